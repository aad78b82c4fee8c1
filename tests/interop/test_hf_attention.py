"""hf_attention: models of transformers as they are, against their own sdpa with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim, sparse
from fzero.errors import SpecError
from fzero.interop import from_module, register_attention

transformers = pytest.importorskip("transformers")
TOKENS, VOCAB, WINDOW = 64, 64, 20
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ENCODER = {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
# name: (the model's class, options of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "Gemma2": ("Gemma2ForCausalLM", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "layer_types": KINDS}),
    "GptOss": ("GptOssForCausalLM", {
        "sliding_window": WINDOW, "layer_types": KINDS, "num_local_experts": 2, "num_experts_per_tok": 1,
    }),
    "Gemma3": ("Gemma3ForCausalLM", {"sliding_window": WINDOW, "layer_types": KINDS}),
    "Qwen2": ("Qwen2ForCausalLM", {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": KINDS}),
    "Llama4": ("Llama4ForCausalLM", {
        "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    }),
    "Llama": ("LlamaForCausalLM", {}),
    "ModernBert": ("ModernBertForMaskedLM", {"local_attention": WINDOW, "global_attn_every_n_layers": 2}),
    "Bert": ("BertForMaskedLM", {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}),
}  # fmt: skip
EAGER = ("Gemma2", "GptOss")  # softcaps and sinks: they have no sdpa
CASES = ("plain", "padded", "packed")


def config_of(name: str, **changed: Any) -> Any:
    family, options = MODELS[name]
    kind = family.partition("For")[0] + ("TextConfig" if name in ("Gemma3", "Llama4") else "Config")
    common = ENCODER if "Bert" in name else COMMON
    return getattr(transformers, kind)(**{**common, **options, **changed})


def model_of(name: str, implementation: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(name, **changed)
    config._attn_implementation = implementation
    return getattr(transformers, MODELS[name][0])(config)


def batch_of(case: str, name: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=generator)
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    if case == "padded":
        mask = torch.ones_like(ids)
        mask[0, 50:] = 0
        mask[1, :7] = 0
        labels.masked_fill_(mask == 0, -100)
        labels[1, 7] = -100  # what a padded token would predict
        batch["attention_mask"] = mask
    if case == "packed":
        batch["position_ids"] = torch.cat([torch.arange(25), torch.arange(9), torch.arange(30)]).expand(2, -1)
    return batch


def compared(name: str, case: str) -> None:
    found = []
    for implementation in ("eager" if name in EAGER else "sdpa", register_attention()):
        model = model_of(name, implementation)
        out = model(**batch_of(case), **({} if "Bert" in name else {"use_cache": False}))
        names, leaves = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
        found.append((out.loss, dict(zip(names, grads, strict=True))))
    (wanted, grads), (loss, own) = found
    assert abs(float(loss / wanted) - 1) <= 1e-5
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    for path, grad in grads.items():
        if grad is not None:
            assert float((own[path] - grad).abs().max()) <= 1e-5 * largest, path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(12)
def test_a_model_has_the_loss_and_gradients_of_its_sdpa(name: str, case: str) -> None:
    if case == "packed" and "Bert" in name:
        pytest.skip("encoders take no packed positions")
    compared(name, case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_so_has_a_step(case: str) -> None:
    """Captured, with a batch whose masks and positions are known only when it runs."""
    losses = []
    for implementation in ("sdpa", register_attention()):
        params, buffers, apply = from_module(model_of("Mistral", implementation, num_hidden_layers=1))

        def loss(p: Any, b: Any, apply: Any = apply, buffers: Any = buffers) -> Tensor:
            return apply(p, buffers, **b, use_cache=False).loss

        state = fzero.init(params, fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2)))
        for _ in range(3):
            state = fzero.step(state, batch_of(case))
        losses.append(float(state.metrics["loss"]))
    assert abs(losses[1] / losses[0] - 1) <= 1e-4


def test_the_window_is_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of tokens x tokens is built."""
    seen = []

    def watched(q: Tensor, k: Tensor, v: Tensor, layout: sparse.BlockLayout, **rest: Any) -> Tensor:
        seen.append((layout.left, layout.right, rest["documents"] is None))
        return real(q, k, v, layout, **rest)

    real = sparse.attention
    monkeypatch.setattr(sparse, "attention", watched)
    for name in ("Mistral", "Gemma3", "ModernBert"):
        model_of(name, register_attention())(**batch_of("plain"))
    window, full = (WINDOW - 1, 0, True), (None, 0, True)
    both, near = (None, None, True), (WINDOW // 2, WINDOW // 2, True)
    assert seen == [window] * 3 + [window, full, window] + [both, near, both]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Mistral", {"attention_dropout": 0.1}, "dropout_p=0.1"),
    ],
)
def test_what_the_op_has_not_is_refused(name: str, change: dict[str, Any], said: str) -> None:
    config = config_of(name)
    for key, value in change.items():
        setattr(config, key, value)
    config._attn_implementation = register_attention()
    model = getattr(transformers, MODELS[name][0])(config).train()
    with pytest.raises(SpecError, match=said):
        model(**batch_of("plain"), use_cache=False)


def test_masks_and_lengths_that_are_refused() -> None:
    model, batch = model_of("Mistral", register_attention()), batch_of("plain")
    with pytest.raises(SpecError, match=r"a mask of shape \(2, 1, 64, 64\) was given; needed \(batch, tokens\)"):
        model(**batch, attention_mask=torch.zeros(2, 1, TOKENS, TOKENS), use_cache=False)
    with pytest.raises(SpecError, match="60 tokens are no multiple of block=16; pad by 4 to 64"):
        model(**{name: x[:, :60] for name, x in batch.items()}, use_cache=False)
    out = model(**batch, use_cache=True)
    with pytest.raises(SpecError, match="1 queries and 20 keys of a cache; it trains only"):
        model(batch["input_ids"][:, :1], past_key_values=out.past_key_values)


def test_a_mask_that_is_not_known_is_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    config = config_of("Llama")
    config._attn_implementation = register_attention()
    with pytest.raises(SpecError, match="combines masks in a way that is not known"):
        create_causal_mask(
            config, torch.zeros(1, 16, 32), None, None, or_mask_function=lambda b, h, q, k: q >= k
        )  # fmt: skip
