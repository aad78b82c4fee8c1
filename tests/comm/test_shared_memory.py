"""Ranks that read one another's memory: the bits of point-to-point, whatever the timing; and every way to fail."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import gloo, same_bits, start, values
from hosts import hosts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import MODELS
from workers import shared as worker

import fzero
from fzero import tree
from fzero.comm.group import Line
from fzero.comm.heartbeat import Presence
from fzero.comm.rendezvous import _apart
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import Messages, gather_by_gloo
from fzero.errors import PeerError, VerifyError
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.passes.settle import settle
from fzero.runtime.interpreter import HazardError, LocalComm, Mailbox, interpret
from fzero.state import storage
from fzero.verify.lifetimes import settled
from fzero.verify.rules import transfers, verify

WORLDS = (2, 3, 4)
DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "complex64")
TRANSFER = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(("all_gather", "reduce_scatter", "all_reduce", "all_reduce_small")),
        "part": st.sampled_from((0, 1, 3, 64, 1023, 1025, 30_001)),  # elements; inline up to 4,096 bytes
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(("sum", "max")),
        "divisor": st.sampled_from((1, 3, 8)),
        "arena": st.booleans(),
        "dest": st.booleans(),
        "inside": st.booleans(),
    }
)


def in_some_order(count: int, seed: int) -> list[tuple[str, int]]:
    """Start, wait and settle of each of `count` transfers: in this order for one, in any order between them."""
    draw = random.Random(seed)
    left = {i: ["settle", "wait", "start"] for i in range(count)}
    events = []
    while left:
        i = draw.choice(list(left))
        events.append((left[i].pop(), i))
        if not left[i]:
            del left[i]
    return events


# --- ranks of this process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("size", [12, 12_000])
def test_each_kind_is_that_of_its_record(kind: str, size: int) -> None:
    """Within a message, and beyond. A rank waits for another in vain after two seconds."""
    ranks, reduces = hosts(3, seconds=2.0), "reduce" in kind
    op = make_op(kind, [Ref("a")], [Ref("b")], axis="dp", **({"op": "sum", "divisor": 3} if reduces else {}))
    sources = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    wanted = op.row.collective.reference(sources, op.reduction, op.divisor)

    def moved(rank: int) -> list[bool]:
        comm, right = Shared(ranks[rank], Line.whole(rank, 3)), []
        for _ in range(2):  # the second time into the same buffer
            dest = torch.full_like(wanted[rank], torch.nan)
            comm.start("b", op, [ranks[rank].allocate(4 * size).view(torch.float32).copy_(sources[rank]), dest])
            comm.wait("b")
            right.append(same_bits(dest, wanted[rank]))
        comm.settle("b")
        return right

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(moved, range(3))) == [[True, True]] * 3
    for host in ranks:
        host.close()


def test_one_element_may_have_any_stride() -> None:
    """As a metric that a loss makes by `expand`."""
    ranks = hosts(2, seconds=2.0)
    op = make_op("all_reduce_small", [Ref("a")], [Ref("b")], axis="dp", op="sum", divisor=2)

    def moved(rank: int) -> list[float]:
        comm, dest = Shared(ranks[rank], Line.whole(rank, 2)), torch.zeros(1, 1)
        comm.start("b", op, [torch.tensor(3.0 + rank).expand(1, 1), dest])
        comm.wait("b")
        return dest.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(moved, range(2))) == [[[3.5]], [[3.5]]]
    for host in ranks:
        host.close()


@pytest.mark.parametrize("source", [torch.zeros(()).expand(8), torch.zeros(16)[::2]], ids=["expanded", "gaps"])
def test_several_elements_with_gaps_are_no_bytes(source: torch.Tensor) -> None:
    """They lie elsewhere than the bytes behind the first one."""
    ranks = hosts(2, seconds=2.0)
    with pytest.raises(RuntimeError, match="stride"):
        ranks[0].offer(1, source, [1])
    with pytest.raises(RuntimeError, match="stride"):
        gather_by_gloo(Messages(0, 2), source, torch.zeros(16), 0)
    for host in ranks:
        host.close()


@pytest.mark.parametrize("size", [12, 12_000])
def test_messages_arrive_by_tag(size: int) -> None:
    """Within a letter, and read in place; the second receive of a tag gets the second message."""
    ranks = hosts(2, seconds=2.0)
    sender, receiver = (Shared(host, Line.whole(rank, 2)) for rank, host in enumerate(ranks))
    rooms = [torch.full((size,), torch.nan) for _ in range(3)]
    for number, (tag, room) in enumerate(zip((7, 7, 8), rooms, strict=True)):
        receiver.start(f"in{number}", make_op("recv", writes=[Ref("in")], axis="pp", peer=0, tag=tag), [room])
    for number, tag in enumerate((8, 7, 7)):
        source = ranks[0].allocate(4 * size).view(torch.float32).fill_(number)
        sender.start(f"out{number}", make_op("send", [Ref("out")], axis="pp", peer=1, tag=tag), [source])
    for number in range(3):
        receiver.wait(f"in{number}")
        sender.wait(f"out{number}")
    assert [room.unique().tolist() for room in rooms] == [[1.0], [2.0], [0.0]]
    for host in ranks:
        host.close()


def test_in_memory_a_transfer_is_ready_once_all_who_send_have_offered_their_part() -> None:
    ranks = hosts(3)
    comms = [Shared(host, Line.whole(rank, 3)) for rank, host in enumerate(ranks)]
    op = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp")
    wholes = [torch.zeros(6000) for _ in ranks]
    seen = [comms[0].ready("b")]
    for rank in (0, 2, 1):
        comms[rank].start("b", op, [torch.full((2000,), float(rank)), wholes[rank]])
        seen.append(comms[0].ready("b"))
    assert seen == [True, False, False, True], "nothing was started; then one is missing"
    for comm in (comms[0], comms[2], comms[1]):
        comm.wait("b")
        assert comm.ready("b")
        assert not comm.presence.waits
    assert all(whole.unique().tolist() == [0.0, 1.0, 2.0] for whole in wholes)
    for host in ranks:
        host.close()


def test_a_rank_that_waits_for_its_source_to_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = hosts(2)
    comm, presence = Shared(one, Line.whole(0, 2)), Presence(0, 2)
    comm.presence = presence
    source = one.allocate(40_000).view(torch.float32)
    op = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp")
    comm.start("b", op, [source, torch.zeros(20_000)])
    seen: list[Any] = []
    monkeypatch.setattr(one, "settle", lambda number, label: seen.append((number, label, presence.waits)))
    comm.settle("b")
    assert seen == [(16, "reading of the source of b", True)]
    assert not presence.waits
    comm.settle("b")
    assert len(seen) == 1
    for host in (one, other):
        host.close()


def test_a_transfer_into_a_buffer_waits_until_the_source_of_the_one_before_was_read() -> None:
    """The same memory may be the source again, and somebody still read it."""
    one, other = hosts(2, seconds=0.2)
    comm = Shared(one, Line.whole(0, 2))
    source = one.allocate(40_000).view(torch.float32)
    op = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp")
    comm.start("b", op, [source, torch.zeros(20_000)])
    with pytest.raises(PeerError, match="reading of the source of b: rank 0 waited for rank 1"):
        comm.start("b", op, [source, torch.zeros(20_000)])
    for host in (one, other):
        host.close()


def test_who_closes_it_says_goodbye_to_the_others() -> None:
    one, other = hosts(2)
    Shared(one, Line.whole(0, 2)).close()
    with pytest.raises(PeerError, match="rank 1 waited for rank 0, which closed its side"):
        other.take(1, 0, torch.zeros(1), "it")
    other.close()


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.sampled(2)
@settings(
    max_examples=4, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), derandomize=True
)
@given(specs=st.lists(TRANSFER, min_size=25, max_size=25), seed=st.integers(0, 999))
def test_bits_are_those_of_point_to_point(world, specs, seed):
    """In flight together, waited for and settled in any order, in arenas and not; a settled source is overwritten."""
    found = values(gloo(world, worker.transfers, specs, in_some_order(len(specs), seed), seed))
    assert found == [[]] * world


def test_more_in_flight_than_a_socket_holds():
    assert values(gloo(2, worker.many_in_flight)) == [True, True]


@pytest.mark.parametrize(("world", "zero"), [(2, 3), (3, 1), (2, 0)])
@pytest.mark.sampled(1)
def test_training_in_shared_memory(world, zero):
    """Programs lowered for shared memory, every buffer in an arena and spoiled when freed: settling is in time."""
    for differing, num_arenas in values(gloo(world, worker.training, zero, 3)):
        assert differing == []
        assert num_arenas > 0


def test_the_fastest_way_is_the_same_on_all_ranks():
    outcomes = values(gloo(2, worker.chosen))
    tables = [table for table, _, _ in outcomes]
    assert tables[0] == tables[1]
    assert outcomes[0][2] == outcomes[1][2], "rank 0's rates hold for all"
    assert set(tables[0].values()) <= {"shared", "p2p", "gloo"}
    assert all(way != "gloo" for key, way in tables[0].items() if key.startswith("reduce"))
    assert all(same for _, same, _ in outcomes)


def finding(outcome):
    """What a `worker.Finding` holds."""
    name, _, text = outcome.error.partition("\n")[0].partition(": ")
    assert name == "Finding", outcome.error
    return json.loads(text)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["forked", pytest.param("killed", marks=pytest.mark.acceptance)])
def test_a_killed_rank_is_named(how):
    """By those who wait for it, and by those who wait for another; though a child of it holds copies of its sockets."""
    outcomes = gloo(3, worker.stopped_and_killed, how)
    assert "Died: rank 1" in outcomes[1].error
    for rank in (0, 2):
        told, took, again = finding(outcomes[rank])
        assert told.startswith(f"all_gather into whole: rank {rank} waited for rank 1, which ended")
        assert took < 2.5  # of a timeout of 60; the other rank, if killed, is 3 late
        assert again == f"rank {rank} shares no memory any more: {told}"


def test_a_stopped_rank_is_named_when_the_time_is_up():
    outcomes = gloo(2, worker.stopped_and_killed, "stopped")
    told, _, _ = finding(outcomes[0])
    assert told == (
        "all_gather into whole: rank 0 waited for rank 1, which did not come within 1.5 s: it is stopped, or does "
        "something else"
    )


def test_killed_between_offering_and_reading():
    """Its memory outlives it; that it has read ours is never said."""
    arrived, told = finding(gloo(2, worker.killed_before_reading)[0])
    assert arrived
    assert told.startswith("reading of the source of whole: rank 0 waited for rank 1, which ended")


def test_a_rank_may_leave_when_it_is_done():
    found = values(gloo(3, worker.leaves_early))
    assert found == [(1.0, 1.0), (9.0, 0.0), (3.0, 1.0)]


def test_a_forked_child_has_no_part():
    for told, whole in values(gloo(2, worker.in_a_child)):
        assert "shares no memory any more: it was forked, and its parent is the rank" in told
        assert whole == [1.0] * 8


def test_ranks_that_disagree_on_sizes():
    for rank, outcome in enumerate(gloo(2, worker.of_another_size)):
        needed, given_ = (400_000, 400_004) if rank == 0 else (400_004, 400_000)
        text = f"DisagreementError: all_gather into whole: rank {1 - rank} gives {given_} bytes, rank {rank} needs"
        text += f" {needed}"
        assert outcome.error.startswith(text)


# --- set-up and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("namespace", "rank 1 is in another network namespace than rank 0"),
        ("memfd", "rank 1: this system has no memfd"),
    ],
)
def test_one_ranks_no_is_everybodys(how, why):
    found = values(gloo(2, worker.apart, how))
    if "not permitted" in found:
        pytest.skip("this process may not make a network namespace")
    for host, told in found:
        assert host is None
        assert told.startswith(why)


def test_another_machine():
    assert _apart(["m1 net:[1] a t", "m2 net:[1] b u"]) == "rank 1 is in another machine than rank 0"
    assert _apart(["m1 net:[1] a t", "m1 net:[1] b u"]) == ""


def test_memory_goes_with_its_last_tensor():
    assert values(gloo(2, worker.memory)) == [[0, 2, 2, 0, 1]] * 2


def test_two_hosts_in_one_process():
    ranks, tens = [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]
    assert values(gloo(3, worker.two_hosts)) == [[ranks, ranks, tens, tens]] * 3


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(1)
def test_programs_without_receive_buffers(zero):
    """The same bits interpreted, and less memory."""
    init, loss, batch = MODELS["mlp"]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=zero, bucket_bytes=4096, clip_norm=1.0)
    params = init(fzero.random.key(0))
    _, leaves = start(spec, params)
    found = {}
    for via in ("p2p", "shared"):
        lowered = worker.lowered_via(spec, params, batch(0, 0), 2, via)
        program = lowered.program
        assert program.transport == via
        assert any(op.is_settle for op in program.ops) == (via == "shared")
        assert any(len(op.writes) > 1 for op in program.ops if op.reduces) == (via == "p2p")
        names = [name for name, b in program.buffers.items() if b.kind == "batch"]
        memory = []
        for rank in range(2):
            given_ = zip(names, tree.flatten(batch(rank, 0))[1], strict=True)
            memory.append({**storage.shards(lowered.plan, leaves, rank), **dict(given_)})
        with torch.no_grad():
            ranks = interpret(dict.fromkeys(range(2), program), memory, poison=True)
        found[via] = [rank.memory[name] for rank in ranks for name in lowered.plan.buffers], lowered.memory.peak
    assert all(same_bits(a, b) for a, b in zip(found["p2p"][0], found["shared"][0], strict=True))
    assert found["shared"][1] <= found["p2p"][1]


def program_of(ops, transport="shared", **buffers):
    kept = {name: Buffer(name, torch.float32, (size,), kind) for name, (size, kind) in buffers.items()}
    return Program(
        mesh=Mesh((("dp", 2),)),
        buckets={},
        buffers=kept,
        ops=tuple(ops),
        metrics={},
        passes=("lower",),
        transport=transport,
    )


def test_receive_buffers_are_not_for_shared_memory():
    reduce = make_op("reduce_scatter", [Ref("g")], [Ref("r"), Ref("s")], axis="dp", op="sum")
    ops = [reduce, make_op("wait", [Ref("r")])]
    program = program_of(ops, g=(128, "state"), r=(64, "grad"), s=(64, "scratch"))
    with pytest.raises(VerifyError, match=r"\[transfers\] op 0 .*has scratch s: transport shared receives into none"):
        verify(program)
    without = replace(ops[0], writes=ops[0].writes[:1])
    assert list(transfers(replace(program, ops=(without, ops[1])))) == []


def settling():
    """A column is gathered and written in place, gradients are all-reduced and freed."""
    gather = make_op("all_gather", [Ref("p")], [Ref("full")], axis="dp")
    all_ = make_op("all_reduce", [Ref("g")], [Ref("r")], axis="dp")
    run = make_op("run", [Ref("full")], [Ref("g")])
    waits = [make_op("wait", [Ref(name)]) for name in ("full", "r")]
    end = [make_op("free", [Ref("full")]), make_op("update", [Ref("r")], [Ref("p")]), make_op("free", [Ref("r")])]
    sizes = {"p": (64, "param"), "full": (128, "gathered"), "g": (128, "grad"), "r": (128, "grad")}
    return program_of([gather, waits[0], run, all_, waits[1], *end], **sizes)


def settles(program):
    return [(i, op.target) for i, op in enumerate(program.ops) if op.is_settle]


def test_when_transfers_settle():
    program = settling()
    done = settle(program)
    assert settles(done) == [(6, "full"), (8, "r")]  # the column is written, the sums are freed
    assert list(settled(done)) == []
    assert settles(settle(replace(program, ops=program.ops[:5]))) == [(5, "full"), (6, "r")]
    assert settles(settle(replace(program, transport="p2p"))) == []
    assert list(settled(program)) == [], "a wait without a settle settles at once"


def test_memory_of_the_arena_may_be_read_until_something_is_written_there():
    program = settling()
    placed = {
        name: replace(b, at=at) for (name, b), at in zip(program.buffers.items(), (0, 1024, 2048, 4096), strict=True)
    }
    placed["x"] = Buffer("x", torch.float32, (16,), "activation", at=4096)
    ops = (*program.ops, make_op("run", [Ref("p")], [Ref("x")]))
    done = settle(replace(program, buffers={**placed, "p": program.buffers["p"]}, ops=ops))
    assert settles(done) == [(6, "full"), (9, "r")], "the free may come first"
    assert list(settled(done)) == []


def test_a_source_that_is_written_before_its_transfer_settles_is_refused():
    done = settle(settling())
    at = settles(done)[0][0]
    late = (*done.ops[:at], done.ops[at + 1], done.ops[at], *done.ops[at + 2 :])
    assert (
        next(iter(settled(replace(done, ops=late))))[1] == "writes or frees p before the transfer into full is settled"
    )
    twice = (*done.ops[: at + 1], done.ops[at], *done.ops[at + 1 :])
    assert "of which none has been waited for" in next(iter(settled(replace(done, ops=twice))))[1]


def test_a_source_that_changes_before_it_settles_is_found():
    world = Mailbox(Mesh((("dp", 2),)), poison=True)
    comms = [LocalComm(world, rank) for rank in range(2)]
    gather = make_op("all_gather", [Ref("p")], [Ref("full")], axis="dp")
    sources = [torch.ones(4), torch.ones(4)]
    for comm, source in zip(comms, sources, strict=True):
        comm.start("full", gather, [source, torch.empty(8)])
    comms[0].wait("full")
    sources[0].zero_()
    with pytest.raises(HazardError, match="rank 0: a source of the transfer into full changed before it settled"):
        comms[0].settle("full")


def to_one_another(sizes: tuple[int, ...]) -> tuple[list[bool], int]:
    """Two ranks send to each other, and each waits for its send before it waits for its receive."""
    spec = fzero.Spec(loss=crossed_loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2}, transfers="shared")
    runtime = fzero.init({"layers": [{"w": torch.ones(2)} for _ in range(2)]}, spec).runtime
    rank, comm, arrived = runtime.rank, runtime.transport.comm, []
    for nbytes in sizes:
        out, into = (runtime.transport.block(nbytes) for _ in range(2))
        out.fill_(rank + 1)
        comm.start("out", make_op("send", [Ref("out")], axis="pp", peer=1 - rank, tag=rank), [out])
        comm.start("in", make_op("recv", writes=[Ref("in")], axis="pp", peer=1 - rank, tag=1 - rank), [into])
        comm.wait("out")
        comm.wait("in")
        arrived.append(bool((into == 2 - rank).all()))
    return arrived, runtime.sent_bytes["pp"]


def crossed_loss(params, batch):
    return sum((layer["w"] * batch).sum() for layer in params["layers"])


def test_ranks_that_send_to_one_another_do_not_wait_for_ever() -> None:
    """In a letter of its own, and in place."""
    for arrived, sent in values(gloo(2, to_one_another, (64, 1 << 16, 1 << 16), timeout=100)):
        assert arrived == [True] * 3
        assert sent == 64 + (1 << 17)
