"""session: the programs of a run, what is said of them, and the loop that runs one on the memory that they share.

What a run keeps of its programs has a bound, and a program that was dropped is made again.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import free_port

import fzero
from fzero._torch_compat import FakeTensorMode, forget_fakes
from fzero.compile.lowering_context import LoweringContext
from fzero.errors import CaptureError, DonatedError, VerifyError
from fzero.ir import forms
from fzero.ir.records import DISK, HOST, Buffer
from fzero.phases import Phases
from fzero.session import session


def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return ((batch @ p["w"]).tanh() @ p["v"]).square().mean()


def out(p: Any, batch: torch.Tensor) -> Any:
    return {"out": loss(p, batch)}


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}


def first(**options: Any) -> tuple[fzero.State, Any]:
    """(a first state, its session)."""
    given: dict[str, Any] = {"loss": loss, "optimizer": fzero.optim.sgd(1e-2), **options}
    state = fzero.init(params(), fzero.Spec(**given))
    return state, state.runtime


# --- the program of a batch -------------------------------------------------------------------------------------------


def test_a_batch_of_a_known_kind_has_its_program_and_another_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _, runtime = first()
    with caplog.at_level(logging.WARNING, "fzero"):
        one = runtime.compiled(torch.ones(2, 4))
        assert runtime.compiled(torch.zeros(2, 4)) is one
        assert caplog.text == "", "the first program is no surprise"
        other = runtime.compiled(torch.ones(3, 4))
    assert other is not one
    assert "a new program is traced: batch was f32[2, 4], is f32[3, 4]" in caplog.text.replace("float32", "f32")
    assert [*runtime.programs.values()] == [one, other]
    caplog.clear()
    assert runtime.compiled(torch.ones(2, 4)) is one
    assert caplog.text == ""
    assert [*runtime.programs.values()] == [other, one], "the last used is at the end"


def test_an_evaluation_has_programs_of_its_own() -> None:
    _, runtime = first()
    given = {"batch": torch.ones(2, 4), "key": None}
    one = runtime.compiled(given, out)
    assert runtime.compiled(given, out) is one
    assert runtime.compiled({**given, "key": fzero.random.key(0)}, out) is not one
    assert runtime.compiled(given, lambda p, b: out(p, b)) is not one
    assert not runtime.programs
    assert len(runtime.evaluations) == 3


@pytest.mark.parametrize("new", ["its own batch", "another batch"])
def test_an_evaluation_whose_reads_have_changed_is_refused(monkeypatch: pytest.MonkeyPatch, new: str) -> None:
    _, runtime = first()
    monkeypatch.setitem(SCALE, "by", 1.0)
    scored = {"batch": torch.ones(2, 4), "key": None}

    def score(p: Any, batch: Any) -> Any:
        return {"out": scaled(p, batch)}

    runtime.compiled(scored, score)
    runtime.compiled(scored, out)
    monkeypatch.setitem(SCALE, "by", 2.0)
    given = scored if new == "its own batch" else {**scored, "batch": torch.ones(3, 4)}
    with pytest.raises(CaptureError, match=r"SCALE\['by'\]"):
        runtime.compiled(given, score)
    assert runtime.compiled(scored, out), "what another evaluation read is as it was"


def test_programs_of_all_phases_are_made_at_once() -> None:
    """The one of this step is made last, and is the one that is used last."""
    rates = {name: fzero.optim.sgd(rate) for name, rate in (("low", 0.1), ("high", 0.2))}
    _, runtime = first(optimizer=Phases(lambda step: "high" if step == 1 else "low", rates))
    assert [runtime.phase(step) for step in range(3)] == ["low", "high", "low"]
    lowered = runtime.compiled(torch.ones(2, 4), step=1)
    assert [key[-1] for key in runtime.programs] == ["phase 'low'", "phase 'high'"]
    assert lowered is [*runtime.programs.values()][1]
    assert runtime.compiled(torch.ones(2, 4)) is [*runtime.programs.values()][1]
    assert len(runtime.programs) == 2
    assert first()[1].phase(7) == ""


def test_a_number_that_changes_is_a_tensor_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    def by(p: Any, batch: Any) -> torch.Tensor:
        return loss(p, batch["x"]) * batch["n"]

    state, runtime = first(loss=by)
    x = torch.ones(2, 4)
    with caplog.at_level(logging.WARNING, "fzero"):
        for n in (2.0, 3.0, 4.0):
            state = fzero.step(state, {"x": x, "n": n})
    assert caplog.text.count("a Python number that changes is a 0-d tensor") == 1
    assert "batch['n'] was float 2.0, is float 3.0" in caplog.text
    assert "a new program is traced" not in caplog.text, "it has been said"
    assert len(runtime.programs) == 2
    assert runtime.inputs == {None: frozenset({"n"})}
    settled = runtime.settled({"x": x, "n": 5.0})
    assert (float(settled["n"]), settled["x"]) == (5.0, x)
    plain = runtime.settled({"x": x, "n": 5.0}, out)
    assert plain["n"] == 5.0, "an evaluation has numbers of its own"
    assert not isinstance(plain["n"], torch.Tensor)
    only_tensors = {"x": x}
    assert runtime.settled(only_tensors) is only_tensors


def test_a_number_of_an_evaluation_that_changes_is_a_tensor_there(caplog: pytest.LogCaptureFixture) -> None:
    def scored(p: Any, batch: Any) -> Any:
        return {"out": loss(p, batch["x"]) * batch["n"]}

    _, runtime = first()
    x = torch.ones(2, 4)
    for n in (2.0, 3.0):
        given = runtime.settled({"x": x, "n": n}, scored)
        runtime.compiled({"batch": given, "key": None}, scored)
    assert isinstance(given["n"], torch.Tensor)
    assert "batch['n'] was float 2.0, is float 3.0" in caplog.text
    assert runtime.inputs == {session.Called(scored): frozenset({"n"})}


def test_a_number_that_changes_within_a_phase_is_a_tensor_too() -> None:
    def by(p: Any, batch: Any) -> torch.Tensor:
        return loss(p, batch["x"]) * batch["n"]

    rates = {name: fzero.optim.sgd(rate) for name, rate in (("low", 0.1), ("high", 0.2))}
    state, runtime = first(loss=by, optimizer=Phases(lambda step: "high" if step > 3 else "low", rates))
    for n in (2.0, 3.0, 4.0):
        state = fzero.step(state, {"x": torch.ones(2, 4), "n": n})
    assert runtime.inputs == {None: frozenset({"n"})}


def test_a_step_leaves_the_copies_of_parameters_as_their_casts() -> None:
    """The next one casts none anew."""
    state, runtime = first(optimizer=fzero.optim.adamw(1e-2), precision="bf16")
    state = fzero.step(state, torch.ones(2, 4))
    copies = runtime.copies
    assert copies.tensors, "some are kept"
    assert {key: copies.masters[key[0]]._version for key in copies.tensors} == copies.fresh


def test_a_string_that_changes_is_refused() -> None:
    def named(p: Any, batch: Any) -> torch.Tensor:
        return loss(p, batch["x"])

    state, runtime = first(loss=named)
    state = fzero.step(state, {"x": torch.ones(2, 4), "task": "a"})
    with pytest.raises(fzero.TreeError, match=r"batch\['task'\] was str 'a', is str 'b'"):
        runtime.settled({"x": torch.ones(2, 4), "task": "b"})


def test_an_error_of_a_trace_names_the_numbers_that_are_tensors() -> None:
    def chosen(p: Any, batch: Any) -> torch.Tensor:
        return loss(p, batch["x"]) * (2.0 if batch["n"] > 1 else 1.0)

    state, _ = first(loss=chosen)
    state = fzero.step(state, {"x": torch.ones(2, 4), "n": 1})
    with pytest.raises(CaptureError, match=r"batch\['n'\]: a Python number that changed.*fzero.static\(x\)"):
        fzero.step(state, {"x": torch.ones(2, 4), "n": 2})
    with pytest.raises(ZeroDivisionError), session._numbers_named(frozenset("n")):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match=r"^of its own$"), session._numbers_named(frozenset()):
        raise ValueError("of its own")


# --- running it -------------------------------------------------------------------------------------------------------


def test_programs_share_an_arena_as_large_as_the_largest_needs() -> None:
    _, runtime = first()
    small, large = (runtime.compiled(torch.ones(rows, 4)) for rows in (1, 64))
    sizes = [lowered.on(0).arena_bytes for lowered in (small, large)]
    assert sizes[0] < sizes[1]
    before = runtime.bind(small)
    assert runtime.arena.numel() == sizes[1], "it has room for all that are known"
    assert runtime.bind(small) is before
    larger = runtime.compiled(torch.ones(128, 4))
    runtime.bind(larger)
    assert runtime.arena.numel() == larger.on(0).arena_bytes > sizes[1]
    assert [*runtime.bound] == [id(larger)], "the others hold the old arena"
    assert runtime.bind(small).arena is runtime.arena
    runtime.bind(larger)
    assert len(runtime.bound) == 2


def test_an_arena_is_let_go_before_a_larger_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once may be more than there is."""
    _, runtime = first()
    held: list[tuple[int, int]] = []
    runtime.bind(runtime.compiled(torch.ones(1, 4)))
    larger = runtime.compiled(torch.ones(128, 4))
    kept = Buffer("kept", torch.uint8, (1 << 20,), "grad", space=HOST, at=4096)
    program = replace(larger.program, buffers={**larger.program.buffers, "kept": kept})
    runtime.host_arena = torch.zeros(8, dtype=torch.uint8)

    def empty(room: int) -> torch.Tensor:
        held.append((runtime.arena.numel(), runtime.host_arena.numel()))
        return torch.zeros(room, dtype=torch.uint8)

    runtime.transport = replace(runtime.transport, block=empty)
    monkeypatch.setattr(session, "host_memory", lambda device, room: empty(room))
    runtime.programs["another phase"] = replace(larger, programs={0: program})
    runtime.bind(larger)
    (before, _), (_, host) = held
    assert (before, host) == (0, 0)


