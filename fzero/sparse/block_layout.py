"""block_layout: the record of which keys each query looks at, in blocks of tokens with exact bounds.

>>> print(BlockLayout(64, 16, left=20, right=0))
64 tokens in blocks of 16, keys from 20 back to 0 ahead: 9 of 16 blocks
# . . .
# # . .
# # # .
. # # #
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.errors import SpecError
from fzero.sparse.block_rows import Rules

_PICTURE = 32  # blocks that a picture has at most in a row


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """What a query of `seq_len` tokens looks at. Built by the functions of `fzero.sparse`; it is never changed.

    seq_len, block: tokens in all, and of a block. columns: int32 (1 or batch, 1 or heads, rows, width), the key blocks
    of each row in ascending order, then -1; None: all. left, right: a query at token i sees keys i - left to i + right;
    None: no bound. right=0 is causal.
    """

    seq_len: int
    block: int
    columns: Tensor | None = None
    left: int | None = None
    right: int | None = None

    @staticmethod
    def of_blocks(blocks: Tensor, block: int, *, left: int | None = None, right: int | None = None) -> BlockLayout:
        """The layout of bool blocks (heads, rows, columns). Heads that are all alike are kept once."""
        own = blocks[:1] if bool((blocks == blocks[:1]).all()) else blocks
        counts = own.sum(-1)
        width = max(1, int(counts.max()))
        order = torch.argsort((~own).to(torch.int8), dim=-1, stable=True)[..., :width].to(torch.int32)
        columns = order.masked_fill(torch.arange(width) >= counts[..., None], -1)
        return BlockLayout(blocks.shape[-1] * block, block, columns[None], left, right)

    @property
    def rules(self) -> Rules:
        """Its bounds, with -1 for none."""
        return Rules(self.block, *(-1 if x is None else x for x in (self.left, self.right)))

    def table(self, num_heads: int = 1) -> Tensor:
        """bool (num_heads, rows, columns): the blocks of `columns`, whatever the bounds."""
        count = self.seq_len // self.block
        own = torch.zeros(1, count, count + 1, dtype=torch.bool)
        if self.columns is None:
            own[:] = True
        else:
            _one_batch(self.columns)
            index = self.columns[0].long()
            own = own.expand(len(index), -1, -1).clone().scatter_(2, index.where(index >= 0, count), True)
        if num_heads % len(own):
            raise SpecError(f"num_heads={num_heads}: the layout has {len(own)} heads; needed a multiple")
        return own[..., :count].repeat_interleave(num_heads // len(own), 0)

    def blocks(self, num_heads: int = 1) -> Tensor:
        """bool (num_heads, rows, columns): the blocks that hold a pair of a query and a key that it looks at."""
        count, rules = self.seq_len // self.block, self.rules
        reached = torch.zeros(count, count, dtype=torch.bool)
        for row in range(count):
            columns = rules.columns(row, count)
            reached[row, columns.start : columns.stop] = True
        return self.table(num_heads) & reached

    def tokens(self, num_heads: int = 1) -> Tensor:
        """bool (num_heads, tokens, tokens), the mask that `scaled_dot_product_attention` takes: for short texts."""
        wide = self.blocks(num_heads).repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        ahead = torch.arange(self.seq_len) - torch.arange(self.seq_len)[:, None]
        left, right = (self.seq_len if x is None else x for x in (self.left, self.right))
        return wide & (ahead >= -left) & (ahead <= right)

    def __str__(self) -> str:
        """Counts, and a picture of the first head's blocks."""
        blocks = self.blocks(1 if self.columns is None else self.columns.shape[1])
        left, right = ("any" if x is None else x for x in (self.left, self.right))
        reach = "" if left == right == "any" else f", keys from {left} back to {right} ahead"
        head = f"{self.seq_len} tokens in blocks of {self.block}{reach}: {int(blocks.sum())} of {blocks.numel()} blocks"
        if blocks.shape[-1] > _PICTURE:
            return head
        return "\n".join([head, *(" ".join(".#"[x] for x in row) for row in blocks[0].int().tolist())])


def _one_batch(columns: Tensor) -> None:
    if columns.shape[0] != 1:
        raise SpecError(f"a layout of {columns.shape[0]} batches has no blocks of its own; needed one for all batches")
