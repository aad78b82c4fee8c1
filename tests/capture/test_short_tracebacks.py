"""What is left of a traceback that a user sees."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fzero
from fzero.capture.short_tracebacks import SWITCH
from fzero.compile import step as compile_step
from fzero.errors import FzeroError, VerifyError

X = torch.ones(4)


def state_of(loss: Callable[..., Any], params: Any = None) -> fzero.State:
    return fzero.init(params or {"w": torch.ones(4)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def shorter(p: Any, b: torch.Tensor) -> torch.Tensor:
    return (p["w"] * b[:3]).sum()


def test_a_shape_error_ends_at_the_users_line() -> None:
    """It had 69 frames."""
    state = state_of(shorter)
    with pytest.raises(RuntimeError, match=r"test_short_tracebacks.py:\d+: aten.mul.*f32\[4\] and f32\[3\]") as found:
        fzero.step(state, X)
    assert frames(found.value) == ["test_a_shape_error_ends_at_the_users_line", "shorter"]
    with pytest.raises(RuntimeError) as again:
        fzero.evaluate(state, X, shorter)
    assert frames(again.value) == ["test_a_shape_error_ends_at_the_users_line", "shorter"]


def test_all_frames_are_there_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(shorter)
    monkeypatch.setenv(SWITCH, "full")
    with pytest.raises(RuntimeError) as found:
        fzero.step(state, X)
    assert len(frames(found.value)) > 30


@pytest.mark.parametrize(
    "loss", [shorter, lambda p, b: (p["w"] * b).sum() * float(p["w"].sum().detach())], ids=["shape", "value"]
)
@pytest.mark.parametrize("switch", ["", "full"])
def test_an_error_keeps_no_state_alive(loss: Callable[..., Any], switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of a notebook that fails and runs again would hold two states until Python collects garbage."""
    if switch and sys.version_info >= (3, 12):
        pytest.skip("a frame of contextlib, which is shown then, holds the error")
    monkeypatch.setenv(SWITCH, switch)
    gc.collect()
    gc.disable()
    try:
        state = state_of(loss)
        session = weakref.ref(state.runtime)
        with pytest.raises(Exception, match=r"test_short_tracebacks.py:\d+") as found:
            fzero.step(state, X)
        kept = None if switch else found.value  # as sys.last_value
        del state, found
        assert session() is None, kept
    finally:
        gc.enable()


def test_layers_of_torch_stay_and_how_they_are_called_does_not() -> None:
    layer = nn.Linear(3, 3)

    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, p, (b,)).sum()

    state = state_of(loss, dict(layer.named_parameters()))
    with pytest.raises(RuntimeError) as found:
        fzero.step(state, X)
    assert frames(found.value) == ["test_layers_of_torch_stay_and_how_they_are_called_does_not", "loss", "forward"]


@pytest.mark.parametrize("call", ["init", "lower", "step", "evaluate", "load", "save", "plan"])
def test_an_error_of_fzero_ends_where_it_was_called(call: str, tmp_path: Any) -> None:
    spec = fzero.Spec(loss=shorter, optimizer=fzero.optim.sgd(0.1))
    state = fzero.init({"w": torch.ones(4)}, spec)
    wrong: dict[str, Callable[[], Any]] = {
        "init": lambda: fzero.init({"w": 1}, spec),
        "lower": lambda: fzero.lower(spec, {"w": X}, X, world_size=0),
        "step": lambda: fzero.step(state, {"x": object()}),
        "evaluate": lambda: fzero.evaluate(state, object(), shorter),
        "load": lambda: fzero.load(tmp_path / "none", spec),
        "save": lambda: fzero.save({"w": X}, tmp_path),  # type: ignore[arg-type]
        "plan": lambda: fzero.plan(spec, {"w": X}, X, world_size=1, hardware="h99"),
    }
    with pytest.raises(FzeroError) as found:
        wrong[call]()
    assert frames(found.value) == ["test_an_error_of_fzero_ends_where_it_was_called", "<lambda>"]


def test_causes_are_shortened_too() -> None:
    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        try:
            return p["v"]
        except KeyError as error:
            raise ValueError("no such leaf") from error

    with pytest.raises(ValueError, match="no such leaf") as found:
        fzero.step(state_of(loss), X)
    cause = found.value.__cause__
    assert isinstance(cause, KeyError)
    assert (frames(found.value), frames(cause)) == (["test_causes_are_shortened_too", "loss"], ["loss"])


@pytest.mark.parametrize("kind", [VerifyError, AttributeError])
def test_a_fault_of_fzero_keeps_its_frames(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise kind("not the user's")

    fails.__code__ = fails.__code__.replace(co_filename=compile_step.__file__)
    monkeypatch.setattr(compile_step, "_captured", fails)
    with pytest.raises(kind, match="not the user's") as found:
        fzero.step(state_of(lambda p, b: (p["w"] * b).sum()), X)
    assert len(frames(found.value)) > 5
    assert "_lowered" in frames(found.value)


def test_in_another_thread() -> None:
    """There no signal is waited for, and `step` is another function."""
    state, raised = state_of(shorter), []

    def target() -> None:
        try:
            fzero.step(state, X)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert frames(raised[0]) == ["target", "shorter"]


@pytest.mark.parametrize("name", [None, "__main__", "cells"])
def test_code_without_a_file_is_the_users(name: str | None) -> None:
    """Of `python -c` and `exec`, in a dict that names no file: what it reads is watched, and an error ends there."""
    made: dict[str, Any] = {} if name is None else {"__name__": name}
    exec("ALPHA = 2.0\ndef loss(p, b):\n    x = ALPHA * p['w']\n    return (x * b).sum()\n", made)
    state = fzero.step(state_of(made["loss"]), X)
    with pytest.raises(RuntimeError, match=r"^<string>:4: aten.mul") as found:
        fzero.step(state, X[:3])
    assert frames(found.value) == ["test_code_without_a_file_is_the_users", "loss"]
    made["ALPHA"] = 3.0
    with pytest.raises(FzeroError, match=r"^ALPHA, which loss \(<string>:3\) reads, was 2.0 and is 3.0"):
        fzero.step(state, X)


def test_the_error_that_a_caller_handles_keeps_its_frames() -> None:
    """A step in an `except` block: that error is the caller's."""
    state = state_of(shorter)

    def handles() -> None:
        try:
            torch.func.grad(lambda x: x.reshape(3))(X)
        except RuntimeError:
            fzero.step(state, X)

    with pytest.raises(RuntimeError) as found:
        handles()
    first: Any = found.value
    while first.__context__ is not None:
        first = first.__context__
    assert any("torch" in frame.filename for frame in traceback.extract_tb(first.__traceback__))
