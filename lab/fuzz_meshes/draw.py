"""draw: a random case. Case k of a seed is the same in every run of one version.

`TOGETHER` cases in a row have one model and one recipe, so that they share a capture; each has its own mesh, rules and
schedule.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from fzero import P, Pipeline, Precision, groups
from fzero.precision import LossScale
from fzero.shard.partition import Groups
from lab.fuzz_meshes import optimizers
from lab.fuzz_meshes.case import Case, Recipe
from lab.fuzz_meshes.layers import KINDS, WEIGHTS, Layer, Leaf
from lab.fuzz_meshes.model import Model

TOGETHER = 8
MOST = 8  # ranks
MESHES = [
    {"pp": pp, "dp_out": out, "dp": dp, "tp": tp}
    for pp, out, dp, tp in itertools.product(range(1, 5), range(1, 4), range(1, MOST + 1), (1, 2, 3, 4, 8))
    if 2 <= pp * out * dp * tp <= MOST
]


def draw(seed: int, number: int) -> Case:
    """The case of this number."""
    shared = random.Random(f"meshes:{seed}:{number // TOGETHER}")
    model = _model(shared)
    recipe = _recipe(shared, model)
    rng = random.Random(f"meshes:{seed}:{number // TOGETHER}:{number % TOGETHER}")
    return Case(f"{seed}:{number}", model, recipe, draw_place(rng, model, recipe))


# --- what is computed -------------------------------------------------------------------------------------------------


def _model(rng: random.Random) -> Model:
    width, seq, vocab = rng.choice((8, 8, 12)), rng.choice((4, 4, 6)), rng.choice((8, 12, 16, 24))
    given = rng.choice(("tokens", "tokens", "floats"))
    second = rng.choice((None, None, None, "add", "join", "cross"))
    length = 2 * seq if second == "join" else seq
    layers = [_layer(rng, width, length) for _ in range(rng.choice((2, 2, 2, 3, 4)))]
    encoder: list[Layer] = []
    if second == "cross":
        encoder = [_layer(rng, width, seq) for _ in range(rng.choice((1, 2)))]
        at = rng.randrange(len(layers))
        crossed = KINDS["attention"].draw(rng, width, seq)
        layers[at] = Layer("attention", {**crossed, "cross": True})
    shared = {len(layers) - 1: 0} if len(layers) > 2 and rng.random() < 0.12 else None
    aux = [(n, rng.choice(("square", "head", "spread"))) for n in range(len(layers)) if rng.random() < 0.15]
    heads = ("words", "words", "values", "classes", "contrast", *(["tied"] * 3 if given == "tokens" else []))
    return Model(
        width, seq, vocab, given, rng.choice(heads), tuple(layers), tuple(encoder), tuple(aux), second, shared,
        rng.random() < 0.4,
    )  # fmt: skip


def _layer(rng: random.Random, width: int, seq: int) -> Layer:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return Layer(kind, dict(KINDS[kind].draw(rng, width, seq)))


def _recipe(rng: random.Random, model: Model) -> Recipe:
    names = list(optimizers.TABLE)
    optimizer = rng.choices(names, [optimizers.WEIGHTS.get(name, 1) for name in names])[0]
    dtype, precision = "f64", "fp32"
    chance = rng.random()
    if chance < 0.3:
        dtype = "f32"
    if chance < 0.15:
        precision = rng.choice(("bf16", "bf16", "fp16", "bf16_params"))
        optimizer = rng.choice(("momentum", "adamw", "adam"))
    scaled = Precision(compute="fp16", loss_scale=LossScale(initial=64.0))
    clip: dict[str, float] = rng.choice(({}, {}, {"clip_norm": 0.5}, {"clip_norm": 0.5}, {"clip_value": 0.05}))
    bad = None
    nonfinite = rng.choice((None, None, None, "skip")) if precision != "fp16" else None
    if nonfinite and model.input == "floats" and rng.random() < 0.6:
        bad = rng.choice((0, 1))
    trainable = None
    if rng.random() < 0.15:
        trainable = rng.choice(
            (("blocks/**",), ("blocks/0/**", "last"), ("last", f"blocks/{len(model.layers) - 1}/**"))
        )
    microbatches = rng.choice((1, 2, 2, 2, 3, 4))
    return Recipe(
        optimizer, dtype, scaled if precision == "fp16" else precision, microbatches, rng.choice((1, 2, 2, 3)),
        2, clip, trainable, nonfinite, bad,
    )  # fmt: skip


# --- where it is computed ---------------------------------------------------------------------------------------------


def draw_place(rng: random.Random, model: Model, recipe: Recipe) -> dict[str, Any]:
    """A mesh, rules and the other fields of a `fzero.Spec` for a model."""
    mesh = _mesh(rng, model, recipe)
    place: dict[str, Any] = {"mesh": mesh}
    if "tp" in mesh and (mesh["tp"] > 1 or rng.random() < 0.5):
        place["shard"] = _rules(rng, model, mesh["tp"])
        if rng.random() < 0.3:
            place["sequence"] = "tp"
    place["zero"] = _zero(rng, model, mesh)
    if "pp" in mesh:
        place |= _pipeline(rng, model, mesh["pp"])
    for name, values in (
        ("reduce", (None, "each", "each", "end", "end")), ("bucket_bytes", (None, 64, 512)),
        ("prefetch", (None, None, 0, 1, 2)),
        ("overlap", (True, True, True, False)), ("gather_bytes", (None,) * 7 + (4096,)),
    ):  # fmt: skip
        value = rng.choice(values)
        if value is not None and value is not True:
            place[name] = value
    place |= _remat(rng, model) | _offload(rng, recipe)
    return _two_axes(rng, place) if mesh.get("tp", 1) in (4, 8) and rng.random() < 0.5 else place


def _two_axes(rng: random.Random, place: dict[str, Any]) -> dict[str, Any]:
    """The place with the ranks of `tp` on two axes: each rule cuts over both, or over one of them."""
    outer = rng.choice([n for n in (2, 4) if place["mesh"]["tp"] > n])
    mesh: dict[str, int] = {}
    for name, size in place["mesh"].items():
        mesh |= {"tp": outer, "mp": size // outer} if name == "tp" else {name: size}
    rules = {
        path: _renamed(rule, rng.choice(("tp", "mp", ("tp", "mp"), ("tp", "mp"))))
        for path, rule in place["shard"].items()
    }
    named = {axis for rule in rules.values() for axis in rule.axes}
    if named != {"tp", "mp"}:
        rules |= {path: _renamed(rule, ("tp", "mp")) for path, rule in [*place["shard"].items()][:1]}
    sequence = {"sequence": rng.choice(("tp", "mp"))} if "sequence" in place else {}
    return {**place, "mesh": mesh, "shard": rules, **sequence}


def _renamed(rule: P, axes: str | tuple[str, ...]) -> P:
    """The rule with other axes in the place of `tp`."""
    dims = [groups(axes, dim.count) if isinstance(dim, Groups) else axes if dim == "tp" else None for dim in rule]
    return P(*dims)


def _mesh(rng: random.Random, model: Model, recipe: Recipe) -> dict[str, int]:
    narrow = recipe.precision != "fp32" and any(x.kind == "experts" for x in (*model.layers, *model.encoder))
    fitting = [m for m in MESHES if m["pp"] <= len(model.layers) + len(model.encoder)]
    fitting = [m for m in fitting if model.width % m["tp"] == 0 and not (narrow and m["tp"] > 1)]
    weights = [1 / (m["pp"] * m["dp_out"] * m["dp"] * m["tp"]) ** 0.5 for m in fitting]
    sizes = rng.choices(fitting, weights)[0]
    names = [name for name, size in sizes.items() if size > 1 or rng.random() < 0.1]
    if rng.random() < 0.2:
        rng.shuffle(names)
        if {"dp", "dp_out"} <= {*names} and names.index("dp") < names.index("dp_out"):
            i, j = names.index("dp"), names.index("dp_out")
            names[i], names[j] = names[j], names[i]
    return {name: sizes[name] for name in names}


def _rules(rng: random.Random, model: Model, n: int) -> dict[str, P]:
    """Rules that cut each leaf as a textbook says, with some left out, or along any dim that n divides."""
    textbook = rng.random() < 0.5
    share = rng.choice((1.0, 0.8, 0.5))
    rules: dict[str, P] = {}
    for path, leaf in model.leaves().items():
        dims = [d for d, size in enumerate(leaf.shape) if size % n == 0]
        rarely = 0.1 if leaf.init == "one" else 1.0  # a norm needs its weights whole: the refusal is known
        if not dims or rng.random() > share * rarely:
            continue
        if not textbook:
            rules[path] = _cut(leaf, rng.choice(dims), 1)
        elif leaf.cut in dims and leaf.shape[leaf.cut] // leaf.groups % n == 0:
            rules[path] = _cut(leaf, leaf.cut, leaf.groups)
    if not rules:
        path, leaf = next((p, x) for p, x in model.leaves().items() if any(size % n == 0 for size in x.shape))
        rules[path] = _cut(leaf, next(d for d, size in enumerate(leaf.shape) if size % n == 0), 1)
    return rules


def _cut(leaf: Leaf, dim: int, count: int) -> P:
    return P(*([None] * dim), groups("tp", count) if count > 1 else "tp", *([None] * (len(leaf.shape) - dim - 1)))


def _zero(rng: random.Random, model: Model, mesh: dict[str, int]) -> Any:
    chance = rng.random()
    if {"dp_out", "dp"} <= {*mesh} and chance < 0.5:
        both = ("dp_out", "dp")
        columns = {"params": ("dp",), "grads": ("dp",), "optimizer": both}
        return rng.choice(("hsdp", "hpz", columns, {**columns, "grads": both}, {**columns, "params": ()}))
    if chance < 0.8:
        return rng.choice((0, 1, 2, 3, 3))
    first = rng.choice(("blocks/0/**", "last", "blocks/**"))
    return {f"**/{first}": rng.choice((0, 1, 2, 3)), "**": rng.choice((0, 1, 2, 3))}


def _pipeline(rng: random.Random, model: Model, roles: int) -> dict[str, Any]:
    name = rng.choice((None, "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"))
    layers = len(model.layers) + len(model.encoder)
    if name == "interleaved":
        return {"pipeline": Pipeline(name, chunks=2) if 2 * roles <= layers else "1f1b"}
    if name == "zb-v" and 2 * roles > layers:
        name = "zb-h1"
    if not model.encoder and roles > 1 and name in ("gpipe", "1f1b", "zb-h1") and rng.random() < 0.25:
        starts = sorted(rng.sample(range(1, layers), roles - 1))
        if all(map(model.has_rows, starts)):
            return {"pipeline": Pipeline(name, cut=[f"blocks/{n}" for n in starts])}
    return {} if name is None else {"pipeline": name}


def _remat(rng: random.Random, model: Model) -> dict[str, Any]:
    chance = rng.random()
    if chance < 0.6:
        return {}
    if chance < 0.85:
        return {"remat": rng.choice(("full", "gathers", "offload"))}
    n = rng.randrange(len(model.layers))
    if not model.has_rows(n):
        return {}
    return {"remat": {f"blocks/{n}/**": rng.choice(("full", "offload")), "**": rng.choice(("gathers", "full"))}}


def _offload(rng: random.Random, recipe: Recipe) -> dict[str, Any]:
    if rng.random() < 0.7:
        return {}
    bare = recipe.optimizer in ("sgd", "scheduled")
    if bare:
        rules: Any = rng.choice(({"params/**": "cpu"}, {"params/blocks/**": "nvme"}, {"**": "cpu"}))
    else:
        rules = rng.choice((
            "optimizer", "optimizer+params", {"params/**": "cpu"}, {"**": "nvme"},
            {"opt_state/**": "nvme", "params": "cpu"}, {"params/blocks/0/**": "cpu", "optimizer": "nvme"},
        ))  # fmt: skip
    if "clip_norm" in recipe.clip and isinstance(rules, dict) and rng.random() < 0.4:
        rules = {"grads/**": rng.choice(("cpu", "nvme")), **rules}
    away = isinstance(rules, dict) and "nvme" in rules.values()
    where = rng.choice((None, "device", "cpu"))
    return {"offload": rules, **({"nvme_path": "/var/tmp"} if away else {}), **({"update_on": where} if where else {})}
