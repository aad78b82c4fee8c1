"""update_roles: whether each role of a pipeline can make its part of the update, before there is a batch.

The real loss is known with the first batch. So the update is lowered behind another one, which sums every leaf, chunk
after chunk. It is done for an optimizer of the user's own alone: those of fzero are known to be taken apart by role.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.step import fakes_on, lower_step
from fzero.passes.pipeline.assign_roles import AcrossRolesError
from fzero.phases import each_of
from fzero.plan.state_plan import Plan
from fzero.spec import Spec


def check_update(spec: Spec, state: Any, plan: Plan, device: torch.device) -> None:
    """Raises SpecError where one value of the update needs leaves of several roles. Of `state` only shapes and dtypes
    count."""
    if plan.cut is None or spec.optimizer is None or all(map(_is_ours, each_of(spec.optimizer))):
        return
    chunk_of = plan.cut.chunk

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        paths, leaves, _ = tree.flatten(params)
        total = batch.float().mean()
        for _, leaf in sorted(zip(paths, leaves, strict=True), key=lambda row: chunk_of(row[0])):
            total = total + leaf.sum().float() if leaf.is_floating_point() else total
        return total

    batch = torch.empty(spec.microbatches)
    plain = replace(
        spec, loss=loss, allow_unused=True, matmul="default", remat="none", device_bytes=None, host_bytes=None
    )
    for phase in [""] if spec.phases is None else spec.phases.each:
        try:
            lower_step(plain.in_phase(phase), fakes_on(state, device), fakes_on(batch, device), plan, LoweringContext())
        except AcrossRolesError:
            raise
        except Exception:  # of this loss, or one that the step's own lowering tells with its place
            continue


def _is_ours(part: Any) -> bool:
    """Whether an optimizer, and all functions that it was made of, are fzero's."""
    if isinstance(part, (tuple, list)):
        return all(map(_is_ours, part))
    if isinstance(part, dict):
        return all(map(_is_ours, part.values()))
    if isinstance(part, functools.partial):
        return _is_ours([part.func, part.args, part.keywords])
    if not callable(part):
        return True
    cells = [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    return str(getattr(part, "__module__", "")).startswith("fzero.") and all(map(_is_ours, cells))
