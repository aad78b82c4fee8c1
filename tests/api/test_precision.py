"""Precision policies: how far a narrow run is from fp32, which dtype lies where, and that a stage changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import kept
import numpy as np
import pytest
import torch
from helpers import Run, differing, run
from models import GPT, MLP
from torch import Tensor

import fzero
from fzero import optim, random
from fzero.ir.program import wire_bytes
from fzero.precision import PRESETS, Precision
from text import load, window

SEQUENCE, WIDTH = 24, 32
ADAMW = optim.adamw(1e-2)
NARROW = ["bf16", "fp16", "bf16_params"]
BOUNDS = {"bf16": (0.006, 0.002), "fp16": (0.0006, 0.0002), "bf16_params": (0.01, 0.004)}  # (largest, mean) of a loss


# --- how far from fp32 ------------------------------------------------------------------------------------------------


def tiny(key: Tensor) -> Any:
    """examples/gpt.py with one layer of half the width, its heads 16 wide: the demo's data in a second."""
    k = random.split(key, 7)

    def normal(number: int, *shape: int) -> Tensor:
        return random.normal(k[number], shape) * (0.05 if number < 2 else 0.1)

    block = {
        "norm": torch.ones(WIDTH),
        "qkv": normal(2, 3 * WIDTH, WIDTH),
        "project": normal(3, WIDTH, WIDTH),
        "up": normal(4, 2 * WIDTH, WIDTH),
        "down": normal(5, WIDTH, 2 * WIDTH),
    }
    return {"tokens": normal(0, 256, WIDTH), "positions": normal(1, SEQUENCE, WIDTH), "blocks": [block]}


