"""fzero: a training step as a pure function, compiled into an explicit, verified ZeRO schedule. See README.md."""

from fzero import checkpoint, optim, random
from fzero.api import evaluate, init, lower, step
from fzero.checkpoint import Manifest, save
from fzero.checkpoint.load import load
from fzero.compile import Lowered
from fzero.errors import (
    CaptureError,
    CheckpointError,
    CorruptError,
    DisagreementError,
    DonatedError,
    FzeroError,
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

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CorruptError",
    "DisagreementError",
    "DonatedError",
    "FzeroError",
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
    "evaluate",
    "forward",
    "grad",
    "init",
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
