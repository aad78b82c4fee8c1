"""Casts by op: torch.autocast's own numbers on one rank, narrow gathers, and the same bits under every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import autocast_models
import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import differing, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import optim, random
from fzero.errors import SpecError
from fzero.interop import from_module
from fzero.ir import fx_nodes
from fzero.precision import PRESETS, Precision

WIDTH, LENGTH, VOCAB, DEPTH = 16, 6, 11, 2
SGD = optim.sgd(0.1)
B16, F32 = torch.bfloat16, torch.float32
CAST = torch.ops.aten._to_copy.default


def params(key: Tensor) -> Any:
    ks = random.split(key, 2 + DEPTH)

    def layer(key: Tensor) -> Any:
        q, k, v, o = (random.normal(each, (WIDTH, WIDTH)) / 4 for each in random.split(key, 4))
        return {"norm": torch.ones(WIDTH), "bias": torch.zeros(WIDTH), "q": q, "k": k, "v": v, "o": o}

    layers = [layer(key) for key in ks[2:]]
    return {
        "tokens": random.normal(ks[0], (VOCAB, WIDTH)),
        "head": random.normal(ks[1], (WIDTH, 1024)),
        "layers": layers,
    }


def block(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    y = F.scaled_dot_product_attention(h @ p["q"], h @ p["k"].t(), F.linear(h, p["v"], p["bias"]), is_causal=True)
    return x + y @ p["o"]


def loss(p: Any, b: dict[str, Tensor], layer: Callable[..., Tensor] = block) -> Tensor:
    x = F.embedding(b["x"], p["tokens"])
    for each in p["layers"]:
        x = layer(x, each)
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), b["y"].flatten())


def batch(rank: int, step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def stock(fn: Callable[..., Tensor], p: Any, b: Any, dtype: torch.dtype = B16) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients by plain PyTorch under torch.autocast."""
    own = fzero.tree.map(lambda x: x.detach().clone().requires_grad_(), p)
    with torch.autocast("cpu", dtype):
        value = fn(own, b)
    return value.detach(), list(torch.autograd.grad(value, fzero.tree.flatten(own)[1]))


def with_checkpoint(p: Any, b: Any) -> Tensor:
    return loss(p, b, lambda x, each: checkpoint(block, x, each, use_reentrant=False))


def with_remat(p: Any, b: Any) -> Tensor:
    return loss(p, b, fzero.remat(block))


def with_transforms(p: Any, b: Any) -> Tensor:
    """Gradients and rows by torch.func, and a part that leaves autocast."""
    x = F.embedding(b["x"], p["tokens"]).mean(1)
    inner = torch.func.grad(lambda w: (torch.tanh(x @ w)).sum())(p["layers"][0]["q"])
    rows = torch.vmap(lambda row: p["layers"][1]["k"] @ row)(x)
    with torch.autocast("cpu", enabled=False):
        wide = x @ p["layers"][1]["v"]
    assert (rows.dtype, wide.dtype) == (B16, F32)
    return (x @ inner).square().mean() + rows.float().square().mean() + wide.square().mean()


@pytest.mark.parametrize("fn", [loss, with_checkpoint, with_remat, with_transforms])
@pytest.mark.sampled(2)
def test_one_ranks_loss_and_gradients_are_torchs_own(fn: Callable[..., Tensor]) -> None:
    """Bit for bit where each parameter is cast once. Casts in a checkpoint's second run are autocast's too."""
    p, b = params(random.key(0)), batch(0, 0)
    used = (
        fzero.tree.flatten(p)[0] if fn is not with_transforms else ["tokens", "layers/0/q", "layers/1/k", "layers/1/v"]
    )
    p = fzero.tree.partition(p, lambda path, leaf: path in used)[0]
    wanted, grads = stock(fn, p, b)
    spec = fzero.Spec(loss=fn, optimizer=optim.sgd(1.0), precision="autocast")
    state = fzero.step(fzero.init(p, spec), b)
    assert float(state.metrics["loss"]) == float(wanted)
    for path, before, after, g in zip(
        *fzero.tree.flatten(p)[:2], fzero.tree.flatten(state.params)[1], grads, strict=True
    ):
        assert torch.equal(before - g, after.full()), path
    value, own = fzero.value_and_grad(fn, precision="autocast")(p, b)
    assert float(value) == float(wanted)
    assert all(torch.equal(a, g) for a, g in zip(fzero.tree.flatten(own)[1], grads, strict=True))
    assert float(fzero.evaluate(fzero.init(p, spec), b, fn)) == float(wanted)


