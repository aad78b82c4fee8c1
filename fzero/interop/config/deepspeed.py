"""deepspeed: a ds_config as the fields of a Spec, with DeepSpeed 0.19.8's meanings. docs/migration.md has the table."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

from fzero.errors import SpecError
from fzero.interop.config.config_calls import ConfigCall
from fzero.interop.config.deepspeed_keys import ALIASES, DEEPSPEED, PYDANTIC, ZERO
from fzero.interop.config.deepspeed_optimizers import TAKES_LOCAL, optimizer
from fzero.interop.config.given_fields import Given, finish
from fzero.interop.config.ledger import Ledger
from fzero.interop.config.others import refuse_others
from fzero.interop.config.read import read
from fzero.kernels.codecs import CODECS
from fzero.precision import DTYPES, LossScale

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CLIPPING = "gradient_clipping"
GRAD_SCALER = ConfigCall("fzero.LossScale.of_torch", (), {})
_OWNERS = {"optimizer": "optimizer.params", "precision": "fp16", "mesh": f"{ZERO}.stage"}


def ds_config(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Given:
    """What `fzero.Spec(loss=loss, **given)` takes, from a DeepSpeed configuration as it stands.

    source: a file of JSON (comments and commas at the end are read over), or a dict. world_size: ranks in all; None:
    WORLD_SIZE, which torchrun sets, else 1. auto: values by path, as {"optimizer.params.lr": 2e-5}, for keys that say
    "auto" or are missing. Meanings are those of DeepSpeed 0.19.8; docs/migration.md lists them, and every key.

    A key changes the run, or is always so in fzero, or is a hint that changes no number; `print(given)` says which. Any
    other is refused unless it is at its default or off, so that a full dump of a configuration loads. If the document
    has no optimizer, give `Spec(optimizer=...)` yourself. Raises ConfigError with all that is in the way, at once.

    >>> given = ds_config(
    ...     {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
    ...     world_size=2, auto={"optimizer.params.lr": 2e-5})
    >>> print(given)
    config, on 2 ranks: 16 rows a step; a rank's batch has 8
      train_batch_size                16             rows in a step, over all ranks
      train_micro_batch_size_per_gpu  (absent)       8: rows of a step / ranks / accumulation
      gradient_accumulation_steps     (absent)       Spec(microbatches=1)
      gradient_clipping               (absent)       Spec(clip_norm=1.0): DeepSpeed's default since 0.19.3
      optimizer.type                  "Adam"         Spec(optimizer=fzero.optim.adamw(...))
      optimizer.params.lr             2e-05 (given)  of the optimizer
      zero_optimization.stage         (absent)       Spec(zero=0)
    >>> ds_config({"train_batch_size": 8, "zero_optimiztion": {"stage": 2}, "fp16": {"enabled": "auto"}})
    Traceback (most recent call last):
    fzero.errors.ConfigError: config: 2 keys are in the way
      zero_optimiztion = {"stage": 2}: there is no such key. Did you mean 'zero_optimization'?
      fp16.enabled = "auto": nothing says what auto is. Give auto={'fp16.enabled': ...}, or write the value
    """
    where, document = read(source)
    refuse_others(document, where)
    return translated(Ledger(where, document, DEEPSPEED, auto, ALIASES, PYDANTIC), world(world_size))


def translated(ledger: Ledger, ranks: int) -> Given:
    """What a ledger of DeepSpeed's keys gives. Raises ConfigError."""
    placed = _placement(ledger, ranks)
    replicas = _replicas(ledger, placed["mesh"] or {}, ranks)
    micro, steps = _batch(ledger, replicas)
    chosen, schedule = optimizer(ledger)
    compute, precision = _precision(ledger)
    local = chosen is not None and chosen.name in TAKES_LOCAL
    if local:
        _check_local(ledger, precision.get("precision"), placed["mesh"] or {})
    fields = {
        "optimizer": chosen,
        **placed,
        "microbatches": steps,
        **precision,
        **_clipping(ledger, local),
        **_zero(ledger, compute),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return finish(
        ledger,
        fields,
        _OWNERS,
        ranks=ranks,
        micro_batch=micro,
        rank_batch=micro * steps,
        global_batch=micro * steps * replicas,
        schedule=schedule.value() if schedule and not ledger.refusals else None,
        **_shown(ledger, compute),
    )


def world(world_size: int | None) -> int:
    """The ranks in all: as given, or as the launcher says, or 1. Raises SpecError."""
    if world_size is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
    if type(world_size) is not int or world_size < 1:
        raise SpecError(f"world_size={world_size!r}: needed the number of ranks, a positive int")
    return world_size


# --- the batch --------------------------------------------------------------------------------------------------------


def _batch(ledger: Ledger, replicas: int) -> tuple[int, int]:
    """(rows of a micro batch, micro batches of a step), from two of three keys or, as in DeepSpeed, from one."""
    total, micro, steps = (ledger.take(path, auto=None) for path in (TOTAL, MICRO, STEPS))
    if steps is None and ledger.values.get(STEPS) == "auto" and STEPS not in ledger.auto and not (total and micro):
        ledger.lacks(STEPS, "nothing says what auto is")
    if not total and not micro:
        ledger.lacks(MICRO, "nothing says how many rows a micro batch has", f"it or {TOTAL}")
        return 1, steps or 1
    if steps is None:
        steps = total // micro // replicas if total and micro else 1
    ledger.became(STEPS, f"Spec(microbatches={steps})")
    if micro is None:
        micro = total // replicas // steps
        ledger.became(MICRO, f"{micro}: rows of a step / ranks / accumulation")
    if total and total != micro * steps * replicas:
        whole = max(micro, 1) * max(steps, 1) * replicas
        parts = f"{max(micro, 1)} x {max(steps, 1)} accumulated x {replicas} ranks that split the batch"
        ledger.refuse(TOTAL, f"{total} rows are not {parts}", f"write {whole}, or take it out")
    return max(micro, 1), max(steps, 1)


# --- where things lie -------------------------------------------------------------------------------------------------


def _placement(ledger: Ledger, ranks: int) -> dict[str, Any]:
    """`zero` and `mesh`, and `pipeline` and `remat` where a document asks for them."""
    stage, pp = _stage(ledger), _stages(ledger)
    tp = max(1, ledger.take("tensor_parallel.autotp_size"))
    within, name = _within(ledger, stage)
    outer, path = ranks // (pp * tp), f"{ZERO}.{'mics_shard_size' if name == 'hsdp' else 'zero_hpz_partition_size'}"
    if outer % within:
        ledger.refuse(
            path, f"{outer} ranks split the batch, no multiple of it", "launch a multiple of it (world_size=)"
        )
    two = 1 < within < outer
    mesh = {"pp": pp, **({"dp_out": -1, "dp": within} if two else {"dp": -1}), "tp": tp}
    mesh = {axis: size for axis, size in mesh.items() if size != 1}
    ledger.became(f"{ZERO}.stage", f"Spec(zero={(name if two else stage)!r})")
    return {
        "zero": name if two else stage,
        "mesh": mesh if mesh != {"dp": -1} else None,
        "pipeline": "1f1b" if pp > 1 else None,
        "remat": "full" if ledger.take("pipeline.activation_checkpoint_interval") else None,
    }


def _stage(ledger: Ledger) -> int:
    old, stage = ledger.take("zero_optimization"), ledger.take(f"{ZERO}.stage")
    return int(old) if isinstance(ledger.values.get("zero_optimization"), bool) else stage


def _stages(ledger: Ledger) -> int:
    stages = ledger.take("pipeline.stages", auto="auto")
    return 1 if stages == "auto" else int(stages)


def _within(ledger: Ledger, stage: int) -> tuple[int, str]:
    """(ranks of the inner data axis, the name of the placement) of hpZ and MiCS; 1 for neither."""
    hpz, mics = ledger.take(f"{ZERO}.zero_hpz_partition_size"), ledger.take(f"{ZERO}.mics_shard_size")
    for name, size in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)):
        if size > 1 and stage != 3:
            ledger.refuse(
                f"{ZERO}.{name}", f"it is of stage 3, and the stage is {stage}", "write stage 3, or take it out"
            )
    if hpz > 1 and mics > 1:
        ledger.refuse(f"{ZERO}.mics_shard_size", "zero_hpz_partition_size says another placement", "keep one of them")
    return (mics, "hsdp") if mics > 1 else (max(1, hpz), "hpz")


