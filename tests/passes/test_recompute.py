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
from torch import Tensor

import fzero
from fzero import optim, random
from fzero.ir.liveness import live_bytes

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


def test_a_gpt_has_the_same_bits() -> None:
    def ends(**options: Any) -> dict[str, Tensor]:
        given = fzero.Spec(loss=GPT.loss, optimizer=ADAMW, **options)
        return run(given, GPT.init(random.key(0)), GPT.batch, world=3, steps=2).final

    plain = ends()
    assert not differing(ends(remat="full"), plain)
    assert not differing(ends(remat={"blocks/0/**": "full"}), plain)


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
        ("fulll", r"remat='fulll'.*needed \"none\", \"full\", \"offload\", or path rules"),
        ({"blocks/**": "half"}, 'needed "none", "full"'),
        ({"bloks/**": "full"}, r"Spec\(remat=\.\.\.\): the rule 'bloks/\*\*' matches no leaf\. Did you mean"),
    ],
)
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        lowered(remat=given)
