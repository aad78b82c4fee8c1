"""Keys: a step is a function of its state, what modules draw included, and the spread of a batch does not change it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Run, differing, gloo, relative, run, same_bits, values
from models import normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import optim, random, tree
from fzero.capture.ambient_rng import Keyed

KEY = random.key(7)
ROWS, WIDTH = 8, 16


def params() -> Any:
    k = random.split(random.key(1), 3)
    layers = [{"w": normal(key, WIDTH, WIDTH, scale=0.3), "b": torch.zeros(WIDTH)} for key in k[:2]]
    return {"layers": layers, "out": normal(k[2], WIDTH, scale=0.3)}


def whole(step: int) -> Tensor:
    return normal(random.fold_in(random.key(2), step), ROWS, WIDTH)


def layer(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(F.dropout(h @ p["w"] + p["b"], 0.4))


def loss(p: Any, batch: Tensor) -> Tensor:
    for one in p["layers"]:
        batch = layer(one, batch)
    return (batch @ p["out"] - 1).square().mean()


def train(fn: Callable[..., Any] = loss, world: int = 1, num: int = 1, steps: int = 3, **options: Any) -> Run:
    key = options.pop("key", KEY)
    spec = fzero.Spec(
        loss=fn, microbatches=num, **{"optimizer": optim.sgd(0.2), "zero": 3, "reduce": "each", **options}
    )
    return run(spec, params(), lambda r, s: whole(s).chunk(world)[r].contiguous(), world=world, steps=steps, key=key)


def found(fn: Callable[[Tensor], Tensor], key: Tensor | None = KEY, x: Tensor | None = None) -> Tensor:
    """`fn(x)` as a step's own, in a loss with a key."""
    x = torch.ones(4000) if x is None else x

    def with_aux(p: Tensor, b: Tensor) -> Any:
        return p * 1.0, fn(b)

    def step(state: Any, batch: Tensor) -> Any:
        key = state.get("key")
        (value, aux), _ = fzero.value_and_grad(with_aux, has_aux=True, key=key)(state["p"], batch)
        return state, {"loss": value, "aux": aux}

    start = {"p": torch.tensor(1.0)} if key is None else {"p": torch.tensor(1.0), "key": key}
    result: Tensor = fzero.step(fzero.init(start, fzero.Spec(step=step)), x).metrics["aux"]
    return result


# --- a function of the key --------------------------------------------------------------------------------------------


def test_the_same_state_and_batch_give_the_same_bits_and_another_key_others() -> None:
    one, two, other = train(), train(), train(key=random.key(8))
    assert not differing(one.final, two.final)
    assert one.losses() == two.losses()
    assert one.losses()[0] != other.losses()[0]


def test_every_step_draws_anew() -> None:
    state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=optim.sgd(0.0)), key=KEY)
    losses = set()
    for _ in range(4):
        state = fzero.step(state, whole(0))
        losses.add(float(state.metrics["loss"]))
    assert len(losses) == 4


def test_a_saved_key_resumes() -> None:
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.2))
    state = fzero.init(params(), spec, key=KEY)
    for step in range(2):
        state = fzero.step(state, whole(step))
    saved, key = fzero.unshard(state.params), state.tree["key"].full()
    on = fzero.step(fzero.step(state, whole(2)), whole(3))

    def own(state: Any, batch: Tensor) -> Any:  # the same step with the saved key put into the state
        next_key, draw = random.split(state["key"])
        value, grads = fzero.value_and_grad(loss, key=draw)(state["params"], batch)
        updated = tree.map(lambda p, g: p - 0.2 * g, state["params"], grads)
        return {"params": updated, "key": next_key}, {"loss": value}

    again = fzero.init({"params": saved, "key": key}, fzero.Spec(step=own))
    again = fzero.step(fzero.step(again, whole(2)), whole(3))
    assert all(
        same_bits(a, b) for a, b in zip(*(tree.flatten(fzero.unshard(s.params))[1] for s in (on, again)), strict=True)
    )


def test_torchs_own_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = train(lambda p, b: fzero.remat(loss)(p, b)).losses()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert train(lambda p, b: fzero.remat(loss)(p, b)).losses() == first, "and has no say"


