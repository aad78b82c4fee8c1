"""What crosses a border of segments: dense in its buffer, its dims in the order that the step gave them."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run, same_bits
from torch import Tensor, fx

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes, fx_values, segments
from fzero.verify import form
from lab.fuzz import runs
from lab.fuzz.runs import run_bound

aten = torch.ops.aten
W, X = torch.randn(4, 6), torch.randn(4, 6)


def metrics(step: Callable[[Any, Any], Any]) -> dict[str, Tensor]:
    """What the executor makes of a step, in spoiled memory, and the interpreter too."""
    spec = fzero.Spec(step=step, zero=3)
    lowered = fzero.lower(spec, W, X, world_size=1)
    interpreted = run(spec, W, lambda rank, number: X, world=1, steps=1)
    batch = {name: X for name, b in lowered.program.buffers.items() if b.kind == "batch"}
    (found,) = run_bound({0: lowered.program}, [{**interpreted.memory[0], **batch}], steps=1)
    assert all(same_bits(found[name], value) for name, value in interpreted.metrics[0][0].items())
    return found


def with_aux(loss: Callable[..., Any], after: Callable[[Tensor], Tensor] = lambda aux: aux) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        (_, aux), _ = fzero.value_and_grad(loss, has_aux=True)(state, batch)
        return state, {"aux": after(aux)}

    return step


@pytest.mark.parametrize(
    ("strides", "dense"),
    [((6, 1), True), ((1, 4), True), ((12, 2), False), ((0, 1), False), ((6, 0), False), ((8, 1), False)],
)
def test_what_has_gaps_or_meets_itself_is_not_dense(strides: tuple[int, int], dense: bool) -> None:
    value = torch.empty_strided((4, 6), strides, device="meta")
    assert fx_values.is_dense(value) == dense
    held = fx_values.dense_like(value)
    assert fx_values.is_dense(held)
    assert held.stride() == value.clone().stride()
    assert fx_values.is_dense(torch.empty_strided((4, 0), strides, device="meta"))
    assert fx_values.is_dense(torch.empty_strided((1, 1), strides, device="meta"))


@pytest.mark.parametrize("split", [torch.unsafe_chunk, torch.unsafe_split])
def test_an_alias_that_torch_does_not_mark_is_no_memory_of_its_own(split: Callable[..., Any]) -> None:
    """Their results have the gaps of views: as memory of their own they overlapped the next buffer."""
    found = metrics(with_aux(lambda p, b: ((p * b).sum(), split(p * b, 3, 1)[1])))
    assert same_bits(found["aux"], split(W * X, 3, 1)[1])


def test_a_result_with_the_gaps_of_its_operand_stays_in_its_buffer() -> None:
    """diagonal_scatter keeps the strides of what it writes into, here every second element."""

    def scattered(p: Tensor, b: Tensor) -> Tensor:
        return torch.diagonal_scatter((p * b)[:, ::2], b[0, :3].exp())

    found = metrics(with_aux(lambda p, b: ((p * b).sum(), scattered(p, b))))
    assert same_bits(found["aux"], scattered(W, X))


def test_a_segment_that_returns_gaps_is_refused() -> None:
    spec = fzero.Spec(loss=lambda p, b: (p * b).exp().sum(), optimizer=fzero.optim.sgd(0.1), zero=3)
    program = fzero.lower(spec, W, X).program
    op = next(op for op in program.ops if op.num_outputs)
    gm = segments.module(segments.copied(program.segments[op.segment].graph))
    node = fx_nodes.outputs(gm.graph)[0]
    node.meta["val"] = torch.empty_strided((*node.meta["val"].shape, 2), (1,) * node.meta["val"].ndim + (2,))
    broken = replace(program, segments={**program.segments, op.segment: gm})
    with pytest.raises(fzero.VerifyError, match=r"with strides \(2,\): its buffer has no room for the gaps"):
        fzero.verify(broken)


VIEWED = {
    "transposed": (lambda h: h.t(), lambda y: y.t().view(-1)),
    "with gaps": (lambda h: h.t()[::2], lambda y: y.t().view(2, 2, 3)),
    "expanded": (lambda h: h[:, 0].expand(5, 4), lambda y: y[0].view(2, 2)),
    "one element, expanded": (lambda h: h.sum().expand(4, 6), lambda y: y.view(24)),
}


@pytest.mark.parametrize("case", VIEWED)
def test_a_view_of_what_left_a_loss_is_a_view_again(case: str) -> None:
    """The view is traced on the strides that the value has inside; a contiguous copy of it does not have them."""
    inside, outside = VIEWED[case]
    found = metrics(with_aux(lambda p, b: ((p * b).sum(), inside(p * b)), outside))
    assert same_bits(found["aux"], outside(inside(W * X)).contiguous())


def test_memory_without_values_takes_no_copy() -> None:
    """Of `empty_strided` whose elements meet: a copy into such memory is an error."""

    def shaped(p: Tensor) -> Tensor:
        return torch.zeros_like(torch.empty_strided((4, 6), (0, 1))) + p

    found = metrics(with_aux(lambda p, b: ((p * b).sum(), shaped(p))))
    assert same_bits(found["aux"], W)


def pooled_twice() -> fx.GraphModule:
    """max(x, 1) computed twice; the values of both leave the segment."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6, device="meta")
    for _ in range(2):
        pooled = graph.call_function(torch.ops.aten.max.dim, (x, 1))
        pooled.meta["val"] = torch.max(x.meta["val"], 1)
        values = graph.call_function(operator.getitem, (pooled, 0))
        values.meta["val"] = pooled.meta["val"][0]
    graph.output([n for n in graph.nodes if n.target is operator.getitem])
    return segments.module(graph)


