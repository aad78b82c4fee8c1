"""shapes: a batch of any length or number of rows in one of few shapes, so that few programs are made.

A program is made for each shape. So the rows of a batch become those of the others, and its length pad_to * 2**k for
the least k that fits, the same on all ranks. What is added weighs nothing: padded places have no label and no
attention, added rows no label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import tree
from fzero.errors import DataError

IGNORED = -100  # the label of a place that weighs nothing, in transformers and in torch
Batch = Mapping[str, Any]
Lengths = tuple[int, int]  # of the inputs, and of what a decoder is given; 0: there are none

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "labels")
DECODED = ("labels", "decoder_input_ids", "decoder_attention_mask")
TOKENS = ("input_ids", "decoder_input_ids")


def lengths(batch: Batch, decodes: bool) -> Lengths:
    """The lengths of a batch. `decodes`: whether its labels are those of a decoder, with a length of their own.

    >>> lengths({"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 3)}, decodes=True)
    (5, 3)
    """
    decoded = [batch[name].shape[1] for name in DECODED if decodes and _has_length(batch.get(name))]
    inputs = batch.get("input_ids")
    return (inputs.shape[1] if _has_length(inputs) else 0), max(decoded, default=0)


def rounded(length: int, pad_to: int, most: int | None = None) -> int:
    """The least pad_to * 2**k that `length` fits in, and no more than `most`, unless `length` itself is more.

    >>> [rounded(length, 8, most=20) for length in (0, 3, 8, 9, 17, 30)]
    [0, 8, 8, 16, 20, 30]
    """
    if pad_to < 1 or length == 0:
        return length
    fits = pad_to
    while fits < length:
        fits *= 2
    return fits if most is None else max(length, min(fits, most))


def padded(batch: Batch, own: Lengths, to: Lengths, token: int, masks: bool = True) -> dict[str, Any]:
    """The batch with its sequences of the lengths `own` padded on the right to those of `to`; 0: not padded.

    token: the id at padded places. Labels are -100 there, and masks 0. A batch without a mask gets one if the model
    `masks`, for it would attend to what is added. What has another length, or another name, stays as it is.

    >>> batch = padded({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, (2, 0), (4, 0), token=7)
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[1, 1, 7, 7]], [[1, 1, 0, 0]])
    """
    fill = {**dict.fromkeys(TOKENS, token), "labels": IGNORED, "special_tokens_mask": 1}
    result = dict(batch)
    if masks and own[0] and to[0] and "position_ids" not in batch and "attention_mask" not in batch:
        result["attention_mask"] = torch.ones_like(batch["input_ids"])
    for names, length, wanted in ((INPUTS, own[0], to[0]), (DECODED, own[1], to[1])):
        for name in names:
            value = result.get(name)
            if _has_length(value) and value.shape[1] == length < wanted and not value.is_floating_point():
                result[name] = F.pad(value, (0, wanted - length), value=fill.get(name, 0))
    return result


def filled(batch: Batch, rows: int) -> dict[str, Any]:
    """The batch with copies of its first row up to `rows`, which have no labels.

    >>> filled({"x": torch.tensor([[1.0], [2.0]]), "labels": torch.tensor([3, 4])}, 3)["labels"].tolist()
    [3, 4, -100]
    """
    result = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] < rows:
            more = value[:1].expand(rows - value.shape[0], *value.shape[1:])
            value = torch.cat([value, torch.full_like(more, IGNORED) if name == "labels" else more])
        result[name] = value
    return result


def joined(batches: Sequence[Batch]) -> dict[str, Any]:
    """Batches of one shape as one, row after row. Raises ValueError for a leaf that is no tensor and not the same in
    all."""
    if len(batches) == 1:
        return dict(batches[0])
    paths, first, treedef = tree.flatten(dict(batches[0]))
    others = [tree.flatten(dict(batch))[1] for batch in batches]
    leaves = []
    for path, leaf, column in zip(paths, first, zip(*others, strict=True), strict=True):
        if isinstance(leaf, Tensor):
            if len(found := sorted({tuple(x.shape) for x in column})) > 1:
                raise DataError(
                    f"batch/{path}: the batches of a step have the shapes {found}: a step takes one. Pad in the "
                    "collator to one length, set gradient_accumulation_steps=1, or pad_to=64 if the model and its loss "
                    "leave padded places out"
                )
            leaves.append(torch.cat(column) if leaf.dim() else torch.stack(column))
        elif all(other == leaf for other in column):
            leaves.append(leaf)
        else:
            raise ValueError(f"batch/{path} is no tensor, and differs between the batches of a step: {set(column)}")
    return tree.unflatten(treedef, leaves)


def num_rows(batch: Batch) -> int:
    """The rows of a batch: dim 0 of its first tensor."""
    return next((leaf.shape[0] for leaf in tree.flatten(dict(batch))[1] if isinstance(leaf, Tensor) and leaf.dim()), 0)


def trimmed(outputs: Any, rows: int, padded_to: Lengths, own: Lengths, num_labels: int | None = None) -> Any:
    """Outputs of a padded and filled batch, as tensors of its own rows and lengths.

    A tensor whose dim 1 is a padded length is cut to the length before. Where inputs and labels were padded to one
    length, the first output (the logits) has that of the labels, and the others that of the inputs. Scores of
    `num_labels` classes are none of places; the weights of attention are of places in two dims.
    """
    decoded = {padded_to[1]: own[1]} if own[1] else {}
    inputs = {padded_to[0]: own[0]} if own[0] else {}

    def cut(value: Any, cuts: Mapping[int, int]) -> Any:
        if isinstance(value, Tensor) and value.dim():
            value = value[:rows]
            scores = value.dim() == 2 and value.is_floating_point() and value.shape[1] == num_labels
            if value.dim() == 4 and value.shape[2] in cuts and value.shape[3] in cuts:
                value = value[:, :, : cuts[value.shape[2]], : cuts[value.shape[3]]]
            elif value.dim() > 1 and value.shape[1] in cuts and not scores:
                value = value[:, : cuts[value.shape[1]]]
        return value

    first = True

    def next_cut(value: Any) -> Any:
        nonlocal first
        cuts = {**inputs, **decoded} if first else {**decoded, **inputs}
        first = False
        return cut(value, cuts)

    return tree.map(next_cut, outputs)


def _has_length(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 2
