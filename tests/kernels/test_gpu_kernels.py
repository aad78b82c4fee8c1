"""The Triton kernels on a CUDA device (`make test-gpu`): the bits that are promised, the oracle elsewhere.

Bits are compared with references that run on the CPU and round as IEEE says, so they are the same on every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse_calls import drawn, masked
from torch import Tensor

from fzero import optim
from fzero._torch_compat import fused_adam_, fused_adamw_
from fzero.ir.op_info import kernel_for
from fzero.kernels import (
    KERNELS,
    adam8_kernel,
    adamw,
    cast,
    codec_kernels,
    codecs,
    flat_norms,
    hyper,
    row_sums,
    softmax_loss,
)
from fzero.kernels import round as rounding
from fzero.kernels.codecs import CODECS, BlockCodec
from fzero.optim import _adam8

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEP: Any = (0.9, 0.999, 1e-8, 0.1)
SIZES = [1, 63, 4097, 1_000_003]
ODD = [0.0, -0.0, 1e-45, -1e-40, 1e30, 3.4e38, 65520.0, float("inf"), float("-inf"), float("nan")]


def values(size: int, dtype: torch.dtype = F32, seed: int = 0, odd: bool = False) -> Tensor:
    """On the CPU, one element into its memory."""
    x = torch.randn(size + 1, generator=torch.Generator().manual_seed(seed))
    if odd and size > 100:
        x[torch.arange(1, 3 * len(ODD), 3)] = torch.tensor(ODD)
    return x.to(dtype)[1:]


def there(*tensors: Tensor) -> list[Tensor]:
    """Copies on the device, as misaligned as those here."""
    return [torch.cat([t.new_zeros(1), t.reshape(-1)]).cuda()[1:] for t in tensors]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; any NaN equals any other."""
    a, b = a.cpu(), b.cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(whole), b[~nan].view(whole))


def near(got: Tensor, exact: Tensor, other: Tensor, old: Tensor) -> None:
    """Twice as far from the exact result as `other` is at its worst, relative to the old and the exact value; one unit
    in the last place, and two at the size of `old`."""
    unit = torch.finfo(got.dtype).eps
    got, exact, other, old = (t.double().cpu() for t in (got, exact, other, old))
    size = old.abs() + exact.abs()
    worst = float(((other - exact).abs() / (size + 1e-30)).max())
    room = 2 * (worst + torch.finfo(F32).eps) * size
    assert ((got - exact).abs() <= room + unit * exact.abs() + 1e-44).all()


def state(size: int, dtype: torch.dtype) -> list[Tensor]:
    p, g, m, v = (values(size, dtype, seed) for seed in range(4))
    return [p, g, m * 0.1, v.square() * 0.1]


def scalars(count: int = 3) -> tuple[Tensor, Tensor]:
    return torch.tensor(count, device="cuda"), torch.tensor(1e-2, dtype=torch.float64, device="cuda")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw_is_as_near_as_aten(size: int, dtype: torch.dtype, decoupled: bool) -> None:
    old = state(size, dtype)
    exact = adamw.adamw_reference(*old, 3, 1e-2, *STEP, decoupled, dtype=torch.float64)
    own, other = there(*old), there(*old)
    adamw.adamw_(*own, *scalars(), *STEP, decoupled)
    count, lr = scalars()
    options: dict[str, Any] = dict(zip(("beta1", "beta2", "eps", "weight_decay"), STEP, strict=True))
    aten = fused_adamw_ if decoupled else fused_adam_
    aten(*([t] for t in other), [], [count.float()], lr=lr.float(), amsgrad=False, maximize=False, **options)
    for i, wanted in zip((0, 2, 3), exact, strict=True):
        near(own[i], wanted, other[i], old[i])


