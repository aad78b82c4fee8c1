"""Where and when, never what: a state's bits do not depend on how a step is sharded, cut, ordered or run.

Over real gloo processes at three worlds, then over drawn models and plans through the interpreter. Bits are those of
the whole state (parameters, moments, count) after twenty steps (eight in `make test`), and of the loss at each.

What may change them: the world, the number of microbatches and `reduce`, for these are other sums. With clipping also
the bucket cap, which cuts the sum of the norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import kept
import pytest
import torch
from helpers import differing, gloo, run, same_bits, values
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import MODELS, Model, generator
from torch import Tensor

import fzero
from fzero import tree

STEPS, FEW = 20, 3  # the latter in part
STAGES = (0, 1, 2, 3)
CAPS = (256, 800, 32 << 20)  # bytes: a bucket for each leaf of the MLP, one layer cut in two, a bucket for each layer
TX = {"adamw": fzero.optim.adamw(1e-2), "sgd": fzero.optim.sgd(0.05, momentum=0.9, nesterov=True)}


@dataclass(frozen=True)
class Case:
    """A model and the options of its Spec."""

    model: str = "mlp"
    tx: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> fzero.Spec:
        return fzero.Spec(loss=MODELS[self.model].loss, optimizer=TX[self.tx], **self.options)


def cases(world: int) -> dict[str, Case]:
    """By name: `group/which`. All members of a group must give the same bits.

    World 2 has the options one by one; at 3 and 4 the stages of one group differ in them too, which takes less time.
    """
    one: dict[str, dict[str, Any]] = {f"zero={zero}": {"zero": zero} for zero in STAGES}
    each, end = ({name: dict(options) for name, options in one.items()} for _ in range(2))
    small = {"bucket_bytes": CAPS[0]}
    made: dict[str, Case] = {}
    if world == 2:
        one |= {f"zero=1 cap={CAPS[1]}": {"zero": 1, "bucket_bytes": CAPS[1]}}
        one |= {f"zero=3 cap={CAPS[0]}": {"zero": 3, **small}}  # the default is the third
        one |= {f"prefetch={n}": {"zero": 3, "prefetch": n, **small} for n in (0, 2)}
        one |= {"again": {"zero": 3}}
        each |= {"no overlap": {"zero": 3, "overlap": False}}
        end |= {"rules": {"zero": {"layers/1/**": 3, "**": 1}, **small}}
        clipped = {"clip_norm": 0.3, "microbatches": 2, "reduce": "each"}
        made |= {f"clipped/zero={zero}": Case("mlp", "sgd", {"zero": zero, **clipped}) for zero in (0, 3)}
        made["gpt/zero=0"] = Case("gpt", options={"zero": 0})
        made["gpt/zero=3"] = Case("gpt", options={"zero": 3, "bucket_bytes": 4096, "prefetch": 2})
        made["gpt/rules"] = Case("gpt", options={"zero": {"blocks/**": 3, "**": 1}})
    else:
        each["zero=1"] |= {"bucket_bytes": CAPS[1], "overlap": False}
        each["zero=2"] |= small
        each["zero=3"] |= {"prefetch": 2, **small}
    made |= {f"one microbatch/{name}": Case(options=options) for name, options in one.items()}
    for reduce, group in (("each", each), ("end", end)):
        for name, options in group.items():
            made[f"{reduce}/{name}"] = Case(options={"microbatches": 4, "reduce": reduce, **options})
    return made


PART = tuple(f"{group}/zero={z}" for group, zero in (("one microbatch", 3), ("each", 1), ("end", 2)) for z in (0, zero))


def picked(world: int, part: bool) -> dict[str, Case]:
    return {name: case for name, case in cases(world).items() if not part or name in PART}


def train(case: Case, steps: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """In a rank's process: the whole state after the last step, and the losses."""
    model = MODELS[case.model]
    state = fzero.init(model.init(fzero.random.key(0)), case.spec())
    losses = []
    for step in range(steps):
        state = fzero.step(state, model.batch(torch.distributed.get_rank(), step))
        losses.append(state.metrics["loss"].clone())
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True)), losses


