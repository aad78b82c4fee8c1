"""segment: where a region is cut: which leaves count as one unit, and at which value a layer begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import pytest
import short_programs
import torch
from by_hand import Draft
from passed import upto
from recorded import calls
from torch import Tensor

import fzero
from fzero.ir import fx_nodes
from fzero.ir.op import StepPhase
from fzero.ir.program import Program
from fzero.passes.segment import _grouped, _phase, segment
from fzero.shard.ops import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fzero.verify.rules import verify

KB = 256  # elements of 4 bytes


def _gates(p: Any, x: Tensor) -> Tensor:
    """Layers whose last op has no parameter: a gate, whose operands are kept for the backward."""
    x = x @ p["first"]
    for w in p["layers"]:
        y = torch.tanh(x @ w["a"]) @ w["b"]
        x = x + torch.sigmoid(y) * torch.tanh(y)
    return (x @ p["head"]).square().mean()


def test_the_backward_of_a_layer_begins_at_its_end() -> None:
    """What only a layer's forward makes is read by the segment of its own backward: so a layer is made again for that
    one alone, after the layer behind it is done, and gathered once for both."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    layers = [{"a": meta(64, 64), "b": meta(64, 64)} for _ in range(4)]
    params = {"first": meta(64, 64), "layers": layers, "head": meta(64, 512)}
    spec = fzero.Spec(loss=_gates, optimizer=fzero.optim.sgd(0.1), remat="full")
    program = fzero.lower(spec, params, meta(256, 64), world_size=2).program
    number = {f"params:layers.{n}": n for n in range(4)}
    assert [number[name] for op in program.ops if op.gathers and (name := op.reads[0].name) in number] == [
        *range(4), *reversed(range(4))
    ]  # fmt: skip
    runs = [op for op in program.ops if op.computes and op.in_region]
    again = [n for n, op in enumerate(runs) if op.phase is StepPhase.RECOMPUTE]
    assert len(again) == 4
    made = {ref.name for n in again for ref in runs[n].writes}
    for n, last in zip(again, [*again[1:], len(runs)], strict=True):
        late = {ref.name for op in runs[last:] for ref in op.reads}
        assert not late & {ref.name for ref in runs[n].writes}, "of one layer alone"
    assert not made & {ref.name for op in runs[: again[0]] for ref in op.reads}


def node(target: Any, phase: str | None) -> Any:
    return SimpleNamespace(target=target, meta={} if phase is None else {"phase": phase})


def test_the_phase_of_work() -> None:
    aten = torch.ops.aten
    mm, cast = aten.mm.default, aten._to_copy.default
    assert _phase([node(mm, None)]) is StepPhase.FORWARD
    assert _phase([node(mm, "backward"), node(cast, None)]) is StepPhase.BACKWARD, "a cast may stand in either"
    assert _phase([node(mm, None), node(mm, "backward")]) is StepPhase.REGION
    assert _phase([node(cast, None)]) is StepPhase.FORWARD
    assert _phase([]) is StepPhase.BACKWARD, "it brings gradients to their places"


@pytest.mark.parametrize(("chunks", "first"), [((0, 0, 0), 1), ((0, 0, 1), 2)])
def test_what_a_layer_begins_with_stays_in_its_chunk(chunks: tuple[int, ...], first: int) -> None:
    """`wide` would cross the border instead of `h`; but of another chunk it is, so it crosses."""
    aten, draft = torch.ops.aten, Draft()
    a, x, b = draft.input(4, 4), draft.input(4, 4), draft.input(16, 4)
    h = draft.call(aten.mm.default, x, a)
    wide = draft.call(aten.cat.default, [h, h, h, h], 1)
    last = draft.call(aten.mm.default, wide, b)
    draft.returning(last)
    nodes = [h, wide, last]
    units = {h: {"layers.0"}, last: {"layers.1"}}
    groups = _grouped(nodes, units, dict(zip(nodes, chunks, strict=True)), lambda node: False)
    assert [group.nodes for group in groups] == [nodes[:first], nodes[first:]]


def runs(program: Program) -> list[str]:
    """The segments of a step, by phase and units."""
    return [op.why.split(" (")[0] for op in program.ops if op.in_region]


def segmented(loss: Any, params: Any, batch: Any, **given: Any) -> Program:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **given)
    graph, plan = cases.captured(spec, params, batch)
    program = upto("segment", cases.built(graph, plan))
    verify(program)
    return program


def test_a_tied_model_is_cut_at_its_layers() -> None:
    init, loss = cases.tied(64, 16, 3)
    program = segmented(loss, init, cases.tokens(2, 8, 64))
    assert runs(program) == [
        "forward small", "forward blocks.0", "forward blocks.1", "forward blocks.2", "forward and backward small",
        "backward blocks.2", "backward blocks.1", "backward blocks.0", "backward blocks.0 small",
    ]  # fmt: skip
    hashes = [op.segment for op in program.ops if op.in_region]
    assert hashes[1] == hashes[2], "equal layers are one segment"
    assert len({*hashes}) < len(hashes)