def test_adamw_has_the_bits_of_separate_operations() -> None:
    """In float32, one IEEE operation after the other, with the same numbers of the step: numpy's."""
    old = state(100_003, F32)
    p, g, m, v = (t.numpy() for t in old)
    beta1, rest1, beta2, rest2, eps = (np.float32(x) for x in (0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-8))
    rate, root = (float(x) for x in hyper.bias_corrections(*scalars(), 0.9, 0.999))
    size, inverse, shrink = (np.float32(x) for x in (rate, 1 / root, 1e-2 * 0.1))
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    step = shrink * p + size * m / (np.sqrt(v) * inverse + eps)
    own = there(*old)
    adamw.adamw_(*own, *scalars(), *STEP)
    for got, wanted in zip((own[0], *own[2:]), (p - step, m, v), strict=True):
        assert same(got, torch.from_numpy(wanted))


def test_slices_skips_copies_and_seeds() -> None:
    old = state(5000, F32)
    whole, cut = there(*old), there(*old)
    copy, flag = torch.empty(5000, dtype=BF16, device="cuda"), torch.tensor(True, device="cuda")
    adamw.adamw_(*whole, *scalars(), *STEP, copy=copy)
    for part in (slice(0, 1234), slice(1234, 5000)):
        adamw.adamw_(*(t[part] for t in cut), *scalars(), *STEP)
    assert all(same(a, b) for a, b in zip(whole, cut, strict=True))
    assert same(copy, whole[0].to(BF16))
    adamw.adamw_(*cut, *scalars(), *STEP, skip=flag)
    assert all(same(a, b) for a, b in zip(whole, cut, strict=True))
    low = [t.to(BF16) if i != 1 else t for i, t in enumerate(there(*old))]
    wide = [t.float() for t in low]
    seeds = [torch.tensor(s, device="cuda") for s in (7, -9, 2**62)]
    adamw.adamw_(*low, *scalars(), *STEP, seeds=adamw.Seeds(*seeds))
    adamw.adamw_(*wide, *scalars(), *STEP)
    for i, seed in zip((0, 2, 3), seeds, strict=True):
        assert same(low[i], optim.stochastic_round(wide[i].cpu(), seed.cpu()))


@pytest.mark.parametrize("count", [1, 2, 10, 12_345, 10**6])
def test_the_numbers_of_a_step_are_the_cpus(count: int) -> None:
    rate, root = hyper.bias_corrections(*scalars(count), 0.9, 0.999)
    exact = torch.tensor([1e-2 / (1 - 0.9**count), (1 - 0.999**count) ** 0.5], dtype=torch.float64)
    assert [float(x.float()) for x in (rate, root)] == exact.float().tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_adamw8_has_the_bits_of_the_operator(size: int, dtype: torch.dtype) -> None:
    """Of the operator on the device, whose roots are IEEE's."""
    blocks = -(-size // 64)
    own, other = ([*there(*[values(size, dtype)]), *_zero(size, blocks)] for _ in range(2))
    for count in range(1, 6):
        g = values(size, dtype, count).cuda()
        for step, (p, *moments) in ((adam8_kernel.adamw8_, own), (_adam8.adamw8_, other)):
            step(p, g, *moments, *scalars(count), *STEP)
    assert all(same(a, b) for a, b in zip(own, other, strict=True))


def _zero(size: int, blocks: int) -> list[Tensor]:
    sizes = (size, torch.int8), (blocks, F32), (size, torch.uint8), (blocks, F32)
    return [torch.zeros(num, dtype=dtype, device="cuda") for num, dtype in sizes]


@pytest.mark.parametrize("size", SIZES)
def test_rounding_and_casts(size: int) -> None:
    x = values(size, odd=True)
    seed = torch.tensor(-5)
    got = rounding.stochastic_round(*there(x), seed.cuda())
    assert torch.equal(got.cpu().view(torch.int16), optim.stochastic_round(x, seed).view(torch.int16))
    scale = torch.tensor(0.37)
    for source in (F32, BF16, F16):
        for target in (F32, BF16, F16):
            out = torch.empty(size + 1, dtype=target, device="cuda")[1:]
            cast.cast(out, *there(x.to(source)), scale.cuda())
            assert same(out, cast.cast_reference(x.to(source), target, scale))


@pytest.mark.parametrize("size", [0, *SIZES, 10_000_019])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norm_and_finite_check(size: int, dtype: torch.dtype) -> None:
    x, flag = values(size, dtype), torch.tensor(True, device="cuda")
    (device,) = there(x)
    total = flat_norms.sum_squares(device, nonfinite=flag)
    assert total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-13)
    assert not flag
    assert all(torch.equal(total, flat_norms.sum_squares(device.clone())) for _ in range(3)), "the same bits every time"
    for lost in (float("inf"), float("nan")):
        if size:
            device[-1] = lost
            flat_norms.sum_squares(device, nonfinite=flag)
            assert flag


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_codecs_have_the_bits_of_the_cpu(size: int, dtype: torch.dtype, codec: BlockCodec) -> None:
    x = values(size, dtype, odd=True)
    wanted = codecs.encode(x, codec)
    got = codec_kernels.encode(codec, *there(x)).cpu()
    finite = torch.tensor([bool(part.isfinite().all()) for part in x.split(64)])
    rows, others = (message.view(-1, codec.block_bytes) for message in (got, wanted))
    assert torch.equal(rows[finite], others[finite])
    assert same(rows[:, -4:].contiguous().view(F32), others[:, -4:].contiguous().view(F32))
    assert same(codec_kernels.decode(codec, got.cuda()), codecs.decode_blocks(got, codec))
    assert not codecs.decode_blocks(got, codec).view(-1, 64)[~finite].isfinite().any()


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_sums_of_messages_have_the_bits_of_the_cpu(codec: BlockCodec, ranks: int, divisor: int) -> None:
    messages = torch.stack([codecs.encode(values(70_001, seed=i), codec) for i in range(ranks)])
    room = torch.nn.functional.pad(messages, (4, 8)).cuda()
    got = codec_kernels.decode_sum(codec, room[:, 4:-8], divisor)
    assert same(got, codecs.decode_sum(messages, divisor, codec))


