"""What a ds_config means, key by key: DeepSpeed's rules, each of which a naive translation gets wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import ConfigError, SpecError
from fzero.interop import ds_config
from fzero.interop.config.deepspeed_keys import DEEPSPEED

FILES = Path(__file__).parent / "files"
ROWS = {"train_micro_batch_size_per_gpu": 2}


def fields(document: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The Python of each field, as text."""
    given = ds_config({**ROWS, **document}, **how)
    return dict(line.strip().rstrip(",").split("=", 1) for line in given.python().splitlines()[3:-1])


def refused(document: dict[str, Any], **how: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        ds_config(document, **how)
    return [path for path, _ in error.value.refusals]


def rates(expression: str, steps: int) -> list[float]:
    schedule = eval(expression, {"fzero": fzero})
    return [float(schedule(torch.tensor(c))) for c in range(steps)]


# --- the batch


@pytest.mark.parametrize(
    ("keys", "world", "micro", "steps"),
    [
        ({"train_batch_size": 16}, 2, 8, 1),
        ({"train_micro_batch_size_per_gpu": 4}, 2, 4, 1),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, 2, 2, 4),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 2, 2, 4),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, 2, 4),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 3, 2, 4),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, 3, 2, 4),
        ({"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}, 4, 8, 1),
        ({"train_batch_size": 16, "pipeline": {"stages": 2}, "gradient_accumulation_steps": 4}, 4, 2, 4),
    ],
)
def test_two_batch_keys_or_one_give_the_others(keys: dict[str, Any], world: int, micro: int, steps: int) -> None:
    given = ds_config(keys, world_size=world)
    assert (given.micro_batch, given["microbatches"], given.rank_batch) == (micro, steps, micro * steps)
    replicas = world // math.prod((given.get("mesh") or {}).get(axis, 1) for axis in ("pp", "tp"))
    assert given.global_batch == micro * steps * replicas


def test_batch_keys_that_disagree_or_are_missing() -> None:
    assert refused({}) == ["train_micro_batch_size_per_gpu"]
    assert refused({"gradient_accumulation_steps": 4}) == ["train_micro_batch_size_per_gpu"]
    assert refused({**ROWS, "gradient_accumulation_steps": "auto"}) == ["gradient_accumulation_steps"]
    with pytest.raises(ConfigError, match=r"16 rows are not 4 x 4 accumulated x 2 ranks .* Write 32, or take it out"):
        ds_config(
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            world_size=2,
        )
    assert refused({"train_batch_size": 7}, world_size=2) == ["train_batch_size"]
    assert refused({"train_batch_size": 1}, world_size=2) == ["train_batch_size"]
    with pytest.raises(SpecError, match="world_size=0: needed the number of ranks"):
        ds_config(ROWS, world_size=0)


def test_the_world_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ds_config({"train_batch_size": 16}).micro_batch == 4
    assert ds_config({"train_batch_size": 16}, world_size=2).micro_batch == 8


# --- optimizers


def adam(kind: str = "Adam", **params: Any) -> str:
    return fields({"optimizer": {"type": kind, "params": params}})["optimizer"]


def test_adam_is_adamw_unless_it_says_otherwise() -> None:
    assert adam(lr=1e-4) == "fzero.optim.adamw(0.0001, weight_decay=0.0)"
    assert adam(lr=1e-4, adam_w_mode=False) == "fzero.optim.adam(0.0001, weight_decay=0.0)"
    assert adam("AdamW", adam_w_mode=False).startswith("fzero.optim.adamw("), "the name decides"
    assert adam("adamw") == adam("ADAM") == adam() == "fzero.optim.adamw(0.001, weight_decay=0.0)"


