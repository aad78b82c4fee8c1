"""A run that is killed at random instants until it is done, as `torchrun --max-restarts` would start it again.

`kill_loop` trains two ranks from the last committed step on, kills one or both after a random time, ends what is left
as torchrun does, and begins again, run after run, until there were enough kills. Every run must end with the bits of
the run that nobody disturbed. A tiny model in processes forked from one that has imported torch: about a second a kill.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.nn.functional as F
from helpers import Outcome, gloo, same_bits, start_ranks, values
from torch import Tensor

import fzero
from fzero import tree
from fzero.checkpoint import Disk

T = TypeVar("T")
WORLD, SIZE, SEQUENCE = 2, 4, 8
PHASES = ("starting", "stepping")  # up to the end of its first step, and after it
SWITCH = 60  # the step at which optimizers with phases change
FORMS: dict[str, Callable[[], dict[str, Any]]] = {  # fields of the Spec
    "adamw": lambda: {"optimizer": fzero.optim.adamw(1e-2), "zero": 3, "clip_norm": 1.0},
    "onebit": lambda: {"optimizer": fzero.optim.onebit_adam(1e-2, warmup_steps=SWITCH), "zero": 0},
    "sign": lambda: {
        "optimizer": fzero.optim.freeze_nu(1e-2, after=SWITCH), "zero": 2, "clip_norm": 1.0,
        "precision": fzero.Precision(reduce="sign"),
    },
}  # fmt: skip
GRACE_SECONDS = 10.0  # that the survivors have, after SIGTERM, before SIGKILL


def loss(params: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> Tensor:
    hidden = fzero.random.dropout(key, params["embed"][batch["x"]], 0.2)
    return F.cross_entropy((hidden @ params["out"]).flatten(0, 1), batch["y"].flatten())


def init(key: Tensor) -> dict[str, Tensor]:
    one, two = fzero.random.split(key, 2)
    return {"embed": fzero.random.normal(one, (64, 16)), "out": fzero.random.normal(two, (16, 64))}


class Watched(Disk):
    """Says while it writes, in a byte that the killer reads."""

    def __init__(self, saving: Any) -> None:
        self.saving = saving

    def run(self, kind: str, path: Path, call: Callable[[], T]) -> T:
        self.saving[0] = 1
        try:
            return super().run(kind, path, call)
        finally:
            self.saving[0] = 0


def train(
    out: Path, text: Path, steps: int, form: str, watched: Path | None = None, nvme: Path | None = None
) -> dict[str, Tensor]:
    """A run up to `steps` steps, from the last committed one: the whole state's leaves by path. nvme: a folder on a
    disk, which holds all of the state then."""
    rank = fzero.data._here()[0]
    shown = np.zeros((WORLD, 2), np.uint8) if watched is None else _watched(watched)
    away: dict[str, Any] = {} if nvme is None else {"offload": {"**": "nvme"}, "nvme_path": str(nvme)}
    spec = fzero.Spec(loss=loss, **FORMS[form](), **away)
    tokens = fzero.data.Tokens(text, dtype="uint8", sequence=SEQUENCE)
    with fzero.Checkpointer(out, every=2, keep=2, disk=Watched(shown[rank, 1:])) as saver:
        state = saver.resume(init, spec, key=fzero.random.key(3))
        batches = tokens.batches(SIZE, position=saver.extra.get("position", 0))
        assert batches.position == SIZE * state.step, "no batch is lost, none comes twice"
        while state.step < steps:
            state = fzero.step(state, next(batches))
            shown[rank, 0] = PHASES.index("stepping")
            saver.after(state, lambda: {"position": batches.position})
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def _watched(path: Path) -> Any:
    """(rank, [phase, whether a file operation of a save runs])"""
    return np.memmap(path, np.uint8, "r+", shape=(WORLD, 2))


def kill_loop(
    folder: Path, *, kills: int, steps: int, seed: int, nvme: Path | None = None, form: str = "adamw"
) -> Counter[str]:
    """What happened, counted: `kills` in all; of processes killed, those that were `starting` or `stepping`, and those
    that were `saving` too; `runs`; `stops` (a SIGTERM that was heard); `late` (survivors that needed SIGKILL).

    nvme: a folder on a disk, in which those runs keep their state, not the one that nobody disturbs. Fails where a run
    ends with other bits than that one, and where ranks that have ended leave a file in `nvme`.
    """
    text, watched = folder / "text.bin", folder / "watched"
    np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint8).tofile(text)
    np.zeros(2 * WORLD, np.uint8).tofile(watched)
    expected = values(gloo(WORLD, train, folder / "undisturbed", text, steps, form))[0]
    draw, counts = random.Random(seed), Counter[str]()
    while counts["kills"] < kills:
        out, found = folder / f"run{counts['runs']}", None
        for _ in range(20 * steps):
            disturb = counts["kills"] < kills
            given = (out, text, steps, form, watched, nvme)
            if (found := _attempt(given, draw if disturb else None, counts)) is not None:
                break
        assert found is not None, "it does not get any further"
        assert found.keys() == expected.keys()
        different = [path for path in expected if not same_bits(expected[path], found[path])]
        assert not different, f"{out} ended with other bits in {different}"
        counts["runs"] += 1
    return counts


def _attempt(
    given: tuple[Path, Path, int, str, Path, Path | None], draw: random.Random | None, counts: Counter[str]
) -> dict[str, Tensor] | None:
    """One start of both ranks and, with `draw`, a signal: the final state where they ended before it, else None.
    given: as `train` takes it."""
    *_, watched, nvme = given
    shown = _watched(watched)
    shown[:] = 0
    processes, pipes = start_ranks(WORLD, train, *given)
    disturbed = draw is not None and not _passed(processes, shown, draw)
    if draw is not None and disturbed:
        number = signal.SIGKILL if draw.random() < 0.85 else signal.SIGTERM
        sent = [_sent(processes[rank], number, shown[rank], counts) for rank in draw.choice([[0], [1], [0, 1]])]
        counts["kills"] += number == signal.SIGKILL and any(sent)
    outcomes = _ended(processes, pipes, counts)
    assert nvme is None or os.listdir(nvme) == [], "an offload file was left"
    errors = [None if outcome is None else outcome.error for outcome in outcomes]
    assert disturbed or errors == [None] * WORLD, f"a rank failed that nobody had disturbed: {outcomes}"
    counts["stops"] += any(error is not None and error.startswith("SystemExit: 143") for error in errors)
    return outcomes[0].value if None not in outcomes and not any(errors) else None  # type: ignore[union-attr]


def _sent(process: Any, number: int, shown: Any, counts: Counter[str]) -> bool:
    """Sends the signal, and counts where a SIGKILL struck; False where the process has just ended by itself."""
    phase, saving = PHASES[shown[0]], int(shown[1])
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    if number == signal.SIGKILL:
        counts.update([phase, *["saving"] * saving])
    return True


def _passed(processes: list[Any], shown: Any, draw: random.Random) -> bool:
    """Waits until a random instant, most often after the first step; whether the ranks have ended before it."""
    if later := draw.random() < 0.8:
        while not shown[:, 0].any() and all(process.is_alive() for process in processes):
            time.sleep(0.001)
    sentinels = [process.sentinel for process in processes]
    return bool(multiprocessing.connection.wait(sentinels, draw.uniform(0, 0.4 if later else 0.8)))


def _ended(processes: list[Any], pipes: list[Any], counts: Counter[str]) -> list[Outcome | None]:
    """The outcomes, None for a rank that died. Once one has, the others get SIGTERM, and SIGKILL if they do not end."""
    found: list[Outcome | None] = [None] * len(pipes)
    left, patience = dict(zip(pipes, range(len(pipes)), strict=True)), 60.0
    while left and (ready := multiprocessing.connection.wait(list(left), patience)):
        for pipe in ready:
            rank = left.pop(pipe)
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                patience = GRACE_SECONDS
                for process in processes:
                    process.terminate()
    for process in processes:
        process.join(GRACE_SECONDS if not left else 0)
        if process.is_alive():
            counts["late"] += 1
            process.kill()
            process.join()
    return found
