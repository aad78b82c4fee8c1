"""The mutation harness at its full count: what `fzero mutate` prints, asserted."""

import pytest

from fzero.mutate import KINDS, run

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def test_a_thousand_mutants_are_caught_and_no_program_is_refused() -> None:
    report = run(count=1000, seed=0, each=50, unbroken=240)
    print(report)
    assert report.missed == []
    assert report.refused == []
    assert report.unbroken >= 200
    assert sum(report.changing.values()) >= 1000
    assert [kind for kind in KINDS if report.changing[kind] < 50] == []
    assert len(KINDS) >= 12
