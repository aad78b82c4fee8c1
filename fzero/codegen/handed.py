"""handed: results that go from the op that allocates them straight to the one stretch that reads them.

An op without an `out=` form allocates its results, and they are copied to their places in the workspace. On a device
each copy is a pass over memory. A result of which a stretch is the only reader needs no place, where the stretch is the
next call: it is read where the op left it, and let go.

    dq, dk, dv = attention_backward(...)          copied: 3 passes more
    packed = fused(dq, dk, dv)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from fzero.codegen import out_forms
from fzero.codegen.clusters import on_device
from fzero.codegen.fusion import Fused
from fzero.ir import fx_nodes, fx_values


def handed(gm: fx.GraphModule) -> frozenset[fx_values.Value]:
    """The results of a segment's ops that are handed on."""
    calls = [n for n in gm.graph.nodes if fx_nodes.is_compute(n) and not _is_name(n)]
    found: set[fx_values.Value] = set()
    for node, reader in itertools.pairwise(calls):
        if not isinstance(reader.target, Fused) or not _allocates(node):
            continue
        for index, _ in fx_values.results(node):
            names = [user for user in node.users if user.args[1] == index]
            directly = [user for name in names for user in name.users]  # of two names, a reader would take it twice
            if len(names) == 1 and on_device(names[0]) and directly == [reader] and not _written(reader, names):
                found.add((node, index))
    outputs = {key for node in fx_nodes.outputs(gm.graph) for key in fx_values.memory(node)}
    return frozenset(found - outputs)


def _is_name(node: fx.Node) -> bool:
    return node.target is operator.getitem or fx_nodes.is_view(node)


def _allocates(node: fx.Node) -> bool:
    """Whether an op returns several results in memory of its own."""
    several = isinstance(node.meta.get("val"), (tuple, list)) and not isinstance(node.target, Fused)
    direct = fx_nodes.mutated(node) or out_forms.special_form(node) or out_forms.form_of(node)
    return several and not direct


def _written(reader: fx.Node, names: Collection[fx.Node]) -> bool:
    return any(into in names for into in fx_nodes.mutated(reader))


class Handed:
    """A result until its reader has run. `like`: its planned form."""

    def __init__(self, like: torch.Tensor) -> None:
        self.value: torch.Tensor | None = None
        self.like = like

    def take(self) -> torch.Tensor:
        """The result, which is let go; in the planned strides, which its reader was compiled for."""
        value, self.value = self.value, None
        assert value is not None, "the op that makes it runs before"
        if value.stride() != self.like.stride():
            value = torch.empty_strided(value.shape, self.like.stride(), dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value


def holding(compute: Callable[[], Any], into: Sequence[tuple[int, Any]]) -> None:
    """Computes several results, holds those that wait and copies the others."""
    results = compute()
    for index, one in into:
        if isinstance(one, Handed):
            one.value = results[index]
    out_forms.copy_results(lambda: results, [(i, one) for i, one in into if not isinstance(one, Handed)])


def taking(run: Callable[..., Any], *args: Any) -> None:
    """Runs a stretch with the results that are held for it."""
    run(*(arg.take() if isinstance(arg, Handed) else arg for arg in args))
