"""What a step has read from Python is compared before it runs: a change is an error with its name, or a new program."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import os
import random
import re
import sys
import threading
import timeit
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import gloo, values
from torch import nn
from torch.func import functional_call

import fzero
from fzero.capture.reads.bytecode import lines_of
from fzero.capture.reads.frames import OTHER, USER, kind_of, kind_of_code
from fzero.capture.reads.reading import Reading
from fzero.errors import CaptureError

pytestmark = pytest.mark.usefixtures("thawed")  # Python finds no function that is frozen

X = torch.eye(2)

WIDTH = 2.0
SWITCH = "plus"
WEIGHTS = [0.25, 0.75]
PART = slice(0, 2)
TABLE = {"relu": lambda x: x * 2.0, "other": 1.0}
OFFSET = torch.ones(2)
ARRAY = np.array([1.0, 2.0])
LARGE = np.ones((1000, 1000))  # 8 MB: a part of it is compared
RECENT = collections.deque([1.0, 2.0])


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclass
class Config:
    alpha: float = 0.5
    mode: Mode = Mode.SUM
    rates: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Scale:
    factor = 3.0


@dataclass(slots=True)
class Slotted:
    beta: float = 1.5


CONFIG, SCALE, SLOTTED = Config(), Scale(), Slotted()
SPACE = types.SimpleNamespace(deep=types.SimpleNamespace(gamma=1.0))


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


def with_default(x: torch.Tensor, weights: list[float] = [1.0, 2.0]) -> torch.Tensor:  # noqa: B006
    return x * weights[0]


def keyword(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    return x * by


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alpha = nn.Linear(2, 2, bias=False), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.alpha


MODULE = Counted()


def by_helper(p, b):
    return helper(b @ p["w"]).mean()


def by_module(p, b):
    return functional_call(MODULE, {"inner.weight": p["w"][None] * X}, (b,)).mean()


def state_of(loss: Any, params: Any = None, **options: Any) -> Any:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **options)
    return fzero.init({"w": torch.ones(2)} if params is None else params, spec)


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x + 2.0


# (loss, what changes: an owner, a key and another value, the name that the message must have)
CASES: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "a global": (lambda p, b: (b @ p["w"]).mean() * WIDTH, globals(), "WIDTH", 3.0, "WIDTH"),
    "a text": (lambda p, b: (b @ p["w"]).mean() * (2 if SWITCH == "plus" else 1), globals(), "SWITCH", "m", "SWITCH"),
    "a type": (lambda p, b: (b @ p["w"]).mean() * WIDTH, globals(), "WIDTH", 2, "WIDTH, which <lambda>"),
    "a helper": (by_helper, globals(), "helper", other_helper, "helper"),
    "a tensor": (lambda p, b: (b @ p["w"] + OFFSET).mean(), globals(), "OFFSET", torch.zeros(2), "OFFSET"),
    "a list": (lambda p, b: sum((b @ p["w"]).mean() * w for w in WEIGHTS), WEIGHTS, 1, 0.5, "WEIGHTS[1]"),
    "a slice of a list": (lambda p, b: (b @ p["w"]).mean() * sum(WEIGHTS[PART]), WEIGHTS, 1, 0.5, "WEIGHTS[1]"),
    "a slice by its name": (
        lambda p, b: (b @ p["w"]).mean() * sum(WEIGHTS[PART]), globals(), "PART", slice(1), "PART"
    ),
    "a dict": (lambda p, b: (b @ p["w"]).mean() * TABLE["other"], TABLE, "other", 2.0, "TABLE['other']"),
    "a function in a dict": (
        lambda p, b: TABLE["relu"](b @ p["w"]).mean(), TABLE, "relu", lambda x: x, "TABLE['relu']"
    ),
    "a dataclass": (lambda p, b: (b @ p["w"]).mean() * CONFIG.alpha, CONFIG, "alpha", 1.0, "CONFIG.alpha"),
    "an enum": (
        lambda p, b: (b @ p["w"]).mean() * (1 if CONFIG.mode is Mode.SUM else 2),
        CONFIG, "mode", Mode.MEAN, "CONFIG.mode",
    ),
    "a list in a dataclass": (
        lambda p, b: (b @ p["w"]).mean() * CONFIG.rates[1], CONFIG.rates, 1, 5.0, "CONFIG.rates[1]"
    ),
    "another dataclass": (lambda p, b: (b @ p["w"]).mean() * CONFIG.alpha, globals(), "CONFIG", Config(2.0), "CONFIG"),
    "a class attribute": (lambda p, b: (b @ p["w"]).mean() * Scale.factor, Scale, "factor", 1.0, "Scale.factor"),
    "a class attribute of an object": (
        lambda p, b: (b @ p["w"]).mean() * SCALE.factor, Scale, "factor", 1.0, "SCALE.factor"
    ),
    "a class attribute that is hidden": (
        lambda p, b: (b @ p["w"]).mean() * SCALE.factor, SCALE, "factor", 1.0, "SCALE.factor"
    ),
    "a slot": (lambda p, b: (b @ p["w"]).mean() * SLOTTED.beta, SLOTTED, "beta", 1.0, "SLOTTED.beta"),
    "a namespace": (
        lambda p, b: (b @ p["w"]).mean() * SPACE.deep.gamma, SPACE.deep, "gamma", 2.0, "SPACE.deep.gamma"
    ),
    "an array": (lambda p, b: (b @ p["w"] + torch.tensor(ARRAY)).mean(), ARRAY, 0, 5.0, "ARRAY"),
    "a number of an array": (lambda p, b: (b @ p["w"]).mean() * float(ARRAY[1]), ARRAY, 1, 5.0, "ARRAY"),
    "a large array": (lambda p, b: (b @ p["w"]).mean() * float(LARGE.mean()), LARGE, slice(None), 5.0, "LARGE"),
    "the end of a large array": (lambda p, b: (b @ p["w"]).mean() * float(LARGE.mean()), LARGE, (-1, -1), 5.0, "LARGE"),
    "a large array's view": (lambda p, b: (b @ p["w"]).mean() * float(LARGE.T[::2].sum()), LARGE, 0, 5.0, "LARGE"),
    "a sum of an array": (lambda p, b: (b @ p["w"]).mean() * float(ARRAY.sum()), ARRAY, 1, 5.0, "ARRAY"),
    "getattr": (lambda p, b: (b @ p["w"]).mean() * getattr(CONFIG, "alpha", 9.0), CONFIG, "alpha", 1.0, "CONFIG.alpha"),
    "a deque": (lambda p, b: (b @ p["w"]).mean() * sum(RECENT), RECENT, 1, 5.0, "RECENT[1]"),
    "a mutated default": (
        lambda p, b: with_default(b @ p["w"]).mean(), with_default.__defaults__[0], 0, 5.0, "weights[0]"
    ),
    "another default": (
        lambda p, b: with_default(b @ p["w"]).mean(),
        with_default, "__defaults__", ([3.0],), "with_default.__defaults__",
    ),
    "a keyword's default": (
        lambda p, b: keyword(b @ p["w"]).mean(), keyword.__kwdefaults__, "by", 5.0, "keyword.__kwdefaults__['by']"
    ),
    "an attribute of a module": (
        by_module, MODULE, "alpha", 1.0, "self.alpha"
    ),
    "a part of a module": (
        by_module, MODULE, "inner", nn.Linear(2, 2, bias=False), "MODULE's parts"
    ),
    "a module's mode": (
        by_module, MODULE, "training", False, "MODULE.training"
    ),
}  # fmt: skip


@contextlib.contextmanager
def changed(owner: Any, key: Any, value: Any) -> Iterator[None]:
    items = isinstance(owner, (dict, list, collections.deque, np.ndarray))
    hidden = isinstance(owner, Scale)  # it has the class's value
    old = copy.copy(owner[key]) if isinstance(owner, np.ndarray) else owner[key] if items else getattr(owner, key)
    put = owner.__setitem__ if items else functools.partial(setattr, owner)
    put(key, value)
    try:
        yield
    finally:
        delattr(owner, key) if hidden else put(key, old)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(9)
def test_a_change_is_an_error_that_names_it(case: str) -> None:
    loss, owner, key, value, name = CASES[case]
    state = fzero.step(state_of(loss), X)
    state = fzero.step(state, X)
    with changed(owner, key, value):
        with pytest.raises(CaptureError, match=r"reads, was .* and is .*\. A program reads it once") as error:
            fzero.step(state, X)
        assert str(error.value).startswith(name), error.value
        assert "test_reads.py:" in str(error.value)
        with pytest.raises(CaptureError, match="reads, was"):  # of another shape: not the same data with two answers
            fzero.step(state, torch.ones(4, 2))
        with pytest.raises(CaptureError, match="reads, was"):
            fzero.step(state, X)
    assert fzero.step(state, X).step == 3  # put back, it runs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(9)
def test_a_change_makes_a_new_program_where_that_is_asked(case: str) -> None:
    """The new program computes what a state that begins with the new value computes."""
    loss, owner, key, value, _ = CASES[case]
    state = fzero.step(state_of(loss, on_change="retrace"), X)
    start = {"w": state.params["w"].full()}
    with changed(owner, key, value):
        late, fresh = fzero.step(state, X), fzero.step(state_of(loss, start), X)
    assert torch.equal(late.params["w"].full(), fresh.params["w"].full())
    assert torch.equal(late.metrics["loss"], fresh.metrics["loss"])
    assert len(late.runtime.programs) == 1


def test_a_slice_that_has_a_name_may_be_written_to() -> None:
    def loss(p, b):
        shape, part = [1, 1, 1], slice(1, 3)
        shape[part] = b.shape
        return (b.view(shape) @ p["w"]).mean()

    assert fzero.step(fzero.step(state_of(loss), X), X).step == 2


def test_what_was_not_there_and_came_is_a_change() -> None:
    here, table = types.SimpleNamespace(), {}

    def loss(p, b):
        scale = 2.0 if hasattr(here, "extra") else 1.0
        with contextlib.suppress(KeyError):
            scale = table["scale"]
        return (b @ p["w"]).mean() * scale

    state = fzero.step(state_of(loss), X)
    here.extra = True
    with pytest.raises(CaptureError, match=r"here.extra, which .* was not there and is True"):
        fzero.step(state, X)
    del here.extra
    table["scale"] = 3.0
    with pytest.raises(CaptureError, match=r"table\['scale'\], which .* was not there and is 3.0"):
        fzero.step(state, X)


def test_a_variable_of_an_outer_function() -> None:
    def made(first: float) -> tuple[Any, Any]:
        gamma, unread = first, 0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * gamma

        def loss(p, b):
            if b.shape[0] > 100:
                return (b @ p["w"]).mean() * unread
            return sum(scaled(b @ p["w"]).mean() for _ in range(2))

        def sets(g: float, u: int) -> None:
            nonlocal gamma, unread
            gamma, unread = g, u

        return loss, sets

    (loss, sets), (_, others) = made(2.0), made(5.0)
    state = fzero.step(state_of(loss), X)
    others(7.0, 0)  # another function of the same code
    sets(2.0, 9)  # the same number, and one that no line that ran has read
    state = fzero.step(state, X)
    sets(3.0, 9)
    with pytest.raises(CaptureError, match=r"^gamma, which .*scaled \(test_reads.py:\d+\) reads, was 2.0 and is 3.0"):
        fzero.step(state, X)


def test_a_variable_of_the_function_around_a_class() -> None:
    """Its methods are values of no line that ran."""

    def made() -> tuple[Any, Any]:
        scale = 2.0

        class Scaled:
            def __call__(self, x: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
                return x * scale + bias

        def sets(value: float) -> None:
            nonlocal scale
            scale = value

        return Scaled(), sets

    scaled, sets = made()
    state = fzero.step(state_of(lambda p, b: scaled(b @ p["w"]).mean()), X)
    sets(3.0)
    with pytest.raises(CaptureError, match=r"^scale, which .*Scaled.__call__ .* reads, was 2.0 and is 3.0"):
        fzero.step(state, X)
    sets(2.0)
    state = fzero.step(state_of(lambda p, b: scaled(b @ p["w"]).mean()), X)
    type(scaled).__call__.__defaults__ = (1.0,)
    with pytest.raises(CaptureError, match=r"__call__.__defaults__, which .* was \(0.0,\) and is \(1.0,\)"):
        fzero.step(state, X)


def test_what_a_function_within_uses_is_not_read_as_a_whole() -> None:
    """Python 3.13 loads the cells for it like a local variable."""
    table: dict[str, Any] = {"weights": {"a": 1.0, "b": 2.0}, "step": 0}
    state = state_of(lambda p, b: (b @ p["w"]).mean() * sum(table["weights"][key] for key in table["weights"]))
    state = fzero.step(state, X)
    table["step"] = 1
    state = fzero.step(state, X)
    table["weights"]["b"] = 3.0
    with pytest.raises(CaptureError, match=r"^table\['weights'\].*, which .* was 2.0 and is 3.0"):
        fzero.step(state, X)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * doubled(2.0)


def doubled(x: Any) -> Any:
    return x * 2.0


def tripled(x: Any) -> Any:
    return x * 3.0


@pytest.mark.parametrize("fn", [doubled, Doubled.forward])
def test_new_code_in_an_old_function_is_a_change(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's `%autoreload` puts it there when a file is edited, on whatever line."""
    layer = Doubled()

    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return layer(x)

        return inner(b @ p["w"]).mean()

    state = fzero.step(state_of(loss), X)
    monkeypatch.setattr(fn, "__code__", fn.__code__.replace(co_firstlineno=1))
    state = fzero.step(state, X)
    other = tripled.__code__ if fn is doubled else (lambda self, x: x * 5.0).__code__
    monkeypatch.setattr(fn, "__code__", other)
    with pytest.raises(
        CaptureError, match=rf"^the code of {fn.__qualname__}, which the step reads, was {fn.__qualname__} "
    ):
        fzero.step(state, X)
    state = fzero.step(state_of(loss, on_change="retrace"), X)
    before = float(state.metrics["loss"])
    monkeypatch.setattr(fn, "__code__", (lambda *x: x[-1] * 0.0).__code__)
    state = fzero.step(state, X)
    assert before
    assert not float(state.metrics["loss"])


