"""interrupts: Ctrl-C in a step. A state is donated in the middle of it, and somebody must hold what it became.

From the first op of a step on, SIGINT waits for its end, or for its error. Then the handler of before is called. If it
raises, as Python's own does, the caller never gets the new state. So the state that was given takes its place: it is
the state after the step, and can be saved or stepped. A second SIGINT acts at once, for a step that does not end: it
makes the state unusable if the step had begun to write.

No signal falls between the two: handlers run where Python looks for signals, which is after a call and in a loop, and
not between the last call here and the caller's assignment.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

from fzero.capture.short_tracebacks import without_caller
from fzero.state.state import State

log = logging.getLogger("fzero")
Step = TypeVar("Step", bound=Callable[..., State])


def keeps_state(step: Step) -> Step:
    """A function (state, ...) -> state that donates its first argument, with the promise above."""

    @functools.wraps(step)
    def keeping(state: State, *args: Any, **kwargs: Any) -> State:
        if torch.compiler.is_compiling():
            return step(state, *args, **kwargs)
        held = _Held(state) if isinstance(state, State) and _here() else None
        after = None
        try:
            if held is None:
                return step(state, *args, **kwargs)
            held.begin()
            after = step(state, *args, **kwargs)
            held.end()
            return after  # at once: any call here would be a place where Python looks for signals
        except BaseException as error:  # also one that a handler raised once the new state was made
            if held is not None and after is not None:
                state.become(after)
            if held is not None:
                held.end()
            if without_caller(error):
                del state, args, kwargs  # this frame stays, as the caller of those that are shown
            raise

    return keeping  # type: ignore[return-value]


def _here() -> bool:
    """Whether this thread handles signals, and Python SIGINT."""
    return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT))


class _Held:
    """SIGINT during one step of a state. The handler, on the main thread, alone writes `came`."""

    def __init__(self, state: State) -> None:
        self.life, self.came, self.before = state.life, False, signal.getsignal(signal.SIGINT)

    def begin(self) -> None:
        """From here on the signal comes to `handle`, also before this function has ended."""
        self.life.steps = False
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Puts a first signal off if the step may have written; else acts as the handler of before.

        That one is back when it raises, wherever it does: a handler of a step that has ended would put signals off
        for ever.
        """
        if not self.came and (self.life.steps or self.life.ended):
            self.came = True
            log.warning("fzero: Ctrl-C: this step ends first. Another one ends it now, and the state is lost")
            return
        try:
            self.before(number, frame)  # type: ignore[operator, misc]
        except BaseException:
            self.came = False
            self.restore()
            raise

    def end(self) -> None:
        """The step has ended, or failed: the handler of before is back, and gets the signal that came, once."""
        self.restore()
        came, self.came = self.came, False
        if came:
            self.before(signal.SIGINT, None)  # type: ignore[operator, misc]

    def restore(self) -> None:
        """Puts the handler of before back."""
        self.life.steps = False
        if signal.getsignal(signal.SIGINT) == self.handle:
            signal.signal(signal.SIGINT, self.before)
