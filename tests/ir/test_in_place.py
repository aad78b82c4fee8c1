"""In-place ops in a trace: what eager PyTorch refuses is refused at its line, in eager's words, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import opdb
import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo  # 2.11.0, 2.13.0

import fzero
from fzero import optim, tree
from fzero._torch_compat import FakeTensorMode, TorchDispatchMode
from fzero.errors import CaptureError
from fzero.ir import forms, in_place

SHAPE, DTYPE, MEMORY = "doesn't match the broadcast shape", "can't be cast to the desired output", "single memory"
SAID = DTYPE, MEMORY
DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)


def mask_of_a_number(w: Tensor, b: Tensor) -> Any:
    m = w.sum() > 0
    m &= b > 0
    return m


def bound_of_a_number(w: Tensor, b: Tensor) -> Any:
    return w.sum().clamp_(min=b[0])


def power_of_a_row(w: Tensor, b: Tensor) -> Any:
    return w.sum(0).pow_(b.abs())


def half_of_counts(w: Tensor, b: Tensor) -> Any:
    counts = (b > 0).sum(0)
    counts *= 0.5
    return counts


def weighted_counts(w: Tensor, b: Tensor) -> Any:
    return (b > 0).sum(0).mul_(b[0])


def weighted_mask(w: Tensor, b: Tensor) -> Any:
    return (b > 0).mul_(b)


def complex_sum(w: Tensor, b: Tensor) -> Any:
    return (w * 1).add_(b[0].to(torch.complex64))


def root_of_counts(w: Tensor, b: Tensor) -> Any:
    return (b > 0).sum(0).pow_(0.5)


def odds_of_counts(w: Tensor, b: Tensor) -> Any:
    return (b > 0).sum(0).logit_()


def list_of_counts(w: Tensor, b: Tensor) -> Any:
    counts = (b > 0).sum(0)
    torch._foreach_mul_([counts], 0.5)
    return counts


def scaled_counts(w: Tensor, b: Tensor) -> Any:
    return (b > 0).sum(0).ldexp_(b[0])


def counts_of_an_out(w: Tensor, b: Tensor) -> Any:
    return torch.mul(b, 0.5, out=torch.zeros(4, 3, dtype=torch.long))


def expanded_out(w: Tensor, b: Tensor) -> Any:
    return torch.mul(b, 0.5, out=torch.zeros(3).expand(4, 3))


def expanded(w: Tensor, b: Tensor) -> Any:
    return w.sum(0).expand(6, 3).mul_(2.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (mask_of_a_number, SHAPE), (bound_of_a_number, SHAPE), (power_of_a_row, SHAPE), (half_of_counts, DTYPE),
        (weighted_counts, DTYPE), (weighted_mask, DTYPE), (complex_sum, DTYPE), (root_of_counts, DTYPE),
        (odds_of_counts, DTYPE), (list_of_counts, DTYPE), (expanded, MEMORY), (scaled_counts, "be cast to the desired"),
        (counts_of_an_out, DTYPE), (expanded_out, MEMORY),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_what_eager_refuses_is_refused_at_its_line(make: Callable[..., Any], words: str) -> None:
    """The complaint: each ran, with numbers of another function."""
    w, batch = torch.ones(6, 3), torch.ones(4, 3)
    with pytest.raises(RuntimeError, match=words):
        make(w, batch)
    spec = fzero.Spec(loss=lambda p, b: p["w"].sum() * make(p["w"], b).sum().real, optimizer=optim.sgd(0.1))
    with pytest.raises(
        (RuntimeError, CaptureError), match=rf"test_in_place\.py:\d+: aten\.\w+\.\w+ of .*{re.escape(words)}"
    ):
        fzero.lower(spec, {"w": w}, batch)


def test_a_quotient_of_whole_numbers_has_its_operands_shape() -> None:
    """`floor_divide_`, which torch does not mark as elementwise."""
    with FakeTensorMode(), pytest.raises(RuntimeError, match=SHAPE):
        forms.run(torch.ops.aten.floor_divide_.Tensor, (torch.ones(3), torch.ones(4, 3)), {})


EXPANDED: dict[str, Callable[[Tensor], Any]] = {  # eager takes the first five
    "fill_": lambda x: x.fill_(5.0),
    "zero_": lambda x: x.zero_(),
    "tril_": lambda x: x.tril_(),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0, 1]), 5.0),
    "index_put_": lambda x: x.__setitem__(torch.tensor([0, 1]), 5.0),
    "copy_": lambda x: x.copy_(torch.ones(4, 3)),
    "cumsum_": lambda x: x.cumsum_(0),
    "scatter_add_": lambda x: x.scatter_add_(0, torch.zeros(4, 3, dtype=torch.long), torch.ones(4, 3)),
    "addmm_": lambda x: x.addmm_(torch.ones(4, 2), torch.ones(2, 3)),
    "_foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_nothing_is_written_to_an_element_several_times(name: str) -> None:
    """The complaint: `x = row.expand(4, 3); x.fill_(5.0)` left `row + 4 * (5 - row)` in both."""

    def loss(p: Any, b: Any) -> Tensor:
        row = b * 1
        x = row.expand(4, 3)
        EXPANDED[name](x)
        return p["w"] * (x.sum() + row.sum())

    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1))
    with pytest.raises(CaptureError, match=rf"test_in_place\.py:\d+: aten\.{name}\.\w+ of .*{MEMORY}.*x = x.clone"):
        fzero.lower(spec, {"w": torch.ones(())}, torch.ones(1, 3))


def test_one_of_the_rows_that_are_one_may_be_written() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        row = b * 1
        x = row.expand(4, 3)
        x[0] = 5.0
        return p["w"] * (x.sum() + row.sum())

    state = fzero.init({"w": torch.ones(())}, fzero.Spec(loss=loss, optimizer=optim.sgd(0.1)))
    assert float(fzero.step(state, torch.ones(1, 3)).metrics["loss"]) == 75.0


def doubled(w: Tensor) -> Tensor:
    made = w * 1
    torch._foreach_mul_([made], 2.0)
    return made


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a complex number's power": lambda w: (w * 1j).pow_(2.0).real,
    "a complex number's number": lambda w: (w * 1j).add_(2.0).abs(),
    "a real number's number": lambda w: (w * 1).pow_(2),
    "a list's number": doubled,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_fit_are_taken(name: str) -> None:
    """The complaint: a power of complex numbers was compared with `number ** tensor`."""
    w = torch.ones(3)
    spec = fzero.Spec(loss=lambda p, b: NUMBERS[name](p["w"]).sum() * b.sum(), optimizer=optim.sgd(0.1))
    state = fzero.step(fzero.init({"w": w}, spec), torch.ones(1))
    assert float(state.metrics["loss"]) == pytest.approx(float(NUMBERS[name](w).sum()))


class Checked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.count += 1
            in_place.check(func, args, kwargs or {}, forms.run)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sampled(1)
def test_what_eager_takes_is_taken(dtype: torch.dtype, whole: bool) -> None:
    """The in-place forms of torch's operator database; those of fifteen of its ops in `make test`."""
    checked, refused = Checked(), []
    infos = [info for info in opdb.OPS.values() if info.inplace_variant and info.supports_dtype(dtype, "cpu")]
    for info in infos if whole else random.Random(str(dtype)).sample(infos, 15):
        for sample in samples(info, dtype):
            mode = FakeTensorMode()
            own, args, kwargs = tree.map(
                lambda x, mode=mode: mode.from_tensor(x) if isinstance(x, Tensor) else x,
                (sample.input.clone(), sample.args, sample.kwargs),
            )
            with mode:
                try:
                    with checked:
                        info.inplace_variant(own, *args, **kwargs)
                except Exception as error:
                    if any(words in str(error) for words in SAID):
                        refused.append((info.name, sample, error))
    assert refused == []
    assert checked.count >= (200 if whole else 10)


