"""rematerialise_views: what is made anew before each use, what is made once, and that values stay the same."""

from __future__ import annotations

from typing import Any

import torch
from recorded import calls
from short_programs import segment, shown, written
from torch import Tensor, fx

import fzero
from fzero.ir import fx_nodes
from fzero.passes.rematerialise_views import again, rematerialise_views

RECORDS = """
    bucket b length=64 w[0:64:8x8]
    buffer p f32[64] param bucket=b
    buffer x f32[8x8] batch
    buffer y f32[8x8] activation
    buffer z f32[8x8] activation
"""


def remade(body: Any, op: str = "run p[0:64:8x8] x -> y z  region=r0  fresh=2  segment=s") -> fx.GraphModule:
    """The segment behind the pass. Its first input is a leaf, its second one is not."""
    gm = segment(body, (8, 8), (8, 8))
    program = rematerialise_views(written(RECORDS + op, segments={"s": gm}))
    (made,) = program.segments.values()
    given = torch.randn(8, 8), torch.randn(8, 8)
    assert all(torch.equal(a, b) for a, b in zip(made(*given), gm(*given), strict=True))
    return made


def test_a_view_is_taken_before_each_use() -> None:
    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        t = w.t()
        a = x.mm(t)
        return [a.sin(), a.mm(t)]

    assert calls(remade(body)) == ["t", "mm", "sin", "t", "mm"]


def test_a_use_that_reads_a_view_twice_takes_it_once() -> None:
    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        t = w.t()
        return [t * t, t.t() + x]

    made = remade(body)
    assert calls(made) == ["t", "mul", "t", "t", "add"]
    product = next(n for n in made.graph.nodes if fx_nodes.op_name(n) == "mul")
    assert product.args[0] is product.args[1]


def test_a_cast_of_a_leaf_is_made_before_each_use_and_another_one_is_not() -> None:
    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        low, own = w.t().bfloat16(), x.bfloat16()
        a = own.mm(low)
        return [a.float(), (own + low.t()).float()]

    assert calls(remade(body)) == [
        "_to_copy",
        "t",
        "_to_copy",
        "mm",
        "_to_copy",
        "t",
        "_to_copy",
        "t",
        "add",
        "_to_copy",
    ]


def test_results_that_are_views_are_taken_for_the_results() -> None:
    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        a = w.mm(x)
        t = a.t()
        return [t, t]

    made = remade(body)
    assert calls(made) == ["mm", "t"]
    assert fx_nodes.outputs(made.graph)[0] is fx_nodes.outputs(made.graph)[1]


def test_a_result_that_is_none_stays_none() -> None:
    gm = segment(lambda w, x: [w + x], (8, 8), (8, 8))
    fx_nodes.output(gm.graph).args = ([fx_nodes.outputs(gm.graph)[0], None],)
    op = "run p[0:64:8x8] x -> y  region=r0  fresh=1  segment=s"
    (made,) = rematerialise_views(written(RECORDS + op, segments={"s": gm})).segments.values()
    assert fx_nodes.outputs(made.graph)[1] is None


def test_ops_outside_of_regions_stay_and_equal_segments_are_one() -> None:
    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        t = w.t()
        return [x.mm(t), x + t]

    gm = segment(body, (8, 8), (8, 8))
    run = "run p[0:64:8x8] x -> y z  region=r0  fresh=2  segment=s\n"
    text = run + run + run.replace("region=r0", "")
    program = rematerialise_views(written(RECORDS + text, segments={"s": gm}))
    assert [op.segment == "s" for op in program.ops] == [False, False, True]
    assert program.ops[0] == program.ops[1]
    assert shown(program.ops) == ["run p[0:64:8x8] x -> y z"] * 3


def test_no_weight_in_another_order_is_kept_for_the_backward() -> None:
    """`einsum` copies the weights of experts, of which the kept copies of all layers were a whole model at stage 3. And
    what reads such a copy is work on the layer's parameters: each layer but the last is gathered twice."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params:
            hidden = torch.einsum("bd,edh->beh", x, layer["up"]).relu()
            x = x + torch.einsum("beh,ehd->bd", hidden, layer["down"])
        return x.square().mean()

    layers = [{"up": torch.empty(4, 32, 24), "down": torch.empty(4, 24, 32)} for _ in range(4)]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), zero=3)
    program = fzero.lower(spec, layers, torch.empty(2, 32), world_size=4).program
    kept = [b.numel for b in program.buffers.values() if b.kind == "activation"]
    assert max(kept) < layers[0]["up"].numel()
    assert sum(op.gathers for op in program.ops) == 4 + 3


def test_what_is_made_anew() -> None:
    """Views; of leaves also casts, copies, codes, what codes say, and casts and copies of that."""

    def body(w: Tensor, x: Tensor) -> list[Tensor]:
        said = [torch.ops.fzero.decode_int8(torch.ops.fzero.encode_int8(v)) for v in (w, x)]
        copied = w.bfloat16().clone() + x.clone()
        return [said[0].bfloat16() + said[1].bfloat16(), (w + x).bfloat16() + copied]

    gm = segment(body, (8, 8), (8, 8))
    made_anew = again({fx_nodes.placeholders(gm.graph)[0]})
    nodes = [n for n in gm.graph.nodes if fx_nodes.is_compute(n)]
    found = [fx_nodes.op_name(n) for n in nodes if made_anew(n)]
    assert found == ["encode_int8", "decode_int8", "_to_copy", "clone", "_to_copy"]


def test_what_a_transfer_reads_is_made_once() -> None:
    """A transfer is an op of its own: the copy was left behind it, with the next work (a KeyError)."""

    def body(w: Tensor) -> list[Tensor]:
        return [torch.ops.fzero.axis_all_gather(w.t().clone(), "tp", 2, [16, 8]) + 1]

    gm = segment(body, (8, 8))
    made_anew = again({fx_nodes.placeholders(gm.graph)[0]})
    nodes = [n for n in gm.graph.nodes if fx_nodes.is_compute(n)]
    assert [fx_nodes.op_name(n) for n in nodes if made_anew(n)] == ["t"]