def test_the_file_has_room_for_what_the_largest_program_keeps_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runtime = first()
    lowered, grown = runtime.compiled(torch.ones(2, 4)), []
    kept = Buffer("kept", torch.uint8, (1 << 20,), "grad", space=DISK, at=4096)
    program = replace(lowered.program, buffers={**lowered.program.buffers, "kept": kept})
    runtime.programs["another phase"] = replace(lowered, programs={0: program})
    monkeypatch.setattr(runtime.memory, "file", SimpleNamespace(grow=grown.append))
    runtime.bind(lowered)
    assert grown == [4096 + (1 << 20)]


def test_moves_to_the_host_share_an_arena_as_large_as_the_largest_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runtime = first()
    lowered, made = runtime.compiled(torch.ones(2, 4)), list[tuple[Any, int]]()

    def host_memory(device: torch.device, room: int) -> torch.Tensor:
        made.append((device, room))
        return torch.zeros(room, dtype=torch.uint8)

    before = runtime.bind(lowered)
    kept = Buffer("kept", torch.uint8, (1 << 20,), "grad", space=HOST, at=4096)
    program = replace(lowered.program, buffers={**lowered.program.buffers, "kept": kept})
    runtime.programs["another phase"] = replace(lowered, programs={0: program})
    monkeypatch.setattr(session, "host_memory", host_memory)
    after = runtime.bind(lowered)
    assert after is not before, "it holds the old arena"
    assert after is runtime.bind(lowered)
    assert made == [(runtime.device, 4096 + (1 << 20))]
    assert runtime.host_arena.numel() == 4096 + (1 << 20)


