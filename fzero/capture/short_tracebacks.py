"""short_tracebacks: an error at a user's line ends at that line: 70 frames of fzero and torch beneath it say nothing.

Frames of the user and of installed libraries stay, torch's layers among them. A fault of fzero's own, a raw error that
was raised in its code or an error that no line of the user has part in, keeps all of its frames, for a report.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fzero.capture.reads.frames import OTHER, OURS, kind_of_code
from fzero.errors import FzeroError, VerifyError

Call = TypeVar("Call", bound=Callable[..., Any])

SWITCH = "FZERO_TRACEBACKS"
_CALLS_OF_LAYERS = tuple(
    os.path.join("torch", "nn", *of) for of in (("modules", "module.py"), ("utils", "stateless.py"))
)


def short_tracebacks(call: Call) -> Call:
    """A function of the user's words whose errors have the user's frames. One that does not take what it is given
    raises Python's own TypeError, which has those alone."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def shortened(*args: Any, **kwargs: Any) -> Any:
        before = sys.exc_info()[1]
        try:
            return call(*args, **kwargs)
        except Exception as error:
            misused = isinstance(error, TypeError) and not _takes(signature, args, kwargs)
            if shorten(error, before, misused=misused):
                del args, kwargs  # this frame stays, as the caller of those that are shown
            raise

    return shortened  # type: ignore[return-value]


def shorten(error: Exception, before: BaseException | None, *, misused: bool = False) -> bool:
    """Leaves the user's frames in an error's traceback, and in those of the errors that led to it, if it is the user's;
    returns whether. before: what the caller was handling, which is not this call's. misused: it is the user's in any
    case.

    The other frames are emptied: they would keep a state alive as long as somebody holds the error, as a notebook does.
    """
    if os.environ.get(SWITCH) == "full" or not (misused or _is_users(error)):
        return False
    errors: list[BaseException] = [error]
    for one in errors:
        for at in _frames(one.__traceback__):
            if not _stays(at):
                with contextlib.suppress(RuntimeError):  # it runs
                    at.tb_frame.clear()
        one.__traceback__ = _joined([at for at in _frames(one.__traceback__) if _stays(at)])
        for other in (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())):
            if other is not None and all(other is not known for known in (before, *errors)):
                errors.append(other)
    return True


def without_caller(error: BaseException) -> bool:
    """Leaves the function out of a traceback that handles the error, and is no more than a wrapper. Returns whether the
    rest is the user's alone."""
    if error.__traceback__ is None or os.environ.get(SWITCH) == "full":
        return False
    error.__traceback__ = error.__traceback__.tb_next
    return all(map(_stays, _frames(error.__traceback__)))


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_users(error: Exception) -> bool:
    """Whether an error is about what the user wrote: fzero says so, or it comes from below a line of the user."""
    if isinstance(error, FzeroError):
        return not isinstance(error, VerifyError)
    frames = _frames(error.__traceback__)
    ours = [at.tb_frame.f_code.co_filename.startswith(OURS) for at in frames]
    return any(ours) and not ours[-1] and any(map(_stays, frames[ours.index(True) :]))


def _stays(at: types.TracebackType) -> bool:
    code = at.tb_frame.f_code
    other = kind_of_code(code, at.tb_frame.f_globals) == OTHER
    return not other and not code.co_filename.endswith(_CALLS_OF_LAYERS)


def _frames(first: types.TracebackType | None) -> list[types.TracebackType]:
    frames = []
    while first is not None:
        frames.append(first)
        first = first.tb_next
    return frames


def _joined(frames: list[types.TracebackType]) -> types.TracebackType | None:
    joined = None
    for at in reversed(frames):
        joined = types.TracebackType(joined, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return joined
