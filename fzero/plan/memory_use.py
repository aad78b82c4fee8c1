"""memory_use: the fields of a Spec that say where values wait between their uses, and the budgets of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fzero import tree
from fzero.errors import SpecError
from fzero.field_checks import choice, needs, positive

SPACE_OF = {"device": "device", "cpu": "host", "nvme": "disk"}  # the user's words, and those of programs
KINDS_OF_LEAVES = OPTIMIZER, PARAMS = "optimizer", "params"  # rules of `offload`: all that is no parameter; those
GRADS = "grads/"  # rules of `offload` that begin so name gradients that wait for all others: grads/blocks/**
SHORT_OFFLOADS = {"optimizer": (OPTIMIZER,), "optimizer+params": (OPTIMIZER, PARAMS)}


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Where values wait, and the budgets; the fields are those of `fzero.Spec`.

    Raises SpecError for a field that cannot be used.
    """

    bucket_bytes: int | None = None
    prefetch: int | None = None
    gather_bytes: int | None = None
    prefetch_bytes: int | None = None
    overlap: bool = True
    remat: str | Mapping[str, str] = "none"
    loss_chunks: int | None = None
    offload: str | Mapping[str, str] | None = None
    nvme_path: str | None = None
    update_on: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "gather_bytes", "prefetch_bytes", "loss_chunks", "device_bytes", "host_bytes"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.prefetch is not None:
            needs(type(self.prefetch) is int and self.prefetch >= 0, "prefetch", self.prefetch, "0 or a positive int")
        needs(isinstance(self.overlap, bool), "overlap", self.overlap, "True or False")
        self._check_remat()
        self._check_offload()

    @property
    def remat_rules(self) -> dict[str, str]:
        """`remat` as path rules, in order."""
        return dict(self.remat) if isinstance(self.remat, Mapping) else {"**": str(self.remat)}

    @property
    def offload_rules(self) -> dict[str, str]:
        """`offload` as rules to "device", "cpu" or "nvme", in order: path rules, and names of `KINDS_OF_LEAVES`."""
        if isinstance(self.offload, str):
            return dict.fromkeys(SHORT_OFFLOADS[self.offload], "cpu")
        return dict(self.offload or {})

    @property
    def gradient_rules(self) -> dict[str, str]:
        """Path rules of the gradients that wait for all others, to the spaces where they do."""
        rules = self.offload_rules.items()
        return {rule.removeprefix(GRADS): SPACE_OF[to] for rule, to in rules if rule.startswith(GRADS)}

    def space_of(self, path: str, params: Sequence[str]) -> str:
        """The space that a leaf is held in, by the first path rule that matches. params: path rules of the parameters;
        a rule may be the name of all of them, or of all other leaves."""
        kind = PARAMS if any(tree.matches(rule, path) for rule in params) else OPTIMIZER
        rules = self.offload_rules.items()
        return SPACE_OF[next((to for rule, to in rules if rule == kind or tree.matches(rule, path)), "device")]

    def _check_remat(self) -> None:
        remat = self.remat
        for rule, way in remat.items() if isinstance(remat, Mapping) else [("**", remat)]:
            form = '"none", "full", "gathers", "offload", or path rules to them, as {"blocks/**": "full"}'
            needs(isinstance(rule, str) and way in ("none", "full", "gathers", "offload"), "remat", remat, form)

    def _check_offload(self) -> None:
        """Checks `offload` and what belongs to it."""
        choice("update_on", self.update_on, (None, "device", "cpu"))
        if self.offload is None:
            for name in ("nvme_path", "update_on"):
                given = getattr(self, name)
                needs(
                    given is None, name, given, "offload=, which says what lies off the device, as offload='optimizer'"
                )
            return
        if isinstance(self.offload, str):
            choice("offload", self.offload, tuple(SHORT_OFFLOADS))
        else:
            form = 'path rules to "device", "cpu" or "nvme", as {"opt_state/**": "cpu"}'
            needs(isinstance(self.offload, Mapping) and bool(self.offload), "offload", self.offload, form)
            for rule, home in self.offload.items():
                needs(isinstance(rule, str) and home in SPACE_OF, "offload", {rule: home}, form)
        moves = any(home != "device" for home in self.offload_rules.values())
        needs(moves, "offload", self.offload, "a rule that takes something off the device, or no offload=")
        away = "nvme" in self.offload_rules.values()
        if self.nvme_path is None and away:
            raise SpecError(
                f"Spec(offload={self.offload!r}): 'nvme' needed nvme_path=, a folder on a fast local disk, as "
                "nvme_path='/local_nvme'"
            )
        if self.nvme_path is not None:
            text = isinstance(self.nvme_path, (str, os.PathLike))
            text = text and "\0" not in os.fsdecode(self.nvme_path) and bool(self.nvme_path)
            needs(text, "nvme_path", self.nvme_path, "the path of a folder")
            needs(away, "nvme_path", self.nvme_path, "a rule of offload= to 'nvme', or none")
