"""others: files of other programs that people keep beside a ds_config: known by keys of their own, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.errors import ConfigError

# (the program, keys that only its files have, with _ for -, and what to do)
OTHERS = (
    ("GPT-NeoX", {"pipe_parallel_size", "model_parallel_size", "pos_emb", "rotary_pct", "output_layer_init_method"},
     "It holds a ds_config among its own keys: give those (train_batch_size, optimizer, fp16, zero_optimization, ...)"),
    ("Megatron-LM", {"tensor_model_parallel_size", "pipeline_model_parallel_size", "encoder_seq_length",
                     "num_layers_per_virtual_pipeline_stage", "micro_batch_size"},
     "Write Spec(mesh={'pp': ..., 'dp': -1, 'tp': ...}) and the optimizer by hand"),
    ("LLaMA-Factory", {"finetuning_type", "model_name_or_path", "cutoff_len"},
     "Give the file that its deepspeed: key names, or the accelerate config beside it"),
    ("axolotl", {"base_model", "sequence_len", "micro_batch_size", "sample_packing"},
     "Give the file that its deepspeed: key names"),
)  # fmt: skip


def refuse_others(document: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, with its name, for a file of another program.

    >>> refuse_others({"pipe-parallel-size": 1, "model-parallel-size": 2}, "20B.yml")
    Traceback (most recent call last):
    fzero.errors.ConfigError: 20B.yml: is a file of GPT-NeoX, not of DeepSpeed or Accelerate. It holds a ds_config \
among its own keys: give those (train_batch_size, optimizer, fp16, zero_optimization, ...)
    """
    names = {str(name).replace("-", "_") for name in document}
    found = max(OTHERS, key=lambda other: len(names & other[1]))
    if len(names & found[1]) >= 2:
        raise ConfigError(f"{where}: is a file of {found[0]}, not of DeepSpeed or Accelerate. {found[2]}")
