"""batch_shapes: the batches of a Trainer, padded and filled so that all ranks have one shape.

`batch_lengths` says how long a batch is, `shapes` pads; here lies what a Trainer's arguments and model ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from fzero.interop.trainer import batch_lengths, refusals, shapes, weightless
from fzero.interop.trainer.batch_lengths import Lengths, Seen
from fzero.ir.mesh import Mesh

log = logging.getLogger("fzero")


class BatchShapes:
    """The shapes of one Trainer's batches; what was seen of them so far is kept. given: the last ones that were shaped,
    as they came."""

    def __init__(self, trainer: Any, mesh: Mesh) -> None:
        self.given: Iterator[Any] = iter(())
        self.trainer, self.mesh, self.no_length, self.seen = trainer, mesh, False, Seen()

    def pads_to(self) -> int:
        """The number of which lengths become multiples; 0: they stay as they are."""
        pad_to: int | None = getattr(self.trainer.args, "pad_to", None)
        return pad_to if pad_to is not None else weightless.PAD_TO if weightless.places(self.trainer) else 0

    def shaped(self, batches: list[Any], rows: int, count: float = 0) -> tuple[list[Any], Lengths, Lengths, float]:
        """(batches padded and filled, the lengths of all after that, the last one's before, the sum of `count` over the
        ranks). A collective if they are padded."""
        batches = [dict(batch) for batch in batches]
        self.given = iter(batches)
        own, agreed, total = self._lengths(batches, count)
        results = []
        for batch, before in zip(batches, own, strict=True):
            if any(agreed):
                batch = self._padded(batch, before, agreed)
            if shapes.num_rows(batch) < rows:
                batch = self._filled(batch, rows, len(batches))
            results.append(batch)
        return results, agreed, own[-1] if own else (0, 0), total

    def _lengths(self, batches: list[Any], count: float) -> tuple[list[Lengths], Lengths, float]:
        """(the lengths of the batches, those to pad to, the same on all ranks, or 0: they stay as they are; the sum of
        `count` over the ranks)."""
        pad_to = getattr(self.trainer.args, "pad_to", None)
        decodes = bool(getattr(getattr(self.trainer.model, "config", None), "is_encoder_decoder", False))
        main = getattr(self.trainer.model, "main_input_name", None) if pad_to else None
        own = [batch_lengths.lengths(batch, decodes, main) for batch in batches]
        to_all = self.pads_to()
        if not own or not to_all:
            return own, (0, 0), count
        if pad_to and not any(map(any, own)) and not self.no_length:
            self.no_length = True
            log.warning("fzero: pad_to=%d found nothing to pad: a batch has no sequence of tokens, but %s. Each shape "
                        "has a program: pad in the collator, or leave pad_to out",
                        pad_to, shapes.described(batches[0]))  # fmt: skip
        gather = self.trainer.engine.of_all_ranks if self.trainer.args.world_size > 1 else None
        longest, count = self.seen.agreed(batches, own, gather, count)
        if longest is None:
            return own, (0, 0), count
        config = getattr(self.trainer.model, "config", None)
        inputs, decoded = (shapes.rounded(longest[i], to_all, weightless.most(config, bool(i))) for i in (0, 1))
        return own, (inputs, decoded), count

    def _padded(self, batch: Any, own: Lengths, to: Lengths) -> Any:
        mask, key = None, batch_lengths.key_of(batch, getattr(self.trainer.model, "main_input_name", None))
        masked = "position_ids" in batch or "attention_mask" in batch or not weightless.takes_mask(self.trainer.model)
        if key is not None and to[0] and not masked:
            whole = key[..., 0] if key is batch.get(batch_lengths.EMBEDDED) else key
            mask = torch.ones_like(whole, dtype=torch.int64)
        elif all(length in (0, longest) for length, longest in zip(own, to, strict=True)):
            return batch  # it has that length
        places = self.seen.places(batch if mask is None else {**batch, "attention_mask": mask}, own)
        fills = {**dict.fromkeys(shapes.TOKENS, self._pad_token()), "special_tokens_mask": 1}
        fills |= dict.fromkeys(("labels", *self.trainer.label_names), shapes.IGNORED)
        return shapes.padded(batch, places, to, fills, mask)

    def _pad_token(self) -> int:
        known = (
            getattr(self.trainer.processing_class, "pad_token_id", None),
            getattr(getattr(self.trainer.model, "config", None), "pad_token_id", None),
        )
        return next((token for token in known if isinstance(token, int) and token >= 0), 0)

    def _filled(self, batch: Any, rows: int, num_batches: int) -> Any:
        if weightless.rows(self.trainer, batch):
            return shapes.filled(batch, rows)
        if num_batches > 1 and dict(self.mesh.axes).get("pp", 1) > 1:
            refusals.short_batch(shapes.num_rows(batch), rows)
        return batch  # at its own size, in a program of its own
