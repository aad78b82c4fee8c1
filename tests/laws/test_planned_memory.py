"""The planned peak of random programs is what the allocator holds: never less, and at most 5 % more (but see `BOUNDS`).

A program is a chain of steps, each from one image-like value to another of its form: transforms, sorts, sums along a
dim, norms, convolutions, pools, products, factorisations, indices, losses; with views between them, so that kernels
meet operands in any order of memory. Its gradients are part of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import optim, sparse
from fzero.cost.allocator import measured_peak

PROGRAMS = 200
SMALL = 65_536  # bytes that no rule counts: numbers, and blocks of a size that does not grow
SHAPE = (4, 8, 64, 64)  # rows, channels, height, width
FLAT = SHAPE[0] * SHAPE[1]
PIXELS = SHAPE[2] * SHAPE[3]

# oneDNN's convolutions of few channels and the backward of a batch norm are planned by up to a fifth too much
BOUNDS = dict.fromkeys(("convolution", "convolution of pixels", "line convolution", "norm of a channel"), 1.2)
ELSE = 1.05

Step = Callable[[Tensor, Any], Tensor]


def _drawn(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """x times a number for each row and channel, which is near one."""
    return x * (1 + torch.tanh(by.reshape(FLAT, -1).mean(1)).view(*SHAPE[:2], 1, 1))


def _index(x: Tensor, high: int) -> Tensor:
    return (x.detach().abs() * 977).long() % high


STEPS: dict[str, Step] = {
    "fft": lambda x, p: torch.fft.ifft(torch.fft.fft(x) * 0.5).real,
    "fft of columns": lambda x, p: torch.fft.ifft(torch.fft.fft(x, dim=2) * 0.5, dim=2).real,
    "fft2": lambda x, p: torch.fft.ifft2(torch.fft.fft2(x) * 0.5).real,
    "fftn": lambda x, p: torch.fft.ifftn(torch.fft.fftn(x, dim=(0, 2)) * 0.5, dim=(0, 2)).real,
    "rfft2": lambda x, p: torch.fft.irfft2(torch.fft.rfft2(x)),
    "rfft": lambda x, p: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1),
    "stft": lambda x, p: _scaled(x, torch.stft(x.reshape(FLAT, PIXELS), 256, return_complex=True).abs()),
    "sort": lambda x, p: x.sort(2)[0],
    "sort of all": lambda x, p: x.flatten().sort()[0].view(SHAPE),
    "cumsum": lambda x, p: x.cumsum(1) / 8,
    "cumprod": lambda x, p: (x / 100 + 1).cumprod(3),
    "logcumsumexp": lambda x, p: x.logcumsumexp(2),
    "topk": lambda x, p: _scaled(x, x.topk(5, 3)[0]),
    "kth": lambda x, p: _scaled(x, x.kthvalue(5, 2)[0]),
    "median": lambda x, p: _scaled(x, x.median(3)[0]) + x.median(),
    "logsumexp": lambda x, p: x - x.logsumexp(1, keepdim=True),
    "softmax": lambda x, p: x.softmax(1) * 8,
    "log_softmax": lambda x, p: x.log_softmax(3),
    "norm of a channel": lambda x, p: F.batch_norm(x, None, None, p["c"], p["c"], training=True),
    "norm of groups": lambda x, p: F.group_norm(x, 2, p["c"], p["c"]),
    "norm of a row": lambda x, p: F.layer_norm(x, (64,), p["w"][0], p["w"][1]),
    "instance norm": lambda x, p: F.instance_norm(x, weight=p["c"]),
    "convolution": lambda x, p: F.conv2d(x, p["k"], p["c"], padding=1),
    "convolution of pixels": lambda x, p: F.conv2d(x, p["k"][:, :, :1, :1]),
    "line convolution": lambda x, p: F.conv1d(x.reshape(32, 8, 512), p["k"][:, :, 0], padding=1).reshape(SHAPE),
    "max pool": lambda x, p: F.interpolate(F.max_pool2d(x, 2), scale_factor=2),
    "average pool": lambda x, p: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear"),
    "adaptive pool": lambda x, p: _scaled(x, F.adaptive_avg_pool2d(x, 5)) + F.adaptive_max_pool2d(x, 1),
    "product": lambda x, p: x @ p["w"] / 8,
    "product from the left": lambda x, p: p["w"] @ x / 8,
    "product with itself": lambda x, p: x @ x.mT / 64,
    "einsum": lambda x, p: torch.einsum("bchw,cd->bdhw", x, p["w"][:8, :8]),
    "attention": lambda x, p: F.scaled_dot_product_attention(x, x @ p["w"], x),
    "reflected": lambda x, p: F.pad(x, (2, -2, 1, -1), mode="reflect"),
    "replicated": lambda x, p: F.pad(x, (-3, 3, 0, 0), mode="replicate"),
    "rolled": lambda x, p: x.roll((3, 5), (1, 2)),
    "flipped": lambda x, p: x.flip(3),
    "triangle": lambda x, p: x.tril() + x.triu(1),
    "channels by number": lambda x, p: x[:, [3, 1, 0, 2, 7, 5, 6, 4]],
    "gathered": lambda x, p: x.gather(3, _index(x, 64)),
    "scattered": lambda x, p: x.scatter_add(2, _index(x, 64), x) / 2,
    "added by number": lambda x, p: x.index_add(1, torch.tensor([0, 3]), x[:, 2:4]),
    "embedding": lambda x, p: F.embedding(_index(x[..., 0], 64), p["w"]) + x,
    "masked": lambda x, p: x.masked_fill(x > 1, 0.5) + torch.where(x > 0, x, p["w"]),
    "distances": lambda x, p: torch.cdist(x.flatten(0, 1), p["w"]).view(SHAPE) / 8,
    "patches": lambda x, p: _scaled(x, F.unfold(x, 3, padding=1)),
    "in doubles": lambda x, p: (x.double() * p["w"]).sin().float(),
    "in halves": lambda x, p: (x.bfloat16() * 2).float() + x,
    "inverse": lambda x, p: torch.linalg.inv(x / 64 + 2 * torch.eye(64)),
    "solved": lambda x, p: torch.linalg.solve(x / 64 + 2 * torch.eye(64), x),
    "factors": lambda x, p: torch.linalg.cholesky(x @ x.mT / 64 + torch.eye(64)),
    "orthogonal": lambda x, p: torch.linalg.qr(x + 9 * torch.eye(64))[0],
    "huber": lambda x, p: x * F.huber_loss(x, p["w"].expand(SHAPE)),
    "cross entropy": lambda x, p: x * F.cross_entropy(x.reshape(-1, 64), _index(x, 64)[..., 0].reshape(-1)),
    "logits": lambda x, p: x + F.binary_cross_entropy_with_logits(x, (x > 0).float()),
    "gelu": lambda x, p: F.gelu(x),
    "glu": lambda x, p: F.glu(torch.cat([x, x], 1), 1),
}
VIEWS: dict[str, Step] = {
    "as it is": lambda x, p: x,
    "turned": lambda x, p: x.transpose(2, 3),
    "channels first": lambda x, p: x.reshape(8, 4, 64, 64).transpose(0, 1),
    "one in two": lambda x, p: torch.stack([x, x * 2], -1)[..., 1],
    "channels last": lambda x, p: x.contiguous(memory_format=torch.channels_last),
}


def program(number: int) -> list[str]:
    draw = random.Random(number)
    count = draw.randint(2, 5)
    views = [draw.choice([*VIEWS, "as it is", "as it is"]) for _ in range(count)]
    steps = [draw.choice(list(STEPS)) for _ in range(count)]
    return [name for pair in zip(views, steps, strict=True) for name in pair]


def planned_and_held(names: list[str]) -> tuple[int, int]:
    """Bytes of a program's step."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        x = batch + p["w"]
        for name in names:
            x = (STEPS | VIEWS)[name](x, p)
        return (x * torch.linspace(-1, 1.5, 64)).square().mean() + sum(leaf.sum() for leaf in p.values()) * 0

    params = {"w": _drawn(1, 64, 64), "c": _drawn(2, 8), "k": _drawn(3, 8, 8, 3, 3) / 9}
    return of_loss(loss, params, _drawn(4, *SHAPE))


