"""torch.func inside a step means what it means without sharding.

Every case is a loss or a step written with `vmap`, `grad`, `jvp`, `hessian` and kin, run on several ranks of this
process with and without sharding, and compared with plain torch on one process that has the whole batch. A loss is a
mean over the examples and every rank has equally many, so that the mean over the ranks is the loss of the whole batch.
"""

from collections.abc import Callable
from typing import Any

import losses
import pytest
import torch
from helpers import differing, relative, run
from losses import NORM, batch, clip_factors, one_loss, params, two_pass
from torch import Tensor
from torch.func import grad, jvp, vmap

import fzero
from fzero import optim, random, tree
from fzero.ir.kinds import OPS
from fzero.ir.program import wire_bytes

worlds = pytest.mark.parametrize("world", [2, 3])
runs = pytest.mark.parametrize(
    ("dtype", "world"),
    [
        pytest.param(torch.float32, 2, id="fp32-world=2"),
        pytest.param(torch.float64, 3, id="fp64-world=3", marks=pytest.mark.acceptance),
    ],
)
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-13}  # of what a parameter becomes; its norm is about 1

STEPS, RATE = 2, 0.05
NOISE = 0.02  # of a private gradient, over its norm


LOSSES = [
    losses.mapped,
    losses.penalty,
    losses.old_penalty,
    losses.maml,
    losses.maml_loop,
    losses.rematerialised,
    losses.rematerialised_penalty,
    losses.dropped,
    losses.of_a_module,
    losses.two_pass,
    losses.directional,
    losses.along_params,
    losses.laplacian,
    losses.jacobians,
    losses.curvature,
    losses.dual,
    losses.own_derivative,
]


def descend(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Any]:
    def step(state: Any, b: Any) -> Any:
        value, gradients = fzero.value_and_grad(loss)(state, b)
        return tree.map(lambda x, g: x - RATE * g, state, gradients), {"loss": value}

    return step


def whole(world: int, step: int, dtype: torch.dtype) -> Any:
    return tree.map(lambda *parts: torch.cat(parts), *(batch(rank, step, dtype) for rank in range(world)))


def plain(loss: Callable[[Any, Any], Tensor], start: Any, world: int, dtype: torch.dtype) -> tuple[Any, list[float]]:
    """The same steps in torch alone, on the whole batch."""
    _, leaves, spec = tree.flatten(start)
    values = []
    for step in range(STEPS):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(tree.unflatten(spec, leaves), whole(world, step, dtype))
        values.append(value.item())
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        leaves = [x if g is None else x - RATE * g for x, g in zip(leaves, gradients, strict=True)]
    return tree.unflatten(spec, leaves), values


def close(found: dict[str, Tensor], expected: Any, tolerance: float, prefix: str = "") -> None:
    for path, value in zip(*tree.flatten(expected)[:2], strict=True):
        gap = float((found[prefix + path].double() - value.detach().double()).norm())
        assert gap <= tolerance * max(1.0, float(value.detach().norm())), f"{prefix + path} differs by {gap:.1e}"


@runs
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.sampled(1)
def test_a_loss_of_transforms(loss: Callable[[Any, Any], Tensor], dtype: torch.dtype, world: int) -> None:
    """As plain torch has it; sharded and not, with equal bits; and in microbatches."""
    start = params(dtype)
    expected, values = plain(loss, start, world, dtype)
    finals, step_fn = [], descend(loss)
    for zero, microbatches in ((0, 1), (3, 1), (3, 2)) if dtype == torch.float64 else ((0, 1), (3, 1)):
        options = {"zero": zero, "microbatches": microbatches, "params": "**", "bucket_bytes": 400}
        spec = fzero.Spec(step=step_fn, allow_unused=True, **options)
        result = run(spec, start, lambda rank, step: batch(rank, step, dtype), world=world, steps=STEPS)
        close(result.final, expected, CLOSE[dtype])
        for mine, theirs in zip(result.losses(), values, strict=True):
            assert abs(mine - theirs) <= CLOSE[dtype] * max(1.0, abs(theirs))
        finals.append(result.final)
    assert not differing(finals[0], finals[1])
    assert relative(finals[0]["layers/0/w"], start["layers"][0]["w"]) > 1e-3, "it trained"


