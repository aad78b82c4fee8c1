"""convolution_workspace: bytes that ATen's CPU kernels of convolutions hold beside operands and results, from above.

ATen's own kernels (float64, single small images) spread each window of the operand into a column. oneDNN's reorder
operands and results into blocks of 16 channels, each padded to whole blocks; those that it needs no copy of are counted
too where which ones is not known: few channels, transposed, grouped or in 16 bits. So plain ones with steps of 1 are
exact to some percent, and odd ones are planned up to several times too high. Fitted to 1,500 random convolutions of 1
to 3 dims on one thread (torch 2.13.0, AVX-512).

Still planned too low: 1-d with steps and channels last (808 kB asked, 550 planned), transposed depthwise 3-d in another
order of memory (45.0 MB asked, 39.3 planned), depthwise 3-d of width 7 on 4 threads (384 kB asked, 322 planned).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero._torch_compat import convolution_kernel

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
BLOCK = 16 if AVX512 else 8  # channels in a block of oneDNN's layout
SCRATCH = 8_448  # bytes that oneDNN's kernels take whatever the sizes


class Convolution(NamedTuple):
    """The operands of a convolution, its result, and its numbers: one for each dim of space."""

    source: Tensor
    weight: Tensor
    result: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def kernel(self) -> str:
        return convolution_kernel(self.source, self.weight, *self[3:])

    @property
    def narrow(self) -> Tensor:
        """The side that is multiplied with the columns of the other's windows: the source of a transposed one."""
        return self.source if self.transposed else self.result

    @property
    def wide(self) -> Tensor:
        return self.result if self.transposed else self.source

    @property
    def window(self) -> int:
        return math.prod(self.weight.shape[2:])

    @property
    def strided(self) -> bool:
        return any(n > 1 for n in self.stride)

    @property
    def reorders_source(self) -> bool:
        """False where the source of few channels is read as it is."""
        return self.source.shape[1] >= BLOCK or self.transposed or self.groups > 1 or self.window == 1

    @property
    def dilated(self) -> bool:
        return any(n > 1 for n in self.dilation)

    @property
    def plain(self) -> bool:
        return not (self.transposed or self.strided or self.dilated)