def train_all(world: int, part: bool) -> dict[str, tuple[dict[str, Tensor], list[Tensor]]]:
    with kept.captures():
        return {name: train(case, FEW if part else STEPS) for name, case in picked(world, part).items()}


@dataclass
class World:
    size: int
    part: bool
    found: dict[str, tuple[dict[str, Tensor], list[Tensor]]]

    def groups(self) -> Iterator[tuple[str, list[str]]]:
        names: dict[str, list[str]] = {}
        for name in self.found:
            names.setdefault(name.split("/")[0], []).append(name)
        yield from names.items()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((3, True), id="part of world=3"),
        *(pytest.param((size, False), marks=pytest.mark.acceptance, id=f"world={size}") for size in (2, 3, 4)),
    ],
)
def world(request: pytest.FixtureRequest) -> World:
    size, part = request.param
    ranks = values(gloo(size, train_all, size, part))
    for other in ranks[1:]:
        for name, (state, losses) in ranks[0].items():
            assert not differing(state, other[name][0]), f"{name}: unshard gives other bits on another rank"
            assert torch.equal(torch.stack(losses), torch.stack(other[name][1])), f"{name}: the ranks' losses differ"
    return World(size, part, ranks[0])


def test_stages_caps_prefetch_and_overlap_do_not_change_a_bit(world: World) -> None:
    for group, names in world.groups():
        assert len(names) > 1
        first, losses = world.found[names[0]]
        for name in names[1:]:
            state, own = world.found[name]
            assert not differing(state, first), f"{name} differs from {names[0]} in {differing(state, first)}"
            assert torch.equal(torch.stack(own), torch.stack(losses)), f"the losses of {name} and {names[0]}"
        assert losses[-1] != losses[0], f"{group} did not train"


def test_groups_really_differ(world: World) -> None:
    """Or the test above would compare what cannot differ: other sums have other bits."""
    ends = {group: world.found[names[0]][0] for group, names in world.groups()}
    assert not same_bits(ends["one microbatch"]["params/out"], ends["each"]["params/out"])
    assert not same_bits(ends["each"]["params/out"], ends["end"]["params/out"])
    if world.size == 2:
        assert not same_bits(ends["one microbatch"]["params/out"], ends["clipped"]["params/out"])


def test_interpret_gives_the_bits_of_execute(world: World) -> None:
    for name, case in picked(world.size, world.part).items():
        model, steps = MODELS[case.model], FEW if world.part else STEPS
        result = run(case.spec(), model.init(fzero.random.key(0)), model.batch, world=world.size, steps=steps)
        state, losses = world.found[name]
        assert not differing(result.final, state), f"{name}: {differing(result.final, state)}"
        assert result.losses() == [float(loss) for loss in losses], name


@pytest.mark.acceptance
def test_the_options_change_the_program() -> None:
    """What must not change a bit does change what is run, or its cases say nothing."""
    model = MODELS["mlp"]
    texts = {}
    for name, case in cases(2).items():
        if case.model == "mlp" and name != "one microbatch/again":
            lowered = fzero.lower(case.spec(), model.init(fzero.random.key(0)), model.batch(0, 0), world_size=2)
            texts[name] = str(lowered.program)
    assert len(set(texts.values())) == len(texts), [n for n, t in texts.items() if list(texts.values()).count(t) > 1]


# --- drawn models and plans, through the interpreter ------------------------------------------------------------------

# without shrinking: what is drawn is small, and shrinking takes minutes
few = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))

