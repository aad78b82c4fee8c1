"""moved: what other axes see of the transfers of an axis that was localised before them.

A transfer moves equal flat parts of a contiguous value, of which the dims are those of a view with one dim more, the
ranks: it is whole, and all others may lie in parts along another axis.

all_gather (2, 6) -> (2, 12) over 2 ranks:   - k ab -> k (r)ab
own_part of dim 1, groups 3:                 k (g r o) -> k (g o)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fzero.shard import ops
from fzero.shard.factors import WHOLE, Call, Dims, Factor, Factors, Maker
from fzero.shard.placements import Partial
from fzero.shard.rules.pointwise import broadcasted, sized
from fzero.shard.rules.rule import Rule, Rules, Strategy
from fzero.shard.rules.views import chains


def gathered(call: Call) -> Factors:
    """The result is a view of (ranks, the part)."""
    m = Maker(call)
    before, after = chains(m, (call["n"], *call.shape("x")), call.result)
    return _but_ranks(m, before[0]).factors({"x": before[1:]}, after)


def scattered(call: Call) -> Factors:
    """The operand is a view of (ranks, the part)."""
    m = Maker(call)
    before, after = chains(m, call.shape("x"), (call["n"], *call.result))
    return _but_ranks(m, after[0]).factors({"x": before}, after[1:])


def exchanged(call: Call) -> Factors:
    """Operand and result are views of (ranks, the part); the parts are the same but for their shape."""
    m, n = Maker(call), call["n"]
    before, after = _by_ranks(call.shape("x"), n), _by_ranks(call.result, n)
    if before is None or after is None:
        return m.factors({})
    one, two = chains(m, before[1], after[1])
    return m.factors({"x": _led(m, n, before[0], one)}, _led(m, n, after[0], two))


def own_part(call: Call) -> Factors:
    """Of the dim (groups, ranks, own) a rank keeps (groups, own)."""
    m, cut = Maker(call), call["dim"]
    before, after = [], []
    for d, size in enumerate(call.shape("x")):
        if d != cut:
            before.append(m.dim(size))
            after.append(before[-1])
            continue
        groups, n = call["groups"], call["n"]
        outer, ranks, own = m.dim(groups, WHOLE), m.dim(n, WHOLE), m.dim(size // (groups * n))
        before.append(outer + ranks + own)
        after.append(outer + own)
    return m.factors({"x": tuple(before)}, tuple(after))


def _summed(call: Call, n: int) -> Iterable[Strategy]:
    """A sum over one axis is linear; of maxima the maximum may be taken later."""
    how = str(call["how"])
    yield Strategy((Partial(how),), (Partial(how),))


def _but_ranks(m: Maker, ranks: Sequence[int]) -> Maker:
    """The maker, with the factors of the ranks whole."""
    for number in ranks:
        m.made[number] = Factor(m.made[number].size, WHOLE)
    return m


def _by_ranks(shape: Sequence[int], n: int) -> tuple[int, tuple[int, ...]] | None:
    """(dims of one before it, the shape from there on without the ranks) of a value that is n parts."""
    ones = next((d for d, size in enumerate(shape) if size != 1), len(shape))
    if ones == len(shape) or shape[ones] % n:
        return None
    return ones, (shape[ones] // n, *shape[ones + 1 :])


def _led(m: Maker, n: int, ones: int, dims: Dims) -> Dims:
    """The dims with those of one, and the ranks, before them."""
    return (*[()] * ones, m.dim(n, WHOLE) + dims[0], *dims[1:])


RULES: Rules = {
    ops.ALL_REDUCE: Rule(broadcasted, more=_summed),
    ops.ALL_GATHER: Rule(gathered, ("x",), moves=True, local=sized("shape")),
    ops.REDUCE_SCATTER: Rule(scattered, ("x",), local=sized("shape")),
    ops.ALL_TO_ALL: Rule(exchanged, ("x",), moves=True, local=sized("shape")),
    ops.OWN_PART: Rule(own_part, ("x",), moves=True),
    ops.CONSTRAIN: Rule(broadcasted, ("x",), moves=True),  # of another axis
}