def test_partials_callables_and_custom_steps() -> None:
    def loss(p, b, by, table):
        return (b @ p["w"]).mean() * by * table["k"]

    table = {"k": 2.0}
    state = fzero.step(state_of(functools.partial(loss, by=1.0, table=table)), X)
    table["k"] = 3.0
    with pytest.raises(CaptureError, match=r"\['k'\], which .* was 2.0 and is 3.0"):
        fzero.step(state, X)

    class Callable_:
        def __init__(self) -> None:
            self.alpha = 2.0

        def __call__(self, p, b):
            return (b @ p["w"]).mean() * self.alpha

    called = Callable_()
    state = fzero.step(state_of(called), X)
    called.alpha = 3.0
    with pytest.raises(CaptureError, match=r"^self.alpha, which .*__call__ .* was 2.0 and is 3.0"):
        fzero.step(state, X)

    rate = types.SimpleNamespace(value=0.1)

    def step(state, batch):
        value, grads = fzero.value_and_grad(lambda p, b: (b @ p["w"]).mean())(state, batch)
        return fzero.tree.map(lambda p, g: p - rate.value * g, state, grads), {"loss": value}

    state = fzero.init({"w": torch.ones(2)}, fzero.Spec(step=step))
    state = fzero.step(state, X)
    rate.value = 0.2
    with pytest.raises(CaptureError, match=r"^rate.value, which .*<lambda> .* was 0.1 and is 0.2"):
        fzero.step(state, X)


