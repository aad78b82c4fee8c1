"""What follows from uniform numbers and bits: masks, dropout, integers, permutations, classes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import random
from fzero._torch_compat import FakeTensorMode

KEY = random.key(17)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# One call of each, by name.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (3, 2)),
    "dropout": lambda key: random.dropout(key, torch.ones(4, 3, dtype=torch.float64), 0.3),
    "randint": lambda key: random.randint(key, -5, 9, (3,)),
    "permutation": lambda key: random.permutation(key, 7),
    "rows": lambda key: random.permutation(key, torch.arange(6.0).view(3, 2)),
    "categorical": lambda key: random.categorical(key, torch.linspace(-1, 1, 10).view(2, 5)),
}
each_call = pytest.mark.parametrize("name", CALLS)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_bits_are_numpys_philox_words() -> None:
    """randint and permutation promise the same bits on every backend: numpy's own generator is the oracle."""
    n = 70_001  # several chunks, the last one partial and odd
    words = np.random.Philox(key=np.array([17, 0], np.uint64), counter=np.array([0, 0, 0, 5], np.uint64))
    bits = words.random_raw(4 * (n + 1)).reshape(-1, 4)[:, :2].reshape(-1)[:n]
    kept = torch.from_numpy((bits & np.uint64(2**63 - 1)).astype(np.int64))
    assert torch.equal(random.randint(KEY, 0, 1 << 62, n), kept % (1 << 62))
    assert torch.equal(random.randint(KEY, -3, 7, n), kept % 10 - 3)
    signed = torch.from_numpy(bits.view(np.int64))
    assert torch.equal(random.permutation(KEY, n), signed.argsort(stable=True))


@settings(deadline=None, max_examples=30)
@given(low=st.integers(-(2**63), 2**63 - 1), span=st.integers(1, 2**62))
def test_randint_stays_within(low: int, span: int) -> None:
    high = min(low + span, 2**63)
    x = random.randint(KEY, low, high, (5, 3))
    assert x.dtype == torch.int64
    assert all(low <= value < high for value in x.flatten().tolist())


def test_randint_is_even() -> None:
    counts = random.randint(KEY, 0, 10, 100_000).bincount(minlength=10)
    assert len(counts) == 10
    assert ((counts - 10_000).abs() < 6 * math.sqrt(10_000 * 0.9)).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_keeps_its_share(p: float) -> None:
    n = 100_000
    drawn = random.bernoulli(KEY, p, n)
    assert drawn.dtype == torch.bool
    assert abs(int(drawn.sum()) - n * p) <= 5 * math.sqrt(n * p * (1 - p))
    assert torch.equal(drawn, random.bernoulli(KEY, torch.full((n,), p), n))
    assert torch.equal(drawn, random.bernoulli(KEY, torch.tensor(p), n))


