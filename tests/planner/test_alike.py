"""alike: candidates as numbers, against the same said of one candidate at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from fzero.pipeline import Pipeline
from fzero.planner.alike import Alike
from fzero.planner.candidates import ALL, Candidate, FixedRules
from fzero.planner.planned import Row

MESHES = ((("dp", 8),), (("dp", 4), ("tp", 2)), (("pp", 2), ("dp", 4)), (("dp_out", 2), ("dp", 4)))
FIELDS: list[Sequence[Any]] = [
    MESHES, (0, 1, 3, "hpz", FixedRules({"**": 1})), (1, 2, 4), ("none", "full", FixedRules({"a": "full"})),
    (None, "optimizer", ALL), (None, "zb-h1", Pipeline("interleaved", 4)), (None, "each", "end"), (None, "tp"),
]  # fmt: skip


def drawn(draw: random.Random, count: int) -> list[Candidate]:
    return list({Candidate(*(draw.choice(values) for values in FIELDS)): None for _ in range(count)})


def differs(one: Candidate, other: Candidate) -> int:
    return sum(a != b for a, b in zip(one.values, other.values, strict=True))


def corrected(said: dict[Candidate, tuple[float, int]], rows: Sequence[Row], one: Candidate) -> tuple[float, float]:
    """By the mean of the rows that are nearest."""
    known = [row for row in rows if not row.refused and row.candidate in said]
    nearest = min((differs(row.candidate, one) for row in known), default=0)
    alike = [row for row in known if differs(row.candidate, one) == nearest]
    slower = [row.seconds / said[row.candidate][0] for row in alike] or [1.0]
    larger = [row.peak / max(said[row.candidate][1], 1) for row in alike] or [1.0]
    seconds, nbytes = said[one]
    return seconds * (sum(slower) / len(slower)), nbytes * (sum(larger) / len(larger))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_corrected(seed: int) -> None:
    draw = random.Random(seed)
    said = {one: (draw.uniform(0.1, 9.0), draw.randrange(10**11)) for one in drawn(draw, 200)}
    alike, rows = Alike(said), list[Row]()
    others = drawn(draw, 20)
    for _ in range(6):
        got = alike.corrected(rows).tolist()
        assert [tuple(x) for x in got] == [pytest.approx(corrected(said, rows, one), rel=1e-12) for one in said]
        of = draw.choice([*said, *others])
        refused = "no" * (draw.random() < 0.2)
        rows.append(Row(of, draw.uniform(0.1, 9.0), draw.randrange(10**11), refused=refused))
    rows[0] = Row(draw.choice([*said]), 3.0, 10**10)  # a row was found anew
    assert alike.corrected(rows)[7].tolist() == pytest.approx(corrected(said, rows, list(said)[7]), rel=1e-12)


def test_in_how_many_fields_candidates_differ() -> None:
    draw = random.Random(0)
    every = drawn(draw, 300)
    alike = Alike(dict.fromkeys(every, (1.0, 1)))
    for one in [*every[:20], *drawn(draw, 20)]:
        assert alike.differs(one).tolist() == [differs(one, other) for other in every]


def test_a_candidate_is_a_key() -> None:
    one = drawn(random.Random(0), 1)[0]
    again = Candidate(*one.values)
    assert one == again
    assert hash(one) == hash(again)
    assert {one: 1}[again] == 1
