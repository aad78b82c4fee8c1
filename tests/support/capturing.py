"""What the tests of capture share: a small loss, and checks of a refusal's words.

A refusal must name the leaf or variable, the user's line (the one marked `# here`) and what to write instead.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import CaptureError
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.state.state import State

REGION, REDUCE = torch.ops.fzero.region.default, torch.ops.fzero.reduce.default
SGD = fzero.optim.sgd(0.1)
Loss = Callable[[Any, Any], Any]


def params() -> dict[str, Tensor]:
    return {"w": torch.tensor([1.0, 2.0, 3.0])}


def batch() -> Tensor:
    return torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 3.0]])


def mean_square(p: Any, b: Tensor) -> Tensor:
    return ((b @ p["w"]) ** 2).mean()


def here(fn: Callable[..., Any]) -> str:
    """`file:line` of the line of `fn` that is marked."""
    lines, first = inspect.getsourcelines(fn)
    return f"{_file(fn)}:{next(first + i for i, line in enumerate(lines) if '# here' in line)}"


def _file(fn: Callable[..., Any]) -> str:
    return Path(inspect.getsourcefile(fn) or "").name


def defined(fn: Callable[..., Any]) -> str:
    return f"{_file(fn)}:{inspect.getsourcelines(fn)[1]}"


def said(error: type[Exception], fn: Callable[[], Any], *parts: str) -> str:
    """The message of the error that `fn` raises: exactly of this class, with all these parts."""
    with pytest.raises(error) as caught:
        fn()
    assert type(caught.value) is error
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is missing in: {message}"
    return message


def refused(loss: Loss, *parts: str, p: Any = None, b: Any = None, error: type[Exception] = CaptureError) -> str:
    """Lowers a step with this loss, which must be refused."""
    spec = fzero.Spec(loss=loss, optimizer=SGD)
    return said(error, lambda: fzero.lower(spec, params() if p is None else p, batch() if b is None else b), *parts)


def refused_step(step: Loss, *parts: str, state: Any = None, error: type[Exception] = CaptureError, **spec: Any) -> str:
    def run() -> None:
        fzero.lower(fzero.Spec(step=step, **spec), {"p": params()} if state is None else state, batch())

    return said(error, run, *parts)


def after_one_step(loss: Loss, p: Any = None, b: Any = None, **spec: Any) -> State:
    state = fzero.init(params() if p is None else p, fzero.Spec(loss=loss, optimizer=SGD, **spec))
    return fzero.step(state, batch() if b is None else b)


def agrees(loss: Loss) -> State:
    """One step of a loss gives the loss and the parameters that plain autograd gives."""
    state = after_one_step(loss)
    w = params()["w"].requires_grad_()
    value = loss({"w": w}, batch())
    value.backward()
    torch.testing.assert_close(state.metrics["loss"], value.detach())
    torch.testing.assert_close(state.params["w"].full(), w.detach() - 0.1 * w.grad)
    return state


def captured(step: Loss, state: Any = None, b: Any = None, **options: Any) -> Graph:
    return trace_step.capture(
        step, {"p": params()} if state is None else state, batch() if b is None else b, **{"axis": "dp", **options}
    )


def nodes(gm: torch.fx.GraphModule, target: Any = None) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and target in (None, n.target)]


def sgd_step(loss: Loss, **options: Any) -> Loss:
    def step(state: Any, b: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, **options)(state["p"], b)
        return {**state, "p": fzero.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)}, {"value": value}

    return step
