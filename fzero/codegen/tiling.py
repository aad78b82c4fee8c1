"""tiling: chains of ops that run one tile at a time, so that a value between them is never whole.

The gradient of a cross entropy is a matrix as large as the logits, nearly all zeros, that the next op reads once. So is
that of an embedding, to which the gradient of an output head is added where the two are one. A chain cuts such a value
into tiles of rows, which do not meet in any op of the chain. The value then needs the memory of one tile, which stays
in the cache. The same kernels run on the tiles, so the bits are the same.

That holds for ops that round once, or not at all. Of others (a sigmoid, a gelu, a power) torch has a vector form, and a
scalar form for the last few elements of its operand. The two round differently, and a tile ends elsewhere than the
whole.

    a = nll_loss_backward(g, x, y)        for rows of x: a = nll_loss_backward(g, x[rows], y[rows])
    b = _log_softmax_backward(a, x)                      b[rows] = _log_softmax_backward(a, x[rows])

Pointwise work on flat slices, as an update's, needs no chain: all of it runs tile by tile, each op in its turn. A tile
begins at a multiple of 64 elements, where the bits are those of the whole (`fzero.optim._ops`):

    c = f32(g); adamw_(p, c, m, v)        for each tile: c = f32(g[tile]); adamw_(p[tile], c, m[tile], v[tile])
    d = m * lr; q = p + d; copy_(p, q)                   d = m[tile] * lr; q = p[tile] + d; copy_(p[tile], q)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero.codegen import embedding_rows
from fzero.codegen.inplace import by_rows
from fzero.codegen.workspace import workspace_bytes
from fzero.ir import fx_nodes, fx_values, op_info
from fzero.ir.op_info import of

aten = torch.ops.aten
BYTES = 1 << 20  # of a tile


@dataclass(frozen=True)
class Head:
    """How tiles of the first op of a chain are made.

    cut: the operands that are cut with the result, by place. rows: gives the calls that make some rows, from their
    memory, the op's arguments and `first=`, the number of the first row; None for the op itself, on its cut operands.
    heap: the most bytes that these calls ask the allocator for.
    """

    cut: Collection[int] = ()
    rows: Callable[..., Iterator[Callable[[], Any]]] | None = None
    heap: int = 0


@dataclass(frozen=True)
class Chain:
    """Ops that run tile by tile.

    nodes: the head, then each the only user of the one before; or flat work in its order.
    step: the rows of a tile; the last may have fewer.
    head: None for flat work, all operands of which are cut.
    """

    nodes: tuple[fx.Node, ...]
    step: int
    head: Head | None = None

    @property
    def flat(self) -> bool:
        """Whether it is flat work."""
        return self.head is None

    @property
    def heap(self) -> int:
        """The most bytes that its head asks the allocator for, in a way of its own."""
        return 0 if self.head is None else self.head.heap

    @property
    def saves_memory_alone(self) -> bool:
        """Whether its ops take no more time one after the other: so do those whose head is made by rows anyway."""
        return self.head is not None and self.head.rows is not None

    @property
    def last(self) -> fx.Node:
        """The last op, at whose place the chain executes."""
        return self.nodes[-1]

    @cached_property
    def whole(self) -> frozenset[fx.Node]:
        """The operands of which each tile of its head needs all."""
        return frozenset() if self.head is None else _read_whole(self.nodes[0], self.head.cut)

    @cached_property
    def inner(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are never whole."""
        return tuple(node for node in self.nodes[:-1] if not fx_nodes.mutated(node) and node not in self.placed)

    @cached_property
    def placed(self) -> dict[fx.Node, fx.Node]:
        """{node of flat work: the destination that it is written to at once, and that the next op would copy it to}."""
        pairs = zip(self.nodes, self.nodes[1:], strict=False) if self.flat else ()
        return {node: fx_nodes.operand(copy) for node, copy in pairs if _may_be_placed(node, copy)}

    @cached_property
    def rooms(self) -> dict[fx.Node, fx.Node]:
        """{inner node: the earlier one in whose memory its tile lies, which no later op of the tile reads}."""
        last_use = {n: i for i, node in enumerate(self.nodes) for n in node.all_input_nodes}
        rooms: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.nodes):
            if self.flat and node in self.inner:
                over = of(node.target).overwrites == "elements"
                held = {rooms[n] for n in rooms if last_use[n] > i or (last_use[n] == i and not over)}
                dtype = node.meta["val"].dtype
                free = [r for r in rooms.values() if r not in held and r.meta["val"].dtype is dtype]
                rooms[node] = free[0] if free else node
        return {node: room for node, room in rooms.items() if node is not room}

    @cached_property
    def between(self) -> list[tuple[fx.Node, torch.Tensor]]:
        """(node, one tile of its value on the meta device) of each value that lies between the ops."""
        tiles = []
        for node in self.inner:
            value = node.meta["val"]
            tiles.append((node, torch.empty((self.step, *value.shape[1:]), dtype=value.dtype, device="meta")))
        return tiles

    def is_tiled(self, operand: fx.Node) -> bool:
        """Whether a tile of the results needs the same tile of an operand alone."""
        value, first = operand.meta["val"], self.nodes[0]
        result = fx_nodes.mutated(first)[0] if fx_nodes.mutated(first) else first
        alike = value.shape == result.meta["val"].shape and bool(value.is_contiguous())
        return alike and operand not in self.whole

    def tiles(self, env: Mapping[fx.Node, Any], blocks: Mapping[fx.Node, torch.Tensor]) -> Iterator[dict[fx.Node, Any]]:
        """For each tile, the tensor of every operand of the chain.

        `env` holds the operands' whole tensors, `blocks` 1-D memory for a tile of each value between the ops.
        """
        cut_alike = self.nodes if self.head is None else self.nodes[1:]
        cut = {n for node in cut_alike for n in node.all_input_nodes if _is_cut(n)}
        cut |= {fx_nodes.operand(self.nodes[0], i) for i in (() if self.head is None else self.head.cut)}
        outer = {n: env[n] for node in self.nodes for n in node.all_input_nodes if n not in self.nodes}
        sizes = [x.shape[0] for n, x in outer.items() if n in cut]
        (size, *_) = sizes or self.nodes[0].meta["val"].shape
        for start in range(0, size, self.step):
            num = min(self.step, size - start)
            operands = {n: x[start : start + num] if n in cut else x for n, x in outer.items()}
            for node, tile in self.between:
                operands[node] = blocks[node][: tile[:num].numel()].view(num, *tile.shape[1:])
            for node in self.nodes:
                if written := [self.placed[node]] if node in self.placed else fx_nodes.mutated(node):
                    operands[node] = operands[written[0]]
            yield operands


