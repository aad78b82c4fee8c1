"""watch: the mode that sees every op of a trace before it is traced.

It refuses ops that a program cannot hold, and swaps the few that a trace would record wrongly. It gives values that
depend on no input. It notes the user's line and the phase on each new node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

from fzero._torch_compat import (
    TorchDispatchMode,
    backward_number,
    forward_number,
    in_functorch,
    is_fake,
    recording,
    scatters_keep_overlap,
    unwatched,
)
from fzero.capture import (  # these fill the column `traced`, and `refuse.REPLACED`
    attention_dropout,  # noqa: F401
    ctc,  # noqa: F401
    embedding_bag,  # noqa: F401
    host_values,  # noqa: F401
    margin_loss,  # noqa: F401
    mixed_dtypes,
    running_norms,  # noqa: F401
)
from fzero.capture.cast_first import CAST
from fzero.capture.context import Tracing
from fzero.capture.known import READS, Known
from fzero.capture.origins import is_drawn
from fzero.capture.provenance import describe, name_of
from fzero.capture.refuse import Refused, ambient_draw, closed_over_write
from fzero.capture.remedies import COLLECTIVE, COLLECTIVES, PLAIN, SPARSE
from fzero.ir import elsewhere, fx_values
from fzero.ir.op_info import of
from fzero.ir.recorder import DEVICE

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Sees every op before it is traced.

    It refuses writes to real tensors before they happen, at the place `where()`. It notes on each new node the user's
    line (`line()`) and, after the forward, the phase (`phase()`). With `known` it follows the values that depend on no
    input. While a region is traced inside of a step, the region's alone does so.
    """

    def __init__(
        self, tracing: Tracing, line: Callable[[], str], *, where: Callable[[], str] | None = None,
        phase: Callable[[], str | None] | None = None, known: Known | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tracing, self.line, self.where, self.known = tracing, line, where or line, known
        self.phase = phase or (lambda: tracing.phase)

    def __enter__(self) -> Watch:
        self.tracing.watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracing.watching.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Checks an op, runs it, and notes its source on the new nodes. Raises Refused."""
        if func is DEVICE:  # torch's C++ asks for it, five times as often as all ops are called
            return args[0].fake_device if is_fake(args[0]) else func(*args)
        if self is not self.tracing.watching[-1]:
            return func(*args, **(kwargs or {}))  # an op of a region, whose own mode has seen it
        with self.tracing.paused:
            return self._seen(func, args, kwargs)

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if func.namespace == "profiler":  # record_function: the trace's own time, no part of the program
            with unwatched():
                return func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES:
            raise Refused(f"{func} at {self.where()} {COLLECTIVE}")
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            func = aten._native_batch_norm_legit.default  # the same op, with a schema that marks its writes
        if func._schema.is_mutable:
            self._refuse_real(func, args, kwargs or {})
        if sparse := [x for x in args if isinstance(x, torch.Tensor) and x.layout is not torch.strided]:
            name = name_of(sparse[0], self.tracing.fns)
            raise Refused(f"{func} at {self.where()} reads {name}, of {sparse[0].layout}. {SPARSE}")
        if odd := [x for x in args if isinstance(x, torch.Tensor) and _is_subclass(x)]:
            name = name_of(odd[0], self.tracing.fns)
            raise Refused(f"{func} at {self.where()} reads {name}, a {type(odd[0]).__name__}. {PLAIN}")
        args = mixed_dtypes.with_bytes_cast(func, args, self._result)
        if mixed := mixed_dtypes.why(func, args):
            raise Refused(f"{func} at {self.where()} {mixed}")
        if of(func).keeps_overlap and not fx_values.is_dense(args[0]) and scatters_keep_overlap():
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        away, kinds = (kwargs or {}).get("device"), self.tracing.devices
        if kinds and away is not None and torch.device(away).type not in kinds:  # autograd may end the process
            out = ".cuda() or .to(device) out" if func is CAST else "device= out, or take a tensor's: device=x.device"
            raise Refused(
                f"{func} at {self.where()} asks for a tensor on {away}, and those of this step are on "
                f"{elsewhere.told(kinds)}. Leave {out}"
            )
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            raise Refused(str(ambient_draw(func, self.where())))
        if func is aten._efficientzerotensor.default:
            func = aten.zeros.default  # forward mode's zero tangents, which have no memory
        try:
            result = self._result(func, args, kwargs or {})
        except Exception as error:
            operands = " and ".join(map(describe, fx_values.tensors(optree.tree_leaves(list(args)))))  # type: ignore[arg-type]
            self.tracing.failed, self.tracing.raised = self.where(), (error, f"{func} of {operands}")
            reads, recorder = bool(READS.intersection(func.tags)), recording()
            self.tracing.drawn = reads and recorder is not None and is_drawn(recorder, fx_values.tensors(args))
            raise
        if layouts := [value.layout for value in fx_values.tensors(result) if value.layout is not torch.strided]:
            raise Refused(f"{func} at {self.where()} makes a tensor of {layouts[0]}. {SPARSE}")
        if (recorder := recording()) is not None:
            line = None
            for node in reversed(recorder.graph.nodes):
                if "source" in node.meta or node.op in ("placeholder", "root"):
                    break
                line = self._noted(func) if line is None else line
                node.meta["source"] = line
                node.meta["no_grad"] = not torch.is_grad_enabled() or not _has_gradient(func, args)
                if phase := self.phase():
                    node.meta["phase"] = phase
        return result

    def _noted(self, func: Any) -> str:
        """The line of the op that was traced, kept for its backward."""
        line = self.line()
        if self.phase() is None and backward_number() is None:
            if torch.is_grad_enabled():
                self.tracing.lines[forward_number()] = line
            else:  # of a node whose forward is Python: an autograd.Function
                self.tracing.lines.setdefault(forward_number(), line)
        if func.namespace not in ("aten", "fzero"):
            self.tracing.lines[str(func)] = line
        return line

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op; of one that asks for values that depend on no input, a literal."""
        if (known := self.known) is None:
            return func(*args, **kwargs)
        if (traced := of(func).traced) is not None:
            return traced(known, *args, **kwargs)
        if func is aten.index.Tensor:
            args = (args[0], known.places(args[0].shape, args[1]))
        elif func is aten.masked_select.default and args[0].shape == args[1].shape:
            places = known.places(args[0].shape, [args[1]])
            func, args = (func, args) if places[0] is args[1] else (aten.index.Tensor, (args[0], places))
        if READS.intersection(func.tags) and (value := known.value(func, args, kwargs)) is not None:
            device = next((x.device for x in fx_values.tensors(args)), torch.device("cpu"))
            return optree.tree_map(lambda x: known.literal(x, device), value[0])
        result = func(*args, **kwargs)
        known.follow(func, args, kwargs, result, forward=self.phase() is None)
        return result

    def _refuse_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses an op that would write to a tensor that is closed over."""
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = named.get(argument.name)
            for value in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    raise Refused(str(closed_over_write(self.tracing.fns, value, func, self.where())), written=value)


def _is_subclass(value: torch.Tensor) -> bool:
    """Whether a tensor is of a class of its own that torch's modes do not see."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) or is_fake(value)
    return not plain and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _has_gradient(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd follows an op that changes its operand's shape in place; it need not be known of others."""
    return torch.Tag.inplace_view not in func.tags or args[0].requires_grad or in_functorch()
