"""chunk_loss: the loss, and the logits that it is of, by chunks of the sequence (`Spec(loss_chunks=)`).

A linear layer from D features to V > D classes, and the loss of its logits, work token by token. The captured graph of
a region has this work forward and backward. Here it is written once for each chunk of tokens, the backward of a chunk
right after its forward, so the logits of one chunk exist at a time. Nothing is computed twice.

    logits = h @ w.T;  total = nll(log_softmax(logits), y);  d = back(...);  dh = d @ w;  dw = d.T @ h
    becomes, for the last chunk c to the first:
    logits = h[c] @ w.T;  totals[c] = nll(log_softmax(logits), y[c]);  d = back(...);  dh[c] = d @ w;  dw += d.T @ h[c]
    total = totals[0] + totals[1] + ...;  dh = cat(dh)

The bits are those of the loop that a user would write, the sum of `loss(h_c, y_c)` over chunks, and of autograd's sums,
which begin with the last chunk. A mean is a sum divided by the count of all tokens, which the targets alone decide.

Sources: Liger-Kernel (arXiv 2410.10989) and ALST (2506.13996), which compute the gradient with the forward. Given up:
losses whose gradient needs a sum over all tokens first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from fzero._torch_compat import graph_module
from fzero.capture.graph import Graph, Region
from fzero.errors import SpecError
from fzero.ir import fx_nodes, segments
from fzero.lowering.batched_heads import batched_heads, unbatched
from fzero.lowering.chunk_body import ChunkBody, features_of, grown, heads
from fzero.lowering.node_writer import NodeWriter
from fzero.lowering.plain_losses import made_plain
from fzero.lowering.token_dims import TokenDim, local_args

aten = torch.ops.aten
MANY = 32  # chunks: a program has the ops of each
HEAD = "head"  # in a node's meta, for as long as heads are written


def chunked(graph: Graph, chunks: int) -> Graph:
    """The graph with the losses of its `value_and_grad`s by chunks of the sequence.

    Raises SpecError if there is none, if a sequence has fewer tokens than chunks, or if logits are needed at once.
    """
    regions = tuple(_region(region, chunks) if region.grad_of else region for region in graph.regions)
    if all(new is old for new, old in zip(regions, graph.regions, strict=True)):
        raise SpecError(
            f"Spec(loss_chunks={chunks}): no loss of a linear layer's logits was found. Needed cross_entropy (or "
            "log_softmax) of h @ weight.T with more classes than features. Leave loss_chunks out"
        )
    return replace(graph, regions=regions)


def chunks_for(graph: Graph) -> tuple[int, int]:
    """(the number of chunks with which logits are as many as the features that they are of, at most `MANY`; the bytes
    of logits without chunks). (1, 0) of a graph without a loss that `chunked` could write."""
    chunks, nbytes = 1, 0
    for region in graph.regions:
        plain = _by_rows(region.gm)
        for head in heads(plain.graph) if region.grad_of else []:
            logits, features = head.meta["val"], features_of(head).meta["val"]
            try:
                gm = graph_module(segments.copied(plain.graph))
                made_plain(gm)
                tokens = min(grown(each).num for each in heads(gm.graph))
            except SpecError:
                return 1, 0
            chunks = max(chunks, min(-(-logits.shape[1] // features.shape[1]), tokens, MANY))
            nbytes += logits.nbytes
    return chunks, nbytes


def _by_rows(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with heads that are one product of all rows; itself where they are."""
    if not batched_heads(gm.graph):
        return gm
    gm = graph_module(segments.copied(gm.graph))
    unbatched(gm.graph)
    return gm


def _region(region: Region, chunks: int) -> Region:
    plain = _by_rows(region.gm)
    if not heads(plain.graph):
        return region
    gm = graph_module(segments.copied(plain.graph))
    made_plain(gm)
    for number, head in enumerate(found := heads(gm.graph)):
        head.meta[HEAD] = number
    for number in range(len(found)):
        head = next(node for node in gm.graph.nodes if node.meta.get(HEAD) == number)
        del head.meta[HEAD]
        body = grown(head)
        if body.num < chunks:
            raise SpecError(
                f"Spec(loss_chunks={chunks}): a sequence has {body.num} tokens. Needed at most loss_chunks={body.num}"
            )
        gm = _ByChunks(body, chunks).written()
    return replace(region, gm=gm, values=tuple(x.meta["val"] for x in fx_nodes.outputs(gm.graph)))


