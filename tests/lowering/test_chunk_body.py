"""chunk_body: of a graph that is written op by op, what runs once for each chunk of tokens, and what cannot."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from by_hand import Draft
from torch import fx

from fzero.errors import SpecError
from fzero.lowering.chunk_body import ChunkBody, features_of, grown, heads
from fzero.lowering.token_dims import TokenDim

aten = torch.ops.aten
ROWS, D, V = 6, 4, 10  # tokens, features, classes
ALL = TokenDim(0, 1, 0, ROWS)


class Loss(Draft):
    """A head and its log-softmax; `given`, if there is one, is what the features are a view of."""

    def __init__(self, given: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.w, self.y = self.input(D, V), self.input(ROWS, 1, dtype=torch.int64)
        self.h = self.call(aten.view.default, self.input(*given), [ROWS, D]) if given else self.input(ROWS, D)
        self.logits = self.call(aten.mm.default, self.h, self.w)

    def normal(self, x: fx.Node, dim: int = 1) -> fx.Node:
        return self.call(aten._log_softmax.default, x, dim, False)

    def grown(self, *results: fx.Node) -> ChunkBody:
        self.returning(*results)
        return grown(self.logits)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        [],
        [(aten.view.default, [2, 3, V])],
        [(aten.div.Tensor, 30.0), (aten.tanh.default,), (aten.mul.Tensor, 30.0)],
        [(aten.clone.default,), (aten._unsafe_view.default, [2, 3, V])],
    ],
)
def test_a_head_is_found_behind_views_and_elementwise_ops(between: list[Any]) -> None:
    loss = Loss()
    x = loss.logits
    for op, *args in between:
        x = loss.call(op, x, *args)
    loss.returning(loss.normal(x, -1), loss.call(aten.logsumexp.default, x, [-1]))
    assert heads(loss.graph) == [loss.logits], "once"
    assert features_of(loss.logits) is loss.h


def test_a_head_in_other_numbers_and_with_a_bias() -> None:
    loss = Loss()
    with_bias = loss.call(aten.addmm.default, loss.input(V), loss.h, loss.w)
    low = loss.call(aten._to_copy.default, with_bias)
    loss.returning(loss.normal(loss.logits), loss.call(aten._softmax.default, low, 1, False))
    assert heads(loss.graph) == [loss.logits, with_bias]
    assert features_of(with_bias) is loss.h


def test_what_is_no_head() -> None:
    """As many classes as features; one row; no product; a product behind a sum; what a remat computes again; what is
    made of no value."""
    draft = Draft()
    square = draft.call(aten.mm.default, draft.input(ROWS, V), draft.input(V, V))
    row = draft.call(aten.mm.default, draft.input(1, D), draft.input(D, V))
    summed = draft.call(aten.sum.dim_IntList, draft.call(aten.mm.default, draft.input(ROWS, D), draft.input(D, V)), [0])
    again = draft.call(aten.mm.default, draft.input(ROWS, D), draft.input(D, V))
    again.meta["phase"] = "x"
    plain = draft.call(aten.mm.default, draft.input(ROWS, D), draft.input(D, V))
    found = [draft.call(aten._log_softmax.default, x, 0, False) for x in (square, row, summed, again, plain)]
    found[-1].meta["phase"] = "x"
    found.append(draft.call(aten._log_softmax.default, draft.call(aten.full.default, [ROWS, V], 1.0), 1, False))
    draft.returning(*found, draft.call(aten._log_softmax.default, draft.input(ROWS, V), 1, False))
    assert heads(draft.graph) == []
    two = Draft()
    head = two.call(aten.mm.default, two.input(2, D), two.input(D, D + 1))
    two.returning(two.call(aten._log_softmax.default, head, 1, False))
    assert heads(two.graph) == [head], "two tokens, one class more than features"


# --- what grows from it -----------------------------------------------------------------------------------------------


def test_all_that_follows_token_by_token_forward_and_backward() -> None:
    loss = Loss()
    normal = loss.normal(loss.logits)
    picked = loss.call(aten.gather.default, normal, 1, loss.y)
    total = loss.call(aten.sum.default, picked)
    d = loss.call(aten._log_softmax_backward_data.default, loss.input(ROWS, V), normal, 1, torch.float32)
    dh = loss.call(aten.mm.default, d, loss.call(aten.t.default, loss.w))
    dw = loss.call(aten.mm.default, loss.call(aten.t.default, loss.h), d)
    before = loss.call(aten.mul.Tensor, dh, 2.0)
    apart = loss.call(aten.mul.Tensor, loss.input(3), 2.0)
    body = loss.grown(total, dw, before, apart)
    assert (body.head, body.num) == (loss.logits, ROWS)
    assert body.nodes == [loss.logits, normal, picked, total, d, dh, dw], "not what follows the features' gradient"
    assert {*body.ways} == {*body.nodes}
    assert body.tokens == dict.fromkeys([loss.logits, normal, picked, d, dh], ALL)
    assert body.summed == [total, dw]
    assert body.joined == [dh]
    assert body.results == {total, dw, dh}
    assert body.ways[loss.logits].operands == (ALL, None)
    assert body.ways[dw].operands == (TokenDim(1, 1, 0, ROWS), ALL)


def test_a_value_of_each_token_that_others_read_is_joined() -> None:
    loss = Loss()
    picked = loss.call(aten.gather.default, loss.normal(loss.logits), 1, loss.y)
    wide = loss.call(aten.slice.Tensor, loss.logits, 1, 0, D)
    body = loss.grown(picked, wide, loss.call(aten.sum.default, picked))
    assert body.joined == [picked, wide], "no wider than the features"


def test_the_items_of_a_tuple_are_values_of_the_body() -> None:
    loss = Loss()
    pair = loss.call(aten.max.dim, loss.logits, 1)
    most = loss.graph.call_function(operator.getitem, (pair, 0))
    where = loss.graph.call_function(operator.getitem, (pair, 1))
    most.meta["val"], where.meta["val"] = pair.meta["val"]
    total = loss.call(aten.sum.default, most)
    body = loss.grown(total, where)
    assert body.nodes == [loss.logits, pair, most, where, total]
    assert (body.tokens[most], body.tokens[where]) == (ALL, ALL)
    assert (body.summed, body.joined) == ([total], [where])


@pytest.mark.parametrize(
    ("given", "seen", "outer"),
    [
        ((2, 3, D), None, 2),
        ((), [2, 3, V], 2),
        ((), [3, 2, V], 3),
        ((3, 2, D), [3, 2, V], 3),
        ((), [ROWS, 2, V // 2], 1),  # rows, whose classes are apart
        ((), [V, ROWS], 1),
        ((), None, 1),
        ((ROWS * D,), None, 1),
    ],
)
def test_rows_are_of_as_many_sequences_as_the_views_say(given: Any, seen: Any, outer: int) -> None:
    loss = Loss(given)
    results = [loss.call(aten.sum.default, loss.normal(loss.logits))]
    if seen is not None:
        results.append(loss.call(aten.sum.default, loss.call(aten.view.default, loss.logits, seen)))
    if seen == [V, ROWS]:
        with pytest.raises(SpecError, match="view"):
            loss.grown(*results)
        return
    body = loss.grown(*results)
    assert body.num == ROWS // outer
    assert body.tokens[loss.logits] == TokenDim(0, outer, 0, ROWS // outer)


def test_a_width_is_of_one_token_of_one_sequence() -> None:
    """Of two sequences the features' gradient is as wide as the features, and so the last of the body."""
    loss = Loss((2, 3, D))
    d = loss.call(aten.mul.Tensor, loss.logits, 2.0)
    dh = loss.call(aten.mm.default, d, loss.call(aten.t.default, loss.w))
    before = loss.call(aten.relu.default, dh)
    body = loss.grown(before)
    assert (body.nodes, body.joined) == ([loss.logits, d, dh], [dh])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_logits_that_are_returned_are_needed_at_once() -> None:
    loss = Loss()
    loss.logits.meta["source"] = "train.py:3"
    with pytest.raises(SpecError, match=r"it reads mm.* of all tokens. Write the loss token by token"):
        loss.grown(loss.call(aten.sum.default, loss.normal(loss.logits)), loss.logits)


