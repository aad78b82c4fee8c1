"""refusals: what a Trainer of fzero cannot do, said at the start: all of it in one error, with the smallest fix.

A field at its default is never refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import transformers
from torch import nn
from torch.utils.data import IterableDataset

import fzero
from fzero import optim
from fzero._torch_compat import NormBase
from fzero.errors import ConfigError
from fzero.interop import _hf_compat
from fzero.interop._hf_compat import Recomputed
from fzero.interop.tp_plan import tp_plan
from fzero.interop.trainer import weightless, weights
from fzero.interop.trainer.arguments import LAUNCHED
from fzero.interop.trainer.optimizers import OURS
from fzero.interop.trainer.parallel import axes_of, given_of
from fzero.ir.mesh import Mesh
from fzero.shard.partition import P

KINDS = {"lion_32bit": "Lion", "lion": "Lion", "adamw_8bit": "AdamW8bit", "adamw_bnb_8bit": "AdamW8bit"}
OPTIMS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", *KINDS)
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
LEAST = (5, 11)  # of transformers: what its Trainer is asked for
REMAT_KWARGS = ("use_reentrant", "preserve_rng_state")  # of `Recomputed.kwargs`: they change no number here
Refusal = tuple[str, str]  # the path of what is in the way, and a text that begins with it
assert set(KINDS.values()) == set(OURS)


class RefusalRow(NamedTuple):
    """A field of TrainingArguments: whether a value is in the way, why, and the smallest fix."""

    name: str
    refused: Callable[[Any], Any]
    why: str
    fix: str


FIELDS = (
    RefusalRow("auto_find_batch_size", bool, "a step has one batch size",
        "set it to False, and per_device_train_batch_size to what fits: fzero.lower plans the peak without a device"),
    RefusalRow("torch_compile", bool, "fzero captures the step by itself",
        'leave it out, or give spec={"compile": "auto"}'),
    RefusalRow("parallelism_config", lambda v: v is not None, "the axes are those of a Spec's mesh", "leave it out"),
    RefusalRow("fp16_full_eval", bool, "evaluation runs in the precision of training", "leave it out"),
    RefusalRow("bf16_full_eval", bool, "evaluation runs in the precision of training",
        "leave it out, or set bf16=True"),
    RefusalRow("neftune_noise_alpha", lambda v: v is not None, "its hooks are not captured", "leave it out"),
    RefusalRow("use_liger_kernel", bool, "its kernels are not captured", "leave it out"),
    RefusalRow("optim", lambda v: str(getattr(v, "value", v)) not in OPTIMS, "fzero has no counterpart",
        f"take one of {', '.join(OPTIMS)}"),
    RefusalRow("lr_scheduler_type", lambda v: str(getattr(v, "value", v)) in METRIC_SCHEDULES,
        "rates are known before the run, and this one follows the metrics", "take a schedule of the step count"),
    RefusalRow("debug", bool, "its hooks are not captured", "leave it out"),
    RefusalRow("deepspeed", bool, "transformers has started DeepSpeed's engine for it",
        "import TrainingArguments from fzero.interop"),
    RefusalRow("fsdp", bool, "transformers has made FSDP's plugin for it",
        "import TrainingArguments from fzero.interop"),
    RefusalRow("n_gpu", lambda v: v > 1, "one process would drive several devices",
        "launch with torchrun --nproc-per-node=<devices>"),
    RefusalRow("pad_to", lambda v: type(v) is not int or v < 0, "needed a whole number of at least 0, or None",
        "leave it out"),
)  # fmt: skip


def check(trainer: Any, base: type, args: Any, model: Any, optimizers: Any) -> None:
    """Raises ConfigError for all that is in the way of a Trainer that is being made. base: the class whose methods a
    subclass may not replace."""
    found = [*_fields(args), *_beside(args), *_subclass(trainer, base), *_model(model)]
    schedule = type(optimizers[1]).__name__
    if schedule in ("ReduceLROnPlateau", "GreedyLR"):
        why = "rates are known before the run, and this one follows the metrics"
        found.append(("optimizers", f"optimizers[1], a {schedule}: {why}. Take a schedule of the step count"))
    given: Any = None
    try:
        given = given_of(args)
    except ConfigError as error:
        found += list(error.refusals) or [("deepspeed", str(error))]
    extra = args.spec if isinstance(getattr(args, "spec", None), dict) else {}
    found += _spec(extra)
    found += _mesh(args, model, given, {**(given or {}), **extra})
    raise_all(found)


def raise_all(found: Sequence[Refusal]) -> None:
    """Raises ConfigError for refusals, (path, text), if there are any."""
    if found:
        count = "one thing is" if len(found) == 1 else f"{len(found)} things are"
        raise ConfigError("\n".join([f"Trainer: {count} in the way", *(f"  {text}" for _, text in found)]), found)


def _fields(args: Any) -> Iterator[Refusal]:
    for row in FIELDS:
        value = getattr(args, row.name, None)
        if value is not None and row.refused(value):
            shown = getattr(value, "value", value)
            yield row.name, f"{row.name}={shown!r}: {row.why}. {row.fix[:1].upper()}{row.fix[1:]}"


def _beside(args: Any) -> Iterator[Refusal]:
    """What is refused of several fields together, of blocks, and of the environment."""
    have = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if have < LEAST:
        wanted = ".".join(map(str, LEAST))
        why = f"transformers {transformers.__version__}: its Trainer has not all that this one asks for"
        yield "transformers", f"{why}. pip install 'transformers>={wanted}'"
    if args.save_only_model and args.load_best_model_at_end:
        why = "load_best_model_at_end reads the whole state of the best step"
        yield "save_only_model", f"save_only_model=True: {why}. Leave one of them out"
    again = Recomputed.of(args)
    for name in again.kwargs if again.wanted else ():
        if name not in REMAT_KWARGS:
            path = f"{again.field}[{name!r}]"
            yield path, f"{path}: it is Spec(remat='full') here. Leave it out, or give spec={{'remat': {{...}}}}"
    if args.accelerator_config is not None and not args.accelerator_config.even_batches:
        why = "a rank without a batch would leave the others waiting"
        yield "accelerator_config", f"accelerator_config.even_batches=False: {why}. Set it to True"
    for name in LAUNCHED:
        if os.environ.get(name, "").lower() in ("1", "true"):
            yield name, f"{name}=true: `accelerate launch` has chosen another engine. Launch with torchrun"


def _spec(extra: dict[str, Any]) -> Iterator[Refusal]:
    """What `fzero.Spec` refuses of `spec=`, and what is the Trainer's own there."""
    ours = [name for name in extra if name in ("loss", "optimizer", "step", "microbatches")]
    for name in ours:
        yield f"spec.{name}", f"spec[{name!r}]: the other arguments say it. Leave it out"
    try:
        kept = {name: value for name, value in extra.items() if name not in (*ours, "mesh", "shard")}
        fzero.Spec(loss=_subclass, optimizer=optim.sgd(0.0), **kept)
    except fzero.SpecError as error:
        yield "spec", f"spec: {error}"


