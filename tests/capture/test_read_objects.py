"""What a loss reads of objects: a change is an error, however the line names it; what it does not read may change."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import datetime
import functools
import importlib
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import CaptureError

pytestmark = pytest.mark.usefixtures("thawed")  # Python finds no function that is frozen

X = torch.eye(2)


def begun(ask: Callable[[], Any]) -> Any:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return ask() * (batch @ params["w"]).square().mean()

    return fzero.init({"w": torch.ones(2)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))


class Config:
    def __init__(self, k: float = 1.0) -> None:
        self.k, self.other = k, 1.0
        self.inner = SimpleNamespace(k=k, other=1.0)

    @property
    def twice(self) -> float:
        return self.k * 2

    @property
    def part(self) -> Any:
        return self.inner

    @functools.cached_property
    def kept(self) -> float:
        return 2.0

    def get(self) -> Any:
        return self.inner

    @classmethod
    def made(cls) -> float:
        return 1.0

    def __rmul__(self, x: float) -> float:
        return x * self.k


class Unsized(tuple[float, ...]):
    """As e3nn's irreps."""

    def __len__(self) -> int:
        raise NotImplementedError


@dataclasses.dataclass
class Term:
    k: float = 1.0
    other: float = 1.0


def matched(it: Any) -> float:
    match it.term:
        case Term(k=k):
            return k
        case _:
            return 7.0


def matched_in_order(it: Any) -> float:
    match it.term:
        case Term(k):
            return k
        case _:
            return 7.0


def missing_global(it: Any) -> float:
    try:
        return MAY_COME  # type: ignore[name-defined]
    except NameError:
        return 1.0


def missing_item(it: Any) -> float:
    try:
        return it.items[1]
    except IndexError:
        return 1.0


def of_loop(it: Any) -> float:
    total = 0.0
    for i in range(1, 2):
        total += it.layers[i - 1].k
    return total


def from_getter(it: Any) -> float:
    return it.a.get().k * it.b.get().k


def copied(it: Any) -> float:
    mine = copy.copy(it.term)
    return mine.k


def changed_globals(**values: Any) -> Callable[[Any], None]:
    return lambda it: globals().update(values)


def put(path: str, value: Any) -> Callable[[Any], None]:
    """What sets an attribute of an attribute."""
    *owners, last = path.split(".")
    return lambda it: setattr(functools.reduce(getattr, owners, it), last, value)


def redefined(name: str, value: Any) -> Callable[[Any], None]:
    """What sets an attribute of the object's own class."""
    return lambda it: setattr(type(it), name, value)


def a_class(base: type = Config) -> Any:
    """An object of a class of its own, which a test may change."""
    return type("Own", (base,), dict(vars(base)))()


def space(**values: Any) -> Callable[[], Any]:
    return lambda: SimpleNamespace(**copy.deepcopy(values))


NAMESPACE: dict[str, Any] = {"K": 1.0}
exec("def typed(it):\n    return K", NAMESPACE)