SHAPES = [(), (1,), (5,), (63,), (64,), (65,), (3, 7), (130,), (2, 3, 4), (0,), (17, 9)]
shape = st.sampled_from(SHAPES)
matrix = st.sampled_from([s for s in SHAPES if len(s) > 0 and 0 not in s])
trees = st.fixed_dictionaries(
    {
        "layers": st.lists(st.fixed_dictionaries({"w": matrix, "b": shape}), min_size=1, max_size=3),
        "out": matrix,
    },
    optional={"tail": st.lists(shape, min_size=1, max_size=4), "scale": shape},
)
plans = st.fixed_dictionaries(
    {
        "zero": st.sampled_from([0, 1, 2, 3, {"layers/**": 3, "**": 1}, {"out": 2, "layers/0/**": 1, "**": 3}]),
        "bucket_bytes": st.sampled_from([1, 300, 900, 32 << 20]),
        "prefetch": st.integers(0, 3),
        "overlap": st.booleans(),
    }
)
sums = st.fixed_dictionaries({"microbatches": st.sampled_from([1, 2, 4]), "reduce": st.sampled_from(["each", "end"])})


def drawn(shapes: Any, seed: int) -> Model:
    """A model with these parameters in which every element gets a gradient of its own, on every rank another."""

    def is_shape(x: Any) -> bool:
        return isinstance(x, tuple)

    flat, structure = tree.optree.tree_flatten(shapes, is_leaf=is_shape)

    def init(key: Tensor) -> Any:
        keys = fzero.random.split(key, len(flat))
        leaves = [fzero.random.normal(k, s) for k, s in zip(keys, flat, strict=True)]
        return tree.optree.tree_unflatten(structure, leaves)

    def loss(params: Any, batch: Tensor) -> Tensor:
        total = batch.sum() * 0
        for leaf in tree.flatten(params)[1]:
            waves = torch.sin(batch.view(-1, *[1] * leaf.ndim) * leaf)
            total = total + waves.mean(0).square().sum() + waves.sum() / 50
        return total

    return Model(init, loss, lambda rank, step: torch.randn(4, generator=generator(rank + 100 * seed, step)))


def outcome(
    model: Model, plan: dict[str, Any], how: dict[str, Any], world: int
) -> tuple[dict[str, Tensor], list[float]]:
    spec = fzero.Spec(loss=model.loss, optimizer=TX["adamw"], **plan, **how)
    result = run(spec, model.init(fzero.random.key(1)), model.batch, world=world, steps=3)
    return result.final, result.losses()


@pytest.mark.parametrize("examples", [3, pytest.param(24, marks=pytest.mark.acceptance)])
def test_any_plan_gives_the_bits_of_the_replicated_program(examples: int) -> None:
    drawing = given(shapes=trees, plan=plans, how=sums, world=st.integers(1, 5), seed=st.integers(0, 99))
    settings(few, max_examples=examples)(drawing(has_the_bits_of_the_replicated_program))()


def has_the_bits_of_the_replicated_program(
    shapes: Any, plan: dict[str, Any], how: dict[str, Any], world: int, seed: int
) -> None:
    model = drawn(shapes, seed)
    oracle, losses = outcome(model, {"zero": 0}, how, world)
    state, own = outcome(model, plan, how, world)
    assert not differing(state, oracle)
    assert own == losses
    assert all(torch.isfinite(leaf).all() for leaf in state.values())


@settings(few, max_examples=2)
@given(shapes=trees, plan=plans, how=sums, world=st.integers(1, 5), clip=st.sampled_from([1e-3, 0.5]))
def test_with_clipping_stages_give_the_same_bits_at_one_bucket_cap(
    shapes: Any, plan: dict[str, Any], how: dict[str, Any], world: int, clip: float
) -> None:
    model = drawn(shapes, 0)
    how = {**how, "clip_norm": clip}
    oracle = outcome(model, {"zero": 0, "bucket_bytes": plan["bucket_bytes"]}, how, world)
    whole = plan["zero"] if isinstance(plan["zero"], int) else 3  # rules cut buckets elsewhere
    state = outcome(model, {**plan, "zero": whole}, how, world)
    assert not differing(state[0], oracle[0])
    assert state[1] == oracle[1]
