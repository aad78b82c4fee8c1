"""The long counts: SIGKILL at every file operation of a save, and a hundred thousand damaged files."""

import pytest
from fuzzed import read_damaged
from killed import ask, every_kill
from workers.saves import saved_by_two

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_kill_at_every_operation(world):
    assert ask(world, *every_kill(world)) == []


@pytest.mark.parametrize(("kind", "count"), [("manifest", 50_000), ("header", 40_000), ("marker", 12_000)])
def test_damaged_files(kind, count, tmp_path):
    """102,000 in all: no end but the typed error, no path outside the directory, little memory."""
    ends = read_damaged(saved_by_two(tmp_path), tmp_path, kind, count, seed=1)
    assert ends["refused"] > 0.9 * count
