"""Every table has every kind, and a kind that nobody has heard of needs a row alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

import fzero
from fzero.cost import step_time
from fzero.cost.rates import Rates
from fzero.ir import kinds
from fzero.ir.kinds import OPS, OpKind, register
from fzero.ir.op import make_op
from fzero.ir.program import Program, wire_bytes
from fzero.ir.records import Ref
from fzero.runtime import executor, handlers
from lab.mutate import Bench
from lab.mutate.corpus import Case, lowered
from lab.mutate.edits import insert
from lab.mutate.models import MODELS


def copied(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    writes[0].copy_(reads[0])


DEVICE_COPY = OpKind("device_copy", (1, 1), (1, 1), runs=copied, copies=True)


def test_every_kind_has_what_runs_it() -> None:
    for kind in OPS.values():
        op = make_op(kind.name, [Ref("a")], [Ref("b")])
        assert callable(handlers.handler(op))
        assert callable(executor.binder(op))
        assert op.row is kind
    with pytest.raises(KeyError):
        executor.binder(make_op("banana"))


def test_what_rows_say_fits_together() -> None:
    for kind in OPS.values():
        assert kind.transfers or kind.collective is None
        assert not (kind.gathers and kind.reduces)
        assert bool(kind.rate) == (kind.collective is not None)
        assert kind.wire_bytes(1024, 1) == 0
    moved = {name: OPS[name].wire_bytes(1200, 4) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    assert moved == {"all_gather": 900, "reduce_scatter": 900, "all_reduce": 1800}
    assert OPS["all_reduce_small"].wire_bytes(8, 4) == 24


@pytest.fixture(scope="module")
def made_up() -> Iterator[Case]:
    """A program of two ranks in which the batch is copied by a kind of its own before a segment reads it."""
    with register(DEVICE_COPY):
        placed = {"zero": 3, "microbatches": 1}
        generator = torch.Generator().manual_seed(0)
        case = lowered("made up", MODELS["mlp"], fzero.optim.sgd(0.1), placed, 2, generator)
        yield replace(case, programs=dict.fromkeys(case.programs, with_copy(case.programs[0])))


def with_copy(program: Program) -> Program:
    name = next(n for n, b in program.buffers.items() if b.kind == "batch")
    at = next(i for i, op in enumerate(program.ops) if op.is_run and any(r.name == name for r in op.reads))
    reads = tuple(replace(ref, name="copy") if ref.name == name else ref for ref in program.ops[at].reads)
    batch = program.buffers[name]
    room = -(-program.arena_bytes // 64) * 64
    copy = replace(batch, name="copy", kind="activation", at=room)
    ops = [*program.ops[:at], replace(program.ops[at], reads=reads), *program.ops[at + 1 :]]
    changed = replace(program, ops=tuple(ops), buffers={**program.buffers, "copy": copy})
    copied_in = insert(changed, at, make_op("device_copy", [Ref(name)], [Ref("copy")], why="into the device"))
    return insert(copied_in, at + 2, make_op("free", [Ref("copy")], why="last use"))


def test_a_kind_in_one_file_prints_parses_and_verifies(made_up: Case) -> None:
    program = made_up.programs[0]
    text = str(program)
    assert "device_copy batch:x -> copy  # live" in text
    again = fzero.parse(text, program.segments)
    assert again == program
    fzero.verify(again)
    unread = replace(program, ops=tuple(op for op in program.ops if op.kind != "device_copy"))
    with pytest.raises(fzero.VerifyError, match="reads copy, which is not live: nothing wrote it"):
        fzero.verify(unread)
    lost = next(op for op in program.ops if op.kind == "device_copy")
    other = next(n for n, b in program.buffers.items() if b.kind == "batch" and n != lost.reads[0].name)
    wrong = replace(program, ops=tuple(replace(op, reads=(Ref(other),)) if op is lost else op for op in program.ops))
    with pytest.raises(fzero.VerifyError, match="computes something else than what was captured"):
        fzero.verify(wrong)


def test_a_kind_in_one_file_runs_and_costs(made_up: Case) -> None:
    bench = Bench(made_up)
    assert bench.sound.error is None, "interpreted"
    assert bench.ran.error is None, "executed"
    plain = lowered("plain", MODELS["mlp"], fzero.optim.sgd(0.1), {"zero": 3, "microbatches": 1}, 2,
                    torch.Generator().manual_seed(0))  # fmt: skip
    reference = Bench(plain)
    for a, b in zip(bench.ran.state, reference.ran.state, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(bench.sound.state, reference.sound.state, strict=True):
        assert torch.equal(a, b)
    program, without = made_up.programs[0], plain.programs[0]
    op = next(op for op in program.ops if op.kind == "device_copy")
    assert wire_bytes(program, op) == 0
    some = dict.fromkeys(("all_gather", "reduce_scatter"), 1e-4), dict.fromkeys(("all_gather", "reduce_scatter"), 1e9)
    rates = Rates(*some, 1.0, {2: 1e9, 4: 1e9}, 1e9)
    more = step_time.seconds(program, rates) - step_time.seconds(without, rates)
    assert more == pytest.approx(2 * program.buffers["copy"].nbytes / 1e9)


def test_a_kind_in_one_file_is_mutated_and_what_changes_meaning_is_caught(made_up: Case) -> None:
    bench, rng = Bench(made_up), random.Random(0)
    copy = [str(op.reads[0]) for op in made_up.programs[0].ops if op.kind == "device_copy"]
    touched = changing = 0
    for kind in (
        "drop an op",
        "exchange two ops",
        "wrong kind",
        "shift a range",
        "move an op",
        "drop or repeat a reference",
    ):
        for mutant in bench.mutants(kind, rng, tries=20):
            ops = [op for op in mutant.programs[0].ops if op.kind == "device_copy"]
            touched += [str(op.reads[0]) for op in ops] != copy or mutant.programs[0].ops.count(ops[0]) != 1
            if mutant.changes is not None:
                changing += 1
                assert mutant.refused is not None, f"{kind}: {mutant.changes}"
    assert touched
    assert changing > 20


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="there is a kind 'run' already"), register(OPS["run"]):
        pass
    assert kinds.of("banana") is kinds.UNKNOWN
