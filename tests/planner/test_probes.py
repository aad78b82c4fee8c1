"""Shallow programs foretell a deep one: its ops, the bytes of each kind, its seconds, and about its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from tp_models import gpt

import fzero
from fzero import optim
from fzero.compile.lowered import Lowered
from fzero.interop import from_module
from fzero.ir.mesh import Mesh
from fzero.planner import deep, equal_layers, grow
from fzero.planner.grow import Token
from fzero.planner.probes import Foretold, of_programs
from fzero.planner.problem import Problem, problem_of
from fzero.planner.programs import by_rates, lowered_of
from fzero.planner.shallow import shallow

DEPTH = deep.DEEP


def problem(loss: Any, params: Any, batch: Any, **fields: Any) -> Problem:
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), clip_norm=1.0, **fields)
    return problem_of(spec, params, batch, 4, "h100", None)


def both(of: Problem, mesh: dict[str, int]) -> tuple[Foretold | None, Lowered]:
    """(what shallow programs say, the whole one)."""
    over, spec = Mesh(tuple(mesh.items())), replace(of.spec, mesh=mesh)
    deciders = by_rates(of.machine, over)
    return deep.probed(of, spec, over, deciders), lowered_of(of, spec, over, deciders)


def assert_equal(found: Foretold | None, whole: Lowered, of: Problem, memory: float = 0.1) -> None:
    """Counts and bytes are equal, seconds to 1e-6, memory about."""
    assert found is not None
    wanted = of_programs(whole.programs, of.machine.rates(whole.plan.mesh))
    for role in whole.programs:
        assert found.ops(role) == wanted.ops(role)
        assert [t.kind for t in found.tokens[role]] == [t.kind for t in wanted.tokens[role]]
        assert found.times[role].seconds == pytest.approx(wanted.times[role].seconds, rel=1e-6)
    assert found.peak == pytest.approx(whole.memory.peak, rel=memory)
    assert wanted.peak == whole.memory.peak


@pytest.mark.parametrize(
    ("fields", "mesh", "microbatches"),
    [
        ({"remat": "full"}, {"dp": 4}, 1),
        ({"zero": 1}, {"dp": 4}, 8),
        ({"zero": 2, "remat": "full", "offload": "optimizer+params"}, {"dp": 4}, 2),
        ({"zero": 1, "remat": "full"}, {"pp": 2, "dp": 2}, 8),
    ],
)
@pytest.mark.sampled(1)
def test_a_gpt(fields: dict[str, Any], mesh: dict[str, int], microbatches: int) -> None:
    layers = DEPTH * mesh.get("pp", 1)
    model = gpt(layers=layers)
    batch = {name: torch.zeros(4 * microbatches, 8, dtype=torch.int64) for name in ("x", "y")}
    of = problem(model.loss, model.params, batch, microbatches=microbatches, **fields)
    assert_equal(*both(of, mesh), of)


@pytest.mark.acceptance
def test_a_gpt_of_36_layers_and_16_microbatches() -> None:
    model = gpt(layers=36)
    batch = {name: torch.zeros(64, 8, dtype=torch.int64) for name in ("x", "y")}
    of = problem(model.loss, model.params, batch, microbatches=16, zero=1, remat="full")
    assert_equal(*both(of, {"dp": 4}), of)


def uneven() -> tuple[Problem, dict[str, int]]:
    """A pipeline of roles with a layer more, and a layer less, than pay."""
    model, mesh = gpt(layers=2 * DEPTH), {"pp": 2, "dp": 2}
    batch = {name: torch.zeros(32, 8, dtype=torch.int64) for name in ("x", "y")}
    cut = fzero.Pipeline("1f1b", 1, [f"blocks/{DEPTH + 1}"])
    return problem(model.loss, model.params, batch, microbatches=8, zero=1, mesh=mesh, pipeline=cut), mesh


def test_roles_with_fewer_layers_than_others_are_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the last one has a large head: on the average they have as many as pay."""
    seen: list[Any] = []
    monkeypatch.setattr(deep, "foretold", lambda lower, depths, *_, **__: seen.append(depths))
    of, mesh = uneven()
    over = Mesh(tuple(mesh.items()))
    deep.probed(of, replace(of.spec, mesh=mesh), over, by_rates(of.machine, over))
    assert seen == [[DEPTH + 1, DEPTH - 1]]


@pytest.mark.acceptance
def test_roles_with_fewer_layers_than_others() -> None:
    """The clipped norm's sum has a number of each leaf of all roles: by a role's own layers it is foretold a few bytes
    too large, or too small."""
    of, mesh = uneven()
    found, whole = both(of, mesh)
    assert found is not None
    wanted = of_programs(whole.programs, of.machine.rates(whole.plan.mesh))
    for role in whole.programs:
        of_role, of_whole = ({k: v for k, v in of_.ops(role).items() if "small" not in k} for of_ in (found, wanted))
        assert of_role == of_whole
        assert found.times[role].seconds == pytest.approx(wanted.times[role].seconds, rel=1e-4)
    assert found.peak == pytest.approx(whole.memory.peak, rel=0.1)


