"""What each transfer among ranks does, spelled out in torch; and one that nobody has heard of, in this file alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import gloo, same_bits, values

import fzero
from fzero.comm import heartbeat
from fzero.comm.by_axis import sent
from fzero.comm.group import Line, open_world
from fzero.comm.rendezvous import meet
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, Nccl
from fzero.cost import step_time
from fzero.cost.rates import Rates
from fzero.ir.collectives import Collective, Span
from fzero.ir.kinds import OPS, OpKind, of, register
from fzero.ir.op import Op, make_op
from fzero.ir.program import TRANSPORTS, Program, op_text, wire_bytes
from fzero.ir.records import Ref
from fzero.verify.abstract import program_meaning
from fzero.verify.rules import transfers
from lab.mutate import Bench
from lab.mutate.corpus import Case, lowered
from lab.mutate.edits import insert
from lab.mutate.models import MODELS

COLLECTIVES = [kind.name for kind in OPS.values() if kind.collective is not None]
WORLDS = (2, 3)


def record_of(kind: str) -> Collective:
    record = of(kind).collective
    assert record is not None
    return record


def spelled_out(kind: str, sources: list[torch.Tensor], how: str, divisor: int) -> list[torch.Tensor]:
    """The targets of all ranks, without a record."""
    world = len(sources)
    total = sources[0].clone()
    for source in sources[1:]:
        total = torch.maximum(total, source) if how == "max" else total + source
    total = total / divisor if divisor != 1 else total
    return {
        "all_gather": [torch.cat(sources)] * world,
        "reduce_scatter": list(total.chunk(world)),
        "all_reduce": [total] * world,
        "all_reduce_small": [total] * world,
        "all_to_all": [torch.cat([source.chunk(world)[rank] for source in sources]) for rank in range(world)],
        "all_gather_values": [torch.cat(sources)] * world,
        "broadcast": [sources[0]] * world,
    }[kind]


def drawn(world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(world)
    return [torch.randn(12 * world, generator=generator) for _ in range(world)]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("how", "divisor"), [("sum", 1), ("sum", 3), ("max", 1)])
def test_the_reference_is_what_the_kind_says(kind: str, world: int, how: str, divisor: int) -> None:
    made = record_of(kind).reference(drawn(world), how, divisor)
    assert all(map(same_bits, made, spelled_out(kind, drawn(world), how, divisor)))


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_are_those_of_what_the_first_rank_sends(kind: str, world: int) -> None:
    """In the first half; an all-reduce sends as much again."""
    record, numel = record_of(kind), 12 * world
    spans = [record.sends(numel, 0, peer, world) for peer in range(1, world)]
    elements = sum(span[1] - span[0] for span in spans if span is not None) * (2 if record.scattered else 1)
    target = record.reference(drawn(world))[0].numel()
    assert record.wire_bytes(record.whole_bytes(4 * numel, 4 * target), world) == 4 * elements


def test_only_messages_that_are_added_up_need_scratch() -> None:
    needs = {(kind, t): of(kind).scratch(t, 24, 4) for kind in COLLECTIVES for t in TRANSPORTS}
    assert {key: shape for key, shape in needs.items() if shape} == {
        ("reduce_scatter", "p2p"): (3, 6),
        ("all_reduce", "p2p"): (3, 6),
        ("all_reduce_small", "p2p"): (3, 24),
    }
    assert of("all_reduce_small").scratch("p2p", 0, 4) == (3, 1), "a buffer has an element"
    assert of("run").scratch("p2p", 24, 4) is None


def test_no_program_of_nccl_receives_into_scratch() -> None:
    """Its library has memory of its own: a sum over 0-d values had some, which nothing used."""
    model = MODELS["mlp"]
    params = model.params(torch.Generator().manual_seed(0))
    batch = model.batch(torch.Generator().manual_seed(0))
    spec = fzero.Spec(loss=model.loss, optimizer=fzero.optim.adamw(0.1), zero=3, clip_norm=1.0, device="cuda")
    program = fzero.lower(spec, params, batch, world_size=2).program
    assert any(op.reduces and op.row.small for op in program.ops)
    assert [op for op in program.ops if op.reduces and len(op.writes) > 1] == []
    at = next(i for i, op in enumerate(program.ops) if op.reduces)
    op, total = program.ops[at], program.buffers[program.ops[at].target]
    more = replace(op, writes=(*op.writes, Ref("room")))
    ops = (*program.ops[:at], more, *program.ops[at + 1 :])
    buffers = {**program.buffers, "room": replace(total, name="room", kind="scratch", at=program.arena_bytes)}
    (fault,) = transfers(replace(program, ops=ops, buffers=buffers))
    assert fault == (at, "has scratch room: transport nccl receives into none")


def test_parts_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="7 elements have no equal parts for 2 ranks"):
        record_of("all_to_all").reference([torch.zeros(7)] * 2)


def test_nccl_has_a_call_for_each_kind() -> None:
    assert sorted(Nccl(Line(), heartbeat.ALONE).calls) == sorted(COLLECTIVES)


# --- a kind of its own ------------------------------------------------------------------------------------------------


def from_the_first(numel: int, sender: int, receiver: int, world: int) -> Span | None:
    return (0, numel) if sender == 0 else None


BROADCAST = OpKind(
    "broadcast", (1, 1), (1, 1), transfers=True,
    collective=Collective("value", "value", from_the_first, rate="all_gather"),
)  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Case:
    placed = {"zero": 3, "microbatches": 1}
    return lowered("plain", MODELS["mlp"], fzero.optim.sgd(0.1), placed, 2, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made_up(plain: Case) -> Iterator[Case]:
    """The same program, except that every rank trains on the batch of the first."""
    with register(BROADCAST):
        program = from_first(plain.programs[0])
        yield replace(plain, name="made up", programs=dict.fromkeys(plain.programs, program))


def from_first(program: Program) -> Program:
    for name in [n for n, b in program.buffers.items() if b.kind == "batch"]:
        new = f"{name}.first"
        room = -(-program.arena_bytes // 64) * 64
        reads = [tuple(replace(r, name=new) if r.name == name else r for r in op.reads) for op in program.ops]
        at = next(i for i, op in enumerate(program.ops) if reads[i] != op.reads)
        end = max(i for i, op in enumerate(program.ops) if reads[i] != op.reads)
        ops = [replace(op, reads=own) for op, own in zip(program.ops, reads, strict=True)]
        copy = replace(program.buffers[name], name=new, kind="activation", at=room)
        program = replace(program, ops=tuple(ops), buffers={**program.buffers, new: copy})
        program = insert(program, end + 1, make_op("free", [Ref(new)], why="last use"))
        start = make_op("broadcast", [Ref(name)], [Ref(new)], axis="dp", why="one batch")
        program = insert(program, at, start, make_op("wait", [Ref(new)], why="one batch"))
    return replace(program, meaning=program_meaning(program))


def test_a_kind_in_one_file_prints_parses_and_verifies(made_up: Case, plain: Case) -> None:
    program = made_up.programs[0]
    text = str(program)
    assert "broadcast batch:x -> batch:x.first axis=dp  # wire " in text.replace("  axis", " axis")
    again = fzero.parse(text, program.segments)
    assert again == program
    fzero.verify(again)
    fzero.verify(made_up.programs)
    with pytest.raises(fzero.VerifyError, match="computes something else than what was captured"):
        fzero.verify(replace(program, meaning=plain.programs[0].meaning))
    op = next(op for op in program.ops if op.kind == "broadcast")
    other = next(n for n, b in program.buffers.items() if b.numel != program.buffers[op.target].numel)
    for refused, what in (
        (replace(op, axis="tp"), "runs over axis 'tp'"),
        (replace(op, reads=(Ref(other),)), r"exchanges \d+ elements of 2 ranks for"),
    ):
        ops = tuple(refused if one is op else one for one in program.ops)
        with pytest.raises(fzero.VerifyError, match=what):
            fzero.verify(replace(program, ops=ops))


def test_a_kind_in_one_file_runs_and_costs(made_up: Case, plain: Case) -> None:
    """Interpreted and executed, it gives the bits of the plain program on the first rank's batch."""
    bench, batches = Bench(made_up), [n for n, b in plain.programs[0].buffers.items() if b.kind == "batch"]
    first = {name: plain.memory[0][name] for name in batches}
    reference = Bench(replace(plain, memory=[{**own, **first} for own in plain.memory]))
    for outcome, other in ((bench.sound, reference.sound), (bench.ran, reference.ran)):
        assert outcome.error is None
        assert all(map(same_bits, outcome.state, other.state))
    assert not all(map(same_bits, bench.sound.state, Bench(plain).sound.state)), "the ranks have different batches"
    program = made_up.programs[0]
    ops = [op for op in program.ops if op.kind == "broadcast"]
    nbytes = sum(program.buffers[op.target].nbytes for op in ops)
    assert sum(wire_bytes(program, op) for op in ops) == nbytes
    assert sum(wire_bytes(program, op) for op in program.ops) - nbytes == sum(
        wire_bytes(plain.programs[0], op) for op in plain.programs[0].ops
    )
    some = dict.fromkeys(("all_gather", "reduce_scatter"), 0.0), dict.fromkeys(("all_gather", "reduce_scatter"), 1e6)
    rates = Rates(*some, 0.0, {2: 1e15, 4: 1e15}, 1e15)
    more = step_time.seconds(program, rates) - step_time.seconds(plain.programs[0], rates)
    assert more == pytest.approx(nbytes / (1e6 / 2), rel=1e-3)  # of a whole of two slices a rank sends one


