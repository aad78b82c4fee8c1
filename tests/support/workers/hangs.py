"""What one rank does in test_hangs: each function runs in a process of its own, under `helpers.gloo`."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fzero
from fzero.checkpoint import shards
from fzero.comm import heartbeat
from fzero.comm.agree import tell
from fzero.ir.program import op_text
from fzero.runtime.executor import Executor

STEPS = 2  # that go well


def loss(params, batch):
    for weight in params["blocks"]:
        batch = torch.tanh(batch @ weight)
    return (batch**2).mean()


def trouble(
    how: str, wrong: int, transfers: str, timeout: float, kind: str, folder: str, **given: Any
) -> dict[str, Any]:
    """Rank `wrong` does not come to step STEPS + 1, or not through it (`kind`: before the first op of this kind; "":
    between steps). What the others raised, how long it took, and what is left."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fields = {"loss": loss, "optimizer": fzero.optim.sgd(1e-3), "transfers": transfers, "timeout": timeout, "zero": 2}
    spec = fzero.Spec(**fields, **given)
    draw = torch.Generator().manual_seed(0)
    state = fzero.init({"blocks": [torch.randn(8, 8, generator=draw) for _ in range(2)]}, spec)
    pids = [int(pid) for pid in tell(str(os.getpid()).encode(), world, None)]
    batch = torch.ones(2, 8)
    for _ in range(STEPS):
        state = fzero.step(state, batch)
    lines = [f"op {i}: {op_text(one)} | {one.why}" for i, one in enumerate(state.program.ops)]
    answered = Path(folder)
    if rank == wrong:
        act: Callable[[], None] = {
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stay": lambda: wait_for(answered, world - 1),
            "raise": fail,
            "end": end,
        }[how]
        if not kind:
            act()
            os._exit(1)
        before_first(kind, act)
    began = time.monotonic()
    found: dict[str, Any] = {"lines": lines}
    try:
        fzero.step(state, batch)
    except ValueError as error:
        wait_for(answered, world - 1)
        found |= {"own": str(error)}
    except fzero.HangError as error:
        found |= {"message": str(error), "missing": error.missing, "seconds": time.monotonic() - began}
        found |= {"again": said(lambda: fzero.step(state, batch)), "ended": state.life.ended}
        found |= {
            "readable": bool(torch.isfinite(state.params["blocks"][0].local).all()) if not state.life.ended else None
        }
        (answered / str(rank)).touch()
        if how == "stop" and len(list(answered.iterdir())) == world - 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[wrong], signal.SIGKILL)
    began = time.monotonic()
    dist.destroy_process_group()
    return found | {"teardown": time.monotonic() - began}


def before_first(kind: str, act: Callable[[], None]) -> None:
    """The next step does `act` before its first op of a kind."""
    real = Executor.issue

    def issue(self: Executor, watch: Any = None) -> None:
        at = next(i for i, op in enumerate(self.program.ops) if op.kind == kind)
        self.calls = [*self.calls[:at], [act, *self.calls[at]], *self.calls[at + 1 :]]
        real(self, watch)

    Executor.issue = issue  # type: ignore[method-assign]


def fail() -> None:
    raise ValueError("only here")


def end() -> None:
    """As a program that comes to its end; `helpers` would leave by `os._exit`."""
    atexit._run_exitfuncs()
    os._exit(0)


def ends_slowly(folder: str) -> dict[str, Any]:
    """Rank 1's program comes to its end, and what it has to do there ends when rank 0 has been told of it."""
    answered = Path(folder)
    state = fzero.init(
        {"blocks": [torch.ones(8, 8)]}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), timeout=60)
    )
    pids = [int(pid) for pid in tell(str(os.getpid()).encode(), 2, None)]
    state = fzero.step(state, torch.ones(2, 8))
    if os.environ["RANK"] == "1":
        atexit.unregister(heartbeat._ended)
        atexit.register(wait_for, answered, 1)  # before fzero, as what was imported before: it runs after
        atexit.register(heartbeat._ended)
        end()
    try:
        fzero.step(state, torch.ones(2, 8))
    except fzero.HangError as error:
        os.kill(pids[1], 0)  # raises if it has ended
        (answered / "0").touch()
        dist.destroy_process_group()
        return {"message": str(error)}
    return {}


def wait_for(folder: Path, count: int) -> None:
    while len(list(folder.iterdir())) < count:
        time.sleep(0.02)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except fzero.FzeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def retried(transfers: str) -> tuple[str, str, int]:
    """All ranks fail in one step, rank 1 later than the others look for it; the next step goes well."""
    rank = int(os.environ["RANK"])
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), transfers=transfers, timeout=10)
    state = fzero.init({"blocks": [torch.ones(8, 8), torch.ones(8, 8)]}, spec)
    state = fzero.step(state, torch.ones(2, 8))
    real = Executor.issue

    def late() -> None:
        time.sleep(1.5 * (rank == 1))  # more than a tick
        raise ValueError("everywhere")

    before_first("run", late)
    with contextlib.suppress(ValueError):
        fzero.step(state, torch.ones(2, 8))
    Executor.issue = real  # type: ignore[method-assign]
    state.runtime.bound.clear()
    ended = state.life.ended
    again = said(lambda: fzero.step(state, torch.ones(2, 8)))
    return ended, again, state.runtime.presence.call


def restarted() -> list[float]:
    """The process group is destroyed and made again, twice; what was told before is not heard."""
    found = []
    for _ in range(3):
        state = fzero.init({"blocks": [torch.ones(8, 8), torch.ones(8, 8)]},
                           fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), timeout=20))  # fmt: skip
        here = state.runtime.presence
        state = fzero.step(state, torch.ones(2, 8))
        here.failed(ValueError("a note that stays in the store"))
        state = fzero.step(state, torch.ones(2, 8))
        found.append(float(state.metrics["loss"]))
        del state
        dist.barrier()
        dist.destroy_process_group()
    return found


