"""parallelism: what the fields of a Spec mean for the layout and the order of work."""

import pytest

import fzero
from fzero.plan.parallelism import Parallelism, by_column
from fzero.plan.stages import Columns

TWO = {"dp_out": 2, "dp": 2}


@pytest.mark.parametrize(
    ("zero", "stages"),
    [
        (2, 2),
        ({"blocks/**": 3, "**": 1}, {"blocks/**": 3, "**": 1}),
        ("hsdp", Columns(("dp",), ("dp",), ("dp",))),
        ("hpz", Columns(("dp_out", "dp"), ("dp_out", "dp"), ("dp_out", "dp"), copy=("dp",))),
        (
            {"params": ["dp"], "grads": ["dp"], "optimizer": ["dp_out", "dp"]},
            Columns(("dp",), ("dp",), ("dp_out", "dp")),
        ),
    ],
)
def test_zero_names_stages_by_column(zero: object, stages: object) -> None:
    assert Parallelism(mesh=TWO, zero=zero).stages("dp_out.dp") == stages  # type: ignore[arg-type]


def test_rules_to_stages_are_no_columns() -> None:
    assert not by_column({"params": 3, "optimizer": 1})
    assert not by_column({})
    assert by_column({"params": ()})


def test_the_order_of_work() -> None:
    assert Parallelism().order.schedule == "1f1b"
    assert Parallelism(mesh={"pp": 2}, pipeline="gpipe").order.schedule == "gpipe"
    own = fzero.Pipeline("zb-h1", cut=["blocks/1"])
    assert Parallelism(mesh={"pp": 2}, pipeline=own).order is own


def test_columns_lie_within_one_another() -> None:
    with pytest.raises(fzero.SpecError, match="params over no more axes than grads"):
        Parallelism(mesh=TWO, zero={"params": ("dp_out", "dp"), "grads": ("dp",), "optimizer": ("dp_out", "dp")})
    with pytest.raises(fzero.SpecError, match="the inner axis 'dp', before one outside of it"):
        Parallelism(mesh=TWO, zero={"params": (), "grads": (), "optimizer": ("dp_out",)})


@pytest.mark.parametrize("zero", [{1: 3}, {("a",): 2}])
def test_rules_are_text(zero: object) -> None:
    with pytest.raises(fzero.SpecError, match="path rules that are text"):
        Parallelism(zero=zero)  # type: ignore[arg-type]