def test_a_kind_in_one_file_is_mutated_and_what_changes_meaning_is_caught(made_up: Case) -> None:
    bench, rng = Bench(made_up), random.Random(0)
    own = [op_text(op) for op in made_up.programs[0].ops if op.kind == "broadcast"]
    touched = changing = 0
    for kind in ("drop an op", "exchange two ops", "wrong kind", "move an op"):
        for mutant in bench.mutants(kind, rng, tries=20):
            touched += [op_text(op) for op in mutant.programs[0].ops if op.kind == "broadcast"] != own
            if mutant.changes is not None:
                changing += 1
                assert mutant.refused is not None, f"{kind}: {mutant.changes}"
    assert touched
    assert changing > 10


def through_every_comm() -> list[tuple[str, str, bool, int]]:
    """By transport and kind: whether a rank ends with what the reference gives it, and the bytes that it counts."""
    rank, world = open_world("cpu")
    host, why = meet(rank, world, timeout_seconds=60.0)
    assert host is not None, why
    line, told = Line.whole(rank, world), []
    with register(BROADCAST):
        for way, comm in (("p2p", P2P(line)), ("shared", Shared(host, line))):
            for kind in (*COLLECTIVES, "broadcast"):
                sources = drawn(world)
                wanted = spelled_out(kind, sources, "sum", 1)[rank]
                memory = host.allocate if way == "shared" else lambda n: torch.empty(n, dtype=torch.uint8)
                source, target = (memory(4 * x.numel()).view(x.dtype) for x in (sources[rank], wanted))
                source.copy_(sources[rank])
                room = of(kind).scratch(way, source.numel(), world)
                tensors = [source, target, *([torch.empty(room)] if room else [])]
                op = make_op(kind, [Ref("source")], [Ref("target"), *([Ref("room")] if room else [])], axis="dp")
                comm.start("target", op, tensors)
                comm.wait("target")
                comm.settle("target")
                source.fill_(-1.0)
                told.append((way, kind, same_bits(target, wanted), sent(op, tensors, world)))
    host.close()
    return told


@pytest.mark.parametrize("world", WORLDS)
def test_messages_and_shared_memory_do_what_the_record_says(world: int) -> None:
    for told in values(gloo(world, through_every_comm)):
        assert [(way, kind) for way, kind, right, _ in told if not right] == []
        assert len(told) == 2 * (len(COLLECTIVES) + 1)
        assert {nbytes for _, kind, _, nbytes in told if kind == "broadcast"} == {4 * 12 * world * (world - 1)}


def test_what_a_rank_may_read_late_settles() -> None:
    op: Op = make_op("all_reduce", [Ref("a")], [Ref("b"), Ref("s")])
    assert op.sources == {"a", "b"}, "the sums are read for the second half"
    assert make_op("all_gather", [Ref("a")], [Ref("b")]).sources == {"a"}
