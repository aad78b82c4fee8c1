"""factors: the arguments of a call by name, and the dims of its tensors as chains of factors."""

from __future__ import annotations

import pytest
import torch
from by_hand import Draft

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Factor, Maker, broadcast

aten = torch.ops.aten


def test_arguments_by_their_names_with_defaults() -> None:
    draft = Draft()
    x = draft.input(2, 3, 4)
    call = Call.of(draft.call(aten.sum.dim_IntList, x, [-1], True))
    assert (call["self"], call["dim"], call["keepdim"], call["dtype"]) == (x, [-1], True, None)
    assert (call.operands, call.names) == ((x,), ("self",))
    assert (call.shape("self"), call.ndim("self"), call.result) == ((2, 3, 4), 3, (2, 3, 1))
    named = Call.of(draft.call(aten.softmax.int, x, dim=-1))
    assert (named["dim"], named.dim()) == (-1, 2), "counted from the front"
    assert Call.of(draft.call(aten.softmax.int, draft.input(), 0)).dim() == 0
    assert Call.of(draft.call(aten.softmax.int, x, -3)).dim() == 0


def test_operands_are_the_tensors_in_order_of_all_arguments() -> None:
    draft = Draft()
    a, b = draft.input(2, 3), draft.input(4, 3)
    cat = Call.of(draft.call(aten.cat.default, [a, b, a]))
    assert (cat.operands, cat.names) == ((a, b, a), ("tensors",) * 3)
    assert [tuple(x.shape) for x in cat.values] == [(2, 3), (4, 3), (2, 3)]
    pair = Call.of(draft.call(aten.max.dim, a, 1))
    assert [tuple(x.shape) for x in pair.results] == [(2,), (2,)]


def test_a_dim_of_size_one_has_no_factor() -> None:
    draft = Draft()
    m = Maker(Call.of(draft.call(aten.relu.default, draft.input(2, 1))))
    assert m.dim(1) == ()
    assert (m.dim(3), m.dim(4, SUM, "form"), m.dims((5, 1, 6), FREE, but=[2])) == ((0,), (1,), ((2,), (), (3,)))
    assert m.made == [Factor(3, FREE), Factor(4, SUM, "form"), Factor(5, FREE), Factor(6, WHOLE)]


def test_what_is_not_named_is_whole() -> None:
    draft = Draft()
    x, w = draft.input(3, 4), draft.input(3, 4)
    m = Maker(Call.of(draft.call(aten.add.Tensor, x, w)))
    rows = m.dim(3)
    found = m.factors({"self": (rows, m.dim(4, SUM))}, addends=("other",))
    assert found.inputs == (((0,), (1,)), ((2,), (3,)))
    assert found.outputs == (((4,), (5,)),)
    assert [factor.kind for factor in found.factors] == [FREE, SUM, WHOLE, WHOLE, WHOLE, WHOLE]
    assert (found.addends, found.unaffected) == ({1}, frozenset())


def test_a_list_of_operands_and_results_that_are_not_returned() -> None:
    """`unaffected` counts the results that are returned."""
    draft = Draft()
    cat = Maker(Call.of(draft.call(aten.cat.default, [draft.input(2, 3), draft.input(4, 3)])))
    column = cat.dim(3)
    of = [(cat.dim(2, WHOLE), column), (cat.dim(4, WHOLE), column)]
    assert cat.factors({"tensors": of}, (cat.dim(6, WHOLE), column)).inputs == tuple(of)
    x, w, g = draft.input(2, 3, 5), draft.input(4, 3, 1), draft.input(2, 4, 5)
    args = (g, x, w, [4], [1], [0], [1], False, [0], 1, [False, True, True])
    back = draft.graph.call_function(aten.convolution_backward.default, args)
    back.meta["val"] = (None, torch.empty(4, 3, 1), torch.empty(4))
    m = Maker(Call.of(back))
    inner, out = m.dim(3), m.dim(4)
    found = m.factors({}, (), (out, inner, ()), (out,), unaffected=[(2, inner), (0, inner)])
    assert found.outputs == ((out, inner, ()), (out,))
    assert found.unaffected == {(1, inner[0])}


def test_factors_that_do_not_fit_their_tensors_are_a_fault() -> None:
    draft = Draft()
    call = Call.of(draft.call(aten.add.Tensor, draft.input(4, 4), draft.input(4, 4)))
    m = Maker(call)
    row, column = m.dim(4), m.dim(4)
    with pytest.raises(AssertionError, match="a factor runs over two dims"):
        m.factors({"self": (row, row)})
    with pytest.raises(AssertionError, match=r"factors \(4, 1\) of a value of shape"):
        m.factors({"self": (row, ())})
    chain = (*m.dim(2), *m.dim(2))
    assert m.factors({"self": (row, column), "other": (chain, column)}, (row, column)).inputs[1] == (chain, column)


def test_an_operand_that_is_broadcast() -> None:
    dims = ((0,), (1, 2), (3,))
    assert broadcast((2, 3, 4), dims) == dims
    assert broadcast((4,), dims) == ((3,),)
    assert broadcast((1, 6, 1), dims) == ((), (1, 2), ())
    assert broadcast((), dims) == ()
