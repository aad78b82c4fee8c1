"""Rematerialisation: less memory, the same bits, and no gather more."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import Run, differing, relative, run
from models import GPT, normal
from short_programs import lines, segment, shown, written
from torch import Tensor

import fzero
from fzero import optim, random
from fzero.ir.liveness import live_bytes
from fzero.passes.recompute import recompute

DEPTH, DEEP, WIDTH, ROWS = 4, 6, 32, 64
ADAMW = optim.adamw(1e-2)


def params(key: Tensor, depth: int = DEPTH) -> Any:
    def block(key: Tensor) -> Any:
        up, down = random.split(key)
        return {"norm": torch.ones(WIDTH), "up": normal(up, 4 * WIDTH, WIDTH, scale=0.1),
                "down": normal(down, WIDTH, 4 * WIDTH, scale=0.1)}  # fmt: skip

    keys = random.split(key, depth + 1)
    return {"blocks": [block(k) for k in keys[1:]], "out": normal(keys[0], WIDTH)}


def block(p: Any, x: Tensor) -> Tensor:
    h = F.linear(F.layer_norm(x, (WIDTH,), p["norm"]), p["up"])
    return x + F.linear(torch.tanh(h) * torch.sigmoid(h), p["down"])


def loss(p: Any, batch: Tensor) -> Tensor:
    for one in p["blocks"]:
        batch = block(one, batch)
    return (batch @ p["out"]).square().mean()


def wrapped(p: Any, batch: Tensor) -> Tensor:
    for one in p["blocks"]:
        batch = fzero.remat(block)(one, batch)
    return (batch @ p["out"]).square().mean()


def dropped(p: Any, batch: Tensor) -> Tensor:
    for one in p["blocks"]:
        batch = F.dropout(block(one, batch), 0.3)
    return (batch @ p["out"]).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return normal(random.fold_in(random.fold_in(random.key(4), step), rank), ROWS, WIDTH)


def spec(fn: Any = loss, **options: Any) -> fzero.Spec:
    return fzero.Spec(loss=fn, **{"optimizer": ADAMW, "zero": 3, "clip_norm": 0.1, **options})


def train(fn: Any = loss, **options: Any) -> Run:
    key = options.pop("key", None)
    return run(spec(fn, **options), params(random.key(0)), batch, world=2, steps=2, key=key)


def activations(program: fzero.ir.program.Program) -> int:
    """The most bytes of buffers that hold activations at one time (what runs inside a segment aside)."""
    live: set[str] = set()
    most = 0
    for op in program.ops:
        live |= {ref.name for ref in op.writes if program.buffers[ref.name].kind == "activation"}
        most = max(most, sum(program.buffers[name].nbytes for name in live))
        live -= {ref.name for ref in op.reads} if op.is_free else set()
    return most


seen: dict[str, fzero.Lowered] = {}  # several tests look at the same step


def lowered(fn: Any = loss, depth: int = DEPTH, **options: Any) -> fzero.Lowered:
    key = f"{fn.__name__} {depth} {options}"
    if key not in seen:
        seen[key] = kept.lower(spec(fn, **options), partial(params, depth=depth), batch(0, 0), 2)
    return seen[key]


def gathers(one: fzero.Lowered) -> Counter[str]:
    return Counter(op.reads[0].name for op in one.program.ops if op.gathers)


SOME: Any = {"blocks/1/**": "full", "blocks/3/**": "none", "blocks/*/up": "full"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [{"remat": "full"}, {"remat": SOME}, {"fn": wrapped}], ids=["full", "rules", "fn"])
@pytest.mark.sampled(1)
def test_bits_and_metrics_are_the_same(zero: int, how: dict[str, Any]) -> None:
    plain, again = train(zero=zero), train(zero=zero, **how)
    assert not differing(again.final, plain.final)
    for mine, theirs in zip(again.metrics, plain.metrics, strict=True):
        assert not any(differing(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "reduce": "each"},
        {"microbatches": 2, "reduce": "end", "prefetch": 2},
        {"precision": "bf16"},
        {"fn": dropped, "key": random.key(3)},
        {"bucket_bytes": 4096, "overlap": False},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.sampled(1)
def test_bits_are_the_same_with_other_options(options: dict[str, Any]) -> None:
    plain, again = train(**options), train(remat="full", **options)
    assert again.lowered.program.digest != plain.lowered.program.digest
    assert not differing(again.final, plain.final)
    assert again.losses() == plain.losses()
    assert relative(again.final["params/out"], params(random.key(0))["out"]) > 1e-3


@pytest.mark.parametrize("how", ["full", {"blocks/0/**": "full"}], ids=str)
@pytest.mark.sampled(1)
def test_a_gpt_has_the_same_bits(how: Any) -> None:
    def ends(**options: Any) -> dict[str, Tensor]:
        given = fzero.Spec(loss=GPT.loss, optimizer=ADAMW, **options)
        return run(given, GPT.init(random.key(0)), GPT.batch, world=2, steps=2).final

    assert not differing(ends(remat=how), ends())


@pytest.mark.acceptance
def test_activation_memory_falls() -> None:
    some = {f"blocks/{i}/**": "full" for i in (0, 2, 4)}
    plain, half, full = (lowered(depth=DEEP, remat=how) for how in ("none", some, "full"))
    held = [activations(one.program) for one in (plain, half, full)]
    layer = ROWS * WIDTH * 4  # one checkpoint
    print("activations of buffers:", held, "peaks:", [one.memory.peak for one in (plain, half, full)])
    assert held[2] < held[1] < held[0]
    assert held[0] > DEEP * 8 * layer, "each layer keeps some multiples of its input"
    assert held[2] < held[0] / 3
    assert held[2] <= (DEEP + 16) * layer, "one input a layer, and one layer at work"
    assert full.memory.peak < half.memory.peak < plain.memory.peak
    assert max(live_bytes(full.program.ops, full.program.buffers)) < max(
        live_bytes(plain.program.ops, plain.program.buffers)
    )


@pytest.mark.acceptance
def test_a_remat_of_the_users_saves_memory_too() -> None:
    own = lowered(wrapped, DEEP)
    plain, full = (lowered(depth=DEEP, remat=how) for how in ("none", "full"))
    assert activations(own.program) < activations(plain.program) / 2
    assert gathers(own) == gathers(full)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.sampled(1)
def test_no_gather_more(zero: int) -> None:
    plain, full = lowered(zero=zero), lowered(zero=zero, remat="full")
    assert gathers(full) == gathers(plain)
    assert full.program.gather_cap_bytes <= plain.program.gather_cap_bytes


def test_what_is_run_again_is_the_forward_of_the_layers_under_a_rule() -> None:
    def again(how: Any) -> list[str]:
        return [op.why for op in lowered(remat=how).program.ops if op.why.startswith("again ")]

    full = again("full")
    assert again("none") == []
    assert {why.split()[2] for why in full} >= {f"blocks.{i}" for i in range(DEPTH - 1)}
    assert {why.split()[2] for why in again({"blocks/2/**": "full"})} == {"blocks.2"}
    assert again({"blocks/2/**": "none", "**": "full"}) == [w for w in full if "blocks.2" not in w]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fulll", r"remat='fulll'.*needed \"none\", \"full\", \"gathers\", \"offload\", or path rules"),
        ({"blocks/**": "half"}, 'needed "none", "full"'),
        (
            {"bloks/**": "full"},
            r"Spec\(remat=\.\.\.\): the rule 'bloks/\*\*' matches no leaf\. Did you mean 'blocks/\*\*'",
        ),
    ],
)
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        lowered(remat=given)


# --- two layers, by hand ---------------------------------------------------------------------------------------------

RECORDS = """
    bucket l.0 length=64 w/0[0:64:8x8]
    bucket l.1 length=64 w/1[0:64:8x8]
    buffer p0 f32[64] param bucket=l.0 entry=params
    buffer p1 f32[64] param bucket=l.1 entry=params
    buffer g0 f32[64] grad bucket=l.0
    buffer g1 f32[64] grad bucket=l.1
    buffer x f32[8x8] batch
