"""windows: edits that only programs with block-sparse attention and losses by chunks have, and models of these."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fzero import sparse
from fzero.sparse.sparse_ops import BACKWARD, FORWARD
from lab.mutate.models import ROWS, Model
from lab.mutate.within import Change

aten = torch.ops.aten
TOKENS, VOCABULARY, WIDTH, HEADS = 8, 20, 8, 2
NUMBERS = {"block": 5, "left": 6, "right": 7, "scale": 8}  # places of the forward's numbers; the backward's are next
OPERANDS = {"q": 0, "k": 1, "v": 2, "columns": 3, "documents": 4}
LOSS = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)


# --- models -----------------------------------------------------------------------------------------------------------


def layouts(rng: random.Random) -> sparse.BlockLayout:
    """A window, or a table of blocks for each head."""
    if rng.random() < 0.5:
        return sparse.sliding_window(TOKENS, window=rng.choice((2, 3, 5)), causal=rng.random() < 0.5, block=2)
    draw = torch.Generator().manual_seed(rng.getrandbits(31))
    return sparse.from_mask(torch.rand(HEADS, TOKENS, TOKENS, generator=draw) < 0.4, block=2)


def windowed(rng: random.Random) -> Model:
    """A model with block-sparse attention, of documents or not, and a head of more classes than features."""
    layout, packed = layouts(rng), rng.random() < 0.5

    def params(g: torch.Generator) -> Any:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g) * 0.4

        leaves = {"tokens": normal(VOCABULARY, WIDTH), "head": normal(VOCABULARY, WIDTH)}
        return {**leaves, "layers": [{"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH)} for _ in range(2)]}

    def batch(g: torch.Generator) -> Any:
        found = {name: torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g) for name in "xy"}
        return {**found, "ids": torch.randint(0, 2, (ROWS, TOKENS), generator=g).sort(1).values}

    def loss(p: Any, b: Any) -> Tensor:
        h = F.embedding(b["x"], p["tokens"])
        for layer in p["layers"]:
            q, k, v = (h @ layer["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            seen = sparse.attention(q, k, v, layout, documents=b["ids"] if packed else None)
            h = h + seen.transpose(1, 2).flatten(2) @ layer["out"]
        return F.cross_entropy((h @ p["head"].T).flatten(0, 1), b["y"].flatten())

    return Model(params, batch, loss)


# --- edits ------------------------------------------------------------------------------------------------------------


def _pick(rng: random.Random, graph: fx.Graph, *targets: Any) -> fx.Node | None:
    nodes = [node for node in graph.nodes if node.target in targets or _base(node) in targets]
    return rng.choice(nodes) if nodes else None


def _base(node: fx.Node) -> Any:
    """The op that a node calls, also where it writes into given memory."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "default", None)


def _attention(rng: random.Random, graph: fx.Graph) -> tuple[fx.Node, int] | None:
    """A call of the op or of its backward, and the place of its first operand beyond the gradient."""
    node = _pick(rng, graph, FORWARD, BACKWARD)
    return None if node is None else (node, int(_base(node) is BACKWARD))


def another_number(name: str, change: Callable[[random.Random, Any], Any]) -> Change:
    """A bound, the block or the scale of an attention is another one."""

    def edit(rng: random.Random, graph: fx.Graph) -> bool | None:
        if (found := _attention(rng, graph)) is None:
            return None
        node, first = found
        node.update_arg(NUMBERS[name] + first, change(rng, node.args[NUMBERS[name] + first]))
        return True

    return edit


def exchanged(a: str, b: str) -> Change:
    """Two operands of an attention stand in each other's place."""

    def edit(rng: random.Random, graph: fx.Graph) -> bool | None:
        if (found := _attention(rng, graph)) is None:
            return None
        node, first = found
        args = list(node.args)
        args[OPERANDS[a] + first], args[OPERANDS[b] + first] = args[OPERANDS[b] + first], args[OPERANDS[a] + first]
        node.args = tuple(args)
        return True

    return edit


def without(name: str) -> Change:
    """An attention has no table, or no documents."""

    def edit(rng: random.Random, graph: fx.Graph) -> bool | None:
        if (found := _attention(rng, graph)) is None or found[0].args[OPERANDS[name] + found[1]] is None:
            return None
        found[0].update_arg(OPERANDS[name] + found[1], None)
        return True

    return edit


def other_tokens(rng: random.Random, graph: fx.Graph) -> bool | None:
    """A chunk takes features or targets of as many tokens, but of others."""
    nodes = [x for x in graph.nodes if x.target is aten.slice.Tensor and len(x.args) > 3]
    rng.shuffle(nodes)
    for node in nodes:
        size = node.args[0].meta["val"].shape[node.args[1]]
        low, high = node.args[2], min(node.args[3], size)
        starts = [s for s in range(size - (high - low) + 1) if s != low]
        if starts:
            start = rng.choice(starts)
            node.args = (*node.args[:2], start, start + high - low, *node.args[4:])
            return True
    return None


def fewer_tokens(rng: random.Random, graph: fx.Graph) -> bool | None:
    """The targets and the logits of a loss are those of one token less: the loss of a chunk lacks one."""
    node = _pick(rng, graph, LOSS[0])
    if node is None:
        return None
    with graph.inserting_before(node):
        cut = [graph.call_function(aten.slice.Tensor, (x, 0, 1, 1 << 62)) for x in node.args[:2]]
    node.args = (*cut, *node.args[2:])
    return True


def chunk_left_out(rng: random.Random, graph: fx.Graph) -> bool | None:
    """A sum over chunks lacks one of them, or has it twice."""
    node = _pick(rng, graph, aten.add.Tensor)
    if node is None or not all(isinstance(x, fx.Node) for x in node.args[:2]):
        return None
    one = rng.randrange(2)
    node.update_arg(one, node.args[1 - one])
    return True


def chunks_exchanged(rng: random.Random, graph: fx.Graph) -> bool | None:
    """The features' gradient has two chunks in each other's place, or one of them twice."""
    node = _pick(rng, graph, aten.cat.default)
    if node is None or len(parts := list(node.args[0])) < 2:  # type: ignore[arg-type]
        return None
    a, b = rng.sample(range(len(parts)), 2)
    parts[a], parts[b] = parts[b], (parts[a] if rng.random() < 0.6 else parts[b])
    node.update_arg(0, parts)
    return True


def another_reduction(rng: random.Random, graph: fx.Graph) -> bool | None:
    """A chunk's loss is the mean of its own tokens, or ignores another class."""
    node = _pick(rng, graph, *LOSS)
    if node is None:
        return None
    place = 3 + (_base(node) is LOSS[1])
    if rng.random() < 0.6:
        node.update_arg(place, 1)
    else:
        node.update_arg(place + 1, rng.randrange(VOCABULARY))
    return True


def another_loss_scale(rng: random.Random, graph: fx.Graph) -> bool | None:
    """The gradient of a chunk begins with another number than one over the count of all tokens."""
    node = _pick(rng, graph, LOSS[1])
    if node is None:
        return None
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(aten.mul.Tensor, (node.args[0], rng.choice((0.5, 2.0, -1.0)))))
    return True
