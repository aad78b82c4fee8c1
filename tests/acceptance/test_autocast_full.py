"""50 steps of six models under autocast: as far from fp32 as torch.autocast's own, on one rank and on two."""

from __future__ import annotations

import pytest
from autocast_models import MODELS

from tests.api.test_autocast import gaps


@pytest.mark.acceptance
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_50_steps_are_within_twice_torchs_distance(name: str, world: int) -> None:
    theirs, ours = gaps(name, 50, world)
    print(f"{name} on {world}: torch.autocast {theirs:.2e}, fzero {ours:.2e}")
    assert 0 < ours <= 2 * theirs
