"""local_forms: what the ranks compute of their parts, joined, is the op on the whole. Every rank is a thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import Draft
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.shard import local_forms, ops
from fzero.shard.local_forms import forms, traced
from fzero.shard.placements import Partial, Placement, Replicated, Shard, join, split

aten = torch.ops.aten
R, ROWS, COLUMNS, SUM = Replicated(), Shard(0), Shard(1), Partial()


class Ranks:
    """The communicator of one rank among threads."""

    def __init__(self, rank: int, values: list[Any], gate: threading.Barrier) -> None:
        self.rank, self.values, self.gate = rank, values, gate

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        self.values[self.rank] = x
        self.gate.wait(20)
        total = join(list(self.values), Partial(how))
        self.gate.wait(20)
        return total.clone()


def joined(
    form: Callable[..., Any], given: list[tuple[Any, Placement]], outs: list[Placement], n: int = 3, **named: Any
) -> list[Tensor]:
    """The results of a form, from what all ranks make of their parts of the arguments."""
    parts = [
        split(x, p, n) if isinstance(x, Tensor) else [[y] for y in split(x[0], p, n)] if isinstance(x, list) and
        isinstance(x[0], Tensor) else [x] * n for x, p in given
    ]  # fmt: skip
    values, gate = [None] * n, threading.Barrier(n)

    def rank(r: int) -> Any:
        return form(Ranks(r, values, gate), r, n, *(part[r] for part in parts), **named)

    with ThreadPoolExecutor(n) as pool:
        found = list(pool.map(rank, range(n)))
    made = [[x] if isinstance(x, Tensor) else list(x) for x in found]
    return [join(of, placement) for of, placement in zip(zip(*made, strict=True), outs, strict=True)]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    loose = {"rtol": 2e-2, "atol": 4e-3} if wanted.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, wanted, equal_nan=True, **loose)


def test_a_mean_over_a_sharded_dim() -> None:
    x = drawn(6, 4)
    close(joined(local_forms.mean, [(x, ROWS), ([0], R)], [SUM])[0], x.mean(0))
    close(joined(local_forms.mean, [(x, ROWS), ([0], R), (True, R)], [SUM], dtype=torch.float32)[0],
          x.float().mean(0, keepdim=True))  # fmt: skip


INDICES = torch.tensor([[0, 5, 2], [3, 3, 1]])


def test_rows_of_a_table_and_their_gradient() -> None:
    table, grad = drawn(6, 4), drawn(2, 3, 4)
    close(joined(local_forms.embedding, [(table, ROWS), (INDICES, R), (-1, R)], [SUM])[0], F.embedding(INDICES, table))
    for padding in (-1, 3, 0):
        wanted = aten.embedding_dense_backward(grad, INDICES, 6, padding, False)
        given = [(grad, R), (INDICES, R), (6, R), (padding, R), (False, R)]
        close(joined(local_forms.embedding_dense_backward, given, [ROWS])[0], wanted)


@pytest.mark.parametrize("indices", [INDICES, torch.tensor([-1, -6, 5, 0])], ids=["front", "end"])
def test_rows_by_an_index(indices: Tensor) -> None:
    for x in (drawn(6, 4), drawn(6), drawn(6, 2, 3)):
        close(joined(local_forms.index, [(x, ROWS), ([indices], R)], [SUM])[0], x[indices])
        values = drawn(*indices.shape, *x.shape[1:])
        given = [(x, ROWS), ([indices], R), (values, R), (True, R)]
        wanted = x.index_put((indices,), values, accumulate=True)
        close(joined(local_forms.index_put, given, [ROWS])[0], wanted)


@pytest.mark.parametrize("index", [6, 99, -7])
def test_a_row_that_nobody_has_is_refused_by_every_rank(index: int) -> None:
    """A table has no row -1 either."""
    for rank in range(3):
        with pytest.raises(IndexError):
            local_forms.index(None, rank, 3, drawn(2, 4), [torch.tensor([index])])  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            local_forms.embedding(None, rank, 3, drawn(2, 4), torch.tensor([index]))  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            local_forms.embedding(None, rank, 3, drawn(2, 4), torch.tensor([-1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_log_softmax_over_a_sharded_dim_and_its_gradient(dtype: torch.dtype, dim: int) -> None:
    x, grad, place = 30 * drawn(6, 6, dtype=dtype), drawn(6, 6, dtype=dtype), Shard(dim)
    found = joined(local_forms.log_softmax, [(x, place), (dim, R), (False, R)], [place])[0]
    close(found, x.log_softmax(dim))
    if dtype == torch.bfloat16:
        return  # its differences of large numbers have few bits
    back = [(grad, place), (found, place), (dim, R), (dtype, R)]
    close(joined(local_forms.log_softmax_backward, back, [place])[0],
          aten._log_softmax_backward_data(grad, found, dim, dtype))  # fmt: skip


def test_a_log_softmax_of_16_bits_may_be_in_32() -> None:
    x = drawn(6, 6, dtype=torch.bfloat16)
    found = joined(local_forms.log_softmax, [(x, COLUMNS), (1, R), (True, R)], [COLUMNS])[0]
    close(found, x.float().log_softmax(1))
    back = [(found, COLUMNS), (found, COLUMNS), (1, R), (torch.bfloat16, R)]
    assert joined(local_forms.log_softmax_backward, back, [COLUMNS])[0].dtype == torch.bfloat16


TARGET = torch.tensor([0, 5, -100, 3, 2, 5])
REDUCTIONS = [0, 1, 2]  # none, mean, sum


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("target", [TARGET, torch.tensor([1, 1, 1, 4, 0, 2])], ids=["ignored", "all"])
def test_a_loss_over_sharded_classes_and_its_gradient(reduction: int, target: Tensor) -> None:
    x = drawn(6, 6).log_softmax(1)
    wanted, weight = aten.nll_loss_forward(x, target, None, reduction, -100)
    given = [(x, COLUMNS), (target, R), (None, R), (reduction, R), (-100, R)]
    loss, count = joined(local_forms.nll_loss_forward, given, [SUM, R])
    close(loss, wanted)
    close(count, weight)
    grad = drawn(6) if reduction == 0 else torch.tensor(2.0, dtype=torch.float64)
    back = [(grad, R), (x, COLUMNS), (target, R), (None, R), (reduction, R), (-100, R), (weight, R)]
    close(joined(local_forms.nll_loss_backward, back, [COLUMNS])[0],
          aten.nll_loss_backward(grad, x, target, None, reduction, -100, weight))  # fmt: skip


@pytest.mark.parametrize("weight", [None, torch.linspace(1, 2, 6, dtype=torch.float64)], ids=["plain", "weighed"])
def test_a_mean_loss_over_sharded_rows_is_of_the_weight_of_all(weight: Tensor | None) -> None:
    """The ranks have different numbers of rows that count."""
    x = drawn(6, 6).log_softmax(1)
    wanted, total = aten.nll_loss_forward(x, TARGET, weight, 1, -100)
    given = [(x, ROWS), (TARGET, ROWS), (weight, R), (1, R), (-100, R)]
    loss, own = joined(local_forms.nll_loss_mean, given, [SUM, R])
    close(loss, wanted)
    close(own, total)
    image, labels = x.view(6, 6, 1, 1), TARGET.view(6, 1, 1)
    given = [(image, ROWS), (labels, ROWS), (weight, R), (1, R), (-100, R)]
    close(joined(local_forms.nll_loss_mean, given, [SUM, R])[0], wanted)


def test_forms_have_the_names_of_their_functions() -> None:
    assert forms()["mean"] is local_forms.mean
    assert {"embedding", "index_put", "nll_loss_mean", "uniform"} <= forms().keys()


# --- a form as a graph ------------------------------------------------------------------------------------------------


def test_a_form_that_is_traced_has_its_transfers_as_ops() -> None:
    draft = Draft()
    x, rank = draft.input(6, 2), draft.input(dtype=torch.int64)
    graph, results, env = traced("log_softmax", (x, 1, False), {}, rank, 3, "tp")
    sums = [node for node in graph.nodes if node.target is ops.ALL_REDUCE]
    assert [node.args[1:] for node in sums] == [("tp", 3, "max"), ("tp", 3, "sum")]
    assert len(results) == 1
    assert results[0].meta["val"].shape == (6, 2)
    assert [*env.values()] == [rank, x]
    assert all(node.op == "placeholder" for node in env)


def test_a_form_of_several_results_on_an_operand_that_comes_twice() -> None:
    draft = Draft()
    x, target, rank = draft.input(6, 2), draft.input(6, dtype=torch.int64), draft.input(dtype=torch.int64)
    _, results, env = traced("nll_loss_forward", (x, target, None, 1, -100), {}, rank, 3, "tp")
    assert [tuple(node.meta["val"].shape) for node in results] == [(), ()]
    assert [*env.values()] == [rank, x, target]
    _, _, env = traced("log_softmax_backward", (x, x, 1, torch.float32), {}, rank, 3, "tp")
    assert [*env.values()] == [rank, x]


def test_a_form_may_be_told_its_dim() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        values = {"key": torch.empty(2, dtype=torch.int64), "rank": torch.empty((), dtype=torch.int64)}
    key, rank = (graph.placeholder(name) for name in values)
    key.meta["val"], rank.meta["val"] = values.values()
    _, (result,), _ = traced("uniform:1", (key, [4, 6], torch.float32, 0.0, 1.0), {}, rank, 3, "tp")
    assert result.meta["val"].shape == (4, 2)


SHORT = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_logsumexp_over_a_sharded_dim(dtype: torch.dtype, keepdim: bool) -> None:
    x = 100 * drawn(4, 6, 2, dtype=dtype)
    x[0, :, 0], x[1, :, 1], x[2, 3, 0], x[3, 5, 1] = -torch.inf, torch.inf, torch.inf, torch.nan
    for dim in ([1], [1, 2], [0, 1]):
        found = joined(local_forms.logsumexp, [(x, COLUMNS), (dim, R), (keepdim, R)], [R])[0]
        close(found, x.logsumexp(dim, keepdim))
        assert found.isnan().equal(x.logsumexp(dim, keepdim).isnan())


@pytest.mark.parametrize("dtype", [*SHORT, torch.complex128])
@pytest.mark.parametrize("order", [2, 1, 3, 0.5, 0, float("inf"), float("-inf")])
def test_a_norm_over_a_sharded_dim(dtype: torch.dtype, order: float) -> None:
    x = drawn(4, 6, 2, dtype=dtype)
    x[0] = 0
    for dim, keepdim in ((None, False), ([1], True), ([0, 1], False)):
        given = [(x, COLUMNS), (order, R), (dim, R), (keepdim, R)]
        close(joined(local_forms.vector_norm, given, [R])[0], torch.linalg.vector_norm(x, order, dim, keepdim))
    if not x.is_complex():
        wide = joined(local_forms.vector_norm, [(x, COLUMNS), (order, R), (None, R)], [R], dtype=torch.float64)[0]
        close(wide, torch.linalg.vector_norm(x, order, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "correction"), [*itertools.product(SHORT, [None, 0, 1, 2.5, 24]), (torch.complex128, None)]
)
def test_a_variance_over_a_sharded_dim(dtype: torch.dtype, correction: float | None) -> None:
    x = 3 + drawn(4, 6, 2, dtype=dtype)
    for dim, keepdim in ((None, False), ([1], True), ([0, 1], False)):
        how: dict[str, Any] = {"correction": correction, "keepdim": keepdim}
        variance, middle = joined(local_forms.var_mean, [(x, COLUMNS), (dim, R)], [R, R], **how)
        close(variance, aten.var.correction(x, dim, **how))
        close(middle, aten.var_mean.correction(x, dim, **how)[1])
        close(joined(local_forms.var, [(x, COLUMNS), (dim, R)], [R], **how)[0], variance)
        close(joined(local_forms.std, [(x, COLUMNS), (dim, R)], [R], **how)[0], aten.std.correction(x, dim, **how))
        deviation, again = joined(local_forms.std_mean, [(x, COLUMNS), (dim, R)], [R, R], **how)
        close(deviation, aten.std.correction(x, dim, **how))
        close(again, middle)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_extrema_over_a_sharded_dim_and_their_first_place(dtype: torch.dtype) -> None:
    """With equals among the ranks and within one, the least numbers there are, and NaN."""
    x = torch.randint(0, 3, (5, 6, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype == torch.int64:
        x[0, 2, 0], x[1, 3, 1] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if dtype.is_floating_point:
        x[0, 4, 0], x[1, 1, 1], x[2, 3, 0], x[2, 5, 0] = torch.nan, -torch.inf, torch.nan, torch.nan
    for keepdim in (False, True):
        given = [(x, COLUMNS), (1, R), (keepdim, R)]
        for form, op, place in (
            (local_forms.max_dim, aten.max.dim, aten.argmax.default),
            (local_forms.min_dim, aten.min.dim, aten.argmin.default),
        ):
            most, at = joined(form, given, [R, R])
            assert most.equal(op(x, 1, keepdim)[0]) or most.nan_to_num().equal(op(x, 1, keepdim)[0].nan_to_num())
            if dtype != torch.bool:
                assert at.equal(op(x, 1, keepdim)[1])
            where = local_forms.argmax if place is aten.argmax.default else local_forms.argmin
            assert joined(where, given, [R])[0].equal(at)
        if not dtype.is_floating_point:
            assert joined(local_forms.amin, [(x, COLUMNS), ([0, 1], R), (keepdim, R)], [R])[0].equal(
                aten.amin(x, [0, 1], keepdim)
            )