def test_an_op_over_the_tokens_is_named_with_its_line() -> None:
    loss = Loss()
    over = loss.normal(loss.logits, 0)
    over.meta["source"] = "train.py:3"
    with pytest.raises(
        SpecError, match=r"_log_softmax \(train.py:3\) does not run by chunks of the sequence: it needs all tokens"
    ):
        loss.grown(loss.call(aten.sum.default, over))


def test_a_value_wider_than_the_features_is_not_kept_of_all_tokens() -> None:
    """One column more than the features is refused, where the features' number is joined."""
    loss = Loss()
    wide = loss.call(aten.slice.Tensor, loss.logits, 1, 0, D + 1)
    with pytest.raises(SpecError, match="it reads slice_tensor of all tokens"):
        loss.grown(wide)


def test_a_sum_over_all_tokens_is_not_known_within_a_chunk() -> None:
    """Nor is what is computed of it."""
    loss = Loss()
    total = loss.call(aten.sum.default, loss.logits)
    scale = loss.call(aten.mul.Tensor, total, 2.0)
    scaled = loss.call(aten.mul.Tensor, loss.logits, scale)
    with pytest.raises(SpecError, match=r"mul.*it reads mul_tensor, which is known after all tokens"):
        loss.grown(loss.call(aten.sum.default, scaled))
    fine = Loss()
    total = fine.call(aten.sum.default, fine.logits)
    body = fine.grown(fine.call(aten.mul.Tensor, total, 2.0))
    assert body.summed == [total]