def test_the_programs_that_were_not_used_for_the_longest_time_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_PROGRAMS", 2)
    _, runtime = first()
    one, two = (runtime.compiled(torch.ones(rows, 4)) for rows in (1, 2))
    assert runtime.compiled(torch.ones(1, 4)) is one
    runtime.bind(two)
    three = runtime.compiled(torch.ones(3, 4))
    assert [*runtime.programs.values()] == [one, three]
    assert not runtime.bound, "nor is its executor kept"


def test_costs_of_products_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runtime = first()
    monkeypatch.setattr(session, "Costs", lambda *given, **named: (given, named))
    monkeypatch.setattr(session, "default_store", lambda: "store")
    assert runtime.costs == (("products",), {"rank": 0, "store": None})
    other = replace(runtime, world_size=2, rank=1)
    assert other.costs == (("products",), {"rank": 1, "store": "store"})
    assert other.costs is other.costs


@pytest.mark.parametrize(("matmul", "asked"), [("fastest", True), ("default", False)])
def test_products_are_measured_where_the_spec_asks(monkeypatch: pytest.MonkeyPatch, matmul: str, asked: bool) -> None:
    _, runtime = first(matmul=matmul)
    given = []

    def made(*args: Any, **named: Any) -> Any:
        given.extend(x for x in args if isinstance(x, LoweringContext) and x.costs is runtime.costs)
        return checked(*args, **named)

    checked = session.checked_step
    monkeypatch.setattr(session, "checked_step", made)
    runtime.compiled(torch.ones(2, 4))
    assert bool(given) == asked


