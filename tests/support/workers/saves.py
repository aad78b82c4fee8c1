"""Saves in processes that are killed: ranks are forked from this one, write snapshots over gloo, and die.

`python saves.py WORLD:COUNT ...` puts saves in worlds of these sizes to COUNT kills each, drawn by a fixed seed (0: to
every kill there is), and prints JSON: how many there were, and what went wrong. A kill is [rank, n, when, who]: at its
n-th file operation, `before`, in the `middle` of (a write) or `after` it, rank `rank` or (who = "all") every rank gets
SIGKILL.

Every save starts with two committed steps and with what two dead saves left, and keeps two: it cleans, writes, commits
and prunes.
"""

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import gloo, values
from saved import contents, steps

import fzero
from fzero import tree
from fzero.checkpoint import Disk, commit, shards, write
from fzero.checkpoint.manifest import shard_name
from fzero.checkpoint.save import Snapshot, take
from fzero.errors import CheckpointError
from fzero.state import storage

KEEP = 2


def values_of(plan: Any, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(x.shape, generator=draw).to(x.dtype) for x in plan.leaves]


@cache
def placed(world: int) -> tuple[Any, Any]:
    """The plan of a small run, and the structure of its state."""
    params = {"w": torch.zeros(9, 16), "b": torch.zeros(5)}
    spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean() + p["b"].sum(), optimizer=fzero.optim.adamw(1e-3))
    treedef = tree.flatten({"params": params, "opt_state": spec.optimizer.init(params)})[2]
    return fzero.lower(spec, params, torch.ones(2, 9), world_size=world).plan, treedef


def snapshots(world: int, step: int) -> tuple[list[Snapshot], dict[str, torch.Tensor]]:
    """What each rank of the small run saves at a step, and the whole leaves."""
    plan, treedef = placed(world)
    values = values_of(plan, step)
    extra = {"position": step}
    parts = [
        take(plan, storage.shards(plan, values, rank), rank, treedef=treedef, step=step, zero=3, extra=extra)
        for rank in range(world)
    ]
    return parts, {leaf.path: value for leaf, value in zip(plan.leaves, values, strict=True)}


