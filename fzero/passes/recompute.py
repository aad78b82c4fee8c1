"""recompute: values that a layer's forward would keep for its backward are computed again there.

A rule may match a parameter that a forward segment reads. The segment then no longer writes the values that only the
backward reads. Just before the first backward segment that reads one, a segment of the same nodes on the same inputs
makes them again, with the same bits. Values that the next layer's forward reads stay: those are the checkpoints. A
layer then keeps its input instead of its intermediate values; its forward runs twice, without the work that only the
next layer needs, and without what leads to a value that is kept. Its parameters are gathered once for the second
forward and the backward.

A transfer between two such segments is repeated too, on all ranks of its axis, if that saves more bytes than it sends,
or a gather as many. A gather and an exchange do: their source is made again, or is a part. A sum over ranks does not.
The op says both numbers. A source that an earlier layer made is kept: it is what that layer hands on, and to make it
again would run all layers before it again, at once. Under "gathers" nothing is computed again: a layer keeps its part
of what it gathered, and gathers that again; a copy of it in another order is copied again.

    run x0 w0 -> x1 a1;  run x1 w1 -> x2 a2;  run g2 a2 w1 -> g1 ...
    becomes   run x0 w0 -> x1;  run x1 w1 -> x2;  run x1 w1 -> a2.again;  run g2 a2.again w1 -> g1 ...

    run x w0 -> p;  all_gather p -> q;  run q w0 -> y a;  run g a q w0 -> g0 ...
    becomes   run x w0 -> p;  all_gather p -> q;  run q w0 -> y;  run x w0 -> p.again;  all_gather p.again -> q.again;
              run q.again w0 -> a.again;  run g a.again q.again w0 -> g0 ...
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fzero import tree
from fzero.ir import fx_nodes, op_info, rewrite, segments
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import Program, wire_bytes
from fzero.ir.records import Ref
from fzero.passes.common import run_layers

Rules = Mapping[str, str]
FULL, GATHERS = "full", "gathers"


def recompute(program: Program, rules: Rules, keep: frozenset[str] = frozenset()) -> Program:
    """The program with forward values made again before the backward, for the leaves that `rules` match. `rules` map
    path rules to "full", "gathers", "offload" or "none"; the first match wins, and a leaf without a match keeps
    everything. The buffers of `keep` are not made again."""
    if {FULL, GATHERS}.isdisjoint(rules.values()):
        return rewrite.Edits().apply(program, "recompute")
    again = _Again(program, _under(program, rules, FULL), _under(program, rules, GATHERS), keep)
    for index in reversed(range(len(program.ops))):
        op = program.ops[index]
        if again.full[index] or again.gathers[index]:
            again.run(index, op)
        elif op.transfers and op.phase is StepPhase.FORWARD and program.buffers[op.target].kind == "activation":
            again.transfer(index, op)
    edits = again.edits
    edits.before = {i: [rewrite.moved(op, again.renames) for op in repeated] for i, repeated in edits.before.items()}
    edits.rename = {i: again.renames for i, backward in enumerate(again.backward) if backward}
    return edits.apply(program, "recompute")


class _Again:
    """What is made again, found from the last op to the first: then it is known what the repeated ops read.

    backward: whether a run's work is the backward's alone. full: whether it is the forward's alone, and under a rule.
    gathers: the same, under a rule by which only gathers are repeated.
    renames: by value, its name where it is made again. wanted: those that the forward reads too, sources of repeated
    transfers. edits: the repeated ops before others, and instead of runs those that write less. late: by value, its
    uses after the forward, those of repeated ops too: before which op, and the chunk. parts: segments that were made.
    layers: by op, the layers of a run. Only the methods `run` and `transfer` write these.
    """

    def __init__(self, program: Program, under: Sequence[bool], gathers: Sequence[bool], keep: frozenset[str]) -> None:
        self.program, self.keep = program, keep
        self.edits = rewrite.Edits()
        self.readers = rewrite.reads_of(program.ops)
        self.writers = {ref.name: i for i, op in enumerate(program.ops) for ref in op.writes}
        self.backward = [op.in_region and op.phase is StepPhase.BACKWARD for op in program.ops]
        forward = [op.in_region and op.phase is StepPhase.FORWARD for op in program.ops]
        self.full = list(map(operator.and_, forward, under))
        self.gathers = list(map(operator.and_, forward, gathers))
        self.renames: dict[str, str] = {}
        self.wanted: set[str] = set()
        self.late: dict[str, list[tuple[int, int | None]]] = {}
        self.parts: dict[tuple[Any, ...], tuple[fx.GraphModule, list[int]]] = {}
        self.layers = run_layers.layers(program)
        for name, refs in self.readers.items():
            uses = [(i, program.ops[i].chunk) for i, _ in refs if self.backward[i]]
            if uses:
                self.late[name] = uses

    def run(self, index: int, op: Op) -> None:
        """A forward run: what only the backward reads is left out, and made again with what is wanted."""
        unread = [ref for ref in op.writes if _only_backward(self.readers.get(ref.name, ()), self.backward)]
        unread = [
            ref for ref in unread if ref.name not in self.keep and self.program.buffers[ref.name].kind == "activation"
        ]
        if not self.full[index]:
            unread = [ref for ref in unread if self._gathered(op, ref)]
        if len(unread) == len(op.writes):
            return
        repeated = [ref for ref in op.writes if ref in unread or ref.name in self.wanted]
        if not repeated:
            return
        kept = [ref for ref in op.writes if ref not in unread]
        there = [ref for ref in kept if ref not in repeated and self._read_late(ref, op)]
        self.edits.instead[index] = [self._making(op, kept, ())]
        again = self._making(op, repeated, there)
        self._repeat([replace(again, writes=tuple(map(self._named, repeated)), why=f"again {op.why}")], repeated)

    def transfer(self, index: int, op: Op) -> None:
        """A transfer of the forward whose result the backward reads, where that saves the bytes that it sends.

        Its source is made again too, by the run of the same layer that made it, or is kept."""
        target, source = op.writes[0], op.reads[0]
        uses = self.late.get(target.name, [])
        readers = [i for i, _ in self.readers.get(target.name, ())]
        readers = [i for i in readers if self.full[i] or (op.gathers and self.gathers[i])]
        if not uses or not readers or target.name in self.keep or any(chunk != op.chunk for _, chunk in uses):
            return
        maker = self.writers.get(source.name, -1)  # -1: it is held anyway
        alike = self.program.ops[maker].chunk == op.chunk
        alike = alike and not self.layers[maker].isdisjoint(self.layers[readers[0]])
        made = maker >= 0 and self.full[maker] and alike and source.name not in self.keep
        held = 0 if made or maker < 0 or source.name in self.late else self.program.buffers[source.name].nbytes
        saved, sent = self.program.buffers[target.name].nbytes - held, wire_bytes(self.program, op)
        reason = f"{saved:,} bytes less are kept for {sent:,} sent"
        if sent > saved or (sent == saved and not op.gathers):
            self.edits.instead[index] = [replace(op, why=f"{op.why}; kept: else {reason}")]
            return
        if made:
            self.wanted.add(source.name)
        start = replace(op, writes=tuple(map(self._named, op.writes)), why=f"again {op.why}: {reason}")
        self._repeat([start, Op("wait", (start.writes[0],), why=start.why)], [target])

    def _gathered(self, op: Op, result: Ref) -> bool:
        """Whether a result of a run is all of what was gathered, in another order."""
        graph = self.program.segments[op.segment].graph
        node = fx_nodes.outputs(graph)[op.writes.index(result)]
        while fx_nodes.is_view(node) or (fx_nodes.is_compute(node) and op_info.of(node.target).meaning == "copy"):
            node = fx_nodes.operand(node)
        read = dict(zip(fx_nodes.placeholders(graph), op.reads, strict=True)).get(node)
        maker = self.writers.get(read.name, -1) if read is not None else -1
        if read is None or maker < 0 or not self.program.ops[maker].gathers:
            return False
        return self.program.buffers[result.name].nbytes >= self.program.buffers[read.name].nbytes

    def _read_late(self, ref: Ref, op: Op) -> bool:
        """Whether the backward of this op's chunk reads a value."""
        return any(chunk == op.chunk for _, chunk in self.late.get(ref.name, ()))

    def _making(self, op: Op, results: Sequence[Ref], there: Sequence[Ref]) -> Op:
        """The run that makes these results of a run, from what it reads and those of its results that are `there`. It
        reads no value that it does not need."""
        number = {ref: i for i, ref in enumerate(op.writes)}
        given = [*op.reads, *there]
        held = tuple(self.program.buffers[ref.name].kind != "activation" for ref in given)
        key = op.segment, tuple(number[ref] for ref in results), tuple(number[ref] for ref in there), held
        if key not in self.parts:
            self.parts[key] = _part(self.program.segments[op.segment], *key[1:])
        part, read = self.parts[key]
        made = rewrite.run_op(op, part, [given[i] for i in read], results)
        self.edits.segments.setdefault(made.segment, part)
        return made

    def _named(self, ref: Ref) -> Ref:
        """A reference to what is made again, for which a buffer is made."""
        name = self.renames[ref.name] = f"{ref.name}.again"
        self.edits.buffers[name] = replace(self.program.buffers[ref.name], name=name)
        return replace(ref, name=name)

    def _repeat(self, ops: list[Op], results: Sequence[Ref]) -> None:
        """Puts repeated ops before the first use of a result of theirs after the forward."""
        ops = [op if op.is_wait else op.with_attrs(phase=StepPhase.RECOMPUTE) for op in ops]
        first = min(i for ref in results for i, _ in self.late[ref.name])
        self.edits.before[first][:0] = ops
        for ref in ops[0].reads:
            self.late.setdefault(ref.name, []).append((first, ops[0].chunk))


