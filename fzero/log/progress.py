"""progress: where a run is, for a person: a bar of rich on a terminal, a line for each record elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

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
        self.stream = stream or sys.stderr
        self.bar = _bar(total, self.stream) if self.stream.isatty() else None

    def show(self, record: Mapping[str, Any]) -> None:
        """Moves the bar, or prints a line."""
        if self.bar is None:
            print(text(record), file=self.stream, flush=True)
            return
        bar, task = self.bar
        bar.update(task, completed=record["step"], description=text(record))

    def close(self) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar[0].stop()


def _bar(total: int | None, stream: TextIO) -> tuple[Any, Any] | None:
    """(rich's progress, its task); None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(file=stream))
    bar.start()
    return bar, bar.add_task("step 0", total=total)
