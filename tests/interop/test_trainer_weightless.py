"""Families of transformers whose batches a Trainer pads: what is added weighs nothing in the loss of plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from foreign import hf  # noqa: E402
from foreign.hf import ENCODER, SPECIAL, TEXT, VOCAB  # noqa: E402

from fzero.interop.trainer import shapes, weightless  # noqa: E402

PLACES, LENGTH, LONGER = 80, 11, 64  # an odd length, which pooling fills up
TOKENS: dict[str, Any] = {
    **ENCODER, "type_vocab_size": 2, "downsampling_rate": 4, "local_transformer_stride": 16, "num_hash_buckets": PLACES,
    "num_hash_functions": 2, "max_position_embeddings": PLACES, "num_labels": VOCAB,
}  # fmt: skip
ANT = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48,
       "num_hidden_layers": 2, "prompt_length": 4, "prompt_types": 4, "segment_types": 4}  # fmt: skip
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CANINE": ("CanineForTokenClassification", "masked", TOKENS),
    "CPM-Ant": ("CpmAntForCausalLM", "causal", ANT),
    "Llama, tokens": ("LlamaForTokenClassification", "causal", {**hf.ONE, "num_labels": VOCAB}),
    "Nystromformer": (
        "NystromformerForMaskedLM", "masked", {**TEXT, "num_landmarks": PLACES, "segment_means_seq_len": PLACES}
    ),
    "YOSO": ("YosoForMaskedLM", "masked", {**TEXT, "use_expectation": True}),
}  # fmt: skip
KINDS = ("causal", "plain", "masked", "sequences")
SAME = {  # in which the effect on a loss is too small to be measured so
    "MobileBERT"
}
FAMILIES = {n: row for n, row in hf.FAMILIES.items() if row and row[1].partition(",")[0] in KINDS} | OTHERS


def model(name: str) -> Any:
    """The model in evaluation, with values as trained ones have them: of biases and of the pad token's row too."""
    kind, _, options = FAMILIES[name]
    longer = {
        key: PLACES for key, n in options.items() if n == 32 and ("position" in key or key in ("n_ctx", "max_seq_len"))
    }
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    result = made(made.config_class(**{**SPECIAL, **options, **longer})).eval()
    with torch.no_grad():
        for value in result.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return result


def batch(kind: str) -> dict[str, Tensor]:
    """Rows of several lengths, as a collator pads them."""
    ids = torch.randint(3, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 9, 5])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels = labels[:, :7].clone() if kind.startswith("sequences") else labels
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    fills = {"labels": -100}
    return {n: F.pad(x, (0, LONGER - x.shape[1]), value=fills.get(n, 0)) for n, x in batch.items()}


class Trained(transformers.Trainer):
    def __init__(self, model: Any) -> None:
        self.model, self.label_names, self.compute_loss_func = model, ["labels"], None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(6)
def test_padded_places_weigh_nothing_where_batches_are_padded(name: str) -> None:
    """The complaint: Funnel, Nystromformer and others took padded places into the loss, mask or not, and were padded to
    64 without a word."""
    made, given = model(name), batch(FAMILIES[name][1])
    pads = weightless.places(Trained(made))
    with torch.no_grad():
        short, long = made(**given).loss, made(**padded(given)).loss
    if pads:
        assert torch.allclose(short, long, rtol=3e-6, atol=0), f"{name}: {float(short)} and {float(long)}"
    elif made.config.model_type in weightless.UNMASKED and name not in SAME:
        assert not torch.allclose(short, long, rtol=3e-6, atol=0), f"{name} may be padded"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(6)
def test_rows_without_labels_weigh_nothing_where_short_batches_are_filled(name: str) -> None:
    """The complaint: mBART looks for the last label of each row, and a short last batch ended in torch's IndexError."""
    made, given = model(name), batch(FAMILIES[name][1])
    if weightless.rows(Trained(made), given):
        with torch.no_grad():
            short, long = made(**given).loss, made(**shapes.filled(given, 7)).loss
        assert torch.allclose(short, long, rtol=3e-6, atol=0), f"{name}: {float(short)} and {float(long)}"