def _part(
    gm: fx.GraphModule, results: Sequence[int], there: Sequence[int], held: Sequence[bool]
) -> tuple[fx.GraphModule, list[int]]:
    """(the segment that makes these results of a segment, which inputs it reads). Its inputs, and behind them the
    results that are `there`, are read if they are needed or `held`."""
    outs = fx_nodes.outputs(gm.graph)
    holders = fx_nodes.placeholders(gm.graph)[: len(held) - len(there)]
    inputs = {node: i for i, node in enumerate([*holders, *(outs[n] for n in there)])}
    needed: set[fx.Node] = set()
    left = [outs[n] for n in results]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += [] if node in inputs else node.all_input_nodes
    read = [node for node, i in inputs.items() if node in needed or held[i]]
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n in needed and n not in inputs]
    return segments.extract(nodes, read, [outs[n] for n in results]), [inputs[node] for node in read]


def _only_backward(readers: Sequence[tuple[int, Ref]], backward: Sequence[bool]) -> bool:
    return bool(readers) and all(backward[i] for i, _ in readers)


def _under(program: Program, rules: Rules, word: str) -> list[bool]:
    """By op, whether a word holds for a run. One that reads no leaf, as between two transfers, is as the run before."""
    return run_layers.of_runs(program, lambda leaves: says(leaves, rules, word), first=False)


def says(leaves: run_layers.Leaves, rules: Rules, word: str) -> bool:
    """Whether, for any of these leaves, the first rule that matches it says `word`."""
    return any(_says(rules, names) == word for names in leaves)


def _says(rules: Rules, names: Sequence[str]) -> str:
    return next((what for rule, what in rules.items() if any(tree.matches(rule, name) for name in names)), "none")
