"""device_autocast: what `torch.autocast("cuda")` casts, for what is traced on the processor for a device.

The processor's autocast casts the operands of products, as CUDA's does, but leaves norms, softmax and sums in narrow
dtypes. The lists are torch's (`AT_FORALL_*` of ATen/autocast_mode.h: 2.11.0, 2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode  # 2.11.0, 2.13.0
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

KINDS = {  # of ops, by what is done to their operands
    "narrow": "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input "
    "convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention",
    "wide": "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim",
    "wide by dtype": "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
ONLY_HERE = "cross_entropy_loss"  # the processor's autocast widens it, and CUDA's what it is made of
KEY = "AutocastCPU"
Operands = tuple[tuple[Any, ...], dict[str, Any]]
Policy = Callable[[Any, Operands], Operands]


def cast_as_a_device(library: torch.library.Library, is_here: Callable[[], bool]) -> None:
    """Registers what autocast of the processor does not cast and CUDA's does, for threads of which `is_here` is true;
    others go on as ever."""
    for kind in KINDS:
        for name in cast_there(kind):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY):
                _register(library, name, POLICIES[kind], is_here)
    _register(library, ONLY_HERE, _wide, lambda: not is_here())


def cast_there(kind: str) -> list[str]:
    """Of `KINDS`, the ops that CUDA's autocast of this torch casts (2.11.0 does not know `rms_norm`)."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in KINDS[kind].split() if has(f"aten::{name}", "AutocastCUDA")]


def _register(library: torch.library.Library, name: str, policy: Policy, casts: Callable[[], bool]) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    library.impl(name, _casting(op, policy, casts), KEY, with_keyset=True)


@contextmanager
def autocast_here(is_here: Callable[[], bool]) -> Iterator[None]:
    """`torch.autocast("cuda")` of such threads is the processor's, with CUDA's dtype where none is given."""
    own = autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and is_here():
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        own(self, device_type, dtype, *args, **kwargs)

    autocast_mode.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        autocast_mode.autocast.__init__ = own  # type: ignore[method-assign]


def _casting(op: Any, policy: Policy, casts: Callable[[], bool]) -> Callable[..., Any]:
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, KEY))
    own = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not casts():
            return op.redispatch(keyset & after, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(own):
            args, kwargs = policy(op, (args, kwargs))
            return op(*args, **kwargs)

    return call


def _is_eligible(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64


def _cast(operands: Operands, dtype: torch.dtype) -> Operands:
    return pytree.tree_map(lambda x: x.to(dtype) if _is_eligible(x) else x, operands)


def _narrow(_: Any, operands: Operands) -> Operands:
    return _cast(operands, torch.get_autocast_dtype("cpu"))


def _wide(_: Any, operands: Operands) -> Operands:
    return _cast(operands, torch.float32)


def _widest(_: Any, operands: Operands) -> Operands:
    has_wide = any(_is_eligible(x) and x.dtype is torch.float32 for x in pytree.tree_leaves(operands))
    return _cast(operands, torch.float32) if has_wide else operands


def _by_dtype(op: Any, operands: Operands) -> Operands:
    """A sum of narrow values is asked for in float32, unless a dtype is given."""
    args, kwargs = operands
    place = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")
    given = kwargs.get("dtype") if len(args) <= place else args[place]
    if given is not None or not _is_eligible(args[0]):
        return operands
    return args[:place], {**kwargs, "dtype": torch.float32}


POLICIES: dict[str, Policy] = {"narrow": _narrow, "wide": _wide, "wide by dtype": _by_dtype, "widest": _widest}
