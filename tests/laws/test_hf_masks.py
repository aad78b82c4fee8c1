"""Captured decoders of Hugging Face build no more masks than uncaptured ones, and compute the same with every mask.

transformers leaves a causal mask out where it can see that nothing else is masked, and asks whether it is traced before
it looks. A capture knows the positions that a model makes itself. So with sdpa no value grows with the square of the
length. A mask or positions from the batch are known only when the step runs: their mask is built, once for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from capturing import captured, nodes, sgd_step
from hf_models import DECODER, EXPERTS, SPECIAL, VOCAB
from torch import Tensor, nn

import fzero
from fzero.capture.graph import Graph
from fzero.interop import from_module
from fzero.ir import fx_values

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

LENGTH, ROWS, LAYERS = 41, 2, 2  # a length that no other dim has
SIZES = {**DECODER, "max_position_embeddings": 128}
HEADS = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}  # of their own
OLD = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB}
MANY = {**EXPERTS, "max_position_embeddings": 128}

DECODERS: dict[str, dict[str, Any]] = {
    "Arcee": SIZES,
    "BioGpt": HEADS,
    "Cohere": SIZES,
    "Cohere2": SIZES,
    "Exaone4": SIZES,
    "GPT2": OLD,
    "GPTBigCode": OLD,
    "GPTNeoX": HEADS,
    "Gemma": SIZES,
    "Gemma3Text": SIZES,
    "Glm": SIZES,
    "Granite": SIZES,
    "Helium": SIZES,
    "Llama": SIZES,
    "Mistral": SIZES,  # its window is longer than the batch
    "Mixtral": {**MANY, "num_local_experts": 4},
    "Nemotron": SIZES,
    "OPT": {**{k: v for k, v in HEADS.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo": SIZES,
    "Olmo2": SIZES,
    "Olmoe": {**MANY, "num_experts": 4},
    "Persimmon": HEADS,
    "Phi": SIZES,
    "Phi3": SIZES,
    "Qwen2": SIZES,
    "Qwen3": SIZES,
    "Qwen3Moe": {**MANY, "num_experts": 4, "moe_intermediate_size": 16},
    "SeedOss": SIZES,
    "SmolLM3": SIZES,
    "StableLm": SIZES,
    "Starcoder2": SIZES,
}


def decoder(name: str, **options: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{name}Config")(**{**SPECIAL, **DECODERS[name], **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def plain(length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def padded(length: int) -> dict[str, Tensor]:
    """Padded left in the first row, right in the second."""
    batch, mask = plain(length), torch.ones(ROWS, length, dtype=torch.int64)
    mask[0, : length // 3], mask[1, -length // 4 :] = 0, 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def whole(length: int) -> dict[str, Tensor]:
    """With a mask that hides nothing; but that is known only when the step runs."""
    return {**plain(length), "attention_mask": torch.ones(ROWS, length, dtype=torch.int64)}


def packed(length: int) -> dict[str, Tensor]:
    """Two documents in each row."""
    first = length // 3
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(ROWS, -1).contiguous()
    return {**plain(length), "position_ids": positions}


BATCHES = {"plain": plain, "padded": padded, "whole": whole, "packed": packed}


@dataclass(frozen=True)
class Captured:
    """A decoder, its Spec, and a batch for it."""

    model: nn.Module
    params: dict[str, Tensor]
    spec: fzero.Spec
    batch: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, batch: dict[str, Tensor], **closed_over: Tensor) -> Captured:
        params, buffers, apply = from_module(model)

        def loss(p: Any, b: dict[str, Tensor]) -> Tensor:
            return apply(p, buffers, **b, **closed_over, use_cache=False).loss

        return cls(model, params, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), allow_unused=True), batch)

    def graph(self) -> Graph:
        assert self.spec.loss is not None
        return captured(sgd_step(self.spec.loss), {"p": self.params}, self.batch, allow_unused=True)

    def values(self) -> list[Tensor]:
        """The fake tensors of all nodes of its region."""
        return [value for region in self.graph().regions for value in _of(region.gm)]

    def squares(self) -> list[tuple[int, ...]]:
        """The shapes of the values with two dims of the batch's length."""
        length = self.batch["input_ids"].shape[1]
        return [tuple(x.shape) for x in self.values() if list(x.shape).count(length) >= 2]


