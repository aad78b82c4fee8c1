"""accelerate: a file of `accelerate config` as the fields of a Spec, with Accelerate 1.15's meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from fzero.errors import ConfigError
from fzero.interop.config.accelerate_keys import (
    ACCELERATE,
    ALIASES,
    DEEPSPEED,
    FSDP,
    PARALLEL,
    STRATEGIES,
)
from fzero.interop.config.config_calls import ConfigCall
from fzero.interop.config.config_keys import says_off
from fzero.interop.config.deepspeed import GRAD_SCALER, ds_config, world
from fzero.interop.config.given_fields import Given, finish
from fzero.interop.config.ledger import Ledger, Refusal
from fzero.interop.config.others import refuse_others
from fzero.interop.config.read import read

_ZERO2 = {"params": (), "grads": ("dp",), "optimizer": ("dp",)}
ZERO: dict[str, Any] = dict(zip(STRATEGIES, (3, 2, 0, "hsdp", _ZERO2), strict=True))  # by the strategy of FSDP
_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")
_OWNERS = {"zero": f"{FSDP}.sharding_strategy", "mesh": "distributed_type"}
_INLINE = {  # keys of DeepSpeed's plugin, and where a ds_config has them
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_FILLED: dict[str, Any] = {  # what Accelerate makes of "auto", in its plugin and in a ds_config
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": "none",
    "zero_optimization.offload_param.nvme_path": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
_NARROW = ("fp16", "bf16", "bfloat16", "torch_autocast")


def accelerate_config(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Given:
    """What `fzero.Spec(loss=loss, optimizer=optimizer, **given)` takes, from a file of `accelerate config`.

    source: its YAML (needs PyYAML) or JSON, or a dict. world_size: ranks in all; None: the file's num_processes, else
    WORLD_SIZE, else 1. auto: values for keys of DeepSpeed that say "auto" or are missing, as in `ds_config`. Types are
    NO, MULTI_CPU and MULTI_GPU (zero=0), FSDP of either version, and DEEPSPEED, inline or by its file. Raises
    ConfigError with all that is in the way, at once.

    >>> given = accelerate_config({"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16",
    ...                            "fsdp_config": {"sharding_strategy": 1, "fsdp_offload_params": False}})
    >>> print(given)
    config, on 2 ranks
      distributed_type               "FSDP"  Spec(zero=3)
      num_processes                  2       the ranks, unless world_size= is given
      mixed_precision                "bf16"  Spec(precision=)
      fsdp_config.sharding_strategy  1       FULL_SHARD
      fsdp_config.offload_params     false   nothing: off
    >>> given["zero"], given["precision"].compute
    (3, 'autocast')
    """
    where, document = read(source)
    refuse_others(document, where)
    auto = dict(auto or {})
    inner = {path: auto.pop(path) for path in list(auto) if path not in ACCELERATE}
    ledger = Ledger(where, document, ACCELERATE, auto, ALIASES)
    kind, processes = str(ledger.take("distributed_type")).upper(), ledger.take("num_processes")
    ranks = world(processes if world_size is None and processes > 0 else world_size)
    if kind == "DEEPSPEED":
        return _deepspeed(ledger, ranks, inner, where)
    for path in inner:
        ledger.refuse(path, "auto= gives it, but this file has no DeepSpeed", "take it out of auto=", inner[path])
    if kind not in (*_DDP, "FSDP"):
        ledger.refuse(
            "distributed_type", "fzero has no such type", f"write one of {', '.join((*_DDP, 'FSDP', 'DEEPSPEED'))}"
        )
    fsdp = _fsdp(ledger, kind == "FSDP", ranks)
    _plugin(ledger)
    fields = {**fsdp, **_precision(_mixed(ledger), kind == "FSDP"), **_dynamo(ledger)}
    fields["device"] = "cpu" if ledger.take("use_cpu") else None
    ledger.became("distributed_type", f"Spec(zero={fsdp['zero']})")
    kept = {name: value for name, value in fields.items() if value is not None}
    return finish(ledger, kept, _OWNERS, ranks=ranks)


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether a document is of Accelerate and not of DeepSpeed."""
    return not document.keys().isdisjoint({"distributed_type", "compute_environment", "num_processes"})


