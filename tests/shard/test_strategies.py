"""strategies: all that the rules offer for a call of each op, as text: of attention, images, indexing, losses, norms,
pieces, pointwise, products, reductions, views and whole.

The brute force of `test_rules` sees that what is offered is right. Here one sees that nothing is offered no more: each
would be a transfer that a model pays for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from shard_cases import CASES
from shard_draws import Draw
from sharding import call

from fzero.shard.rules import localised, strategies

TURNS = 3


def shown(x: Any) -> str:
    """An argument: of a tensor its sizes."""
    if isinstance(x, torch.Tensor):
        return f"[{' '.join(map(str, x.shape))}]"
    return f"({', '.join(map(shown, x))})" if isinstance(x, (list, tuple)) else str(x)


def offered(op: Any, turn: int) -> str:
    """A call of an op, and beneath it its strategies on two ranks, in one and in three groups, each with the arguments
    that a rank calls the op with instead."""
    args, kwargs = CASES[op](Draw(str(op), turn))
    node, _ = call(op, args, kwargs)
    given = ", ".join([*map(shown, args), *(f"{name}={shown(x)}" for name, x in kwargs.items())])
    found = []
    for strategy in strategies(node, 2, (1, 3)):
        own_args, own_kwargs = localised(node, strategy, 2)
        own = [x for x, y in zip(own_args, node.args, strict=True) if x != y]
        own += [x for name, x in own_kwargs.items() if x != node.kwargs.get(name)]
        found.append(f"{strategy}{' with ' if own else ''}{', '.join(map(shown, own))}")
    return f"{op} {given}\n    {'; '.join(found)}"


def test_so_many_calls_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    module = import_module("fzero.shard.rules.strategies")  # its folder has a function of that name
    monkeypatch.setattr(module, "MOST", 3)
    monkeypatch.setattr(module, "_kept", kept)
    counts = []
    for size in (2, 4, 4, 6, 8):
        strategies(call(torch.ops.aten.relu.default, [torch.zeros(size)])[0], 2)
        counts.append(len(kept))
    assert counts == [1, 2, 2, 3, 1]


def test_what_is_offered_for_each_op(golden: Callable[[str, str], None]) -> None:
    calls = (offered(op, turn) for op in sorted(CASES, key=str) for turn in range(TURNS))
    golden("shard/strategies", "\n".join(dict.fromkeys(calls)))