def test_a_step_waits_for_nothing_and_fits_in_a_graph() -> None:
    own = there(*state(4096, F32))
    norm, bad = torch.empty((), dtype=torch.float64, device="cuda"), torch.tensor(False, device="cuda")
    count, lr = scalars()

    def step() -> None:
        flat_norms.sum_squares(own[1], nonfinite=bad, out=norm)
        adamw.adamw_(*own, count, lr, *STEP, skip=bad)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replayed = [t.clone() for t in own]
    other = [t.clone() for t in own]
    for target in (count.add_(1), own[1].mul_(2)):
        assert target.is_cuda
    graph.replay()
    adamw.adamw_(other[0], own[1], *other[2:], count, lr, *STEP)
    assert same(own[0], other[0])
    assert not same(own[0], replayed[0]), "the replay steps, with the count and the gradient of now"


def test_compiled_kernels_have_no_spills_on_this_device() -> None:
    x, out = values(4096).cuda(), torch.empty(4096, dtype=BF16, device="cuda")
    compiled: Any = cast._cast_kernel[(2,)](out, x, None, 4096, BLOCK=2048, enable_fp_fusion=False)
    assert compiled.n_spills == 0


def test_the_table_swaps_operators_of_a_program() -> None:
    p, g, m, v = there(*state(4096, F32))
    op = torch.ops.fzero.adamw.default
    arguments = (p, g, m, v, *scalars(), *STEP, True)
    launch = kernel_for(op, *arguments)
    assert launch is KERNELS[str(op)].launch
    for a, b in zip(launch(*arguments), op(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_block_sparse_attention_has_the_numbers_of_the_cpu(dtype: torch.dtype, seed: int) -> None:
    """And its bits repeat: nothing is added up by atomics."""
    call = drawn(seed, dtype, block=(16, 64)[seed % 2], dim=(32, 64)[seed % 2], value_dim=64)

    def on_device() -> list[Tensor]:
        own = [x.detach().cuda().requires_grad_() for x in call.tensors[:3]]
        others = [x if x is None else x.cuda() for x in (call.columns, call.documents)]
        out = torch.ops.fzero.block_sparse_attention(*own, *others, *call.numbers)
        return [out.detach(), *torch.autograd.grad(out, own, call.tensors[3].cuda())]

    first = on_device()
    assert all(torch.equal(a, b) for a, b in zip(first, on_device(), strict=True))
    for got, wanted in zip(first, masked(call, torch.float64), strict=True):
        assert (got.cpu() - wanted).norm() <= (1e-5 if dtype == F32 else 2e-2) * wanted.norm() + 1e-6  # or zeros


def _rows(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (300, 1280), (1000, 768), (65, 8192)])
def test_rows_are_summed_in_the_pass_that_makes_them(rows: int, width: int, dtype: torch.dtype) -> None:
    """As in fp64 on the CPU; the sums are of what was written, and their bits repeat."""
    grad, x, more = (_rows(rows, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = 1 + _rows(width, dtype=dtype, seed=3)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x.float(), [width], None, None, 1e-5)
    wide = [t.double() for t in (grad, x, mean, rstd, weight)]
    norm = torch.ops.aten.native_layer_norm_backward(
        wide[0], wide[1], [width], *wide[2:], torch.zeros(width).double(), [True, True, True]
    )
    gelu = torch.ops.aten.gelu_backward(wide[0], wide[1], approximate="tanh")
    on = [t.cuda() for t in (grad, x, mean, rstd, weight, more)]

    def run() -> list[Tensor]:
        outs = [torch.full_like(t, torch.nan) for t in (on[1], on[1], *[on[4]] * 4)]
        row_sums.gelu_backward_sum(on[0], on[1], outs[0], outs[2], approximate="tanh")
        row_sums.layer_norm_backward_sums(*on, outs[1], *outs[3:])
        return [t.cpu() for t in outs]

    found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))
    room = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}[dtype]
    sums = found[0].double().sum(0), norm[1], norm[2], found[1].double().sum(0)
    for got, wanted in zip(found, (gelu, norm[0] + more.double(), *sums), strict=True):
        assert (got.double() - wanted).norm() <= room * wanted.norm()


