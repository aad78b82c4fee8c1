"""fzero.Mean: one mean over the terms of the whole batch, however it is spread over ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import relative, run
from models import generator, normal
from torch import Tensor

import fzero
from fzero import Mean, optim, random
from fzero.precision import PRESETS

ROWS, WIDTH, CLASSES = 16, 6, 5  # of the global batch
ADAMW = optim.adamw(1e-2)
SPREADS = [(world, num) for world in (1, 2, 4) for num in (1, 2, 4)]
PART = [(1, 4), (2, 2), (4, 1), (4, 2)]  # of them, in `make test`


def params() -> Any:
    k = random.split(random.key(3), 2)
    return {"w1": normal(k[0], WIDTH, 9, scale=0.4), "b": torch.zeros(9), "w2": normal(k[1], 9, CLASSES, scale=0.4)}


def whole(step: int, mask: Callable[[Tensor], Tensor]) -> Any:
    """The global batch; `mask` changes a mask (ROWS, 7) of ragged lengths."""
    g = generator(0, step)
    lengths = torch.randint(1, 8, (ROWS,), generator=g)
    return {
        "x": torch.randn(ROWS, 7, WIDTH, generator=g),
        "y": torch.randint(CLASSES, (ROWS, 7), generator=g),
        "mask": mask((torch.arange(7) < lengths[:, None]).float()),
    }


def ragged(mask: Tensor) -> Tensor:
    return mask


def empty_part(mask: Tensor) -> Tensor:
    """Rows 4 to 7, one microbatch of a world of one in four parts (or half of a rank's), have no terms."""
    mask[4:8] = 0
    return mask


def empty_rank(mask: Tensor) -> Tensor:
    """The first half, a rank of two (or two of four), has none."""
    mask[:8] = 0
    return mask


def terms(p: Any, batch: Any) -> Tensor:
    h = torch.tanh(batch["x"] @ p["w1"] + p["b"]) @ p["w2"]
    return F.cross_entropy(h.float().transpose(1, 2), batch["y"], reduction="none")


def exact(p: Any, batch: Any) -> Any:
    return Mean((terms(p, batch) * batch["mask"]).sum(), (batch["mask"] != 0).sum())


def exact_bool(p: Any, batch: Any) -> Any:
    kept = batch["mask"] > 0
    return Mean((terms(p, batch) * kept).sum(), kept.sum(dtype=torch.int32))


def weighted(p: Any, batch: Any) -> Any:
    weights = batch["mask"] * (0.3 + batch["x"][..., 0].square())
    return Mean((terms(p, batch) * weights).sum(), weights.sum())


def plain(p: Any, batch: Any) -> Tensor:
    return (terms(p, batch) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def train(loss: Any, mask: Any, world: int, num: int, steps: int = 10, **options: Any) -> tuple[Tensor, list[float]]:
    """All parameters after the steps, and the losses."""
    batches = [whole(step, mask) for step in range(steps)]

    def part(rank: int, step: int) -> Any:
        return {name: x.chunk(world)[rank].contiguous() for name, x in batches[step].items()}

    given = {"optimizer": ADAMW, "zero": 3, **options}
    spec = fzero.Spec(loss=loss, microbatches=num, **given)
    result = run(spec, params(), part, world=world, steps=steps)
    found = [x.flatten() for path, x in result.final.items() if path.startswith("params/")]
    return torch.cat(found), result.losses()


@pytest.mark.parametrize("loss", [exact, exact_bool, weighted])
@pytest.mark.parametrize("mask", [ragged, empty_part, empty_rank])
@pytest.mark.sampled(1)
def test_the_spread_of_a_batch_does_not_matter(loss: Any, mask: Any, whole: bool) -> None:
    expected, losses = train(loss, mask, 1, 1)
    worst = 0.0
    for world, num in SPREADS[1:] if whole else PART:
        for reduce in ("each", "end") if (world, num) == (2, 2) else ("each",):
            found, own = train(loss, mask, world, num, reduce=reduce)
            worst = max(worst, relative(found, expected))
            assert relative(found, expected) < 1e-6, (world, num)
            assert own == pytest.approx(losses, rel=1e-6), (world, num)
    print(f"{loss.__name__}, {mask.__name__}: largest relative difference {worst:.1e}")
    assert relative(expected, torch.cat([x.flatten() for x in params().values()])) > 1e-2


@pytest.mark.acceptance
def test_a_mean_of_means_is_another_loss() -> None:
    for world, num in ((2, 1), (1, 4), (4, 2)):
        (one, _), (spread, _) = train(plain, ragged, 1, 1), train(plain, ragged, world, num)
        assert relative(spread, one) > 1e-3
    same = relative(train(plain, ragged, 1, 1)[0], train(exact, ragged, 1, 1)[0])
    assert same < 1e-6, "in one part it is the same mean"


def test_it_is_the_gradient_that_torch_computes() -> None:
    own = {name: x.clone().requires_grad_() for name, x in params().items()}
    value = plain(own, whole(0, ragged))
    value.backward()
    found, losses = train(exact, ragged, 4, 2, steps=1, optimizer=optim.sgd(1.0))
    expected = torch.cat([(own[name] - own[name].grad).flatten() for name in sorted(own)])
    assert relative(found, expected.detach()) < 1e-6
    assert losses[0] == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("world", "num"), [(1, 1), (2, 2)])
def test_a_batch_without_terms_has_loss_zero_and_no_gradient(world: int, num: int, precision: str) -> None:
    found, losses = train(exact, torch.zeros_like, world, num, steps=1, optimizer=optim.sgd(1.0), precision=precision)
    assert losses == [0.0]
    assert torch.equal(found, torch.cat([params()[name].flatten() for name in sorted(params())]))


@pytest.mark.acceptance
def test_with_bf16_and_loss_scaling_the_spread_matters_by_their_rounding() -> None:
    scale = fzero.LossScale(initial=2.0**10)
    for name, bound in (("bf16", 2e-2), ("fp16", 3e-3)):
        how = replace(PRESETS[name], loss_scale=scale if name == "fp16" else None)
        expected, _ = train(exact, ragged, 1, 1, optimizer=optim.sgd(0.1), steps=5)
        start = torch.cat([params()[n].flatten() for n in sorted(params())])
        for world, num in ((1, 1), (2, 2), (4, 1)):
            found, losses = train(exact, ragged, world, num, optimizer=optim.sgd(0.1), steps=5, precision=how)
            gap = float((found - expected).norm() / (expected - start).norm())
            print(f"{name} {world}x{num}: {gap:.1e}")
            assert gap < bound
            assert len(losses) == 5


def test_aux_beside_a_mean() -> None:
    """aux is this rank's; its means over parts are plain ones, and integers the last part's."""
    tx = optim.sgd(0.5)

    def with_aux(p: Any, batch: Any) -> Any:
        return exact(p, batch), {"mean": batch["x"].mean(), "terms": batch["mask"].sum().to(torch.int64)}

    def step(state: Any, batch: Any) -> Any:
        (value, aux), grads = fzero.value_and_grad(with_aux, has_aux=True)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        metrics = {"loss": value, "all": fzero.pmean(aux["mean"]), "last": aux["terms"]}
        return {"params": optim.apply_updates(state["params"], updates), "opt": opt}, metrics

    batch = whole(0, ragged)
    state = {"params": params(), "opt": tx.init(params())}
    result = run(
        fzero.Spec(step=step, microbatches=2, zero=3), state,
        lambda rank, step: {name: x.chunk(2)[rank].contiguous() for name, x in batch.items()}, world=2, steps=1,
    )  # fmt: skip
    expected, losses = train(exact, ragged, 1, 1, steps=1, optimizer=tx)
    found = torch.cat([x.flatten() for path, x in result.final.items() if path.startswith("params/")])
    assert relative(found, expected) < 1e-6
    assert result.losses() == pytest.approx(losses, rel=1e-6)
    assert result.losses("all")[0] == pytest.approx(float(batch["x"].mean()), abs=1e-6)
    assert [int(one["last"]) for one in result.metrics[0]] == [int(batch["mask"][i : i + 4].sum()) for i in (4, 12)]


def test_clipping_sees_the_gradient_of_the_quotient() -> None:
    norms = []
    for world, num in ((1, 1), (2, 2)):
        batch = whole(0, ragged)
        spec = fzero.Spec(loss=exact, optimizer=optim.sgd(1.0), microbatches=num, clip_norm=0.01)
        result = run(
            spec, params(), lambda r, s, w=world, b=batch: {n: x.chunk(w)[r].contiguous() for n, x in b.items()},
            world=world, steps=1,
        )  # fmt: skip
        norms.append(result.losses("grad_norm")[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 0.1


X = torch.ones(4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: Mean((p["w"] * b).sum(), p["w"].sum()), "depends on the parameters.*detach"),
        (lambda p, b: Mean(p["w"] * b, b.sum()), r"Mean\(total=.*f32\[4\].*0-d tensor, a \.sum\(\)"),
        (lambda p, b: Mean((p["w"] * b).sum(), b), r"Mean\(count=.*f32\[4\]: needed a number, or a 0-d tensor"),
        (lambda p, b: Mean((p["w"] * b).sum(), "4"), r"Mean\(count=.*needed a number, or a 0-d tensor"),
        (lambda p, b: Mean((p["w"] * b).sum().long(), b.sum()), r"Mean\(total=.*needed a floating 0-d tensor"),
        (lambda p, b: ((p["w"] * b).sum(), b.sum()), r"returned a tuple.*fzero\.Mean\(total, count\)"),
    ],
)
def test_refusals(loss: Any, message: str) -> None:
    with pytest.raises(fzero.CaptureError, match=message):
        fzero.lower(fzero.Spec(loss=loss, optimizer=optim.sgd(0.1)), {"w": torch.ones(4)}, X, world_size=2)
    with pytest.raises(fzero.CaptureError, match=message):
        fzero.value_and_grad(loss)({"w": torch.ones(4)}, X)


def test_a_count_in_16_bits_is_refused() -> None:
    def loss(p: Any, batch: Any) -> Any:
        mask = batch["mask"].to(torch.bfloat16)  # as a floating mask of the batch is, under precision="bf16"
        return fzero.Mean((p["w"] * mask.float()).sum(), mask.sum())

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match=r"bf16\[\], which cannot tell 257 from 256.*mask\.float\(\)\.sum\(\)"):
        fzero.lower(spec, {"w": torch.ones(3)}, {"mask": torch.ones(3)}, world_size=2)


