"""What the scripts of `example_scripts` train on: local files of made-up words, a tokenizer, small models, metrics.

A case writes its inputs into a folder, once, and returns (the script, its arguments). Dropout is off, as two Trainers
draw no equal masks.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{n}" for n in range(40)]
TO_TRAIN, TO_EVALUATE, TO_PREDICT = 13, 11, 7
TAGS = ["O", "B-X", "I-X"]
OPTIONS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
# of a small model the usual 0.02 gives gradients of 1e-6, and AdamW makes differences in the last bit large
NAMES = {
    "seqeval": ("overall_precision", "overall_recall", "overall_f1", "overall_accuracy"),
    "rouge": ("rouge1", "rougeL"),
    "sacrebleu": ("score",),
    "squad": ("f1", "exact_match"),
}


class Metric:
    """A metric of `evaluate`, by name: the share of equal predictions, under all of the names that a script reads."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.names = NAMES.get(name, (name,))

    def compute(self, predictions: Any, references: Any, **_: Any) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        return dict.fromkeys(self.names, sum(map(self._equal, *zip(*pairs, strict=True))) / len(pairs))

    @staticmethod
    def _equal(prediction: Any, reference: Any) -> bool:
        if isinstance(prediction, dict):  # of question answering
            return prediction["prediction_text"] in reference["answers"]["text"]
        return bool(prediction == reference or [prediction] == reference)


Row = dict[str, Any]


def written(folder: Path, row: Callable[[random.Random, int], Row], field: str | None = None) -> str:
    """Files of rows, in JSON; the arguments that name them."""
    said = []
    counts = {"train": TO_TRAIN, "validation": TO_EVALUATE, "test": TO_PREDICT}
    for seed, (name, count) in enumerate(counts.items()):
        draws = random.Random(seed)
        rows = [row(draws, n) for n in range(count)]
        text = json.dumps({field: rows}) if field else "\n".join(map(json.dumps, rows))
        whole(folder / f"{name}.json", text)
        said.append(f"--{name}_file {folder / name}.json")
    return " ".join(said)


def whole(path: Path, text: str) -> None:
    """Writes a file at once: several ranks write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{random.SystemRandom().random()}")
    part.write_text(text)
    part.rename(path)


def sentence(draws: random.Random, low: int = 3, high: int = 14) -> str:
    return " ".join(draws.choices(WORDS, k=draws.randint(low, high)))


def saved(folder: Path, kind: str, config: Any, to: str = "bert") -> str:
    """A model of a class with a configuration, and a tokenizer; the argument that names them. Written once."""
    import transformers

    part = folder / f"model_{os.environ.get('RANK', '0')}"
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(part)
    if to != "none":
        tokenizer(to).save_pretrained(part)
    return f"--model_name_or_path {part}"


def tokenizer(kind: str) -> Any:
    """Words to tokens: with [CLS] and [SEP], with </s> at the end, or as they are."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
    vocab = {word: n for n, word in enumerate(special + WORDS)}
    made = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    shapes = {"bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"), "t5": ("$A </s>", "$A </s> $B </s>")}
    if kind in shapes:
        single, pair = shapes[kind]
        ids = [(token, vocab[token]) for token in ("[CLS]", "[SEP]", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"} if kind == "bert" else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>", model_max_length=64, **names
    )


def bert(num_labels: int = 2) -> Any:
    import transformers

    return transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=46,
        max_position_embeddings=64, pad_token_id=0, num_labels=num_labels, **OPTIONS,
    )  # fmt: skip


def t5() -> Any:
    import transformers

    return transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=46, dropout_rate=0, pad_token_id=0,
        eos_token_id=5, decoder_start_token_id=0,
    )  # fmt: skip


def glue(folder: Path) -> tuple[str, str]:
    files = written(
        folder, lambda draws, n: {"sentence1": sentence(draws), "sentence2": sentence(draws), "label": n % 3}
    )
    model = saved(folder, "BertForSequenceClassification", bert(3))
    return "run_glue", f"{files} {model} --do_predict --max_seq_length 32 --pad_to_max_length False"


def regression(folder: Path) -> tuple[str, str]:
    files = written(folder, lambda draws, n: {"sentence1": sentence(draws), "label": draws.random()})
    model = saved(folder, "BertForSequenceClassification", bert(1))
    return "run_glue", f"{files} {model} --do_predict --max_seq_length 32"


def swag(folder: Path) -> tuple[str, str]:
    def row(draws: random.Random, n: int) -> Row:
        endings = {f"ending{k}": sentence(draws, 1, 8) for k in range(4)}
        return {"sent1": sentence(draws), "sent2": sentence(draws, 1, 4), **endings, "label": n % 4}

    files = written(folder, row).partition(" --test_file")[0]
    return "run_swag", f"{files} {saved(folder, 'BertForMultipleChoice', bert())} --max_seq_length 48"


