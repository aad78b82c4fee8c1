"""Lowering in which a step is captured once for all the stages, worlds and schedules that a test compares.

A graph is immutable and says nothing of where state lies, and to capture it is half of the work. What a rank of the
axes that cut dims computes of it is kept too, as a planner keeps it. Equal are steps with the same functions: an
optimizer that is made anew has other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

import fzero
from fzero import tree
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.compile.ahead import lower_again
from fzero.compile.captures import Captures

KEPT = 4
_graphs: list[tuple[Any, str, Graph]] = []  # the last ones, each behind what it is the graph of
_capture = trace_step.capture
_captures = Captures()


@contextmanager
def captures() -> Iterator[None]:
    """What is in it takes a graph that is kept."""
    with mock.patch.object(trace_step, "capture", _kept):
        yield


def lower(
    spec: fzero.Spec, params: Any, batch: Any, world: int | None = None, key: Tensor | None = None, phase: str = ""
) -> fzero.Lowered:
    with captures():
        return lower_again(spec, params, batch, world_size=world, key=key, phase=phase, captures=_captures)


def _kept(step: Any, state: Any, batch: Any, *, fns: Any, **options: Any) -> Graph:
    what = getattr(step, "__self__", step)  # of a loss: its Training, which has an equality
    paths, leaves, treedef = tree.flatten((state, batch))
    shown = [(x.shape, x.dtype, x.stride(), x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
    asked = repr((paths, shown, treedef, options))
    for of, text, graph in _graphs:
        if of == what and text == asked:
            return graph
    _graphs.insert(0, (what, asked, _capture(step, state, batch, fns=fns, **options)))
    del _graphs[KEPT:]
    return _graphs[0][2]
