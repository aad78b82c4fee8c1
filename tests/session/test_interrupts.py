"""Ctrl-C in a step loses no state: the caller holds the old one or the new one."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.session.interrupts import keeps_state
from fzero.session.session import Session, _with_last, session_of
from fzero.state.state import Life, State

SUPPORT = Path(__file__).parents[1] / "support"


# --- a step of which a test says when Ctrl-C comes --------------------------------------------------------------------


@pytest.fixture
def state() -> Iterator[State]:
    """A state, with Python's own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    yield fzero.init({"w": torch.ones(3)}, spec)
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def after(state: State) -> State:
    """The state after a step, as `fzero.api` makes it."""
    state.life.ended = "was donated"
    life = Life()
    return State(session_of(state).sharded(life), state.step + 1, {}, state.runtime, life)


def writing(state: State, *then: Callable[[], None]) -> State:
    """A step that may have written when these calls come."""
    state.life.steps = True
    for call in then:
        call()
    return after(state)


def test_a_step_without_a_signal_gives_the_handler_back(state: State) -> None:
    new = keeps_state(writing)(state, lambda: None)
    assert (state.step, new.step) == (0, 1)
    assert not state.life.steps
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_waits_for_the_end_of_the_step(state: State, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[bool] = []
    leaf = state.params["w"]
    with caplog.at_level(logging.WARNING, "fzero"), pytest.raises(KeyboardInterrupt):
        keeps_state(writing)(state, interrupt, lambda: ended.append(True))
    assert ended == [True]
    assert "this step ends first" in caplog.text
    assert state.step == 1, "the caller's state is the one after the step"
    assert torch.equal(state.params["w"].full(), torch.ones(3))
    assert leaf.life.ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_before_the_first_op_acts_at_once(state: State) -> None:
    def step(state: State) -> State:
        interrupt()
        return pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        keeps_state(step)(state)
    assert (state.step, state.life.ended) == (0, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_between_the_last_op_and_the_new_state_waits(state: State) -> None:
    """The old state is donated by then."""

    def step(state: State) -> State:
        new = after(state)
        interrupt()
        return new

    with pytest.raises(KeyboardInterrupt):
        keeps_state(step)(state)
    assert state.step == 1


def test_a_second_signal_does_not_wait(state: State) -> None:
    with pytest.raises(KeyboardInterrupt):
        keeps_state(writing)(state, interrupt, interrupt, lambda: pytest.fail("it went on"))
    assert state.step == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_nothing_is_called_once_after_the_step(state: State) -> None:
    seen: list[int] = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    new = keeps_state(writing)(state, interrupt, lambda: seen.append(0))
    assert seen == [0, signal.SIGINT]
    assert (state.step, new.step) == (0, 1)
    assert signal.getsignal(signal.SIGINT) is handler


def test_of_a_handler_that_raises_nothing_only_a_signal_within_the_ops_waits(state: State) -> None:
    seen: list[int] = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)

    def step(state: State) -> State:
        interrupt()
        seen.append(1)
        return writing(state, interrupt, lambda: seen.append(2))

    keeps_state(step)(state)
    assert seen == [signal.SIGINT, 1, 2, signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_the_step_has_put_there_stays(state: State) -> None:
    other = lambda number, frame: None  # noqa: E731
    keeps_state(writing)(state, lambda: signal.signal(signal.SIGINT, other))
    assert signal.getsignal(signal.SIGINT) is other


def test_an_error_of_the_step_gives_the_handler_back(state: State) -> None:
    with pytest.raises(ZeroDivisionError):
        keeps_state(writing)(state, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert state.step == 0
    assert not state.life.steps
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_waits_is_not_lost_where_the_step_fails(state: State) -> None:
    """Who catches the error and goes on has not seen the signal: the handler of before gets it."""
    with pytest.raises(KeyboardInterrupt) as caught:
        keeps_state(writing)(state, interrupt, lambda: 1 / 0)  # type: ignore[arg-type]
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with pytest.raises(ZeroDivisionError):
        keeps_state(writing)(state, interrupt, lambda: 1 / 0)  # type: ignore[arg-type]
    assert seen == [signal.SIGINT]


def test_a_handler_that_raises_is_called_once(state: State) -> None:
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        raise ValueError

    for signals, calls in ((1, 1), (2, 1)):
        signal.signal(signal.SIGINT, handler)
        seen.clear()
        with pytest.raises(ValueError, match=r"^$"):
            keeps_state(writing)(state, *[interrupt] * signals)
        assert len(seen) == calls


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_signal_while_handlers_change_leaves_none_behind(
    state: State, call: int, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an ended step would put the next Ctrl-C off for ever."""
    real, calls = signal.signal, [0]

    def changes(number: Any, handler: Any) -> Any:
        calls[0] += 1
        now = calls[0] == call
        if now and side == "before":
            interrupt()
        old = real(number, handler)
        if now and side == "after":
            interrupt()
        return old

    def fails(state: State) -> State:
        raise ZeroDivisionError

    monkeypatch.setattr(signal, "signal", changes)
    with pytest.raises(KeyboardInterrupt):
        keeps_state(fails)(state)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (state.step, state.life.ended) == (0, "")


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, None])
def test_where_python_handles_no_signal_here_the_step_is_left_alone(state: State, ignored: Any) -> None:
    """It is ignored, or the step runs in another thread, which can set no handler."""
    seen: list[Any] = []

    def step(state: State) -> State:
        seen.append(signal.getsignal(signal.SIGINT))
        return after(state)

    if ignored is not None:
        signal.signal(signal.SIGINT, ignored)
        assert keeps_state(step)(state).step == 1
    else:
        thread = threading.Thread(target=lambda: keeps_state(step)(state))
        thread.start()
        thread.join()
    assert seen == [signal.default_int_handler if ignored is None else ignored]


def test_what_is_no_state_is_handed_on() -> None:
    """The step itself says what it needs."""
    before = signal.getsignal(signal.SIGINT)
    assert keeps_state(lambda state: signal.getsignal(signal.SIGINT))({"w": 1}) is before  # type: ignore


# --- in a process of its own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["at_every_op", "around", "between", "twice"])
@pytest.mark.sampled(1)
def test_ctrl_c(case: str) -> None:
    path = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])
    done = subprocess.run(
        [sys.executable, SUPPORT / "workers" / "interrupted.py", case],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert ("Ctrl-C: this step ends first" in done.stderr) or case in ("around", "between")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_keeps_a_state_is_named(how: Callable[[Any], Any]) -> None:
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    state = fzero.init({"w": torch.ones(3)}, spec)
    assert copy.deepcopy(spec) == spec == copy.copy(spec)
    with pytest.raises(fzero.SpecError, match=r"a Spec cannot be pickled: .*fzero.save\(state.*snapshot"):
        pickle.dumps(spec)
    for value in (state, state.params["w"], {"deep": [state]}):
        if how is not copy.copy or not isinstance(value, dict):
            with pytest.raises(fzero.FzeroError, match=r"cannot be copied or pickled: .*fzero.save\(state.*snapshot"):
                how(value)


def test_ctrl_c_at_any_line_of_the_session_keeps_the_program() -> None:
    """A program that is known is not traced again: neither is it lost while it is moved to the end of its table."""
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    batch = torch.ones(3)
    state = fzero.step(fzero.init({"w": torch.ones(3)}, spec), batch)
    session, told = session_of(state), 0
    interrupted = {Session.compiled.__code__, Session.ready.__code__, _with_last.__code__}

    def at(place: int) -> Callable[..., Any]:
        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal told
            if frame.f_code not in interrupted:
                return None
            told += event == "line"
            if told == place:
                told += 1
                raise KeyboardInterrupt
            return trace

        return trace

    for place in range(1, 60):
        told, before = 0, sys.gettrace()
        sys.settrace(at(place))
        try:
            session.ready(session.compiled(batch))
            ended = True
        except KeyboardInterrupt:
            ended = False
        finally:
            sys.settrace(before)
        assert len(session.programs) == len(session.compiled_segments) == 1, place
        if ended:
            break
    assert ended
    assert place > 10
