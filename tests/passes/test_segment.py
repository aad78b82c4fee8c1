"""segment: where a region is cut: which leaves count as one unit, and at which value a layer begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
from passed import upto
from torch import Tensor

import fzero
from fzero.ir.op import StepPhase
from fzero.ir.program import Program
from fzero.passes.segment import SMALL_BYTES, _phase, _units
from fzero.verify.rules import verify

KB = 256  # elements of 4 bytes
STEP = ["wte", "wpe", "h.0", "h.1", "norm", "wte"]  # the leaves in the order of their uses, as in a tied GPT


def units(sizes: dict[str, int], order: list[str], numbered: str = "h") -> dict[str, str]:
    """The unit of each bucket of so many elements."""
    buckets = {
        name: SimpleNamespace(layer="", numbered=name.startswith(numbered), length=n) for name, n in sizes.items()
    }
    program: Any = SimpleNamespace(buckets=buckets)
    nodes: Any = list(range(len(order)))
    return _units(program, nodes, {node: {name} for node, name in zip(nodes, order, strict=True)})


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
    nodes: Any = [0, 1]
    assert _units(program, nodes, {0: {"h.0"}, 1: {"h.0~2"}}) == {"h.0": "h.0", "h.0~2": "h.0"}
    assert units({"a": 64, "b": 99 * LARGE}, ["a", "b"]) == {"a": "a", "b": "b"}


def node(target: Any, phase: str | None) -> Any:
    return SimpleNamespace(target=target, meta={} if phase is None else {"phase": phase})


def test_the_phase_of_work() -> None:
    aten = torch.ops.aten
    mm, cast = aten.mm.default, aten._to_copy.default
    assert _phase([node(mm, None)]) is StepPhase.FORWARD
    assert _phase([node(mm, "backward"), node(cast, None)]) is StepPhase.BACKWARD, "a cast may stand in either"
    assert _phase([node(mm, None), node(mm, "backward")]) is StepPhase.REGION
    assert _phase([node(cast, None)]) is StepPhase.FORWARD
    assert _phase([]) is StepPhase.BACKWARD, "it brings gradients to their places"


def runs(program: Program) -> list[str]:
    """The segments of a step, by phase and units."""
    return [op.why.split(" (")[0] for op in program.ops if op.in_region]


def segmented(loss: Any, params: Any, batch: Any, **given: Any) -> Program:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **given)
    graph, plan = cases.captured(spec, params, batch)
    program = upto("segment", cases.built(graph, plan))
    verify(program)
    return program


def test_a_tied_model_is_cut_at_its_layers() -> None:
    init, loss = cases.tied(64, 16, 3)
    program = segmented(loss, init, cases.tokens(2, 8, 64))
    assert runs(program) == [
        "forward small", "forward blocks.0", "forward blocks.1", "forward blocks.2", "forward and backward small",
        "backward blocks.2", "backward blocks.1", "backward blocks.0", "backward blocks.0 small",
    ]  # fmt: skip
    hashes = [op.segment for op in program.ops if op.in_region]
    assert hashes[1] == hashes[2], "equal layers are one segment"
    assert len({*hashes}) < len(hashes)


def test_a_layer_begins_where_the_fewest_bytes_cross() -> None:
    """Before its norm: behind it the sum that goes on and the norm would both be kept."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ layer["w"])
        return x.square().mean()

    params = {"layers": [{"w": torch.empty(8, 8, device="meta")} for _ in range(3)]}
    program = segmented(loss, params, torch.empty(4, 8, device="meta"))
    forward = [op for op in program.ops if op.in_region and op.phase is StepPhase.FORWARD]
    assert [op.why.split(" (")[0] for op in forward[:3]] == [f"forward layers.{i}" for i in range(3)][: len(forward)]
    later = forward[1]
    read = [ref.name for ref in later.reads if program.buffers[ref.name].kind == "activation"]
    assert len(read) == 1, "the value that the last layer left"
