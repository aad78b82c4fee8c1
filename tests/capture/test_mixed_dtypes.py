"""Operands of several dtypes: what eager PyTorch refuses is refused at its line, and what it takes is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import optim
from fzero._torch_compat import FakeTensor, FakeTensorMode
from fzero.capture import mixed_dtypes
from fzero.errors import CaptureError

aten = torch.ops.aten
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLACES = torch.tensor([0, 1])
CLASSES = torch.zeros(6, dtype=torch.long)


def written_rows(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[PLACES] = b[:2]
    return x


def written_row(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[1] = b[0]
    return x


def a_number_in_places_of_a_mask(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[torch.arange(6) < 2, PLACES] = b.sum()
    return x


def a_number_added_to_a_mask(w: Tensor, b: Tensor) -> Tensor:
    return torch.index_put(w, [w > 0], b.sum(), accumulate=True)


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put_": written_rows,
    "index_put": a_number_added_to_a_mask,
    "index_put_ ": a_number_in_places_of_a_mask,
    "put": lambda w, b: torch.put(w, PLACES, b[0, :2]),
    "addbmm": lambda w, b: torch.addbmm(w[:4], b[None, :, :2], b[None, :2]),
    "heaviside": lambda w, b: w[:4] * torch.heaviside(w[:4].detach(), b),
    "_embedding_bag": lambda w, b: F.embedding_bag(PLACES[None], w, per_sample_weights=b[:1, :2], mode="sum"),
    "index_add": lambda w, b: torch.index_add(w, 0, PLACES, b[:2]),
    "index_copy": lambda w, b: torch.index_copy(w, 0, PLACES, b[:2]),
    "nll_loss_forward": lambda w, b: F.cross_entropy(w, CLASSES, weight=b[0].abs()),
    "binary_cross_entropy": lambda w, b: F.binary_cross_entropy(w[:4].sigmoid(), b.sigmoid()),
    "_cdist_forward": torch.cdist,
    "linalg_cross": lambda w, b: torch.linalg.cross(w[:4], b),
    "mm": lambda w, b: w @ b.mT,
    "native_layer_norm": lambda w, b: F.layer_norm(w, (3,), b[0]),
    "native_batch_norm": lambda w, b: F.batch_norm(w, b[0], b[1].abs(), w[0], w[1]),
}


def filled(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[x > 0] = b.sum()
    return x


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": written_row,
    "a mask": filled,
    "a sum": lambda w, b: w[:4] + b,
    "a choice": lambda w, b: torch.where(b > 0, w[:4], b),
}


def lowered(make: Callable[[Tensor, Tensor], Tensor], batch: Tensor) -> None:
    spec = fzero.Spec(loss=lambda p, b: make(p["w"], b).sum(), optimizer=optim.sgd(0.1))
    fzero.lower(spec, {"w": torch.ones(6, 3)}, batch)


@pytest.mark.parametrize("name", MIXED)
def test_what_eager_refuses_is_refused_at_its_line(name: str) -> None:
    """The complaint: a raw RuntimeError when the step ran, without a line."""
    batch = torch.rand(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        MIXED[name](torch.ones(6, 3), batch)
    with pytest.raises(
        CaptureError, match=rf"aten\.{name.strip()}\.\w+ at test_mixed_dtypes\.py:\d+ is given f32\[.* and f64\["
    ):
        lowered(MIXED[name], batch)
    lowered(MIXED[name], batch.float())


@pytest.mark.parametrize("op", [aten.native_layer_norm.default, aten.native_group_norm.default], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_norm_of_two_dtypes_is_refused_where_a_device_has_no_kernel(op: Any, device: str) -> None:
    """CUDA's kernels read a weight in the dtype of the values ("expected scalar type BFloat16 but found Float"), and
    those of the processor take a wide one."""
    mode = FakeTensorMode()

    def fake(*shape: int, dtype: torch.dtype) -> FakeTensor:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device(device))

    def why(dtype: torch.dtype, of_weight: torch.dtype | None) -> str:
        x, weight = fake(4, 6, dtype=dtype), None if of_weight is None else fake(6, dtype=of_weight)
        args = (x, [6], weight, None, 1e-5) if "layer" in str(op) else (x, weight, None, 4, 6, 1, 3, 1e-5)
        return mixed_dtypes.why(op, args)

    said = why(torch.bfloat16, torch.float32)
    assert (
        said == ""
        if device == "cpu"
        else said.startswith(
            "is given bf16[4, 6] and f32[6]: on cuda this norm needs one dtype. Cast one: F.layer_norm(x.float()"
        )
    )
    assert why(torch.bfloat16, None) == why(torch.bfloat16, torch.bfloat16) == ""
    assert why(torch.float32, torch.bfloat16) != ""


def test_a_mask_that_keeps_an_op_wide_is_told_from_a_layer() -> None:
    """The complaint: advice to keep a BatchNorm's layer wide, where no layer is: a float mask made in the loss."""

    def attended(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        scores = h @ h.transpose(1, 2) + torch.zeros(2, 2)
        return scores.softmax(-1) @ h

    spec = fzero.Spec(loss=lambda p, b: attended(p["w"], b).sum(), optimizer=optim.sgd(0.1), precision="bf16")
    with pytest.raises(CaptureError, match=r"test_mixed_dtypes\.py:\d+ .*one dtype. Cast one, as in x.to"):
        fzero.lower(spec, {"w": torch.ones(3, 3)}, torch.ones(2, 2, 3))


INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nll_loss_forward": F.cross_entropy,
    "nll_loss2d_forward": lambda w, y: F.cross_entropy(w.T[None, :, :, None], y[None, :, None]),
    "multi_margin_loss": F.multi_margin_loss,
    "index_copy": lambda w, y: torch.index_copy(w, 0, y, w),
    "put": lambda w, y: torch.put(w, y, w[:, 0]),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_eager_refuses_are_refused_at_their_line(name: str) -> None:
    """The complaint: targets in int32 were a raw RuntimeError when the step ran."""
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(RuntimeError):
        INDICES[name](torch.ones(6, 3), y.int())
    with pytest.raises(CaptureError, match=rf"aten\.{name}\.\w+ at test_mixed_dtypes\.py:\d+ is given i32\[.*y.long"):
        lowered(INDICES[name], y.int())
    lowered(INDICES[name], y)


MASK = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.uint8)
BYTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "labels": F.cross_entropy,
    "a choice": lambda w, y: torch.where(y[:, None], w, 0.0),
    "rows of a mask that is known": lambda w, y: w[MASK],
}


