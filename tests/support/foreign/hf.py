"""Architectures of transformers, tiny, in evaluation mode; batches as `hf_models` has them: ragged and padded.

The losses are computed from logits, as docs/models.md says; with CTC, from torch's own loss.
"""

from collections.abc import Callable
from typing import Any

import hf_models
import torch
import torch.nn.functional as F
from hf_models import DECODER, ENCODER, SPECIAL, VOCAB, WORDS
from torch import Tensor, nn

from foreign.case import Batch, Case

ONE = {**DECODER, **WORDS}
EXPERTS = {**ONE, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts": 4}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
TEXT = {**ENCODER, **WORDS, "type_vocab_size": 2}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32, "rotary_dim": 4}
BOTH = {
    **WORDS,
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in hf_models.WHISPER.items()},
    "d_model": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "num_decoder_layers": 2}
PICTURE = {**ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 5}
STAGED = {"image_size": 32, "num_labels": 5}
SOUND = {
    **ENCODER,
    "vocab_size": 16,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "num_labels": 5,
}

# architecture: its class, the batch, and its configuration
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Apertus": ("ApertusForCausalLM", "causal", ONE),
    "Arcee": ("ArceeForCausalLM", "causal", ONE),
    "BitNet": ("BitNetForCausalLM", "causal", ONE),
    "Cohere": ("CohereForCausalLM", "causal", ONE),
    "Cohere2": ("Cohere2ForCausalLM", "causal", {**ONE, "sliding_window": 6}),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        "causal",
        {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 1, "first_k_dense_replace": 1},
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "causal",
        {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "DiffLlama": ("DiffLlamaForCausalLM", "causal", ONE),
    "Ernie 4.5": ("Ernie4_5ForCausalLM", "causal", ONE),
    "EXAONE 4": ("Exaone4ForCausalLM", "causal", {**ONE, "sliding_window": 6}),
    "Falcon": ("FalconForCausalLM", "causal", {**WORDS, **ENCODER}),
    "Falcon-Mamba": ("FalconMambaForCausalLM", "plain", {**ONE, "state_size": 4}),
    "Gemma": ("GemmaForCausalLM", "causal", ONE),
    "Gemma 3": ("Gemma3ForCausalLM", "causal", {**ONE, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "GLM": ("GlmForCausalLM", "causal", ONE),
    "GLM-4": ("Glm4ForCausalLM", "causal", ONE),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "causal", GPT),
    "GPT-J": ("GPTJForCausalLM", "causal", GPT),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "causal",
        {
            **WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
            "intermediate_size": 48,
        },
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "causal", ONE),
    "gpt-oss": ("GptOssForCausalLM", "causal", {**EXPERTS, "sliding_window": 6}),
    "Granite": ("GraniteForCausalLM", "causal", ONE),
    "GraniteMoE": ("GraniteMoeForCausalLM", "causal", EXPERTS),
    "Helium": ("HeliumForCausalLM", "causal", ONE),
    "Jamba": (
        "JambaForCausalLM",
        "causal",
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
        },
    ),
    "LFM2": ("Lfm2ForCausalLM", "causal", {**ONE, "layer_types": ["conv", "full_attention"]}),
    "Ministral": ("MinistralForCausalLM", "causal", ONE),
    "MPT": (
        "MptForCausalLM",
        "causal",
        {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    ),
    "NanoChat": ("NanoChatForCausalLM", "causal", ONE),
    "Nemotron": ("NemotronForCausalLM", "causal", ONE),
    "OLMo": ("OlmoForCausalLM", "causal", ONE),
    "OLMo 2": ("Olmo2ForCausalLM", "causal", ONE),
    "OLMoE": ("OlmoeForCausalLM", "causal", EXPERTS),
    "OPT": ("OPTForCausalLM", "causal", {**ONE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Persimmon": ("PersimmonForCausalLM", "causal", {**ONE, "num_key_value_heads": 4}),
    "Phi": ("PhiForCausalLM", "causal", ONE),
    "Phi-3": ("Phi3ForCausalLM", "causal", ONE),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "causal", EXPERTS),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        "causal",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        "causal",
        {**ONE, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 6},
    ),
    "SmolLM3": ("SmolLM3ForCausalLM", "causal", ONE),
    "StableLM": ("StableLmForCausalLM", "causal", ONE),
    "StarCoder2": ("Starcoder2ForCausalLM", "causal", ONE),
    "XGLM": (
        "XGLMForCausalLM",
        "causal",
        {**WORDS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    ),
    "BLOOM": ("BloomForCausalLM", "causal", {**WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "CodeGen": ("CodeGenForCausalLM", "causal", GPT),
    "BioGPT": ("BioGptForCausalLM", "causal", ONE),
    "ALBERT": ("AlbertForMaskedLM", "masked", {**TEXT, "embedding_size": 16}),
    "BigBird": ("BigBirdForMaskedLM", "masked", {**TEXT, "attention_type": "original_full"}),
    "CamemBERT": ("CamembertForMaskedLM", "masked", TEXT),
    "ConvBERT": ("ConvBertForMaskedLM", "masked", {**TEXT, "embedding_size": 16}),
    "DeBERTa": ("DebertaForMaskedLM", "masked", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa-v2": (
        "DebertaV2ForMaskedLM",
        "masked",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "masked",
        {**WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "ELECTRA": ("ElectraForMaskedLM", "masked", {**TEXT, "embedding_size": 16}),
    "ESM": ("EsmForMaskedLM", "masked", {**TEXT, "mask_token_id": 2, "position_embedding_type": "rotary"}),
    "FNet": ("FNetForMaskedLM", "masked", TEXT),
    "Funnel": (
        "FunnelForMaskedLM",
        "masked",
        {
            "vocab_size": VOCAB,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
        },
    ),
    "Longformer": ("LongformerForMaskedLM", "masked, not padded", {**TEXT, "attention_window": 4}),
    "MobileBERT": (
        "MobileBertForMaskedLM",
        "masked",
        {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    "MPNet": ("MPNetForMaskedLM", "masked", TEXT),
    "RemBERT": ("RemBertForMaskedLM", "masked", {**TEXT, "input_embedding_size": 16, "output_embedding_size": 32}),
    "RoBERTa": ("RobertaForMaskedLM", "masked", TEXT),
    "RoFormer": ("RoFormerForMaskedLM", "masked", {**TEXT, "embedding_size": 32}),
    "SqueezeBERT": ("SqueezeBertForMaskedLM", "masked", {**TEXT, "embedding_size": 32}),
    "XLM-RoBERTa": ("XLMRobertaForMaskedLM", "masked", TEXT),
    "BART": ("BartForConditionalGeneration", "sequences", BOTH),
    "Blenderbot": ("BlenderbotForConditionalGeneration", "sequences", BOTH),
    "LED": (
        "LEDForConditionalGeneration",
        "sequences, not padded",
        {**BOTH, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    ),
    "LongT5": ("LongT5ForConditionalGeneration", "sequences", {**T5, "local_radius": 4}),
    "M2M100": ("M2M100ForConditionalGeneration", "sequences", BOTH),
    "Marian": ("MarianMTModel", "sequences", BOTH),
    "mBART": ("MBartForConditionalGeneration", "sequences", BOTH),
    "mT5": ("MT5ForConditionalGeneration", "sequences", T5),
    "Pegasus": ("PegasusForConditionalGeneration", "sequences", BOTH),
    "ProphetNet": (
        "ProphetNetForConditionalGeneration",
        "sequences",
        {
            **WORDS,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "ngram": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "SwitchTransformers": (
        "SwitchTransformersForConditionalGeneration",
        "sequences",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "BEiT": ("BeitForImageClassification", "images", PICTURE),
    "BiT": (
        "BitForImageClassification",
        "images",
        {**STAGED, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
    ),
    "ConvNeXt V2": (
        "ConvNextV2ForImageClassification",
        "images",
        {**STAGED, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "DeiT": ("DeiTForImageClassification", "images", PICTURE),
    "DINOv2": ("Dinov2ForImageClassification", "images", PICTURE),
    "EfficientNet": (
        "EfficientNetForImageClassification",
        "images",
        {**STAGED, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    ),
    "FocalNet": (
        "FocalNetForImageClassification",
        "images",
        {
            **STAGED,
            "embed_dim": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
        },
    ),
    "MobileNetV1": ("MobileNetV1ForImageClassification", "images", {**STAGED, "depth_multiplier": 0.25}),
    "MobileNetV2": ("MobileNetV2ForImageClassification", "images", {**STAGED, "depth_multiplier": 0.25}),
    "MobileViT": (
        "MobileViTForImageClassification",
        "images",
        {
            **STAGED,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 2,
        },
    ),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        "images",
        {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    "PVTv2": (
        "PvtV2ForImageClassification",
        "images",
        {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]},
    ),
    "RegNet": (
        "RegNetForImageClassification",
        "images",
        {**STAGED, "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "groups_width": 4},
    ),
    "SegFormer": (
        "SegformerForImageClassification",
        "images",
        {**STAGED, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]},
    ),
    "SigLIP": (
        "SiglipForImageClassification",
        "images",
        {"vision_config": {**ENCODER, "image_size": 32, "patch_size": 8}, "num_labels": 5},
    ),
    "Swin V2": (
        "Swinv2ForImageClassification",
        "images",
        {**STAGED, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4]},
    ),
    "AST": (
        "ASTForAudioClassification",
        "spectrogram",
        {
            **ENCODER,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 16,
            "num_mel_bins": 8,
            "num_labels": 5,
        },
    ),
    "HuBERT": ("HubertForSequenceClassification", "waves", SOUND),
    "wav2vec 2.0": ("Wav2Vec2ForSequenceClassification", "waves", SOUND),
    "wav2vec 2.0, CTC": ("Wav2Vec2ForCTC", "transcribed", SOUND),
    "WavLM": ("WavLMForSequenceClassification", "waves", SOUND),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        "told",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **ENCODER, "image_size": 16, "patch_size": 8},
            "image_token_index": 63,
            "image_seq_length": 4,
            "vision_feature_layer": -1,
        },
    ),
}


def case(name: str) -> Case:
    if name in hf_models.CASES:
        known = hf_models.CASES[name]
        return Case(lambda: known.make().eval(), lambda: known.batch(0, 0), _mean(known.loss), mutable=False)
    model, kind, options = FAMILIES[name]

    def make() -> nn.Module:
        import transformers  # seconds, which collecting the tests need not wait for

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, model)
        return cls(cls.config_class(**{**SPECIAL, **options})).eval()

    batch, loss = KINDS[kind]
    return Case(make, batch, loss, mutable=False)


def _mean(loss: Callable[[Any, Batch], tuple[Tensor, Tensor]]) -> Callable[[Callable[..., Any], Batch], Tensor]:
    def mean(model: Callable[..., Any], batch: Batch) -> Tensor:
        total, count = loss(model(**_given(batch)), batch)
        return total / count

    return mean


def _given(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key != "labels"}


def _images() -> Batch:
    g = hf_models.generator(0, 0)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g), "labels": torch.tensor([1, 4])}


def _heard(name: str, *shape: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        return {name: torch.randn(2, *shape, generator=hf_models.generator(0, 0)), "labels": torch.tensor([1, 4])}

    return batch


def _transcribed() -> Batch:
    return {
        **_heard("input_values", 400)(),
        "labels": torch.randint(1, 16, (2, 5), generator=hf_models.generator(0, 0)),
    }


def _ctc(model: Callable[..., Any], batch: Batch) -> Tensor:
    logits = model(**_given(batch)).logits.log_softmax(-1).transpose(0, 1)
    lengths = [len(logits)] * 2, [5] * 2
    return F.ctc_loss(logits, batch["labels"], *map(torch.tensor, lengths))


def _told() -> Batch:
    ids = torch.randint(3, 60, (2, 12), generator=hf_models.generator(0, 0))
    ids[:, 1:5] = 63
    pixels = torch.randn(2, 3, 16, 16, generator=hf_models.generator(0, 1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": ids}


def _whole(batch: Batch) -> Batch:
    """Without the mask of what is padded, for models that ask whether any token has global attention."""
    return {name: x for name, x in batch.items() if name != "attention_mask"}


KINDS: dict[str, tuple[Callable[[], Batch], Callable[[Callable[..., Any], Batch], Tensor]]] = {
    "causal": (lambda: hf_models.causal(0, 0), _mean(hf_models.next_token)),
    "plain": (lambda: hf_models.causal_without_mask(0, 0), _mean(hf_models.next_token)),
    "masked": (lambda: hf_models.masked(0, 0), _mean(hf_models.same_place)),
    "masked, not padded": (lambda: _whole(hf_models.masked(0, 0)), _mean(hf_models.same_place)),
    "sequences, not padded": (lambda: _whole(hf_models.sequences(0, 0)), _mean(hf_models.same_place)),
    "sequences": (lambda: hf_models.sequences(0, 0), _mean(hf_models.same_place)),
    "images": (_images, _mean(hf_models.same_place)),
    "spectrogram": (_heard("input_values", 16, 8), _mean(hf_models.same_place)),
    "waves": (_heard("input_values", 400), _mean(hf_models.same_place)),
    "transcribed": (_transcribed, _ctc),
    "told": (_told, _mean(hf_models.next_token)),
}
FAMILIES = {**dict.fromkeys(hf_models.CASES), **FAMILIES}