def forward_bytes(c: Convolution) -> int:
    copies = _copy(c.source) + _copy(c.weight)
    copies += c.weight.nbytes if _channels_last(c) else 0
    if c.kernel.startswith("Slow"):
        # of groups each makes its result, which are joined at last
        return copies + _columns(c, forward=True) + (c.groups > 1) * (c.result.nbytes + c.source.nbytes // c.groups)
    by_image = c.dilated or (c.transposed and (c.strided or _channels_last(c)))
    apart = 0 if c.plain and (c.groups == 1 or c.source.dim() < 5) else _times_result(c) * c.result.nbytes
    of_image = _image(c) * by_image + _float_columns(c) * c.transposed
    if _channels_last(c):
        return copies + _blocked_weight(c) + _rows(c) + _sixteen_bits(c) + apart + of_image
    source, result = _blocked(c.source) if c.reorders_source else 0, _blocked(c.result)
    operands = source + _blocked_weight(c) + result - c.result.nbytes
    return copies + max(result, operands, apart) + _rows(c) + of_image


def backward_bytes(c: Convolution, incoming: Tensor, wants_source: bool, wants_weight: bool) -> int:
    """The gradients of source and weight come one after the other."""
    copies = _ordered(c, incoming) + _ordered(c, c.source) + _copy(c.weight)
    if c.kernel.startswith("Slow"):
        apart = c.source.nbytes * wants_source + c.weight.nbytes * wants_weight
        joined = c.weight.nbytes * _channels_last(c) + (c.groups > 1) * (
            apart + (c.source.nbytes + c.result.nbytes) // c.groups
        )
        return copies + _columns(c, forward=False) + joined
    source, result, weight = _blocked(c.source, c.groups), _blocked(c.result, c.groups), _blocked_weight(c)
    by_image = c.dilated or (c.transposed and (c.strided or _channels_last(c)))
    others = (weight + _image(c) // torch.get_num_threads() * c.strided) * (torch.get_num_threads() - 1)
    extra = (
        others
        + copies
        + _rows(c)
        + (8 if c.source.element_size() < 4 else (3 if AVX512 else 13) * (not c.plain)) * SCRATCH
        + _image(c) * by_image
        + _float_columns(c)
    )
    if _channels_last(c):
        again = c.source.nbytes * (2 * c.strided + c.dilated)
        return extra + 2 * (c.weight.nbytes + weight) + _sixteen_bits(c) + again
    of_source = max(source, result + weight + source - c.source.nbytes * (not c.strided))
    of_source = max(of_source, 2 * c.source.nbytes) if c.strided else of_source
    few = c.source.nbytes * (c.source.shape[1] > 3) * (1 + c.strided)
    of_weight = (source if c.reorders_source or not AVX512 else few) + result + weight
    if c.transposed or c.dilated or c.groups > 1 or c.window > 100:
        of_weight += 3 * weight + (source - few) * (not c.reorders_source) + SCRATCH
    if c.window > 100 and c.source.dim() == 5 and not AVX512:  # a product of the columns of one plane
        plane = c.wide.shape[1] // c.groups * c.window * c.narrow.shape[3:].numel() * c.source.element_size()
        of_weight = max(of_weight, torch.get_num_threads() * plane + 5 * c.weight.nbytes + SCRATCH)
    if c.source.element_size() < 4:  # sums in float32, and an image of each side for a thread
        of_weight += 4 * weight + SCRATCH + _image(c) * 5 // 4
    return extra + max(of_source * wants_source, of_weight * wants_weight)


def _times_result(c: Convolution) -> int:
    """How often a kernel may make its result apart."""
    return 2 if c.strided or c.groups > 1 else 1


def _image(c: Convolution) -> int:
    """Both sides of one image for each thread."""
    rows = max(c.source.shape[0], 1)
    return (_blocked(c.source) + _blocked(c.result)) // rows * torch.get_num_threads()


def _float_columns(c: Convolution) -> int:
    """The columns of one image in float32, of 16 bits, for each thread."""
    by_columns = (c.dilated and c.transposed) or (c.groups > 1 and (c.dilated or c.weight.shape[1] > 1))
    if not by_columns and (c.plain or c.source.element_size() == 4):
        return 0
    return (
        4
        * c.wide.shape[1]
        // (1 if _channels_last(c) else c.groups)
        * c.window
        * c.narrow.shape[2:].numel()
        * torch.get_num_threads()
    )


def _columns(c: Convolution, forward: bool) -> int:
    """Of all rows, or of one at a time."""
    kernel, rows = c.kernel, c.source.shape[0]
    if kernel == "Slow2d" and c.window == 1 and c.plain and not any(c.padding):
        return 0  # they are the source
    at_once = rows if kernel in ("Slow2d", "Slow3d") or (kernel == "SlowTranspose2d" and forward) else 1
    places = c.narrow.shape[2:].numel()
    channels = c.wide.shape[1] // (1 if kernel == "Slow3d" else c.groups)
    copied = c.source.nbytes if kernel == "SlowTranspose3d" else 0
    if copied and forward:  # or a one for each place of the result, which is multiplied with the bias
        copied = max(copied, c.result.shape[2:].numel() * c.source.element_size())
    return copied + at_once * channels * c.window * places * c.source.element_size()


def _copy(value: Tensor) -> int:
    """Of a value whose elements lie in another order: none of one whose channels are last."""
    return 0 if value.is_contiguous() or _has_channels_last(value) else value.nbytes


def _ordered(c: Convolution, value: Tensor) -> int:
    """Of a copy in the order that a backward takes: channels are last in all operands, or in none."""
    right = _has_channels_last(value) if _channels_last(c) else value.is_contiguous()
    return 0 if right else value.nbytes


def _has_channels_last(value: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.dim() in formats and value.is_contiguous(memory_format=formats[value.dim()])


def _channels_last(c: Convolution) -> bool:
    return any(not x.is_contiguous() and _has_channels_last(x) for x in (c.source, c.weight))


def _blocked(value: Tensor, groups: int = 1) -> int:
    """Bytes of a (batch, channels, ...) tensor in oneDNN's layout: channels padded to whole blocks, of each group."""
    channels = value.shape[1]
    padded = groups * _whole(channels // groups) if groups < channels else _whole(channels)
    return value.numel() // max(channels, 1) * padded * value.element_size()


def _whole(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _blocked_weight(c: Convolution) -> int:
    first, second = c.weight.shape[0] // c.groups, c.weight.shape[1]
    blocks = _whole(c.groups) if c.groups > 1 and first == second == 1 else c.groups * _whole(first) * _whole(second)
    return blocks * c.window * c.weight.element_size()


def _rows(c: Convolution) -> int:
    """Of windows of one element: the elements that a stride leaves, and sums in float32 of 16 bits, for a thread."""
    if c.window > 1:
        return 0
    places, size = c.narrow.shape[2:].numel(), c.source.element_size()
    strided = _whole(c.wide.shape[1]) * size if any(s > 1 for s in c.stride) else 0
    sums = 4 * max(_whole(c.result.shape[1]), _whole(c.source.shape[1])) if size < 4 else 0
    return places * (strided + sums) * torch.get_num_threads() + 256


def _sixteen_bits(c: Convolution) -> int:
    """Both sides in float32."""
    return 2 * (c.source.nbytes + c.result.nbytes) if c.source.element_size() < 4 else 0
