"""The reductions that lowering writes: what the layouts of a bucket say, and nothing for a pass to mend."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch

import fzero
from fzero import optim
from fzero.ir.program import Program
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


@pytest.mark.parametrize("zero", WAYS)
def test_lowering_reduces_to_what_each_rank_updates(zero: Any) -> None:
    assert sums(cases.naive(4, zero=zero, mesh=BOTH)) == WAYS[zero]


@pytest.mark.parametrize("zero", WAYS)
@pytest.mark.parametrize("given", [{}, EACH, {**EACH, "precision": WIRE}], ids=["one", "each", "wire"])
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
@pytest.mark.parametrize("zero", [1, 3])
def test_a_gradient_that_is_read_whole_is_all_reduced(zero: int, mesh: dict[str, int], given: dict[str, Any]) -> None:
    """A product needs all of a matrix: one all-reduce an axis, no gather after it."""
    program = narrow(shard_update(cases.naive(4, zero=zero, mesh=mesh, optimizer=PRODUCTS, **given)))
    assert {kind.partition(" ")[0] for kind in sums(program)} == {"all_reduce"}
    assert gathered(program) == []
    for op in program.ops:
        if op.reduces and not op.row.small and op.axis is not None:
            source, scratch = (program.buffers[ref.name] for ref in (op.reads[0], op.writes[1]))
            assert source.sharded is None
            n = program.mesh.size(str(op.axis))
            assert scratch.shape == (n - 1, source.numel // n)
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


def test_the_mean_is_divided_once_by_the_last_sum() -> None:
    program = cases.naive(4, zero=2, mesh=BOTH, microbatches=2, reduce="end")
    divisors = [op.divisor for op in program.ops if op.reduces and program.buffers[op.target].bucket == "layers.0"]
    assert divisors == [1, 8]