def test_the_session_shows_the_state_by_its_shapes() -> None:
    _, runtime = first()
    like = runtime.like["params"]
    assert {name: (x.shape, x.device.type) for name, x in like.items()} == {
        name: (x.shape, "meta") for name, x in params().items()
    }
    assert runtime.sent_bytes == {}


@pytest.mark.parametrize("error", [MemoryError("none left"), VerifyError("broken")])
def test_an_error_in_a_new_programs_memory_is_told_and_leaves_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank: the program is new again to all of them."""
    _, runtime = first()
    told: list[Any] = []

    def agree(rank: int, size: int, call: str, digest: str, group: Any, failure: Any = None) -> int:
        told.append((call, digest, failure))
        if failure is not None:
            raise failure
        return 0

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    lowered = runtime.compiled(torch.ones(2, 4))
    monkeypatch.setattr(session, "agree", agree)
    with monkeypatch.context() as patch:
        patch.setattr(session, "Executor", failing)
        with pytest.raises(type(error), match=str(error)):
            runtime.ready(lowered)
    ((call, digest, failure),) = told
    assert (call, digest) == ("a new program's memory", lowered.program_digest)
    assert isinstance(failure, type(error))
    assert not runtime.compiled_segments
    runtime.ready(lowered)
    runtime.ready(lowered)
    assert [failure for *_, failure in told[1:]] == [None], "a known program is not agreed on again"


def test_a_step_that_fails_before_its_first_write_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state, runtime = first()
    lowered = runtime.compiled(torch.ones(2, 4))
    ops = len(lowered.program.ops)
    writes = runtime.ready(lowered).first_write
    assert 0 < writes < ops - 1

    def failing_at(place: int) -> Any:
        def watch(number: int) -> None:
            if number == place:
                raise ValueError("a fault\nof two lines")

        return watch

    with pytest.raises(ValueError, match="a fault"):
        session.execute(state, lowered, torch.ones(2, 4), failing_at(-1))
    assert state.life.ended == ""
    assert torch.equal(state.params["w"].full(), params()["w"])
    with pytest.raises(ValueError, match="a fault"):
        session.execute(state, lowered, torch.ones(2, 4), failing_at(ops - 1))
    assert state.life.ended == (
        "is unusable: step 1 failed after it began to write (ValueError: a fault). Start again from fzero.init or the "
        "last checkpoint"
    )
    with pytest.raises(DonatedError, match="is unusable"):
        state.params["w"].full()


def test_flags_of_all_ranks_go_with_every_step() -> None:
    state, runtime = first()
    state = fzero.step(state, torch.ones(2, 4))
    assert runtime.any_rank_flags == 0
    runtime.flags = lambda: 6
    fzero.step(state, torch.ones(2, 4))
    assert runtime.any_rank_flags == 6


def test_a_step_may_have_written_from_its_first_op_on() -> None:
    """What Ctrl-C asks (`interrupts`)."""
    state, runtime = first()
    lowered, seen = runtime.compiled(torch.ones(2, 4)), []
    assert not state.life.steps
    session.execute(state, lowered, torch.ones(2, 4), lambda number: seen.append(state.life.steps))
    assert {*seen} == {True}


def test_calls_of_threads_on_one_state_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They share one arena: evaluations of two threads gave each other's numbers."""
    inside, most = [], []

    def counted(fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(fn)
            most.append(len(inside))
            time.sleep(0.02)
            try:
                return fn(*args, **kwargs)
            finally:
                inside.pop()

        return call

    state, _ = first()
    state = fzero.step(state, torch.ones(2, 4))
    fzero.evaluate(state, torch.ones(2, 4), out)
    for owner, name in (
        (session.Executor, "run"),
        (session.LeafGathers, "gathered"),
        (sys.modules[fzero.save.__module__], "take"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    calls: list[Any] = [
        lambda: fzero.evaluate(state, torch.ones(2, 4), out),
        lambda: state.params["w"].full(),
        lambda: fzero.save(state, tmp_path),
        lambda: fzero.checkpoint.snapshot(state),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == len(calls)
    assert max(most) == 1


def test_of_two_threads_that_step_one_state_one_is_refused() -> None:
    state, _ = first()
    state, found = fzero.step(state, torch.ones(2, 4)), []

    def work() -> None:
        try:
            found.append(fzero.step(state, torch.ones(2, 4)).step)
        except DonatedError:
            found.append(0)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 2]


def test_ranks_ask_for_the_same_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    state, runtime = first()
    told: list[Any] = []
    monkeypatch.setattr(session, "agree", lambda rank, size, *given: told.append(given) or 0)
    leaves = [state.params["w"], state.params["v"]]
    both = runtime.whole(leaves)
    assert all(torch.equal(x, params()[name]) for x, name in zip(both, "wv", strict=True))
    for asked in (leaves[:1], leaves[1:], leaves[::-1]):
        runtime.whole(asked)
    runtime.whole(leaves[:1], joined=False)
    assert [call for call, *_ in told] == [
        "the whole of 'params/w' and 1 more leaves", "the whole of 'params/w'", "the whole of 'params/v'",
        "the whole of 'params/v' and 1 more leaves", "the part by dims of 'params/w'",
    ]  # fmt: skip
    digests = [digest for _, digest, *_ in told]
    assert len({*digests[:4]}) == 4
    state.life.ended = "was donated"
    with monkeypatch.context() as patch:
        patch.setattr(session, "agree", lambda *given: (_ for _ in ()).throw(given[-1]))
        with pytest.raises(DonatedError, match="was donated"):
            runtime.whole(leaves)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"offload": {"**": "device"}}, "a rule that takes something off the device, or no offload="),
        ({"mesh": {"tp": 2}, "shard": {"w": fzero.P(), "v": fzero.P(None, None)}}, "a rule that cuts something over"),
    ],
)
def test_rules_that_say_nothing(fields: Any, needed: str) -> None:
    with pytest.raises(fzero.SpecError, match=needed):
        fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **fields)
    fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), offload={"params/w": "cpu", "**": "device"})


