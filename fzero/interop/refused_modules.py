"""refused_modules: the modules that cannot become a pure function, each with its remedy."""

from __future__ import annotations

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fzero.capture.leaves import check_hooks
from fzero.capture.provenance import describe
from fzero.errors import TreeError

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
_EXTRA = "_extra_state"  # the end of the name under which torch puts what `get_extra_state` returns


def unusable(module: nn.Module) -> None:
    """Raises TreeError for a module whose state is not its dense parameters and buffers."""
    if not isinstance(module, nn.Module):
        raise TreeError(f"from_module needs a torch.nn.Module, got {describe(module)}")
    name = type(module).__name__
    for path, part in module.named_modules():
        inner = _WRAPPERS.get(type(part).__name__)
        if inner is not None:
            raise TreeError(
                f"{_where(name, path)} is wrapped in {type(part).__name__}: fzero shards, reduces and compiles by "
                f"itself. Pass the module inside, as in from_module(module.{inner})"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise TreeError(f"{_where(name, path)} is a TorchScript module: pass the nn.Module that it was made from")
    for path, value in module.named_parameters():
        _check_parameter(f"parameter {path!r} of {name}", value)
    for path, buffer in module.named_buffers():
        if is_lazy(buffer):
            raise TreeError(_lazy(f"buffer {path!r} of {name}"))
        if buffer.is_meta:
            raise TreeError(
                f"buffer {path!r} of {name} is on the meta device, so it has no values, and the step would read them. "
                "Make it on a real device: buffers are small (parameters may be on meta for fzero.lower)"
            )
    _check_shared(module, name)
    _check_extra(module, name)


def _check_parameter(label: str, value: Tensor) -> None:
    """Raises TreeError for a parameter that is lazy, wrapped, not floating, or has hooks on its gradient. `label` is
    its name in the message."""
    if is_lazy(value):
        raise TreeError(_lazy(label))
    if type(value) not in (nn.Parameter, Tensor):
        raise TreeError(
            f"{label} is a {type(value).__name__}: needed a plain torch.nn.Parameter. Load the model without "
            "quantisation (or dequantise it: Hugging Face's model.dequantize()), without FSDP or tensor parallelism"
        )
    if not (
        value.dtype.is_floating_point or value.dtype.is_complex
    ):  # of a complex one the optimizer says what to hold
        raise TreeError(
            f"{label} is {describe(value)}: no gradient exists for it. Quantised weights do not train: load the model "
            "without quantisation; what is no weight, register as a buffer"
        )
    check_hooks(label, value)


def _lazy(label: str) -> str:
    return f"{label} has no shape yet: the module is lazy. Run one batch through it first, module(x)"


def _check_shared(module: nn.Module, name: str) -> None:
    """Raises TreeError for two parameters over one memory: they would become two leaves, and drift apart."""
    path_of: dict[tuple[object, ...], str] = {}
    for path, value in module.named_parameters():
        if value.is_meta or not value.numel():
            continue
        key = (value.device, value.data_ptr())
        if key in path_of:
            raise TreeError(
                f"parameters {path_of[key]!r} and {path!r} of {name} are two Parameters over one memory: as two leaves "
                "they would drift apart. Tie them as one: module.b.weight = module.a.weight"
            )
        path_of[key] = path


def _check_extra(module: nn.Module, name: str) -> None:
    """Raises TreeError if `state_dict` holds more than parameters and buffers, as packed weights and `get_extra_state`
    do. What a `state_dict` of the user's adds without tensors, as how the module was made, is no state."""
    known = {path for path, _ in module.named_parameters(remove_duplicate=False)}
    known |= {path for path, _ in module.named_buffers(remove_duplicate=False)}
    for path, value in module.state_dict().items():
        leaves = optree.tree_leaves(value)
        held = path.endswith(_EXTRA) or any(isinstance(x, (Tensor, torch.ScriptObject)) for x in leaves)
        if path not in known and value is not None and held and not (isinstance(value, Tensor) and not value.numel()):
            raise TreeError(
                f"{path!r} of {name} is state outside its parameters and buffers ({type(value).__name__}): a compiled "
                "step would keep what it was at the first one. Register it as buffers, or take a layer without it"
            )


def written(module: nn.Module, train: bool, forced: bool) -> None:
    """Raises TreeError for layers that will write running statistics."""
    layers = [
        path
        for path, part in module.named_modules()
        if getattr(part, "track_running_stats", False)
        and getattr(part, "running_mean", None) is not None
        and (train if forced else part.training)
    ]
    if layers:
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        raise TreeError(
            f"{layers[0]!r}{more} of {type(module).__name__} write running statistics in training: take them, as in "
            "params, buffers, apply = from_module(module, mutable=True); output, buffers = apply(params, buffers, x). "
            "To train with the statistics as they are: from_module(module, train=False)"
        )


def _where(name: str, path: str) -> str:
    return f"{path!r} of {name}" if path else name