def test_a_sum_of_pythons_under_vmap() -> None:
    """`sum` begins with the number 0, which torch.func casts to the dtype of the first addend."""

    def loss(p: Any, b: Any) -> Tensor:
        def laplacian(x: Tensor) -> Tensor:
            slopes = grad(lambda x: losses.net(p, x))
            return sum(jvp(slopes, (x,), (v,))[1] @ v for v in torch.eye(len(x)))  # type: ignore[return-value]

        return (vmap(laplacian)(b["x"]) - b["y"]).square().mean()

    expected, _ = plain(loss, params(), 2, torch.float32)
    result = run(fzero.Spec(step=descend(loss), allow_unused=True), params(), batch, world=2, steps=STEPS)
    close(result.final, expected, CLOSE[torch.float32])


# --- steps ------------------------------------------------------------------------------------------------------------


def halves(p: Any, b: Any) -> Any:
    """Half the squared error's mean, as plain torch writes it."""
    return vmap(one_loss, in_dims=(None, 0))(p, b).mean()


def dot(a: Any, b: Any) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(tree.flatten(a)[1], tree.flatten(b)[1], strict=True)]).sum()


def power_step(state: Any, b: Any) -> Any:
    """Power iteration: the Hessian of the global loss times a vector of the state, which stays sharded."""

    def along(p: Any, b: Any, v: Any) -> Tensor:
        return dot(grad(halves)(p, b), v)

    product = fzero.grad(along)(state["params"], b, state["v"])
    size = dot(product, product).sqrt()
    return {"params": state["params"], "v": tree.map(lambda x: x / size, product)}, {"eigenvalue": size}


@runs
def test_power_iteration_of_the_hessian(dtype: torch.dtype, world: int) -> None:
    start = {"params": params(dtype), "v": tree.map(torch.ones_like, params(dtype))}
    v, sizes = start["v"], []
    for step in range(STEPS):
        b = whole(world, step, dtype)
        _, product = jvp(lambda p, b=b: grad(halves)(p, b), (start["params"],), (v,))
        size = dot(product, product).sqrt()
        v = tree.map(lambda x, size=size: x / size, product)
        sizes.append(float(size))
    finals = []
    for zero in (0, 3):
        spec = fzero.Spec(step=power_step, zero=zero, bucket_bytes=400)
        result = run(spec, start, lambda rank, step: batch(rank, step, dtype), world=world, steps=STEPS)
        close(result.final, v, CLOSE[dtype], "v/")
        for mine, theirs in zip(result.losses("eigenvalue"), sizes, strict=True):
            assert abs(mine - theirs) <= CLOSE[dtype] * theirs
        finals.append(result.final)
    assert not differing(*finals)


