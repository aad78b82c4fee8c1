"""trackers: a record given to a tracker, by the method that it has. Nothing of them is imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fzero.errors import SpecError

Record = Mapping[str, Any]


def _scalars(tracker: Any, record: Record, step: int) -> None:
    for name, value in record.items():
        tracker.add_scalar(name, value, step)


METHODS: dict[str, Callable[[Any, Record, int], Any]] = {  # the first that a tracker has
    "add_scalar": _scalars,  # TensorBoard's SummaryWriter
    "log_metrics": lambda tracker, record, step: tracker.log_metrics(record, step=step),  # MLflow
    "log": lambda tracker, record, step: tracker.log(record, step=step),  # a run of W&B, trackio, Accelerate's trackers
}


class Tracker:
    """One tracker. It is given every record; the first that it fails on is a warning, and the run goes on.

    >>> class Memory:
    ...     def log(self, record, step):
    ...         print(step, record)
    >>> Tracker(Memory()).give({"loss": 0.5}, 3)
    3 {'loss': 0.5}
    """

    def __init__(self, target: Any) -> None:
        """Raises SpecError for an object that has none of the known methods."""
        name = next((name for name in METHODS if callable(getattr(target, name, None))), None)
        if name is None:
            raise SpecError(
                f"Log(to=[{type(target).__name__}]): needed an object with log(dict, step=), log_metrics(dict, step=) "
                "or add_scalar(name, value, step), as wandb.init(...) or SummaryWriter(...)"
            )
        self.target, self.method, self.failures = target, METHODS[name], 0

    def give(self, record: Record, step: int) -> None:
        """Hands a record to the tracker. An exception of it becomes a warning, once."""
        try:
            self.method(self.target, dict(record), step)
        except Exception as error:  # whatever it is, training goes on
            self.failures += 1
            if self.failures == 1:
                said = f"the tracker {type(self.target).__name__} failed at step {step}: {error!r}. Training goes on"
                warnings.warn(said, RuntimeWarning, stacklevel=2)
