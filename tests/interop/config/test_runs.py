"""The files train: on two ranks of this process, and two of them on real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, run, values

import fzero
from fzero import optim
from fzero.interop import Given, accelerate_config, ds_config
from fzero.interop.config.read import read

FILES = Path(__file__).parent / "files"
AUTO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-2,
    "scheduler.params.warmup_num_steps": 5,
}
NEEDED = {
    "adam_zero1": [],
    "zero2_auto": ["optimizer.params.lr", "scheduler.params.warmup_num_steps"],
    "zero2_cpu": [],
    "adamw_zero2_cpu": ["train_micro_batch_size_per_gpu"],
    "adamw_zero3_cpu": ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"],
    "adamw_zero3_constant": ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"],
    "zero3_cpu": ["train_micro_batch_size_per_gpu"],
    "breakdown": ["train_micro_batch_size_per_gpu"],
}


def given_of(name: str) -> Given:
    """What a file gives on two ranks, as it stands."""
    return ds_config(FILES / f"{name}.json", world_size=2, auto={path: AUTO[path] for path in NEEDED[name]})


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()


def params() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"w": torch.randn(6, 33), "v": torch.randn(33, 5)}


def batch(rank: int, step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def spec_of(given: Given) -> fzero.Spec:
    fields = dict(given) if "optimizer" in given else {**given, "optimizer": optim.adamw(1e-2)}
    return fzero.Spec(loss=loss, **fields)


@pytest.mark.parametrize("name", NEEDED)
def test_each_file_trains(name: str) -> None:
    given = given_of(name)
    rows = given.rank_batch or 0
    result = run(spec_of(given), params(), lambda rank, step: batch(rank, step, rows), world=2, steps=2)
    assert len(result.losses()) == 2
    assert all(torch.isfinite(leaf).all() for leaf in result.leaves[-1])
    if "fp16" in read(FILES / f"{name}.json")[1]:
        assert result.metrics[0][0]["loss_scale"] == 2.0**16


def trained(kind: str) -> list[float]:
    if kind == "yaml":
        given = accelerate_config(FILES / "fsdp.yaml")
        rows = 4
    else:
        given = ds_config(FILES / "adam_zero1.json")
        rows = given.rank_batch or 0
    state = fzero.init(params(), spec_of(given))
    losses = []
    for step in range(2):
        state = fzero.step(state, batch(int(os.environ["RANK"]), step, rows))
        losses.append(float(state.metrics["loss"]))
    return losses


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_files_as_they_stand_train_on_real_ranks(kind: str) -> None:
    if kind == "yaml":
        pytest.importorskip("yaml")
        spec, rows = spec_of(accelerate_config(FILES / "fsdp.yaml")), 4
    else:
        given = ds_config(FILES / "adam_zero1.json", world_size=2)
        spec, rows = spec_of(given), given.rank_batch or 0
    found = values(gloo(2, trained, kind))
    expected = run(spec, params(), lambda rank, step: batch(rank, step, rows), world=2, steps=2).losses()
    assert found == [expected, expected]
