"""split_backward: what other segments wait for is made first; gradients of parameters are made by the second half."""

from __future__ import annotations

from typing import Any

import torch
from short_programs import segment, shown, written
from torch import Tensor, fx

from fzero.ir import fx_nodes
from fzero.ir.op import Op
from fzero.passes.pipeline.split_backward import Halves, Split, split_backward

SQUARE = (4, 4)
RECORDS = """
    bucket b length=64 w[0:16:4x4]
    buffer p f32[64] param bucket=b
    buffer grad f32[64] grad bucket=b
    buffer g f32[4x4] activation
    buffer a f32[4x4] activation
    buffer g2 f32[4x4] activation
    buffer g3 f32[4x4] activation
"""
RUN = "run g a p[0:16:4x4] -> g2 grad[0:16:4x4]  region=r0  chunk=0  fresh=1  segment=s"
Memory = dict[str, Tensor]


def execute(op: Op, gm: fx.GraphModule, memory: Memory) -> None:
    """Runs an op on whole buffers of one leaf each."""
    results = gm(*(memory[ref.name] for ref in (*op.reads, *op.writes[op.num_outputs :])))
    memory |= dict(zip((ref.name for ref in op.writes[: op.num_outputs]), results, strict=True))


def split(body: Any, run: str = RUN, known: dict[str, Halves] | None = None) -> Split:
    """The halves of a run: one after the other they write what the run writes."""
    reads = run.partition(" -> ")[0].split()[1:]
    gm = segment(body, *[SQUARE] * (len(reads) + 1))
    (op,) = written(RECORDS + run, segments={"s": gm}).ops
    found = split_backward(written(RECORDS + run, segments={"s": gm}), op, {} if known is None else known)
    names = {ref.name for ref in (*op.reads, *op.writes)}
    whole = {name: torch.randn(SQUARE) for name in names}
    parts = dict(whole)
    whole["grad"], parts["grad"] = torch.zeros(SQUARE), torch.zeros(SQUARE)
    execute(op, gm, whole)
    for half in (found.first, found.second):
        if half is not None:
            execute(half, found.segments[half.segment], parts)
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    return found


def both(found: Split) -> list[str]:
    assert found.first is not None
    assert found.second is not None
    return shown([found.first, found.second])


def bodies(found: Split) -> tuple[list[str], list[str]]:
    first, second = found.first, found.second
    assert first is not None
    assert second is not None
    return names(found.segments[first.segment]), names(found.segments[second.segment])


def names(gm: fx.GraphModule) -> list[str]:
    """The ops of a segment, but for the picks of one result of several."""
    return [name for node in gm.graph.nodes if (name := fx_nodes.op_name(node))]


def test_a_value_that_both_halves_read_is_kept_between_them() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        k = g * a.cos()
        into.copy_(a.mm(k))
        return [k.mm(w)]

    found = split(body)
    assert both(found) == [
        "run g a p[0:16:4x4] -> g2 g2.w0  chunk=0",
        "run a g2.w0 -> grad[0:16:4x4]  chunk=0",
    ]
    assert bodies(found) == (["cos", "mul", "mm"], ["mm", "copy_"])
    kept = found.buffers["g2.w0"]
    assert (kept.shape, kept.dtype, kept.kind) == (SQUARE, torch.float32, "activation")


def test_an_output_that_the_second_half_reads_is_kept_anyway() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        k = g.mm(w)
        into.copy_(k.sin())
        return [k]

    found = split(body)
    assert both(found) == ["run g p[0:16:4x4] -> g2  chunk=0", "run g2 -> grad[0:16:4x4]  chunk=0"]
    assert found.buffers == {}


def test_the_second_of_two_outputs_is_read_where_it_is_that() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        k = g.mm(w)
        into.copy_(a.mm(k))
        return [g.mm(a), k]

    found = split(body, RUN.replace("-> g2", "-> g2 g3").replace("fresh=1", "fresh=2"))
    assert both(found) == ["run g a p[0:16:4x4] -> g2 g3  chunk=0", "run a g3 -> grad[0:16:4x4]  chunk=0"]


def test_views_are_taken_anew() -> None:
    """And what they are of is kept, or read."""

    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        k = g.cos()
        t, u = k.t(), a.t()
        into.copy_(u.mm(t.t()))
        return [t.mm(w) + u]

    found = split(body)
    assert both(found)[1] == "run a g2.w0 -> grad[0:16:4x4]  chunk=0"
    assert bodies(found)[1].count("mm") == 1
    assert "cos" not in bodies(found)[1]


def test_results_of_one_op_stay_in_one_half() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        values, places = g.sort(0)
        into.copy_(a * places)
        return [values.mm(w)]

    found = split(body)
    assert bodies(found)[1] == ["mul", "copy_"]
    assert [b.dtype for b in found.buffers.values()] == [torch.int64]


def test_an_input_that_is_an_output_is_handed_on_by_the_first_half() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        into.copy_(a.sin())
        return [g]

    assert both(split(body)) == ["run g -> g2  chunk=0", "run a -> grad[0:16:4x4]  chunk=0"]


def test_what_has_one_purpose_is_one_half() -> None:
    def outputs(g: Tensor, a: Tensor, w: Tensor, _: Tensor) -> list[Tensor]:
        return [g.mm(w) + a]

    def gradients(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> None:
        into.copy_(a.mm(g) + w)

    gm = segment(outputs, *[SQUARE] * 3, SQUARE)
    text = RECORDS + "run g a p[0:16:4x4] grad[0:16:4x4] -> g2  fresh=1  segment=s"
    program = written(text, segments={"s": gm})
    assert split_backward(program, program.ops[0], {}) == Split(program.ops[0], None, {}, {})
    text = RECORDS + RUN.replace("g2 ", "").replace("fresh=1", "")
    program = written(text, segments={"s": segment(gradients, *[SQUARE] * 4)})
    assert split_backward(program, program.ops[0], {}) == Split(None, program.ops[0], {}, {})


def test_runs_of_one_segment_have_the_same_halves() -> None:
    def body(g: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
        into.copy_(a.mm(g))
        return [g.mm(w)]

    known: dict[str, Halves] = {}
    first = split(body, known=known)
    again = split(body, RUN.replace("g a ", "g3 a "), known)
    assert first.segments == again.segments
    assert both(again)[0] == "run g3 p[0:16:4x4] -> g2  chunk=0"