def test_equal_ops_of_several_results_that_leave_a_segment_stay_apart() -> None:
    gm = segments.merge_equal(pooled_twice())
    owners = [value for out in fx_nodes.outputs(gm.graph) for value in fx_values.memory(out)]
    assert len(set(owners)) == 2, "each output has a buffer of its own, and the executor fills one of each value"


def test_a_segment_that_returns_one_result_twice_is_refused() -> None:
    def step(state: Any, batch: Any) -> Any:
        low, high = batch.aminmax()
        return state, {"low": low, "high": high}

    program = fzero.lower(fzero.Spec(step=step, allow_unused=True), W, X, world_size=1).program
    picks = [n for gm in program.segments.values() for n in gm.graph.nodes if n.target is operator.getitem]
    assert [n.args[1] for n in picks] == [0, 1]
    assert not list(form.calls(program))
    picks[1].args = (picks[0].args[0], 0)
    assert "shares its memory with another" in str(list(form.calls(program)))


def test_what_equal_ops_leave_to_several_layers_is_there() -> None:
    """One result is read by the next layer, the other by the layer after it and by its backward."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = (batch @ params["layers.0.w"]).relu().view(4, 64, 3)
        one, other = x.max(2)[0], x.max(2)[0]
        return ((one + (other @ params["layers.1.w"]).tanh()) @ params["layers.2.w"]).pow(2).mean()

    def step(state: Any, batch: Any) -> Any:
        return state, fzero.value_and_grad(loss)(state, batch)[1]

    g = torch.Generator().manual_seed(0)
    shapes = {"layers.0.w": (6, 192), "layers.1.w": (64, 64), "layers.2.w": (64, 64)}
    params = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    made = runs.Prepared({}, params, [X], {"step": step, "zero": 3})
    found = runs.bound(made, runs.lowered(made))
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    for name, grad in zip(leaves, torch.autograd.grad(loss(leaves, X), list(leaves.values())), strict=True):
        torch.testing.assert_close(found[name], grad)


def layer_norm(dtype: torch.dtype) -> tuple[Any, ...]:
    rows = torch.ones(2, 4, dtype=torch.bfloat16)
    return aten.native_layer_norm.default, [rows, [4], *torch.ones(2, 4, dtype=dtype), 1e-5]


def group_norm(dtype: torch.dtype) -> tuple[Any, ...]:
    image = torch.ones(2, 4, 3, dtype=torch.bfloat16)
    return aten.native_group_norm.default, [image, *torch.ones(2, 4, dtype=dtype), 2, 4, 3, 2, 1e-5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [layer_norm, group_norm])
def test_statistics_of_a_norm_have_the_dtypes_of_its_kernel(norm: Any, dtype: torch.dtype) -> None:
    op, args = norm(dtype)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        found = segments.true_statistics(op, given, op(*given))
    assert [x.dtype for x in found] == [x.dtype for x in op(*args)]
