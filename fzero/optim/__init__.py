"""Optimizers in optax's shape: pure `init` and `update` over pytrees, chained and masked, with traced schedules."""

from fzero.optim._round import stochastic_round
from fzero.optim.adafactor import AdafactorState, adafactor
from fzero.optim.adam import AdamState, adam, adamw
from fzero.optim.adam8 import Adam8State, Blocks, adamw8bit
from fzero.optim.groups import multi_transform, scale_by_path
from fzero.optim.lion import LionState, lion
from fzero.optim.muon import MuonState, muon
from fzero.optim.schedules import Schedule, constant, cosine, linear_warmup, warmup_cosine
from fzero.optim.sgd import SgdState, sgd
from fzero.optim.simple import (
    ScheduleState,
    TraceState,
    add_decayed_weights,
    clip_by_value,
    scale_by_schedule,
    trace,
)
from fzero.optim.transform import (
    GradientTransformation,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    identity,
    masked,
    scale,
)
from fzero.optim.wrappers import (
    DelayedState,
    IfFiniteState,
    InjectState,
    apply_if_finite,
    delayed,
    inject_hyperparams,
)

__all__ = [
    "AdafactorState",
    "Adam8State",
    "AdamState",
    "Blocks",
    "DelayedState",
    "GradientTransformation",
    "IfFiniteState",
    "InjectState",
    "LionState",
    "MuonState",
    "Schedule",
    "ScheduleState",
    "SgdState",
    "TraceState",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "apply_if_finite",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "delayed",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "linear_warmup",
    "lion",
    "masked",
    "multi_transform",
    "muon",
    "scale",
    "scale_by_path",
    "scale_by_schedule",
    "sgd",
    "stochastic_round",
    "trace",
    "warmup_cosine",
]
