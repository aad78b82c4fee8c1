"""hf_attention: `fzero.sparse` as an attention implementation of transformers.

A model asks twice. First for a mask, with a function of indices that says who sees whom; `_mask` reads from it the
bounds, chunks, documents and padding, and builds nothing of tokens x tokens. Then for the attention of each layer, with
that record in the mask's place. What a record cannot say is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import sparse
from fzero.errors import SpecError
from fzero.interop._hf_compat import MaskParts, all_true, mask_parts

NAME = "fzero_sparse"
_ELSE = 'Take attn_implementation="sdpa" for this model'


class SeenKeys(NamedTuple):
    """What stands in the place of a mask: bounds in tokens (None: no bound), and ids of documents (batch, tokens)."""

    left: int | None
    right: int | None
    documents: Tensor | None


def register_attention(name: str = NAME) -> str:
    """Registers block-sparse attention with transformers, and returns its name: a model's `attn_implementation`.

    Models train with their own weights and code; layers with a sliding window or in chunks take time and memory of
    tokens x window, other layers are computed over all pairs that they see. Lengths are multiples of 16. Padding and
    packed documents (by `position_ids`) are taken from what the model is given; padded tokens have the result 0.

    Softcaps (Gemma 2) and sinks (gpt-oss) are kept.

    Refused by name: dropout of probabilities, biases of positions, masks that the user made, and
    caches of keys (generation). transformers 5.

        model = AutoModelForCausalLM.from_config(config, attn_implementation=fzero.interop.register_attention())

    Raises ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> SeenKeys:
    """The record of a mask function. attention_mask: bool (batch, tokens), False at padding."""
    if q_length != kv_length or q_offset or kv_offset:
        raise SpecError(f"{NAME}: {q_length} queries and {kv_length} keys of a cache; it trains only. {_ELSE}")
    parts = mask_parts(mask_function)
    if parts is None:
        raise SpecError(f"{NAME}: the model combines masks in a way that is not known: {mask_function}. {_ELSE}")
    ids = None if parts.documents is None else parts.documents.to(torch.int32)
    if parts.chunk is not None:
        ids = _by_chunk(parts, parts.chunk, ids, (batch_size, q_length))
    if attention_mask is not None and not all_true(attention_mask):
        ids = torch.zeros_like(attention_mask, dtype=torch.int32) if ids is None else ids
        ids = ids.masked_fill(~attention_mask, -1)
    return SeenKeys(parts.left, parts.right, ids)


def _by_chunk(parts: MaskParts, chunk: int, ids: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Ids of chunks, which begin behind the padding on the left, within documents."""
    start = torch.zeros(shape[0]) if parts.left_padding is None else parts.left_padding
    at = torch.arange(shape[1], device=start.device) if parts.positions is None else parts.positions
    chunks = torch.div(at - start.to(at)[:, None], chunk, rounding_mode="floor").clamp(min=0).to(torch.int32)
    return chunks if ids is None else ids * shape[1] + chunks


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """A layer's attention: (batch, tokens, heads, dim)."""
    if rest.get("position_bias") is not None:
        raise SpecError(f"{NAME}: {type(module).__name__} has a position_bias; needed none. {_ELSE}")
    if query.shape[2] != key.shape[2]:
        raise SpecError(f"{NAME}: {query.shape[2]} queries and {key.shape[2]} keys; it trains only. {_ELSE}")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        side = None if sliding_window is None else sliding_window - 1
        attention_mask = SeenKeys(side, 0 if causal else side, None)
    if not isinstance(attention_mask, SeenKeys):
        raise SpecError(
            f"{NAME}: a mask of shape {tuple(attention_mask.shape)} was given; needed (batch, tokens). {_ELSE}"
        )
    tokens = query.shape[2]
    layout = sparse.BlockLayout(tokens, sparse.block_for(tokens), left=attention_mask.left, right=attention_mask.right)
    out = sparse.attention(
        query, key, value, layout, scale=scaling, documents=attention_mask.documents, softcap=rest.get("softcap"),
        sinks=rest.get("s_aux"), dropout_p=dropout,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
