"""Adafactor and Muon in the Trainer: the numbers of the stock one with the same optimizer, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values

import fzero
from fzero.errors import CaptureError, ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, llama, result, run, seeded, text  # noqa: E402

Make = Callable[[Any], Any]


def both(folder: Path, optimizers: Make | None = None, close: float = 1e-5, **given: Any) -> Any:
    """fzero's Trainer, after both had the same losses, rates and parameters."""
    found = []
    for kind in (OURS, STOCK):
        model = seeded(lambda: llama()[0])
        own = {"optimizers": optimizers(model)} if optimizers else {}
        found.append(run(kind, folder / kind, model, text(12, 0), **{**given, **own}))
    ours, stock = map(result, found)
    assert ours.losses == pytest.approx(stock.losses, rel=close, abs=close)
    assert ours.rates == pytest.approx(stock.rates)
    assert all(float((ours.params[n] - value).abs().max()) < 10 * close for n, value in stock.params.items())
    return found[0]


def test_adafactor_by_its_name(tmp_path: Path) -> None:
    """With a decay that leaves norms out, and the schedule and clipping of the arguments."""
    trainer = both(tmp_path, optim="adafactor", weight_decay=0.1)
    assert type(trainer.engine.state.tree["opt_state"]).__name__ == "AdafactorState"


@pytest.mark.parametrize(
    "named",
    [
        {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "clip_threshold": 0.5, "decay_rate": -0.6},
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "eps": (1e-8, 1e-2), "weight_decay": 0.3},
        {"relative_step": True, "warmup_init": True},
    ],
    ids=["scaled", "eps", "relative"],
)
@pytest.mark.sampled(1)
def test_adafactor_of_transformers_as_given(named: dict[str, Any], tmp_path: Path) -> None:
    from transformers.optimization import Adafactor, AdafactorSchedule

    def optimizers(model: Any) -> Any:
        made = Adafactor(model.parameters(), **named)
        return made, AdafactorSchedule(made) if named["relative_step"] else None

    if not named["relative_step"]:
        both(tmp_path, optimizers)
        return
    found = []  # the rates that are logged are transformers' own of the first parameter, and here the schedule's 0
    for kind in (OURS, STOCK):
        model = seeded(lambda: llama()[0])
        found.append(result(run(kind, tmp_path / kind, model, text(12, 0), optimizers=optimizers(model))))
    assert found[0].losses == pytest.approx(found[1].losses, abs=1e-5)


def test_adafactor_of_torch_as_given(tmp_path: Path) -> None:
    both(tmp_path, lambda model: (torch.optim.Adafactor(model.parameters(), 1e-2, d=1.5, weight_decay=0.1), None))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False, beta1=0.9), "optimizer.beta1: fzero.optim"),
        (lambda p: transformers.Adafactor(p), "optimizer.lr: it is None, and no schedule says the rate. Give "),
        (lambda p: torch.optim.Adafactor([{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:]}]),
         "optimizer.weight_decay: torch.optim.Adafactor has one decay for all leaves here"),
    ],
)  # fmt: skip
def test_what_adafactor_cannot_be_is_refused_by_name(make: Any, said: str, tmp_path: Path) -> None:
    model = llama()[0]
    with pytest.raises(ConfigError) as error:
        run(OURS, tmp_path, model, text(4, 0), optimizers=(make(list(model.parameters())), None), max_steps=1)
    assert said in str(error.value)