def test_a_count_may_be_a_number() -> None:
    """The mean over a batch of known length, with the bits of a tensor for the count, for each batch length."""
    for length in (4, 6):
        x = torch.arange(length, dtype=torch.float32)
        by_number = fzero.value_and_grad(lambda p, b: Mean((p["w"] * b).sum(), len(b)))({"w": torch.ones(())}, x)
        by_tensor = fzero.value_and_grad(lambda p, b: Mean((p["w"] * b).sum(), torch.full((), len(b))))(
            {"w": torch.ones(())}, x
        )
        assert torch.equal(by_number[0], by_tensor[0])
        assert torch.equal(by_number[1]["w"], by_tensor[1]["w"])


def test_a_count_that_is_a_float_has_the_bits_of_the_total() -> None:
    """Of a float64 total it was a float32: the loss and its gradients were off by 1e-8."""
    params, x = {"w": torch.ones(3, dtype=torch.float64)}, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    value, grads = fzero.value_and_grad(lambda p, b: Mean((p["w"] * b).sum(), 0.1))(params, x)
    assert float(value) == 7.0 / 0.1
    assert torch.equal(grads["w"], x / 0.1)


def _correct(p: Any, b: Any) -> Mean:
    return Mean((b["x"] * p["w"] > 0).sum(), len(b["x"]))


def test_a_metric_may_count_integers() -> None:
    """An accuracy as users write it, in an evaluation and among a loss's metrics: the quotient of exact counts."""

    def loss(p: Any, b: Any) -> Any:
        return (p["w"] * b["x"]).square().mean(), {"accuracy": _correct(p, b)}

    batch = {"x": torch.tensor([1.0, -1.0, 2.0, 3.0])}
    state = fzero.init({"w": torch.ones(())}, fzero.Spec(loss=loss, optimizer=optim.sgd(0.0), microbatches=2))
    assert float(fzero.evaluate(state, batch, _correct)) == 0.75
    state = fzero.step(state, batch)
    assert float(state.metrics["accuracy"]) == 0.75
