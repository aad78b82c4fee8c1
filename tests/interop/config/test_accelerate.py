"""Files of `accelerate config`: FSDP of two versions, DeepSpeed inline and by file, plain data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fzero
from fzero import LossScale, Precision
from fzero.errors import ConfigError
from fzero.interop import accelerate_config
from fzero.interop.config.accelerate_keys import ACCELERATE, ALIASES
from fzero.interop.config.config_keys import blocks, is_off

FILES = Path(__file__).parent / "files"
ZERO2 = {"params": (), "grads": ("dp",), "optimizer": ("dp",)}


def fsdp(world: int = 8, machines: int = 1, precision: str = "no", **config: Any) -> Any:
    document = {"distributed_type": "FSDP", "num_processes": world, "num_machines": machines, "fsdp_config": config}
    return accelerate_config({**document, "mixed_precision": precision})


def refused(document: dict[str, Any], **how: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        accelerate_config({"num_processes": 2, **document}, **how)
    return [path for path, _ in error.value.refusals]


def refused_by(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        accelerate_config(file)
    return [path for path, _ in error.value.refusals]


def test_the_file_as_it_stands() -> None:
    pytest.importorskip("yaml")
    for name in ("fsdp.yaml", "fsdp_pasted.yaml"):
        given = accelerate_config(FILES / name)
        assert dict(given) == {"zero": 3}
        assert given.ranks == 2
        assert {line.path: line.became for line in given.lines}["fsdp_config.min_num_params"].startswith(
            "nothing: layers"
        )
        fzero.Spec(loss=lambda p, b: p, optimizer=fzero.optim.sgd(0.1), **given)


@pytest.mark.parametrize(
    ("config", "machines", "zero", "mesh"),
    [
        ({"sharding_strategy": 1}, 1, 3, None),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 1, 3, None),
        ({"fsdp_sharding_strategy": "2"}, 1, 2, None),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 1, 2, None),
        ({"sharding_strategy": "no_shard"}, 1, 0, None),
        ({"sharding_strategy": 4}, 1, 3, None),
        ({"sharding_strategy": 4}, 2, "hsdp", {"dp_out": 2, "dp": -1}),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, 2, ZERO2, {"dp_out": 2, "dp": -1}),
        ({"sharding_strategy": 5}, 1, 2, None),
        ({}, 1, 3, None),
        ({"fsdp_version": 2}, 1, 3, None),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 1, 2, None),
        ({"fsdp_version": 2, "reshard_after_forward": "true"}, 1, 3, None),
        ({"fsdp_version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, 1, 2, None),
    ],
)
def test_strategies(config: dict[str, Any], machines: int, zero: Any, mesh: Any) -> None:
    given = fsdp(machines=machines, **config)
    assert (given["zero"], given.get("mesh")) == (zero, mesh)


def test_axes_of_parallelism_config() -> None:
    def placed(world: int, **axes: int) -> tuple[Any, Any]:
        document = {"distributed_type": "FSDP", "num_processes": world, "fsdp_config": {"fsdp_version": 2}}
        given = accelerate_config(
            {**document, "parallelism_config": {f"parallelism_config_{n}": v for n, v in axes.items()}}
        )
        return given["zero"], given.get("mesh")

    assert placed(8, dp_replicate_size=2, dp_shard_size=4) == ("hsdp", {"dp_out": 2, "dp": -1})
    assert placed(8, dp_shard_size=8) == (3, None)
    assert placed(8, dp_shard_size=4, tp_size=2) == (3, {"dp": -1, "tp": 2})
    assert placed(8, dp_replicate_size=8) == (0, None)
    bad = {"distributed_type": "FSDP", "num_processes": 8, "parallelism_config": {"dp_shard_size": 3}}
    assert refused(bad) == ["parallelism_config.dp_shard_size"]
    bad["parallelism_config"] = {"dp_shard_size": 4, "cp_size": 2}
    assert refused(bad) == ["parallelism_config.cp_size"], "the rest of the ranks is its own"
    bad["parallelism_config"] = {"dp_shard_size": 4, "sp_size": 2}
    assert refused(bad) == ["parallelism_config.sp_size"]


def test_dynamo_is_a_compiler() -> None:
    multi = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    given = accelerate_config({**multi, "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}})
    assert given["compile"] == "auto"
    assert accelerate_config({**multi, "dynamo_backend": "inductor"})["compile"] == "auto"
    assert "compile" not in accelerate_config({**multi, "dynamo_config": {"dynamo_backend": "EAGER"}})
    assert "compile" not in accelerate_config({**multi, "dynamo_config": {"dynamo_backend": "NO"}})
    inline = {"distributed_type": "DEEPSPEED", "num_processes": 2, "dynamo_backend": "INDUCTOR"}
    given = accelerate_config(inline, auto={"train_micro_batch_size_per_gpu": 2})
    assert (given["compile"], given["zero"]) == ("auto", 2)


def test_keys_of_tpus_and_old_names_decide_nothing() -> None:
    document = {"distributed_type": "FSDP", "num_processes": 2, "downcast_bf16": True, "tpu_name": "a pod"}
    document["fsdp_config"] = {"fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_sharding_strategy": 1}
    given = accelerate_config(document)
    assert dict(given) == {"zero": 3}
    assert {line.path for line in given.lines} >= {"downcast_bf16", "tpu_name", "fsdp_config.backward_prefetch"}


def test_precision() -> None:
    assert fsdp(precision="bf16")["precision"] == Precision(compute="autocast", reduce="bf16")
    scale = LossScale.of_torch()
    assert fsdp(precision="fp16")["precision"] == Precision(compute="autocast_fp16", reduce="fp16", loss_scale=scale)
    ddp = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    assert accelerate_config({**ddp, "mixed_precision": "bf16"})["precision"] == Precision(
        compute="autocast", reduce="fp32"
    )
    assert accelerate_config({**ddp, "fp16": True})["precision"].compute == "autocast_fp16", "the old form"
    for no in ("no", False, None):
        assert "precision" not in accelerate_config({**ddp, "mixed_precision": no})
    assert accelerate_config({**ddp, "mixed_precision": "BF16"}) == accelerate_config(
        {**ddp, "mixed_precision": "bf16"}
    )
    assert refused({**ddp, "mixed_precision": "fp8"}) == ["mixed_precision"]


def test_the_rest_of_fsdp() -> None:
    assert fsdp(activation_checkpointing=True)["remat"] == "full"
    assert "remat" not in fsdp(fsdp_activation_checkpointing=False)
    offload = {"distributed_type": "FSDP", "fsdp_config": {"offload_params": True, "ignored_modules": "x"}}
    assert refused(offload) == ["fsdp_config.ignored_modules"]
    assert fsdp(offload_params=True)["offload"] == "optimizer+params"
    with pytest.raises(
        ConfigError, match=r"fsdp_config.shardng_strategy = 2: there is no such key. Did you mean 'fsdp_config.sharding"
    ):
        fsdp(shardng_strategy=2)
    assert refused({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "HALF"}}) == [
        "fsdp_config.sharding_strategy"
    ]


def test_plain_data_parallelism_and_the_world() -> None:
    given = accelerate_config({"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True})
    assert dict(given) == {"zero": 0, "device": "cpu"}
    assert given.ranks == 4
    assert accelerate_config({"distributed_type": "NO"}).ranks == 1
    assert accelerate_config({"distributed_type": "FSDP", "num_processes": 4}, world_size=2).ranks == 2
    other = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"a": 1}, "fp8_config": {"backend": "TE"}}
    assert refused(other) == ["distributed_type", "megatron_lm_config", "fp8_config"]
    assert refused({"compute_environment": "AMAZON_SAGEMAKER"}) == ["compute_environment"]
    assert refused({"dynamo_config": {"dynamo_backend": "TENSORRT"}}) == ["dynamo_config.backend"]
    assert refused({}, auto={"optimizer.params.lr": 1}) == ["optimizer.params.lr"]


INLINE = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": True}


def test_deepspeed_inline() -> None:
    document = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "deepspeed_config": INLINE,
    }
    given = accelerate_config(document, auto={"train_micro_batch_size_per_gpu": 2})
    assert (given["zero"], given["microbatches"], given["clip_norm"], given.global_batch) == (3, 4, 0.5, 16)
    assert given["precision"] == Precision(compute="bf16", reduce="bf16")
    assert given["nonfinite"] == "skip"
    lines = {line.path for line in given.lines}
    assert {"deepspeed_config.zero_stage", "deepspeed_config.zero3_init_flag", "zero_optimization.stage"} <= lines
    empty = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {}}
    given = accelerate_config(empty, auto={"train_micro_batch_size_per_gpu": 2})
    assert (given["zero"], given["microbatches"], given["clip_norm"]) == (2, 1, 1.0), "Accelerate's defaults"
    assert refused(empty) == ["train_micro_batch_size_per_gpu"]
    cpu = {**INLINE, "offload_optimizer_device": "cpu"}
    offloaded, rows = {"distributed_type": "DEEPSPEED", "deepspeed_config": cpu}, {"train_micro_batch_size_per_gpu": 2}
    assert accelerate_config({**offloaded, "num_processes": 2}, auto=rows)["offload"] == {"optimizer": "cpu"}


AUTOS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


@pytest.mark.parametrize("narrow", ["no", "bf16", "fp16"])
def test_auto_in_its_file_is_what_accelerate_fills_in(narrow: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTOS))
    outer: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": narrow}
    outer["deepspeed_config"] = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    given = accelerate_config(tmp_path / "accelerate.json", auto={"train_micro_batch_size_per_gpu": 2})
    assert (given["zero"], given["microbatches"], given["clip_norm"]) == (3, 1, 1.0)
    assert "offload" not in given
    assert given.export_dtype is None
    assert (given["precision"].compute if "precision" in given else "no") == narrow
    assert refused_by(tmp_path / "accelerate.json") == ["train_micro_batch_size_per_gpu"], "the data loader says it"
    del outer["mixed_precision"]
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    open_paths = ["train_micro_batch_size_per_gpu", "bf16.enabled", "fp16.enabled"]
    assert sorted(refused_by(tmp_path / "accelerate.json")) == sorted(open_paths), "who fills it is not said"


def test_the_precision_of_the_outer_file_where_its_file_switches_the_other_off(tmp_path: Path) -> None:
    """As Accelerate: a block that is off is no precision."""
    inner = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "fp16": {"enabled": False}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    outer: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16"}
    outer["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    assert accelerate_config(tmp_path / "accelerate.json")["precision"].compute == "bf16"
    (tmp_path / "ds.json").write_text(json.dumps({**inner, "fp16": {"enabled": "auto"}}))
    assert accelerate_config(tmp_path / "accelerate.json")["precision"].compute == "bf16"
    (tmp_path / "ds.json").write_text(json.dumps({**inner, "bf16": {"enabled": False}}))
    assert "precision" not in accelerate_config(tmp_path / "accelerate.json")


def test_auto_inline_is_accelerates_default() -> None:
    plugin = {"zero_stage": 3, "zero3_save_16bit_model": "auto", "gradient_accumulation_steps": "auto"}
    plugin |= {"gradient_clipping": "auto", "offload_optimizer_device": "auto", "offload_param_device": "auto"}
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": plugin}
    given = accelerate_config(document, auto={"train_micro_batch_size_per_gpu": 2})
    assert (given["zero"], given["microbatches"], given["clip_norm"]) == (3, 1, 1.0)
    assert "offload" not in given
    assert given.export_dtype is None


def test_deepspeed_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = {"train_batch_size": 16, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    outer = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "fp16"}
    outer["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    given = accelerate_config(tmp_path / "accelerate.json")
    assert (given["zero"], given.micro_batch, given["precision"].compute) == (1, 4, "bf16"), "the file's own precision"
    outer["deepspeed_config"] = {"deepspeed_config_file": "ds.json", "zero_stage": 3}
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    with pytest.raises(ConfigError, match=r"deepspeed_config_file says it. Take it out here, as Accelerate asks"):
        accelerate_config(tmp_path / "accelerate.json")
    deeper = tmp_path / "configs" / "accelerate"
    deeper.mkdir(parents=True)
    (tmp_path / "configs" / "zero.json").write_text(json.dumps(inner))
    outer["deepspeed_config"] = {"deepspeed_config_file": "configs/zero.json"}
    (deeper / "a.json").write_text(json.dumps(outer))
    assert accelerate_config(deeper / "a.json")["zero"] == 1, "paths of a repository begin at its root"
    monkeypatch.chdir(tmp_path / "configs")
    outer["deepspeed_config"] = {"deepspeed_config_file": "zero.json"}
    (tmp_path / "a.json").write_text(json.dumps(outer))
    assert accelerate_config(tmp_path / "a.json")["zero"] == 1, "as Accelerate: from the current folder"
    outer["deepspeed_config"] = {"deepspeed_config_file": "none.json"}
    (tmp_path / "accelerate.json").write_text(json.dumps(outer))
    with pytest.raises(ConfigError, match=r"none\.json: there is no such file"):
        accelerate_config(tmp_path / "accelerate.json")


@pytest.mark.parametrize("path", ACCELERATE)
def test_every_default_is_accepted(path: str) -> None:
    key = ACCELERATE[path]
    *above, name = path.split(".")
    block = {above[0]: {name: key.default}} if above else {name: key.default}
    given = accelerate_config({"distributed_type": "FSDP", **block})
    if path != "distributed_type":
        assert dict(given) == {"zero": 3}
    assert path in {line.path for line in given.lines}
    assert key.default is None or key.kind.fits(key.default) or is_off(key.default, key.default)
    assert key.fix or not key.verdict.off_only


def test_accelerates_own_class_has_these_keys() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    theirs = set(config_args.ClusterConfig.__dataclass_fields__)
    ours = {path for path in {*ACCELERATE, *blocks(tuple(ACCELERATE))} if "." not in path}
    assert ours - theirs == {"fp16", "dynamo_backend", "ipex_config"}, "the old forms, which it renames or has no more"
    assert theirs <= ours
    launch = pytest.importorskip("accelerate.commands.launch")
    options = {name for action in launch.launch_command_parser()._actions for name in [action.dest]}
    known = {*ALIASES, *ACCELERATE}
    for prefix, block in (("fsdp_", "fsdp_config"), ("parallelism_config_", "parallelism_config")):
        missing = {name for name in options if name.startswith(prefix) and f"{block}.{name}" not in known}
        assert not missing - {"fsdp_config"}, missing