def test_an_evaluation_watches_what_it_reads_and_no_more() -> None:
    train, measure = types.SimpleNamespace(a=1.0), types.SimpleNamespace(b=1.0)

    def score(p, b):
        return (b @ p["w"]).mean() * measure.b

    state = fzero.step(state_of(lambda p, b: (b @ p["w"]).mean() * train.a), X)
    assert float(fzero.evaluate(state, X, score)) == pytest.approx(0.95)
    train.a = 2.0
    fzero.evaluate(state, X, score)
    with pytest.raises(CaptureError, match=r"train\.a"):
        fzero.step(state, X)
    train.a, measure.b = 1.0, 2.0
    state = fzero.step(state, X)
    for batch in (X, torch.ones(3, 2)):
        with pytest.raises(CaptureError, match=r"measure\.b, which score"):
            fzero.evaluate(state, batch, score)


def test_what_the_functions_change_themselves_is_no_change() -> None:
    """Caches, counts that nothing reads, settings that a loss makes before it reads them; two shapes, and an evaluation
    that sets them otherwise."""
    cache: dict[int, float] = {}
    here = types.SimpleNamespace(mode="", calls=0, lazy=None, flag=True)
    calls = [0]

    @functools.cache
    def slow(n: int) -> float:
        return 1.0 / n

    def body(p, b):
        here.calls += 1
        calls[0] += 1
        if here.lazy is None:
            here.lazy = [len(b)]
        if here.flag:
            here.flag = False
        if len(b) not in cache:
            cache[len(b)] = 1.0
        return (b @ p["w"]).mean() * cache[len(b)] * slow(len(b)) * (2 if here.mode == "train" else 1)

    def loss(p, b):
        here.mode = "train"
        return body(p, b)

    def score(p, b):
        here.mode = "eval"
        return body(p, b)

    state = state_of(loss)
    for n in (2, 3, 2, 3, 4, 2):
        state = fzero.step(state, torch.ones(n, 2))
        fzero.evaluate(state, torch.ones(n, 2), score)
    assert here.calls == calls[0] == 6


@dataclass(frozen=True)
class Frozen:
    alpha: float = 0.5
    step: int = 0

    @property
    def twice(self) -> float:
        return self.alpha * 2

    def thrice(self) -> float:
        return self.alpha * 3

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.alpha


class Named(NamedTuple):
    alpha: float = 0.5
    step: int = 0