class _ByChunks:
    """Writes a region anew, with a body once for each chunk.

    graph: what is written so far. new: by node of the old graph, its node there. chunk, parts: the chunk that is being
    written, and by node of the body its node in it.
    """

    def __init__(self, body: ChunkBody, chunks: int) -> None:
        self.body, self.old = body, body.head.graph
        size = -(-body.num // chunks)
        self.chunks = [range(i, min(i + size, body.num)) for i in range(0, body.num, size)]
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.chunk, self.parts = self.chunks[-1], dict[fx.Node, fx.Node]()
        self.slices: dict[tuple[fx.Node, TokenDim], fx.Node] = {}

    def written(self) -> fx.GraphModule:
        """The new graph: what comes before the body or is read by it, the body for each chunk, the rest."""
        inside = set(self.body.nodes)
        read = fx_nodes.ancestors(*self.body.nodes) - inside
        order = list(self.old.nodes)
        before = order.index(self.body.head)
        first = [node for i, node in enumerate(order) if (i < before or node in read) and node not in inside]
        for node in first:
            self._copy(node)
        self._body()
        for node in order:
            if node not in self.new and node not in inside and node.op != "output":
                self._copy(node)
        self.graph.output([self.new[x] if isinstance(x, fx.Node) else x for x in fx_nodes.outputs(self.old)])
        return segments.module(self.graph)

    def _copy(self, node: fx.Node) -> None:
        self.new[node] = fx_nodes.copy_node(self.graph, node, self.new.__getitem__)

    def _body(self) -> None:
        body = self.body
        joined: dict[fx.Node, list[fx.Node]] = {x: [] for x in body.joined}
        totals: dict[fx.Node, list[fx.Node]] = {x: [] for x in body.summed if not x.meta.get("phase")}
        sums: dict[fx.Node, fx.Node] = {}
        for chunk in reversed(self.chunks):
            self.chunk, self.parts, self.slices = chunk, {}, {}
            for node in body.nodes:
                self.parts[node] = part = self._part(node)
                part.meta["chunk"] = chunk.start  # `passes.segment` keeps them together
                if node in joined:
                    joined[node].insert(0, part)
                if node in totals:
                    totals[node].insert(0, part)
                elif node in body.summed:  # a gradient: complete for the chunks so far
                    write = NodeWriter(self.graph, node)
                    sums[node] = write(aten.add.Tensor, (sums[node], part)) if node in sums else part
        for node, parts in totals.items():
            total, write = parts[0], NodeWriter(self.graph, node)
            for part in parts[1:]:
                total = write(aten.add.Tensor, (total, part))
            self.new[node] = total
        self.new |= sums | {node: self._whole(node, parts) for node, parts in joined.items()}

    def _part(self, node: fx.Node) -> fx.Node:
        """A node of the body for the chunk."""
        if node not in self.body.ways:  # an item of a tuple
            return NodeWriter(self.graph, node).item(self.parts[fx_nodes.operand(node)], int(str(node.args[1])))
        ways = self.body.ways[node]
        tokens = iter(ways.operands)

        def given(x: fx.Node) -> fx.Node:
            own = next(tokens) if isinstance(x.meta["val"], torch.Tensor) else None
            if x in self.parts:
                return self.parts[x]
            return self.new[x] if own is None else self._slice(x, own)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
        held = zip(_operands(node), ways.operands, strict=True)
        known = self.body.tokens | {x: own for x, own in held if own is not None}
        local = local_args(node, args, ways.results[0], self.chunk, known)
        return NodeWriter(self.graph, node)(node.target, local, kwargs)

    def _slice(self, x: fx.Node, tokens: TokenDim) -> fx.Node:
        """The chunk's tokens of a value that is made before all chunks."""
        if (x, tokens) not in self.slices:
            write, value = NodeWriter(self.graph, x), x.meta["val"]
            shape = tokens.local_shape(value.shape, self.chunk)
            if x.target is aten.full.default:
                made = write(x.target, (shape, x.args[1]), x.kwargs)
            else:
                apart, dim = _apart(value.shape, tokens)
                inner = apart[dim] // tokens.num
                first, last = ((i - tokens.first) * inner for i in tokens.of(self.chunk))
                base = self.new[x] if dim == tokens.dim else write(aten.view.default, (self.new[x], apart))
                made = write(aten.slice.Tensor, (base, dim, first, last))
                made = made if dim == tokens.dim else write(aten.view.default, (made, shape))
            self.slices[x, tokens] = made
        return self.slices[x, tokens]

    def _whole(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """A value of all tokens from those of the chunks."""
        write, tokens, shape = NodeWriter(self.graph, node), self.body.tokens[node], node.meta["val"].shape
        apart = []
        for part in parts:
            sizes, dim = _apart(part.meta["val"].shape, tokens)
            apart.append(part if dim == tokens.dim else write(aten.view.default, (part, sizes)))
        done = write(aten.cat.default, (apart, dim))
        return done if dim == tokens.dim else write(aten.view.default, (done, list(shape)))


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(
        (node.args, node.kwargs), lambda x: found.append(x) if isinstance(x.meta["val"], torch.Tensor) else None
    )
    return found


def _apart(shape: Sequence[int], tokens: TokenDim) -> tuple[list[int], int]:
    """(the shape with the tokens as a dim that has nothing outside of them, that dim)."""
    if tokens.outer == 1:
        return list(shape), tokens.dim
    rest = [tokens.outer, shape[tokens.dim] // tokens.outer]
    return [*shape[: tokens.dim], *rest, *shape[tokens.dim + 1 :]], tokens.dim + 1
