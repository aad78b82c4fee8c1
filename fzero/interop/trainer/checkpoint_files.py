"""checkpoint_files: what a Trainer saves and loads: the model for `from_pretrained`, and the state of fzero.

The names of folders are transformers'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers

import fzero
from fzero.errors import CheckpointError
from fzero.interop.trainer import resume, weights
from fzero.interop.trainer.engine import Engine

FOLDER = "fzero"  # of a checkpoint: the state


class CheckpointFiles(transformers.Trainer):
    """transformers' Trainer, whose files are fzero's once there is an engine."""

    engine: Engine | None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for `from_pretrained`: a collective. There is no training_args.bin, which is a pickle."""
        if self.engine is None:
            return super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or str(self.args.output_dir))
        try:
            weights.write(self, self.engine.state, self.engine.trained.apply, folder, self.engine.export_dtype)
        except OSError as error:
            why = f"the model cannot be written: {error.strerror or error}. Make room, or name another folder"
            raise CheckpointError(folder, f"{why}: trainer.save_model(folder)", error.errno) from error
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        folder = Path(output_dir) / FOLDER
        if self.args.should_save and os.path.lexists(folder):  # of a run that has gone back since
            weights.remove(folder)
        self.accelerator.wait_for_everyone()
        fzero.save(self.engine.state, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """A look at what transformers reads; the state is loaded once the step is known."""
        resume.check(resume_from_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:  # whatever lies in the file
            raise resume.unreadable(checkpoint, error) from None

    def _load_best_model(self) -> None:
        assert self.engine is not None
        self.engine.load(state_of(self.state.best_model_checkpoint))


def state_of(checkpoint: Any) -> Path | None:
    """The folder of the state in a checkpoint of a Trainer. Raises CheckpointError if it has none."""
    if not checkpoint:
        return None
    folder = Path(checkpoint) / FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            Path(checkpoint),
            f"has no folder {FOLDER!r}: it was saved by another Trainer, or with save_only_model. To begin from its "
            f"weights: model = AutoModel...from_pretrained({str(checkpoint)!r})",
        )
    return folder
