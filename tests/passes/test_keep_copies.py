"""The bf16 copy of a column of parameters that AdamW's kernel writes: a column of the state between steps.

Bits are those of the captured step run in plain torch (`helpers.run_reference`), which casts each leaf in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import cases
import pytest
import torch
from helpers import run_reference, start
from kept import lower
from naive_steps import written
from passed import upto

import fzero
from fzero.errors import VerifyError
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT
from fzero.runtime.interpreter import interpret
from fzero.state import storage

ADAMW = fzero.optim.adamw(1e-2, weight_decay=0.1)
MASKED = fzero.optim.adamw(1e-2, weight_decay=0.1, mask="**/w")  # two updates of one column


def spec(**given: Any) -> fzero.Spec:
    return cases.spec(**{"optimizer": ADAMW, "precision": "bf16", **given})


@cache
def lowered(world: int = 1, zero: int = 0) -> fzero.Lowered:
    return cases.lowered(world, optimizer=ADAMW, precision="bf16", zero=zero)


def kept(world: int, **given: Any) -> Program:
    """The program after the pass."""
    return upto("keep_copies", written(spec(**given), cases.layers(width=16), cases.batch(4), world).program)


def casts(program: Program) -> list[str]:
    """The reasons of the ops that do nothing but cast a column of parameters."""
    flat = (op.why for op in program.ops if op.is_run and op.is_flat)
    return [why for why in flat if why.endswith(("16 once", "16 before the gather"))]


@pytest.mark.parametrize("world", [1, 2])
def test_golden(world: int, golden: Callable[[str, str], None]) -> None:
    program = cases.naive(world, loss=cases.bf16_loss, optimizer=ADAMW, zero=3)
    golden(f"keep_copies/adamw_{world}", str(upto("keep_copies", program)))
    golden(f"write_in_place/copies_{world}", str(upto("write_in_place", program)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [ADAMW, MASKED], ids=["adamw", "masked"])
@pytest.mark.sampled(8)
def test_a_copy_of_each_column_sharded_as_its_master(zero: int, world: int, optimizer: Any) -> None:
    program = kept(world, zero=zero, optimizer=optimizer)
    params = {name: b for name, b in program.buffers.items() if b.kind == "param"}
    assert sorted(program.copies.values()) == sorted(params)
    assert casts(program) == []
    for copy, master in program.copies.items():
        held, own = program.buffers[copy], params[master]
        assert (held.dtype, held.kind in PERSISTENT) == (torch.bfloat16, True)
        assert (held.shape, held.sharded, held.nbytes) == (own.shape, own.sharded, own.nbytes // 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"optimizer": fzero.optim.sgd(0.1)}, "no kernel of sgd writes a copy"),
        ({"nonfinite": "skip"}, "the new value is chosen, not made by the kernel"),
        ({"precision": "fp16"}, "so it is with a loss scale"),
        ({"offload": "optimizer", "update_on": "cpu"}, "moments lie on the host"),
        ({"offload": "optimizer+params"}, "and masters"),
        ({"mesh": {"pp": 2, "dp": 1}}, "a pipeline"),
    ],
)
def test_casts_that_stay(given: dict[str, Any], why: str) -> None:
    program = kept(2 if "mesh" in given else 1, **given)
    assert not program.copies, why
    assert "offload" in given or casts(program), why


@pytest.mark.parametrize("optimizer", [ADAMW, fzero.optim.sgd(0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_of_frozen_columns_too(zero: int, optimizer: Any) -> None:
    """LoRA's base: it is cast when the copy is made, and never again."""
    given = {"zero": zero, "optimizer": optimizer, "trainable": "layers/0/**"}
    program = kept(2, **given, nonfinite="skip")
    frozen = {"params:layers.1", "params:small"}
    assert {*program.copies.values()} == frozen
    assert len(casts(program)) == 1, "of the layer that trains, whose new value is chosen"
    assert {*kept(2, **given).copies.values()} == (frozen | {"params:layers.0"} if optimizer is ADAMW else frozen)


def test_what_rounds_the_moments_leaves_the_copy_of_the_parameter() -> None:
    assert kept(1, optimizer=fzero.optim.adamw(1e-2, moments="bfloat16")).copies