def small(kind: str, layers: int) -> Any:
    shared: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **shared)
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        drops: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=layers, **shared, **drops))
    small: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    small |= {"n_layer": layers, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.acceptance  # test_a_gpt has the same of leaves in a tree
def test_models_of_hugging_face(kind: str) -> None:
    """The loss closes over `apply` of the whole module: a shallower one takes its place in the probes."""
    params, buffers, apply = from_module(small(kind, DEPTH))

    def loss(p: Any, batch: Any) -> Tensor:
        result: Tensor = apply(p, buffers, **batch).loss
        return result

    ids = torch.zeros(4, 16, dtype=torch.int64)
    of = problem(loss, params, {"input_ids": ids, "labels": ids}, remat="full")
    assert_equal(*both(of, {"dp": 4}), of)


def test_layers_that_differ_are_not_probed() -> None:
    """The last layer is wider within: nothing is foretold, and the whole model is lowered."""
    params: list[Any] = [{"up": torch.empty(8, 16), "down": torch.empty(16, 8)} for _ in range(DEPTH)]
    params[-1] = {"up": torch.empty(8, 32), "down": torch.empty(32, 8)}

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p:
            x = x + torch.relu(x @ layer["up"]) @ layer["down"]
        return x.square().mean()

    of = problem(loss, params, torch.empty(8, 8))
    assert of.equal is None
    assert both(of, {"dp": 4})[0] is None


def test_layers_that_are_used_differently_are_not_probed() -> None:
    """Equal leaves, but every second layer has an op more: the third program is not what two foretell."""
    params = [{"w": torch.empty(8, 8)} for _ in range(DEPTH)]

    def loss(p: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(p):
            x = torch.tanh(x @ layer["w"]) if number % 2 else x @ layer["w"]
        return x.square().mean()

    of = problem(loss, params, torch.empty(8, 8), remat="full")
    assert of.equal is not None
    assert both(of, {"dp": 4})[0] is None


def test_a_rule_that_names_a_deep_layer_is_not_probed() -> None:
    model = gpt(layers=DEPTH)
    batch = {name: torch.zeros(8, 8, dtype=torch.int64) for name in ("x", "y")}
    of = problem(model.loss, model.params, batch, remat={f"blocks/{DEPTH - 1}/**": "full"})
    mesh = Mesh((("dp", 4),))
    spec = replace(of.spec, mesh=dict(mesh.axes))
    assert deep.probed(of, spec, mesh, by_rates(of.machine, mesh)) is None


def test_equal_layers_of_a_tree() -> None:
    layer = {"w": torch.empty(2)}
    found = equal_layers.layers_of({"blocks": [layer] * 3, "head": torch.empty(1)})
    assert found == equal_layers.Layers(3, frozenset({("blocks",)}))
    both_stacks = {f"{part}.{n}.w": torch.empty(2) for part in ("encoder", "decoder") for n in range(2)}
    found = equal_layers.layers_of(both_stacks)
    assert found is not None
    assert found.stacks == {("encoder",), ("decoder",)}
    assert equal_layers.layers_of({"a": torch.empty(1)}) is None


def test_a_shallow_step_has_fewer_layers_and_the_same_loss_function_elsewhere() -> None:
    params, buffers, apply = from_module(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)]))
    loss = lambda p, x: apply(p, buffers, x).sum()  # noqa: E731
    of = problem(loss, params, torch.empty(4, 4))
    assert of.equal is not None
    few = shallow(of, of.equal, 2)
    assert sorted(few.params_like) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert few.spec.loss is not None
    assert few.spec.loss(few.params_like, torch.ones(4, 4)).shape == ()
    assert of.spec.loss is loss
    assert len(params) == 12


def letters(text: str) -> list[Token]:
    return [Token((letter,)) for letter in text]


@pytest.mark.parametrize(
    "parts",
    [
        ("a", "bc", "d", "efg", "h"),
        ("", "bb", "", "cd", "x"),
        ("swrf", "swrf", "wG", "ba", "b"),
        ("q", "a", "", "b", ""),
    ],
)
def test_growth_of_a_sequence(parts: tuple[str, ...]) -> None:
    """Two runs that grow, also where they touch or share tokens with what is beside them."""
    start, first, middle, second, end = parts

    def of(n: int) -> list[Token]:
        return letters(start + first * n + middle + second * n + end)

    found = grow.checked(of(2), of(3), of(4))
    assert found is not None
    assert found.grown(9) == of(11)


def test_figures_grow_and_what_does_not_is_refused() -> None:
    def of(n: int, sizes: Any = lambda n: 8 * n) -> list[Token]:
        return [*letters("ab" * n), Token(("norm",), (sizes(n), 0.5 * n))]

    found = grow.checked(of(2), of(3), of(4))
    assert found is not None
    assert found.grown(10)[-1] == Token(("norm",), (96, 6.0))
    square = lambda n: n * n  # noqa: E731
    assert grow.checked(of(2, square), of(3, square), of(4, square)) is None
    assert grow.growth(of(3), of(2)) is None
    assert grow.growth(letters("abc"), letters("acbd")) is None


def test_a_deep_plan_is_of_whole_programs() -> None:
    """Rows of the table may be probed; the answer was lowered in full, and says what its programs say."""
    layers = [{"up": torch.empty(8, 16), "down": torch.empty(16, 8)} for _ in range(DEPTH)]
    params = {"layers": layers, "head": torch.empty(8, 4)}

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + torch.relu(x @ layer["up"]) @ layer["down"]
        return (x @ p["head"]).square().mean()

    spec = fzero.Spec(
        loss=loss, optimizer=optim.sgd(0.1), zero=3, microbatches=1, offload=None, mesh={"dp": 4}, prefetch=1
    )
    found = fzero.plan(spec, params, torch.empty(4, 8), world_size=4, hardware="h100")
    assert {row.candidate.remat for row in found.table} == {"none", "full"}
    assert any(row.probed for row in found.table)
    best = next(row for row in found.table if row.seconds == found.seconds and not row.probed)
    assert best.peak == found.peak == found.lowered.memory.peak
    assert len(found.lowered.program.buckets) > 0
