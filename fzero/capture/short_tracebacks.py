"""short_tracebacks: an error at a user's line ends at that line: 70 frames of fzero and torch beneath it say nothing.

Frames of the user and of installed libraries stay, torch's layers among them. A fault of fzero's own, a raw error that
was raised in its code or an error that no line of the user has part in, keeps all of its frames, for a report.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fzero.capture.reads.frames import OTHER, OURS, kind_of
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
        try:
            return call(*args, **kwargs)
        except Exception as error:
            shorten(error, misused=isinstance(error, TypeError) and not _takes(signature, args, kwargs))
            raise

    return shortened  # type: ignore[return-value]


def shorten(error: Exception, *, misused: bool = False) -> None:
    """Leaves the user's frames in an error's traceback, and in those of its causes. misused: it is the user's in any
    case."""
    if os.environ.get(SWITCH) == "full" or not (misused or _is_users(error)):
        return
    one: BaseException | None = error
    known: set[int] = set()
    while one is not None and id(one) not in known:
        known.add(id(one))
        one.__traceback__ = _joined([at for at in _frames(one.__traceback__) if _stays(at)])
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def without_caller(error: BaseException) -> None:
    """Leaves the function out of a traceback that handles the error, and is no more than a wrapper."""
    if error.__traceback__ is not None and os.environ.get(SWITCH) != "full":
        error.__traceback__ = error.__traceback__.tb_next


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
    name = at.tb_frame.f_code.co_filename
    return kind_of(name) != OTHER and not name.endswith(_CALLS_OF_LAYERS)


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