# what there is, what the loss asks of it, what changes that, and what changes nothing that is read
Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "another property": (a_class, lambda it: it.twice, redefined("twice", property(lambda self: 9.0)), put("other", 2)),
    "a class method": (a_class, lambda it: it.made(), redefined("made", classmethod(lambda c: 9.0)), put("other", 2)),
    "of the class": (a_class, lambda it: type(it).made(), redefined("made", classmethod(lambda c: 9.0)), put("k", 2)),
    "an operator": (a_class, lambda it: 1.0 * it, redefined("__rmul__", lambda self, x: 9.0), put("other", 2.0)),
    "a cached property": (a_class, lambda it: it.kept, put("kept", 9.0), lambda it: vars(it).pop("kept")),
    "vars": (Config, lambda it: vars(it)["k"], put("k", 2.0), put("other", 2.0)),
    "__dict__": (Config, lambda it: it.__dict__["k"], put("k", 2.0), put("other", 2.0)),
    "keywords of vars": (Config, lambda it: dict(**vars(it))["k"], put("k", 2.0), lambda it: None),
    "globals": (
        Config, lambda it: globals()["GIVEN"], changed_globals(GIVEN=2.0), changed_globals(OTHER=2.0)
    ),
    "a global that comes": (Config, missing_global, changed_globals(MAY_COME=2.0), changed_globals(OTHER=3.0)),
    "an item that comes": (space(items=[3.0]), missing_item, lambda it: it.items.append(2.0), lambda it: None),
    "what was typed": (Config, NAMESPACE["typed"], lambda it: NAMESPACE.update(K=2.0), lambda it: None),
    "eval": (Config, lambda it: eval("GIVEN"), changed_globals(GIVEN=2.0), changed_globals(OTHER=4.0)),
    "what a function returned": (Config, lambda it: it.get().k, put("inner.k", 2.0), put("inner.other", 2.0)),
    "two of them": (space(a=Config(), b=Config()), from_getter, put("a.inner.k", 2.0), put("b.inner.other", 2.0)),
    "a property's attribute": (Config, lambda it: it.part.k, put("inner.k", 2.0), put("inner.other", 2.0)),
    "a computed index": (space(layers=[Config(), Config()]), of_loop, lambda it: put("k", 2.0)(it.layers[0]),
                         lambda it: put("k", 2.0)(it.layers[1])),
    "a computed key": (space(w_0=1.0, w_1=1.0), lambda it: vars(it)[f"w_{0}"], put("w_0", 2.0), put("w_1", 2.0)),
    "a computed name": (space(w_0=1.0, w_1=1.0, n=0), lambda it: getattr(it, f"w_{it.n}"), put("w_0", 2.0),
                        put("w_1", 2.0)),
    "a name that is put together": (space(w_a=1.0, w_b=1.0, n="a"), lambda it: getattr(it, "w_" + it.n),
                                    put("w_a", 2.0), put("w_b", 2.0)),
    "a pattern": (space(term=Term()), matched, put("term.k", 2.0), put("term", Term(other=2.0))),
    "a pattern in order": (space(term=Term()), matched_in_order, put("term.k", 2.0), put("term", Term(other=2.0))),
    "a generated comparison": (space(a=Term(), b=Term()), lambda it: 2.0 if it.a == it.b else 1.0, put("a.k", 2.0),
                               lambda it: None),
    "a copy": (space(term=Term()), copied, put("term.k", 2.0), lambda it: None),
    "all fields": (space(term=Term()), lambda it: dataclasses.asdict(it.term)["k"], put("term.k", 2.0),
                   lambda it: None),
    "a default": (lambda: collections.defaultdict(lambda: 1.0), lambda it: it["a"], lambda it: it.update(a=2.0),
                  lambda it: it.clear()),
    "a Counter's method": (lambda: collections.Counter("aab"), lambda it: it.total(), lambda it: it.update("a"),
                           lambda it: None),
    "a tuple without a length": (lambda: [Unsized([1.0, 2.0])], lambda it: sum(map(sum, it)),
                                 lambda it: it.insert(0, Unsized([3.0])), lambda it: None),
    "a UserDict": (lambda: collections.UserDict(a=1.0, b=1.0), lambda it: it.get("a"), lambda it: it.update(a=2.0),
                   lambda it: it.update(b=2.0)),
    "a dict's method": (lambda: {"a": 1.0}.get, lambda it: it("a"), lambda it: it.__self__.update(a=2.0),
                        lambda it: it.__self__.update(a=1.0)),
    "all of a UserDict": (lambda: collections.UserDict(a=1.0), lambda it: sum(it.values()),
                          lambda it: it.update(a=2.0), lambda it: None),
    "a UserList": (lambda: collections.UserList([1.0, 2.0]), lambda it: it[0], lambda it: it.insert(0, 5.0),
                   lambda it: it.append(1.0)),
    "a ChainMap": (lambda: collections.ChainMap({}, {"a": 1.0}), lambda it: it.get("a"), lambda it: it.update(a=2.0),
                   lambda it: None),
    "an array of Python's": (lambda: array.array("d", [1.0, 2.0]), lambda it: it[0], lambda it: it.insert(0, 5.0),
                             lambda it: None),
    "bytes": (lambda: bytearray(b"\1\2"), lambda it: it[0], lambda it: it.insert(0, 5), lambda it: None),
    "a date": (space(day=datetime.date(2020, 1, 2)), lambda it: it.day.day, put("day", datetime.date(2020, 1, 3)),
               put("day", datetime.date(2020, 1, 2))),
    "a pattern of re": (space(of=re.compile("a+")), lambda it: len(it.of.match("aa").group()),
                        put("of", re.compile("a")), put("of", re.compile("a+"))),
    "a tensor's flag": (lambda: torch.ones(1), lambda it: 2.0 if it.requires_grad else 1.0,
                        lambda it: it.requires_grad_(), lambda it: None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals() -> Any:
    NAMESPACE["K"], globals()["GIVEN"] = 1.0, 1.0
    yield
    for name in ("GIVEN", "MAY_COME", "OTHER"):
        globals().pop(name, None)


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_of_an_object_is_compared(case: str) -> None:
    make, ask, change, other = CASES[case]
    it = make()
    state = begun(lambda: ask(it))
    for _ in range(2):
        state = fzero.step(state, X)
        assert float(state.metrics["loss"]) == pytest.approx(float(ask(it)))
    other(it)
    state = fzero.step(state, X)
    change(it)
    with pytest.raises(CaptureError, match="reads, was"):
        fzero.step(state, X)


class Named(nn.Module):
    """Made in a loss, as torchdiffeq makes one; its own __init__ gives it away before it is a module."""

    def __init__(self, inner: nn.Module) -> None:
        noted = getattr(self, "noted", [str(type(self)), id(self)])
        super(Named, self).__init__()  # noqa: UP008
        self.inner, self.noted = inner, noted

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_that_a_loss_makes_may_be_given_away_before_it_is_one() -> None:
    layer = nn.Linear(2, 1).requires_grad_(False)
    state = fzero.init({"w": torch.ones(2)}, fzero.Spec(
        loss=lambda params, batch: Named(layer)(batch * params["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1)
    ))  # fmt: skip
    wanted = layer(X).square().mean()
    state = fzero.step(state, X)
    assert torch.allclose(state.metrics["loss"], wanted)
    assert fzero.step(state, X).step == 2


def test_a_method_that_super_names_is_compared() -> None:
    class Base:
        def scale(self) -> float:
            return 1.0

    class Leaf(Base):
        def scale(self) -> float:
            return super().scale() * 2

    leaf = Leaf()
    state = fzero.step(begun(lambda: leaf.scale()), X)
    Base.scale = lambda self: 3.0  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"Base\.scale, which"):
        fzero.step(state, X)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LeakyReLU(0.5), nn.Dropout(0.0))
        self.hook = self.layers[0].register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODULE_CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layer's number": (
        lambda net: setattr(net.layers[0], "negative_slope", 0.1),
        r"\.0\.negative_slope, .* 0.5 .* 0.1",
    ),
    "a rate": (lambda net: setattr(net.layers[1], "p", 1.0), r"\.1\.p, which"),
    "a new hook": (lambda net: net.layers[1].register_forward_hook(lambda module, args, out: out), "'s parts"),
    "a hook before": (lambda net: net.layers.register_forward_pre_hook(lambda module, args: args), "'s parts"),
    "a hook that is gone": (lambda net: net.hook.remove(), "'s parts"),
    "a mode": (lambda net: net.layers[1].eval(), r"\.1\.training, which .* was True and is False"),
    "its own forward": (lambda net: setattr(net, "forward", lambda x: x), r"Net\.forward, which"),
}