@pytest.mark.parametrize("zero", [0, 3])
def test_under_a_budget_copies_are_the_first_to_go(zero: int) -> None:
    wanted = lowered(2, zero)
    less = wanted.memory.peak - 1
    fits = cases.lowered(2, optimizer=ADAMW, precision="bf16", zero=zero, device_bytes=less)
    (first,), (decided,) = (low.decisions.roles.values() for low in (wanted, fits))
    assert wanted.program.copies
    assert not fits.program.copies
    assert fits.memory.peak <= less
    assert (first.copies.value, decided.copies.value, decided.copies.how) == (True, False, "budget")
    assert replace(decided, copies=first.copies) == first, "nothing else went"
    assert [str(p) for _, p in fits.trail()][-1] == str(fits.program)
    again = fzero.lower(spec(zero=zero), cases.layers(), cases.batch(4), world_size=2, decisions=fits.decisions)
    assert again.program_digest == fits.program_digest


def test_a_budget_that_copies_fit_keeps_them() -> None:
    wanted = lowered(2, 3)
    fits = cases.lowered(2, optimizer=ADAMW, precision="bf16", zero=3, device_bytes=wanted.memory.peak)
    assert fits.program_digest == wanted.program_digest


def test_a_budget_of_the_host_leaves_the_copies_on_the_device() -> None:
    away = {f"{kind}/layers/{i}/**": "cpu" for kind in ("opt_state/mu", "opt_state/nu", "params") for i in range(4)}
    params, given = cases.layers(64, 8), {"optimizer": ADAMW, "precision": "bf16", "zero": 3, "offload": away}
    wanted = cases.lowered(2, params, **given)
    host, device = (wanted.memory.spaces[space] for space in ("host", "device"))
    for budgets in ({"host_bytes": host - 1}, {"host_bytes": host - 1, "device_bytes": device}):
        fits = cases.lowered(2, params, **given, **budgets)
        decided = fits.decisions.roles[0]
        assert fits.memory.spaces["host"] < host
        assert fits.program.copies == wanted.program.copies
        assert (decided.copies.how, decided.fetch_ahead.how) == ("chosen", "budget")


def test_what_fits_without_copies_and_prefetch() -> None:
    """The least that a refusal names is that of the program without either."""
    with pytest.raises(fzero.SpecError, match=r"The least that works is device_bytes=") as refused:
        cases.lowered(2, optimizer=ADAMW, precision="bf16", zero=3, device_bytes=10)
    least = int(re.findall(r"device_bytes=(\d+)", str(refused.value))[-1])
    fits = cases.lowered(2, optimizer=ADAMW, precision="bf16", zero=3, device_bytes=least)
    assert (fits.memory.peak, fits.decisions.roles[0].copies.value) == (least, False)


def data(world: int) -> tuple[Any, Callable[[int, int], torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    params = fzero.tree.map(lambda x: torch.randn(x.shape, generator=generator) * 0.3, cases.layers(width=32, depth=2))
    return params, lambda rank, step: torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))


def interpreted(one: fzero.Spec, world: int, steps: int) -> dict[str, torch.Tensor]:
    """The leaves after so many steps of the interpreter, which is handed the copies that the step before has left."""
    params, batch = data(world)
    found = lower(one, params, batch(0, 0), world)
    paths, leaves = start(one, params)
    plan, program = found.plan, found.program
    memory = [storage.shards(plan, leaves, rank) for rank in range(world)]
    (given,) = (name for name, b in program.buffers.items() if b.kind == "batch")
    for step in range(steps):
        inputs = [{**memory[rank], given: batch(rank, step)} for rank in range(world)]
        with torch.no_grad():
            ranks = interpret(dict.fromkeys(range(world), program), inputs, poison=True)
        memory = [{n: r.memory[n] for n in (*plan.held_by(r.rank), *program.copies)} for r in ranks]
    assert program.copies
    for rank in memory:
        for copy, master in program.copies.items():
            assert torch.equal(rank[copy], rank[master].bfloat16())
    return dict(zip(paths, (storage.join(plan, leaf, memory) for leaf in plan.leaves), strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"clip_norm": 0.1}, {"optimizer": MASKED}, {"trainable": "layers/0/**"}],
    ids=lambda options: "".join(options),
)
@pytest.mark.parametrize(("world", "zero"), [(w, z) for w in (1, 2, 4) for z in range(4)])
@pytest.mark.sampled(3)
def test_bits_of_the_reference(world: int, zero: int, options: dict[str, Any]) -> None:
    params, batch = data(world)
    one = spec(zero=zero, **options)
    exact, _ = run_reference(one, params, batch, world=world, steps=3)
    for path, value in interpreted(one, world, 3).items():
        assert torch.equal(value, exact[path]), path


