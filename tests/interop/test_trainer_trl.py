"""TRL's SFTTrainer with fzero's engine, as docs/trainer.md writes it: the losses of TRL's own."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from trainers import VOCAB, llama  # noqa: E402

from fzero.interop import Trainer, TrainingArguments  # noqa: E402


@dataclasses.dataclass
class Config(TrainingArguments, trl.SFTConfig):  # type: ignore[misc,name-defined]
    pass


class SFT(Trainer, trl.SFTTrainer):  # type: ignore[misc,name-defined]
    compute_loss = transformers.Trainer.compute_loss

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        vars(self.model).pop("forward", None)


def tokenizer() -> Any:
    import tokenizers

    words = {f"w{i}": i for i in range(2, VOCAB)} | {"<pad>": 0, "<eos>": 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )


def rows() -> Any:
    """A prompt of three tokens without labels, and completions of several lengths."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    ids = [[3, 4, 5, *range(6, 8 + n % 5), 1] for n in range(16)]
    labels = [[-100] * 3 + row[3:] for row in ids]
    return Dataset(InMemoryTable.from_pydict({"input_ids": ids, "labels": labels}), fingerprint="rows")


def test_sft_has_the_losses_of_trls_own(tmp_path: Path) -> None:
    options = {
        "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "bf16": False,
        "learning_rate": 1e-3, "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    found = []
    for kind, arguments in ((trl.SFTTrainer, trl.SFTConfig), (SFT, Config)):
        args = arguments(output_dir=str(tmp_path), **options)
        torch.manual_seed(0)
        trainer = kind(
            model=llama()[0], args=args, train_dataset=rows(), eval_dataset=rows(), processing_class=tokenizer()
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, trainer.evaluate()["eval_loss"]))
    assert len(found[0][0]) == 4
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-5)
    assert len(trainer.engine.state.runtime.programs) == 1
