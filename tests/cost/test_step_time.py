"""The model of lanes: figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from tp_models import gpt

import fzero
from fzero.cost import op_price, rates, step_time
from fzero.cost.flops import flops
from fzero.cost.kept_costs import folder
from fzero.cost.rates import Link, Rates
from fzero.errors import FzeroError
from fzero.ir import fx_nodes
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.program import Program, wire_bytes
from fzero.ir.records import Buffer, Ref

KINDS = ("all_gather", "reduce_scatter")


def figures(latency: tuple[float, float], wire_bytes: float, *rest: Any) -> Rates:
    """Rates of a gather and of a reduction."""
    kinds = ("all_gather", "reduce_scatter")
    return Rates(dict(zip(kinds, latency, strict=True)), dict.fromkeys(kinds, wire_bytes), *rest)


NETWORK = Rates(
    {"all_gather": 1e-4, "reduce_scatter": 1e-4}, {"all_gather": 1e8, "reduce_scatter": 1e8}, 1.0, {2: 1e9, 4: 1e9}, 1e9
)
HERE = Rates(
    {"all_gather": 0.0, "reduce_scatter": 0.0}, {"all_gather": 1e10, "reduce_scatter": 1e10}, 0.0, {2: 1e9, 4: 1e9}, 1e9
)


def lowered(**options: Any) -> fzero.Lowered:
    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        for layer in p["layers"]:
            b = torch.tanh(b @ layer["w"])
        return b.square().mean()

    params = {"layers": [{"w": torch.empty(128, 128, device="meta")} for _ in range(6)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=3, **options)
    return fzero.lower(spec, params, torch.empty(64, 128), world_size=2)


def test_compute_takes_longer_while_a_wire_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment takes a second and every transfer a quarter. At a tax of 2, what passes beside costs half of its
    time; at a tax of 1 nothing."""
    whole = lowered(prefetch=1).program
    monkeypatch.setattr(op_price, "_compute", lambda gm, rates: 1.0)
    plain = Rates(dict.fromkeys(KINDS, 0.25), dict.fromkeys(KINDS, 1e18), 1.0, {}, 1.0)
    free, taxed = (step_time.step_time(whole, replace(plain, tax=tax)) for tax in (1.0, 2.0))
    hidden = sum(free.busy.values()) - sum(free.waited.values())
    assert taxed.seconds - free.seconds == pytest.approx(hidden / 2)