"""
LAYERS = """
    run x p0[0:64:8x8] -> x1 a1  region=r0  phase=forward  fresh=2  segment=layer  # one
    run x1 p1[0:64:8x8] -> x2 a2  region=r0  phase=forward  fresh=2  segment=layer  # two
    run x2 -> d2  region=r0  phase=region  fresh=1  segment=loss
    run d2 a2 p1[0:64:8x8] -> d1 g1[0:64:8x8]  region=r0  phase=backward  fresh=1  segment=back
    run d1 a1 p0[0:64:8x8] -> g0[0:64:8x8]  region=r0  phase=backward  segment=end
"""
SENT = """
    run x p0[0:64:8x8] -> x1  region=r0  phase=forward  fresh=1  segment=one  # one
    all_gather x1 -> q  axis=dp  phase=forward  region=r0  # gather
    wait q
    run q p1[0:64:8x8] -> x2 a2  region=r0  phase=forward  fresh=2  segment=wide  # two
    run x2 -> d2  region=r0  phase=region  fresh=1  segment=loss
    run d2 a2 q p1[0:64:8x8] -> d1 g1[0:64:8x8]  region=r0  phase=backward  fresh=1  segment=end_wide
"""


def layer(x: Tensor, w: Tensor) -> list[Tensor]:
    a = x.mm(w)
    return [a.tanh(), a.cos()]


def back(d: Tensor, a: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
    into.copy_(d * a)
    return [d.mm(w)]


def end(d: Tensor, a: Tensor, w: Tensor, into: Tensor) -> None:
    into.copy_(d * a + w)


def end_wide(d: Tensor, a: Tensor, q: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
    into.copy_(w)
    return [d.mm(w) + a + q]


SMALL, WIDE = (8, 8), (16, 8)
POOL = {
    "layer": segment(layer, SMALL, SMALL),
    "loss": segment(lambda x: [x.sin()], SMALL),
    "back": segment(back, *[SMALL] * 4),
    "end": segment(end, *[SMALL] * 4),
    "one": segment(lambda x, w: [x.mm(w)], SMALL, SMALL),
    "wide": segment(layer, WIDE, SMALL),
    "end_wide": segment(end_wide, WIDE, WIDE, WIDE, SMALL, SMALL),
}


def repeated(
    ops: str, rules: dict[str, str], *keep: str, wide: str = "", one_layer: bool = False
) -> fzero.ir.program.Program:
    """The program behind the pass. wide: the values that have the rows of two ranks. one_layer: whether both leaves are
    of one."""
    large, records = wide.split(), RECORDS
    if one_layer:
        records = records.replace("w/0[", "w/0/a[").replace("w/1[", "w/0/b[")
    names = ("x1", "a1", "x2", "a2", "d2", "d1", "q")
    values = [f"buffer {name} f32[{16 if name in large else 8}x8] activation" for name in names]
    program = written("\n".join([records, *values, ops]), segments=POOL)
    return recompute(program, rules, frozenset(keep))


def test_what_only_the_backward_reads_is_made_again_before_it() -> None:
    done = repeated(LAYERS, {"**": "full"})
    assert shown(done.ops) == lines(
        """
        run x p0[0:64:8x8] -> x1
        run x1 p1[0:64:8x8] -> x2
        run x2 -> d2
        run x1 p1[0:64:8x8] -> a2.again
        run d2 a2.again p1[0:64:8x8] -> d1 g1[0:64:8x8]
        run x p0[0:64:8x8] -> a1.again
        run d1 a1.again p0[0:64:8x8] -> g0[0:64:8x8]
        """
    )
    assert [(op.phase, op.why) for op in done.ops if ".again" in op.writes[0].name] == [
        ("recompute", "again two"),
        ("recompute", "again one"),
    ]
    again, forward = (done.segments[done.ops[n].segment] for n in (3, 1))
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert torch.equal(again(x, w)[0], layer(x, w)[1])
    assert torch.equal(forward(x, w)[0], layer(x, w)[0])
    assert done.buffers["a2.again"].shape == (8, 8)
    assert "a2" not in done.buffers


@pytest.mark.parametrize(
    ("rules", "again"),
    [
        ({"w/1": "full"}, ["a2.again"]),
        ({"params/w/0": "full", "**": "none"}, ["a1.again"]),
        ({"w/1": "none", "**": "full"}, ["a1.again"]),
        ({"**": "offload"}, []),
        ({}, []),
    ],
)
def test_the_first_rule_that_matches_a_leaf_says_it(rules: dict[str, str], again: list[str]) -> None:
    done = repeated(LAYERS, rules)
    assert [op.writes[0].name for op in done.ops if op.writes[0].name.endswith("again")] == again


def test_what_must_be_kept_is() -> None:
    done = repeated(LAYERS, {"**": "full"}, "a2")
    assert [name for name in done.buffers if name.endswith("again")] == ["a1.again"]
    assert "run d2 a2 p1[0:64:8x8] -> d1 g1[0:64:8x8]" in shown(done.ops)


def test_a_metric_that_only_the_backward_reads_stays() -> None:
    def of_parts(p: Any, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = torch.tanh(batch + p["b"])
        return F.huber_loss(out, torch.zeros_like(out)), {"largest": out.abs().amax()}  # its gradient is made like it

    def one_step(state: Any, batch: Tensor) -> Any:
        (value, aux), grads = fzero.value_and_grad(of_parts, has_aux=True)(state["params"], batch)
        return {"params": {"b": state["params"]["b"] - 0.1 * grads["b"]}}, {"loss": value, **fzero.pmax(aux)}

    def trained(remat: str) -> Run:
        spec = fzero.Spec(step=one_step, mesh={"tp": 2}, shard={"params/b": fzero.P("tp")}, zero=0, remat=remat)
        return run(spec, {"params": {"b": torch.arange(8.0)}}, lambda rank, step: torch.ones(4, 8), world=2, steps=1)

    plain, again = trained("none"), trained("full")
    assert any(".again" in name for name in again.lowered.program.buffers)
    assert not differing(again.final, plain.final)
    assert again.losses() == plain.losses()


def test_a_segment_of_which_only_the_backward_reads_stays() -> None:
    """To make all of it again would save nothing but its time."""
    ops = LAYERS.replace("run x2 -> d2", "run x1 -> d2").replace("run d2 a2 p1", "run x2 a2 p1")
    assert [name for name in repeated(ops, {"**": "full"}).buffers if name.endswith("again")] == ["a1.again"]


WIDE_VALUES = "x2 a2 d2 d1 q"


def test_a_transfer_within_a_layer_is_repeated_and_what_it_reads() -> None:
    done = repeated(SENT, {"**": "full"}, wide=WIDE_VALUES, one_layer=True)
    assert shown(done.ops) == lines(
        """
        run x p0[0:64:8x8] -> x1
        all_gather x1 -> q  axis=dp
        wait q
        run q p1[0:64:8x8] -> x2
        run x2 -> d2
        run x p0[0:64:8x8] -> x1.again
        all_gather x1.again -> q.again  axis=dp
        wait q.again
        run q.again p1[0:64:8x8] -> a2.again
        run d2 a2.again q.again p1[0:64:8x8] -> d1 g1[0:64:8x8]
        """
    )
    assert {op.why for op in done.ops if op.reads[0].name == "x1.again"} == {
        "again gather: 512 bytes less are kept for 256 sent"
    }
    assert [op.phase for op in done.ops if op.gathers] == ["forward", "recompute"]


@pytest.mark.parametrize(("rules", "keep"), [({"**": "full"}, ()), ({"w/1": "full"}, ()), ({"**": "full"}, ("x1",))])
def test_what_a_layer_hands_on_is_kept_and_gathered_again(rules: dict[str, str], keep: tuple[str, ...]) -> None:
    """The complaint: it was made again, and for that what the layer before handed on, and so on: all layers at once."""
    done = repeated(SENT, rules, *keep, wide=WIDE_VALUES)
    assert shown(done.ops) == lines(
        """
        run x p0[0:64:8x8] -> x1
        all_gather x1 -> q  axis=dp
        wait q
        run q p1[0:64:8x8] -> x2
        run x2 -> d2
        all_gather x1 -> q.again  axis=dp
        wait q.again
        run q.again p1[0:64:8x8] -> a2.again
        run d2 a2.again q.again p1[0:64:8x8] -> d1 g1[0:64:8x8]
        """
    )
    assert [op.why for op in done.ops if op.gathers] == [
        "gather", "again gather: 256 bytes less are kept for 256 sent"
    ]  # fmt: skip


def test_a_transfer_of_what_is_kept_is_not_made_again() -> None:
    done = repeated(SENT, {"**": "full"}, "q", wide=WIDE_VALUES)
    assert len([op for op in done.ops if op.gathers]) == 1


def test_without_a_rule_no_transfer_is_looked_at() -> None:
    done = repeated(SENT, {}, wide=WIDE_VALUES)
    assert [op.why for op in done.ops if op.gathers] == ["gather"]
