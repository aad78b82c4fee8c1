"""beside_uses: a penalty on weights costs no gather of its own, holds no gradients, and has the bits that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.capture import region
from fzero.runtime.interpreter import interpret
from fzero.state import storage

LAYERS, WIDTH = 8, 64
START = [torch.full((WIDTH, 4 * WIDTH), 0.01 * i) for i in range(LAYERS)]  # closed over


def forward(params: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for layer in params:
        x = x + torch.tanh(x @ layer["w"] + layer["b"]) @ layer["v"]
    return (x - batch["y"]).square().mean()


def weights(params: Any) -> list[Tensor]:
    return [layer[name] for layer in params for name in ("w", "v", "b")]


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "squares": lambda params: 0.01 * sum((w**2).sum() for w in weights(params)),  # type: ignore[return-value]
    "sizes": lambda params: 0.01 * torch.stack([w.abs().mean() for w in weights(params)]).sum(),
    "norms": lambda params: 1e-3 * sum(w.norm() for w in weights(params)),  # type: ignore[return-value]
    "elastic": lambda params: sum(w.abs().sum() + 2 * w.square().sum() for w in weights(params)) / 1e4,  # type: ignore[return-value]
    "to its start": lambda params: sum(  # type: ignore[return-value]
        (0.5 * (layer["w"] - start) ** 2 * 1.5).sum() for layer, start in zip(params, START, strict=False)
    ),
    "exponentials": lambda params: 1e-4 * sum(torch.exp(-w).sum() for w in weights(params)),  # type: ignore[return-value]
    "in views": lambda params: 0.1 * sum(w.flatten()[1:].t().pow(2).sum() for w in weights(params)),  # type: ignore[return-value]
    "backwards": lambda params: 0.01 * sum(w.pow(2).sum() for w in weights(params[::-1])),  # type: ignore[return-value]
}


def lowered(penalty: str, layers: int = LAYERS, **options: Any) -> fzero.Lowered:
    def loss(params: Any, batch: Any) -> Tensor:
        return forward(params, batch) + (PENALTIES[penalty](params) if penalty else 0)

    params, batch = example(layers)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), **{"mesh": {"dp": 2}, "zero": 3, **options})
    return fzero.lower(spec, params, batch, world_size=1 if options.get("mesh") == {"dp": 1} else 2)


def example(layers: int = LAYERS) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) / 8

    params = [
        {"w": normal(WIDTH, 4 * WIDTH), "b": normal(4 * WIDTH), "v": normal(4 * WIDTH, WIDTH)} for _ in range(layers)
    ]
    return params, {"x": normal(4, WIDTH), "y": normal(4, WIDTH)}


def gathers(low: fzero.Lowered) -> int:
    return sum(op.kind.startswith("all_gather") for op in low.program.ops)


@pytest.fixture(scope="module")
def plain() -> fzero.Lowered:
    return lowered("")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("penalty", sorted(PENALTIES.keys() - {"in views"}))
def test_a_penalty_costs_no_gather_and_holds_no_gradients(penalty: str, plain: fzero.Lowered) -> None:
    """The plain step gathers each of the eight layers twice, but the last one's."""
    low = lowered(penalty)
    assert gathers(low) <= gathers(plain) + 1
    layer = sum(x.nbytes for x in example()[0][0].values())
    constants = sum(value.nbytes for value in low.graph.constants.values())
    assert low.memory.peak - constants < plain.memory.peak + 2 * layer


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"zero": 0}, {"precision": "autocast"}, {"mesh": {"pp": 2}, "zero": 0, "microbatches": 2}],
    ids=["zero 3", "zero 0", "autocast", "pipeline"],
)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_no_bit_changes(penalty: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    after = stepped(lowered(penalty, 3, **options), 3)
    monkeypatch.setattr(region, "beside_uses", lambda gm, inputs: None)
    before = stepped(lowered(penalty, 3, **options), 3)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[path], before[path]) for path in after)


def stepped(low: fzero.Lowered, layers: int) -> dict[str, Tensor]:
    """The leaves of the parameters after a step of both ranks, interpreted."""
    params, batch = example(layers)
    whole = {f"params/{i}/{name}": w for i, layer in enumerate(params) for name, w in layer.items()}
    leaves = [whole.get(leaf.path, torch.zeros(leaf.shape, dtype=leaf.dtype)) for leaf in low.plan.leaves]
    programs = {rank: low.on(rank) for rank in range(2)}
    memory = []
    for rank, program in programs.items():
        of_kind = {kind: [n for n, b in program.buffers.items() if b.kind == kind] for kind in ("batch", "constant")}
        fixed = dict(zip(of_kind["constant"], low.graph.constants.values(), strict=True))
        given = dict(zip(of_kind["batch"], [batch["x"], batch["y"]], strict=True))
        memory.append({**storage.shards(low.plan, leaves, rank), **fixed, **given})
    with torch.no_grad():
        ranks = interpret(programs, memory, poison=True)
    held = [{name: rank.memory[name] for name in low.plan.held_by(rank.rank)} for rank in ranks]
    return {leaf.path: storage.join(low.plan, leaf, held) for leaf in low.plan.leaves}


def test_long_chains_take_no_longer() -> None:
    """Sixty doublings, between which there are 2^60 ways through the graph."""

    def loss(params: Any, batch: Any) -> Tensor:
        doubled = params[0]["w"] * 0.5**60
        for _ in range(60):
            doubled = doubled + doubled
        return forward(params, batch) + (doubled * doubled.sin()).sum() / 1e6

    params, batch = example()
    low = fzero.lower(fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3), params, batch, world_size=2)
    low.graph.regions[0].gm.graph.lint()


def test_what_is_returned_stays() -> None:
    """A square that is a metric as well, and gradients that nothing but a penalty gives."""

    def loss(params: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        squares = [w.square() for w in weights(params)]
        free = params[-1]["v"].exp()
        return forward(params[:-1], batch) + sum(x.sum() for x in squares) + free.sum(), {"square": squares[0].mean()}

    params, batch = example()
    low = fzero.lower(fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3), params, batch, world_size=2)
    low.graph.regions[0].gm.graph.lint()


def test_the_order_of_a_penalty() -> None:
    """Sums go to the first use of their parameter, and a number to the next layer; gradients to what reads them."""
    low = lowered("squares", mesh={"dp": 1}, zero=0)
    ops = [node for node in low.graph.regions[0].gm.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in ops]
    products = [i for i, name in enumerate(names) if name == "aten.mm.default"]
    sums = [i for i, node in enumerate(ops) if node.target is torch.ops.aten.sum.default]
    assert len(sums) == 3 * LAYERS
    assert max(sums) < products[2 * LAYERS - 1] + 1, "none behind the last product of the forward"
    assert min(sums[3:]) > products[0], "and those of later layers not before theirs"
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    own = [node for node in ops if node.target is torch.ops.aten.mul.Tensor and node.meta["val"].shape in sizes]
    assert len(own) == 2 * LAYERS
    assert all(node.next.target is torch.ops.aten.add.Tensor for node in own), "right before what reads it"
