"""corpus: unbroken programs to break, drawn from small models of every shape that fzero lowers.

A model is a loss or a step, its parameters and its batch; `draw` puts it under a random optimizer, world, ZeRO stage,
number of microbatches, bucket size and schedule, and lowers it. `pipeline` is a model of `pipelines` on a grid of
ranks, with a program for each role. `relay` is a hand-written program whose ranks differ, with nothing but sends and
receives. All are small enough to interpret in milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fzero import api, functional, optim, tree
from fzero._torch_compat import FakeTensorMode
from fzero.ir import segments
from fzero.ir.mesh import Mesh
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Op, Ref, make_op
from fzero.passes import optimise
from fzero.plan.layout import Leaf, Plan
from fzero.spec import Spec
from fzero.state import storage
from fzero.tools.mutate.pipelines import PIPED, shape, tokens
from fzero.verify.abstract import program_meaning

ROWS = 6  # of a rank's batch: one, two or three microbatches divide it
NOTHING: Mapping[str, Any] = {}
HIERARCHICAL: tuple[Any, ...] = (  # values of `Spec(zero=)` on two data axes
    0,
    1,
    2,
    3,
    "hsdp",
    "hsdp",
    "hpz",
    "hpz",
    {"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")},
)
Tx = optim.GradientTransformation


@dataclass(frozen=True)
class Case:
    """A program for every rank, and the contents of each rank's buffers before the step."""

    name: str
    plan: Plan
    programs: Mapping[int, Program]
    memory: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """`params` and `batch` draw theirs from a generator; `step` makes a whole step from an optimizer, `state` its
    state; `part` is a path rule that some of the state's leaves match."""

    params: Callable[[torch.Generator], Any]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Tx], Callable[[Any, Any], Any]] | None = None
    state: Callable[[Any, Tx], Any] | None = None
    part: str = "layers/0/**"


# --- models -----------------------------------------------------------------------------------------------------------


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g) * 0.4


def _layers(g: torch.Generator) -> Any:
    return {"layers": [{"w": _normal(g, 8, 8), "b": _normal(g, 8)} for _ in range(3)]}


def _wide(g: torch.Generator) -> Any:
    return {"layers": [{"w": _normal(g, 8, 256), "b": _normal(g, 256)}, {"w": _normal(g, 256, 8), "b": _normal(g, 8)}]}


def _pairs(g: torch.Generator) -> dict[str, Tensor]:
    return {"x": _normal(g, ROWS, 8), "y": _normal(g, ROWS, 8)}


