"""search: which candidates are lowered, by a sketch that errs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_hardware import TOY

import fzero
from fzero import optim
from fzero.planner import search
from fzero.planner.candidates import Candidate
from fzero.planner.planned import Row
from fzero.planner.problem import problem_of


def loss(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]).square().mean()


def seconds(one: Candidate) -> float:
    """What a candidate takes: at stage 3 less if gradients are reduced at the end."""
    return 160.0 if one.zero != 3 else 90.0 if one.reduce == "end" and one.offload is None else 100.0


@dataclass
class Sketch:
    """Right of stage 3, and wrong of all others."""

    share: float = 0.0
    ops: int = 10**9

    def estimates(self, candidates: Iterable[Candidate], *_: Any) -> dict[Candidate, tuple[float, int]]:
        return {one: (seconds(one) * (1.0 if one.zero == 3 else 0.375), 1) for one in candidates}


def test_what_differs_from_the_best_alone_is_not_judged_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four stages with the same other fields the sketch is wrong of three, so their mean says nothing of the fourth:
    what it says of the best does."""
    monkeypatch.setattr(search.Search, "row", _row)
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), mesh={"dp": 4}, microbatches=2, remat="none")
    problem = problem_of(spec, {"w": torch.empty(8, 8, device="meta")}, torch.empty(8, 8, device="meta"), 4, TOY, 10**6)
    done = search.search(problem, Sketch(), 10)  # type: ignore[arg-type]
    assert len(done.rows) < len(done.estimates)
    assert min(row.seconds for row in done.rows.values()) == min(map(seconds, done.estimates))


def _row(self: search.Search, one: Candidate) -> Row:
    return self.rows.setdefault(one, Row(one, seconds(one), 1))