ONE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL_TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **ONE}


def pairs(kind: str, places: int) -> Any:
    """A model that compares pictures of 8 x 8 and text."""
    parts = {
        "vision_config": {"image_size": 8, "patch_size": 4, **ONE},
        "text_config": {**SPECIAL_TEXT, "max_position_embeddings": places},
    }
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    return made(made.config_class(**parts))


def test_a_model_that_compares_rows_is_not_padded() -> None:
    """The complaint: SigLIP's text is read at its last place, which was a padded one, without a word."""
    made, ids = pairs("SiglipModel", 64), batch("masked")
    given = {"input_ids": ids["input_ids"], "pixel_values": torch.randn(4, 3, 8, 8), "return_loss": True}
    longer = {**given, "input_ids": F.pad(ids["input_ids"], (0, LONGER - LENGTH))}
    with torch.no_grad():
        assert not torch.allclose(made(**given).loss, made(**longer).loss, rtol=1e-5)
    trainer = Trained(made)
    trainer.label_names = []
    assert not weightless.places(trainer)


def test_blocks_that_all_places_look_at_are_not_padded() -> None:
    """The complaint: BigBird's last block was one of padded places, without a word. Its full attention masks."""
    for kind, pads in (("block_sparse", False), ("original_full", True)):
        options = {**SPECIAL_TEXT, "attention_type": kind, "block_size": 4, "num_random_blocks": 1}
        assert (
            weightless.places(Trained(transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**options)))) == pads
        )


def test_no_more_places_than_there_are_positions() -> None:
    """The complaint: CLIP's text (77 places) and Whisper's labels (448) were padded to the next power of two, and the
    model refused them."""
    decoders = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(max_position_embeddings=20), transformers.GPT2Config(n_positions=30)
    )
    led = transformers.LEDConfig(max_encoder_position_embeddings=40, max_decoder_position_embeddings=8)
    configs = {
        "text": (pairs("CLIPModel", 16).config, (16, 16)),
        "audio": (transformers.WhisperConfig(max_target_positions=32), (None, 32)),
        "two models": (decoders, (20, 30)),
        "a side each": (led, (40, 8)),
        "MPT": (transformers.MptConfig(max_seq_len=24), (24, 24)),
    }  # fmt: skip
    for name, (config, expected) in configs.items():
        assert (weightless.most(config, False), weightless.most(config, True)) == expected, name


@pytest.mark.parametrize("head", ["Token", "Sequence"])
def test_heads_that_models_share_are_padded(head: str) -> None:
    """The complaint: a Llama with a head of `transformers.modeling_layers` was taken for a model of the user's: each
    length had a program, and a window of several was refused."""
    config = transformers.LlamaConfig(**{**SPECIAL, **hf.ONE, "num_labels": 3})
    trainer = Trained(getattr(transformers, f"LlamaFor{head}Classification")(config))
    assert weightless.places(trainer)
    assert weightless.rows(trainer, None)


def test_a_head_that_reads_the_last_place_is_not_padded() -> None:
    """The complaint: XLNet's classifier took the state of a padded place, without a word."""
    config = transformers.XLNetConfig(**SPECIAL, d_model=32, n_layer=2, n_head=4, d_inner=48, num_labels=3)
    torch.manual_seed(0)
    made = transformers.XLNetForSequenceClassification(config).eval()
    given = {**batch("masked"), "labels": torch.tensor([0, 2, 1, 0])}
    longer = {n: F.pad(x, (0, LONGER - LENGTH)) if x.ndim == 2 else x for n, x in given.items()}
    with torch.no_grad():
        assert not torch.allclose(made(**given).loss, made(**longer).loss, rtol=1e-3)
    assert not weightless.places(Trained(made))
    assert not weightless.places(Trained(transformers.XLNetForMultipleChoice(config)))
    assert weightless.places(Trained(transformers.XLNetForTokenClassification(config)))
