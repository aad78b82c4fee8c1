"""arguments: transformers' TrainingArguments with the two fields that say how to train in parallel kept for fzero."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import transformers

from fzero.errors import ConfigError
from fzero.interop.config.read import from_json, read

LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "deepspeed=", "ACCELERATE_USE_FSDP": "fsdp="}  # by `accelerate launch`


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' TrainingArguments, for `fzero.interop.Trainer`. All fields are taken as they are, and two more.

    `deepspeed=` and `fsdp=` (with `fsdp_config=`) are read by `ds_config` and `accelerate_config`: neither engine
    is started. Then `deepspeed`, `fsdp` and `fsdp_config` are None here, and `parallel` holds what they said.

    pad_to: leaves whose dim is the length are padded on the right to pad_to * 2**k places, for the least k that all
    ranks' batches of a step fit in. A program is made for each such length, so few are made. 0 pads nothing. None is 64
    for transformers' own models that mask, and else 0: a number says that padded places weigh nothing in this model's
    loss.

    spec: more fields of `fzero.Spec`, as {"zero": 2, "remat": "full", "mesh": {"tp": 2}}, in JSON or its file; they
    come last. With `tp` and no `shard` the rules are those of `fzero.interop.tp_plan`.

    Raises ConfigError for an environment in which `accelerate launch` has chosen DeepSpeed or FSDP by itself.

    >>> args = TrainingArguments("runs/doc", deepspeed={"zero_optimization": {"stage": 2}}, use_cpu=True)
    >>> args.deepspeed, args.parallel["deepspeed"], args.pad_to
    (None, {'zero_optimization': {'stage': 2}}, None)
    """

    pad_to: int | None = field(default=None, metadata={"help": "Pad sequences to these places, times a power of two."})
    spec: dict[str, Any] | str | None = field(default=None, metadata={"help": "More fields of fzero.Spec, in JSON."})

    def __post_init__(self) -> None:
        chosen = [name for name in LAUNCHED if os.environ.get(name, "").lower() in ("1", "true")]
        if chosen:
            said = [f"  {name}=true: `accelerate launch` starts another engine. Launch with torchrun, and give "
                    f"TrainingArguments({LAUNCHED[name]}...)" for name in chosen]  # fmt: skip
            texts = [(name, text.strip()) for name, text in zip(chosen, said, strict=True)]
            raise ConfigError("\n".join(["the environment: another engine is chosen", *said]), texts)
        spec = _of_text("spec", self.spec)
        self.spec = read(spec.strip())[1] if isinstance(spec, str) else spec
        self.parallel = {name: _of_text(name, getattr(self, name)) for name in ("deepspeed", "fsdp", "fsdp_config")}
        self.deepspeed = self.fsdp = self.fsdp_config = None
        super().__post_init__()

    @property
    def place_model_on_device(self) -> bool:
        """False: a rank moves only its part of the model to its device."""
        return False


def _of_text(name: str, value: Any) -> Any:
    """A field's value; what a command line gives as JSON, as transformers reads it."""
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    return from_json(value, f"TrainingArguments({name}=)") if is_json else value
