"""device_autocast: what `torch.autocast` casts on a CUDA device, for what is traced on the processor in its place.

torch has a list of ops for each kind of device, in C++ (ATen/autocast_mode.h: 2.11.0, 2.13.0): on the processor
softmax, norms and sums stay narrow, which a device computes in fp32, and the transforms of torch.fft are widened, which
it leaves. So the rules of a device are registered for the processor while a step of one is traced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode

from fzero._torch_compat.trace import OpOverload
from fzero.backend import CUDA, traced_device

KIND, KEY = "cpu", torch._C.DispatchKey.AutocastCPU
OFF = torch._C.DispatchKeySet(KEY)
WIDE = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
}  # fmt: skip
WIDE_RESULT = {
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
}  # fmt: skip
WIDE_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
}  # fmt: skip
NAMED_AT = {  # where each has the kind of device, and the arguments with it (2.11.0, 2.13.0)
    "is_autocast_enabled": (0, 1), "get_autocast_dtype": (0, 1), "set_autocast_enabled": (0, 2),
    "set_autocast_dtype": (0, 2), "_cast": (1, 3),
}  # fmt: skip
NAMED = {
    torch.autocast: ("__init__",),
    torch: [name for name in NAMED_AT if name != "_cast"],
    autocast_mode: ("_cast",),  # of the operands of `custom_fwd`
}
REFUSED = "binary_cross_entropy"  # torch says why


def traces_for_a_device() -> bool:
    """Whether this thread traces what is of a device that is elsewhere."""
    return traced_device() is not None


def cast_as_a_device(library: torch.library.Library) -> None:
    """Gives autocast of the processor the rules of a device, for threads that trace for one. What others compute under
    an autocast of the processor is as ever."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of kernels that are put aside
        for name, rule in _rules():
            library.impl(name, rule, KEY.name, with_keyset=True)


@contextmanager
def autocast_by_name() -> Iterator[None]:
    """In threads that trace for a device, "cuda" names the autocast of what is traced, in `torch.autocast` and in what
    asks for its state, as `torch.utils.checkpoint` does. So does "cpu": it is what `x.device.type` says there."""
    own = {(owner, name): getattr(owner, name) for owner, names in NAMED.items() for name in names}
    dtype = torch.get_autocast_dtype(KIND)
    torch.set_autocast_dtype(KIND, torch.get_autocast_dtype(CUDA.name))
    for (owner, name), function in own.items():
        setattr(owner, name, _init(function) if owner is torch.autocast else _by_name(name, function))
    try:
        yield
    finally:
        torch.set_autocast_dtype(KIND, dtype)
        for (owner, name), function in own.items():
            setattr(owner, name, function)


def _init(own: Callable[..., None]) -> Callable[..., None]:
    """`torch.autocast.__init__`."""

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if not traces_for_a_device() or device_type not in (KIND, CUDA.name):
            return own(self, device_type, dtype, enabled, cache_enabled)
        own(self, KIND, torch.bfloat16, enabled, cache_enabled)
        self.fast_dtype = dtype or torch.get_autocast_dtype(KIND)  # a device takes any, the processor two

    return init


def _by_name(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the autocast of a kind of device, which is CUDA where none is named."""
    place, least = NAMED_AT[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if traces_for_a_device() and not kwargs:
            if len(args) < least:
                args = (*args[:place], CUDA.name, *args[place:])
            if args[place] == CUDA.name:
                args = (*args[:place], KIND, *args[place + 1 :])
        return own(*args, **kwargs)

    return call


@functools.cache
def _rules() -> list[tuple[str, Callable[..., Any]]]:
    """By name the ops that autocast casts on the processor or on a device, and what casts them as a device does."""
    there = torch._C._dispatch_has_kernel_for_dispatch_key
    rules = []
    for full in torch._C._dispatch_get_all_op_names():
        cast_there, cast_here = there(full, "AutocastCUDA"), there(full, KEY.name)
        if full.startswith("aten::") and (cast_there or cast_here):
            name = full.removeprefix("aten::")
            own = torch.library.get_kernel(full, KEY.name) if cast_here else None
            rules.append((name, _rule(_op(name), cast_there, own)))
    return rules


def _rule(op: OpOverload, cast_there: bool, own: Any) -> Callable[..., Any]:
    """The kernel of an op under autocast on the processor. own: the one that it has there."""
    name = op.name().removeprefix("aten::")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        on = traces_for_a_device()
        if not on and own is not None:
            return own.call_boxed(keyset, *args, **kwargs)
        if not (on and cast_there) and composite:
            return op.decompose(*args, **kwargs)  # into ops that are cast
        if on and name == REFUSED:
            return torch.library.get_kernel(op, "AutocastCUDA").call_boxed(keyset, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(OFF):
            return _as_a_device(name, op, args, kwargs) if on and cast_there else op(*args, **kwargs)

    return call


def _as_a_device(name: str, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in WIDE_RESULT:
        place = [argument.name for argument in op._schema.arguments].index("dtype")
        given = args[place] if place < len(args) else kwargs.get("dtype")
        wide = {"dtype": torch.float32 if given is None and _casts(args[0]) else given}
        return op(*args[:place], **{**kwargs, **wide})
    if name in WIDE_NORM:
        dtype = torch.float32 if _casts(args[0]) else args[0].dtype
        return _op(WIDE_NORM[name])(*args, *([2] if len(args) == 1 else []), **kwargs, dtype=dtype)
    dtype = torch.get_autocast_dtype(KIND)
    if name in WIDE or (name in WIDEST and any(x.dtype is torch.float32 for x in _tensors([*args, *kwargs.values()]))):
        dtype = torch.float32
    named = {key: _cast(x, dtype) for key, x in reversed([*kwargs.items()])}
    return op(*[_cast(x, dtype) for x in reversed(args)][::-1], **named)  # from the last, as torch's compiler has it


def _op(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(x, dtype) for x in value]
    return torch.ops.aten.to.dtype(value, dtype) if _casts(value) and value.dtype is not dtype else value


def _casts(value: Any) -> bool:
    """Whether autocast casts a value: a floating tensor of its device, but for those of 64 bits."""
    if not isinstance(value, torch.Tensor) or value.device.type != KIND:
        return False
    return value.dtype.is_floating_point and value.dtype is not torch.float64


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    return [x for x in flat if isinstance(x, torch.Tensor)]