# --- FSDP and DDP -----------------------------------------------------------------------------------------------------


def _fsdp(ledger: Ledger, sharded: bool, ranks: int) -> dict[str, Any]:
    """`zero`, `mesh` and `remat`. Every key is taken; without FSDP they decide nothing."""
    strategy = _strategy(ledger)
    zero = ZERO[strategy] if sharded else 0
    nodes = ledger.take("num_machines")
    replicas, shards, tp = (
        ledger.take(f"{PARALLEL}.{name}") for name in ("dp_replicate_size", "dp_shard_size", "tp_size")
    )
    remat, offload = ledger.take(f"{FSDP}.activation_checkpointing"), ledger.take(f"{FSDP}.offload_params")
    ledger.take(f"{FSDP}.state_dict_type")
    others = any(
        isinstance(n := ledger.values.get(f"{PARALLEL}.{name}"), int) and n > 1 for name in ("cp_size", "sp_size")
    )
    if replicas * shards > 1 and replicas * shards * tp != ranks and not others:  # what is refused has ranks too
        path = f"{PARALLEL}.dp_shard_size"
        ledger.refuse(
            path, f"{replicas} x {shards} x {tp} are not {ranks} ranks", f"write {max(ranks // (replicas * tp), 1)}"
        )
    two = replicas > 1 and shards > 1
    if not two and zero in ("hsdp", _ZERO2):
        replicas, two = nodes, nodes > 1
        zero = zero if two else {"hsdp": 3}.get(str(zero), 2)
    elif two and zero == 3:
        zero = "hsdp"
    elif two and zero == 2:
        zero = _ZERO2
    elif replicas > 1:
        zero = 0
    outer = {"dp_out": replicas, "dp": -1} if two else {"dp": -1}
    mesh = {**outer, "tp": tp} if tp > 1 else outer
    return {
        "zero": zero,
        "mesh": mesh if mesh != {"dp": -1} else None,
        "remat": "full" if remat and sharded else None,
        "offload": "optimizer+params" if offload and sharded else None,
    }


def _strategy(ledger: Ledger) -> str:
    """The strategy that version 1 names, or version 2 by `reshard_after_forward`."""
    version, reshard = ledger.take(f"{FSDP}.version"), ledger.take(f"{FSDP}.reshard_after_forward")
    path, named = f"{FSDP}.sharding_strategy", ledger.take(f"{FSDP}.sharding_strategy")
    again = False if says_off(reshard) else {"true": True}.get(str(reshard).lower(), reshard)
    if version == 2:
        if again not in (None, True, False):
            ledger.refuse(f"{FSDP}.reshard_after_forward", "version 2 takes true or false", "write true")
        if named is not None:
            ledger.became(path, "nothing: version 2 reads reshard_after_forward")
        return "SHARD_GRAD_OP" if again is False else "FULL_SHARD"
    unnamed = "FULL_SHARD" if again is None else "SHARD_GRAD_OP" if again is False else reshard
    text = str(unnamed if named is None else named).upper()
    text = STRATEGIES[int(text) - 1] if text.isdigit() and 1 <= int(text) <= len(STRATEGIES) else text
    if text not in STRATEGIES:
        ledger.refuse(
            f"{FSDP}.reshard_after_forward", "version 1 takes a strategy", f"write one of {', '.join(STRATEGIES)}"
        )
        return "FULL_SHARD"
    if named is not None:
        ledger.became(path, text)
    return text


def _dynamo(ledger: Ledger) -> dict[str, Any]:
    """`compile`, where the file asks for torch.compile's Inductor."""
    fields = {}
    for path in ("dynamo_config.backend", "dynamo_backend"):
        backend = str(ledger.take(path)).upper()
        if backend == "INDUCTOR":
            fields["compile"] = "auto"
        elif backend in ("EAGER", "AOT_EAGER"):
            ledger.became(path, "nothing: fzero captures the step by itself")
        elif backend != "NO":
            ledger.refuse(path, "fzero compiles with Inductor alone", "write INDUCTOR, or NO")
    return fields


