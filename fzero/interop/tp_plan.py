"""tp_plan: the rules of `Spec(shard=...)` for a Hugging Face model, from its own plan or the names of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fzero.errors import SpecError
from fzero.shard.partition import P, groups

AXIS = "tp"  # the axis that the rules name

COLUMN, ROW, EMBEDDING = "column", "row", "embedding"
QKV = "column of 3"
STYLES = {  # of transformers 5: names of `_tp_plan`; those that are not here leave their leaves whole
    "colwise": COLUMN, "colwise_rep": COLUMN, "colwise_gather_output": COLUMN, "rowwise": ROW, "rowwise_rep": ROW,
    "embedding_rowwise": EMBEDDING, "packed_colwise": "column of 2", "packed_rowwise": ROW,
}  # fmt: skip
_COLUMNS = (
    "q_proj k_proj v_proj query key value q k v q_lin k_lin v_lin fc1 c_fc pwconv1 up_proj gate_proj wi wi_0 wi_1 lin1 "
    "w1 w3 fc_in query_key_value dense_h_to_4h intermediate.dense"
)
_ROWS = (
    "o_proj out_proj c_proj o wo Wo fc2 pwconv2 down_proj out_lin lin2 w2 fc_out dense_4h_to_h attention.dense "
    "output.dense attention.output.dense"
)
_EMBEDDINGS = "embed_tokens wte word_embeddings shared tok_embeddings token_embedding embed_in lm_head embed_out"
NAMES = {  # of modules in models without a plan: the last components of their names
    **dict.fromkeys(_COLUMNS.split(), COLUMN),
    **dict.fromkeys(_ROWS.split(), ROW),
    **dict.fromkeys(_EMBEDDINGS.split(), EMBEDDING),
    "embeddings": EMBEDDING,
    "c_attn": QKV,
    "Wqkv": QKV,
    "Wi": "column of 2",
}


def tp_plan(model: torch.nn.Module) -> dict[str, P]:
    """`Spec(shard=...)` for the parameters that `from_module(model)` gives.

    model: of transformers, or one with such names. The rules come from the model's own tensor-parallel plan
    (`model._tp_plan`), else from the names of its modules: projections to heads and hidden units are cut by rows of
    their weight, those back by columns, embeddings by words. What a rule does not name is held by every rank.
    `fzero.lower` refuses a dim that the ranks do not divide, such as GPT-2's 50,257 words: pad it, or drop its rule. No
    rule changes what is computed, only what ranks must exchange.

    Raises SpecError where neither says anything.

    >>> class Layer(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc1, self.fc2 = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
    >>> tp_plan(Layer())
    {'fc1.weight': P('tp', None), 'fc1.bias': P('tp'), 'fc2.weight': P(None, 'tp')}
    """
    plan = {name: STYLES[style] for name, style in _own_plan(model).items() if style in STYLES}
    of_layers = any("*" in key for key in plan)  # else it speaks of the head alone
    rules: dict[str, P] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = _planned(plan, name, module)
        if style is None and not of_layers and kind in ("weight", "bias"):
            style = _fused(_by_name(module), model.get_submodule(module))
        if style is None:
            continue
        owner = model.get_submodule(module)
        dims = _dims(style, parameter, kind, transposed=type(owner).__name__ == "Conv1D")
        if dims is not None:
            rules[_general(name)] = dims
    if not rules:
        raise SpecError(
            f"tp_plan: {type(model).__name__} has no plan of its own, and no module with a name that is known "
            f"({', '.join(list(NAMES)[:8])}, ...). Write the rules: shard={{'<path>': fzero.P('tp', None), ...}}"
        )
    return rules


def _fused(style: str | None, owner: torch.nn.Module) -> str | None:
    """The style of a projection that may make q, k and v at once, with as many parts as its weight has: cross attention
    makes k and v alone."""
    weight = getattr(owner, "weight", None)
    if style != QKV or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return style
    small, large = sorted(weight.shape)
    return f"{COLUMN} of {large // small}" if large % small == 0 and large // small > 1 else style


def _own_plan(model: Any) -> dict[str, str]:
    plan = getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, dict) else {}


def _planned(plan: dict[str, str], name: str, module: str) -> str | None:
    """The style of a parameter, by its own name or that of its module, layers' numbers as `*`."""
    return next((plan[key] for key in (_general(name), _general(module)) if key in plan), None)


def _by_name(module: str) -> str | None:
    ends = list(_ends(module))
    return next((NAMES[end] for end in ends if end in NAMES), None)


def _ends(module: str) -> Iterator[str]:
    """The last components of a name, three, two and one of them."""
    parts = module.split(".")
    for count in (3, 2, 1):
        yield ".".join(parts[-count:])


def _general(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _dims(style: str, parameter: torch.Tensor, kind: str, transposed: bool) -> P | None:
    """The dims of a parameter in a style. transposed: the weight is (in, out), as in GPT-2. A 3-D one holds experts."""
    style, _, count = style.partition(" of ")
    axis = groups(AXIS, int(count)) if count else AXIS
    first = [None] * (parameter.ndim - 2)
    if kind == "bias":
        return P(axis) if style == COLUMN else None
    if parameter.ndim < 2 or (parameter.ndim > 3 and kind == "weight"):
        return None
    by_rows = (style != ROW) != (transposed and style != EMBEDDING)
    return P(*first, axis, None) if by_rows else P(*first, None, axis)