def test_batches_of_many_lengths(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-2))
    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    lengths = [1, 2, 3, 4, 5, 1, 5, 4, 2]
    plain = fzero.init(params, spec)
    for length in lengths:
        plain = fzero.step(plain, torch.ones(length, 4))
    monkeypatch.setattr(session, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(session, "MAX_FAKES", 5)
    state = fzero.init(params, spec)
    runtime: Any = state.runtime
    caplog.set_level(logging.WARNING, "fzero")
    for length in lengths:
        state = fzero.step(state, torch.ones(length, 4))
        assert len(runtime.programs) <= 3
        assert len(runtime.bound) <= 3
        assert len(FakeTensorMode.cache) <= 5
        fzero.evaluate(state, torch.ones(2, 4), out)
        assert len(runtime.programs) + len(runtime.evaluations) <= 3 + 1
        assert len(runtime.compiled_segments) <= 3
    assert "more than 3 programs: the one that was not used for the longest time is dropped" in caplog.text
    assert all(torch.equal(state.params[name].full(), plain.params[name].full()) for name in params)


def trained(number: int) -> None:
    """A step of a Spec of its own: the update is that of plain PyTorch."""
    rate, factor = 0.1 / (number + 1), 1.0 + number

    def scaled(p: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss(p, batch) * factor

    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    spec = fzero.Spec(loss=scaled, optimizer=fzero.optim.sgd(rate), bucket_bytes=64 * (1 + number % 3))
    state = fzero.step(fzero.init(params, spec), torch.ones(3, 4))
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    torch.autograd.backward(scaled(leaves, torch.ones(3, 4)))
    optimizer = torch.optim.SGD(leaves.values(), lr=rate)
    optimizer.step()
    for name, leaf in leaves.items():
        torch.testing.assert_close(state.params[name].full(), leaf.detach(), rtol=1e-6, atol=1e-6)


def started(_: int) -> None:
    """A first state of one Spec, over and over."""
    fzero.init({"w": torch.ones(64, 64), "v": torch.ones(64, 2)}, STARTED)


STARTED = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3))


