"""other_ranks: leaves of which each rank keeps its own, for another number of ranks than they were saved on.

What ranks owe to a mean, as the errors of `fzero.coded_mean`, has a meaning for any number: every new rank gets the
mean of what the old ones owed, and so the mean of all is as it was. A leaf whose ranks hold slices of one value is
sliced anew. Nothing else has a meaning, so this is done only where the user asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from fzero.state.source import CHUNK_BYTES, Entry, Source, Want

KEEP, MEAN = "refuse", "mean"  # the values of `fzero.load(per_rank=)`


def respread(here: Mapping[str, Entry], there: Mapping[str, Entry], sliced: Collection[str]) -> set[str]:
    """The paths of per-rank leaves that another number of ranks has saved, and that can be spread over these.

    here: the state's leaves. sliced: of these, what holds slices of one value.
    """
    found = set()
    for path, ours in here.items():
        theirs = there.get(path)
        if theirs is None or not (ours.per_rank and theirs.per_rank) or ours.shape[0] == theirs.shape[0]:
            continue
        alike = ours.dtype is theirs.dtype and len(ours.shape) == len(theirs.shape)
        fits = ours.dtype.is_floating_point and ours.shape[1:] == theirs.shape[1:]
        if alike and (path in sliced or fits):
            found.add(path)
    return found


def fill(source: Source, wants: Iterable[Want], sliced: Collection[str]) -> None:
    """Fills parts of per-rank leaves from a source of another number of ranks; each want is all of one rank's leaf."""
    for want in wants:
        ranks, *shape = source.leaves[want.path].shape
        size = torch.Size(shape).numel()
        if want.path in sliced:
            stop = min(want.start + len(want.out), ranks * size)
            held = max(stop - want.start, 0)
            want.out[held:].zero_()
            if held:
                want.out[:held].copy_(source.read(want.path, want.start, stop))
            continue
        step = max(CHUNK_BYTES // want.out.dtype.itemsize, 1)
        for at in range(0, size, step):
            end = min(at + step, size)
            total = torch.zeros(end - at, dtype=torch.float64)
            for rank in range(ranks):
                total += source.read(want.path, rank * size + at, rank * size + end)
            want.out[at:end].copy_(total / ranks)
