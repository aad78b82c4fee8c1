"""fzero: a training step as a pure function, compiled into an explicit, verified ZeRO schedule. See README.md."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("fzero runs on Linux and macOS. On Windows install it, and PyTorch, in WSL: its Linux is one")

from fzero import checkpoint, data, hardware, optim, random, sparse, tree
from fzero._version import __version__ as __version__
from fzero.api import evaluate, init, step
from fzero.capture.joint import Mean
from fzero.capture.scan import scan
from fzero.capture.static import static
from fzero.checkpoint import Manifest, save
from fzero.checkpoint.checkpointer import Checkpointer
from fzero.checkpoint.load import load
from fzero.compile.ahead import lower
from fzero.compile.lowered import Lowered
from fzero.compile.simulate import simulate
from fzero.compile.simulation import Simulation, simulation
from fzero.error_feedback import CodedError, coded_error, coded_mean, first_error
from fzero.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    CorruptError,
    DataError,
    DisagreementError,
    DonatedError,
    FzeroError,
    HangError,
    MismatchError,
    NonFiniteError,
    OffloadError,
    SpecError,
    TreeError,
    VerifyError,
)
from fzero.functional import (
    axis_index,
    constrain,
    forward,
    grad,
    per_rank,
    pmax,
    pmean,
    psum,
    remat,
    value_and_grad,
)
from fzero.ir.parse import parse
from fzero.ir.program import Program
from fzero.log import Log
from fzero.phases import Phases
from fzero.pipeline import Pipeline, Schedule
from fzero.planner import Longest, Planned, longest, plan
from fzero.precision import LossScale, Precision
from fzero.profile import profile
from fzero.shard.partition import P, groups
from fzero.spec import Spec
from fzero.state.state import ShardedTensor, State, unshard
from fzero.verify.rules import verify

if TYPE_CHECKING:
    from fzero import interop

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Checkpointer",
    "CodedError",
    "ConfigError",
    "CorruptError",
    "DataError",
    "DisagreementError",
    "DonatedError",
    "FzeroError",
    "HangError",
    "Log",
    "Longest",
    "LossScale",
    "Lowered",
    "Manifest",
    "Mean",
    "MismatchError",
    "NonFiniteError",
    "OffloadError",
    "P",
    "Phases",
    "Pipeline",
    "Planned",
    "Precision",
    "Program",
    "Schedule",
    "ShardedTensor",
    "Simulation",
    "Spec",
    "SpecError",
    "State",
    "TreeError",
    "VerifyError",
    "axis_index",
    "checkpoint",
    "coded_error",
    "coded_mean",
    "constrain",
    "data",
    "evaluate",
    "first_error",
    "forward",
    "grad",
    "groups",
    "hardware",
    "init",
    "interop",
    "load",
    "longest",
    "lower",
    "optim",
    "parse",
    "per_rank",
    "plan",
    "pmax",
    "pmean",
    "profile",
    "psum",
    "random",
    "remat",
    "save",
    "scan",
    "simulate",
    "simulation",
    "sparse",
    "static",
    "step",
    "unshard",
    "value_and_grad",
    "verify",
]


_LATER = {  # imported when they are asked for
    "cli": "fzero.cli",
    "doctor": "fzero.tools.doctor",
    "interop": "fzero.interop",
    "kernels": "fzero.kernels",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(_LATER[name])
    raise AttributeError(f"module 'fzero' has no attribute {name!r}{_remedy(name)}")


def _remedy(name: str) -> str:
    """Where a name is that somebody looked for here: optimizers, datasets and draws are in modules of their own."""
    if name.startswith("_"):  # asked for by Python's own tools
        return ""
    places = [place.__name__ for place in (optim, data, sparse, random, checkpoint, hardware) if name in dir(place)]
    told = f" It is {places[0]}.{name}" if places else tree.suggest(name, __all__)
    return f".{told}" if told else ""


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER})
