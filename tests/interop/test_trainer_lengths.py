"""`pad_to`: every leaf whose dim is the length is padded, what is not is said, and the same numbers as the stock
Trainer."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloo
from torch import Tensor, nn

from fzero.errors import DataError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import (  # noqa: E402
    OURS,
    STOCK,
    VOCAB,
    Own,
    Row,
    bert,
    llama,
    padded,
    points,
    result,
    run,
    seeded,
    sequences,
    stacked,
    text,
)  # fmt: skip

from fzero.interop.trainer.batch_lengths import Seen  # noqa: E402

CHOICES = 4


def choosing(count: int, low: int, high: int) -> list[Row]:
    return [{"input_ids": torch.stack([ids.roll(i) for i in range(CHOICES)]), "labels": ids.sum() % CHOICES}
            for ids in sequences(count, 0, low, high)]  # fmt: skip


def choices(rows: Sequence[Row]) -> Row:
    """As transformers' DataCollatorForMultipleChoice: (rows, choices, tokens)."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    ids = torch.stack([F.pad(row["input_ids"], (0, longest - row["input_ids"].shape[1])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids),
            "labels": torch.stack([row["labels"] for row in rows])}  # fmt: skip


def both(folder: Path, make: Callable[[], Any], rows: Any, collate: Any, pad_to: int = 16, **given: Any) -> Any:
    """fzero's Trainer, after both had the same losses and predictions."""
    ours = run(OURS, folder / OURS, seeded(make), rows, collate, pad_to=pad_to, **given)
    stock = run(STOCK, folder / STOCK, seeded(make), rows, collate, **given)
    assert result(ours).losses == pytest.approx(result(stock).losses, abs=1e-5)
    predicted, expected = (trainer.predict(rows[:5]).predictions for trainer in (ours, stock))
    assert predicted.shape == expected.shape
    if "MultipleChoice" in type(ours.model).__name__:
        # one bias moves all choices of a row alike: its gradient is rounding, of which AdamW makes whole steps
        predicted, expected = (x - x.mean(1, keepdims=True) for x in (predicted, expected))
    assert abs(predicted - expected).max() < 1e-5
    return ours


def test_multiple_choice_is_padded_in_its_last_dim(tmp_path: Path) -> None:
    """(rows, choices, tokens) of 9 to 12 tokens: one program, for 16, windows of several lengths too."""
    trainer = both(
        tmp_path, lambda: bert("BertForMultipleChoice"), choosing(16, 9, 12), choices, gradient_accumulation_steps=2
    )
    assert len(trainer.engine.state.runtime.programs) == 1


def test_scores_of_as_many_choices_as_places_are_not_cut(tmp_path: Path) -> None:
    trainer = both(tmp_path, lambda: bert("BertForMultipleChoice"), choosing(8, 3, 4), choices, pad_to=CHOICES)
    assert trainer.predict(choosing(3, 3, 3)).predictions.shape == (3, CHOICES)


def boxed(rows: Sequence[Row]) -> Row:
    """As the collators of LayoutLM: a box of four numbers for each token; and as many numbers for each row."""
    batch = padded(rows)
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {**batch, "bbox": torch.stack([places, places, places + 1, places + 2], -1)}


def test_a_leaf_of_another_name_is_padded_where_its_dim_is_the_length(tmp_path: Path) -> None:
    """`bbox` of shape (rows, tokens, 4). With batches of four tokens both of its dims agree: no dim is padded then."""
    config = transformers.LayoutLMConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=VOCAB,
        num_labels=3, max_position_embeddings=80, max_2d_position_embeddings=80, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    lengths = [4, 4, 9, 10, 11, 12, 13, 14, 15, 16]
    rows = [{"input_ids": ids, "labels": ids % 3} for n in lengths for ids in sequences(2, n, n, n)]
    trainer = both(
        tmp_path, lambda: transformers.LayoutLMForTokenClassification(config), rows, boxed, max_steps=len(lengths)
    )  # fmt: skip
    assert len(trainer.engine.state.runtime.programs) <= 2


