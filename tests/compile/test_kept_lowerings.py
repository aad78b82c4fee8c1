"""Lowerings on disk: the same again, only of the same step, and never believed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import gloo, values
from kept import captures
from torch import Tensor, fx

import fzero
from fzero import P, optim
from fzero.compile import decide, kept_lowerings, step
from fzero.compile.ahead import lower_again
from fzero.compile.kept_lowerings import SWITCH, Kept
from fzero.ir import op_info
from fzero.ir.op_table import OpInfo
from fzero.ir.program import Level, Program
from fzero.ir.records import Bucket
from fzero.ir.scan_op import SCAN, text_of
from fzero.private_folder import folder as private
from fzero.private_folder import keep_last
from fzero.spec import Spec

PARAMS = {
    "layers": [{"up": torch.empty(8, 16), "down": torch.empty(16, 8), "bias": torch.empty(8)} for _ in range(2)],
    "head": torch.empty(8, 4),
}
SHARD = {"layers/*/up": P(None, "tp"), "layers/*/down": P("tp", None)}
TP, PP = {"mesh": {"dp": 2, "tp": 2}, "shard": SHARD}, {"mesh": {"pp": 2, "dp": 2}, "microbatches": 4}
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "stage 1": {"mesh": {"dp": 4}, "zero": 1},
    "stage 3": {"mesh": {"dp": 4}, "zero": 3, "microbatches": 2, "remat": "full"},
    "two data axes": {"mesh": {"dp_out": 2, "dp": 2}, "zero": 2},
    "tp": TP,
    "sequence": {**TP, "sequence": "tp", "zero": 3},
    "two model axes": {"mesh": {"tp": 2, "mp": 2}, "shard": {**SHARD, "head": P("mp", None)}},
    "pp": PP,
    "3D": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "microbatches": 2, "shard": SHARD, "pipeline": "zb-h1"},
    "offload": {"mesh": {"dp": 2}, "offload": "optimizer"},
    "bf16": {"mesh": {"dp": 2}, "zero": 3, "precision": "bf16", "clip_norm": 1.0},
    "scaled": {"mesh": {"dp": 2}, "precision": "fp16", "zero": 2},
    "budget": {"mesh": {"dp": 2}, "zero": 3, "device_bytes": 1 << 20},
    "codec": {"mesh": {"dp": 2}, "precision": fzero.Precision(reduce="int8")},
}


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return (x @ p["head"]).square().mean()


SPEC = Spec(loss=loss, optimizer=optim.adamw(1e-3))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(op_info, "_foreign", set())  # those of other tests
    return tmp_path / "lowerings"


def lowered(kept: Kept, **options: Any) -> fzero.Lowered:
    with captures():
        return traced(kept, **options)


def traced(kept: Kept, rows: int = 8, **options: Any) -> fzero.Lowered:
    spec = dataclasses.replace(SPEC, **options) if options else SPEC
    return lower_again(spec, PARAMS, torch.empty(rows, 4, 8), captures=None, kept=kept)


def again(**options: Any) -> tuple[fzero.Lowered, fzero.Lowered, Kept]:
    """(the first lowering, the second, what the second read), each of a step that was captured anew."""
    read = Kept()
    return traced(Kept(), **options), traced(read, **options), read


def all_of(one: fzero.Lowered) -> list[Any]:
    """All that a lowering says of itself, but for the strategies that were not taken."""
    memory = {role: str(account) for role, account in one.memories.items()}
    return [str(one), one.programs, one.decisions, one.choices, one.records, str(one.sharding), memory, one.schedule]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.sampled(4)
def test_what_was_kept_is_what_lowering_makes(options: dict[str, Any]) -> None:
    first, second, kept = again(**options)
    axes = sum(name not in ("pp", "dp", "dp_out") for name in options.get("mesh", {}))
    assert len(kept.read) == 1 + axes
    assert all_of(first) == all_of(second)


def other(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return (x @ p["head"]).square().sum()


OTHERS: dict[str, dict[str, Any]] = {
    "loss": {"loss": other},
    "rate": {"optimizer": optim.adamw(2e-3)},
    "stage": {"zero": 1},
    "rows": {"rows": 16},
    "prefetch": {"prefetch": 0},
    "clipping": {"clip_norm": 1.0},
    "remat": {"remat": "full"},
    "buckets": {"bucket_bytes": 512},
    "reduce": {"reduce": "each"},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.sampled(4)
def test_nothing_is_read_of_another_step(options: dict[str, Any]) -> None:
    base = {"mesh": {"dp": 2}, "microbatches": 2}
    lowered(Kept(), **base)
    kept = Kept()
    found = lowered(kept, **base, **options)
    assert not kept.read
    assert str(found) == str(lowered(Kept(""), **base, **options))


def test_other_threads_and_settings_make_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for change in (lambda: None, lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 7)):
        change()
        kept = Kept()
        lowered(kept)
        keys |= {*os.listdir(kept_lowerings.folder())}
        assert not kept.read
    torch.use_deterministic_algorithms(True)
    try:
        kept = Kept()
        lowered(kept)
        assert not kept.read
        assert len({*os.listdir(kept_lowerings.folder())} - keys) == 1
    finally:
        torch.use_deterministic_algorithms(False)


# --- files that are wrong


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes what a file holds, and its digest, as who wants it to be believed."""
    data = change(file.read_bytes()[kept_lowerings.DIGEST :])
    kept_lowerings._write(file.name.removesuffix(".lowering"), data)