def stored_in_a_file(path: str, folder: str) -> dict[str, Any]:
    """Rank 1 does not come; the ranks' store is a file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from datetime import timedelta

    dist.init_process_group(
        "gloo", store=dist.FileStore(path, world), rank=rank, world_size=world, timeout=timedelta(seconds=2)
    )
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3))
    state = fzero.init({"blocks": [torch.ones(8, 8), torch.ones(8, 8)]}, spec)
    state = fzero.step(state, torch.ones(2, 8))
    found = {}
    if rank == 1:
        wait_for(Path(folder), world - 1)
    else:
        try:
            fzero.unshard(state.params)
        except fzero.HangError as error:
            found = {"message": str(error), "missing": error.missing}
        (Path(folder) / str(rank)).touch()
    dist.destroy_process_group()
    return found


def never_met(how: str, wrong: int) -> dict[str, Any]:
    """Rank `wrong` dies on its way into the process group: "before" it says a word, with its "token" in the store, or
    when all have "met" there and not yet connected. What the others raised."""
    if int(os.environ["RANK"]) == wrong:
        real = dist.PrefixStore

        class Store(real):  # type: ignore[misc, valid-type]
            def set(self, key: str, value: str) -> None:
                super().set(key, value)
                if key.startswith("token"):
                    os._exit(1)

        if how == "before":
            os._exit(1)
        elif how == "token":
            dist.PrefixStore = Store
        else:
            dist.init_process_group = lambda *_, **__: os._exit(1)
    try:
        fzero.init({"blocks": []}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), timeout=4.0))
    except fzero.HangError as error:
        return {"message": str(error), "missing": error.missing}
    return {}


def few_files(left: int) -> str:
    """What `init` says with room for so many files and sockets more."""
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + left, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), zero=2, timeout=8.0)
    return said(lambda: fzero.step(fzero.init({"blocks": [torch.ones(8, 8)]}, spec), torch.ones(2, 8)))


def stopped_in_a_save(how: str, folder: str) -> None:
    """A program of its own, of which rank 1 is stopped while it writes its shard, and says in a file when that was.

    how: what the main thread does meanwhile: "steps", waits for a save of its own ("save"), writes itself ("front"), or
    has come to its "end".
    """
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), timeout=3.0)
    state = fzero.init({"blocks": [torch.ones(8, 8)]}, spec)

    def stop(*_: Any) -> None:
        Path(folder, "stopped").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["RANK"] == "1":
        shards.write = stop
    with fzero.Checkpointer(f"{folder}/saved", every=1, background=how != "front") as saver:
        for step in range(5):
            state = fzero.step(state, torch.ones(2, 8))
            saver.after(state)
            if how == "save" and not step:
                saver.save(state)
            if how == "end":
                break


def killed_for_memory(group: str) -> dict[str, Any]:
    """Rank 1 takes more memory than its control group has ("": it is killed as if it had). What rank 0 raises."""
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), timeout=60.0)
    state = fzero.init({"blocks": [torch.eye(8)]}, spec)
    state = fzero.step(state, torch.ones(2, 8))
    if os.environ["RANK"] == "1":
        if not group:
            os.kill(os.getpid(), signal.SIGKILL)
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        held = []
        while True:
            held.append(b"\1" * (8 << 20))
    try:
        fzero.step(state, torch.ones(2, 8))
    except fzero.HangError as error:
        dist.destroy_process_group()
        return {"message": str(error), "missing": error.missing}
    raise AssertionError("rank 1 lives")


STRANGER = """
import os, random, socket, sys, time
sys.argv[2] == "0" or os.setuid(65534)
port, held, draw = int(sys.argv[1]), [], random.Random(0)
for each in range(1_000_000):
    held = held[-100:]  # the others say nothing, for as long as they live
    try:
        one = socket.socket()
        held.append(one)
        one.connect(("127.0.0.1", port))
        if each % 2:
            one.sendall([b"GET / HTTP/1.0\\r\\n\\r\\n", draw.randbytes(4096), b"\\0"][each // 2 % 3])
    except OSError:
        pass
    time.sleep(0.02)
"""


def strangers(seconds: float) -> dict[str, Any]:
    """Steps, while a process of another user (of this one, where it is not root's) connects to the store's port and
    writes what is no message, and this process writes into the records of all ranks what is none."""
    rank, root = int(os.environ["RANK"]), os.geteuid() == 0
    draw = torch.Generator().manual_seed(0)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-3), zero=2, timeout=20.0)
    state = fzero.init({"blocks": [torch.randn(8, 8, generator=draw) for _ in range(2)]}, spec)
    command = [sys.executable, "-I", "-S", "-c", STRANGER, os.environ["MASTER_PORT"], str(int(root))]
    stranger = subprocess.Popen(command, env={}) if rank == 0 else None
    pulse = heartbeat.of().heartbeat
    store, began, done = pulse.store.clone(), time.monotonic(), False
    while not done:
        for number, record in enumerate(("", b"\xff", "[" * 10_000, '{"end": "failed", "call": "x"}')):
            store.set(str(number % 2), record)
        state = fzero.step(state, torch.ones(2, 8))
        late = state.step > STEPS and time.monotonic() - began > seconds
        done = any(tell(bytes([late]), 2, None))
    lived = stranger is None or stranger.poll() is None
    if stranger is not None:
        stranger.kill()
        stranger.wait()
    return {"steps": state.step, "thread": pulse.alive(), "stranger": lived, "loss": float(state.metrics["loss"])}