def test_dims_are_lengths_by_what_varies() -> None:
    """Not before two lengths were seen, and not a dim that once was something else."""

    def batch(length: int, wide: int) -> Any:
        return {"input_ids": torch.zeros(2, length), "square": torch.zeros(2, length, length),
                "wide": torch.zeros(2, wide)}  # fmt: skip

    seen = Seen()
    assert seen.agreed([batch(5, 5)], [(5, 0)], None) == (None, 0)
    assert seen.agreed([batch(5, 5), batch(7, 5)], [(5, 0), (7, 0)], None, 3) == ((7, 0), 3)
    assert seen.places(batch(5, 5), (5, 0)) == {"input_ids": {-1: 0}, "square": {-2: 0, -1: 0}}

    def gather(row: Tensor) -> Tensor:
        """This rank's row, and that of a rank with a batch of nine places, in which `square` was something else."""
        away = row.clone()
        away[0, 0] = 9
        away[0, 6:] = 1
        return torch.cat([row, away])

    other = Seen()
    assert other.agreed([batch(5, 3)], [(5, 0)], gather, 2) == ((9, 0), 3)  # `away` says 1
    assert other.places(batch(5, 3), (5, 0)) == {"input_ids": {-1: 0}}


def test_an_additive_mask_lets_nobody_see_what_is_padded() -> None:
    from fzero.interop.trainer.shapes import padded as longer

    mask = torch.zeros(1, 1, 2, 2)
    found = longer({"attention_mask": mask}, {"attention_mask": {-2: 0, -1: 0}}, (3, 0), {}, None)["attention_mask"]
    assert found.shape == (1, 1, 3, 3)
    assert float(found[0, 0, 0, 2]) == torch.finfo(torch.float32).min


def test_pad_to_that_found_nothing_to_pad_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fzero"):
        run(OURS, tmp_path, Own(), points(8), stacked, pad_to=16, max_steps=3)
    assert (
        caplog.text.count(
            "pad_to=16 found nothing to pad: a batch has no sequence of tokens, but labels (2,), x (2, 8)"
        )
        == 1
    )


def test_a_leaf_that_varies_and_is_no_length_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, 8)

        def forward(self, input_ids: Tensor, other: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
            loss = (self.table(input_ids).mean(-1) * attention_mask).sum() / attention_mask.sum() + other.mean()
            return {"loss": loss, "logits": loss}

    def collate(rows: Sequence[Row]) -> Row:
        batch = padded(rows)
        return {**batch, "other": torch.zeros(2, batch["input_ids"].shape[1] + 3)}

    with caplog.at_level(logging.WARNING, "fzero"):
        run(OURS, tmp_path, Beside(), text(12, 0), collate, pad_to=64, max_steps=4)
    assert caplog.text.count("of batch/other was") == 1
    assert "is not the length that pad_to pads: each size has a program. Pad it in the collator" in caplog.text


def test_several_lengths_in_one_step_name_pad_to_and_the_collator(tmp_path: Path) -> None:
    model = bert("BertForMultipleChoice")
    with pytest.raises(DataError, match=r"have the shapes .*Pad it in the collator.*pad_to=64"):
        run(OURS, tmp_path, model, choosing(16, 9, 12), choices, gradient_accumulation_steps=4, pad_to=0)


def of_two_lengths(folder: str) -> str:
    """The error of a rank whose batch has another length than the other rank's. At the top for `gloo`."""
    rows = [{"input_ids": ids, "labels": ids.clone()} for n in (3, 5, 9, 12) for ids in sequences(1, n, n, n)]
    try:
        run(OURS, Path(folder), llama()[0], rows, padded, pad_to=0, max_steps=1, seed=5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.acceptance
def test_lengths_that_differ_between_ranks_name_pad_to_and_the_collator(tmp_path: Path) -> None:
    outcomes = gloo(2, of_two_lengths, str(tmp_path))
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert "DisagreementError" in outcome.value
        assert "Pad it in the collator to one length, or give pad_to=64" in outcome.value
