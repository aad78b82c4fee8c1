"""Published steps are read, and a layer's work is what the formula says (`benchmarks/published.py`)."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import calibration
from benchmarks.published import TABLE, Published, parts, published
from fzero import hardware


def test_published_steps_are_read() -> None:
    rows = list(published())
    assert len(rows) == 29
    assert {calibration.preset_of(row) for row in rows} <= set(hardware.presets())


@pytest.mark.parametrize("name", ["foundry_beyond_64", "megatron_2021", "vtrain_node", "vtrain_nodes"])
def test_tables_that_nothing_is_fitted_to_agree_with_themselves(name: str) -> None:
    """Their ranks are the product of their axes; seconds of a step and tokens a second are one statement."""
    path = TABLE.parent / f"{name}.csv"
    with path.open() as file:
        given = list(csv.DictReader(file))
    for row, raw in zip(published(path), given, strict=True):
        assert row.world == row.pp * row.cp * row.dp * row.shape.tp
        assert row.microbatches * row.shape.rows * row.dp == int(raw["global_batch"])
        if raw["measured_tok_s_gpu"]:
            tokens = int(raw["global_batch"]) * row.shape.length / row.world / row.seconds
            assert tokens == pytest.approx(float(raw["measured_tok_s_gpu"]), rel=0.01)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.acceptance)])
def test_a_layer_is_what_the_formula_says(tp: int) -> None:
    """The operations of a layer's products: six for each parameter and token, over the ranks of tensor parallelism.
    Twice the microbatches take longer, and so does a program that Python starts kernel by kernel. Of FSDP each layer's
    gather goes round the whole ring: more ranks take longer, however small the layers are."""
    row = next(row for row in published() if row.name == "mpt-125m")
    small = replace(row.shape, rows=1, length=512, tp=tp, sequence=tp > 1)
    layer, rest = parts(small)
    of_layer = sum(n * work.flops for work, n in layer.products.items() if work.kind == "product")
    assert of_layer == 6 // tp * row.params[0] * 512
    assert sum(n * work.flops for work, n in rest.products.items()) == 6 // tp * row.params[1] * 512
    assert layer.moved[1] < layer.moved[0]
    machine = hardware.load("a100-40gb")
    row = replace(row, shape=small, microbatches=1, layers=48)

    def seconds(row: Published, eager: float = 1.0) -> float:
        return calibration.predicted(row, machine, eager)

    assert seconds(row) < seconds(replace(row, microbatches=2))
    assert seconds(row) < seconds(row, eager=0.8)
    alone, some, many = (seconds(replace(row, dp=ranks)) for ranks in (1, 64, 1024))
    assert some > alone
    assert many - alone > 4 * (some - alone)


@pytest.mark.parametrize(("pp", "layer", "ends", "slowest"), [
    (4, 1.0, 1.5, 4.5),  # 12 layers: three each, and the ends beside three of them
    (8, 1.0, 1.5, 2.0),  # 12 layers on 8 roles: seven roles of two hold them all, if need be
    (5, 1.0, 1.5, 3.0),
    (5, 1.0, 9.0, 9.0),
])  # fmt: skip
def test_layers_that_the_roles_do_not_divide_are_dealt_around_the_ends(
    pp: int, layer: float, ends: float, slowest: float
) -> None:
    row = replace(next(published()), layers=12, pp=pp)
    assert calibration._slowest(row, layer, ends) == slowest


def test_of_the_layouts_of_one_step_the_fastest_by_prediction_is_named() -> None:
    first, *_ = published()
    rows = [replace(first, pp=pp, seconds=seconds) for pp, seconds in ((1, 4.0), (2, 2.0), (4, 3.0))]
    with (console := Console(width=200)).capture() as shown:
        calibration.choices(console, rows, [0.0, 0.0, -0.5])  # foretold: 4.0, 2.0 and 1.5 s
    assert "1.500 of the fastest of 3, tau 0.33" in shown.get()
    assert "pp 4" in shown.get()
