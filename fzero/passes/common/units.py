"""units: which buckets of a region count as one unit, a layer, and which of them each node uses.

A unit is a layer's buckets. A layer without a number that is used only where another is (a final norm beside the tied
embedding) joins its unit, and so does a small numbered layer that is used amid a larger one (an adapter).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fzero.ir.program import Program
from fzero.passes.pipeline.chunks import root
from fzero.passes.rematerialise_views import MadeAnew
from fzero.plan.fill_buckets import SMALL_BYTES

COPY = torch.ops.aten.copy_.default


def uses_of(
    gm: fx.GraphModule, nodes: list[fx.Node], bucket_of: dict[fx.Node, str], made_anew: MadeAnew
) -> dict[fx.Node, set[str]]:
    """{node: the buckets that it uses}: those of parameters among its operands. In the backward also the one bucket
    whose gradients alone it feeds, without work on parameters of another: of a frozen layer all feeds those before."""
    uses: dict[fx.Node, set[str]] = {}
    feeds: dict[fx.Node, str | None] = {}  # the one bucket; "*": others too; None: nothing
    reads: dict[fx.Node, set[str]] = {}
    for node in reversed(gm.graph.nodes):
        if node.target is COPY:
            feeds[node] = bucket_of.get(node.args[0], "*")
        elif node.op == "call_function":
            fed = {"*" if feeds.get(u) and reads.get(u, set()) - {feeds[u]} else feeds.get(u, "*") for u in node.users}
            fed -= {None}
            feeds[node] = "*" if len(fed) > 1 else fed.pop() if fed else None
            if not made_anew(node):
                reads[node] = {bucket_of[r] for a in node.all_input_nodes if (r := root(a, made_anew)) in bucket_of}
    for node in nodes:
        if made_anew(node):
            continue
        used = set(reads[node])
        only = feeds[node] if node.meta.get("phase") == "backward" else None
        if only is not None and only != "*" and "chunk" not in node.meta:  # the chunks of a loss are one segment
            used.add(only)
        if used:
            uses[node] = used
    return uses


def units_of(program: Program, nodes: list[fx.Node], uses: dict[fx.Node, set[str]]) -> dict[str, str]:
    """The unit of every bucket. A numbered layer is its own unit, but for `_adapters`. A layer without a number joins
    another one that is in use wherever it is, if both together take no more memory than a layer, or if it adds
    little."""
    layer = {name: bucket.layer or name for name, bucket in program.buckets.items()}
    numbered = {name for name, bucket in program.buckets.items() if bucket.numbered}
    epochs: dict[str, set[int]] = {}
    epoch, last = 0, ""
    for node in nodes:
        for name in sorted(uses.get(node, ())):
            if name in numbered:
                epoch += layer[name] != last
                last = layer[name]
            epochs.setdefault(layer[name], set()).add(epoch)
    if not numbered:
        return layer
    size: dict[str, int] = {}
    for name, bucket in program.buckets.items():
        size[layer[name]] = size.get(layer[name], 0) + 4 * bucket.length
    most = max(size[layer[name]] for name in numbered)
    loose = sorted({own for name, own in layer.items() if name not in numbered}, key=size.__getitem__)
    joined = {own: own for own in loose} | _adapters(nodes, uses, {name: layer[name] for name in numbered}, size)
    for unit in loose:
        for other in reversed(loose):
            light = size[unit] < SMALL_BYTES or size[unit] * 8 <= size[other] or size[unit] + size[other] <= most
            inside = epochs.get(unit, set()) <= epochs.get(other, set())
            if unit != other and light and inside and joined[other] == other and joined[unit] == unit:
                joined[unit] = other
    return {name: joined.get(own, own) for name, own in layer.items()}


def _adapters(
    nodes: list[fx.Node], uses: dict[fx.Node, set[str]], layer: Mapping[str, str], size: Mapping[str, int]
) -> dict[str, str]:
    """By numbered layer, the larger one that it joins: one that is in use just before or after each of its uses, and on
    both sides of one. Else an adapter would part the segment of the layer in two, each with its own gather.

    layer: of each bucket of a numbered layer. size: bytes by layer.
    """
    order: list[tuple[object, str]] = []  # (phase, layer) of uses, in order
    for node in nodes:
        used = [(node.meta.get("phase"), layer[name]) for name in sorted(uses.get(node, ())) if name in layer]
        order += [use for use in dict.fromkeys(used) if use not in order[-1:]]

    def beside(place: int, step: int) -> str | None:
        phase, own = order[place]
        passed = size[own]
        while 0 <= (place := place + step) < len(order) and order[place][0] == phase:
            found = size[order[place][1]]
            if size[own] * 8 <= found:
                return order[place][1] if passed * 8 <= found else None
            passed = max(passed, found)
        return None

    around: dict[str, list[tuple[str | None, str | None]]] = {}
    for place, (_, own) in enumerate(order):
        around.setdefault(own, []).append((beside(place, -1), beside(place, 1)))
    joined: dict[str, str] = {}
    for own, sides in around.items():
        amid = [before for before, after in sides if before is not None and before == after]
        joined |= {own: amid[0]} if amid and all(amid[0] in pair for pair in sides) else {}
    return joined
