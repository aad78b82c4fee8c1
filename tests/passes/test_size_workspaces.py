"""size_workspaces: the bytes of a run beside the program's buffers, with and without stretches that are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from short_programs import written
from torch import Tensor

from fzero import backend
from fzero._torch_compat import FakeTensorMode
from fzero.ir.op import Op
from fzero.ir.program import Level
from fzero.ir.recorder import record
from fzero.passes.size_workspaces import size_workspaces

TEXT = """
    buffer x f32[64x64] batch
    buffer y f32[64x64] activation
    run x -> y  fresh=1  segment=s
    wait y
"""
MATRIX, ROW = 64 * 64 * 4, 64 * 4


def normed(x: Tensor) -> Tensor:
    """A matrix and a row are held until the result is there, which has memory of its own."""
    exps = x.exp()
    return exps * (exps * exps.sum(0)).sum(1)


def smallest(x: Tensor) -> Tensor:
    """What the kernel of a sort asks for is the allocator's."""
    return x.sort(0)[0]


def sized(body: Any, how: str | None = "none", device: str = "cpu") -> Op:
    with FakeTensorMode():  # no memory of a device is asked for
        gm = record(lambda x: [body(x)], [torch.empty(64, 64, device=device)])
    done = size_workspaces(written(TEXT, segments={"s": gm}), how)
    assert done.level is Level.SIZED
    assert done.ops[1].attrs == ()
    return done.ops[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_says_what_its_values_take_at_once(device: str) -> None:
    op = sized(normed, device=device)
    assert (op.workspace, op.get("heap"), op.get("compile")) == (MATRIX + ROW, None, None)


def test_a_run_says_what_its_kernels_take() -> None:
    assert sized(smallest).get("heap", 0) > MATRIX


def test_one_that_needs_nothing_says_nothing() -> None:
    op = sized(torch.sin)
    assert {"workspace", "heap"}.isdisjoint(key for key, _ in op.attrs)


def test_on_the_processor_a_run_has_room_for_both_forms() -> None:
    """Compiled, the whole is a loop that holds no value; it may not compile."""
    op = sized(normed, "inductor")
    assert (op.workspace, op.get("compile")) == (MATRIX + ROW, None)


@pytest.mark.parametrize(("how", "workspace"), [("inductor", 0), ("auto", MATRIX + ROW), ("none", MATRIX + ROW)])
def test_on_a_device_a_run_with_stretches_has_room_for_them_alone_and_says_so(how: str, workspace: int) -> None:
    """A matrix is too small for "auto"."""
    op = sized(normed, how, "cuda")
    assert (op.workspace, op.get("compile")) == (workspace, how if how == "inductor" else None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_word_it_is_what_the_device_does(device: str) -> None:
    assert sized(normed, None, device) == sized(normed, backend.of(device).compiles, device)
