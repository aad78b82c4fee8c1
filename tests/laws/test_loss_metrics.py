"""Metrics that a loss returns: means over microbatches and ranks, everywhere that a loss is computed."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from helpers import gloo, run, values
from torch import Tensor

import fzero
from fzero import optim, random
from fzero.errors import CaptureError

WIDTH, ROWS = 8, 8
SGD = optim.sgd(0.05)


def params(key: Tensor) -> Any:
    return {"layers": [{"w": random.normal(k, (WIDTH, WIDTH)) / 3} for k in random.split(key, 4)]}


def loss(p: Any, b: dict[str, Tensor]) -> Any:
    """The first layer's size, an error, and what a mean over parts of unlike counts would get wrong."""
    x, metrics = b["x"], {}
    for number, layer in enumerate(p["layers"]):
        x = torch.tanh(x @ layer["w"])
        if number == 0:
            metrics["first"] = x.square().mean()
    error = (x - b["y"]).abs()
    kept = b["kept"][:, None].expand_as(error)
    metrics |= {
        "error": error.mean(),
        "by_column": error.mean(0),
        "masked": fzero.Mean((error * kept).sum(), kept.sum()),
        "rows": b["kept"].sum(),
    }
    return (x - b["y"]).square().mean(), metrics


def whole(step: int) -> dict[str, Tensor]:
    key = random.fold_in(random.key(3), step)
    x = random.normal(key, (ROWS, WIDTH))
    return {"x": x, "y": x.flip(1).tanh(), "kept": (torch.arange(ROWS) + step) % 5 < 2}


def parts(world: int) -> Any:
    def batch(rank: int, step: int) -> dict[str, Tensor]:
        return {name: leaf.chunk(world)[rank] for name, leaf in whole(step).items()}

    return batch


def wanted(p: Any, step: int, num_parts: int) -> dict[str, Tensor]:
    """The metrics of the whole batch in plain PyTorch; `rows` is counted by part."""
    value, found = loss(p, whole(step))
    masked = found.pop("masked")
    return {"loss": value, **found, "masked": masked.total / masked.count, "rows": found["rows"] / num_parts}


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # (ranks, parts of the batch in all, options)
    "one rank": (1, 1, {}),
    "microbatches": (1, 2, {"microbatches": 2}),
    "two ranks": (2, 4, {"microbatches": 2, "zero": 3, "reduce": "each"}),
    "a pipeline": (2, 2, {"microbatches": 2, "mesh": {"dp": -1, "pp": 2}}),
    "a pipeline of replicas": (4, 4, {"microbatches": 2, "mesh": {"dp": -1, "pp": 2}, "zero": 2, "clip_norm": 1.0}),
    "tensor parallel": (2, 1, {"mesh": {"dp": -1, "tp": 2}, "shard": {"layers/*/w": fzero.P(None, "tp")}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_metrics_are_means_over_the_whole_batch(case: str) -> None:
    world, num_parts, options = CASES[case]
    spec = fzero.Spec(loss=loss, optimizer=SGD, **options)
    mesh = dict(options.get("mesh", {}))
    data_ranks = world // (mesh.get("pp", 1) * mesh.get("tp", 1))
    result = run(spec, params(random.key(0)), parts(data_ranks), world=world, steps=2, every_step=True)
    p = params(random.key(0))
    for step, by_rank in enumerate(result.metrics):
        expected = wanted(p, step, num_parts)
        for metrics in by_rank:
            assert {*expected} <= {*metrics}
            for name, value in expected.items():
                torch.testing.assert_close(metrics[name], value.detach().float(), rtol=1e-5, atol=1e-6, msg=name)
        leaves = dict(zip(result.paths, result.leaves[step], strict=True))
        p = {"layers": [{"w": leaves[f"params/layers/{i}/w"]} for i in range(4)]}


def test_metrics_change_no_bit_of_the_step() -> None:
    alone = lambda p, b: loss(p, b)[0]  # noqa: E731
    ends = [
        run(
            fzero.Spec(loss=fn, optimizer=SGD, zero=3, microbatches=2),
            params(random.key(0)),
            parts(2),
            world=2,
            steps=2,
        )
        for fn in (loss, alone)
    ]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].leaves[-1], ends[1].leaves[-1], strict=True))
    assert ends[0].losses() == ends[1].losses()


