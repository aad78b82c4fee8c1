"""units: which leaves count as one unit, and how often a layer is gathered by that."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.passes.common.units import SMALL_BYTES, units_of

STEP = ["wte", "wpe", "h.0", "h.1", "norm", "wte"]  # the leaves in the order of their uses, as in a tied GPT


def units(sizes: dict[str, int], order: list[str], numbered: str = "h", turn: int | None = None) -> dict[str, str]:
    """The unit of each bucket of so many elements. turn: of the uses in order, the first of the backward."""
    buckets = {
        name: SimpleNamespace(layer="", numbered=name.startswith(numbered), length=n) for name, n in sizes.items()
    }
    program: Any = SimpleNamespace(buckets=buckets)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"n{i}") for i in range(len(order))]
    for node in nodes[turn:] if turn is not None else ():
        node.meta["phase"] = "backward"
    return units_of(program, nodes, {node: {name} for node, name in zip(nodes, order, strict=True)})


LARGE = SMALL_BYTES // 4
LAYERS = {"h.0": 4 * LARGE, "h.1": 4 * LARGE}


def test_a_layer_with_a_number_is_a_unit_of_its_own() -> None:
    found = units({**LAYERS, "wte": LARGE, "wpe": LARGE, "norm": 64}, STEP)
    assert (found["h.0"], found["h.1"], found["wte"]) == ("h.0", "h.1", "wte")


@pytest.mark.parametrize(
    ("wte", "wpe", "joins"),
    [
        (99 * LARGE, LARGE - 1, True),  # it is small
        (99 * LARGE, 13 * LARGE, False),
        (99 * LARGE, 12 * LARGE, True),  # an eighth adds little
        (3 * LARGE, LARGE, True),  # both together are no more than a layer
        (3 * LARGE + 1, LARGE, False),
    ],
)
def test_a_layer_without_a_number_joins_one_that_is_in_use_with_it(wte: int, wpe: int, joins: bool) -> None:
    assert units({**LAYERS, "wte": wte, "wpe": wpe}, STEP[:4])["wpe"] == ("wte" if joins else "wpe")


def test_it_joins_only_what_is_in_use_wherever_it_is() -> None:
    """The embedding at the top alone, a norm at the end: neither is there with the other."""
    sizes = {**LAYERS, "norm": 64, "wte": 99 * LARGE}
    assert units(sizes, ["wte", "h.0", "h.1", "norm"])["norm"] == "norm"
    assert units(sizes, ["wte", "h.0", "h.1", "norm", "wte"])["norm"] == "wte"
    assert units(sizes, ["wte", "norm", "h.0", "h.1", "norm", "wte"])["norm"] == "wte"
    assert units(sizes, ["wte", "h.0", "norm", "h.1", "wte"])["norm"] == "norm"


def test_buckets_of_one_layer_are_one_unit_and_without_numbers_nothing_joins() -> None:
    buckets = {name: SimpleNamespace(layer="h.0", numbered=True, length=64) for name in ("h.0", "h.0~2")}
    program: Any = SimpleNamespace(buckets=buckets)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "ab"]
    assert units_of(program, nodes, {nodes[0]: {"h.0"}, nodes[1]: {"h.0~2"}}) == {"h.0": "h.0", "h.0~2": "h.0"}
    assert units({"a": 64, "b": 99 * LARGE}, ["a", "b"]) == {"a": "a", "b": "b"}


ADAPTED = {"h.0": 8 * LARGE, "h.1": 8 * LARGE, "hl.0": LARGE, "hl.1": LARGE, "hr.1": LARGE // 2}


@pytest.mark.parametrize(
    ("order", "turn", "joined"),
    [
        ("h.0 hl.0 h.0 h.1 hl.1 hr.1 h.1", 7, {"hl.0": "h.0", "hl.1": "h.1", "hr.1": "h.1"}),
        ("hl.0 h.0 hl.1 h.1 h.1 hl.1 h.1 hl.1 h.0 hl.0 h.0 hl.0", 4, {"hl.0": "h.0", "hl.1": "h.1"}),
        ("hl.0 h.0 hl.1 h.1 h.1 hl.1 h.0 hl.0", 4, {}),  # a row of layers, some of them small
        ("h.0 hl.0 h.0 h.1 hl.0 h.1", 6, {}),  # one for two layers
        ("h.0 hl.0 hl.0 h.0", 2, {}),  # the last layer: its backward comes after its forward
    ],
)
def test_a_small_layer_amid_a_larger_one_joins_it(order: str, turn: int, joined: dict[str, str]) -> None:
    found = units(ADAPTED, order.split(), turn=turn)
    assert {name: found[name] for name in found if found[name] != name} == joined
    larger = units({**ADAPTED, "hl.0": LARGE + 1}, order.split(), turn=turn)
    assert larger.get("hl.0", "hl.0") == "hl.0"


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("merged", [False, True])
def test_the_layers_of_a_frozen_base_are_gathered_twice(remat: str, merged: bool) -> None:
    """Adapters in a tree of their own part no layer: its forward and its backward gather it, and the head is gathered
    once, as without adapters."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for w, a in zip(p["base"], p["lora"], strict=True):
            y = torch.tanh(x) @ w["up"]
            z = torch.tanh(y)
            y = z @ (w["q"] + a["a"] @ a["b"]) if merged else z @ w["q"] + (z @ a["a"]) @ a["b"]
            x = x + torch.tanh(y) @ w["down"]
        return (x @ p["head"]).square().mean()

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    base = [{name: meta(64, 64) for name in ("up", "q", "down")} for _ in range(4)]
    params = {"base": base, "lora": [{"a": meta(64, 2), "b": meta(2, 64)} for _ in range(4)], "head": meta(64, 128)}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), trainable="lora/**", remat=remat)
    program = fzero.lower(spec, params, meta(4, 64), world_size=2).program
    count = Counter(op.reads[0].name for op in program.ops if op.gathers)
    assert [count.pop(f"params:base.{n}") for n in range(4)] == [2] * 4
    assert count.pop("params:small") == 1  # the head
    assert set(count) <= {f"params:lora.{n}" for n in range(4)}
