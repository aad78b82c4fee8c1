"""Optimizers in optax's shape: pure `init` and `update` over pytrees, chained and masked, with traced schedules."""

from fzero.optim._round import stochastic_round
from fzero.optim.adadelta import AdadeltaState, adadelta
from fzero.optim.adafactor import AdafactorState, adafactor
from fzero.optim.adagrad import AdagradState, adagrad
from fzero.optim.adam import AdamState, adam, adamw
from fzero.optim.adam8 import Adam8State, Blocks, adamw8bit
from fzero.optim.averages import EmaParamsState, EmaState, ema, ema_params
from fzero.optim.cycles import OneCycle, inverse_time, linear_growth, one_cycle, triangle
from fzero.optim.frozen import freeze_nu
from fzero.optim.groups import multi_transform, scale_by_path
from fzero.optim.lion import LionState, lion
from fzero.optim.muon import MuonState, hidden_matrices, muon
from fzero.optim.nadam import NadamState, nadam
from fzero.optim.onebit import OnebitAdamState, onebit_adam
from fzero.optim.radam import RadamState, radam
from fzero.optim.rmsprop import RmspropState, rmsprop
from fzero.optim.schedules import (
    Schedule,
    constant,
    cosine,
    exponential,
    joined,
    linear_warmup,
    piecewise,
    polynomial,
    shift,
    table,
    warmup,
    warmup_cosine,
)
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
from fzero.optim.trust import lamb, lars, scale_by_trust_ratio
from fzero.optim.wrappers import (
    DelayedState,
    IfFiniteState,
    InjectState,
    apply_if_finite,
    delayed,
    inject_hyperparams,
)

__all__ = [
    "AdadeltaState",
    "AdafactorState",
    "AdagradState",
    "Adam8State",
    "AdamState",
    "Blocks",
    "DelayedState",
    "EmaParamsState",
    "EmaState",
    "GradientTransformation",
    "IfFiniteState",
    "InjectState",
    "LionState",
    "MuonState",
    "NadamState",
    "OneCycle",
    "OnebitAdamState",
    "RadamState",
    "RmspropState",
    "Schedule",
    "ScheduleState",
    "SgdState",
    "TraceState",
    "adadelta",
    "adafactor",
    "adagrad",
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
    "ema",
    "ema_params",
    "exponential",
    "freeze_nu",
    "global_norm",
    "hidden_matrices",
    "identity",
    "inject_hyperparams",
    "inverse_time",
    "joined",
    "lamb",
    "lars",
    "linear_growth",
    "linear_warmup",
    "lion",
    "masked",
    "multi_transform",
    "muon",
    "nadam",
    "one_cycle",
    "onebit_adam",
    "piecewise",
    "polynomial",
    "radam",
    "rmsprop",
    "scale",
    "scale_by_path",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "sgd",
    "shift",
    "stochastic_round",
    "table",
    "trace",
    "triangle",
    "warmup",
    "warmup_cosine",
]