def test_a_layer_begins_where_the_fewest_bytes_cross() -> None:
    """Before its norm: behind it the sum that goes on and the norm would both be kept."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ layer["w"])
        return x.square().mean()

    params = {"layers": [{"w": torch.empty(8, 8, device="meta")} for _ in range(3)]}
    program = segmented(loss, params, torch.empty(4, 8, device="meta"))
    forward = [op for op in program.ops if op.in_region and op.phase is StepPhase.FORWARD]
    assert [op.why.split(" (")[0] for op in forward[:3]] == [f"forward layers.{i}" for i in range(3)][: len(forward)]
    later = forward[1]
    read = [ref.name for ref in later.reads if program.buffers[ref.name].kind == "activation"]
    assert len(read) == 1, "the value that the last layer left"


# --- a region of two layers, by hand ---------------------------------------------------------------------------------

SQUARE = (8, 8)
REGION = """
    bucket l.0 length=64 numbered w/0[0:64:8x8]
    bucket l.1 length=64 numbered w/1[0:64:8x8]
    buffer p0 f32[64] param bucket=l.0
    buffer p1 f32[64] param bucket=l.1
    buffer g0 f32[64] grad bucket=l.0
    buffer g1 f32[64] grad bucket=l.1
    buffer x f32[8x8] batch
    buffer loss f32[] activation
    run x p0[0:64:8x8] p1[0:64:8x8] -> loss g0[0:64:8x8] g1[0:64:8x8]  region=r0  microbatch=0  fresh=1  segment=s
"""


def cut(body: Any, chunk_of: dict[str, int] | None = None, transport: str = "p2p") -> Program:
    """The region behind the pass; its first four ops are the forward."""
    gm = short_programs.segment(body, *[SQUARE] * 5)
    work = [n for n in gm.graph.nodes if fx_nodes.is_compute(n) and fx_nodes.op_name(n) != "copy_"]
    for op in [n for n in work if not fx_nodes.is_view(n)][4:]:
        op.meta["phase"] = "backward"
    return segment(short_programs.written(REGION, segments={"s": gm}, transport=transport), chunk_of)


def two_layers(x: Tensor, w0: Tensor, w1: Tensor, into0: Tensor, into1: Tensor) -> list[Tensor]:
    a = x.mm(w0).tanh()
    b = a.mm(w1)
    total = b.sum()
    g = b.cos()
    into1.copy_(a.mm(g))
    into0.copy_(x.mm(g.mm(w1)))
    return [total]


def moved(op: Any, *how: Any) -> Any:
    """With a transfer behind the first product, and one of the first leaf's gradient."""

    def body(x: Tensor, w0: Tensor, w1: Tensor, into0: Tensor, into1: Tensor) -> list[Tensor]:
        a = x.mm(w0)
        b = op(a, "dp", 2, *how)[:8].mm(w1)
        total = b.sum()
        g = b.cos()
        into1.copy_(a.mm(g))
        into0.copy_(op(g.mm(w1), "dp", 2, *how)[:8])
        return [total]

    return body


def test_a_run_for_each_layer_and_a_buffer_for_what_crosses() -> None:
    program = cut(two_layers)
    assert short_programs.shown(program.ops) == short_programs.lines(
        """
        run x p0[0:64:8x8] -> r0.h0.0.0
        run r0.h0.0.0 p1[0:64:8x8] -> loss r0.h1.1.0 g1[0:64:8x8]
        run r0.h1.1.0 p1[0:64:8x8] x -> g0[0:64:8x8]
        """
    )
    said = [(op.why, op.phase, op.chunk, op.microbatch) for op in program.ops]
    assert said == [
        ("forward l.0", "forward", None, 0),
        ("forward and backward l.1", "region", None, 0),
        ("backward l.0 l.1", "backward", None, 0),
    ]
    crossing = program.buffers["r0.h1.1.0"]
    assert (crossing.shape, crossing.dtype, crossing.kind) == (SQUARE, torch.float32, "activation")


def test_views_of_a_gradient_are_taken_in_their_order_where_it_is_copied() -> None:
    def body(x: Tensor, w0: Tensor, w1: Tensor, into0: Tensor, into1: Tensor) -> list[Tensor]:
        b = x.mm(w0).tanh().mm(w1)
        total = b.sum()
        into1.copy_(b.cos())
        into0.copy_(x.mm(b.sin().mm(w1)).view(64).view(8, 8))
        return [total]

    program = cut(body)
    assert calls(program.segments[program.ops[-1].segment])[-4:] == ["mm", "view", "view", "copy_"]