def of_loss(loss: Any, params: Any, batch: Tensor) -> tuple[int, int]:
    """Bytes: the planned peak of a step, and state, batch, arena and what the allocator gave beside them."""
    state = fzero.init(params, fzero.Spec(loss=loss, optimizer=optim.sgd(1e-6)))
    state = fzero.step(state, batch)
    state, extra = measured_peak(lambda s=state: fzero.step(s, batch))
    runtime = state.runtime
    held = sum(x.nbytes for x in runtime.memory.values()) + batch.nbytes + runtime.arena.numel()
    return runtime.compiled(batch).memory.peak, held + extra


@pytest.mark.parametrize("number", range(PROGRAMS))
@pytest.mark.sampled(4)
def test_what_is_planned_is_what_the_allocator_holds(number: int) -> None:
    names = program(number)
    planned, held = planned_and_held(names)
    print(names, f"planned {planned:,}, held {held:,}: {planned / held - 1:+.2%}")
    assert held <= planned + SMALL, f"{names}: planned {planned:,}, held {held:,}"
    bound = max(BOUNDS.get(name, ELSE) for name in names)
    assert planned <= bound * held + SMALL, f"{names}: planned {planned:,}, held {held:,}"


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sampled(1)
def test_so_is_that_of_each_step_on_each_view(name: str) -> None:
    for view in VIEWS:
        planned, held = planned_and_held([view, name])
        assert held <= planned + SMALL, f"{view}, {name}: planned {planned:,}, held {held:,}"
        bound = BOUNDS.get(name, ELSE)
        assert planned <= bound * held + SMALL, f"{view}, {name}: planned {planned:,}, held {held:,}"


def _windowed(p: Any, b: Tensor) -> Tensor:
    layout = sparse.sliding_window(2048, window=256, causal=True)
    return sparse.attention(b + p, b * p, b - p, layout).square().mean()


# what outside testing found: planned 60 MB and held 94, 148 and 224, and 4.5 % too low; and block-sparse attention
FOUND: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "rfft2 and irfft2": (lambda p, b: torch.fft.irfft2(torch.fft.rfft2(b + p) * 0.5).square().mean(), (8, 512, 512)),
    "stft": (lambda p, b: torch.stft(b + p, 256, return_complex=True).abs().square().mean(), (24, 65_536)),
    "sort and cumsum": (lambda p, b: ((b + p).sort(1)[0].cumsum(1) * b).square().mean(), (8, 131_072)),
    "of columns": (lambda p, b: ((b + p).sort(0)[0].cumsum(0) * b).square().mean(), (131_072, 8)),
    "attention of a window": (_windowed, (1, 4, 2048, 64)),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.sampled(2)
def test_so_is_that_of_the_programs_that_were_planned_too_low(name: str) -> None:
    loss, shape = FOUND[name]
    planned, held = of_loss(loss, _drawn(1, shape[-1]), _drawn(2, *shape))
    print(name, f"planned {planned:,}, held {held:,}: {planned / held - 1:+.2%}")
    assert held - SMALL <= planned <= 1.01 * held + SMALL, f"planned {planned:,}, held {held:,}"
