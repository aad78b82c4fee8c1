"""Arguments of the Trainer that few scripts give: the numbers of the stock Trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, bert, classified, padded, run, seeded  # noqa: E402


class Stream(IterableDataset[Any]):
    """20 rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(classified(20, 0))


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": classified(11, 1)}
BEST = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
CASES: dict[str, dict[str, Any]] = {
    "label smoothing, workers": {"label_smoothing_factor": 0.1, "dataloader_num_workers": 2},
    "rows by length": {"train_sampling_strategy": "group_by_length"},
    "metrics of inputs": {**EVALUATED, "eval_accumulation_steps": 2, "include_for_metrics": ["inputs", "loss"]},
    "early stopping, the best state": {**EVALUATED, **BEST, "learning_rate": 0.1},
    "a stream, unused columns": {"remove_unused_columns": False, "gradient_accumulation_steps": 2, "max_steps": 4},
}  # fmt: skip


def measured(prediction: Any) -> dict[str, float]:
    return {"inputs": float(prediction.inputs[0].sum()), "losses": float(prediction.losses.sum())}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_options_give_what_they_give_with_the_stock_trainer(case: str, tmp_path: Path) -> None:
    logs = []
    for kind in (OURS, STOCK):
        given, rows = dict(CASES[case]), Stream() if "stream" in case else classified(20, 0)
        if "include_for_metrics" in given:
            given["compute_metrics"] = measured
        if "load_best_model_at_end" in given:
            given["callbacks"] = [transformers.EarlyStoppingCallback(1)]
        model = seeded(lambda: bert("BertForSequenceClassification", num_labels=3))
        trainer = run(kind, tmp_path / kind, model, rows, padded, **given)
        if "load_best_model_at_end" in given:
            trainer.evaluate()
        names = ("loss", "grad_norm", "train_loss", "eval_loss", "eval_inputs", "eval_losses")
        logs.append([{n: float(e[n]) for n in names if n in e} for e in trainer.state.log_history])
    assert len(logs[0]) == len(logs[1]) > 3
    for ours, stock in zip(*logs, strict=True):
        assert ours == pytest.approx(stock, rel=1e-4)