def test_the_mode_s_state_is_seen_by_its_own_thread_alone() -> None:
    """Two modes on two threads, the first entered left first: the second still counts, and torch's functions return."""
    own = torch.get_rng_state, torch.set_rng_state
    entered, left = threading.Event(), threading.Event()
    counts: list[Any] = []

    def second() -> None:
        with Keyed(KEY) as mode:
            entered.set()
            assert left.wait(60)
            torch.rand(2)
            state = torch.get_rng_state()
            torch.rand(2)
            counts.append(mode.count)
            torch.set_rng_state(state)
            counts.append(mode.count)

    thread = threading.Thread(target=second)
    with Keyed(KEY):
        thread.start()
        assert entered.wait(60)
        assert not isinstance(torch.get_rng_state(), Tensor)
    assert isinstance(torch.get_rng_state(), Tensor), "this thread has left its mode"
    left.set()
    thread.join()
    assert counts == [2, 1]
    assert (torch.get_rng_state, torch.set_rng_state) == own


# --- where a part of the batch is computed does not matter ------------------------------------------------------------


def test_the_spread_of_equal_parts_changes_no_mask() -> None:
    one, two, four = train(num=4), train(world=2, num=2), train(world=4)
    assert not differing(one.final, four.final), "four parts added in one order"
    assert one.losses() == four.losses()
    assert two.losses() == pytest.approx(one.losses(), rel=1e-6)
    assert relative(two.final["params/layers/0/w"], one.final["params/layers/0/w"]) < 1e-6
    parts = train(num=2)
    assert relative(parts.final["params/layers/0/w"], one.final["params/layers/0/w"]) > 1e-3, "other parts, other masks"


def test_parts_draw_differently() -> None:
    """Equal rows in every part: only the masks can differ."""

    def masks(p: Any, batch: Tensor) -> Any:
        return p * 1.0, F.dropout(batch, 0.5).reshape(-1)[: WIDTH * 2]

    def step(state: Any, batch: Tensor) -> Any:
        (value, aux), _ = fzero.value_and_grad(masks, has_aux=True, key=state["key"])(state["p"], batch)
        return state, {"loss": value, "mask": aux}

    start = {"p": torch.tensor(1.0), "key": KEY}
    ranks = run(fzero.Spec(step=step), start, lambda r, s: torch.ones(4, WIDTH), world=4, steps=1).metrics[0]
    assert len({tuple(m["mask"].tolist()) for m in ranks}) == 4


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.sampled(2)
def test_stages_draw_alike(zero: int) -> None:
    assert not differing(train(world=2, num=2, zero=zero).final, train(world=2, num=2).final)


def on_gloo() -> dict[str, Tensor]:
    state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=optim.sgd(0.2), zero=3, reduce="each"), key=KEY)
    for step in range(3):
        state = fzero.step(state, whole(step).chunk(2)[dist.get_rank()].contiguous())
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def test_processes_draw_what_the_interpreter_draws() -> None:
    for final in values(gloo(2, on_gloo)):
        assert not differing(final, train(world=2).final)


# --- what may be drawn ------------------------------------------------------------------------------------------------

DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {  # of ones; mean and variance
    "F.dropout": (lambda x: F.dropout(x, 0.25), 1, 1 / 3),
    "nn.Dropout": (torch.nn.Dropout(0.5), 1, 1),
    "nn.Dropout2d": (lambda x: torch.nn.Dropout2d(0.5)(x.view(1, -1, 1, 1)), 1, 1),
    "torch.rand": (lambda x: torch.rand(x.shape), 1 / 2, 1 / 12),
    "torch.rand, float64": (lambda x: torch.rand(x.shape, dtype=torch.float64), 1 / 2, 1 / 12),
    "torch.rand, generator=None": (lambda x: torch.rand(x.shape, generator=None), 1 / 2, 1 / 12),
    "torch.rand_like": (torch.rand_like, 1 / 2, 1 / 12),
    "torch.randn": (lambda x: torch.randn(x.shape), 0, 1),
    "torch.randn_like": (torch.randn_like, 0, 1),
    "torch.normal": (lambda x: torch.normal(2 * x, 3 * x), 2, 9),
    "torch.normal, numbers": (lambda x: torch.normal(2.0, 3.0, x.shape), 2, 9),
    "torch.normal, one tensor": (lambda x: torch.normal(2 * x, 3.0), 2, 9),
    "torch.normal, its own deviation": (lambda x: torch.normal(2 * x, 1.0), 2, 1),  # the dispatcher leaves it out
    "torch.bernoulli": (lambda x: torch.bernoulli(0.3 * x), 0.3, 0.21),
    "Tensor.bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
    "Tensor.bernoulli_, tensor": (lambda x: torch.empty_like(x).bernoulli_(0.3 * x), 0.3, 0.21),
    "torch.randint": (lambda x: torch.randint(5, x.shape), 2, 2),
    "torch.randint, low": (lambda x: torch.randint(-2, 3, x.shape), 0, 2),
    "torch.randint_like": (lambda x: torch.randint_like(x, 5), 2, 2),
    "torch.randint_like, low": (lambda x: torch.randint_like(x, -2, 3), 0, 2),
    "torch.multinomial": (lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), x.numel(), True), 1.5, 0.75),
    "Tensor.uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 1), 0, 1 / 3),
    "Tensor.normal_": (lambda x: torch.empty_like(x).normal_(1, 2), 1, 4),
    "Tensor.exponential_": (lambda x: torch.empty_like(x).exponential_(0.5), 2, 4),
    "Normal.rsample": (lambda x: torch.distributions.Normal(x, 2.0, validate_args=False).rsample(), 1, 4),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.sampled(4)