class Dotted(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Itself(dict):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


def by_alpha(x: torch.Tensor, given: Any) -> torch.Tensor:
    return x if given is None else x * given.alpha


def by_parts(s: Any, x: torch.Tensor) -> torch.Tensor:
    given = s.it
    model = given["model"]
    if not given["extra"]:
        return x
    if model:
        x = x * model["alpha"]
    return x


def made_to_scale(by: float) -> Any:
    return lambda x: x * by


def redefined(by: float) -> Any:
    """An object of a class that is defined anew, as by the cell of a notebook."""

    class Scaled:
        factor = by

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    return Scaled()


# (what reads the object `s.it`, the object for a number that is read and one that is not)
REPLACED: dict[str, tuple[Any, Any]] = {
    "a property": (lambda s, x: x * s.it.twice, lambda a, n: Frozen(a, n)),
    "a method": (lambda s, x: x * s.it.thrice(), lambda a, n: Frozen(a, n)),
    "a call": (lambda s, x: s.it(x), lambda a, n: Frozen(a, n)),
    "a helper": (lambda s, x: by_alpha(x, s.it), lambda a, n: Frozen(a, n)),
    "itself and a helper": (lambda s, x: by_alpha(x, s.it) * s.it.step, lambda a, n: Frozen(a, 1)),
    "a named tuple": (lambda s, x: x * s.it.alpha, lambda a, n: Named(a, n)),
    "a named tuple's helper": (lambda s, x: by_alpha(x, s.it), lambda a, n: Named(a, n)),
    "a dict": (lambda s, x: x * s.it["alpha"], lambda a, n: {"alpha": a, "step": n}),
    "get": (lambda s, x: x * s.it.get("alpha", 1.0), lambda a, n: {"alpha": a, "step": n}),
    "get, and it comes": (lambda s, x: x * s.it.get("alpha", 1.0), lambda a, n: {"alpha": 2.0} if a > 0.5 else {n: n}),
    "in": (lambda s, x: x * (2 if "alpha" in s.it else 1), lambda a, n: {n: n} if a > 0.5 else {"alpha": n}),
    "a dotted dict": (lambda s, x: x * s.it.model.alpha, lambda a, n: Dotted(model=Dotted(alpha=a, step=n), step=n)),
    "a dict that is its own": (lambda s, x: x * s.it.model.alpha, lambda a, n: Itself(model=Itself(alpha=a, n=n), n=n)),
    "a partial": (lambda s, x: s.it(x), lambda a, n: functools.partial(keyword, by=a)),
    "a partial's function": (lambda s, x: s.it(x, 2), lambda a, n: functools.partial((torch.add, torch.mul)[a > 0.5])),
    "a closure": (lambda s, x: s.it(x), lambda a, n: made_to_scale(a)),
    "objects in a list": (lambda s, x: sum(x * o.alpha for o in s.it), lambda a, n: [Frozen(1.0, n), Frozen(a, n)]),
    "a class defined again": (lambda s, x: s.it(x), lambda a, n: redefined(a)),
    "a variable": (by_parts, lambda a, n: {"model": {"alpha": a, "step": n}, "extra": [n], "step": n}),
    "a partial's argument": (
        lambda s, x: s.it(x), lambda a, n: functools.partial(by_alpha, given=Dotted(alpha=a, step=n))
    ),
    "getattr by a variable": (lambda s, x: sum(x * getattr(s.it, k) for k in ("alpha",)), lambda a, n: Frozen(a, n)),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLACED)
def test_an_object_in_the_place_of_another_is_compared_by_what_was_read(case: str) -> None:
    reads, made = REPLACED[case]
    s = types.SimpleNamespace(it=made(0.5, 0))
    state = state_of(lambda p, b: reads(s, (b @ p["w"]).mean()))
    for n in range(3):
        state = fzero.step(state, X)
        s.it = made(0.5, n + 1)
    s.it = made(0.75, 3)
    with pytest.raises(CaptureError, match=r"reads, was .* and is "):
        fzero.step(state, X)


def test_parts_that_are_not_read_may_change_in_place() -> None:
    """Of dicts with attributes, and of those that are asked for one key."""
    for config in (Dotted(alpha=0.5, step=0), Itself(alpha=0.5, step=0)):
        losses = [
            lambda p, b, c=config: (b @ p["w"]).mean() * c.alpha,
            lambda p, b, c=config: (b @ p["w"]).mean() * c.get("alpha"),
            lambda p, b, c=config: (b @ p["w"]).mean() * (c["alpha"] if "alpha" in c else 1.0),  # noqa: SIM401
            lambda p, b, c=config: (b @ p["w"]).mean() * (1.0 if c is None or not isinstance(c, dict) else c["alpha"]),
        ]
        for loss in losses:
            config["alpha"], state = 0.5, state_of(loss)
            for config["step"] in range(2):
                state = fzero.step(state, X)
            config["alpha"] = 0.75
            with pytest.raises(CaptureError, match="alpha"):
                fzero.step(state, X)


def test_lists_that_a_loss_logs_to_may_be_replaced_and_cleared() -> None:
    here = types.SimpleNamespace(log=[], sizes=collections.deque(), counts={}, calls=0, last=None)

    def loss(p, b):
        here.log.append("called")
        here.sizes.append(len(b))
        here.counts["calls"] = here.counts.get("calls", 0) + 1
        here.calls = here.calls + 1
        if len(here.sizes) > 100:
            print(here.calls)
        with torch.profiler.record_function("forward"):
            return (b @ p["w"]).mean()

    state = state_of(loss)
    for _ in range(3):
        state = fzero.step(state, X)
        here.log, here.counts = [], {}
        here.sizes.clear()


def test_a_draw_after_a_seed_is_the_same_each_time_anyway() -> None:
    def seeded(p, b):
        random.seed(3)
        np.random.seed(4)
        return (b @ p["w"]).mean() * random.random() * float(np.random.rand())

    state = state_of(seeded)
    for _ in range(2):
        state = fzero.step(state, X)

    def unseeded(p, b):
        random.seed()
        return (b @ p["w"]).mean() * random.random()

    def late(p, b):
        scale = random.random()
        random.seed(3)
        return (b @ p["w"]).mean() * scale

    for loss in (unseeded, late):
        with pytest.raises(CaptureError, match="draws from the global generator of random"):
            fzero.step(state_of(loss), X)


# what a line reads where `s.on` is true, and not where it is false: `s.it`, for `s.it` of 1.0 and of 2.0
BEHIND: dict[str, Any] = {
    "and": lambda s, x: x * 3.0 if s.on and s.it > 1 else x,
    "or": lambda s, x: x if not s.on or s.it > 1 else x * 3.0,
    "two": lambda s, x: x * 3.0 if s.on and len(s.few) == 2 and s.it > 1 else x,
    "if and else": lambda s, x: x * (s.it if s.on else s.other),
    "else": lambda s, x: x * (s.other if not s.on else s.it),
    "a chain of comparisons": lambda s, x: x * (2.0 if 0 < s.on < s.it else 1.0),
    "a test of None": lambda s, x: x * (s.it if s.none is not None else s.other) if not s.on else x * s.it,
    "a value": lambda s, x: x * ((s.on and s.it) or s.other),
    "a comprehension": lambda s, x: x * sum([s.it for _ in range(3) if s.on]),
    "a call": lambda s, x: x * (float(s.it) if bool(s.on) else 1.0),
    "an entry": lambda s, x: x * (2.0 if s.on and vars(s)["few"][0] and s.it > 1 else 1.0),
}


@pytest.mark.parametrize("case", BEHIND)
def test_what_a_line_leaves_out_is_not_read(case: str) -> None:
    """Behind `and`, `or`, `if ... else`: a change of what was not reached is none, and of what was reached is one."""
    for on in (False, True):
        s = types.SimpleNamespace(on=on, it=1.0, few=[1, 2], other=1.0, none=None)
        state = fzero.step(state_of(lambda p, b, s=s: BEHIND[case](s, (b @ p["w"]).mean())), X)
        s.it = 2.0
        if on:
            with pytest.raises(CaptureError, match=r"^s\.it, which .* reads, was 1.0 and is 2.0"):
                fzero.step(state, X)
        else:
            state = fzero.step(state, X)
        s.on, s.it = not on, 1.0
        with pytest.raises(CaptureError, match=r"^s\.on, which .* reads, was"):
            fzero.step(state, X)


def test_what_a_line_reaches_later_in_a_loop_is_read() -> None:
    s = types.SimpleNamespace(it=1.0)

    def loss(p, b):
        x = (b @ p["w"]).mean()
        for i in range(3):
            x = x * s.it if i == 2 else x
        return x

    state = fzero.step(state_of(loss), X)
    s.it = 2.0
    with pytest.raises(CaptureError, match=r"^s\.it, which loss .* was 1.0 and is 2.0"):
        fzero.step(state, X)


def test_a_write_or_a_seed_that_a_line_leaves_out_hides_no_read() -> None:
    s = types.SimpleNamespace(it=1.0, reset=False, seed=None)

    def writes(p, b):
        if s.reset: s.it = 5.0  # fmt: skip  # noqa: E701
        return (b @ p["w"]).mean() * s.it

    def seeds(p, b):
        if s.seed is not None: random.seed(s.seed)  # fmt: skip  # noqa: E701
        return (b @ p["w"]).mean() * random.random()

    state = fzero.step(state_of(writes), X)
    s.it = 2.0
    with pytest.raises(CaptureError, match=r"^s\.it, which writes .* was 1.0 and is 2.0"):
        fzero.step(state, X)
    with pytest.raises(CaptureError, match=r"^seeds .* draws from the global generator of random"):
        fzero.step(state_of(seeds), X)
    s.seed = 0
    fzero.step(state_of(seeds), X)


def test_a_draw_behind_a_short_circuit_is_refused_where_it_is_reached() -> None:
    s = types.SimpleNamespace(on=False)
    state = state_of(lambda p, b: (b @ p["w"]).mean() * (RNG.normal() if s.on else 1.0))
    fzero.step(state, X)
    s.on = True
    state = state_of(lambda p, b: (b @ p["w"]).mean() * (RNG.normal() if s.on else 1.0))
    with pytest.raises(CaptureError, match="draws from a numpy Generator that is closed over"):
        fzero.step(state, X)


def test_truth_of_a_container_is_compared_alone() -> None:
    here = types.SimpleNamespace(extra=[1])
    state = state_of(lambda p, b: (b @ p["w"]).mean() * (2.0 if here.extra else 1.0))
    for here.extra[0] in range(2):
        state = fzero.step(state, X)
    here.extra.clear()
    with pytest.raises(CaptureError, match=r"bool\(here.extra\), which .* was True and is False"):
        fzero.step(state, X)


def test_functions_of_one_code_are_watched_each() -> None:
    configs = [types.SimpleNamespace(alpha=1.0), types.SimpleNamespace(alpha=2.0)]

    def made(config: Any, factor: float) -> Any:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * config.alpha * factor

        def sets(value: float) -> None:
            nonlocal factor
            factor = value

        return scaled, sets

    (first, _), (second, sets) = made(configs[0], 1.0), made(configs[1], 2.0)
    state = fzero.step(state_of(lambda p, b: first((b @ p["w"]).mean()) + second((b @ p["w"]).mean())), X)
    configs[1].alpha = 3.0
    with pytest.raises(CaptureError, match=r"config.alpha, which .* was 2.0 and is 3.0"):
        fzero.step(state, X)
    configs[1].alpha = 2.0
    sets(5.0)
    with pytest.raises(CaptureError, match=r"factor, which .* was 2.0 and is 5.0"):
        fzero.step(state, X)


@pytest.mark.parametrize("how", ["parameter", "assign"])
def test_a_parameter_of_a_module_that_is_replaced_is_a_change(how: str) -> None:
    """The program read the old one, as that of a teacher that `load_state_dict(assign=True)` renews."""
    teacher = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).requires_grad_(False)
    state = fzero.step(state_of(lambda p, b: (teacher(b) @ p["w"]).mean()), X)
    teacher[0].weight.mul_(2)
    state = fzero.step(state, X)
    new = {name: 2 * value for name, value in teacher.state_dict().items()}
    if how == "assign":
        teacher.load_state_dict(new, assign=True)
    else:
        teacher[0].weight = nn.Parameter(new["0.weight"], requires_grad=False)
    with pytest.raises(CaptureError, match=r"teacher.0.(weight|bias), which .* is another f32"):
        fzero.step(state, X)


