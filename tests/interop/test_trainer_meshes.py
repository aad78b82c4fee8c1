"""Meshes with `tp` and `pp` in the Trainer: the numbers of the stock Trainer of as many data ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import gloo, same_bits, values
from torch import nn

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, Result, make, result  # noqa: E402

RUN = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
       "num_rows": 28, "gradient_accumulation_steps": 2}  # fmt: skip


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) / max(1.0, abs(b[step])) for step in b)


def on_mesh(folder: str, mesh: dict[str, int], resume: str | None = None) -> Any:
    """(the result, predictions, the resumed result). At the top for `gloo`."""
    options = {**RUN, "spec": {"mesh": mesh}}
    trainer = make(OURS, "llama of two layers", Path(folder), **options)
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    found = result(trainer)
    trainer.save_model(f"{folder}/export")
    again = make(OURS, "llama of two layers", Path(folder), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return found, predicted.predictions, result(again)


def assert_stock(outcomes: Any, stock: Result, predicted: Any, folder: Path) -> None:
    for ours, predictions, again in outcomes:
        assert gap(ours.losses, stock.losses) < 1e-5
        assert gap(ours.norms, stock.norms) < 1e-5
        assert gap(ours.evals, stock.evals) < 1e-5
        assert ours.rates == stock.rates
        assert predictions.shape == predicted.shape
        assert abs(predictions - predicted).max() < 1e-4
        assert {step: again.losses[step] for step in (3, 4)} == {step: ours.losses[step] for step in (3, 4)}
        assert all(same_bits(again.params[n], value) for n, value in ours.params.items())
    exported = transformers.LlamaForCausalLM.from_pretrained(folder / "export")
    assert all(same_bits(p.detach(), outcomes[0][0].params[n]) for n, p in exported.named_parameters())


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.acceptance  # two processes import transformers
def test_two_ranks_of_one_batch_train_as_one_process_does(axis: str, tmp_path: Path) -> None:
    """Losses, evaluations, predictions, a resumed run, and the export."""
    stock = make(STOCK, "llama of two layers", tmp_path / STOCK, **RUN)
    stock.train()
    predicted = stock.predict(stock.eval_dataset).predictions
    outcomes = values(gloo(2, on_mesh, str(tmp_path / OURS), {axis: 2}))
    assert_stock(outcomes, result(stock), predicted, tmp_path / OURS)


def stock_on_rank(folder: str) -> Any:
    trainer = make(STOCK, "llama of two layers", Path(folder), **RUN)
    trainer.train()
    return result(trainer), trainer.predict(trainer.eval_dataset).predictions


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
@pytest.mark.acceptance
def test_four_ranks_train_as_two_processes_do(mesh: dict[str, int], tmp_path: Path) -> None:
    """Ranks that the mesh does not speak of are `dp`."""
    stock, predicted = values(gloo(2, stock_on_rank, str(tmp_path / STOCK)))[0]
    outcomes = values(gloo(4, on_mesh, str(tmp_path / OURS), mesh))
    assert_stock(outcomes, stock, predicted, tmp_path / OURS)


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ({"pp": 2}, {}, "'1' has running statistics, which a mesh axis 'pp' does not carry. Leave the axis out"),
        ({"tp": 3}, {}, "spec: mesh={'dp': -1, 'tp': 3} needs 3 ranks, there are 2: start a multiple of 3 ranks"),
        ({"pp": 2}, {"eval_use_gather_object": True}, "eval_use_gather_object=True: it takes each of the ranks of pp"),
        ({"tp": 2}, {}, "spec: tp_plan: Sequential has no plan of its own"),
        ({"pp": 2}, {"accelerator_config": SimpleNamespace(dispatch_batches=True)}, "accelerator_config.dispatch"),
    ],
)  # fmt: skip
def test_what_a_mesh_cannot_have_is_refused_by_name(mesh: Any, options: dict[str, Any], said: str) -> None:
    """On ranks of a mesh alone, so the check is asked here."""
    from fzero.interop.trainer.refusals import _mesh

    args = SimpleNamespace(world_size=2, spec={"mesh": mesh}, **{"accelerator_config": None, **options})
    found = [text for _, text in _mesh(args, nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), None, args.spec)]
    assert any(said in text for text in found), found