def test_draws(name: str) -> None:
    """Of the right distribution, the same for a key, others for another key, for another call site, and without one
    refused."""
    draw, mean, variance = DRAWS[name]
    x = found(draw).double()
    error = 5 * (variance / x.numel()) ** 0.5
    assert float(x.mean()) == pytest.approx(mean, abs=error)
    assert float(x.var()) == pytest.approx(variance, rel=0.15)
    assert torch.equal(found(draw).double(), x)
    assert not torch.equal(found(draw, random.key(8)).double(), x)
    two = found(lambda x: torch.stack([draw(x), draw(x)])).double().reshape(2, -1)
    assert torch.equal(two[0], x.reshape(-1)), "the first call site"
    assert abs(float(torch.corrcoef(two)[0, 1])) < 5 / x.numel() ** 0.5
    with pytest.raises(fzero.CaptureError, match=r"give it a key: fzero\.init\(params, spec, key="):
        found(draw, None)


def test_a_permutation_and_a_sample_without_replacement() -> None:
    order = found(lambda x: torch.randperm(100))
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    p = torch.tensor([1.0, 0.0, 2.0, 4.0])
    rows = found(lambda x: torch.multinomial(p.expand(3000, 4), 3))
    assert all(sorted(row) == [0, 2, 3] for row in rows.tolist())
    assert float((rows[:, 0] == 3).double().mean()) == pytest.approx(4 / 7, abs=0.05)


def test_gumbel_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(3000, 3)
    picked = found(lambda x: F.gumbel_softmax(logits, hard=True))
    assert torch.allclose(picked.mean(0), torch.softmax(logits[0], 0), atol=0.04)
    soft = found(lambda x: F.gumbel_softmax(logits, tau=0.5))
    assert torch.allclose(soft.sum(1), torch.ones(3000))
    assert torch.isfinite(soft).all()


