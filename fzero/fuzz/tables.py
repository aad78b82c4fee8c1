"""tables: every row by its group, and how often a group is drawn."""

from __future__ import annotations

import random

from fzero.fuzz import modules, ops
from fzero.fuzz.case import Options

GROUPS: dict[str, tuple[int, dict[str, ops.Row]]] = {
    "pointwise": (16, ops.POINTWISE),
    "activations": (6, ops.ACTIVATIONS),
    "views": (24, ops.VIEWS),
    "writes": (20, ops.WRITES),
    "reductions": (8, ops.REDUCTIONS),
    "indexing": (11, ops.INDEXING),
    "linalg": (8, ops.LINALG),
    "layers": (10, ops.LAYERS),
    "complex": (6, ops.COMPLEX),
    "func": (3, ops.FUNC),
    "modules": (9, modules.MODULES),
}
KEYED: dict[str, tuple[int, dict[str, ops.Row]]] = {"draws": (30, ops.DRAWS), "dropping": (10, modules.DROPPING)}


def row(rng: random.Random, options: Options) -> tuple[str, ops.Row]:
    """(its name with its group's, the row)."""
    if rng.random() < 0.0015:
        name = rng.choice(list(ops.DYNAMIC))
        return f"dynamic/{name}", ops.DYNAMIC[name]
    groups = {**GROUPS, **KEYED} if options.keyed else GROUPS
    group = rng.choices(list(groups), [weight for weight, _ in groups.values()])[0]
    name = rng.choice(list(groups[group][1]))
    return f"{group}/{name}", groups[group][1][name]
