"""fzero: a training step as a pure function, compiled into an explicit, verified ZeRO schedule. See README.md."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero import checkpoint, data, optim, random
from fzero.api import evaluate, init, lower, step
from fzero.checkpoint import Manifest, save
from fzero.checkpoint.checkpointer import Checkpointer
from fzero.checkpoint.load import load
from fzero.compile import Lowered
from fzero.errors import (
    CaptureError,
    CheckpointError,
    CorruptError,
    DataError,
    DisagreementError,
    DonatedError,
    FzeroError,
    HangError,
    MismatchError,
    NonFiniteError,
    SpecError,
    TreeError,
    VerifyError,
)
from fzero.functional import (
    axis_index,
    forward,
    grad,
    per_rank,
    pmax,
    pmean,
    psum,
    remat,
    value_and_grad,
)
from fzero.joint import Mean
from fzero.precision import LossScale, Precision
from fzero.profile import profile
from fzero.program import Program, parse
from fzero.spec import Spec
from fzero.state import ShardedTensor, State, unshard
from fzero.verify import verify

if TYPE_CHECKING:
    from fzero import interop

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Checkpointer",
    "CorruptError",
    "DataError",
    "DisagreementError",
    "DonatedError",
    "FzeroError",
    "HangError",
    "LossScale",
    "Lowered",
    "Manifest",
    "Mean",
    "MismatchError",
    "NonFiniteError",
    "Precision",
    "Program",
    "ShardedTensor",
    "Spec",
    "SpecError",
    "State",
    "TreeError",
    "VerifyError",
    "axis_index",
    "checkpoint",
    "data",
    "evaluate",
    "forward",
    "grad",
    "init",
    "interop",
    "load",
    "lower",
    "optim",
    "parse",
    "per_rank",
    "pmax",
    "pmean",
    "profile",
    "psum",
    "random",
    "remat",
    "save",
    "step",
    "unshard",
    "value_and_grad",
    "verify",
]


_LATER = ("cli", "doctor", "fuzz", "interop", "kernels", "mutate")  # imported when they are asked for


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"fzero.{name}")
    raise AttributeError(f"module 'fzero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER})
