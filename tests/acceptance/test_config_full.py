"""Configuration files beside DeepSpeed's own engine: the same losses for 20 steps, under every stage, in fp32."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import configurations
import pytest
from helpers import run
from workers import deepspeed_losses as worker

import fzero
from fzero import optim
from fzero.interop import ds_config, from_module
from fzero.interop.config import deepspeed, deepspeed_optimizers
from fzero.interop.config.read import read

ROOT = Path(__file__).parents[1]
FILES = ROOT / "interop" / "config" / "files"
WORKER = ROOT / "support" / "workers" / "deepspeed_losses.py"

pytestmark = pytest.mark.acceptance

NAMES = [
    "adam_zero1",
    "zero2_auto",
    "zero2_cpu",
    "adamw_zero2_cpu",
    "adamw_zero3_cpu",
    "adamw_zero3_constant",
    "zero3_cpu",
]
FILL = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer.params.lr": 1e-2,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 7,
}


def fp32(document: dict[str, Any], stage: int | None = None, fill: Mapping[str, Any] = FILL) -> dict[str, Any]:
    """A document in fp32, on the device, at a stage; with values where it says auto or nothing."""
    document = copy.deepcopy(document)
    for block in ("fp16", "bf16", "torch_autocast", "compile", "data_types", "_comment"):
        document.pop(block, None)
    old = document.get("zero_optimization", {})
    zero = document["zero_optimization"] = {"stage": int(old)} if isinstance(old, bool) else old
    for block in ("offload_optimizer", "offload_param", "cpu_offload"):
        zero.pop(block, None)
    if stage is not None:
        zero["stage"] = stage
    for key in [key for key, value in zero.items() if value == "auto"]:
        zero.pop(key)
    if document.get("train_batch_size") in ("auto", None):
        document.pop("train_batch_size", None)
        if document.get("train_micro_batch_size_per_gpu") in ("auto", None):
            document["train_micro_batch_size_per_gpu"] = FILL["train_micro_batch_size_per_gpu"]
    for path, value in {**FILL, **fill}.items():
        *above, last = path.split(".")
        inner = document
        for part in above:
            inner = inner.get(part, {})
        if inner.get(last) == "auto":
            inner[last] = value
    params = document.get("optimizer", {}).get("params", {})
    if params.get("lr", 1) < 1e-3:
        params["lr"] = 1e-2  # so that 20 steps tell rules apart
    if document.get("scheduler", {}).get("params", {}).get("warmup_num_steps", 0) > 100:
        document["scheduler"]["params"] |= {"warmup_max_lr": 1e-2, "warmup_num_steps": 7}
    return document


def more(stage: int) -> dict[str, dict[str, Any]]:
    """Documents for rules that the files do not have."""
    base = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    adam = {"type": "Adam", "params": {"lr": 2e-2}}
    linear = {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 6, "warmup_type": "linear"}
    cosine = {"total_num_steps": 15, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 5, "cycle_second_step_size": 7}
    stairs = {**cycle, "cycle_first_stair_count": 2, "decay_step_size": 3, "decay_lr_rate": 0.5, "cycle_max_mom": 0.95}
    growth = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    delta = {"type": "Adadelta", "params": {"rho": 0.8, "eps": 1e-5, "weight_decay": 0.01}}
    l2 = {"type": "Adam", "params": {"lr": 2e-2, "adam_w_mode": False, "weight_decay": 0.3}}
    torchs = {"type": "AdamW", "params": {"lr": 2e-2, "torch_adam": True}}
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.8}}
    return {
        "linear": {**base, "optimizer": adam, "scheduler": {"type": "WarmupLR", "params": linear}},
        "decay": {
            **base,
            "optimizer": adam,
            "scheduler": {"type": "WarmupDecayLR", "params": {**linear, "total_num_steps": 15}},
        },
        "cosine": {**base, "optimizer": adam, "scheduler": {"type": "WarmupCosineLR", "params": cosine}},
        "l2": {**base, "optimizer": l2, "gradient_clipping": 0},
        "torch": {**base, "optimizer": torchs, "gradient_clipping": 0.3},
        "sgd": {**base, "optimizer": sgd, "gradient_clipping": 0.0},
        "clipped": {**base, "optimizer": sgd},
        "one_cycle": {**base, "optimizer": adam, "scheduler": {"type": "OneCycle", "params": cycle}},
        "one_cycle_stairs": {**base, "optimizer": l2, "scheduler": {"type": "OneCycle", "params": stairs}},
        "range_test": {**base, "optimizer": sgd, "scheduler": {"type": "LRRangeTest", "params": growth}},
        "adadelta": {**base, "optimizer": delta},
    }


# what DeepSpeed cannot do on two ranks of a processor, or asks another package for
ELSEWHERE = {"ds_hpz", "ds_mics", "ds_muon", "ds_lion", "ds_monitors", "factory_autotp"}
WRITTEN = {
    name: fp32(case.document, fill=case.auto)
    for name, case in {**configurations.DEEPSPEED, **configurations.OTHERS}.items()
    if name not in ELSEWHERE
}


def documents(stage: int) -> dict[str, dict[str, Any]]:
    return {**{name: fp32(read(FILES / f"{name}.json")[1], stage) for name in NAMES}, **more(stage)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[float]]:
    """The losses of DeepSpeed's engine on two ranks, by name and stage."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    cases = {(name, stage): document for stage in range(4) for name, document in documents(stage).items()}
    cases |= {(name, -1): document for name, document in WRITTEN.items()}
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(folder)], env=env, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return dict(zip(cases, json.loads((folder / "losses.json").read_text()), strict=True))