def _mixed(ledger: Ledger) -> str:
    """The mixed precision that the file asks for: "no", "fp16" or "bf16"."""
    old, name = ledger.take("fp16"), ledger.take("mixed_precision")
    return "fp16" if old and not ledger.has("mixed_precision") else (name or "no").lower()


def _precision(name: str, sharded: bool) -> dict[str, Any]:
    """The dtypes: Accelerate runs a forward under torch.autocast. FSDP reduces gradients in its dtype, DDP in fp32."""
    if name == "no":
        return {}
    by_op = {"compute": "autocast"} if name == "bf16" else {"compute": "autocast_fp16"}
    scale = {"loss_scale": GRAD_SCALER} if name == "fp16" else {}
    named = {**by_op, "reduce": name if sharded else "fp32", **scale}
    return {"precision": ConfigCall("fzero.Precision", (), named)}


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def _plugin(ledger: Ledger) -> dict[str, Any]:
    """The values of DeepSpeed's block by name, those that are given."""
    names = ["deepspeed_config_file", *_INLINE]
    filled = {name: {"auto": _FILLED[path]} for name, path in _INLINE.items()}
    values = {name: ledger.take(f"{DEEPSPEED}.{name}", **filled.get(name, {})) for name in names}
    return {name: value for name, value in values.items() if ledger.has(f"{DEEPSPEED}.{name}")}


def _deepspeed(ledger: Ledger, ranks: int, auto: Mapping[str, Any], where: str) -> Given:
    """What the plugin's file gives, or its own keys; with the lines of both."""
    plugin = _plugin(ledger)
    _fsdp(ledger, False, ranks)
    file = plugin.pop("deepspeed_config_file", None)
    for name in plugin if file else ():
        ledger.refuse(f"{DEEPSPEED}.{name}", "deepspeed_config_file says it", "take it out here, as Accelerate asks")
    narrow = _mixed(ledger)
    beside = {**_dynamo(ledger), **({"device": "cpu"} if ledger.take("use_cpu") else {})}
    document: dict[str, Any] = {}
    try:
        name, document = read(_found(file, where)) if file else (f"{where}: {DEEPSPEED}", _document(plugin))
        said = document.keys() & {narrow, narrow.replace("bf", "bfloat")}
        if narrow != "no" and not said and not any(_at(document, f"{block}.enabled") is True for block in _NARROW):
            document[narrow] = {"enabled": True}
        inner = ds_config(
            document, world_size=ranks, auto={**_auto(document, ledger.has("mixed_precision"), narrow), **auto}
        )
    except ConfigError as error:
        ledger.refusals += [Refusal(*refusal) for refusal in error.refusals] or [Refusal("", str(error))]
        ledger.open += error.open
    lines = ledger.close()
    fields = {**inner.expressions, **beside}
    return replace(inner, where=where, expressions=fields, lines=(*lines, *inner.lines))


def _found(file: str, where: str) -> Path:
    """The plugin's file: as Accelerate finds it, from the current folder; or from a folder that `where` lies in."""
    folders = Path(where).absolute().parents
    return next((p for p in (Path(file), *(at / file for at in folders)) if p.is_file()), folders[0] / file)


def _auto(document: Mapping[str, Any], said: bool, narrow: str) -> dict[str, Any]:
    """The values that Accelerate puts where a ds_config says "auto". said: whether the file names a mixed precision."""
    precisions = {f"{name}.enabled": name.replace("bfloat", "bf") == narrow for name in ("fp16", "bf16", "bfloat16")}
    filled = {**_FILLED, **(precisions if said else {})}
    found = {path: value for path, value in filled.items() if _at(document, path) == "auto"}
    return {path.replace("bfloat", "bf"): value for path, value in found.items()}


def _at(document: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a path of blocks."""
    value: Any = document
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def _document(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """The ds_config that Accelerate makes of its plugin's keys."""
    document: dict[str, Any] = {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
    for name, value in plugin.items():
        *blocks, last = _INLINE[name].split(".")
        inner = document
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return document
