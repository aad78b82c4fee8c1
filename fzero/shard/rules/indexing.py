"""indexing: ops that pick or write elements by index tensors.

embedding(w, i):       w vd, i ab -> abd      v sharded: a local form, Partial
index(x, [i]):         x vd, i ab -> abd      as embedding; other indexed dims whole
index_select(x, 0, i): x vb, i a -> ab        v whole
gather(x, 1, i):       x av, i ab -> ab       v whole
"""

from __future__ import annotations

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dims, Factors, Kind, Maker, broadcast
from fzero.shard.rules.rule import Rule, Rules

aten = torch.ops.aten


def embedded(call: Call) -> Factors:
    """Rows of a weight. Where rows are sharded, a rank gives the rows that it has."""
    m = Maker(call)
    rows, width = call.shape("weight")
    ids, row, col = m.dims(call.shape("indices")), m.dim(rows, SUM, "embedding"), m.dim(width)
    return m.factors({"weight": (row, col), "indices": ids}, (*ids, col))


def embedded_back(call: Call) -> Factors:
    """The gradient of the weight: summed over indices. A rank can make its own rows alone."""
    m = Maker(call)
    counted = bool(call["scale_grad_by_freq"])
    ids = m.dims(call.shape("indices"), WHOLE if counted else SUM)
    rows, width = call.result
    row, col = m.dim(rows, WHOLE if counted else FREE, "embedding_dense_backward"), m.dim(width)
    return m.factors({"grad_output": (*ids, col), "indices": ids}, (row, col))


def picked_dim(call: Call) -> Factors:
    """index_select: the index takes the place of one dim."""
    m = Maker(call)
    at = call.dim()
    dims = m.dims(call.shape("self"), but=[at])
    index = m.dims(call.shape("index"))
    return m.factors({"self": dims, "index": index}, (*dims[:at], *(index or ((),)), *dims[at + 1 :]))


def gathered(call: Call) -> Factors:
    """gather: the index has the result's dims. The dim that it picks from is whole."""
    m = Maker(call)
    at = call.dim()
    own, index = _beside(m, call, at, FREE)
    return m.factors({"self": own, "index": index}, index)


def scattered(call: Call) -> Factors:
    """scatter, scatter_add: every dim but the one written along may be sharded."""
    m = Maker(call)
    own, index = _beside(m, call, call.dim(), WHOLE)
    inputs: dict[str, Dims | list[Dims]] = {"self": own, "index": index}
    if "src" in call.names and call.shape("src") == call.shape("index"):
        inputs["src"] = index
    elif "src" in call.names:
        return _all_whole(call)
    return m.factors(inputs, own)


def _beside(m: Maker, call: Call, at: int, along: Kind) -> tuple[Dims, Dims]:
    """The dims of `self` and of `index`: the same where their sizes are, whole where not.

    The index's dim `at` is of kind `along`.
    """
    pairs = []
    for d, (size, picked) in enumerate(zip(call.shape("self"), call.shape("index"), strict=True)):
        if d == at:
            pairs.append((m.dim(size, WHOLE), m.dim(picked, along)))
        elif size == picked:
            pairs.append((m.dim(size),) * 2)
        else:
            pairs.append((m.dim(size, WHOLE), m.dim(picked, WHOLE)))
    return tuple(own for own, _ in pairs), tuple(index for _, index in pairs)


def indexed(call: Call) -> Factors:
    """index: `x[:, i, j]`. The indexed dims are whole; the others, and those of the indices, may be sharded. Of `x[i]`
    a rank gives the rows that it has."""
    if _by_masks(call):
        return _all_whole(call)
    m = Maker(call)
    own, indices, shape = _indices(m, call, FREE, SUM, "index")
    return m.factors({"self": own, "indices": indices}, shape)


def index_written(call: Call) -> Factors:
    """index_put: `x[:, i, j] = values`. Added values may be sharded along the indices, if x is a sum too."""
    if _by_masks(call):
        return _all_whole(call)
    m = Maker(call)
    added = bool(call["accumulate"])
    own, indices, shape = _indices(m, call, SUM if added else WHOLE, FREE if added else WHOLE, "index_put")
    values = broadcast(call.shape("values"), shape)
    return m.factors({"self": own, "indices": indices, "values": values}, own, addends=("self",))


def _by_masks(call: Call) -> bool:
    return any(x is not None and not _integer(x.meta["val"]) for x in call["indices"])


def _integer(x: torch.Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32)


def _indices(m: Maker, call: Call, kind: Kind, rows: Kind, local: str) -> tuple[Dims, list[Dims], Dims]:
    """The dims of `self`, of each index, and of `self[indices]`. kind: of the indices' dims. rows, local: of the first
    dim, where it alone is indexed.

    The dims of the indices, which are broadcast, stand where the first of the indexed dims was; in front if these do
    not lie side by side.
    """
    given = list(call["indices"])
    at = [d for d, x in enumerate(given) if x is not None]
    own = m.dims(call.shape("self"), but=at)
    own = (m.dim(call.shape("self")[0], rows, local), *own[1:]) if at == [0] else own
    shapes = [given[d].meta["val"].shape for d in at]
    shared = m.dims(torch.broadcast_shapes(*shapes), kind)
    rest = [d for d in range(len(own)) if d not in at]
    front = 0 if at != list(range(at[0], at[-1] + 1)) else at[0]
    left, right = [own[d] for d in rest if d < front], [own[d] for d in rest if d >= front]
    return own, [broadcast(shape, shared) for shape in shapes], (*left, *shared, *right)


def _all_whole(call: Call) -> Factors:
    return Maker(call).factors({})


RULES: Rules = {
    aten.embedding.default: Rule(embedded, ("weight",)),
    aten.embedding_dense_backward.default: Rule(embedded_back, ("grad_output",)),
    aten.index_select.default: Rule(picked_dim, ("self",), moves=True),
    aten.gather.default: Rule(gathered, ("self",), moves=True),
    aten.scatter.src: Rule(scattered, ("self src",)),
    aten.scatter.value: Rule(scattered),
    aten.scatter_add.default: Rule(scattered, ("self src",)),
    aten.index.Tensor: Rule(indexed, ("self",), moves=True),
    aten._unsafe_index.Tensor: Rule(indexed, ("self",), moves=True),
    aten.index_put.default: Rule(index_written, ("self values",)),
    aten._unsafe_index_put.default: Rule(index_written, ("self values",)),
}
