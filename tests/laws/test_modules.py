"""Every module of torch's own module database, trained one step: torch's loss and gradients, or a refusal."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db  # 2.11.0, 2.13.0
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

import fzero
from fzero import optim
from fzero.errors import FzeroError

PARTS, WIDE = 24, torch.float64
REFUSED = ("write running statistics in training", "gaussian_nll_loss asks", "transformer.py")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(1)
def test_loss_and_gradients_are_torchs(part: int, whole: bool) -> None:
    ends: Counter[str] = Counter()
    wrong = []
    for name, module, flat, treedef in drawn(part, 20 if whole else 2):
        try:
            what = difference(module, flat, treedef)
        except FzeroError as error:
            if not any(words in str(error) for words in REFUSED):
                raise
            ends["refused"] += 1
            continue
        ends["equal"] += not what
        wrong += [(name, what)] if what else []
    assert wrong == []
    assert ends["equal"] > ends["refused"]


def drawn(part: int, each: int) -> Iterator[tuple[str, nn.Module, list[Any], Any]]:
    """(name, module, operands of its forward, their tree) of the database's inputs that eager takes."""
    for info in module_db[part::PARTS]:
        for training in (False, True):
            torch.manual_seed(0)
            inputs = info.module_inputs_func(info, device="cpu", dtype=WIDE, requires_grad=False, training=training)
            for number, given in enumerate(inputs[:each]):
                if given.forward_input is None:
                    continue
                made = given.constructor_input
                module = info.module_cls(*made.args, **made.kwargs).to(WIDE).train(training)
                flat, treedef = pytree.tree_flatten((given.forward_input.args, given.forward_input.kwargs))
                flat = [x.detach() if isinstance(x, Tensor) else x for x in flat]
                try:
                    called = copy.deepcopy(module)  # which gives lazy modules their shapes, and leaves statistics
                    args, kwargs = pytree.tree_unflatten(flat, treedef)
                    called(*args, **kwargs)
                except Exception:
                    continue
                lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
                yield f"{info.name} {training} {number}", called if lazy else module, flat, treedef


def difference(module: nn.Module, flat: list[Any], treedef: Any) -> str:
    """What differs of fzero's step from torch's; "" if nothing does."""
    args, kwargs = pytree.tree_unflatten(flat, treedef)
    own = copy.deepcopy(module)
    loss = projected(own(*args, **kwargs))
    leaves = dict(own.named_parameters())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if leaves else ()
    grads = dict(zip(leaves, found, strict=True))
    params, buffers, apply = fzero.interop.from_module(module)

    def of(p: Any, b: Any) -> Tensor:
        args, kwargs = pytree.tree_unflatten([b.get(str(i), x) for i, x in enumerate(flat)], treedef)
        return projected(apply(p["module"], buffers, *args, **kwargs)) + 0.0 * p["other"]

    spec = fzero.Spec(loss=of, optimizer=optim.sgd(1.0))
    state = fzero.init({"module": params, "other": torch.zeros((), dtype=WIDE)}, spec)
    batch = {str(i): x for i, x in enumerate(flat) if isinstance(x, Tensor)}
    state = fzero.step(state, {**batch, "rows": torch.zeros(1)})
    torch.testing.assert_close(state.metrics["loss"], loss.detach(), rtol=1e-11, atol=1e-11, equal_nan=True)
    for path, before in params.items():
        wanted = before if grads[path] is None else before - grads[path]
        if not torch.allclose(state.params["module"][path].full(), wanted, rtol=1e-10, atol=1e-11, equal_nan=True):
            return path
    return ""


def projected(outs: Any) -> Tensor:
    """A sum of all floating results, each element by a weight of its own."""
    values = [x for x in pytree.tree_leaves(outs) if isinstance(x, Tensor) and x.is_floating_point()]
    weights = [torch.arange(x.numel(), dtype=WIDE).add(i).cos().reshape(x.shape) for i, x in enumerate(values)]
    return sum(((x * w).sum() for x, w in zip(values, weights, strict=True)), start=torch.zeros((), dtype=WIDE))
