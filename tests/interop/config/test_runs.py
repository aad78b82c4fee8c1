"""The files train: on two ranks of this process, and two of them on real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate_files
import configurations
import pytest
import torch
from helpers import gloo, run, values

import fzero
from fzero import optim
from fzero.interop import Given, accelerate_config, ds_config
from fzero.interop.config.accelerate import is_accelerate
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
@pytest.mark.sampled(2)
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


# --- configurations written anew from the documentations of DeepSpeed, Accelerate, LLaMA-Factory and axolotl


CASES = {**configurations.DEEPSPEED, **configurations.OTHERS, **accelerate_files.ACCELERATE}


def given_by(case: configurations.Case) -> Given:
    if is_accelerate(case.document):
        return accelerate_config(case.document, auto=case.auto)
    return ds_config(case.document, world_size=case.ranks, auto=case.auto)


@pytest.mark.parametrize("name", CASES)
def test_a_document_gives_the_fields_that_it_means(name: str) -> None:
    case = CASES[name]
    given = given_by(case)
    found = {field: given.get(field) for field in case.fields}
    if "precision" in found:
        found["precision"] = given["precision"].compute
    assert found == case.fields


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_a_document_trains(name: str) -> None:
    """On its ranks, in this process; with the losses of plain data parallelism where nothing is rounded."""
    given = given_by(CASES[name])
    rows = given.rank_batch or 4
    fields = {field: value for field, value in given.items() if field != "device"}
    plain = {**fields, "zero": 0} | dict.fromkeys(("mesh", "offload", "remat", "compile", "prefetch_bytes"))
    plain = {field: value for field, value in plain.items() if value is not None}
    start = {name: leaf / 4 for name, leaf in params().items()}  # so that fp16 holds gradients times 2**16
    runs = [
        run(
            fzero.Spec(loss=loss, **{"optimizer": optim.adamw(1e-2), **own}),
            start,
            lambda rank, step: batch(rank, step, rows),
            world=given.ranks,
            steps=3,
        )
        for own in (fields, plain)
    ]
    losses, wanted = (result.losses() for result in runs)
    assert losses == pytest.approx(wanted, rel=1e-6 if "precision" not in given else 2e-2)
    assert len({round(loss, 6) for loss in losses}) == 3
    moved = [not torch.equal(runs[0].final[f"params/{leaf}"], value) for leaf, value in start.items()]
    assert all(moved)
