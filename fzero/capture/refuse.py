"""refuse: the rules of a trace. Every error has the user's line and a remedy.

`check_graph` looks at a finished trace. `explained` turns errors that torch raises on the way into errors of fzero.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fzero._torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    is_fake,
    quiet_fakes,
)
from fzero.capture.ambient_rng import no_dropout
from fzero.capture.context import Tracing
from fzero.capture.provenance import describe, is_users_line, name_of, short_name, user_line
from fzero.capture.remedies import (
    BUFFER,
    DRAWN,
    FUNCTIONS,
    IN_GENERAL,
    IN_PLACE,
    INDEXED,
    NO_GROUP,
    NO_VIEW,
    RAGGED,
    REMEDIES,
    TORCH_SAYS,
)
from fzero.errors import CaptureError
from fzero.ir import fx_nodes
from fzero.recurrent import layers

aten = torch.ops.aten
Fns = tuple[Callable[..., Any], ...]


def check_graph(gm: fx.GraphModule, names: Sequence[str], fns: Fns, *, in_region: bool) -> None:
    """Raises CaptureError for the first node of a traced graph that breaks a rule.

    `names` are the inputs' in errors. `fns` are the user's functions, whose closures name tensors. Inside a region
    (`in_region`) a graph may use fake tensors of the step around it.
    """
    inputs = dict(zip(fx_nodes.placeholders(gm.graph), names, strict=False))
    _check_shape_changes(gm)
    for node in gm.graph.nodes:
        where = node.meta.get("source") or "the step"
        for argument in fx_nodes.mutated(node):
            root = fx_nodes.base(argument)
            if root in inputs:
                raise CaptureError(
                    f"{inputs[root]} is changed in place by {node.target} at {where}: a step is pure. "
                    f"{IN_PLACE.get(str(node.target), 'Return a new value instead')}"
                )
            if root.op == "get_attr":
                raise closed_over_write(fns, attribute(gm, root), node.target, where)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not no_dropout(
            node.target, node.args, node.kwargs
        ):
            raise ambient_draw(node.target, where)
        if node.op == "get_attr":
            value = attribute(gm, node)
            if is_fake(value) and not in_region:
                raise CaptureError(
                    f"a tensor {describe(value)} at {where} was made inside a loss, or in another trace, and kept: it "
                    "has no value here. Return it from the loss as aux (has_aux=True); what a cache keeps, make before "
                    "the first step"
                )
            wanted = [u for u in node.users if not (u.meta.get("no_grad") or str(u.target) in _NO_GRAD)]
            if isinstance(value, torch.Tensor) and not is_fake(value) and value.requires_grad and wanted:
                raise CaptureError(
                    f"{name_of(value, fns)} is closed over at {wanted[0].meta.get('source') or where} and "
                    "requires grad: it would get no gradient and never change. Pass it in through the parameters, or "
                    "detach() it"
                )


def _check_shape_changes(gm: fx.GraphModule) -> None:
    """Refuses `x.transpose_(...)` and the like on a tensor that shares its memory, where that could spoil gradients.

    Either an older value with the same memory is read afterwards; or x is a view, and the memory is written to
    afterwards. Autograd then makes x's views anew, from x as it is now and not as it was, so their gradients would be
    wrong. (That is so on fake tensors; on real ones it makes them by their place in memory.)
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    reshaped = [n for n in order if torch.Tag.inplace_view in getattr(n.target, "tags", ())]
    writes = [n for n in order if n not in reshaped and fx_nodes.mutated(n)]
    for node in reshaped:
        if node.meta.get("no_grad"):
            continue
        changed, root = fx_nodes.operand(node), fx_nodes.base(node)
        others = [n for n in order if n is not changed and fx_nodes.is_compute(n) and fx_nodes.base(n) is root]
        read = any(order[n] < order[node] < order[user] for n in others for user in n.users)
        written = any(order[n] > order[node] and fx_nodes.base(n) is root for n in writes)
        if read or (written and fx_nodes.is_view(changed)):
            raise CaptureError(
                f"{node.target} at {node.meta.get('source') or 'the step'} changes the shape of a tensor in place that "
                "shares its memory with another one: their gradients would be wrong. Write x = x.transpose(...), not "
                "x.transpose_(...)"
            )


# ops that ask for no gradient of their operands; a region's own graph has been checked by itself
_NO_GRAD = ("aten.detach.default", "fzero.region.default")


def ambient_draw(op: Any, where: str) -> CaptureError:
    """The error for a draw from torch's generator."""
    return CaptureError(
        f"{op} at {where} draws from torch's ambient generator: the step would not be a function of its state. "
        "In a loss, give it a key: fzero.init(params, spec, key=fzero.random.key(0)), or value_and_grad(loss, key=key) "
        "in a step of your own, or fzero.evaluate(..., key=key). "
        "Elsewhere use fzero.random with a key from the state or the batch"
    )


