"""When a step is traced again, and what the log says of it."""

import logging
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capturing import SGD, Loss, batch, mean_square, params, said
from torch import Tensor

import fzero
from fzero import TreeError


def scaled_loss(p: Any, b: Any) -> Tensor:
    return mean_square(p, b["x"]) * b["s"]


class Cached:
    """A state that is stepped with zero learning rate; counts programs and log lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture, loss: Loss = scaled_loss) -> None:
        caplog.set_level(logging.INFO, logger="fzero")
        self.log = caplog
        self.state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))

    def __call__(self, **given: Any) -> float:
        self.log.clear()
        self.state = fzero.step(self.state, given)
        return self.state.metrics["loss"].item()

    @property
    def programs(self) -> int:
        return len(self.state.runtime.programs)

    @property
    def messages(self) -> str:
        return "\n".join(r.getMessage() for r in self.log.records if r.name == "fzero")


def test_equal_shapes_do_not_retrace(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    assert run(x=x, s=2) == 2 * mean_square(params(), x)
    assert run(x=2 * x, s=2) == 2 * mean_square(params(), 2 * x), "values are not part of the program"
    assert run(x=x.t().contiguous().t(), s=2) == 2 * mean_square(params(), x), "nor are strides"
    assert run.programs == 1
    assert run.messages == ""


def test_a_new_shape_retraces_and_the_log_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    run(x=x, s=2)
    assert run(x=x[:2], s=2) == 2 * mean_square(params(), x[:2])
    assert "batch['x'] was f32[4, 3], is f32[2, 3]" in run.messages
    assert "'s'" not in run.messages
    run(x=x, s=2)
    assert run.messages == "", "the first program was kept"
    run(x=x, s=2, more=x.double())
    assert "batch['more'] is new" in run.messages
    run(x=x, s=2, more=x.long())
    assert "batch['more'] was f64[4, 3], is i64[4, 3]" in run.messages
    run(x=x, s=2)
    assert run.programs == 4


def test_static_values_are_part_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    plain = mean_square(params(), x).item()
    for count, value in enumerate([2, 3, 2.5, True, 1, 1.0, 0.0], 1):
        assert run(x=x, s=fzero.static(value)) == plain * value
        assert run.programs == count
    assert "batch['s'] was static(1.0), is static(0.0)" in run.messages
    zero = run(x=x, s=fzero.static(-0.0))
    assert math.copysign(1.0, zero) == -1.0, "-0.0 equals 0.0 but is another program"
    assert run(x=x, s=fzero.static(3)) == plain * 3
    assert run.messages == ""
    count = run.programs
    for _ in range(3):
        assert math.isnan(run(x=x, s=fzero.static(float("nan"))))
    assert run.programs == count + 1, "nan is not equal to itself but is the same program"


def test_a_number_that_changes_is_named_once_and_is_one_program(caplog: pytest.LogCaptureFixture) -> None:
    """The complaint: a learning-rate factor or a step number in the batch made a program a step."""
    run, x = Cached(caplog), batch()
    plain = mean_square(params(), x).item()
    assert run(x=x, s=0.5) == plain * 0.5
    assert run(x=x, s=0.25) == plain * 0.25
    assert run.messages.count("batch['s'] was float 0.5, is float 0.25") == 1
    assert "torch.tensor(x)" in run.messages
    assert "fzero.static(x)" in run.messages
    for number in range(40):
        assert run(x=x, s=number / 8) == pytest.approx(plain * number / 8)
        assert run.messages == ""
    assert run.programs == 2
    assert run(x=x, s=7) == pytest.approx(plain * 7), "an int is another dtype"
    assert run(x=x, s=np.float64(0.75)) == pytest.approx(plain * 0.75), "a number of numpy's is a float"
    assert run(x=x, s=np.float32(0.5)) == pytest.approx(plain * 0.5)
    run(x=x[:2], s=0.5)
    run(x=x[:2], s=1.5)
    assert run.programs == 4


def test_a_number_that_follows_the_shapes_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog, lambda p, b: mean_square(p, b["x"].reshape(b["n"], 3))), batch()
    for n in (2, 4, 2, 3):
        assert run(x=x[:n], n=n) == mean_square(params(), x[:n])
    assert run.programs == 3


def test_a_number_whose_value_is_needed_is_refused_with_static_as_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog, lambda p, b: mean_square(p, b["x"][: b["n"]])), batch()
    run(x=x, n=2)
    parts = ("batch['n']: a Python number that changed", "mark it in the batch: fzero.static(x)")
    said(fzero.CaptureError, lambda: run(x=x, n=3), *parts)
    for n in (2, 3, 2):
        assert run(x=x, n=fzero.static(n)) == mean_square(params(), x[:n])
    run, x = Cached(caplog, lambda p, b: F.dropout(mean_square(p, b["x"]), b["p"], training=False)), batch()
    run(x=x, p=0.1)
    said(fzero.CaptureError, lambda: run(x=x, p=0.2), "batch['p']: a Python number that changed", "fzero.static(x)")


def test_numbers_of_an_evaluation_are_settled_too(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    run(x=x, s=1.0)
    values = [float(fzero.evaluate(run.state, {"x": x, "s": n / 4}, scaled_loss)) for n in range(8)]
    assert values == pytest.approx([mean_square(params(), x).item() * n / 4 for n in range(8)])
    assert len(run.state.runtime.evaluations) == 2
    assert run.messages.count("a Python number that changes") == 1
    assert run(x=x, s=1.0) > 0
    assert run.programs == 1


def test_a_program_runs_as_it_was_traced_whatever_modes_are_on() -> None:
    states = [fzero.init(params(), fzero.Spec(loss=mean_square, optimizer=SGD)) for _ in range(2)]
    plain = fzero.step(states[0], batch())
    with torch.no_grad(), torch.inference_mode():
        other = fzero.step(states[1], batch())
    assert torch.equal(plain.params["w"].full(), other.params["w"].full())


def test_a_program_runs_without_the_ambient_autocast_that_it_was_traced_under(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])

    def loss(p: Any, b: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return ((b["x"] @ w.t() * p["w"]) ** 2).mean()

    run, x = Cached(caplog, loss), torch.tensor([[0.7, 0.11]])
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x=x) == loss(params(), {"x": x}).item()


def test_a_string_selects(caplog: pytest.LogCaptureFixture) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return mean_square(p, b["x"]) if b["mode"] == "square" else (b["x"] @ p["w"]).mean()

    run, x = Cached(caplog, loss), batch()
    for _ in range(2):
        assert run(x=x, mode=fzero.static("square")) == mean_square(params(), x)
        assert run(x=x, mode=fzero.static("mean")) == (x @ params()["w"]).mean()
    assert run.programs == 2


def test_a_string_that_changes_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog, lambda p, b: mean_square(p, b["x"])), batch()
    for _ in range(2):
        run(x=x, text="a")
    parts = ("batch['text'] was str 'a', is str 'b'", "fzero.static", "else leave batch['text'] out of the batch")
    said(TreeError, lambda: run(x=x, text="b"), *parts)
    assert run(x=x, text="a") > 0
    assert run(x=x) > 0, "another structure"


def test_many_alternations_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    for number in range(30):
        assert run(x=x if number % 2 else x[:2], s=fzero.static(2 + number % 3)) > 0
    assert run.programs == 6
    assert run.messages == ""


@dataclass(frozen=True)
class Config:
    scale: float


@dataclass(frozen=True)
class Rows:
    x: Tensor


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_values_compared_by_content_may_be_static(caplog: pytest.LogCaptureFixture) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return mean_square(p, b["x"]).to(b["dtype"]) * b["c"].scale

    run, x = Cached(caplog, loss), batch()
    for _ in range(2):
        assert run(x=x, c=Config(2.0), dtype=torch.float64) == 2 * mean_square(params(), x)
        assert run(x=x, c=Config(3.0), dtype=torch.float32) == 3 * mean_square(params(), x)
    assert run.programs == 2


def test_objects_whose_contents_cannot_be_seen_are_refused() -> None:
    state = fzero.init(params(), fzero.Spec(loss=lambda p, b: mean_square(p, b["o"].x), optimizer=SGD))
    for value in (Batch(batch()), Rows(batch()), iter([1])):
        parts = (f"batch['o'] is a {type(value).__name__}", "Pass a dict", "optree.register_pytree_node")
        said(TreeError, lambda value=value: fzero.step(state, {"o": value}), *parts)
    for value in ({1, 2}, bytearray(b"x")):
        said(TreeError, lambda value=value: fzero.step(state, {"o": value}), f"batch['o'] is {type(value).__name__}")


def test_pytrees_of_all_kinds_are_batches(caplog: pytest.LogCaptureFixture) -> None:
    pair = namedtuple("pair", "x y")
    state = fzero.init(params(), fzero.Spec(loss=lambda p, b: mean_square(p, b["in"][0].x), optimizer=SGD))
    state = fzero.step(state, {"in": [pair(batch(), None)], "none": None, "empty": ()})
    assert state.metrics["loss"] == mean_square(params(), batch())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda p, b: p["w"].t().view(-1).sum() * b.sum(), r"write x\.reshape\(\.\.\.\) instead of x\.view"),
        (
            lambda p, b: p["w"].sum() * torch.autograd.grad((CLOSED * b).sum(), CLOSED)[0].sum(),
            r"or closed over\)\. Take it of x\.detach\(\)\.requires_grad_\(\)",
        ),
    ],
)  # fmt: skip
def test_torchs_own_errors_come_with_what_to_write(loss: Any, says: str) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.errors.CaptureError, match=f"(?i){says}"):
        fzero.lower(spec, {"w": torch.ones(2, 3)}, torch.ones(3), world_size=1)


CLOSED = torch.ones(3)
