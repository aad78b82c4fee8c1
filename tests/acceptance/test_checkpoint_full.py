"""The long counts: SIGKILL at every file operation of a save, and a hundred thousand damaged files."""

import pytest
from fuzzed import read_damaged
from workers.saves import kills, saved_by_two

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(("world", "least"), [(1, 130), (2, 300), (4, 380)])
def test_a_kill_at_every_operation(world, least):
    """Before and after each, in the middle of a write; one rank, and all of them."""
    ((count, wrong),) = kills(f"{world}:0")
    assert wrong == []
    assert count >= least


@pytest.mark.parametrize(("kind", "count"), [("manifest", 50_000), ("header", 40_000), ("marker", 12_000)])
def test_damaged_files(kind, count, tmp_path):
    """102,000 in all: no end but the typed error, no path outside the directory, little memory."""
    ends = read_damaged(saved_by_two(tmp_path), tmp_path, kind, count, seed=1)
    assert ends["refused"] > 0.9 * count
