"""progress_log: where a run is, for a person: a bar of rich on a terminal, a line for each record elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from fzero.progress import Display

_SHOWN = {"loss": "loss {:.4g}", "grad_norm": "norm {:.3g}", "rate": "rate {:.2e}", "loss_scale": "scale {:g}",
          "tokens_per_second": "{:,.0f} tokens/s", "step_seconds": "{:.3g} s a step"}  # fmt: skip


def text(record: Mapping[str, Any]) -> str:
    """A record in a line.

    >>> text({"step": 20, "loss": 1.5, "tokens_per_second": 12345.6, "finite": 1.0})
    'step 20  loss 1.5  12,346 tokens/s'
    """
    parts = [form.format(record[name]) for name, form in _SHOWN.items() if name in record]
    return "  ".join([f"step {record['step']}", *parts])


class Progress:
    """Shows records on a stream. `total` steps give the bar its length; None: no end is known."""

    def __init__(self, total: int | None, stream: TextIO | None = None) -> None:
        self.stream: TextIO | None = stream or sys.stderr  # None: a process that was started with it closed
        self.display = Display.on(self.stream)
        self.total, self.task = total, None if self.display is None else self.display.add(total)

    def show(self, record: Mapping[str, Any]) -> None:
        """Moves the bar, or prints a line. After a stream that fails (a full disk, a reader that is gone) nothing."""
        if self.display is not None and self.task is not None:
            self.display.show(self.task, text(record), record["step"], self.total)
        elif self.stream is not None:
            try:
                print(text(record), file=self.stream, flush=True)
            except (OSError, ValueError):  # ValueError: it was closed
                self.stream = None

    def close(self) -> None:
        """Ends the bar, which stays as it is."""
        if self.display is not None and self.task is not None:
            self.display.remove(self.task, keep=True)
            self.task = None
