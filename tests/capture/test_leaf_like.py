"""leaf_like: values that are made of a leaf elementwise, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.capture.leaf_like import leaf_like
from fzero.capture.step_ops import REGION

LEAVES = {"a": (3, 4), "b": (3, 4), "mine": (3, 4)}


def loss(params: Any, x: Tensor) -> Tensor:
    return sum((p * x).square().mean() for p in tree.flatten(params)[1])


def given(step: Any) -> list[str]:
    """Of the values that the last loss of a step is given first, the place of the leaf that each is like."""
    state = {name: torch.empty(shape) for name, shape in LEAVES.items()}
    state["mine"] = fzero.per_rank(state["mine"])
    graph = fzero.lower(fzero.Spec(step=step), state, torch.empty(3, 4), world_size=2).graph
    like = leaf_like(graph, graph.gm, ["mine"], ["a", "b", None])
    region = [node for node in graph.gm.graph.nodes if node.target is REGION][-1]
    return [like.get(node, "") for node in region.args[0]]


def result(state: Any, params: Any, x: Tensor) -> Any:
    return state, {"loss": fzero.value_and_grad(loss)(params, x)[0]}


def test_a_leaf_and_its_gradients_and_what_is_made_of_them() -> None:
    def step(state: Any, x: Tensor) -> Any:
        _, grads = fzero.value_and_grad(loss)({"a": state["a"]}, x)
        moved = state["a"] - 0.1 * grads["a"] / grads["a"].square().sum()
        return result(state, [moved, state["b"].bfloat16().float(), grads["a"]], x)

    assert given(step)[:3] == ["a", "b", "a"]


def test_what_is_made_of_two_leaves_or_in_another_shape_or_differs_between_ranks_is_like_none() -> None:
    def step(state: Any, x: Tensor) -> Any:
        own = fzero.value_and_grad(loss, reduce=False)({"a": state["a"]}, x)[1]["a"]
        others = [state["a"] + state["b"], state["a"].flip(0), state["a"] - own, state["a"] + state["mine"]]
        return result(state, [*others, state["a"] + fzero.pmean(own)], x)

    assert given(step)[:5] == ["", "", "", "", "a"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_verify_does_not_believe_it(zero: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes programs and what judges them ask it: were it wrong of a value that ranks have each their own of, the
    program that holds one slice of it on each would be refused."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))

    def step(state: Any, x: Tensor) -> Any:
        own = {name: w + x.mean() for name, w in state.items()}
        grads = fzero.pmean(fzero.value_and_grad(loss, reduce=False)(own, x)[1])
        return {name: w - 0.1 * grads[name] for name, w in state.items()}, {}

    def lowered() -> Any:
        state = {name: torch.empty(LEAVES[name]) for name in ("a", "b")}
        return fzero.lower(fzero.Spec(step=step, zero=zero, params="**"), state, torch.empty(3, 4), world_size=2)

    lowered()
    monkeypatch.setattr("fzero.capture.leaf_like.varying_nodes", lambda graph, per_rank: set())
    with pytest.raises(fzero.VerifyError, match=r"\[meaning\]"):
        lowered()
