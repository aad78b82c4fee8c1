"""sparse: attention over some pairs of tokens only, in time and memory linear in their number.

A layout says which: `sliding_window`, DeepSpeed's `fixed`, `variable`, `bigbird`, `longformer` and `dense`,
`from_mask`, or `from_columns`, of blocks that the step has chosen. `attention(q, k, v, layout)` computes with it.
"""

from fzero.sparse.attend import attention
from fzero.sparse.block_layout import BlockLayout
from fzero.sparse.block_layouts import (
    bigbird,
    block_for,
    dense,
    fixed,
    from_columns,
    from_mask,
    longformer,
    sliding_window,
    variable,
)
from fzero.sparse.deepspeed_block import from_deepspeed

__all__ = [
    "BlockLayout",
    "attention",
    "bigbird",
    "block_for",
    "dense",
    "fixed",
    "from_columns",
    "from_deepspeed",
    "from_mask",
    "longformer",
    "sliding_window",
    "variable",
]
