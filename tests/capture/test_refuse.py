"""Refusals by name: ambient randomness, reductions and gradients in the wrong place, and what torch cannot trace."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from capturing import (
    agrees,
    batch,
    captured,
    defined,
    here,
    mean_square,
    nodes,
    params,
    refused,
    refused_step,
    said,
    sgd_step,
)
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import CaptureError

# --- ambient randomness -----------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda b: torch.rand(3),
    "randn_like": torch.randn_like,
    "dropout": lambda b: F.dropout(b, 0.5),
    "module": lambda b: torch.nn.Dropout(0.5)(b),
    "bernoulli": lambda b: torch.bernoulli(b.sigmoid()),
    "randperm": lambda b: torch.randperm(3),
    "normal_": lambda b: torch.empty(3).normal_(),
    "randint": lambda b: torch.randint(0, 3, (3,)),
    "multinomial": lambda b: torch.multinomial(b + 1, 1),
    "gumbel_softmax": F.gumbel_softmax,
    "seeded": lambda b: torch.rand(3, generator=torch.Generator().manual_seed(0)),
    "init": lambda b: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "attention": lambda b: F.scaled_dot_product_attention(b[None], b[None], b[None], dropout_p=0.5),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RANDOM)
def test_ambient_randomness_is_refused(name: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) + RANDOM[name](b).sum()  # here

    def step(s: Any, b: Tensor) -> Any:
        return s, {"m": RANDOM[name](b).sum()}  # here

    parts = ("draws from torch's ambient generator", "lsewhere use fzero.random with a key from the state or the batch")
    line = here(loss) if name not in ("module", "init", "seeded", "randperm") else Path(__file__).name
    before = torch.get_rng_state()
    refused(loss, line if name in ("randn_like", "gumbel_softmax") else Path(__file__).name, *parts)
    refused_step(step, *parts)
    assert torch.equal(torch.get_rng_state(), before), "the refused draw did not happen"


def test_dropout_that_draws_nothing_is_fine() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        q = (b * p["w"]).view(1, 1, 4, 3)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.0, is_causal=True).sum()
        return y + mean_square(p, F.dropout(F.dropout(b, 0.0), 0.5, training=False))

    agrees(loss)


def _leaves_out(y: Tensor) -> Tensor:
    return y if torch.rand(()) < 0.5 else 2 * y  # here


def _in_order(y: Tensor) -> Tensor:
    return sum((i * y[j] for i, j in enumerate(torch.randperm(3).tolist())), y.sum())  # here


def _as_many(y: Tensor) -> Tensor:
    return y[: int(torch.randint(1, 3, ()) + torch.tensor(1))]  # here


@pytest.mark.parametrize("fn", [_leaves_out, _in_order, _as_many], ids=lambda fn: fn.__name__.strip("_"))
def test_a_road_that_a_draw_decides_is_refused_with_what_to_do(fn: Callable[[Tensor], Tensor]) -> None:
    spec = fzero.Spec(loss=lambda p, b: mean_square(p, b) + fn(b @ p["w"]).sum(), optimizer=fzero.optim.sgd(0.1))
    for key in (fzero.random.key(0), None):  # a key would not help: the remedy is the same
        state = fzero.init(params(), spec, key=key)
        said(CaptureError, lambda: fzero.step(state, batch()), here(fn), "It is drawn at random", "before fzero.step")  # noqa: B023


def test_what_an_input_decides_beside_a_draw_is_no_draw() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * (1 if (torch.rand(()) * b.sum()) < 0.5 else 2)  # here

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    state = fzero.init(params(), spec, key=fzero.random.key(0))
    assert "drawn" not in said(CaptureError, lambda: fzero.step(state, batch()), here(loss), "torch.where")


def test_keyed_randomness_is_fine_and_draws_anew_each_step() -> None:
    def step(s: Any, b: Tensor) -> Any:
        key = fzero.random.fold_in(fzero.random.key(1), s["n"])
        return {**s, "n": s["n"] + 1}, {"draw": fzero.random.uniform(key)}

    state = fzero.init({"n": 0}, fzero.Spec(step=step))
    drawn = []
    for n in range(3):
        state = fzero.step(state, batch())
        drawn.append(state.metrics["draw"].item())
        assert drawn[-1] == fzero.random.uniform(fzero.random.fold_in(fzero.random.key(1), n)).item()
    assert len(set(drawn)) == 3


# --- value_and_grad and reductions where they do not belong -----------------------------------------------------------


def test_value_and_grad_inside_a_loss_or_a_transform_is_refused() -> None:
    def in_loss(p: Any, b: Tensor) -> Tensor:
        return fzero.value_and_grad(mean_square)(p, b)[0]  # here

    def in_vmap(p: Any, b: Tensor) -> Tensor:
        per_row = lambda x: fzero.grad(mean_square)(p, x[None])["w"]  # noqa: E731  # here
        return torch.vmap(per_row)(b).sum()

    def in_grad(p: Any, b: Tensor) -> Tensor:
        inner = lambda w: fzero.value_and_grad(mean_square)({"w": w}, b)[0]  # noqa: E731  # here
        return torch.func.grad(inner)(p["w"]).sum()

    parts = ("value_and_grad was called inside a loss or a torch.func transform", "Inside a loss use torch.func.grad")
    for fn in (in_loss, in_vmap, in_grad):
        refused(fn, here(fn), *parts)
        refused_step(lambda s, b, fn=fn: (s, {"m": fn(s["p"], b)}), here(fn), *parts) if fn is not in_loss else None
    said(CaptureError, lambda: in_vmap(params(), batch()), here(in_vmap), *parts)


@pytest.mark.parametrize("op", ["pmean", "psum", "pmax"])
def test_reductions_inside_a_loss_are_refused(op: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return getattr(fzero, op)(mean_square(p, b))  # here

    refused(loss, f"fzero.{op} was called inside a loss at", here(loss), "reduce what value_and_grad returns")


def test_reductions_of_the_wrong_thing() -> None:
    refused_step(lambda s, b: (s, {"m": fzero.psum(3)}), "fzero.psum of a value: needed a tensor, got 3")
    refused_step(lambda s, b: (s, {"m": fzero.psum({"a": ["x"]})}), "fzero.psum of a/0: needed a tensor, got 'x'")
    parts = ("fzero.pmean of i64[4, 3] at", "may differ between ranks", "fzero.psum or fzero.pmax", "pmean(x.float())")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b.long())}), *parts)
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b + 1j)}), "needed a real dtype. Use torch.view_as_real(x)")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b, "tp")}), "over axis 'tp'", "the data axes dp")


# --- what torch cannot trace ------------------------------------------------------------------------------------------


def scores(p: Any, b: Tensor) -> Tensor:
    return (b * p["w"]).view(1, 1, 4, 3)


def by_cond(p: Any, b: Tensor) -> Tensor:
    return torch.cond(b.sum() > 0, lambda x: x.sum(), lambda x: (2 * x).sum(), (b * p["w"],))  # here


def by_while(p: Any, b: Tensor) -> Tensor:
    loop = torch._higher_order_ops.while_loop
    return loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), b * p["w"]))[1].sum()  # here


def by_map(p: Any, b: Tensor) -> Tensor:
    return torch._higher_order_ops.map(lambda x: 2 * x, b * p["w"]).sum()  # here


def by_flex(p: Any, b: Tensor) -> Tensor:
    q = scores(p, b)
    return flex_attention(q, q, q).sum()  # here


def by_cond_of_data(p: Any, b: Tensor) -> Tensor:
    flag = torch.cond(b.sum() > 0, lambda x: x.sum(), lambda x: (2 * x).sum(), (b,))  # here
    return mean_square(p, b) * flag


def lower_right(p: Any, b: Tensor) -> Tensor:
    q = scores(p, b)
    mask = causal_lower_right(2, 4)  # here
    return F.scaled_dot_product_attention(q[:, :, :2], q, q, attn_mask=mask).sum()


class Own(Tensor):
    pass


OWN = torch.ones(3).as_subclass(Own)


def own_closed_over(p: Any, b: Tensor) -> Tensor:
    return (p["w"] * OWN).sum()  # here


def own_made(p: Any, b: Tensor) -> Tensor:
    return p["w"].as_subclass(Own).sum()  # here


def jagged(p: Any, b: Tensor) -> Tensor:
    return torch.nested.nested_tensor([b[0], b[1]], layout=torch.jagged).values().sum() * p["w"].sum()  # here


def nested(p: Any, b: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([b[0] * p["w"], b[1] * p["w"]]).values().sum()  # here


LIBRARY = torch.library.Library("fzero_test", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")


@torch.library.custom_op("fzero_test::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("fzero_test::without_backward", mutates_args=())
def without_backward(x: Tensor) -> Tensor:
    return 2 * x


without_backward.register_fake(torch.empty_like)


@torch.library.custom_op("fzero_test::doubled_", mutates_args=("x",))
def doubled_(x: Tensor) -> None:
    x.mul_(2)


doubled_.register_fake(lambda x: None)


def writes(p: Any, b: Tensor) -> Tensor:
    y = b * p["w"]
    doubled_(y)  # here
    return y.sum()


def no_shape(p: Any, b: Tensor) -> Tensor:
    return torch.ops.fzero_test.twice(b * p["w"]).sum()  # here


def no_fake(p: Any, b: Tensor) -> Tensor:
    return mean_square(p, without_fake(b))  # here


def no_backward(p: Any, b: Tensor) -> Tensor:
    y = without_backward(b * p["w"])  # here
    return y.square().mean()


def reentrant(p: Any, b: Tensor) -> Tensor:  # here, for its backward fails
    h = checkpoint(torch.tanh, b * p["w"], use_reentrant=True)
    return h.square().mean()


def copied_whole(p: Any, b: Tensor) -> Tensor:
    return mean_square(p, copy.copy(b).T.T)  # here


def attention_forwards(p: Any, b: Tensor) -> Tensor:
    q = (b * p["w"])[None, None]
    return torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (q,), (q,))[1].sum()  # here


UNTRACED: dict[Any, tuple[str, ...]] = {
    by_cond: ("torch's op cond runs functions of its own", "torch.where(condition, a, b)"),
    by_cond_of_data: ("torch's op cond", "torch.where(condition, a, b)"),
    by_while: ("torch's op while_loop", "Write a Python loop over a fixed number of turns", "torch.where"),
    by_flex: ("runs functions of its own, which a program does not hold", "fzero.sparse.attention computes windows"),
    by_map: ("torch's op map", "Write a Python loop", "torch.vmap"),
    lower_right: ("a tensor of another class", "attn_mask=torch.ones(q, k, dtype=torch.bool).tril(k - q)"),
    own_closed_over: ("reads tensor 'OWN', a Own", "Pass x.as_subclass(torch.Tensor)"),
    own_made: ("a tensor of another class is made", "Pass x.as_subclass(torch.Tensor)"),
    jagged: ("a nested tensor is made", "one padded tensor and a mask of the lengths"),
    nested: ("makes a nested tensor", "one padded tensor and a mask of the lengths"),
    reentrant: ("runs a backward of its own", "use_reentrant=False", "Spec(remat='full')"),
    copied_whole: ("a tensor is copied with its memory", "x.clone()"),
    attention_forwards: ("a kernel of attention has no derivative", "sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"),
    writes: ("a custom op that writes to its arguments", "one that returns a new tensor, with mutates_args=()"),
    no_shape: ("fzero_test.twice.default has no fake rule", "torch.library.register_fake('fzero_test::twice')"),
    no_fake: ("has no fake rule", "torch.library.register_fake('fzero_test::without_fake')"),
    no_backward: ("fzero_test.without_backward.default at", "has no backward", "torch.library.register_autograd"),
}


@pytest.mark.parametrize("loss", UNTRACED, ids=lambda loss: loss.__name__)
@pytest.mark.sampled(8)
def test_what_torch_cannot_trace_is_refused_by_line_with_a_remedy(loss: Any) -> None:
    refused(loss, here(loss), *UNTRACED[loss])
    refused_step(lambda s, b: (s, {"m": loss(s["p"], b)}), here(loss), *UNTRACED[loss]) if loss not in (
        no_backward,
        reentrant,
    ) else None


def test_the_remedies_work() -> None:
    def chosen(p: Any, b: Tensor) -> Tensor:
        x, total = b * p["w"], b.new_zeros(3)
        for row in x.unbind(0):
            total = torch.where(row.sum() > 0, total + row, total)
        return total.square().sum()

    def masked(p: Any, b: Tensor) -> Tensor:
        q = scores(p, b)
        mask = torch.ones(2, 4, dtype=torch.bool).tril(4 - 2)
        return F.scaled_dot_product_attention(q[:, :, :2], q, q, attn_mask=mask).sum()

    for loss in (chosen, masked, lambda p, b: (p["w"] * OWN.as_subclass(Tensor) * b).sum()):
        agrees(loss)
    w = params()["w"].requires_grad_()
    assert lower_right({"w": w}, batch()).item() == pytest.approx(masked({"w": w}, batch()).item())


# --- what only the backward, or fzero itself, does --------------------------------------------------------------------


SUBSCRIPTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "x[i]": (lambda x, i: x[i], lambda x, i: x[i[None]][0]),
    "x[i : i + 2]": (lambda x, i: x[i : i + 2], lambda x, i: x[i + torch.arange(2)]),
    "x[:, i]": (lambda x, i: x[:, i], lambda x, i: x[:, i[None]][:, 0]),
    "list": (lambda x, i: [x, 2 * x, 3 * x][i], lambda x, i: torch.stack([x, 2 * x, 3 * x])[i[None]][0]),
    "x[i] =": (lambda x, i: _assigned(x, i, 1), lambda x, i: _assigned(x, i[None], 1)),
    "x[i : i + 2] =": (
        lambda x, i: _assigned(x, slice(i, i + 2), 2),
        lambda x, i: _assigned(x, i + torch.arange(2), 2),
    ),
}


def _assigned(x: Any, where: Any, rows: int) -> Any:
    x = x.clone()
    x[where] = x.new_full((rows, x.shape[1]), 3.0) if rows > 1 else 3.0
    return x


@pytest.mark.parametrize("name", SUBSCRIPTS)
def test_a_tensor_as_an_index_is_refused_and_the_remedy_has_its_numbers(name: str) -> None:
    """The complaint: "keep the 0-d tensor", of one that was kept, as the place in a queue is."""
    asks, remedy = SUBSCRIPTS[name]
    text = refused(lambda p, b: (asks(b, b[0, 0].long()) * p["w"].sum()).sum())
    assert "Instead of x[i] write x[i[None]][0] " in text
    assert "x.item()" not in text
    assert torch.equal(remedy(batch(), torch.tensor(1)), asks(batch(), 1))
    agrees(lambda p, b: (remedy(b, b[0, 0].long()) * p["w"].sum()).sum())


def test_a_number_that_is_asked_for_beside_a_subscript_has_the_general_remedy() -> None:
    text = refused(lambda p, b: (b[:, : int(b.sum())] @ p["w"]).sum())
    assert "instead of x.item() keep the 0-d tensor" in text


def test_a_refusal_of_the_backward_names_the_line_of_the_forward() -> None:
    def assigned(p: Any, b: Tensor) -> Tensor:
        h = b * p["w"]
        h[b > 0] = p["w"][0]  # here
        return h.sum()

    def rows(p: Any, b: Tensor) -> Tensor:
        h = b * p["w"]
        h[b[:, 0] > 0] = p["w"]  # here
        return h.square().sum()

    def sparse(p: Any, b: Tensor) -> Tensor:
        y = F.embedding(b.long(), p["w"][:, None], sparse=True)  # here
        return y.sum()

    refused(
        assigned, here(assigned), "aten.nonzero.default", "instead of x[mask] = y write x = torch.where(mask, y, x)"
    )
    refused(rows, here(rows), "aten.nonzero.default")
    refused(sparse, here(sparse), "makes a tensor of torch.sparse_coo")
    agrees(lambda p, b: torch.where(b > 0, p["w"][0], b * p["w"]).square().sum())


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 if grad.sum() > 0 else grad  # here


def test_a_refusal_in_a_backward_of_the_users_own_names_its_line() -> None:
    refused(lambda p, b: Asks.apply(b * p["w"]).sum(), here(Asks), "aten._local_scalar_dense.default")


class Sums(torch.autograd.Function):
    """A row's sum for the gradient of all of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.sum(0)


