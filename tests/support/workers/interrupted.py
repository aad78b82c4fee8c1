"""A process that is sent SIGINT before the op of a step that it is told, and says what its state is then."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import Any

import torch

import fzero
from fzero.runtime.executor import Executor


def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return ((batch @ p["w"]).tanh() @ p["v"]).square().mean()


def first() -> Any:
    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    return fzero.init(params, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2)))


def values(state: Any) -> list[float]:
    return [float(x) for leaf in ("w", "v") for x in state.params[leaf].full().reshape(-1)]


def at_every_op() -> None:
    """SIGINT before each op of a step in turn: the state that is held is that after the step."""
    state = fzero.step(first(), torch.ones(3, 4))
    num_ops, real, place = len(state.program.ops), Executor.issue, [-1]

    def issue(self: Executor, watch: Any = None) -> None:
        calls = self.calls
        at, end = place[0], len(calls)
        interrupt = [lambda: os.kill(os.getpid(), signal.SIGINT)]
        if 0 <= at < end:
            self.calls = [*calls[:at], [*interrupt, *calls[at]], *calls[at + 1 :]]
        elif at == end:
            self.calls = [*calls, interrupt]
        try:
            real(self, watch)
        finally:
            self.calls = calls

    Executor.issue = issue  # type: ignore[method-assign]
    plain = [values(state)]
    for _ in range(num_ops + 1):
        state = fzero.step(state, torch.ones(3, 4))
        plain.append(values(state))
    state = fzero.step(first(), torch.ones(3, 4))
    for number in range(num_ops + 1):
        place[0] = number
        leaf = state.params["w"]
        try:
            fzero.step(state, torch.ones(3, 4))
            raise AssertionError("no KeyboardInterrupt")
        except KeyboardInterrupt:
            pass
        assert state.step == number + 2, (state.step, number)
        assert values(state) == plain[number + 1], number
        assert "was donated to fzero.step" in leaf.life.ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def around(seed: int) -> None:
    """SIGINT anywhere, from a timer: what the loop holds is always a state that can be stepped."""
    import random

    draw, state = random.Random(seed), first()
    state = fzero.step(state, torch.ones(3, 4))
    came, before = 0, state.step

    def steps() -> None:  # a function: Python 3.13.0 may raise at the end of a loop's turn past the `try` around it
        nonlocal state, before
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2e-3))
        for _ in range(10_000):
            before = state.step
            state = fzero.step(state, torch.ones(3, 4))
            assert state.step == before + 1
        raise AssertionError(f"a Ctrl-C was lost: SIGINT goes to {signal.getsignal(signal.SIGINT)}")

    while came < 100:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        try:
            steps()
        except KeyboardInterrupt:
            came += 1
        assert not state.life.ended, state.life.ended
        assert state.step in (before, before + 1)
        values(state)


def between() -> None:
    """SIGINT at each line that runs between the end of a step and the caller."""
    from fzero.session import interrupts

    state = fzero.step(first(), torch.ones(3, 4))
    place, told = [0], [0]

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            told[0] += 1
            if told[0] == place[0]:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return local

    def traced(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename == interrupts.__file__ and ended[0] else None

    ended, real = [False], interrupts._Held.end

    def end(self: Any) -> None:
        ended[0] = True
        real(self)

    interrupts._Held.end = end  # type: ignore[method-assign]
    while True:
        place[0], told[0], ended[0] = place[0] + 1, 0, False
        before = state.step
        sys.settrace(traced)
        try:
            state = fzero.step(state, torch.ones(3, 4))
        except KeyboardInterrupt:
            assert state.step == before + 1, place
            assert not state.life.ended, place
            values(state)
            continue
        finally:
            sys.settrace(None)
        break
    assert place[0] > 2, "no line was met"


def twice() -> None:
    """A second one does not wait."""
    state = fzero.step(first(), torch.ones(3, 4))
    real = Executor.issue

    def issue(self: Executor, watch: Any = None) -> None:
        real(self, watch)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it waited")

    Executor.issue = issue  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        fzero.step(state, torch.ones(3, 4))
    assert "is unusable: step 2 failed after it began to write (KeyboardInterrupt" in state.life.ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born with it ignored
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    {"at_every_op": at_every_op, "around": lambda: around(seed), "between": between, "twice": twice}[sys.argv[1]]()
    print("right")
    gc.freeze()  # Python ends without a walk over all objects
