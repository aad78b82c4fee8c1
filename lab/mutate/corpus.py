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
from torch import Tensor, fx

from fzero import tree
from fzero._torch_compat import FakeTensorMode
from fzero.compile.ahead import lower
from fzero.ir import segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, make_op
from fzero.ir.program import Level, Program
from fzero.ir.records import Buffer, Ref
from fzero.passes import optimise
from fzero.plan.stages import batch_layout
from fzero.plan.state_plan import Leaf, Plan
from fzero.precision import Precision
from fzero.spec import Spec
from fzero.state import storage
from fzero.verify.abstract import program_meaning
from lab.mutate import parallels
from lab.mutate.models import MODELS, OPTIMIZERS, Model, Tx
from lab.mutate.pipelines import PIPED, shape, tokens
from lab.mutate.windows import windowed

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


@dataclass(frozen=True)
class Case:
    """A program for every rank, and the contents of each rank's buffers before the step."""

    name: str
    plan: Plan
    programs: Mapping[int, Program]
    memory: Sequence[Mapping[str, Tensor]]


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, number: int) -> Case:
    """The programs of this number: models in turn, everything else at random. Of seventeen two are pipelines, one
    a relay, two have an outer data axis, two an axis `tp`, the state of one is offloaded, and values of one travel as
    messages of blocks."""
    names = [
        *(n for n in MODELS if n != "wide"),
        "pipeline",
        "relay",
        "hierarchy",
        "pipeline",
        "hierarchy",
        "offloaded",
        "parallel",
        "parallel",
        "coded",
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
    if name == "parallel":
        return parallel(rng, generator, shared=shared)
    if name == "coded":
        return coded(rng, generator, shared=shared)
    return _flat(rng, name, generator, {}, rng.choice((1, 2, 2, 3, 4)), shared=shared)


def _flat(
    rng: random.Random, name: str, generator: torch.Generator, given: Mapping[str, Any], world: int, *, shared: bool,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
) -> Case:  # fmt: skip
    """A model without a pipeline, on a world of this size. `given` are fields of `Spec` that are not drawn."""
    model, tx = MODELS[name], rng.choice(optimizers)
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


def draw_coded(rng: random.Random, number: int) -> Case:
    """A model whose parameters and gradients travel as messages of blocks, one in three on two data axes."""
    return coded(rng, torch.Generator().manual_seed(rng.getrandbits(31)), shared=number % 3 == 0)


def coded(rng: random.Random, generator: torch.Generator, *, shared: bool) -> Case:
    """A model with any codecs, at any stage, on any world."""
    codecs = ("int8", "int4", "e4m3", "e5m2")
    policy = Precision(
        gather=rng.choice((None, *codecs)), reduce=rng.choice(codecs), compute=rng.choice((None, None, "bf16"))
    )
    given: dict[str, Any] = {"precision": policy}
    world = rng.choice((2, 2, 3, 4))
    if rng.random() < 0.34:
        given = {"precision": replace(policy, reduce="sign"), "reduce": None}
        name = rng.choice([n for n, model in MODELS.items() if model.loss is not None])
        return _flat(rng, name, generator, given, world, shared=shared, optimizers=("sgd", "momentum"))
    if rng.random() < 0.34:
        given |= {"mesh": {"dp_out": 2, "dp": 2}, "zero": rng.choice((0, 1, 2, 3, "hsdp", "hpz"))}
        world = 4
    name = rng.choice([n for n, model in MODELS.items() if model.loss is not None])
    return _flat(rng, name, generator, given, world, shared=shared)


def draw_windowed(rng: random.Random, number: int) -> Case:
    """A model with block-sparse attention and its loss by chunks, on one rank or several."""
    generator, model = torch.Generator().manual_seed(rng.getrandbits(31)), windowed(rng)
    tx, world = rng.choice(("sgd", "momentum", "adam")), rng.choice((1, 2))
    placed = {**_placed(rng, model.part, number % 3 == 0), "microbatches": rng.choice((1, 2)), "precision": "fp32",
              "loss_chunks": rng.choice((2, 3, 4))}  # fmt: skip
    return lowered(f"windowed {tx} world={world} {_shown(placed)}", model, OPTIMIZERS[tx](), placed, world, generator)


def draw_kept(rng: random.Random, number: int) -> Case:
    """A model whose bf16 copies of parameters stay between steps, on one rank or several."""
    generator, world = torch.Generator().manual_seed(rng.getrandbits(31)), rng.choice((1, 2, 2, 3))
    name = rng.choice([n for n, model in MODELS.items() if model.loss is not None])
    optimizers, given = ("adam", "adamw"), {"precision": "bf16"}
    return _flat(rng, name, generator, given, world, shared=number % 3 == 0, optimizers=optimizers)


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


def draw_parallel(rng: random.Random, number: int) -> Case:
    """The program of this number on a mesh with `tp`: every third over shared memory."""
    return parallel(rng, torch.Generator().manual_seed(rng.getrandbits(31)), shared=number % 3 == 0)


def parallel(rng: random.Random, generator: torch.Generator, *, shared: bool) -> Case:
    """A model whose leaves lie over `tp`, alone or beside data axes and a pipeline."""
    name, tx = rng.choice(list(parallels.SHARED)), rng.choice(("sgd", "momentum", "adam", "adamw"))
    mesh, given, blocks = parallels.grid(rng)
    own = parallels.SHARED[name]
    model = Model(lambda g: own.params(g, blocks), lambda g: parallels.tokens(g, 2 * given["microbatches"]), own.loss)
    placed = {
        **_placed(rng, "blocks/**", shared),
        **given,
        "mesh": mesh,
        "shard": parallels.rules(rng, own.cuts, mesh["tp"]),
        "sequence": rng.choice((None, "tp")),
    }
    if rng.random() < 0.6:
        placed["clip_norm"] = 0.5
    world = math.prod(mesh.values())
    return lowered(f"parallel {name} {tx} {_shown(placed)}", model, OPTIMIZERS[tx](), placed, world, generator)


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
    done = lower(spec, state, batches[0], world_size=world)
    if tile_bytes is not None:
        done = replace(
            done,
            programs={
                0: optimise(
                    done.naive, replace(done.options[0], decided=done.decisions.roles[0].but(tile_bytes=tile_bytes))
                )[0]
            },
        )
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
        mesh, passes = Mesh((("dp", world),)), ("lower", "prefetch", "free")
        program = Program(mesh, {}, buffers, tuple(ops), {}, passes=passes, level=Level.FREED, segments=pool)
        programs[rank] = replace(program, meaning=program_meaning(program))
    mesh = Mesh((("dp", world),))
    plan = Plan(batch_layout(mesh), mesh, {}, {n: buffers[n] for n in ("x", "y")},
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