@pytest.mark.filterwarnings("ignore:.*uint8:UserWarning")
@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_read_as_eager_reads_them(name: str) -> None:
    """The complaint: labels and masks of uint8 were refused."""
    w = torch.randn(6, 3)
    wanted = BYTES[name](w, MASK).sum()
    spec = fzero.Spec(loss=lambda p, b: BYTES[name](p["w"], b).sum(), optimizer=optim.sgd(0.1))
    state = fzero.step(fzero.init({"w": w}, spec), MASK)
    assert float(state.metrics["loss"]) == pytest.approx(float(wanted))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16])
def test_a_target_whose_gradient_eager_refuses(dtype: torch.dtype) -> None:
    """The complaint: a raw RuntimeError when the step ran."""
    target = torch.ones(6, 3, dtype=dtype)
    with pytest.raises(RuntimeError, match="Found dtype"):
        F.huber_loss(torch.ones(6, 3, requires_grad=True), target).backward()
    with pytest.raises(CaptureError, match=r"huber_loss_backward\.default at test_mixed_dtypes\.py:\d+ .*one dtype"):
        lowered(F.huber_loss, target)


def test_places_of_floats_are_refused() -> None:
    """The complaint: a raw IndexError when the step ran."""

    def written(w: Tensor, places: Tensor) -> Tensor:
        x = w * 1
        x[places] = 0.0
        return x

    with pytest.raises(
        CaptureError, match=r"index_put_\.default at test_mixed_dtypes\.py:\d+ is given f32\[6\] as ind"
    ):
        lowered(written, torch.ones(6))


TRUTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sub.Tensor": lambda w, m: w - m,
    "sub.Tensor ": lambda w, m: m - w,
    "rsub.Scalar": lambda w, m: w * (1 - m),
    "sub_.Tensor": lambda w, m: (w * 1).sub_(m),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_mask_that_is_subtracted_is_refused_at_its_line(name: str) -> None:
    """The complaint: a raw RuntimeError when the step ran."""
    mask = torch.ones(6, 3) > 0
    with pytest.raises(RuntimeError, match="with a bool tensor"):
        TRUTHS[name](torch.ones(6, 3), mask)
    with pytest.raises(
        CaptureError, match=rf"aten\.{name.strip()} at test_mixed_dtypes\.py:\d+ is given .*bool\[6, 3\].*~m"
    ):
        lowered(TRUTHS[name], mask)
    lowered(TRUTHS[name], mask.float())


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_taken(name: str) -> None:
    batch = torch.rand(4, 3, dtype=torch.float64)
    TAKEN[name](torch.ones(6, 3), batch)
    lowered(TAKEN[name], batch)


def test_norms_are_refused_where_eager_refuses_them() -> None:
    """Every dtype of values, weights, biases and statistics."""
    differing = []
    for dtype, weight, bias in itertools.product(FLOATS, (*FLOATS, None), (*FLOATS, None)):
        x, w, b = torch.randn(2, 4, 3).to(dtype), column(weight, 4), column(bias, 4)
        row, rows = column(weight, 3), column(bias, 3)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (aten.native_layer_norm.default, (x, [3], row, rows, 1e-5)),
            (aten.native_group_norm.default, (x, w, b, 2, 4, 3, 2, 1e-5)),
        ]
        for statistics, training in itertools.product((weight, torch.float32, dtype), (False, True)):
            own = column(statistics, 4)
            if own is not None:
                calls += [(aten.native_batch_norm.default, (x, w, b, own, own.clone(), training, 0.1, 1e-5))]
        differing += [
            (op, dtype, weight, bias) for op, args in calls if (mixed_dtypes.why(op, args) == "") != runs(op, args)
        ]
    assert differing == []


def column(dtype: torch.dtype | None, size: int) -> Tensor | None:
    return None if dtype is None else torch.ones(size, dtype=dtype)


def runs(op: Any, args: tuple[Any, ...]) -> bool:
    try:
        with torch.backends.mkldnn.flags(enabled=False):  # as BatchNorm is captured
            op(*args)
    except RuntimeError:
        return False
    return True