def test_a_line_that_is_not_the_last_reads_of_what_it_makes() -> None:
    """A new object in the place of one that was read so was no change, and the old one's numbers stayed."""
    config = types.SimpleNamespace(rates=[{"a": 1.0}, {"a": 2.0}])

    def loss(p, b):
        rates = config.rates; rate = rates[1]  # noqa: E702  # fmt: skip
        both = (last := config.rates[0])["a"] * last["a"]
        return (b @ p["w"]).mean() * rate["a"] * both

    state = fzero.step(state_of(loss), X)
    config.rates = [{"a": 1.0}, {"a": 2.0}]
    state = fzero.step(state, X)
    for rates in ([{"a": 1.0}, {"a": 7.0}], [{"a": 7.0}, {"a": 2.0}]):
        config.rates = rates
        with pytest.raises(CaptureError, match=r"config\.rates, which loss"):
            fzero.step(state, X)


def test_lines_that_make_what_they_read_and_classes_by_type() -> None:
    config, table = types.SimpleNamespace(alpha=1.0), {"a": 1.0, "b": 2.0}
    module = types.ModuleType("read_once_config")
    module.BETA = 1.0  # type: ignore[attr-defined]

    def given() -> Any:
        return config

    class Model:
        scale, bias = 1.0, 1.0

        def scaled(self, x):
            with contextlib.nullcontext(given()) as c: return x * c.alpha  # noqa: E701  # fmt: skip

        def loss(self, p, b):
            from read_once_config import BETA

            x = self.scaled((b @ p["w"]).mean()) * BETA
            x = x * type(self).scale + self.__class__.bias
            return sum(x * v / (i + 1) for i, v in enumerate(table.values()))

    with mock.patch.dict(sys.modules, {module.__name__: module}):
        state = fzero.step(state_of(Model().loss), X)
        for owner, name in ((config, "alpha"), (module, "BETA"), (Model, "scale"), (Model, "bias")):
            with mock.patch.object(owner, name, 7.0), pytest.raises(CaptureError, match=f"{name}, which"):
                fzero.step(state, X)
        table["a"] = table.pop("a")
        with pytest.raises(CaptureError, match=r"table's keys, which .* was \['a', 'b'\] and is \['b', 'a'\]"):
            fzero.step(state, X)


