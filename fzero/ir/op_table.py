"""op_table: the columns of an op's row (`OpInfo`), and the plain facts of torch's ops.

A row is keyed by the op's name: `aten.sum` for all of its overloads, `aten.sum.dim_IntList` for one; no fact is stated
by both. What needs more than words (a rule of shardings, a formula of bytes) is filled in by the room that knows it.
Ask `fzero.ir.op_info.of`, which puts a row together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import fx

from fzero.ir.records import Per

Ratios = tuple[tuple[Per, ...], tuple[Per, ...]]  # per operand, per result: elements of the leaf for one of its own
Formula = Callable[[fx.Node], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """All that is known of an op beyond its schema and torch's tags. What is left out is not known, or is not so.

    What it means:

    pointwise: each element of the result depends on the same element of every full-shaped operand alone. An op that
        torch tags so needs no row.
    meaning: "copy": the result has its operand's value. "sum": all elements of one tensor are added up to a scalar.
    view: the result shares its operand's memory, though the schema does not say so. rename: it *is* the operand.
    in_place: (its pure form, for each result of the pure form the argument that it goes to).
    blockwise: its ratios: a block of the results depends on the same block of the operands alone, so the op runs on
        slices, as an elementwise op does. of_ranks: its operand has a row of blocks for each of several ranks.
    flat_form: of an op that needs all of a leaf, the op that takes the leaf's elements in 1-D, then the leaf's shape.
        Of no elements the flat form makes none. whole_form: the other way round.
    of_shape: the op that makes the same value from a shape, where this one reads the shape of an operand.
    placements: its `fzero.shard.rules.Rule`. local_forms: functions that a rank may call in its place, by their names.
    draws: how a captured step draws the same from a key: called with the mode, then the op's arguments.

    How it is traced:

    fake: "kept": the forms of its results follow from those of its operands, and are kept; "kernel": moreover its
        kernel for meta tensors is its shape rule, as of aten's pointwise ops. Pure ops of aten are kept without saying.
    traced: its trace, given what is known of values, then its operands. one_dtype: places of operands, or "all", that
        it refuses in several dtypes when it runs, but not on fake tensors. index: the place of an operand of indices,
        and the dtypes that it takes when it runs. read_bytes: the place of an operand that may be of uint8, and the
        dtype as which its kernel reads that. numbers: it refuses bool when it runs. keeps_overlap: its result may
        overlap itself as its operand does.
    norm_weight: the place of a norm's weight, whose dtype decides that of its statistics. norm_alike: the kernels of a
        device read such a weight in the dtype of the values, so it has it.

    How it runs:

    out_form: how its results are written where they belong. "call": torch's `out=` form of it was seen to write there
        and nothing else, and each call uses it. "program": so does the program's text. The name of another overload:
        that one, which has a tensor for a Python number. Pointwise ops are "program".
    in_order: its `out=` form is used only where the "result", or "all" that it reads and writes, lies in plain order: a
        softmax writes row by row, and of some ops torch's shape rule says other strides than its kernel gives.
    special_form: gives the calls that write its result into given memory, where no `out=` form does.
    overwrites: "elements", "rows": its kernel reads each of them before it writes it, so the result may lie in an
        operand's memory.
    exact: it rounds once or not at all, so parts of any size have the bits of the whole.
    tile_head: of a call that may head a chain of tiles, how these are made (`fzero.codegen.tiling.Head`); None for
        another call.
    fusion: "loop" over elements, which a compiler may fuse; "move": so it is, but it does not count as work; "not on
        cpu": there torch's kernel is faster. aten's pointwise ops are loops.
    widens: the operands that its kernel casts itself, by place: they may come in a narrower floating dtype.
    narrows: the results that its kernel writes in 16 bits as well, into its argument `copy`, by place.
    kernel: the `fzero.kernels.Kernel` that replaces it on CUDA. reads_back: that one waits for values from the device.
    seeds: the results that only a dropout reads, by place: of a call with `dropout_p=0` they hold nothing.
    workspace: bytes that its CPU kernel holds beyond operands and results.

    What it costs: flops: floating-point operations of a call. Without, its time is that of the bytes it moves. attends:
    these are of attention, which reaches another rate than products.

    >>> OpInfo(pointwise=True, flops=len)
    OpInfo(pointwise=True, flops=len)
    """

    pointwise: bool = False
    meaning: Literal["", "copy", "sum"] = ""
    view: bool = False
    rename: bool = False
    in_place: tuple[Any, tuple[int, ...]] | None = None
    blockwise: Ratios | None = None
    of_ranks: bool = False
    flat_form: Any = None
    whole_form: Any = None
    of_shape: str = ""
    placements: Any = None
    local_forms: tuple[Callable[..., Any], ...] = ()
    draws: Callable[..., Any] | None = None
    fake: Literal["", "kept", "kernel"] = ""
    traced: Callable[..., Any] | None = None
    one_dtype: Literal["all"] | tuple[int, ...] | None = None
    index: tuple[int, tuple[torch.dtype, ...]] | None = None
    read_bytes: tuple[int, torch.dtype] | None = None
    numbers: bool = False
    keeps_overlap: bool = False
    norm_weight: int | None = None
    norm_alike: bool = False
    out_form: str = ""
    in_order: Literal["", "result", "all"] = ""
    special_form: Callable[..., Any] | None = None
    overwrites: Literal["", "elements", "rows"] = ""
    exact: bool = False
    tile_head: Callable[[fx.Node], Any] | None = None
    fusion: Literal["", "loop", "move", "not on cpu"] = ""
    widens: tuple[int, ...] = ()
    narrows: tuple[int, ...] = ()
    kernel: Any = None
    reads_back: bool = False
    seeds: tuple[int, ...] = ()
    workspace: Formula | None = None
    flops: Formula | None = None
    attends: bool = False

    def stated(self) -> dict[str, Any]:
        """The facts of the row, by column, without those that are left out."""
        own = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, default, value in own if value is not default and value != default}

    def __str__(self) -> str:
        return "\n".join(f"{name:13} {_text(value)}" for name, value in self.stated().items())

    def __repr__(self) -> str:
        return f"OpInfo({', '.join(f'{name}={_text(value)}' for name, value in self.stated().items())})"


def _text(value: Any) -> str:
    """A fact in words: of a function its name, without its address."""
    if is_dataclass(value) and not isinstance(value, type):
        facts = [(f.name, f.default, getattr(value, f.name)) for f in fields(value)]
        return f"{type(value).__name__}({', '.join(f'{k}={_text(x)}' for k, d, x in facts if x != d)})"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(_text, value))})"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    return f"{module}.{name}".removeprefix("builtins.").replace(".<locals>", "") if module and name else str(value)


def rows(names: str, row: OpInfo, of: str = "aten") -> dict[str, OpInfo]:
    """The same row for several ops of a library."""
    return {f"{of}.{name}": row for name in names.split()}


LONG = (torch.int64,)
INDICES = (torch.int32, torch.int64)
PLACES = (*INDICES, torch.bool)

ROWS: dict[str, OpInfo] = {
    # attention
    "aten._scaled_dot_product_cudnn_attention": OpInfo(seeds=(6, 7)),
    # elementwise
    **rows("abs add div mul neg sqrt threshold_backward", OpInfo(overwrites="elements", exact=True)),
    "aten.where": OpInfo(overwrites="elements", exact=True, read_bytes=(0, torch.bool)),
    "aten.sub": OpInfo(overwrites="elements", exact=True, numbers=True),
    **rows("sub_ rsub", OpInfo(numbers=True)),
    **rows("heaviside heaviside_", OpInfo(one_dtype="all")),
    **rows(
        "clamp_max clamp_min exp log maximum minimum pow reciprocal relu rsqrt sigmoid sigmoid_backward silu square "
        "silu_backward tanh tanh_backward",
        OpInfo(overwrites="elements"),
    ),
    **rows("gelu gelu_backward", OpInfo(overwrites="elements", fusion="not on cpu")),
    **rows("float_power.Scalar pow.Scalar logit_backward special_xlog1py.default xlogy.Tensor", OpInfo(in_order="all")),
    **rows("erf erfc special_erf special_erfc", OpInfo(fusion="not on cpu")),
    "aten.add.Scalar": OpInfo(out_form="aten.add.out"),
    "aten.sub.Scalar": OpInfo(out_form="aten.sub.out"),
    "aten.mul.Scalar": OpInfo(out_form="aten.mul.out"),
    "aten.div.Scalar": OpInfo(out_form="aten.div.out"),
    **rows(  # that write into `out=`, of ops that torch does tag
        "clip.Tensor_out elu.out gelu.out hardshrink.out hardsigmoid.out hardtanh.out leaky_relu.out mish.out "
        "softplus.out softshrink.out threshold.out true_divide.out where.self_out",
        OpInfo(pointwise=True),
    ),
    # copies, and values that are made
    "aten.clone": OpInfo(pointwise=True, meaning="copy", fusion="move"),
    "aten._to_copy": OpInfo(pointwise=True, fusion="move"),
    "aten.copy_": OpInfo(fusion="move"),
    "aten.lift_fresh_copy": OpInfo(meaning="copy"),
    "aten.zeros_like": OpInfo(pointwise=True, of_shape="aten.zeros.default", fusion="move"),
    "aten.ones_like": OpInfo(pointwise=True, of_shape="aten.ones.default", fusion="move"),
    "aten.full_like": OpInfo(pointwise=True, of_shape="aten.full.default", fusion="move"),
    "aten.empty_like": OpInfo(pointwise=True, of_shape="aten.empty.memory_format", fusion="move"),
    "aten.fill": OpInfo(fusion="move"),
    **rows("full zeros ones", OpInfo(fusion="move")),
    **rows("arange scalar_tensor", OpInfo(fusion="loop")),
    # views
    "aten.detach": OpInfo(meaning="copy", rename=True, fake="kernel"),
    "aten.alias": OpInfo(meaning="copy", rename=True),
    "aten.lift_fresh": OpInfo(meaning="copy", rename=True, view=True),
    "aten._unsafe_view": OpInfo(view=True, fake="kernel"),
    **rows("unsafe_split.Tensor unsafe_split_with_sizes", OpInfo(view=True)),
    **rows(
        "expand permute select.int slice.Tensor split.Tensor t transpose.int unbind.int unsqueeze view.default",
        OpInfo(fake="kernel"),
    ),
    # products
    **rows("mm addmm bmm", OpInfo(out_form="program", fake="kernel", one_dtype="all")),
    "aten.baddbmm": OpInfo(out_form="call", one_dtype="all"),
    **rows("onednn_mm onednn_addmm onednn_bmm onednn_baddbmm", OpInfo(out_form="program"), "fzero"),
    **rows("widened_mm widened_addmm widened_bmm widened_baddbmm", OpInfo(out_form="program"), "fzero"),
    **rows("mv addmv addbmm addbmm_ convolution", OpInfo(one_dtype="all")),
    # reductions and norms
    "aten.sum": OpInfo(fusion="loop", fake="kernel"),
    "aten.sum.default": OpInfo(meaning="sum"),
    "aten.sum.dim_IntList": OpInfo(out_form="program"),
    **rows("all amax amin any mean", OpInfo(fusion="loop", out_form="call", fake="kernel")),
    **rows("argmax argmin cumsum", OpInfo(out_form="call", fake="kernel")),
    **rows("prod var var_mean logsumexp linalg_vector_norm", OpInfo(fusion="loop", fake="kernel")),
    **rows(
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
        OpInfo(fusion="loop", out_form="call", in_order="result", overwrites="rows", fake="kernel"),
    ),
    "aten.native_layer_norm": OpInfo(fusion="loop", norm_weight=2, norm_alike=True, fake="kernel"),
    "aten.native_layer_norm_backward": OpInfo(fusion="loop", fake="kernel"),
    **rows("_fused_rms_norm _fused_rms_norm_backward", OpInfo(fusion="loop")),
    **rows(
        "native_batch_norm _native_batch_norm_legit.default _native_batch_norm_legit_functional",
        OpInfo(norm_weight=1),
    ),
    "aten.native_group_norm": OpInfo(norm_weight=1, norm_alike=True, fake="kernel"),
    "fzero.reduce": OpInfo(fake="kept"),
    "fzero.sum_squares": OpInfo(fake="kept", meaning="sum"),
    # pieces, indices, losses
    **rows("cat stack tril triu", OpInfo(fusion="loop", out_form="call", fake="kernel")),
    **rows("slice_backward select_backward constant_pad_nd embedding", OpInfo(fusion="loop", fake="kernel")),
    **rows("gather max_pool2d_with_indices", OpInfo(out_form="call")),
    **rows(
        "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices_backward "
        "max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool2d adaptive_max_pool2d_backward "
        "upsample_nearest1d.default upsample_nearest1d_backward.default upsample_nearest2d.default "
        "upsample_nearest2d_backward.default upsample_nearest3d.default upsample_bilinear2d.default "
        "upsample_bilinear2d_backward.default upsample_bicubic2d.default upsample_bicubic2d_backward.default "
        "reflection_pad1d reflection_pad2d reflection_pad2d_backward glu glu_backward",
        OpInfo(out_form="call", in_order="all"),
    ),
    "aten.index": OpInfo(out_form="call", index=(1, PLACES), read_bytes=(1, torch.bool)),
    "aten.index_select": OpInfo(out_form="call", index=(2, INDICES)),
    **rows("embedding_dense_backward native_group_norm_backward", OpInfo(fake="kernel")),
    **rows("as_strided_scatter diagonal_scatter select_scatter slice_scatter", OpInfo(keeps_overlap=True)),
    "aten.nll_loss_forward": OpInfo(
        fusion="loop", out_form="call", fake="kernel", one_dtype=(0, 2), index=(1, LONG), read_bytes=(1, torch.int64)
    ),
    "aten.nll_loss_backward": OpInfo(fusion="loop", out_form="call", fake="kernel", read_bytes=(2, torch.int64)),
    "aten.nll_loss2d_forward": OpInfo(one_dtype=(0, 2), index=(1, LONG)),
    "aten.huber_loss_backward": OpInfo(one_dtype=(0, 1, 2)),
    **rows("multi_margin_loss multilabel_margin_loss_forward", OpInfo(index=(1, LONG))),
    "aten.binary_cross_entropy": OpInfo(one_dtype=(0, 1, 2)),
    **rows("grid_sampler_2d grid_sampler_3d linalg_cross polar complex _cdist_forward", OpInfo(one_dtype=(0, 1))),
    **rows("_embedding_bag _embedding_bag_forward_only", OpInfo(one_dtype=(0, 6))),
    **rows(
        "index_put index_put_ _unsafe_index_put",
        OpInfo(one_dtype=(0, 2), index=(1, PLACES), read_bytes=(1, torch.bool)),
    ),
    **rows("put put_", OpInfo(one_dtype=(0, 2), index=(1, LONG))),
    **rows("index_copy index_copy_", OpInfo(one_dtype=(0, 3), index=(2, LONG))),
    **rows("index_add index_add_ index_reduce index_reduce_", OpInfo(one_dtype=(0, 3), index=(2, INDICES))),
    # layers
    **rows("recurrent recurrent_backward", OpInfo(fake="kept", out_form="call"), "fzero"),
    # their kernels on CUDA copy the lengths to the host, whatever the tags say (2.11.0, 2.13.0)
    **dict.fromkeys(("fzero.ctc_loss", "aten._ctc_loss_backward.Tensor"), OpInfo(reads_back=True)),
}
