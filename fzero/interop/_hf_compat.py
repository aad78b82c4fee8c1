"""The only file of interop that uses private names, of torch and of transformers; each with the version it was seen in.

transformers asks `is_tracing(tensor)`, which knows fake tensors (5.0.0, 5.23.0), before it looks at the values of a
mask or of positions. Of a tensor whose values a capture knows, such as the positions that a model makes itself, the
answer is here no: a captured model then leaves out the same masks as an uncaptured one. A mask or positions from the
batch are known only when the step runs, so their mask is built. transformers before 5 does not ask, and its models
capture only without an `attention_mask`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from fzero._torch_compat import DataDependentOutputException, DynamicOutputShapeException, forward_hooks, is_fake
from fzero.capture.context import active
from fzero.errors import CaptureError


def install() -> None:
    """Lets the transformers that is imported capture as well as it runs: grouped products, and masks left out."""
    _let_grouped_products_trace()
    for name in ("transformers.masking_utils", "transformers.modeling_attn_mask_utils"):
        _let_known_values_be_asked(sys.modules.get(name))


class Recomputed(NamedTuple):
    """What a Trainer's arguments say of activations that are computed again: whether, the field that says how, and what
    it says. Before transformers 5.23 the fields were `gradient_checkpointing` and its `_kwargs`."""

    wanted: bool
    field: str
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: Any) -> Recomputed:
        name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
        return cls(bool(getattr(args, name)), f"{name}_kwargs", getattr(args, f"{name}_kwargs") or {})


def keep_activations(model: Any) -> None:
    """Turns off what a transformers model computes again by itself (`activation_checkpointing_disable`: 5.23.0)."""
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def _let_known_values_be_asked(module: Any) -> None:
    """`is_tracing(tensor)` of this module says False of a tensor whose values the capture knows (5.0.0, 5.23.0)."""
    is_tracing = getattr(module, "is_tracing", None)
    if is_tracing is None or hasattr(is_tracing, "fzero"):
        return

    def unknown(tensor: Any = None) -> bool:
        if not torch.compiler.is_compiling() and (tracing := active()) is not None and tracing.known.holds(tensor):
            return False
        return bool(is_tracing(tensor))

    unknown.fzero = True  # type: ignore[attr-defined]
    module.is_tracing = unknown


def _let_grouped_products_trace() -> None:
    """transformers' grouped matrix product in fp32 (`_can_use_grouped_mm`: transformers 5.23.0).

    torch's shape rule knows bfloat16 only; transformers has an op of its own for the rest, which it takes under
    `torch.compile`, and now for fake tensors. Real tensors take the road they took before.
    """
    moe: Any = sys.modules.get("transformers.integrations.moe")
    can_use = getattr(moe, "_can_use_grouped_mm", None)
    if can_use is None or hasattr(can_use, "fzero"):
        return

    def fakes_too(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return not (is_fake(weight) and weight.dtype != torch.bfloat16) and can_use(input, weight, offs)

    fakes_too.fzero = True  # type: ignore[attr-defined]
    moe._can_use_grouped_mm = fakes_too


@contextmanager
def capturing(module: nn.Module) -> Iterator[None]:
    """For the traced call of a module: for a mixture of experts that loops over them, its error gives the way to
    capture it."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException):
        looping = next((part for part in module.modules() if _loops_over_experts(part)), None)
        if looping is None:
            raise
        raise CaptureError(
            f"{type(looping).__name__} finds each expert's tokens in a Python loop, so shapes depend on the routing, "
            "which is known only when the step runs. Call model.set_experts_implementation('grouped_mm') before "
            "from_module (in older transformers 'batched_mm'): the same numbers, without the loop"
        ) from None
    except RuntimeError as error:
        if "Expected inputs of BF16 type" not in str(error):  # torch's shape rule of _grouped_mm (2.13.0)
            raise
        raise CaptureError(
            f"{type(module).__name__}: torch's grouped matrix product is captured in bfloat16 alone. Take "
            "precision='bf16', model.set_experts_implementation('batched_mm') before from_module, or a newer "
            "transformers (5.23 has its own for fp32)"
        ) from None