def test_an_absent_weight_decay_is_zero_but_for_torchs_adamw() -> None:
    assert adam(weight_decay=0.1).endswith("weight_decay=0.1)")
    assert adam(torch_adam=True).endswith("weight_decay=0.01)")
    assert adam(torch_adam=True, adam_w_mode=False).endswith("weight_decay=0.0)")


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        (
            "AdamW",
            {"betas": [0.8, 0.999], "eps": 1e-6},
            "adamw(0.001, betas=(0.8, 0.999), eps=1e-06, weight_decay=0.0)",
        ),
        ("Lion", {}, "lion(0.001, betas=(0.9, 0.999))"),
        ("Adagrad", {"initial_accumulator_value": 0.1}, "adagrad(0.01, initial=0.1)"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "sgd(0.1, momentum=0.9, nesterov=True)"),
        ("RMSprop", {"alpha": 0.9, "centered": True}, "rmsprop(0.01, alpha=0.9, centered=True)"),
        ("Adadelta", {"rho": 0.8}, "adadelta(1.0, rho=0.8)"),
        ("NAdam", {"momentum_decay": 0.1}, "nadam(0.002, momentum_decay=0.1)"),
        ("RAdam", {"decoupled_weight_decay": True}, "radam(0.001, decoupled_weight_decay=True)"),
        (
            "Muon",
            {"lr": 0.1, "adam_lr": 0.2, "momentum": 0.8},
            "muon(0.1, momentum=0.8, weight_decay=0.0, mask=fzero.optim.hidden_matrices, "
            "others=fzero.optim.adamw(0.2, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0))",
        ),
    ],
)
def test_other_optimizers(kind: str, params: dict[str, Any], text: str) -> None:
    assert adam(kind, **params) == f"fzero.optim.{text}"
    assert isinstance(ds_config({**ROWS, "optimizer": {"type": kind, "params": params}})["optimizer"], tuple)


def test_onebit_adam_maps_again_with_a_note() -> None:
    """Its phases are the optimizer's; DeepSpeed's has no bias correction, whatever it is told."""
    params = {"lr": 0.1, "freeze_step": 400, "weight_decay": 0.01, "cuda_aware": False, "comm_backend_name": "nccl"}
    text = adam("OneBitAdam", **params)
    assert text == "fzero.optim.onebit_adam(0.1, 400, weight_decay=0.01, bias_correction=False)"
    assert adam("onebitadam", lr=0.1, bias_correction=True).startswith("fzero.optim.onebit_adam(0.1, 100000, ")
    given = ds_config({**ROWS, "optimizer": {"type": "OneBitAdam", "params": params}})
    assert given["optimizer"].at(399) == "warmup"
    assert given["optimizer"].at(400) == "coded"
    assert "each 64 elements have a scale of their own" in str(given)
    assert "clip_norm" not in given
    clipped = {**ROWS, "gradient_clipping": 0.5, "optimizer": {"type": "OneBitAdam", "params": params}}
    assert refused(clipped) == ["gradient_clipping"]
    assert refused({**ROWS, "optimizer": {"type": "Adam", "params": {"freeze_step": 4}}}) == [
        "optimizer.params.freeze_step"
    ]


