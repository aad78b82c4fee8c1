"""tracing: a function traced on fake tensors. Every op is seen before it is done (`fzero.capture.watch`).

`trace` gives a pure graph of aten ops whose nodes carry the user's line. Nothing is baked in silently. Four things are
refused, with the line and a remedy:

- in-place work on inputs or closed-over tensors
- draws from torch's ambient generator
- branches on values that an input decides
- closed-over tensors that require grad

Values that no input decides are known (`fzero.capture.known`). Other closed-over tensors become inputs (`lifted`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import (
    backward_number,
    checks_deferred,
    compiled_functions_traced,
    distributions_unchecked,
    is_fake,
    jiterator_refused,
    recording,
    seen_in_backwards,
)
from fzero.capture import ambient
from fzero.capture.context import Tracing
from fzero.capture.functionalise import functionalised, purified, without_copies
from fzero.capture.origins import made_anew
from fzero.capture.provenance import defined_at, user_line
from fzero.capture.refuse import NoExchange, Refused, attribute, check_graph, explained
from fzero.capture.watch import Watch
from fzero.ir import as_strided, fx_nodes
from fzero.ir.recorder import record

aten = torch.ops.aten


def trace(
    tracing: Tracing,
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    changing: Collection[int] = (),
) -> fx.GraphModule:
    """`fn(*inputs)` as a graph of aten ops without in-place work.

    `inputs` are fake tensors of `tracing.mode`; `names` are theirs in errors. changing: the places of those that have
    other values at each step. Raises CaptureError, with the line, for work that a program cannot hold.
    """
    outermost = not tracing.depth
    if outermost:
        ambient.check_trace()

    def watched(*xs: torch.Tensor) -> Any:
        with ExitStack() as stack:
            if outermost:
                stack.enter_context(ambient.of_caller())
                stack.enter_context(seen_in_backwards(stack.enter_context(NoExchange())))
                stack.enter_context(distributions_unchecked())
                stack.enter_context(checks_deferred())
                stack.enter_context(jiterator_refused(_no_jiterator))
            line = partial(_line, tracing)
            stack.enter_context(Watch(tracing, line, where=partial(_place, tracing), known=tracing.known))
            stack.enter_context(torch.enable_grad())
            result = fn(*xs)
            tracing.traced(made_anew(recording(), changing))
            return result

    with explained(tracing, lambda: _place(tracing)), tracing.mode, compiled_functions_traced():
        gm = record(watched, inputs)
    check_graph(gm, names, tracing.fns, in_region=tracing.depth > 0)
    _without_failed(gm)
    as_strided.check_reach(gm)
    as_strided.rooted(gm)
    purified(gm)
    if any(fx_nodes.mutated(node) for node in gm.graph.nodes):
        gm = functionalised(tracing, gm, inputs)
    without_copies(gm)
    return as_strided.rebased(gm)


def _line(tracing: Tracing) -> str:
    """The user's line of the op at hand, for the program's text."""
    return _place(tracing) if tracing.phase else user_line()


def _place(tracing: Tracing) -> str:
    """The user's line of the op at hand, for errors.

    An op of a backward is called by torch: its line is that of the op of the forward that it belongs to. Where fzero
    calls it, as in an optimizer's update, the place is the user's function.
    """
    number = backward_number()
    line = user_line(within=__file__) or ("" if number is None else tracing.lines.get(number))
    return line or (defined_at(tracing.fns[0]) if tracing.fns else "the step")


def _without_failed(gm: fx.GraphModule) -> None:
    """Drops the nodes of ops that raised, where the user's code went on. Such a node has no value and no users. An op
    that returns nothing has the value None."""
    for node in reversed(list(gm.graph.nodes)):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or node.users or schema is None or "val" in node.meta:
            continue
        if schema.returns:
            gm.graph.erase_node(node)
            gm.recompile()
        else:
            node.meta["val"] = None


def lifted(gm: fx.GraphModule, graph_inputs: int) -> list[torch.Tensor]:
    """Turns every closed-over tensor into one more placeholder, after the first `graph_inputs`. In place.

    Returns the tensors, in the order of the placeholders. A tensor of one element that the trace made from a literal
    (`torch.tensor(0.5)`) becomes a `full` instead.
    """
    after = fx_nodes.placeholders(gm.graph)[graph_inputs - 1] if graph_inputs else None
    placeholder_of: dict[int, fx.Node] = {}  # by the tensor's id
    values: list[torch.Tensor] = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value = attribute(gm, node)
        is_literal = node.users and all(u.target is aten.lift_fresh_copy.default for u in node.users)
        if is_literal and value.numel() == 1 and not is_fake(value):
            for user in list(node.users):
                with gm.graph.inserting_before(user):
                    options = {"dtype": value.dtype, "device": user.meta["val"].device}
                    full = gm.graph.call_function(aten.full.default, (list(value.shape), value.item()), options)
                full.meta = dict(user.meta)
                user.replace_all_uses_with(full)
                gm.graph.erase_node(user)
        elif id(value) in placeholder_of:
            node.replace_all_uses_with(placeholder_of[id(value)])
        else:
            with gm.graph.inserting_after(after) if after else gm.graph.inserting_before():
                after = gm.graph.placeholder(f"lifted_{len(values)}")
            after.meta["val"] = value
            node.replace_all_uses_with(after)
            placeholder_of[id(value)] = after
            values.append(value)
        gm.graph.erase_node(node)
    gm.recompile()
    return values


def _no_jiterator() -> Exception:
    return Refused(
        f"torch.cuda.jiterator at {user_line()} is no op that a trace sees. Write it in torch ops: they are fused"
    )
