"""interop: a `torch.nn.Module` (Hugging Face's too) as plain values and a pure function of them; and checkpoints of
other libraries, read and written one tensor at a time. See README.md."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero.interop.config import Given, accelerate_config, ds_config
from fzero.interop.dcp_folder import dcp, export_dcp
from fzero.interop.deepspeed_folder import deepspeed
from fzero.interop.fitted import Fitted, fitted
from fzero.interop.hf_attention import register_attention
from fzero.interop.huggingface import export_safetensors, safetensors
from fzero.interop.incoming import write_checkpoint
from fzero.interop.module import Apply, Functional, from_module
from fzero.interop.statistics import with_buffers
from fzero.interop.tp_plan import tp_plan

if TYPE_CHECKING:
    from fzero.interop.trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

__all__ = [
    "Apply",
    "Fitted",
    "Functional",
    "Given",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "accelerate_config",
    "dcp",
    "deepspeed",
    "ds_config",
    "export_dcp",
    "export_safetensors",
    "fitted",
    "from_module",
    "register_attention",
    "safetensors",
    "tp_plan",
    "with_buffers",
    "write_checkpoint",
]

_OF_TRANSFORMERS = (
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
)  # imported if asked for


def __getattr__(name: str) -> Any:
    if name in _OF_TRANSFORMERS:
        return getattr(importlib.import_module("fzero.interop.trainer"), name)
    raise AttributeError(f"module 'fzero.interop' has no attribute {name!r}")