def on_rank() -> Any:
    rank = int(os.environ["RANK"])
    spec = fzero.Spec(loss=loss, optimizer=SGD, trainable=("layers/1/**",))
    state = fzero.init(params, spec, key=random.key(0))
    value, metrics = fzero.evaluate(state, parts(2)(rank, 0), loss)
    state = fzero.step(state, parts(2)(rank, 0))
    found = {name: float(x) for name, x in state.metrics.items() if x.ndim == 0}
    evaluated = {"loss": float(value), **{name: float(metrics[name]) for name in ("first", "error", "masked")}}
    return found, evaluated


@pytest.mark.sampled(1)
def test_processes_and_an_evaluation_of_the_loss_agree() -> None:
    expected = wanted(params(random.key(0)), 0, 2)
    for found, evaluated in values(gloo(2, on_rank)):
        for name in found:
            assert found[name] == pytest.approx(float(expected[name]), rel=1e-5), name
        assert evaluated == pytest.approx({name: found[name] for name in evaluated}, rel=1e-6)


def in_a_pipeline() -> Any:
    """Of two stages: what a step and an evaluation find. At the top for `gloo`."""
    spec = fzero.Spec(loss=loss, optimizer=SGD, mesh={"pp": 2}, microbatches=2)
    state = fzero.init(params(random.key(0)), spec, key=random.key(0))
    value, metrics = fzero.evaluate(state, whole(0), loss)
    state = fzero.step(state, whole(0))
    names = ("first", "error", "by_column", "masked")
    evaluated = {"loss": value, **{name: metrics[name] for name in names}}
    return [{name: torch.as_tensor(found[name]).tolist() for name in evaluated} for found in (state.metrics, evaluated)]


@pytest.mark.sampled(1)
def test_an_evaluation_in_a_pipeline_finds_what_its_step_finds() -> None:
    expected = wanted(params(random.key(0)), 0, 2)
    for found, evaluated in values(gloo(2, in_a_pipeline)):
        for name in evaluated:
            assert found[name] == pytest.approx(expected[name].tolist(), rel=1e-5), name
            assert evaluated[name] == pytest.approx(found[name], rel=1e-5), name


def test_narrow_metrics_are_summed_in_fp32_and_get_no_gradient() -> None:
    def narrow(p: Any, b: Tensor) -> Any:
        y = b @ p["w"]
        return y.float().square().mean(), {"high": (y * 0 + 257).mean(), "weight": p["w"].mean() * 1e6}

    spec = fzero.Spec(loss=narrow, optimizer=optim.sgd(1.0), precision="bf16", microbatches=2)
    state = fzero.step(fzero.init({"w": torch.zeros(4)}, spec), torch.ones(4, 4))
    assert state.metrics["high"].dtype is torch.float32
    assert state.params["w"].full().tolist() == [0.0] * 4, "a metric has no gradient"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (lambda p, b: {"loss": b.mean()}, r"metric 'loss' of .*the step has a metric of that name.*Give it another"),
        (lambda p, b: {"updated": b.mean()}, r"metric 'updated' of .*new values of frozen leaves.*Give it another"),
        (lambda p, b: {"lr": 0.1}, r"metric 'lr' of .* is the Python value 0.1: it would stay what it was"),
        (lambda p, b: {"c": b.sum().to(torch.complex64)}, r"metric 'c' of .*needed a real tensor"),
        (lambda p, b: {"m": fzero.Mean(b, b.sum())}, r"Mean\(total=...\) of .*needed a floating 0-d tensor"),
        (lambda p, b: b.sum(), r"returned a tuple.*\(loss, \{'name': tensor\}\).*fzero\.Mean\(total, count\)"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: Any, said: str) -> None:
    def bad(p: Any, b: Tensor) -> Any:
        return (p["w"] * b).sum(), metrics(p, b)

    with pytest.raises(CaptureError, match=re.compile(said, re.S)):
        fzero.step(fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=bad, optimizer=SGD)), torch.ones(3))
