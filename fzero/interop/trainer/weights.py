"""weights: the parameters of a module that a state holds: taken out of it, put back, and written."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import fzero
from fzero.errors import CheckpointError
from fzero.interop import _hf_compat
from fzero.interop.fitted import Fitted
from fzero.interop.huggingface import SINGLE, export_safetensors, safetensors
from fzero.interop.module import Apply, Functional
from fzero.interop.trainer.absent import Absent, unusable

log = logging.getLogger("fzero")


class HeldModule:
    """A module whose parameters are in a state: on the meta device, or whole for a while.

    `taken` and `back` change the module. Both may be called at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._guard: Any = None

    @property
    def away(self) -> bool:
        """Whether the module's parameters are on the meta device."""
        return self._guard is not None

    def taken(self, device: torch.device, in_state: Collection[str] = ()) -> None:
        """Leaves the module without parameters and without what of its buffers the state holds, and the others on
        `device`. A call of it is an error from then on."""
        owner = type(self.module).__name__
        put(self.module, {name: Absent(p, name, owner) for name, p in self.module.named_parameters()})
        for path, part in self.module.named_modules():
            for name, buffer in part._buffers.items():
                whole = f"{path}.{name}".lstrip(".")
                if buffer is not None:
                    held = whole in in_state
                    part._buffers[name] = Absent(buffer, whole, owner) if held else buffer.to(device)
        if self._guard is None:
            self._guard = (self.module.register_forward_pre_hook(_absent),
                           self.module.register_state_dict_pre_hook(_absent))  # fmt: skip
            vars(self.module)["zero_grad"] = _no_gradients  # which transformers calls after each step

    def back(self, state: fzero.State, why: str) -> None:
        """Gathers the whole parameters into the module, on every rank: a collective. `why` is for the log."""
        sizes = [p.numel() * p.element_size() for p in self.module.parameters()]
        log.info("fzero: %s: gathers %s bytes of parameters on every rank", why, f"{sum(sizes):,}")
        put(self.module, fzero.unshard(state.params))
        if self._guard is not None:
            for hook in self._guard:
                hook.remove()
            self._guard = None
            vars(self.module).pop("zero_grad", None)


def _absent(module: nn.Module, *given: Any) -> None:
    raise unusable("", type(module).__name__)


def _no_gradients(set_to_none: bool = True) -> None:
    """`zero_grad` of a module whose parameters are in a state: to look through all of them takes a third of a
    millisecond."""


def on_meta(module: Any) -> bool:
    """Whether parameters of a module have no values yet."""
    return any(p.is_meta for p in module.parameters())


def in_files(module: Any, functional: Functional) -> Fitted:
    """The parameters of a model on the meta device, to be read leaf by leaf from the folder that it is named after.
    Raises CheckpointError and MismatchError."""
    return safetensors(folder_of(module), functional.params, tied=functional.apply, strict=False)


def folder_of(module: Any) -> Path:
    """The folder that `AutoConfig.from_pretrained` was given."""
    return Path(getattr(module, "name_or_path", "") or "")


def put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives a module other parameters, by the names of `named_parameters`, and buffers if there are some. Tied
    parameters stay tied."""
    new = {}
    for name, old in module.named_parameters():
        value = tensors[name]
        new[id(old)] = value if isinstance(value, Absent) else nn.Parameter(value.detach(), old.requires_grad)
    for part in module.modules():
        for name, held in list(part._parameters.items()):
            if held is not None:
                setattr(part, name, new[id(held)])
    for path, part in module.named_modules():
        for name in part._buffers:
            if (buffer := tensors.get(f"{path}.{name}".lstrip("."))) is not None:
                part._buffers[name] = buffer.detach().clone()


def same_on_all(tensors: Mapping[str, Tensor]) -> None:
    """Gives every rank the values of rank 0, as DistributedDataParallel does."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for value in tensors.values():
            dist.broadcast(value.detach(), 0)


def write(trainer: Any, state: fzero.State, apply: Apply, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes the model as transformers' `save_pretrained` does: a collective.

    A model whose file has the module's own names goes leaf by leaf, and rank 0 holds one leaf at a time. Of an adapter
    (PEFT) what trains is gathered. Else the whole model is, and the log says its bytes.
    """
    module = trainer.model
    params = state.params
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(module, "peft_config", {}).values()):
        with trainer.gathered() as whole:  # PEFT runs a part of it to know what to write
            if trainer.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                _processor(trainer, folder)
                whole.save_pretrained(folder)
        return
    if hasattr(module, "peft_config"):
        prefix = getattr(getattr(module, "base_model", None), "prefix", None) or "lora_"
        own = {name: leaf for name, leaf in params.items() if name in apply.trainable or prefix in name}
        _whole(trainer, folder, _host(fzero.unshard(own), dtype))
        return
    beside = _persistent(module, params)
    plain = isinstance(module, transformers.PreTrainedModel) and not beside and not _hf_compat.renamed_in_files(module)
    if not plain:
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in params.values())
        log.info("fzero: %s: gathers %s bytes of parameters on every rank", folder, f"{size:,}")
        _whole(trainer, folder, _host({**fzero.unshard(params), **beside}, dtype))
        return
    export_safetensors(state, folder / "weights.tmp", tied=apply, config=module.config, dtype=dtype)
    if not trainer.args.should_save:
        return
    _processor(trainer, folder)
    for old in folder.glob("model*.safetensors*"):
        if old.is_symlink() or not old.is_dir():
            old.unlink()
    for file in (folder / "weights.tmp").iterdir():
        os.replace(file, folder / file.name)
    (folder / "weights.tmp").rmdir()
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def remove(path: Path) -> None:
    """Removes what lies at a path: a folder with its content, of a link the link alone. Raises CheckpointError."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise CheckpointError(path, f"is in the way, and cannot be removed: {error.strerror}", error.errno) from error


def _whole(trainer: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes tensors that are whole on every rank as the module's own `save_pretrained` does, or as safetensors."""
    if not trainer.args.should_save:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _processor(trainer, folder)
    if hasattr(trainer.model, "save_pretrained"):
        trainer.model.save_pretrained(folder, state_dict=tensors)
    else:
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / SINGLE, {"format": "pt"})


def _processor(trainer: Any, folder: Path) -> None:
    """Writes the tokenizer, or whatever else prepared the inputs."""
    processor = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processor is not None:
        processor.save_pretrained(folder)


def _host(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        n: t.to("cpu", dtype if dtype is not None and t.is_floating_point() else t.dtype) for n, t in tensors.items()
    }


def _persistent(module: nn.Module, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffers that a file of the module holds."""
    held = {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in part._buffers.items()
        if value is not None and name not in part._non_persistent_buffers_set
    }
    return {name: value for name, value in held.items() if name not in params}
