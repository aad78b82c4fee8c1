"""Optimizers in optax's shape: pure `init` and `update` over pytrees, chained and masked, with traced schedules."""

from fzero.optim.adam import AdamState, adam, adamw
from fzero.optim.adam8 import Adam8State, Blocks, adamw8bit
from fzero.optim.schedules import Schedule, constant, cosine, linear_warmup, warmup_cosine
from fzero.optim.sgd import SgdState, sgd
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

__all__ = [
    "Adam8State",
    "AdamState",
    "Blocks",
    "GradientTransformation",
    "Schedule",
    "SgdState",
    "adam",
    "adamw",
    "adamw8bit",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "identity",
    "linear_warmup",
    "masked",
    "scale",
    "sgd",
    "warmup_cosine",
]
