"""Transformations and schedules: clipping as torch clips, chains, masks, groups, wrappers, closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import differing, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import optim, tree
from tests.optim.test_optim import (
    assert_close,
    batch,
    every,
    example,
    leaves,
    loss,
    network,
    on_mesh,
    one_step,
    targets,
    train,
    warmup,
)

few = settings(max_examples=25, deadline=None, derandomize=True)


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


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6])
@pytest.mark.parametrize("both", [False, True], ids=["float64", "float64 and float32"])
def test_float64_leaves_are_clipped_in_float64(max_norm: float, both: bool) -> None:
    """A norm that is rounded to float32 on the way is 1e-8 off."""
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=g, dtype=torch.float64) for size in ((17, 5), (3,), ())]
    grads += [torch.randn(4, generator=g)] if both else []
    params = [torch.zeros_like(x, requires_grad=True) for x in grads]
    for p, x in zip(params, grads, strict=True):
        p.grad = x.clone()
    wanted = torch.nn.utils.clip_grad_norm_(params, max_norm)
    if both:  # torch takes the norm of each leaf in its own dtype
        wanted = sum((x.double().square().sum() for x in grads), torch.zeros((), dtype=torch.float64)).sqrt()
    norm = optim.global_norm(grads)
    assert norm.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    clipped, _ = optim.clip_by_global_norm(max_norm).update(grads, (), None)
    for x, p in zip(clipped[:3], params, strict=False):
        torch.testing.assert_close(x, p.grad, rtol=1e-7 if both else 1e-12, atol=0)


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


# --- small ones -------------------------------------------------------------------------------------------------------


def test_clip_by_value_keeps_dtypes_and_what_is_not_a_number() -> None:
    for limit in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        values = [torch.tensor([-2.0, 0.25, float("nan"), float("inf")]).bfloat16(), torch.tensor(3.0)]
        (vector, scalar), _ = optim.clip_by_value(limit).update(values, (), None)
        assert (vector.dtype, scalar.dtype) == (torch.bfloat16, torch.float32)
        assert vector.tolist()[:2] == [-0.5, 0.25]
        assert vector[2].isnan()
        assert vector[3] == scalar == 0.5


def test_decayed_weights_have_a_mask() -> None:
    params = example()
    updates, _ = optim.add_decayed_weights(0.5, "**/bias").update(tree.map(torch.zeros_like, params), (), params)
    assert torch.equal(updates["a"]["bias"], 0.5 * params["a"]["bias"])
    assert not updates["a"]["w"].any()


def test_a_schedule_may_be_negative_and_counts() -> None:
    tx = optim.scale_by_schedule(lambda count: 1.0 - count.to(torch.float64))
    state, seen = tx.init([torch.ones(())]), []
    for _ in range(3):
        (update,), state = tx.update([torch.ones(())], state, None)
        seen.append(update.item())
    assert seen == [1.0, 0.0, -1.0]
    assert update.dtype == torch.float32


# --- groups -----------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides() -> None:
    params, grads = example(), tree.map(torch.ones_like, example())
    tx = optim.multi_transform({"a/w": optim.sgd(0.1), "a/**": optim.sgd(0.2, momentum=0.9), "**": optim.scale(0.0)})
    state = tx.init(params)
    assert tree.flatten(state)[0] == ["0/count", "1/count", "1/momentum/a/bias"]
    updates, _ = tx.update(grads, state, params)
    firsts = {path: u.flatten()[0].item() for path, u in zip(*tree.flatten(updates)[:2], strict=True)}
    assert firsts == pytest.approx({"a/w": -0.1, "a/bias": -0.2, "scale": 0.0, "rest/0": 0.0})


def test_multipliers_leave_other_leaves_untouched() -> None:
    params = example()
    updates, _ = optim.scale_by_path({"a/w": 0.5, "a/*": -2}).update(params, (), params)
    assert torch.equal(updates["a"]["w"], 0.5 * params["a"]["w"])
    assert torch.equal(updates["a"]["bias"], -2 * params["a"]["bias"])
    assert updates["rest"][0] is params["rest"][0]


# --- wrappers ---------------------------------------------------------------------------------------------------------


def test_injected_numbers_can_be_set_and_schedules_set_themselves() -> None:
    tx = optim.inject_hyperparams(optim.sgd, static="momentum")(
        learning_rate=optim.linear_warmup(1.0, 4), momentum=0.5, weight_decay=0.0
    )
    params, grads = [torch.ones(2)], [torch.zeros(2)]
    state = tx.init(params)
    assert tree.flatten(state)[0] == [
        "count", "hyper/learning_rate", "hyper/weight_decay", "inner/count", "inner/momentum/0",
    ]  # fmt: skip
    _, state = tx.update(grads, state, params)
    state.hyper["weight_decay"] = torch.tensor(2.0, dtype=torch.float64)
    state.hyper["learning_rate"] = torch.tensor(99.0, dtype=torch.float64)  # the schedule knows better
    updates, state = tx.update(grads, state, params)
    assert updates[0].tolist() == [-0.5, -0.5]
    assert state.hyper["learning_rate"].item() == 0.25


def test_a_step_may_set_hyperparameters_and_show_them() -> None:
    tx = optim.inject_hyperparams(optim.adamw)(learning_rate=0.5, weight_decay=0.0)

    def step(state: Any, batch: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], batch)
        rate = state["opt"].hyper["learning_rate"]
        rate = torch.where(value > 1e9, rate, rate / 2)  # 1e9: never, here
        opt = state["opt"]._replace(hyper={**state["opt"].hyper, "learning_rate": rate})
        updates, opt = tx.update(grads, opt, state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "opt": opt}, {"loss": value, "lr": rate}

    state = {"params": network(), "opt": tx.init(network())}
    result = run(fzero.Spec(step=step, zero=3), state, batch, world=2, steps=3)
    assert result.losses("lr") == [0.25, 0.125, 0.0625]
    assert result.final["opt/hyper/learning_rate"].item() == 0.0625


def spoilt(rank: int, step: int) -> torch.Tensor:
    """The second batch of the last rank is not finite."""
    return batch(rank, step) * (float("inf") if (rank, step) == (1, 1) else 1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_bad_gradient_on_one_rank_changes_nothing_but_the_count(zero: int) -> None:
    tx = optim.apply_if_finite(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2)))
    spec = fzero.Spec(loss=loss, optimizer=tx, zero=zero, bucket_bytes=2000)
    result = run(spec, network(), spoilt, world=2, steps=3, every_step=True)
    states = [dict(zip(result.paths, leaves, strict=True)) for leaves in result.leaves]
    assert differing(states[1], states[0]) == ["opt_state/skipped"]
    assert states[2]["opt_state/skipped"].item() == 1
    assert states[2]["opt_state/inner/1/count"].item() == 2
    assert len(differing(states[2], states[1])) == len(states[0]) - 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finite_step_has_the_bits_of_the_step_without_the_wrapper(dtype: torch.dtype) -> None:
    tx = optim.adamw(1e-2, moments="float32")
    plain, wrapped = on_mesh(tx, 2, 3, dtype), on_mesh(optim.apply_if_finite(tx), 2, 3, dtype)
    for path, leaf in network(dtype).items():
        if isinstance(leaf, torch.Tensor):
            assert same_bits(wrapped.final[f"params/{path}"], plain.final[f"params/{path}"])


def test_large_gradients_are_finite() -> None:
    """Their squares are not, in float32; nor is the norm."""
    grads = [torch.full((100,), 3e38)]
    tx = optim.apply_if_finite(optim.identity())
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert torch.equal(updates[0], grads[0])
    assert not state.skipped


# --- optimizers' own, and the graph -----------------------------------------------------------------------------------


def test_moments_carry_the_path_of_their_parameter() -> None:
    state = optim.chain(optim.clip_by_global_norm(1.0), optim.masked(optim.adamw(0.1), "a/**")).init(example())
    assert tree.flatten(state)[0] == ["1/count", "1/mu/a/bias", "1/mu/a/w", "1/nu/a/bias", "1/nu/a/w"]
    assert optim.sgd(0.1).init(example()).momentum is None
    assert state[1].count.dtype == torch.int64


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_adafactor_floors_tiny_second_moments_as_torch_does(size: float) -> None:
    torch.manual_seed(0)
    params = {"w": torch.ones(4, 3), "b": torch.ones(5), "cube": torch.ones(2, 3, 4)}
    gradients = [tree.map(lambda p: torch.randn_like(p) * size, params) for _ in range(5)]
    got, _ = train(optim.adafactor(0.1, eps=(1e-3, 1e-3)), params, gradients)
    reference = every(lambda p: torch.optim.Adafactor(p, lr=0.1, eps=(1e-3, 1e-3)))
    wanted = reference(params, gradients)
    moved = ({path: values[path] - 1 for path in params} for values in (got, wanted))
    assert_close(*moved, tolerance=1e-2)  # of steps that are small beside 1


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


# --- schedules -------------------------------------------------------------------------------------------------------


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


def test_the_average_of_parameters_is_torchs() -> None:
    params, gradients = example(), [example() for _ in range(5)]
    twin = torch.nn.ParameterList([p.clone() for p in leaves(params)])
    average = torch.optim.swa_utils.AveragedModel(twin, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75))
    average.update_parameters(twin)  # torch's average starts with the first parameters that it is shown
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for grads in gradients:
        for p, g in zip(twin, leaves(grads), strict=True):
            p.grad = g.clone()
        optimizer.step()
        average.update_parameters(twin)
    _, state = train(optim.ema_params(optim.sgd(0.1), 0.75), params, gradients)
    for got, wanted in zip(leaves(state.average), average.module, strict=True):
        torch.testing.assert_close(got, wanted.detach())


def test_ema_without_correction_starts_small() -> None:
    tx, params = optim.ema(0.75, debias=False), [torch.zeros(1)]
    updates, state = tx.update([torch.tensor([4.0])], tx.init(params), params)
    assert updates == [torch.tensor([1.0])]
    assert tx.update([torch.tensor([0.0])], state, params)[0] == [torch.tensor([0.75])]


def test_trust_ratios_are_bounded_and_one_for_zeros() -> None:
    params, grads = [torch.tensor([30.0, 40.0]), torch.zeros(2)], [torch.tensor([0.0, 1.0]), torch.ones(2)]
    scaled, _ = optim.scale_by_trust_ratio(bounds=(0.01, 10.0)).update(grads, (), params)
    assert_close(scaled, [torch.tensor([0.0, 10.0]), torch.ones(2)])
    whole, _ = optim.scale_by_trust_ratio(0.5, eps=1.0).update(grads, (), params)
    assert_close(whole, [torch.tensor([0.0, 12.5]), torch.ones(2)])


def test_lars_leaves_out_what_its_mask_leaves_out() -> None:
    tx, params = optim.lars(1.0, weight_decay=0.5, mask="w"), {"w": torch.ones(4), "bias": torch.ones(4)}
    updates, _ = tx.update({"w": torch.ones(4), "bias": torch.ones(4)}, tx.init(params), params)
    assert_close(updates, {"w": torch.full((4,), -1e-3), "bias": -torch.ones(4)})