def test_a_cell_that_runs_again_is_no_change() -> None:
    """With a class, a decorated function and a lambda, on other lines; with another number it is one."""
    cell = """
def decorated(fn):
    def wrapper(*given): return fn(*given)
    return wrapper
@decorated
def helper(x): return x * ALPHA
class Scale:
    factor = 2.0
    def __call__(self, x): return x * self.factor
scale, shift, ALPHA = Scale(), lambda x: x + 1, 0.5
"""
    here: dict[str, Any] = {"__name__": "__main__"}
    for name, text in (("1", cell), ("2", "def loss(p, b): return shift(scale(helper((b @ p['w']).mean())))")):
        exec(compile(text, f"<ipython-input-{name}>", "exec"), here)
    state = fzero.step(state_of(here["loss"]), X)
    exec(compile("\n# a note" + cell, "<ipython-input-3>", "exec"), here)
    state = fzero.step(state, X)
    exec(compile(cell.replace("2.0", "3.0"), "<ipython-input-4>", "exec"), here)
    with pytest.raises(CaptureError, match=r"factor, which .* was 2.0 and is 3.0|scale, which"):
        fzero.step(state, X)


@pytest.mark.parametrize("name", ["<stdin>", "<console>", "<input>", "<command-12>", "<cell 1>", "<ipython-input-1>"])
def test_what_is_typed_is_the_users(name: str) -> None:
    assert kind_of(name) == USER
    assert kind_of("<string>") == kind_of("<frozen importlib._bootstrap>") == OTHER


def test_what_python_c_and_exec_were_given_is_the_users() -> None:
    """The functions that modules of others generate have its file name, and are not."""
    given = compile("1", "<string>", "eval")
    for users in ({}, {"__name__": "__main__"}, {"__name__": "of_no_module"}, {"__file__": "/home/a/train.py"}):
        assert kind_of_code(given, users) == USER
    assert kind_of_code(given, {"__name__": "dataclasses"}) == OTHER
    new: Any = namedtuple("Pair", "x y").__new__
    assert kind_of_code(new.__code__, new.__globals__) == OTHER
    assert kind_of("<dynamic-code>") == USER  # of what came by cloudpickle
    assert kind_of_code(given, {"__name__": "__main__", "__file__": dataclasses.__file__}) == OTHER


def test_what_a_helper_does_not_read_of_its_argument_is_no_change() -> None:
    config = {"alpha": 0.5, "step": 0}

    def scaled(x: torch.Tensor, given: dict[str, Any], *, again: dict[str, Any]) -> torch.Tensor:
        return x * given["alpha"] * again["alpha"]

    state = state_of(lambda p, b: scaled(b @ p["w"], config, again=config).mean())
    for config["step"] in range(3):
        state = fzero.step(state, X)
    config["alpha"] = 1.0
    with pytest.raises(CaptureError, match=r"^given\['alpha'\], which .*scaled .* was 0.5 and is 1.0"):
        fzero.step(state, X)


def test_a_hundred_values_are_compared_in_twenty_microseconds() -> None:
    """The quickest of many tries: the machine may be busy."""
    table = {f"k{i}": float(i) for i in range(100)}
    reads = fzero.lower(
        fzero.Spec(loss=lambda p, b: (b @ p["w"]).mean() * sum(table.values()), optimizer=fzero.optim.sgd(0.1)),
        {"w": torch.ones(2)},
        X,
    ).graph.reads
    assert len(reads.places) >= 100
    assert min(timeit.repeat(reads.changes, number=20, repeat=200)) / 20 < 20e-6


