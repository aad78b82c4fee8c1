"""joint: forward and backward of a loss at the shape of one microbatch, as a function: a region is traced from it.

Inputs are the parameters' leaves, then the tensors of the other arguments. The loss scale and the key of this part of
the batch follow, if there are any. Outputs are the loss, a gradient for every leaf that gets one, then aux. For an
`fzero.Mean`, the total takes the loss's place and the count follows the gradients; all of these are sums. The metrics
of a `Spec`'s loss, `(loss, {"name": tensor})`, are outputs like those of a forward.

Casts are part of it: leaves and arguments to the dtype they are computed in, gradients to the dtype they are summed in;
under a policy of autocast also those of its ops.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero import backend, tree
from fzero.capture.ambient_rng import Keyed
from fzero.capture.context import active
from fzero.capture.leaves import check_leaf
from fzero.capture.provenance import check_call, defined_at, describe, shown, user_line
from fzero.capture.static import opened
from fzero.errors import CaptureError, leaf_name
from fzero.ir.code_ops import coded
from fzero.precision import LOW, Precision

log = logging.getLogger("fzero")


def no_tensor(name: str, value: Any, fix: str) -> CaptureError:
    """The error for a metric or aux, of this name, that is not a tensor."""
    if isinstance(value, Mean):
        return CaptureError(
            f"{name} is an fzero.Mean: only a loss, its metrics, fzero.forward and fzero.evaluate return one. Take "
            "the quotient in the step: fzero.psum(total) / fzero.psum(count.float())"
        )
    return CaptureError(
        f"{name} is the Python value {shown(value)}: it would stay what it was at the first step. {fix}"
    )


@dataclass(frozen=True)
class Mean:
    """The sum of a loss's terms, and how many there are. A loss may return it instead of a mean of its own.

    `total` is a 0-d floating tensor of at least 32 bits; `count` a number, or a 0-d tensor that does not depend on the
    parameters (tokens that are not masked, the sum of the weights). The loss is then sum(total) / sum(count) over all
    ranks and microbatches, and its gradient is that of this quotient, however the batch is spread. A count of 0
    divides by 1, so without terms both are 0. The total of a metric, or of an evaluation, may be an integer:
    `(predicted == y).sum()`.

    >>> import fzero
    >>> def loss(p, batch):
    ...     return fzero.Mean(((p["w"] * batch["x"] - 1) ** 2 * batch["mask"]).sum(), batch["mask"].sum())
    >>> batch = {"x": torch.tensor([1.0, 2.0, 9.0]), "mask": torch.tensor([1, 1, 0])}
    >>> value, grads = fzero.value_and_grad(loss)({"w": torch.tensor(2.0)}, batch)
    >>> float(value), float(grads["w"])
    (5.0, 7.0)
    """

    total: Tensor
    count: Tensor | float


def safe(count: Tensor) -> Tensor:
    """The count as a divisor: 1 in the place of 0."""
    return torch.where(count == 0, torch.ones_like(count), count)


@dataclass
class Marks:
    """Facts about a region's outputs that are known once it was traced. `Joint`'s two functions write them."""

    grad_of: tuple[int, ...] = ()  # for each gradient, the leaf it belongs to
    has_count: bool = False  # the loss is a total, a count follows the gradients
    aux_treedef: Any = None
    aux_kinds: tuple[str, ...] = ()  # of a forward and of metrics: "value", "mean", "total" or "count", for each output


@dataclass
class Joint:
    """One `value_and_grad` (or forward) of a function, at given arguments.

    Its methods `value_and_grad` and `forward` are called with a region's inputs, and fill `marks`. Nothing else is
    written after the constructor.
    """

    fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    precision: Precision
    has_aux: bool = False
    metrics: bool = False  # the loss may return metrics beside its value
    unused: bool = False
    key: Tensor | None = None
    scale: Tensor | None = None
    microbatches: int = 1
    reduce: bool = True  # over the ranks; else each has its own gradients
    errors: Mapping[str, Tensor] = field(default_factory=dict)  # by path, what earlier codes of a gradient have lost
    enter: Callable[[str], None] = lambda phase: None  # called where a phase of the trace begins
    marks: Marks = field(default_factory=Marks)

    def __post_init__(self) -> None:
        self.paths, self.leaves, self.treedef = tree.flatten(self.params)
        self.arg_paths, self.arg_leaves, self.arg_treedef = tree.flatten((self.args, self.kwargs))
        self.arg_leaves = [opened(leaf) for leaf in self.arg_leaves]
        tracing = active()
        static = tracing.static if tracing is not None else ()
        self.is_tensor = [isinstance(leaf, Tensor) and id(leaf) not in static for leaf in self.arg_leaves]
        self.asks_key = asks_key(self.fn) and "key" not in self.kwargs
        more = "batch" if len(self.args) == 1 else f"and {len(self.args)} arguments"
        given = self.kwargs | ({"key": self.key} if self.asks_key else {})
        check_call(self.fn, f"(params, {more})", self.params, *self.args, **given)
        if self.asks_key and self.key is None:
            raise CaptureError(
                f"{defined_at(self.fn)} asks for a key: give fzero.init one (fzero.init(params, spec, "
                "key=fzero.random.key(0))), in a step of your own fzero.value_and_grad(loss, key=key), and for an "
                "evaluation fzero.evaluate(state, batch, fn, key=key)"
            )

    @property
    def others(self) -> list[Tensor]:
        """The arguments' tensors, then the loss scale. The caller, who cuts the batch, adds the parts' keys."""
        tensors = [leaf for leaf, is_tensor in zip(self.arg_leaves, self.is_tensor, strict=True) if is_tensor]
        return tensors if self.scale is None else [*tensors, self.scale]

    @property
    def other_paths(self) -> list[str]:
        """Their paths within (args, kwargs)."""
        paths = [path for path, is_tensor in zip(self.arg_paths, self.is_tensor, strict=True) if is_tensor]
        return paths if self.scale is None else [*paths, "scale"]

    def value_and_grad(self, *xs: Tensor) -> list[Tensor]:
        """[loss, *gradients, count where the loss is a Mean, *aux]; fills `marks`. `xs`: a region's inputs."""
        own, call, scale = self._inputs(xs, leaf=True)
        with torch.enable_grad(), call:
            with self._autocast():
                result = self.fn(tree.unflatten(self.treedef, own), *call.args, **call.kwargs)
            loss, count, aux = self._checked(result)
            with torch.no_grad():
                shown = _wide(loss.detach())  # forward work: in a pipeline the last chunk's
            start = loss if scale is None else loss * scale / (1 if count is None else safe(count))
            self.enter("backward")
            grads = torch.autograd.grad(start, own, allow_unused=True) if loss.requires_grad else [None] * len(own)
        self.enter("finish")
        self._check_used(grads)
        present = [(i, g) for i, g in enumerate(grads) if g is not None]
        self.marks.grad_of = tuple(i for i, _ in present)
        self.marks.has_count = count is not None
        sums = []
        for i, g in present:
            g = g.to(self._grad_dtype(self.leaves[i].dtype))
            sums.append(g if scale is None or count is None else g * safe(count))
        counts = [] if count is None else [count]
        return [shown, *sums, *counts, *(a.detach() for a in aux)]

    def forward(self, *xs: Tensor) -> list[Tensor]:
        """The leaves of the function's result, two for a Mean; fills `marks`. `xs`: a region's inputs."""
        own, call, _ = self._inputs(xs, leaf=False)
        with torch.no_grad(), call, self._autocast():
            result = self.fn(tree.unflatten(self.treedef, own), *call.args, **call.kwargs)
        paths, leaves, self.marks.aux_treedef = tree.flatten(result)
        outs: list[Tensor] = []
        kinds: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, Mean):
                outs += map(_wide, _tensors_of(leaf, self.fn))
                kinds += ["total", "count"]
                continue
            if not isinstance(leaf, Tensor):
                raise CaptureError(
                    f"{leaf_name('result', path)} of {defined_at(self.fn)} is {describe(leaf)}: needed a tensor or "
                    "fzero.Mean"
                )
            scalar = leaf.ndim == 0 and leaf.dtype.is_floating_point
            outs.append(_wide(leaf) if scalar else leaf)
            kinds.append("mean" if scalar else "value")
        self.marks.aux_kinds = tuple(kinds)
        return outs

    # --- pieces

    def _inputs(self, xs: Sequence[Tensor], *, leaf: bool) -> tuple[list[Tensor], _Call, Tensor | None]:
        """The parameters as they are computed in, the call's other arguments, and the loss scale."""
        feed = iter(xs[len(self.leaves) :])
        own = []
        for path, x in zip(self.paths, xs, strict=False):
            codec, held = self.precision.coding(path, x).gather, x.detach()
            held = held if codec is None else coded(held, codec)
            x = held.to(self.precision.compute_dtype(path, x.dtype))
            if leaf:
                x.requires_grad_().register_post_accumulate_grad_hook(functools.partial(self._no_backward, path))
            own.append(x)
        full = [next(feed) if t else leaf for t, leaf in zip(self.is_tensor, self.arg_leaves, strict=True)]
        if self.precision.cast_batch:
            full = [self._cast(path, x) for path, x in zip(self.arg_paths, full, strict=True)]
        args, kwargs = tree.unflatten(self.arg_treedef, full)
        scale = None if self.scale is None else next(feed)
        key = None if self.key is None else next(feed)[0]
        if self.asks_key:
            kwargs = {**kwargs, "key": key}
        return own, _Call(args, kwargs, key), scale

    def _autocast(self) -> AbstractContextManager[object]:
        """The policy's autocast, if it has one, on the device of the parameters. It keeps no casts, for one that is
        kept from a phase without gradients has none; equal casts of a program are made once all the same."""
        dtype = self.precision.autocast
        if dtype is None or not self.leaves:
            return nullcontext()
        device = backend.traced_device() or self.leaves[0].device
        return torch.autocast(device.type, dtype, cache_enabled=False)

    def _cast(self, path: str, x: Any) -> Any:
        """A floating leaf of an argument, as it is computed in: rules match its path within its argument."""
        within = path.split("/", 2)[2] if path.count("/") > 1 else ""
        return x.to(self.precision.compute_dtype(within, x.dtype)) if isinstance(x, Tensor) else x

    def _grad_dtype(self, held: torch.dtype) -> torch.dtype:
        """A region's gradients come in the dtype they are summed in; where nothing is summed, as they travel."""
        summed = self.microbatches > 1 or not self.reduce
        return self.precision.sum_dtype(held) if summed else self.precision.wire_dtype(held)

    def _checked(self, result: Any) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """(loss or total, count or None, aux leaves) of the function's result. Raises CaptureError for a wrong one."""
        metrics = None
        if self.metrics and isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, metrics = result
        loss, aux = _check_loss(result, self.has_aux, self.fn)
        count = None
        if isinstance(mean := loss, Mean):
            loss, counted = _tensors_of(mean, self.fn, trained=True)
            count = _wide(counted)
        if self.metrics:
            return loss, count, self._metrics(metrics or {})
        paths, leaves, self.marks.aux_treedef = tree.flatten(aux)
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                name = f"{leaf_name('aux', path)} of {defined_at(self.fn)}"
                raise no_tensor(name, leaf, "Return a tensor, or leave it out")
            check_leaf(leaf_name("aux", path), leaf)
        return loss, count, leaves

    def _metrics(self, metrics: Mapping[str, Any]) -> list[Tensor]:
        """The outputs for a loss's metrics. Raises CaptureError for a value that no mean can be taken of."""
        paths, leaves, self.marks.aux_treedef = tree.flatten(dict(metrics))
        outs: list[Tensor] = []
        kinds: list[str] = []
        for path, leaf in zip(paths, leaves, strict=True):
            name = f"metric {path!r} of {defined_at(self.fn)}"
            if isinstance(leaf, Mean):
                outs += map(_wide, _tensors_of(leaf, self.fn))
                kinds += ["total", "count"]
                continue
            if not isinstance(leaf, Tensor):
                raise no_tensor(name, leaf, "Return a tensor or an fzero.Mean, or leave it out")
            if leaf.dtype.is_complex:
                raise CaptureError(f"{name} is {describe(leaf)}: needed a real tensor. Return its .abs()")
            check_leaf(name, leaf)
            outs.append(leaf.to(torch.float64 if leaf.dtype is torch.float64 else torch.float32).contiguous())
            kinds.append("mean")
        self.marks.aux_kinds = tuple(kinds)
        return outs

    def _no_backward(self, path: str, _: Tensor) -> None:
        """A hook of the leaf: refuses a backward() that would add to its `.grad`, which the step does not read."""
        raise CaptureError(
            f"{user_line()}: a backward() within the loss {defined_at(self.fn)}: it adds to the .grad of {path!r}. "
            "Leave loss.backward() out: fzero takes the gradient of what the loss returns. For one within the loss "
            "write torch.autograd.grad(y, x, create_graph=True), or backward(inputs=[x]) for a tensor of your own. "
            "Reversible layers run one in their own backward: take plain ones, and Spec(remat='full')"
        )

    def _check_used(self, grads: Sequence[Tensor | None]) -> None:
        missing = [path for path, g in zip(self.paths, grads, strict=True) if g is None]
        if not missing:
            return
        shown = f"{', '.join(repr(p) for p in missing[:5])}{' and more' if len(missing) > 5 else ''}"
        shown += " gets" if len(missing) == 1 else " get"
        them = "it" if len(missing) == 1 else "them"
        if not self.unused:
            its = ""
            if len(missing) == len(self.paths):  # it is not that one leaf was forgotten
                its = (
                    " without torch.no_grad() and .detach() between (a module that is called computes with its own: "
                    "functional_call(module, params, (x,)))"
                )
            raise CaptureError(
                f"{shown} no gradient from the loss {defined_at(self.fn)}. Use {them}{its}, leave {them} out of the "
                "parameters, or pass allow_unused=True"
            )
        log.warning("fzero: %s no gradient from the loss: it is zero here, and a weight decay would move %s still",
                    shown, them)  # fmt: skip