def chains(gm: fx.GraphModule, apart: frozenset[int]) -> list[Chain]:
    """The chains of a segment whose values are larger than a tile. `apart` as in `fzero.codegen.inplace`."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    holders = fx_nodes.placeholders(gm.graph)
    free = {holders[i] for i in apart}
    flat = _flat_work(gm)
    if flat is not None:
        return [flat]
    chosen: list[Chain] = []
    for node in gm.graph.nodes:
        taken = {n for chain in chosen for n in chain.nodes}  # two chains may meet: the second ends before
        head = _head(node)
        chain = _chain(node, head, taken) if head is not None else None
        if chain is not None and _undisturbed(chain, list(gm.graph.nodes), position, free):
            chosen.append(chain)
    return chosen


def _head(node: fx.Node) -> Head | None:
    """How tiles of the head of a chain are made; None for a node that is no head."""
    head = of(node.target).tile_head
    if head is None:
        return None
    value = node.meta["val"]
    here = backend.of(value.device).on_host
    return head(node) if here and value.is_contiguous() else None


def _chain(first: fx.Node, head: Head, taken: Collection[fx.Node]) -> Chain | None:
    value = first.meta["val"]
    step = max(1, BYTES * value.shape[0] // max(value.numel() * value.element_size(), 1))
    nodes, whole = [first], _read_whole(first, head.cut)
    while not fx_nodes.mutated(nodes[-1]) and len(nodes[-1].users) == 1:
        user = next(iter(nodes[-1].users))
        if user in taken or whole & set(user.all_input_nodes) or not _follows(user, nodes[-1]):
            break
        nodes.append(user)
    return Chain(tuple(nodes), step, head) if len(nodes) > 1 and step < value.shape[0] else None


def _read_whole(head: fx.Node, cut: Collection[int]) -> frozenset[fx.Node]:
    """The operands of a head that are not cut with its result."""
    return frozenset(head.all_input_nodes) - {fx_nodes.operand(head, i) for i in cut}


def _flat_work(gm: fx.GraphModule) -> Chain | None:
    """All pointwise work on flat slices of one length that a segment writes, if there is more than a tile of it."""
    compute = [node for node in gm.graph.nodes if fx_nodes.is_compute(node)]
    written = [n.meta["val"] for node in compute for n in fx_nodes.mutated(node)]
    shape = max((x.shape for x in written if x.ndim == 1), default=torch.Size([0]))
    nodes = {node for node in compute if _is_flat(node, shape)}
    while outer := {n for n in nodes if not fx_nodes.mutated(n) and not nodes.issuperset(n.users)}:
        nodes -= outer
    ordered = [node for node in compute if node in nodes]
    step = BYTES // max((x.dtype.itemsize for n in ordered for x in _values(n) if x.ndim), default=1)
    if len(ordered) < 2 or all(map(fx_nodes.mutated, ordered)) or step >= shape[0]:
        return None
    between = compute[compute.index(ordered[0]) : compute.index(ordered[-1])]
    touched = nodes | {fx_nodes.base(n) for node in nodes for n in fx_nodes.mutated(node)}
    for node in between:  # the work runs where its last op stands
        if node not in nodes and (fx_nodes.mutated(node) or touched & {*map(fx_nodes.base, node.all_input_nodes)}):
            return None
    return Chain(tuple(ordered), step)


def _is_flat(node: fx.Node, shape: torch.Size) -> bool:
    """Whether a call on the host is pointwise over flat values of this shape, and numbers apart from them."""
    if fx_nodes.is_view(node) or not (node.target is aten.copy_.default or of(node.target).pointwise):
        return False
    single = isinstance(node.meta.get("val"), torch.Tensor) or bool(fx_nodes.mutated(node))
    cut = [x for x in _values(node) if x.ndim]
    parts = [n for n in node.all_input_nodes if not _is_cut(n) and _is_cut(fx_nodes.base(n))]
    return (
        single and not parts and bool(cut) and all(x.shape == shape and x.is_contiguous() and _on_host(x) for x in cut)
    )


def _may_be_placed(node: fx.Node, copy: fx.Node) -> bool:
    """Whether a value that is only copied may be made where it will lie, which may be where an operand lies."""
    if copy.target is not aten.copy_.default or copy.args[1] is not node or set(node.users) != {copy}:
        return False
    into = fx_nodes.operand(copy)
    given = into.op == "placeholder" and into.meta["val"].dtype == node.meta["val"].dtype
    return given and of(node.target).overwrites == "elements"


def _values(node: fx.Node) -> list[torch.Tensor]:
    """A call's operands and results."""
    return [x for n in (node, *node.all_input_nodes) for x in fx_values.tensors(n.meta.get("val"))]


