"""batch_key: what of a batch decides its program, and what is said of a batch that is another."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import fzero
from fzero.compile import batch_key
from fzero.session import session

CPU = torch.device("cpu")
X = torch.ones(2, 3)


def key(batch: Any) -> batch_key.Key:
    return batch_key.key_of(batch, CPU)


def test_a_tensor_counts_by_shape_and_dtype_and_another_leaf_by_its_value() -> None:
    assert key({"x": X}) == key({"x": X * 2})
    assert key({"x": X}) != key({"x": X.double()})
    assert key({"n": 1}) != key({"n": 2})
    assert key({"n": 1}) != key({"n": True})
    assert key({"n": 0.0}) != key({"n": -0.0})


@dataclass(frozen=True)
class Config:
    rate: Any
    name: str = field(default="", compare=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Config(1), Config(True)),
        (Config(0.0), Config(-0.0)),
        (Config((1, 2)), Config((1.0, 2))),
        (Config(1, "sum"), Config(1, "mean")),
        (frozenset([1]), frozenset([1.0])),
    ],
)
def test_values_that_are_equal_and_not_the_same_have_keys_of_their_own(one: Any, other: Any) -> None:
    """The second ran the program of the first."""
    assert one == other
    assert key({"c": one}) != key({"c": other})
    assert key({"c": one}) == key({"c": frozenset([*one]) if isinstance(one, frozenset) else replace(one)})


def test_a_function_is_itself_alone_in_a_key() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self) -> None: ...

        def call(self) -> None: ...

    one, other = Equal(), Equal()
    fns = [one, other, one.call, other.call, one, one.call]
    assert len({batch_key.Called(fn) for fn in fns}) == 4


def test_a_dict_counts_by_the_order_of_its_keys() -> None:
    """A loss that loops over the batch computes another function of a batch in another order."""
    one, two = {"x": X, "y": 2 * X}, {"y": 2 * X, "x": X}
    assert batch_key.difference(key([one]), key([two])) == "the keys are in another order"
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * next(iter(b.values()))).sum(), optimizer=fzero.optim.sgd(0.0))
    state = fzero.init({"w": torch.ones(3)}, spec)
    for batch, wanted in ((one, 6.0), (two, 12.0), (one, 6.0)):
        state = fzero.step(state, batch)
        assert float(state.metrics["loss"]) == wanted
    assert len(state.runtime.programs) == 2


def test_numbers_and_strings_are_plain() -> None:
    assert batch_key.has_plain({"x": X, "n": np.float32(1)})
    assert batch_key.has_plain({"x": X, "task": "copy"})
    assert not batch_key.has_plain({"x": X, "train": True})
    assert not batch_key.has_plain({"task": fzero.static("copy")})


def test_what_changed_alone_is_told() -> None:
    first, second, other = key({"x": X, "n": 1}), key({"x": X, "n": 2}), key({"x": X.double(), "n": 2})
    ((path, before, now),) = batch_key.changed(second, [first])
    assert (path, before.text, now.text) == ("n", "int 1", "int 2")
    assert list(batch_key.changed(first, [first])) == []
    assert list(batch_key.changed(other, [first])) == [], "the tensors differ too"
    assert list(batch_key.changed(key((X, 2)), [key([X, 1])])) == [], "the structure differs too"
    low, high = (batch_key.key_of({"n": n}, CPU, phase) for n, phase in ((1, "low"), (2, "high")))
    assert list(batch_key.changed(high, [low])) == [], "the phase differs too"


def test_a_string_that_changes_is_refused() -> None:
    changes = list(batch_key.changed(key({"task": "b"}), [key({"task": "a"})]))
    with pytest.raises(fzero.TreeError, match=r"batch\['task'\] was str 'a', is str 'b'"):
        batch_key.check_strings(changes)
    to_number = list(batch_key.changed(key({"task": 1}), [key({"task": "a"})]))
    with pytest.raises(fzero.TreeError, match="a string decides the program"):
        batch_key.check_strings(to_number)
    batch_key.check_strings(list(batch_key.changed(key({"n": 2}), [key({"n": 1})])))


def test_numbers_become_tensors_where_they_change() -> None:
    made = batch_key.with_tensors({"n": 3, "rate": 0.5, "kept": 4, "task": "a"}, {"n", "rate", "task"}, CPU)
    assert made["n"].dtype is torch.int64
    assert made["rate"].dtype is torch.get_default_dtype()
    assert (int(made["n"]), float(made["rate"])) == (3, 0.5)
    assert (made["kept"], made["task"]) == (4, "a")
    assert int(batch_key.with_tensors({"n": -(1 << 63)}, {"n"}, CPU)["n"]) == -(1 << 63)
    with pytest.raises(fzero.TreeError, match="needed an int of 64 bits"):
        batch_key.with_tensors({"n": 1 << 63}, {"n"}, CPU)


def test_the_difference_of_two_batches_in_words() -> None:
    old, new = key({"x": X, "gone": 1, "n": 1}), key({"x": X.double(), "y": X, "n": 1})
    said = batch_key.difference(old, new)
    assert "x" in said.partition(" was ")[0]
    assert " is new" in said
    assert " is gone" in said
    assert said.count(";") == 2, said
    assert batch_key.difference(key([X]), key((X,))) == "the batch has another structure"


def test_the_difference_names_values_settings_and_phases() -> None:
    assert batch_key.difference(key({"t": torch.float32}), key({"t": torch.int64})) == (
        "batch['t'] was dtype torch.float32, is dtype torch.int64"
    )
    assert batch_key.difference(key({"n": 1, "s": "a"}), key({"n": 2, "s": "a"})) == "batch['n'] was int 1, is int 2"
    phases = [batch_key.key_of({"x": X}, CPU, phase) for phase in ("low", "high")]
    assert batch_key.difference(*phases) == "phase 'low' became phase 'high'"
    torch.use_deterministic_algorithms(True)
    try:
        other = key({"x": X})
    finally:
        torch.use_deterministic_algorithms(False)
    assert other != key({"x": X})
    assert " became " in batch_key.difference(key({"x": X}), other)


def test_numbers_of_numpy_are_those_of_python() -> None:
    made = batch_key.with_tensors({"n": np.int32(3), "f": np.float32(0.5)}, {"n", "f"}, CPU)
    assert (made["n"].dtype, made["f"].dtype) == (torch.int64, torch.get_default_dtype())
    assert batch_key.has_plain({"x": X, "n": b"text"})
    assert not batch_key.has_plain({"x": X, "z": 1j, "none": None})
    changes = list(batch_key.changed(key({"z": 1j}), [key({"z": 2j})]))
    assert changes == [], "a complex number decides the program"


def test_of_several_known_batches_the_one_that_differs_in_numbers_alone_tells() -> None:
    known = [key({"x": X.double(), "n": 1}), key({"x": X, "n": 1, "m": 5})]
    found = list(batch_key.changed(key({"x": X, "n": 2, "m": 5}), known))
    assert [(path, before.text, now.text) for path, before, now in found] == [("n", "int 1", "int 2")]


@pytest.mark.parametrize(
    ("leaf", "end"),
    [
        (np.ones(3), r"is ndarray: needed a tensor or a hashable value. Give torch.from_numpy\(x\)"),
        (bytearray(b"x"), "is bytearray: needed a tensor or a hashable value$"),
    ],
)
def test_what_cannot_be_hashed_is_refused_with_what_makes_tensors_of_it(leaf: Any, end: str) -> None:
    with pytest.raises(fzero.TreeError, match=rf"batch\['leaf'\] {end}"):
        key({"leaf": leaf})


@dataclass
class Fields:
    """A dataclass that can change."""

    x: Any


def test_a_dataclass_that_can_change_is_refused() -> None:
    with pytest.raises(fzero.TreeError, match=r"is Fields: needed a tensor .* Give vars"):
        key({"leaf": Fields(X)})


class Counted:
    """Equal by its identity: what is in it may change."""

    def __init__(self) -> None:
        self.number = 1


@dataclass(frozen=True)
class Holder:
    """Equal by its value, which is a tensor."""

    x: Any


@pytest.mark.parametrize("leaf", [Counted(), Holder(X)])
def test_an_object_whose_contents_could_change_is_refused(leaf: Any) -> None:
    with pytest.raises(fzero.TreeError, match=f"is a {type(leaf).__name__}, whose contents would stay what they were"):
        key({"x": X, "leaf": leaf})
    assert key({"x": X, "leaf": Holder(3)}) == key({"x": X, "leaf": Holder(3)})


def test_no_more_evaluations_are_kept_than_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; one that is used again is the newest."""
    monkeypatch.setattr(session, "MAX_EVALUATIONS", 2)
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    state = fzero.init({"w": torch.ones(3)}, spec)
    first, second, third = (lambda p, b, n=n: (p["w"] * b).sum() * n for n in (1, 2, 3))
    for fn in (first, second, first, third):
        fzero.evaluate(state, torch.ones(3), fn)
    assert [called for called, *_ in session.session_of(state).evaluations] == [*map(batch_key.Called, (first, third))]
    assert session.MAX_EVALUATIONS == 2


@dataclass
class Opaque:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (Opaque(X), "Give vars"),
        (torch.ones(2, requires_grad=True), r"batch\['x'\] requires grad, which no step would use"),
        (np.ones(2), "Give torch.from_numpy"),
    ],
)
def test_a_batch_that_a_step_refuses_is_refused_ahead_of_it(leaf: Any, said: str) -> None:
    def loss(params: Any, batch: Any) -> torch.Tensor:
        return (params["w"] * (batch["x"].x if isinstance(batch["x"], Opaque) else batch["x"])).sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.errors.TreeError, match=said):
        fzero.lower(spec, {"w": torch.ones(2)}, {"x": leaf})
    with pytest.raises(fzero.errors.TreeError, match=said):
        fzero.step(fzero.init({"w": torch.ones(2)}, spec), {"x": leaf})