def renamed_in_files(module: Any) -> bool:
    """Whether transformers writes a model's parameters under other names, or in other shapes, than the module has
    (`_weight_conversions`, `get_model_conversion_mapping`: transformers 5.23.0)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded = getattr(module, "_weight_conversions", None)
    if loaded is not None:
        return bool(loaded)
    return any(not isinstance(x, PrefixChange) for x in get_model_conversion_mapping(module, add_legacy=False))


def _loops_over_experts(part: nn.Module) -> bool:
    """Whether this is a transformers layer of experts in its plain form (5.0.0, 5.23.0)."""
    kind, config = type(part), getattr(part, "config", None)
    plain = getattr(config, "_experts_implementation", None) == "eager"
    return plain and kind.__module__.startswith("transformers.") and "Experts" in kind.__name__


def all_true(mask: torch.Tensor) -> bool:
    """Whether a mask hides nothing; False if that is known only when the step runs (5.0.0, 5.23.0)."""
    is_tracing = getattr(sys.modules.get("transformers.masking_utils"), "is_tracing", is_fake)
    return not is_tracing(mask) and bool(mask.all())


class MaskParts(NamedTuple):
    """What a mask function of transformers says: bounds in tokens (None: no bound), ids of packed documents and the
    positions within them (batch, tokens), and the tokens of a chunk with the padding before the first (batch,)."""

    left: int | None = None
    right: int | None = None
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    chunk: int | None = None
    left_padding: torch.Tensor | None = None


def mask_parts(function: Any) -> MaskParts | None:
    """The parts that a mask function was put together from; None if one is not known, or if two are united.

    They are closures, named by the functions of `transformers.masking_utils` that return them (5.23.0).
    """
    name = getattr(function, "__qualname__", "").removesuffix(".<locals>.inner_mask").removesuffix(".<locals>.and_mask")
    held = dict(
        zip(
            getattr(getattr(function, "__code__", None), "co_freevars", ()),
            (cell.cell_contents for cell in getattr(function, "__closure__", None) or ()),
            strict=True,
        )
    )
    if name == "and_masks":
        every = [mask_parts(part) for part in held["mask_functions"]]
        return None if any(part is None for part in every) else _both([part for part in every if part is not None])
    if name == "remap_positions_for_packed_sequence":  # neighbours in a document have neighbouring positions
        inner = mask_parts(held["mask_function"])
        return None if inner is None else inner._replace(positions=held["position_ids"])
    own: dict[str, Any] = {
        "causal_mask_function": lambda: MaskParts(right=0),
        "bidirectional_mask_function": MaskParts,
        "sliding_window_overlay": lambda: MaskParts(left=held["sliding_window"] - 1),
        "sliding_window_bidirectional_overlay": lambda: MaskParts(held["sliding_window"], held["sliding_window"]),
        "packed_sequence_mask_function": lambda: MaskParts(documents=held["packed_sequence_mask"]),
        "chunked_overlay": lambda: MaskParts(chunk=held["chunk_size"], left_padding=held["left_padding"]),
    }
    return own[name]() if name in own else None


def _both(every: list[MaskParts]) -> MaskParts:
    """The parts of an intersection: the nearer bound, and what only one of them has."""
    found = {}
    for field in MaskParts._fields:
        given = [value for part in every if (value := getattr(part, field)) is not None]
        found[field] = min(given) if field in ("left", "right") and given else next(iter(given), None)
    return MaskParts(**found)


def recomputed(module: nn.Module) -> Iterator[torch.Tensor]:
    """The weights that a hook before each forward computes anew from the parameters: those of `torch.nn.utils.prune`
    and of `torch.nn.utils.weight_norm` (2.11.0, 2.13.0). They have a graph, and so cannot be copied."""
    for part in module.modules():
        for hook in forward_hooks(part)[1].values():
            name = getattr(hook, "_tensor_name" if isinstance(hook, BasePruningMethod) else "name", "")
            if isinstance(hook, (WeightNorm, BasePruningMethod)) and isinstance(part.__dict__.get(name), torch.Tensor):
                yield part.__dict__[name]