def test_a_gather_passes_beside_a_segment_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment takes a second and every transfer a quarter: hidden, exposed, or free."""
    whole = lowered(prefetch=1).program
    runs = sum(op.computes for op in whole.ops)
    monkeypatch.setattr(op_price, "_compute", lambda gm, rates: 1.0)
    free = figures((0, 0), 1e18, 1.0, {}, 1.0)
    assert step_time.seconds(whole, free) == pytest.approx(runs)
    transfers = [op for op in whole.ops if op.is_collective]
    exposed = Rates(
        {"all_gather": 0.25, "reduce_scatter": 0.25}, {"all_gather": 1e18, "reduce_scatter": 1e18}, 0.0, {}, 1.0
    )
    assert step_time.seconds(whole, exposed) == pytest.approx(runs + 0.25 * len(transfers))
    hidden = Rates(
        {"all_gather": 0.25, "reduce_scatter": 0.25}, {"all_gather": 1e18, "reduce_scatter": 1e18}, 1.0, {}, 1.0
    )
    assert runs < step_time.seconds(whole, hidden) < step_time.seconds(whole, exposed)


def test_a_simulation_says_what_lanes_do_and_what_is_written() -> None:
    """By hand: one layer of 128 x 128 on one rank, with moments on disk that pass through the host."""
    spec = fzero.Spec(
        loss=lambda p, x: torch.tanh(x @ p["w"]).square().mean(), optimizer=fzero.optim.adamw(1e-3), device="cuda",
        offload="optimizer", update_on="device",
    )  # fmt: skip
    params, x, nbytes = {"w": torch.empty(128, 128)}, torch.empty(64, 128), 128 * 128 * 4
    lanes = {"disk→host": 1e6, "host→disk": 2e6, "host→device": 4e6, "device→host": 4e6}
    machine = replace(rates.H100, lanes=lanes, flops={2: 1e18, 4: 1e18}, memory_bytes=1e18)
    on_disk = replace(spec, offload={"optimizer": "nvme"}, nvme_path="/local_nvme")
    found = fzero.simulate(fzero.lower(on_disk, params, x), machine)
    assert found.busy == pytest.approx({name: 2 * nbytes / rate for name, rate in lanes.items()})
    assert found.written == 2 * nbytes
    assert found.written_a_day == pytest.approx(86_400 * found.written / found.seconds)
    assert found.days(2 * found.written_a_day) == pytest.approx(2)
    assert max(found.busy.values()) <= found.seconds <= sum(found.busy.values()) * (1 + 1e-6)
    assert sum(found.waited.values()) == pytest.approx(found.seconds - found.compute)
    assert "TB written to disk a day" in str(found)
    plain = fzero.simulate(fzero.lower(replace(spec, offload=None, update_on=None), params, x), machine)
    assert (plain.busy, plain.written, plain.days(1e12)) == ({}, 0, float("inf"))


def test_updates_on_the_host_pass_beside_the_device() -> None:
    spec = fzero.Spec(
        loss=lambda p, x: torch.tanh(x @ p["w"]).square().mean(), optimizer=fzero.optim.adamw(1e-3), device="cuda",
        offload="optimizer+params", update_on="cpu",
    )  # fmt: skip
    lowered = fzero.lower(spec, {"w": torch.empty(128, 128)}, torch.empty(64, 128))
    machine = replace(rates.H100, flops={2: 1e18, 4: 1e18}, memory_bytes=1e18, host_bytes=1e6)
    found = fzero.simulate(lowered, machine)
    assert found.busy["host"] == pytest.approx(28 * 128 * 128 / 1e6, rel=1e-3)
    assert found.seconds == pytest.approx(found.busy["host"], rel=1e-2), "the end waits for it"
    tiled = fzero.lower(spec, {"w": torch.empty(4096, 4096)}, torch.empty(64, 4096))
    assert sum(op.computes and tiled.program.space(op) == "host" for op in tiled.program.ops) > 1
    assert fzero.simulate(tiled, machine).busy["host"] == pytest.approx(28 * 4096**2 / 1e6, rel=1e-3), "once each"


def test_a_transfer_without_a_rate_is_named() -> None:
    with pytest.raises(fzero.SpecError, match=r"without a rate: all_gather, reduce_scatter\. Needed in rates.latency"):
        fzero.simulate(lowered(prefetch=1), rates.H100)
    with pytest.raises(fzero.SpecError, match=r"bytes on disk→device, a lane without a rate\. Needed in rates.lanes"):
        fzero.simulate(lowered(offload={"optimizer": "nvme"}, nvme_path="/nvme"), NETWORK)
    with pytest.raises(fzero.SpecError, match="rank 2 of a world of 2"):
        fzero.simulate(lowered(prefetch=1), NETWORK, rank=2)


def test_operations_of_products() -> None:
    a, b, c = torch.empty(3, 4, 5), torch.empty(3, 5, 6), torch.empty(4, 6)
    into = torch.empty(4, 6)

    def fn(a: Any, b: Any, c: Any, into: Any) -> list[Any]:
        torch.ops.aten.mm.out(a[0], b[0], out=into)
        return [torch.bmm(a, b), torch.addmm(c, a[0], b[0]), torch.exp(a)]

    gm = make_fx(fn, tracing_mode="fake")(a, b, c, into)
    found = [flops(node) for node in gm.graph.nodes if fx_nodes.is_compute(node) and not fx_nodes.is_view(node)]
    assert sorted(found) == [0, 2 * 4 * 5 * 6, 2 * 4 * 5 * 6, 2 * 3 * 4 * 5 * 6]


def test_attention_and_convolution_count() -> None:
    q = torch.empty(1, 2, 16, 8)
    gm = make_fx(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), tracing_mode="fake")(q)
    assert sum(flops(n) for n in gm.graph.nodes if fx_nodes.is_compute(n)) == 4 * q.numel() * 16
    x, w = torch.empty(1, 3, 8, 8), torch.empty(4, 3, 3, 3)
    gm = make_fx(lambda x, w: torch.nn.functional.conv2d(x, w), tracing_mode="fake")(x, w)
    assert sum(flops(n) for n in gm.graph.nodes if fx_nodes.is_compute(n)) == 2 * (4 * 6 * 6) * 27


def test_rates_from_a_busy_machine_stay_rates() -> None:
    assert rates.fitted({4096: 1e-4, 4 << 20: 1e-2}) == (1e-4, pytest.approx((4 << 20) / 9.9e-3))
    latency, rate = rates.fitted({4096: 4e-3, 4 << 20: 4e-3})
    assert (latency, rate) == (4e-3, pytest.approx((4 << 20) / 4e-4))


def test_a_user_without_a_home_has_a_folder_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FZERO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert folder().is_absolute()


# --- axes, ranks and roles --------------------------------------------------------------------------------------------


def test_a_transfer_is_priced_by_its_ranks() -> None:
    """By the ring: n - 1 hops, and (n - 1)/n of the buffer. An all-reduce is a reduce-scatter and a gather."""
    link = Link(latency=3e-5, wire_bytes=1e9, ranks=4)
    for n in (2, 3, 4, 8):
        by_hand = 1e-5 * (n - 1) + (1 << 20) * (n - 1) / n / 0.75e9
        assert link.seconds("all_gather", 1 << 20, n) == pytest.approx(by_hand, rel=1e-5)
        assert link.seconds("all_reduce", 1 << 20, n) == pytest.approx(2 * by_hand, rel=1e-5)
    assert link.seconds("all_gather", 1 << 20) == pytest.approx(3e-5 + (1 << 20) / 1e9), "as it was measured"
    assert link.seconds("all_gather", 1 << 20, 1) == 0
    unknown = Link(3e-5, 1e9)
    assert unknown.seconds("all_gather", 1 << 20, 64) == pytest.approx(3e-5 + (1 << 20) / 1e9)
    starting = replace(link, start=1e-3)
    for kind in ("all_gather", "all_reduce"):
        assert starting.seconds(kind, 1 << 20, 8) == pytest.approx(1e-3 + link.seconds(kind, 1 << 20, 8)), "once"
    own = replace(NETWORK, axes={"pp": {"all_gather": starting}})
    assert own.transfer("send", 1 << 20, "pp") == pytest.approx(1e-3 + 1e-5 + (1 << 20) / 0.75e9)


def test_an_axis_may_have_figures_of_its_own() -> None:
    kinds = ("all_gather", "reduce_scatter")
    fast, slow = (dict.fromkeys(kinds, Link(1e-6, rate, 2)) for rate in (1e11, 1e9))
    machine = replace(NETWORK, ranks=2, axes={"tp": fast, "dp_out": slow})
    nbytes = 1 << 20
    assert machine.transfer("all_gather", nbytes, "tp", 2) == pytest.approx(1e-6 + nbytes / 1e11)
    assert machine.transfer("all_gather", nbytes, "dp", 2) == pytest.approx(1e-4 + nbytes / 1e8), "that of any axis"
    assert machine.transfer("all_gather", nbytes, "dp.dp_out", 2) == machine.transfer("all_gather", nbytes, "dp_out", 2)
    both = replace(machine, axes={**machine.axes, "dp": fast})
    assert both.link("all_gather", "dp.dp_out") == slow["all_gather"], "the slowest of several"
    with pytest.raises(KeyError, match="no rate of all_gather over tp"):
        rates.H100.transfer("all_gather", nbytes, "tp", 2)


def test_a_message_is_priced_by_its_own_kind_or_by_gathers() -> None:
    among_4 = replace(NETWORK, latency=dict.fromkeys(NETWORK.latency, 3e-5), ranks=4)
    assert among_4.transfer("send", 3000, "pp", 2) == pytest.approx(1e-5 + 3000 / 0.75e8), "one hop of three"
    own = replace(NETWORK, axes={"pp": {"send": Link(1e-3, 1e6)}})
    assert own.transfer("send", 3000, "pp", 2) == pytest.approx(4e-3)


def tp_and_dp() -> fzero.Lowered:
    model = gpt(layers=2)
    spec = fzero.Spec(
        loss=model.loss, optimizer=fzero.optim.sgd(0.1), mesh={"dp": 4, "tp": 2}, shard=dict(model.rules), zero=3
    )
    return fzero.lower(spec, model.params, model.batch(0, 0), world_size=8)


def test_each_axis_has_a_wire() -> None:
    lowered = tp_and_dp()
    sent = {"dp": 0.0, "tp": 0.0}
    for op in lowered.program.ops:
        if op.is_collective:
            n = {"dp": 4, "tp": 2}[str(op.axis)]
            sent[str(op.axis)] += wire_bytes(lowered.program, op) * n / (n - 1)
    kinds = ("all_gather", "reduce_scatter")
    machine = Rates(dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 1e8), 1.0, {2: 1e18, 4: 1e18}, 1e18)
    busy = fzero.simulate(lowered, machine).busy
    assert busy == pytest.approx({f"wire {axis}": nbytes / 1e8 for axis, nbytes in sent.items()}, rel=1e-3)
    own = replace(machine, axes={"tp": dict.fromkeys(kinds, Link(0.0, 1e6))})
    slower = fzero.simulate(lowered, own).busy
    assert slower["wire tp"] == pytest.approx(100 * busy["wire tp"])
    assert slower["wire dp"] == busy["wire dp"]


def test_wires_of_two_axes_work_at_one_time() -> None:
    """Two gathers of a second each, started one after the other: over one axis two seconds, over two axes one."""

    def program(*axes: str) -> Program:
        names = [f"{i}" for i in range(len(axes))]
        buffers = {n + end: Buffer(n + end, torch.float32, (4,), "scratch") for n in names for end in "ab"}
        starts = [make_op("all_gather", [Ref(f"{n}a")], [Ref(f"{n}b")], axis=axis)
                  for n, axis in zip(names, axes, strict=True)]  # fmt: skip
        waits = [make_op("wait", [Ref(f"{n}b")]) for n in names]
        return Program(Mesh((("dp_out", 2), ("dp", 2), ("tp", 2))), {}, buffers, (*starts, *waits), {})

    second = figures((1.0, 1.0), 1e18, 0.0, {}, 1.0)
    assert step_time.seconds(program("dp", "dp"), second) == pytest.approx(2)
    assert step_time.seconds(program("dp", "tp"), second) == pytest.approx(1)
    assert step_time.seconds(program("dp.dp_out", "dp"), second) == pytest.approx(1)
    assert step_time.seconds(program("dp.dp_out", "dp_out"), second) == pytest.approx(2), "on the outermost's wire"


def two_roles(runs: int) -> dict[int, Program]:
    """Role 0 runs, sends, and runs again; role 1 runs `runs` segments, receives and runs. A segment is "s"."""
    mesh, run = Mesh((("pp", 2),)), make_op("run", segment="s")
    x = {"x": Buffer("x", torch.float32, (1000,), "activation")}
    send, wait = make_op("send", [Ref("x")], axis="pp", peer=1, tag=0), make_op("wait", [Ref("x")])
    recv = make_op("recv", writes=[Ref("x")], axis="pp", peer=0, tag=0)
    first, second = (run, send, run, wait), (recv, *[run] * runs, wait, run)
    segments = {"s": None}
    return {i: Program(mesh, {}, x, ops, {}, role=i, segments=segments) for i, ops in enumerate((first, second))}


@pytest.mark.parametrize(("runs", "late"), [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0), (5, 0.0)])
def test_a_role_waits_for_the_message_of_another(runs: int, late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment takes a second, a message two: it is sent after one, and arrives after three."""
    monkeypatch.setattr(op_price, "_compute", lambda gm, rates: 1.0)
    machine = replace(NETWORK, axes={"pp": {"send": Link(1.0, 4000.0)}})
    found = step_time.roles_time(two_roles(runs), machine)
    assert found[1].seconds == pytest.approx(runs + late + 1)
    assert found[1].waited.get("wire pp in", 0.0) == pytest.approx(late)
    assert found[0].seconds == pytest.approx(3), "a send is waited for until it is through"
    assert found[0].busy == {"wire pp out": pytest.approx(2)}
    assert found[1].busy == {"wire pp in": pytest.approx(2)}
    alone = step_time.step_time(two_roles(runs)[1], machine)
    assert alone.seconds == pytest.approx(runs + max(2 - runs, 0) + 1), "as if it were sent at once"


