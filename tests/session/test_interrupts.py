"""Ctrl-C in a step loses no state: the caller holds the old one or the new one."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.session.session import Session, _with_last, session_of

SUPPORT = Path(__file__).parents[1] / "support"


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
