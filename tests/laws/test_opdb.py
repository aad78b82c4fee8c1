"""A part of torch's operator database as losses; all of it in tests/acceptance/test_opdb_full.py."""

import random
from typing import Any

import opdb_table
import pytest
import torch
from torch import Tensor

from fzero.codegen import bind

MOST = {"plain": 1, "strided": 1}
DRAWN = 24  # by number: the database takes seconds to import, which a collection need not spend
KNOWN = ["as_strided", "as_strided_scatter", "diagonal_scatter", "nonzero", "bernoulli", "stft", "unsafe_chunk"]


@pytest.fixture(scope="module")
def opdb() -> Any:
    import opdb

    return opdb


def cases(opdb: Any, name: str, most: dict[str, int]) -> dict[str, Any]:
    return {key: one for key, one in opdb.keys(opdb.OPS[name], most) if "float32" in key}


@pytest.mark.parametrize("which", [*range(DRAWN), *KNOWN])
@pytest.mark.sampled(3)
def test_an_op_is_right_or_refused(which: str | int, opdb: Any) -> None:
    drawn = sorted(random.Random(11).sample(sorted(opdb.OPS), DRAWN))
    name = which if isinstance(which, str) else drawn[which]
    found = dict(opdb.outcomes(opdb.OPS[name], cases(opdb, name, MOST)))
    assert not {key: one for key, one in found.items() if one["status"] not in opdb_table.FINE}
    listed = opdb_table.DOCS.read_text()
    assert all(f"`{name}`" in listed for one in found.values() if one["status"] == "refused"), "a new refusal"


def test_a_wrong_number_is_seen(opdb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cases(opdb, "add", MOST)
    assert {one["status"] for _, one in opdb.outcomes(opdb.OPS["add"], own)} == {"equal"}
    kernel = bind._kernel

    def off(target: Any, args: Any, kwargs: Any) -> Any:
        def one_off(*args: Any, **kwargs: Any) -> Any:
            found = kernel(target, args, kwargs)(*args, **kwargs)
            return found.mul_(1 + 1e-4) if isinstance(found, Tensor) else found

        return one_off

    monkeypatch.setattr(bind, "_kernel", off)
    assert {one["status"] for _, one in opdb.outcomes(opdb.OPS["add"], own)} == {"wrong"}


def test_gaps_are_in_units_of_what_is_allowed(opdb: Any) -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert opdb.gap(one, one) == opdb.gap(nan, nan) == 0
    assert opdb.gap(one * (1 + 2e-5), one) == pytest.approx(2, rel=0.1)
    assert opdb.gap(one.double() * (1 + 2e-12), one.double()) == pytest.approx(2, rel=0.1)
    assert opdb.gap(nan, one) == opdb.gap(one, nan) == opdb.gap(one, one.double()) == float("inf")
    assert opdb.gap(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert opdb.gap(torch.zeros(2), torch.tensor([0.0, float("inf")])) == float("inf")


def test_the_table_counts_and_names_what_is_refused() -> None:
    lines = [
        {"key": "a|float32|0|plain", "status": "equal", "gap": 0.0},
        {"key": "a|float32|1|plain", "status": "refused", "detail": "x.py:3: the program would depend on aten.a"},
        {"key": "b|float64|0|plain", "status": "equal", "gap": 0.5},
        {"key": "c|float64|0|plain", "status": "refused", "detail": "aten.c draws from torch's ambient generator"},
        {"key": "c|float64|1|plain", "status": "crash"},
    ]
    text = opdb_table.tables(lines)
    assert "| float32 | 1 | 2 | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| all | 3 | 5 | 1 | 1 | 2 | 0 | 1 |" in text
    assert "depends on values | (`a`) |" in text
    assert "given no key | `c` |" in text
