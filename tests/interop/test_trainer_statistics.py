"""Models with running statistics in the Trainer: the stock Trainer's losses, evaluations and statistics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, same_bits, values
from torch import Tensor, nn

import fzero
from fzero.errors import ConfigError, FzeroError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, Row, result, run, seeded, stacked  # noqa: E402

WINDOWS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 4, "optim": "sgd",
           "learning_rate": 0.01, "warmup_steps": 0}  # fmt: skip


def pictures(count: int, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator).repeat(1, 1, 2, 2) + 0.5
    return [{"pixel_values": x, "labels": (x.mean() > 0.5).long()} for x in images]


def resnet() -> Any:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=2
        )
    )


def regnet() -> Any:
    return transformers.RegNetForImageClassification(
        transformers.RegNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, layer_type="y", num_labels=2
        )
    )


def mobilenet() -> Any:
    config = transformers.MobileNetV2Config(
        image_size=64, depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, classifier_dropout_prob=0, num_labels=2
    )
    model = transformers.MobileNetV2ForImageClassification(config).double()
    model.register_forward_pre_hook(
        lambda _, args, kw: (args, {**kw, "pixel_values": kw["pixel_values"].double()}), with_kwargs=True
    )
    return model


class Normed(nn.Module):
    """One of the user's. momentum: None is the average over all batches so far."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten())
        self.out = nn.Linear(256, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        scores = self.out(self.net(pixel_values))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def statistics(trainer: Any) -> dict[str, Tensor]:
    """By name, of a trainer of either kind."""
    if hasattr(trainer, "engine"):
        with trainer.gathered() as model:
            return {name: value.clone() for name, value in model.named_buffers() if "running" in name or "num_" in name}
    return {name: value.clone() for name, value in trainer.model.named_buffers() if "running" in name or "num_" in name}


def both(folder: Path, make: Any, rows: list[Row], **given: Any) -> Any:
    options = {**WINDOWS, "eval_dataset": pictures(6, 1), "eval_strategy": "steps", "eval_steps": 2, **given}
    found = [run(kind, folder / kind, seeded(make), rows, stacked, **options) for kind in (OURS, STOCK)]
    ours, stock = (result(trainer) for trainer in found)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5, abs=1e-5)
    assert ours.evals == pytest.approx(stock.evals, rel=1e-5, abs=1e-5)
    a, b = map(statistics, found)
    assert a.keys() == b.keys()
    assert any("num_batches_tracked" in name and value > 2 for name, value in a.items())
    for name, value in b.items():
        assert a[name].dtype == value.dtype
        assert float((a[name] - value).abs().max()) <= 1e-5 * max(1.0, float(value.abs().max())), name
    predicted, expected = (trainer.predict(pictures(5, 2)).predictions for trainer in found)
    assert abs(predicted - expected).max() < 1e-4
    return found[0]


@pytest.mark.parametrize("make", [resnet, regnet, mobilenet, Normed], ids=lambda make: make.__name__)
@pytest.mark.acceptance
def test_statistics_are_those_of_the_stock_trainer(make: Any, tmp_path: Path) -> None:
    """Windows of three batches, of which the last of an epoch has two. MobileNet in float64 and at a small rate: it is
    chaos (at 1e-2 another last bit of its float32 parameters moves the fourth loss by a tenth)."""
    both(tmp_path, make, pictures(32), learning_rate=1e-4 if make is mobilenet else 1e-2)


def test_an_average_over_all_batches(tmp_path: Path) -> None:
    both(tmp_path, lambda: Normed(momentum=None), pictures(32))


def test_they_are_in_the_checkpoint_the_export_and_a_resumed_run(tmp_path: Path) -> None:
    """A resumed run ends with the same bits; what is exported loads in transformers with them."""
    options = {**WINDOWS, "save_strategy": "steps", "save_steps": 2}
    whole = run(OURS, tmp_path, seeded(resnet), pictures(32), stacked, **options)
    held = statistics(whole)
    whole.save_model(str(tmp_path / "export"))
    exported = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "export")
    assert all(same_bits(value, held[name]) for name, value in exported.named_buffers())
    again = run(OURS, tmp_path, seeded(resnet), pictures(32), stacked, resume=str(tmp_path / "checkpoint-2"), **options)
    found = statistics(again)
    assert all(same_bits(found[name], value) for name, value in held.items())
    params = fzero.unshard(whole.engine.state.params)
    assert all(same_bits(params[name], value) for name, value in fzero.unshard(again.engine.state.params).items())
    name = next(name for name in held if name.endswith("running_var"))
    with pytest.raises(FzeroError, match=r"running_var' of ResNetForImageClassification has no values of its own now"):
        dict(whole.model.named_buffers())[name].sum()


def test_layers_that_stay_in_evaluation_keep_their_statistics(tmp_path: Path) -> None:
    """As of a backbone that is frozen: `train()` of the user's leaves it in evaluation."""

    class Frozen(Normed):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.net[1].eval()
            return self

    options = {**WINDOWS, "max_steps": 2}
    found = [run(kind, tmp_path / kind, seeded(Frozen), pictures(24), stacked, **options) for kind in (OURS, STOCK)]
    assert result(found[0]).losses == pytest.approx(result(found[1]).losses, abs=1e-5)
    assert statistics(found[0])["net.1.num_batches_tracked"] == 0


def test_sync_batch_norm_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    with pytest.raises(ConfigError, match=r"'net.1' is a SyncBatchNorm.*Take nn\.BatchNorm2d"):
        run(OURS, tmp_path, model, pictures(8), stacked)


def test_another_buffer_that_is_written_is_refused_by_name(tmp_path: Path) -> None:
    class Counting(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
            self.seen += 1
            return super().forward(pixel_values, labels)

    with pytest.raises(FzeroError, match="Counting writes to its buffer 'seen'"):
        run(OURS, tmp_path, Counting(), pictures(8), stacked, gradient_accumulation_steps=1)


def on_two_ranks(folder: str) -> Any:
    """(losses of both kinds, our statistics, this rank's part of the statistics of stock). At the top for `gloo`."""
    options = {**WINDOWS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    options["ddp_broadcast_buffers"] = False
    found = [run(kind, Path(folder) / kind, seeded(resnet), pictures(32), stacked, **options) for kind in (OURS, STOCK)]
    ours, stock = (result(trainer).losses for trainer in found)
    own = {name.removeprefix("module."): value for name, value in statistics(found[1]).items()}
    return ours, stock, statistics(found[0]), own


@pytest.mark.acceptance  # two processes import transformers
def test_two_ranks_keep_the_mean_of_what_the_ranks_see(tmp_path: Path) -> None:
    """Of the stock Trainer without its broadcasts each rank has its own: their mean is ours, on both ranks."""
    outcomes = values(gloo(2, on_two_ranks, str(tmp_path)))
    for ours, stock, held, _ in outcomes:
        assert ours == pytest.approx(stock, abs=1e-5)
        for name, value in held.items():
            mean = sum(own[name].double() for *_, own in outcomes) / 2
            assert float((value - mean).abs().max()) <= 1e-5 * max(1.0, float(mean.abs().max())), name
            assert same_bits(value, outcomes[0][2][name])
