"""What one rank does in test_shared_memory: each function runs in a process of its own, under `helpers.gloo`."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
from helpers import same_bits, start
from models import MODELS

import fzero
from fzero import tree
from fzero.comm import peers as host_module
from fzero.comm.agree import tell
from fzero.comm.group import Line, open_world
from fzero.comm.peers import PeerError
from fzero.comm.pick_way import Fastest, measured
from fzero.comm.rendezvous import meet
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, gloo
from fzero.compile.judged import naive
from fzero.ir.op import make_op
from fzero.ir.records import Ref as R
from fzero.passes import Options, optimise
from fzero.runtime.handlers import Rank, steps
from fzero.state import storage
from fzero.verify.rules import verify

GATHER = make_op("all_gather", [R("own")], [R("whole")], axis="dp")
BIG = 100_000  # elements: more than travels in a message


def met(timeout_seconds=60.0):
    """(rank, world, host)"""
    rank, world = open_world("cpu")
    host, why = meet(rank, world, timeout_seconds=timeout_seconds)
    assert host is not None, why
    return rank, world, host


# --- transfers --------------------------------------------------------------------------------------------------------


def made(spec, rank, world, index, memory):
    """(op, tensors with receive scratch, destination) of one transfer, its values drawn from (rank, index)."""
    draw = torch.Generator().manual_seed(1000 * index + rank)
    dtype, part = getattr(torch, spec["dtype"]), spec["part"]
    count = part if spec["kind"] == "all_gather" and not spec["inside"] else part * world
    value = torch.randn(count, generator=draw) * 50
    value = value > 0 if dtype is torch.bool else value.to(dtype)

    def place(shape, arena):
        if not arena:
            return torch.empty(shape, dtype=dtype)
        return memory(shape * dtype.itemsize).view(dtype) if shape else memory(0).view(dtype)

    source = place(count, spec["arena"]).copy_(value)
    if spec["kind"] == "all_gather":
        whole = source if spec["inside"] else place(part * world, spec["dest"])
        own = source.view(world, -1)[rank] if spec["inside"] and part else source[:part]
        return GATHER, [own, whole], own, whole
    kind = spec["kind"]
    size = part if kind == "reduce_scatter" else part * world
    scratch = torch.empty(world - 1, max(part * world, 1), dtype=dtype)
    divisor = spec["divisor"] if dtype.is_floating_point or dtype.is_complex else 1
    how = "sum" if dtype.is_complex else spec["op"]
    one = make_op(kind, [R("own")], [R("whole"), R("s")], axis="dp", op=how, divisor=divisor)
    dest = place(size, spec["dest"])
    return one, [source, dest, scratch], source, dest


def transfers(specs, events, seed):
    """Runs the transfers by P2P, then by Shared with other delays on each rank; the names of those whose bits differ.

    After a transfer has settled its source is overwritten, at once: nobody may still read it.
    """
    rank, world, host = met()
    shared, plain = Shared(host, Line.whole(host.rank, world)), P2P(Line.whole(rank, world))
    expected, wrong = {}, []
    for index, spec in enumerate(specs):
        one, tensors, _, dest = made(spec, rank, world, index, lambda n: torch.empty(n, dtype=torch.uint8))
        plain.start("x", one, tensors)
        plain.wait("x")
        expected[index] = dest
    delays = random.Random(seed * 10 + rank)
    running = {}
    for action, index in events:
        time.sleep(delays.choice((0, 0, 0, 0.002)))
        name = f"t{index}"
        if action == "start":
            one, tensors, source, dest = made(specs[index], rank, world, index, host.allocate)
            shared.start(name, one, tensors[:2])
            running[index] = (source, dest)
        elif action == "wait":
            shared.ready(name)
            shared.wait(name)
            if not same_bits(running[index][1], expected[index]):
                wrong.append((index, specs[index]))
        else:
            shared.settle(name)
            source, dest = running.pop(index)
            source.fill_(1)
            dest.fill_(1)
    host.close()
    return wrong


def many_in_flight():
    """More transfers at once than a socket holds messages, staged ones among them."""
    rank, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))
    sizes = [3] * 600 + [BIG] * 20  # small ones first: staging looks for messages
    wholes = [torch.empty(world * n) for n in sizes]
    for i, n in enumerate(sizes):
        shared.start(f"t{i}", GATHER, [torch.full((n,), float(1000 * rank + i)), wholes[i]])
    for i in reversed(range(len(sizes))):
        shared.wait(f"t{i}")
    found = all(
        torch.equal(w.view(world, -1)[r], torch.full((n,), float(1000 * r + i)))
        for i, (w, n) in enumerate(zip(wholes, sizes, strict=True))
        for r in range(world)
    )
    assert len(host.staged) <= 20
    return found


def training(zero, steps_):
    """State buffers that differ after steps by P2P and by Shared with all buffers in arenas and freed ones spoiled."""
    rank, world, host = met()
    host_module.INLINE_BYTES = 0  # or all of a small model travels in messages
    init, loss, batch = MODELS["mlp"]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=zero, bucket_bytes=256, clip_norm=1.0)
    params = init(fzero.random.key(0))
    _, leaves = start(spec, params)
    found = []
    for via in ("p2p", "shared"):
        lowered = lowered_via(spec, params, batch(0, 0), world, via)
        program = lowered.program
        comm = LateReader(host, Line.whole(rank, world)) if via == "shared" else P2P(Line.whole(rank, world))
        memory = storage.shards(lowered.plan, leaves, rank)
        if via == "shared":
            memory = {name: in_arena(host, x.shape, x.dtype).copy_(x) for name, x in memory.items()}
        inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
        for step in range(steps_):
            given = dict(zip(inputs, tree.flatten(batch(rank, step))[1], strict=True))
            one = Rank(program, rank, comm, {**memory, **given}, poison=True)
            if via == "shared":
                one.arena = host.allocate(program.arena_bytes)
            with torch.no_grad():
                for _ in steps(one):
                    pass
        found.append(memory)
    return [name for name in found[0] if not same_bits(found[0][name], found[1][name])], len(host.own.places)


class LateReader(Shared):
    """Rank 1 reads what it waits for when the others have gone on."""

    def wait(self, name):
        time.sleep(0.005 * (self.rank == 1))
        super().wait(name)


def in_arena(host, shape, dtype):
    count = torch.Size(shape).numel()
    return host.allocate(count * dtype.itemsize).view(dtype).view(shape)


def lowered_via(spec, params, batch, world, via):
    """`fzero.lower` with another `via` than that of the device, and the options' defaults."""
    lowered = fzero.lower(spec, params, batch, world_size=world)
    program, _ = optimise(naive(lowered.graph, lowered.plan, transport=via), Options())
    verify(program)
    return replace(lowered, programs={0: program})