def _mesh(args: Any, model: Any, given: Any, fields: dict[str, Any]) -> Iterator[Refusal]:
    """What is in the way of the mesh, and of what ranks do that are given the same batch."""
    axes = axes_of(args, given)
    try:
        mesh = Mesh.of({**axes, "dp": axes.get("dp", 1)}, args.world_size)
        tp = dict(mesh.axes).get("tp", 1) > 1
        shard = fields.get("shard") or (tp_plan(model) if tp and isinstance(model, nn.Module) else None)
        fzero.Spec(
            loss=_subclass, optimizer=optim.sgd(0.0), mesh=axes, shard=shard if shard or not tp else {"*": P("tp")}
        )
    except fzero.SpecError as error:
        yield "spec.mesh", f"spec: {error}"
        return
    if mesh.data_ranks == mesh.world_size:
        return
    shared = ", ".join(mesh.same_batch)
    for name, value in (("eval_use_gather_object", False), ("train_sampling_strategy", "batch_rebalance")):
        if bool(getattr(args, name, None)) and str(getattr(args, name)) in ("True", value):
            yield (
                name,
                f"{name}={getattr(args, name)!r}: it takes each of the ranks of {shared} for a data rank. Leave it out",
            )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        why = f"it gives each of the ranks of {shared} rows of its own"
        yield "accelerator_config", f"accelerator_config.dispatch_batches=True: {why}. Leave it out"
    norms = model.named_modules() if isinstance(model, nn.Module) and "pp" in shared.split(", ") else ()
    for path in [path for path, part in norms if isinstance(part, NormBase) and part.track_running_stats][:1]:
        why = "has running statistics, which a mesh axis 'pp' does not carry"
        yield "model", f"model: {path!r} {why}. Leave the axis out"


