"""Random calls of ops, for the table of `shard_cases`: a seed draws sizes and tensors."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
SIZES = (1, 2, 3, 6, 6, 12)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Draw(random.Random):
    """Random sizes and tensors from one seed."""

    def __init__(self, seed: str, turn: int) -> None:
        super().__init__(f"{seed} {turn}")
        self.turn = turn
        self.of: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(self.randrange(1 << 30))

    def shape(self, letters: str) -> tuple[int, ...]:
        """The sizes of letters; `1` is of size one."""
        return tuple(1 if c == "1" else self.of.setdefault(c, self.choice(SIZES)) for c in letters)

    def x(self, letters: str) -> Tensor:
        return torch.randn(self.shape(letters), generator=self.generator, dtype=torch.float64)

    def ids(self, letters: str, below: int) -> Tensor:
        return torch.randint(0, below, self.shape(letters), generator=self.generator)

    def mask(self, letters: str) -> Tensor:
        return torch.rand(self.shape(letters), generator=self.generator) < 0.5

    def fixed(self, **sizes: int) -> "Draw":
        self.of |= sizes
        return self


Make = Callable[[Draw], Arguments]


def tensors(text: str, *rest: Any, **kwargs: Any) -> Make:
    """The call on the tensors that a text names, then `rest`."""
    return lambda d: ((*(d.x(word.strip()) for word in text.split(",")), *rest), kwargs)


def either(*makes: Make) -> Make:
    """Each of some calls in turn."""
    return lambda d: makes[d.turn % len(makes)](d)


def of(fn: Callable[[Draw], tuple[Any, ...]], **kwargs: Any) -> Make:
    return lambda d: (fn(d), kwargs)


def view(d: Draw) -> tuple[Tensor, list[int]]:
    """Random factors, grouped in two ways."""
    factors = [d.choice((1, 2, 3, 2, 6)) for _ in range(d.randrange(1, 5))]
    return torch.arange(float(_product(factors)), dtype=torch.float64).view(grouped(d, factors)), grouped(d, factors)


def grouped(d: random.Random, factors: list[int]) -> list[int]:
    sizes = [1]
    for k in factors:
        if d.random() < 0.5:
            sizes[-1] *= k
        else:
            sizes.append(k)
    return sizes


def _product(sizes: list[int]) -> int:
    return int(torch.tensor(sizes).prod())


def norm(d: Draw) -> tuple[Any, ...]:
    x, w, b = d.x("abc"), d.x("c"), d.x("c")
    return x, [x.shape[2]], w, b, 1e-5


def norm_back(d: Draw) -> tuple[Any, ...]:
    x, shape, w, b, eps = norm(d)
    _, mean, rstd = aten.native_layer_norm.default(x, shape, w, b, eps)
    return d.x("abc"), x, shape, mean, rstd, w, b, [True, d.random() < 0.5, True]


def rms_back(d: Draw) -> tuple[Any, ...]:
    x, w = d.x("abc"), d.x("c")
    _, rstd = aten._fused_rms_norm.default(x, list(w.shape), w, 1e-5)
    return d.x("abc"), x, list(w.shape), rstd, w, [True, True]


def group_norm(d: Draw) -> tuple[Any, ...]:
    d.fixed(g=d.choice((1, 2, 3, 6)), k=2)
    d.of["c"] = d.of["g"] * d.of["k"]
    n, c, h, w = d.shape("nchw")
    return d.x("nchw"), d.x("c"), d.x("c"), n, c, h * w, d.of["g"], 1e-5


def group_norm_back(d: Draw) -> tuple[Any, ...]:
    x, w, b, n, c, hw, g, eps = group_norm(d)
    _, mean, rstd = aten.native_group_norm.default(x, w, b, n, c, hw, g, eps)
    return d.x("nchw"), x, mean, rstd, w, n, c, hw, g, [True, True, True]


def batch_norm(d: Draw, training: bool) -> tuple[Any, ...]:
    return d.x("nchw"), d.x("c"), d.x("c"), d.x("c"), d.x("c").abs(), training


def batch_norm_back(d: Draw) -> tuple[Any, ...]:
    x, w, b, mean, var, train = batch_norm(d, d.random() < 0.5)
    _, save, inv = aten.native_batch_norm.default(x, w, b, mean, var, train, 0.1, 1e-5)
    return d.x("nchw"), x, w, mean, var, save, inv, train, 1e-5, [True, True, True]


def attention(d: Draw) -> Arguments:
    d.fixed(b=d.choice((1, 2, 6)), h=6, q=d.choice((3, 6)), k=6, e=4)
    mask = d.choice((None, "bhqk", "11qk", "b11k", "qk"))
    causal = mask is None and d.random() < 0.5
    masks = {} if mask is None else {"attn_mask": d.x(mask)}
    return (d.x("bhqe"), d.x("bhke"), d.x("bhke"), 0.0, causal), masks


def attention_back(d: Draw) -> Arguments:
    (q, k, v, p, causal), kwargs = attention(d)
    out, log = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, p, causal, **kwargs)
    return (d.x("bhqe"), q, k, v, out, log, p, causal), kwargs


def conv(d: Draw) -> tuple[Any, ...]:
    """Ordinary, in groups, by channel, and transposed."""
    groups, i, o = d.choice(((1, 6, 6), (2, 3, 6), (6, 1, 1), (6, 1, 2), (1, 6, 2), (3, 2, 1)))
    back = d.random() < 0.3
    d.fixed(I=groups * i, O=groups * o, i=i, o=o, k=2)
    bias = None if d.random() < 0.3 else d.x("O")
    weight = d.x("Iok" if back else "Oik")
    d.fixed(t=6)
    return d.x("nIt"), weight, bias, [1], [1], [1], back, [0], groups


def conv_back(d: Draw) -> tuple[Any, ...]:
    x, w, bias, *rest = conv(d)
    y = aten.convolution.default(x, w, bias, *rest)
    grad = torch.randn(y.shape, generator=d.generator, dtype=y.dtype)
    return grad, x, w, None if bias is None else [bias.shape[0]], *rest, [True, True, bias is not None]


def nll(d: Draw, letters: str) -> tuple[Any, ...]:
    d.fixed(c=d.choice((6, 12)))
    target = d.ids(letters.replace("c", ""), d.of["c"])
    weight = d.x("c").abs() if d.random() < 0.3 else None
    return d.x(letters).log_softmax(-1), target, weight, d.randrange(3), d.choice((-100, 1))


def nll_back(d: Draw, letters: str) -> tuple[Any, ...]:
    args = nll(d, letters)
    op = aten.nll_loss2d_forward if len(letters) == 4 else aten.nll_loss_forward
    out, total = op.default(*args)
    return torch.randn(out.shape, generator=d.generator, dtype=out.dtype), *args, total


def index(d: Draw) -> tuple[Tensor, list[Any]]:
    """One, two side by side, and two with a dim between, where the indexed dims go to the front. Some count from the
    end."""
    x = d.fixed(a=6, b=6, c=6, e=6).x("abce")
    i, j = d.ids("pq", 6), d.ids("q", 6)
    i = torch.where(i > 3, i - 6, i) if d.random() < 0.5 else i
    ways = [[i], [None, i], [None, i, j], [i, None, j], [None, i, None, j], [i, j]]
    return x, ways[d.turn % len(ways)]


def index_put(d: Draw) -> tuple[Any, ...]:
    x, indices = index(d)
    accumulate = d.turn % 3 != 1
    if not accumulate:
        indices = [i if i is None else torch.arange(6) for i in indices]
    values = torch.randn(x[tuple(slice(None) if i is None else i for i in indices)].shape, generator=d.generator)
    return x, indices, values.double(), accumulate


def gather(d: Draw) -> tuple[Any, ...]:
    x, dim = d.x("abc"), d.randrange(3)
    shape = list(x.shape)
    shape[dim] = 6
    return x, dim, torch.randint(0, x.shape[dim], shape, generator=d.generator)


def scatter(d: Draw, by: str) -> tuple[Any, ...]:
    x, dim = d.x("abc"), d.randrange(3)
    index = torch.argsort(d.x("abc"), dim) if by != "add" else torch.randint(0, x.shape[dim], x.shape)
    index = index[: max(1, len(index) // 2)] if d.turn % 3 == 2 else index  # fewer than the elements of `src`
    return x, dim, index, 0.5 if by == "value" else d.x("abc")


def masked_fill(d: Draw) -> tuple[Any, ...]:
    return d.x("abc"), d.mask(d.choice(("abc", "bc", "1c"))), d.choice((0, 0.0, -1.5))


def embedding_back(d: Draw) -> tuple[Any, ...]:
    rows = d.choice((6, 12))
    return d.x("abe"), d.ids("ab", rows), rows, (-1, 1)[d.turn % 2], d.turn == 2


def cut(d: Draw) -> tuple[Tensor, list[int], int]:
    sizes = [6 * d.randrange(1, 4) for _ in range(3)]
    return d.fixed(s=sum(sizes)).x("asb"), sizes, 1


def bounds(d: Draw) -> tuple[Any, ...]:
    start, length, step = d.choice(((0, 6, 1), (6, 12, 1), (12, 100, 1), (0, 18, 1), (5, 9, 1), (0, 18, 2)))
    return 1, start, min(start + length, 18), step


def slice_back(d: Draw) -> tuple[Any, ...]:
    given = bounds(d)
    part = d.fixed(s=18).x("asb")[:, given[1] : given[2] : given[3]]
    return part.clone(), d.shape("asb"), *given


def slice_write(d: Draw) -> tuple[Any, ...]:
    part, _, *given = slice_back(d)
    return d.x("asb"), part, *given


def grouped_mm(d: Draw) -> tuple[Any, ...]:
    """Small whole numbers, whose bfloat16 sums are exact; sizes whose parts begin at multiples of 16 bytes."""
    d.fixed(m=6, e=2, k=48, n=48)
    a, b = (
        (d.x(word) > 0).bfloat16() for word in d.choice((("mk", "ekn"), ("emk", "ekn"), ("emk", "kn"), ("mk", "kn")))
    )
    if a.dim() == b.dim() == 3:
        return a, b, None
    ends = (2, 6) if b.dim() == 3 else (16, 48)
    return a, b, torch.tensor(ends, dtype=torch.int32)


def max_pool_back(d: Draw) -> tuple[Any, ...]:
    x = d.fixed(h=6, w=6).x("nchw")
    y, i = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
    return torch.randn_like(y), x, [2, 2], [2, 2], [0, 0], [1, 1], False, i


def image(d: Draw) -> Tensor:
    return d.fixed(h=6, w=6).x("nchw")


def softmax_back(d: Draw) -> tuple[Any, ...]:
    dim = d.randrange(-1, 2)
    return d.x("abc"), d.x("abc").log_softmax(dim), dim, torch.float64
