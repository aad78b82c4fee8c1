"""Short last batches of an epoch, with accumulation: the numbers of the stock Trainer, or a refusal before training."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, VOCAB, Row, bert, run, seeded, sequences, stacked  # noqa: E402

ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def logged(trainer: Any) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "train_loss")
    return [{n: float(e[n]) for n in names if n in e} for e in trainer.state.log_history]


def alike(ours: Any, stock: Any) -> None:
    a, b = logged(ours), logged(stock)
    assert len(a) == len(b) > 2
    for x, y in zip(a, b, strict=True):
        assert x == pytest.approx(y, rel=1e-5)


def answered(count: int) -> list[Row]:
    """Rows of one length with an answer. One answer is after the last place, which weighs nothing."""
    rows = []
    for n, ids in enumerate(sequences(count, 0, 12, 12)):
        begin = torch.tensor(12 if n == 2 else n % 9)
        rows.append({"input_ids": ids, "start_positions": begin, "end_positions": begin + 2})
    return rows


@pytest.mark.parametrize("kind", ["BertForQuestionAnswering", "T5ForQuestionAnswering"])
def test_question_answering_fills_a_short_batch(kind: str, tmp_path: Path) -> None:
    """13 rows in windows of 2 x 4: the last window is one row. One program, and stock's numbers."""

    def make() -> Any:
        if kind.startswith("Bert"):
            return bert(kind)
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=VOCAB, dropout_rate=0,
            decoder_start_token_id=0, num_labels=2,
        )  # fmt: skip
        return transformers.T5ForQuestionAnswering(config)

    ours, stock = (run(k, tmp_path / k, seeded(make), answered(13), stacked, **ACCUMULATED) for k in (OURS, STOCK))
    alike(ours, stock)
    assert len(ours.engine.state.runtime.programs) == 1