def _on_host(value: torch.Tensor) -> bool:
    return bool(backend.of(value.device).on_host)


def _is_cut(node: fx.Node) -> bool:
    return all(x.ndim > 0 for x in fx_values.tensors(node.meta.get("val")))


def _follows(node: fx.Node, before: fx.Node) -> bool:
    """Whether an op's tiles depend on the same tiles of its operands alone."""
    shape = before.meta["val"].shape
    cast = node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}
    copied = node.target is aten.copy_.default and node.args[1] is before
    fits = cast or copied or _exact(node) or by_rows(node)
    values = [n.meta["val"] for n in node.all_input_nodes]
    alike = all(isinstance(x, torch.Tensor) and x.shape == shape for x in values)
    return fits and alike and all(n.meta["val"].is_contiguous() for n in node.all_input_nodes)


def _exact(node: fx.Node) -> bool:
    """Whether an op rounds once or not at all: with a factor (`alpha`) of the second operand it rounds twice."""
    name, factor = fx_nodes.op_name(node), {"alpha", "rounding_mode"} & set(node.kwargs)
    return of(node.target).exact and not factor and not (name in ("add", "sub") and len(node.args) > 2)


def _undisturbed(chain: Chain, nodes: list[fx.Node], position: dict[fx.Node, int], free: set[fx.Node]) -> bool:
    """Whether nothing writes to data that the chain still reads.

    No op between the head and the last op may, for the whole chain runs at the last. And no tile's write touches data
    that a later tile still reads: a destination outside `free` may share memory with operands.
    """
    operands = [n for node in chain.nodes for n in node.all_input_nodes if n not in chain.nodes]
    reads = {fx_nodes.base(n) for n in operands}
    between = nodes[position[chain.nodes[0]] : position[chain.last]]
    written = [fx_nodes.base(w) for node in between if node not in chain.nodes for w in fx_nodes.mutated(node)]
    into = {fx_nodes.base(w).meta["val"].dtype for w in fx_nodes.mutated(chain.last) if fx_nodes.base(w) not in free}
    whole = {
        b.meta["val"].dtype for n in operands if (b := fx_nodes.base(n)).op == "placeholder" and not chain.is_tiled(n)
    }
    return all(w in free and w not in reads for w in written) and not into & whole


