"""accumulate: segments add their gradients to the sum over microbatches, and what keeps an op that adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import torch
from passed import upto

import fzero
from fzero.cost.memory import account
from fzero.passes import PASSES, Options
from fzero.passes.accumulate import accumulate as sums_in_segments
from fzero.verify.rules import verify


def test_one_leafs_gradient_lives_beside_the_sum_over_microbatches() -> None:
    """Without the pass those of a layer do: here 8 leaves."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in p["layers"]:
            for w in layer:
                x = torch.tanh(x @ w)
        return x.square().mean()

    params = {"layers": [[torch.empty(64, 64, device="meta") for _ in range(8)] for _ in range(2)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(0.1), microbatches=4, mesh={"dp": 1})
    every = without = fzero.lower(spec, params, torch.empty(4, 64, device="meta")).naive
    for name, run, _ in PASSES:
        every = run(every, Options())
        without = without if name == "accumulate" else run(without, Options())
    verify(every)
    assert not [op for op in every.ops if op.why.startswith("add gradients")]
    leaf, slack = 4 * 64 * 64, 4 * 64 * 64
    assert account(without).peak - account(every).peak >= 8 * leaf - leaf - slack
    assert account(every).peak <= (3 * 16 + 16 + 1) * leaf + slack  # state, sums, one gradient


def test_a_sum_that_is_read_on_the_way_stays_a_sum() -> None:
    """A region that writes a sum out of order, or an op that reads it, keeps the op that adds."""
    program = upto("schedule_reductions", cases.naive(zero=1, microbatches=2, reduce="end"))
    at = next(i for i, op in enumerate(program.ops) if op.why.startswith("add gradients of layers.0"))
    total = program.ops[at].writes[0].name
    first = next(i for i, op in enumerate(program.ops) if total in {ref.name for ref in op.writes})
    peek = replace(program.ops[at], why="peek")
    read = replace(program, ops=(*program.ops[: first + 1], peek, *program.ops[first + 1 :]))
    kept = [op.why for op in sums_in_segments(read).ops if op.is_flat and op.why.startswith("add ")]
    assert kept == ["add gradients of layers.0"]