def test_bernoulli_broadcasts_a_tensor_of_probabilities() -> None:
    assert random.bernoulli(KEY, torch.rand(3, 1), (2, 1, 4)).shape == (2, 3, 4)
    assert random.bernoulli(KEY, torch.rand(3)).shape == (3,)
    assert random.bernoulli(KEY, 0.5).shape == ()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_dropout_is_a_mask_and_a_scale(p: float) -> None:
    x = random.normal(random.key(1), (300, 40))
    dropped = random.dropout(KEY, x, p)
    mask = random.bernoulli(KEY, 1 - p, x.shape)
    assert torch.equal(dropped, x * mask / (1 - p))
    assert abs(float(mask.float().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())


def test_dropout_of_nothing_and_of_everything() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    assert random.dropout(KEY, x, 0.0) is x
    zeros = random.dropout(KEY, x, 1)
    assert torch.equal(zeros, torch.zeros(3))
    (gradient,) = torch.autograd.grad(zeros.sum(), x)
    assert torch.equal(gradient, torch.zeros(3)), "a parameter behind it still has a gradient"
    assert random.dropout(KEY, torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_a_dropout_mask_does_not_depend_on_the_dtype(dtype: torch.dtype, p: float) -> None:
    x = torch.ones(50_000)
    dropped = random.dropout(KEY, x.to(dtype), p)
    assert dropped.dtype == dtype
    assert torch.equal(dropped != 0, random.dropout(KEY, x, p) != 0)


def test_permutations_are_permutations_and_all_come() -> None:
    for n in (0, 1, 2, 1000):
        order = random.permutation(KEY, n)
        assert order.dtype == torch.int64
        assert torch.equal(order.sort().values, torch.arange(n))
    seen = torch.stack([random.permutation(key, 4) for key in random.split(KEY, 2400)])
    _, counts = seen.unique(dim=0, return_counts=True)
    assert len(counts) == math.factorial(4)
    assert ((counts - 100).abs() < 6 * 10).all()


def test_permutation_of_a_tensor_moves_its_rows() -> None:
    x = random.normal(random.key(3), (9, 2)).requires_grad_()
    order = random.permutation(KEY, 9)
    assert torch.equal(random.permutation(KEY, x), x[order])
    weight = torch.arange(18.0).view(9, 2)
    (gradient,) = torch.autograd.grad((random.permutation(KEY, x) * weight).sum(), x)
    assert torch.equal(gradient[order], weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_categorical_draws_by_softmax(dtype: torch.dtype) -> None:
    n = 60_000
    logits = torch.tensor([0.0, 1.0, -1.0, -torch.inf, 2.0], dtype=dtype)
    drawn = random.categorical(KEY, logits.expand(n, -1))
    assert (drawn.shape, drawn.dtype) == ((n,), torch.int64)
    shares = drawn.bincount(minlength=5) / n
    expected = torch.softmax(logits.float(), 0)
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt()).all()


# ---- transforms and tracing ------------------------------------------------------------------------------------------


@each_call
def test_the_same_key_gives_the_same_and_another_key_another(name: str) -> None:
    call = CALLS[name]
    assert torch.equal(call(KEY), call(KEY))
    assert any(not torch.equal(call(KEY), call(key)) for key in random.split(KEY, 8))


@each_call
def test_vmap_gives_what_a_loop_gives(name: str) -> None:
    call, keys = CALLS[name], random.split(random.key(1), 6)
    expected = torch.stack([call(key) for key in keys])
    assert torch.equal(torch.vmap(call)(keys), expected)
    assert torch.equal(torch.vmap(torch.vmap(call))(keys.view(2, 3, 2)).flatten(0, 1), expected)


@each_call
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_traces(name: str, mode: str) -> None:
    call = CALLS[name]
    graph = make_fx(call, tracing_mode=mode)(KEY)
    assert torch.equal(graph(random.key(3)), call(random.key(3)))
    with FakeTensorMode():
        fake = call(random.key(0))
    assert (fake.shape, fake.dtype) == (call(KEY).shape, call(KEY).dtype)


def loss(w: Tensor, key: Tensor) -> Tensor:
    first, second = random.split(key)
    hidden = random.dropout(first, torch.tanh(w[:, None] * torch.arange(1.0, 6.0)), 0.4)
    return random.dropout(second, hidden, 0.1).square().sum()


def masked_loss(w: Tensor, key: Tensor) -> Tensor:
    """The same with the masks made before."""
    first, second = random.split(key)
    one, two = random.bernoulli(first, 0.6, (3, 5)).float() / 0.6, random.bernoulli(second, 0.9, (3, 5)).float() / 0.9
    return (torch.tanh(w[:, None] * torch.arange(1.0, 6.0)) * one * two).square().sum()


def test_dropout_is_differentiated_in_every_way() -> None:
    w, v = torch.tensor([0.3, -0.2, 0.9]), torch.tensor([1.0, -2.0, 0.5])
    close = torch.testing.assert_close
    ways: list[Callable[[Any], Any]] = [
        lambda fn: torch.func.grad(fn)(w, KEY),
        lambda fn: torch.func.jvp(lambda x: fn(x, KEY), (w,), (v,)),
        lambda fn: torch.func.hessian(fn)(w, KEY),
        lambda fn: torch.vmap(torch.func.grad(fn), in_dims=(None, 0))(w, random.split(KEY, 3)),
        lambda fn: torch.vmap(fn)(torch.stack([w, v]), random.split(KEY, 2)),
    ]
    for way in ways:
        close(way(loss), way(masked_loss))


def test_one_key_under_vmap_is_one_mask_and_a_key_each_is_a_mask_each() -> None:
    x = torch.ones(3, 200)
    same = torch.vmap(random.dropout, in_dims=(None, 0))(KEY, x)
    assert torch.equal(same, random.dropout(KEY, x[0]).expand(3, 200))
    each = torch.vmap(random.dropout)(random.split(KEY, 3), x)
    assert not torch.equal(each[0], each[1])


def keyed_loss(params: Any, batch: Tensor, key: Tensor) -> Tensor:
    dropped = random.dropout(key, torch.tanh(batch * params["w"]), 0.5)
    return (dropped.sum(1) + random.normal(random.fold_in(key, 1), (len(batch),))).square().mean()


def test_draws_belong_to_the_part_of_the_batch_and_not_to_a_rank() -> None:
    """Four parts on one, two and four ranks: the same draws, so the same training, up to the order of sums."""
    rows = random.normal(random.key(2), (8, 5))
    start = {"w": torch.linspace(0.5, 1.5, 5)}
    finals = []
    for world, microbatches in ((1, 4), (2, 2), (4, 1)):
        spec = fzero.Spec(loss=keyed_loss, optimizer=fzero.optim.sgd(0.1), zero=3, microbatches=microbatches)
        result = run(spec, start, lambda rank, step, n=world: rows.chunk(n)[rank], world=world, steps=3)
        finals.append(result.final["params/w"])
    expected, key = start["w"].clone(), random.fold_in(random.key(0), -2)
    for _ in range(3):
        key, draw = random.split(key)
        parts = [
            torch.func.grad(keyed_loss)({"w": expected}, part, random.fold_in(draw, j))["w"]
            for j, part in enumerate(rows.chunk(4))
        ]
        expected = expected - 0.1 * torch.stack(parts).mean(0)
    for final in finals:
        torch.testing.assert_close(final, expected)


# ---- errors ----------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: random.bernoulli(KEY, 1.5), ValueError, r"bernoulli: p must be in \[0, 1\], given 1\.5"),
    (lambda: random.bernoulli(KEY, float("nan")), ValueError, "given nan"),
    (lambda: random.bernoulli(KEY, "half"), TypeError, "given str 'half'"),
    (lambda: random.bernoulli(KEY, torch.tensor(1)), TypeError, r"floating.*int64 tensor of shape \(\).*p\.float\(\)"),
    (lambda: random.bernoulli(0, 0.5), TypeError, r"fzero\.random\.bernoulli: key must be.*fzero\.random\.key\(0\)"),
    (lambda: random.bernoulli(KEY, 0.5, -1), ValueError, "must not be negative"),
    (lambda: random.bernoulli(KEY, torch.rand(2, device="meta")), ValueError, "p is on meta, the key on cpu"),
    (lambda: random.dropout(KEY, torch.ones(2), -0.1), ValueError, r"dropout: p must be in \[0, 1\]"),
    (lambda: random.dropout(KEY, torch.ones(2), torch.tensor(0.1)), TypeError, r"bernoulli\(key, p, shape\)"),
    (lambda: random.dropout(KEY, torch.ones(2), True), TypeError, "given bool True"),
    (lambda: random.dropout(KEY, torch.ones(2).int()), TypeError, "x must be a floating tensor, given a int32"),
    (lambda: random.dropout(KEY, torch.ones(2, device="meta")), ValueError, r"Write key\.to\(x\.device\)"),
    (lambda: random.dropout(torch.ones(2), torch.ones(2)), TypeError, "dropout: key must be an int64 tensor"),
    (lambda: random.randint(KEY, 3, 3), ValueError, "given low=3 and high=3"),
    (lambda: random.randint(KEY, -(2**62), 2**62), ValueError, r"at most 2\*\*62 numbers"),
    (lambda: random.randint(KEY, 0, 2.0), TypeError, "high must be a Python int, given float"),
    (lambda: random.permutation(KEY, -1), ValueError, "must not be negative"),
    (lambda: random.permutation(KEY, torch.tensor(3)), ValueError, r"must have rows.*permutation\(key, int\(x\)\)"),
    (lambda: random.permutation(KEY, 2.0), TypeError, "needed an int or a tensor, given float"),
    (lambda: random.categorical(KEY, torch.ones(2, 0)), ValueError, "must have classes along the last dimension"),
    (lambda: random.categorical(KEY, torch.ones(2).int()), TypeError, "logits must be a floating tensor"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors_teach(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.gpu
def test_integers_on_cuda_have_the_cpus_bits() -> None:
    there = KEY.to("cuda")
    for n in (0, 1, 33, 70_001):
        assert torch.equal(random.permutation(there, n).cpu(), random.permutation(KEY, n))
        assert torch.equal(random.randint(there, -3, 7, n).cpu(), random.randint(KEY, -3, 7, n))
    keys = random.split(KEY, 5)
    on_device = torch.vmap(lambda key: random.permutation(key, 9))(keys.to("cuda"))
    assert torch.equal(on_device.cpu(), torch.vmap(lambda key: random.permutation(key, 9))(keys))
    x = torch.ones(1000, device="cuda")
    assert torch.equal(random.dropout(there, x, 0.3), x * random.bernoulli(there, 0.7, 1000) / 0.7)