CallsOf = Callable[[fx.Node, Any, Any, dict[int, torch.Tensor]], Iterator[Callable[[], Any]]]


def calls(
    chain: Chain, env: Mapping[fx.Node, Any], blocks: Mapping[fx.Node, torch.Tensor], into: torch.Tensor | None,
    calls_of: CallsOf,
) -> Iterator[Callable[[], Any]]:  # fmt: skip
    """The calls of a chain, tile by tile.

    env: the operands' tensors. blocks: 1-D memory for a tile of each value between the ops.
    into: the last op's result; None where the op writes to one of its operands.
    calls_of: gives the calls of one node.
    """
    start = 0
    for operands in chain.tiles(env, blocks):
        for node in chain.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
            if len(args) > 1 and node.args[1] in chain.placed and node.target is aten.copy_.default:
                continue  # it is there
            if chain.head is not None and chain.head.rows is not None and node is chain.nodes[0]:
                yield from chain.head.rows(operands[node], *args, first=start)
            elif node is not chain.last:
                yield from calls_of(node, args, kwargs, {} if fx_nodes.mutated(node) else {0: operands[node]})
            elif into is None:
                yield from calls_of(node, args, kwargs, {})
            else:
                num = len(operands[chain.nodes[0]])
                yield from calls_of(node, args, kwargs, {0: into[start : start + num]})
        start += chain.step


# --- heads ------------------------------------------------------------------------------------------------------------


def _of_a_loss(node: fx.Node) -> Head | None:
    """Of a mean or a sum: then the gradient of the loss is one number."""
    return Head(cut=(1, 2)) if node.args[4] in (1, 2) and node.meta["val"].ndim == 2 else None


def _of_an_embedding(node: fx.Node) -> Head | None:
    """Where rows are not scaled by how often they come."""
    contiguous = fx_nodes.operand(node).meta["val"].is_contiguous()  # else each tile would copy it
    if node.meta["val"].ndim != 2 or not contiguous or node.args[4]:
        return None
    return Head(rows=embedding_rows.rows, heap=workspace_bytes(node) + embedding_rows.heap_bytes(node))


op_info.fill(
    "tile_head",
    {
        aten.nll_loss_backward.default: _of_a_loss,
        aten.embedding_dense_backward.default: _of_an_embedding,
    },
)