def clm(folder: Path) -> tuple[str, str]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=46, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=5, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    files = written(folder, lambda draws, n: {"text": sentence(draws, 10, 30)}).partition(" --test_file")[0]
    return "run_clm", f"{files} {saved(folder, 'GPT2LMHeadModel', config, 'plain')} --block_size 16"


def mlm(folder: Path) -> tuple[str, str]:
    files = written(folder, lambda draws, n: {"text": sentence(draws)}).partition(" --test_file")[0]
    return "run_mlm", f"{files} {saved(folder, 'BertForMaskedLM', bert())} --line_by_line --max_seq_length 32"


def ner(folder: Path) -> tuple[str, str]:
    def row(draws: random.Random, n: int) -> Row:
        words = sentence(draws).split()
        return {"tokens": words, "ner_tags": draws.choices(TAGS, k=len(words))}

    return (
        "run_ner",
        f"{written(folder, row)} {saved(folder, 'BertForTokenClassification', bert(len(TAGS)))} --do_predict",
    )


def qa(folder: Path) -> tuple[str, str]:
    def row(draws: random.Random, n: int) -> Row:
        words = sentence(draws, 8, 40).split()  # the long ones have several features
        at = draws.randrange(len(words) - 2)
        answer = {"text": [" ".join(words[at : at + 2])], "answer_start": [len(" ".join([*words[:at], ""]))]}
        return {"id": str(n), "context": " ".join(words), "question": sentence(draws, 2, 5), "answers": answer}

    model = saved(folder, "BertForQuestionAnswering", bert())
    return "run_qa", f"{written(folder, row, 'data')} {model} --do_predict --max_seq_length 32 --doc_stride 8"


def seq2seq(folder: Path, script: str, row: Callable[[random.Random, int], Row], more: str) -> tuple[str, str]:
    model = saved(folder, "T5ForConditionalGeneration", t5(), "t5")
    given = "--do_predict --predict_with_generate --max_source_length 24 --max_target_length 12"
    return script, f"{written(folder, row)} {model} {given} {more}"


def summarization(folder: Path) -> tuple[str, str]:
    def row(draws: random.Random, n: int) -> Row:
        return {"text": sentence(draws, 6, 20), "summary": sentence(draws, 2, 6)}

    return seq2seq(folder, "run_summarization", row, "--text_column text --summary_column summary --source_prefix w1")


def translation(folder: Path) -> tuple[str, str]:
    def row(draws: random.Random, n: int) -> Row:
        return {"translation": {"en": sentence(draws, 3, 10), "ro": sentence(draws, 3, 10)}}

    return seq2seq(folder, "run_translation", row, "--source_lang en --target_lang ro --num_beams 2")


def pictures(folder: Path, kind: str, config: Any) -> tuple[str, str]:
    import numpy as np
    import transformers
    from PIL import Image

    draws = np.random.default_rng(0)
    for split, count in (("train", TO_TRAIN), ("validation", TO_EVALUATE)):
        for n in range(count):
            path = folder / split / "ab"[n % 2] / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = draws.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            if not path.exists():
                Image.fromarray(pixels).save(path)
    model = saved(folder, kind, config, "none")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(model.split()[-1])
    folders = f"--train_dir {folder}/train --validation_dir {folder}/validation --remove_unused_columns False"
    return "run_image_classification", f"{folders} {model}"


def resnet(folder: Path) -> tuple[str, str]:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
    )
    script, argv = pictures(folder, "ResNetForImageClassification", config)
    return script, f"{argv} --ddp_broadcast_buffers False"


def vit(folder: Path) -> tuple[str, str]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8,
        num_labels=2, **OPTIONS,
    )  # fmt: skip
    return pictures(folder, "ViTForImageClassification", config)


def accumulated(case: Callable[[Path], tuple[str, str]]) -> Callable[[Path], tuple[str, str]]:
    """A case in windows of three micro batches, of which the last of an epoch has one row."""

    def more(folder: Path) -> tuple[str, str]:
        script, argv = case(folder)
        return script, f"{argv} --gradient_accumulation_steps 3"

    return more


CASES: dict[str, Callable[[Path], tuple[str, str]]] = {
    "glue": glue, "regression": regression, "swag": swag, "clm": clm, "ner": ner, "resnet": resnet, "vit": vit,
    "summarization": summarization, "qa": qa, "mlm": mlm, "translation": translation,
    "regression, accumulated": accumulated(regression), "resnet, accumulated": accumulated(resnet),
    "qa, accumulated": accumulated(qa), "mlm, accumulated": accumulated(mlm),
}  # fmt: skip
SHIFTED = (
    "swag",
    "qa",
    "qa, accumulated",
)  # their loss is a softmax over choices or places, so one bias shifts all scores