def test_an_equal_value_is_no_change() -> None:
    """A number that is computed anew, an equal configuration in the place of another, a function defined again."""
    here = types.SimpleNamespace(rate=0.1, config=Config(), fn=helper, names=["a", "b"])

    def loss(p, b):
        return here.fn(b @ p["w"]).mean() * here.rate * here.config.alpha * here.config.rates[0] * len(here.names)

    state = fzero.step(state_of(loss), X)
    for _ in range(2):
        here.rate, here.config, here.names = float("0.1"), Config(), ["a", "b"]
        again = types.FunctionType(helper.__code__, helper.__globals__)
        here.fn = again
        state = fzero.step(state, X)
    here.config.rates[0] = 7.0  # of the new object
    with pytest.raises(CaptureError, match=r"here.config.rates\[0\], which .* was 1.0 and is 7.0"):
        fzero.step(state, X)


@pytest.mark.parametrize("how", ["a global", "an attribute", "written out"])
def test_a_number_that_a_loss_counts_is_refused(how: str) -> None:
    here = types.SimpleNamespace(count=0)

    def loss(p, b):
        global COUNT
        if how == "a global":
            COUNT += 1
            return (b @ p["w"]).mean() * min(1.0, COUNT / 100)
        if how == "an attribute":
            here.count += 1
        else:
            here.count = here.count + 1
        return (b @ p["w"]).mean() * here.count

    with pytest.raises(
        CaptureError, match=r"is changed by .*loss \(test_reads.py:\d+\) from 0 to 1: that happens once"
    ):
        fzero.step(state_of(loss), X)


COUNT = 0

RNG, PYTHONS = np.random.default_rng(0), random.Random(0)
ALIAS = random.uniform
DRAWS: dict[str, tuple[Any, str]] = {
    "random": (lambda p, b: (b @ p["w"]).mean() * random.random(), "random"),
    "an alias": (lambda p, b: (b @ p["w"]).mean() * ALIAS(0, 1), "random"),
    "numpy": (lambda p, b: (b @ p["w"]).mean() * np.random.rand(), "numpy.random"),
    "within numpy": (lambda p, b: (b @ p["w"]).mean() * sum(map(float, np.random.permutation(3))), "numpy.random"),
    "a Generator": (lambda p, b: (b @ p["w"]).mean() * RNG.normal(), "a numpy Generator that is closed over"),
    "a Random": (lambda p, b: (b @ p["w"]).mean() * PYTHONS.random(), "a random Random that is closed over"),
}


@pytest.mark.parametrize("case", DRAWS)
def test_a_draw_of_a_loss_is_refused(case: str) -> None:
    """It would give every step the same numbers."""
    loss, name = DRAWS[case]
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(CaptureError, match=rf"<lambda> \(test_reads.py:\d+\) draws from .*{name}.* fzero.random"):
        fzero.lower(spec, {"w": torch.ones(2)}, X)


def test_sympys_shuffles_are_no_draws_of_the_loss() -> None:
    """It shuffles the facts that it asks itself; einx solves shapes with it."""
    import sympy

    def loss(p, b):
        size = sympy.Symbol(f"n{timeit.default_timer()}", integer=True, positive=True)  # no answer is kept of it
        assert (2 * size + 1).is_positive
        return (b @ p["w"]).mean() * len(sympy.solve(2 * size - 4))

    assert fzero.step(state_of(loss), X).step == 1


def test_a_draw_in_a_helper_and_in_an_evaluation_is_refused() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        picks = random.sample(range(5), 2)
        return x * sum(picks)

    state = state_of(lambda p, b: (b @ p["w"]).mean())
    with pytest.raises(CaptureError, match=r"noisy \(test_reads.py:\d+\) draws from the global generator of random"):
        fzero.evaluate(state, X, lambda p, b: noisy(b @ p["w"]))
    generator = torch.Generator()
    with pytest.raises(CaptureError, match="generator"):
        fzero.evaluate(state, X, lambda p, b: b + torch.rand(2, generator=generator))


def test_a_generator_that_the_loss_makes_may_draw() -> None:
    def loss(p, b):
        noise = np.random.default_rng(3).normal(size=2)
        rng = random.Random(1)
        weight = rng.random()
        weight += helped(rng)
        for _ in range(rng.randint(2, 3)):
            weight += rng.random()
        return (b @ p["w"] + torch.tensor(noise)).mean() * weight

    def helped(generator):
        return generator.random() + generator.uniform(0, 1)

    state = state_of(loss)
    for _ in range(2):
        state = fzero.step(state, X)


def test_a_generator_that_the_loss_makes_without_a_seed_may_not_draw() -> None:
    """It gives other numbers each time that it is made; the program would keep the first."""
    losses = [
        lambda p, b: (b @ p["w"]).mean() * np.random.default_rng().random(),
        lambda p, b: (b @ p["w"]).mean() * random.SystemRandom().random(),
    ]
    for loss in losses:
        with pytest.raises(CaptureError, match=r"<lambda> \(test_reads.py:\d+\) draws from the system's entropy"):
            fzero.step(state_of(loss), X)
    seeded = state_of(lambda p, b: (b @ p["w"]).mean() * np.random.RandomState(3).rand())
    assert fzero.step(seeded, X).step == 1


