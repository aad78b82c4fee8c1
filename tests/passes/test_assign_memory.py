"""assign_memory: what is alive at one moment lies apart; what is not shares memory; pages where a disk reads."""

from __future__ import annotations

from itertools import combinations

from short_programs import written

from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.program import Level, Program
from fzero.passes.assign_memory import assign_memory
from fzero.passes.free import free

TEXT = """
    buffer p f32[100] param
    buffer x f32[8] batch
    buffer k f32[50] optimizer space=disk at=4096
    buffer a f32[100] activation
    buffer b f32[100] activation
    buffer c f32[100] activation
    buffer d f32[100] activation
    buffer up f32[50] staging
    buffer kept f32[100] activation space=host
    buffer more f32[100] activation space=host
    run x -> a
    run a -> b  workspace=700
    run b -> c
    move k -> up
    wait up
    run c up -> d
    move d -> kept
    wait kept
    run kept -> more  workspace=900
    run x -> d
"""


def placed(text: str = TEXT) -> Program:
    return assign_memory(free(written(text)))


def test_what_lives_at_one_moment_lies_apart_and_a_workspace_beside_it() -> None:
    done = placed()
    at = {name: b.at for name, b in done.buffers.items()}
    second, host = (op for op in done.ops if op.workspace)
    blocks = {name: (at[name] or 0, (at[name] or 0) + done.buffers[name].nbytes) for name in "xabcd"}
    blocks["up"] = at["up"], at["up"] + 200
    blocks["work"] = second.offset, second.offset + 700
    for one, other in [*combinations("abx", 2), ("a", "work"), ("b", "work"), ("b", "c"), ("c", "d"), ("c", "up")]:
        (low, high), (start, stop) = blocks[one], blocks[other]
        assert high <= start or stop <= low, (one, other)
    assert 0 <= done.arena_bytes - max(stop for _, stop in blocks.values()) < 64
    assert at["kept"] is not None
    assert host.offset is not None
    assert {at["kept"] % PAGE_BYTES, at["more"] % PAGE_BYTES, host.offset % PAGE_BYTES} == {0}
    assert len({at["kept"], at["more"], host.offset}) == 3
    assert done.level == Level.PLACED


def test_what_is_dead_leaves_its_place() -> None:
    """The most at once are two values and a workspace beside the batch."""
    alone = TEXT.replace("move k -> up\n    wait up\n", "").replace("run c up -> d", "run c -> d")
    assert placed(alone).arena_bytes == 2 * 448 + 704 + 64


def test_what_is_held_keeps_its_place() -> None:
    done = placed()
    assert (done.buffers["p"].at, done.buffers["k"].at) == (None, 4096)


def test_what_a_disk_reads_or_writes_lies_at_a_page_and_no_other() -> None:
    text = TEXT.replace("buffer up", "buffer early f32[3] activation\n buffer up").replace(
        "run b -> c", "run b -> c early"
    ).replace("run c up -> d", "run c up early -> d")  # fmt: skip
    done = placed(text)
    assert (done.buffers["up"].at or 0) % PAGE_BYTES == 0
    assert (done.buffers["c"].at or 0) % PAGE_BYTES != 0 or (done.buffers["early"].at or 0) % PAGE_BYTES != 0
