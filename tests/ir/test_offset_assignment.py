"""Places in one arena: what lives at one moment lies apart, and the arena is little more than what is alive."""

from __future__ import annotations

import cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.ir.offset_assignment import ALIGN_BYTES, clash, pack
from fzero.ir.records import PERSISTENT

lives = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 1000)).map(lambda x: (x[0], x[0] + x[1], x[2]))


@given(st.lists(lives, max_size=60))
@settings(max_examples=150, deadline=None)
def test_what_lives_at_one_moment_lies_apart(items: list[tuple[int, int, int]]) -> None:
    places, total = pack(items)
    assert clash([(a, b, place, size) for (a, b, size), place in zip(items, places, strict=True)]) is None
    assert all(
        place % ALIGN_BYTES == 0 and place + size <= total
        for (_, _, size), place in zip(items, places, strict=True)
        if size
    )
    padded = [(a, b, -(-size // ALIGN_BYTES) * ALIGN_BYTES) for a, b, size in items]
    least = max((sum(size for a, b, size in padded if a <= t <= b) for t in range(60)), default=0)
    assert least <= total <= sum(size for _, _, size in padded)


def test_a_clash_is_found() -> None:
    assert clash([(0, 2, 0, 64), (2, 3, 32, 64)]) == (0, 1)
    assert clash([(0, 2, 0, 64), (3, 4, 0, 64), (0, 4, 64, 8)]) is None
    assert clash([(0, 2, 0, 0), (0, 2, 0, 64)]) is None


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_the_arena_is_little_more_than_what_is_alive(zero: int, whole: bool) -> None:
    init, loss = cases.gpt(512, 128, 6 if whole else 3)
    spec = cases.fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=zero, clip_norm=1.0)
    program = fzero.lower(spec, init, cases.tokens(4, 64, 512, 0), world_size=4).program
    from fzero.ir.liveness import live_bytes

    held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT)
    batch = sum(b.nbytes for b in program.buffers.values() if b.kind == "batch")
    alive = max(
        level - held + op.workspace
        for level, op in zip(live_bytes(program.ops, program.buffers), program.ops, strict=True)
    )
    assert alive <= program.arena_bytes <= 1.1 * (alive + batch)
