"""as_strided and its kin in a step are what they are in eager PyTorch, wherever a program lays the values.

Every case is a loss of w (4, 6) and a batch; oracle: torch.autograd on one process. It runs in the bound executor,
whose values lie side by side in one arena, and interpreted on two ranks under zero=0 and zero=3.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.errors import CaptureError, VerifyError
from fzero.ir import as_strided, segments
from fzero.ir.program import Program

Params = dict[str, Tensor]
CLOSED_OVER = torch.arange(100.0).sin()


def _rows(x: Tensor) -> Tensor:
    """Numbers of x's shape, all different, so that no two elements may change places."""
    return torch.arange(1.0, x.numel() + 1).view(x.shape).cos()


def weighed(x: Tensor, batch: Tensor) -> Tensor:
    return (x * _rows(x)).sum() * batch.mean() + (x * x).sum()


def same_layout(p: Params, b: Tensor) -> Tensor:
    return weighed(torch.sin(p["w"]).as_strided((4, 6), (6, 1)), b)


def with_offset(p: Params, b: Tensor) -> Tensor:
    return weighed(torch.sin(p["w"]).as_strided((3, 4), (2, 1), 5), b)


def overlapping(p: Params, b: Tensor) -> Tensor:
    return weighed(torch.sin(p["w"]).as_strided((8, 4), (2, 1), 1), b)


def of_a_leaf(p: Params, b: Tensor) -> Tensor:
    return weighed(p["w"].as_strided((3, 4), (2, 1), 5), b)


def of_the_batch(p: Params, b: Tensor) -> Tensor:
    return weighed(b[1:].as_strided((3, 4), (2, 1), 2) * p["w"][:3, :4], b)


def before_a_view(p: Params, b: Tensor) -> Tensor:
    """The offset counts from the storage's start, not from the view's."""
    return weighed(torch.sin(p["w"])[1:].as_strided((3, 4), (2, 1), 0), b)


def of_a_transposed_value(p: Params, b: Tensor) -> Tensor:
    return weighed(torch.sin(p["w"].t()).as_strided((2, 5), (5, 2), 3), b)


def of_a_gap(p: Params, b: Tensor) -> Tensor:
    return weighed((p["w"] * 2)[:, ::2].as_strided((4, 3), (6, 2), 1), b)


def written_through(p: Params, b: Tensor) -> Tensor:
    x = torch.sin(p["w"])
    x.as_strided((3, 4), (6, 1), 1).mul_(2.0)
    return weighed(x, b)


def written_beyond_a_view(p: Params, b: Tensor) -> Tensor:
    """A write through a view of a view reaches elements that the first view does not have."""
    x = torch.sin(p["w"])
    x[1:3].as_strided((4, 3), (6, 1), 0).mul_(3.0)
    return weighed(x, b)


def written_into_zeros(p: Params, b: Tensor) -> Tensor:
    x = torch.zeros(40)
    x.as_strided((4, 6), (9, 1), 3).copy_(p["w"])
    return weighed(x, b)


def read_after_writes(p: Params, b: Tensor) -> Tensor:
    x = torch.cos(p["w"])
    early, late = x.as_strided((4,), (7,), 0), x.view(-1)[3:9]
    late += p["w"].sum()
    early.zero_()
    return weighed(late, b) + weighed(x.t(), b)


def pooled(p: Params, b: Tensor) -> Tensor:
    """torchvision's ConvNeXt and Swin: a permuted tensor pooled to one element a channel."""
    x = (p["w"].view(1, 2, 3, 4) * b.mean()).expand(2, 2, 3, 4).permute(0, 3, 1, 2)
    return weighed(nn.AdaptiveAvgPool2d(1)(x), b)


def pooled_3d(p: Params, b: Tensor) -> Tensor:
    x = (p["w"].view(1, 2, 3, 2, 2) * b.mean()).permute(0, 4, 1, 2, 3)
    return weighed(nn.AdaptiveAvgPool3d(1)(x), b)


def frames(p: Params, b: Tensor) -> Tensor:
    return weighed(p["w"].flatten().unfold(0, 8, 2), b)


