"""storage: a rank's part of a state as plain tensors by buffer name, and the copies from and to logical leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from fzero import backend
from fzero.disk import aligned
from fzero.ir.offset_assignment import ALIGN_BYTES, PAGE_BYTES
from fzero.ir.records import DEVICE, SPACES, Buffer
from fzero.plan.state_plan import Leaf, Plan
from fzero.state.order import Order, cuts

Block = Callable[[int], torch.Tensor]  # makes memory of a number of bytes (uint8, 1-D)


def block_of(device: torch.device | str, *, disk: bool = False) -> Callable[[int], torch.Tensor]:
    """Returns a function from a number of bytes to new memory on a device (uint8, 1-D): zeroed, and on the CPU of pages
    of its own, which the machine provides when they are first written. disk: whether a disk reads and writes it."""
    if not backend.of(device).on_host:
        return partial(torch.zeros, dtype=torch.uint8, device=device)
    return partial(aligned, huge=disk)


@runtime_checkable
class Parts(Protocol):
    """Buffers of which some lie elsewhere (`fzero.state.homes.Homes`)."""

    @property
    def on_disk(self) -> Mapping[str, Buffer]:
        """Those that lie in the rank's file."""

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a buffer, 1-D: a view, or a copy of what lies elsewhere."""


def is_on_disk(memory: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether a buffer lies in the rank's file."""
    return isinstance(memory, Parts) and name in memory.on_disk