@pytest.mark.parametrize("turned", [False, True])
def test_packing_sums_its_columns(turned: bool) -> None:
    three = [_rows(3, 5, 200, 64, dtype=BF16, seed=seed).cuda() for seed in range(3)]
    three = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in three] if turned else three
    wanted = torch.stack(three).permute(1, 3, 0, 2, 4).contiguous()
    out, total = torch.full_like(wanted, torch.nan), torch.full((960,), torch.nan, dtype=BF16, device="cuda")
    row_sums.pack_sum(*three, out, total)
    assert torch.equal(out, wanted)
    exact = wanted.double().view(600, 960).sum(0)
    assert (total.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("columns", "width"), [(257, 257), (50257, 50304), (32000, 32000)])
def test_the_loss_over_a_vocabulary(columns: int, width: int, dtype: torch.dtype) -> None:
    """As in fp64 on the CPU, also over the logits; the bits repeat."""
    x = (5 * _rows(100, width, dtype=F32, seed=0)).to(dtype)
    target = torch.randint(0, columns, (100,), generator=torch.Generator().manual_seed(1))
    target[::7] = -100
    exact = x[:, :columns].double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, target)
    wanted.backward()
    options = {"columns": columns, "mean": True, "ignored": -100}
    on, where = x.cuda(), target.cuda()
    out, loss, again = torch.full_like(on, 3.0), torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    softmax_loss.softmax_loss(on, where, None, loss, out, **options)
    softmax_loss.softmax_loss(on, where, None, again, on, **options)
    assert torch.equal(loss, again)
    assert torch.equal(out, on)
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    assert exact.grad is not None
    room = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}[dtype]
    assert (out[:, :columns].cpu().double() - exact.grad).norm() <= room * exact.grad.norm()
    assert not out[:, columns:].any()