@pytest.mark.parametrize(
    ("what", "count"), [*(pytest.param(trained, n, marks=pytest.mark.acceptance) for n in (20, 50)), (started, 50)]
)
def test_many_in_one_process_leave_nothing(what: Any, count: int) -> None:
    """Fifty Specs and their steps, fifty first states of one: no object is left, of Python or of fzero."""
    warm = 8  # what is made once

    def left() -> int:
        assert len(FakeTensorMode.cache) <= session.MAX_FAKES
        assert len(forms._kept) <= forms.MOST
        forget_fakes(0)
        forms._kept.clear()  # it has each number that a call was given
        gc.collect()
        return len(gc.get_objects())

    for number in range(warm):
        what(number)
    grown, window = [], (count - warm) // 2
    for start in (warm, warm + window):  # what earlier tests left may come and go in one of the two
        before = left()
        for number in range(start, start + window):
            what(number)
        grown.append(left() - before)
    assert min(grown) < window, "objects are left by each"


OTHER = os.environ.get("FZERO_OTHER_PYTHON", "")


@pytest.mark.acceptance
@pytest.mark.skipif(not OTHER, reason="FZERO_OTHER_PYTHON names no Python with another torch")
def test_ranks_of_two_versions_of_torch_are_refused(tmp_path: Path) -> None:
    """Rank 1 runs that interpreter. Both name both versions, and end."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        """
import torch, fzero
spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), timeout=60.0)
print(torch.__version__, flush=True)
try:
    fzero.init({"w": torch.ones(2, 2)}, spec)
except fzero.DisagreementError as error:
    print(error)
"""
    )
    port, ranks = free_port(), []
    for rank, python in enumerate((sys.executable, OTHER)):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        env |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[2])}
        ranks.append(
            subprocess.Popen(
                [python, str(worker)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    versions = [text.splitlines()[0] for text in said]
    assert len({*versions}) == 2, said
    for text in said:
        assert all(f"torch {version}" in text for version in versions), said
        assert "Start all ranks from one environment" in text


SCALE = {"by": 1.0}


def scaled(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss(p, batch) * SCALE["by"]


def test_a_program_whose_reads_have_changed_goes_with_its_executor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = fzero.Spec(loss=scaled, optimizer=fzero.optim.sgd(1e-2), on_change="retrace")
    state = fzero.init({"w": torch.ones(4, 4), "v": torch.ones(4, 2)}, spec)
    runtime: Any = state.runtime
    assert runtime.arena.numel() == runtime.host_arena.numel() == 0, "nothing is held before there is a program"
    seen = []
    for value in (1.0, 2.0, 3.0):
        monkeypatch.setitem(SCALE, "by", value)
        state = fzero.step(state, torch.ones(2, 4))
        assert len(runtime.programs) == len(runtime.bound) == 1
        (lowered,) = runtime.programs.values()
        assert id(lowered) in runtime.bound
        seen.append(lowered.graph)
    assert len({*map(id, seen)}) == 3, "each was traced"
    assert "a new program is traced: " in caplog.text
    assert "SCALE['by']" in caplog.text, "what has changed"
