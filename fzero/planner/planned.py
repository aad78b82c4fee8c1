"""planned: what a planner answers: a Spec to paste, its verified programs, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fzero.compile.lowered import Lowered
from fzero.hardware import Hardware
from fzero.ir.decisions import Choice
from fzero.planner.candidates import Candidate
from fzero.spec import Spec

SHOWN = 160  # characters of a refusal


def size(nbytes: int) -> str:
    """
    >>> size(1000), size(3_200_000), size(41_000_000_000)
    ('1,000 bytes', '3.20 MB', '41.00 GB')
    """
    if nbytes < 5000:  # 0.00 MB
        return f"{nbytes:,} bytes"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


@dataclass(frozen=True)
class Row:
    """A candidate that was lowered and verified. seconds: of a step, simulated with all roles together. peak, host:
    planned bytes of the fullest rank. refused: why there is no program; then the figures say nothing. probed: whether
    only shallow programs were lowered, which foretell those of the whole model."""

    candidate: Candidate
    seconds: float
    peak: int
    host: int = 0
    refused: str = ""
    probed: bool = False

    @property
    def order(self) -> tuple[float, int]:
        """By which rows are compared: of two that are as fast the smaller is better."""
        return self.seconds, self.peak

    def fits(self, memory: int, host: int) -> bool:
        """Whether it is a program that needs no more than these bytes."""
        return not self.refused and self.peak <= memory and self.host <= host

    def cells(self, memory: int, host: int) -> str:
        """Its line of the table."""
        state = "fits" if self.fits(memory, host) else "refused" if self.refused else "too large"
        figures = f"{self.seconds:10.4g} s {size(self.peak):>11}" if not self.refused else f"{'-':>12} {'-':>11}"
        note = self.refused.partition("\n")[0][:SHOWN] or ("probed" if self.probed else "")
        return f"{state:9} {figures}  {self.candidate}" + (f"  ({note})" if note else "")


@dataclass(frozen=True)
class Planned:
    """The answer of `fzero.plan`.

    spec: concrete, to give to `fzero.init`. seconds: of a step, predicted. peak: planned bytes of the device of the
    fullest rank. choices: of each field that was open. table: all candidates that were lowered, the fastest first.
    machine: the hardware as so many ranks find it (`Hardware.for_ranks`). memory: the budget in bytes. programs: makes
    `lowered`.
    """

    spec: Spec
    seconds: float
    peak: int
    choices: Mapping[str, Choice[Any]]
    table: tuple[Row, ...]
    machine: Hardware
    memory: int
    world_size: int
    programs: Callable[[], Lowered] = field(repr=False, compare=False)

    @cached_property
    def lowered(self) -> Lowered:
        """The programs of the spec, verified. Of an answer that was kept they are lowered when they are asked for."""
        return self.programs()

    def python(self) -> str:
        """The chosen fields as Python to paste, pin and diff. Rules of `shard` need `fzero.P` and `fzero.groups`.

        >>> import torch, fzero
        >>> spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1))
        >>> meta = torch.empty(64, 64, device="meta")
        >>> print(fzero.plan(spec, {"w": meta}, torch.empty(8, 64), world_size=2, hardware="h100").python())
        dataclasses.replace(spec, mesh={'dp': 2}, zero=3, microbatches=1, remat='none', offload=None,
        prefetch=..., bucket_bytes=..., device='cuda')
        """
        values = ", ".join(f"{name}={getattr(self.spec, name)!r}" for name in self.choices)
        return f"dataclasses.replace(spec, {values})"

    def __repr__(self) -> str:
        """In one line; `str` has the table.

        >>> import torch, fzero
        >>> spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1))
        >>> fzero.plan(spec, {"w": torch.empty(64, 64)}, torch.empty(8, 64), world_size=2, hardware="h100")
        Planned({'dp': 2}, 2 ranks of DGX H100, 80 GB, ... s a step: print it)
        """
        where = f"{self.world_size} ranks of {self.machine.name}"
        return f"Planned({self.spec.mesh}, {where}, {self.seconds:.4g} s a step: print it)"

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.4g} s a step, {size(self.peak)} of {size(self.memory)} a rank, on "
            f"{self.world_size} ranks of {self.machine.name} (predicted)",
            "",
            *(f"{name:12} {choice.value!s:24} {choice.reason}" for name, choice in self.choices.items()),
            "",
            *(row.cells(self.memory, self.machine.host_budget) for row in self.table),
            "",
            self.python(),
        ]
        return "\n".join(line.rstrip() for line in lines)