def lowered(zero: int = 3, world: int = 2, **options: Any) -> fzero.Lowered:
    given = {"loss": loss, "optimizer": SGD, "precision": "autocast", **options}
    return kept.lower(fzero.Spec(zero=zero, **given), params, batch(0, 0), world)


def gathered(one: fzero.Lowered) -> dict[str, set[torch.dtype]]:
    """The dtypes in which each leaf travels to ranks that compute with it."""
    found: dict[str, set[torch.dtype]] = {}
    for op in one.program.ops:
        if op.gathers:
            bucket = one.program.buckets[one.program.buffers[op.reads[0].name].bucket or ""]
            for slot in bucket.slots:
                found.setdefault(slot.path, set()).add(one.program.buffers[op.writes[0].name].dtype)
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.sampled(1)
def test_matrices_that_are_only_read_narrow_are_gathered_narrow(zero: int) -> None:
    """`k` is read as a view. The table is looked up in fp32, and norms and biases lie in a bucket of their own."""
    for path, dtypes in gathered(lowered(zero)).items():
        narrow = path == "head" or path.rpartition("/")[2] in "qkvo"
        assert dtypes == {B16 if narrow else F32}, path
    wire = [op for op in lowered(zero).program.ops if op.reduces and not op.row.small]
    assert wire
    assert {lowered(zero).program.buffers[op.writes[0].name].dtype for op in wire} == {F32}


def test_a_value_that_three_products_cast_is_kept_once_for_the_backward() -> None:
    """What a layer norm gives, or the residual stream: its casts for q, k and v are one."""
    kept_casts = [
        [n.args[0] for n in fx_nodes.outputs(one.segments[op.segment].graph) if n.target is CAST]
        for one in [lowered().program]
        for op in one.ops
        if op.in_region
    ]
    assert any(kept_casts)
    assert all(len(sources) == len(set(sources)) for sources in kept_casts)


@pytest.mark.parametrize("how", [{}, {"microbatches": 2, "reduce": "each"}, {"remat": "full"}], ids=str)
@pytest.mark.sampled(1)
def test_stages_have_equal_bits(how: dict[str, Any]) -> None:
    runs = [
        run(fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2), precision="autocast", zero=zero, **how),
            params(random.key(0)), batch, world=2, steps=2)
        for zero in (0, 1, 2, 3)
    ]  # fmt: skip
    assert all(not differing(other.final, runs[0].final) for other in runs[1:])


MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": -1, "tp": 2}, "shard": {"layers/*/[qkv]": fzero.P(None, "tp"), "layers/*/o": fzero.P("tp")}},
    "pp": {"mesh": {"dp": -1, "pp": 2}, "microbatches": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.sampled(1)
def test_meshes_compute_what_one_rank_does(mesh: str) -> None:
    """Losses are as near as bf16 sums in another order are; and no product is wide."""
    options = {"loss": loss, "optimizer": SGD, "precision": "autocast", "zero": 3}
    alone = run(fzero.Spec(**options), params(random.key(0)), batch, world=1, steps=3)
    many = run(fzero.Spec(**options, **MESHES[mesh]), params(random.key(0)), batch, world=2, steps=3)
    assert many.losses() == pytest.approx(alone.losses(), rel=2e-3)
    for role in many.lowered.programs.values():
        products = [n for gm in role.segments.values() for n in gm.graph.nodes if fx_nodes.op_name(n) == "mm"]
        assert products
        assert {n.meta["val"].dtype for n in products} == {B16}


def test_fp16_is_scaled_and_a_step_that_overflows_is_skipped() -> None:
    scaled = replace(PRESETS["autocast_fp16"], loss_scale=fzero.LossScale(initial=2.0**40, hysteresis=1))
    first = params(random.key(0))
    state = fzero.init(first, fzero.Spec(loss=loss, optimizer=SGD, precision=scaled))
    for _ in range(2):
        state = fzero.step(state, batch(0, 0))
    assert int(state.metrics["skipped"]) == 2
    assert torch.equal(state.params["head"].full(), first["head"])
    low = replace(scaled, loss_scale=fzero.LossScale(initial=2.0**8))
    state = fzero.step(fzero.init(first, fzero.Spec(loss=loss, optimizer=SGD, precision=low)), batch(0, 0))
    assert float(state.metrics["loss"]) == float(stock(loss, first, batch(0, 0), torch.float16)[0])
    assert (int(state.metrics["skipped"]), state.params["head"].full().dtype) == (0, F32)


def test_what_autocast_cannot_keep_is_refused() -> None:
    with pytest.raises(SpecError, match=r"compute='autocast', keep=\{'n': 'fp32'\}\): autocast casts by op.*'bf16'"):
        Precision(compute="autocast", keep={"n": "fp32"})
    with pytest.raises(SpecError, match=r"compute='autocst'\): needed one of .*Did you mean 'autocast'"):
        Precision(compute="autocst")
    with pytest.raises(SpecError, match="reduce='autocast'"):
        Precision(reduce="autocast")
    narrow = Precision(compute="autocast")
    assert narrow.compute_dtype("w", F32) is F32
    assert [narrow.gathered_dtype("w", torch.empty(shape, dtype=d)) for shape, d in
            (((2, 2), F32), ((2,), F32), ((2, 2), torch.float64))] == [B16, F32, torch.float64]  # fmt: skip


# --- how far from fp32 ------------------------------------------------------------------------------------------------


def gaps(name: str, steps: int, world: int = 1) -> tuple[float, float]:
    """The mean distances of losses from fp32's: those of torch.autocast, and fzero's."""
    wide = torch.tensor(autocast_models.stock(name, steps, None))
    theirs = torch.tensor(autocast_models.stock(name, steps, B16))
    given, buffers, apply = from_module(autocast_models.model(name))

    def fn(p: Any, b: Any) -> Any:
        value: Tensor = apply.call(p, buffers, lambda module: autocast_models.loss(module, b))
        counted = (b["labels"] != -100).sum()
        return value if world == 1 else fzero.Mean(value.float() * counted, counted)

    spec = fzero.Spec(
        loss=fn, optimizer=optim.adamw(autocast_models.RATE), precision="autocast", zero=3, allow_unused=True
    )
    if world == 1:
        state, ours = fzero.init(given, spec), []
        for step in range(steps):
            state = fzero.step(state, autocast_models.batch(name, step))
            ours.append(float(state.metrics["loss"]))
    else:
        rows = lambda rank, step: fzero.tree.map(lambda x: x.chunk(world)[rank], autocast_models.batch(name, step))  # noqa: E731
        ours = run(spec, given, rows, world=world, steps=steps, poison=False).losses()
    return float((theirs - wide).abs().mean()), float((torch.tensor(ours) - wide).abs().mean())


@pytest.mark.parametrize("name", ["resnet", "llama", "lstm", "bert"])
@pytest.mark.sampled(1)
def test_a_run_is_as_far_from_fp32_as_torchs_autocast(name: str) -> None:
    """All six and 50 steps are in tests/acceptance/test_autocast_full.py."""
    theirs, ours = gaps(name, 8)
    print(f"{name}: torch.autocast {theirs:.1e}, fzero {ours:.1e}")
    assert 0 < ours <= 2 * theirs