@pytest.mark.parametrize("how", ["a branch", "max"])
def test_the_longest_sequence_so_far_is_no_count(how: str) -> None:
    """A module that remembers what it has made a table for: the textbook's rotary positions."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.longest = nn.Parameter(torch.ones(2)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "max":
                self.longest = max(self.longest, x.shape[0])
            elif x.shape[0] > self.longest:
                self.longest = x.shape[0]
            return (x * self.weight).sum() * self.longest

    module = Rotary()
    state = state_of(lambda p, b: functional_call(module, {"weight": p["w"]}, (b,)))
    assert fzero.step(fzero.step(state, X), X).step == 2


def test_a_large_nested_container_costs_no_more_than_its_length() -> None:
    table = [[float(i + j) for j in range(100)] for i in range(400)]
    state = fzero.step(state_of(lambda p, b: (b @ p["w"]).mean() * torch.tensor(table).mean()), X)
    (lowered,) = state.runtime.programs.values()
    assert len(lowered.graph.reads.places) < 10
    table.append(table[0])
    with pytest.raises(CaptureError, match=r"table's length, which .* was 400 and is 401"):
        fzero.step(state, X)


def test_parts_of_a_module_are_compared_once() -> None:
    """A module of many layers is watched as a whole; its layers do not add their own parts."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    module = Layers()
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    state = fzero.step(state_of(lambda p, b: functional_call(module, p, (b,)).mean(), params), X)
    (lowered,) = state.runtime.programs.values()
    assert len([place for place in lowered.graph.reads.places if place.kind == "copy"]) == 2
    module.layers[3][1] = nn.Tanh()
    with pytest.raises(CaptureError, match=r"module's parts, which"):
        fzero.step(state, X)


def test_a_thread_that_draws_meanwhile_is_no_draw_of_the_loss() -> None:
    stop = threading.Event()

    def draws() -> None:
        while not stop.is_set():
            random.random(), np.random.rand()

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        for _ in range(2):
            fzero.step(state_of(lambda p, b: (b @ p["w"]).mean() * WIDTH), X)
    finally:
        stop.set()
        thread.join()


def test_a_closed_over_tensor_that_a_program_reads_in_place_is_no_change() -> None:
    """A program reads its memory at each step."""
    offset = torch.zeros(2)
    state = state_of(lambda p, b: (b @ p["w"] * offset).mean())
    state = fzero.step(state, X)
    offset += 1
    assert float(fzero.step(state, X).metrics["loss"]) == 1.0


def test_lines_name_chains() -> None:
    def fn(p, i):
        a = CONFIG.alpha + p["w"] + TABLE["k"][i].x
        SPACE.count += 1
        return WEIGHTS[i + 1] + a

    lines = lines_of(fn.__code__)
    start = fn.__code__.co_firstlineno
    shown = {number - start: [str(use.chain) for use in uses] for number, uses in lines.reads.items()}
    assert shown == {1: ["CONFIG.alpha", "p['w']", "i", "TABLE['k'][i].x"], 3: ["i", "WEIGHTS[i + 1]", "a"]}
    assert [str(use.chain) for uses in lines.updates.values() for use in uses] == ["SPACE.count"]


SHARED = types.SimpleNamespace(rate=1.0, offset=torch.zeros(2))


def _changed_on_one_rank(on_change: str) -> list[str]:
    """What each call says when rank 1 alone has changed a number, and then a tensor."""
    rank = int(os.environ["RANK"])

    def loss(p, b):
        return (b @ p["w"] + SHARED.offset).mean() * SHARED.rate

    state, said = fzero.step(state_of(loss, on_change=on_change), X), []
    for name, value in (("rate", 2.0), ("offset", torch.ones(2))):
        old = getattr(SHARED, name)
        if rank == 1:
            setattr(SHARED, name, value)
        try:
            state = fzero.step(state, X)
            said.append("runs")
        except fzero.FzeroError as error:
            said.append(f"{type(error).__name__}: {error}")
        setattr(SHARED, name, old)
    state = fzero.step(state, X)  # all alike again
    return said


@pytest.mark.parametrize("on_change", ["error", "retrace"])
def test_a_change_on_one_rank_alone_ends_on_all_and_hangs_none(on_change: str) -> None:
    first, second = values(gloo(2, _changed_on_one_rank, on_change, timeout=120.0))
    if on_change == "error":
        assert re.fullmatch(r"DisagreementError: rank 1 failed before step 2: CaptureError: SHARED.rate, .*", first[0])
        assert re.match(r"CaptureError: SHARED.rate, which .* was 1.0 and is 2.0", second[0])
        assert re.match(r"CaptureError: SHARED.offset, which", second[1])
    else:
        for said in (first, second):
            assert "SHARED.rate is 1.0 on rank 0, 2.0 on rank 1" in said[0]
            assert said[1] == "runs"  # ranks may close over other values of one shape


def test_a_debugger_that_starts_in_a_loss_keeps_the_program() -> None:
    """Its `step` into a function did not stop there: as `breakpoint()` in a loss."""
    called: list[str] = []

    def follows(frame: Any, event: str, argument: Any) -> None:
        called.append(frame.f_code.co_name)

    def loss(p, b):
        sys.settrace(follows)
        x = (b @ p["w"]).square()
        try:
            return helper(x).mean()
        finally:
            sys.settrace(None)

    before = sys.gettrace()
    try:
        fzero.step(state_of(loss), X)
    finally:
        sys.settrace(before)
    assert "helper" in called


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring has no pause")
def test_a_pause_in_another_thread_is_none() -> None:
    """Autograd has a thread for each device but the CPU. It ended the watch, and Python followed each call from then
    on."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        with Reading([helper]) as reading:
            thread = threading.Thread(target=lambda: reading.paused.__enter__() or reading.paused.__exit__())
            thread.start()
            thread.join()
            followed = sys.gettrace()
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert followed is not None
    assert after is None


@dataclasses.dataclass
class Inner:
    alpha: float = 0.5


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    several: list[Inner] = dataclasses.field(default_factory=lambda: [Inner(), Inner()])


@pytest.mark.parametrize("copied", [
    lambda x: dataclasses.asdict(x)["inner"]["alpha"], lambda x: dataclasses.astuple(x)[1][1][0],
    lambda x: copy.deepcopy(x).several[1].alpha,
], ids=["asdict", "astuple", "deepcopy"])  # fmt: skip
def test_what_a_copy_reads_of_the_objects_within(copied: Callable[[Any], float]) -> None:
    """A change of a field of a field went unseen."""
    args = Outer()

    def loss(p, b):
        return copied(args) * (b @ p["w"]).square().mean()

    state = fzero.step(fzero.step(state_of(loss), X), X)
    args.inner.alpha = args.several[1].alpha = 0.25
    with pytest.raises(CaptureError, match=r"\['alpha'\], which .* reads, was 0.5 and is 0.25"):
        fzero.step(state, X)
