"""What `fzero.interop.Trainer` takes from `deepspeed=` and `fsdp=`, and what it refuses when it is made."""

from pathlib import Path
from typing import Any

import pytest

import fzero

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from trainers import OURS, STOCK, make, trained

AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
DOCUMENT: dict[str, Any] = {**AUTO, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({"deepspeed": DOCUMENT}, 2),
        ({"fsdp": "full_shard"}, 3),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}, 3),
    ],
    ids=["deepspeed", "fsdp-legacy", "fsdp"],
)
def test_the_two_fields_are_the_spec(options: dict[str, Any], zero: int, tmp_path: Path) -> None:
    """And neither engine is started. The numbers are those of a Trainer without them."""
    ours = make(OURS, "llama", tmp_path / OURS, max_steps=3, **options)
    assert not ours.is_deepspeed_enabled
    assert not ours.is_fsdp_enabled
    ours.train()
    assert ours.engine.spec.zero == zero
    stock = trained(STOCK, "llama", tmp_path / STOCK, max_steps=3).losses
    found = {entry["step"]: entry["loss"] for entry in ours.state.log_history if "loss" in entry}
    assert found == pytest.approx(stock, abs=1e-5)


def test_all_that_is_in_the_way_is_one_error(tmp_path: Path) -> None:
    document = {"zero_optimiztion": {}, "optimizer": {"type": "Adam", "params": {"lr": 1e-5}}}
    options = {"auto_find_batch_size": True, "optim": "adafactor", "neftune_noise_alpha": 5.0, "deepspeed": document}
    with pytest.raises(fzero.ConfigError, match="6 things are in the way") as caught:
        make(OURS, "llama", tmp_path, **options)
    paths = {path for path, _ in caught.value.refusals}
    assert paths >= {"auto_find_batch_size", "optim", "neftune_noise_alpha", "zero_optimiztion", "optimizer.params.lr"}
    assert "Did you mean 'zero_optimization'" in str(caught.value)


REFUSED: list[dict[str, Any]] = [
    {"auto_find_batch_size": True}, {"neftune_noise_alpha": 1.0}, {"use_liger_kernel": True}, {"pad_to": -1},
    {"optim": "adafactor"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}, {"bf16_full_eval": True},
    {"spec": {"mesh": {"dp": 1, "tp": 2}}}, {"accelerator_config": {"even_batches": False}},
]  # fmt: skip


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: "-".join(options))
def test_each_is_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(fzero.ConfigError, match="mesh" if name == "spec" else name):
        make(OURS, "llama", tmp_path, **{"eval_strategy": "steps", "eval_steps": 2, **options})


def test_both_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fzero.ConfigError, match="Keep one of them"):
        make(OURS, "llama", tmp_path, deepspeed=DOCUMENT, fsdp="full_shard")