def _of(gm: torch.fx.GraphModule) -> Iterator[Tensor]:
    for node in gm.graph.nodes:
        yield from fx_values.tensors(node.meta.get("val"))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.sampled(2)
def test_no_value_of_a_causal_decoder_grows_with_the_square_of_the_length(name: str) -> None:
    short, long = (Captured.of(decoder(name), plain(length)).values() for length in (LENGTH, 2 * LENGTH))
    assert len(short) == len(long)
    grown = [(tuple(a.shape), tuple(b.shape)) for a, b in zip(short, long, strict=True) if b.numel() > 2 * a.numel()]
    assert not grown


@pytest.mark.parametrize("kind", ["padded", "whole", "packed"])
def test_the_law_sees_masks_where_they_are_needed(kind: str) -> None:
    assert Captured.of(decoder("Llama"), BATCHES[kind](LENGTH)).squares()


def test_grouped_keys_stay_grouped() -> None:
    graph = Captured.of(decoder("Qwen2"), plain(LENGTH)).graph()
    attention = [n for n in nodes(graph.regions[0].gm) if "scaled_dot_product" in str(n.target)]
    assert len(attention) == 2 * LAYERS
    forward = [n for n in attention if "backward" not in str(n.target)]
    assert [tuple(arg.meta["val"].shape[:2]) for n in forward for arg in n.args[:3]] == [
        (ROWS, 4),
        *2 * [(ROWS, 2)],
    ] * LAYERS


def test_a_window_needs_its_mask_from_its_length_on() -> None:
    for window, needed in ((LENGTH + 1, False), (LENGTH, True), (8, True)):
        assert bool(Captured.of(decoder("Mistral", sliding_window=window), plain(LENGTH)).squares()) is needed, window


def test_a_mask_that_is_closed_over_is_known() -> None:
    """One that hides nothing is left out; another is built."""
    model, ones = decoder("Llama"), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    hides = ones.clone()
    hides[0, :5] = 0
    assert not Captured.of(model, plain(LENGTH), attention_mask=ones).squares()
    case = Captured.of(model, plain(LENGTH), attention_mask=hides)
    assert case.squares()
    _trains_as_torch_does(case, attention_mask=hides)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.sampled(2)
def test_every_mask_gives_the_losses_of_torch(name: str, kind: str) -> None:
    model = (
        decoder(name) if kind != "packed" else decoder(name, sliding_window=8) if name == "Mistral" else decoder(name)
    )
    _trains_as_torch_does(Captured.of(model, BATCHES[kind](LENGTH)))


def _trains_as_torch_does(case: Captured, **closed_over: Tensor) -> None:
    """Two steps: their losses, the second of which shows the gradients of the first."""
    state, optimizer = fzero.init(case.params, case.spec), torch.optim.SGD(case.model.parameters(), 0.1)
    for _ in range(2):
        state = fzero.step(state, case.batch)
        loss = case.model(**case.batch, **closed_over, use_cache=False).loss
        assert state.metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "window"), [("padded", None), ("packed", None), ("plain", 8), ("padded", 8)])
@pytest.mark.sampled(1)
def test_a_mask_becomes_a_bias_once_a_step_and_not_in_each_layer(kind: str, window: int | None) -> None:
    model = decoder("Mistral", num_hidden_layers=4, sliding_window=window)
    case = Captured.of(model, BATCHES[kind](LENGTH))
    program = fzero.lower(case.spec, case.params, case.batch).program
    made = [
        n for op in program.ops if op.segment for n in nodes(program.segments[op.segment], torch.ops.aten.where.self)
    ]
    biases = [n for n in made if n.meta["val"].shape[-2:] == (LENGTH, LENGTH) and n.meta["val"].is_floating_point()]
    assert len(biases) == 1
