"""storage: a rank's part of a state as plain tensors by buffer name, and the copies from and to logical leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fzero.ir.offset_assignment import ALIGN_BYTES
from fzero.plan.layout import Leaf, Plan


def block_of(device: torch.device | str) -> Callable[[int], torch.Tensor]:
    """Returns a function from a number of bytes to new memory on a device (uint8, 1-D)."""
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)


def allocate(plan: Plan, block: Callable[[int], torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's state buffers, one after the other in one block. Padding is zero: the caller fills the leaves. (The
    first touch of memory costs more than a copy.)"""
    held = plan.held_by(rank)
    places, total = [], 0
    for b in held.values():
        places.append(total)
        total += -(-b.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    all_bytes = block(total)
    memory = {
        b.name: all_bytes[place : place + b.nbytes].view(b.dtype).view(b.shape)
        for b, place in zip(held.values(), places, strict=True)
    }
    used: dict[str, list[slice]] = {b.name: [] for b in held.values() if b.bucket}
    for leaf in plan.leaves:
        if leaf.slot is not None and leaf.buffer in held:
            used[leaf.buffer].append(piece(plan, leaf, rank)[0])
    for name, places_used in used.items():
        end = 0
        for here in sorted((s for s in places_used if s.start < s.stop), key=lambda s: s.start):
            memory[name][end : here.start].zero_()
            end = here.stop
        memory[name][end:].zero_()
    return memory


def piece(plan: Plan, leaf: Leaf, rank: int) -> tuple[slice, slice]:
    """(slice of the rank's flat buffer, slice of the flat leaf): the rank's part of a flat leaf, in both."""
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


def flat(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> tuple[torch.Tensor, int]:
    """(a rank's part of a leaf as a 1-D view, the element of the flattened logical leaf at which it begins). The part
    is empty where another role keeps the leaf."""
    if leaf.buffer not in memory:
        return next(iter(memory.values()), torch.empty(0)).new_empty(0, dtype=leaf.dtype), 0
    held = memory[leaf.buffer]
    if leaf.slot is None:
        return held.view(-1), plan.mesh.coordinate(rank, plan.axis) * held.numel() if leaf.per_rank else 0
    here, there = piece(plan, leaf, rank)
    return held[here], there.start


def store(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, value: torch.Tensor, rank: int) -> None:
    """Copies the rank's part of a whole leaf into its buffer; nothing where another role keeps it.

    Zeros are not written over zeros. So the moments of a first state take no memory of the machine until a step writes
    them, beside the user's parameters.
    """
    if leaf.buffer not in memory:
        return
    target, part = memory[leaf.buffer], value
    if leaf.slot is not None:
        here, there = piece(plan, leaf, rank)
        target, part = target[here], value.reshape(-1)[there]
    if not (_is_zero(part) and _is_zero(target)):
        target.copy_(part)


def _is_zero(value: torch.Tensor) -> bool:
    """Whether a tensor on the CPU has no bit set; False on another device, which is not asked."""
    return value.device.type == "cpu" and not value.reshape(-1).view(torch.uint8).any()


def local(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> torch.Tensor:
    """The rank's part of a leaf, a view: 1-D if the leaf is sharded, in its own shape if it is whole. Where another
    role keeps the leaf it is 1-D and empty."""
    if leaf.buffer not in memory:
        return flat(plan, memory, leaf, rank)[0]
    held = memory[leaf.buffer]
    if leaf.slot is None:
        return held
    here, _ = piece(plan, leaf, rank)
    part = held[here]
    return part if plan.buffers[leaf.buffer].sharded else part.view(leaf.shape)


def join(plan: Plan, leaf: Leaf, parts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """A logical leaf, put together from every rank's buffers. Per-rank leaves are stacked."""
    owners = plan.owners(plan.buffers[leaf.buffer])
    slices = [local(plan, parts[rank], leaf, rank) for rank in owners]
    if leaf.per_rank:
        return torch.stack(slices)
    if leaf.slot is None or not plan.buffers[leaf.buffer].sharded:
        return slices[0].clone()
    return torch.cat(slices).view(leaf.shape)


def shards(plan: Plan, leaves: Iterable[torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's buffers, made from whole leaves."""
    leaves = list(leaves)
    device = leaves[0].device if leaves else torch.device("cpu")
    memory = allocate(plan, block_of(device), rank)
    for leaf, value in zip(plan.leaves, leaves, strict=True):
        store(plan, memory, leaf, value, rank)
    return memory