def ours(document: dict[str, Any]) -> Any:
    given = ds_config(document, world_size=2)
    params, buffers, apply = from_module(worker.net())
    fields = dict(given) if "optimizer" in given else {**given, "optimizer": optim.adamw(1e-2)}
    spec = fzero.Spec(loss=lambda p, ids: apply(p, buffers, ids), **fields)
    return run(spec, params, lambda rank, step: worker.batch(rank, step, given.rank_batch), world=2, steps=worker.STEPS)


@pytest.mark.parametrize("name", [*NAMES, *more(0)])
def test_losses_are_those_of_deepspeeds_engine(name: str, theirs: dict[tuple[str, int], list[float]]) -> None:
    for stage in range(4):
        losses, wanted = ours(documents(stage)[name]).losses(), theirs[name, stage]
        difference = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        assert difference <= 1e-5, f"stage {stage}: {losses}, but DeepSpeed has {wanted}"
        assert abs(wanted[0] - wanted[-1]) > 0.02, "the parameters move, so rules show"


@pytest.mark.parametrize("name", WRITTEN)
def test_what_documentations_describe_has_deepspeeds_losses(
    name: str, theirs: dict[tuple[str, int], list[float]]
) -> None:
    losses, wanted = ours(WRITTEN[name]).losses(), theirs[name, -1]
    difference = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    assert difference <= 1e-5, f"{losses}, but DeepSpeed has {wanted}"
    assert abs(wanted[0] - wanted[-1]) > 0.02, "the parameters move, so rules show"


def _decayed(decoupled: bool, decay: dict[str, float]) -> deepspeed_optimizers.OptimizerRow:
    return deepspeed_optimizers.OptimizerRow(
        lambda values, rate: deepspeed_optimizers._adam({**decay, **values}, rate, decoupled),
        deepspeed_optimizers.OPTIMIZERS["Adam"].names,
    )


BROKEN: dict[str, tuple[str, Any]] = {  # a document that shows it, and the fault
    "Adam is L2": ("adam_zero1", lambda m: m.setitem(deepspeed_optimizers.OPTIMIZERS, "Adam", _decayed(False, {}))),
    "decay is 0.01": (
        "linear",
        lambda m: m.setitem(deepspeed_optimizers.OPTIMIZERS, "Adam", _decayed(True, {"weight_decay": 0.01})),
    ),
    "nothing is clipped": ("clipped", lambda m: m.setattr(deepspeed, "_clipping", _taken)),
    "the schedule is not behind": (
        "linear",
        lambda m: m.setattr(deepspeed_optimizers, "_behind", lambda schedule: schedule),
    ),
    "the warm-up is linear": ("adamw_zero2_cpu", lambda m: m.setattr(deepspeed_optimizers, "_warmup", _linear)),
}


def _taken(ledger: Any, local: bool) -> dict[str, Any]:
    for path in ("gradient_clipping", "zero_optimization.compute_grad_norm"):
        ledger.take(path)
    return {}


def _linear(values: Any, low: float, peak: float) -> Any:
    steps = max(2, values.get("warmup_num_steps", 1000))
    return deepspeed_optimizers.ConfigCall("fzero.optim.warmup", (low, peak, steps), {"kind": "linear"}), steps


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_that_is_broken_shows(rule: str, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = BROKEN[rule]
    broken(monkeypatch)
    losses, wanted = ours(documents(2)[name]).losses(), theirs[name, 2]
    difference = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    assert difference > 5e-5, f"{rule} is not seen: {difference}"
