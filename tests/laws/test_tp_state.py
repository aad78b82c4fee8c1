"""A state over `tp` in real processes: what goes in and out of it, and onto other meshes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloo, run, values
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import fzero
from fzero import P, groups, interop, tree

WIDTH, HIDDEN, SAMPLES = 12, 24, 8
SHARD = {"fused": P(groups("tp", 3), None), "w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp")}
GRID = {"mesh": {"dp": 2, "tp": 2}, "shard": SHARD}


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "fused": (3 * WIDTH, WIDTH),
        "w1": (HIDDEN, WIDTH),
        "b1": (HIDDEN,),
        "w2": (WIDTH, HIDDEN),
        "b2": (WIDTH,),
    }
    return {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def loss(p: dict[str, Tensor], b: Tensor) -> Tensor:
    q, k, v = (b @ p["fused"].T).chunk(3, -1)
    hidden = F.gelu((q * k + v) @ p["w1"].T + p["b1"])
    return ((hidden @ p["w2"].T + p["b2"]) ** 2).mean()


def batch(place: int, ranks: int, step: int) -> Tensor:
    whole = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.view(ranks, -1, WIDTH)[place]


def spec(**given: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": fzero.optim.adamw(1e-2), **given})


def by_path(state: fzero.State) -> dict[str, Tensor]:
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def of_params(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: x for path, x in leaves.items() if path.startswith("params/")}


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    return [path for path in one | two if not torch.equal(one[path], two[path])]


def around(folder: str, zero: int) -> dict[str, Any]:
    """On 2 x 2: a state trained, saved, loaded, exported and given back by way of DTensors."""
    torch.set_num_threads(1)
    mine = spec(**GRID, zero=zero)
    state = fzero.init(params(), mine)
    mesh, rank = state.runtime.plan.mesh, state.runtime.rank
    assert not differing({f"params/{name}": x for name, x in params().items()}, of_params(by_path(state)))
    for step in range(2):
        state = fzero.step(state, batch(mesh.data_rank(rank), 2, step))
    fzero.save(state, folder)
    whole = by_path(state)
    assert all(torch.equal(leaf.full(), whole[leaf.path]) for leaf in tree.flatten(state.tree)[1])

    tensors = {name: leaf.to_dtensor() for name, leaf in state.params.items()}
    lies = {name: x.placements for name, x in tensors.items()}
    expected = {"w1": Shard(0), "b1": Shard(0), "w2": Shard(1), "b2": Replicate(), "fused": Replicate()}
    assert lies == {name: (Replicate(), expected[name]) for name in lies}
    assert all(torch.equal(x.full_tensor(), whole[f"params/{name}"]) for name, x in tensors.items())
    assert tensors["w2"].to_local().shape == (WIDTH, HIDDEN // 2)
    given = of_params(by_path(fzero.init(tensors, mine)))
    assert not differing(given, of_params(whole))

    interop.export_safetensors(state, f"{folder}/exported")
    again = fzero.load(folder, mine)
    assert not differing(by_path(again), whole)
    turned = fzero.load(folder, spec(mesh={"tp": 4}, shard={**SHARD, "w1": P(None, "tp")}, zero=zero))
    assert not differing(by_path(turned), whole)
    state = fzero.load(folder, like=state)
    assert not differing(by_path(state), whole)
    seen = float(fzero.evaluate(state, batch(mesh.data_rank(rank), 2, 7), loss))
    again, state = (fzero.step(x, batch(mesh.data_rank(rank), 2, 2)) for x in (again, state))
    assert not differing(by_path(again), by_path(state))
    shown = {name: leaf.placement.partition(", ")[0] for name, leaf in state.params.items()}
    return {
        "whole": whole,
        "seen": seen,
        "shown": shown,
        "held": state.held_bytes,
        "loss": float(state.metrics["loss"]),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_over_tp(zero: int, tmp_path: Path) -> None:
    ranks = values(gloo(4, around, str(tmp_path), zero))
    plain = run(spec(**GRID, zero=zero), params(), lambda r, s: batch(r, 2, s), world=4, steps=2)
    for rank in ranks:
        assert not differing(rank["whole"], plain.final)
        assert (rank["seen"], rank["loss"]) == (ranks[0]["seen"], ranks[0]["loss"])
    shown = ranks[0]["shown"]
    assert {name: shown[name] for name in ("fused", "w1", "w2")} == {
        "fused": "S0/3 over tp", "w1": "S0 over tp", "w2": "S1 over tp"
    }  # fmt: skip
    whole = sum(x.nbytes for x in of_params(plain.final).values())
    assert ranks[0]["held"]["param"] < 0.8 * whole  # with padding

    saved = fzero.checkpoint.manifest(tmp_path)
    written = sum((piece.stop - piece.start) * leaf.dtype.itemsize for leaf in saved.leaves for piece in leaf.pieces)
    assert written == sum(leaf.nbytes for leaf in plain.final.values())
    there = fzero.load(tmp_path, spec())  # on one rank
    assert not differing(by_path(there), plain.final)
    fzero.step(there, batch(0, 1, 2))
    exported = load_file(next((tmp_path / "exported").glob("*.safetensors")))
    assert not differing({f"params/{name}": x for name, x in exported.items()}, of_params(plain.final))
    interop.export_safetensors(tmp_path, tmp_path / "from files", part="params")
    stored = load_file(next((tmp_path / "from files").glob("*.safetensors")))
    assert not differing(stored, exported)


def wrong(folder: str) -> list[str]:
    """What the ranks say where one was given other params, and where one asks for another part of a leaf."""
    torch.set_num_threads(1)
    said, rank = [], int(os.environ["RANK"])
    given = params()
    given["w2"][0, -1] += float(rank == 3)
    try:
        fzero.init(given, spec(**GRID))
    except fzero.FzeroError as error:
        said.append(f"{type(error).__name__}: {error}")
    state = fzero.init(params(), spec(**GRID))
    fzero.save(state, folder)
    if rank == 0:
        for shard in Path(folder).glob("step-*/shard-00002*"):
            shard.unlink()
    torch.distributed.barrier()
    try:
        fzero.load(folder, spec(**GRID))
    except fzero.FzeroError as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        state.params["w1"].full() if rank == 1 else state.params["w1"].to_dtensor()
    except fzero.FzeroError as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    for other, damaged, asked in values(gloo(4, wrong, str(tmp_path))):
        assert other.startswith("DisagreementError: "), other
        assert "the values of params" in other
        assert damaged.startswith("CorruptError: "), damaged
        assert "shard-00002" in damaged
        assert asked.startswith("DisagreementError: "), asked
        assert "the part by dims of 'params/w1'" in asked


BOTH = {
    "fused": P(groups(("tp", "mp"), 3), None),
    "w1": P(("tp", "mp"), None),
    "b1": P(("tp", "mp")),
    "w2": P("mp", "tp"),
}


def over_both(folder: str) -> dict[str, Tensor]:
    """On 2 x 2 of two axes that cut dims: a state trained, saved, given back by DTensors, loaded onto other meshes."""
    torch.set_num_threads(1)
    mine = spec(mesh={"tp": 2, "mp": 2}, shard=BOTH)
    state = fzero.init(params(), mine)
    assert not differing({f"params/{name}": x for name, x in params().items()}, of_params(by_path(state)))
    for step in range(2):
        state = fzero.step(state, batch(0, 1, step))
    fzero.save(state, folder)
    whole = by_path(state)

    tensors = {name: leaf.to_dtensor() for name, leaf in state.params.items()}
    assert tensors["w1"].placements == (Shard(0), Shard(0), Replicate())
    assert tensors["w2"].placements == (Shard(1), Shard(0), Replicate())
    assert all(torch.equal(x.full_tensor(), whole[f"params/{name}"]) for name, x in tensors.items())
    assert torch.equal(state.params["w1"].local, tensors["w1"].to_local())
    assert not differing(of_params(by_path(fzero.init(tensors, mine))), of_params(whole))
    other = {**SHARD, "w1": P(None, "tp")}
    for mesh, rules in (
        ({"tp": 4}, other),
        ({"dp": 2, "mp": 2}, {"w1": P(None, "mp"), "w2": P("mp")}),
        ({"dp": 4}, None),
    ):
        turned = fzero.load(folder, spec(mesh=mesh, shard=rules, zero=3))
        assert not differing(by_path(turned), whole)
        fzero.save(turned, f"{folder}/{len(mesh)}{next(iter(mesh))}")
        back = fzero.load(f"{folder}/{len(mesh)}{next(iter(mesh))}", mine)
        assert not differing(by_path(back), whole)
    return whole


@pytest.mark.acceptance
def test_a_state_over_two_axes(tmp_path: Path) -> None:
    plain = run(spec(mesh={"tp": 2, "mp": 2}, shard=BOTH), params(), lambda r, s: batch(0, 1, s), world=4, steps=2)
    for whole in values(gloo(4, over_both, str(tmp_path))):
        assert not differing(whole, plain.final)
    saved = fzero.checkpoint.manifest(tmp_path)
    assert {leaf.path: len(leaf.cuts) for leaf in saved.leaves}["params/fused"] == 2
    written = sum((piece.stop - piece.start) * leaf.dtype.itemsize for leaf in saved.leaves for piece in leaf.pieces)
    assert written == sum(leaf.nbytes for leaf in plain.final.values())
    assert not differing(by_path(fzero.load(tmp_path, spec())), plain.final)