def matrices(model: Any) -> list[Any]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name]


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.sampled(1)
def test_muon_as_given(adjust: str | None, tmp_path: Path) -> None:
    """In two groups, one without decay. It steps in bfloat16, in which a last bit of a gradient may turn one of it.
    What is in no group stays."""

    def muon(model: Any) -> Any:
        own = matrices(model)
        groups = [{"params": own[:3], "lr": 4e-3}, {"params": own[3:], "weight_decay": 0.0}]
        return torch.optim.Muon(groups, lr=2e-3, momentum=0.9, adjust_lr_fn=adjust), None

    trainer = both(tmp_path, muon, close=1e-4)
    before = seeded(lambda: llama()[0])
    after = fzero.unshard(trainer.engine.state.params)
    still = [n for n, p in before.named_parameters() if torch.equal(after[n], p)]
    assert sorted(still) == sorted(
        n for n, p in before.named_parameters() if p.dim() == 1 or "embed" in n or "head" in n
    )


class Both(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer of torch."""

    def __init__(self, model: Any, **aux: Any) -> None:
        own = matrices(model)
        rest = [p for p in model.parameters() if all(p is not other for other in own)]
        self.parts = torch.optim.Muon(own, lr=2e-3, weight_decay=0.0), torch.optim.AdamW(rest, lr=2e-3, **aux)
        super().__init__([{"params": group["params"], "lr": group["lr"]} for group in self.groups()], {})

    def groups(self) -> list[Any]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, group in zip(self.groups(), self.param_groups, strict=True):
            own["lr"] = group["lr"]
        for part in self.parts:
            part.step()


def test_muon_of_a_ds_config(tmp_path: Path) -> None:
    """The file's Muon, with AdamW for what is no hidden matrix, and the schedule of the arguments."""
    document = {"optimizer": {"type": "Muon", "params": {"lr": 2e-3}}, "gradient_clipping": 1.0}
    ours = run(OURS, tmp_path / OURS, seeded(lambda: llama()[0]), text(12, 0), deepspeed=document, learning_rate=2e-3,
               weight_decay=0.0)  # fmt: skip
    assert type(ours.engine.state.tree["opt_state"]).__name__ == "MuonState"
    model = seeded(lambda: llama()[0])
    optimizer = Both(model, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    stock = run(STOCK, tmp_path / STOCK, model, text(12, 0), optimizers=(optimizer, None))
    assert result(ours).losses == pytest.approx(result(stock).losses, abs=1e-4)


def adafactor_on_rank(folder: str) -> Any:
    """The losses and parameters of both kinds. At the top for `gloo`."""
    found = []
    for kind in (OURS, STOCK):
        model = seeded(lambda: llama()[0])
        trainer = run(kind, Path(folder) / kind, model, text(16, 0), optim="adafactor", weight_decay=0.1, max_steps=3)
        found.append((result(trainer).losses, result(trainer).params))
    return found


@pytest.mark.acceptance
def test_adafactor_over_two_ranks(tmp_path: Path) -> None:
    """Its factored moments are of whole matrices, whose gradients lie in slices."""
    for (ours, params), (stock, expected) in values(gloo(2, adafactor_on_rank, str(tmp_path))):
        assert ours == pytest.approx(stock, abs=1e-5)
        assert all(float((params[n] - value).abs().max()) < 1e-4 for n, value in expected.items())


def test_a_loss_updates_frozen_leaves_and_no_others() -> None:
    """What the Trainer's statistics are made with: a metric `updated` of `fzero.training`."""

    def loss(params: Any, batch: Any, name: str = "seen") -> Any:
        return (params["w"] * batch).sum(), {"updated": {name: params["seen"] + batch.sum()}}

    spec = {"optimizer": fzero.optim.sgd(0.1), "trainable": "w"}
    params = {"w": torch.ones(2), "seen": torch.zeros(())}
    state = fzero.init(params, fzero.Spec(loss=loss, **spec))
    state = fzero.step(fzero.step(state, torch.ones(2)), torch.ones(2))
    assert float(state.params["seen"].full()) == 4.0
    assert "updated" not in state.metrics
    other = fzero.init(params, fzero.Spec(loss=lambda p, b: loss(p, b, "w"), **spec))
    with pytest.raises(CaptureError, match="'w' is no frozen leaf of params"):
        fzero.step(other, torch.ones(2))
