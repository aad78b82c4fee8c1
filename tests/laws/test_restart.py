"""A run that is killed at random instants ends with the bits of the run that nobody disturbed."""

from pathlib import Path

from kills import kill_loop


def test_a_kill_changes_no_bit(tmp_path: Path) -> None:
    """`make acceptance` kills 200 times."""
    counts = kill_loop(tmp_path, kills=1, steps=40, seed=1)
    assert counts["kills"] == 1
    assert counts["runs"] >= 1
    assert counts["late"] == 0, "a survivor did not end when it was told to"
