"""The reductions that lowering writes: what the layouts of a bucket say, and nothing for a pass to mend."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from coded_cases import GRIDS, rows, start
from naive_steps import stepped
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.ir.program import Program
from fzero.kernels.codecs import CODECS, decode_sum, encode
from fzero.passes.narrow import narrow
from fzero.passes.shard_update import shard_update

BOTH = {"dp_out": 2, "dp": 2}
WIRE = fzero.Precision(compute="bf16", reduce="bf16")
EACH: dict[str, Any] = {"microbatches": 2, "reduce": "each"}
WAYS: dict[Any, list[str]] = {
    0: ["all_reduce dp", "all_reduce dp_out"],
    1: ["reduce_scatter dp", "reduce_scatter dp_out"],
    3: ["reduce_scatter dp", "reduce_scatter dp_out"],
    "hsdp": ["reduce_scatter dp", "all_reduce dp_out"],
    "hpz": ["reduce_scatter dp", "reduce_scatter dp_out"],
}


def _products(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return fzero.tree.map(lambda g: -0.1 * (g @ g.T @ g if g.ndim == 2 else g), grads), state


PRODUCTS = optim.GradientTransformation(lambda params: (), _products)


def sums(program: Program, bucket: str = "layers.0") -> list[str]:
    """The reductions of a bucket's gradients, in order."""
    return [
        f"{op.kind} {op.axis}"
        for op in program.ops
        if op.reduces and not op.row.small and program.buffers[op.target].bucket == bucket
    ]


def gathered(program: Program) -> list[str]:
    """The gradients that are gathered."""
    return [op.target for op in program.ops if op.gathers and program.buffers[op.target].kind == "grad"]


def test_gradients_travel_in_the_dtype_of_the_precision_and_come_back() -> None:
    """Coded on each rank, summed, decoded on the slice alone."""
    program = cases.naive(2, zero=2, microbatches=2, reduce="end", precision=WIRE)
    ops = [op for op in program.ops if op.why == "bf16 gradients of layers.0"]
    assert [op.kind for op in ops] == ["run", "reduce_scatter", "wait", "run"]
    encode, send, _, decode = ops
    assert [str(program.buffers[op.target].dtype) for op in (encode, send, decode)] == [
        "torch.bfloat16", "torch.bfloat16", "torch.float32"
    ]  # fmt: skip
    assert not encode.reads[0].mine
    assert decode.reads[0].mine
    assert decode.writes[0].mine


@pytest.mark.parametrize("zero", WAYS)
def test_lowering_reduces_to_what_each_rank_updates(zero: Any) -> None:
    assert sums(cases.naive(4, zero=zero, mesh=BOTH)) == WAYS[zero]


@pytest.mark.parametrize("zero", WAYS)
@pytest.mark.parametrize("given", [{}, EACH, {**EACH, "precision": WIRE}], ids=["one", "each", "wire"])
@pytest.mark.sampled(8)
def test_no_pass_mends_a_reduction_of_elementwise_updates(zero: Any, given: dict[str, Any]) -> None:
    """The gathers that the rest of the step was written on are dropped; the transfers stay as they are."""
    program = cases.naive(4, zero=zero, mesh=BOTH, **given)
    after = narrow(shard_update(program))
    assert bool(gathered(program)) == (zero != 0)
    assert gathered(after) == []
    assert [op for op in after.ops if op.reduces] == [op for op in program.ops if op.reduces]
    fzero.verify(after)