# --- what is refused --------------------------------------------------------------------------------------------------


def edited(program: Program, change: Callable[[torch.fx.Graph], None]) -> Program:
    """The program with another segment in the first op that writes a copy."""
    at, op = next((i, op) for i, op in enumerate(program.ops) if any(r.name in program.copies for r in op.writes))
    graph = segments.copied(program.segments[op.segment].graph)
    change(graph)
    gm = segments.module(graph)
    new = replace(rewrite.run_op(op, gm, op.reads, op.writes), kind=op.kind)
    new = new.with_attrs(flat=1) if op.is_flat else new
    pool = {**program.segments, new.segment: gm}
    return replace(program, ops=(*program.ops[:at], new, *program.ops[at + 1 :]), segments=pool)


def _never_written(program: Program) -> Program:
    def change(graph: torch.fx.Graph) -> None:
        copy = next(n for n in graph.nodes if fx_nodes.op_name(n) == "copy_")
        cast = fx_nodes.operand(copy, 1)
        graph.erase_node(copy)
        graph.erase_node(cast)

    return edited(program, change)


def _of_the_moment(program: Program) -> Program:
    def change(graph: torch.fx.Graph) -> None:
        cast = fx_nodes.operand(next(n for n in graph.nodes if fx_nodes.op_name(n) == "copy_"), 1)
        cast.replace_input_with(fx_nodes.operand(cast), fx_nodes.placeholders(graph)[-3])

    return edited(program, change)


def _of_another_column(program: Program) -> Program:
    """Two equal layers: each update writes the other's copy."""
    names = [f"params:layers.{i}.copy" for i in (0, 1)]
    swap = {names[0]: names[1], names[1]: names[0]}
    return replace(program, ops=tuple(rewrite.moved(op, swap) if op.is_update else op for op in program.ops))


def _master_written_again(program: Program) -> Program:
    """The new value is halved behind the cast."""

    def change(graph: torch.fx.Graph) -> None:
        copy = next(n for n in graph.nodes if fx_nodes.op_name(n) == "copy_")
        master = fx_nodes.operand(fx_nodes.operand(copy, 1))
        with graph.inserting_after(copy):
            graph.call_function(torch.ops.aten.mul_.Scalar, (master, 0.5)).meta["val"] = master.meta["val"]

    return edited(program, change)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("broken", [_never_written, _of_the_moment, _of_another_column, _master_written_again])
def test_a_stale_copy_is_found(broken: Callable[[Program], Program], world: int) -> None:
    found = lowered(world, zero=3)
    fzero.verify(found.roles)
    message = r"\[meaning\] .*copy is stale at the end: it is not the cast of what params:\S+ holds then"
    with pytest.raises(VerifyError, match=message):
        fzero.verify(dict.fromkeys(range(world), broken(found.program)))


def _with(program: Program, **fields: Any) -> Program:
    name = next(iter(program.copies))
    return replace(program, buffers={**program.buffers, name: replace(program.buffers[name], **fields)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entry": "elsewhere"}, "is a copy, and 0 columns of parameters could be its master"),
        ({"dtype": torch.float32}, "needed its form on the device, in a smaller floating dtype"),
        ({"space": "host"}, "needed its form on the device"),
    ],
)
def test_a_copy_that_is_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        fzero.verify({0: _with(lowered().program, **fields)})


def test_the_text_holds_copies() -> None:
    program = lowered(2).program
    again = fzero.parse(str(program))
    assert again.copies == program.copies
