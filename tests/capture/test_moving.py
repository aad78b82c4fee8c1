"""What gives another value each time that it is asked is refused; what a step makes or leaves as it was is not."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import io
import itertools
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import fzero
from fzero.errors import CaptureError

X = torch.eye(2)


def counting() -> Iterator[float]:
    at = 0.0
    while True:
        at += 1.0
        yield at


class Ticks:
    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1; return self.at  # fmt: skip  # noqa: E702


def first(values: Any) -> float:
    for value in values:
        return float(value)
    return 0.0


def another(it: Any) -> float:
    here = it.values
    return float(next(here))


def popped(owner: Any) -> float:
    at = owner.values.pop()
    return float(at)


def turned(owner: Any) -> float:
    owner.values.rotate(1)
    return float(owner.values[0])


def filled_queue() -> queue.Queue[float]:
    full: queue.Queue[float] = queue.Queue()
    for i in range(8):
        full.put(float(i))
    return full


TEXT = "1\n2\n3\n4\n5\n"
TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {  # what there is, and what the loss asks of it
    "count": (lambda: itertools.count(1), lambda it: next(it)),
    "a generator": (counting, lambda it: next(it)),
    "its method": (lambda: counting().__next__, lambda it: it()),
    "by its method": (counting, lambda it: it.__next__()),
    "send": (counting, lambda it: it.send(None)),
    "an attribute": (lambda: SimpleNamespace(values=iter([1.0, 2.0, 3.0, 4.0])), another),
    "a loop": (lambda: zip([1.0, 2.0], "ab", strict=True), lambda it: first(a for a, _ in it)),
    "another's argument": (lambda: map(float, itertools.count(1)), lambda it: sum(itertools.islice(it, 2))),
    "a partial": (lambda: functools.partial(next, itertools.cycle([1.0, 2.0])), lambda it: it()),
    "a loader": (lambda: iter(DataLoader(TensorDataset(torch.arange(8)))), lambda it: next(it)[0].sum()),
    "a file's line": (lambda: io.StringIO(TEXT), lambda it: float(it.readline())),
    "a file": (lambda: io.StringIO(TEXT), lambda it: float(next(it))),
    "a list's last": (lambda: SimpleNamespace(values=[1.0, 2.0, 3.0, 4.0]), popped),
    "a deque's first": (lambda: collections.deque([1.0, 2.0, 3.0]), lambda it: it.popleft()),
    "a turned deque": (lambda: SimpleNamespace(values=collections.deque([1.0, 2.0, 3.0])), turned),
    "a dict's last": (lambda: {1.0: 2.0, 3.0: 4.0}, lambda it: it.popitem()[0]),
    "a dict's entry": (lambda: {"a": 2.0}, lambda it: it.pop("a", 1.0)),
    "a list's method": (lambda: [1.0, 2.0, 3.0].pop, lambda it: it()),
    "a queue's method": (lambda: filled_queue().get, lambda it: it()),
    "a queue": (filled_queue, lambda it: it.get()),
    "a queue, at once": (filled_queue, lambda it: it.get(False)),
}  # fmt: skip


def losses_of(ask: Callable[[], float]) -> Callable[[Any, Tensor], Tensor]:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return ask() * (batch @ params["w"]).square().mean()

    return loss


def begun(loss: Callable[[Any, Tensor], Tensor]) -> Any:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0))
    return fzero.init({"w": torch.ones(2)}, spec)


@pytest.mark.parametrize("kind", TAKEN)
def test_a_value_that_is_another_the_next_time_is_refused(kind: str) -> None:
    make, ask = TAKEN[kind]
    it = make()
    with pytest.raises(CaptureError, match=r"takes a value from .*, which gives another the next time.*in the batch"):
        fzero.step(begun(losses_of(lambda: ask(it))), X)


def test_a_count_in_one_line_is_refused() -> None:
    ticks = Ticks()
    with pytest.raises(CaptureError, match=r"self\.at, which .* is changed by Ticks.__next__ .* from 0 to 1"):
        fzero.step(begun(losses_of(lambda: next(ticks))), X)


def stack_as_it_was(owner: Any) -> float:
    owner.values.append(2.0)
    inner = owner.values[-1]
    last = owner.values.pop()
    return float(inner + last)


def evicts(owner: Any) -> float:
    owner.values[9] = 1.0
    owner.values.popitem(last=False)
    return float(owner.values[9])


def iterates_anew(owner: Any) -> float:
    values = iter(owner.values)
    pairs = zip(owner.values, counting(), strict=False)
    return float(next(values) + sum(a * b for a, b in pairs))


def takes_from_a_copy(owner: Any) -> float:
    values = list(owner.values)
    return float(values.pop() + dict.fromkeys(values, 1.0).popitem()[1])


def with_options(owner: Any, **options: Any) -> float:
    return float(options.pop("by", 1.0) * len(owner.values))


def logs(owner: Any) -> float:
    print("a step", file=owner.log)
    owner.log.write("more")
    return 1.0


RIGHT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a stack": (lambda: SimpleNamespace(values=[1.0]), stack_as_it_was),
    "a full cache": (lambda: SimpleNamespace(values=collections.OrderedDict({1: 1.0, 2: 2.0})), evicts),
    "its own iterators": (lambda: SimpleNamespace(values=[1.0, 2.0]), iterates_anew),
    "a copy": (lambda: SimpleNamespace(values=[1.0, 2.0]), takes_from_a_copy),
    "options": (lambda: SimpleNamespace(values=[1.0, 2.0]), lambda it: with_options(it, by=2.0)),
    "a log": (lambda: SimpleNamespace(log=io.StringIO()), logs),
    "a log's method": (lambda: SimpleNamespace(log=[].append), lambda it: 2.0 if it.log(1.0) is None else 1.0),
    "is there one": (lambda: SimpleNamespace(values=itertools.count()), lambda it: 1.0 if it.values is None else 2.0),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_the_step_makes_or_leaves_as_it_was_is_no_change(kind: str) -> None:
    make, ask = RIGHT[kind]
    it, alone = make(), make()
    state = begun(losses_of(lambda: ask(it)))
    for _ in range(3):
        state = fzero.step(state, X)
    assert float(state.metrics["loss"]) == ask(alone)


def test_what_the_batch_holds_may_be_taken_out_of_it() -> None:
    def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs = batch.pop("x")
        return (inputs @ params["w"]).square().mean() * batch["by"]

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0))
    state = fzero.init({"w": torch.ones(2)}, spec)
    for by in (2.0, 3.0):
        state = fzero.step(state, {"x": X, "by": torch.tensor(by)})
        assert float(state.metrics["loss"]) == by


def scheduled() -> Any:
    optimizer = SGD([torch.ones(1)], 1.0)
    scheduler = lr_scheduler.LinearLR(optimizer)
    optimizer.step()
    return scheduler


CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
ASKED: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {  # and what changes it
    "a variable of the context": (lambda: CONTEXT, lambda it: it.get(), lambda it: it.set(2.0)),
    "an event": (threading.Event, lambda it: 2.0 if it.is_set() else 1.0, lambda it: it.set()),
    "a number of C": (lambda: ctypes.c_double(1.0), lambda it: it.value, lambda it: setattr(it, "value", 2.0)),
    "a shared number": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda it: it.value,
        lambda it: setattr(it, "value", 2.0),
    ),
    "a scheduler": (scheduled, lambda it: it.get_last_lr()[0], lambda it: it.step()),
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_such_a_method_returned_is_compared(kind: str) -> None:
    make, ask, change = ASKED[kind]
    it = make()
    state = begun(losses_of(lambda: ask(it)))
    for _ in range(2):
        state = fzero.step(state, X)
    change(it)
    with pytest.raises(CaptureError, match=r"it\.\w+, which .* reads, was .* and is"):
        fzero.step(state, X)


def environ_get(name: str) -> float:
    return float(os.environ.get(name, "1"))


def environ_entry(name: str) -> float:
    return float(os.environ[name]) if name in os.environ else 1.0


def environ_asked(name: str) -> float:
    return float(os.getenv(name, "1"))


@pytest.mark.parametrize("ask", [environ_get, environ_entry, environ_asked])
@pytest.mark.parametrize("before", [None, "2"])
def test_the_environment_is_compared(ask: Any, before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is not None:
        monkeypatch.setenv("FZERO_TEST_SCALE", before)
    state = begun(losses_of(lambda: ask("FZERO_TEST_SCALE")))
    for _ in range(2):
        state = fzero.step(state, X)
    monkeypatch.setenv("FZERO_TEST_SCALE", "3")
    with pytest.raises(CaptureError, match=r"os\.environ"):
        fzero.step(state, X)
    if before is not None:
        monkeypatch.delenv("FZERO_TEST_SCALE")
        with pytest.raises(CaptureError, match=r"os\.environ"):
            fzero.step(state, X)
