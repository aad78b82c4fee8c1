"""What is of a device that is not here is traced on the processor, by the ops of the device, and moved there."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import backend
from fzero._torch_compat import FakeTensorMode, fake_empty
from fzero._torch_compat.device_autocast import WIDE, WIDE_NORM, WIDE_RESULT, WIDEST
from fzero.ir import elsewhere, fx_nodes
from fzero.ir.recorder import record

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(backend.CUDA.calls.traceable(), reason="of a machine without a device")


def traced(fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    """(op, the dtypes of its results, their devices) of a function of fake tensors of CUDA."""
    mode = FakeTensorMode()
    given = [fake_empty(mode, shape, dtype, CUDA) for shape in shapes]
    with elsewhere.chosen_for(CUDA), mode:
        gm = record(fn, given)
    found = []
    for node in gm.graph.nodes:
        if fx_nodes.is_compute(node):
            values = node.meta["val"]
            values = values if isinstance(values, (list, tuple)) else [values]
            found.append((str(node.target), [v.dtype for v in values], {v.device for v in values}))
    return found


def test_ops_are_the_devices_and_lie_there() -> None:
    (norm, *_), (attention, *_) = (
        [row for row in traced(fn, (2, 4, 8, 16)) if name in row[0]]
        for fn, name in (
            (lambda x: F.rms_norm(x, (16,)), "norm"),
            (lambda x: F.scaled_dot_product_attention(x, x, x), "att"),
        )
    )
    assert norm[0] == "aten._fused_rms_norm.default"
    assert norm[2] == {CUDA}
    assert attention[0] == "aten._scaled_dot_product_efficient_attention.default"


def test_statistics_have_the_dtype_that_they_have_there() -> None:
    """On the processor those of bf16 are bf16."""
    ((_, dtypes, _),) = [
        row for row in traced(lambda x: F.layer_norm(x, (16,)), (4, 16), dtype=torch.bfloat16) if "layer_norm" in row[0]
    ]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


def test_statistics_where_a_leaf_is_closed_over() -> None:
    """A real tensor lies on the processor: bf16 statistics, and none of a norm that reads running ones."""
    weight, mean, variance = (torch.ones(16, dtype=torch.bfloat16) for _ in range(3))

    def loss(p: Tensor, x: Tensor) -> Tensor:
        y = F.layer_norm(p * x, (16,), weight)
        return F.batch_norm(y, mean, variance).float().sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), device="cuda", precision="bf16")
    low = fzero.lower(spec, torch.empty(16), torch.empty(4, 16), world_size=1)
    nodes = [node for gm in low.program.segments.values() for node in gm.graph.nodes]
    of = {
        str(node.target): [(v.dtype, tuple(v.shape)) for v in node.meta["val"][1:]]
        for node in nodes
        if "norm." in str(node.target)
    }
    assert of["aten.native_layer_norm.default"] == [(torch.float32, (4, 1))] * 2
    assert of["aten.native_batch_norm.default"] == [(torch.float32, (16,))] * 2


def test_autocast_is_left_as_it_was() -> None:
    own = [torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype("cpu")]
    with elsewhere.chosen_for(CUDA):
        assert torch.get_autocast_dtype("cuda") is torch.float16
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.bfloat16
    assert [torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype("cpu")] == own


def test_factories_of_a_trace_lie_there() -> None:
    rows = traced(lambda x: x + torch.arange(4, device=x.device), (4,))
    assert {device for _, _, devices in rows for device in devices} == {CUDA}


def test_what_python_asks_of_the_device_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~mask` and `x[0]` of fake tensors of CUDA ask torch's C++ for a guard of the device, which is not there."""
    rows = traced(lambda x: x[0].masked_fill(~(x[0] > 0), 0), (2, 3))
    assert any("bitwise_not" in name for name, *_ in rows)


