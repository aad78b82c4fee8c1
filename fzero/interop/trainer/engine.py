"""engine: a Trainer's state, what its steps and evaluations are, and how they begin."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.comm.agree import gathered
from fzero.interop._hf_compat import Recomputed
from fzero.interop.config import Given
from fzero.interop.config.config_calls import ConfigCall
from fzero.interop.module import Functional, from_module
from fzero.interop.tp_plan import tp_plan
from fzero.interop.trainer import optimizers, refusals, shapes, trainer_step, weights
from fzero.interop.trainer.parallel import axes_of, given_of
from fzero.interop.trainer.running_statistics import Statistics, tracked
from fzero.optim import GradientTransformation
from fzero.session.session import session_of

_FP16 = fzero.Precision(compute="autocast_fp16", reduce="fp32", loss_scale=fzero.LossScale.of_torch())


class Engine:
    """The state of a Trainer and its functions. `step` and `load` change `state`; nothing else changes.

    trained, evaluated: the module as a function, in either mode. statistics: the buffers that are leaves of the state.
    export_dtype: that of an export, or None for the held.
    """

    def __init__(
        self, trainer: Any, spec: fzero.Spec, trained: Functional, statistics: Statistics, state: fzero.State,
        export_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.spec, self.trained, self.state, self.export_dtype = spec, trained, state, export_dtype
        self.statistics = statistics
        self._evaluated = from_module(trainer.model, train=False)
        self._trainer = trainer
        self._scored: dict[Any, Callable[..., Any]] = {}

    @classmethod
    def to_train(cls, trainer: Any, num_updates: int, folder: Path | None) -> Engine:
        """The engine of a run of `num_updates` updates, from the module's parameters or the state in a folder.

        Sets the trainer's `optimizer` and `lr_scheduler`, where they stand after the updates made.
        """
        args = trainer.args
        given = given_of(args, num_updates)
        trained, statistics = _tracking(trainer.model, train=True)
        transformation = _optimizer(trainer, given, num_updates)
        fields = _fields(trainer, trained, given)
        loss = trainer_step.loss_of(trainer, trained, statistics)
        spec = fzero.Spec(loss=loss, **{**fields, "optimizer": transformation})
        state = _begun(spec, trainer.model, trained, args.seed, folder)
        made = state.step - (int(state.tree["loss_scale"]["skipped"].full()) if "loss_scale" in state.tree else 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schedule that goes ahead of its optimizer
            for _ in range(made):
                trainer.lr_scheduler.step()
        return cls(trainer, spec, trained, statistics, state, given.export_dtype if given else None)

    @classmethod
    def to_evaluate(cls, trainer: Any) -> Engine:
        """An engine that evaluates the module as it is, and does not train."""
        given = given_of(trainer.args, 0)
        trained, statistics = _tracking(trainer.model, train=False)
        fields = {**_fields(trainer, trained, given), "optimizer": optim.sgd(0.0)}
        spec = fzero.Spec(loss=trainer_step.loss_of(trainer, trained, statistics), **fields)
        state = _begun(spec, trainer.model, trained, trainer.args.seed, None)
        return cls(trainer, spec, trained, statistics, state, given.export_dtype if given else None)

    def of_all_ranks(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, of a small CPU tensor (1, n) on each. A collective."""
        session = session_of(self.state)
        return torch.cat(gathered(row, session.world_size, session.group))

    def step(self, batch: Any) -> Any:
        """One step. Returns its metrics."""
        with shapes.same_on_ranks():
            self.state = fzero.step(self.state, batch)
        return self.state.metrics

    def load(self, folder: Path | None) -> None:
        """The state that a folder holds, in the place of this one."""
        assert folder is not None
        self.state = fzero.load(folder, like=self.state)

    def evaluate(self, batch: Any, loss_only: bool, name: Any, ignored: Any, stock: Callable[..., Any]) -> Any:
        """What `step.scored_of` returns for a batch. name: hashable, for `ignored`."""
        key = (loss_only, name)
        if key not in self._scored:
            given = self._evaluated, self.statistics, loss_only, ignored, stock
            self._scored[key] = trainer_step.scored_of(self._trainer, *given)
        with shapes.same_on_ranks():
            return fzero.evaluate(self.state, batch, self._scored[key])


def _tracking(model: Any, train: bool) -> tuple[Functional, Statistics]:
    """(the module as a function, in a mode; the statistics that it writes then). They are among its params."""
    model.train(train)
    statistics = tracked(model)
    params, buffers, apply = from_module(model, mutable=statistics.names)
    return Functional({**params, **{n: buffers[n] for n in statistics.names}}, buffers, apply), statistics


def _begun(spec: fzero.Spec, model: Any, module: Functional, seed: int, folder: Path | None) -> fzero.State:
    """The first state: of a checkpoint, of the model's own folder if its parameters are on the meta device, else of
    these."""
    key = fzero.random.key(seed)
    if folder is not None:
        return fzero.load(folder, spec, like=module.params, key=key)
    if weights.on_meta(model):
        return fzero.init(weights.in_files(model, module), spec, key=key)
    weights.same_on_all(module.params)
    return fzero.init(module.params, spec, key=key)