def test_what_onebit_adam_leaves_no_place_for_is_refused_at_its_key() -> None:
    """All of it was a refusal of zero_optimization.stage."""
    onebit = {**ROWS, "gradient_clipping": 0, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 4}}}
    coded = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
    for more, path in (
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        (coded, "zero_optimization.zero_quantized_gradients"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
    ):
        with pytest.raises(ConfigError, match=r"OneBitAdam takes each rank's own gradients") as error:
            ds_config({**onebit, **more}, world_size=2)
        assert [refusal.path for refusal in error.value.refusals] == [path]
    assert ds_config({**onebit, "bf16": {"enabled": True}}, world_size=2)["microbatches"] == 1


def test_optimizers_that_are_refused() -> None:
    for kind, words in (
        ("Lamb", "bounds its trust ratio"), ("ZeroOneAdam", r"has it as a Spec\(step="), ("MuAdam", "library mup"),
        ("AdamX", "fzero has no optimizer of this name. Did you mean 'Adam"), ("sgd", "Did you mean 'SGD'"),
        ("Elephant", "Known are Adam, AdamW, Lion"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            adam(kind, lr=0.1)
    assert refused({**ROWS, "optimizer": {"params": {"lr": 0.1}}}) == ["optimizer.params.lr"]
    assert refused({**ROWS, "optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}}) == [
        "optimizer.params.betas"
    ]
    assert refused({**ROWS, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}}) == ["optimizer.params"]
    assert refused({**ROWS, "optimizer": {"type": "Adam", "params": {"amsgrad": True}}}) == ["optimizer.params.amsgrad"]
    with pytest.raises(ConfigError, match=r"Write gradient_clipping at the top instead"):
        adam(max_grad_norm=1.0)


def test_without_an_optimizer_the_caller_gives_one() -> None:
    given = ds_config(ROWS)
    assert "optimizer" not in given
    assert "optimizer=optimizer" in given.python()
    fzero.Spec(loss=lambda p, b: p, optimizer=fzero.optim.sgd(0.1), **given)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4}}
    given = ds_config({**ROWS, "scheduler": scheduler})
    assert float(given.schedule(torch.tensor(9))) == 1.0
    assert refused({**ROWS, "scheduler": {"type": "WarmupLR"}}) == ["scheduler.type"]


def test_what_people_write_beside_the_keys() -> None:
    """Comments, keys that are put aside, a printing step that never comes, keys of older versions that do nothing."""
    document = {
        **ROWS, "_comment": "two nodes", "//": "x", "_fp16": {"enabled": True}, "steps_per_print": 2 * 10**16,
        "fp16": {"enabled": False, "opt_level": "O2", "_scale": 3},
        "compile": {"disable": False, "backend": "inductor"},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "seq_parallel_communication_data_type": "bf16",
    }  # fmt: skip
    given = ds_config(document)
    assert dict(given) == dict(ds_config(ROWS))
    lines = {line.path: line.became for line in given.lines}
    assert lines["_comment"] == lines["_fp16"] == lines["fp16._scale"] == "nothing: a comment"
    assert lines["activation_checkpointing.partition_activations"].startswith("nothing: DeepSpeed recomputes only")
    assert given.every == 2 * 10**16


# --- schedules


def schedule(kind: str, lr: float = 0.5, **params: Any) -> list[float]:
    document = {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "scheduler": {"type": kind, "params": params}}
    text = fields(document)["optimizer"]
    return rates(text.removeprefix("fzero.optim.sgd(")[:-1], 14)


def test_warmup_is_logarithmic_and_lags() -> None:
    curve = [0.1 + 0.9 * math.log(max(c, 1)) / math.log(6) if c - 1 < 6 else 1.0 for c in range(14)]
    assert schedule("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=1.0, warmup_num_steps=6) == pytest.approx(curve)
    assert curve[0] == curve[1] == 0.1


def test_linear_warmup_lags_too() -> None:
    curve = [max(c - 1, 0) / 6 if c - 1 < 6 else 1.0 for c in range(14)]
    assert schedule("WarmupLR", warmup_max_lr=1.0, warmup_num_steps=6, warmup_type="linear") == pytest.approx(curve)


def test_the_highest_rate_of_a_warmup() -> None:
    assert schedule("WarmupLR", 0.5, warmup_num_steps=4)[-1] == 0.5, "absent: the optimizer's"
    assert schedule("WarmupLR", 0.5, warmup_num_steps=4, warmup_max_lr=0.25)[-1] == 0.25
    auto = {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}
    assert schedule("WarmupLR", 0.5, warmup_num_steps=4, **auto) == schedule("WarmupLR", 0.5, warmup_num_steps=4)
    assert max(schedule("WarmupDecayLR", 0.5, warmup_num_steps=4, total_num_steps=8)) == 0.001, "its own default"


def test_decay_is_linear_from_the_warmup_on() -> None:
    rise = [math.log(max(c, 1)) / math.log(4) for c in range(5)]
    curve = [0.1 + 0.9 * gamma for gamma in [*rise, *(max(0.0, (10 - (c - 1)) / 6) for c in range(5, 14))]]
    found = schedule("WarmupDecayLR", warmup_min_lr=0.1, warmup_max_lr=1.0, warmup_num_steps=4, total_num_steps=10)
    assert found == pytest.approx(curve)
    assert schedule("WarmupDecayLR", warmup_num_steps=4, total_num_steps=3)[5:] == [0.0] * 9


def test_cosine_scales_the_optimizers_rate_and_starts_at_nothing() -> None:
    rise = [0.2 + 0.8 * (c - 1) / 4 for c in range(1, 5)]
    fall = [1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * min(1.0, (c - 4) / 6))) / 2 for c in range(5, 14)]
    found = schedule(
        "WarmupCosineLR", 0.5, warmup_min_ratio=0.2, warmup_num_steps=4, total_num_steps=10, warmup_type="linear"
    )
    assert found == pytest.approx([0.5 * ratio for ratio in [0.0, *rise, *fall]])
    assert schedule("WarmupCosineLR", warmup_num_steps=4, total_num_steps=10)[:2] == [0.0, 0.0]


TURNS = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 3}