def test_a_dropout_mask_does_not_depend_on_the_dtype() -> None:
    masks = [found(lambda x, d=d: F.dropout(x.to(d), 0.3)) != 0 for d in (torch.float32, torch.bfloat16, torch.float64)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_dropout_of_nothing_and_of_all() -> None:
    x = torch.randn(50)
    assert torch.equal(found(lambda x: F.dropout(x, 0.0), None, x), x)
    assert torch.equal(found(lambda x: F.dropout(x, 0.5, training=False), None, x), x)
    assert not found(lambda x: F.dropout(x, 1.0), x=x).any()


def test_attention_with_dropout() -> None:
    q = normal(random.key(5), 2, 3, 40, 8)
    ones = torch.ones(2, 3, 40, 8)
    one = found(lambda x: F.scaled_dot_product_attention(q, q, ones, dropout_p=0.5))
    assert 0.9 < float(one.mean()) < 1.1, "weights that sum to one, half of them doubled"
    assert float(one.std()) > 0.05
    assert torch.equal(one, found(lambda x: F.scaled_dot_product_attention(q, q, ones, dropout_p=0.5)))
    plain = found(lambda x: F.scaled_dot_product_attention(q, q, ones), None)
    assert torch.allclose(plain, torch.ones_like(plain), atol=1e-6)
    with pytest.raises(fzero.CaptureError, match="give it a key"):
        found(lambda x: F.scaled_dot_product_attention(q, q, ones, dropout_p=0.5), None)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.rand(3, generator=torch.Generator()), r"given a torch\.Generator.*Leave generator= out"),
        (lambda x: torch.empty(3).bernoulli_(generator=torch.Generator()), r"given a torch\.Generator"),
        (lambda x: torch.poisson(x), r"aten\.poisson.*test_keys\.py:\d+ has no version that draws from a key.*random"),
        (lambda x: torch.empty(3).cauchy_(), "has no version that draws from a key"),
        (
            lambda x: torch.ops.aten._scaled_dot_product_efficient_attention(*[x[None, None]] * 3, None, True, 0.1)[0],
            r"no version that draws from a key.*within torch\.nn\.attention\.sdpa_kernel\(.*MATH\), in the loss",
        ),
    ],
)
def test_other_draws_are_refused(draw: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(fzero.CaptureError, match=message):
        found(draw)
    with pytest.raises(fzero.CaptureError, match=message):
        fzero.value_and_grad(lambda p, x: p * draw(x).sum(), key=KEY)(torch.tensor(1.0), torch.ones(3))


# --- a second run draws what the first drew ---------------------------------------------------------------------------


def wrapped(how: Callable[..., Any]) -> Callable[[Any, Tensor], Tensor]:
    def whole_loss(p: Any, batch: Tensor) -> Tensor:
        for one in p["layers"]:
            batch = how(layer)(one, batch)
        return (batch @ p["out"] - 1).square().mean()

    return whole_loss


@pytest.mark.parametrize(
    "how",
    [
        fzero.remat,
        lambda fn: lambda *args: checkpoint(fn, *args, use_reentrant=False),
        lambda fn: fzero.remat(fzero.remat(fn)),
    ],
    ids=["fzero.remat", "checkpoint", "nested"],
)
@pytest.mark.sampled(2)
def test_what_is_computed_again_has_the_same_masks(how: Callable[..., Any]) -> None:
    plain, again = train(), train(wrapped(how))
    assert not differing(again.final, plain.final)
    assert again.losses() == plain.losses()
    eager = [fzero.value_and_grad(fn, key=KEY)(params(), whole(0)) for fn in (loss, wrapped(how))]
    assert all(same_bits(a, b) for a, b in zip(*(tree.flatten(x)[1] for x in eager), strict=True))


def test_draws_after_a_checkpoint_go_on_where_it_ended() -> None:
    """A checkpoint's second run sets the count of draws back, and must give it back."""

    def with_noise(how: Callable[..., Any]) -> Callable[[Any, Tensor], Tensor]:
        def noisy(p: Any, batch: Tensor) -> Tensor:
            h = how(layer)(p["layers"][0], batch)
            inner = how(layer)(p["layers"][1], h).sum()
            (slope,) = torch.autograd.grad(inner, p["layers"][1]["w"], create_graph=True)
            return (F.dropout(h, 0.5) @ p["out"] + F.dropout(slope, 0.5).sum() + inner).square().mean()

        return noisy

    plain, again = train(with_noise(lambda fn: fn)), train(with_noise(fzero.remat))
    assert again.losses() == plain.losses()


def test_vmap_says_whether_rows_share_a_mask() -> None:
    x = torch.ones(6, 50)
    for draw in (lambda e: F.dropout(e, 0.5), lambda e: e * torch.rand(50)):
        same = found(lambda x, d=draw: torch.vmap(d, randomness="same")(x), x=x)
        own = found(lambda x, d=draw: torch.vmap(d, randomness="different")(x), x=x)
        assert len({tuple(row) for row in same.tolist()}) == 1
        assert len({tuple(row) for row in own.tolist()}) == 6


# --- a loss with a key of its own -------------------------------------------------------------------------------------


def test_a_key_of_a_loss_and_ambient_draws_do_not_meet() -> None:
    def both(x: Tensor) -> Any:
        return torch.rand(4000)

    def with_key(p: Tensor, b: Tensor, key: Tensor) -> Any:
        return p * 1.0, torch.stack([torch.rand(4000), random.uniform(key, 4000)])

    def step(state: Any, batch: Tensor) -> Any:
        (value, aux), _ = fzero.value_and_grad(with_key, has_aux=True, key=state["key"])(state["p"], batch)
        return state, {"loss": value, "aux": aux}

    start = {"p": torch.tensor(1.0), "key": KEY}
    pair = fzero.step(fzero.init(start, fzero.Spec(step=step)), torch.ones(2)).metrics["aux"]
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.08
    assert torch.equal(pair[1], random.uniform(random.fold_in(KEY, 0), 4000)), "the key of part 0"
    assert torch.equal(pair[0], found(both))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fzero.init(params(), spec_of(loss), key=torch.zeros(2)), r"fzero\.init\(key=.*as fzero\.random\.key"),
        (lambda: fzero.init(params(), fzero.Spec(step=lambda s, b: (s, {})), key=KEY), "put the key into it"),
        (lambda: fzero.value_and_grad(lambda p, b, key: p["out"].sum())(params(), 1), "asks for a key"),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((fzero.TreeError, fzero.CaptureError), match=message):
        make()


def spec_of(fn: Callable[..., Any]) -> fzero.Spec:
    return fzero.Spec(loss=fn, optimizer=optim.sgd(0.1))
