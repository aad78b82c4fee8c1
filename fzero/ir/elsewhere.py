"""elsewhere: what is of a device that cannot be traced here: it is traced on the processor, by the ops that torch takes
on the device, and its graph is moved there.

What code that is traced asks of its device (`x.is_cuda`, its capability) is
answered by the processor. `fzero fake-cuda` starts a process where the device answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import FakeTensor, chosen_for_a_device, fake_of_form, move_fake
from fzero.ir.forms import HOST
from fzero.ir.scan_op import BODY, SCAN, text_of, unshared_body_of


def device_elsewhere(values: Iterable[Any]) -> torch.device | None:
    """The device of tensors among the values, if it cannot be traced here; None if all can.

    >>> device_elsewhere([torch.empty(2), 3]) is None
    True
    """
    devices = {x.device for x in values if isinstance(x, torch.Tensor)}
    return next((device for device in devices if not backend.of(device).calls.traceable()), None)


@contextmanager
def chosen_for(device: torch.device) -> Iterator[None]:
    """A context in which what is traced on the processor has the ops of the device."""
    with backend.traced_for(device), chosen_for_a_device():
        yield


def told(kinds: Iterable[str]) -> str:
    """The devices of a trace, of these types, in words.

    >>> told({"meta", "cpu"})
    'cpu'
    """
    device = backend.traced_device()
    own = " and ".join(sorted({*kinds} - {"meta"}))
    return own if device is None else f"{device.type}, which is not here: they are traced on {own}"


def on_host(value: Any) -> Any:
    """A fake tensor of the same form on the processor; what is none, as it is."""
    if not isinstance(value, FakeTensor):
        return value
    return fake_of_form(value, False, value.shape, value.stride(), int(value.storage_offset()), value.dtype, HOST)


def move(gm: fx.GraphModule, device: torch.device) -> None:
    """Has what a graph computes on the processor, and the graphs within it, lie on a device, in place."""
    for graph in (part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            move_values(node.meta.get("val"), device)
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda x: _there(x, device))
            if node.target is SCAN:
                node.update_arg(BODY, _moved_body(node.args[BODY], device))
    gm.recompile()


def _moved_body(text: str, device: torch.device) -> str:
    """The body of a scan, which it holds as text, on a device."""
    body = unshared_body_of(text)
    move(body, device)
    return text_of(body)


def move_values(values: Any, device: torch.device) -> None:
    """Has the fake tensors among nested values that lie on the processor lie on a device, in place."""
    if isinstance(values, (list, tuple)):
        for value in values:
            move_values(value, device)
    elif isinstance(values, FakeTensor) and values.device.type == HOST.type:
        move_fake(values, device)


def _there(argument: Any, device: torch.device) -> Any:
    return device if isinstance(argument, torch.device) and argument.type == HOST.type else argument
