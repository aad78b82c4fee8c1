"""trainer: transformers' Trainer, whose step, evaluation and files are fzero's. Its loop stays its own.

Overridden are the places where transformers wraps a model, runs a micro batch, clips, evaluates, saves and loads
(transformers 5.23.0). Data, callbacks, logs, schedules and the names of folders are transformers'.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

from fzero.cost.memory import account
from fzero.interop._hf_compat import Recomputed, keep_activations
from fzero.interop.trainer import data_ranks, refusals, resume, shapes, trainer_step, weights
from fzero.interop.trainer.arguments import TrainingArguments
from fzero.interop.trainer.batch_shapes import BatchShapes
from fzero.interop.trainer.began import Began
from fzero.interop.trainer.checkpoint_files import CheckpointFiles, state_of
from fzero.interop.trainer.engine import Engine
from fzero.interop.trainer.parallel import axes_of, given_of
from fzero.ir.mesh import Mesh

log = logging.getLogger("fzero")


class Mixin(CheckpointFiles):
    """What `Trainer` and `Seq2SeqTrainer` put over transformers' classes.

    `engine` is None until training or evaluation begins; then the model's parameters are in `engine.state`, and the
    module is on the meta device. `gathered` brings them back for a while.
    """

    model: Any
    optimizer: Any

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        bound = inspect.signature(super().__init__).bind(model, args, *more, **named).arguments
        refusals.check(self, Mixin, args, model, bound.get("optimizers", (None, None)))
        axes = axes_of(args, given_of(args))
        self._mesh = Mesh.of({**axes, "dp": axes.get("dp", 1)}, args.world_size)
        self.engine: Engine | None = None
        self._held: weights.HeldModule | None = None
        self._items: Any = None
        self._counted = False
        self._noted: list[dict[str, Any]] | None = None  # what is logged while a loss is captured
        self._window: list[Any] = []
        self._flops_per_element: int | None = None
        self._planned: tuple[Any, int] = (None, 0)  # a program and its planned peak
        self._shapes = BatchShapes(self, self._mesh)
        self._given_optimizer = (bound.get("optimizers") or (None, None))[0]
        super().__init__(model, args, *more, **named)
        if self.train_dataset is not None:
            refusals.short_batches(self, args, self.train_dataset, self._mesh)

    # --- before the loop

    def create_accelerator_and_postprocess(self) -> None:
        """transformers' own, whose data and metrics are those of the mesh's data ranks."""
        super().create_accelerator_and_postprocess()
        data_ranks.limit(self.accelerator, self._mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """How many ranks are given one batch: by this transformers counts a step's rows and items."""
        return data_ranks.same_batch(self._mesh)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: a rank moves only its part."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._created_lr_scheduler:
            self.optimizer, self.lr_scheduler = self._given_optimizer, None
            self._created_lr_scheduler = False
        if self.engine is not None and self.engine.state.step and not resume_from_checkpoint:
            log.warning("fzero: train() again begins with new moments of the optimizer. To go on with the old ones: "
                        "resume_from_checkpoint=, with a larger max_steps")  # fmt: skip
        if Recomputed.of(self.args).wanted:  # which the Spec's remat does
            keep_activations(self.model)
        self._here("training begins")
        self.engine = Engine.to_train(self, max_steps, state_of(resume_from_checkpoint))
        if resume_from_checkpoint:
            resume.same_steps(resume_from_checkpoint, self.state.global_step, self.engine.state.step)
        self._begin()
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _begin(self) -> None:
        """After the start of an engine: the module without parameters, and nothing left for Accelerate to wrap."""
        assert self._held is not None
        assert self.engine is not None
        self._held.taken(self.args.device, self.engine.statistics.names)
        self._flops_per_element, self.model_wrapped = None, self.model
        self._began = Began(self.model)
        self.accelerator._models, self.accelerator._optimizers = [self.model], [self.optimizer]
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))

    def _here(self, why: str) -> None:
        """The module with its parameters, for an engine to begin with."""
        if self._held is None or self._held.module is not self.model:
            self._held = weights.HeldModule(self.model)
        elif self._held.away and self.engine is not None:
            self._held.back(self.engine.state, why)

    # --- a step

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of a window, of one shape on all ranks, and its number of items: counted in the exchange in which
        ranks agree on lengths, where they do. Without `average_tokens_across_devices` it is that of this rank."""
        together = self.args.world_size > 1 and self._shapes.pads_to() > 0
        with data_ranks.alone(self.accelerator) if together else contextlib.nullcontext():
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        own = float(items) if together and items is not None else 0.0
        batches, _, _, total = self._shapes.shaped(batches, self.args.train_batch_size, own)
        self._window = []
        if together and self.args.average_tokens_across_devices and isinstance(items, torch.Tensor):
            items = torch.full_like(items, total)
        return batches, items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keeps a micro batch; the last of a window makes the step. Returns this rank's loss then, and 0 before."""
        assert self.engine is not None
        self._window.append(self._prepare_inputs(inputs))
        if len(self._window) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        if not self.accelerator.gradient_state.sync_gradients:  # transformers would go on in the next epoch's window
            log.warning("fzero: the last %d batches of an epoch fill no window of %d, and are left out: give the data "
                        "set a length", len(self._window), self.args.gradient_accumulation_steps)  # fmt: skip
            self._window = []
            return torch.zeros((), device=self.args.device)
        self._began.check(self)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.20
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        steps = self.args.gradient_accumulation_steps
        tracks = bool(self.engine.statistics.names)
        place = self._mesh.data_rank(self.args.process_index), self._mesh.data_ranks
        batch = trainer_step.window(self._window, num_items_in_batch, steps, scaled, place, self.args.device, tracks)
        number, self._window = len(self._window), []
        metrics = self.engine.step(batch)
        self._log_all(trainer_step.numbers(metrics))
        self.optimizer.step_was_skipped = "finite" in metrics and not bool(metrics["finite"])
        values = trainer_step.losses(metrics, number, steps, scaled, place)
        if not self.args.logging_nan_inf_filter or bool(values.isfinite().all()):
            return values.sum()
        return trainer_step.filtered(values, self._tr_loss, 1 + self.state.global_step - self._globalstep_last_logged)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self.engine is not None
        return self.engine.state.metrics["grad_norm"]

    def floating_point_ops(self, inputs: Any) -> int:
        """transformers' estimate, which is proportional to the elements of the input: parameters are counted once."""
        size = getattr(inputs.get(getattr(self.model, "main_input_name", "input_ids")), "numel", int)()
        if not size:
            return super().floating_point_ops(inputs)
        if self._flops_per_element is None:
            self._flops_per_element = super().floating_point_ops(inputs) // size
        return self._flops_per_element * size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """transformers' count, of a batch without the rows and the places that were added to it."""
        super()._track_num_input_tokens(next(self._shapes.given, inputs))

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """transformers' log, with the planned peak of the step's program in bytes. In `compute_loss`: the step's
        metrics."""
        if self._noted is not None:
            self._noted.append(dict(logs))
            return
        program = self.engine.state.program if self.engine is not None and "loss" in logs else None
        if program is not None and program is not self._planned[0]:
            self._planned = (program, account(program).peak)
        if program is not None:
            logs["planned_peak_bytes"] = self._planned[1]
        super().log(logs, *more, **named)

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[dict[str, Any]]]:
        """While a loss is captured: what it logs is in the list. Each run of the step logs its numbers."""
        noted: list[dict[str, Any]] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def _log_all(self, entries: list[dict[str, float]]) -> None:
        for entry in entries:
            super().log(entry)

    # --- evaluation

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """transformers' loop. With predict_with_generate the model is whole for its length."""
        if self.engine is None or self._held is None or self._held.module is not self.model:
            self._here("evaluation begins")
            self.engine = Engine.to_evaluate(self)
            self._begin()
        generates = getattr(self.args, "predict_with_generate", False)
        with self.gathered() if generates else contextlib.nullcontext():
            return super().evaluation_loop(*given, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **more: Any
    ) -> Any:
        """transformers' own, on the sharded parameters."""
        stock = super().prediction_step
        if self._held is None or not self._held.away:
            return stock(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)
        assert self.engine is not None
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs.get(name) for name in self.label_names)
        rows = shapes.num_rows(inputs)
        (batch,), to, own, _ = self._shapes.shaped([inputs], self.args.eval_batch_size)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        given = (
            {"inputs": batch}
            if items is None
            else {"inputs": batch, "items": trainer_step.whole(items, self.args.device)}
        )
        found = self.engine.evaluate(given, prediction_loss_only, tuple(ignore_keys or ()), ignore_keys, stock)
        self._log_all(trainer_step.numbers(found))
        ids, num_labels = inputs.get("input_ids"), getattr(getattr(model, "config", None), "num_labels", None)
        classes = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 3 else num_labels  # or choices
        outputs = shapes.trimmed(found.get("outputs"), (rows, shapes.num_rows(batch)), to, own, classes)
        loss = found["loss"][0] if "loss" in found else None
        if prediction_loss_only:
            return loss, None, None
        whole = None if not labels or any(label is None for label in labels) else labels
        return loss, outputs, whole[0] if whole and len(whole) == 1 else whole

    @contextlib.contextmanager
    def counted(self, items: Any) -> Iterator[None]:
        """While `prediction_step` is captured: its inputs are where they belong, and the number of its items came with
        them, so nothing is gathered."""
        self._counted, self._items = True, None if items is None else items.reshape(())
        try:
            yield
        finally:
            self._counted, self._items = False, None

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs if self._counted else super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        return self._items if self._counted else super()._get_num_items_in_batch(batch_samples, device)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """The module with its whole parameters on every rank, to call it or to generate: a collective.

        They are gathered once, and the log of fzero (level INFO) says their bytes. Changes to them are lost at the end.
        """
        away = self._held is not None and self._held.away
        if away and self.engine is not None:
            assert self._held is not None
            self._held.back(self.engine.state, "gathered()")
        try:
            yield self.model
        finally:
            if away:
                assert self._held is not None
                assert self.engine is not None
                self._held.taken(self.args.device, self.engine.statistics.names)