class _Call:
    """The other arguments of a call; as a context, the ambient draws within are made from its key."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Tensor | None) -> None:
        self.args, self.kwargs = args, kwargs
        self.mode: Any = nullcontext() if key is None else Keyed(key)

    def __enter__(self) -> None:
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def asks_key(fn: Callable[..., Any]) -> bool:
    """Whether a loss has a parameter named `key`."""
    if isinstance(fn, functools.partial) and "key" in fn.keywords:
        return False
    try:
        return "key" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def _wide(x: Tensor) -> Tensor:
    """A loss or a count in a dtype that sums do not spoil."""
    if not x.dtype.is_floating_point:
        return x.to(torch.int64)
    return x.to(torch.float32) if x.dtype in LOW else x


def _check_loss(result: Any, has_aux: bool, fn: Callable[..., Any]) -> tuple[Any, Any]:
    """(loss, aux) of a loss's result. Raises CaptureError, with the remedy, for a result of another form."""
    name = defined_at(fn)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise CaptureError(
            f"with has_aux=True a loss returns (loss, aux), {name} returned {type(result).__name__}. Return the pair, "
            "or leave out has_aux"
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple):
        raise CaptureError(
            f"the loss {name} returned a tuple: return the loss alone. The loss of a Spec may return metrics too, as "
            "(loss, {'name': tensor}). For another (loss, aux) write a step= with fzero.value_and_grad(loss, "
            "has_aux=True); for an exact mean return fzero.Mean(total, count)"
        )
    if isinstance(loss, Mean):
        return loss, aux
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise CaptureError(
            f"a loss is a floating 0-d tensor, {name} returned {describe(loss)}. Return a floating tensor's "
            ".mean() or .sum()"
        )
    return loss, aux