def written_through_windows(p: Params, b: Tensor) -> Tensor:
    """The last column is in no window."""
    x = torch.sin(p["w"])[:, :5].clone()
    x.unfold(1, 2, 2).mul_(3.0)
    return weighed(x, b)


def written_through_windows_of_a_view(p: Params, b: Tensor) -> Tensor:
    x = torch.cos(p["w"])
    x[1:].t().unfold(0, 2, 4)[..., 1].zero_()
    return weighed(x, b)


def written_into_a_result_beside_another(p: Params, b: Tensor) -> Tensor:
    """`rrelu` writes its noise too, but what it returns is memory of its own."""
    x = F.rrelu(torch.sin(p["w"]), training=False)
    x.as_strided((2,), (1,), 10).div_(2.5)
    return weighed(x, b)


def in_place_where_strides_differ(p: Params, b: Tensor) -> Tensor:
    """The norm's backward fills in place; its pure form has other strides, and a view is taken of it: twice."""
    apart = p["w"].flatten()[:6].view(2, 3).t() - b.flatten()[:6].view(3, 2)
    other = p["w"].flatten()[8:16].view(2, 4).t() - b.flatten()[:8].view(4, 2)
    return weighed((apart + 0.1).norm(2, -1), b) + weighed((other + 0.2).norm(2, -1), b)


def windows_that_leave_nothing_out(p: Params, b: Tensor) -> Tensor:
    z = torch.complex(p["w"].sin(), p["w"].cos()).clone()
    z.real.unfold(1, 2, 2).mul_(2.0)
    return weighed(torch.view_as_real(z), b)


def after_a_view_that_failed(p: Params, b: Tensor) -> Tensor:
    x = torch.sin(p["w"]).t()
    try:
        flat = x.view(-1)
    except (RuntimeError, ValueError):
        flat = x.reshape(-1)
    y = torch.cos(p["w"])
    y[0].mul_(2.0)
    return weighed(flat, b) + weighed(y, b)


def added_over_a_column(p: Params, b: Tensor) -> Tensor:
    """A sum lies in the place of an operand whose stride of a dim of one element is another."""
    x = p["w"].flatten()[:5].view(5, 1)
    found = torch.index_put(x, (b[0].long() % 5,), x.sum(), accumulate=True)
    return torch.inner(x, found).mean() + b.mean()


def short_time_fourier(p: Params, b: Tensor) -> Tensor:
    wave = p["w"].flatten().repeat(4)
    found = torch.stft(wave, 16, 4, window=torch.hann_window(16), return_complex=True)
    return weighed(torch.view_as_real(found), b)


def closed_over(p: Params, b: Tensor) -> Tensor:
    return weighed(CLOSED_OVER[10:].as_strided((4, 6), (8, 1), 13) * p["w"], b)


def complex_parts(p: Params, b: Tensor) -> Tensor:
    z = torch.complex(p["w"], p["w"].cos())
    return weighed(torch.view_as_real(z).as_strided((4, 3), (12, 2), 1), b) + weighed(
        z.as_strided((2, 2), (3, 1), 4).real, b
    )


def of_a_conjugate(p: Params, b: Tensor) -> Tensor:
    """Which has the memory, the shape and the strides of what it is of."""
    x = torch.view_as_complex(p["w"].view(4, 3, 2)) * 2
    return weighed(x.conj().as_strided((3, 3), (1, 3)).imag, b)


def in_torch_func(p: Params, b: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return (x.as_strided((3, 4), (2, 1), 5) ** 3).sum()

    return weighed(torch.func.grad(inner)(p["w"]), b)


def mapped(p: Params, b: Tensor) -> Tensor:
    return weighed(torch.func.vmap(lambda row: row.as_strided((2, 2), (3, 1)) ** 2)(p["w"]), b)


CASES: list[Callable[[Params, Tensor], Tensor]] = [
    same_layout,
    with_offset,
    overlapping,
    of_a_leaf,
    of_the_batch,
    before_a_view,
    of_a_transposed_value,
    of_a_gap,
    written_through,
    written_beyond_a_view,
    written_into_zeros,
    read_after_writes,
    pooled,
    pooled_3d,
    frames,
    written_through_windows,
    written_through_windows_of_a_view,
    written_into_a_result_beside_another,
    in_place_where_strides_differ,
    windows_that_leave_nothing_out,
    after_a_view_that_failed,
    added_over_a_column,
    short_time_fourier,
    closed_over,
    complex_parts,
    of_a_conjugate,
    in_torch_func,
    mapped,
]


def _w() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def _batch(rank: int = 0, step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1 + rank))


