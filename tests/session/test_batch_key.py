"""batch_key: what of a batch decides its program, and what is said of a batch that is another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fzero
from fzero.session import batch_key, session

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
    assert [fn for fn, *_ in session.session_of(state).evaluations] == [first, third]
    assert session.MAX_EVALUATIONS == 2