def tiny_loss(params: Any, batch: Any) -> Tensor:
    norm, linear = torch.nn.functional.layer_norm, torch.nn.functional.linear
    x = torch.nn.functional.embedding(batch["x"], params["tokens"]) + params["positions"]
    for block in params["blocks"]:
        heads = linear(norm(x, (WIDTH,), block["norm"]), block["qkv"]).unflatten(-1, (3, -1, 16))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), block["project"])
        x = x + linear(torch.tanh(linear(x, block["up"])), block["down"])
    logits = linear(x, params["tokens"]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def text_of(world: int, steps: int, sequence: int) -> Callable[[int, int], Any]:
    corpus = load(None, sequence)
    part = 8 // world

    def batch(rank: int, step: int) -> Any:
        starts = np.random.default_rng([0, step]).integers(0, len(corpus.train) - sequence, 8)
        return window(corpus.train, torch.from_numpy(starts)[rank * part : (rank + 1) * part], sequence)

    drawn = [[batch(rank, step) for step in range(steps)] for rank in range(world)]
    return lambda rank, step: drawn[rank][step]


def losses(name: str, steps: int) -> Tensor:
    given: Any = name
    if name == "fp16":  # a scale that needs no search, so that no step is skipped and the runs stay side by side
        given = replace(PRESETS["fp16"], loss_scale=fzero.LossScale(initial=2.0**10))
    spec = fzero.Spec(loss=tiny_loss, optimizer=optim.adamw(3e-3), zero=3, precision=given)
    result = run(spec, tiny(random.key(0)), text_of(2, steps, SEQUENCE), world=2, steps=steps, poison=False)
    return torch.tensor(result.losses(), dtype=torch.float64)


@pytest.fixture(scope="module")
def fp32_losses() -> Tensor:
    return losses("fp32", 40)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.acceptance
def test_losses_track_fp32(name: str, fp32_losses: Tensor) -> None:
    """On the demo's text. All 200 steps are in tests/acceptance/test_precision_full.py."""
    gap = (losses(name, 40) - fp32_losses).abs()
    print(f"{name}: largest {gap.max():.4f}, mean {gap.mean():.4f}; fp32 {fp32_losses[0]:.3f} -> {fp32_losses[-1]:.3f}")
    most, mean = BOUNDS[name]
    assert 0 < float(gap.max()) <= most
    assert float(gap.mean()) <= mean
    assert fp32_losses[-5:].mean() < fp32_losses[0] - 1


# --- a stage changes no bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
@pytest.mark.parametrize("how", [{}, {"microbatches": 2, "reduce": "each"}, {"microbatches": 2, "reduce": "end"}])
@pytest.mark.sampled(1)
def test_stages_have_equal_bits_in_every_precision(name: str, reduce: str, how: dict[str, Any]) -> None:
    found = []
    for zero in (0, 1, 2, 3):
        spec = fzero.Spec(
            loss=MLP.loss,
            optimizer=ADAMW,
            zero=zero,
            precision=replace(PRESETS[name], reduce=reduce),
            **how,
        )
        found.append(run(spec, MLP.init(random.key(0)), MLP.batch, world=2, steps=3))
    for other in found[1:]:
        assert not differing(other.final, found[0].final)
        for mine, theirs in zip(other.metrics, found[0].metrics, strict=True):
            assert not any(differing(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_gradients_travel_in_changes_bits() -> None:
    """Or the test above would not see that `reduce` is obeyed."""
    ends = [
        run(
            fzero.Spec(loss=MLP.loss, optimizer=optim.sgd(0.1), precision=replace(PRESETS["bf16"], reduce=reduce)),
            MLP.init(random.key(0)), MLP.batch, world=2, steps=2,
        ).final
        for reduce in ("bf16", "fp32")
    ]  # fmt: skip
    assert differing(*ends)


# --- which dtype lies where -------------------------------------------------------------------------------------------

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16

# precision: (parameters, moments, gathered, gradient buffers, gradients on the wire)
HELD = {
    "fp32": (F32, F32, F32, F32, F32),
    "bf16": (F32, F32, B16, F32, F32),
    "fp16": (F32, F32, F16, F32, F32),
    "bf16_params": (B16, F32, B16, F32, F32),
    "bf16, reduced in bf16": (F32, F32, B16, B16, B16),
}
POLICIES: dict[str, Any] = {
    **{name: name for name in PRESETS},
    "bf16, reduced in bf16": Precision(compute="bf16", reduce="bf16"),
}


def lowered(precision: Any, zero: int, **options: Any) -> fzero.Lowered:
    spec = fzero.Spec(loss=GPT.loss, optimizer=ADAMW, zero=zero, precision=precision, **options)
    return kept.lower(spec, GPT.init, GPT.batch(0, 0), 4)


def travelled(one: fzero.Lowered, kind: str) -> tuple[set[torch.dtype], int]:
    """The dtypes of what ops that `gathers` or `reduces` (`kind`) move of buckets, and the bytes."""
    ops = [op for op in one.program.ops if getattr(op, kind) and not op.row.small]
    return {one.program.buffers[op.writes[0].name].dtype for op in ops}, sum(wire_bytes(one.program, op) for op in ops)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", HELD)
@pytest.mark.sampled(2)
def test_what_is_held_and_moved_in_which_dtype(name: str, zero: int) -> None:
    params, moments, gathered, grads, wire = HELD[name]
    one = lowered(POLICIES[name], zero)
    dtypes = {leaf.path: leaf.dtype for leaf in one.plan.leaves}
    assert {d for p, d in dtypes.items() if p.startswith("params/")} == {params}
    assert {d for p, d in dtypes.items() if p.startswith(("opt_state/mu", "opt_state/nu"))} == {moments}
    region = [b.dtype for n, b in one.program.buffers.items() if b.kind == "grad" and n.startswith("r0.grad:")]
    assert set(region) == {grads}
    assert travelled(one, "reduces")[0] == {wire}
    if zero == 3:
        assert travelled(one, "gathers")[0] == {gathered}
    elif zero == 0:
        assert travelled(one, "gathers")[0] == set()


@pytest.mark.parametrize(("held", "given"), [("fp64", torch.float32), ("fp32", torch.bfloat16)])
def test_parameters_held_wider_than_they_are_given(held: str, given: torch.dtype) -> None:
    """The bits are those of parameters that were cast by hand. It was a TypeError: nothing is rounded, so nothing is
    drawn, and no key is in the state."""
    wide = {"fp64": torch.float64, "fp32": torch.float32}[held]
    params = {"w": torch.linspace(-1, 1, 12).view(4, 3).to(given), "b": torch.zeros(3, dtype=given)}
    loss = lambda p, x: (x @ p["w"] + p["b"]).square().mean()  # noqa: E731
    batch = lambda rank, step: torch.linspace(0, 1 + rank + step, 8).view(2, 4)  # noqa: E731
    found, by_hand = (
        run(
            fzero.Spec(loss=loss, optimizer=ADAMW, zero=3, precision=Precision(params=name, compute=held)), of, batch,
            world=2, steps=2,
        )
        for name, of in ((held, params), (None, {name: x.to(wide) for name, x in params.items()}))
    )  # fmt: skip
    assert found.final["params/w"].dtype is wide
    assert differing(found.final, by_hand.final) == []


@pytest.mark.acceptance
def test_the_narrow_gather_halves_the_bytes() -> None:
    for zero in (1, 2, 3):
        wide, narrow = (travelled(lowered(name, zero), "gathers")[1] for name in ("fp32", "bf16"))
        assert narrow * 2 == wide, zero
    wide, narrow = (travelled(lowered(POLICIES[name], 3), "reduces")[1] for name in ("bf16", "bf16, reduced in bf16"))
    assert narrow * 2 == wide


def test_keep_rules_compute_and_gather_norms_in_fp32() -> None:
    kept = Precision(compute="bf16", reduce="fp32", keep={"blocks/*/norm/**": "fp32", "norm": "fp32"})
    program = lowered(kept, 3).program
    found = {}
    for op in program.ops:
        if op.gathers:
            bucket = program.buckets[program.buffers[op.reads[0].name].bucket or ""]
            found |= {slot.path: program.buffers[op.writes[0].name].dtype for slot in bucket.slots}
    assert {path for path, dtype in found.items() if dtype == F32} == {
        "norm", *(f"blocks/{i}/norm/{j}" for i in (0, 1) for j in (0, 1)),
    }  # fmt: skip
    assert set(found.values()) == {F32, B16}


def test_what_a_loss_sees() -> None:
    """Parameters and floating arguments narrow, kept ones and integers as they are, with and without cast_batch."""
    seen: dict[str, torch.dtype] = {}

    def loss(params: Any, batch: Any) -> Tensor:
        seen.update({path: x.dtype for path, x in zip(*fzero.tree.flatten([params, batch])[:2], strict=True)})
        return sum(x.float().sum() for x in params.values()) * batch["x"].float().mean()

    params = {"w": torch.ones(3), "norm": torch.ones(3), "frozen": torch.ones(3)}
    batch = {"x": torch.ones(2), "ids": torch.arange(2), "mask": torch.ones(2)}
    for cast in (True, False):
        how = Precision(compute="bf16", keep={"norm": "fp32", "mask": "fp32"}, cast_batch=cast)
        spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), precision=how, trainable=["w", "norm"])
        fzero.lower(spec, params, batch, world_size=2)
        assert seen == {
            "0/w": B16, "0/norm": F32, "0/frozen": B16,
            "1/x": B16 if cast else F32, "1/ids": torch.int64, "1/mask": F32,
        }, cast  # fmt: skip


def test_evaluation_computes_in_the_precision_of_the_spec() -> None:
    state = fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=narrow_loss, optimizer=optim.sgd(0.1), precision="bf16"))
    assert fzero.evaluate(state, torch.ones(3), lambda p, b: p["w"] * b).dtype == B16


