"""resume: the files of a checkpoint that transformers reads, looked at before it does.

transformers makes its state of `trainer_state.json` without a look at types, and reads `rng_state*.pth`, a pickle, with
`weights_only=True` (5.23.0). Who wrote them is not known. So each is a plain file of some size, its fields have their
types, and it counts as many steps as the state beside it has made. The state is checked by `fzero.load`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from fzero.errors import CheckpointError, CorruptError, printable
from fzero.interop.file_places import read_all

STATE = "trainer_state.json"
MOST_BYTES = 256 << 20  # of a file: a log of a million entries has a hundred
MOST = sys.maxsize  # of a count: so many epochs has a run over a stream
ANOTHER = "Resume from another checkpoint of this run: resume_from_checkpoint='.../checkpoint-N'"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MOST)


def _interval(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or kind(value)


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _log(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("global_step", "num_input_tokens_seen"), (_count, "a count")),
    **dict.fromkeys(("max_steps", "num_train_epochs"), (_interval, "a number")),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), (_or_none(_interval), "a number or null")),
    **dict.fromkeys(("train_batch_size", "best_global_step"), (_or_none(_count), "a count or null")),
    **dict.fromkeys(("epoch", "total_flos", "best_metric"), (_or_none(_number), "a number or null")),
    **dict.fromkeys(("best_model_checkpoint", "trial_name"), (_or_none(_of(str)), "a text or null")),
    **dict.fromkeys(("trial_params", "stateful_callbacks"), (_or_none(_of(dict)), "an object or null")),
    "log_history": (_or_none(_log), "a list of objects"),
}


def check(checkpoint: Any) -> None:
    """Raises CheckpointError if the checkpoint of a Trainer has not what transformers reads of it."""
    if not isinstance(checkpoint, (str, os.PathLike)) or not os.fspath(checkpoint) or "\0" in str(checkpoint):
        raise CheckpointError(
            "resume_from_checkpoint", f"{checkpoint!r:.200} is given, needed True or the path of a checkpoint-N folder"
        )
    folder = Path(checkpoint)
    if not os.path.isdir(folder):
        raise CheckpointError(folder, f"is no folder. {ANOTHER}")
    file = folder / STATE
    if not file.is_file():
        why = "is missing, or no plain file: a folder without it was not written whole"
        raise CheckpointError(file, f"{why}. {ANOTHER}")
    try:
        content = json.loads(read_all(file, MOST_BYTES).decode())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise CorruptError(file, f"is not what transformers wrote ({error}). {ANOTHER}") from None
    for name, (fits, needed) in FIELDS.items():
        if name in content and not fits(content[name]):
            given = printable(_repr(content[name]))
            raise CorruptError(file, f"{name} is {given}, needed {needed}. {ANOTHER}")
    known = {field.name for field in dataclasses.fields(transformers.TrainerState)}
    if unknown := sorted(content.keys() - known):
        why = f"has the field {unknown[0]!r:.60}, which transformers {transformers.__version__} does not know"
        raise CorruptError(file, f"{why}: another release wrote it, or something else. {ANOTHER}")
    if "global_step" not in content:
        raise CorruptError(file, f"has no global_step. {ANOTHER}")


def same_steps(checkpoint: Any, told: int, made: int) -> None:
    """Raises CorruptError if `trainer_state.json` tells of other steps than the state has made."""
    if told != made:
        raise CorruptError(
            Path(checkpoint) / STATE,
            f"global_step is {told:,}, and the state beside it has made {made:,} steps: they are of two checkpoints, "
            f"and the data would not go on where the parameters do. {ANOTHER}",
        )


def unreadable(checkpoint: Any, error: BaseException) -> CorruptError:
    """The error for generators (`rng_state*.pth`) that cannot be read. torch's text would have them unpickled."""
    return CorruptError(
        Path(checkpoint) / "rng_state*.pth",
        f"holds no state of generators ({type(error).__name__}); nothing of it was run. {ANOTHER}, or remove the file: "
        "the order of shuffled data is another then, and the step's own random numbers are not",
    )


def _repr(value: Any) -> str:
    """A value of JSON in few letters: Python writes no number of thousands of digits."""
    return f"{value!r:.60}" if type(value) is not int or abs(value) < 10**40 else "a number of many digits"
