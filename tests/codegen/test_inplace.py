"""Values that need no memory of their own: the bits are those of the plain graph, and the memory is really less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.codegen import bind, inplace, segment_memory, tiling
from fzero.cost.allocator import measured_peak
from fzero.ir import segments
from fzero.ir.op import make_op
from fzero.ir.records import Ref
from fzero.runtime.handlers import spoil

aten = torch.ops.aten
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "tanh_backward", "sigmoid_backward", "silu_backward")
UNARY = ["neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "tanh", "sigmoid", "relu", "silu", "gelu"]


def graph_of(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    return segments.normalised(make_fx(fn, tracing_mode="fake")(*inputs))


def check(
    gm: fx.GraphModule, inputs: Sequence[Tensor], apart: frozenset[int] = frozenset()
) -> segment_memory.SegmentMemory:
    """The calls, in spoiled memory, twice, beside the graph; every input may be a destination."""
    plain = [x.clone() for x in inputs]
    expected = gm(*plain)
    layout = segment_memory.layout(gm, apart)
    block = torch.empty(layout.nbytes, dtype=torch.uint8)
    fresh = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in expected]
    memory = [x.clone() for x in inputs]
    calls = bind.bind(gm, memory, fresh, block, apart)
    for _ in range(2):
        for tensor, was in zip(memory, inputs, strict=True):
            tensor.copy_(was)
        for tensor in (block, *fresh):
            spoil(tensor)
        for call in calls:
            call()
        assert all(same_bits(a, b) for a, b in zip((*fresh, *memory), (*expected, *plain), strict=True))
    return layout


def positive(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_an_elementwise_op_over_its_operand_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    packet = getattr(aten, name)
    target = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    x, y = positive(37, 71, dtype=dtype), positive(71, 37, dtype=dtype).t().contiguous()

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x @ y.t() @ y if dtype is torch.float64 else x + y
        result = target(made, y) if name in BINARY else target(made)
        return [torch.sum(result, 0)]

    layout = check(graph_of(fn, [x, y]), [x, y])
    nbytes = x.numel() * x.element_size()
    assert layout.nbytes < 2 * nbytes + 4096, "the result lies where its operand lay"


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["_softmax", "_log_softmax"]),
)
def test_softmax_along_rows_over_its_operand_has_the_same_bits(
    rows: int, columns: int, dtype: torch.dtype, kind: str
) -> None:
    forward, backward = getattr(aten, kind).default, getattr(aten, f"{kind}_backward_data").default

    def fn(x: Tensor, g: Tensor) -> list[Tensor]:
        out = forward(x * 3, -1, False)
        return [backward(g * 2, out, -1, dtype).sum(1)]

    x = positive(rows, columns, dtype=dtype) * 4
    gm = graph_of(fn, [x, x.flip(0)])
    assert len(check(gm, [x, x.flip(0)]).homes) == 2


def test_an_operand_that_is_read_again_or_in_another_order_keeps_its_memory() -> None:
    x = positive(48, 48)
    for fn in (
        lambda x: [(a := x * 2).exp() + a.sum()],  # read after it
        lambda x: [(a := x * 2) + a.t()],  # two orders at once
        lambda x: [(x * 2)[:, :24] + 1],  # a part of it
        lambda x: [torch.softmax(x * 2, 0)],  # columns, not rows
        lambda x: [(x[:1, :1] * 2).as_strided((1, 1), (7, 3)) + x[:1, :1]],  # other strides
    ):
        gm = graph_of(fn, [x])
        layout = check(gm, [x])
        names = {str(key[0].target) for key in layout.homes}
        assert "aten.mul.Tensor" not in names, gm.graph


def into_destination(x: Tensor, y: Tensor, into: Tensor) -> list[Tensor]:
    aten.add.out(x, x @ y, out=into)
    return []


def test_the_second_term_of_a_sum_is_made_where_the_sum_goes() -> None:
    inputs = [positive(40, 40), positive(40, 40) - 1, torch.zeros(40, 40)]
    gm = fx.GraphModule(torch.nn.Module(), make_fx(into_destination, tracing_mode="fake")(*inputs).graph)
    assert check(gm, inputs, frozenset([2])).nbytes == 0
    assert check(gm, inputs, frozenset()).nbytes == 6400, "a destination that may overlap is left alone"


def test_destinations_apart() -> None:
    one = make_op("run", [Ref("a", 0, 64), Ref("b")], [Ref("f"), Ref("a", 64, 128), Ref("a", 0, 32), Ref("c")], fresh=1)
    assert inplace.apart(one) == {2, 4}
    two = make_op("run", [], [Ref("a", 0, 64), Ref("a", 32, 128), Ref("b")])
    assert inplace.apart(two) == {2}


# --- strips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 50257), (1000, 700), (3, 100000)])
def test_a_cross_entropy_s_gradient_by_rows(rows: int, columns: int, reduction: str) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    y = torch.arange(rows) * 7 % columns
    y[1] = -100  # ignored

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        grad, loss = torch.func.grad_and_value(lambda x: F.cross_entropy(x * 2, y, reduction=reduction))(x)
        return [loss.sum(), grad.sum(0), grad @ x.t()]

    gm = graph_of(fn, [x, y])
    layout = check(gm, [x, y])
    assert [len(one.nodes) for one in layout.chains.values()] == [3]
    assert layout.nbytes < 2 * x.numel() * 4 + (5 << 19), "the matrix of zeros is never whole"


@pytest.mark.parametrize("padding", [-1, 1, 39_999])
@pytest.mark.parametrize("spread", [60, 40_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_embedding_s_gradient_by_rows(dtype: torch.dtype, spread: int, padding: int) -> None:
    rows, columns = 40000, 210  # 2,496 rows of 16 bits are 1 MiB
    g, other = positive(3, 500, columns, dtype=dtype), positive(rows, columns, dtype=dtype)
    index, into = torch.randint(0, spread, (3, 500)), torch.zeros(rows, columns)
    index[0, :3] = torch.tensor([1, 39_999, 39_999 if spread > 60 else 1])

    def fn(g: Tensor, index: Tensor, other: Tensor, into: Tensor) -> list[Tensor]:
        made = aten.embedding_dense_backward(g, index, rows, padding, False)
        into.copy_((other + made).float())
        return []

    inputs = [g, index, other, into]
    gm = fx.GraphModule(torch.nn.Module(), make_fx(fn, tracing_mode="fake")(*inputs).graph)
    layout = check(gm, inputs, frozenset([3]))
    assert len(layout.chains) == (dtype is not torch.float32), "in fp32 it is made where it goes, which is quicker"
    assert layout.nbytes + layout.heap < 6 * (1 << 20), "strips instead of 17 and 34 MB"


def test_an_embedding_s_gradient_that_is_only_cast() -> None:
    g, index = positive(50, 210, dtype=torch.bfloat16), torch.randint(0, 40000, (50,))
    gm = graph_of(lambda g, index: [aten.embedding_dense_backward(g, index, 40000, -1, False).float()], [g, index])
    assert len(check(gm, [g, index]).chains) == 1


@pytest.mark.parametrize("kind", ["added", "under a cast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_embedding_s_gradient_reads_whole_is_not_cut(dtype: torch.dtype, kind: str) -> None:
    """As many tokens as rows: what comes in has the shape of the result, and an op after it may read it too."""
    rows, columns = 20000, 64
    g, index = positive(rows, columns, dtype=dtype), torch.arange(rows).flip(0)

    def fn(g: Tensor, index: Tensor) -> list[Tensor]:
        held = g * 2
        made = aten.embedding_dense_backward(held, index, rows, -1, False)
        if kind == "under a cast":
            made = made.double()
        return [made + held]

    layout = check(graph_of(fn, [g, index]), [g, index])
    assert [len(one.nodes) for one in layout.chains.values()] == ([2] if kind == "under a cast" else [])


@pytest.mark.parametrize("columns", [0, 64])
def test_an_embedding_s_gradient_that_is_only_copied_is_made_there(columns: int) -> None:
    """In fp32 rows are added where they lie: in tiles it took two to five times as long, and saved nothing."""
    g, index, into = positive(50, columns), torch.randint(0, 20000, (50,)), torch.zeros(20000, columns)

    def fn(g: Tensor, index: Tensor, into: Tensor) -> list[Tensor]:
        into.copy_(aten.embedding_dense_backward(g, index, 20000, -1, False))
        return []

    gm = fx.GraphModule(torch.nn.Module(), make_fx(fn, tracing_mode="fake")(g, index, into).graph)
    layout = check(gm, [g, index, into], frozenset([2]))
    assert not layout.chains
    assert layout.nbytes == layout.heap == 0


def test_a_chain_does_not_cross_a_write_to_what_it_reads() -> None:
    x, y = torch.randn(64, 50257), torch.arange(64)

    def fn(x: Tensor, y: Tensor, g: Tensor, into: Tensor) -> list[Tensor]:
        zeros = aten.nll_loss_backward(g, x, y, None, 1, -100, torch.tensor(64.0))
        x.mul_(2)
        return [aten._log_softmax_backward_data(zeros, x, 1, torch.float32).sum(0)]

    inputs = [x, y, torch.tensor(1.0), torch.zeros(64, 50257)]
    traced = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    assert tiling.chains(traced, frozenset()) == []


# --- flat work --------------------------------------------------------------------------------------------------------

LENGTH = 700_003  # two tiles of 1 MiB and a part of one


def sgd(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
    m.copy_(m * 0.9 + g)
    p.copy_(torch.ops.fzero.apply_delta(p, m * lr))
    return []


def lion(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
    direction = torch.sign(torch.add(m * 0.9, g, alpha=0.1)) + p * 0.01
    m.copy_(torch.add(m * 0.99, g, alpha=0.01))
    p.copy_(torch.ops.fzero.apply_delta(p, direction * lr))
    return []


def adam_of_halves(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
    wide = g.to(torch.bfloat16).float() * lr
    torch.ops.fzero.adamw_(p, wide, m, g, lr.ceil().long(), lr, 0.9, 0.99, 1e-8, 0.1, True)
    return []


def adam_then_narrow(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
    torch.ops.fzero.adamw_(p, g, m, g.clone(), lr.ceil().long(), lr, 0.9, 0.99, 1e-8, 0.1, True)
    m.copy_(p.to(torch.bfloat16))
    return []


def written(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    traced = make_fx(fn, tracing_mode="fake")(*inputs)
    return fx.GraphModule(torch.nn.Module(), traced.graph)


def flat_inputs(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [*(positive(length + i, dtype=dtype)[:length] for i in range(3)), torch.tensor(0.1, dtype=torch.float64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fn", "rooms"), [(sgd, 1), (lion, 2), (adam_of_halves, 2), (adam_then_narrow, 2)])
def test_an_update_runs_tile_by_tile(fn: Callable[..., Any], rooms: int, dtype: torch.dtype) -> None:
    """What lies between its ops was once or twice as large as the parameters."""
    inputs = flat_inputs(dtype=dtype)
    layout = check(written(fn, inputs), inputs)
    assert [chain.flat for chain in layout.chains.values()] == [True]
    assert layout.nbytes <= rooms * tiling.BYTES + (1 << 10)


def test_a_rank_s_shorter_part_runs_tile_by_tile_too() -> None:
    gm, whole = written(lion, flat_inputs()), flat_inputs()
    for length in (0, 64, 300_032):
        inputs = [x[:length].clone() if x.ndim else x for x in whole]
        plain = [x.clone() for x in inputs]
        lion(*plain)
        block = torch.empty(segment_memory.layout(gm).nbytes, dtype=torch.uint8)
        for call in bind.bind(gm, inputs, [], block):
            call()
        assert all(same_bits(a, b) for a, b in zip(inputs, plain, strict=True))


def test_flat_work_that_meets_more_than_its_elements_runs_whole() -> None:
    def by_norm(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
        m.copy_(m * 0.9 + g)
        p.copy_(p + m * m.sum())  # the sum stands between, and reads what is written
        return []

    def by_element(p: Tensor, g: Tensor, m: Tensor, lr: Tensor) -> list[Tensor]:
        p.copy_(p + g * p[5])
        return []

    inputs = flat_inputs()
    assert not check(written(by_norm, inputs), inputs).chains
    (chain,) = check(written(by_element, inputs), inputs).chains.values()
    assert [node.name for node in chain.nodes] == ["add", "copy_"], "the product reads an element of all"


# --- odd graphs -------------------------------------------------------------------------------------------------------


def logits(rows: int = 64, columns: int = 50257) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(rows, columns, generator=draw), torch.randint(0, columns, (rows,), generator=draw)


@pytest.mark.parametrize("kind", ["copy", "add", "output"])
def test_a_value_that_is_transposed_into_its_home(kind: str) -> None:
    def fn(x: Tensor, y: Tensor, into: Tensor) -> list[Tensor]:
        made = (x.t() * 2).t()
        if kind == "copy":
            into.copy_(made)
        elif kind == "add":
            aten.add.out(made, y, out=into)
        return [made + y] if kind == "output" else []

    inputs = [positive(4, 6), positive(4, 6), torch.zeros(4, 6)]
    gm = fx.GraphModule(torch.nn.Module(), make_fx(fn, tracing_mode="fake")(*inputs).graph)
    assert len(check(gm, inputs, frozenset([2])).homes) == 1


def test_a_copy_of_another_dtype_or_of_a_conjugate_is_made() -> None:
    def fn(x: Tensor, z: Tensor, bits: Tensor, into: Tensor) -> list[Tensor]:
        bits.copy_((x * 2).view(torch.int32))
        into.copy_((z * 2).conj())
        return []

    z = torch.complex(positive(6), positive(6))
    inputs = [positive(4, 6), z, torch.zeros(4, 6, dtype=torch.int32), torch.zeros_like(z)]
    gm = fx.GraphModule(torch.nn.Module(), make_fx(fn, tracing_mode="fake")(*inputs).graph)
    check(gm, inputs, frozenset([2, 3]))


def test_an_op_that_rounds_by_where_its_memory_ends_is_not_cut() -> None:
    x, y = logits()

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        grad = torch.func.grad(lambda x: F.cross_entropy(x, y))(x)
        return [aten.silu_backward(grad, x)]

    check(graph_of(fn, [x, y]), [x, y])


def test_two_chains_that_meet() -> None:
    x, y = logits()

    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        mixed = torch.func.grad(lambda x: 0.3 * F.cross_entropy(x * 2, y) + 0.7 * F.cross_entropy(x * 3, z))
        return [mixed(x) @ x.t()]

    gm = graph_of(fn, [x, y, y.flip(0)])
    assert check(gm, [x, y, y.flip(0)]).chains


def test_a_chain_does_not_end_in_memory_that_it_may_read_whole() -> None:
    def fn(x: Tensor, y: Tensor, total: Tensor, into: Tensor) -> list[Tensor]:
        grad = aten.nll_loss_backward(total, x, y, None, 1, -100, total)
        aten.mul.out(grad, x, out=into)
        return []

    inputs = [*logits(), torch.tensor(1.0), torch.zeros(64, 50257)]
    gm = fx.GraphModule(torch.nn.Module(), make_fx(fn, tracing_mode="fake")(*inputs).graph)
    assert len(tiling.chains(gm, frozenset([3]))) == 1
    assert tiling.chains(gm, frozenset()) == [], "the destination may lie over `total`"


def test_of_zeros_with_two_signs_a_minimum_takes_the_same_in_strips() -> None:
    x, y = torch.zeros(64, 50257), torch.arange(64)

    def fn(x: Tensor, y: Tensor, grad: Tensor) -> list[Tensor]:
        return [torch.minimum(aten.nll_loss_backward(grad, x, y, None, 1, -100, grad), -x)]

    check(graph_of(fn, [x, y, torch.tensor(1.5)]), [x, y, torch.tensor(1.5)])


def test_a_chain_s_last_op_spares_what_later_strips_read_whole() -> None:
    x, y = logits()

    def fn(x: Tensor, y: Tensor, grad: Tensor) -> list[Tensor]:
        held = x * 2
        return [aten.nll_loss_backward(grad, x, y, None, 1, -100, held[0, 0]) + held]

    inputs = [x, y, torch.tensor(1.5)]
    y[0] = 0  # the total weight's place is written in the first strip
    assert check(graph_of(fn, inputs), inputs).chains


@pytest.mark.parametrize(("rows", "columns", "met"), [(20000, 256, 30000), (1000, 700, 9000), (30, 64, 9000)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_an_embedding_s_gradient_allocates(
    rows: int, columns: int, met: int, transposed: bool, every: int, scaled: bool
) -> None:
    """By rows, or scaled by frequency, of operands that lie in order or not."""
    g, index = torch.ones(met, columns, dtype=torch.bfloat16), torch.arange(met * every).fmod(rows)[::every]
    if transposed:
        g = torch.ones(columns, met, dtype=torch.bfloat16).t()
    gm = graph_of(lambda g, index: [aten.embedding_dense_backward(g, index, rows, -1, scaled)], [g, index])
    layout, made = segment_memory.layout(gm), torch.empty(rows, columns, dtype=torch.bfloat16)
    calls = bind.bind(gm, [g, index], [made], torch.empty(layout.nbytes, dtype=torch.uint8))
    _, peak = measured_peak(lambda: [call() for call in calls])
    assert peak <= layout.heap <= 1.02 * peak, f"planned {layout.heap}, allocator {peak}"


def test_complex_division_is_not_over_its_operand() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    gm = graph_of(lambda x: [(made := x.reciprocal()) / made], [x])
    assert not check(gm, [x]).homes


def test_an_embedding_s_gradient_scaled_by_frequency() -> None:
    rows, columns = 40000, 205
    g, index = torch.randn(3, 50, columns).to(torch.bfloat16), torch.randint(0, 9, (3, 50))

    def fn(g: Tensor, index: Tensor) -> list[Tensor]:
        return [aten.embedding_dense_backward(g, index, rows, -1, True)]

    check(graph_of(fn, [g, index]), [g, index])


@pytest.mark.parametrize("kind", ["_softmax", "_log_softmax"])
def test_the_gradient_of_a_softmax_that_is_transposed(kind: str) -> None:
    """torch's shape rule says the gradient has the strides of what comes in; the kernel writes it row by row."""
    x, g = positive(16, 33), positive(33, 16)

    def fn(x: Tensor, g: Tensor) -> list[Tensor]:
        made = getattr(aten, kind)(x, -1, False)
        return [getattr(aten, f"{kind}_backward_data")(g.t(), made, -1, torch.float32).clone(), made]

    check(graph_of(fn, [x, g]), [x, g])


def test_a_sum_of_views_of_one_expanded_element() -> None:
    """Torch's shape rules and its kernels give such views other strides, and a kernel refuses half of an operand."""
    spec = fzero.Spec(loss=lambda p, b: torch.cartesian_prod(p["w"], p["w"]).sum(), optimizer=fzero.optim.sgd(0.5))
    state = fzero.step(fzero.init({"w": torch.ones(1)}, spec), torch.ones(1))
    assert fzero.unshard(state.params)["w"].tolist() == [0.0]
