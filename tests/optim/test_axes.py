"""Every optimizer over every axis: the numbers of one process, or a refusal before anything is allocated.

`TABLE` is the table of docs/optimizers.md. Leaves are float64, so that an update by signs is the same update.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run
from torch import Tensor

import fzero
from fzero import P, optim, tree
from fzero.comm import heartbeat
from fzero.compile import update_roles

WIDTH, ROWS = 64, 4
RULES = {"**/up": P(None, "tp"), "**/b": P("tp"), "**/down": P("tp")}
ADAMW = optim.adamw(1e-2)
OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam, adamw": ADAMW,
    'adamw(moments="bfloat16")': optim.adamw(1e-2, moments="bfloat16"),
    "adamw8bit": optim.adamw8bit(1e-2),
    "lion": optim.lion(1e-3),
    "rmsprop": optim.rmsprop(1e-3, centered=True, momentum=0.9),
    "adagrad": optim.adagrad(1e-2),
    "adadelta": optim.adadelta(),
    "nadam": optim.nadam(1e-2),
    "radam": optim.radam(1e-2),
    "lamb": optim.lamb(1e-2, weight_decay=0.01),
    "lars": optim.lars(0.1, weight_decay=1e-4),
    "adafactor": optim.adafactor(1e-2, weight_decay=0.01),
    "muon, its matrices": optim.muon(1e-2, others=ADAMW),
    "ema, ema_params": optim.ema_params(optim.chain(optim.ema(0.9), optim.scale(-0.1)), 0.9),
    "clip_by_global_norm": optim.chain(optim.clip_by_global_norm(1e-2), optim.adafactor(1e-2)),
    "freeze_nu": optim.freeze_nu(1e-2, 1)["frozen"],
    "apply_if_finite": optim.apply_if_finite(ADAMW),
    "delayed": optim.delayed(ADAMW),
}
AXES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}, "zero": 3},
    "pp": {"mesh": {"pp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}},
    "offload": {"mesh": {"dp": 2}, "zero": 2, "offload": "optimizer+params"},
}
TABLE = {name: dict.fromkeys(AXES, "yes") for name in OPTIMIZERS}
TABLE["onebit_adam"] = {axis: "yes" if axis in ("dp", "offload") else "no" for axis in AXES}  # tests/optim/test_onebit
TABLE["adamw8bit"] |= {"tp": "no", "pp x tp": "no"}
TABLE["muon, its matrices"] |= {"tp": "no", "pp x tp": "no"}
WHY = {
    "adamw8bit": "moments in blocks of 64 elements, which a part would cut",
    "muon, its matrices": "is stepped as a whole matrix",
}
ROUNDED = ('adamw(moments="bfloat16")', "adamw8bit")  # draws and blocks follow the layout of leaves


def params(width: int = WIDTH) -> Any:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.1

    def block() -> Any:
        return {"up": normal(width, 2 * width), "b": normal(2 * width), "down": normal(2 * width, width),
                "square": normal(width, width), "c": normal(width)}  # fmt: skip

    return {"embed": normal(width, width), "blocks": [block() for _ in range(2)]}


def loss(p: Any, x: Tensor) -> Tensor:
    h = x @ p["embed"]
    for block in p["blocks"]:
        h = h + torch.tanh(h @ block["up"] + block["b"]) @ block["down"] @ block["square"] + block["c"]
    return (h - 1).square().mean()


def batch(rank: int, step: int) -> Tensor:
    """The same on every rank of dp, so that one process has the same mean."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def spec(name: str, **given: Any) -> fzero.Spec:
    shard = RULES if "tp" in given.get("mesh", {}) else None
    return fzero.Spec(loss=loss, optimizer=OPTIMIZERS[name], shard=shard, microbatches=2, transfers="p2p", **given)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(1)