def _tensors_of(mean: Mean, fn: Callable[..., Any], *, trained: bool = False) -> tuple[Tensor, Tensor]:
    """A Mean's total and count as 0-d tensors of enough bits. An integer total counts exactly, in fp64.

    Raises CaptureError for other things, for a count that needs a gradient, and for an integer total that is `trained`.
    """
    name = defined_at(fn)
    total, count = mean.total, mean.count
    whole = isinstance(total, Tensor) and not (total.dtype.is_floating_point or total.dtype.is_complex)
    if whole and total.ndim == 0 and not trained:
        total = total.to(torch.float64)
    if not isinstance(total, Tensor) or total.ndim != 0 or not total.dtype.is_floating_point:
        raise CaptureError(f"Mean(total=...) of {name} is {describe(total)}: needed a floating 0-d tensor, a .sum()")
    if isinstance(count, int | float) and not isinstance(count, bool):
        dtype = total.dtype if isinstance(count, float) else torch.int64
        count = torch.full((), count, dtype=dtype, device=total.device)
    if not isinstance(count, Tensor) or count.ndim != 0:
        raise CaptureError(
            f"Mean(count=...) of {name} is {describe(count)}: needed a number, or a 0-d tensor, as mask.sum()"
        )
    if total.dtype in LOW:
        raise CaptureError(
            f"Mean(total=...) of {name} is {describe(total)}: a sum of many terms needs more bits. Sum in fp32, as in "
            "F.cross_entropy(logits.float(), y, reduction='sum')"
        )
    if count.dtype in LOW:
        raise CaptureError(
            f"Mean(count=...) of {name} is {describe(count)}, which cannot tell 257 from 256: count in more bits, as "
            "in mask.float().sum()"
        )
    if count.requires_grad:
        raise CaptureError(
            f"Mean(count=...) of {name} depends on the parameters, and a mean's count has no gradient: detach() it"
        )
    return total, count