def test_a_gradient_of_another_shape_is_told_of_the_users_backward() -> None:
    """The complaint: it was taken for a `squeeze_`, of which there is none."""
    spec = fzero.Spec(loss=lambda p, b: Sums.apply(b * p["w"]).sum(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+\)?: .*return one of that shape from a backward"):
        fzero.lower(spec, {"w": torch.ones(4, 3)}, torch.ones(4, 3))


def test_nodes_of_the_backward_have_the_line_of_the_forward() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return (b @ p["w"]).tanh().sum()  # here

    graph = captured(sgd_step(loss))
    backward = [n for n in nodes(graph.regions[0].gm) if n.meta.get("phase") == "backward"]
    made = [n for n in backward if n.all_input_nodes and n.target is not torch.ops.aten.ones_like.default]
    assert {n.meta["source"] for n in made} == {here(loss)}
    assert torch.ops.aten.tanh_backward.default in {n.target for n in made}


def test_a_refusal_in_the_work_of_fzero_itself_names_the_users_function() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b)

    def update(grads: Any, state: Any, p: Any) -> Any:
        return fzero.tree.map(torch.ops.fzero_test.twice, grads), state

    inner = fzero.optim.GradientTransformation(lambda p: {}, partial(update))
    update.__code__ = update.__code__.replace(co_filename=fzero.optim.__file__)  # as an optimizer of fzero's own
    spec = fzero.Spec(loss=loss, optimizer=inner)
    said(CaptureError, lambda: fzero.lower(spec, params(), batch()), defined(loss), "has no fake rule")


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda x: torch.narrow(x, 0, 0, 11), RuntimeError, "exceeds dimension size"),
        (lambda x: F.conv2d(x, x), RuntimeError, "Expected 3D"),
        (lambda x: torch.lt(1, x), TypeError, r"got \(int, Tensor\)"),
        (lambda x: x.movedim((0, 0), (1, 0)), RuntimeError, "repeated dim"),
        (lambda x: None + x, TypeError, "unsupported operand"),
    ],
)
def test_an_error_of_a_function_before_it_calls_an_op_has_the_users_line_once(
    wrong: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=rf"^test_refuse\.py:\d+: (?!test_refuse).*{says}"):
        lowered_loss(lambda p, b: wrong(b).sum() + p["w"].sum())


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError])
def test_what_the_user_raises_is_left_as_it_is(error: type[Exception]) -> None:
    def loss(p: Any, b: Any) -> Any:
        raise error("of my own")

    with pytest.raises(error, match=r"^of my own$"):
        lowered_loss(loss)


