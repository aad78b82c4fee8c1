"""The recorder beside torch's make_fx, and kept forms beside fake tensors: over torch's operator database."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from fzero._torch_compat import FakeTensor, FakeTensorMode
from fzero.ir import forms, fx_nodes
from fzero.ir.recorder import record

aten = torch.ops.aten
OPS = {f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name}": op for op in op_db}
HELD, WEIGHT = torch.ones(3), torch.nn.Parameter(torch.ones(3))


def form(x: Any) -> Any:
    """What a fake tensor says of itself."""
    if not is_strided(x):
        return (tuple(x.shape), x.layout, x.dtype) if isinstance(x, Tensor) else x
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.is_conj(), x.is_neg()


def listing(gm: fx.GraphModule) -> list[Any]:
    """The nodes of a graph by their numbers, each with the form of its value; without what nothing uses."""
    fx_nodes.drop_dead(gm.graph)
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda x: f"%{number[x]}" if x in number else x)
        value = getattr(gm, node.target) if node.op == "get_attr" else None
        known = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        target = value.tolist() if known else "input" if node.op == "placeholder" else node.target
        if target is torch.ops.aten.alias.default:
            target = torch.ops.aten.detach.default  # make_fx of torch 2.14 decomposes it
        vals = [form(x) for x in optree.tree_leaves(node.meta.get("val"))]  # torch keeps a list, or a tuple
        lines.append((node.op, str(target), str(args), str(dict(kwargs)), vals))
    return lines


def by_both(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[Any], list[Any]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in inputs]
    with mode:
        theirs = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
        fakes = [mode.from_tensor(x) for x in inputs]
        return listing(record(fn, fakes)), listing(theirs)


def changes_in_place(x: Tensor, y: Tensor) -> Any:
    x = x * 2
    x.add_(y).t_().mul_(3)
    x[0] = 1
    return [x, x.t().view(-1)]


def in_inference_mode(x: Tensor, y: Tensor) -> Any:
    with torch.inference_mode():
        return [torch.nn.functional.linear(x, y), torch.nn.functional.silu(x)]


def gradients(x: Tensor, y: Tensor) -> Any:
    x = x.detach().requires_grad_()
    loss = (torch.tanh(x @ y) * HELD).sum() + (x * WEIGHT).sum()
    return [loss, *torch.autograd.grad(loss, [x])]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "changes_in_place": changes_in_place,
    "in_inference_mode": in_inference_mode,
    "gradients": gradients,
    "several_results": lambda x, y: [*x.max(0), *x.split(2), x.unbind(1)[0]],
    "closed_over": lambda x, y: [x * HELD + WEIGHT, y + HELD],
    "literals": lambda x, y: [x + torch.tensor(0.5), y + torch.tensor([1.0, 2, 3])],
    "what_nothing_uses": lambda x, y: [(x.exp(), y)[1], None, 3],
    "lists_of_tensors": lambda x, y: [torch.cat([x, y, x]), *torch._foreach_add([x, y], 1.0), torch.stack([x, y])],
    "transforms": lambda x, y: [torch.func.vmap(lambda r: torch.func.grad(lambda q: (q * q).sum())(r))(x)],
    "a_checkpoint": lambda x, y: [torch.utils.checkpoint.checkpoint(lambda a: (a @ y).sin(), x, use_reentrant=False)],
    "nothing_returned": lambda x, y: [torch._foreach_mul_([z := x.clone(), y.clone()], 2.0), z],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_that_of_make_fx(name: str) -> None:
    ours, theirs = by_both(FUNCTIONS[name], torch.ones(3, 3), torch.ones(3, 3))
    assert ours == theirs
    assert len(ours) >= 3


class Twice(TorchDispatchMode):
    """Runs each op on fake tensors as they are, by a form that is kept now, and by one that was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if forms._results(func) is not None:
            own = [x for x in optree.tree_leaves([*args, *kwargs.values()]) if is_strided(x)]
            for _ in range(2):
                again = forms.run(func, args, kwargs)
                assert type(again) is type(result)
                pairs = zip(optree.tree_leaves(again), optree.tree_leaves(result), strict=True)
                for x, y in pairs:
                    assert form(x) == form(y), func
                    assert x.is_conj() == y.is_conj() and x.requires_grad == y.requires_grad, func  # noqa: PT018
                    assert not is_strided(x) or sharing(x, own) == sharing(y, own), func
            self.hits += 1
        return result


def is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def sharing(x: Tensor, own: list[Tensor]) -> list[bool]:
    memory = operator.attrgetter("_cdata")
    return [memory(x.untyped_storage()) == memory(y.untyped_storage()) for y in own]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", OPS)
def test_over_torchs_operator_database(name: str) -> None:
    """The graphs of its samples are those of make_fx, and a kept form is what torch's rule gives."""
    op = OPS[name]
    dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else torch.int64
    if not op.supports_dtype(dtype, "cpu"):
        pytest.skip("neither float32 nor int64")
    for sample in list(op.sample_inputs("cpu", dtype))[:4]:
        leaves, tree = optree.tree_flatten((sample.input, sample.args, sample.kwargs))  # type: ignore[arg-type]
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
            continue  # a capture refuses it by name, and make_fx knows no closed over one
        at = [i for i, x in enumerate(leaves) if type(x) is Tensor and x.layout is torch.strided]

        def call(*xs: Tensor, leaves: Any = leaves, tree: Any = tree, at: Any = at) -> Any:
            given = {**dict(enumerate(leaves)), **dict(zip(at, xs, strict=True))}
            value, args, kwargs = tree.unflatten([given[i] for i in range(len(given))])
            result = op(value, *args, **kwargs)
            return [x for x in optree.tree_leaves(result) if isinstance(x, Tensor)]

        inputs = [leaves[i] for i in at]
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with mode:
                call(*map(mode.from_tensor, inputs))
        except Exception:
            continue  # torch has no rule for it
        with mode, Twice():
            call(*map(mode.from_tensor, inputs))
        ours, theirs = by_both(call, *inputs)
        assert ours == theirs


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, True, False), (False, True, True)])
def test_forms_of_a_layer_norm(device: str, dtype: torch.dtype, of_weight: torch.dtype, wanted: Any) -> None:
    """Statistics of narrow rows differ by device, and its backward leaves out what nobody wants."""
    if device != "cpu" and dtype != of_weight:
        pytest.skip("CUDA's kernel takes no two dtypes, and a capture refuses them")
    mode = FakeTensorMode()

    def fake(*shape: int, like: torch.dtype) -> FakeTensor:
        return FakeTensor(mode, torch.empty(shape, dtype=like, device="meta"), torch.device(device))

    x, weight = fake(2, 3, 4, like=dtype), fake(4, like=of_weight)
    with mode, Twice() as seen:
        y, mean, rstd = aten.native_layer_norm(x, [4], weight, None, 1e-5)
        aten.native_layer_norm_backward(y, x, [4], mean, rstd, weight, None, wanted)
    assert seen.hits == 2