def test_one_cycle_rises_falls_and_decays() -> None:
    scales = [0, 1 / 4, 2 / 4, 3 / 4, 1, 2 / 3, 1 / 3, 0]
    curve = [0.1 + 0.4 * scale for scale in scales] + [0.1 / (1 + 0.5 * n / 2) for n in range(1, 7)]
    assert schedule("OneCycle", **TURNS, decay_step_size=2, decay_lr_rate=0.5) == pytest.approx(curve)
    assert schedule("OneCycle", **TURNS, decay_lr_rate=0.5)[8:] == pytest.approx([0.1] * 6), "no interval: no decay"
    stairs = [0.1 + 0.4 * scale for scale in [0, 0, 1 / 2, 1 / 2, 1, 0, 0, 0]]
    assert schedule("OneCycle", **TURNS, cycle_first_stair_count=2, cycle_second_stair_count=1)[:8] == pytest.approx(
        stairs
    )


def test_one_cycle_turns_the_first_beta_too() -> None:
    """It has the least value at the first update, as the scheduler leaves it, and the second beta is 0.99."""
    params = {**TURNS, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_step_size": 2, "decay_mom_rate": 0.1}
    optimizer = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.5, 0.6]}}
    document = {**ROWS, "optimizer": optimizer, "scheduler": {"type": "OneCycle", "params": params}}
    given = ds_config(document)
    text = fields(document)["optimizer"]
    found = rates(text[text.index("betas=(") + 7 : text.rindex(", 0.99)")], 10)
    scales = [1, 1 / 4, 2 / 4, 3 / 4, 1, 2 / 3, 1 / 3, 0]
    after = [0.9 * (1 + 0.1 * n / 2) for n in (1, 2)]
    assert found == pytest.approx([0.9 - 0.1 * scale for scale in scales] + after)
    lines = {line.path: line.became for line in given.lines}
    assert lines["optimizer.params.betas"] == "nothing: OneCycle sets them"
    assert lines["optimizer.params.lr"] == "nothing: the schedule sets the rate, up to 0.5"
    document["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    lines = {line.path: line.became for line in ds_config(document).lines}
    assert lines["scheduler.params.cycle_momentum"] == "nothing: the optimizer has no betas"


def test_a_range_test_grows_without_an_end() -> None:
    given = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2}
    assert schedule("LRRangeTest", **given) == pytest.approx([0.1 * (1 + 2 * c / 4) for c in range(14)])
    steps = schedule("LRRangeTest", **given, lr_range_test_staircase=True)
    assert steps == pytest.approx([0.1 * (1 + 2 * (c // 4)) for c in range(14)])


def test_schedules_that_are_refused() -> None:
    def of(kind: str, **params: Any) -> dict[str, Any]:
        return {**ROWS, "optimizer": {"type": "Adam"}, "scheduler": {"type": kind, "params": params}}

    assert refused(of("WarmupDecayLR")) == ["scheduler.params.total_num_steps"]
    assert refused(of("WarmupCosineLR", total_num_steps="auto")) == ["scheduler.params.total_num_steps"]
    assert refused(of("WarmupLRR")) == refused(of("OneCycleLR", max_lr=1)) == ["scheduler.type"], "not its parameters"
    assert refused(of("OneCycle")) == ["scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"]
    bounds = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    lion = {**of("OneCycle", **bounds), "optimizer": {"type": "Lion"}}
    assert refused(lion) == ["scheduler.params.cycle_momentum"]
    lion["scheduler"]["params"]["cycle_momentum"] = False
    assert ds_config(lion)["optimizer"]
    alone = {**ROWS, "scheduler": {"type": "OneCycle", "params": bounds}}
    assert refused(alone) == ["scheduler.params.cycle_momentum"], "nobody would cycle the betas"
    assert refused(of("WarmupLR", total_num_steps=9)) == ["scheduler.params.total_num_steps"]
    assert refused(of("WarmupLR", warmup_num_steps=0)) == ["scheduler.params.warmup_num_steps"]
    assert refused(of("WarmupLR", warmup_type="cubic")) == ["scheduler.params.warmup_type"]


# --- clipping, precision, the loss scale


def test_clipping_is_one_unless_the_file_says_otherwise() -> None:
    assert fields({})["clip_norm"] == "1.0"
    assert fields({"gradient_clipping": 0.5})["clip_norm"] == "0.5"
    assert "clip_norm" not in fields({"gradient_clipping": 0})
    measured = {"gradient_clipping": 0.0, "zero_optimization": {"stage": 2, "compute_grad_norm": True}}
    assert fields(measured)["clip_norm"] == 'float("inf")'
    assert ds_config({**ROWS, **measured})["clip_norm"] == math.inf
    assert "(absent)  Spec(clip_norm=1.0): DeepSpeed's default since 0.19.3" in str(ds_config(ROWS))


def test_gradients_travel_in_the_computed_dtype() -> None:
    assert "precision" not in fields({})
    assert fields({"bf16": {"enabled": True}})["precision"] == "fzero.Precision(compute='bf16', reduce='bf16')"
    assert fields({"fp16": {"enabled": True}, "communication_data_type": "fp32"})["precision"] == (
        "fzero.Precision(compute='fp16', reduce='fp32', loss_scale=fzero.LossScale())"
    )
    assert fields({"communication_data_type": "bf16"})["precision"] == "fzero.Precision(reduce='bf16')"
    assert "precision" not in fields({"communication_data_type": "fp32"})
    assert fields({"bfloat16": {"enabled": True}}) == fields({"bf16": {"enabled": True}})
    assert refused({**ROWS, "fp16": {"enabled": True}, "bf16": {"enabled": True}}) == ["bf16.enabled"]


def test_torch_autocast_casts_by_op() -> None:
    def by_op(**block: Any) -> str:
        return fields({"torch_autocast": {"enabled": True, **block}})["precision"]

    assert by_op() == by_op(dtype="bfloat16") == "fzero.Precision(compute='autocast', reduce='fp32')"
    assert by_op(dtype="torch.float16", lower_precision_safe_modules=["torch.nn.Linear"]) == (
        "fzero.Precision(compute='autocast_fp16', reduce='fp32', loss_scale=fzero.LossScale.of_torch())"
    )
    sent = {"communication_data_type": "bf16", "torch_autocast": {"enabled": True}}
    assert fields(sent)["precision"] == "fzero.Precision(compute='autocast', reduce='bf16')"
    assert "precision" not in fields({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}})
    both = {**ROWS, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    assert refused(both) == ["torch_autocast.enabled"]
    assert refused({**ROWS, "torch_autocast": {"enabled": True, "dtype": "fp8"}}) == ["torch_autocast.dtype"]


def test_bf16_skips_steps_that_overflow() -> None:
    assert fields({"bf16": {"enabled": True}})["nonfinite"] == "'skip'"
    assert "nonfinite" not in fields({"bf16": {"enabled": True, "check_grad_overflow": False}})
    assert "nonfinite" not in fields({})
    assert "nonfinite" not in fields({"fp16": {"enabled": True}})


def test_loss_scales() -> None:
    def scale(**fp16: Any) -> fzero.LossScale:
        return ds_config({**ROWS, "fp16": {"enabled": True, **fp16}})["precision"].loss_scale

    assert scale() == fzero.LossScale()
    odd = {"initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 2}
    odd["consecutive_hysteresis"] = True
    assert scale(**odd) == fzero.LossScale(
        initial=256.0, window=5, hysteresis=3, minimum=2, consecutive_hysteresis=True
    )
    assert scale(loss_scale=128, hysteresis=3) == fzero.LossScale(initial=128.0, dynamic=False)
    assert refused({**ROWS, "fp16": {"enabled": True, "initial_scale_power": 200}}) == ["fp16.initial_scale_power"]


def test_dtypes_can_only_be_said_again() -> None:
    assert fields({"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "torch.float32"}}) == fields({})
    assert refused({**ROWS, "data_types": {"param_dtype": "bf16", "grad_accum_dtype": "fp16"}}) == [
        "data_types.param_dtype", "data_types.grad_accum_dtype"]  # fmt: skip


# --- where things lie


def test_stages_and_what_goes_with_them() -> None:
    assert [fields({"zero_optimization": {"stage": z}})["zero"] for z in range(4)] == ["0", "1", "2", "3"]
    assert (fields({"zero_optimization": True})["zero"], fields({"zero_optimization": False})["zero"]) == ("1", "0")
    assert refused({**ROWS, "zero_optimization": {"stage": 4}}) == ["zero_optimization.stage"]
    assert fields({})["allow_unused"] == "True"
    assert "allow_unused" not in fields({"zero_optimization": {"ignore_unused_parameters": False}})
    assert fields({"zero_optimization": {"overlap_comm": False}})["overlap"] == "False"
    assert "overlap" not in fields({"zero_optimization": {"overlap_comm": True}})
    live = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e6}}
    assert fields(live)["prefetch_bytes"] == "4000000"
    assert fields({**live, "bf16": {"enabled": True}})["prefetch_bytes"] == "2000000"
    assert fields({"zero_optimization": {"max_live_parameters": 10}})["prefetch_bytes"] == "40", "by its other name"


def test_offload() -> None:
    def zero(optimizer: Any = None, param: Any = None, **more: Any) -> dict[str, Any]:
        blocks = {"offload_optimizer": optimizer, "offload_param": param}
        return {"zero_optimization": {"stage": 3, **{name: b for name, b in blocks.items() if b}, **more}}

    cpu, nvme = {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "/local_nvme"}
    assert fields(zero({"device": "none"}, {"device": "none", "nvme_path": "/x"})) == fields(zero())
    both = refused({**ROWS, **zero({"device": "nvme"}, {"device": "nvme", "nvme_path": "/x"})})
    assert "zero_optimization.offload_optimizer.nvme_path" in both
    found = fields(zero(cpu, nvme))
    assert (found["offload"], found["nvme_path"]) == ("{'optimizer': 'cpu', 'params': 'nvme'}", "'/local_nvme'")
    assert fields({**zero(nvme), "aio": {"thread_count": 4, "queue_depth": 32}}) == fields(zero(nvme)), "an older name"
    assert refused({**ROWS, **zero(nvme, aio={"queue_depth": 32})}) == ["zero_optimization.aio"], (
        "it is not in this block"
    )
    assert fields(zero(cpu_offload=True))["offload"] == "{'optimizer': 'cpu'}"
    assert fields(zero(cpu_offload=True, cpu_offload_param=True))["offload"] == "{'optimizer': 'cpu', 'params': 'cpu'}"


def test_two_data_axes() -> None:
    def placed(world: int, **zero: Any) -> tuple[Any, Any]:
        found = fields({"zero_optimization": {"stage": 3, **zero}}, world_size=world)
        return found["zero"], found.get("mesh")

    assert placed(8, zero_hpz_partition_size=4) == ("'hpz'", "{'dp_out': -1, 'dp': 4}")
    assert placed(8, mics_shard_size=2) == ("'hsdp'", "{'dp_out': -1, 'dp': 2}")
    assert placed(4, zero_hpz_partition_size=4) == ("3", None), "one node: its slices are all"
    assert placed(4, mics_shard_size=-1) == ("3", None)
    assert refused({**ROWS, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, world_size=4) == [
        "zero_optimization.zero_hpz_partition_size"]  # fmt: skip
    assert refused({**ROWS, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}, world_size=4) == [
        "zero_optimization.mics_shard_size"]  # fmt: skip


def test_messages_of_blocks() -> None:
    """ZeRO++: qwZ and qgZ, alone and with hpZ."""

    def precision(**zero: Any) -> str:
        return str(fields({"zero_optimization": {"stage": 3, **zero}}, world_size=8).get("precision"))

    assert precision() == "None"
    assert precision(zero_quantized_weights=True) == "fzero.Precision(gather='int8')"
    assert precision(zero_quantized_gradients=True) == "fzero.Precision(reduce='int4')"
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert precision(**both, zero_hpz_partition_size=4) == "fzero.Precision(reduce='int4', gather='int8')"
    low = fields({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **both}})
    assert low["precision"] == "fzero.Precision(compute='bf16', reduce='int4', gather='int8')"
    by_op = {"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 3, **both}}
    assert fields(by_op)["precision"] == "fzero.Precision(compute='autocast', reduce='int4', gather='int8')"
    wrong = {**ROWS, "zero_optimization": {"stage": 2, **both}}
    assert refused(wrong) == ["zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"]


def test_pipelines_and_layers_in_parts() -> None:
    found = fields(
        {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}, "tensor_parallel": {"autotp_size": 2}},
        world_size=8,
    )
    assert found["mesh"] == "{'pp': 2, 'dp': -1, 'tp': 2}"
    assert found["pipeline"] == "'1f1b'"
    assert found["remat"] == "'full'"
    given = ds_config({**ROWS, "tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert given.global_batch == 4
    assert "give shard=fzero.interop.tp_plan(model)" in str(given)
    spec = fzero.Spec(loss=lambda p, b: p, optimizer=fzero.optim.sgd(0.1), shard={"**/w": fzero.P("tp")}, **given)
    assert dict(spec.mesh) == {"dp": -1, "tp": 2}
    assert refused({**ROWS, "tensor_parallel": {"autotp_size": 3}}, world_size=4) == ["tensor_parallel.autotp_size"]
    assert refused({**ROWS, "pipeline": {"stages": "two"}}) == ["pipeline.stages"]
    assert fields({"pipeline": {"stages": "auto"}}) == fields({})


# --- beside the Spec


def test_what_is_beside_the_spec() -> None:
    given = ds_config({
        **ROWS, "steps_per_print": 10, "wall_clock_breakdown": True, "dump_state": True, "log_level": "info",
        "tensorboard": {"enabled": True, "output_path": "runs"}, "wandb": {"enabled": False, "project": "x"},
        "bf16": {"enabled": True}, "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True},
    })  # fmt: skip
    assert (given.every, given.profile, given.dump, given.log_level) == (10, True, True, "info")
    assert given.trackers == {"tensorboard": {"output_path": "runs", "job_name": "DeepSpeedJobName"}}
    assert given.export_dtype is torch.bfloat16
    assert ds_config(ROWS).export_dtype is None
    assert not ds_config(ROWS).trackers


def test_what_it_prints_is_what_it_holds() -> None:
    document = {
        "train_batch_size": 32, "gradient_accumulation_steps": 4, "fp16": {"enabled": True, "hysteresis": 3},
        "optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 0.1}},
    }  # fmt: skip
    given = ds_config(document, world_size=4)
    names: dict[str, Any] = {"loss": lambda p, b: p}
    exec(given.python(), names)
    spec = names["spec"]
    for name in ("zero", "mesh", "microbatches", "precision", "clip_norm", "allow_unused"):
        assert getattr(spec, name) == given[name], name
    params = {"w": torch.ones(4, 4), "bias": torch.ones(4)}
    moved = [tx.update(params, tx.init(params), params)[0] for tx in (spec.optimizer, given["optimizer"])]
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in params)


# --- the files

AUTO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer.params.lr": 1e-3,
    "scheduler.params.warmup_num_steps": 5,
    "gradient_clipping": 1.0,
}
VERDICTS: dict[str, list[str]] = {
    "adam_zero1": [],
    "breakdown": [],
    "compressed": ["compress_communication"],
    "zero2_auto": [],
    "zero2_cpu": [],
    "adamw_zero2_cpu": [],
    "adamw_zero3_cpu": [],
    "adamw_zero3_constant": [],
    "zero3_cpu": [],
}


def auto_for(document: dict[str, Any]) -> dict[str, Any]:
    """The values of AUTO that a document says "auto" to, or that it lacks and needs."""
    book = fzero.interop.config.config_keys.leaves(document, fzero.interop.config.config_keys.blocks(tuple(DEEPSPEED)))
    values = dict(book)
    missing = (
        {"train_micro_batch_size_per_gpu"}
        if "train_batch_size" not in values or values["train_batch_size"] == "auto"
        else set()
    )
    return {
        path: value
        for path, value in AUTO.items()
        if values.get(path) == "auto" or (path in missing and path not in values)
    }


@pytest.mark.parametrize("name", VERDICTS)
def test_each_file_is_taken_or_refused_by_name(name: str) -> None:
    document = fzero.interop.config.read.read(FILES / f"{name}.json")[1]
    auto = auto_for(document)
    if VERDICTS[name]:
        assert refused(FILES / f"{name}.json", world_size=2, auto=auto) == VERDICTS[name]
        document = copy.deepcopy(document)
        document.pop("compress_communication", None)
    given = ds_config(document, world_size=2, auto=auto)
    assert len(given.lines) >= len(
        dict(
            fzero.interop.config.config_keys.leaves(document, fzero.interop.config.config_keys.blocks(tuple(DEEPSPEED)))
        )
    )


def test_without_values_for_auto_every_one_is_named() -> None:
    assert refused(FILES / "zero2_auto.json", world_size=2) == [
        "scheduler.params.warmup_num_steps", "optimizer.params.lr",
    ]  # fmt: skip
    assert refused(FILES / "adamw_zero3_cpu.json", world_size=2) == [
        "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping",
    ]  # fmt: skip