@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_what_a_layer_of_torch_is_set_to_is_compared(change: str) -> None:
    net = Net()

    def loss(params: Any, batch: Tensor) -> Tensor:
        return net(batch @ params["w"]).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0))
    state = fzero.init({"w": torch.ones(2)}, spec)
    for _ in range(2):
        state = fzero.step(state, X)
    changes, text = MODULE_CHANGES[change]
    changes(net)
    with pytest.raises(CaptureError, match=text):
        fzero.step(state, X)


def test_a_copy_of_a_configuration_may_be_changed() -> None:
    config = {"k": 1.0, "n": 1}
    it = SimpleNamespace(k=1.0)

    def ask() -> float:
        mine, other = dict(config), copy.deepcopy(it)
        mine["k"] *= 2
        other.k += 1
        return mine["k"] * other.k

    state = begun(ask)
    for _ in range(2):
        state = fzero.step(state, X)
        assert float(state.metrics["loss"]) == 4.0
    config["k"] = 2.0
    with pytest.raises(CaptureError, match=r"config\['k'\]"):
        fzero.step(state, X)


def test_a_count_by_setattr_is_refused() -> None:
    it = types.SimpleNamespace(n=1.0)

    def ask() -> float:
        setattr(it, "n", it.n + 1)  # noqa: B010
        return it.n

    with pytest.raises(CaptureError, match=r"it\.n, which .* is changed by .* from 1\.0 to 2\.0"):
        fzero.step(begun(ask), X)


