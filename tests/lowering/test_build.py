"""The naive program: its text, and what it computes, compared with plain PyTorch on all rows at once.

The verifier proves the meaning of each program here before it runs, and the interpreter poisons what is read too early.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cases
import kept
import pytest
import torch
from by_hand import Draft
from models import MLP
from naive_steps import stepped, written
from passed import without_lines
from torch import Tensor, fx

import fzero
from fzero import tree
from fzero.capture.step_ops import REDUCE
from fzero.lowering import build

aten = torch.ops.aten

BOTH = {"dp_out": 2, "dp": 2}
SIGN = fzero.Precision(reduce="sign")
BF16 = fzero.Precision(compute="bf16", reduce="bf16")


@pytest.mark.parametrize("case", cases.GOLDEN_CASES)
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    golden(f"lower/{case}", str(cases.naive(**cases.GOLDEN_CASES[case])))


# --- levels -----------------------------------------------------------------------------------------------------------


def reduced(draft: Draft, x: fx.Node) -> fx.Node:
    node = draft.graph.call_function(REDUCE, (x, "sum", "dp"))
    node.meta["val"] = x.meta["val"]
    return node


def test_elementwise_work_waits_for_its_first_user() -> None:
    """Of tensors: a product is done at once, and so is a number. What only the step returns waits for the end."""
    draft = Draft()
    x = draft.input(4, 4)
    gradient = reduced(draft, x)
    scaled, returned = (draft.call(aten.mul.Tensor, x, 2.0) for _ in range(2))
    product, total = draft.call(aten.mm.default, x, x), draft.call(aten.sum.default, x)
    number = draft.call(aten.mul.Tensor, total, 2.0)
    terms = [draft.call(aten.add.Tensor, value, gradient) for value in (scaled, product, number)]
    draft.returning(*terms, returned)
    levels = build._levels(draft.graph)
    assert {node for node, level in levels.items() if level == 1} == {gradient, scaled, returned, *terms}
    assert {node for node, level in levels.items() if level == 0} == {x, product, total, number}


def test_a_short_chain_on_a_gradient_is_done_again_at_each_level_that_reads_it() -> None:
    draft = Draft()
    gradient = reduced(draft, draft.input(4, 4))
    mean = draft.call(aten.div.Tensor, gradient, 2.0)
    norm = reduced(draft, draft.call(aten.sum.default, mean))
    clipped = draft.call(aten.mul.Tensor, mean, norm)
    first = draft.call(aten.mm.default, mean, mean)
    draft.returning(clipped, first)
    levels = build._repeated(draft.graph, build._levels(draft.graph))
    again = clipped.args[0]
    assert again is not mean
    assert (again.target, again.args) == (mean.target, mean.args)
    assert (levels[mean], levels[again], levels[clipped]) == (1, 2, 2)
    assert first.args == (mean, mean)
    assert {*levels} == {node for node in draft.graph.nodes if node.op != "output"}


# --- steps of a Spec --------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"microbatches": 4}),
    "whole": (2, {"zero": 0, "microbatches": 2, "reduce": "each"}),
    "whole, added first": (2, {"zero": 0, "microbatches": 2, "reduce": "end"}),
    "slices": (3, {"zero": 3}),
    "slices of the rest": (2, {"zero": 1, "microbatches": 4, "reduce": "end"}),
    "two axes": (4, {"zero": 2, "mesh": BOTH, "microbatches": 2, "reduce": "each"}),
    "slices within a node": (4, {"zero": "hsdp", "mesh": BOTH, "microbatches": 2, "reduce": "end"}),
    "small buckets": (2, {"zero": 2, "bucket_bytes": 256}),
}


def mlp_by_hand(params: Any, world: int, steps: int) -> tuple[dict[str, Tensor], float]:
    """(parameters after some steps of SGD with momentum on all rows, the last loss)."""
    paths, leaves, treedef = tree.flatten(params)
    leaves = [x.clone().requires_grad_() for x in leaves]
    optimizer = torch.optim.SGD(leaves, lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for step in range(steps):
        rows = tree.map(lambda *x: torch.cat(x), *(MLP.batch(rank, step) for rank in range(world)))
        optimizer.zero_grad()
        loss = MLP.loss(tree.unflatten(treedef, leaves), rows)
        loss.backward()
        optimizer.step()
    return dict(zip(paths, (x.detach() for x in leaves), strict=True)), float(loss.detach())


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_plain_pytorch(way: str) -> None:
    world, given = WAYS[way]
    params = MLP.init(fzero.random.key(1))
    spec = fzero.Spec(loss=MLP.loss, optimizer=cases.SGD, **given)
    found = stepped(spec, params, MLP.batch, world=world, steps=2)
    wanted, loss = mlp_by_hand(params, world, 2)
    for path, value in wanted.items():
        torch.testing.assert_close(found.leaves[f"params/{path}"], value, rtol=1e-5, atol=1e-6)
    assert [float(metrics["loss"]) for metrics in found.metrics] == pytest.approx([loss] * world, rel=1e-6)


@pytest.mark.parametrize("transport", ["p2p", "shared", "nccl"])
def test_transports_differ_in_their_scratch_alone(transport: str) -> None:
    """Messages and shared memory add in rank order, so the bits are the same."""
    params, given = MLP.init(fzero.random.key(1)), {"loss": MLP.loss, "optimizer": cases.SGD, "zero": 1}
    first = stepped(fzero.Spec(**given), params, MLP.batch, world=2)
    other = stepped(fzero.Spec(**given), params, MLP.batch, world=2, transport=transport)
    assert all(torch.equal(value, other.leaves[path]) for path, value in first.leaves.items())
    program = written(fzero.Spec(**given), params, MLP.batch(0, 0), 2, transport).program
    scratch = {name: b.numel for name, b in program.buffers.items() if name.endswith(".scratch")}
    assert bool(scratch) == (transport == "p2p")
    assert program.transport == transport


# --- a step of ones own, with all that an outer graph may hold --------------------------------------------------------

ROWS = 4
STATE = {
    "params": {"w": torch.linspace(-1, 1, 15).view(5, 3), "b": torch.linspace(0, 1, 3), "scale": torch.tensor(0.7),
               "frozen": torch.linspace(1, 2, 9).view(3, 3), "last": torch.linspace(2, 3, 70)},
    "old": torch.zeros(5, 3), "first": torch.zeros(5, 3), "largest": torch.tensor(0.0),
    "count": torch.tensor(3), "seen": torch.tensor([1, 2]), "own": fzero.per_rank(torch.zeros(5)),
}  # fmt: skip


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(p: Any, x: Tensor, frozen: Tensor) -> Any:
    out = torch.tanh(x @ p["w"] + p["b"]) @ frozen * p["scale"]
    return out.square().mean() + p["last"].square().mean(), {"mean": out.mean(), "rows": torch.tensor(len(x)), "x": x}


def custom(state: Any, x: Tensor) -> Any:
    """Two leaves of one value, a leaf that becomes an input, one that stays, integers, metrics of every kind."""
    params = {name: leaf for name, leaf in state["params"].items() if name != "frozen"}
    (value, aux), grads = fzero.value_and_grad(loss, has_aux=True)(params, x, state["params"]["frozen"])
    norm = sum((g.square().sum() for g in tree.flatten(grads)[1]), torch.zeros(())).sqrt()
    new = tree.map(lambda p, g: p - 0.1 * g / (1 + norm), params, grads)
    place = fzero.axis_index()
    after = {
        "params": {**new, "frozen": state["params"]["frozen"]}, "old": state["params"]["w"], "first": new["w"],
        "largest": fzero.pmax(x.max()), "count": state["count"] + 1, "seen": state["seen"],
        "own": state["own"] + x.mean(0) * place,
    }  # fmt: skip
    metrics = {
        "loss": value, "again": value, "norm": norm, "row": new["w"][0], "before": state["count"], "own": aux["mean"],
        "all": fzero.pmean(aux["mean"]), "total": fzero.psum(x.sum()), "rows": aux["rows"], "place": place,
    }  # fmt: skip
    return after, metrics


def custom_by_hand(world: int, k: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """One step in plain PyTorch: (the state by path, the metrics of each rank)."""
    held = STATE["params"]
    assert isinstance(held, dict)
    names = [name for name in held if name != "frozen"]
    values, grads, means = [], [], []
    for rank in range(world):
        for part in rows(rank, 0).chunk(k):
            leaves = {name: held[name].clone().requires_grad_() for name in names}
            value, aux = loss(leaves, part, held["frozen"])
            grads.append(torch.autograd.grad(value, list(leaves.values())))
            values.append(value.detach())
            means.append(aux["mean"].detach())
    mean = {name: sum(g[i] for g in grads) / len(grads) for i, name in enumerate(names)}
    norm = torch.stack([g.square().sum() for g in mean.values()]).sum().sqrt()
    new = {name: held[name] - 0.1 * g / (1 + norm) for name, g in mean.items()}
    every = torch.stack([rows(rank, 0) for rank in range(world)])
    own = torch.stack([x.mean(0) * rank for rank, x in enumerate(every)])
    state = {f"params/{name}": x for name, x in new.items()} | {
        "params/frozen": held["frozen"], "old": held["w"], "first": new["w"], "largest": every.max(),
        "count": torch.tensor(4), "seen": torch.tensor([1, 2]), "own": own,
    }  # fmt: skip
    value = torch.stack(values).mean()
    shared = {"loss": value, "again": value, "norm": norm, "row": new["w"][0], "before": torch.tensor(3)}
    shared |= {"all": torch.stack(means).mean(), "total": every.sum(), "rows": torch.tensor(ROWS // k)}
    local = torch.stack(means).view(world, k).mean(1)
    return state, [{**shared, "own": local[rank], "place": torch.tensor(rank)} for rank in range(world)]


@pytest.mark.parametrize(("world", "k", "zero"), [(1, 1, 3), (1, 2, 0), (2, 1, 1), (3, 2, 3), (2, 4, 0)])
def test_a_custom_step_is_that_of_plain_pytorch(world: int, k: int, zero: int) -> None:
    spec = fzero.Spec(step=custom, zero=zero, microbatches=k, reduce="each" if k == 4 else "end")
    found = stepped(spec, STATE, rows, world=world)
    state, metrics = custom_by_hand(world, k)
    assert found.leaves.keys() == state.keys()
    for path, value in state.items():
        torch.testing.assert_close(found.leaves[path], value, rtol=1e-5, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}")
    for rank, wanted in enumerate(metrics):
        assert found.metrics[rank].keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found.metrics[rank][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_golden_of_a_custom_step(golden: Callable[[str, str], None]) -> None:
    spec = fzero.Spec(step=custom, zero=1, microbatches=2, reduce="end")
    golden("lower/custom", without_lines(str(written(spec, STATE, rows(0, 0), 2).program)))


def test_leaves_that_a_step_leaves_alone_are_not_written() -> None:
    """Nor are they trainable."""
    program = written(fzero.Spec(step=custom, zero=0, bucket_bytes=1 << 20), STATE, rows(0, 0), 1).program
    kept = {op.target for op in program.ops if op.is_update}
    assert "seen" not in kept
    bucket = next(b for b in program.buckets.values() if any(s.path == "frozen" for s in b.slots))
    paths = [slot.path for slot in bucket.slots]
    trained = {key.slot for key in program.trainable if key.bucket == bucket.name}
    assert {paths[slot] for slot in trained} == {*paths} - {"frozen"}
    spans = [op.writes[0] for op in program.ops if op.is_update and op.target == f"params:{bucket.name}"]
    written_slots = [slot for slot in bucket.slots if any(r.start <= slot.start and slot.stop <= r.stop for r in spans)]
    assert {slot.path for slot in written_slots} == {*paths} - {"frozen"}


def test_a_step_without_a_loss_has_one_microbatch() -> None:
    def counted(state: Any, x: Tensor) -> Any:
        return {"n": state["n"] + 1}, {}

    program = written(fzero.Spec(step=counted), {"n": torch.zeros(())}, torch.ones(2), 1).program
    assert program.microbatches == 1


def test_ranges_of_neighbours() -> None:
    assert build._ranges([0, 1, 3, 4, 6]) == [(0, 1), (3, 4), (6, 6)]
    assert build._ranges([]) == []


# --- texts ------------------------------------------------------------------------------------------------------------


def test_golden_of_two_axes_and_a_wire(golden: Callable[[str, str], None]) -> None:
    """Each microbatch is cast and summed over one axis, the total over the other."""
    given: dict[str, Any] = {"zero": 2, "mesh": BOTH, "microbatches": 2, "reduce": "each", "precision": BF16}
    golden("lower/two_axes_wire", without_lines(str(cases.naive(4, cases.layers(depth=1), **given))))


def test_golden_of_signs_that_are_fed_back(golden: Callable[[str, str], None]) -> None:
    spec = cases.spec(zero=2, microbatches=2, precision=SIGN)
    program = written(spec, cases.layers(depth=1), cases.batch(8), 2).program
    golden("lower/signs_fed_back", without_lines(str(program)))


def test_golden_of_parameters_that_lie_in_wider_slices_than_are_updated(golden: Callable[[str, str], None]) -> None:
    """Each rank updates its part of a slice, and gets the rest of the slice from those that hold it too."""
    zero = {"params": ("dp",), "grads": ("dp", "dp_out"), "optimizer": ("dp", "dp_out")}
    golden("lower/wider_slices", without_lines(str(cases.naive(4, cases.layers(depth=1), zero=zero, mesh=BOTH))))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_leaf_whose_new_value_is_computed_again_later_is_written_then(mesh: dict[str, int], zero: int) -> None:
    """LAMB needs the norms of what its new moments say before it updates a parameter. The complaint: over a model axis
    the new moments of all leaves were there beside the old ones."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params["layers"]:
            x = torch.tanh(x @ layer["up"]) @ layer["down"]
        return x.square().mean()

    params = {"layers": [{"up": torch.ones(16, 32), "down": torch.ones(32, 16)} for _ in range(3)]}
    rules = {"layers/*/up": fzero.P(None, "tp"), "layers/*/down": fzero.P("tp")} if "tp" in mesh else None
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.lamb(1e-3), mesh=mesh, zero=zero, shard=rules)
    program = kept.lower(spec, params, torch.ones(4, 16), math.prod(mesh.values())).program
    new = [name for name, buffer in program.buffers.items() if name.endswith(".new") and buffer.numel > 1]
    assert [name for name in new if name.startswith("opt_state")] == []


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_update_of_a_leaf_without_a_gradient_is_written_in_place(zero: int, clip_norm: float | None) -> None:
    """It needs no loss, and came before it: then all new leaves and moments of its bucket, full, were kept beside the
    old ones for the whole step."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params["layers"]:
            expert = (x @ layer["router"]).argmax(-1)  # which has no gradient
            x = torch.einsum("td,tdh->th", x, layer["w"][expert])
        return x.square().mean()

    params = {"layers": [{"router": torch.ones(16, 2), "w": torch.ones(2, 16, 16)} for _ in range(3)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=zero, clip_norm=clip_norm, allow_unused=True)
    program = fzero.lower(spec, params, torch.ones(4, 16), world_size=2).program
    assert [name for name, b in program.buffers.items() if name.endswith(".new") and b.numel > 1] == []
