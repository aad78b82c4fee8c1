"""deepspeed_block: the block `sparse_attention` of a DeepSpeed configuration as a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fzero.errors import SpecError
from fzero.sparse import block_layouts
from fzero.sparse.block_layout import BlockLayout
from fzero.tree import suggest

_GLOBAL = ("global_block_indices", "global_block_end_indices")
# a mode of DeepSpeed (0.14.4): the layout, and the keys that it reads beside `mode` and `block`
_MODES: dict[str, tuple[Callable[..., BlockLayout], tuple[str, ...]]] = {
    "dense": (block_layouts.dense, ()),
    "fixed": (block_layouts.fixed, (
        "num_local_blocks", "num_global_blocks", "attention", "horizontal_global_attention",
        "num_different_global_patterns", "different_layout_per_head",
    )),
    "variable": (block_layouts.variable, (
        "num_random_blocks", "local_window_blocks", *_GLOBAL, "attention", "horizontal_global_attention",
        "different_layout_per_head",
    )),
    "bigbird": (block_layouts.bigbird, (
        "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "different_layout_per_head",
    )),
    "bslongformer": (block_layouts.longformer, ("num_sliding_window_blocks", *_GLOBAL, "different_layout_per_head")),
}  # fmt: skip


def from_deepspeed(
    config: Mapping[str, Any], num_heads: int, seq_len: int, *, key: Tensor | None = None
) -> BlockLayout:
    """The layout that the block `sparse_attention` of a DeepSpeed configuration means, with DeepSpeed's defaults.

    config: the block, as a dict. num_heads, seq_len: of the table, and tokens. key: of `fzero.random`, for random
    blocks, which DeepSpeed draws from Python's generator. Raises SpecError for a mode or key that DeepSpeed does not
    read, and for what its layouts refuse.

    >>> print(from_deepspeed({"mode": "fixed", "block": 16, "num_local_blocks": 2}, num_heads=1, seq_len=64))
    64 tokens in blocks of 16: 12 of 16 blocks
    # # . #
    # # . #
    . # # #
    . # # #
    """
    mode = config.get("mode", "fixed")
    if mode not in _MODES:
        raise SpecError(
            f"sparse_attention.mode={mode!r}: needed one of {list(_MODES)}.{suggest(str(mode), list(_MODES))}"
        )
    layout, known = _MODES[mode]
    for name in config:
        if name not in ("mode", "block", *known):
            hint = suggest(name, ["block", *known])
            raise SpecError(f"sparse_attention.{name}: mode {mode!r} reads {', '.join(('block', *known))}.{hint}")
    given = {name: config[name] for name in known if name in config}
    if mode == "bslongformer":
        given.pop("different_layout_per_head", None)  # its heads are all alike
    if mode == "bigbird":
        given.setdefault("num_random_blocks", 0)
    if given.get("num_random_blocks"):
        given["key"] = key
    return layout(num_heads, seq_len, block=config.get("block", 16), **given)