def test_other_threads_compute_as_ever() -> None:
    x = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(0))

    def computed(out: list[Tensor]) -> None:
        y = x.clone().requires_grad_()
        value = F.scaled_dot_product_attention(y, y, y, is_causal=True) + F.rms_norm(y, (8,))
        value = value + torch.vmap(lambda z: F.scaled_dot_product_attention(z, z, z) + F.softmax(z, -1))(y)
        value = value + torch.func.grad(lambda z: F.dropout(z, 0.5, False).square().sum())(y)
        value.square().sum().backward()
        assert y.grad is not None
        out += [value.detach(), y.grad]

    expected, found = list[Tensor](), list[Tensor]()
    computed(expected)
    with elsewhere.chosen_for(CUDA):
        thread = threading.Thread(target=computed, args=(found,))
        thread.start()
        thread.join()
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_a_forward_of_another_thread_has_its_backward_afterwards() -> None:
    """The complaint: "Could not run 'aten::_fused_rms_norm_backward'", where a step had begun beside a lowering."""
    x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    (expected,) = torch.autograd.grad(F.rms_norm(x, (8,)).square().sum(), x)
    found = list[Tensor]()
    with elsewhere.chosen_for(CUDA):
        thread = threading.Thread(target=lambda: found.append(F.rms_norm(x, (8,)).square().sum()))
        thread.start()
        thread.join()
    assert torch.equal(torch.autograd.grad(found[0], x)[0], expected)


def test_nothing_is_left_behind() -> None:
    x = torch.randn(4, 8)
    expected = F.rms_norm(x, (8,))
    with elsewhere.chosen_for(CUDA):
        assert backend.of_traced(x.device) is backend.CUDA
    assert backend.of_traced(x.device) is backend.CPU
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CPU")
    assert torch.equal(F.rms_norm(x, (8,)), expected)


def test_what_can_be_traced_here_is() -> None:
    assert elsewhere.device_elsewhere([torch.empty(2), torch.empty(2, device="meta"), 3]) is None


def test_the_lists_of_autocast_are_torchs() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    listed: dict[str, set[str]] = {}
    for policy, rows in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*?)\n\n", header, re.DOTALL):
        listed[policy] = {".".join(filter(None, row)) for row in re.findall(r"_\((\w+)(?:, (\w+))?\)", rows)}
    cast = torch._C._dispatch_has_kernel_for_dispatch_key
    for policy, own in (("FP32", WIDE), ("FP32_SET_OPT_DTYPE", WIDE_RESULT), ("PROMOTE", WIDEST)):
        known = {name for name in own if cast(f"aten::{name}", "AutocastCUDA")}  # not rms_norm before torch 2.12
        assert known == {name for name in listed[policy] if "imname" not in name}
    assert all(f'"{name}"' in header for name in WIDE_NORM)


def cast(kind: str, fn: Any) -> Any:
    x = torch.full((4, 4), 0.5)
    with torch.autocast(kind, torch.bfloat16):
        return [y.dtype for y in fn(x)]


def test_other_threads_are_cast_as_ever() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        y = x @ x
        return [y, y.softmax(-1), y.exp(), torch.cat([x, y]), F.layer_norm(y, (4,)), F.cross_entropy(y, x), y.norm()]

    expected, found = cast("cpu", fn), list[Any]()
    with elsewhere.chosen_for(CUDA), torch.autocast("cuda", torch.bfloat16):
        thread = threading.Thread(target=lambda: found.append(cast("cpu", fn)))
        thread.start()
        thread.join()
        own = [y.dtype for y in fn(torch.full((4, 4), 0.5))]
    assert found == [expected]
    assert own == [torch.bfloat16, *[torch.float32] * 6]
    assert cast("cpu", fn) == expected


@pytest.mark.parametrize(
    "call", [torch.cuda.synchronize, torch.cuda.Event, lambda: torch.empty(2).pin_memory(), torch.cuda.current_stream]
)
def test_a_question_of_a_device_is_refused_with_its_line(call: Any) -> None:
    if call is torch.cuda.Event and torch.version.cuda is not None:
        pytest.skip("a torch for CUDA makes an event without a device")

    def loss(p: Tensor, b: Tensor) -> Tensor:
        call()
        return (p * b).sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), device="cuda")
    with pytest.raises(fzero.CaptureError, match=r"test_elsewhere.py:\d+.*[Ll]eave"):
        fzero.lower(spec, torch.empty(2), torch.empty(2), world_size=1)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CPU")
