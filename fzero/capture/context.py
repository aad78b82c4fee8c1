"""context: the trace in progress, for the functions that are called inside a step (`value_and_grad`, reductions).

They are called by the user's code, so nothing can be handed to them. The one ContextVar of a capture is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero._torch_compat import FakeTensorMode
from fzero.capture.graph import Region
from fzero.capture.known import Known
from fzero.precision import Precision


@dataclass
class Tracing:
    """The state of one trace. Only `fzero.capture` and `fzero.functional` write to it.

    The caller of the trace sets the first six fields; `fns` name closed-over tensors in errors.
    depth: 0 in the step itself, 1 inside a region; `region.add_region` counts it.
    phase: of a region ("backward", "finish"), noted on its nodes; None in the forward.
    regions: those found so far; a `fzero::region` node holds an index into them.
    watching: the `Watch` modes that are on, innermost last.
    known: the values that depend on no input.
    lines: the user's line of each op of a forward that has a backward, by the number of autograd's node; and of each
    op that is not torch's, by its name.
    failed: the user's line of the last op that raised. raised: its error, and the op with its operands.
    drawn: whether that op asked for what is made of draws alone.
    cut: what microbatches cut for the region at hand, beside the batch it may be, for errors of torch's.
    static: the names of the tensors of the batch that are marked static, by id.
    devices: the kinds of device on which a tensor may be: those of the state and the batch, the host's, and "meta".
    Empty: any.
    paused: a context for the work on an op, in which no line of the user is followed (`reads`).
    traced: called where a function was traced, with what tells of a tensor whether each step makes it anew (`origins`).
    """

    mode: FakeTensorMode
    fns: tuple[Callable[..., Any], ...]
    microbatches: int = 1
    allow_unused: bool = False
    axis: str = ""
    precision: Precision = field(default_factory=Precision)
    depth: int = 0
    phase: str | None = None
    regions: list[Region] = field(default_factory=list)
    watching: list[Any] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    lines: dict[int | str, str] = field(default_factory=dict)
    failed: str = ""
    raised: tuple[Exception, str] | None = None
    drawn: bool = False
    cut: str = ""
    static: dict[int, str] = field(default_factory=dict)
    devices: frozenset[str] = frozenset()
    paused: Any = field(default_factory=nullcontext)
    traced: Callable[[Callable[[torch.Tensor], bool]], None] = lambda _: None


_active: ContextVar[Tracing | None] = ContextVar("fzero_tracing", default=None)


def current() -> Tracing:
    """The trace in progress, which there must be."""
    tracing = _active.get()
    assert tracing is not None, "no step is being captured"
    return tracing


@contextmanager
def while_active(tracing: Tracing) -> Iterator[None]:
    """Makes this the trace in progress."""
    token = _active.set(tracing)
    try:
        yield
    finally:
        _active.reset(token)
        tracing.raised = None  # an error holds the frames that it came through, and these the trace


def active() -> Tracing | None:
    """The trace in progress, or None outside a step."""
    return _active.get()