def _fields(trainer: Any, module: Functional, given: Given | None) -> dict[str, Any]:
    """The fields of the Spec: of TrainingArguments, then of `deepspeed=` or `fsdp=`, then of `spec=`."""
    args = trainer.args
    fields: dict[str, Any] = {
        "microbatches": args.gradient_accumulation_steps,
        "clip_norm": args.max_grad_norm if args.max_grad_norm > 0 else float("inf"),
        "precision": "autocast" if args.bf16 else _FP16 if args.fp16 else "fp32",
        "trainable": module.apply.trainable if module.apply.frozen or module.apply.mutable else None,
        "remat": "full" if Recomputed.of(args).wanted else "none",
        "allow_unused": True,
        "device": str(args.device),
        "timeout": float(args.ddp_timeout),
    }
    fields |= dict(given or {})
    fields |= getattr(args, "spec", None) or {}
    fields["mesh"] = axes_of(args, given)
    if fields["mesh"].get("tp", 1) != 1 and not fields.get("shard"):
        fields["shard"] = tp_plan(trainer.model)
    fields.setdefault("clip_norm", float("inf"))  # so that the norm is measured
    return fields


# --- the optimizer ----------------------------------------------------------------------------------------------------


def _optimizer(trainer: Any, given: Given | None, num_updates: int) -> GradientTransformation:
    """The update's transformation. Sets the trainer's `optimizer`, a handle, and `lr_scheduler`."""
    device = trainer.args.device
    if given is not None and "optimizer" in given:
        return _document(trainer, given, num_updates)
    kind = refusals.KINDS.get(str(trainer.args.optim.value))
    if trainer.optimizer is None and kind is not None:
        chosen, schedule = _by_name(trainer, kind), trainer.lr_scheduler
        trainer.optimizer = optimizers.Handle([{"lr": chosen.lr}])
    else:
        trainer.create_optimizer()
        chosen = _read(trainer)
        schedule = trainer.lr_scheduler
    refusals.raise_all([(path, f"{path}: {why}. {fix[:1].upper()}{fix[1:]}") for path, why, fix in chosen.refusals])
    if schedule is None and given is not None and given.schedule is not None:
        return chosen.transformation(_of_document(trainer, given.schedule))
    optimizers.empty(trainer.optimizer)
    trainer.create_scheduler(num_updates)  # unless there is one
    course = optimizers.course(trainer.optimizer, trainer.lr_scheduler, num_updates)
    return chosen.scheduled({name: table.to(device) for name, table in course.items()})


def _read(trainer: Any) -> optimizers.Chosen:
    """The trainer's optimizer, as it was before it was emptied."""
    before, read = getattr(trainer, "_optimizer_read", (None, None))
    if read is None or before is not trainer.optimizer:
        named = dict(trainer.model.named_parameters())
        names = {id(p): name for name, p in named.items()}
        read = optimizers.chosen(trainer.optimizer, names, [name for name, p in named.items() if p.requires_grad])
        trainer._optimizer_read = trainer.optimizer, read
    return read


def _by_name(trainer: Any, kind: str) -> optimizers.Chosen:
    """An optimizer that torch has not, by its name in `optim=`."""
    args = trainer.args
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    decay = {name: args.weight_decay * (name in decays) for name, _ in trainer.model.named_parameters()}
    values = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return optimizers.Chosen(kind, args.learning_rate, values, decay)


def _document(trainer: Any, given: Given, num_updates: int) -> GradientTransformation:
    """The optimizer of a ds_config, with its own schedule or the one that TrainingArguments name."""
    call = given.expressions["optimizer"]
    rate = call.arguments[0]
    if isinstance(rate, ConfigCall):
        _of_document(trainer, rate.value())
        return given["optimizer"]
    trainer.optimizer = optimizers.Handle([{"lr": rate}])
    trainer.create_scheduler(num_updates)
    table = optimizers.rates(trainer.optimizer, trainer.lr_scheduler, num_updates).to(trainer.args.device)

    def scheduled(call: ConfigCall) -> ConfigCall:
        own = call.arguments[0]
        named = {name: scheduled(v) if isinstance(v, ConfigCall) else v for name, v in call.named.items()}
        share = own / rate if rate else 1.0
        return dataclasses.replace(call, arguments=(optimizers.tabled(table * share), *call.arguments[1:]), named=named)

    return scheduled(call).value()


def _of_document(trainer: Any, schedule: optim.Schedule) -> optim.Schedule:
    """A document's schedule, and the handle and the schedule of torch that show its rates."""
    trainer.optimizer = optimizers.Handle([{"lr": 1.0}])
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda count: float(schedule(torch.tensor(count)))
    )
    trainer._created_lr_scheduler = True
    return schedule
