"""The text form round-trips, and says where it is not understood."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.ir.liveness import live_bytes
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, StepPhase, make_op
from fzero.ir.program import Level, Program
from fzero.ir.records import ALIGN, DTYPES, Bucket, Buffer, Ref, Slot, SlotKey
from fzero.passes import Options, optimise

specs = st.fixed_dictionaries(
    {
        "zero": st.sampled_from([0, 1, 2, 3, {"layers/**": 3, "**": 2}]),
        "microbatches": st.integers(1, 3),
        "reduce": st.sampled_from([None, "each", "end"]),
        "clip_norm": st.sampled_from([None, 1.0]),
        "prefetch": st.integers(0, 3),
        "overlap": st.booleans(),
        "bucket_bytes": st.sampled_from([256, 1 << 14, 1 << 25]),
    }
)


@pytest.mark.sampled(1)
def test_parse_of_the_text_is_the_program_and_verifies(whole: bool) -> None:
    @settings(max_examples=8 if whole else 5, deadline=None)
    @given(specs, st.integers(1, 5))
    def reads_back(options: dict[str, Any], world: int) -> None:
        program = cases.lowered(world, **options).program
        again = fzero.parse(str(program), program.segments)
        assert again == program
        assert str(again) == str(program)
        assert again.digest == program.digest
        fzero.verify(again)

    reads_back()


def test_the_naive_program_round_trips_too() -> None:
    program = cases.naive(microbatches=2, clip_norm=1.0)
    assert fzero.parse(str(program)) == program


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
names = st.from_regex(r"[a-z][\w./:~@-]{0,8}", fullmatch=True)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Records of every form, not meant to run."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    slots = (Slot(draw(words), 0, 6, (2, 3)), Slot(draw(words), ALIGN, ALIGN + 1, ()))
    flags = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(["produced", "end"]))
    bucket = Bucket(draw(names), 2 * ALIGN, slots, "dp", *flags)
    note = draw(st.from_regex(r"[a-z]( ?[a-z(|#]){0,9}", fullmatch=True))
    buffer = Buffer(draw(names), draw(st.sampled_from(list(DTYPES.values()))), shape, "scratch", None, None, None, note)
    refs = [Ref(buffer.name), Ref(buffer.name, 0, 6, (2, 3)), Ref(buffer.name, 1, 2, ()), Ref(buffer.name, 0, 9)]
    refs.append(Ref(buffer.name, 0, 9, None, True))
    attrs = draw(st.dictionaries(st.sampled_from(["mode", "flat", "peer"]), st.integers(-9, 9) | st.just("all")))
    why = draw(st.just("") | words.map(str.split).map(" ".join))
    reads = tuple(draw(st.lists(st.sampled_from(refs))))
    axis = draw(st.none() | st.just("dp"))
    op = Op(draw(st.sampled_from(["run", "wait"])), reads, (refs[1],), axis, tuple(sorted(attrs.items())), why)
    return Program(Mesh((("dp", 2),)), {bucket.name: bucket}, {buffer.name: buffer}, (op,), {draw(words): buffer.name})


@pytest.mark.sampled(1)
def test_any_records_round_trip(whole: bool) -> None:
    @settings(max_examples=150 if whole else 50, deadline=None)
    @given(programs())
    def reads_back(program: Program) -> None:
        assert fzero.parse(str(program)) == program

    reads_back()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("   0 run a[1:2:3:4] -> b", "reference"),
        ("buffer x f31[2] grad", "f31"),
        ("bucket b length=x axis=dp updates=whole gathered=kept reduced=end", "invalid literal"),
        ("banana 3", "banana"),
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str, what: str) -> None:
    text = f"fzero program 3\nmesh dp=2\n{line}\n"
    with pytest.raises(ValueError, match="line 3 of the program is not understood") as error:
        fzero.parse(text)
    assert what in str(error.value)


def test_an_edited_program_runs_if_it_verifies_and_is_refused_if_not() -> None:
    """A gather moved one op later by hand is accepted; its wait dropped is refused."""
    program = cases.lowered(zero=3, prefetch=1).program
    lines = str(program).splitlines()
    at = next(i for i, line in enumerate(lines) if " all_gather params:layers.1" in line)
    later = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
    fzero.verify(fzero.parse("\n".join(later), program.segments))
    wait = next(i for i, line in enumerate(lines) if " wait params:layers.1.full" in line)
    with pytest.raises(fzero.VerifyError, match="before the transfer into"):
        fzero.verify(fzero.parse("\n".join([*lines[:wait], *lines[wait + 1 :]]), program.segments))


def test_live_bytes_end_with_the_state_the_batch_and_the_metrics() -> None:
    program = cases.lowered(clip_norm=1.0).program
    kept = [b for b in program.buffers.values() if b.kind in ("param", "optimizer", "state", "batch", "metric")]
    assert live_bytes(program.ops, program.buffers)[-1] == sum(b.nbytes for b in kept)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_own_slices_partition_a_range(world: int, parts: int, data: st.DataObject) -> None:
    length = world * parts * ALIGN
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    bucket = Bucket("b", length, (), "dp")
    whole = Buffer("w", torch.float32, (length,), "gathered", "b")
    shard = Buffer("s", torch.float32, (length // world,), "param", "b", "dp")
    program = Program(Mesh((("dp", world),)), {"b": bucket}, {"w": whole, "s": shard}, (), {})
    covered = []
    for rank in range(world):
        low, high = program.local_range(Ref("w", start, stop, None, True), rank)
        covered += range(low, high)
        own = program.local_range(Ref("s", start, stop, None, True), rank)
        assert own[1] - own[0] == high - low
        assert high == low or own[0] + rank * length // world == low
    assert covered == list(range(start, stop))


def test_optimise_notes_its_passes() -> None:
    program, _ = optimise(cases.naive(), Options())
    passes = [name for name, _, _ in fzero.passes.PASSES]
    moving = {"to_spaces", "tile_updates", "place_moves", "schedule_updates"}  # nothing lies elsewhere here
    assert program.passes == ("lower", *(p for p in passes if p not in moving and not p.startswith("offload_")))


def test_a_line_break_in_a_key_stays_in_its_line() -> None:
    """The reasons of updates name leaves: `update \\n .. w` was two lines, and the program could not be read back."""
    spec = fzero.Spec(loss=lambda p, b: p["\n"].sum() * p["w"].sum() * b.mean(), optimizer=fzero.optim.sgd(0.1))
    program = fzero.lower(spec, {"\n": torch.ones(3), "w": torch.ones(2)}, torch.ones(4), world_size=2).program
    text = str(program)
    assert str(fzero.parse(text, program.segments)) == text


def test_paths_of_any_characters_round_trip() -> None:
    """An empty path, and characters at which `str.splitlines` would cut a comment."""
    path = "a\u2028b\x0bc | d  # e"
    bucket = Bucket("b", ALIGN, (Slot("", 0, 1, (1,)), Slot("%", 1, 2, (1,)), Slot(path, 2, 3, ())), "dp")
    whole = Buffer("w", torch.float32, (ALIGN,), "scratch", "b")
    ops = (Op("free", (Ref("w"),), why=f"last use of {path}"),)
    program = Program(Mesh((("dp", 1),)), {"b": bucket}, {"w": whole}, ops, {"": "w"})
    again = fzero.parse(str(program))
    assert again == program
    assert again.digest == program.digest


@pytest.mark.parametrize("word", ["shard", "tier=host"])
def test_a_word_that_a_buffer_has_not_is_refused(word: str) -> None:
    text = f"fzero program 3\nmesh dp=2\nbuffer w f32[64] param bucket=b {word}\n"
    with pytest.raises(ValueError, match="line 3 of the program is not understood"):
        fzero.parse(text)


def test_a_text_that_ends_before_its_ops_is_refused() -> None:
    """The complaint: it was a program without work."""
    text = str(cases.naive())
    lines = text[: text.index("\nops\n") + 1].splitlines(keepends=True)
    for n in range(2, len(lines) + 1):
        with pytest.raises(ValueError, match="the text is no whole program: it has no `ops` line"):
            fzero.parse("".join(lines[:n]))


def test_a_text_of_another_version_says_so() -> None:
    text = str(cases.naive())
    with pytest.raises(ValueError, match="a text of version 1; this fzero reads 'fzero program 3'"):
        fzero.parse(text.replace("fzero program 3", "fzero program 1"))


def test_facts_that_are_fields_round_trip() -> None:
    """A bucket's layer, a buffer's entry, axis and what is lent, an op's phase, a program's level and slots."""
    odd = "blocks.0 = 1"
    buckets = {
        "a~2": Bucket("a~2", ALIGN, (Slot("x", 0, 1, ()),), "dp", layer=odd, numbered=True),
        "b": Bucket("b", ALIGN, (), "dp", layer="a"), "numbered": Bucket("numbered", ALIGN, (), "dp"),
    }  # fmt: skip
    buffers = {
        "w": Buffer("w", torch.float32, (ALIGN,), "param", "a~2", entry=odd, note="a note"),
        "here": Buffer("here", torch.int64, (), "rank", axis="tp"),
        "copy": Buffer("copy", torch.float32, (), "activation", lent="w"),
    }
    op = make_op("run", [Ref("w")], [Ref("copy")], phase=StepPhase.OUTER)
    mesh, keys = Mesh((("dp", 1), ("tp", 2))), (SlotKey("a~2", 10), SlotKey("x:y", 2))
    program = Program(mesh, buckets, buffers, (op,), {}, trainable=keys, level=Level.SIZED)
    again = fzero.parse(str(program))
    assert again == program
    assert again.level >= Level.FREED
    assert again.ops[0].phase is StepPhase.OUTER
    assert str(again) == str(program)


def test_a_phase_or_a_level_that_there_is_not_is_refused() -> None:
    for line in ("   0 run a -> b  phase=sideways", "level final", "trainable a:b"):
        with pytest.raises(ValueError, match="line 3 of the program is not understood"):
            fzero.parse(f"fzero program 3\nmesh dp=2\n{line}\n")


def test_each_fact_of_a_lowered_program_is_in_its_field() -> None:
    """What later modules read: made by the plan, by lowering and by the passes, and kept by those in between."""
    naive, program = cases.naive(zero=3), cases.lowered(zero=3).program
    assert (naive.level, program.level) == (Level.NAIVE, Level.PLACED)
    assert {name: b.numbered for name, b in program.buckets.items()} == {
        "small": False, "layers.0": True, "layers.1": True
    }  # fmt: skip
    columns = [b for b in program.buffers.values() if b.kind in ("param", "gathered")]
    assert {b.entry for b in columns} == {"params"}
    assert {b.entry for b in program.buffers.values() if b.kind == "optimizer"} == {"opt_state/momentum"}
    assert {str(key) for key in program.trainable} == {f"{b.name}:{i}" for b in program.buckets.values()
                                                       for i in range(len(b.slots))}  # fmt: skip
