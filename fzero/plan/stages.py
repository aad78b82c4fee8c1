"""stages: what each ZeRO stage shards, over which data axes, and when it reduces gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
class Row:
    """What a stage means on a mesh. An axis, or several as one, or None for a whole column.

    cut: along which ranks own slices of a bucket. reduce_when: when a gradient bucket is reduced, as soon as it is
    "produced" or at the "end" of the microbatch's backward.
    """

    params: str | None
    optimizer: str | None
    cut: str
    reduce_when: str
    copy: str | None = None


def shards_params(stage: Stage) -> bool:
    """Whether parameters are held in slices, and gathered for each use."""
    return stage == 3 if isinstance(stage, int) else bool(stage.params)


def row_of(stage: Stage, axes: Sequence[str]) -> Row:
    """The row of a stage on data axes, the innermost first.

    >>> row_of(1, ["dp"])
    Row(params=None, optimizer='dp', cut='dp', reduce_when='end', copy=None)
    >>> row_of(Columns(("dp",), ("dp",), ("dp", "dp_out")), ["dp", "dp_out"]).optimizer
    'dp.dp_out'
    """
    every = ".".join(axes)
    if isinstance(stage, int):
        table = {
            0: Row(None, None, every, "produced"),
            1: Row(None, every, every, "end"),
            2: Row(None, every, every, "produced"),
            3: Row(every, every, every, "produced"),
        }
        return table[stage]
    params, grads, optimizer, copy = (
        ".".join(axis for axis in axes if axis in column) or None
        for column in (stage.params, stage.grads, stage.optimizer, stage.copy)
    )
    return Row(params, optimizer, optimizer or every, "produced" if grads or not optimizer else "end", copy)