def closed_over_write(fns: Fns, value: Any, op: Any, where: str) -> CaptureError:
    """The error for an in-place change of a tensor that is closed over."""
    return CaptureError(
        f"{name_of(value, fns)} is closed over and changed in place by {op} at {where}: put it in the state "
        "and return its new value"
    )


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The value of a `get_attr` node."""
    return getattr(gm, str(node.target))


class Refused(Exception):
    """A CaptureError on its way out of torch, which takes a TypeError in an operator for "try the other operand".

    written: the real tensor that an op would write to, where that is the reason.
    """

    def __init__(self, text: str, written: torch.Tensor | None = None) -> None:
        super().__init__(text)
        self.written = written


_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


# a function of torch's that a trace does another way; the module that has the way adds its row
REPLACED: dict[Any, Callable[..., Any]] = {}


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one storage, in one dtype and order."""
    one, other = ((v.dtype, v.shape, v.stride(), v.storage_offset(), v.untyped_storage()._cdata) for v in (x, y))
    return one == other


class NoExchange(TorchFunctionMode):
    """Refuses `x.data = y`: it is no op, so a trace would go on with the old value.

    A layer of torch's recurrent nets becomes one op (`fzero.recurrent`); so does torch's scan (`REPLACED`).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SETS_DATA and not _same_memory(*args[:2]):
            raise Refused(
                f"`.data = ...` at {user_line()} puts another value into a tensor, which a trace cannot follow. Write "
                "x = value, or x = value.detach().requires_grad_() for its gradient; of a parameter, compute with the "
                "new value, and return it from the step to keep it"
            )
        if func == _SETS_DATA:  # `x.data = x.data.to(x.dtype)` puts nothing new there
            return None
        if func in layers.KINDS:
            return layers.run(func, args, kwargs or {})
        if func in REPLACED:
            return REPLACED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def explained(tracing: Tracing, place: Callable[[], str]) -> Iterator[None]:
    """Turns torch's errors about what a trace does not have into one with the user's line and a remedy.

    `place()` is told where no op has raised the error and no line of the user's is among its callers.
    """
    tracing.failed, tracing.raised, tracing.drawn = "", None, False
    try:
        with quiet_fakes():
            yield
    except Refused as error:
        raise CaptureError(str(error)) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _data_dependent(error, str(error.func), tracing.failed or place(), drawn=tracing.drawn) from None
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        known = NO_VIEW in str(error) or NO_GROUP in str(error)
        if isinstance(error, CaptureError) or (isinstance(error, ValueError) and not known):
            raise
        where = _frames(error)[0][0] or tracing.failed or place()
        if "tracing tensor" in str(error) or "data-dependent" in str(error).lower():
            raise _data_dependent(error, "a tensor's value", where) from None
        if why := _op_without_rule(error):
            raise CaptureError(f"{where}: {why}") from None
        if match := _NO_FORMULA.search(str(error)):
            raise CaptureError(
                f"{match[1]} at {tracing.lines.get(match[1], where)} has no backward. Give it "
                "one with torch.library.register_autograd, or detach() its operands"
            ) from None
        op = tracing.raised[1] if tracing.raised and error is tracing.raised[0] else ""  # no frame keeps the error
        what = f"{where}: {op}" if op else where
        for part, why in TORCH_SAYS.items():
            if part in str(error):
                library = _frames(error, layers=False)[1]
                within = f", in {library[0]}" if library is not None else ""
                raise CaptureError(f"{what}{within}: {why}") from None
        if op:
            reason = str(error).strip().partition("\n")[0]
            raise _told(error, f"{what}: {reason.rstrip('.') + tracing.cut if tracing.cut else reason}") from None
        told = str(error).startswith(f"{where}: ")  # by the trace of a region within
        if told or type(error) not in _TORCHS or _is_raised_by_user(error):
            raise
        raise _told(error, f"{where}: {error}".replace("FakeTensor", "Tensor")) from None


def _told(error: Exception, text: str) -> Exception:
    """The same error with another text; itself with a note, where its class is made of more than a text."""
    try:
        return type(error)(text).with_traceback(error.__traceback__)
    except TypeError:
        if text not in getattr(error, "__notes__", ()):  # by the trace of a region within
            error.add_note(text)
        return error


_TORCHS = (RuntimeError, TypeError, IndexError)  # what torch raises of operands before any op is called


def _is_raised_by_user(error: Exception) -> bool:
    """Whether an error comes from a `raise` or `assert` of the user's, not from a function that is called there."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return is_users_line(last.tb_frame) and dis.opname[code.co_code[last.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


