"""fzero: a training step as a pure function, compiled into an explicit, verified ZeRO schedule. See README.md."""

from fzero import optim, random
from fzero.api import init, lower, step
from fzero.compile import Lowered
from fzero.errors import (
    CaptureError,
    DisagreementError,
    DonatedError,
    FzeroError,
    SpecError,
    TreeError,
    VerifyError,
)
from fzero.functional import grad, per_rank, pmax, pmean, psum, value_and_grad
from fzero.program import Program, parse
from fzero.spec import Spec
from fzero.state import ShardedTensor, State, unshard
from fzero.verify import verify

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "DisagreementError",
    "DonatedError",
    "FzeroError",
    "Lowered",
    "Program",
    "ShardedTensor",
    "Spec",
    "SpecError",
    "State",
    "TreeError",
    "VerifyError",
    "grad",
    "init",
    "lower",
    "optim",
    "parse",
    "per_rank",
    "pmax",
    "pmean",
    "psum",
    "random",
    "step",
    "unshard",
    "value_and_grad",
    "verify",
]
