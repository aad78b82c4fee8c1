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
from torch import Tensor

import fzero
from fzero import P, optim
from fzero.compile import decide, kept_lowerings
from fzero.compile.ahead import lower_again
from fzero.compile.kept_lowerings import SWITCH, Kept
from fzero.ir import op_info
from fzero.ir.op_table import OpInfo
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


def lowered(kept: Kept, rows: int = 8, **options: Any) -> fzero.Lowered:
    spec = dataclasses.replace(SPEC, **options) if options else SPEC
    return lower_again(spec, PARAMS, torch.empty(rows, 4, 8), captures=None, kept=kept)


def again(**options: Any) -> tuple[fzero.Lowered, fzero.Lowered, Kept]:
    """(the first lowering, the second, what the second read)."""
    read = Kept()
    return lowered(Kept(), **options), lowered(read, **options), read


def all_of(one: fzero.Lowered) -> list[Any]:
    """All that a lowering says of itself, but for the strategies that were not taken."""
    memory = {role: str(account) for role, account in one.memories.items()}
    return [str(one), one.programs, one.decisions, one.choices, one.records, str(one.sharding), memory, one.schedule]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
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


def trained() -> tuple[list[bytes], int]:
    """The bytes of the leaves after three steps, and how many files were read."""
    torch.manual_seed(0)
    params = {"layers": [{n: torch.randn(x.shape) for n, x in one.items()} for one in PARAMS["layers"]],
              "head": torch.randn(8, 4)}  # fmt: skip
    with mock.patch.object(kept_lowerings, "unpack", wraps=kept_lowerings.unpack) as unpacked:
        state = fzero.init(params, dataclasses.replace(SPEC, mesh={"dp": 1, "tp": 2}, shard=SHARD))
        for _ in range(3):
            state = fzero.step(state, torch.randn(8, 4, 8))
    return [x.numpy().tobytes() for x in fzero.tree.flatten(fzero.unshard(state.params))[1]], unpacked.call_count


def test_a_second_run_has_the_same_bits() -> None:
    before, _ = zip(*values(gloo(2, trained)), strict=True)
    after, read = zip(*values(gloo(2, trained)), strict=True)
    assert before == after
    assert min(read) >= 1
