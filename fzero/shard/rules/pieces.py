"""pieces: ops that cut a dim in pieces, or make one of pieces.

Pieces of sizes 8, 4, 4 of a dim of 16 have the common unit 4: the dim is a chain of 4 units and the 4 elements of a
unit, and a piece the same with 2, 1 and 1 units. The inner factor may be sharded. So each rank holds its part of each
piece: a fused q, k, v is S0/4, and its pieces are S0/2, S0, S0.

    split [8, 4, 4]:  (u a) -> (v a), (w a), (x a)      a sharded
    cat:              the other way
    slice [4:8]:      (u a) -> (v a), v = 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fzero.shard.factors import WHOLE, Call, Dim, Dims, Factors, Maker
from fzero.shard.placements import Partial, local_shape
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten


def _put(dims: Dims, at: int, dim: Dim) -> Dims:
    """The same dims with another one at position `at`."""
    return (*dims[:at], dim, *dims[at + 1 :])


def _in_units(m: Maker, *sizes: int) -> list[Dim]:
    """The dims of these sizes, each as whole units and the elements of a unit; all sizes are multiples of the unit."""
    unit = math.gcd(*sizes)
    inner = m.dim(unit) if unit else ()
    return [m.dim(size // unit, WHOLE) + inner if unit else m.dim(size, WHOLE) for size in sizes]


def cut(call: Call) -> Factors:
    """split, split_with_sizes: a dim in pieces."""
    m = Maker(call)
    at, shape = call.dim(), call.shape("self")
    rest = m.dims(shape, but=[at])
    whole, *pieces = _in_units(m, shape[at], *(result.shape[at] for result in call.results))
    return m.factors({"self": _put(rest, at, whole)}, *(_put(rest, at, piece) for piece in pieces))


def joined(call: Call) -> Factors:
    """cat: pieces to a dim. An empty 1-D operand, which cat leaves out, is whole."""
    m = Maker(call)
    at = int(call["dim"]) % len(call.result)
    rest = m.dims(call.result, but=[at])
    taken = [value.shape[at] for value in call.values if value.dim() == len(rest)]
    whole, *pieces = _in_units(m, call.result[at], *taken)
    feed = iter(pieces)
    operands = [
        _put(rest, at, next(feed)) if value.dim() == len(rest) else m.dims(value.shape, WHOLE) for value in call.values
    ]
    return m.factors({"tensors": operands}, _put(rest, at, whole))


def stacked(call: Call) -> Factors:
    """stack: a new dim, one element from each operand."""
    m = Maker(call)
    at = int(call["dim"]) % len(call.result)
    dims = m.dims((*call.result[:at], *call.result[at + 1 :]))
    new = m.dim(call.result[at], WHOLE)
    return m.factors({"tensors": [dims] * len(call.values)}, (*dims[:at], new, *dims[at:]))


def without(call: Call) -> Factors:
    """select, unbind: one dim disappears."""
    m = Maker(call)
    at = call.dim()
    dims = m.dims(call.shape("self"), but=[at])
    return m.factors({"self": dims}, *[(*dims[:at], *dims[at + 1 :])] * len(call.results))


def _bounds(call: Call, size: int) -> tuple[int, int]:
    """The first element of a slice of a dim of `size`, and the one after its last."""
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    return start, max(start, end)


def sliced(call: Call) -> Factors:
    """slice: from one border of units to another. Steps over elements keep the dim whole."""
    return _slice(call, "self", call.shape("self"), result_is_part=True)


def unsliced(call: Call) -> Factors:
    """slice_backward: zeros around the operand."""
    return _slice(call, "grad_output", call.result, result_is_part=False)


def _slice(call: Call, name: str, whole: Sequence[int], result_is_part: bool) -> Factors:
    m = Maker(call)
    at = int(call["dim"]) % len(whole)
    rest = m.dims(whole, but=[at])
    big, small = _sliced_dim(m, call, at, whole[at])
    operand, result = (big, small) if result_is_part else (small, big)
    return m.factors({name: _put(rest, at, operand)}, _put(rest, at, result))


def _sliced_dim(m: Maker, call: Call, at: int, size: int) -> tuple[Dim, Dim]:
    """The dims of the whole and of the slice."""
    start, end = _bounds(call, size)
    if call["step"] != 1:
        return m.dim(size, WHOLE), m.dim(len(range(start, end, call["step"])), WHOLE)
    unit = math.gcd(start, end - start, size)
    inner = m.dim(unit) if unit else ()
    big, small = (m.dim(k // unit if unit else k, WHOLE) for k in (size, end - start))
    return big + inner, small + inner


def slice_written(call: Call) -> Factors:
    """slice_scatter: `src` in the place of a slice."""
    m = Maker(call)
    whole = call.shape("self")
    at = call.dim()
    rest = m.dims(whole, but=[at])
    big, small = _sliced_dim(m, call, at, whole[at])
    result = _put(rest, at, big)
    return m.factors({"self": result, "src": _put(rest, at, small)}, result)


def selected_back(call: Call) -> Factors:
    """select_backward: zeros around the operand, in a dim that it lacks."""
    m = Maker(call)
    at = int(call["dim"]) % len(call.result)
    dims = m.dims(call.result, but=[at])
    return m.factors({"grad_output": (*dims[:at], *dims[at + 1 :])}, dims)


def select_written(call: Call) -> Factors:
    """select_scatter: `src` in the place of one element of a dim."""
    m = Maker(call)
    at = call.dim()
    dims = m.dims(call.shape("self"), but=[at])
    return m.factors({"self": dims, "src": (*dims[:at], *dims[at + 1 :])}, dims)


def padded(call: Call) -> Factors:
    """constant_pad_nd: new elements on both sides of the last dims, or fewer."""
    m = Maker(call)
    before, after = [], []
    for size, (low, high) in zip(call.shape("self"), _pads(call), strict=True):
        if low == high == 0:
            small = big = m.dim(size)
        else:
            unit = math.gcd(low, size, high)
            inner = m.dim(unit)
            small, big = (m.dim(k // unit, WHOLE) + inner for k in (size, low + size + high))
        before.append(small)
        after.append(big)
    return m.factors({"self": tuple(before)}, tuple(after))


def _pads(call: Call) -> list[tuple[int, int]]:
    """(before, after) of each dim; the argument counts from the last dim."""
    flat = list(call["pad"])
    pairs = list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    return [(0, 0)] * (call.ndim("self") - len(pairs)) + pairs


def _zero_padded(call: Call, n: int) -> Iterable[Strategy]:
    """Padding with zeros is linear."""
    if call["value"] == 0:
        yield Strategy((Partial(),), (Partial(),))


# --- arguments of the local call --------------------------------------------------------------------------------------


def _parts(call: Call, strategy: Strategy, n: int, at: int) -> int:
    """By how much the pieces of dim `at` shrink."""
    pieces = zip((tuple(x.shape) for x in call.results), strategy.outputs, strict=True)
    shape, placement = next(((s, p) for s, p in pieces if s[at]), (call.result, strategy.outputs[0]))
    return shape[at] // local_shape(shape, placement, n)[at] if shape[at] else 1


def _cut_local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    at = call.dim()
    name, given = next((k, call.named[k]) for k in ("split_sizes", "split_size") if k in call.named)
    by = _parts(call, strategy, n, at)
    return {name: [size // by for size in given] if isinstance(given, (list, tuple)) else given // by}


def _slice_local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    """The bounds of the local slice; the sizes of the local whole, where the op takes them."""
    whole = call.shape("self") if "self" in call.named else call.result
    at = int(call["dim"]) % len(whole)
    placement = strategy.inputs[0] if "self" in call.named else strategy.outputs[0]
    local = local_shape(whole, placement, n)
    by = whole[at] // local[at] if whole[at] else 1
    changed: dict[str, Any] = {"input_sizes": list(local)} if "input_sizes" in call.named else {}
    if by > 1:
        start, end = _bounds(call, whole[at])
        changed |= {"start": start // by, "end": end // by}
    return changed


def _input_sizes(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    return {"input_sizes": list(local_shape(call.result, strategy.outputs[0], n))}


def _pad_local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    local = local_shape(call.result, strategy.outputs[0], n)
    by = [size // part if size else 1 for size, part in zip(call.result, local, strict=True)]
    pairs = [(low // k, high // k) for (low, high), k in zip(_pads(call), by, strict=True)]
    return {"pad": [pad for pair in pairs[::-1] for pad in pair][: len(call["pad"])]}


SPLITS = (
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
)  # fmt: skip

RULES: Rules = {
    **{op: Rule(cut, ("self",), moves=True, local=_cut_local) for op in SPLITS},
    aten.cat.default: Rule(joined, ("tensors",), moves=True),
    aten.stack.default: Rule(stacked, ("tensors",), moves=True),
    aten.unbind.int: Rule(without, ("self",), moves=True),
    aten.select.int: Rule(without, ("self",), moves=True),
    aten.slice.Tensor: Rule(sliced, ("self",), moves=True, local=_slice_local),
    aten.slice_backward.default: Rule(unsliced, ("grad_output",), local=_slice_local),
    aten.slice_scatter.default: Rule(slice_written, ("self src",), moves=True, local=_slice_local),
    aten.select_backward.default: Rule(selected_back, ("grad_output",), local=_input_sizes),
    aten.select_scatter.default: Rule(select_written, ("self src",), moves=True),
    aten.constant_pad_nd.default: Rule(padded, local=_pad_local, more=_zero_padded),
}
