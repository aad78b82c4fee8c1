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


P = fzero.P
PIPELINED = {"mesh": {"pp": 2, "dp": -1}, "pipeline": "1f1b"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": {}}, "axis sizes, as in {'dp': 2}, or 'auto'"),
        ({"mesh": ("dp", 2)}, "axis sizes"),
        ({"mesh": "all"}, "axis sizes"),
        ({"mesh": {"d p": 2}}, "names as 'dp' and 'tp', not 'd p'"),
        ({"mesh": {3: 2}}, "not 3"),
        ({"mesh": {"dp": 0}}, "mesh['dp']=0"),
        ({"mesh": {"dp": -2}}, "mesh['dp']=-2"),
        ({"mesh": {"dp": -1, "dp_out": -1}}, "one axis may be -1, the rest of the world"),
        ({"mesh": {"dp": 2, "dp_out": 3, "pp": 1}}, "mesh={'dp_out': 3, 'pp': 1, 'dp': 2}"),
        ({"mesh": {"tp": 2}}, "shard= with 'tp' in a rule"),
        ({"mesh": {"tp": 2, "dq": 2}, "shard": {"w": P("tp")}}, "shard= with 'dq' in a rule"),
        ({"mesh": {"dpp": 2}}, "Did you mean 'pp'?"),
        ({"shard": {}}, "path rules to fzero.P"),
        ({"shard": {"w": ("tp",)}}, "path rules to fzero.P"),
        ({"shard": {3: P("tp")}}, "path rules to fzero.P"),
        ({"shard": {"w": P("dp")}}, "zero= cuts leaves over dp_out and dp"),
        ({"shard": {"w": P("pp")}}, "pipeline= over 'pp'"),
        ({"shard": {"w": P()}}, "a rule that cuts something over an axis"),
        ({"shard": {"w": P("tp")}}, "an axis 'tp' in mesh, as in mesh={'dp': -1, 'tp': 2}"),
        ({"mesh": {"tensor": 1}, "shard": {"w": P("tensr")}}, "Did you mean 'tensor'?"),
        ({"sequence": "tp"}, "shard=, which says what lies in parts"),
        ({"mesh": {"tp": 2}, "shard": {"w": P("tp")}, "sequence": "mp"}, "sequence='mp'"),
        ({"pipeline": "1f1b"}, "an axis `pp` in mesh, as in mesh={'pp': 2, 'dp': -1}; it is None"),
        ({**PIPELINED, "pipeline": "2f2b"}, "pipeline='2f2b'"),
        ({**PIPELINED, "pipeline": 3}, "a schedule's name, an fzero.Pipeline or an fzero.Schedule"),
        ({"zero": "hspd"}, "'hsdp' or 'hpz'"),
        ({"zero": {"**": "hsdp"}}, "path rules to them; 'hsdp' is of the whole state, as in zero='hsdp'"),
        ({"zero": {"**": [1]}}, "'**': [1]}): needed a stage 0, 1, 2 or 3"),
        ({"zero": "hsdp"}, "two data axes, as in mesh={'dp_out': 2, 'dp': 4}"),
        ({"zero": 4}, "a stage 0, 1, 2 or 3, or path rules to them"),
        ({"zero": True}, "a stage 0, 1, 2 or 3"),
        ({"zero": {"w": 3, "**": 5}}, "Spec(zero={'**': 5}): needed a stage"),
        ({"zero": {}}, "at least one rule, as in {'**': 3}"),
        ({"zero": {"params": ("dp",), "grads": ("dp",)}}, "all of params, grads and optimizer"),
        ({"zero": {"params": "dp", "grads": ("dp",), "optimizer": ("dp",)}}, "a tuple of axes of the mesh, of ['dp']"),
        ({"zero": {"params": (), "grads": (), "optimizer": ("dp_out",)}}, "of ['dp']"),
        ({"zero": {"params": (), "grads": (), "optimizer": ("dp", "dp")}}, "each axis once"),
        ({"params": []}, "params"),
        ({"params": 3}, "params=3"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatches": 2.0}, "microbatches=2.0"),
        ({"reduce": "eech"}, "Did you mean 'each'?"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_cannot_be_used(given: dict[str, object], message: str) -> None:
    with pytest.raises(fzero.SpecError) as error:
        Parallelism(**given)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": None}, {"mesh": "auto", "pipeline": "1f1b", "shard": {"w": P("tp")}, "sequence": "tp"}, PIPELINED,
        {"mesh": {"dp_out": 2, "dp": -1}, "zero": "hpz"}, {"mesh": {"dp": 2, "tp": 1}},
        {"mesh": {"tp": 2}, "shard": {"w": P("tp"), "**": P()}, "sequence": "tp"}, {"zero": {"w": 0, "**": 3}},
        {"zero": {"params": (), "grads": ["dp"], "optimizer": ("dp",)}}, {"params": ("a/**", "b/**")},
        {**PIPELINED, "pipeline": fzero.Pipeline("gpipe")},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_go_together(given: dict[str, object]) -> None:
    made = Parallelism(**given)  # type: ignore[arg-type]
    assert made.axes == (given["mesh"] if isinstance(given.get("mesh"), dict) else {})


def test_parameters_by_one_rule_or_several() -> None:
    assert Parallelism().param_rules == ("params/**",)
    assert Parallelism(params="model/**").param_rules == ("model/**",)
    assert Parallelism(params=["a/**", "b/**"]).param_rules == ("a/**", "b/**")