@pytest.mark.parametrize("given", [{}, EACH, {**EACH, "precision": WIRE}], ids=["one", "each", "wire"])
@pytest.mark.parametrize("mesh", [{"dp": 4}, BOTH], ids=str)
def test_a_gradient_that_is_read_whole_is_all_reduced(mesh: dict[str, int], given: dict[str, Any]) -> None:
    """A product needs all of a matrix: one all-reduce an axis, no gather after it."""
    program = narrow(shard_update(cases.naive(4, zero=1, mesh=mesh, optimizer=PRODUCTS, **given)))
    assert {kind.partition(" ")[0] for kind in sums(program)} == {"all_reduce"}
    assert gathered(program) == []
    for op in program.ops:
        if op.reduces and not op.row.small and op.axis is not None:
            source, scratch = (program.buffers[ref.name] for ref in (op.reads[0], op.writes[1]))
            assert source.sharded is None
            n = program.mesh.size(str(op.axis))
            assert scratch.shape == (n - 1, source.numel // n)
    fzero.verify(program)


@pytest.mark.parametrize("given", [{}, EACH, {**EACH, "precision": WIRE}], ids=["one", "each", "wire"])
@pytest.mark.parametrize("mesh", [{"dp": 4}, BOTH], ids=str)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.sampled(6)
def test_where_ranks_hold_slices_of_gradients_it_is_gathered(
    zero: int, mesh: dict[str, int], given: dict[str, Any]
) -> None:
    """Once, of the sum over microbatches."""
    program = narrow(shard_update(cases.naive(4, zero=zero, mesh=mesh, optimizer=PRODUCTS, **given)))
    assert {kind.partition(" ")[0] for kind in sums(program)} == {"reduce_scatter"}
    whole = [op.target for op in program.ops if op.gathers and program.buffers[op.target].kind == "grad"]
    assert len(whole) == len({program.buffers[name].bucket for name in whole}) == len(program.buckets) > 1
    fzero.verify(program)


@pytest.mark.parametrize("mesh", [{"dp": 4}, BOTH], ids=str)
def test_a_gradient_of_which_only_a_norm_is_taken_is_scattered_at_stage_0(mesh: dict[str, int]) -> None:
    """No layout says so, for every rank would update all of it: that each reads its slice alone only the reads tell."""

    def step(state: Any, batch: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
        loss, grads = fzero.value_and_grad(cases.layers_loss)(state["params"], batch)
        return state, {"loss": loss, "norm": optim.global_norm(grads)}

    spec = fzero.Spec(step=step, zero=0, mesh=mesh)
    program = fzero.lower(spec, {"params": cases.layers()}, cases.batch(), world_size=4).program
    assert sums(program) == [f"reduce_scatter {axis}" for axis in reversed(mesh)]


def test_the_mean_is_divided_once_by_the_last_sum() -> None:
    program = cases.naive(4, zero=2, mesh=BOTH, microbatches=2, reduce="end")
    divisors = [op.divisor for op in program.ops if op.reduces and program.buffers[op.target].bucket == "layers.0"]
    assert divisors == [1, 8]


# --- gradients in messages of blocks ----------------------------------------------------------------------------------


def summed(parts: list[Tensor], n: int, divisor: int) -> list[Tensor]:
    """By group of n ranks, the sum by messages of what they have, divided once."""
    sums = []
    for i in range(0, len(parts), n):
        messages = torch.stack([encode(x.reshape(-1), CODECS["int8"]) for x in parts[i : i + n]])
        total = decode_sum(messages, divisor, CODECS["int8"])
        sums.append(total[: parts[0].numel()].view(parts[0].shape))
    return sums


def by_hand(sizes: list[int], k: int, each: bool) -> dict[str, Tensor]:
    """One step of gradient descent whose matrices' gradients are messages, over the inner axis and then the outer one.
    Over the inner axis they are of each microbatch, or of their sum."""
    world, (paths, leaves, treedef) = torch.Size(sizes).numel(), tree.flatten(start())
    found: list[list[list[Tensor]]] = []  # by microbatch, rank and leaf
    for m in range(k):
        own = []
        for rank in range(world):
            used = [x.clone().requires_grad_() for x in leaves]
            value = cases.layers_loss(tree.unflatten(treedef, used), rows(rank).chunk(k)[m])
            own.append(list(torch.autograd.grad(value, used)))
        found.append(own)
    if not each:
        found = [[[sum(same[1:], same[0]) for same in zip(*own, strict=True)] for own in zip(*found, strict=True)]]
    after = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if leaf.ndim < 2:
            total = sum(grads[rank][i] for grads in found for rank in range(world)) / (world * k)
        else:
            inner, *outer = sizes
            divisors = [*(1 for _ in outer), world * k]
            parts = [summed([grads[i] for grads in own], inner, divisors[0]) for own in found]
            total = [sum(same[1:], same[0]) for same in zip(*parts, strict=True)]
            for n, divisor in zip(outer, divisors[1:], strict=True):
                total = summed(total, n, divisor)
            (total,) = total
        after[f"params/{path}"] = leaf - 0.5 * total
    return after


@pytest.mark.parametrize(
    ("grid", "k", "reduce", "zero"),
    [("2", 1, "end", 0), ("3", 2, "each", 3), ("2x2", 2, "end", 2), ("2x2", 2, "each", 0)],
)
def test_messages_of_gradients_are_added_in_rank_order(grid: str, k: int, reduce: str, zero: int) -> None:
    spec = fzero.Spec(
        loss=cases.layers_loss, optimizer=optim.sgd(0.5), mesh=GRIDS[grid], zero=zero, microbatches=k, reduce=reduce,
        precision=fzero.Precision(reduce="int8"), bucket_bytes=1 << 12,
    )  # fmt: skip
    sizes = [n for _, n in reversed(GRIDS[grid].items())]
    found = stepped(spec, start(), rows, world=torch.Size(sizes).numel())
    for path, wanted in by_hand(sizes, k, reduce == "each").items():
        torch.testing.assert_close(found.leaves[path], wanted, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_is_given_twice_gets_the_sum_of_its_gradients() -> None:
    """And one that is used in two regions a gradient of each."""

    def step(state: Any, x: Tensor) -> Any:
        w = state["params"]["w"]
        one, grads = fzero.value_and_grad(lambda p, x: (x @ p["a"] * p["b"].sum()).mean())({"a": w, "b": w}, x)
        two, more = fzero.value_and_grad(lambda p, x: (x @ p).square().mean())(w, x)
        return {"params": {"w": w - grads["a"] - 2 * grads["b"] - 3 * more}}, {"one": one, "two": two}

    params = {"params": {"w": torch.linspace(-1, 1, 8)}}
    found = stepped(fzero.Spec(step=step, zero=2), params, rows, world=2)
    w = params["params"]["w"]
    a, b, c = (w.clone().requires_grad_() for _ in range(3))
    x = torch.cat([rows(0), rows(1)])
    one, two = (x @ a * b.sum()).mean(), (x @ c).square().mean()
    of_a, of_b = torch.autograd.grad(one, (a, b))
    (of_c,) = torch.autograd.grad(two, c)
    torch.testing.assert_close(found.leaves["params/w"], w - of_a - 2 * of_b - 3 * of_c, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics[1]["two"], two.detach())
