"""Hugging Face architectures, tiny, from configurations: nothing is downloaded.

Each case makes a model, and per rank and step a batch of plain tensors; `loss(outputs, batch)` is a total and a count,
so that the mean over ragged sequences is the global one. Text is padded, on both sides, with a 2-D attention mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, ROWS = 64, 12, 2
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """`make()` is a model (options of its config may be given), `batch(rank, step)` the arguments of its forward and
    `labels`, `loss` the total and the count of a mean. `zero_gradient` names leaves (path rules) whose true gradient is
    zero: what an optimizer makes of their rounding is not compared."""

    task: str
    make: Callable[..., nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]]
    zero_gradient: tuple[str, ...] = ()
    optimizer: str = "AdamW"


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def ragged(rank: int, step: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Token ids and a mask, of shape (ROWS, length): another length in each row, padded left in the odd ones."""
    g = generator(rank, step)
    ids = torch.randint(3, VOCAB, (ROWS, length), generator=g)
    lengths = torch.randint(length // 2, length + 1, (ROWS,), generator=g)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    mask[1::2] = mask[1::2].flip(1)
    return ids * mask, mask


def causal(rank: int, step: int) -> dict[str, Tensor]:
    ids, mask = ragged(rank, step)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def causal_without_mask(rank: int, step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator(rank, step))
    return {"input_ids": ids, "labels": ids}


def masked(rank: int, step: int) -> dict[str, Tensor]:
    ids, mask = ragged(rank, step)
    hidden = (torch.rand(ids.shape, generator=generator(rank, step)) < 0.3) & (mask == 1)
    labels = ids.masked_fill(~hidden, IGNORED)
    return {"input_ids": ids.masked_fill(hidden, 2), "attention_mask": mask, "labels": labels}


def sequences(rank: int, step: int) -> dict[str, Tensor]:
    ids, mask = ragged(rank, step)
    target, kept = ragged(rank, step + 500, 8)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": kept,
        "labels": target.masked_fill(kept == 0, IGNORED),
    }


def images(rank: int, step: int) -> dict[str, Tensor]:
    g = generator(rank, step)
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=g),
        "labels": torch.randint(0, 5, (ROWS,), generator=g),
    }


def sound(rank: int, step: int) -> dict[str, Tensor]:
    g = generator(rank, step)
    target, kept = ragged(rank, step, 8)
    return {
        "input_features": torch.randn(ROWS, 8, 32, generator=g),
        "decoder_input_ids": target,
        "decoder_attention_mask": kept,
        "labels": target.masked_fill(kept == 0, IGNORED),
    }


def pairs(rank: int, step: int) -> dict[str, Tensor]:
    return {k: v for k, v in {**causal(rank, step), **images(rank, step)}.items() if k != "labels"}


def next_token(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"][:, 1:]
    return _total(outputs.logits[:, :-1].transpose(1, 2), labels)


def same_place(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = outputs.logits
    return _total(logits.transpose(1, 2) if logits.ndim == 3 else logits, batch["labels"])


def similarity(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Image and text of a row alike: a mean over rows (CLIP's own loss contrasts the rows of one rank's batch)."""
    total = torch.nn.functional.softplus(-outputs.logits_per_text.diagonal()).sum()
    return total, total.new_full((), len(batch["input_ids"]))


def _total(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


# --- the models -------------------------------------------------------------------------------------------------------

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IMAGE = {"image_size": 16, "patch_size": 8}
WORDS = {"vocab_size": VOCAB, "max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {**DECODER, "num_experts_per_tok": 2}


def made(model: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        import transformers  # seconds, which collecting the tests need not wait for

        transformers.logging.set_verbosity_error()
        given = getattr(transformers, config)(**{**SPECIAL, **options, **more})
        return getattr(transformers, model)(given)

    return make


def whisper() -> nn.Module:
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in WHISPER.items()}
    options = {**sizes, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    make = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **options,
        vocab_size=VOCAB,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    return make()


WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def lm(model: str, config: str, batch: Any = causal, zero_gradient: tuple[str, ...] = (), **options: Any) -> Case:
    return Case("causal language model", made(model, config, **options), batch, next_token, zero_gradient)


CASES: dict[str, Case] = {
    "Llama": lm("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "Mistral": lm("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=6),
    "Qwen2": lm("Qwen2ForCausalLM", "Qwen2Config", zero_gradient=("**/k_proj/bias",), **DECODER),
    "Qwen3": lm("Qwen3ForCausalLM", "Qwen3Config", **DECODER),
    "Gemma2": lm("Gemma2ForCausalLM", "Gemma2Config", **DECODER, query_pre_attn_scalar=8, sliding_window=6),
    "GPT-2": lm(
        "GPT2LMHeadModel",
        "GPT2Config",
        zero_gradient=("**/c_attn/bias",),
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
    ),
    "Mixtral": lm("MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=4),
    "Qwen2-MoE": lm(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        zero_gradient=("**/k_proj/bias",),
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "Mamba": lm(
        "MambaForCausalLM",
        "MambaConfig",
        causal_without_mask,
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
    ),
    "Mamba2": lm(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    "BERT": Case(
        "masked language model",
        made("BertForMaskedLM", "BertConfig", **ENCODER, **WORDS),
        masked,
        same_place,
        ("**/key/bias",),
    ),
    "ModernBERT": Case(
        "masked language model",
        made("ModernBertForMaskedLM", "ModernBertConfig", **ENCODER, **WORDS, cls_token_id=1, sep_token_id=2),
        masked,
        same_place,
    ),
    "T5": Case(
        "sequence to sequence",
        made(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        sequences,
        same_place,
    ),
    "Whisper": Case("speech to text", whisper, sound, same_place),
    "ViT": Case(
        "image classification",
        made("ViTForImageClassification", "ViTConfig", **ENCODER, **IMAGE, num_labels=5),
        images,
        same_place,
        ("**/k_proj/bias",),
        "SGD",  # with Adam, elements whose gradient is 1e-9 move by the learning rate, in rounding's direction
    ),
    "ConvNeXt": Case(
        "image classification",
        made(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            num_stages=2,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_labels=5,
        ),
        images,
        same_place,
    ),
    "Swin": Case(
        "image classification",
        made(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            window_size=4,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 4],
            num_labels=5,
            drop_path_rate=0.0,
        ),
        images,
        same_place,
        ("**/k_proj/bias",),
    ),
    "ResNet": Case(
        "image classification",
        made(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
            num_labels=5,
        ),
        images,
        same_place,
    ),
    "CLIP": Case(
        "image and text",
        made(
            "CLIPModel",
            "CLIPConfig",
            text_config={**ENCODER, **WORDS, **SPECIAL},
            vision_config={**ENCODER, **IMAGE},
            projection_dim=16,
        ),
        pairs,
        similarity,
        ("**/k_proj/bias",),
    ),
}
