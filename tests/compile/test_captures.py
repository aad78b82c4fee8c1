"""Steps captured before: what differs in anything that capture reads is captured again, the rest is shared."""

from __future__ import annotations

from typing import Any

import kept
import pytest
import torch
from torch import Tensor

import fzero
from fzero import P, optim
from fzero.compile.ahead import lower_again
from fzero.compile.captures import LATER, READ, Captures
from fzero.spec import Spec

PARAMS = {"layers": [{"up": torch.empty(8, 16), "down": torch.empty(16, 8)} for _ in range(2)]}
SHARD = {"layers/*/up": P(None, "tp"), "layers/*/down": P("tp", None)}


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
    return x.square().mean()


def another(p: Any, x: Tensor) -> Tensor:
    return loss(p, x) * 2


SPEC = Spec(loss=loss, optimizer=optim.adamw(1e-3), mesh={"dp": 2, "tp": 2}, shard=SHARD, zero=3, microbatches=2)
SAME = {
    "stage": {"zero": 1},
    "remat": {"remat": "full"},
    "homes": {"offload": "optimizer"},
    "prefetch": {"prefetch": 0},
    "data ranks": {"mesh": {"dp": 8, "tp": 2}},
    "roles": {"mesh": {"pp": 2, "dp": 1, "tp": 2}},
    "reduce": {"reduce": "each"},
}
OTHERS = {
    "loss": {"loss": another},
    "optimizer": {"optimizer": optim.adamw(1e-2)},
    "precision": {"precision": "bf16"},
    "clipping": {"clip_norm": 1.0},
    "microbatches": {"microbatches": 4},
    "width": {"mesh": {"dp": 1, "tp": 4}},
    "rules": {"shard": {"layers/*/up": P(None, "tp")}},
    "sequence": {"sequence": "tp"},
    "data axes": {"mesh": {"dp_out": 2, "dp": 2, "tp": 2}},
}


def lowered(spec: Spec, captures: Captures | None, rows: int = 8) -> fzero.Lowered:
    return lower_again(spec, PARAMS, torch.empty(rows, 4, 8), captures=captures)


@pytest.fixture(scope="module")
def known() -> Captures:
    """With the step of SPEC, which is lowered by no other test."""
    captures = Captures()
    lowered(SPEC, captures)
    return captures


@pytest.mark.parametrize("name", SAME)
@pytest.mark.sampled(2)
def test_what_lowering_alone_reads_is_lowered_from_the_same_graph(name: str, known: Captures) -> None:
    spec, captures = SPEC.but(**SAME[name]), Captures([*known.known])
    found = lowered(spec, captures)
    assert len(captures.known) == 1
    assert found.graph is captures.known[0][1][0]
    assert found.digest == lowered(spec, None).digest


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sampled(3)
def test_what_capture_reads_is_captured_again(name: str, known: Captures) -> None:
    spec, captures = SPEC.but(**OTHERS[name]), Captures([*known.known])
    assert lowered(spec, captures).digest == lowered(spec, None).digest
    assert len(captures.known) == 2


def test_another_batch_is_captured_again(known: Captures) -> None:
    captures = Captures([*known.known])
    assert lowered(SPEC, captures, rows=16).digest == lowered(SPEC, None, rows=16).digest
    assert len(captures.known) == 2


def test_each_field_of_a_spec_is_read_early_or_late() -> None:
    """A new field counts as read by capture until it is said not to be."""
    names = {name for name in Spec.__dataclass_fields__ if Spec.__dataclass_fields__[name].init}
    assert names > LATER
    assert {*READ} == names - LATER
    assert "loss_chunks" in READ


def test_what_tests_capture_once_is_of_one_code_over_the_same_values() -> None:
    """As an optimizer that is made anew. (`kept`, by which tests compare stages of one step.)"""

    def times(number: Any, *, also: Any = 1) -> Any:
        return lambda p, x, by=also: loss(p, x) * number * by

    def itself(depth: int) -> Any:
        def again(p: Any, x: Tensor) -> Any:
            return again(p, x) if depth else loss(p, x)

        return again

    table = torch.ones(2)
    for one, more in [(times, [2, 3, 2.0, table, loss, (2, table)]), (itself, [0, 1]), (optim.lamb, [0.1, 0.2])]:
        made = [(one(value), one(value)) for value in more]
        assert all(kept.same(*pair) for pair in made)
        assert not any(kept.same(a, b) for i, (a, _) in enumerate(made) for b, _ in made[:i])
    assert not kept.same(times(table), times(torch.ones(2)))
    assert not kept.same(times(2), times(2, also=2))
    assert not kept.same(SPEC, SPEC.but(clip_norm=1.0))
    assert not kept.same(loss, another)
