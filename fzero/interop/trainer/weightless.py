"""weightless: where a batch may be padded or filled up, for what is added weighs nothing in the model's loss.

That is known of transformers' own models, whose forward takes a mask and whose loss leaves out labels of -100, and in
question answering answers after the last place. Of a model or a loss that somebody wrote it is not, so nothing is added
to its batches unless `pad_to=` says so.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn

from fzero.interop.trainer.shapes import ANSWERS

PAD_TO = 64  # places, where nothing else is said
MIX_ROWS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
UNMASKED = (  # model types in which padded places count, mask or not: they are convolved, pooled or hashed
    "canine", "convbert", "cpmant", "funnel", "mobilebert", "nystromformer", "prophetnet", "yoso",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # what a config calls its number of places
OWN = ("transformers.models.", "transformers.modeling_layers")  # modules of its models, and of the heads they share
OF_LAST = ("last", "mean", "cls_index")  # summaries of a head's places that read the last one
LAST_LABEL = ("mbart", "plbart")  # model types that look for the last label of each row


def inner(model: Any) -> Any:
    """The model below an adapter of PEFT."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def known(model: Any) -> bool:
    """Whether the forward, and so the loss, is transformers' own."""
    model = inner(model)
    own = getattr(type(model).forward, "__module__", "") or ""
    return isinstance(model, transformers.PreTrainedModel) and own.startswith(OWN)


def takes_mask(model: Any) -> bool:
    """Whether a mask can be given to the forward."""
    parameters = inspect.signature(inner(model).forward).parameters
    return "attention_mask" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def most(config: Any, decoded: bool) -> int | None:
    """The places that a config has positions for, in the inputs or in what a decoder is given; None: it does not say.

    >>> config = transformers.WhisperConfig(max_target_positions=32)
    >>> most(config, decoded=True), most(config, decoded=False)
    (32, None)
    """
    side, parts = ("decoder", ("decoder", "text_config")) if decoded else ("encoder", ("encoder", "text_config"))
    names = (f"max_{side}_position_embeddings", *(("max_target_positions",) if decoded else ()), *POSITIONS)
    held = [config, *(getattr(config, part, None) for part in parts)]
    found = (getattr(part, name, None) for part in held for name in names)
    return next((value for value in found if type(value) is int), None)


def own_loss(trainer: Any) -> bool:
    """Whether the loss is of the user's, who may count what is added: a mean over all places, a distance of logits."""
    return trainer.compute_loss_func is not None or type(trainer).compute_loss is not transformers.Trainer.compute_loss


def places(trainer: Any) -> bool:
    """Whether padded places weigh nothing in the trainer's loss: it is the model's, its softmax is not one over places,
    its forward takes a mask, and it need not look for the last token, nor is it the last place that counts."""
    model = inner(trainer.model)
    if own_loss(trainer) or not known(trainer.model) or trainer.label_names != ["labels"]:
        return False  # without labels the loss compares rows, which some models (SigLIP) read at their last places
    config = model.config
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird: all look at the last block
        return False
    looks = type(model).__name__.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", None) is None
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    ends = any(getattr(part, "summary_type", "first") in OF_LAST for part in model.modules())
    return masked and not looks and not ends and config.model_type not in UNMASKED


def rows(trainer: Any, batch: Any) -> bool:
    """Whether rows without labels or answers weigh nothing in the trainer's loss. batch: None for what is known before
    there is one."""
    model = inner(trainer.model)
    answers = list(trainer.label_names) == list(ANSWERS)
    if own_loss(trainer) or not known(trainer.model) or not (answers or trainer.label_names == ["labels"]):
        return False
    config = model.config
    if config.model_type in LAST_LABEL:
        return False
    if getattr(config, "output_router_logits", False) or hasattr(config, "semantic_loss_ignore_index"):
        return False
    if any(isinstance(part, MIX_ROWS) for part in model.modules()):
        return False
    if answers:  # a head with `is_impossible` reads the states at the answers
        heads = "is_impossible" in inspect.signature(model.forward).parameters
        return not heads and (batch is None or all(name in batch for name in ANSWERS))
    if batch is None:
        floats = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
        return not floats and getattr(config, "num_labels", 2) != 1
    return "labels" in batch and not batch["labels"].is_floating_point()
