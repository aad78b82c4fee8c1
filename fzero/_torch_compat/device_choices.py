"""device_choices: the ops that torch takes on a CUDA device, where it would take others or take them apart.

torch chooses some ops by the device of their operands, in C++: attention (sdp_utils.cpp: 2.11.0, 2.13.0), and those of
`WHOLE`. So what is traced on the processor for a device, and what is traced on fake tensors of it, gets an H100's here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # 2.11.0, 2.13.0
from torch._decomp import decomposition_table  # 2.11.0, 2.13.0

from fzero._torch_compat import device_cells
from fzero._torch_compat.device_autocast import autocast_by_name, cast_as_a_device, traces_for_a_device
from fzero._torch_compat.fakes import is_fake
from fzero._torch_compat.trace import ONE_THREAD
from fzero.backend import CUDA

WHOLE = ("_fused_rms_norm", "silu_backward", "mish_backward")  # a device has a kernel (native_functions.yaml: 2.13.0)
CASTING = ("softmax", "log_softmax")  # a device's kernels cast fp16 to fp32 themselves (SoftMax.cpp: 2.11.0, 2.13.0)
FRONT = "FuncTorchDynamicLayerFrontMode"  # where torch.func chooses for dropout
aten = torch.ops.aten


def choose_on_a_device() -> torch.library.Library:
    """Gives fake tensors of CUDA the ops of a device, for as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    for key in IN_FUNCTORCH:
        _override(library, "scaled_dot_product_attention", _attention_there, key)
    for name in _without_kernel("CUDA"):
        library.impl(name, _never_run, "CUDA")
    return library


@contextmanager
def chosen_for_a_device() -> Iterator[None]:
    """Within it a thread that traces for a device has its ops on the processor. Other threads compute as ever."""
    with ONE_THREAD:  # the ops of a process are registered once
        device_cells.shapes()
        library = torch.library.Library("aten", "IMPL")
        _choose_here(library)
        cast_as_a_device(library)
        try:
            with autocast_by_name():
                yield
        finally:
            library._destroy()


def _choose_here(library: torch.library.Library) -> None:
    for key in ("CPU", "AutogradCPU"):
        for name, call in APART.items():
            library.impl(name, call, key)
    for key, names in IN_FUNCTORCH.items():
        for name in names:
            _override(library, name, APART[name], key)
    own = torch.library.get_kernel("aten::dropout", FRONT)
    _override(library, "dropout", _dropout_in_functorch(own), FRONT)
    for name in _without_kernel("CPU"):
        library.impl(name, _apart(name), "CPU")
        library.impl(name, _in_parts_for_others(name), "AutogradCPU", with_keyset=True)
    library.impl("_fused_rms_norm_backward", decomposition_table[aten._fused_rms_norm_backward.default], "CPU")


def _override(library: torch.library.Library, name: str, call: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of kernels that are put aside
        library.impl(name, call, key, with_keyset=key == FRONT)


def _without_kernel(backend: str) -> list[str]:
    """Of `WHOLE`, what a dispatcher's backend has no kernel of."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in WHOLE if not has(f"aten::{name}", backend)]


def _never_run(*_: Any) -> Any:
    raise NotImplementedError("there is no device here")


def _apart(name: str) -> Callable[..., Any]:
    """An op in its parts: what other threads compute with it."""

    def call(*args: Any) -> Any:
        return getattr(aten, name).default.decompose(*args)

    return call


def _in_parts_for_others(name: str) -> Callable[..., Any]:
    """An op that has a kernel now: what other threads compute with it has a backward that outlives the kernel."""
    traced = torch.library.get_kernel(f"aten::{name}", "AutogradCPU")

    def call(keyset: Any, x: torch.Tensor, *args: Any) -> Any:
        return traced.call_boxed(keyset, x, *args) if _is_traced(x) else _apart(name)(x, *args)

    return call


def _casting(name: str) -> Callable[..., Any]:
    """`softmax` or `log_softmax`, with a dtype."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype is torch.float16 and dtype is torch.float32 and _is_traced(x):
            return getattr(aten, f"_{name}").default(x, dim, True)
        return getattr(aten, name).int.decompose(x, dim, dtype)

    return call


def _group_norm(x: torch.Tensor, *args: Any) -> Any:
    """A device's kernel takes contiguous values, the processor's channels_last too (group_norm.cpp: 2.11.0, 2.13.0)."""
    return aten.group_norm.default.decompose(x.contiguous() if _is_traced(x) else x, *args)


def _dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    """A device has a kernel that draws and drops (Dropout.cpp: 2.11.0, 2.13.0)."""
    if _is_fused(x, p, train):
        return aten.native_dropout.default(x, p, train)[0]
    return aten.dropout.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, x, p, train)  # not Python's


