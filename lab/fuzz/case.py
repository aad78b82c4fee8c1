"""case: one drawn loss with its leaves and options, as data and as a script that runs alone.

A loss is lines of Python, so that a case can be printed, cut line by line (`lab.fuzz.shrink`) and run again
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

NAME = re.compile(r"\b[vmc]\d+\b|\b[pb]\[\"\w+\"\]")
DEFINES = re.compile(r"^((?:[vmc]\d+(?:, )?)+),? = ")

HEADER = """\
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import fzero
from fzero import optim
from lab.fuzz.values import call, fit, integers, normal, used, wave, weights
"""


@dataclass(frozen=True)
class Options:
    """How a case is run.

    form: "gradients", a step that returns them, or "training", with a loss and an optimizer.
    world: ranks.
    spec, other: fields of `fzero.Spec` as texts; those of a second lowering, whose bits must be the same.
    keyed: the loss draws from a key.
    interpret: the interpreter runs it too, for its bits.
    exact: the optimizer is smooth enough to compare its result with that of eager PyTorch's gradients.
    """

    form: str = "gradients"
    world: int = 1
    spec: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)
    keyed: bool = False
    interpret: bool = False
    exact: bool = True

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.spec.get("microbatches", "1"))


@dataclass(frozen=True)
class Case:
    """A loss with its leaves.

    setup: lines that make modules (m0) and constants (c0).
    params, batch: names of leaves and how they are made; the batch from `rank`, with {parts} for the microbatches.
    body, terms, count: the loss's lines, the summands of its result, and the count where that is an `fzero.Mean`.
    uses: the rows of the tables that it was drawn from.
    """

    name: str
    setup: tuple[str, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    batch: tuple[tuple[str, str], ...] = ()
    body: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    count: str | None = None
    options: Options = field(default_factory=Options)
    uses: frozenset[str] = frozenset()

    @property
    def source(self) -> str:
        """`params`, `batch(rank)` and `loss` as Python."""
        total = " + ".join(self.terms)
        parts = str(self.options.microbatches)
        result = f"fzero.Mean({total}, {self.count})" if self.count else total
        return "\n".join([
            HEADER,
            "torch.manual_seed(0)",
            *self.setup,
            "params = {" + _items(self.params) + "}",
            "",
            "",
            "def batch(rank):",
            "    return {" + _items(self.batch).replace("{parts}", parts) + "}",
            "",
            "",
            "def loss(p, b):",
            *(f"    {line}" for line in self.body),
            f"    return {result}",
            "",
        ])  # fmt: skip

    @property
    def script(self) -> str:
        """The same with its options and its check: run as it is, it says what is wrong."""
        shown = f"Case({self.name!r}, {self.setup!r}, {self.params!r}, {self.batch!r}, {self.body!r}, {self.terms!r}, "
        shown += f"{self.count!r}, {self.options!r})"
        return "\n".join([
            '"""' + self.name + '"""',
            self.source,
            "",
            'if __name__ == "__main__":',
            "    from lab.fuzz import check",
            "    from lab.fuzz.case import Case, Options",
            "",
            f"    print(check({shown}))",
            "",
        ])  # fmt: skip

    def namespace(self, source: str | None = None) -> dict[str, Any]:
        """The script's names, run; torch's generator stays as it was."""
        names: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            exec(compile(source or self.source, f"<{self.name}>", "exec"), names)
        return names


def _items(leaves: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f'"{name}": {text}' for name, text in leaves)


def names_in(line: str) -> set[str]:
    """The tensors and modules that a line names."""
    return set(NAME.findall(line))


def defines(line: str) -> list[str]:
    """The names that a line binds; none for work in place."""
    match = DEFINES.match(line)
    return re.findall(r"[vmc]\d+", match.group(1)) if match else []
