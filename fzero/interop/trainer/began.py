"""began: what a callback may not change while a Trainer trains, for it was read when training began."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from fzero.interop.trainer import refusals

log = logging.getLogger("fzero")


class Began:
    """A run as it began: which parameters train. `check` warns of a rate once."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(path, part._parameters) for path, part in model.named_modules() if part._parameters]
        self._trains, self._warned = self._now(), False

    def _now(self) -> list[bool]:
        """Of each parameter. To look for the parameters anew would take longer than all else between two steps."""
        return [p is not None and p.requires_grad for _, held in self._held for p in held.values()]

    def check(self, trainer: Any) -> None:
        """Raises ConfigError for a parameter that was frozen, or no longer is. Warns of a rate that a callback has set:
        those of the step are the schedule's."""
        if (now := self._now()) != self._trains:
            names = [f"{path}.{name}".lstrip(".") for path, held in self._held for name in held]
            name, trains = next((n, b) for n, a, b in zip(names, self._trains, now, strict=True) if a != b)
            why = "which parameters train is read once, when training begins. Set it before, or in two runs: set it"
            text = f"requires_grad of {name!r} became {trains} while training: {why} between two calls of train()"
            refusals.raise_all([("model", text)])
        said, handle = getattr(trainer.lr_scheduler, "_last_lr", None), trainer.optimizer
        if said and not self._warned and handle.param_groups[0]["lr"] != said[0]:
            self._warned = True
            log.warning("fzero: param_groups[0]['lr'] is %g, and the step takes %g, its schedule's: give a schedule",
                        handle.param_groups[0]["lr"], said[0])  # fmt: skip
