"""layers: the kinds of layers that a random model is made of, in plain PyTorch, each a row of `KINDS`.

A layer maps a hidden value [rows, seq, width] to one of the same shape. Its row says which leaves it has, where
textbook tensor parallelism cuts them, and what it computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Options = Mapping[str, Any]
Leaves = dict[str, "Leaf"]
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Leaf:
    """A leaf's shape, the dim that is cut over `tp` as in Megatron (None: not cut), the groups of that dim, and how its
    first values are drawn: "weight", "bias" or "one"."""

    shape: tuple[int, ...]
    cut: int | None = None
    groups: int = 1
    init: str = "weight"


@dataclass(frozen=True)
class Layer:
    """One layer of a model: its kind, a key of `KINDS`, and what was drawn for it."""

    kind: str
    options: Options = field(default_factory=dict)


@dataclass
class Side:
    """What a layer reads and writes beside the hidden value: the encoder's output, and summands of the loss. Layers add
    to `terms`."""

    context: Tensor | None = None
    terms: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """draw: options from a generator, the width and the length. leaves: by name, from options, width and length.
    run: (options, leaves, hidden, side) -> hidden."""

    draw: Callable[[random.Random, int, int], Options]
    leaves: Callable[[Options, int, int], Leaves]
    run: Callable[[Options, Params, Tensor, Side], Tensor]


# --- pieces -----------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "square": lambda x: x * x * 0.5,
}


def matrix(o: Options, inner: int, outer: int, cut: str | None = None, groups: int = 1) -> Leaf:
    """The leaf of a linear map: [outer, inner] if it is held turned, else [inner, outer]. cut: "in", "out" or None."""
    turned = o["turned"]
    dim = None if cut is None else int((cut == "out") != turned)
    return Leaf((outer, inner) if turned else (inner, outer), dim, groups)


def apply(o: Options, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """A linear map of the last dim."""
    if o["turned"]:
        return F.linear(x, w, b)
    return x @ w if b is None else x @ w + b


def norm_leaves(o: Options, width: int) -> Leaves:
    """The leaves of a norm before a layer."""
    if o["norm"] == "none":
        return {}
    own = {"norm": Leaf((width,), init="one")}
    return {**own, "norm_b": Leaf((width,), init="bias")} if o["norm"] == "layer" else own


def normed(o: Options, p: Params, x: Tensor) -> Tensor:
    """The layer's input after its norm."""
    if o["norm"] == "none":
        return x
    if o["norm"] == "layer":
        return F.layer_norm(x, x.shape[-1:], p["norm"], p["norm_b"])
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * p["norm"]


def _common(rng: random.Random) -> dict[str, Any]:
    return {
        "norm": rng.choice(("none", "layer", "layer", "rms", "rms")),
        "turned": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        "residual": rng.random() < 0.8,
    }


def _result(o: Options, x: Tensor, y: Tensor) -> Tensor:
    return x + y if o["residual"] else y


def _biases(o: Options, sizes: Mapping[str, tuple[int, int | None]]) -> Leaves:
    return {name: Leaf((size,), cut, init="bias") for name, (size, cut) in sizes.items()} if o["bias"] else {}


# --- dense ------------------------------------------------------------------------------------------------------------


def _draw_mlp(rng: random.Random, width: int, seq: int) -> Options:
    hidden = rng.choice((8, 12, 16, 24))
    return {**_common(rng), "hidden": hidden, "gated": rng.random() < 0.4, "act": rng.choice([*ACTIVATIONS])}


def _leaves_mlp(o: Options, width: int, seq: int) -> Leaves:
    own = {"up": matrix(o, width, o["hidden"], "out"), "down": matrix(o, o["hidden"], width, "in")}
    if o["gated"]:
        own["gate"] = matrix(o, width, o["hidden"], "out")
    return {**norm_leaves(o, width), **own, **_biases(o, {"up_b": (o["hidden"], 0), "down_b": (width, None)})}