def test_in_a_pipeline_a_run_for_each_chunk() -> None:
    """A gradient's product with a leaf is made where the leaf is."""
    program = cut(two_layers, {"l.0": 0, "l.1": 1})
    assert short_programs.shown(program.ops) == short_programs.lines(
        """
        run x p0[0:64:8x8] -> r0.h0.0.0  chunk=0
        run r0.h0.0.0 p1[0:64:8x8] -> loss r0.h1.1.0 g1[0:64:8x8]  chunk=1
        run x r0.h1.1.0 -> g0[0:64:8x8]  chunk=0
        """
    )


@pytest.mark.parametrize("chunks", [None, {"l.0": 0, "l.1": 1}])
def test_a_transfer_is_an_op_between_two_runs(chunks: dict[str, int] | None) -> None:
    program = cut(moved(ALL_REDUCE, "max"), chunks)
    at, before, behind = (f"  chunk={n}" if chunks else "" for n in (0, 0, 1))
    ops = short_programs.shown(program.ops)
    assert ops[:4] == [
        f"run x p0[0:64:8x8] -> r0.h0.0.0{before}",
        f"all_reduce r0.h0.0.0 -> r0.h1.0.0 r0.h1.0.0.scratch  axis=dp{at}",
        "wait r0.h1.0.0",
        f"run r0.h1.0.0 p1[0:64:8x8] r0.h0.0.0 -> loss r0.h2.1.0 g1[0:64:8x8]{behind}",
    ]
    assert [op.split()[0] for op in ops[-3:]] == ["all_reduce", "wait", "run"]
    assert ops[-1].split("  ")[0].endswith("-> g0[0:64:8x8]")
    first, last = (op for op in program.ops if op.transfers)
    assert (first.phase, last.phase, first.region, first.microbatch) == ("forward", "backward", "r0", 0)
    assert (first.get("op"), first.get("divisor")) == ("max", 1)
    assert program.buffers["r0.h1.0.0.scratch"].shape == (1, 32), "of a part of the other rank"


@pytest.mark.parametrize(
    ("op", "how", "attrs"),
    [
        (ALL_GATHER, ([16, 8],), (None, None)),
        (REDUCE_SCATTER, ([8, 8],), ("sum", 1)),
    ],
)
def test_only_a_reduction_says_how_it_adds(op: Any, how: Any, attrs: tuple[Any, Any]) -> None:
    program = cut(moved(op, *how), transport="nccl")
    transfer = next(each for each in program.ops if each.transfers)
    assert (transfer.kind, transfer.get("op"), transfer.get("divisor")) == (
        str(op).split("axis_")[1].split(".")[0],
        *attrs,
    )
    assert not [name for name in program.buffers if name.endswith("scratch")], "NCCL needs no memory of ours"


def test_what_ranks_cannot_share_evenly_is_reduced_by_each() -> None:
    """A number: no part of it is anybody's."""

    def body(x: Tensor, w0: Tensor, w1: Tensor, into0: Tensor, into1: Tensor) -> list[Tensor]:
        total = ALL_REDUCE((x.mm(w0) + w1).sum(), "dp", 2, "sum")
        into0.copy_(x.mul(2.0))
        into1.copy_(x.mul(3.0))
        return [total]

    assert [op.kind for op in cut(body).ops if op.transfers] == ["all_reduce_small"]


def _unrolled(steps: int) -> Program:
    """Two cells in a loop over the columns of an input, each with parameters of its own."""
    torch.manual_seed(0)
    cells = torch.nn.ModuleList([torch.nn.LSTMCell(1, 4), torch.nn.LSTMCell(4, 4)])
    params, buffers, apply = fzero.interop.from_module(cells)

    def run(module: Any, x: Tensor) -> Any:
        h = c = h2 = c2 = torch.zeros(3, 4)
        for column in x.split(1, dim=1):
            h, c = module[0](column, (h, c))
            h2, c2 = module[1](h, (h2, c2))
        return h2

    def loss(p: Any, x: Tensor) -> Tensor:
        last: Tensor = apply.call(p, buffers, lambda module: run(module, x))
        return last.square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), mesh={"dp": 1})
    lowered = fzero.lower(spec, params, torch.zeros(3, steps))
    return lowered.after("segment")


def test_the_turns_of_a_loop_over_columns_share_their_segments() -> None:
    """A turn copies its column: the number of the column makes no segment of its own."""
    short, long = _unrolled(20), _unrolled(30)
    assert sum(op.in_region for op in long.ops) - sum(op.in_region for op in short.ops) == 4 * 10
    assert len(long.segments) == len(short.segments)


def test_few_columns_are_copied_where_they_are_read() -> None:
    assert len(_unrolled(12).segments) - len(_unrolled(10).segments) == 2