def _attention_here(*args: Any, **options: Any) -> Any:
    if _is_traced(args[0]):
        return _attention(*args, **options)
    return aten.scaled_dot_product_attention.default.decompose(*args, **options)


def _cell(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor, *args: Any) -> Any:
        return whole(x, *args) if _is_traced(x) else getattr(aten, name).default.decompose(x, *args)

    return call


def _attention_there(query: torch.Tensor, *args: Any, **options: Any) -> Any:
    if query.device.type == CUDA.name:
        return _attention(query, *args, **options)
    return aten.scaled_dot_product_attention.default.decompose(query, *args, **options)


def _is_traced(x: torch.Tensor) -> bool:
    """Whether this thread traces for a device, and x is no value that is known."""
    return traces_for_a_device() and is_fake(_unwrapped(x))


def _unwrapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor without what transforms of torch.func have put around it (2.11.0, 2.13.0)."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _dropout_in_functorch(own: Any) -> Callable[..., Any]:
    """The same within torch.func. own: the kernel that it has there."""

    def call(keyset: Any, x: torch.Tensor, p: float, train: bool) -> Any:
        fused = _is_fused(x, p, train)
        return aten.native_dropout.default(x, p, train)[0] if fused else own.call_boxed(keyset, x, p, train)

    return call


def _is_fused(x: torch.Tensor, p: float, train: bool) -> bool:
    return train and 0 < p < 1 and x.numel() > 0 and _is_traced(x)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` by the kernel that torch takes."""
    kernel = _kernel(query, key, value, attn_mask, is_causal)
    if kernel == "math":
        found: Any = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]
    if kernel == "flash":
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if kernel == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
        )
        return found[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    found = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return found[0]


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> str:  # fmt: skip
    """Of those that are switched on: cuDNN's for 16 bits (torch >= 2.11 on sm_90), but for a mask with a gradient; the
    flash kernel for 16 bits without a mask; the memory-efficient one. Plain products where none takes it: other than
    four dims, 64 bits, widths that 16 bytes do not divide."""
    on, widths = torch.backends.cuda, (query.shape[-1], value.shape[-1])
    if query.dim() != 4 or query.dtype is torch.float64 or any(w * query.itemsize % 16 for w in widths):
        return "math"
    narrow, square = query.dtype in (torch.bfloat16, torch.float16), query.shape[-2] == key.shape[-2]
    refused = mask is not None and (mask.requires_grad or mask.dim() not in (2, 4))
    if narrow and on.cudnn_sdp_enabled() and max(widths) <= 128 and key.shape[-2] > 1 and not refused:
        return "cudnn"
    if narrow and on.flash_sdp_enabled() and mask is None and widths[0] == widths[1] <= 256 and square >= causal:
        return "flash"
    return "efficient" if on.mem_efficient_sdp_enabled() else "math"


APART: dict[str, Callable[..., Any]] = {  # by name, what the processor takes apart otherwise
    "scaled_dot_product_attention": _attention_here,
    "group_norm": _group_norm,
    "dropout": _dropout,
    "lstm_cell": _cell("lstm_cell", device_cells.lstm),
    "gru_cell": _cell("gru_cell", device_cells.gru),
    **{f"{name}.int": _casting(name) for name in CASTING},
}
IN_FUNCTORCH = {  # by dispatch key, what `vmap` takes apart there (BatchRulesDecompositions.cpp: 2.11.0, 2.13.0)
    "FuncTorchVmapMode": ["scaled_dot_product_attention"],
    "FuncTorchBatched": ["scaled_dot_product_attention", "group_norm", *(f"{name}.int" for name in CASTING)],
}