_NO_FORMULA = re.compile(r"Trying to backward through (\S+) but no autograd formula was registered")
_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((\S+)\)>")
_OF_FUNCTIONS = re.compile(r"no rule registered for (?:HigherOrderOperator|HOP) (\w+)")


def _op_without_rule(error: Exception) -> str | None:
    """The reason and the remedy, where torch cannot trace an op at all; None for another error."""
    if match := _OF_FUNCTIONS.search(str(error)):
        remedy = next((text for name, text in FUNCTIONS.items() if match[1].startswith(name)), "Write it in plain ops")
        return f"torch's op {match[1]} runs functions of its own, which a program does not hold. {remedy}"
    custom = _NO_FAKE.search(str(error))
    if custom is None and not isinstance(error, UnsupportedOperatorException):
        return None
    op = custom[1] if custom else str(getattr(error, "func", error))
    if "nested" in op:
        return f"{op} makes a nested tensor. {RAGGED}"
    if op.startswith(("aten", "prims")):
        return f"torch has no shape rule for {op}. Write it in other ops"
    name = ".".join(op.split(".")[:2]).replace(".", "::", 1)
    return f"{op} has no fake rule, which says its result's shape. Give it one: torch.library.register_fake({name!r})"


def _data_dependent(error: Exception, value_name: str, where: str, *, drawn: bool = False) -> CaptureError:
    (users, code), library = _frames(error)
    text = f"{users or where}: the program would depend on {value_name}, which is known only when it runs"
    if library is not None:
        where, code = library
        text += f"; {where} asks for it: `{code}`"
        code = f"{where} {code}"
    elif value_name == "aten._local_scalar_dense.default" and _is_subscript(error):
        return CaptureError(f"{text}. {INDEXED}")
    remedies = (remedy for part, remedy in REMEDIES.items() if part in f"{value_name} {code}")
    buffer = _buffer(error)
    otherwise = DRAWN if drawn else BUFFER.format(buffer) if buffer else IN_GENERAL
    return CaptureError(f"{text}. {next(remedies, otherwise)}")


def _buffer(error: Exception) -> str:
    """The buffer that the innermost method of a module names in the line that failed, if its value is not known."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        frame, number = trace_back.tb_frame, trace_back.tb_lineno
        method = frame.f_code.co_varnames[:1] == ("self",)  # of others f_locals would keep what it copies, as the error
        if method and isinstance(module := frame.f_locals.get("self"), nn.Module):
            line = linecache.getline(frame.f_code.co_filename, number)
            named = (name for name in _OF_SELF.findall(line) if is_fake(module._buffers.get(name)))
            found = next(named, "")
        trace_back = trace_back.tb_next
    return found


_OF_SELF = re.compile(r"\bself\.(\w+)\b")


def _is_subscript(error: Exception) -> bool:
    """Whether the user's innermost line was at `x[i]`, `x[i:j]` or an assignment to one."""
    innermost, trace_back = None, error.__traceback__
    while trace_back is not None:
        innermost = trace_back if is_users_line(trace_back.tb_frame) else innermost
        trace_back = trace_back.tb_next
    if innermost is None:
        return False
    before = (op for op in dis.get_instructions(innermost.tb_frame.f_code) if op.offset <= innermost.tb_lasti)
    *_, op = before  # the place may be in the cache behind a call
    names = ("BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE")
    return op.opname in names or (op.opname == "BINARY_OP" and op.argrepr == "[]")  # since Python 3.14


def _frames(error: Exception, *, layers: bool = True) -> tuple[tuple[str, str], tuple[str, str] | None]:
    """((the user's innermost line, its code), the innermost line of a library that it called, as `package/x.py:12 in
    f`, and its code) of an error's traceback. layers: torch's layers are one too."""
    users, library = ("", ""), None
    trace_back = error.__traceback__
    while trace_back is not None:
        code, line = trace_back.tb_frame.f_code, trace_back.tb_lineno
        text = linecache.getline(code.co_filename, line).strip()
        if (package := _library(code.co_filename)) is not None:
            if layers or not package.startswith("torch/"):
                library = f"{package}:{line} in {code.co_name}", text
        elif is_users_line(trace_back.tb_frame):
            users, library = (f"{short_name(code.co_filename)}:{line}", text), None
        trace_back = trace_back.tb_next
    return users, library


def _library(filename: str) -> str | None:
    """The path of an installed file from its package on; None for a user's file, fzero, optree and most of torch."""
    _, _, inner = filename.rpartition("site-packages/")
    shown = ("torch/ao", "torch/distributions", "torch/nn", "torch/functional", "torch/optim", "torch/utils/data")
    if inner == filename or (inner.startswith("torch/") and not inner.startswith(shown)):
        return None
    return inner if not inner.startswith(("fzero/", "optree/")) else None
