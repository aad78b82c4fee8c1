"""pick_way and routed: the way of each size is the fastest that rank 0 has measured, and so are the rates. Time is
played here: a stand-in of a comm says how long each of its transfers takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fzero.comm import pick_way
from fzero.comm.pick_way import SIZES, WAYS, Fastest, measured
from fzero.cost import kept_costs
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref
from fzero.kernels.codecs import CODECS

RANKS = 2


class Timed:
    """A comm whose transfers take these seconds, by kind and bytes of the whole."""

    def __init__(self, clock: list[float], seconds: dict[tuple[str, int], float]) -> None:
        self.clock, self.seconds, self.open = clock, seconds, ""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        whole = tensors[1] if op.gathers else tensors[0]
        own = tensors[0] if op.gathers else tensors[1]
        assert whole.dtype == torch.float32
        assert own.numel() * RANKS == whole.numel()
        if not op.gathers:
            assert (op.reduction, tensors[2].shape) == ("sum", (RANKS, own.numel()))
        self.open = name
        self.clock[0] += self.seconds[op.kind, whole.nbytes]

    def wait(self, name: str) -> None:
        assert name == self.open

    def settle(self, name: str) -> None:
        assert name == self.open


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which only transfers spend; every computation takes a millisecond."""
    now = [0.0]

    def fastest_of(run: Callable[[], object], times: int = 4) -> float:
        began = now[0]
        run()
        return now[0] - began or 1e-3

    monkeypatch.setattr(pick_way, "fastest_of", fastest_of)
    monkeypatch.setattr(pick_way, "nanoseconds", lambda codec: (1.0 + len(codec), 2.0))
    return now


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))


def comms(clock: list[float]) -> dict[str, Any]:
    """Shared memory is fast for small buffers, messages for large ones; gloo gathers the middle size fastest."""
    of: dict[str, tuple[float, float, float]] = {"shared": (1, 3, 9), "p2p": (2, 4, 6), "gloo": (3, 2, 7)}
    return {
        way: Timed(clock, {(kind, size): s * 1e-4 for kind in WAYS for size, s in zip(SIZES, seconds, strict=True)})
        for way, seconds in of.items()
    }


def echo(monkeypatch: pytest.MonkeyPatch, first: Callable[[Any], Any] = lambda x: x) -> list[int]:
    """What rank 0 tells is what this rank would, or what `first` makes of it."""
    sizes: list[int] = []

    def tell(note: bytes, world_size: int, group: Any) -> list[bytes]:
        sizes.append(len(note))
        return [json.dumps(first(json.loads(note))).encode(), b"[]"]

    monkeypatch.setattr(pick_way, "tell", tell)
    return sizes