def test_roles_that_wait_for_one_another_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_price, "_compute", lambda gm, rates: 1.0)
    programs = {1: two_roles(0)[1]}
    with pytest.raises(FzeroError, match="the roles wait for one another: role 1 at wait x"):
        step_time.roles_time(programs, replace(NETWORK, axes={"pp": {"send": Link(1.0, 1.0)}}))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_roles_of_a_pipeline_are_simulated_together(schedule: str) -> None:
    model = gpt(layers=2)
    spec = fzero.Spec(
        loss=model.loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2}, microbatches=4, pipeline=schedule
    )
    lowered = fzero.lower(spec, model.params, model.batch(0, 0), world_size=2)
    machine = replace(NETWORK, axes={"pp": {"send": Link(0.0, 1e18)}})
    free = [fzero.simulate(lowered, machine, rank) for rank in (0, 1)]
    assert max(x.compute for x in free) < max(x.seconds for x in free) < sum(x.compute for x in free)
    slow = replace(machine, axes={"pp": {"send": Link(1e-3, 1e6)}})
    slower = [fzero.simulate(lowered, slow, rank) for rank in (0, 1)]
    assert all(a.seconds < b.seconds for a, b in zip(free, slower, strict=True))
    for role, other in ((0, 1), (1, 0)):
        sends = [op for op in lowered.programs[role].ops if op.is_send]
        taken = 1e-3 * len(sends) + sum(wire_bytes(lowered.programs[role], op) for op in sends) / 1e6
        assert slower[role].busy["wire pp out"] == pytest.approx(taken)
        assert slower[other].busy["wire pp in"] == pytest.approx(taken)
    with pytest.raises(fzero.SpecError, match=r"transfers of a kind without a rate: .*send"):
        fzero.simulate(lowered, rates.H100)
