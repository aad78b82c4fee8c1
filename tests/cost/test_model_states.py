"""What a rank holds of the model: ZeRO's accounting, and every tensor of the program that is counted."""

from __future__ import annotations

import cases
import pytest

import fzero
from fzero.cost.model_states import KINDS, ModelStates, model_states
from fzero.ir.records import PERSISTENT

WORLD = 4


def states(zero: int, **options: object) -> tuple[fzero.Lowered, ModelStates]:
    made = cases.lowered(world=WORLD, zero=zero, optimizer=fzero.optim.adamw(1e-3), **options)
    return made, model_states(made.program)


def count(lowered: fzero.Lowered) -> int:
    return sum(s.stop - s.start for b in lowered.plan.buckets.values() for s in b.slots)


@pytest.mark.parametrize(("zero", "params", "gradients", "optimizer"), [
    (0, 2, 2, 12), (1, 2, 2, 12 / WORLD), (2, 2, 2 / WORLD, 12 / WORLD), (3, 2 / WORLD, 2 / WORLD, 12 / WORLD),
])  # fmt: skip
def test_zeros_accounting(zero: int, params: float, gradients: float, optimizer: float) -> None:
    lowered, held = states(zero, precision="bf16")
    wanted = {"params": params, "gradients": gradients, "optimizer": optimizer}
    assert held.zero == {kind: round(n * count(lowered)) for kind, n in wanted.items()}
    assert held.zero_bytes == sum(held.zero.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_tensor_that_is_counted_is_a_live_buffer_of_the_program(zero: int) -> None:
    lowered, held = states(zero, precision="bf16")
    buffers = lowered.program.buffers
    assert all(op.nbytes == buffers[op.name].nbytes and op.kind == KINDS[buffers[op.name].kind] for op in held.own)
    assert len({op.name for op in held.own}) == len(held.own)
    kept = {name for name, b in buffers.items() if b.kind in ("param", "copy", "optimizer")}
    assert kept <= {op.name for op in held.own}, "what lasts is always counted"
    assert held.between_steps_bytes == sum(buffers[name].nbytes for name in kept)
    assert held.own_bytes <= lowered.memory.peak


def test_a_narrow_copy_outlasts_a_step_where_the_kernel_writes_it_and_is_sharded_as_the_master() -> None:
    for zero in (0, 1, 2, 3):
        lowered, held = states(zero, precision="bf16")
        buffers = lowered.program.buffers.values()
        narrow = [b for b in buffers if b.kind in PERSISTENT and b.dtype.itemsize == 2]
        assert 2 * sum(b.nbytes for b in narrow) == sum(b.nbytes for b in buffers if b.kind == "param"), f"zero={zero}"
        assert sum(h.nbytes for h in held.own if h.kind == KINDS["copy"]) == sum(b.nbytes for b in narrow)
        sgd = cases.lowered(world=WORLD, zero=zero, precision="bf16").program
        assert not [b for b in sgd.buffers.values() if b.kind in PERSISTENT and b.dtype.itemsize == 2], f"zero={zero}"


def test_stages_1_and_2_gather_narrow_parameters_once_and_3_for_each_use() -> None:
    gathers = {}
    for zero in (1, 2, 3):
        lowered, _ = states(zero, precision="bf16")
        low = [op for op in lowered.program.ops if op.gathers and ".low" in op.writes[0].name]
        gathers[zero] = len(low)
    buckets = len(lowered.plan.buckets)
    assert gathers[1] == gathers[2] == buckets
    assert gathers[3] > buckets
