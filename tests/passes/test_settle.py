"""settle: where ranks read one another's memory, a source is settled before it is written, and at the step's end."""

from __future__ import annotations

from short_programs import lines, shown, written

from fzero.passes.settle import settle

TEXT = """
    bucket b length=64 w[0:64:64]
    buffer p f32[32] param bucket=b sharded=dp at=0
    buffer f f32[64] gathered bucket=b at=256
    buffer q f32[32] param bucket=b sharded=dp at=1024
    buffer g f32[64] gathered bucket=b at=2048
    buffer h f32[8] activation at=3072
    all_gather p -> f  axis=dp
    run h -> h
    wait f
    run f -> h
    all_gather q -> g  axis=dp
    wait g
    run g -> h  # third
    run h -> p  # writes p
    run h -> h
    all_gather q -> g  axis=dp  # once more
    wait g
"""


def test_a_source_is_settled_before_what_writes_there_and_a_target_before_it_is_used_again() -> None:
    done = settle(written(TEXT, transport="shared"))
    assert shown(done.ops) == lines(
        """
        all_gather p -> f  axis=dp
        run h -> h
        wait f
        run f -> h
        all_gather q -> g  axis=dp
        wait g
        run g -> h
        settle f
        run h -> p
        run h -> h
        settle g
        all_gather q -> g  axis=dp
        wait g
        settle g
        """
    )
    whys = [op.why for op in done.ops if op.is_settle]
    assert whys == ["before run writes p", "before all_gather once more", "the end of the step"]


def test_with_messages_nothing_is_to_be_settled() -> None:
    for transport in ("p2p", "nccl"):
        assert shown(settle(written(TEXT, transport=transport)).ops) == shown(written(TEXT).ops)