def step_of(loss: Callable[[Params, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        value, gradients = fzero.value_and_grad(loss)(state, batch)
        return state, {"loss": value, "gradient": gradients["w"]}

    return step


def eager(loss: Callable[[Params, Tensor], Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
    w = _w().requires_grad_()
    value = loss({"w": w}, batch)
    return value.detach(), torch.autograd.grad(value, w)[0]


@pytest.mark.parametrize("loss", CASES, ids=lambda f: f.__name__)
@pytest.mark.sampled(8)
def test_like_eager(loss: Callable[[Params, Tensor], Tensor]) -> None:
    expected = eager(loss, _batch())
    state = fzero.init({"w": _w()}, fzero.Spec(step=step_of(loss), zero=3))
    for _ in range(2):  # the second in memory that the first has used
        state = fzero.step(state, _batch())
        torch.testing.assert_close(state.metrics["loss"], expected[0])
        torch.testing.assert_close(state.metrics["gradient"], expected[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [with_offset, written_through, pooled, short_time_fourier], ids=lambda f: f.__name__)
def test_on_two_ranks(loss: Callable[[Params, Tensor], Tensor]) -> None:
    each = [eager(loss, _batch(rank)) for rank in range(2)]
    found = []
    for zero in (0, 3):
        spec = fzero.Spec(step=step_of(loss), zero=zero)
        (metrics,) = run(spec, {"w": _w()}, _batch, world=2, steps=1).metrics
        torch.testing.assert_close(metrics[0]["gradient"], (each[0][1] + each[1][1]) / 2)
        found.append(metrics[0]["gradient"])
    assert torch.equal(*found)


def test_a_part_of_the_batch_may_be_read_as_complex() -> None:
    """Of three microbatches of five floats, the second begins in the middle of a complex number."""

    def loss(p: Params, b: Tensor) -> Tensor:
        pairs = torch.view_as_complex(b[:, :4].unflatten(1, (2, 2)).contiguous()) * (0.5 - 0.3j)
        whole = torch.view_as_complex(b.flatten()[:4].view(2, 2))
        return (pairs.abs().sum() + whole.real.sum() + b.view(torch.int32).float().mean()) * p["w"].sum()

    batch = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    w = _w().requires_grad_()
    value = sum((loss({"w": w}, part.clone()) for part in batch.split(1)), torch.zeros(())) / 3
    spec = fzero.Spec(step=step_of(loss), zero=3, microbatches=3)
    state = fzero.step(fzero.init({"w": _w()}, spec), batch)
    torch.testing.assert_close(state.metrics["gradient"], torch.autograd.grad(value, w)[0])


# --- random chains of views and writes --------------------------------------------------------------------------------


def _random_view(rng: random.Random, x: Tensor) -> Tensor:
    """A view of x, drawn: what is drawn depends on x's sizes alone, so that every trace draws the same."""
    kind = rng.choice(
        ("slice", "permute", "select", "flatten", "unsqueeze", "diagonal", "strided", "strided", "unfold")
    )
    if x.dim() == 0:
        return x.view(1)
    d = rng.randrange(x.dim())
    if kind == "slice" and x.shape[d] > 1:
        start = rng.randrange(x.shape[d] - 1)
        return x[(slice(None),) * d + (slice(start, None, rng.choice((1, 1, 2))),)]
    if kind == "permute":
        return x.permute(rng.sample(range(x.dim()), x.dim()))
    if kind == "select" and x.dim() > 1:
        return x.select(d, rng.randrange(x.shape[d]))
    if kind == "flatten" and x.is_contiguous():
        return x.view(-1)
    if kind == "unsqueeze" and x.dim() < 4:
        return x.unsqueeze(d)
    if kind == "diagonal" and x.dim() > 1:
        return x.diagonal()
    if kind == "unfold" and x.shape[d] > 2 and x.dim() < 4:
        return x.unfold(d, 2, rng.choice((2, 3)))  # windows apart: they may be written to
    if kind == "strided":
        size = (rng.randint(1, 2), rng.randint(1, 3))
        return x.as_strided(size, (rng.randint(3, 7), 1), rng.randint(0, 10))
    return x


def drawn(seed: int) -> Callable[[Params, Tensor], Tensor]:
    """A loss of some values of w, views of them, and writes through the views."""

    def loss(p: Params, b: Tensor) -> Tensor:
        rng = random.Random(seed)
        owned = [torch.sin(p["w"]), (p["w"] * b).t().contiguous(), p["w"].cos().t() + 1.0]
        views = list(owned)
        for _ in range(rng.randint(2, 7)):
            source = rng.choice(views)
            if rng.random() < 0.55:
                views.append(_random_view(rng, source))
                continue
            factor = p["w"].mean() + rng.random()
            write = rng.choice(("mul", "copy", "fill", "add"))
            if write == "mul":
                source.mul_(factor)
            elif write == "copy":
                source.copy_(torch.sin(source * factor))
            elif write == "fill":
                source.fill_(factor)
            else:
                source.add_(b.mean() * source.detach().sum())
        return sum((weighed(v, b) for v in (*owned, *views[-2:])), start=torch.zeros(()))

    return loss


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_random_views_and_writes(seed: int) -> None:
    loss = drawn(seed)
    try:
        expected = eager(loss, _batch())
    except RuntimeError:  # torch itself refuses a write to overlapping memory, or a view that autograd cannot follow
        return
    state = fzero.init({"w": _w()}, fzero.Spec(step=step_of(loss), zero=3))
    state = fzero.step(state, _batch())
    torch.testing.assert_close(state.metrics["loss"], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.metrics["gradient"], expected[1], rtol=1e-4, atol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def _refused(loss: Callable[[Params, Tensor], Tensor]) -> str:
    with pytest.raises(CaptureError) as caught:
        fzero.lower(fzero.Spec(step=step_of(loss)), {"w": _w()}, _batch(), world_size=1)
    return str(caught.value)


def test_beyond_a_closed_over_view_is_refused() -> None:
    view = CLOSED_OVER[10:]
    text = _refused(lambda p, b: weighed(view.as_strided((4, 6), (8, 1), 3) * p["w"], b))
    assert "reaches elements [-7, 23) of a storage" in text
    assert "test_as_strided.py" in text


def test_a_closed_over_permuted_tensor_is_refused() -> None:
    view = CLOSED_OVER.view(10, 10).t()
    text = _refused(lambda p, b: weighed(view.as_strided((4, 6), (8, 1), 3) * p["w"], b))
    assert "close over its .contiguous()" in text


def test_elements_written_twice_are_refused() -> None:
    def loss(p: Params, b: Tensor) -> Tensor:
        x = p["w"].flatten() * 1.0
        x.as_strided((3, 4), (2, 1)).copy_(b[:3, :4])
        return weighed(x, b)

    assert "writes several values to one element" in _refused(loss)


def _beyond(cut: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def loss(p: Params, b: Tensor) -> Tensor:
        x = torch.sin(p["w"])
        z = cut(x).as_strided((5, 2), (4, 1), 0)
        write(x, z)
        return weighed(z, b)

    return loss


@pytest.mark.parametrize("write", [lambda x, z: x.mul_(2.0), lambda x, z: z.mul_(2.0)], ids=["the whole", "itself"])
@pytest.mark.parametrize("cut", [lambda x: x[1:3], lambda x: x[:, ::2]], ids=["rows", "columns"])
def test_what_reaches_beyond_a_view_is_not_read_after_a_write(cut: Any, write: Any) -> None:
    """Autograd makes such a view anew, of the whole; a trace goes back through the part."""
    assert "Take it of the whole tensor" in _refused(_beyond(cut, write))


@pytest.mark.parametrize("write", [lambda x, z: x.mul_(2.0), lambda x, z: z.mul_(2.0), lambda x, z: z])
def test_of_the_whole_it_is(write: Any) -> None:
    test_like_eager(_beyond(lambda x: x, write))
    test_like_eager(_beyond(lambda x: x[0:], lambda x, z: z))


# --- the class of fault -----------------------------------------------------------------------------------------------


def _program(loss: Callable[[Params, Tensor], Tensor]) -> Program:
    return fzero.lower(fzero.Spec(step=step_of(loss), zero=3), {"w": _w()}, _batch(), world_size=1).program


def _damaged(program: Program, damage: Callable[[torch.fx.Node], None]) -> Program:
    """The program with a segment that names a place in memory damaged in place, under its old hash."""
    for key, gm in program.segments.items():
        graph = segments.copied(gm.graph)
        nodes = [n for n in graph.nodes if n.target is torch.ops.fzero.strided.default]
        if nodes:
            damage(nodes[0])
            return Program(**{**vars_of(program), "segments": {**program.segments, key: segments.module(graph)}})
    raise AssertionError("no segment has a strided view")


def vars_of(program: Program) -> dict[str, Any]:
    return {name: getattr(program, name) for name in program.__dataclass_fields__}


def test_no_program_counts_from_the_start_of_a_storage() -> None:
    """A segment with the op as it was traced is refused, whatever its numbers say."""

    def damage(node: torch.fx.Node) -> None:
        node.target = torch.ops.aten.as_strided.default

    with pytest.raises(VerifyError, match="counts from the start of a storage that other values share"):
        fzero.verify(_damaged(_program(with_offset), damage))


def test_no_program_reads_beyond_a_value() -> None:
    def damage(node: torch.fx.Node) -> None:
        node.args = (*node.args[:3], 20)

    with pytest.raises(VerifyError, match=r"reaches elements \[20, 28\) of a value that has 24"):
        fzero.verify(_damaged(_program(with_offset), damage))


def test_binding_looks_at_real_memory() -> None:
    """Whatever the graph says: a bound view that leaves its operand's memory is an error."""
    block = torch.arange(10.0)
    with pytest.raises(
        VerifyError, match=r"looks at bytes \[12, 28\) of its storage, of which its operand has \[8, 24\)"
    ):
        as_strided.check_view(block[3:7], block[2:6], "a view")
    with pytest.raises(VerifyError):
        as_strided.check_view(torch.zeros(4), block[2:6], "a view of other memory")
    as_strided.check_view(block[2:6].flip(0)[:0], block[2:6], "an empty view")


def test_every_op_of_torch_that_takes_an_offset_is_known() -> None:
    """What is not rewritten is refused by name; a new one in torch shows up here."""
    names = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and not name.endswith("out")
        for schema in torch._C._jit_get_schemas_for_operator(name.split(".")[0])
        if any(argument.name == "storage_offset" for argument in schema.arguments)
    }
    assert {name.split(".")[0] for name in names} <= {
        "aten::as_strided",
        "aten::as_strided_",
        "aten::as_strided_copy",
        "aten::as_strided_scatter",
        "aten::set_",
        "aten::set",
    }


@pytest.mark.parametrize("x", [torch.arange(24.0).view(4, 6), torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)])
def test_rebased_graphs_are_equal(x: Tensor) -> None:
    """On its own: the rewritten graph gives what torch gives, from a tensor that lies anywhere."""

    def fn(x: Tensor) -> list[Tensor]:
        y = x * 2.0
        return [
            y.as_strided((3, 2), (1, 4), 2),
            torch.as_strided_scatter(y, y.flatten()[:4].view(2, 2), (2, 2), (9, 3), 1),
        ]

    with FakeTensorMode() as mode:
        gm = make_fx(fn, tracing_mode="real")(mode.from_tensor(x))
    as_strided.rebased(as_strided.rooted(gm))
    assert not any(as_strided.takes_offset(node) for node in gm.graph.nodes)
    for a, b in zip(gm(x), fn(x), strict=True):
        assert torch.equal(a, b)
