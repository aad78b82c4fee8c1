"""Models that nobody here wrote: equal to eager PyTorch, or refused with a remedy. All of them: tests/acceptance."""

import pytest
import torch
from foreign import sources
from foreign.case import Case, gaps, outcome
from foreign.table import FINE
from torch import nn

EXAMPLES = list(sources.keys("examples"))
ARCHITECTURES = list(sources.keys("hf")) if sources.installed("hf") else []
FAMILIES = list(sources.keys("timm")) if sources.installed("timm") else []


def check(key: str) -> None:
    found = outcome(sources.case(key))
    assert found["status"] in FINE, found


@pytest.mark.parametrize("key", EXAMPLES)
@pytest.mark.sampled(2)
def test_an_example_is_equal_or_refused(key: str) -> None:
    check(key)


@pytest.mark.parametrize("key", ARCHITECTURES)
@pytest.mark.acceptance  # in make test the examples, and test_hf.py's architectures
def test_an_architecture_is_equal_or_refused(key: str) -> None:
    check(key)


@pytest.mark.parametrize("key", FAMILIES)
@pytest.mark.sampled(2)
def test_a_family_of_timm_is_equal_or_refused(key: str) -> None:
    check(key)


# --- the comparison itself --------------------------------------------------------------------------------------------


def test_a_gap_is_relative_to_the_largest_element_and_a_floor() -> None:
    wanted = {"loss": torch.tensor(2.0), "grads/a": torch.tensor([10.0, 0.0]), "grads/b": torch.tensor([1e-9])}
    found = {"loss": torch.tensor(2.0), "grads/a": torch.tensor([10.0, 1e-3]), "grads/b": torch.tensor([2e-9])}
    seen = gaps(found, wanted)
    assert seen["loss"] == 0.0
    assert seen["grads/a"] == pytest.approx(1e-4)
    assert seen["grads/b"] == pytest.approx(1e-7)
    assert gaps({**found, "loss": torch.tensor(float("nan"))}, wanted)["loss"] == float("inf")


def test_another_gradient_is_wrong() -> None:
    """A loss that tells eager from a capture: what the comparison must see."""

    def loss(model: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value = model(batch["x"]).sum()  # type: ignore[operator]
        return value if isinstance(model, nn.Module) else value * 1.001

    case = Case(lambda: nn.Linear(2, 1), lambda: {"x": torch.ones(3, 2)}, loss)
    assert outcome(case)["status"] == "wrong"


def test_an_error_of_another_kind_is_no_refusal() -> None:
    def loss(model: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not isinstance(model, nn.Module):
            raise KeyError("write something else")
        return model(batch["x"]).sum()

    case = Case(lambda: nn.Linear(2, 1), lambda: {"x": torch.ones(3, 2)}, loss)
    assert outcome(case)["status"] == "error"