def test_the_numbers_of_one_process(name: str, axis: str) -> None:
    given = AXES[axis]
    if TABLE[name][axis] == "no":
        with pytest.raises(fzero.SpecError, match=WHY[name]):
            fzero.lower(spec(name, **given), params(), batch(0, 0))
        return
    found = run(spec(name, **given), params(), batch, world=math.prod(given["mesh"].values()), steps=3)
    one = run(spec(name, mesh={"dp": 1}), params(), batch, world=1, steps=3)
    close = {"rtol": 0, "atol": 2e-3} if name in ROUNDED else {"rtol": 1e-6, "atol": 1e-8}
    for path in one.paths:
        if name not in ROUNDED or path.startswith("params/"):
            torch.testing.assert_close(found.final[path], one.final[path], **close, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("axis", ["pp", "tp", "pp x tp"])
@pytest.mark.sampled(1)
def test_adafactor(axis: str) -> None:
    test_the_numbers_of_one_process("adafactor", axis)


def test_a_moment_of_another_shape_lies_with_its_leaf() -> None:
    """On the role that keeps the leaf, cut in the dim that it shares with it: of a square matrix too."""
    rules = {**RULES, "**/square": P("tp")}
    given = {"mesh": {"pp": 2, "tp": 2}, "optimizer": OPTIMIZERS["adafactor"], "shard": rules, "microbatches": 2}
    plan = fzero.lower(fzero.Spec(loss=loss, **given), params(), batch(0, 0)).plan
    leaf = {leaf.path: leaf for leaf in plan.leaves}
    for number in range(2):
        for name, row, col in (("up", "R", "S0"), ("down", "S0", "R"), ("square", "S0", "R")):
            path = f"blocks/{number}/{name}"
            own = [leaf[f"{entry}/{path}"] for entry in ("params", "opt_state/row", "opt_state/col")]
            assert {plan.role_of(plan.buffers[each.buffer]) for each in own} == {number}
            assert [str(each.layout.on("tp")) for each in own[1:]] == [row, col]


def grams(rate: float = 0.1) -> optim.GradientTransformation:
    """Shampoo without its roots: of each leaf a list of one Gram matrix for each dim, which scale its gradient."""

    def init(params: Any) -> Any:
        return tree.map(lambda p: [torch.eye(size, dtype=p.dtype) for size in p.shape], params)

    def own(grad: Tensor, kept: list[Tensor]) -> list[Tensor]:
        rows = (grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad[:, None] for dim in range(grad.dim()))
        return [gram + row @ row.T for gram, row in zip(kept, rows, strict=True)]

    def update(grads: Any, state: Any, params: Any) -> Any:
        new = {**state, "blocks": [{name: own(g, kept[name]) for name, g in block.items()}
                                   for block, kept in zip(grads["blocks"], state["blocks"], strict=True)],
               "embed": own(grads["embed"], state["embed"])}  # fmt: skip
        blocks = [{name: -rate * (kept[name][0] @ g) for name, g in block.items()}
                  for block, kept in zip(grads["blocks"], new["blocks"], strict=True)]  # fmt: skip
        return {"embed": -rate * (new["embed"][0] @ grads["embed"]), "blocks": blocks}, new

    return optim.GradientTransformation(init, update)


def test_several_moments_of_one_leaf_lie_with_it() -> None:
    """Their paths go on behind the leaf's. They lay on the last role, and each role's update was refused."""
    of = {"loss": loss, "optimizer": grams(), "microbatches": 2}
    found = run(fzero.Spec(**of, mesh={"pp": 2}), params(), batch, world=2, steps=2)
    one = run(fzero.Spec(**of), params(), batch, world=1, steps=2)
    for path in one.paths:
        torch.testing.assert_close(found.final[path], one.final[path], rtol=1e-9, atol=1e-12)
    plan = found.lowered.plan
    held = {leaf.path: plan.role_of(plan.buffers[leaf.buffer]) for leaf in plan.leaves}
    assert [held[f"opt_state/blocks/{n}/up/{dim}"] for n in range(2) for dim in range(2)] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", WHY)
def test_what_cannot_is_refused_before_anything_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `init` as by `lower`."""

    def allocated(*args: Any, **given: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr("fzero.session.world.storage.allocate", allocated)
    monkeypatch.setattr(heartbeat.ALONE, "label", heartbeat.ALONE.label)  # of the mesh that is made up here
    for room in ("fzero.session.world", "fzero.api"):
        monkeypatch.setattr(f"{room}.mesh_of", lambda spec, size: fzero.ir.mesh.Mesh.of(spec.mesh | {"dp": 1}))
    with pytest.raises(fzero.SpecError, match=WHY[name]):
        fzero.init(params(), spec(name, mesh={"tp": 2}))


def of_both_blocks(grads: Any, state: Any, params: Any) -> Any:
    first, second = grads["blocks"]
    mean = (first["square"] + second["square"]) / 2
    blocks = [{**block, "square": block["square"] - mean} for block in grads["blocks"]]
    return tree.map(lambda g: -0.1 * g, {**grads, "blocks": blocks}), state


def by_the_norm(grads: Any, state: Any, params: Any) -> Any:
    norm = sum(g.square().sum() for g in tree.flatten(grads)[1]).sqrt()
    return tree.map(lambda g: -0.1 * g / norm, grads), state


@pytest.mark.parametrize("where", ["alone", "in a chain"])
def test_an_optimizer_of_ones_own_that_needs_several_roles_is_refused_by_init(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a transport is opened and anything is allocated, and before there is a batch."""

    def opened(*args: Any, **given: Any) -> Any:
        raise MemoryError("opened")

    monkeypatch.setattr("fzero.session.world.transport_for", opened)
    monkeypatch.setattr(heartbeat.ALONE, "label", heartbeat.ALONE.label)  # of the mesh that is made up here
    for room in ("fzero.session.world", "fzero.api"):
        monkeypatch.setattr(f"{room}.mesh_of", lambda spec, size: fzero.ir.mesh.Mesh.of(spec.mesh | {"dp": 1}))

    def start(update: Any) -> None:
        own = optim.GradientTransformation(lambda params: (), update)
        own = own if where == "alone" else optim.chain(optim.clip_by_global_norm(1.0), own)
        fzero.init(params(), fzero.Spec(loss=loss, optimizer=own, mesh={"pp": 2}, microbatches=2))

    message = (
        r"^`outer .*test_axes.py:\d+.*` needs leaves of several roles of the pipeline for one value: "
        r"blocks/0/square of role 0 and blocks/1/square of role 1\. Only sums over leaves, "
        r"such as .* for a norm, .* or leave the axis `pp` out$"
    )
    with pytest.raises(fzero.SpecError, match=message):
        start(of_both_blocks)
    with pytest.raises(MemoryError):
        start(by_the_norm)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_fzero_are_known(name: str) -> None:
    """They are not lowered for it by `init`, alone or made of one another; one with a function of the user's is."""
    assert update_roles._is_ours(OPTIMIZERS[name])
    own = optim.GradientTransformation(lambda params: (), by_the_norm)
    assert not update_roles._is_ours(optim.chain(OPTIMIZERS[name], own))


def test_the_documents_show_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    head, rows = "| optimizer | dp, every stage | pp | tp | pp x tp | offload |", {}
    assert head in page
    for line in page.split(head)[1].split("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        rows[cells[0].replace("`", "")] = [re.match(r"yes|no", cell)[0] for cell in cells[1:]]  # type: ignore[index]
    assert rows == {name: list(by_axis.values()) for name, by_axis in TABLE.items()}