def narrow_loss(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum()


# --- sums over microbatches -------------------------------------------------------------------------------------------


def accumulated(precision: Any, world: int, num: int, **options: Any) -> Run:
    """The sum of a gradient of 256 and of 63 of a quarter, over microbatches and ranks; in bf16 the sum stays 256."""
    rows = torch.full((world * num, 1), 0.25)
    rows[0] = 256.0
    spec = fzero.Spec(
        loss=narrow_loss, optimizer=optim.sgd(1.0), precision=precision, microbatches=num, zero=3, **options
    )
    parts = rows.chunk(world)
    return run(spec, {"w": torch.zeros(1)}, lambda rank, step: parts[rank], world=world, steps=1)


@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16, reduced in bf16"])
@pytest.mark.sampled(2)
def test_gradients_of_many_microbatches_are_summed_in_fp32(name: str, reduce: str) -> None:
    how = POLICIES[name]
    if name == "fp16":
        how = replace(PRESETS["fp16"], loss_scale=fzero.LossScale(initial=4.0))
    result = accumulated(how, 1, 64, reduce=reduce)
    assert float(result.final["params/w"]) == -(256 + 63 * 0.25) / 64
    low = torch.tensor(256.0).bfloat16()
    for _ in range(63):
        low = low + torch.tensor(0.25).bfloat16()
    assert float(low) == 256, "a sum in bf16 would have lost them all"


def test_with_a_narrow_wire_only_what_travels_is_rounded() -> None:
    """Two ranks, 32 parts each: a rank's own sum is exact, and rounded once on its way."""
    result = accumulated(POLICIES["bf16, reduced in bf16"], 2, 32, reduce="end")
    own = [torch.tensor(256 + 31 * 0.25), torch.tensor(32 * 0.25)]
    expected = sum(x.bfloat16() for x in own) / 64
    assert float(result.final["params/w"]) == -float(expected)


NARROW_WIRE = Precision(compute="bf16", reduce="bf16")


@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.sampled(1)
def test_a_narrow_wire_shards_what_is_reduced_at_any_number_of_microbatches(
    zero: int, reduce: str, whole: bool
) -> None:
    """The cast after a reduction does not make its result whole, nor do the sums."""
    for num in (1, 2, 4) if whole else (1, 2):
        program = lowered(NARROW_WIRE, zero, microbatches=num, reduce=reduce).program
        kinds = {op.kind for op in program.ops if op.reduces}
        assert kinds == {"reduce_scatter", "all_reduce_small"}, num  # the loss is small
        reduced = [b for name, b in program.buffers.items() if b.kind == "grad" and name.startswith("r0.red:")]
        assert reduced
        assert all(buffer.sharded for buffer in reduced), num


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.sampled(1)
def test_with_a_narrow_wire_many_microbatches_need_little_more_memory_than_one(zero: int) -> None:
    """What they add is the sum, of which a rank holds its slice, and a few buckets in flight: not a whole gradient."""
    made = [
        cases.lowered(8, cases.layers(depth=8), zero=zero, microbatches=num, reduce="each", precision=NARROW_WIRE)
        for num in (1, 4)
    ]
    elements = sum(bucket.length for bucket in made[0].plan.buckets.values())
    more = made[1].memory.peak - made[0].memory.peak
    assert more < 4 * elements // 8 + elements, f"{more} bytes, of {4 * elements} of a whole gradient"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision(params="fp16"), "rounded stochastically, to bf16 only"),
        (lambda: Precision(compute="bf61"), "Did you mean 'bf16'"),
        (lambda: Precision(keep={"**": "half"}), r"Precision\(keep=\{'\*\*': 'half'"),
        (lambda: Precision(keep="norm"), "needed path rules to dtypes"),
        (lambda: Precision(loss_scale=2.0), r"needed an fzero.LossScale"),
        (lambda: fzero.Spec(step=lambda s, b: s, precision="fp16"), "fzero.LossScale with value_and_grad"),
        (lambda: fzero.Spec(loss=narrow_loss, optimizer=optim.sgd(1.0), precision=16), "precision=16"),
        (
            lambda: fzero.Spec(loss=narrow_loss, optimizer=optim.sgd(1.0), precision="fp16", nonfinite="ignore"),
            "with a loss scale, which finds",
        ),
        (lambda: lowered(Precision(compute="bf16", keep={"blocks/*/nrom/**": "fp32"}), 3), "matches no leaf"),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        make()
