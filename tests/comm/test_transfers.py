"""transfers and shared_memory: ranks that are threads of this process move what the record of each kind says.

Messages are queues here; memory is shared over real sockets. The oracle is `Collective.reference`, which the
interpreter uses too, and for bits the order in which it adds.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import same_bits
from hosts import hosts
from torch import Tensor

from fzero.comm import transfers
from fzero.comm.group import Line
from fzero.comm.heartbeat import Presence
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, Alone, Messages, Nccl, Pending, finish, gloo, keep_own
from fzero.errors import DisagreementError, HangError, PeerError
from fzero.ir.collectives import Collective
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_small", "all_to_all", "all_gather_values")
PATIENCE = 10.0  # seconds: then a rank waits in vain
pytestmark = pytest.mark.timeout(60, method="thread")  # where a rank waits without end, so does its thread


@dataclass
class Group:
    """As much of a process group as a message needs to know its sender. world: a number of its own."""

    rank: int
    size: int
    world: int = 0


WORLDS = count(1)


class Request:
    """torch's handle of a message."""

    def __init__(self, run: Callable[[], None] = lambda: None) -> None:
        self.run = run

    def wait(self) -> None:
        self.run()


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> dict[Any, queue.Queue[Tensor]]:
    """Replaces torch.distributed by queues: the n-th message of a tag meets the n-th receive that is started."""
    boxes: dict[Any, queue.Queue[Tensor]] = defaultdict(queue.Queue)
    started: Counter[Any] = Counter()
    lock = threading.Lock()

    def box(*key: Any, side: str) -> queue.Queue[Tensor]:
        with lock:
            started[side, *key] += 1
            return boxes[(*key, started[side, *key])]

    def isend(tensor: Tensor, group: Group, group_dst: int, tag: int) -> Request:
        assert tensor.is_contiguous()
        box(group.world, group.rank, group_dst, tag, side="send").put(tensor.clone())
        return Request()

    def irecv(tensor: Tensor, group: Group, group_src: int, tag: int) -> Request:
        here = box(group.world, group_src, group.rank, tag, side="recv")
        return Request(lambda: tensor.copy_(here.get(timeout=PATIENCE)))

    def all_gather_single(whole: Tensor, own: Tensor, group: Group, async_op: bool) -> Request:
        assert async_op
        for peer in range(group.size):
            isend(own, group, peer, -1)
        requests = [irecv(part, group, peer, -1) for peer, part in enumerate(whole.view(group.size, -1))]
        return Request(lambda: [request.wait() for request in requests])

    monkeypatch.setattr(transfers, "dist", SimpleNamespace(isend=isend, irecv=irecv))
    monkeypatch.setattr(transfers, "all_gather_single", all_gather_single)
    return boxes


Run = Callable[[Any, int], Any]  # what one rank does with its comm


def by_messages(world: int, run: Run, make: Any = P2P) -> list[Any]:
    number = next(WORLDS)
    lines = [Line(rank, tuple(range(world)), Group(rank, world, number)) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda line: run(make(line), line.place), lines))


def by_memory(world: int, run: Run) -> list[Any]:
    made = hosts(world)
    comms = [Shared(host, Line.whole(rank, world)) for rank, host in enumerate(made)]
    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(run, comms, range(world)))
    finally:
        for host in made:
            host.close()


WAYS: dict[str, Callable[[int, Run], list[Any]]] = {
    "p2p": by_messages,
    "gloo": lambda world, run: by_messages(world, run, gloo),
    "shared": by_memory,
}


def record(op: Op) -> Collective:
    assert op.row.collective is not None
    return op.row.collective


def made(kind: str, world: int, rank: int, size: int, memory: Callable[[int], Tensor], **attrs: Any) -> Any:
    """(op, its tensors, what it makes) of one rank: a source, a target of nan, scratch of nan."""
    op = make_op(kind, [Ref("a")], [Ref("b"), Ref("s")], axis="dp", **attrs)
    how = record(op)
    sources = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    wanted = how.reference(sources, op.reduction, op.divisor)[rank]
    source = memory(4 * size).view(torch.float32).copy_(sources[rank])
    target = memory(4 * wanted.numel()).view(torch.float32).fill_(torch.nan)
    room = how.scratch("p2p", size, world) or (0, 0)
    return op, [source, target, torch.full(room, torch.nan)], wanted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_moves_what_its_record_says(post: Any, kind: str, way: str) -> None:
    attrs = [{}] if "gather" in kind or kind == "all_to_all" else [{"op": "sum", "divisor": 3}, {"op": "max"}]
    for world in (2, 3):
        for given in attrs:
            for size in (12, 12_000):  # within a letter of shared memory, and beyond

                def run(comm: Any, rank: int, world: int = world, size: int = size, given: Any = given) -> bool:
                    memory = comm.host.allocate if way == "shared" else lambda n: torch.zeros(n, dtype=torch.uint8)
                    op, tensors, wanted = made(kind, world, rank, size, memory, **given)
                    held = tensors[0].clone()
                    comm.start("b", op, tensors)
                    comm.wait("b")
                    comm.settle("b")
                    assert not comm.pending
                    assert torch.equal(tensors[0], held) or record(op).source != "whole", "the source stays"
                    return same_bits(tensors[1], wanted)

                assert WAYS[way](world, run) == [True] * world, (world, given, size)


