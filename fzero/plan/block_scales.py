"""block_scales: the leaves of quantised moments, which mirror a parameter in blocks of 64 elements.

A moment kept in 8 bits is two leaves: `<moment>/codes/<parameter>`, 8-bit integers of the parameter's shape, and
`<moment>/scales/<parameter>`, one fp32 number for each block of 64 of them (the last block may be short). Every leaf
starts on a 64-element boundary of its bucket and every rank's slice is a multiple of 64 elements, so no block lies on
two ranks or in two leaves: codes are a column of the parameter's bucket like a moment, scales one with an element for
each 64 (`Buffer.per`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero.ir.records import ALIGN
from fzero.plan.leaf_classes import LeafClass

CODES = (torch.int8, torch.uint8)


def scales(paths: Sequence[str], leaves: Sequence[torch.Tensor], per_rank: Sequence[str] = ()) -> dict[int, int]:
    """{index of a leaf of scales: index of its leaf of codes}. The codes are the 8-bit leaf at the same path with
    `codes` in the place of `scales`. They have as many blocks as there are scales. Where the codes are kept whole, so
    are the scales.

    >>> scales(["mu/codes/w", "mu/scales/w"], [torch.zeros(5, 13, dtype=torch.int8), torch.zeros(2)])
    {1: 0}
    """
    codes_at = {path: i for i, path in enumerate(paths) if leaves[i].dtype in CODES and path not in per_rank}
    result: dict[int, int] = {}
    for i, path in enumerate(paths):
        split = path.split("/")
        for index in (n for n, part in enumerate(split) if part == "scales" and leaves[i].is_floating_point()):
            codes = codes_at.get("/".join([*split[:index], "codes", *split[index + 1 :]]), -1)
            blocks = -(-leaves[codes].numel() // ALIGN)
            if codes >= 0 and leaves[i].shape == (blocks,) and blocks and path not in per_rank:
                result[i] = codes
    return result


def with_scales(
    classes: Sequence[LeafClass], codes_of: Mapping[int, int], paths: Sequence[str], leaves: Sequence[torch.Tensor]
) -> list[LeafClass]:
    """The classes that have a floating-point leaf, which comes first, with the scales of their codes at the end."""
    scales_of = {codes: i for i, codes in codes_of.items()}
    result = []
    for leaf_class in classes:
        members = sorted(leaf_class.members, key=lambda member: leaves[member[1]].dtype in CODES)
        if leaves[members[0][1]].dtype in CODES:
            continue
        for prefix, codes in members.copy():
            if codes in scales_of:
                i = scales_of[codes]
                depth = len(prefix.split("/"))
                members.append(("/".join(paths[i].split("/")[:depth]), i))
        result.append(LeafClass(leaf_class.key, tuple(members)))
    return result
