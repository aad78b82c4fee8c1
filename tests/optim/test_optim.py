"""fzero.optim's optimizers: one table, one battery.

A new optimizer joins `OPTIMIZERS` with a reference, and inherits: twenty steps as the reference makes them, purity and
dtypes, paths of the state that end with their parameter's, one trace for every step, the rules of `**/bias` and the
rest, and equal bits under every ZeRO stage at two worlds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import differing, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import optim, tree

few = settings(max_examples=12, deadline=None, derandomize=True)
Named = dict[str, torch.Tensor]


class Case(NamedTuple):
    """`reference(params, gradients)` makes the same steps, on leaves by path. `tolerance` is of a leaf's norm.

    `anywhere`: for any tree of params, not only `example()`'s. `flat`: on a mesh nothing but the loss gathers. `wide`:
    updates of bfloat16 params are float32. `moments`: state leaves that belong to a parameter carry its path.
    """

    tx: optim.GradientTransformation
    reference: Callable[[Named, list[Named]], Named]
    tolerance: float = 1e-6
    anywhere: bool = True
    flat: bool = True
    wide: bool = False


def warmup(count: int) -> float:
    return min(1.0, count / 5)


def by_torch(*groups: tuple[Callable[[str, torch.Tensor], bool], Callable[..., Any]], **how: Any) -> Callable[..., Any]:
    """A reference of torch's optimizers, each for the leaves that it is told. `how`: scheduled, cycled (arguments of
    OneCycleLR), norm, value."""

    def reference(params: Named, gradients: list[Named]) -> Named:
        params = {path: p.clone().requires_grad_() for path, p in params.items()}
        chosen = [[p for path, p in params.items() if mine(path, p)] for mine, _ in groups]
        optimizers = [make(leaves) for leaves, (_, make) in zip(chosen, groups, strict=True) if leaves]
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, warmup) for o in optimizers if how.get("scheduled")]
        if "cycled" in how:
            schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, 20, **how["cycled"]) for o in optimizers]
        for grads in gradients:
            for path, p in params.items():
                p.grad = grads[path].clone()
            if "norm" in how:
                torch.nn.utils.clip_grad_norm_(list(params.values()), how["norm"])
            if "value" in how:
                torch.nn.utils.clip_grad_value_(list(params.values()), how["value"])
            for one in [*optimizers, *schedules]:
                one.step()
        return {path: p.detach() for path, p in params.items()}

    return reference


def every(make: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return by_torch((lambda path, p: True, make), **how)


def by_paper(rate: float, beta1: float, beta2: float, decay: float) -> Callable[..., Any]:
    """Lion (Chen et al. 2023, algorithm 2)."""

    def reference(params: Named, gradients: list[Named]) -> Named:
        params, mu = dict(params), {path: torch.zeros_like(p) for path, p in params.items()}
        for grads in gradients:
            for path, g in grads.items():
                c = (mu[path] * beta1).add(g, alpha=1 - beta1)
                params[path] = params[path] - rate * (c.sign() + decay * params[path])
                mu[path] = (mu[path] * beta2).add(g, alpha=1 - beta2)
        return params

    return reference


def by_trust(rate: float, decay: float, momentum: float | None) -> Callable[..., Any]:
    """LAMB (momentum None) and LARS, as optax 0.2.8 chains them: decayed weights, a ratio, the rate, and a trace."""

    def ratio(p: torch.Tensor, u: torch.Tensor) -> float:
        size, length = float(p.double().norm()), float(u.double().norm())
        return (1.0 if momentum is None else 1e-3) * size / length if size * length else 1.0

    def reference(params: Named, gradients: list[Named]) -> Named:
        params = dict(params)
        mu, nu = ({path: torch.zeros_like(p) for path, p in params.items()} for _ in range(2))
        for t, grads in enumerate(gradients, 1):
            for path, g in grads.items():
                p = params[path]
                if momentum is None:
                    mu[path] = 0.9 * mu[path] + 0.1 * g
                    nu[path] = 0.999 * nu[path] + 0.001 * g**2
                    u = mu[path] / (1 - 0.9**t) / ((nu[path] / (1 - 0.999**t)).sqrt() + 1e-6) + decay * p
                    params[path] = p - rate * ratio(p, u) * u
                else:
                    u = g + decay * p
                    mu[path] = -rate * ratio(p, u) * u + momentum * mu[path]
                    params[path] = p + mu[path]
        return params

    return reference


def averaged(rate: float, decay: float) -> Callable[..., Any]:
    """SGD whose updates are a moving average without its bias, as optax.ema(decay) makes it."""

    def reference(params: Named, gradients: list[Named]) -> Named:
        params, held = dict(params), {path: torch.zeros_like(p) for path, p in params.items()}
        for t, grads in enumerate(gradients, 1):
            for path, g in grads.items():
                held[path] = decay * held[path] + (1 - decay) * g
                params[path] = params[path] - rate * held[path] / (1 - decay**t)
        return params

    return reference


def is_matrix(path: str, p: torch.Tensor) -> bool:
    return p.dim() == 2


def is_bias(path: str, p: torch.Tensor) -> bool:
    return path.endswith("bias")


def others(mine: Callable[[str, torch.Tensor], bool]) -> Callable[[str, torch.Tensor], bool]:
    return lambda path, p: not mine(path, p)


PHASES = {"three_phase": True, "pct_start": 0.4, "anneal_strategy": "linear"}
CYCLE, CYCLE3 = optim.one_cycle(1e-2, 20), optim.one_cycle(1e-2, 20, **PHASES)
T, AdamW, SGD = torch.optim, torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS = {
    "adam": Case(optim.adam(1e-2), every(lambda p: T.Adam(p, lr=1e-2))),
    "adam_l2": Case(
        optim.adam(1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        every(lambda p: T.Adam(p, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)),
    ),
    "adamw": Case(optim.adamw(1e-2), every(lambda p: AdamW(p, lr=1e-2))),
    "adamw_fused": Case(
        optim.adamw(1e-2, weight_decay=0.3), every(lambda p: AdamW(p, 1e-2, weight_decay=0.3, fused=True))
    ),
    "adamw_float32": Case(optim.adamw(1e-2, moments="float32"), every(lambda p: AdamW(p, lr=1e-2)), wide=True),
    "adamw_bfloat16": Case(
        optim.adamw(1e-2, moments="bfloat16"), every(lambda p: AdamW(p, lr=1e-2)), tolerance=3e-3, wide=True
    ),
    "adamw8bit": Case(
        optim.adamw8bit(1e-2), every(lambda p: AdamW(p, lr=1e-2)), tolerance=1e-2, anywhere=False, wide=True
    ),
    "adamw_scheduled": Case(
        optim.adamw(optim.linear_warmup(1e-2, 5)), every(lambda p: AdamW(p, lr=1e-2), scheduled=True)
    ),
    "adamw_cycled": Case(
        optim.adamw(CYCLE.rate, betas=(CYCLE.momentum, 0.99), weight_decay=0.3),
        every(lambda p: AdamW(p, betas=(0.5, 0.99), weight_decay=0.3), cycled={}),
    ),
    "adam_cycled": Case(
        optim.adam(CYCLE3.rate, betas=(CYCLE3.momentum, 0.9), weight_decay=0.1, moments="float32"),
        every(lambda p: T.Adam(p, betas=(0.5, 0.9), weight_decay=0.1), cycled=PHASES),
        wide=True,
    ),
    "sgd_cycled": Case(
        optim.sgd(CYCLE.rate, CYCLE.momentum, nesterov=True),
        every(lambda p: SGD(p, lr=1e-2, momentum=0.5, nesterov=True), cycled={}),
    ),
    "sgd": Case(optim.sgd(1e-2), every(lambda p: SGD(p, lr=1e-2))),
    "sgd_l2": Case(optim.sgd(1e-2, weight_decay=0.1), every(lambda p: SGD(p, lr=1e-2, weight_decay=0.1))),
    "sgd_momentum": Case(
        optim.sgd(1e-3, momentum=0.9, weight_decay=0.1),
        every(lambda p: SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1)),
    ),
    "sgd_nesterov": Case(
        optim.sgd(1e-3, momentum=0.9, nesterov=True), every(lambda p: SGD(p, lr=1e-3, momentum=0.9, nesterov=True))
    ),
    "sgd_scheduled": Case(optim.sgd(optim.linear_warmup(1e-2, 5)), every(lambda p: SGD(p, lr=1e-2), scheduled=True)),
    "sgd_in_parts": Case(
        optim.chain(
            optim.add_decayed_weights(0.1),
            optim.trace(0.9),
            optim.scale_by_schedule(lambda count: -1e-3 * (count + 2) / (count + 2)),
        ),
        every(lambda p: SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1)),
    ),
    "lion": Case(optim.lion(1e-2, weight_decay=0.1), by_paper(1e-2, 0.9, 0.99, 0.1)),
    "lion_bfloat16": Case(
        optim.lion(1e-2, moments="bfloat16"), by_paper(1e-2, 0.9, 0.99, 0.0), tolerance=1e-2, anywhere=False, wide=True
    ),
    "rmsprop": Case(optim.rmsprop(1e-2), every(lambda p: T.RMSprop(p, lr=1e-2))),
    "rmsprop_tuned": Case(
        optim.rmsprop(1e-3, 0.9, 1e-6, 0.1, 0.8, centered=True),
        every(lambda p: T.RMSprop(p, 1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8, centered=True)),
        tolerance=1e-5,  # nu - mu^2 cancels
        anywhere=False,
    ),
    "adagrad": Case(optim.adagrad(1e-2), every(lambda p: T.Adagrad(p, lr=1e-2))),
    "adagrad_tuned": Case(
        optim.adagrad(1e-2, 0.1, 0.2, 0.3, 1e-6),
        every(
            lambda p: T.Adagrad(p, 1e-2, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3, eps=1e-6)
        ),
    ),
    "adadelta": Case(optim.adadelta(), every(lambda p: T.Adadelta(p)), tolerance=1e-5),
    "adadelta_tuned": Case(
        optim.adadelta(0.5, 0.8, 1e-4, 0.1),
        every(lambda p: T.Adadelta(p, 0.5, rho=0.8, eps=1e-4, weight_decay=0.1)),
    ),
    "nadam": Case(optim.nadam(1e-2), every(lambda p: T.NAdam(p, lr=1e-2))),
    "nadam_l2": Case(
        optim.nadam(1e-2, (0.8, 0.9), 1e-6, 0.1, 1e-2),
        every(lambda p: T.NAdam(p, 1e-2, (0.8, 0.9), 1e-6, weight_decay=0.1, momentum_decay=1e-2)),
    ),
    "nadam_decoupled": Case(
        optim.nadam(1e-2, weight_decay=0.1, decoupled_weight_decay=True),
        every(lambda p: T.NAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True)),
    ),
    "radam": Case(optim.radam(1e-2), every(lambda p: T.RAdam(p, lr=1e-2))),
    "radam_l2": Case(
        optim.radam(1e-2, (0.8, 0.9), 1e-6, 0.1),
        every(lambda p: T.RAdam(p, 1e-2, (0.8, 0.9), 1e-6, weight_decay=0.1)),
    ),
    "radam_decoupled": Case(
        optim.radam(1e-2, weight_decay=0.1, decoupled_weight_decay=True),
        every(lambda p: T.RAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True)),
    ),
    "lamb": Case(optim.lamb(1e-2, weight_decay=0.1), by_trust(1e-2, 0.1, None), tolerance=1e-5),
    "lars": Case(optim.lars(1.0, weight_decay=0.1), by_trust(1.0, 0.1, 0.9), tolerance=1e-5),
    "ema": Case(optim.chain(optim.ema(0.9), optim.sgd(1e-2)), averaged(1e-2, 0.9)),
    "ema_params": Case(optim.ema_params(optim.adamw(1e-2), 0.9), every(lambda p: AdamW(p, lr=1e-2))),
    "adafactor": Case(optim.adafactor(1e-2), every(lambda p: T.Adafactor(p, lr=1e-2)), flat=False, wide=True),
    "adafactor_tuned": Case(
        optim.adafactor(1e-1, -0.7, (1e-3, 1e-2), 2.0, 0.1),
        every(lambda p: T.Adafactor(p, lr=1e-1, beta2_decay=-0.7, eps=(1e-3, 1e-2), d=2.0, weight_decay=0.1)),
        flat=False,
        wide=True,
    ),
    "muon": Case(
        optim.muon(1e-2, others=optim.adamw(1e-2)),
        by_torch((is_matrix, lambda p: T.Muon(p, lr=1e-2)), (others(is_matrix), lambda p: AdamW(p, lr=1e-2))),
        flat=False,
    ),
    "muon_tuned": Case(
        optim.muon(1e-2, 0.3, 0.9, False, (2.0, -1.5, 0.5), 1e-6, 3, "match_rms_adamw", "a/w", optim.sgd(1e-2)),
        by_torch(
            (
                lambda path, p: path == "a/w",
                lambda p: T.Muon(p, 1e-2, 0.3, 0.9, False, (2.0, -1.5, 0.5), 1e-6, 3, adjust_lr_fn="match_rms_adamw"),
            ),
            (lambda path, p: path != "a/w", lambda p: SGD(p, lr=1e-2)),
        ),
        anywhere=False,
        flat=False,
    ),
    "clipped": Case(
        optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1e-2)), every(lambda p: SGD(p, lr=1e-2), norm=1.0)
    ),
    "clipped_by_value": Case(
        optim.chain(optim.clip_by_value(0.5), optim.sgd(1e-2)), every(lambda p: SGD(p, lr=1e-2), value=0.5)
    ),
    "multi_transform": Case(
        optim.multi_transform({"**/bias": optim.sgd(1e-2, momentum=0.9), "**": optim.adamw(1e-2)}),
        by_torch((is_bias, lambda p: SGD(p, lr=1e-2, momentum=0.9)), (others(is_bias), lambda p: AdamW(p, lr=1e-2))),
        anywhere=False,
    ),
    "scale_by_path": Case(
        optim.chain(optim.adamw(1e-2), optim.scale_by_path({"**/bias": 0.1})),
        by_torch((is_bias, lambda p: AdamW(p, lr=1e-3)), (others(is_bias), lambda p: AdamW(p, lr=1e-2))),
        anywhere=False,
    ),
    "injected_adamw": Case(
        optim.inject_hyperparams(optim.adamw, static=["eps"])(learning_rate=1e-2, weight_decay=0.1, eps=1e-8),
        every(lambda p: AdamW(p, lr=1e-2, weight_decay=0.1)),
    ),
    "injected_adam": Case(
        optim.inject_hyperparams(optim.adam)(learning_rate=optim.linear_warmup(1e-2, 5), weight_decay=0.1),
        every(lambda p: T.Adam(p, lr=1e-2, weight_decay=0.1), scheduled=True),
    ),
    "injected_lion": Case(
        optim.inject_hyperparams(optim.lion)(learning_rate=1e-2, weight_decay=0.1), by_paper(1e-2, 0.9, 0.99, 0.1)
    ),
    "injected_chain": Case(
        optim.inject_hyperparams(
            lambda norm, rate, decay: optim.chain(optim.clip_by_global_norm(norm), optim.sgd(rate, weight_decay=decay))
        )(norm=1.0, rate=1e-2, decay=0.1),
        every(lambda p: SGD(p, lr=1e-2, weight_decay=0.1), norm=1.0),
    ),
    "apply_if_finite": Case(optim.apply_if_finite(optim.adamw(1e-2)), every(lambda p: AdamW(p, lr=1e-2))),
}  # fmt: skip

# --- trees ------------------------------------------------------------------------------------------------------------

shapes = st.sampled_from([(), (1,), (7,), (64,), (3, 5), (130,), (4, 1), (2, 3, 4)])
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


EXAMPLE = {"a": {"w": (4, 6), "bias": (6,)}, "scale": (), "rest": [(130,), None]}


def example() -> Any:
    torch.manual_seed(0)
    return tensors(EXAMPLE, away_from_zero)


def leaves(values: Any) -> list[torch.Tensor]:
    return tree.flatten(values)[1]


def named(values: Any) -> Named:
    paths, found, _ = tree.flatten(values)
    return dict(zip(paths, found, strict=True))


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


# --- the battery ------------------------------------------------------------------------------------------------------


def compare(case: Case, shapes: Any, seed: int) -> None:
    torch.manual_seed(seed)
    params = tensors(shapes, away_from_zero)
    gradients = [tensors(shapes, torch.randn) for _ in range(20)]
    got, state = train(case.tx, params, gradients)
    wanted = case.reference(named(params), [named(g) for g in gradients])
    assert_close(named(got), wanted, case.tolerance)
    counts = [leaf for path, leaf in named(state).items() if path.split("/")[-1] == "count"]
    assert all(int(count) == 20 for count in counts)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_the_reference(name: str) -> None:
    compare(OPTIMIZERS[name], EXAMPLE, 0)


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case.anywhere])
@given(shapes=pytrees, seed=st.integers(0, 2**31))
@few
@pytest.mark.sampled(4)
def test_so_they_are_for_any_tree(name: str, shapes: Any, seed: int) -> None:
    compare(OPTIMIZERS[name], shapes, seed)


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
    for old, new in ((state, after), (params, optim.apply_updates(params, updates))):
        assert [(t.shape, t.dtype) for t in leaves(new)] == [(t.shape, t.dtype) for t in leaves(old)]
    assert {u.dtype for u in leaves(updates)} == {torch.float32 if OPTIMIZERS[name].wide else dtype}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_that_cannot_be_stepped_stay_what_they_are(name: str) -> None:
    """Empty leaves, and gradients of zero with parameters of zero: nothing becomes NaN."""
    params = {"a": {"w": torch.zeros(0, 4), "bias": torch.zeros(0)}, "rest": [torch.zeros(3, 0), torch.zeros(2, 3)]}
    got, state = train(OPTIMIZERS[name].tx, params, [params] * 2)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves((got, state)))
    assert not got["rest"][1].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_leaves_end_with_the_path_of_their_parameter(name: str) -> None:
    params = example()
    known = set(named(params))
    for path, leaf in named(OPTIMIZERS[name].tx.init(params)).items():
        ends = {"/".join(path.split("/")[i:]) for i in range(len(path.split("/")))}
        assert leaf.dim() == 0 or ends & known, path


def one_step(tx: optim.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_trace_serves_every_step(name: str) -> None:
    tx = OPTIMIZERS[name].tx
    params, grads = example(), example()
    traced = make_fx(one_step(tx), tracing_mode="fake")(params, grads, tx.init(params))
    assert not any(op.startswith(("aten.item", "aten._local_scalar")) for op in targets(traced))
    _, late = train(tx, params, [grads] * 6)
    flat = leaves(one_step(tx)(params, grads, late))
    outputs = leaves(traced(params, grads, late))
    assert all(torch.equal(x, y) for x, y in zip(outputs, flat, strict=True))


# --- on a mesh --------------------------------------------------------------------------------------------------------


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    p = tree.map(lambda leaf: leaf.float(), params)
    h = torch.tanh(x @ p["a"]["w"] + p["a"]["bias"])
    h = torch.tanh(h @ p["mid"]) @ p["out"] * p["scale"]
    return h.square().mean() + F.softplus(p["rest"]).mean()


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    shapes = {"a": {"w": (6, 33), "bias": (33,)}, "mid": (33, 33), "out": (33, 5), "scale": (), "rest": (130,)}
    return tensors(shapes, lambda shape: (torch.randn(shape) / 2).to(dtype))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def on_mesh(tx: optim.GradientTransformation, world: int, zero: int, dtype: torch.dtype = torch.float32) -> Any:
    spec = fzero.Spec(loss=loss, optimizer=tx, zero=zero, bucket_bytes=2000)
    return run(spec, network(dtype), batch, world=world, steps=2)


ACCEPTANCE = pytest.mark.acceptance  # that stages compute the same is proved for each program; here a few are run
# of options that change no operation, one is enough
MESHED = [name for name in OPTIMIZERS if not name.endswith(("_fused", "_scheduled", "_nesterov", "_l2"))]


@pytest.mark.parametrize(
    ("world", "stages"),
    [(3, (3,)), pytest.param(3, (1, 2), marks=ACCEPTANCE), pytest.param(2, (1, 2, 3), marks=ACCEPTANCE)],
)
@pytest.mark.parametrize("name", MESHED)
@pytest.mark.sampled(2)
def test_every_stage_gives_the_same_bits(name: str, world: int, stages: tuple[int, ...]) -> None:
    case = OPTIMIZERS[name]
    dtype = torch.bfloat16 if case.wide else torch.float32
    oracle = on_mesh(case.tx, world, 0, dtype)
    assert oracle.losses()[1] != oracle.losses()[0]
    for zero in stages:
        result = on_mesh(case.tx, world, zero, dtype)
        assert not differing(result.final, oracle.final), f"zero={zero} world={world}"
        assert result.losses() == oracle.losses()
        if case.flat and zero == 3:
            gathers = [op for op in result.lowered.program.ops if op.gathers]
            assert all(op.why.startswith(("for forward", "for backward")) for op in gathers), "not of the loss"


ONE_RULE = [
    name
    for name, case in OPTIMIZERS.items()
    if case.flat and name not in ("multi_transform", "scale_by_path", "adamw8bit", "lamb", "lars")  # a scalar a leaf
]


@pytest.mark.parametrize("name", ONE_RULE)
@pytest.mark.sampled(4)
def test_all_leaves_of_a_bucket_are_one_operation(name: str) -> None:
    """A scalar made for each leaf would make an operation for each."""
    lowered = fzero.lower(
        fzero.Spec(loss=loss, optimizer=OPTIMIZERS[name].tx, zero=3), network(), batch(0, 0), world_size=2
    )
    assert len(lowered.plan.buckets) == 1
    assert sum(op.is_flat for op in lowered.program.ops) == 1


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_without_bias_correction_is_the_plain_formula(decoupled: bool) -> None:
    """Against the formula in float64: both moments as they are, from the first step on."""
    make = fzero.optim.adamw if decoupled else fzero.optim.adam
    tx = make(1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, bias_correction=False)
    params = {"w": torch.linspace(-1, 1, 7, dtype=torch.float64)}
    p, mu, nu, state = params["w"].clone(), torch.zeros(7).double(), torch.zeros(7).double(), tx.init(params)
    for step in range(4):
        g = torch.sin(torch.arange(7, dtype=torch.float64) + step)
        updates, state = tx.update({"w": g}, state, params)
        params = fzero.optim.apply_updates(params, updates)
        kept, g = (p * (1 - 1e-2 * 0.1), g) if decoupled else (p, g + 0.1 * p)
        mu, nu = 0.8 * mu + 0.2 * g, 0.95 * nu + 0.05 * g * g
        p = kept - 1e-2 * mu / (nu.sqrt() + 1e-6)
        torch.testing.assert_close(params["w"], p, rtol=1e-13, atol=1e-15)
