"""The first state from a source: each rank reads its part, whatever the mesh."""

from __future__ import annotations

import pytest
import torch
from helpers import same_bits, start
from loading import noise
from torch import Tensor

import fzero
from fzero import P, groups
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.state import source as sources
from fzero.state import storage
from fzero.state.first_state import fingerprint
from fzero.state.source import Entry, Source

SHARD = {"rows": P("tp", None), "columns": P(None, "tp"), "fused": P(groups("tp", 3), None), "bias": P("tp")}


class Tensors(Source):
    """Leaves in memory, which counts what is read of each."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held, self.read_elements = held, dict.fromkeys(held, 0)

    @property
    def leaves(self) -> dict[str, Entry]:
        return {path: Entry(tuple(x.shape), x.dtype) for path, x in self.held.items()}

    def read(self, path: str, start: int, stop: int) -> Tensor:
        self.read_elements[path] += stop - start
        return self.held[path].reshape(-1)[start:stop].clone()


def params() -> dict[str, Tensor]:
    shapes = {"rows": (16, 9), "columns": (10, 64), "fused": (24, 5), "bias": (12,), "plain": (7, 3)}
    return {name: noise(torch.zeros(shape), i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 4}, {"dp": 3, "tp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("chunk", [64, 4 << 20])
def test_each_rank_reads_its_part_of_a_source(
    mesh: dict[str, int], zero: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(sources, "STAGED_BYTES", 4 * chunk)
    spec = fzero.Spec(loss=lambda p, b: b.sum(), optimizer=fzero.optim.adamw(1e-3), mesh=mesh, shard=SHARD, zero=zero)
    held = params()
    paths, leaves = start(spec, held)
    for rank in range(mesh_of(spec).world_size):
        source = Tensors(held)
        recipe = recipe_for(spec, source, None, torch.device("cpu"))
        plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh_of(spec))
        memory = storage.allocate(plan, storage.block_of("cpu"), rank)
        recipe.place(plan, rank, memory)
        wanted = storage.shards(plan, leaves, rank)
        assert recipe.paths == paths
        assert all(same_bits(memory[name], tensor) for name, tensor in wanted.items())
        own = {leaf.path.removeprefix("params/"): leaf for leaf in plan.leaves if leaf.path.startswith("params/")}
        for name in ("rows", "bias"):  # of a part that lies together no more than that is read
            assert source.read_elements[name] == len(storage.flat(plan, memory, own[name], rank)[0])


def test_ranks_with_other_tensors_have_other_digests() -> None:
    """Also of a leaf over `tp`, of which each rank keeps another part."""
    spec = fzero.Spec(loss=lambda p, b: b.sum(), optimizer=fzero.optim.sgd(0.1), mesh={"dp": 2, "tp": 2}, shard=SHARD)
    other = params()
    other["columns"][0, 0] = 1.5

    seen: list[dict[str, str]] = []

    def digests(given: dict[str, Tensor], rank: int) -> tuple[str, str]:
        recipe = recipe_for(spec, given, None, torch.device("cpu"))
        plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh_of(spec))
        placed = recipe.place(plan, rank, storage.allocate(plan, storage.block_of("cpu"), rank))
        seen.append(recipe.seen)
        return placed

    assert len({digests(params(), rank) for rank in range(4)}) == 1
    assert digests(other, 0) != digests(params(), 1)
    assert {name for name, digest in seen[-1].items() if seen[-2][name] != digest} == {
        "the digest of state['params/columns']"
    }


def test_two_leaves_of_one_path_are_refused_by_it() -> None:
    """It named a leaf of the optimizer's, and the same one twice."""
    spec = fzero.Spec(loss=lambda p, b: p["a/b"].sum(), optimizer=fzero.optim.adamw(0.1))
    given = {"a": {"b": torch.ones(2)}, "a/b": torch.ones(2)}
    with pytest.raises(fzero.TreeError, match=r"two leaves are named params\['a/b'\]: a key that holds a / .*Rename"):
        fzero.init(given, spec)


def test_parameters_with_hooks_on_their_gradients_are_refused() -> None:
    """No step called them: a mask of gradients that way changed nothing."""
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    w = torch.nn.Parameter(torch.ones(2))
    hook = w.register_hook(lambda grad: 0 * grad)
    with pytest.raises(fzero.TreeError, match=r"params\['w'\] has hooks on its gradient.*handle.remove\(\)"):
        fzero.init({"w": w}, spec)
    hook.remove()
    assert fzero.init({"w": w}, spec).step == 0


@pytest.mark.parametrize(
    "leaf",
    [torch.arange(10.0)[::5], torch.arange(10.0)[::5][:1], torch.tensor(1.5).expand(4), torch.tensor(1.5).expand(0)],
    ids=["strided", "one", "expanded", "empty"],
)
def test_a_fingerprint_is_of_the_values(leaf: Tensor) -> None:
    """`init` on several ranks ended in a RuntimeError of torch where a leaf was a column, or was expanded."""
    assert fingerprint(leaf) == fingerprint(torch.tensor(leaf.tolist()))
