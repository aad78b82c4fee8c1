"""A few calls of every op that `fzero.shard` has a rule for: `CASES[op](draw)` is the arguments of one call.

`"ab, bc"` stands for two float64 tensors; each letter is a dim of a random size, many of which 2 and 3 divide.
"""

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
    x = d.fixed(a=6, b=6, c=6).x("abc")
    i, j = d.ids("pq", 6), d.ids("q", 6)
    return x, d.choice([[i], [None, i], [None, i, j], [i, None, j], [None, None, i], [i, j]])


def index_put(d: Draw) -> tuple[Any, ...]:
    x, indices = index(d)
    accumulate = d.random() < 0.7
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
    return x, dim, index, 0.5 if by == "value" else d.x("abc")


def masked_fill(d: Draw) -> tuple[Any, ...]:
    return d.x("abc"), d.mask(d.choice(("abc", "bc", "1c"))), d.choice((0, 0.0, -1.5))


def embedding_back(d: Draw) -> tuple[Any, ...]:
    rows = d.choice((6, 12))
    return d.x("abe"), d.ids("ab", rows), rows, d.choice((-1, 1)), d.random() < 0.2


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
    a, b = ((d.x(word) > 0).bfloat16() for word in d.choice((("mk", "ekn"), ("emk", "ekn"), ("emk", "kn"), ("mk", "kn"))))
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


DIMS = either(tensors("abc", [1]), tensors("abc", [0, 2], True), tensors("abc", [-1]), tensors("abc", None))
SPREAD = either(tensors("abc", [1], correction=0), tensors("abc", [0, 2], correction=0, keepdim=True))
DIM = either(tensors("abc", 1), tensors("abc", -1, True), tensors("abc", 0))
LOSS = either(tensors("ab,ab", 0), tensors("ab,ab", 1), tensors("ab,ab", 2))
LOSS_BACK = either(tensors("ab,ab,ab", 0), tensors(",ab,ab", 1), tensors(",ab,ab", 2))
ALONG = either(tensors("abc", 1), tensors("abc", -1), tensors("abc", 0))
PAIR = either(tensors("abc,abc"), tensors("abc,bc"), tensors("a1c,ab1"), tensors("abc,"), tensors("abc", 2.5))
FLOAT64 = {"dtype": torch.float64}