def _mlp(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x


def _mlp_loss(params: Any, batch: Any) -> Tensor:
    return ((_mlp(params, batch["x"]) - batch["y"]) ** 2).mean()


def _low_loss(params: Any, batch: Any) -> Tensor:
    x = batch["x"].to(torch.bfloat16)
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"].to(torch.bfloat16) + layer["b"].to(torch.bfloat16))
    return ((x.float() - batch["y"]) ** 2).mean()


def _gpt_params(g: torch.Generator) -> Any:
    blocks = [
        {"norm": torch.ones(8), "qkv": _normal(g, 8, 24), "out": _normal(g, 8, 8), "up": _normal(g, 8, 16),
         "down": _normal(g, 16, 8)}
        for _ in range(2)
    ]  # fmt: skip
    return {"tokens": _normal(g, 12, 8), "positions": _normal(g, 4, 8), "blocks": blocks}


def _tokens(g: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(12, (ROWS, 4), generator=g) for name in ("inputs", "targets")}


def _gpt_loss(params: Any, batch: Any) -> Tensor:
    x = params["tokens"][batch["inputs"]] + params["positions"]
    for block in params["blocks"]:
        q, k, v = (F.layer_norm(x, (8,), block["norm"]) @ block["qkv"]).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + weights @ v @ block["out"]
        x = x + F.gelu(x @ block["up"]) @ block["down"]
    logits = x @ params["tokens"].t()
    return F.cross_entropy(logits.view(-1, 12), batch["targets"].view(-1))


def _conv_params(g: torch.Generator) -> Any:
    convs = [{"kernel": _normal(g, 4, c, 3, 3), "bias": _normal(g, 4)} for c in (1, 4)]
    return {"convs": convs, "head": {"w": _normal(g, 4, 5), "b": _normal(g, 5)}}


def _images(g: torch.Generator) -> dict[str, Tensor]:
    return {"image": _normal(g, ROWS, 1, 5, 5), "label": torch.randint(5, (ROWS,), generator=g)}


def _conv_loss(params: Any, batch: Any) -> Tensor:
    x = batch["image"]
    for conv in params["convs"]:
        x = torch.relu(F.conv2d(x, conv["kernel"], conv["bias"], padding=1))
    return F.cross_entropy(x.mean((2, 3)) @ params["head"]["w"] + params["head"]["b"], batch["label"])


def _bag_params(g: torch.Generator) -> Any:
    return {"table": _normal(g, 20, 8), "hidden": _normal(g, 8, 8), "output": _normal(g, 20, 8)}


def _bags(g: torch.Generator) -> dict[str, Tensor]:
    return {"words": torch.randint(20, (ROWS, 3), generator=g), "next": torch.randint(20, (ROWS,), generator=g)}


def _bag_loss(params: Any, batch: Any) -> Tensor:
    x = torch.tanh(params["table"][batch["words"]].mean(1) @ params["hidden"])
    return F.cross_entropy(x @ params["output"].t(), batch["next"])


# --- steps of one's own -----------------------------------------------------------------------------------------------


def _averaged(tx: Tx) -> Callable[[Any, Any], Any]:
    """An EMA copy of the weights, a frozen subtree, and a drift that every rank keeps for itself."""

    def loss(params: Any, frozen: Any, batch: Any) -> Tensor:
        return ((_mlp(params, batch["x"]) @ frozen["w"] - batch["y"]) ** 2).mean()

    def step(state: Any, batch: Any) -> Any:
        value, grads = functional.value_and_grad(loss, batch_argnum=2)(state["params"], state["frozen"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        ema = tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["ema"], params)
        drift = state["drift"] + batch["x"].mean(0)
        new = {"params": params, "opt_state": opt_state, "ema": ema, "frozen": state["frozen"], "drift": drift}
        return new, {"loss": value, "drift": functional.pmax(drift.abs().max())}

    return step


def _averaged_state(params: Any, tx: Tx) -> Any:
    return {
        "params": params,
        "opt_state": tx.init(params),
        "ema": params,
        "frozen": {"w": torch.eye(8)},
        "drift": functional.per_rank(torch.zeros(8)),
    }


def _with_aux(tx: Tx) -> Callable[[Any, Any], Any]:
    """A loss with aux, whose mean over the ranks is kept as a running statistic."""

    def loss(params: Any, batch: Any) -> Any:
        x = _mlp(params, batch["x"])
        return ((x - batch["y"]) ** 2).mean(), {"mean": x.mean(0), "top": x.abs().amax()}

    def step(state: Any, batch: Any) -> Any:
        (value, aux), grads = functional.value_and_grad(loss, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        mean = 0.5 * state["mean"] + 0.5 * functional.pmean(aux["mean"])
        new = {"params": optim.apply_updates(state["params"], updates), "opt_state": opt_state, "mean": mean}
        return new, {"loss": value, "top": functional.psum(aux["top"])}

    return step


def _partial(tx: Tx) -> Callable[[Any, Any], Any]:
    """Only the last layer is trained, so that most gradients go unread; the others change places every step."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = functional.value_and_grad(_mlp_loss)(state["params"], batch)
        first, second, last = state["params"]["layers"]
        updates, opt_state = tx.update(grads["layers"][2:], state["opt_state"], [last])
        (new,) = optim.apply_updates([last], updates)
        slow = tree.map(lambda s, p: torch.where(state["turn"] % 2 == 1, p, s), state["slow"], last)
        turn = state["turn"] + 1
        params = {"layers": [second, first, new]}
        return {"params": params, "opt_state": opt_state, "slow": slow, "turn": turn}, {"loss": value, "turn": turn}

    return step


def _partial_state(params: Any, tx: Tx) -> Any:
    last = params["layers"][2]
    return {"params": params, "opt_state": tx.init([last]), "slow": last, "turn": torch.zeros((), dtype=torch.int64)}


MODELS: dict[str, Model] = {
    "mlp": Model(_layers, _pairs, _mlp_loss),
    "gpt": Model(_gpt_params, _tokens, _gpt_loss, part="blocks/**"),
    "conv": Model(_conv_params, _images, _conv_loss, part="convs/**"),
    "bag": Model(_bag_params, _bags, _bag_loss, part="output"),
    "wide": Model(_wide, _pairs, _mlp_loss),
    "bf16": Model(_layers, _pairs, _low_loss),
    "averaged": Model(_layers, _pairs, step=_averaged, state=_averaged_state, part="ema/**"),
    "aux": Model(_layers, _pairs, step=_with_aux, part="**/w",
                 state=lambda p, tx: {"params": p, "opt_state": tx.init(p), "mean": torch.zeros(8)}),
    "partial": Model(_layers, _pairs, step=_partial, state=_partial_state, part="**/b"),
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[], Tx]] = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(optim.warmup_cosine(0.01, 4, 40)),
    "adamw": lambda: optim.adamw(0.01, mask=lambda path, leaf: leaf.ndim > 1),
    "adamw8bit": lambda: optim.adamw8bit(0.01, mask=lambda path, leaf: leaf.ndim > 1),
    "muon": lambda: optim.muon(0.02, others=optim.adamw(0.01)),
}


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, number: int) -> Case:
    """The programs of this number: models in turn, everything else at random. Of fourteen two are pipelines, one
    a relay, two have an outer data axis, and the state of one is offloaded."""
    names = [
        *(n for n in MODELS if n != "wide"),
        "pipeline",
        "relay",
        "hierarchy",
        "pipeline",
        "hierarchy",
        "offloaded",
    ]
    name = names[number % len(names)]
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    if name == "relay":
        return relay(rng.choice((2, 3, 4)), generator)
    shared = (number + number // len(names)) % 3 == 0
    if name == "pipeline":
        return pipeline(rng, generator, shared=shared)
    if name == "hierarchy":
        return hierarchy(rng, generator, shared=shared)
    if name == "offloaded":
        return offloaded(rng, generator, shared=shared)
    return _flat(rng, name, generator, {}, rng.choice((1, 2, 2, 3, 4)), shared=shared)


def _flat(
    rng: random.Random, name: str, generator: torch.Generator, given: Mapping[str, Any], world: int, *, shared: bool
) -> Case:
    """A model without a pipeline, on a world of this size. `given` are fields of `Spec` that are not drawn."""
    model, tx = MODELS[name], rng.choice(list(OPTIMIZERS))
    placed = {"microbatches": rng.choice((1, 2, 3)), **_placed(rng, model.part, shared), **given}
    if model.loss is not None and rng.random() < 0.5:
        placed["clip_norm"] = 0.5
    return lowered(f"{name} {tx} world={world} {_shown(placed)}", model, OPTIMIZERS[tx](), placed, world, generator)


def draw_hierarchy(rng: random.Random, number: int) -> Case:
    """The program of this number with two data axes: every third over shared memory."""
    return hierarchy(rng, torch.Generator().manual_seed(rng.getrandbits(31)), shared=number % 3 == 0)


def hierarchy(rng: random.Random, generator: torch.Generator, *, shared: bool) -> Case:
    """A model on an outer and an inner data axis, one in four behind a pipeline."""
    mesh = {"dp_out": rng.choice((2, 2, 3)), "dp": rng.choice((1, 2, 2, 2))}
    given = {"mesh": mesh, "zero": rng.choice(HIERARCHICAL)}
    if rng.random() < 0.25:
        return pipeline(rng, generator, shared=shared, given={**given, "mesh": {**mesh, "dp_out": 2}})
    return _flat(rng, rng.choice(list(MODELS)), generator, given, mesh["dp_out"] * mesh["dp"], shared=shared)


def draw_offloaded(rng: random.Random, number: int) -> Case:
    """A model whose state is held on host and disk: of half of them the large columns move in tiles."""
    return offloaded(rng, torch.Generator().manual_seed(rng.getrandbits(31)), shared=number % 3 == 0)


def offloaded(rng: random.Random, generator: torch.Generator, *, shared: bool) -> Case:
    """A model with any homes, on any world, its updates on the device or on the host."""
    homes = rng.choice(({"**": "nvme"}, {"params/**": "cpu", "**": "nvme"}, {"optimizer": "cpu"}, {"**": "cpu"}))
    homes = {**rng.choice(({}, {"grads/**": "nvme"}, {"grads/**": "cpu"})), **homes}
    given = {
        "offload": homes,
        "nvme_path": "/nvme" if "nvme" in homes.values() else None,
        "update_on": rng.choice((None, "device", "cpu")),
        "tile_bytes": rng.choice((256, 4096, 1 << 20)),
    }
    name = rng.choice(("wide", "wide", *(n for n, model in MODELS.items() if model.loss is not None)))
    return _flat(rng, name, generator, given, rng.choice((1, 2, 2, 3)), shared=shared)


def draw_pipeline(rng: random.Random, number: int) -> Case:
    """The pipeline of this number: a model on a grid of roles and data ranks, under any schedule."""
    return pipeline(rng, torch.Generator().manual_seed(rng.getrandbits(31)), shared=number % 3 == 0)


def pipeline(
    rng: random.Random, generator: torch.Generator, *, shared: bool, given: Mapping[str, Any] = NOTHING
) -> Case:
    """As `draw_pipeline`; `shared` is the way of transfers. `given` are fields of `Spec` that are not drawn: of `mesh`,
    the data axes."""
    name, tx, form = rng.choice((*PIPED, "lent")), rng.choice(list(OPTIMIZERS)), shape(rng)
    piped = PIPED[name]
    model = Model(lambda g: piped.params(g, form.layers), lambda g: tokens(g, form.microbatches), piped.loss)
    mesh = {"pp": form.roles, **given.get("mesh", {"dp": form.data_ranks})}
    placed = {
        "pipeline": form.schedule,
        "microbatches": form.microbatches,
        **_placed(rng, "blocks/**", shared),
        **given,
        "mesh": mesh,
    }
    if rng.random() < 0.5:
        placed["clip_norm"] = 0.5
    world = math.prod(mesh.values())
    return lowered(f"pipeline {name} {tx} {_shown(placed)}", model, OPTIMIZERS[tx](), placed, world, generator)


def _placed(rng: random.Random, part: str, shared: bool) -> dict[str, Any]:
    """Fields of `Spec` that decide where and when. `part` is a path rule for a stage of its own."""
    stages = [0, 1, 2, 3, 3, {part: rng.randrange(4), "**": rng.randrange(4)}]
    return {
        "zero": rng.choice(stages),
        "reduce": rng.choice((None, "each", "end")),
        "bucket_bytes": rng.choice((300, 1 << 10, 32 << 20)),
        "prefetch": rng.choice((0, 1, 2)),
        "overlap": rng.random() < 0.8,
        "remat": rng.choice(("none", "none", "full")),
        "precision": rng.choice(("fp32", "fp32", "bf16")),
        "transfers": "shared" if shared else "auto",
    }


def _shown(placed: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in placed.items())


def lowered(name: str, model: Model, tx: Tx, placed: Mapping[str, Any], world: int, generator: torch.Generator) -> Case:
    """A model's case under these fields of `Spec`, on `world` ranks. One that is none: `tile_bytes`, of the passes."""
    tile_bytes = placed.get("tile_bytes")
    placed = {key: value for key, value in placed.items() if key != "tile_bytes"}
    params = model.params(generator)
    if model.step is not None and model.state is not None:
        state, spec = model.state(params, tx), Spec(step=model.step(tx), **placed)
    else:
        state, spec = params, Spec(loss=model.loss, optimizer=tx, **placed)
    batches = [model.batch(generator) for _ in range(world)]
    done = api.lower(spec, state, batches[0], world_size=world)
    if tile_bytes is not None:
        done = replace(done, programs={0: optimise(done.naive, replace(done.options, tile_bytes=tile_bytes))[0]})
    buffers, mesh = done.programs[0].buffers, done.plan.mesh
    names = [n for n, b in buffers.items() if b.kind == "batch"]
    held = [n for n, b in buffers.items() if b.kind == "constant"]
    leaves = [_value(leaf, generator) for leaf in done.plan.leaves]
    memory = []
    for rank in range(world):
        batch = batches[mesh.data_rank(rank)]
        own = [
            _value(leaf, generator) if leaf.per_rank else x for leaf, x in zip(done.plan.leaves, leaves, strict=True)
        ]
        memory.append(
            {
                **storage.shards(done.plan, own, rank),
                **dict(zip(names, tree.flatten(batch)[1], strict=True)),
                **dict(zip(held, done.graph.constants.values(), strict=True)),
            }
        )
    return Case(name, done.plan, {rank: done.on(rank) for rank in range(world)}, memory)


def _value(leaf: Leaf, generator: torch.Generator) -> Tensor:
    """Any value that a leaf of this path may have: second moments are not negative."""
    if not leaf.dtype.is_floating_point:
        return torch.randint(1, 5, leaf.shape, generator=generator, dtype=leaf.dtype)
    value = torch.randn(leaf.shape, generator=generator) * 0.3
    return (value.abs() if "/nu/" in leaf.path else value).to(leaf.dtype)


# --- ranks whose programs differ --------------------------------------------------------------------------------------


def relay(world: int, generator: torch.Generator) -> Case:
    """A program in which x and y go round the ring of ranks, each scaled on the way.

    Every rank adds the values that arrive to its own.
    """
    scaled, added, kept = _segment(_scale, 1), _segment(_add, 2), _segment(_keep, 1, num_outputs=0)
    pool = {segments.digest(gm): gm for gm in (scaled, added, kept)}
    scale, add, keep = pool
    buffers = {name: Buffer(name, torch.float32, (8,), "state") for name in ("x", "y")}
    for part in ("out", "in", "sum"):
        buffers |= {f"{n}.{part}": Buffer(f"{n}.{part}", torch.float32, (8,), "activation") for n in ("x", "y")}
    programs = {}
    for rank in range(world):
        to, source = (rank + 1) % world, (rank - 1) % world
        ops: list[Op] = [make_op("run", [Ref(n)], [Ref(f"{n}.out")], segment=scale, fresh=1) for n in ("x", "y")]
        for tag, n in enumerate(("x", "y")):
            ops.append(make_op("send", [Ref(f"{n}.out")], axis="dp", peer=to, tag=tag))
            ops.append(make_op("recv", [], [Ref(f"{n}.in")], axis="dp", peer=source, tag=tag))
        for n in ("x", "y"):
            ops += [
                make_op("wait", [Ref(f"{n}.in")]),
                make_op("wait", [Ref(f"{n}.out")]),
                make_op("free", [Ref(f"{n}.out")]),
            ]
            ops.append(make_op("run", [Ref(n), Ref(f"{n}.in")], [Ref(f"{n}.sum")], segment=add, fresh=1))
            ops.append(make_op("free", [Ref(f"{n}.in")]))
            ops += [make_op("update", [Ref(f"{n}.sum")], [Ref(n)], segment=keep), make_op("free", [Ref(f"{n}.sum")])]
        program = Program(
            Mesh((("dp", world),)), {}, buffers, tuple(ops), {}, passes=("lower", "prefetch", "free"), segments=pool
        )
        programs[rank] = replace(program, meaning=program_meaning(program))
    plan = Plan("dp", Mesh((("dp", world),)), {}, {n: buffers[n] for n in ("x", "y")},
                tuple(Leaf(n, (8,), torch.float32, n) for n in ("x", "y")))  # fmt: skip
    memory = [{n: torch.randn(8, generator=generator) for n in ("x", "y")} for _ in range(world)]
    return Case(f"relay world={world}", plan, programs, memory)


def _scale(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.mul.Tensor, (x, 0.5))


def _add(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.add.Tensor, (x, y))


def _keep(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.copy_.default, (graph.placeholder("into0"), x))


def _segment(body: Callable[..., fx.Node], arity: int, num_outputs: int = 1) -> fx.GraphModule:
    graph = fx.Graph()
    result = body(graph, *[graph.placeholder(f"x{i}") for i in range(arity)])
    graph.output([result] if num_outputs else [])
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(8)
    return segments.module(graph)
