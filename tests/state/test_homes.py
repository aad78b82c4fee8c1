"""A state on disk is filled some buffers at a time, however many there are."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import gloo, values

import fzero
from fzero.state import homes

LEAVES = 70


def first_state(folder: Path) -> tuple[int, list[torch.Tensor]]:
    """The rounds in which a state of many buckets was filled, and its parameters."""
    homes.ROUND_BYTES = 1  # in a process of its own: each buffer alone
    params = {f"w{n:02}": torch.full((64,), float(n)) for n in range(LEAVES)}
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.sum() for x in p.values()) * b.sum(), optimizer=fzero.optim.adamw(1e-3),
        offload={"**": "nvme"}, nvme_path=str(folder), bucket_bytes=64, zero=3,
    )  # fmt: skip
    state = fzero.init(params, spec)
    runtime = fzero.session.session.session_of(state)
    return len(runtime.memory.on_disk), [state.tree["params"][name].full() for name in params]


def test_more_rounds_than_a_note_to_the_other_ranks_has_room_for(tmp_path: Path) -> None:
    """Each round has a digest; the ranks compare one of them all."""
    for rounds, params in values(gloo(2, first_state, tmp_path)):
        assert rounds >= 3 * LEAVES
        assert [float(x[0]) for x in params] == list(range(LEAVES))