CASES: dict[Any, Make] = {
    # pointwise and factories
    aten.add.Tensor: PAIR,
    aten.sub.Tensor: PAIR,
    aten.mul.Tensor: PAIR,
    aten.div.Tensor: PAIR,
    aten.add.Scalar: tensors("ab", 2.0),
    aten.mul.Scalar: tensors("ab", 2.0),
    aten.div.Scalar: tensors("ab", 2.0),
    aten.neg.default: tensors("ab"),
    aten.exp.default: tensors("ab"),
    aten.rsqrt.default: tensors("ab"),
    aten.pow.Tensor_Scalar: tensors("ab", 2),
    aten.gt.Scalar: tensors("ab", 0.0),
    aten.bitwise_and.Tensor: of(lambda d: (d.mask("ab"), d.mask("b"))),
    aten.where.self: of(lambda d: (d.mask("ab"), d.x("ab"), d.x("b"))),
    aten.addcmul.default: tensors("ab,ab,b"),
    aten.gelu.default: tensors("ab"),
    aten.gelu_backward.default: tensors("ab,ab"),
    aten.silu.default: tensors("ab"),
    aten.silu_backward.default: tensors("ab,ab"),
    aten.tanh_backward.default: tensors("ab,ab"),
    aten.sigmoid_backward.default: tensors("ab,ab"),
    aten.threshold_backward.default: tensors("ab,ab", 0.0),
    aten.floor_divide.default: tensors("ab,b"),
    aten.softplus_backward.default: tensors("ab,ab", 1.0, 20.0),
    aten.elu_backward.default: of(lambda d: (d.x("ab"), 1.0, 1.0, 1.0, False, d.x("ab"))),
    aten.hardtanh_backward.default: tensors("ab,ab", -1.0, 1.0),
    aten.leaky_relu_backward.default: tensors("ab,ab", 0.1, False),
    aten.hardswish_backward.default: tensors("ab,ab"),
    aten.hardsigmoid_backward.default: tensors("ab,ab"),
    aten.log_sigmoid_backward.default: of(lambda d: (d.x("ab"), d.x("ab"), aten.log_sigmoid_forward.default(d.x("ab"))[1])),
    aten.mse_loss.default: LOSS,
    aten.mse_loss_backward.default: LOSS_BACK,
    aten.smooth_l1_loss.default: LOSS,
    aten.smooth_l1_loss_backward.default: either(
        tensors("ab,ab,ab", 0, 1.0), tensors(",ab,ab", 1, 1.0), tensors(",ab,ab", 2, 1.0)
    ),
    aten.huber_loss.default: LOSS,
    aten.huber_loss_backward.default: either(tensors("ab,ab,ab", 0, 1.0), tensors(",ab,ab", 2, 1.0)),
    aten.binary_cross_entropy.default: of(lambda d: (d.x("ab").sigmoid(), d.x("ab").sigmoid(), d.x("b"), d.turn % 3)),
    aten.binary_cross_entropy_backward.default: of(
        lambda d: (d.x(("ab", "", "")[d.turn % 3]), d.x("ab").sigmoid(), d.x("ab").sigmoid(), d.x("b"), d.turn % 3)
    ),
    aten.native_dropout_backward.default: of(lambda d: (d.x("ab"), d.mask("ab"), 2.0)),
    aten.masked_fill.Scalar: of(masked_fill),
    aten.copy.default: tensors("abc,bc"),
    aten.clone.default: tensors("abc"),
    aten.detach.default: tensors("abc"),
    aten.alias.default: tensors("abc"),
    aten.lift_fresh_copy.default: tensors("abc"),
    aten._to_copy.default: either(tensors("abc", **FLOAT64), tensors("abc", dtype=torch.int64)),
    aten.zeros_like.default: tensors("abc"),
    aten.ones_like.default: tensors("abc"),
    aten.full_like.default: tensors("abc", 3.0),
    aten.empty_like.default: tensors("abc"),
    aten.new_zeros.default: of(lambda d: (d.x("ab"), d.shape("bcd"))),
    aten.new_ones.default: of(lambda d: (d.x("ab"), d.shape("bcd"))),
    aten.new_full.default: of(lambda d: (d.x("ab"), d.shape("bcd"), 2.0)),
    aten.new_empty.default: of(lambda d: (d.x("ab"), d.shape("bcd"))),
    aten.full.default: of(lambda d: (d.shape("abc"), 2.0)),
    aten.zeros.default: of(lambda d: (d.shape("abc"),)),
    aten.ones.default: of(lambda d: (d.shape("abc"),)),
    aten.empty.memory_format: of(lambda d: (d.shape("abc"),)),
    # products
    aten.mm.default: tensors("ab,bc"),
    aten.addmm.default: either(tensors("c,ab,bc"), tensors("ac,ab,bc"), tensors("1c,ab,bc", beta=0.5, alpha=2.0)),
    aten.bmm.default: tensors("nab,nbc"),
    aten.baddbmm.default: either(tensors("nac,nab,nbc"), tensors("1ac,nab,nbc", beta=0.5, alpha=2.0)),
    aten.mv.default: tensors("ab,b"),
    aten.addmv.default: tensors("a,ab,b"),
    aten.dot.default: tensors("a,a"),
    aten.ger.default: tensors("a,b"),
    aten._grouped_mm.default: of(grouped_mm),
    # reductions
    aten.sum.default: tensors("abc"),
    aten.sum.dim_IntList: DIMS,
    aten.mean.default: tensors("abc"),
    aten.mean.dim: DIMS,
    aten.amax.default: either(tensors("abc", [1]), tensors("abc", [0, 2], True), tensors("abc")),
    aten.amin.default: either(tensors("abc", [1]), tensors("abc", [0, 2], True), tensors("abc")),
    aten.max.default: tensors("abc"),
    aten.min.default: tensors("abc"),
    aten.max.dim: DIM,
    aten.min.dim: DIM,
    aten.argmax.default: either(tensors("abc"), tensors("abc", 1), tensors("abc", -1, True)),
    aten.argmin.default: either(tensors("abc"), tensors("abc", 1), tensors("abc", -1, True)),
    aten.any.default: of(lambda d: (d.mask("ab") & d.mask("ab"),)),
    aten.any.dim: of(lambda d: (d.mask("ab"), 1)),
    aten.any.dims: of(lambda d: (d.mask("abc"), [0, 1])),
    aten.all.default: of(lambda d: (d.mask("ab") | d.mask("ab"),)),
    aten.all.dim: of(lambda d: (d.mask("ab"), 1)),
    aten.all.dims: of(lambda d: (d.mask("abc"), [0, 1])),
    aten.prod.default: tensors("ab"),
    aten.prod.dim_int: DIM,
    aten.var.correction: SPREAD,
    aten.std.correction: SPREAD,
    aten.var_mean.correction: SPREAD,
    aten.std_mean.correction: SPREAD,
    aten.logsumexp.default: either(tensors("abc", [1]), tensors("abc", [0, 2], True)),
    aten.linalg_vector_norm.default: either(tensors("abc"), tensors("abc", 2, [1])),
    aten.cumsum.default: ALONG,
    aten.cumprod.default: ALONG,
    aten.cummax.default: ALONG,
    aten.cummin.default: ALONG,
    aten.logcumsumexp.default: ALONG,
    aten.topk.default: of(lambda d: (d.fixed(b=6).x("abc"), 3, 1)),
    aten.sort.default: ALONG,
    aten.sort.stable: either(tensors("abc", stable=True, dim=1), tensors("abc", stable=True)),
    # views
    aten.view.default: of(view),
    aten._unsafe_view.default: of(view),
    aten.reshape.default: of(view),
    aten.flatten.using_ints: tensors("abcd", 1, 2),
    aten.unsqueeze.default: either(tensors("ab", 1), tensors("ab", -1), tensors("ab", 0)),
    aten.squeeze.default: either(tensors("a1b1"), tensors("ab")),
    aten.squeeze.dim: either(tensors("a1b", 1), tensors("abc", 1), tensors("ab1", -1)),
    aten.squeeze.dims: either(tensors("a1b1", [1, 3]), tensors("ab1", [0, 2])),
    aten.permute.default: either(tensors("abc", [2, 0, 1]), tensors("abcd", [0, -2, 1, 3])),
    aten.transpose.int: either(tensors("abc", 0, 2), tensors("abc", -1, -2)),
    aten.t.default: either(tensors("ab"), tensors("a")),
    aten.expand.default: of(lambda d: (d.x("a1c"), [*d.shape("n"), -1, *d.shape("bc")])),
    aten.repeat.default: of(lambda d: (d.x("ab"), [2, 3, 1])),
    aten.view.dtype: either(
        of(lambda d: (d.x("ab"), torch.int64)), of(lambda d: (d.x("ab"), torch.int32)),
        of(lambda d: (d.ids("ab", 9).int().repeat(1, 2), torch.int64)),
    ),
    aten.view_as_real.default: of(lambda d: (torch.complex(d.x("ab"), d.x("ab")),)),
    aten.view_as_complex.default: of(lambda d: (d.fixed(z=2).x("abz"),)),
    # pieces
    aten.split.Tensor: of(lambda d: (d.fixed(s=18).x("asb"), d.choice((6, 12, 5)), 1)),
    aten.split_with_sizes.default: of(cut),
    aten.unsafe_split.Tensor: of(lambda d: (d.fixed(s=18).x("asb"), d.choice((6, 9, 5)), 1)),
    aten.unsafe_split_with_sizes.default: of(cut),
    aten.cat.default: either(
        of(lambda d: (list(cut(d)[0].split([6, 6, -12 + d.of["s"]], 1)), 1)), of(lambda d: ([d.x("abc"), d.x("adc")], -2)),
        of(lambda d: ([torch.zeros(0), d.x("abc"), d.x("abc")], 0)),
    ),
    aten.stack.default: either(of(lambda d: ([d.x("ab"), d.x("ab")], 1)), of(lambda d: ([d.x("ab")] * 3, -1))),
    aten.unbind.int: of(lambda d: (d.x("abc"), d.randrange(3))),
    aten.select.int: of(lambda d: (d.x("abc"), d.randrange(3), 0)),
    aten.slice.Tensor: either(of(lambda d: (d.fixed(s=18).x("asb"), *bounds(d))), tensors("abc", 1), tensors("abc")),
    aten.slice_backward.default: of(slice_back),
    aten.slice_scatter.default: of(slice_write),
    aten.select_backward.default: of(lambda d: (d.x("ac"), d.shape("abc"), 1, -1)),
    aten.select_scatter.default: of(lambda d: (d.x("abc"), d.x("ac"), 1, 0)),
    aten.constant_pad_nd.default: of(
        lambda d: (d.fixed(b=6).x("abc"), [0, 0, *d.choice(((6, 6), (0, 1), (0, 12), (-1, 0)))], d.choice((0, 1.5)))
    ),
    # indexing
    aten.embedding.default: of(lambda d: (d.fixed(v=d.choice((6, 12))).x("ve"), d.ids("ab", d.of["v"]), 0)),
    aten.embedding_dense_backward.default: of(embedding_back),
    aten.index_select.default: of(lambda d: (d.x("abc"), 1, d.ids("n", d.of["b"]))),
    aten.gather.default: of(gather),
    aten.scatter.src: of(lambda d: scatter(d, "src")),
    aten.scatter.value: of(lambda d: scatter(d, "value")),
    aten.scatter_add.default: of(lambda d: scatter(d, "add")),
    aten.index.Tensor: of(index),
    aten._unsafe_index.Tensor: of(index),
    aten.index_put.default: of(index_put),
    aten._unsafe_index_put.default: of(index_put),
    # norms
    aten._softmax.default: of(lambda d: (d.x("abc"), d.randrange(-1, 2), False)),
    aten._log_softmax.default: of(lambda d: (d.x("abc"), d.randrange(-1, 2), False)),
    aten._safe_softmax.default: of(lambda d: (d.x("abc"), d.randrange(-1, 2))),
    aten._softmax_backward_data.default: of(softmax_back),
    aten._log_softmax_backward_data.default: of(softmax_back),
    aten.native_layer_norm.default: of(norm),
    aten.native_layer_norm_backward.default: of(norm_back),
    aten._fused_rms_norm.default: of(lambda d: (d.x("abc"), list(d.shape("c")), d.x("c"), 1e-5)),
    aten._fused_rms_norm_backward.default: of(rms_back),
    aten.native_group_norm.default: of(group_norm),
    aten.native_group_norm_backward.default: of(group_norm_back),
    aten.native_batch_norm.default: of(lambda d: (*batch_norm(d, d.random() < 0.5), 0.1, 1e-5)),
    aten._native_batch_norm_legit.no_stats: of(lambda d: (*batch_norm(d, True)[:3], True, 0.1, 1e-5)),
    aten._native_batch_norm_legit_functional.default: of(lambda d: (*batch_norm(d, d.random() < 0.5), 0.1, 1e-5)),
    aten._native_batch_norm_legit_no_training.default: of(lambda d: (*batch_norm(d, True)[:5], 0.1, 1e-5)),
    aten.native_batch_norm_backward.default: of(batch_norm_back),
    # attention, convolutions, pools
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_back,
    aten.convolution.default: of(conv),
    aten.convolution_backward.default: of(conv_back),
    aten.max_pool2d_with_indices.default: of(lambda d: (image(d), [2, 2])),
    aten.max_pool2d_with_indices_backward.default: of(max_pool_back),
    aten.avg_pool2d.default: of(lambda d: (image(d), [2, 2])),
    aten.avg_pool2d_backward.default: of(
        lambda d: (image(d)[..., :3, :3].clone(), image(d), [2, 2], [2, 2], [0, 0], False, True, None)
    ),
    aten._adaptive_avg_pool2d.default: of(lambda d: (image(d), [1, 2])),
    aten._adaptive_avg_pool2d_backward.default: of(lambda d: (image(d)[..., :1, :2].clone(), image(d))),
    aten.upsample_bilinear2d.vec: of(lambda d: (image(d), [12, 12], False, None)),
    aten.upsample_nearest2d.vec: of(lambda d: (image(d), [12, 12], None)),
    aten.upsample_bicubic2d.vec: of(lambda d: (image(d), [12, 12], False, None)),
    aten.upsample_bilinear2d_backward.default: of(lambda d: (image(d), [6, 6], [*d.shape("nc"), 3, 3], False)),
    aten.upsample_nearest2d_backward.default: of(lambda d: (image(d), [6, 6], [*d.shape("nc"), 3, 3])),
    aten.upsample_bicubic2d_backward.default: of(lambda d: (image(d), [6, 6], [*d.shape("nc"), 3, 3], False)),
    aten.tril.default: tensors("abc", -1),
    aten.triu.default: tensors("abc"),
    aten.flip.default: either(tensors("abc", [1]), tensors("abc", [0, -1])),
    aten.roll.default: either(tensors("abc", [1], [1]), tensors("abc", [2])),
    # losses
    aten.nll_loss_forward.default: of(lambda d: nll(d, d.choice(("nc", "nc", "c")))),
    aten.nll_loss2d_forward.default: of(lambda d: nll(d, "ncts")),
    aten.nll_loss_backward.default: of(lambda d: nll_back(d, d.choice(("nc", "nc", "c")))),
    aten.nll_loss2d_backward.default: of(lambda d: nll_back(d, "ncts")),
}  # fmt: skip