@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.sampled(1)
def test_an_out_is_taken_where_eager_takes_it(given: torch.dtype, whole: bool) -> None:
    """The elementwise ops of torch's operator database into a tensor of this dtype, and into an expanded one."""
    checked, differing = Checked(), []
    kinds = (UnaryUfuncInfo, BinaryUfuncInfo)
    infos = [
        x
        for x in opdb.OPS.values()
        if isinstance(x, kinds) and x.supports_out and x.supports_dtype(torch.float32, "cpu")
    ]
    for info in infos if whole else random.Random(str(given)).sample(infos, 15):
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 3):
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            if not isinstance(result, Tensor):  # frexp's two
                continue
            for out in (torch.zeros_like(result, dtype=given), torch.zeros((), dtype=given).expand(result.shape)):
                refused, why = refuses(info.op, sample, out), refuses(info.op, sample, out, checked)
                if (not refused and any(map(why.__contains__, SAID))) or (
                    not why and any(map(refused.__contains__, SAID))
                ):
                    differing.append((info.name, sample, out.dtype, refused, why))
    assert differing == []
    assert checked.count >= (500 if whole else 30)


def refuses(op: Callable[..., Any], sample: Any, out: Tensor, checked: Checked | None = None) -> str:
    """The error of an op that writes to `out`; with `checked` that on fake tensors."""
    operands = out, sample.input, sample.args, sample.kwargs
    with contextlib.ExitStack() as stack:
        if checked is not None:
            mode = stack.enter_context(FakeTensorMode())
            operands = tree.map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, operands)
            stack.enter_context(checked)
        try:
            op(operands[1], *operands[2], **operands[3], out=operands[0])
        except Exception as error:
            return str(error) or "an error"
    return ""


def samples(info: Any, dtype: torch.dtype) -> list[Any]:
    """Those of an op that eager takes."""
    taken = []
    for sample in info.sample_inputs("cpu", dtype):
        try:
            info.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)
        except Exception:
            continue
        taken.append(sample)
    return taken
