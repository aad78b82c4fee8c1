"""tables: every row by its group, and how often a group is drawn."""

from __future__ import annotations

import random

from lab.fuzz import modules
from lab.fuzz.case import Options
from lab.fuzz.ops import control, fourier, layers, linalg, pointwise, reductions, views, writes
from lab.fuzz.ops.rows import Row

GROUPS: dict[str, tuple[int, dict[str, Row]]] = {
    "pointwise": (16, pointwise.POINTWISE),
    "activations": (6, pointwise.ACTIVATIONS),
    "views": (24, views.VIEWS),
    "writes": (20, writes.WRITES),
    "reductions": (8, reductions.REDUCTIONS),
    "indexing": (11, reductions.INDEXING),
    "linalg": (8, linalg.LINALG),
    "layers": (10, layers.LAYERS),
    "complex": (6, fourier.COMPLEX),
    "func": (3, control.FUNC),
    "modules": (9, modules.MODULES),
}
KEYED: dict[str, tuple[int, dict[str, Row]]] = {"draws": (30, control.DRAWS), "dropping": (10, modules.DROPPING)}


def row(rng: random.Random, options: Options) -> tuple[str, Row]:
    """(its name with its group's, the row)."""
    if rng.random() < 0.0015:
        name = rng.choice(list(control.DYNAMIC))
        return f"dynamic/{name}", control.DYNAMIC[name]
    groups = {**GROUPS, **KEYED} if options.keyed else GROUPS
    group = rng.choices(list(groups), [weight for weight, _ in groups.values()])[0]
    name = rng.choice(list(groups[group][1]))
    return f"{group}/{name}", groups[group][1][name]
