"""host_draws: random generators outside of torch (`random`, `numpy.random`), and the refusal of a draw in a trace."""

from __future__ import annotations

import collections
import random
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fzero.capture.reads.frames import OTHER, kind_of
from fzero.errors import CaptureError

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_PYTHONS: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPYS: np.random.RandomState = np.random.rand.__self__  # type: ignore[attr-defined]
# the names of methods that draw, by which a line of a library is looked at
NAMES = frozenset(name for kind in _GENERATORS for name in dir(kind) if not name.startswith("_"))


# what makes numbers of the system's: `numpy.random.default_rng()` without a seed asks it for one
_SYSTEMS = {vars(random.SystemRandom)[name].__code__ for name in ("random", "getrandbits", "randbytes")}
_ASK_ALWAYS = {"RandomState", "MT19937"}  # with a seed, too
SYSTEM = "the system's entropy, as a generator without a seed does,"


def may_ask_the_system(code: types.CodeType) -> bool:
    """Whether a function draws from the system's entropy."""
    return code in _SYSTEMS


def of_the_system(frame: types.FrameType) -> types.FrameType | None:
    """The function outside of the standard library that draws from the system's entropy, where this frame does that.
    None for one that is being imported."""
    at: types.FrameType | None = frame if may_ask_the_system(frame.f_code) else None
    while at is not None and kind_of(at.f_code.co_filename) == OTHER:
        at = at.f_back
    if at is None or at.f_code.co_name == "<module>" or _ASK_ALWAYS.intersection(at.f_code.co_names):
        return None
    return at


def generator_of(value: Any) -> Any:
    """The generator that a value is, or draws from: a method of one, or a module of functions that do. Else None."""
    if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
        value = value.__self__
    if isinstance(value, _GENERATORS):
        return value
    return (
        {id(random): _PYTHONS, id(np.random): _NUMPYS}.get(id(value)) if isinstance(value, types.ModuleType) else None
    )


def state_of(generator: Any) -> Any:
    """A value that differs once the generator has drawn."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state()
        return state[1].tobytes(), state[2:]
    return repr(generator.bit_generator.state)


_APART: ContextVar[bool] = ContextVar("_APART", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Draws within are no part of a step, as that of a copied module for the name of a file: the global generators are
    left as they were."""
    python, numpy, token = _PYTHONS.getstate(), _NUMPYS.get_state(), _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)
        _PYTHONS.setstate(python)
        _NUMPYS.set_state(numpy)


@dataclass
class Draws:
    """The draws of one trace. `pending`: for a function at work, its line and the states that the generators named
    there had before it. `drawn`: generators that drew, and the line. `of_system`: a line that drew from the system's
    entropy. `seeded`: ids of generators whose state a line sets: they give the same numbers each time anyway."""

    pending: dict[types.FrameType, tuple[str, list[tuple[Any, Any]]]] = field(default_factory=dict)
    drawn: list[tuple[Any, str]] = field(default_factory=list)
    before: tuple[Any, Any] = ((), ())
    of_system: str = ""
    seeded: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Notes the states of the global generators."""
        self.before = (state_of(_PYTHONS), state_of(_NUMPYS))

    def expect(self, frame: types.FrameType, where: str, generators: list[Any]) -> None:
        """Before a line, or more of it, that names these."""
        if _APART.get():
            return
        if generators := [x for x in generators if id(x) not in self.seeded]:
            self.pending.setdefault(frame, (where, []))[1].extend((x, state_of(x)) for x in generators)

    def settle(self, frame: types.FrameType) -> None:
        """After the line of this frame for which draws were expected."""
        where, expected = self.pending.pop(frame, ("", []))
        self.drawn += [(generator, where) for generator, state in expected if state_of(generator) != state]

    def check(self, fn_name: str) -> None:
        """Raises CaptureError for a draw that would come back at each step. A generator that nothing else holds was
        made by the traced functions, and may draw: it would be made alike each time."""
        self.pending.clear()
        if self.of_system:
            raise _refused(SYSTEM, self.of_system)
        ours = collections.Counter(id(generator) for generator, _ in self.drawn)  # references of this record
        for generator, where in self.drawn:
            held = references(generator) > ours[id(generator)] + 1  # and this loop's
            if generator is _PYTHONS or generator is _NUMPYS or held:
                raise _refused(_name(generator), where)
        if self.drawn or threading.active_count() > 1:  # another thread may have drawn
            return
        for generator, before in zip((_PYTHONS, _NUMPYS), self.before, strict=True):
            if id(generator) not in self.seeded and state_of(generator) != before:
                raise _refused(_name(generator), f"a function that {fn_name} calls")


def _name(generator: Any) -> str:
    if generator is _PYTHONS or generator is _NUMPYS:
        return f"the global generator of {'random' if generator is _PYTHONS else 'numpy.random'}"
    return f"a {type(generator).__module__.partition('.')[0]} {type(generator).__name__} that is closed over"


def _refused(name: str, where: str) -> CaptureError:
    return CaptureError(
        f"{where} draws from {name} while the step is traced: every step would get the same numbers. In a loss, draw "
        "with fzero.random from its key: def loss(params, batch, key), with fzero.init(params, spec, "
        "key=fzero.random.key(0)). What a library draws for itself, switch off, or draw outside and pass in the batch"
    )


def references(value: Any) -> int:
    """How many references to a value there are, without those of this call."""
    return sys.getrefcount(value) - _OF_CALL


_OF_CALL = 0
_OF_CALL = references([object()][0])