def chosen():
    """The measured table, and whether transfers the fastest way have the bits of P2P."""
    rank, world, host = met()
    comms = {
        "shared": Shared(host, Line.whole(host.rank, world)),
        "p2p": P2P(Line.whole(rank, world)),
        "gloo": gloo(Line.whole(rank, world)),
    }
    table, rates = measured(comms, world, world, memory=host.allocate)
    one = make_op("all_reduce", [R("own")], [R("sum"), R("s")], axis="dp", op="sum", divisor=world)
    same = []
    for forced in (table, dict.fromkeys(table, "p2p"), dict.fromkeys(table, "shared"), dict.fromkeys(table, "gloo")):
        fastest = Fastest(comms, {k: v if k[0] == "all_gather" or v != "gloo" else "p2p" for k, v in forced.items()})
        for n in (1, 1000, 400_000):
            source = torch.randn(n * world, generator=torch.Generator().manual_seed(rank))
            total, whole = torch.empty(n * world), torch.empty(n * world)
            fastest.start("sum", one, [source, total, torch.empty(world - 1, n)])
            fastest.wait("sum")
            fastest.start("whole", GATHER, [source[:n], whole])
            fastest.wait("whole")
            same.append((total.sum().item(), whole.sum().item(), total[0].item()))
    return {f"{k} {s}": way for (k, s), way in table.items()}, len(set(same)) == 3, repr(rates)


class Finding(Exception):
    """What a rank found out, as JSON: raised, for `helpers.gloo` meets all ranks at the end, and one is gone."""

    def __init__(self, *values):
        super().__init__(json.dumps(values))


# --- what goes wrong --------------------------------------------------------------------------------------------------


def stopped_and_killed(how):
    """Rank 1 ends or stops before its part of a gather; what the others are told, and how long it took."""
    rank, world, host = met(timeout_seconds=1.5 if how == "stopped" else 60.0)
    shared = Shared(host, Line.whole(host.rank, world))
    own, whole = torch.ones(BIG), torch.empty(BIG * world)
    pids = tell(str(os.getpid()).encode(), world, None)
    if rank == 1:
        if how == "forked":  # a child with copies of its sockets lives on
            if os.fork() == 0:
                time.sleep(4)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        return
    if rank == 0 and how == "killed":
        time.sleep(3)  # is only late; rank 2 waits for it first, and hears of rank 1
    began = time.monotonic()
    try:
        shared.start("whole", GATHER, [own, whole])
        shared.wait("whole")
    except PeerError as error:
        took = time.monotonic() - began
        if how == "stopped" and rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)
        try:
            shared.start("next", GATHER, [own, whole])
        except PeerError as again:
            raise Finding(str(error), took, str(again)) from None