def _subclass(trainer: Any, base: type) -> Iterator[Refusal]:
    kind = type(trainer)
    for name in ("training_step", "get_batch_samples", "_clip_grad_norm"):
        if getattr(kind, name) is not getattr(base, name):
            fix = "Override compute_loss, or write the step with fzero.Spec(step=...)"
            yield name, f"{kind.__name__}.{name}: its work is inside the captured step. {fix}"


def _model(model: Any) -> Iterator[Refusal]:
    """What is refused of a model; what `from_module` refuses comes from there."""
    if not isinstance(model, nn.Module):  # a name, or None with model_init
        return
    placed = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if placed or getattr(model, "is_distributed_loading_by_transformers", False):
        yield "model", "model: it lies on several devices already. Load it without device_map= and distributed_config="
    if weights.on_meta(model):
        yield from _without_values(model)
    synced = [path for path, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if synced:
        why = "is a SyncBatchNorm, whose collectives are not captured"
        yield "model", f"model: {synced[0]!r} {why}. Take nn.BatchNorm2d: each rank normalises by its own rows"


def _without_values(model: Any) -> Iterator[Refusal]:
    """What is in the way of reading the parameters of a model on the meta device from its folder."""
    folder, why = weights.folder_of(model), ""
    fix = "Take a config of AutoConfig.from_pretrained(folder), or make the model with its values"
    if not all(p.is_meta for p in model.parameters()):
        why = "some of its parameters are on the meta device, and others have values"
    elif not (isinstance(model, transformers.PreTrainedModel) and list(folder.glob("*.safetensors"))):
        why = (
            f"its parameters are on the meta device, and its name_or_path, {str(folder)!r}, is no folder of safetensors"
        )
    elif _untied(model):
        why = "its parameters are on the meta device, and those that its config ties are apart"
        fix = "Call model.tie_weights(), which init_empty_weights undoes"
    elif _hf_compat.renamed_in_files(model):
        why = "its parameters are on the meta device, and its files have other names than the module"
    if why:
        yield "model", f"model: {why}. {fix}"


def _untied(model: Any) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False) and head is not None and table is not None
    return bool(tied and head.weight is not table.weight)


# --- short batches ----------------------------------------------------------------------------------------------------


def short_batches(trainer: Any, args: Any, dataset: Any, mesh: Mesh) -> None:
    """Raises ConfigError for a last batch of an epoch that a pipeline cannot take: its stages run one shape."""
    if dict(mesh.axes).get("pp", 1) == 1 or mesh.data_ranks > 1:
        return  # a step of one rank takes it at its own size, and Accelerate fills the batches of several
    if args.dataloader_drop_last or args.gradient_accumulation_steps == 1:
        return  # a step of one batch has a program of its own
    left = 0 if isinstance(dataset, IterableDataset) else len(dataset) % args.train_batch_size
    if left and not weightless.rows(trainer, None):
        short_batch(left, args.train_batch_size)


def short_batch(num_rows: int, rows: int) -> None:
    """Raises ConfigError: a batch that is too short for a pipeline, of a loss that no rows can be left out of."""
    why = "a mesh axis 'pp' runs micro batches of one shape, and it is not known of this loss that rows without labels"
    text = f"train_dataset: the last batch of an epoch has {num_rows} rows of {rows}: {why} weigh nothing"
    raise_all([("train_dataset", f"{text}. Set dataloader_drop_last=True, or leave the axis out")])
