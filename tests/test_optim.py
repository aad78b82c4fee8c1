"""fzero.optim against torch.optim, closed forms, and itself cut into slices or traced.

A new optimizer joins `OPTIMIZERS` and inherits the comparison, the trace, and the rules on state and dtypes.
"""

import doctest
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import optim, tree
from fzero.errors import SpecError, TreeError
from fzero.optim import _ops

HYPER = (0.9, 0.99, 1e-8, 0.1)
few = settings(max_examples=25, deadline=None, derandomize=True)


class Case(NamedTuple):
    tx: optim.GradientTransformation
    torch: Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def warmup(count: int) -> float:
    return min(1.0, count / 5)


OPTIMIZERS = {
    "adam": Case(optim.adam(1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
    "adam_fused": Case(optim.adam(1e-2), lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)),
    "adam_l2": Case(
        optim.adam(1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": Case(optim.adamw(1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adamw_fused": Case(
        optim.adamw(1e-2, weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3, fused=True)
    ),
    "sgd": Case(optim.sgd(1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
    "sgd_l2": Case(optim.sgd(1e-2, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1)),
    "sgd_momentum": Case(
        optim.sgd(1e-3, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
    ),
    "sgd_nesterov": Case(
        optim.sgd(1e-3, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    ),
    "adamw_scheduled": Case(optim.adamw(optim.linear_warmup(1e-2, 5)), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "sgd_scheduled": Case(optim.sgd(optim.linear_warmup(1e-2, 5)), lambda p: torch.optim.SGD(p, lr=1e-2)),
}

shapes = st.sampled_from([(), (1,), (7,), (64,), (3, 5), (130,), (0, 4), (2, 3, 4)])
pytrees = st.recursive(
    shapes,
    lambda inner: (
        st.dictionaries(st.sampled_from(["w", "bias", "h.0.w"]), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple).filter(lambda t: not all(isinstance(i, int) for i in t))
        | st.tuples(inner, st.none()).map(list)
    ),
    max_leaves=6,
).map(lambda shapes: {"params": shapes})


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(i, int) for i in x)


def tensors(shapes: Any, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> Any:
    """The pytree of shapes with a tensor for each."""
    if shapes is None or is_shape(shapes):
        return None if shapes is None else draw(shapes)
    if isinstance(shapes, dict):
        return {key: tensors(value, draw) for key, value in shapes.items()}
    return type(shapes)(tensors(value, draw) for value in shapes)


def away_from_zero(shape: tuple[int, ...]) -> torch.Tensor:
    """So that a relative error means something."""
    return (torch.rand(shape) + 1.0) * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)


def example() -> Any:
    torch.manual_seed(0)
    return tensors({"a": {"w": (4, 6), "bias": (6,)}, "scale": (), "rest": [(130,), None]}, away_from_zero)


def leaves(values: Any) -> list[torch.Tensor]:
    return tree.flatten(values)[1]


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    for path, x, y in zip(tree.flatten(got)[0], leaves(got), leaves(wanted), strict=True):
        assert x.dtype == y.dtype, path
        assert (x - y).norm() <= tolerance * y.norm(), f"{path}: {x} against {y}"


def train(tx: optim.GradientTransformation, params: Any, gradients: list[Any]) -> tuple[Any, Any]:
    state = tx.init(params)
    for grads in gradients:
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def train_torch(make: Callable[..., Any], params: Any, gradients: list[Any], scheduled: bool = False) -> Any:
    params = tree.map(lambda p: p.clone().requires_grad_(), params)
    optimizer = make(leaves(params))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup) if scheduled else None
    for grads in gradients:
        for p, g in zip(leaves(params), leaves(grads), strict=True):
            p.grad = g.clone()
        optimizer.step()
        if schedule:
            schedule.step()
    return tree.map(torch.Tensor.detach, params)


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(shapes=pytrees, seed=st.integers(0, 2**31))
@few
def test_twenty_steps_are_those_of_torch(name: str, shapes: Any, seed: int) -> None:
    torch.manual_seed(seed)
    params = tensors(shapes, away_from_zero)
    gradients = [tensors(shapes, torch.randn) for _ in range(20)]
    got, state = train(OPTIMIZERS[name].tx, params, gradients)
    assert_close(got, train_torch(OPTIMIZERS[name].torch, params, gradients, "scheduled" in name))
    assert int(state.count) == 20


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_is_pure_and_keeps_dtypes_and_structure(name: str, dtype: torch.dtype) -> None:
    params, grads = (tree.map(lambda p: p.to(dtype), example()) for _ in range(2))
    tx = OPTIMIZERS[name].tx
    state = tx.init(params)
    before = [t.clone() for t in leaves((params, grads, state))]
    updates, after = tx.update(grads, state, params)
    assert all(torch.equal(x, y) for x, y in zip(before, leaves((params, grads, state)), strict=True))
    assert tree.flatten(after)[2] == tree.flatten(state)[2]
    for old, new in ((state, after), (params, updates), (params, optim.apply_updates(params, updates))):
        assert [(t.shape, t.dtype) for t in leaves(new)] == [(t.shape, t.dtype) for t in leaves(old)]


def test_moments_carry_the_path_of_their_parameter() -> None:
    state = optim.chain(optim.clip_by_global_norm(1.0), optim.masked(optim.adamw(0.1), "a/**")).init(example())
    assert tree.flatten(state)[0] == ["1/count", "1/mu/a/bias", "1/mu/a/w", "1/nu/a/bias", "1/nu/a/w"]
    assert optim.sgd(0.1).init(example()).momentum is None
    assert state[1].count.dtype == torch.int64


def test_weight_decay_mask() -> None:
    params, tx = example(), optim.adamw(0.1, weight_decay=0.5, mask=lambda path, leaf: leaf.dim() > 1)
    updates, _ = tx.update(tree.map(torch.zeros_like, params), tx.init(params), params)
    assert torch.equal(optim.apply_updates(params, updates)["a"]["w"], params["a"]["w"] * (1 - 0.1 * 0.5))
    assert not any(updates["rest"][0]), "a bias must not decay"


def test_sgd_can_be_differentiated_and_batched() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9))

    def after_a_step(p: Any, x: torch.Tensor) -> torch.Tensor:
        grads = torch.func.grad(lambda p: (p["w"] * x).square().sum())(p)
        p = optim.apply_updates(p, tx.update(grads, tx.init(p), p)[0])
        return (p["w"] * x).square().sum()

    def by_hand(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        g = 2 * w * x.square()
        return ((w - 0.1 * g / (g.norm() + 1e-6)) * x).square().sum()  # the norm is greater than 1

    params, x = {"w": torch.tensor([0.3, -0.2])}, torch.tensor([1.0, 2.0])
    got = torch.func.grad(after_a_step)(params, x)["w"]
    torch.testing.assert_close(got, torch.func.grad(by_hand)(params["w"], x))
    batch = torch.stack([x, 2 * x])
    both = torch.vmap(after_a_step, in_dims=(None, 0))(params, batch)
    torch.testing.assert_close(both, torch.stack([after_a_step(params, row) for row in batch]))
    old_style = {"w": params["w"].clone().requires_grad_()}
    torch.testing.assert_close(torch.autograd.grad(after_a_step(old_style, x), old_style["w"])[0], got)


def test_adam_refuses_to_be_differentiated() -> None:
    params = {"w": torch.ones(2, requires_grad=True)}
    tx = optim.adamw(0.1)
    with pytest.raises(TypeError, match=r"adamw: its fused kernel cannot be differentiated.*torch.no_grad"):
        tx.update({"w": torch.ones(2)}, tx.init(params), params)
    with torch.no_grad():
        tx.update({"w": torch.ones(2)}, tx.init(params), params)


# --- operators --------------------------------------------------------------------------------------------------------


def operands(n: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    p, g, m, v = (torch.randn(n) for _ in range(4))
    return [t.to(dtype) for t in (p, g, m, v.square())]


def scalars(count: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(count), torch.tensor(lr, dtype=torch.float64)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_op_is_torch_fused_bit_for_bit(decoupled: bool) -> None:
    torch.manual_seed(0)
    p, _, m, v = operands(1037)
    m, v = torch.zeros_like(m), torch.zeros_like(v)
    ours, leaf = p.clone(), p.clone().requires_grad_()
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([leaf], lr=3e-3, betas=HYPER[:2], weight_decay=HYPER[3], fused=True)
    for step in range(1, 21):
        g = torch.randn_like(p)
        ours, m, v = _ops.adamw(ours, g, m, v, *scalars(step, 3e-3), *HYPER, decoupled)
        leaf.grad = g
        optimizer.step()
    state = optimizer.state[leaf]
    for x, y in ((ours, leaf), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(size=st.integers(0, 5000), cuts=st.lists(st.integers(0, 78)), seed=st.integers(0, 2**31))
@few
def test_slices_on_64_elements_have_the_bits_of_the_whole(dtype: Any, size: int, cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    whole, last = operands(size, dtype), (*scalars(7, 1e-2), *HYPER, True)
    cut = [t.clone() for t in whole]
    _ops.adamw_(*whole, *last)
    edges = sorted({0, size, *(64 * c for c in cuts if 64 * c < size)})
    for start, end in zip([0, *edges], edges, strict=False):
        _ops.adamw_(*(t[start:end] for t in cut), *last)
    assert all(torch.equal(x, y) for x, y in zip(whole, cut, strict=True))


@pytest.mark.parametrize("transposed", range(16))
def test_strides_do_not_matter(transposed: int) -> None:
    plain, last = operands((6, 5)), (*scalars(2, 1e-2), *HYPER, False)
    strided = [t.t().contiguous().t() if transposed >> i & 1 else t.clone() for i, t in enumerate(plain)]
    pure = _ops.adamw(*strided, *last)
    assert [t.stride() for t in pure] == [strided[i].stride() for i in (0, 2, 3)]
    _ops.adamw_(*plain, *last)
    _ops.adamw_(*strided, *last)
    for x, y, z in zip((plain[0], plain[2], plain[3]), (strided[0], strided[2], strided[3]), pure, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)
        assert torch.equal(y, z)


def test_a_slice_with_gaps_is_updated_alone() -> None:
    wide, last = torch.zeros(4, 8), (*scalars(1, 0.1), 0.9, 0.99, 1e-8, 0.0, True)
    _ops.adamw_(wide[:, :3], torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3), *last)
    torch.testing.assert_close(wide[:, :3], torch.full((4, 3), -0.1))
    assert not wide[:, 3:].any()


def test_ops_agree_with_their_shape_rules() -> None:
    last = (*scalars(1, 1e-2), *HYPER, True)
    checks = ("test_schema", "test_faketensor")
    for args in (operands((3, 5)), operands(()), operands(0), [t.t() for t in operands((3, 5))]):
        torch.library.opcheck(torch.ops.fzero.adamw.default, (*args, *last), test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.adamw_.default, (*args, *last), test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.delta.default, args[:2], test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.apply_delta.default, args[:2], test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.sum_squares.default, args[:1], test_utils=checks)


def test_tags() -> None:
    for name in ("adamw", "adamw_", "delta", "apply_delta"):
        assert torch.Tag.pointwise in getattr(torch.ops.fzero, name).default.tags
    assert torch.Tag.pointwise not in torch.ops.fzero.sum_squares.default.tags


def test_the_op_refuses_what_the_kernel_would_misread() -> None:
    p, g, m, v = operands(4)
    last = (*scalars(1, 0.1), *HYPER, True)
    with pytest.raises(ValueError, match=r"grad has shape \(3,\), param has shape \(4,\)"):
        _ops.adamw(p, g[:3], m, v, *last)
    with pytest.raises(TypeError, match=r"mu is torch.bfloat16, param is torch.float32"):
        _ops.adamw(p, g, m.bfloat16(), v, *last)
    with pytest.raises(ValueError, match=r"lr has shape \(1,\), but it must be 0-d"):
        _ops.adamw_(p, g, m, v, last[0], last[1][None], *HYPER, True)
    with pytest.raises(TypeError, match=r"x is torch.int64"):
        _ops.sum_squares(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_001])
def test_sum_squares(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    buffer = torch.randn(size + 3).to(dtype)
    x = buffer[3:]
    got = _ops.sum_squares(x)
    assert got.shape == ()
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(math.fsum(v * v for v in x.tolist()), rel=1e-13)
    assert torch.equal(got, _ops.sum_squares(x.clone())), "the bits depend on where the tensor lies"


def test_sum_squares_does_not_lose_small_terms() -> None:
    x = torch.full((100_000,), 1e-4)
    x[0] = 1e4  # a float32 sum would drop every other term
    assert _ops.sum_squares(x).item() > 1e8
    assert _ops.sum_squares(torch.ones(2, 3).t()).item() == 6.0


# --- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clip_is_that_of_torch(max_norm: float) -> None:
    grads = example()
    params = tree.map(lambda g: torch.zeros_like(g, requires_grad=True), grads)
    for p, g in zip(leaves(params), leaves(grads), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves(params), max_norm)
    clipped, _ = optim.clip_by_global_norm(max_norm).update(grads, (), None)
    assert_close(clipped, tree.map(lambda p: p.grad, params))
    assert optim.global_norm(grads).dtype == torch.float32
    torch.testing.assert_close(optim.global_norm(grads), norm)


def test_clip_edge_cases() -> None:
    grads = [torch.tensor(3.0).bfloat16(), torch.ones(2).bfloat16()]
    assert [g.dtype for g in optim.clip_by_global_norm(1.0).update(grads, (), None)[0]] == [torch.bfloat16] * 2
    (small,), _ = optim.clip_by_global_norm(1e-6).update([torch.tensor([1e-6])], (), None)
    assert small.item() == pytest.approx(0.5e-6), "1e-6 is added to the norm, as in torch"
    (zero,), _ = optim.clip_by_global_norm(1.0).update([torch.zeros(2)], (), None)
    assert not zero.any()


def test_global_norm_edge_cases() -> None:
    assert optim.global_norm({"a": None}).item() == 0.0
    assert optim.global_norm([torch.zeros(0)]).item() == 0.0
    assert optim.global_norm([torch.tensor([float("nan")]), torch.ones(1)]).isnan()


def test_chain_runs_in_order_and_threads_state() -> None:
    params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([8.0])}
    tx = optim.chain(optim.identity(), optim.clip_by_global_norm(2.0), optim.sgd(1.0, momentum=0.5), optim.scale(0.5))
    got, state = train(tx, params, [grads, grads])
    assert got["w"].item() == pytest.approx(1.0 - 0.5 * 2.0 - 0.5 * 3.0, abs=1e-5)
    assert [len(part) for part in state] == [0, 0, 2, 0]
    assert optim.chain().update(grads, (), params) == (grads, ())


MASKS = {
    "rule": "*/bias",
    "rules": ["a/bias", "**/bias"],
    "bools": {"a": {"w": False, "bias": True}, "scale": False, "rest": [False, None]},
    "function": lambda path, leaf: path.endswith("bias"),
}


@pytest.mark.parametrize("form", MASKS)
def test_masked(form: str) -> None:
    params = example()
    tx = optim.masked(optim.sgd(0.5, momentum=0.9), MASKS[form])
    state = tx.init(params)
    assert tree.flatten(state)[0] == ["count", "momentum/a/bias"]
    updates, state = tx.update(params, state, params)
    assert torch.equal(updates["a"]["bias"], -0.5 * params["a"]["bias"])
    assert updates["a"]["w"] is params["a"]["w"]
    assert updates["rest"] == [params["rest"][0], None]
    assert tree.flatten(tx.update(params, state, params)[1])[0] == ["count", "momentum/a/bias"]


def test_masks_make_parameter_groups() -> None:
    params, grads = example(), tree.map(torch.ones_like, example())
    tx = optim.chain(optim.masked(optim.sgd(0.1), "a/**"), optim.masked(optim.sgd(0.2), ["scale", "rest/**"]))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert {path: u.flatten()[0].item() for path, u in zip(*tree.flatten(updates)[:2], strict=True)} == pytest.approx(
        {"a/w": -0.1, "a/bias": -0.1, "scale": -0.2, "rest/0": -0.2}
    )


# --- schedules --------------------------------------------------------------------------------------------------------


def rates(schedule: optim.Schedule, steps: int) -> list[float]:
    values = [schedule(torch.tensor(count)) for count in range(steps)]
    assert all(v.dtype == torch.float64 and v.shape == () for v in values)
    return [v.item() for v in values]


@given(peak=st.floats(0, 10), end=st.floats(0, 10), warm=st.integers(0, 8), rest=st.integers(1, 20))
@few
def test_schedules_have_their_closed_forms(peak: float, end: float, warm: int, rest: int) -> None:
    def half_cosine(done: float) -> float:
        return end + (peak - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    total = warm + rest
    warmed = [peak * min(1.0, c / warm) if warm else peak for c in range(total + 3)]
    both = [warmed[c] if c < warm else half_cosine((c - warm) / rest) for c in range(total + 3)]
    assert rates(optim.constant(peak), 3) == [peak] * 3
    assert rates(optim.linear_warmup(peak, warm), total + 3) == pytest.approx(warmed, abs=1e-14)
    assert rates(optim.cosine(peak, rest, end), total) == pytest.approx([half_cosine(c / rest) for c in range(total)])
    assert rates(optim.warmup_cosine(peak, warm, total, end), total + 3) == pytest.approx(both, abs=1e-14)


def test_schedules_are_those_of_torch() -> None:
    def torch_rates(make: Callable[..., Any]) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        schedule, values = make(optimizer), []
        for _ in range(10):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return values

    lr = torch.optim.lr_scheduler
    annealed = torch_rates(lambda o: lr.CosineAnnealingLR(o, T_max=9, eta_min=0.1))
    assert rates(optim.cosine(0.5, 9, end=0.1), 10) == pytest.approx(annealed)
    ramp = torch_rates(lambda o: lr.LambdaLR(o, warmup))
    assert rates(optim.linear_warmup(0.5, 5), 10) == pytest.approx(ramp)


# --- tracing ----------------------------------------------------------------------------------------------------------


def one_step(tx: optim.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_trace_serves_every_step(name: str) -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), OPTIMIZERS[name].tx)
    params, grads = example(), example()
    traced = make_fx(one_step(tx), tracing_mode="fake")(params, grads, tx.init(params))
    ops = targets(traced)
    assert not any(op.startswith(("aten.item", "aten._local_scalar")) for op in ops)
    assert ops.count("fzero.sum_squares.default") == ops.count("fzero.apply_delta.default") == 4
    assert ops.count("fzero.adamw.default") == (4 if "adam" in name else 0)
    _, late = train(tx, params, [grads] * 6)
    flat = leaves(one_step(tx)(params, grads, late))
    outputs = leaves(traced(params, grads, late))
    assert all(torch.equal(x, y) for x, y in zip(outputs, flat, strict=True))


def test_the_captured_update_is_pointwise() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-3, 2, 9), mask="a/**"))
    params = example()
    traced = make_fx(one_step(tx), tracing_mode="fake")(params, params, tx.init(params))
    other = {
        str(node.target)
        for node in traced.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise not in node.target.tags
    }
    # casts of 0-d values (count, norm) and the sums
    assert other <= {"aten._to_copy.default", "fzero.sum_squares.default"}
    for node in traced.graph.nodes:
        if str(node.target) == "aten._to_copy.default":
            assert node.meta["val"].shape == ()


def test_the_graph_can_be_functionalised() -> None:
    tx, params = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)), example()
    state = tx.init(params)
    traced = make_fx(one_step(tx), tracing_mode="fake")(params, params, state)
    again = make_fx(torch.func.functionalize(traced), tracing_mode="fake")(params, params, state)
    assert sorted(targets(again)) == sorted(targets(traced))


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False])
def test_cuda_agrees_with_cpu_and_does_not_synchronise(decoupled: bool) -> None:
    torch.manual_seed(0)
    host, last = operands(64 * 1000 + 17), (*scalars(3, 1e-2), *HYPER, decoupled)
    device = [t.cuda() for t in host]
    on_device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in last]
    cut = [t.clone() for t in device]
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ops.adamw_(*device, *on_device)
        _ops.adamw_(*(t[:6400] for t in cut), *on_device)
        _ops.adamw_(*(t[6400:] for t in cut), *on_device)
        total = _ops.sum_squares(device[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(device, cut, strict=True))
    _ops.adamw_(*host, *last)
    for x, y in zip(device, host, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-6)
    assert total.item() == pytest.approx(_ops.sum_squares(host[0]).item(), rel=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG_VALUES = [
    (lambda: optim.adamw(-1.0), r"adamw: learning_rate is -1.0, but it must be at least 0"),
    (lambda: optim.adamw(float("nan")), r"learning_rate is nan"),
    (lambda: optim.sgd("0.1"), r"sgd: learning_rate is '0.1' \(str\), but it must be a Python number"),
    (lambda: optim.sgd(torch.tensor(0.1)), r"learning_rate is of type Tensor"),
    (lambda: optim.adam(0.1, betas=(0.9, 1.0)), r"adam: betas\[1\] is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.adam(0.1, betas=0.9), r"write betas=\(0.9, 0.999\)"),
    (lambda: optim.adam(0.1, eps=0), r"adam: eps is 0.0, but it must be greater than 0"),
    (lambda: optim.adamw(0.1, weight_decay=-1), r"weight_decay is -1.0"),
    (lambda: optim.sgd(0.1, momentum=1.0), r"sgd: momentum is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.sgd(0.1, nesterov=True), r"nesterov needs momentum.*write momentum=0.9"),
    (lambda: optim.clip_by_global_norm(0), r"max_norm is 0.0.*leave clip_by_global_norm out"),
    (lambda: optim.scale(float("inf")), r"scale: factor is inf, but it must be finite"),
    (lambda: optim.constant(-1), r"constant: value is -1.0"),
    (lambda: optim.linear_warmup(1.0, -1), r"linear_warmup: steps is -1, but it must be at least 0"),
    (lambda: optim.linear_warmup(1.0, 1e3), r"steps is 1000.0 \(float\).*whole number"),
    (lambda: optim.cosine(1.0, 0), r"cosine: steps is 0, but it must be at least 1"),
    (lambda: optim.cosine(1.0, 5, end=-1), r"cosine: end is -1.0"),
    (lambda: optim.warmup_cosine(1.0, 9, 5), r"warmup_steps is 9.*total_steps, which includes it, is 5"),
    (lambda: optim.chain(optim.identity), r"chain: argument 0 is identity, not a GradientTransformation: call it"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_VALUES)
def test_invalid_values_are_refused_when_given(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        make()
    assert isinstance(error.value, ValueError)


WRONG_GRADS = [
    ({"a": {"w": 1}}, r"params/a/bias has no counterpart there. A leaf the loss does not use has gradient None"),
    ({"a": {"w": 1, "bias": None}}, r"params/a/bias has no counterpart there"),
    ({"a": {"w": 1, "bias": 1, "bais": 1}}, r"grads/a/bais has no counterpart in params. Did you mean 'a/bias'"),
    ({"a": {"w": 1, "bias": 2}}, r"grads/a/bias has shape \(2,\), but params/a/bias has shape \(1,\)"),
    ({"a": {"w": 1, "bias": 0.5}}, r"grads/a/bias is 0.5 \(float\), but it must be a tensor"),
]


@pytest.mark.parametrize("tx", [optim.adamw(0.1), optim.sgd(0.1), optim.masked(optim.identity(), "**")])
@pytest.mark.parametrize(("sizes", "message"), WRONG_GRADS)
def test_gradients_unlike_params_are_named(tx: Any, sizes: Any, message: str) -> None:
    params = {"a": {"w": torch.ones(1), "bias": torch.ones(1)}}
    grads = tree.map(lambda n: torch.ones(n) if isinstance(n, int) else n, sizes)
    with pytest.raises(TreeError, match=message):
        tx.update(grads, tx.init(params), params)


def test_other_unlike_trees_are_named() -> None:
    params = {"a": [torch.ones(2)]}
    tx = optim.adamw(0.1)
    with pytest.raises(TreeError, match=r"grads/a/0 is held by tuple in dict, params/a/0 by list in dict"):
        tx.update({"a": (torch.ones(2),)}, tx.init(params), params)
    with pytest.raises(TreeError, match=r"grads/a/0 is torch.bfloat16, but params/a/0 is torch.float32: write .to"):
        tx.update({"a": [torch.ones(2).bfloat16()]}, tx.init(params), params)
    with pytest.raises(TreeError, match=r"adamw: mu does not have the structure of params: params/a/0"):
        tx.update(params, tx.init({}), params)
    with pytest.raises(TreeError, match=r"agree in every leaf"):
        optim.apply_updates(params, {**params, "b": []})
    with pytest.raises(TreeError, match=r"apply_updates: updates/a/0 has shape \(1,\)"):
        optim.apply_updates(params, {"a": [torch.ones(1)]})
    with pytest.raises(TreeError, match=r"params/step is torch.int64.*fzero.optim.masked"):
        tx.init({"step": torch.tensor(0)})
    with pytest.raises(TreeError, match=r"params/lr is 0.5 \(float\), but it must be a tensor"):
        tx.init({"lr": 0.5})
    with pytest.raises(TreeError, match=r"chain: opt_state has 1 parts, but the chain has 2"):
        optim.chain(tx, optim.identity()).update(params, (tx.init(params),), params)


WRONG_MASKS = [
    ("**/bais", r"the mask '\*\*/bais' matches none of the 4 leaves of params \(.*\). Did you mean '\*\*/bias'"),
    (["a/*", "scal"], r"the mask 'scal' matches none.*Did you mean 'scale'"),
    ({"a": {"w": True}}, r"mask does not have the structure of params: 'a/bias' is in one of them only"),
    (lambda path, leaf: 1, r"mask says 1 \(int\) for 'a/bias', but it must say True or False"),
]


@pytest.mark.parametrize(("mask", "message"), WRONG_MASKS)
def test_wrong_masks_are_refused_at_init(mask: Any, message: str) -> None:
    for tx in (optim.masked(optim.sgd(0.1), mask), optim.adamw(0.1, mask=mask)):
        with pytest.raises(SpecError, match=message):
            tx.init(example())


def test_a_schedule_must_stay_a_tensor() -> None:
    params = [torch.ones(1)]
    for schedule, shown in ((lambda count: 0.1, r"0.1 \(float\)"), (lambda count: torch.ones(1), r"shape \(1,\)")):
        tx = optim.sgd(schedule)
        with pytest.raises(SpecError, match=f"sgd: the schedule returned {shown}.*baked"):
            tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("module", ["_check", "_ops", "adam", "schedules", "sgd", "transform"])
def test_doctests(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"fzero.optim.{module}"))
    assert not failed
    assert attempted