def test_each_size_goes_its_fastest_way(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = echo(monkeypatch)
    table, rates = measured(comms(clock), RANKS, RANKS)
    assert table == {
        ("all_gather", SIZES[0]): "shared", ("all_gather", SIZES[1]): "gloo", ("all_gather", SIZES[2]): "p2p",
        ("reduce_scatter", SIZES[0]): "shared", ("reduce_scatter", SIZES[1]): "shared",
        ("reduce_scatter", SIZES[2]): "p2p",
    }  # fmt: skip
    assert max(sizes) < 512, "a note to the other ranks holds them"
    assert rates.ranks == RANKS
    assert rates.flops == {2: pytest.approx(2 * 384**3 / 1e-3, rel=1e-2), 4: pytest.approx(2 * 384**3 / 1e-3, rel=1e-2)}
    assert rates.memory_bytes == pytest.approx(3 * 4 * (1 << 22) / 1e-3, rel=1e-2)
    assert rates.coding == {codec: (pytest.approx((1 + len(codec)) * 1e-9), pytest.approx(2e-9)) for codec in CODECS}
    assert {*rates.latency} == {*rates.wire_bytes} == {*WAYS}
    for kind in WAYS:  # a line through the fastest ways' seconds
        assert 0 < rates.latency[kind] < 4e-4
        assert rates.wire_bytes[kind] > 0


def test_a_rank_computes_beside_the_largest_gather(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pick_way, "_hidden", lambda move, comm: seen.append((move.tensors[1].nbytes, comm)) or 0.25)
    echo(monkeypatch)
    ways = comms(clock)
    assert measured(ways, RANKS, RANKS)[1].hidden == 0.25
    assert seen == [(SIZES[2], ways["p2p"])], "on its fastest way"


def test_figures_stay_as_long_as_they_are_near(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a program that depends on them is the same in every run; of another network they are other ones."""
    echo(monkeypatch)

    def slower(factor: float, rank: int = 0) -> Any:
        ways = comms(clock)
        for way in ways.values():
            way.seconds = {key: factor * of for key, of in way.seconds.items()}
        return measured(ways, RANKS, RANKS, rank=rank)[1]

    first = slower(1.0)
    assert slower(kept_costs.NEAR * 0.9) == first
    assert slower(0.5, rank=1) != first
    assert slower(0.5) == first, "only rank 0 keeps figures"
    other = slower(kept_costs.NEAR * 1.2)
    assert other != first
    assert slower(kept_costs.NEAR * 1.2 * 0.5) == other


def test_what_is_kept_is_not_measured_again(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ways of transfers are, by which rank 0 sees whether the rest is as it was; unless the file lacks one."""
    echo(monkeypatch)
    asked: list[str] = []
    for name in ("_hidden", "_computing"):
        old = getattr(pick_way, name)
        monkeypatch.setattr(pick_way, name, lambda *given, name=name, old=old: asked.append(name) or old(*given))
    first = measured(comms(clock), RANKS, RANKS)
    assert sorted(asked) == ["_computing", "_hidden"]
    assert measured(comms(clock), RANKS, RANKS) == first
    assert len(asked) == 2
    ((question, figures),) = kept_costs.read("transfers").items()
    del figures["hidden"]
    kept_costs.remember("transfers", {question: figures}, anew=True)
    assert measured(comms(clock), RANKS, RANKS) == first
    assert len(asked) == 4


@pytest.mark.parametrize(("name", "value"), [("memory", 0), ("bf16", 0), ("f32", 0), ("hidden", 7)])
def test_what_no_machine_has_is_measured_again(
    name: str, value: float, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complaint: of a speed of 0 in the file, each run ended in a ZeroDivisionError."""
    echo(monkeypatch)
    first = measured(comms(clock), RANKS, RANKS)
    ((question, figures),) = kept_costs.read("transfers").items()
    kept_costs.remember("transfers", {question: {**figures, name: value}}, anew=True)
    assert measured(comms(clock), RANKS, RANKS) == first
    assert kept_costs.read("transfers") == {question: figures}


def test_rank_0_decides(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    echo(monkeypatch, lambda told: ["p2p"] * len(told) if "p2p" in told else [0.5] * len(told))
    table, rates = measured(comms(clock), RANKS, RANKS)
    assert {*table.values()} == {"p2p"}
    assert (rates.hidden, rates.memory_bytes, rates.flops) == (0.5, 0.5, {2: 0.5, 4: 0.5})


@pytest.mark.parametrize(("both", "hidden"), [(2e-3, 0.0), (1e-3, 1.0), (1.5e-3, 0.5), (9e-3, 0.0), (1e-9, 1.0)])
def test_how_much_of_a_transfer_passes_beside_work(monkeypatch: pytest.MonkeyPatch, both: float, hidden: float) -> None:
    """A product, a transfer alone and work alone take a millisecond each."""
    seconds = iter([1e-3, 1e-3, 1e-3, both])
    runs: list[Callable[[], object]] = []
    monkeypatch.setattr(pick_way, "fastest_of", lambda run: runs.append(run) or next(seconds))
    assert pick_way._hidden(pick_way._Move("all_gather", SIZES[0], RANKS, pick_way._bytes), None) == pytest.approx(
        hidden
    )


@pytest.mark.parametrize(("alone", "products"), [(3e-3, 3), (2.6e-3, 3), (1e-9, 1), (1e9, 1000)])
def test_a_rank_computes_for_as_long_as_a_transfer_takes(
    monkeypatch: pytest.MonkeyPatch, alone: float, products: int
) -> None:
    """At least one product, which takes a millisecond; at most a thousand."""
    seconds, runs, count = iter([1e-3, alone, 1.0, 1.0]), list[Callable[[], object]](), list[int]()
    monkeypatch.setattr(pick_way, "fastest_of", lambda run: runs.append(run) or next(seconds))
    monkeypatch.setattr(pick_way.torch, "mm", lambda *given, out: count.append(1))
    pick_way._hidden(pick_way._Move("all_gather", SIZES[0], RANKS, pick_way._bytes), None)  # type: ignore[arg-type]
    runs[2]()
    assert len(count) == products


def test_the_fastest_of_some_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], iter([3.0, 1.0, 2.0, 0.0])
    monkeypatch.setattr(pick_way.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += next(spent)

    assert pick_way.fastest_of(run, 3) == 1.0
    assert 0 < pick_way.fastest_of(run, 1) < 1e-6, "nobody divides by zero"


@pytest.mark.parametrize(("first", "runs"), [(0.05, 1), (0.001, 2)])
def test_a_long_product_is_not_run_again(monkeypatch: pytest.MonkeyPatch, first: float, runs: int) -> None:
    seconds, asked = iter([first, 0.0005]), list[int]()
    monkeypatch.setattr(pick_way, "fastest_of", lambda run, times=4: asked.append(times) or next(seconds))
    assert pick_way._flops(torch.bfloat16) == 2 * 384**3 / (first if runs == 1 else 0.0005)
    assert asked == [1, 4][:runs]


def test_the_work_beside_a_transfer_runs_between_its_start_and_its_wait() -> None:
    calls: list[str] = []

    class Noted:
        def __getattr__(self, call: str) -> Any:
            return lambda *given: calls.append(call)

    move = pick_way._Move("reduce_scatter", SIZES[0], 4, pick_way._bytes)
    move.run(Noted(), lambda: calls.append("work"))  # type: ignore[arg-type]
    assert calls == ["start", "work", "wait", "settle"]
    assert [tuple(tensor.shape) for tensor in move.tensors] == [(1024,), (256,), (4, 256)]


def test_a_transfer_goes_the_way_of_the_nearest_size() -> None:
    table = {(kind, size): f"{kind}{size}" for kind in WAYS for size in SIZES}
    fastest = Fastest({"p2p": None, "shared": None}, table)  # type: ignore[dict-item]
    gather = make_op("all_gather", [Ref("a")], [Ref("b")])
    near = (
        (0, SIZES[0]),
        (SIZES[0] + 4, SIZES[0]),
        (SIZES[1] * 3, SIZES[1]),
        (1 << 30, SIZES[2]),
        (SIZES[2], SIZES[2]),
    )
    for num_bytes, size in near:
        whole = torch.empty(num_bytes // 4, device="meta")
        assert fastest.way(gather, [whole[: num_bytes // 8], whole]) == f"all_gather{size}"
    both = make_op("reduce_scatter", [Ref("a")], [Ref("b"), Ref("s")])
    assert fastest.way(both, [whole, whole[:8], whole]) == f"reduce_scatter{SIZES[2]}", "by the whole, which it reads"
    bare = make_op("reduce_scatter", [Ref("a")], [Ref("b")])
    assert fastest.way(bare, [whole, whole[:8]]) == "shared", "there is no receive buffer"
    send = make_op("send", [Ref("a")])
    assert fastest.way(send, [whole]) == "shared"
    assert Fastest({"p2p": None}, table).way(send, [whole]) == "p2p"  # type: ignore[dict-item]


def test_starts_are_counted() -> None:
    started: list[str] = []

    class Noted:
        def __getattr__(self, call: str) -> Any:
            return lambda name, *given: started.append(f"{call} {name}")

    fastest = Fastest({"shared": Noted()}, {})  # type: ignore[dict-item]
    for name in ("a", "b", "a"):
        fastest.start(name, make_op("send", [Ref(name)]), [torch.ones(1)])
    assert fastest.number == 3
    assert started == ["start a", "start b", "settle a", "start a"], "an earlier one into the same buffer has settled"
