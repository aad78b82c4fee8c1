"""block_layouts: which blocks of keys each block of queries looks at, by DeepSpeed's parameter names.

The tables are DeepSpeed's bit for bit (0.14.4). attention="unidirectional" is causal, token by token. DeepSpeed leaves
the block of the diagonal to a mask of the user's, and lets the future through in blocks above it: random ones of
`variable`, and global ones several blocks wide of `variable` and `fixed`. A unidirectional `bigbird` takes several
random blocks, where DeepSpeed always raises.

>>> print(longformer(1, 64, num_sliding_window_blocks=3))
64 tokens in blocks of 16: 14 of 16 blocks
# # # #
# # # .
# # # #
# . # #
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero import random
from fzero.errors import SpecError
from fzero.sparse.block_layout import BlockLayout

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DIRECTIONS = ("unidirectional", "bidirectional")


def sliding_window(seq_len: int, *, window: int, causal: bool = False, block: int | None = None) -> BlockLayout:
    """Each query looks at the tokens near it, exactly, whatever the block.

    seq_len: tokens. causal: whether a query sees no later tokens. window: if causal, a query sees itself and the window
    - 1 tokens before it; else the window // 2 on each side. block: of work; None is the largest of 64, 32 and 16 that
    divides. Raises SpecError for a length that it does not divide.

    >>> print(sliding_window(64, window=20, causal=True, block=16))
    64 tokens in blocks of 16, keys from 19 back to 0 ahead: 9 of 16 blocks
    # . . .
    # # . .
    # # # .
    . # # #
    """
    block = block_for(seq_len) if block is None else block
    _blocks("sliding_window", seq_len, block, window=window)
    side = min(window - 1 if causal else window // 2, seq_len)
    return BlockLayout(seq_len, block, left=side, right=0 if causal else side)


def block_for(seq_len: int) -> int:
    """The largest of the blocks 64, 32 and 16 that divides a length: on the CPU the fastest from 512 tokens on.

    seq_len: tokens.

    >>> block_for(512), block_for(4096 + 32)
    (64, 32)
    """
    fits = [size for size in (64, 32, 16) if type(seq_len) is int and seq_len % size == 0]
    if not fits:
        _blocks("sliding_window", seq_len, 16)
    return fits[0]


def dense(num_heads: int, seq_len: int, *, block: int = 16) -> BlockLayout:
    """Every block looks at every block.

    num_heads: of the table; 1 serves all heads. seq_len: tokens, a multiple of the block. block: tokens of a block.
    """
    _blocks("dense", seq_len, block)
    return BlockLayout(seq_len, block)


def from_mask(mask: Tensor, *, block: int = 16) -> BlockLayout:
    """The blocks of a bool mask (heads, tokens, tokens) that hold a True, each with all of its tokens.

    mask: bool. block: tokens of a block.
    """
    square = isinstance(mask, Tensor) and mask.ndim == 3 and mask.shape[1] == mask.shape[2] and len(mask)
    if not square or mask.dtype is not torch.bool:
        raise SpecError(f"from_mask: given {_given(mask)}; needed bool (heads, tokens, tokens)")
    n = _blocks("from_mask", mask.shape[1], block)
    return BlockLayout.of_blocks(mask.view(len(mask), n, block, n, block).any(4).any(2), block)


def from_columns(columns: Tensor, *, block: int = 16, causal: bool = False) -> BlockLayout:
    """The blocks that a computation has chosen, as a learned attention does; it may run within a step.

    block: tokens of a block. causal: whether a query sees only itself and what is before it.
    columns: int (1 or batch, 1 or heads, rows, width), the key blocks of each row in any order, each once; a
    negative number is none.
    """
    if not isinstance(columns, Tensor) or columns.ndim != 4 or columns.dtype not in INTEGERS:
        raise SpecError(f"from_columns: given {_given(columns)}; needed int (batch, heads, rows, width)")
    rows = columns.shape[2]  # a block that there is not stays one, which the op refuses
    behind = columns.to(torch.int64).clamp(max=rows).where(columns >= 0, rows + 1)
    ordered = torch.sort(behind, dim=-1).values
    own = ordered.masked_fill(ordered > rows, -1).to(torch.int32)
    return BlockLayout(rows * block, block, own, right=0 if causal else None)


def longformer(
    num_heads: int,
    seq_len: int,
    *,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = "bidirectional",
) -> BlockLayout:
    """A window around the diagonal, and blocks that look at all and that all look at.

    num_heads: of the table; 1 serves all heads. seq_len: tokens, a multiple of the block. block: tokens of a block.
    num_sliding_window_blocks: of a row. global_block_indices, global_block_end_indices: the global blocks, each alone
    or up to its end. attention: "bidirectional" or "unidirectional".
    """
    n = _blocks("longformer", seq_len, block)
    _direction("longformer", attention)
    out = _window("longformer", n, num_sliding_window_blocks)
    for start, end in _global_blocks("longformer", global_block_indices, global_block_end_indices):
        out[start:end] = True
        out[:, start:end] = True
    return _made(_below(out[None], attention), block, attention)


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
) -> BlockLayout:
    """Windows side by side, whose last blocks (or, head by head, those before) all others look at too.

    num_heads: of the table; 1 serves all heads. seq_len: tokens, a multiple of the block. block: tokens of a block.
    num_local_blocks: of a window. num_global_blocks: of a window that all look at. attention: "bidirectional" or
    "unidirectional". horizontal_global_attention: whether global blocks look at all. num_different_global_patterns:
    how many choices of these blocks the heads take in turn. different_layout_per_head: whether heads differ at all.
    """
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
    return _made(torch.stack([heads[h % num_different_global_patterns] for h in range(num_heads)]), block, attention)


def variable(
    num_heads: int,
    seq_len: int,
    *,
    block: int = 16,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    different_layout_per_head: bool = False,
    key: Tensor | None = None,
    random_blocks: Tensor | None = None,
) -> BlockLayout:
    """Windows of several sizes side by side (the last one repeats), blocks that all look at, and random blocks.

    num_heads: of the table; 1 serves all heads. seq_len: tokens, a multiple of the block. block: tokens of a block.
    num_random_blocks: of a row. local_window_blocks: the sizes of the windows. global_block_indices,
    global_block_end_indices: the blocks that all look at, each alone or up to its end. attention: "bidirectional" or
    "unidirectional". horizontal_global_attention: whether global blocks look at all. different_layout_per_head: whether
    each head has its own random blocks.
    key: of `fzero.random`, for the random blocks. random_blocks: these, given: int (1 or heads, rows, number of them).
    """
    n = _blocks("variable", seq_len, block)
    _direction("variable", attention)
    if horizontal_global_attention and attention == "unidirectional":
        raise SpecError("variable: horizontal_global_attention needs attention='bidirectional'")
    if not local_window_blocks or min(local_window_blocks) < 1:
        raise SpecError(f"variable: local_window_blocks={local_window_blocks!r}; needed sizes of at least 1")
    own, at = torch.zeros(n, n, dtype=torch.bool), 0
    sizes = iter(local_window_blocks)
    while at < n:
        size = next(sizes, local_window_blocks[-1])
        own[at : at + size, at : at + size] = True
        at += size
    own = _below(own, attention)
    for start, end in _global_blocks("variable", global_block_indices, global_block_end_indices):
        own[start if attention == "unidirectional" else 0 :, start:end] = True
        if horizontal_global_attention:
            own[start:end] = True
    heads = num_heads if different_layout_per_head else 1
    drawn = _random("variable", heads, n, num_random_blocks, False, key, random_blocks)
    return _made(drawn | own, block, attention)


def bigbird(
    num_heads: int,
    seq_len: int,
    *,
    block: int = 16,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: str = "bidirectional",
    different_layout_per_head: bool = False,
    key: Tensor | None = None,
    random_blocks: Tensor | None = None,
) -> BlockLayout:
    """A window, the first blocks (they look at all, and all look at them), and random blocks.

    num_heads: of the table; 1 serves all heads. seq_len: tokens, a multiple of the block. block: tokens of a block.
    num_random_blocks, num_sliding_window_blocks, num_global_blocks: of a row. attention: "bidirectional" or
    "unidirectional". different_layout_per_head: whether each head has its own random blocks.
    key: of `fzero.random`, for the random blocks. random_blocks: these, given: int (1 or heads, rows, number of them).

    >>> layout = bigbird(4, 1024, key=random.key(0))
    >>> torch.equal(layout.columns, bigbird(4, 1024, key=random.key(0)).columns)
    True
    """
    n = _blocks("bigbird", seq_len, block)
    _direction("bigbird", attention)
    own = _window("bigbird", n, num_sliding_window_blocks)
    if not 0 <= num_global_blocks <= n:
        raise SpecError(f"bigbird: num_global_blocks={num_global_blocks} of {n} blocks; needed at most {n}")
    own[:num_global_blocks] = True
    own[:, :num_global_blocks] = True
    heads = num_heads if different_layout_per_head else 1
    drawn = _random("bigbird", heads, n, num_random_blocks, attention == "unidirectional", key, random_blocks)
    return _made(_below(drawn | own, attention), block, attention)


def _below(blocks: Tensor, attention: str) -> Tensor:
    return blocks.tril() if attention == "unidirectional" else blocks


def _random(
    name: str, heads: int, n: int, count: int, causal: bool, key: Tensor | None, given: Tensor | None
) -> Tensor:
    """bool (heads, n, n) with `count` random blocks in each row; causal: of those up to the diagonal."""
    out = torch.zeros(heads, n, n, dtype=torch.bool)
    if not 0 <= count <= n:
        raise SpecError(f"{name}: num_random_blocks={count} of {n} blocks; needed at most {n}")
    if count and given is None:
        if key is None:
            raise SpecError(f"{name}: num_random_blocks={count}; needed key=fzero.random.key(0), or random_blocks=")
        numbers = random.uniform(key, (heads, n, n))
        ahead = torch.ones(n, n, dtype=torch.bool).triu(1) & causal
        given = torch.argsort(numbers.masked_fill(ahead, 2.0), dim=-1, stable=True)[..., :count]
    if given is None:
        return out
    if given.shape not in ((heads, n, count), (1, n, count)) or int(given.min()) < 0 or int(given.max()) >= n:
        raise SpecError(
            f"{name}: random_blocks has shape {tuple(given.shape)}; needed ({heads}, {n}, {count}), from 0 to {n - 1}"
        )
    return out.scatter_(2, given.long().expand(heads, -1, -1), True)


def _window(name: str, n: int, wide: int) -> Tensor:
    """bool (n, n): `wide` blocks around the diagonal."""
    if wide > n:
        raise SpecError(f"{name}: num_sliding_window_blocks={wide} of {n} blocks; needed at most {n}")
    at = torch.arange(n)
    return (at[:, None] - at).abs() <= wide // 2


def _global_blocks(name: str, starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """The runs of global blocks, each as (first, past the last)."""
    stops = [i + 1 for i in starts] if ends is None else ends
    if len(stops) != len(starts):
        raise SpecError(f"{name}: {len(starts)} global_block_indices, {len(stops)} ends; needed one end each")
    for start, stop in zip(starts, stops, strict=True):
        if not 0 <= start < stop:
            raise SpecError(f"{name}: global blocks {start} to {stop}; needed 0 <= start < end")
    return list(zip(starts, stops, strict=True))


def _made(blocks: Tensor, block: int, attention: str) -> BlockLayout:
    """The layout of bool blocks (1 or heads, rows, columns)."""
    return BlockLayout.of_blocks(blocks, block, right=0 if attention == "unidirectional" else None)


def _blocks(name: str, seq_len: int, block: int, **others: int) -> int:
    for word, number in {"seq_len": seq_len, "block": block, **others}.items():
        if type(number) is not int:
            raise SpecError(f"{name}: {word}={number!r}; needed an int")
        if word in others and number < 1:
            raise SpecError(f"{name}: {word}={number}; needed at least 1 token")
    if block < 1 or seq_len < 1:
        raise SpecError(f"{name}: seq_len={seq_len}, block={block}; needed both at least 1")
    if seq_len % block:
        raise SpecError(
            f"{name}: {seq_len} tokens are no multiple of block={block}; pad by {-seq_len % block} to "
            f"{seq_len + -seq_len % block}"
        )
    return seq_len // block


def _given(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _direction(name: str, attention: str) -> None:
    if attention not in _DIRECTIONS:
        raise SpecError(f"{name}: attention={attention!r}; needed one of {', '.join(_DIRECTIONS)}")
