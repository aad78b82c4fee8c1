"""shapes: a batch of any length or number of rows in one of few shapes, so that few programs are made.

A program is made for each shape. So the rows of a batch become those of the others, and its length pad_to * 2**k for
the least k that fits, the same on all ranks. What is added weighs nothing: padded places have no label and no
attention, added rows no label, or an answer after the last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import tree
from fzero.errors import DataError, DisagreementError, HangError
from fzero.interop.trainer.batch_lengths import Batch, Lengths

PADDING = (
    "Pad it in the collator to one length, or give pad_to=64 if the model and its loss leave padded places out: it "
    "pads what is as long as input_ids"
)
IGNORED = -100  # the label of a place that weighs nothing, in transformers and in torch
TOKENS = ("input_ids", "decoder_input_ids")
ANSWERS = ("start_positions", "end_positions")  # labels of question answering
WEIGHTLESS = {"labels": IGNORED, **dict.fromkeys(ANSWERS, 2**31 - 1)}  # a place after the last is ignored


@contextmanager
def same_on_ranks() -> Iterator[None]:
    """Adds to the error of ranks whose batches have several shapes how to pad them."""
    try:
        yield
    except DisagreementError as error:
        if isinstance(error, HangError) or "batch" not in str(error):
            raise
        raise DisagreementError(f"{error}. {PADDING}") from None


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


def padded(
    batch: Batch, places: Mapping[str, Mapping[int, int]], to: Lengths, fills: Mapping[str, int], mask: Tensor | None
) -> dict[str, Any]:
    """The batch with the dims `places` padded on the right to the lengths `to`; 0: not padded.

    places: of `lengths.Seen`. fills: the values of padded places by the leaf's name; else they are 0, and the least
    number in an additive mask. mask: the attention mask of a batch without one.

    >>> batch = {"input_ids": torch.ones(1, 2, dtype=torch.int64)}
    >>> padded(batch, {"input_ids": {-1: 0}}, (4, 0), {"input_ids": 7}, None)["input_ids"].tolist()
    [[1, 1, 7, 7]]
    """

    def longer(path: str, leaf: Any) -> Any:
        for dim, i in places.get(path, {}).items():
            value: float = fills.get(path, 0)
            if path.endswith("attention_mask") and leaf.is_floating_point() and leaf.dim() > 2:
                value = torch.finfo(leaf.dtype).min
            if leaf.shape[dim] < to[i]:
                leaf = F.pad(leaf, (*[0, 0] * (-dim - 1), 0, to[i] - leaf.shape[dim]), value=value)
        return leaf

    return tree.map_with_path(longer, dict(batch) if mask is None else {**batch, "attention_mask": mask})


def filled(batch: Batch, rows: int) -> dict[str, Any]:
    """The batch with copies of its first row up to `rows`, which have no labels.

    >>> filled({"x": torch.tensor([[1.0], [2.0]]), "labels": torch.tensor([3, 4])}, 3)["labels"].tolist()
    [3, 4, -100]
    """
    result = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] < rows:
            more = value[:1].expand(rows - value.shape[0], *value.shape[1:])
            value = torch.cat([value, torch.full_like(more, WEIGHTLESS[name]) if name in WEIGHTLESS else more])
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
                    f"batch/{path}: the batches of a step have the shapes {found}: a step takes one. {PADDING}, or set "
                    "gradient_accumulation_steps=1"
                )
            leaves.append(torch.cat(column) if leaf.dim() else torch.stack(column))
        elif all(other == leaf for other in column):
            leaves.append(leaf)
        else:
            raise ValueError(f"batch/{path} is no tensor, and differs between the batches of a step: {set(column)}")
    return tree.unflatten(treedef, leaves)


def described(batch: Batch) -> str:
    """The leaves of a batch with their shapes, for a message.

    >>> described({"x": torch.zeros(2, 3), "n": 4})
    'n, x (2, 3)'
    """
    leaves = zip(*tree.flatten(dict(batch))[:2], strict=True)
    return ", ".join(f"{path} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else path for path, leaf in leaves)


def num_rows(batch: Batch) -> int:
    """The rows of a batch: dim 0 of its first tensor."""
    return next((leaf.shape[0] for leaf in tree.flatten(dict(batch))[1] if isinstance(leaf, Tensor) and leaf.dim()), 0)


def trimmed(
    outputs: Any, rows: tuple[int, int], padded_to: Lengths, own: Lengths, num_labels: int | None = None
) -> Any:
    """Outputs of a padded and filled batch, as tensors of its own rows and lengths. rows: before and after. An output
    may have several entries for each row (its choices).

    A tensor whose dim 1 is a padded length is cut to the length before. Where inputs and labels were padded to one
    length, the first output (the logits) has that of the labels, and the others that of the inputs. Scores of
    `num_labels` classes are none of places; the weights of attention are of places in two dims.
    """
    decoded = {padded_to[1]: own[1]} if own[1] else {}
    inputs = {padded_to[0]: own[0]} if own[0] else {}

    def cut(value: Any, cuts: Mapping[int, int]) -> Any:
        if isinstance(value, Tensor) and value.dim():
            value = value[: rows[0] * max(value.shape[0] // max(rows[1], 1), 1)]
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
