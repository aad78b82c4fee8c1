"""case: one drawn training run on a mesh, as data and as a script that runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.fuzz_meshes.model import Model

HEADER = '''"""{name}"""
import math

from fzero import P, Pipeline, Precision, groups
from fzero.precision import LossScale
from lab.fuzz_meshes import check
from lab.fuzz_meshes.case import Case, Recipe
from lab.fuzz_meshes.layers import Layer
from lab.fuzz_meshes.model import Model

case = {case!r}

if __name__ == "__main__":
    print(check(case))
'''
DTYPES = {"f64": torch.float64, "f32": torch.float32}


@dataclass(frozen=True)
class Recipe:
    """What is computed, whatever the mesh. Immutable.

    optimizer: a key of `optimizers.TABLE`. dtype: of the parameters, "f64" or "f32". precision: `fzero.Spec`'s. rows:
    of a microbatch. clip: {"clip_norm": ...}, {"clip_value": ...} or nothing. trainable: paths, or prefixes that end in
    "/**"; None: all. bad: the step whose batch holds an infinity, with nonfinite="skip". keyed: the state has a key.
    """

    optimizer: str = "sgd"
    dtype: str = "f64"
    precision: Any = "fp32"
    microbatches: int = 1
    rows: int = 2
    steps: int = 2
    clip: Mapping[str, float] = field(default_factory=dict)
    trainable: tuple[str, ...] | None = None
    nonfinite: str | None = None
    bad: int | None = None
    keyed: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return DTYPES[self.dtype]

    @property
    def skips(self) -> bool:
        """Whether a step without finite gradients changes nothing: said, or because a loss scale is found by trial."""
        return self.nonfinite == "skip" or getattr(self.precision, "loss_scale", None) is not None

    def trains(self, path: str) -> bool:
        """Whether a leaf trains."""
        rules = self.trainable
        return rules is None or any(path.startswith(r[:-2]) if r.endswith("/**") else path == r for r in rules)


@dataclass(frozen=True)
class Case:
    """A model, what is computed, and the other fields of its `fzero.Spec`: mesh, shard, zero, pipeline, and so on."""

    name: str
    model: Model
    recipe: Recipe
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> str:
        """A script that says how the case ends."""
        return HEADER.format(name=self.name, case=self)

    def axis(self, name: str) -> int:
        """The size of a mesh axis; 1 without it."""
        return int(self.place["mesh"].get(name, 1))

    @property
    def data_ranks(self) -> int:
        """How many parts the batch has."""
        return self.axis("dp_out") * self.axis("dp")

    @property
    def model_ranks(self) -> int:
        """Over how many ranks dims of leaves are cut."""
        return self.axis("tp") * self.axis("mp")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.data_ranks * self.axis("pp") * self.model_ranks
