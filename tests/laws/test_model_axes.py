"""A mesh may have any model axes: what holds of `tp` holds of an axis that fzero has never heard of, and of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import differing, run
from torch import Tensor
from tp_models import Model, gpt

import fzero
from fzero import P, groups, optim, tree
from fzero.ir.mesh import Mesh
from fzero.shard.partition import Groups

LOSS, GRADIENT = 1e-6, 2e-6  # of the loss; of the largest of a leaf's gradient


def renamed(rules: Mapping[str, P], *axes: str) -> dict[str, P]:
    """The rules with these axes, the outer one first, where they name `tp`."""
    axis: Any = axes[0] if len(axes) == 1 else axes

    def dim(of: Any) -> Any:
        return groups(axis, of.count) if isinstance(of, Groups) else axis if of == "tp" else of

    return {rule: P(*map(dim, dims)) for rule, dims in rules.items()}


def apart(rules: Mapping[str, P]) -> dict[str, P]:
    """Attention over `tp`, the MLP over `mp`, the embedding's words over one and its width over the other."""
    mlp = {rule: dims for rule, dims in rules.items() if "/up/" in rule or "/down/" in rule}
    return {**rules, **renamed(mlp, "mp"), "wte": P("tp", "mp")}


def gradients(model: Model, mesh: dict[str, int], rules: Mapping[str, P] | None, **given: Any) -> Any:
    """(the loss of a step, the gradient of each leaf, what was lowered)."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(model.loss)(state["params"], batch)
        return {"params": state["params"], "grads": grads}, {"loss": loss}

    start = {"params": model.params, "grads": tree.map(torch.zeros_like, model.params)}
    spec = fzero.Spec(step=step, mesh=mesh, shard=rules, **given)
    found = run(spec, start, model.batch, world=math.prod(mesh.values()), steps=1)
    grads = {path.removeprefix("grads/"): x for path, x in found.final.items() if path.startswith("grads/")}
    return found.metrics[0][0]["loss"], grads, found.lowered


def check(model: Model, found: Any, expected: Any) -> None:
    assert abs(float(found[0]) / float(expected[0]) - 1) <= LOSS
    largest = max(float(x.abs().max()) for x in expected[1].values())
    for path, one in expected[1].items():
        zero = any(tree.matches(rule, path) for rule in model.zero_gradient)
        far, scale = float((found[1][path] - one).abs().max()), float(one.abs().max())
        assert far <= (1e-5 * largest if zero else GRADIENT * scale), f"{path} differs by {far / scale:.1e}"


GRIDS: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "another name": ({"dp": 2, "mp": 2}, lambda rules: renamed(rules, "mp"), {"zero": 3}),
    "four ranks of it": ({"mp": 4}, lambda rules: renamed(rules, "mp"), {}),
    "its tokens": ({"mp": 2}, lambda rules: renamed(rules, "mp"), {"sequence": "mp"}),
    "one dim over both": ({"tp": 2, "mp": 2}, lambda rules: renamed(rules, "tp", "mp"), {}),
    "both, sharded": ({"dp": 2, "tp": 2, "mp": 2}, lambda rules: renamed(rules, "tp", "mp"), {"zero": 3}),
    "tokens of the outer": ({"tp": 2, "mp": 2}, lambda rules: renamed(rules, "tp", "mp"), {"sequence": "tp"}),
    "tokens of the inner": ({"tp": 2, "mp": 2}, lambda rules: renamed(rules, "tp", "mp"), {"sequence": "mp"}),
    "layers apart": ({"tp": 2, "mp": 2}, apart, {}),
    "layers apart, tokens": ({"tp": 2, "mp": 2}, apart, {"sequence": "tp"}),
    "again": ({"tp": 2, "mp": 2}, apart, {"remat": "full", "microbatches": 2}),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.sampled(1)
def test_loss_and_gradients_are_those_of_one_rank(name: str, fused: bool) -> None:
    mesh, rules, given = GRIDS[name]
    model = gpt(fused)
    ones = {axis: n if axis == "dp" else 1 for axis, n in mesh.items()}
    alone = {key: x for key, x in given.items() if key == "microbatches"}
    check(
        model, gradients(model, mesh, rules(model.rules), **given), gradients(model, ones, rules(model.rules), **alone)
    )


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.sampled(1)
def test_no_bit_changes_with_the_stage(zero: int) -> None:
    """AdamW and clipping: norms are summed over the axes on which a leaf lies in parts, and once over all others."""
    model, mesh = gpt(layers=1), {"dp": 2, "tp": 2, "mp": 2}

    def final(mesh: dict[str, int], **given: Any) -> dict[str, Tensor]:
        spec = fzero.Spec(
            loss=model.loss, optimizer=optim.adamw(1e-2), clip_norm=0.5, mesh=mesh, shard=apart(model.rules), **given
        )
        return run(spec, model.params, model.batch, world=math.prod(mesh.values()), steps=2).final

    one = final(mesh, zero=1, bucket_bytes=8192)
    assert not differing(final(mesh, zero=zero, bucket_bytes=8192), one)
    alone = final({"dp": 2, "tp": 1, "mp": 1}, zero=zero)
    for path, x in alone.items():
        if not any(tree.matches(rule, path.partition("/")[2]) for rule in model.zero_gradient):
            assert float((one[path] - x).abs().max()) <= 2e-4 * max(1e-2, float(x.abs().max())), path


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.sampled(1)
def test_beside_a_pipeline(schedule: str) -> None:
    model = gpt(layers=4)
    mesh = {"pp": 2, "tp": 2, "mp": 2}
    given: dict[str, Any] = {"microbatches": 2, "pipeline": schedule}
    found = gradients(model, mesh, apart(model.rules), **given)
    check(model, found, gradients(model, dict.fromkeys(mesh, 1), apart(model.rules), microbatches=2))


def test_a_name_that_no_rule_has_is_refused() -> None:
    model = gpt()
    with pytest.raises(fzero.SpecError, match=r"needed shard= with 'ddp' in a rule.*Did you mean 'dp'"):
        fzero.Spec(loss=model.loss, optimizer=optim.sgd(0.1), mesh={"ddp": 2})
    with pytest.raises(fzero.SpecError, match=r"an axis 'mp' in mesh.*Did you mean 'mpp'"):
        fzero.Spec(loss=model.loss, optimizer=optim.sgd(0.1), mesh={"mpp": 2}, shard={"a": P("mp"), "b": P("mpp")})
    rules = {"wte": P(("mp", "tp"), None)}
    spec = fzero.Spec(loss=model.loss, optimizer=optim.sgd(0.1), mesh={"tp": 2, "mp": 2}, shard=rules)
    with pytest.raises(fzero.SpecError, match=r"the mesh has these axes in the order \['tp', 'mp'\]: name them so"):
        fzero.lower(spec, model.params, model.batch(0, 0), world_size=4)


def small(loss: Any, params: dict[str, Tensor], x: Tensor, mesh: dict[str, int], rules: dict[str, P]) -> None:
    """Loss and gradients over a mesh are those of one rank."""
    model = Model(params, loss, lambda rank, step: x, rules)
    check(model, gradients(model, mesh, rules), gradients(model, dict.fromkeys(mesh, 1), rules))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_a_transfer_of_the_outer_axis_reads_what_has_memory_of_its_own() -> None:
    """Not a view that the inner axis left: it would be made behind the transfer."""

    def tied(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["w"]) @ p["w"].T + p["b"]).square().mean()

    params = {"w": drawn(12, 12), "b": drawn(12)}
    small(tied, params, drawn(4, 12, 12), {"tp": 3, "mp": 2}, {"b": P(("tp", "mp"))})

    def pinned(p: Any, x: Tensor) -> Tensor:
        return fzero.constrain(x @ p["w"], P("mp")).square().mean()

    small(pinned, {"w": drawn(8, 8)}, drawn(4, 8), {"tp": 2, "mp": 2}, {"w": P("tp", "mp")})

    def summed(p: Any, x: Tensor) -> Tensor:
        y = torch.relu(x @ p["up"]) @ p["down"]
        return fzero.constrain(fzero.constrain(y, P(None, "mp")), P()).square().mean()

    rules = {"up": P(None, ("tp", "mp")), "down": P("tp", None)}
    small(summed, {"up": drawn(8, 16), "down": drawn(16, 8)}, drawn(4, 8), {"tp": 2, "mp": 2}, rules)


def test_what_is_refused_says_what_would_do() -> None:
    def mlp(p: Any, x: Tensor) -> Tensor:
        return (torch.relu(x @ p["a"] + p["ab"]) @ p["b"]).square().mean()

    params = {"a": drawn(8, 16), "ab": drawn(16), "b": drawn(16, 8)}
    rules = {"a": P(None, "tp"), "b": P("tp")}
    mesh = {"tp": 2, "mp": 2}

    def lowered(rules: dict[str, P], **given: Any) -> fzero.Lowered:
        spec = fzero.Spec(loss=mlp, optimizer=optim.sgd(0.1), mesh=mesh, shard=rules, **given)
        return fzero.lower(spec, params, drawn(4, 8))

    with pytest.raises(fzero.SpecError, match=r"params/ab lies as S0 over 'mp', and .*test_model_axes.py.*Cut the dim"):
        lowered({**rules, "ab": P("mp")})
    lowered({**rules, "ab": P(("tp", "mp"))})
    text = r"w of shape \(66, 8\).*dim 0 over tp=2 x mp=2 needs 4 equal parts: 66 is no.*the next that is: 68"
    with pytest.raises(fzero.SpecError, match=text):
        P(("tp", "mp")).layout("w", (66, 8), Mesh((("tp", 2), ("mp", 2))))
    for name in ("", "a.b"):
        with pytest.raises(fzero.SpecError, match="is no name of an axis"):
            P(name)
    with pytest.raises(fzero.SpecError, match=r"constrain: P\('dp'\) names 'dp', which cuts no dims"):
        fzero.constrain(drawn(2), P("dp"))


def test_a_view_that_another_axis_made_is_no_head() -> None:
    def tied(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["w"]) @ p["w"].T + p["b"]).square().mean()

    rules = {"w": P(None, "mp"), "b": P("tp")}
    small(tied, {"w": drawn(12, 12), "b": drawn(12)}, drawn(4, 12, 12), {"tp": 3, "mp": 2}, rules)
