"""Operands that torch's operator database says are wrong: what eager PyTorch refuses is refused, at the user's line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import opdb
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

import fzero
from fzero import optim
from fzero.errors import FzeroError

PARTS, EACH = 20, 12
LINE = re.compile(r"\w+\.py:\d+")
# raised by torch's Python code of its own arguments, as by any library: with its own words
WORDED = (ValueError, AttributeError, KeyError, NotImplementedError, AssertionError)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(1)
def test_what_eager_refuses_is_refused_at_its_line(part: int) -> None:
    ran, unplaced = [], []
    for name, number, info, flat, treedef in wrong(part):
        batch = {str(i): x.detach() for i, x in enumerate(flat) if isinstance(x, Tensor)}

        def loss(p: Any, b: Any, info: Any = info, flat: Any = flat, treedef: Any = treedef) -> Tensor:
            own, args, kwargs = pytree.tree_unflatten([b.get(str(i), x) for i, x in enumerate(flat)], treedef)
            outs = pytree.tree_leaves(info.op(own, *args, **kwargs))
            return sum((torch.view_as_real(x) if x.is_complex() else x).float().sum() for x in outs) + p["w"].sum()  # type: ignore[no-any-return]

        state = fzero.init({"w": torch.ones(2)}, fzero.Spec(loss=loss, optimizer=optim.sgd(0.1)))
        try:
            fzero.step(state, {**batch, "rows": torch.ones(1)})
            ran.append((name, number))
        except (FzeroError, *WORDED):
            pass
        except Exception as error:
            if not LINE.search("\n".join([str(error), *getattr(error, "__notes__", ())])):  # a kernel's has a note
                unplaced.append((name, number, error))
    assert ran == []
    assert unplaced == []


def wrong(part: int) -> Iterator[tuple[str, int, Any, list[Any], Any]]:
    """(op, number, its row, operands, their tree) of inputs that eager refuses."""
    for name in list(opdb.OPS)[part::PARTS]:
        info = opdb.OPS[name]
        if info.error_inputs_func is None:
            continue
        for number, case in enumerate(list(info.error_inputs("cpu"))[:EACH]):
            sample = case.sample_input
            flat, treedef = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            tensors = [x for x in flat if isinstance(x, Tensor)]
            if any(x.layout is not torch.strided or x.device.type != "cpu" for x in tensors):
                continue
            try:
                info.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                yield name, number, info, flat, treedef