@pytest.mark.parametrize("way", WAYS)
def test_transfers_in_flight_together_do_not_mix(post: Any, way: str) -> None:
    """Of one kind, waited for in another order than they were started in."""

    def run(comm: Any, rank: int) -> list[list[float]]:
        gather = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp")
        total = make_op("all_reduce", [Ref("a")], [Ref("b"), Ref("s")], axis="dp", op="sum")
        found = []
        for number in range(3):
            own, whole = torch.full((2,), 10.0 * number + rank), torch.zeros(4)
            comm.start(f"g{number}", gather, [own, whole])
            value, into = torch.full((2,), 10.0 * number + rank), torch.zeros(2)
            comm.start(f"r{number}", total, [value, into, torch.zeros(1, 1)])
            found.append((whole, into))
        assert comm.number == 12, "two numbers for each: an all-reduce has two halves"
        for number in (2, 0, 1):
            comm.wait(f"r{number}")
            comm.wait(f"g{number}")
            comm.settle(f"r{number}")
            comm.settle(f"g{number}")
        return [[*whole.tolist(), *into.tolist()] for whole, into in found]

    for found in WAYS[way](2, run):
        assert found == [[x, x, x + 1, x + 1, 2 * x + 1, 2 * x + 1] for x in (0.0, 10.0, 20.0)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [3, 3_000])
def test_messages_meet_by_tag_and_in_order(post: Any, size: int, way: str) -> None:
    def run(comm: Any, rank: int) -> list[float]:
        if rank == 0:
            for number, tag in enumerate((7, 8, 7)):
                op = make_op("send", [Ref("a")], axis="pp", peer=2, tag=tag)
                comm.start(f"a{number}", op, [torch.full((size,), float(number))])
            for number in range(3):
                comm.wait(f"a{number}")
        rooms = [torch.zeros(size) for _ in range(3)]
        if rank == 2:
            for number, tag in enumerate((8, 7, 7)):
                op = make_op("recv", writes=[Ref(f"b{number}")], axis="pp", peer=0, tag=tag)
                comm.start(f"b{number}", op, [rooms[number]])
            assert comm.number == 6
            for number in (2, 0, 1):
                comm.wait(f"b{number}")
        assert not comm.pending
        return [float(room.unique()) for room in rooms]

    assert WAYS[way](3, run)[2] == [1.0, 0.0, 2.0]


def test_what_a_rank_sends_to_itself_is_copied_unless_it_lies_there() -> None:
    op, copied = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp"), list[Tensor]()
    own = torch.ones(2)
    for address in (own.data_ptr(), 0):
        place: Any = SimpleNamespace(data_ptr=lambda address=address: address, copy_=copied.append)
        keep_own(record(op), own, {1: place}, 1, 2)
    assert len(copied) == 1


def test_the_halves_of_an_all_reduce_have_tags_of_their_own(post: Any) -> None:
    def run(comm: Any, rank: int) -> None:
        op, tensors, _ = made("all_reduce", 2, rank, 4, lambda n: torch.zeros(n, dtype=torch.uint8), op="sum")
        for name in ("b", "c"):
            comm.start(name, op, tensors)
            comm.wait(name)

    by_messages(2, run)
    assert {tag for _, _, _, tag, _ in post} == {2, 3, 4, 5}


def test_messages_to_lower_ranks_have_a_group_of_their_own() -> None:
    """NCCL runs what one communicator carries in order."""
    messages = Messages(1, 4, "up", "back")
    assert [messages._group(1, 2), messages._group(1, 0), messages._group(3, 1)] == ["up", "back", "back"]
    assert Messages(1, 4, "up")._group(1, 0) == "up"
    assert messages.others() == [2, 3, 0]