def without_an_op(data: bytes) -> bytes:
    """The program without its last op."""
    content = json.loads(data)
    number = next(i for i, name in enumerate(content["classes"]) if name == ["fzero.ir.program", "Program"])
    (program,) = (record for record in content["records"] if record[0] == number)
    ops = next(field for field in program if isinstance(field, list) and len(field) > 3 and isinstance(field[0], dict))
    del ops[-1]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "change", [without_an_op, lambda data: b"{}", lambda data: data[:-9]], ids=["op", "empty", "cut"]
)
def test_a_file_that_is_wrong_costs_a_lowering(
    change: Callable[[bytes], bytes], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = lowered(Kept(), mesh={"dp": 2}, zero=1)
    (file,) = cache.glob("*.lowering")
    rewrite(file, change)
    with caplog.at_level(logging.DEBUG, "fzero"):
        found = lowered(Kept(), mesh={"dp": 2}, zero=1)
    assert all_of(found) == all_of(first)
    assert "of no use" in caplog.text or "is not read" in caplog.text
    assert not list((cache.parent / "faults").glob("*"))  # no fault of fzero is reported


def test_a_program_of_another_step_under_this_key_is_refused(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lowered(Kept(), mesh={"dp": 2})
    (file,) = cache.glob("*.lowering")
    lowered(Kept(), mesh={"dp": 2}, optimizer=optim.adamw(2e-3))
    (later,) = set(cache.glob("*.lowering")) - {file}
    file.write_bytes(later.read_bytes())
    found = lowered(Kept(), mesh={"dp": 2})
    assert "another meaning than the step" in caplog.text
    assert str(found) == str(lowered(Kept(""), mesh={"dp": 2}))
    assert not file.exists()


def test_a_rank_s_graph_that_computes_something_else_is_refused(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    lowered(Kept(), **TP)
    changed = 0
    for file in cache.glob("*.lowering"):
        if b"aten.tanh.default" in file.read_bytes() and b'"claim"' in file.read_bytes():
            rewrite(file, lambda data: data.replace(b"aten.tanh.default", b"aten.sigmoid.default"))
            changed += 1
    assert changed == 1
    found = lowered(Kept(), **TP)
    assert "of no use" in caplog.text
    assert str(found) == str(lowered(Kept(""), **TP))


def test_bytes_that_are_not_those_written_are_not_read(cache: Path) -> None:
    lowered(Kept())
    (file,) = cache.glob("*.lowering")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    kept = Kept()
    lowered(kept)
    assert not kept.read


# --- what is not kept


def test_the_switch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    lowered(Kept())
    assert not cache.exists()


def test_ops_and_facts_of_others_are_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("keptlib", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    def twice(p: Any, x: Tensor) -> Tensor:
        return loss(p, torch.ops.keptlib.twice(x))

    lowered(Kept(), loss=twice)
    assert not cache.exists()
    monkeypatch.setattr(op_info, "_rows", dict(op_info._rows))
    op_info.add("keptlib.twice", OpInfo(exact=True))
    lowered(Kept())
    assert op_info.has_foreign_rows()
    assert not cache.exists()


def test_functions_of_the_user_that_decide_are_not_kept(cache: Path) -> None:
    always = dataclasses.replace(decide.DECIDERS, reduce=lambda graph, plan: decide.DECIDERS.reduce(graph, plan))
    lower_again(SPEC, PARAMS, torch.empty(8, 4, 8), captures=None, kept=Kept(), decisions=always)
    assert not cache.exists()


def test_a_folder_that_others_may_write_to_is_left_alone(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    (cache / "theirs").touch()
    first, second, kept = again()
    assert not kept.read
    assert str(first) == str(second)
    assert os.listdir(cache) == ["theirs"]


def test_the_oldest_files_go(tmp_path: Path) -> None:
    with private(tmp_path / "place", make=True) as place:
        for number in range(6):
            (tmp_path / "place" / f"{number}.lowering").write_bytes(b"x" * 100)
            os.utime(tmp_path / "place" / f"{number}.lowering", (number, number))
        (tmp_path / "place" / "other").touch()
        keep_last(place, ".lowering", nbytes=250)
        assert sorted(os.listdir(place)) == ["4.lowering", "5.lowering", "other"]
        keep_last(place, ".lowering", files=1)
        assert sorted(os.listdir(place)) == ["5.lowering", "other"]


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """A file that is not yet whole has the name of the file that it was to be, and counts for no limit."""
    with private(tmp_path / "place", make=True) as place:
        for name in (".0.lowering.beef", ".1.lowering.beef", ".0.json.beef"):
            (tmp_path / "place" / name).touch()
        os.utime(tmp_path / "place" / ".0.lowering.beef", (0, 0))
        os.utime(tmp_path / "place" / ".0.json.beef", (0, 0))
        keep_last(place, ".lowering", files=1)
        assert sorted(os.listdir(place)) == [".0.json.beef", ".1.lowering.beef"]


def test_a_rule_of_the_user_s_is_a_fact_of_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fzero.shard.rule` is fzero's module, and who calls it is not."""
    monkeypatch.setattr(op_info, "_rows", dict(op_info._rows))
    fzero.shard.rule(torch.ops.aten._cdist_forward.default, "x1:id x2:jd -> ij")
    lowered(Kept())
    assert not cache.exists()


def test_ops_of_others_within_a_scan_are_not_kept(cache: Path) -> None:
    library = torch.library.Library("keptscan", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.keptscan.twice.default, (x,)),))
    outer = fx.Graph()
    node = outer.call_function(SCAN, ([], [], [], text_of(fx.GraphModule({}, graph)), 2, False))
    assert kept_lowerings._namespaces([node]) == {"fzero", "keptscan"}


def test_nothing_is_kept_by_code_that_was_edited_since_it_was_imported(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the code of before has made lies under the key of the code that is there now."""
    (name, size, _), *others = kept_lowerings._files()
    edited = ((name, size, time.time_ns()), *others)
    monkeypatch.setattr(kept_lowerings, "_files", lambda: edited)
    lowered(Kept())
    assert not cache.exists()


def images(p: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x, p["w"], padding=1).square().mean()


def test_libraries_that_are_switched_off_make_another_key() -> None:
    """The bytes that a convolution takes are those of the kernel that runs."""

    def found(kept: Kept) -> fzero.Lowered:
        spec = dataclasses.replace(SPEC, loss=images)
        params = {"w": torch.empty(16, 8, 3, 3)}
        return lower_again(spec, params, torch.empty(4, 8, 16, 16), captures=None, kept=kept)

    first = found(Kept())
    with torch.backends.mkldnn.flags(enabled=False):
        kept = Kept()
        assert str(found(kept)) == str(found(Kept(""))) != str(first)
        assert not kept.read


# --- programs that are right by themselves, and not this step's


def with_slots_exchanged(program: Program) -> Program:
    """Two leaves of one size, each in the other's place."""

    def exchanged(bucket: Bucket) -> Bucket:
        slots = [*bucket.slots]
        a, b = (i for i, slot in enumerate(slots) if slot.path.rpartition("/")[2] in ("up", "down"))
        places = [(slots[i].start, slots[i].stop) for i in (b, a)]
        for i, (start, stop) in zip((a, b), places, strict=True):
            slots[i] = dataclasses.replace(slots[i], start=start, stop=stop)
        return dataclasses.replace(bucket, slots=tuple(sorted(slots, key=lambda slot: slot.start)))

    return dataclasses.replace(
        program, buckets={n: exchanged(b) if len(b.slots) == 3 else b for n, b in program.buckets.items()}
    )


def with_a_segment_renamed(program: Program) -> Program:
    (key, gm), *others = program.segments.items()
    ops = [
        dataclasses.replace(op, attrs=tuple((n, "0" * 12 if v == key else v) for n, v in op.attrs))
        for op in program.ops
    ]
    return dataclasses.replace(program, ops=tuple(ops), segments=dict([("0" * 12, gm), *others]))


CHANGES: dict[str, Callable[[Program], Program]] = {
    "plan of buckets": with_slots_exchanged,
    "level": lambda program: dataclasses.replace(program, level=Level.SIZED),
    "plan of its state": lambda program: dataclasses.replace(
        program,
        buffers={
            n: dataclasses.replace(b, per_rank=True) if b.kind == "optimizer" else b for n, b in program.buffers.items()
        },
    ),
    "segment": with_a_segment_renamed,
}


@pytest.mark.parametrize(("what", "change"), CHANGES.items(), ids=CHANGES)
def test_a_program_of_another_plan_is_refused(
    what: str, change: Callable[[Program], Program], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its meaning is that of the step; what it runs on is not what the state is."""
    first = lowered(Kept(), mesh={"dp": 2}, zero=1)
    (file,) = cache.glob("*.lowering")

    def changed(data: bytes) -> bytes:
        roles = kept_lowerings.unpack(data, torch._subclasses.FakeTensorMode())
        return kept_lowerings.pack({n: dataclasses.replace(x, program=change(x.program)) for n, x in roles.items()})

    rewrite(file, changed)
    assert all_of(lowered(Kept(), mesh={"dp": 2}, zero=1)) == all_of(first)
    assert f"has another {what}" in caplog.text


def test_an_error_over_what_was_read_is_none_of_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = lowered(Kept())

    def check(*given: Any) -> None:
        raise fzero.SpecError("does not fit")

    monkeypatch.setattr(step, "check_kept", check)
    assert all_of(lowered(Kept())) == all_of(first)
    assert "of no use, and it is made anew (does not fit)" in caplog.text


def test_an_error_of_the_step_is_raised_and_what_was_kept_stays(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with pytest.raises(fzero.SpecError, match="device_bytes"):
            lowered(Kept(), **TP, device_bytes=100)
    assert len([*cache.glob("*.lowering")]) == 1
    assert "of no use" not in caplog.text


def test_all_that_was_read_goes_where_another_rank_removed_some(cache: Path) -> None:
    _, _, kept = again(**TP)
    (cache / f"{kept.read[0]}.lowering").unlink()
    kept.forget()
    assert not list(cache.glob("*.lowering"))


def test_what_is_read_is_among_the_last_to_go(cache: Path) -> None:
    lowered(Kept())
    (file,) = cache.glob("*.lowering")
    os.utime(file, (0, 0))
    lowered(Kept())
    assert time.time() - file.stat().st_mtime < 3600


def test_one_process_of_a_machine_writes(cache: Path) -> None:
    lowered(Kept(writes=False))
    assert not cache.exists()
    lowered(Kept(writes=True))
    kept = Kept(writes=False)
    lowered(kept)
    assert kept.read


# --- turns


def test_of_several_one_lowers_and_the_others_wait() -> None:
    made: list[int] = []
    place = dataclasses.replace(Kept(turns=True), mode=torch._subclasses.FakeTensorMode())

    def make() -> tuple[int, ...]:
        time.sleep(0.2)
        made.append(1)
        return (7,)

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(place.of(make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(7,)] * 4
    assert len(made) == 1


def trained(cache: str) -> tuple[list[bytes], int]:
    """The bytes of the leaves after three steps, and how many files were read."""
    os.environ.update({"FZERO_CACHE": cache, SWITCH: "1"})  # new processes have what the first of the tests had
    torch.manual_seed(0)
    params = {"layers": [{n: torch.randn(x.shape) for n, x in one.items()} for one in PARAMS["layers"]],
              "head": torch.randn(8, 4)}  # fmt: skip
    with mock.patch.object(kept_lowerings, "unpack", wraps=kept_lowerings.unpack) as unpacked:
        state = fzero.init(params, dataclasses.replace(SPEC, mesh={"dp": 1, "tp": 2}, shard=SHARD))
        for _ in range(3):
            state = fzero.step(state, torch.randn(8, 4, 8))
    return [x.numpy().tobytes() for x in fzero.tree.flatten(fzero.unshard(state.params))[1]], unpacked.call_count


def test_a_second_run_has_the_same_bits(tmp_path: Path) -> None:
    before, _ = zip(*values(gloo(2, trained, str(tmp_path))), strict=True)
    after, read = zip(*values(gloo(2, trained, str(tmp_path))), strict=True)
    assert before == after
    assert min(read) >= 1
