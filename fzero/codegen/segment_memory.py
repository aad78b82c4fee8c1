"""segment_memory: where each value of a segment lies in its workspace, and how many bytes that takes.

Shapes are static, so memory can be: every value has an offset in one block, the workspace. Values whose lives do not
meet share their bytes. The outputs lie in the program's buffers, and values that `inplace` puts into another's memory
take none of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fzero.codegen import embedding_rows, inplace, out_forms, tiling
from fzero.codegen.fusion import Fused
from fzero.codegen.handed import handed
from fzero.codegen.widened import is_widened
from fzero.codegen.workspace import workspace_bytes
from fzero.errors import VerifyError
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.offset_assignment import pack
from fzero.ir.scan_op import SCAN, body_of

Lives = dict[fx_values.Value, tuple[int, int, int]]  # (first node, last node, bytes), nodes by position


@dataclass(frozen=True)
class SegmentMemory:
    """The memory of a segment's values.

    outputs: the values that are returned; they lie in the program's buffers.
    homes: values that lie in another value's memory, or in a destination's.
    offsets: where every other value begins in the workspace, in bytes.
    nbytes: of the workspace.
    heap: the most bytes that kernels ask the allocator for at one node.
    chains: those that run tile by tile, by their last node.
    tiled: the nodes of chains before the last. Their values are never whole.
    handed: the results that their one reader takes where the op left them (`fzero.codegen.handed`).
    """

    outputs: tuple[fx_values.Value, ...]
    homes: Mapping[fx_values.Value, inplace.Home]
    offsets: Mapping[fx_values.Value, int]
    nbytes: int
    heap: int
    chains: Mapping[fx.Node, tiling.Chain]
    tiled: Collection[fx.Node]
    handed: frozenset[fx_values.Value]


def layout(gm: fx.GraphModule, apart: frozenset[int] = frozenset()) -> SegmentMemory:
    """The layout of a segment. `apart`: its destinations that share no memory with others (`inplace.apart`).

    It is computed once for each `apart`, and is a note of the segment (`segments.notes`), which must not change.
    """
    layouts: dict[frozenset[int], SegmentMemory] = segments.notes(gm).setdefault("segment_memory", {})
    if apart not in layouts:
        layouts[apart] = _layout(gm, apart)
    return layouts[apart]


def _layout(gm: fx.GraphModule, apart: frozenset[int]) -> SegmentMemory:
    chains = tiling.chains(gm, apart)
    tiled = _tiled(gm, apart, chains)
    others = [chain for chain in chains if not chain.saves_memory_alone]
    if len(others) == len(chains):
        return tiled
    plain = _tiled(gm, apart, others)
    return plain if plain.nbytes + plain.heap <= tiled.nbytes + tiled.heap else tiled


def _tiled(gm: fx.GraphModule, apart: frozenset[int], chains: Sequence[tiling.Chain]) -> SegmentMemory:
    """The layout with these chains."""
    values = fx_values.values(gm)
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    lives = values.lives
    for chain in chains:
        lives = _at_the_last(chain, lives, position)
    taken = handed(gm)
    lives = {key: life for key, life in lives.items() if not is_widened(key[0]) and key not in taken}
    values = fx_values.Values(lives, values.outputs)
    tiled = {node for chain in chains for node in chain.nodes[:-1]}
    stretches = {node: node.target for node in gm.graph.nodes if isinstance(node.target, Fused)}
    over = {node: fused.over for node, fused in stretches.items() if fused.over is not None}
    homes = inplace.homes(gm, values, apart, tiled, over)
    for chain in chains:
        homes |= {(node, 0): (room, 0) for node, room in chain.rooms.items()}
        homes |= {(node, 0): into for node, into in chain.placed.items()}
    held: Lives = {}  # of the values that have memory in the workspace, with those that lie in it
    for key, (first, last, nbytes) in lives.items():
        home = homes.get(key, key)
        if not isinstance(home, fx.Node) and home not in values.outputs:
            before = held.get(home, (first, last, nbytes))
            held[home] = (min(first, before[0]), max(last, before[1]), nbytes)
    offsets, nbytes = pack(list(held.values()))
    heap = max((heap_bytes(node) for node in gm.graph.nodes if fx_nodes.is_compute(node)), default=0)
    heap = max(heap, *(chain.heap for chain in chains), 0)
    by_last = {chain.last: chain for chain in chains}
    places = dict(zip(held, offsets, strict=True))
    return SegmentMemory(values.outputs, homes, places, nbytes, heap, by_last, tiled, taken)


def _at_the_last(chain: tiling.Chain, lives: Lives, position: Mapping[fx.Node, int]) -> Lives:
    """The lives with those that a chain changes.

    A chain executes at its last op: its inputs stay live until then. An input that is not read tile by tile also stays
    live through the last write, so the write cannot overwrite it. Of the values between its ops there is one tile.
    """
    lives, end = dict(lives), position[chain.last]
    for node in chain.nodes:
        for operand in node.all_input_nodes:
            for key in fx_values.memory(operand):
                first, last, nbytes = lives[key]
                whole = chain.is_tiled(operand) and fx_values.extent_bytes(operand.meta["val"]) == nbytes
                lives[key] = (first, max(last, end + (node is not chain.last and not whole)), nbytes)
    for node, tile in chain.between:
        lives[node, 0] = (end, end, tile.numel() * tile.element_size())
    return lives


def heap_bytes(node: fx.Node) -> int:
    """The most bytes that a node's call asks the allocator for: a kernel's own memory, and results to be copied."""
    if node.target is SCAN:
        return sum(value.nbytes for _, value in fx_values.results(node)) + _step_bytes(node)
    if isinstance(node.target, Fused):
        return node.target.own.heap if node.target.own is not None else 0
    if out_forms.is_by_rows(node):
        return workspace_bytes(node) + embedding_rows.heap_bytes(node)
    direct = out_forms.special_form(node) or out_forms.form_of(node)
    own = 0 if direct else sum(value.untyped_storage().nbytes() for _, value in fx_values.results(node))
    return workspace_bytes(node) + own


def _step_bytes(node: fx.Node) -> int:
    """The most bytes that a step of a scan allocates: values that live at once, what a kernel takes, and the carry of
    the step before."""
    carry, body = node.args[0], body_of(str(node.args[3]))
    values = fx_values.values(body)
    held = [0] * len(body.graph.nodes)
    for first, last, nbytes in values.lives.values():
        for at in range(first, last + 1):
            held[at] += nbytes
    before = sum(x.meta["val"].nbytes for x in carry)  # type: ignore[union-attr]
    return max(held) + before + max(workspace_bytes(n) for n in body.graph.nodes)


def tensor_at(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor at a byte offset of `block` (1-D uint8), with the shape, strides and dtype of the fake tensor `like`.

    Raises VerifyError where it does not fit.
    """
    nbytes = fx_values.extent_bytes(like)
    if offset + nbytes > block.numel():
        raise VerifyError(f"a value of {nbytes} bytes at byte {offset} does not fit into {block.numel()}")
    return block[offset : offset + nbytes].view(like.dtype).as_strided(like.shape, like.stride())
