"""The mean over ranks of a flat value that travels in codes: what a rank computes between the two transfers.

    parts, worker = sent(x, worker)          a message for each rank: its slice of x + worker, coded
    all-to-all: rank r gets every rank's message for slice r
    own, server   = averaged(arrived, server)  the mean of slice r; with both ways + server, and coded again
    all-gather: every rank gets every slice
    mean          = joined(gathered)         all of the mean, decoded where it came in codes

What a code has lost is the new error, which the next call adds (error feedback: 1-bit Adam, arXiv 2102.02888). Ranks
are added in order in float32 and divided once, so the bits are the same over every transport.

x is leaves of these `sizes` in one, each padded with zeros to whole blocks of 64. A slice has `slice_length` elements,
and zeros beyond the end. Padding counts in no scale and has no error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.ir.code_ops import OPS
from fzero.kernels.codecs import BLOCK, message_bytes


def padded_size(sizes: Sequence[int]) -> int:
    """Elements of leaves of these sizes, each in whole blocks.

    >>> padded_size([64, 3])
    128
    """
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def slice_length(sizes: Sequence[int], ranks: int) -> int:
    """Elements of one rank's slice: whole blocks.

    >>> slice_length([192], 2)
    128
    """
    return -(-padded_size(sizes) // (BLOCK * ranks)) * BLOCK


def is_short(sizes: Sequence[int]) -> bool:
    """Whether a block has padding of a leaf."""
    return any(size % BLOCK for size in sizes)


def sent(x: Tensor, worker: Tensor | None = None, *, sizes: Sequence[int], ranks: int, codec: str) -> list[Tensor]:
    """[the messages to all ranks (uint8, in one), the new error of this rank, if it keeps one].

    >>> parts, worker = sent(torch.ones(64), torch.zeros(64), sizes=[64], ranks=1, codec="sign")
    >>> parts.shape, float(worker.abs().max())
    (torch.Size([12]), 0.0)
    """
    ops, beyond = OPS[codec], ranks * slice_length(sizes, ranks) - len(x)
    value = x if worker is None else x + worker
    counts = _counts(sizes, ranks, x.device)
    messages = ops.encode(pad(value, (0, beyond)) if beyond else value, counts)
    if worker is None:
        return [messages]
    lost = value - ops.decode(messages)[: len(x)]
    return [messages, lost if counts is None else _without_padding(lost, counts.flatten()[: len(x) // BLOCK])]


def averaged(
    arrived: Tensor, rank: Tensor, server: Tensor | None = None, *, sizes: Sequence[int], ranks: int, codec: str,
    both: bool,
) -> list[Tensor]:  # fmt: skip
    """[the mean of the own slice (float32, or with `both` its message), the new error of the slice, if it is kept].

    rank: 0-d int64, whose slice it is."""
    ops = OPS[codec]
    mean = ops.decode_sum(arrived.view(ranks, -1), ranks)
    if not both:
        return [mean]
    value = mean if server is None else mean + server
    counts = _counts(sizes, ranks, arrived.device)
    if counts is not None:
        counts = counts.index_select(0, rank.reshape(1)).view(-1)
        value = _without_padding(value, counts)
    message = ops.encode(value, counts)
    if server is None:
        return [message]
    lost = value - ops.decode(message)
    return [message, lost if counts is None else _without_padding(lost, counts)]


def joined(gathered: Tensor, *, sizes: Sequence[int], ranks: int, codec: str, both: bool) -> list[Tensor]:
    """[all elements of the mean]."""
    size = padded_size(sizes)
    if not both:
        return [gathered[:size].clone()]
    return [OPS[codec].decode(gathered[: message_bytes(size, OPS[codec].codec)])]


def alone(x: Tensor, *errors: Tensor) -> list[Tensor]:
    """[the mean, new errors of zero] of one rank: nothing travels, so nothing is coded.

    >>> alone(torch.ones(2), torch.full((2,), 0.5))
    [tensor([1.5000, 1.5000]), tensor([0., 0.])]
    """
    total = x
    for error in errors:
        total = total + error
    return [total if errors else x.clone(), *(torch.zeros_like(error) for error in errors)]


def _counts(sizes: Sequence[int], ranks: int, device: torch.device) -> Tensor | None:
    """(ranks, blocks of a slice): how many elements of each block are of a leaf. None where no block is short."""
    if not is_short(sizes):
        return None
    runs: list[tuple[int, int]] = []
    for size in sizes:
        runs += [(size // BLOCK, BLOCK), (1 if size % BLOCK else 0, size % BLOCK)]
    blocks = slice_length(sizes, ranks) // BLOCK
    runs.append((ranks * blocks - padded_size(sizes) // BLOCK, BLOCK))
    parts = [torch.full((number,), float(count), device=device) for number, count in runs if number]
    return torch.cat(parts).view(ranks, blocks)


def _without_padding(value: Tensor, counts: Tensor) -> Tensor:
    """The value with zeros where its blocks hold no element of a leaf."""
    held = torch.arange(BLOCK, device=value.device) < counts[:, None]
    return torch.where(held, value.view(-1, BLOCK), 0.0).flatten()
