"""provenance: lines, definitions and names in the user's code, for errors and for the program's text."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.capture.static import Static
from fzero.errors import CaptureError
from fzero.ir.records import DTYPE_NAMES

_OURS = (
    *(f"{path}{os.sep}" for path in (torch.__path__[0], os.path.dirname(tree.__file__), tree.optree.__path__[0])),
    contextlib.__file__,  # decorators of these add frames between a caller and fzero
    functools.__file__,
)
# what is typed into Python, the cells of notebooks that have no file, what came by cloudpickle or in a `torch.package`
TYPED = (
    "<stdin>", "<ipython", "<doctest", "<python-input", "<console>", "<input", "<cell", "<command-", "<bpython",
    "<dynamic-code>", "<torch_package_",
)  # fmt: skip


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is the user's: not of torch, fzero or optree, and not generated."""
    return not filename.startswith((*_OURS, "<")) or filename.startswith(TYPED)


def is_users_line(frame: types.FrameType) -> bool:
    """Whether a frame is the user's: also of what `exec` or `python -c` was given, in a module without a file."""
    name = frame.f_code.co_filename
    return is_users(name) or (name == "<string>" and not frame.f_globals.get("__file__"))


def short_name(filename: str) -> str:
    """A file as messages name it, by its last part; in a notebook the cell, as IPython's tracebacks do: `In[3]`.

    >>> short_name("/home/me/train.py")
    'train.py'
    """
    ask = getattr(sys.modules.get("IPython.core.getipython"), "get_ipython", None)
    cell = getattr(getattr(ask() if ask else None, "compile", None), "format_code_name", lambda name: None)(filename)
    return str(cell[1]) if cell else filename.rsplit("/", 1)[-1]


def user_line(frame: types.FrameType | None = None, *, within: str | None = None) -> str:
    """`file.py:12` of the innermost caller outside torch, fzero, optree and Python's decorators.

    "" where there is none. With `within` the search ends at a function of that file that is not a caller of this one.
    """
    frame = frame or sys._getframe(1)
    while within is not None and frame is not None and frame.f_code.co_filename == within:
        frame = frame.f_back
    while frame is not None and not is_users_line(frame):
        frame = None if frame.f_code.co_filename == within else frame.f_back
    if frame is None:
        return ""
    return f"{short_name(frame.f_code.co_filename)}:{frame.f_lineno}"


def defined_at(fn: Callable[..., Any]) -> str:
    """`loss_fn (file.py:12)`: a user's function, as messages name it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{name} ({short_name(code.co_filename)}:{code.co_firstlineno})" if code else name


def check_call(fn: Callable[..., Any], takes: str, *args: Any, **kwargs: Any) -> None:
    """Raises CaptureError if a user's function does not take what it is called with. takes: that, in words."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{defined_at(fn)} has the arguments {signature}, and is called with {takes}: {error}"
        ) from None


def called(fn: Callable[..., Any], takes: str, *args: Any) -> Any:
    """What a function returns, once `check_call` is content."""
    check_call(fn, takes, *args)
    return fn(*args)


def describe(value: Any) -> str:
    """`f32[2, 3]`: a tensor as errors and messages show it."""
    if isinstance(value, Static):
        return value.text
    if isinstance(value, torch.Tensor):
        return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    return f"{type(value).__name__} {shown(value)}"


def shown(value: Any) -> str:
    """The repr of a value, on one line and cut at 200 characters: that of a dataclass of tensors has no end.

    >>> shown("x" * 1000)[-8:]
    'xxxx ...'
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:196].rstrip()} ..."


def name_of(value: Any, fns: Sequence[Callable[..., Any]]) -> str:
    """A closed-over tensor as messages name it: by the name in the user's code, else by dtype and shape."""
    name = found_name(value, fns)
    return f"tensor {name!r}" if name else f"a tensor {describe(value)}"


def found_name(value: Any, fns: Sequence[Callable[..., Any]]) -> str | None:
    """The name of a closed-over tensor in the user's code, found from `fns` within four levels, or None."""
    visited: set[int] = set()

    def look(item: Any, name: str, depth: int) -> str | None:
        if item is value:
            return name
        library = isinstance(item, types.ModuleType) and item.__name__.partition(".")[0] in ("torch", "fzero", "numpy")
        if depth == 0 or library or id(item) in visited:
            return None
        visited.add(id(item))
        children: list[tuple[str, Any]] = []
        if isinstance(item, torch.nn.Module):
            children = [(f"{name}.{n}", t) for n, t in [*item.named_parameters(), *item.named_buffers()]]
        elif isinstance(item, dict):
            children = [(f"{name}[{k!r}]", v) for k, v in item.items()]
        elif isinstance(item, (list, tuple)):
            children = [(f"{name}[{k}]", v) for k, v in enumerate(item)]
        elif isinstance(item, types.FunctionType):
            children = list(_variables(item))
        elif isinstance(item, functools.partial):
            arguments = [*enumerate(item.args), *item.keywords.items()]
            children = [(name, item.func), *((f"{name}({key})", v) for key, v in arguments)]
        elif isinstance(item, types.MethodType):
            children = [("self", item.__self__), (name, item.__func__)]
        elif hasattr(item, "__dict__"):
            children = [(f"{name}.{k}", v) for k, v in vars(item).items()]
        return next((hit for n, child in children if (hit := look(child, n, depth - 1))), None)

    for fn in fns:
        if name := look(fn, getattr(fn, "__name__", "fn"), 4):
            return name
    return None


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables that a function closes over: free ones, globals (of functions inside it too), and
    defaults."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    codes = [fn.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        yield from ((name, fn.__globals__[name]) for name in code.co_names if name in fn.__globals__)
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(reversed(arguments), reversed(fn.__defaults__ or ()), strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
