"""The model of lanes: figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.cost import rates, step_time
from fzero.cost.kept_costs import folder
from fzero.cost.rates import Rates
from fzero.ir import fx_nodes


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


def test_a_gather_passes_beside_a_segment_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment takes a second and every transfer a quarter: hidden, exposed, or free."""
    whole = lowered(prefetch=1).program
    runs = sum(op.computes for op in whole.ops)
    monkeypatch.setattr(step_time, "_compute", lambda gm, rates: 1.0)
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
    found = [
        step_time.flops(node) for node in gm.graph.nodes if fx_nodes.is_compute(node) and not fx_nodes.is_view(node)
    ]
    assert sorted(found) == [0, 2 * 4 * 5 * 6, 2 * 4 * 5 * 6, 2 * 3 * 4 * 5 * 6]


def test_attention_and_convolution_count() -> None:
    q = torch.empty(1, 2, 16, 8)
    gm = make_fx(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), tracing_mode="fake")(q)
    assert sum(step_time.flops(n) for n in gm.graph.nodes if fx_nodes.is_compute(n)) == 4 * q.numel() * 16
    x, w = torch.empty(1, 3, 8, 8), torch.empty(4, 3, 3, 3)
    gm = make_fx(lambda x, w: torch.nn.functional.conv2d(x, w), tracing_mode="fake")(x, w)
    assert sum(step_time.flops(n) for n in gm.graph.nodes if fx_nodes.is_compute(n)) == 2 * (4 * 6 * 6) * 27


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