LIBRARY = """
import collections.abc

class Config:
    def __init__(self, **values):
        object.__setattr__(self, "_fields", values)
    def __getitem__(self, key):
        return self._fields[key]
    def get(self, key, default=None):
        return self._fields.get(key, default)
    def __setattr__(self, key, value):
        self._fields[key] = value

class Mapped(Config):
    def keys(self):
        return self._fields.keys()
    def values(self):
        return self._fields.values()
    def __len__(self):
        return len(self._fields)
    def __iter__(self):
        return iter(self._fields)
    def __contains__(self, key):
        return key in self._fields

class Listed(collections.abc.Sequence):
    def __init__(self, values):
        self._list = values
    def __getitem__(self, key):
        return self._list[key]
    def __len__(self):
        return len(self._list)

class Munch(dict):
    def __getattr__(self, key):
        return self[key]
    @property
    def __dict__(self):
        return dict(self)
"""


@pytest.mark.parametrize("case", ["item", "nested item", "get", "get with a default", "a dict's copy as its __dict__"])
def test_a_configuration_of_an_installed_library(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of omegaconf, ml_collections and munch."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "configs_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    of = importlib.import_module("configs_of_a_library")
    inner, shown = of.Config(alpha=2.0), of.Munch(alpha=2.0)
    config = of.Config(alpha=2.0, inner=inner)
    read, name = {
        "item": (lambda: config["alpha"], r"config\['alpha'\]"),
        "nested item": (lambda: config["inner"]["alpha"], r"config\['inner'\]\['alpha'\]"),
        "get": (lambda: config.get("alpha"), r"config\['alpha'\]"),
        "get with a default": (lambda: config.get("beta", 3.0), r"config\['beta'\]"),
        "a dict's copy as its __dict__": (lambda: shown.alpha, r"shown\.alpha"),
    }[case]
    state = fzero.step(begun(read), X)
    config.alpha = inner.alpha = shown["alpha"] = float("2")
    state = fzero.step(state, X)
    config.alpha = config.beta = inner.alpha = shown["alpha"] = 5.0
    with pytest.raises(CaptureError, match=rf"^{name}, which .* reads, was .* and is 5.0"):
        fzero.step(state, X)
    sys.modules.pop("configs_of_a_library")


class Quiet(contextlib.ContextDecorator):
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


WRAPPED_BY: dict[str, Callable[[Any], Any]] = {
    "a context of the standard library": Quiet(),
    "a cache": functools.lru_cache,
    "a dispatch": functools.singledispatch,
    "a decorator of torch": torch.compiler.disable,
    "a setting of torch": torch.autocast("cpu", enabled=False),
}
CELL = "@decorate\ndef scaled(x, by=2.0):\n    return by * x\n"


@pytest.mark.parametrize(
    ("form", "by"),
    [*(("function", by) for by in WRAPPED_BY), *(("method", by) for by in WRAPPED_BY if by != "a dispatch")],
)
def test_a_decorated_function_that_is_defined_again(form: str, by: str) -> None:
    """As by a cell of a notebook: the function that is left there is the decorator's, with the code that it had."""
    cells: dict[str, Any] = {"decorate": WRAPPED_BY[by], "Tensor": Tensor}

    def run(text: str) -> None:
        if form == "method":
            text = text.replace("(x", "(self, x").replace("scaled", "__call__").replace("\n", "\n    ")
            text = f"class Scaled:\n    {text}\nscaled = Scaled()\n"
        exec(compile(text, "cells.py", "exec"), cells)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return cells["scaled"]((batch @ params["w"]).square().mean())

    run(CELL)
    state = fzero.step(fzero.init({"w": torch.ones(2)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0))), X)
    run(CELL)
    state = fzero.step(state, X)
    for text in (CELL.replace("by * x", "by * x + 1.0"), CELL.replace("2.0", "3.0")):
        run(text)
        with pytest.raises(CaptureError, match=r"^.*(scaled|__call__).* was .* and is "):
            fzero.step(state, X)
        run(CELL)
        state = fzero.step(state, X)


