"""stages: how the values of a bucket lie over the mesh: one table for ZeRO's stages and for layouts by column.

A layout of a bucket is ZeRO's: slices of the flat bucket (`Flat`) over some data axes, the inner one first. What cuts a
leaf by its dims comes before (`Leaf.layout`): the bucket holds one rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fzero.ir.mesh import Mesh
from fzero.plan.wires import AnyWire
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.placements import Flat, Partial, Shard


@dataclass(frozen=True)
class Columns:
    """Over which data axes each column of the state is sharded: the inner axis, or all of them.

    copy: those of a second copy of the parameters, kept from their first use in a step to their last.
    """

    params: tuple[str, ...]
    grads: tuple[str, ...]
    optimizer: tuple[str, ...]
    copy: tuple[str, ...] = ()


Stage = int | Columns


@dataclass(frozen=True)
class BucketLayout:
    """How the values of a bucket lie.

    params: parameters at rest. rest: the optimizer's columns at rest; each rank updates the slice that it holds.
    grad: the gradient of a rank's part of the batch: `Partial` over the axes that it is summed over, in that order.
    cut: along which ranks own slices: `rest`, and where every rank updates all of it all axes of `grad`.
    copy: of the second copy of the parameters; `WHOLE` where none is kept.
    reduce_when: when the gradient is reduced, as soon as it is "produced" or at the "end" of the microbatch's backward.
    wire: how the gradient travels; None: in the dtype that the precision of its loss says.
    """

    params: Layout
    rest: Layout
    grad: Layout
    cut: Layout
    copy: Layout = WHOLE
    reduce_when: str = "produced"
    wire: AnyWire | None = None


def shards_params(stage: Stage) -> bool:
    """Whether parameters are held in slices, and gathered for each use."""
    return stage == 3 if isinstance(stage, int) else bool(stage.params)


def batch_layout(mesh: Mesh) -> Layout:
    """How a leaf of the batch lies: each rank of the data axes is given an equal part of its rows.

    >>> str(batch_layout(Mesh((("dp_out", 2), ("dp", 2), ("tp", 2)))))
    'S0 over dp_out, S0 over dp'
    """
    return Layout.over(mesh, mesh.data_axes, Shard(0))


def gradient(batch: Layout) -> Layout:
    """How the gradient of leaves lies that every rank uses whole, or in equal parts by dims, on its part of a batch: it
    is the sum over all axes that cut the batch, the innermost first.

    >>> str(gradient(batch_layout(Mesh((("dp_out", 2), ("dp", 2), ("tp", 2))))))
    'P over dp, P over dp_out'
    """
    return Layout(tuple(replace(cut, placement=Partial()) for cut in reversed(batch.cuts) if cut.n > 1))


def row_of(stage: Stage, batch: Layout) -> BucketLayout:
    """The row of a stage, for a batch that lies so.

    >>> batch = batch_layout(Mesh((("dp_out", 2), ("dp", 2))))
    >>> row = row_of(1, batch)
    >>> str(row.params), str(row.rest), str(row.grad), row.reduce_when
    ('', 'F over dp, F over dp_out', 'P over dp, P over dp_out', 'end')
    >>> row = row_of(Columns(("dp",), ("dp",), ("dp", "dp_out")), batch)
    >>> row.params.axes, row.rest.axes, row.reduce_when
    ('dp', 'dp.dp_out', 'produced')
    """
    grad = gradient(batch)
    every = Layout(tuple(replace(cut, placement=Flat()) for cut in grad.cuts or batch.cuts[-1:]))
    if isinstance(stage, int):
        params, rest, when = (
            (WHOLE, WHOLE, "produced"), (WHOLE, every, "end"), (WHOLE, every, "produced"), (every, every, "produced")
        )[stage]  # fmt: skip
        return BucketLayout(params, rest, grad, every, reduce_when=when)
    params, grads, rest, copy = (
        Layout(tuple(cut for cut in every.cuts if cut.axis in column))
        for column in (stage.params, stage.grads, stage.optimizer, stage.copy)
    )
    return BucketLayout(params, rest, grad, rest or every, copy, "produced" if grads or not rest else "end")