def _replicas(ledger: Ledger, mesh: Mapping[str, int], ranks: int) -> int:
    """Ranks that split the batch. A world that the other axes do not divide is a refusal."""
    same = mesh.get("pp", 1) * mesh.get("tp", 1)
    if ranks % same:
        path = "tensor_parallel.autotp_size" if mesh.get("tp", 1) > 1 else "pipeline.stages"
        ledger.refuse(
            path,
            f"{ranks} ranks are no multiple of {same}, the ranks of a replica",
            "launch a multiple of them (world_size=)",
        )
    return max(ranks // same, 1)


def _zero(ledger: Ledger, compute: str | None) -> dict[str, Any]:
    """What else the block of ZeRO decides."""
    fields: dict[str, Any] = {"allow_unused": ledger.take(f"{ZERO}.ignore_unused_parameters") or None}
    if fields["allow_unused"] is None:
        ledger.became(f"{ZERO}.ignore_unused_parameters", "a parameter without a gradient is an error")
    if ledger.take(f"{ZERO}.overlap_comm") is False:
        fields["overlap"] = False
        ledger.became(f"{ZERO}.overlap_comm", "Spec(overlap=False); the same bits")
    path = f"{ZERO}.stage3_max_live_parameters"
    most = ledger.take(path)
    if ledger.has(path):
        itemsize = DTYPES[compute or "fp32"].itemsize
        fields["prefetch_bytes"] = max(most, 1) * itemsize  # in DeepSpeed too a module has what it needs
        ledger.became(
            path, f"Spec(prefetch_bytes={fields['prefetch_bytes']}): elements, in bytes of {compute or 'fp32'}"
        )
    return fields | _offload(ledger)


def _offload(ledger: Ledger) -> dict[str, Any]:
    """Homes of the optimizer's state and of the parameters, and the folder of what lies on NVMe."""
    homes, folders = {}, {}
    for block, kind, old in (("optimizer", "optimizer", "cpu_offload"), ("param", "params", "cpu_offload_param")):
        device, path = f"{ZERO}.offload_{block}.device", f"{ZERO}.offload_{block}.nvme_path"
        home, folder = ledger.take(device), ledger.take(path)
        if ledger.take(f"{ZERO}.{old}"):
            device, home = f"{ZERO}.{old}", "cpu"
        if home != "none":
            homes[kind] = home
            ledger.became(device, f"Spec(offload=): {kind} on {home}")
        if home == "nvme":
            folders[path] = folder
        elif folder is not None:
            ledger.became(path, f"nothing: the device is {home}")
    for path, folder in folders.items():
        if folder in (None, "none") or folder != next(iter(folders.values())):
            why = "needed a folder on a fast local disk" if folder in (None, "none") else "another folder is given too"
            ledger.refuse(path, why, 'write "/local_nvme", or where it is')
    return {"offload": homes or None, "nvme_path": next(iter(folders.values()), None)}


# --- precision --------------------------------------------------------------------------------------------------------


def _precision(ledger: Ledger) -> tuple[str | None, dict[str, Any]]:
    """(the computed dtype, None for fp32; the fields). Gradients travel in it too, unless the document says more."""
    fp16, bf16 = ledger.take("fp16.enabled"), ledger.take("bf16.enabled")
    scale, overflow = _loss_scale(ledger), ledger.take("bf16.check_grad_overflow")
    sent = ledger.take("communication_data_type")
    if fp16 and bf16:
        ledger.refuse("bf16.enabled", "fp16 is enabled too", "enable one of them")
    compute = "fp16" if fp16 else "bf16" if bf16 else None
    coded = _codecs(ledger)
    if by_op := _autocast(ledger, compute, sent, coded):
        _same_dtype(ledger, None)
        return None, by_op
    _same_dtype(ledger, compute)
    if compute:
        ledger.became(f"{compute}.enabled", f"Spec(precision=): parameters held in fp32, computed in {compute}")
    if compute is None and sent in (None, "fp32") and not coded:
        return None, {}
    named = {"compute": compute, "reduce": sent or compute, "loss_scale": scale if fp16 else None, **coded}
    fields: dict[str, Any] = {
        "precision": ConfigCall("fzero.Precision", (), {n: v for n, v in named.items() if v is not None})
    }
    if bf16 and overflow:
        fields["nonfinite"] = "skip"
    elif bf16:
        ledger.became("bf16.check_grad_overflow", "no step is skipped")
    if compute and not sent and "reduce" not in coded:
        note = f"Precision(reduce={compute!r}): gradients travel in the computed dtype"
        ledger.became("communication_data_type", note)
    return compute, fields


def _codecs(ledger: Ledger) -> dict[str, Any]:
    """The codecs of ZeRO++, which is of stage 3, as fields of a Precision."""
    codecs = {}
    for key, field, codec in (("weights", "gather", "int8"), ("gradients", "reduce", "int4")):
        path = f"{ZERO}.zero_quantized_{key}"
        if not ledger.take(path):
            continue
        if ledger.values.get(f"{ZERO}.stage") != 3:
            ledger.refuse(
                path, "it is of stage 3", f"write stage 3; Precision({field}={codec!r}) goes with every stage"
            )
        codecs[field] = codec
        ledger.became(path, f"Precision({field}={codec!r}): blocks of 64; leaves of one dim and embeddings stay exact")
    return codecs


def _autocast(ledger: Ledger, compute: str | None, sent: str | None, coded: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `torch_autocast`; empty where it is off. For fp16 DeepSpeed takes torch's GradScaler."""
    enabled, dtype = ledger.take("torch_autocast.enabled"), str(ledger.take("torch_autocast.dtype"))
    if not enabled:
        return {}
    if compute:
        ledger.refuse("torch_autocast.enabled", f"{compute} is enabled too", "enable one of them")
    by_op = "autocast" if "b" in dtype.removeprefix("torch.") else "autocast_fp16"
    named: dict[str, Any] = {"compute": by_op, "reduce": sent or "fp32", **coded}
    if by_op != "autocast":
        named["loss_scale"] = GRAD_SCALER
    if not sent and "reduce" not in coded:
        note = "Precision(reduce='fp32'): DeepSpeed sends gradients of Linear and Conv in autocast's dtype"
        ledger.became("communication_data_type", note)
    return {"precision": ConfigCall("fzero.Precision", (), named)}


def _loss_scale(ledger: Ledger) -> ConfigCall:
    names = {"initial": "initial_scale_power", "window": "loss_scale_window", "minimum": "min_loss_scale"}
    names |= {name: name for name in ("hysteresis", "consecutive_hysteresis")}
    fixed = ledger.take("fp16.loss_scale")
    values = {ours: ledger.take(f"fp16.{theirs}") for ours, theirs in names.items()}
    if fixed:
        return ConfigCall("fzero.LossScale", (), {"initial": float(fixed), "dynamic": False})
    if values["initial"] > 126:
        ledger.refuse("fp16.initial_scale_power", "fp32 holds no such scale", "write 16")
    values["initial"] = 2.0 ** min(values["initial"], 126)
    default = LossScale()
    return ConfigCall("fzero.LossScale", (), {n: v for n, v in values.items() if v != getattr(default, n)})


def _same_dtype(ledger: Ledger, compute: str | None) -> None:
    """`data_types` can only say again what fp16 and bf16 say, and that sums are fp32."""
    short = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
    for name, needed in (("param_dtype", compute or "fp32"), ("grad_accum_dtype", "fp32")):
        value = ledger.take(f"data_types.{name}")
        plain = None if value is None else str(value).removeprefix("torch.")
        if plain is not None and short.get(plain, plain) != needed:
            ledger.refuse(f"data_types.{name}", f"it is {needed} here", "take it out")


def _clipping(ledger: Ledger, local: bool) -> dict[str, Any]:
    """DeepSpeed clips at 1.0 where nothing is said; 0 clips nothing, and ZeRO measures the norm all the same. local:
    the optimizer takes local gradients, which have no common norm."""
    limit = ledger.take(CLIPPING)
    if local:
        if ledger.has(CLIPPING) and limit:
            why = "the optimizer reduces what it makes of each rank's gradients, so there is no norm of their mean"
            ledger.refuse(CLIPPING, why, f"write {CLIPPING} 0")
        ledger.became(CLIPPING, "nothing is clipped: the optimizer takes each rank's own gradients")
        limit = 0
    measured = ledger.take(f"{ZERO}.compute_grad_norm")
    if not measured:
        ledger.became(f"{ZERO}.compute_grad_norm", 'metrics["grad_norm"] only where something is clipped')
    if not ledger.has(CLIPPING) and not local:
        note = f"Spec(clip_norm={limit}): DeepSpeed's default since 0.19.3"
        ledger.became(CLIPPING, note)
    if limit:
        return {"clip_norm": limit}
    if local:
        return {}
    ledger.became(CLIPPING, "nothing is clipped")
    return {"clip_norm": math.inf} if measured and ledger.has(f"{ZERO}.compute_grad_norm") else {}


def _check_local(ledger: Ledger, precision: ConfigCall | None, mesh: Mapping[str, int]) -> None:
    """Refuses at its key what an optimizer of local gradients leaves no place for."""
    takes = f"{ledger.values['optimizer.type']} takes each rank's own gradients"
    named = {} if precision is None else precision.named
    if "loss_scale" in named:
        path = "fp16.enabled" if named["compute"] == "fp16" else "torch_autocast.dtype"
        why = f"{takes}, and what it keeps for the next step would be in units of a loss scale that changes"
        ledger.refuse(path, why, "enable bf16 instead, which needs no loss scale")
    if named.get("reduce") in CODECS:
        why = f"{takes}, and sends them in codes of its own"
        ledger.refuse(f"{ZERO}.zero_quantized_gradients", why, "take it out")
    for axis, path in (("pp", "pipeline.stages"), ("tp", "tensor_parallel.autotp_size")):
        if axis in mesh:
            ledger.refuse(path, f"{takes}, all in one message, and a rank would have a part of them", "take it out")


# --- beside the Spec --------------------------------------------------------------------------------------------------


def _shown(ledger: Ledger, compute: str | None) -> dict[str, Any]:
    """What is printed, tracked and exported."""
    trackers = {}
    for block in ("tensorboard", "wandb", "csv_monitor"):
        names = [path for path in DEEPSPEED if path.startswith(f"{block}.")]
        settings = {path.rpartition(".")[2]: ledger.take(path) for path in names}
        if settings.pop("enabled"):
            trackers[block] = settings
    narrow = [ledger.take(f"{ZERO}.stage3_gather_{name}_weights_on_model_save") for name in ("16bit", "fp16")]
    seen = [ledger.take(name) for name in ("wall_clock_breakdown", "memory_breakdown")]
    return {
        "every": ledger.take("steps_per_print"),
        "log_level": ledger.take("log_level"),
        "dump": ledger.take("dump_state"),
        "profile": any(seen),
        "trackers": trackers,
        "export_dtype": DTYPES[compute] if any(narrow) and compute else None,
    }
