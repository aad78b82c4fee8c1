"""views: ops that give the same elements another shape or order.

view (6, 4) -> (2, 3, 4):   (ab) c -> a b c        b sharded: S0/2 -> S1
view (2, 3) -> (3, 2):      whole: no factors divide both
transpose(0, 1):            a b -> b a
expand (1, 4) -> (3, 4):    - b -> a b             a is new: a part of it is made of the whole operand
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fzero.shard.factors import WHOLE, Call, Dim, Dims, Factors, Maker, broadcast
from fzero.shard.placements import Shard
from fzero.shard.rules.pointwise import sized
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten


def reshaped(call: Call) -> Factors:
    """The dims of both shapes as chains of common factors."""
    m = Maker(call)
    before, after = chains(m, call.shape("self"), call.result)
    return m.factors({"self": before}, after)


def chains(m: Maker, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of two shapes of as many elements, in one order, by common factors.

    Both shapes are cut in blocks of as many elements. In a block the borders of both shapes' dims are borders of
    factors, if each divides the next; else the block is whole.
    """
    if 0 in before:
        return m.dims(before, WHOLE), m.dims(after, WHOLE)
    one, two = (list(itertools.accumulate(shape, lambda a, b: a * b)) for shape in (before, after))
    borders = sorted({1, *one, *two})
    ends = sorted({1, *one} & {1, *two})
    dim_of: dict[tuple[int, int], Dim] = {}
    for low, high in itertools.pairwise(ends):
        within = [b for b in borders if low <= b <= high]
        if all(b % a == 0 for a, b in itertools.pairwise(within)):
            dim_of |= {(a, b): m.dim(b // a) for a, b in itertools.pairwise(within)}
    return _chained(m, one, dim_of), _chained(m, two, dim_of)


def _chained(m: Maker, ends: list[int], dim_of: dict[tuple[int, int], Dim]) -> Dims:
    """The chain of factors of each dim; `ends` are the borders of the dims."""
    dims = []
    for low, high in itertools.pairwise([1, *ends]):
        inside = sorted((a, b) for a, b in dim_of if low <= a and b <= high)
        covered = math.prod(b // a for a, b in inside) == high // low
        dims.append(sum((dim_of[key] for key in inside), ()) if covered else m.dim(high // low, WHOLE))
    return tuple(dims)


def permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], Factors]:
    """The rule of an op whose result's dim i is the operand's dim `order(call)[i]`."""

    def factors(call: Call) -> Factors:
        m = Maker(call)
        dims = m.dims(call.shape("self"))
        return m.factors({"self": dims}, tuple(dims[d] for d in order(call)))

    return factors


def _swapped(call: Call, one: int, two: int) -> list[int]:
    ndim = call.ndim("self")
    order = list(range(ndim))
    if ndim:
        order[one % ndim], order[two % ndim] = two % ndim, one % ndim
    return order


def squeezed(call: Call) -> Factors:
    """The named dims of size one disappear. One of another size is whole: its part may have size one."""
    m = Maker(call)
    dims = m.dims(call.shape("self"), but=_squeezable(call))
    gone = _gone(call)
    return m.factors({"self": dims}, tuple(dim for d, dim in enumerate(dims) if d not in gone))


def _squeezable(call: Call) -> set[int]:
    ndim, given = call.ndim("self"), call.named.get("dim")
    named = range(ndim) if given is None else [given] if isinstance(given, int) else given
    return {d % ndim for d in named} if ndim else set()


def _gone(call: Call) -> list[int]:
    return sorted(d for d in _squeezable(call) if call.shape("self")[d] == 1)


def _squeezed_parts(call: Call, n: int) -> Iterable[Strategy]:
    """A sharded dim stays, if its part has more than one element."""
    gone = _gone(call)
    for d in _squeezable(call):
        size = call.shape("self")[d]
        if size > n and size % n == 0:
            yield Strategy((Shard(d),), (Shard(d - sum(g < d for g in gone)),))


def expanded(call: Call) -> Factors:
    """Every dim of the result is a factor; the operand lacks those that are repeated."""
    m = Maker(call)
    dims = m.dims(call.result)
    return m.factors({"self": broadcast(call.shape("self"), dims)}, dims)


def repeated(call: Call) -> Factors:
    """A dim repeated k times is a chain: k, which is whole, then the operand's dim."""
    m = Maker(call)
    shape, times = call.shape("self"), call["repeats"]
    dims = m.dims(shape)
    padded = ((),) * (len(times) - len(shape)) + dims
    return m.factors({"self": dims}, tuple(m.dim(k, WHOLE) + dim for k, dim in zip(times, padded, strict=True)))


def retyped(call: Call) -> Factors:
    """The same bytes as another type: the last dim is whole where its size changes."""
    m = Maker(call)
    before, after = call.shape("self"), call.result
    if before == after:
        dims = m.dims(before)
        return m.factors({"self": dims}, dims)
    outer = m.dims(after[: len(before) - 1])
    inner = tuple(m.dim(size, WHOLE) for size in before[len(outer) :])
    return m.factors({"self": (*outer, *inner)}, (*outer, *(m.dim(size, WHOLE) for size in after[len(outer) :])))


def paired(call: Call) -> Factors:
    """A complex number as two reals, or two reals as one: the dim of two is whole."""
    m = Maker(call)
    before, after = call.shape("self"), call.result
    dims = m.dims(min(before, after, key=len))
    pair = (*dims, m.dim(2, WHOLE))
    return m.factors({"self": pair if len(before) > len(after) else dims}, dims if len(before) > len(after) else pair)


def _view(factors: Callable[[Call], Factors], local: Any = None, more: Any = None) -> Rule:
    return Rule(factors, ("self",), moves=True, local=local, more=more)


RULES: Rules = {
    aten.view.default: _view(reshaped, sized("size")),
    aten._unsafe_view.default: _view(reshaped, sized("size")),
    aten.reshape.default: _view(reshaped, sized("shape")),
    aten.flatten.using_ints: _view(reshaped),
    aten.unsqueeze.default: _view(reshaped),
    aten.squeeze.default: _view(squeezed, more=_squeezed_parts),
    aten.squeeze.dim: _view(squeezed, more=_squeezed_parts),
    aten.squeeze.dims: _view(squeezed, more=_squeezed_parts),
    aten.permute.default: _view(permuted(lambda call: [d % call.ndim("self") for d in call["dims"]])),
    aten.transpose.int: _view(permuted(lambda call: _swapped(call, call["dim0"], call["dim1"]))),
    aten.t.default: _view(permuted(lambda call: range(call.ndim("self"))[::-1])),
    aten.expand.default: _view(expanded, sized("size")),
    aten.repeat.default: _view(repeated),
    aten.view.dtype: Rule(retyped),
    aten.view_as_real.default: Rule(paired, ("self",)),
    aten.view_as_complex.default: Rule(paired, ("self",)),
}