def test_an_error_whose_class_takes_more_than_a_text_is_left_with_a_note() -> None:
    """The complaint: the error was replaced by one of its own constructor, which got too few arguments."""

    class TwoParts(RuntimeError):
        def __init__(self, code: int, why: str) -> None:
            super().__init__(f"{code} {why}")

    def shapes(x: Tensor) -> Tensor:
        raise TwoParts(7, "no shapes")

    op = torch.library.custom_op("fzero_test::two_parts", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(shapes)
    with pytest.raises(TwoParts, match=r"^7 no shapes") as caught:
        lowered_loss(lambda p, b: op(p["w"]).sum())
    (note,) = caught.value.__notes__
    assert note.startswith("test_refuse.py:")


@pytest.mark.parametrize("away", ["cuda", "xpu", "mps"])
def test_a_tensor_on_a_device_of_another_kind_is_refused(away: str) -> None:
    """Autograd ended the process, where torch is built without that kind of device."""
    spec = fzero.Spec(
        loss=lambda p, b: (b @ p["w"]).sum() + torch.ones((), device=away), optimizer=fzero.optim.sgd(0.1)
    )
    said = (
        rf"test_refuse\.py:\d+ asks for a tensor on {away}(:0)?, and those of this step are on cpu\. Leave device= out"
    )
    with pytest.raises(CaptureError, match=said):
        fzero.lower(spec, {"w": torch.ones(3, 2)}, torch.ones(4, 3), world_size=1)
    moved = fzero.Spec(loss=lambda p, b: (b.to(away) @ p["w"]).sum(), optimizer=fzero.optim.sgd(0.1))
    said = r"test_refuse\.py:\d+(: a tensor is moved to a device| asks for a tensor on) .*Leave \.cuda\(\)"
    with pytest.raises(CaptureError, match=said):
        fzero.lower(moved, {"w": torch.ones(3, 2)}, torch.ones(4, 3), world_size=1)


def test_a_convolution_of_two_dtypes_is_told_by_the_librarys_line(tmp_path: Path, monkeypatch: Any) -> None:
    """torch refuses it before any op is called: it was torch's own RuntimeError, at the line of the loss."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "somebodys.py").write_text("def convolved(x, layer):\n    return layer(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    from somebodys import convolved  # type: ignore[import-not-found]

    layer = torch.nn.Conv1d(1, 1, 1).bfloat16().requires_grad_(False)

    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) + convolved(b[:, None], layer).sum()  # here

    refused(loss, here(loss), "in somebodys.py:2 in convolved: operands have two dtypes", "Precision(compute=")


def test_data_that_is_put_where_it_is_already_is_fine() -> None:
    """As heads of metric learning do, whose weight may have another dtype: `self.W.data = self.W.data.to(dtype)`."""

    def loss(p: Any, b: Tensor) -> Tensor:
        p["w"].data = p["w"].data.to(b.dtype)
        return mean_square(p, b)

    def halved(p: Any, b: Tensor) -> Tensor:
        p["w"].data = p["w"].data / 2  # here
        return mean_square(p, b)

    agrees(loss)
    refused(halved, here(halved), "`.data = ...`")


def test_a_backward_in_a_loss_is_refused() -> None:
    """Torch's advice was retain_graph=True."""

    def loss(p: Any, b: Any) -> torch.Tensor:
        value = (b @ p["w"]).square().mean()
        value.backward()
        return value

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+\): .*Leave loss\.backward\(\) out: fzero takes"):
        fzero.lower(spec, {"w": torch.ones(3, 2)}, torch.ones(4, 3), world_size=1)


