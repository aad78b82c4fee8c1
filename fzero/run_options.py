"""run_options: the fields of a Spec that say how a program is run. They change no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fzero import backend
from fzero.field_checks import choice, needs


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a program is run; the fields are those of `fzero.Spec`. Raises SpecError for one that cannot be used."""

    compile: str | None = None
    matmul: str = "default"
    transfers: str = "auto"
    cuda_graph: bool = True
    on_change: str = "error"
    allow_unused: bool = False
    timeout: float | None = None
    device: Any = None

    def __post_init__(self) -> None:
        if self.compile is not None:
            choice("compile", self.compile, ("none", "auto", "inductor"))
        choice("matmul", self.matmul, ("default", "fastest"))
        choice("transfers", self.transfers, ("auto", "shared", "p2p"))
        choice("on_change", self.on_change, ("error", "retrace"))
        for name in ("cuda_graph", "allow_unused"):
            needs(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.timeout is not None:
            fits = type(self.timeout) in (int, float) and 0 < self.timeout < 1e8  # the range of a timedelta and of gloo
            needs(fits, "timeout", self.timeout, "seconds > 0")
        try:
            known = self.device is None or isinstance(self.device, torch.device) or bool(torch.device(str(self.device)))
        except RuntimeError:
            known = False
        needs(known, "device", self.device, "a device's name, as 'cuda' or 'cpu'")
        real = self.device is None or backend.has_memory(self.device)
        needed = "a device with memory, as 'cuda' or 'cpu'. To plan without memory give fzero.lower meta tensors"
        needs(real, "device", self.device, needed)
        runs = self.device is None or backend.of(self.device) is not backend.UNKNOWN
        needs(runs, "device", self.device, f"a kind of device that fzero runs on: {' or '.join(backend.BACKENDS)}")
