"""parallel: what `deepspeed=` and `fsdp=` of TrainingArguments give, with transformers 5.23's meanings.

"auto" is what TrainingArguments say. A value that says something else than they do is a refusal, and so is a flag that
the document leaves to DeepSpeed's default: nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from fzero.errors import ConfigError
from fzero.interop.config import Given, accelerate_config, ds_config
from fzero.interop.config.read import read

PLACEHOLDER_UPDATES = 1000  # of a document that is checked before the number of updates is known
Refusal = tuple[str, str]


def given_of(args: Any, num_updates: int | None = None) -> Given | None:
    """What the two fields give, or None if neither is set. num_updates: those of the run, once they are known.

    Raises ConfigError with all that is in the way.
    """
    said = getattr(args, "parallel", {})
    if said.get("deepspeed") and said.get("fsdp"):
        text = "deepspeed, fsdp: both are given. Keep one of them"
        raise ConfigError(f"TrainingArguments: {text}", [("deepspeed", text)])
    if said.get("deepspeed"):
        return _deepspeed(args, said["deepspeed"], num_updates)
    return _fsdp(args, said["fsdp"], said.get("fsdp_config")) if said.get("fsdp") else None


def axes_of(args: Any, given: Given | None) -> dict[str, int]:
    """The axes of the mesh: of `spec=`, else of the two fields. Ranks that no axis speaks of are `dp`, next to `tp`."""
    extra = getattr(args, "spec", None) or {}
    axes = dict(extra.get("mesh") or dict(given or {}).get("mesh") or {"dp": -1})
    if "dp" in axes or -1 in axes.values():
        return axes
    return (
        {name: axes[name] for name in axes if name != "tp"} | {"dp": -1} | {k: v for k, v in axes.items() if k == "tp"}
    )


def _deepspeed(args: Any, source: Any, num_updates: int | None) -> Given:
    where, document = read(source)
    auto, silent = _flags(args, document, num_updates)
    refusals: list[Refusal] = [
        (path, f"{path}: it is missing, so DeepSpeed takes {default!r}, but TrainingArguments say {value!r}. Write "
               f'"auto"') for path, (value, default) in silent.items()
    ]  # fmt: skip
    given = None
    try:
        given = ds_config(document, world_size=args.world_size, auto=auto)
        refusals += [(name, f"{name}.enabled: report_to= names the trackers of a Trainer. Take the block out")
                     for name in given.trackers]  # fmt: skip
    except ConfigError as error:
        refusals += error.refusals or [("", str(error))]
    if refusals or given is None:
        raise ConfigError(
            "\n".join([f"{where}: it does not fit the arguments", *(f"  {t}" for _, t in refusals)]), refusals
        )
    return given


def _flags(
    args: Any, document: Mapping[str, Any], num_updates: int | None
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """(values that TrainingArguments give to keys, {path: (value, default)} of flags that a missing key ignores)."""
    updates = PLACEHOLDER_UPDATES if num_updates is None else num_updates
    auto: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    total = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    params = {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    schedule = {
        "warmup_min_lr": 0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, args.get_warmup_steps(updates)),
        "total_num_steps": updates,
    }
    flags = {
        "train_batch_size": total,
        "gradient_clipping": float(args.max_grad_norm),
        **{f"optimizer.params.{name}": value for name, value in params.items()},
        **{f"scheduler.params.{name}": value for name, value in schedule.items()},
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
    }
    silent = {}
    for path, value in flags.items():
        said = _at(document, path)
        ours = num_updates is None and path.rpartition(".")[2] in ("total_num_steps", "warmup_num_steps")
        if said is not None and not (ours and said != "auto"):
            auto[path] = value
        elif said is None and path in SILENT and _block(document, path) and value != SILENT[path]:
            silent[path] = (value, SILENT[path])
    return auto, silent


SILENT: dict[str, Any] = {  # what DeepSpeed takes where a key is missing, and a flag of TrainingArguments exists
    "gradient_clipping": 1.0,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "fp16.enabled": False,
    "bf16.enabled": False,
}


def _at(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _block(document: Mapping[str, Any], path: str) -> bool:
    """Whether the document speaks of what the key belongs to: its optimizer may be the Trainer's."""
    return not path.startswith("optimizer.") or "optimizer" in document


def _fsdp(args: Any, fsdp: Any, config: Any) -> Given:
    """The plugin of FSDP that transformers would make, as `accelerate_config` reads it."""
    given = dict(read(config)[1]) if config else {}
    given = {name.removeprefix("fsdp_"): value for name, value in given.items()}
    if isinstance(fsdp, (str, list)) and fsdp not in ("true", "True"):
        transformers.TrainingArguments._apply_legacy_fsdp_to_config(fsdp, given)
    given.setdefault("version", 2)
    refusals = [(f"fsdp_config.{name}", f"fsdp_config.{name}: fzero runs on CUDA and CPU. Take it out")
                for name in [*given] if name.startswith("xla") and given.pop(name)]  # fmt: skip
    if "cpu_offload" in given:
        given["offload_params"] = given.pop("cpu_offload")
    document = {"distributed_type": "FSDP", "mixed_precision": args.mixed_precision, "fsdp_config": given}
    try:
        found = accelerate_config(document, world_size=args.world_size)
    except ConfigError as error:
        refusals += error.refusals
    if refusals:
        raise ConfigError("\n".join(["fsdp_config: not all can be kept", *(f"  {t}" for _, t in refusals)]), refusals)
    return found
