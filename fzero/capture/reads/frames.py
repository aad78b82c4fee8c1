"""frames: follows this thread's Python functions line by line, where asked, while a step is traced.

Python 3.12 and later: `sys.monitoring`, which calls back once for each function that is not followed. Python 3.11:
`sys.settrace`, which calls back for each call; it is off inside of torch's dispatch (`paused`), where most calls are.
A debugger that uses it already keeps it, and nothing is followed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import torch

from fzero import tree
from fzero.capture.provenance import TYPED

log = logging.getLogger("fzero")
USER, LIBRARY, OTHER = "user", "library", "other"

_STDLIB = tuple({os.path.dirname(os.__file__) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
TORCH, OURS = torch.__path__[0] + os.sep, os.path.dirname(tree.__file__) + os.sep
# what torch and fzero are built on, and libraries share: sympy shuffles the questions that it asks itself
_BENEATH = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in map(importlib.util.find_spec, ("optree", "sympy"))
    if spec is not None and spec.origin is not None
)
_LAYERS = os.path.join(TORCH, "nn") + os.sep


@cache
def kind_of(filename: str) -> str:
    """USER, LIBRARY (installed; of torch its layers) or OTHER: the standard library, torch's own work, fzero, and code
    that was generated."""
    if filename.startswith(TYPED):
        return USER
    if filename.startswith((OURS, "<")):
        return OTHER
    if filename.startswith(TORCH):
        return LIBRARY if filename.startswith(_LAYERS) else OTHER
    if filename.startswith(_BENEATH):
        return OTHER
    if any(part in filename for part in _INSTALLED):
        return LIBRARY
    return OTHER if filename.startswith(_STDLIB) else USER


def kind_of_code(code: types.CodeType, variables: Mapping[str, Any]) -> str:
    """The same of a function's code and its globals. What `exec` or `python -c` was given has the file name of code
    that was generated: it is the user's in a module of the user's, as a dataclass's `__eq__` is, and where no module is
    known."""
    if code.co_filename != "<string>":
        return kind_of(code.co_filename)
    if not variables.get("__builtins__", True):  # of a named tuple
        return OTHER
    name = variables.get("__name__", "__main__")
    module = None if name == "__main__" else sys.modules.get(name)
    file = variables.get("__file__") or getattr(module, "__file__", None)
    return kind_of(file) if file else USER


class Follower(Protocol):
    """What is told of functions. `entered` is asked once for each code object, and says whether its lines are followed
    (None: not now, and it may be asked again); `line` comes before a line runs, `left` when a function that is followed
    returns a value or raises (with None). `instruction` comes before one, with its offset, in functions of which
    `by_instruction` says that it must."""

    def entered(self, frame: types.FrameType) -> bool | None: ...
    def by_instruction(self, code: types.CodeType) -> bool: ...
    def line(self, frame: types.FrameType) -> None: ...
    def instruction(self, frame: types.FrameType, offset: int) -> None: ...
    def left(self, frame: types.FrameType, value: Any) -> None: ...


class _BySettrace:
    """By `sys.settrace`. As a context it pauses; in another thread (of autograd, on CUDA) there is nothing to pause."""

    def __init__(self, follower: Follower) -> None:
        self.follower, self.on, self.depth, self.thread = follower, False, 0, threading.get_ident()
        # what was decided of a code object, by its id, for its hash reads all of it: the tracer of its lines (None: not
        # followed), whether by instruction, and the object, which keeps the id its own
        self.decided: dict[int, tuple[Any, bool, types.CodeType]] = {}

    def start(self) -> None:
        if sys.gettrace() is not None:
            _say_debugger()
            return
        self.on = True
        sys.settrace(self._call)

    def stop(self) -> None:
        if sys.gettrace() == self._call:
            sys.settrace(None)
        self.on = False

    def __enter__(self) -> None:
        if threading.get_ident() != self.thread:
            return
        if not self.depth and self._has_it():
            sys.settrace(None)
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self.depth -= 1
        if self.on and not self.depth:
            sys.settrace(self._call)

    def _has_it(self) -> bool:
        """Whether this follows the program still: a `breakpoint()` in a loss starts a debugger, which keeps it."""
        if self.on and sys.gettrace() != self._call:
            self.on = False
            _say_debugger()
        return self.on

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if (decided := self.decided.get(id(code))) is None:
            followed = self.follower.entered(frame)
            if followed is None:
                return None
            decided = self._local if followed else None, bool(followed) and self.follower.by_instruction(code), code
            self.decided[id(code)] = decided
        follow, by_instruction, _ = decided
        if follow is not None:
            frame.f_trace_opcodes = by_instruction
        return follow

    def _local(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.follower.line(frame)
        elif event == "opcode":
            self.follower.instruction(frame, frame.f_lasti)
        elif event == "return":
            self.follower.left(frame, argument)
        return self._local


class _Monitored:
    """By `sys.monitoring`. Nothing needs a pause."""

    def __init__(self, follower: Follower) -> None:
        self.follower, self.thread = follower, threading.get_ident()
        self.monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self.tool: int | None = None
        self.codes: list[types.CodeType] = []

    def start(self) -> None:
        tools, events = self.monitoring, self.monitoring.events
        free = [tool for tool in (4, 3) if tools.get_tool(tool) is None]
        if not free:
            _say_debugger()
            return
        self.tool = free[0]
        tools.use_tool_id(self.tool, "fzero")
        for event, call in self._callbacks():
            tools.register_callback(self.tool, event, call)
        tools.set_events(self.tool, events.PY_START | events.PY_UNWIND)
        tools.restart_events()

    def stop(self) -> None:
        if self.tool is None:
            return
        tools = self.monitoring
        tools.set_events(self.tool, 0)
        for code in self.codes:
            tools.set_local_events(self.tool, code, 0)
        for event, _ in self._callbacks():
            tools.register_callback(self.tool, event, None)
        tools.free_tool_id(self.tool)
        self.tool = None

    def _callbacks(self) -> list[tuple[int, Any]]:
        events = self.monitoring.events
        return [(events.PY_START, self._start), (events.LINE, self._line), (events.INSTRUCTION, self._instruction),
                (events.PY_RETURN, self._left), (events.PY_UNWIND, self._unwound)]  # fmt: skip

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: Any) -> None:
        return None

    def _start(self, code: types.CodeType, offset: int) -> Any:
        if threading.get_ident() != self.thread:
            return None
        if self.follower.entered(sys._getframe(1)):
            self.codes.append(code)
            events = self.monitoring.events
            more = events.INSTRUCTION if self.follower.by_instruction(code) else 0
            self.monitoring.set_local_events(self.tool, code, events.LINE | events.PY_RETURN | more)
        return self.monitoring.DISABLE

    def _line(self, code: types.CodeType, line: int) -> None:
        if threading.get_ident() == self.thread:
            self.follower.line(sys._getframe(1))

    def _instruction(self, code: types.CodeType, offset: int) -> None:
        if threading.get_ident() == self.thread:
            self.follower.instruction(sys._getframe(1), offset)

    def _left(self, code: types.CodeType, offset: int, value: Any) -> None:
        if threading.get_ident() == self.thread:
            self.follower.left(sys._getframe(1), value)

    def _unwound(self, code: types.CodeType, offset: int, error: BaseException) -> None:
        if threading.get_ident() == self.thread:
            self.follower.left(sys._getframe(1), None)


def frames_for(follower: Follower) -> Any:
    """What follows this Python's functions: `start()`, `stop()`, and a context that pauses."""
    return _Monitored(follower) if sys.version_info >= (3, 12) else _BySettrace(follower)


@cache
def _say_debugger() -> None:
    log.warning(
        "fzero: a debugger or a coverage tool follows this program, so values that a loss reads from Python are not "
        "watched: a change of one has no effect on a program that was traced, and no error says so"
    )