def _run_mlp(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    inner = normed(o, p, x)
    hidden = ACTIVATIONS[o["act"]](apply(o, inner, p["up"], p.get("up_b")))
    if o["gated"]:
        hidden = hidden * apply(o, inner, p["gate"])
    return _result(o, x, apply(o, hidden, p["down"], p.get("down_b")))


def _draw_lora(rng: random.Random, width: int, seq: int) -> Options:
    return {**_common(rng), "rank": rng.choice((2, 4))}


def _leaves_lora(o: Options, width: int, seq: int) -> Leaves:
    own = {
        "w": matrix(o, width, width, "out"),
        "a": matrix(o, width, o["rank"]),
        "b": matrix(o, o["rank"], width, "out"),
    }
    return {**norm_leaves(o, width), **own, **_biases(o, {"w_b": (width, 0)})}


def _run_lora(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    inner = normed(o, p, x)
    y = apply(o, inner, p["w"], p.get("w_b")) + apply(o, apply(o, inner, p["a"]), p["b"])
    return _result(o, x, torch.tanh(y))


def _draw_mixer(rng: random.Random, width: int, seq: int) -> Options:
    return {**_common(rng), "hidden": rng.choice((4, 8, 12)), "turned": False}


def _leaves_mixer(o: Options, width: int, seq: int) -> Leaves:
    own = {"up": matrix(o, seq, o["hidden"], "out"), "down": matrix(o, o["hidden"], seq, "in")}
    return {**norm_leaves(o, width), **own, **_biases(o, {"up_b": (o["hidden"], 0), "down_b": (seq, None)})}


def _run_mixer(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    hidden = F.gelu(apply(o, normed(o, p, x).transpose(1, 2), p["up"], p.get("up_b")))
    return _result(o, x, apply(o, hidden, p["down"], p.get("down_b")).transpose(1, 2))


def _draw_scale(rng: random.Random, width: int, seq: int) -> Options:
    return {**_common(rng), "norm": "none", "place": rng.choice(("width", "seq", "scalar"))}


def _leaves_scale(o: Options, width: int, seq: int) -> Leaves:
    shape = {"width": (width,), "seq": (seq, 1), "scalar": ()}[o["place"]]
    return {"s": Leaf(shape, init="one"), **_biases(o, {"s_b": (width, None)})}


def _run_scale(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    y = torch.sin(x * p["s"])
    return _result(o, x, y + p["s_b"] if o["bias"] else y)


# --- attention --------------------------------------------------------------------------------------------------------


def _draw_attention(rng: random.Random, width: int, seq: int) -> Options:
    heads = rng.choice([n for n in (1, 2, 4, 6) if width % n == 0 and width // n >= 2])
    kv = rng.choice([n for n in (1, 2, 4, 6) if heads % n == 0])
    fused = kv == heads and rng.random() < 0.3
    way = rng.choice(("sdpa", "sdpa", "softmax", "linear"))
    return {
        **_common(rng),
        "heads": heads, "kv": kv, "fused": fused, "head": width // heads,
        "mask": rng.choice(("none", "causal", "causal", "window", "bias" if way != "linear" else "none")),
        "rope": rng.random() < 0.3 and (width // heads) % 2 == 0,
        "qk_norm": rng.random() < 0.2,
        "way": way,
    }  # fmt: skip


def _leaves_attention(o: Options, width: int, seq: int) -> Leaves:
    inner, of_kv = o["heads"] * o["head"], o["kv"] * o["head"]
    if o["fused"]:
        own = {"qkv": matrix(o, width, 3 * inner, "out", groups=3)}
        biases: dict[str, tuple[int, int | None]] = {}
        if o["bias"]:
            own["qkv_b"] = Leaf((3 * inner,), 0, 3, "bias")
    else:
        own = {name: matrix(o, width, size, "out") for name, size in (("q", inner), ("k", of_kv), ("v", of_kv))}
        biases = {"q_b": (inner, 0), "k_b": (of_kv, 0), "v_b": (of_kv, 0)}
    own["o"] = matrix(o, inner, width, "in")
    if o["qk_norm"]:
        own |= {"q_norm": Leaf((o["head"],), init="one"), "k_norm": Leaf((o["head"],), init="one")}
    if o["mask"] == "bias":
        own["table"] = Leaf((o["heads"], seq, seq), 0)
    return {**norm_leaves(o, width), **own, **_biases(o, {**biases, "o_b": (width, None)})}


def _run_attention(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    inner = normed(o, p, x)
    source = inner if side.context is None or not o.get("cross") else side.context
    if o["fused"]:
        q, k, v = apply(o, inner, p["qkv"], p.get("qkv_b")).chunk(3, -1)
        if source is not inner:
            _, k, v = apply(o, source, p["qkv"], p.get("qkv_b")).chunk(3, -1)
    else:
        q = apply(o, inner, p["q"], p.get("q_b"))
        k, v = (apply(o, source, p[name], p.get(f"{name}_b")) for name in "kv")
    q, k, v = (_by_head(t, o["head"]) for t in (q, k, v))
    if o["qk_norm"]:
        q, k = (
            t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * p[f"{n}_norm"] for t, n in ((q, "q"), (k, "k"))
        )
    if o["rope"]:
        q, k = _turned(q), _turned(k)
    repeats = o["heads"] // o["kv"]
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    y = _attend(o, p, q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1)
    return _result(o, x, apply(o, y, p["o"], p.get("o_b")))


def _by_head(x: Tensor, head: int) -> Tensor:
    return x.view(*x.shape[:2], -1, head).transpose(1, 2)  # [rows, heads, seq, head]


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 0.3 / torch.arange(1, half + 1, dtype=x.dtype)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def _attend(o: Options, p: Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if o["way"] == "linear":  # a sum over the past of outer products
        q, k = F.softplus(q), F.softplus(k)
        if o["mask"] == "causal" and q.shape[2] == k.shape[2]:
            state = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
            return (
                torch.einsum("bhsd,bhsde->bhse", q, state)
                / (1 + torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)))[..., None]
            )
        state = torch.einsum("bhsd,bhse->bhde", k, v)
        return torch.einsum("bhsd,bhde->bhse", q, state) / (1 + torch.einsum("bhsd,bhd->bhs", q, k.sum(2)))[..., None]
    mask = _mask(o, p, q, k)
    if o["way"] == "sdpa":
        if o["mask"] == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def _mask(o: Options, p: Params, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to scores, or None."""
    if o["mask"] == "none":
        return None
    if o["mask"] == "bias":
        return p["table"]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = j > i if o["mask"] == "causal" else (j - i).abs() > 2
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -1e4)


# --- convolution ------------------------------------------------------------------------------------------------------


def _draw_conv(rng: random.Random, width: int, seq: int) -> Options:
    flat = seq % 2 == 1 or rng.random() < 0.5
    groups = rng.choice((1, 1, 2, width))
    return {**_common(rng), "dims": 1 if flat else 2, "groups": groups, "size": rng.choice((1, 3)),
            "after": rng.choice(("none", "group", "batch"))}  # fmt: skip


def _leaves_conv(o: Options, width: int, seq: int) -> Leaves:
    own = {"w": Leaf((width, width // o["groups"], *([o["size"]] * o["dims"])), 0)}
    if o["after"] != "none":
        own |= {"g": Leaf((width,), init="one"), "g_b": Leaf((width,), init="bias")}
    own["out"] = Leaf((width, width, *([1] * o["dims"])), 1)
    return {**norm_leaves(o, width), **own, **_biases(o, {"w_b": (width, 0)})}


def _run_conv(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    y = normed(o, p, x).transpose(1, 2)
    if o["dims"] == 2:
        y = y.reshape(*y.shape[:2], 2, -1)
    conv = F.conv1d if o["dims"] == 1 else F.conv2d
    y = conv(y, p["w"], p.get("w_b"), padding=o["size"] // 2, groups=o["groups"])
    if o["after"] == "group":
        y = F.group_norm(y, 2, p["g"], p["g_b"])
    elif o["after"] == "batch":  # statistics of the whole batch that the loss is given
        y = F.batch_norm(y, None, None, p["g"], p["g_b"], training=True)
    y = conv(F.silu(y), p["out"])
    return _result(o, x, y.reshape(x.shape[0], x.shape[2], -1).transpose(1, 2))


# --- recurrence -------------------------------------------------------------------------------------------------------


def _draw_recurrent(rng: random.Random, width: int, seq: int) -> Options:
    return {**_common(rng), "hidden": rng.choice((4, 8)), "cell": rng.choice(("plain", "gru", "lstm", "scan", "torch"))}


def _leaves_recurrent(o: Options, width: int, seq: int) -> Leaves:
    gates, h = {"plain": 1, "gru": 3, "lstm": 4, "scan": 2, "torch": 3}[o["cell"]], o["hidden"]
    if o["cell"] == "torch":  # torch.gru holds its matrices turned, and is one op that reads all of them
        own = {"x": Leaf((3 * h, width)), "h": Leaf((3 * h, h))}
        own |= {"x_b": Leaf((3 * h,), init="bias"), "h_b": Leaf((3 * h,), init="bias")}
    else:
        own = {"x": matrix(o, width, gates * h, "out", gates)}
        if o["cell"] != "scan":
            own["h"] = matrix(o, h, gates * h, "out", gates)
        if o["bias"]:
            own["x_b"] = Leaf((gates * h,), 0, gates, "bias")
    return {**norm_leaves(o, width), **own, "out": matrix(o, h, width, "in")}


def _run_recurrent(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    inner, size = normed(o, p, x), o["hidden"]
    if o["cell"] == "torch":
        start = inner.new_zeros(1, x.shape[0], size)
        leaves = [p["x"], p["h"], p["x_b"], p["h_b"]]
        y, _ = torch.gru(inner, start, leaves, True, 1, 0.0, True, False, True)
        return _result(o, x, apply(o, y, p["out"]))
    given = apply(o, inner, p["x"], p.get("x_b"))
    state, cell, states = inner.new_zeros(x.shape[0], size), inner.new_zeros(x.shape[0], size), []
    for now in given.unbind(1):
        state, cell = _cell(o, p, now, state, cell)
        states.append(state)
    return _result(o, x, apply(o, torch.stack(states, 1), p["out"]))


def _cell(o: Options, p: Params, now: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    if o["cell"] == "scan":  # a decay that the input chooses, as in linear state spaces
        decay, value = now.chunk(2, -1)
        return torch.sigmoid(decay) * state + value, cell
    from_state = apply(o, state, p["h"])
    if o["cell"] == "plain":
        return torch.tanh(now + from_state), cell
    if o["cell"] == "gru":
        (r, z, n), (hr, hz, hn) = now.chunk(3, -1), from_state.chunk(3, -1)
        keep = torch.sigmoid(z + hz)
        return keep * state + (1 - keep) * torch.tanh(n + torch.sigmoid(r + hr) * hn), cell
    i, f, g, out = (now + from_state).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(out) * torch.tanh(cell), cell


# --- experts ----------------------------------------------------------------------------------------------------------


def _draw_experts(rng: random.Random, width: int, seq: int) -> Options:
    count = rng.choice((2, 4))
    return {**_common(rng), "bias": False, "experts": count, "hidden": rng.choice((4, 8, 12)), "turned": False,
            "top": rng.choice((1, 2)), "way": rng.choice(("all", "all", "list", "chosen", "capacity")),
            "balance": rng.random() < 0.5, "cut": rng.choice(("experts", "hidden"))}  # fmt: skip


def _leaves_experts(o: Options, width: int, seq: int) -> Leaves:
    count, h = o["experts"], o["hidden"]
    own = {"router": Leaf((width, count))}
    if o["way"] == "list":
        for n in range(count):
            own |= {f"expert{n}_up": Leaf((width, h), 1), f"expert{n}_down": Leaf((h, width), 0)}
    else:
        whole = o["cut"] == "experts"
        own |= {"up": Leaf((count, width, h), 0 if whole else 2), "down": Leaf((count, h, width), 0 if whole else 1)}
    return {**norm_leaves(o, width), **own}


def _run_experts(o: Options, p: Params, x: Tensor, side: Side) -> Tensor:
    tokens = normed(o, p, x).reshape(-1, x.shape[-1])
    weights = torch.softmax(tokens @ p["router"], -1)
    if o["balance"]:
        side.terms.append(0.01 * o["experts"] * (weights.mean(0) * weights.mean(0)).sum())
    top, index = weights.topk(o["top"], -1)
    kept = torch.zeros_like(weights).scatter(1, index, top)  # [tokens, experts], zero where not chosen
    return _result(o, x, _EXPERTS[o["way"]](o, p, tokens, kept, top, index).view_as(x))


def _all_experts(o: Options, p: Params, tokens: Tensor, kept: Tensor, top: Tensor, index: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("td,edh->eth", tokens, p["up"]))
    return torch.einsum("eth,ehd,te->td", hidden, p["down"], kept)


def _listed(o: Options, p: Params, tokens: Tensor, kept: Tensor, top: Tensor, index: Tensor) -> Tensor:
    each = [
        F.gelu(tokens @ p[f"expert{n}_up"]) @ p[f"expert{n}_down"] * kept[:, n : n + 1] for n in range(o["experts"])
    ]
    return torch.stack(each).sum(0)


def _chosen(o: Options, p: Params, tokens: Tensor, kept: Tensor, top: Tensor, index: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("td,tkdh->tkh", tokens, p["up"][index]))
    return torch.einsum("tkh,tkhd,tk->td", hidden, p["down"][index], top)


def _capacity(o: Options, p: Params, tokens: Tensor, kept: Tensor, top: Tensor, index: Tensor) -> Tensor:
    """Each expert takes the tokens that want it most, half of them."""
    room = max(tokens.shape[0] // 2, 1)
    share, place = kept.t().topk(room, -1)  # [experts, room]
    hidden = F.gelu(torch.bmm(tokens[place], p["up"]))
    out = torch.bmm(hidden, p["down"]) * share[..., None]
    return torch.zeros_like(tokens).index_add(0, place.reshape(-1), out.reshape(-1, tokens.shape[1]))


_EXPERTS = {"all": _all_experts, "list": _listed, "chosen": _chosen, "capacity": _capacity}

KINDS: dict[str, Kind] = {
    "mlp": Kind(_draw_mlp, _leaves_mlp, _run_mlp),
    "lora": Kind(_draw_lora, _leaves_lora, _run_lora),
    "mixer": Kind(_draw_mixer, _leaves_mixer, _run_mixer),
    "scale": Kind(_draw_scale, _leaves_scale, _run_scale),
    "attention": Kind(_draw_attention, _leaves_attention, _run_attention),
    "conv": Kind(_draw_conv, _leaves_conv, _run_conv),
    "recurrent": Kind(_draw_recurrent, _leaves_recurrent, _run_recurrent),
    "experts": Kind(_draw_experts, _leaves_experts, _run_experts),
}
WEIGHTS = {"mlp": 6, "attention": 8, "conv": 3, "recurrent": 3, "experts": 3, "lora": 2, "mixer": 1, "scale": 1}
