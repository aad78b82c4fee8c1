"""After training, every use of `trainer.model` that reads values says how to have them: none computes with nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import FzeroError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, make  # noqa: E402


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make(OURS, "llama", tmp_path_factory.mktemp("run"), max_steps=1)
    trainer.train()
    return trainer


IDS = torch.ones(1, 3, dtype=torch.int64)
USES: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to("cpu"),
    "to_empty": lambda model: model.to_empty(device="cpu"),  # which gave whatever lies in memory
    "half": lambda model: model.half(),
    "call": lambda model: model(input_ids=IDS),
    "generate": lambda model: model.generate(IDS, max_new_tokens=2),
    "a layer": lambda model: model.lm_head(torch.ones(1, 16)),
    "the table": lambda model: model.get_input_embeddings()(IDS),
    "a norm": lambda model: model.model.norm(torch.ones(1, 16)),
    "the model within": lambda model: model.model(input_ids=IDS),
    "state_dict": lambda model: model.state_dict(),
    "save_pretrained": lambda model: model.save_pretrained("runs/none"),
    "deepcopy": copy.deepcopy,
    "item": lambda model: model.lm_head.weight.sum().item(),
    "numpy": lambda model: model.lm_head.weight.detach().numpy(),
    "data": lambda model: model.lm_head.weight.data,
    "tolist": lambda model: model.lm_head.weight.tolist(),
    "arithmetic": lambda model: model.lm_head.weight + 1,
    "index": lambda model: model.lm_head.weight[0],
    "stack": lambda model: torch.stack([p for p in model.parameters() if p.dim() == 1]),
    "fill": lambda model: torch.nn.init.zeros_(model.lm_head.weight),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_names_gathered_and_no_advice_of_torchs(use: str, trainer: Any) -> None:
    with pytest.raises(FzeroError, match=r"has no values of its own now.*with trainer\.gathered\(\) as model") as error:
        USES[use](trainer.model)
    assert not re.search(r"to_empty|meta", str(error.value))


def test_what_a_parameter_is_can_be_asked(trainer: Any) -> None:
    """As progress bars, counts of parameters and callbacks do."""
    model = trainer.model
    assert model.num_parameters() == sum(p.numel() for p in model.parameters()) > 0
    weight = model.lm_head.weight
    assert (weight.shape, weight.dtype, weight.dim(), weight.size(0)) == ((32, 16), torch.float32, 2, 32)
    assert weight.requires_grad
    assert weight.grad is None
    assert "Linear(in_features=16, out_features=32" in str(model)
    model.zero_grad()


def test_a_parameter_is_named(trainer: Any) -> None:
    with pytest.raises(FzeroError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' of LlamaForCausalLM has no values"):
        trainer.model.model.layers[0].mlp.up_proj.weight.norm()


def test_gathered_parameters_are_plain_and_absent_afterwards(trainer: Any) -> None:
    with trainer.gathered() as model:
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        whole = model.lm_head.weight.detach().clone()
    assert torch.equal(whole, fzero.unshard(trainer.engine.state.params)["lm_head.weight"])
    with pytest.raises(FzeroError, match="gathered"):
        trainer.model.lm_head.weight.sum()


def test_a_module_with_its_values_clears_its_gradients(trainer: Any) -> None:
    """Without them there is nothing to look through after each step."""
    trainer.model.zero_grad()
    with trainer.gathered() as model:
        weight = model.lm_head.weight
        weight.grad = torch.ones_like(weight)
        model.zero_grad()
        assert weight.grad is None
    assert "zero_grad" in vars(trainer.model)
