"""Builder and judge have no rule in common: a rule of the builder's that is wrong makes a program that is refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import cases
import pytest
import torch
from torch import fx

import fzero
from fzero import P
from fzero.ir import liveness
from fzero.lowering.emit import Emitter
from fzero.lowering.lower_region import RegionBuilder
from fzero.plan.whole_leaves import is_whole


def test_a_builder_that_knows_no_place_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then added over microbatches before it is reduced, and not reduced for each: another order of sums."""
    right = RegionBuilder._places

    def without_the_last(self: RegionBuilder, inputs: Any) -> dict[int, tuple[str, int]]:
        places = right(self, inputs)
        return {i: place for i, place in places.items() if i < max(places)}

    options = {"zero": 1, "microbatches": 2, "reduce": "each"}
    fzero.verify(cases.naive(**options))
    monkeypatch.setattr(RegionBuilder, "_places", without_the_last)
    with pytest.raises(fzero.VerifyError, match="computes something else than what was captured"):
        fzero.verify(cases.naive(**options))


def test_a_builder_that_takes_one_part_of_the_batch_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge knows what a step is given by the order of the program's buffers, as a run does."""
    right = Emitter.new

    def reordered(self: Emitter, name: str, like: torch.Tensor, kind: str) -> Any:
        ref = right(self, name, like, kind)
        if kind == "batch":
            own = self.buffers.pop(ref.name)
            self.buffers = {ref.name: own, **self.buffers}  # the later ones first
        return ref

    def loss(p: Any, batch: Any) -> torch.Tensor:
        return ((batch["x"] @ p["w"] - batch["y"]) ** 2).mean()

    spec = cases.spec(loss=loss, zero=1)
    params = {"w": torch.empty(8, 8, device="meta")}
    given = {name: torch.empty(4, 8, device="meta") for name in ("x", "y")}
    fzero.verify(fzero.lower(spec, params, given, world_size=2).naive)
    monkeypatch.setattr(Emitter, "new", reordered)
    with pytest.raises(fzero.VerifyError, match="computes something else than what was captured"):
        fzero.lower(spec, params, given, world_size=2)


def test_a_builder_that_takes_a_leaf_on_two_ranks_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"a": torch.empty(24, 24, device="meta"), "b": torch.empty(40, 40, device="meta")}

    def loss(p: Any, x: Any) -> torch.Tensor:
        return (x @ p["a"]).square().mean() + p["b"].square().mean()

    spec = cases.spec(loss=loss, optimizer=fzero.optim.muon(0.1), zero=3)
    fzero.lower(spec, params, torch.empty(4, 24), world_size=3)
    monkeypatch.setattr(is_whole, "__code__", (lambda bucket, index, world_size: True).__code__)
    with pytest.raises(fzero.VerifyError, match="of which a rank boundary leaves each rank a part"):
        fzero.lower(spec, params, torch.empty(4, 24), world_size=3)


def test_an_arena_by_lives_that_end_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes know of lives is wrong: values share memory that are alive at one moment."""
    right = liveness.intervals

    def shorter(*args: Any) -> dict[str, tuple[int, int]]:
        return {name: (first, max(first, last - 2)) for name, (first, last) in right(*args).items()}

    fzero.lower(cases.spec(zero=3), cases.layers(), cases.batch(), world_size=2)
    monkeypatch.setattr(import_module("fzero.passes.assign_memory"), "intervals", shorter)
    with pytest.raises(fzero.VerifyError, match="share memory of the arena while both are alive"):
        fzero.lower(cases.spec(zero=3), cases.layers(), cases.batch(), world_size=2)


def test_a_settle_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes know of memory that other ranks may read is wrong: nothing is settled before it is written."""
    monkeypatch.setattr(import_module("fzero.passes.settle"), "endangered", lambda *_: [])
    with pytest.raises(fzero.VerifyError, match=r"\[settled\] .* is settled"):
        fzero.lower(cases.spec(zero=3, transfers="shared"), cases.layers(), cases.batch(), world_size=2)


def test_a_local_graph_is_proven_before_it_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    from fzero.lowering import localise

    right = localise.propagate

    def worse(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        made = right(gm, *args, **kwargs)
        for node in made.gm.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sigmoid.default
        return made

    monkeypatch.setattr(localise, "propagate", worse)
    spec = cases.spec(mesh={"tp": 2}, shard={"layers/*/w": P(None, "tp"), "layers/*/b": P("tp")})
    with pytest.raises(fzero.VerifyError, match=r"^\[sharding\] ") as caught:
        fzero.lower(spec, cases.layers(), cases.batch(4), world_size=2)
    assert "fault of fzero" in str(caught.value)