def elements(memory: Mapping[str, torch.Tensor], name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a buffer, 1-D: a view, or a copy of what lies on disk."""
    return memory.part(name, start, stop) if isinstance(memory, Parts) else memory[name].view(-1)[start:stop]


def allocate(
    plan: Plan,
    block: Block,
    rank: int,
    blocks: Mapping[str, Block] | None = None,
    only: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """A rank's state buffers, one after the other in one block of zeros for each space: the caller fills the leaves.

    block: makes the device's memory. blocks: by space, what makes the memory of others; a buffer of a space without one
    is left out. None: all lie on the device. only: the buffers that are made; None: all.
    """
    held = {name: b for name, b in plan.held_by(rank).items() if only is None or name in only}
    memory: dict[str, torch.Tensor] = {}
    for space in SPACES:
        own = [b for b in held.values() if b.space == space]
        makes = block if blocks is None or space == DEVICE else blocks.get(space)
        if own and makes is not None:
            memory.update(_in_a_block(own, makes))
    return {name: memory[name] for name in held if name in memory}


def _in_a_block(buffers: Sequence[Buffer], block: Block) -> dict[str, torch.Tensor]:
    """New memory for buffers, in one block."""
    places, total = [], 0
    for b in buffers:
        align = ALIGN_BYTES if b.space == DEVICE else PAGE_BYTES
        places.append(total)
        total += -(-b.nbytes // align) * align
    all_bytes = block(total)
    rooms = [all_bytes[place : place + b.nbytes] for b, place in zip(buffers, places, strict=True)]
    return {b.name: room.view(b.dtype).view(b.shape) for b, room in zip(buffers, rooms, strict=True)}


def piece(plan: Plan, leaf: Leaf, rank: int) -> tuple[slice, slice]:
    """(slice of the rank's flat buffer, slice of the flat leaf): the rank's part of a flat leaf, in both.

    Of a leaf that is cut by its dims the leaf is this rank's part of it (`Layout.own_part`).
    """
    buffer = plan.buffers[leaf.buffer]
    bucket = plan.buckets[buffer.bucket or ""]
    first, last, _ = bucket.place(leaf.slot or 0, buffer.per)
    low, high = 0, bucket.length
    if buffer.sharded:
        size = bucket.length // plan.mesh.size(buffer.sharded)
        place = plan.mesh.coordinate(rank, buffer.sharded)
        low, high = place * size, (place + 1) * size
    start, stop = max(first, low), min(last, high)
    stop = max(start, stop)
    if start >= high or stop <= low:
        return slice(0, 0), slice(0, 0)
    elements_per_entry = buffer.per
    return slice((start - low) // elements_per_entry, (stop - low) // elements_per_entry), slice(
        (start - first) // elements_per_entry, (stop - first) // elements_per_entry
    )


def order(plan: Plan, leaf: Leaf) -> Order:
    """The order in which a leaf's elements are counted: what a rank holds of it is one range.

    Of a per-rank leaf the elements of all ranks are counted.
    """
    shape = (plan.data_ranks, *leaf.shape) if leaf.per_rank else leaf.shape
    return Order.of(shape, cuts(leaf.layout))


def first(plan: Plan, leaf: Leaf, rank: int) -> int:
    """The element of a leaf, in its `order`, at which a rank's part by dims begins."""
    place = leaf.layout.place(plan.mesh, rank)
    return place * order(plan, leaf).part if place else 0


def holders(plan: Plan, leaf: Leaf) -> list[int]:
    """The ranks that together hold a leaf once, in the order of its elements; of equal ranks the first."""
    owners = plan.owners(plan.buffers[leaf.buffer])
    if not leaf.layout:
        return owners
    peers = (plan.mesh.peers(rank, leaf.layout.axes) for rank in owners)
    return [rank for column in zip(*peers, strict=True) for rank in column]


def placement(plan: Plan, leaf: Leaf) -> str:
    """How a leaf lies, in words: `replicate`, `flat(bucket, offset)`, `per_rank`, `S0 over tp`, or `S0 over tp,
    flat(bucket, offset)`."""
    if leaf.per_rank:
        return "per_rank"
    buffer = plan.buffers[leaf.buffer]
    words = [str(leaf.layout)] if leaf.layout else []
    if buffer.sharded and leaf.slot is not None:
        words.append(f"flat({buffer.bucket}, {plan.buckets[buffer.bucket or ''].slots[leaf.slot].start})")
    return ", ".join(words) or "replicate"


def span(plan: Plan, leaf: Leaf, rank: int) -> tuple[int, int]:
    """The elements [start, stop) of a leaf that a rank of its role holds, in the leaf's `order`."""
    if leaf.slot is None:
        numel = torch.Size(leaf.shape).numel()
        start = plan.column(plan.buffers[leaf.buffer]).place(plan.mesh, rank) * numel
        return start, start + numel
    there, before = piece(plan, leaf, rank)[1], first(plan, leaf, rank)
    return before + there.start, before + there.stop


def flat(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> tuple[torch.Tensor, int]:
    """(a rank's part of a leaf as a 1-D view, the element at which it begins, in the leaf's `order`). The part is empty
    where another role keeps the leaf."""
    if leaf.buffer not in memory:
        return next(iter(memory.values()), torch.empty(0)).new_empty(0, dtype=leaf.dtype), 0
    if leaf.slot is None:
        part = memory[leaf.buffer].view(-1)
    else:
        here = piece(plan, leaf, rank)[0]
        part = elements(memory, leaf.buffer, here.start, here.stop)
    return part, span(plan, leaf, rank)[0]


def store(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, value: torch.Tensor, rank: int) -> None:
    """Copies the rank's part of a whole leaf into its new buffer (`allocate`); nothing where another role keeps it.

    Zeros are there. So the moments of a first state take no memory of the machine until a step writes them, beside the
    user's parameters.
    """
    put(plan, memory, leaf, value, rank, unless=_is_zero)


def put(
    plan: Plan,
    memory: Mapping[str, torch.Tensor],
    leaf: Leaf,
    value: torch.Tensor,
    rank: int,
    unless: Callable[[torch.Tensor], bool] = lambda _: False,
) -> None:
    """Copies the rank's part of a whole leaf into its buffer; nothing where another role keeps it. unless: of a part,
    whether it is there already."""
    if leaf.buffer not in memory:
        return
    assert not is_on_disk(memory, leaf.buffer), "a buffer on disk is filled in a round of `Homes.rounds`"
    target, part = memory[leaf.buffer], value
    if leaf.slot is not None:
        here, there = piece(plan, leaf, rank)
        target, part = target[here], leaf.layout.own_part(value, plan.mesh, rank).reshape(-1)[there]
    if not unless(part):
        target.copy_(part)


def _is_zero(value: torch.Tensor) -> bool:
    """Whether a tensor on the CPU has no bit set; False on another device, which is not asked."""
    if not backend.of(value.device).on_host:
        return False
    flat = value.reshape(-1).contiguous()
    return not flat.as_strided(flat.shape, (1,)).view(torch.uint8).any()  # one element may have any stride


def local(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> torch.Tensor:
    """The rank's part of a leaf, a view, or a copy of what lies on disk: 1-D if ZeRO slices it, else in the shape of
    the leaf or of its part by dims. Where another role keeps the leaf it is 1-D and empty."""
    if leaf.buffer not in memory:
        return flat(plan, memory, leaf, rank)[0]
    if leaf.slot is None:
        return memory[leaf.buffer]
    here, _ = piece(plan, leaf, rank)
    part = elements(memory, leaf.buffer, here.start, here.stop)
    return part if plan.buffers[leaf.buffer].sharded else part.view(leaf.local_shape)


def join(plan: Plan, leaf: Leaf, parts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """A logical leaf, put together from every rank's buffers. Per-rank leaves are stacked."""
    ranks = holders(plan, leaf)
    if leaf.per_rank:
        return torch.stack([local(plan, parts[rank], leaf, rank) for rank in ranks])
    flattened = torch.cat([local(plan, parts[rank], leaf, rank).reshape(-1) for rank in ranks])
    return leaf.layout.join(list(flattened.view(leaf.layout.parts, *leaf.local_shape)))


def shards(plan: Plan, leaves: Iterable[torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's buffers, made from whole leaves."""
    leaves = list(leaves)
    device = leaves[0].device if leaves else torch.device("cpu")
    memory = allocate(plan, block_of(device), rank)
    for leaf, value in zip(plan.leaves, leaves, strict=True):
        store(plan, memory, leaf, value, rank)
    return memory