def privately(gradients: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """DP-SGD with the mean of the clipped gradients from `gradients`, and noise from a key in the state."""

    def step(state: Any, b: Any) -> Any:
        mean = gradients(state["params"], b)
        key = random.fold_in(state["key"], state["step"])
        _, leaves, spec = tree.flatten(mean)
        noise = [
            random.normal(k, g.shape, g.dtype) for k, g in zip(random.split(key, len(leaves)), leaves, strict=True)
        ]
        noisy = [g + NOISE * NORM * n for g, n in zip(leaves, noise, strict=True)]
        new = tree.map(lambda x, g: x - RATE * g, state["params"], tree.unflatten(spec, noisy))
        return {"params": new, "key": state["key"], "step": state["step"] + 1}, {}

    return step


def clipped_in_the_step(p: Any, b: Any) -> Any:
    """vmap(grad) in the step itself: every example's gradient, clipped, and their mean over the ranks."""
    gradients = vmap(grad(one_loss), in_dims=(None, 0))(p, b)
    factors = clip_factors(p, b, NORM)
    return fzero.pmean(tree.map(lambda g: torch.einsum("n,n...->...", factors, g) / len(factors), gradients))


def clipped_in_the_loss(p: Any, b: Any) -> Any:
    """The two-pass form: one region, whose gradients are reduced as they are made."""
    return fzero.grad(two_pass)(p, b)


def clipped_one_by_one(p: Any, b: Any) -> Any:
    """The oracle: a Python loop over examples."""
    total = None
    for i in range(b["x"].shape[0]):
        one = tree.map(lambda x, i=i: x[i], b)
        gradient = grad(one_loss)(p, one)
        factor = min(1.0, NORM / (float(dot(gradient, gradient).sqrt()) + 1e-6))
        gradient = tree.map(lambda g, factor=factor: g * factor / b["x"].shape[0], gradient)
        total = gradient if total is None else tree.map(torch.add, total, gradient)
    return total


@pytest.mark.sampled(1)
@runs
@pytest.mark.parametrize("form", [clipped_in_the_step, clipped_in_the_loss], ids=lambda form: form.__name__)
def test_private_gradients(form: Callable[[Any, Any], Any], dtype: torch.dtype, world: int) -> None:
    start = {"params": params(dtype), "key": random.key(8), "step": torch.tensor(0)}
    expected, step = start, privately(clipped_one_by_one)
    for number in range(STEPS):
        expected, _ = step(expected, whole(world, number, dtype))
    factors = clip_factors(start["params"], whole(world, 0, dtype), NORM)
    assert (factors < 1).any(), "some are clipped"
    assert (factors == 1).any(), "and some are not"
    finals, step_fn = [], privately(form)
    for zero in (0, 3):
        spec = fzero.Spec(step=step_fn, zero=zero, bucket_bytes=400)
        result = run(spec, start, lambda rank, step: batch(rank, step, dtype), world=world, steps=STEPS)
        close(result.final, expected["params"], CLOSE[dtype], "params/")
        finals.append(result.final)
    assert not differing(*finals)


@worlds
def test_the_two_pass_form_is_one_region_that_reduces_and_nothing_else(world: int) -> None:
    """Per-example gradients never travel: as many bytes as for the plain loss."""

    def moved(loss: Callable[[Any, Any], Tensor]) -> list[int]:
        spec = fzero.Spec(step=descend(loss), params="**", zero=3, bucket_bytes=400)
        program = fzero.lower(spec, params(), batch(0, 0), world_size=world).program
        assert {op.kind for op in program.ops} <= set(OPS)
        return sorted(wire_bytes(program, op) for op in program.ops if op.reduces)

    assert moved(two_pass) == moved(halves)


@runs
def test_a_later_loss_reads_parameters_that_an_optimizer_has_just_made(dtype: torch.dtype, world: int) -> None:
    """Two networks that take turns: the second moves against the first as it has become."""
    tx = optim.adam(1e-2)

    def second(p: Any, b: Any, other: Any) -> Tensor:
        return (losses.net(p, b["x"]) - losses.net(other, b["x"])).square().mean()

    def step(state: Any, b: Any) -> Any:
        updates, opt = tx.update(fzero.grad(halves)(state["one"], b), state["opt"], state["one"])
        one = optim.apply_updates(state["one"], updates)
        two = tree.map(lambda x, g: x - RATE * g, state["two"], fzero.grad(second)(state["two"], b, one))
        return {"one": one, "opt": opt, "two": two}, {}

    expected = start = {"one": params(dtype), "opt": tx.init(params(dtype)), "two": params(dtype)}
    for number in range(STEPS):
        expected, _ = step(expected, whole(world, number, dtype))
    finals = []
    for zero in (0, 3):
        spec = fzero.Spec(step=step, zero=zero, params=["one/**", "two/**"], bucket_bytes=400)
        result = run(spec, start, lambda rank, step: batch(rank, step, dtype), world=world, steps=STEPS)
        close(result.final, expected["two"], 100 * CLOSE[dtype], "two/")
        finals.append(result.final)
    assert not differing(*finals)