class Deadly(Disk):
    """Kills at one operation; counts them all."""

    def __init__(self, at: int = -1, when: str = "", kill: Callable[[], None] = lambda: None) -> None:
        self.at, self.when, self.kill, self.kinds = at, when, kill, []

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        number = len(self.kinds)
        self.kinds.append(kind)
        if number != self.at:
            return call()
        if self.when == "before":
            self.kill()
        if self.when == "middle" and kind == "write":
            real = os.writev
            os.writev = lambda fd, views: real(fd, [(data := b"".join(views))[: len(data) // 2]])
        call()
        return self.kill()


def fork_world(world: int, work: Callable[[int, Callable[[str], None]], str]) -> list[str]:
    """`work(rank, kill)` in a forked process per rank over gloo: what each returned, or how it ended."""
    pids = mmap.mmap(-1, 8 * world)
    results, children = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    os.close(ours)
                    os.write(theirs, _rank(rank, world, folder, pids, work).encode())
                os._exit(0)
            os.close(theirs)
            struct.pack_into("q", pids, 8 * rank, pid)
            results.append(ours)
            children.append(pid)
        found = []
        for pipe, pid in zip(results, children, strict=True):
            with open(pipe, "rb") as file:
                said = file.read().decode()
            status = os.waitpid(pid, 0)[1]
            found.append(said or f"died {os.waitstatus_to_exitcode(status)}")
    return found


def _rank(rank: int, world: int, folder: str, pids: mmap.mmap, work: Callable[..., str]) -> str:
    def kill(who: str) -> None:
        others = [struct.unpack_from("q", pids, 8 * r)[0] for r in range(world) if r != rank] if who == "all" else []
        for pid in [*others, os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    try:
        if world > 1:
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return work(rank, kill)
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    except BaseException:
        return traceback.format_exc()


def prepare(run: Path, world: int) -> dict[int, Any]:
    """Steps 1 and 2, committed; a save of step 3 that died before its rename, and one of step 7 before its marker."""
    saved = {step: snapshots(world, step) for step in (1, 2, 7)}
    for step, (parts, _) in saved.items():
        said = fork_world(world, lambda rank, kill, parts=parts: write(parts[rank], run).name)
        assert said == [f"step-{step:08d}"] * world, said
    (run / "step-00000007" / "COMMITTED").unlink()
    shutil.copytree(run / "step-00000007", run / ".tmp-step-00000003-0123abcd")
    (run / "latest").write_text("step-00000002\n")
    return saved


def saved_by_two(folder: Path) -> Path:
    """A checkpoint of two ranks, saved by this process alone."""
    parts, _ = snapshots(2, 3)
    temporary, release = commit.prepare(folder / "run", 3, 0, "01234567", Disk())
    written = [shards.write(Disk(), temporary / shard_name(rank), one.parts) for rank, one in enumerate(parts)]
    final = commit.commit(folder / "run", temporary, replace(parts[0].manifest, shards=tuple(written)), Disk())
    release()
    return final


def kills(*words: str) -> list[tuple[int, list[str]]]:
    """What this file prints when it is run, from a process of one thread, which may fork."""
    (found,) = values(gloo(1, told, words, timeout=900))
    return found


def told(words: Iterable[str]) -> list[tuple[int, list[str]]]:
    return [main(*map(int, word.split(":"))) for word in words]


def check(run: Path, world: int, kill: list[Any], saved: dict[int, Any]) -> list[str]:
    """Kills a save of step 3, looks at what is there, and saves step 4."""
    dead, n, when, who = kill
    parts, wrong = saved[3][0], []

    def work(rank: int, die: Callable[[str], None]) -> str:
        disk = Deadly(n, when, lambda: die(who)) if rank == dead else Disk()
        return write(parts[rank], run, keep=KEEP, disk=disk).name

    said = fork_world(world, work)
    for rank, text in enumerate(said):
        fine = text == "died -9" if rank == dead or who == "all" else text.startswith("CheckpointError")
        wrong += [] if fine else [f"rank {rank} ended with {text}"]
    left = steps(run)
    if not {2, 3} & set(left) or 2 not in left or not {1, 3} & set(left):
        wrong.append(f"steps {left} are left")
    later = saved[4][0]
    done = fork_world(world, lambda rank, kill: write(later[rank], run, keep=KEEP).name)
    if done != ["step-00000004"] * world:
        wrong.append(f"the next save: {done}")
    kept = [*left, 4][-KEEP:]
    for step in {*left, *kept} & set(steps(run)):
        manifest, leaves = contents(run / f"step-{step:08d}")
        if manifest["extra"] != {"position": step} or not all(
            torch.equal(v, saved[step][1][p]) for p, v in leaves.items()
        ):
            wrong.append(f"step {step} is not what was saved")
    names = sorted(p.name for p in run.iterdir())
    if names != [".lock", "latest", *(f"step-{step:08d}" for step in kept)]:
        wrong.append(f"after the next save there is {names}")
    return [f"world {world}, {kill}: {one}" for one in wrong]


def every_kill(kinds: list[list[str]]) -> list[list[Any]]:
    """From the operations of each rank."""
    return [
        [rank, n, when, who]
        for rank, mine in enumerate(kinds)
        for n, kind in enumerate(mine)
        for when in (("before", "middle", "after") if kind == "write" else ("before", "after"))
        for who in (("one", "all") if len(kinds) > 1 else ("one",))
    ]


def operations(run: Path, world: int, parts: list[Snapshot]) -> list[list[str]]:
    """The kinds of each rank's operations in a save that nobody kills."""

    def work(rank: int, kill: Callable[[str], None]) -> str:
        disk = Deadly()
        write(parts[rank], run, keep=KEEP, disk=disk)
        return json.dumps(disk.kinds)

    return [json.loads(text) for text in fork_world(world, work)]


def main(world: int, count: int) -> tuple[int, list[str]]:
    """How many kills there were, and what went wrong."""
    saved = {step: snapshots(world, step) for step in (3, 4)}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        saved |= prepare(start, world)
        shutil.copytree(start, Path(folder) / "counted")
        kills = every_kill(operations(Path(folder) / "counted", world, saved[3][0]))
        kills = random.Random(world).sample(kills, count) if count else kills
        wrong = []
        for number, kill in enumerate(kills):
            run = Path(folder) / str(number)
            shutil.copytree(start, run)
            wrong += check(run, world, kill, saved)
            shutil.rmtree(run)
        return len(kills), wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(told(sys.argv[1:])))