# --- what ends a wait -------------------------------------------------------------------------------------------------


def raising(error: Exception) -> Request:
    def run() -> None:
        raise error

    return Request(run)


def test_a_wait_is_marked_and_its_error_is_of_a_peer() -> None:
    presence, seen = Presence(0, 2), []
    finish(Pending([Request(lambda: seen.append(presence.waits))], lambda: seen.append(presence.waits)), presence)
    assert seen == [True, True]
    assert not presence.waits
    for error, kind in (
        (RuntimeError("closed"), PeerError),
        (HangError("lost"), HangError),
        (ValueError("x"), ValueError),
    ):
        with pytest.raises(kind, match=str(error)):
            finish(Pending([raising(error)]), presence)
        assert not presence.waits


def test_what_a_failed_step_has_started_is_ended(post: Any) -> None:
    def run(comm: Any, rank: int) -> bool:
        memory = comm.host.allocate if isinstance(comm, Shared) else lambda n: torch.zeros(n, dtype=torch.uint8)
        op, tensors, wanted = made("all_gather", 2, rank, 4_000, memory)
        comm.start("b", op, tensors)
        comm.drain()
        assert not getattr(comm, "lent", {}), "nobody reads its source any more"
        return not comm.pending and same_bits(tensors[1], wanted)

    for way in WAYS.values():
        assert way(2, run) == [True, True]


def test_a_world_of_one_has_no_transfers() -> None:
    comm = Alone()
    with pytest.raises(DisagreementError, match="all_gather into b in a world of one"):
        comm.start("b", make_op("all_gather", [Ref("a")], [Ref("b")]), [])
    for call in (comm.wait, comm.settle):
        with pytest.raises(KeyError):
            call("b")
    assert comm.ready("b")
    assert (comm.number, dict(comm.sent_bytes)) == (0, {})
    comm.drain()


def test_over_messages_and_nccl_a_wait_may_block() -> None:
    """Each rank has a process of its own: nobody has to ask first."""
    assert P2P(Line(0, (0, 1))).ready("b")
    assert Nccl(Line(0, (0, 1)), Presence(0, 2)).ready("b")


# --- NCCL, by a stand-in for its calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nccl_is_asked_for_what_the_kind_is(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: list[Any] = []

    def called(name: str) -> Any:
        def call(dest: Tensor, source: Tensor | None = None, **given: Any) -> Request:
            calls.append((name, given))
            assert (dest if source is None else source).tolist() == [1.0, 1.0], "what the rank gives"
            return Request(lambda: dest.copy_(6 * torch.ones_like(dest)))

        return call

    names = ("all_to_all_single", "reduce_scatter_tensor", "all_reduce")
    fake = SimpleNamespace(**{name: called(name) for name in names}, ReduceOp=SimpleNamespace(MAX="max", SUM="sum"))
    monkeypatch.setattr(transfers, "dist", fake)
    monkeypatch.setattr(transfers, "all_gather_single", called("all_gather"))
    reduces = "reduce" in kind
    given = {"op": "max", "divisor": 2} if reduces else {}
    op = make_op(kind, [Ref("a")], [Ref("b")], axis="dp", **given)
    comm, dest = Nccl(Line(0, (0, 1), "group")), torch.zeros(2)
    comm.start("b", op, [torch.ones(2), dest])
    assert comm.number == 0, "no tag"
    comm.wait("b")
    comm.settle("b")
    ((name, options),) = calls
    assert name == {
        "all_gather_values": "all_gather", "all_reduce_small": "all_reduce", "reduce_scatter": "reduce_scatter_tensor",
        "all_to_all": "all_to_all_single",
    }.get(kind, kind)  # fmt: skip
    assert (options["group"], options["async_op"]) == ("group", True)
    assert options.get("op") == ("max" if reduces else None)
    assert dest.tolist() == ([3.0, 3.0] if reduces else [6.0, 6.0]), "divided once"


def test_nccl_sends_messages_of_a_number(post: Any) -> None:
    presence = Presence(0, 2)
    comm = Nccl(Line(0, (0, 1), Group(0, 2)), presence)
    assert comm.presence is presence
    comm.start("a", make_op("send", [Ref("a")], axis="pp", peer=1, tag=4), [torch.ones(2)])
    assert comm.number == 2
    assert [*comm.pending] == ["a"]
    comm.drain()
    assert not comm.pending
    assert post[0, 0, 1, 4, 1].get(timeout=1).tolist() == [1.0, 1.0]