def test_an_operand_on_another_device_has_the_users_line() -> None:
    """The complaint: torch's error of it takes three arguments, so it became a TypeError."""
    away = torch.ones(3, 3, device="meta")
    with pytest.raises(fzero.CaptureError, match=r"test_refuse\.py:\d+: aten\.mm\.default.*: move it to Spec\.device"):
        lowered_loss(lambda p, b: (b[:, :3] @ away).sum() * p["w"].sum())


def lowered_loss(loss: Any) -> None:
    fzero.lower(fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)), {"w": torch.ones(3)}, torch.ones(4, 3))


def _gathered_by_all(x: Tensor) -> Tensor:
    rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)  # here
    return torch.stack(rows)


def _reduced_at_once(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)  # here


def _waited_for(x: Tensor) -> Tensor:
    dist.barrier()  # here
    return x


@pytest.mark.parametrize("exchanged", [_gathered_by_all, _reduced_at_once, _waited_for])
def test_a_collective_of_torch_is_refused_with_what_to_write(exchanged: Callable[[Tensor], Tensor]) -> None:
    """The first was an IndexError of the program, the others were done, or done once, while the step was traced."""

    def loss(p: Any, b: Tensor) -> Tensor:
        return exchanged(b @ p["w"]).square().mean()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refused(loss, here(exchanged), "collective of torch.distributed", "write fzero.psum or fzero.pmean")
    finally:
        dist.destroy_process_group()


def test_a_collective_without_a_process_group_is_refused_alike() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        mean = (b @ p["w"]).mean()
        dist.all_reduce(mean)  # here
        return mean

    refused(loss, here(loss), "collective of torch.distributed", "write fzero.psum or fzero.pmean")