def killed_before_reading():
    """Rank 1 is killed between its start and its wait: its data can be had, but it will never have read ours."""
    rank, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))
    own, whole = host.allocate(4 * BIG).view(torch.float32).fill_(rank + 1), torch.empty(BIG * world)
    shared.start("whole", GATHER, [own, whole])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    shared.wait("whole")
    try:
        shared.settle("whole")
    except PeerError as error:
        raise Finding(bool((whole.view(world, -1)[1] == 2).all()), str(error)) from None


def leaves_early():
    """Rank 1 closes as soon as it is done; the others still get its part, and need not wait for it to settle."""
    rank, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))
    own, whole = host.allocate(4 * BIG).view(torch.float32).fill_(rank + 1), torch.empty(BIG * world)
    shared.start("whole", GATHER, [own, whole])
    if rank != 1:
        time.sleep(0.3)
    shared.wait("whole")
    if rank == 1:
        host.close()
        own.fill_(9)  # its own memory is still there
        return float(own[0]), 0.0
    shared.settle("whole")
    return float(whole.view(world, -1)[rank][0]), float(whole.view(world, -1)[0][0])


def in_a_child():
    """What a forked child is told."""
    _, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))
    inside, outside = os.pipe()
    if os.fork() == 0:
        try:
            shared.start("whole", GATHER, [torch.ones(4), torch.empty(4 * world)])
        except PeerError as error:
            os.write(outside, str(error).encode())
        os._exit(0)
    told = os.read(inside, 1000).decode()
    whole = torch.empty(4 * world)
    shared.start("whole", GATHER, [torch.ones(4), whole])
    shared.wait("whole")
    return told, whole.tolist()


def of_another_size():
    rank, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))
    shared.start("whole", GATHER, [torch.ones(BIG + rank), torch.empty((BIG + rank) * world)])
    shared.wait("whole")


# --- set-up and memory ------------------------------------------------------------------------------------------------


def apart(why):
    """What `meet` answers when rank 1 is in another network namespace, or has no memfd_create."""
    rank, world = open_world("cpu")
    torch.distributed.barrier()
    able = b"yes"
    if rank == 1 and why == "namespace":
        new_network = 0x40000000
        able = b"yes" if ctypes.CDLL(None, use_errno=True).unshare(new_network) == 0 else b"no"
    if rank == 1 and why == "memfd":
        del os.memfd_create
    if b"no" in tell(able, world, None):
        return "not permitted"
    return meet(rank, world)


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:fzero")


def memory():
    """Shared mappings at each point: arenas go with their last tensor, here and at the peers."""
    rank, world, host = met()
    shared = Shared(host, Line.whole(host.rank, world))

    def together():
        whole = torch.empty(world)
        shared.start("w", GATHER, [torch.ones(1), whole])
        shared.wait("w")
        count = mapped()
        torch.distributed.barrier()  # or a rank that is ahead might have let go of the next
        return count

    together()
    counts = [together()]
    arena = host.allocate(10_000)
    view = arena[100:200].view(torch.float32)
    assert arena.data_ptr() % 4096 == 0
    assert int(arena.sum()) == 0
    assert host.place(view) == (1, 100)
    counts.append(together())
    del arena
    counts.append(together())
    del view
    together()
    counts.append(together())
    assert host.own.places == {}
    kept = host.allocate(10)
    together()
    host.close()
    counts.append(mapped())
    kept.fill_(rank)
    return counts


def two_hosts():
    """Two hosts in one process, transfers in turn, sources in the other's arena."""
    rank, world, first = met()
    _, _, second = met()
    a, b = (Shared(host, Line.whole(host.rank, world)) for host in (first, second))
    x = first.allocate(4 * BIG).view(torch.float32).fill_(rank)
    y = second.allocate(4 * BIG).view(torch.float32).fill_(10 + rank)
    results = [torch.empty(world * BIG) for _ in range(4)]
    for comm, source, whole, name in zip((a, b, a, b), (x, x, y, y), results, "pqrs", strict=True):
        comm.start(name, GATHER, [source, whole])
    for comm, name in zip((b, a, b, a), "srqp", strict=True):
        comm.wait(name)
        comm.settle(name)
    first.close()
    return [w.view(world, -1).mean(1).tolist() for w in results]
