"""block_layouts: which blocks of keys each block of queries may look at, by DeepSpeed's parameter names.

A layout is bool (heads, rows, columns), counted in blocks of `block` tokens.

>>> longformer(1, 64, num_sliding_window_blocks=3)[0].int()
tensor([[1, 1, 1, 1],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 1, 1]], dtype=torch.int32)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.errors import SpecError

_DIRECTIONS = ("unidirectional", "bidirectional")


def dense(num_heads: int, seq_len: int, *, block: int = 16) -> Tensor:
    """Every block looks at every block."""
    n = _blocks("dense", seq_len, block)
    return torch.ones(num_heads, n, n, dtype=torch.bool)


def from_mask(mask: Tensor, *, block: int = 16) -> Tensor:
    """The blocks of a bool mask (heads, tokens, tokens) that hold a True."""
    if mask.dtype != torch.bool or mask.ndim != 3 or mask.shape[1] != mask.shape[2]:
        raise SpecError(
            f"from_mask: given {mask.dtype} of shape {tuple(mask.shape)}; needed bool (heads, tokens, tokens)"
        )
    n = _blocks("from_mask", mask.shape[1], block)
    return mask.view(len(mask), n, block, n, block).any(4).any(2)


def longformer(
    num_heads: int,
    seq_len: int,
    *,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = "bidirectional",
) -> Tensor:
    """A window around the diagonal, and blocks that look at all and that all look at."""
    n = _blocks("longformer", seq_len, block)
    _direction("longformer", attention)
    if num_sliding_window_blocks > n:
        raise SpecError(
            f"longformer: num_sliding_window_blocks={num_sliding_window_blocks} of {n} blocks; needed at most {n}"
        )
    ends = [i + 1 for i in global_block_indices] if global_block_end_indices is None else global_block_end_indices
    if len(ends) != len(global_block_indices):
        raise SpecError(
            f"longformer: {len(global_block_indices)} global_block_indices, {len(ends)} ends; needed one end each"
        )
    at = torch.arange(n)
    out = (at[:, None] - at).abs() <= num_sliding_window_blocks // 2
    for start, end in zip(global_block_indices, ends, strict=True):
        if not 0 <= start < end:
            raise SpecError(f"longformer: global blocks {start} to {end}; needed 0 <= start < end")
        out[start:end] = True
        out[:, start:end] = True
    return _of_heads(out.tril() if attention == "unidirectional" else out, num_heads)


def fixed(
    num_heads: int,
    seq_len: int,
    *,
    block: int = 16,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
    different_layout_per_head: bool = False,
) -> Tensor:
    """Windows side by side, whose last blocks (or, head by head, those before) all others look at too."""
    n = _blocks("fixed", seq_len, block)
    _direction("fixed", attention)
    if num_global_blocks < 1 or num_local_blocks % num_global_blocks:
        raise SpecError(
            f"fixed: num_local_blocks={num_local_blocks} is no multiple of num_global_blocks={num_global_blocks}"
        )
    if horizontal_global_attention and attention == "unidirectional":
        raise SpecError("fixed: horizontal_global_attention needs attention='bidirectional'")
    most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
    if not 1 <= num_different_global_patterns <= most:
        raise SpecError(f"fixed: num_different_global_patterns={num_different_global_patterns}; needed 1 to {most}")
    at, causal = torch.arange(n), attention == "unidirectional"
    local = at[:, None] // num_local_blocks == at // num_local_blocks
    local = local.tril() if causal else local
    heads = []
    for pattern in range(num_different_global_patterns):
        first, out = num_local_blocks - (1 + pattern) * num_global_blocks, local.clone()
        for window in range(0, n, num_local_blocks):
            start = window + first
            if window + num_local_blocks > n:  # a short last window
                start = max(min(start, n - num_global_blocks), 0)
            out[start if causal else 0 :, start : start + num_global_blocks] = True
            if horizontal_global_attention:
                out[start : start + num_global_blocks] = True
        heads.append(out)
    return torch.stack([heads[h % num_different_global_patterns] for h in range(num_heads)])


def _of_heads(one: Tensor, num_heads: int) -> Tensor:
    return one.expand(num_heads, -1, -1).clone()


def _blocks(name: str, seq_len: int, block: int) -> int:
    if block < 1 or seq_len < 1:
        raise SpecError(f"{name}: seq_len={seq_len}, block={block}; needed both at least 1")
    if seq_len % block:
        raise SpecError(
            f"{name}: {seq_len} tokens are no multiple of block={block}; pad by {-seq_len % block} to "
            f"{seq_len + -seq_len % block}"
        )
    return seq_len // block


def _direction(name: str, attention: str) -> None:
    if attention not in _DIRECTIONS:
        raise SpecError(f"{name}: attention={attention!r}; needed one of {', '.join(_DIRECTIONS)}")
