"""chunks: which chunk of the model each node of a region belongs to, and each op.

Forward work belongs to the chunk of the numbered layer whose leaves it uses, or to a later one that made its latest
input: a penalty on weights in the loss is lent them. So an embedding runs on the first chunk and a head on the last,
whoever keeps the leaves.

The forward says at which chunks a leaf or a value is *at hand*: those that make, keep or read it. A node of the
backward belongs to a chunk at which all are at hand that it reads or whose gradient it writes. That may leave a choice,
as for a gradient's sum or the values next to a border. There it is cut where the fewest bytes cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import Program
from fzero.passes.rematerialise_views import MadeAnew

COPY = torch.ops.aten.copy_.default


def node_chunks(
    groups: Sequence[Sequence[fx.Node]],
    bucket_of: Mapping[fx.Node, str],
    chunk_of: Mapping[str, int],
    made_anew: MadeAnew,
) -> dict[fx.Node, int]:
    """The chunk of every node of a region but of those that are made anew.

    groups: the nodes, in order; the forward nodes of one group stay together. bucket_of: of each placeholder in one.
    chunk_of: of each bucket of a numbered layer, its chunk.
    """
    nodes = [n for group in groups for n in group if not made_anew(n)]
    reads = {n: [root(a, made_anew) for a in n.all_input_nodes] for n in nodes}
    found: dict[fx.Node, int] = {}
    at_hand: dict[fx.Node | str, set[int]] = {bucket: {chunk} for bucket, chunk in chunk_of.items()}
    for group in groups:
        work = [n for n in group if n in reads and not n.meta.get("phase")]
        needs = [a for n in work for a in reads[n]]
        homes = [chunk_of[bucket_of[a]] for a in needs if bucket_of.get(a) in chunk_of]
        chunk = max([*homes, *(found[a] for a in needs if a in found)], default=0)
        found.update(dict.fromkeys(work, chunk))
        for value in (*needs, *work):
            if value in found or value in bucket_of:
                at_hand.setdefault(bucket_of.get(value, value), set()).add(chunk)
    uses: dict[fx.Node, list[fx.Node | str]] = {n: [bucket_of.get(a, a) for a in reads[n]] for n in nodes}
    for copy in nodes[0].graph.nodes if nodes else ():
        if copy.target is COPY and copy.args[0] in bucket_of:
            uses.setdefault(root(copy.args[1], made_anew), []).append(bucket_of[copy.args[0]])
    backward = _Backward([n for n in nodes if n not in found], reads, uses, at_hand)
    return found | backward.chunks()


def root(node: fx.Node, made_anew: MadeAnew) -> fx.Node:
    """What a node that is made anew is made of; another node itself."""
    while made_anew(node):
        node = fx_nodes.operand(node)
    return node


class _Backward:
    """The backward nodes of a region, in order. low, high: the first and the last chunk that each may belong to.

    readers: of each node, those that read it. A gradient goes down the chunks: no node is above one that it reads.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        reads: Mapping[fx.Node, Sequence[fx.Node]],
        uses: Mapping[fx.Node, Sequence[fx.Node | str]],
        at_hand: Mapping[fx.Node | str, set[int]],
    ) -> None:
        inside = set(nodes)
        self.reads = {n: [a for a in reads[n] if a in inside] for n in nodes}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            for read in self.reads[node]:
                self.readers[read].append(node)
        spans = {n: [at_hand[value] for value in uses[n] if value in at_hand] for n in nodes}
        self.low: dict[fx.Node, int] = {}
        for n in reversed(nodes):
            self.low[n] = max([*(min(span) for span in spans[n]), *(self.low[r] for r in self.readers[n])], default=0)
        self.high: dict[fx.Node, int] = {}
        for n in nodes:
            most = min([*(max(span) for span in spans[n]), *(self.high[a] for a in self.reads[n])], default=0)
            self.high[n] = max(self.low[n], most)

    def chunks(self) -> dict[fx.Node, int]:
        """The chunk of each: of the nodes that may lie on both sides of a border, the first few lie above it."""
        found = dict(self.low)
        for border in range(1, 1 + max(self.high.values(), default=0)):
            loose = [n for n in self.low if self.low[n] < border <= self.high[n]]
            loose.reverse()  # `low` was filled from the end
            for node in loose[: self._fewest(loose, border)]:
                found[node] += 1
        return found

    def _fewest(self, loose: Sequence[fx.Node], border: int) -> int:
        """How many of these lie above a border where the fewest bytes cross it; of equal numbers the largest."""
        place = {node: i for i, node in enumerate(loose)}
        change = [0] * (len(loose) + 2)
        for value in dict.fromkeys([*(a for n in loose for a in self.reads[n]), *loose]):
            below = [place.get(r, len(loose)) for r in self.readers[value] if self.low[r] < border]
            if below:  # it crosses while it lies above and a reader below
                nbytes = sum(t.nbytes for t in fx_values.tensors(value.meta["val"]))
                change[place.get(value, -1) + 1] += nbytes
                change[max(below) + 1] -= nbytes
        costs = list(accumulate(change[:-1]))
        return min(range(len(costs)), key=lambda i: (costs[i], -i))


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The chunk of an op of a region, and whether it is forward work (else it belongs to the backward)."""

    chunk: int
    forward: bool


def pieces(program: Program) -> dict[int, ChunkWork]:
    """By op number, the piece of every op of a region that has a chunk, and of the wait for a transfer among them.

    Where forward and backward meet one segment may hold both. It belongs to the backward, and so does the forward work
    of its chunk that reads it.

    Raises SpecError where layers do not follow one another as the cut says.
    """
    maker: dict[str, int] = {}
    found: dict[int, ChunkWork] = {}
    for number, op in enumerate(program.ops):
        if op.is_wait and op.target in maker:
            found[number] = found[maker[op.target]]
            continue
        if op.chunk is None:
            continue
        sources = [maker[ref.name] for ref in op.reads if ref.name in maker]
        late = any(found[i].chunk == op.chunk and not found[i].forward for i in sources)
        piece = found[number] = ChunkWork(op.chunk, op.phase is StepPhase.FORWARD and not late)
        for source in sources:
            _check(op, piece, program.ops[source], found[source])
        maker.update({ref.name: number for ref in op.writes})
    return found


def crossing(program: Program) -> frozenset[str]:
    """The forward values that the backward of another chunk reads: `recompute` keeps them, for they are sent when they
    are made first. Without chunks there are none."""
    found = pieces(program)
    made = {ref.name: found[i] for i, op in enumerate(program.ops) if i in found for ref in op.writes}
    read = [(made[ref.name], piece, ref.name) for i, piece in found.items() for ref in program.ops[i].reads
            if ref.name in made]  # fmt: skip
    return frozenset(name for source, reader, name in read if source.forward and source.chunk != reader.chunk)


def _check(op: Op, piece: ChunkWork, maker: Op, source: ChunkWork) -> None:
    """Values go up the chunks in the forward and down in the backward: else roles would wait for one another."""
    up = source.forward and source.chunk > piece.chunk
    down = not source.forward and (piece.forward or source.chunk < piece.chunk)
    if up or down:
        raise SpecError(
            f"the pipeline's cut does not follow the step: `{op.why or op.kind}` on chunk {piece.chunk} reads what "
            f"`{maker.why or maker.kind}` makes on chunk {source.chunk}: values go up the chunks in the forward and "
            "down in the backward. Say where chunks begin, in the order of the forward, so that both are in one chunk: "
            "Pipeline(cut=[...])"
        )
