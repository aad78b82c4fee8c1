"""Short last batches of an epoch, with accumulation: the numbers of the stock Trainer, or a refusal before training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloo, values
from torch import Tensor, nn

import fzero

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, VOCAB, Row, bert, points, run, seeded, sequences, stacked  # noqa: E402

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
@pytest.mark.sampled(1)
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


class Mixing(nn.Module):
    """A model of the user's whose rows are mixed by BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.out(self.norm(self.first(x)).tanh()).squeeze(-1)
        return {"loss": F.mse_loss(scores, labels.float()), "logits": scores}


def measured(count: int) -> list[Row]:
    return [{"input_ids": ids, "labels": ids.float().mean() / 10} for ids in sequences(count, 0, 12, 12)]


def labelled(count: int) -> list[Row]:
    return [{"input_ids": ids, "labels": (ids[:3] % 2).float()} for ids in sequences(count, 0, 12, 12)]


SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}
CASES: dict[str, tuple[Any, list[Row]]] = {
    "several labels": (lambda: bert("BertForSequenceClassification", **SEVERAL), labelled(14)),
    "regression": (lambda: bert("BertForSequenceClassification", num_labels=1), measured(14)),
    "batch norm": (Mixing, points(14)),
}


@pytest.mark.parametrize("accumulated", [2, 3], ids=["a whole window", "a short one"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_a_short_batch_that_no_rows_can_fill_is_taken_at_its_own_size(
    case: str, accumulated: int, tmp_path: Path
) -> None:
    """14 rows in batches of 4: the fourth has 2 rows. It was refused before training."""
    make, rows = CASES[case]
    given = {**ACCUMULATED, "gradient_accumulation_steps": accumulated, "max_steps": 5}
    ours, stock = (run(kind, tmp_path / kind, seeded(make), rows, stacked, **given) for kind in (OURS, STOCK))
    alike(ours, stock)
    assert len(ours.engine.state.runtime.programs) == 2
    params = fzero.unshard(ours.engine.state.params)
    tracked = {n: b for n, b in stock.model.named_buffers() if n.startswith("norm.")}
    assert len(tracked) == (3 if case == "batch norm" else 0)
    for name, value in [*stock.model.named_parameters(), *tracked.items()]:
        torch.testing.assert_close(params[name].to(value.dtype), value.detach(), rtol=1e-4, atol=1e-5)


def in_a_pipeline(folder: str) -> str:
    """The error of a short batch where stages run one shape. At the top for `gloo`."""
    model = bert("BertForSequenceClassification", num_labels=1)
    try:
        run(OURS, Path(folder), model, measured(14), stacked, **ACCUMULATED, spec={"mesh": {"pp": 2}})
    except fzero.ConfigError as error:
        return str(error)
    return ""


def test_in_a_pipeline_it_is_refused_before_training(tmp_path: Path) -> None:
    for text in values(gloo(2, in_a_pipeline, str(tmp_path))):
        assert "has 2 rows of 4: a mesh axis 'pp' runs micro batches of one shape" in text
        assert "Set dataloader_drop_last=True, or leave the axis out" in text