def test_an_object_that_is_given_another_dict() -> None:
    """Assignments to a pydantic model with `validate_assignment` give it one."""
    config = Config()
    state = fzero.step(begun(lambda: config.k), X)
    config.__dict__ = {**vars(config), "other": 2.0}
    state = fzero.step(state, X)
    config.__dict__ = {**vars(config), "k": 3.0}
    with pytest.raises(CaptureError, match=r"^config.k, which .* reads, was 1.0 and is 3.0"):
        fzero.step(state, X)


def test_a_tuple_that_is_made_again_is_watched_as_the_first_was() -> None:
    place = SimpleNamespace(rates=(1.0, 2.0))
    state = fzero.step(begun(lambda: place.rates[0]), X)
    for second in (2.0, 3.0):
        place.rates = (float("1"), second)
        state = fzero.step(state, X)
    place.rates = (5.0, 2.0)
    with pytest.raises(CaptureError, match=r"^place.rates.*, which .* reads, was .*1.0.* and is .*5.0"):
        fzero.step(state, X)


def test_another_object_is_told_by_what_differs_in_it() -> None:
    """Two addresses say nothing."""
    place = SimpleNamespace(config=Config())
    state = fzero.step(begun(lambda: place.config.twice), X)
    place.config = Config(3.0)
    another = r"^place.config, which .* reads, is another object: self.k, which Config.twice .* reads, was 1.0 and is"
    with pytest.raises(CaptureError, match=f"{another} 3.0"):
        fzero.step(state, X)
    del place.config.k
    with pytest.raises(CaptureError, match=f"{another} not there"):
        fzero.step(state, X)


def test_setdefault_reads_an_entry() -> None:
    table: dict[str, float] = {}
    state = fzero.step(begun(lambda: table.setdefault("a", 2.0)), X)
    table["a"] = float("2")
    state = fzero.step(state, X)
    table["a"] = 3.0
    with pytest.raises(CaptureError, match=r"^table\['a'\], which .* reads, was 2.0 and is 3.0"):
        fzero.step(state, X)


@pytest.mark.parametrize("case", ["**", "values", "iteration", "in", "if", "list", "length"])
def test_a_configuration_that_is_read_as_a_whole(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `build(**cfg.loss)` and `for weight in cfg.weights` with omegaconf; other entries may change."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "wholes_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    of = importlib.import_module("wholes_of_a_library")
    weights, listed = of.Mapped(a=1.0, b=2.0), of.Listed([1.0, 2.0])
    config = of.Mapped(weights=weights, listed=listed, step=0)

    def sums(a: float, b: float, c: float = 0.0) -> float:
        return a + b + c

    reads: dict[str, Callable[[], Any]] = {
        "**": lambda: sums(**config["weights"]),
        "values": lambda: sum(config["weights"].values()),
        "iteration": lambda: sum(config["weights"][key] for key in config["weights"]),
        "in": lambda: 1.0 if "c" in config["weights"] else 2.0,
        "if": lambda: 1.0 if config["listed"] else 2.0,
        "list": lambda: sum(config["listed"]),
        "length": lambda: len(config["listed"]),
    }
    state = fzero.step(begun(reads[case]), X)
    config.step = 1
    if case in ("in", "if"):
        weights.a = listed._list[0] = 3.0
    state = fzero.step(state, X)
    weights.a, weights.c = 5.0, 1.0
    listed._list[:] = [] if case == "if" else [1.0, 3.0, 4.0]
    with pytest.raises(CaptureError, match=r"config\['(weights|listed)'\].* which .* reads, was .* and is "):
        fzero.step(state, X)
    sys.modules.pop("wholes_of_a_library")


@dataclasses.dataclass
class Part:
    names: list[str] = dataclasses.field(default_factory=lambda: [f"a long name {i}" for i in range(30)])
    table: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(3))  # an equal one is no difference
    alpha: float = 0.5


@dataclasses.dataclass(frozen=True)
class Whole:
    part: Part = dataclasses.field(default_factory=Part)
    rate: float = 1.0


def test_what_differs_is_named_where_the_texts_are_cut_short() -> None:
    """It said: was Whole(...) and is another Whole(...)."""
    held = {"args": Whole()}

    def ask() -> float:
        args = held["args"]
        return args.part.alpha * args.rate

    state = fzero.step(begun(ask), X)
    held["args"] = dataclasses.replace(held["args"], part=Part(table=torch.zeros(3), alpha=0.25))
    with pytest.raises(CaptureError, match=r"args.*\.part\.alpha, which .* reads, was 0.5 and is 0.25"):
        fzero.step(state, X)
