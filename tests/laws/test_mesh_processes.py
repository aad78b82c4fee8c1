"""A grid of real processes: the bits of the interpreter, which are those of no pipeline (`test_pipeline`)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from helpers import gloo, run, values
from safetensors.torch import load_file
from torch import Tensor

import fzero
from fzero import P, interop, optim, tree

VOCAB, SEQUENCE, STEPS = 64, 32, 3
MODELS = {"gpt": cases.gpt(VOCAB, 64, 4, 2), "tied": cases.tied(VOCAB, 64, 4)}  # messages of 8 kB: read in place
SMALL_INIT, SMALL_LOSS = cases.tied(VOCAB, 64, 2)  # as large messages: every rank lowers the step again


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, SEQUENCE, VOCAB, rank + 10 * step)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": SMALL_LOSS, "optimizer": optim.adamw(1e-2), "microbatches": 4, "reduce": "end", "clip_norm": 0.5}
    return fzero.Spec(**{**made, **given})


def small(**given: Any) -> fzero.Spec:
    return spec(**{"microbatches": 2, **given})


def trained(model: str, given: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """(whole leaves by path, losses, the bytes held) of a rank of a grid."""
    torch.set_num_threads(1)
    init, loss = MODELS[model]
    state = fzero.init(init, spec(loss=loss, **given), key=fzero.random.key(0))
    mesh = state.runtime.plan.mesh
    losses = []
    for number in range(STEPS):
        state = fzero.step(state, tokens(mesh.data_rank(state.runtime.rank), number))
        losses.append(float(state.metrics["loss"]))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True)), losses, state.held_bytes


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"mesh": {"pp": 2}, "pipeline": "1f1b"}),
    "zb-h1 over messages": (2, {"mesh": {"pp": 2}, "pipeline": "zb-h1", "transfers": "p2p"}),
    "interleaved, zero=3": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": "interleaved", "zero": 3}),
    "zb-v, zero=2, messages": (
        4,
        {"mesh": {"pp": 2, "dp": -1}, "pipeline": "zb-v", "zero": 2, "transfers": "p2p", "precision": "bf16"},
    ),
    "hsdp": (4, {"mesh": {"dp_out": 2, "dp": 2}, "zero": "hsdp", "clip_norm": None}),
    "hpz over messages": (4, {"mesh": {"dp_out": 2, "dp": 2}, "zero": "hpz", "transfers": "p2p", "reduce": "each"}),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.sampled(1)
def test_processes_have_the_bits_of_no_pipeline(name: str, whole: bool) -> None:
    world, given = GRIDS[name]
    model = "gpt" if whole else "tied"
    ranks = values(gloo(world, trained, model, given))
    hierarchy = "dp_out" in given["mesh"]
    data = world if hierarchy else world // 2
    plain = {key: value for key, value in given.items() if key not in ("mesh", "pipeline")}
    plain |= {"mesh": given["mesh"], "zero": 3} if hierarchy else {}
    init, loss = MODELS[model]
    params = init(fzero.random.key(0))
    expected = run(spec(loss=loss, **plain), params, tokens, world=data, steps=STEPS, key=fzero.random.key(0))
    for leaves, losses, _ in ranks:
        assert losses == expected.losses()
        differing = [path for path, leaf in expected.final.items() if not torch.equal(leaves[path], leaf)]
        assert differing == []


ALONE: dict[int, list[dict[str, Any]]] = {  # by the number of ranks, grids with data axes of one rank
    2: [{"mesh": {"dp_out": 2}}, {"mesh": {"dp_out": 2, "dp": 1}, "zero": 3},
        {"mesh": {"dp_out": 1, "dp": 2}, "zero": "hsdp"}],
    4: [{"mesh": {"dp_out": 2, "tp": 2}, "shard": {"**/w": P(None, "tp"), "**/b": P("tp")}}],
}  # fmt: skip


def stepped(grids: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Of each grid, the loss of a step and the leaves at the end. `fzero.lower` cuts the buckets of `fzero.init`."""
    torch.set_num_threads(1)
    found = []
    for given in grids:
        one = small(microbatches=1, **given)
        state = fzero.init(SMALL_INIT, one, key=fzero.random.key(0))
        plan = state.runtime.plan
        if not state.runtime.rank:
            shared = replace(one, transfers="shared")  # as these ranks have it, which `lower` cannot know
            ahead = fzero.lower(shared, SMALL_INIT(fzero.random.key(0)), tokens(0, 0), world_size=plan.world_size)
            assert (ahead.plan.bucket_bytes, ahead.plan.buckets) == (plan.bucket_bytes, plan.buckets)
        state = fzero.step(state, tokens(state.runtime.plan.mesh.data_rank(state.runtime.rank), 0))
        paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
        found.append(([float(state.metrics["loss"])], dict(zip(paths, leaves, strict=True))))
    return found


@pytest.mark.parametrize("world", ALONE)
@pytest.mark.sampled(1)
def test_a_data_axis_of_one_rank(world: int) -> None:
    """Ranks open no group for it, and no transfer names it."""
    ranks = values(gloo(world, stepped, ALONE[world]))
    for number, given in enumerate(ALONE[world]):
        one = small(microbatches=1, **given)
        expected = run(one, SMALL_INIT(fzero.random.key(0)), tokens, world=world, steps=1, key=fzero.random.key(0))
        for losses, leaves in (rank[number] for rank in ranks):
            assert losses == expected.losses()
            assert [path for path, leaf in expected.final.items() if not torch.equal(leaves[path], leaf)] == []


def turned(transfers: str) -> dict[str, Tensor]:
    """The leaves after two steps of layers whose border is not contiguous."""
    torch.set_num_threads(1)
    init, loss = cases.turned(2)
    given = {"loss": loss, "mesh": {"pp": 2}, "microbatches": 2, "transfers": transfers}
    state = fzero.init(init, spec(**given), key=fzero.random.key(0))
    for number in range(2):
        state = fzero.step(state, cases.turned_rows(0, number))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def turned_both() -> list[dict[str, Tensor]]:
    return [turned("shared"), turned("p2p")]


def test_a_border_whose_dims_lie_in_another_order() -> None:
    """Over shared memory and over messages."""
    init, loss = cases.turned(2)
    one = spec(loss=loss, microbatches=2)
    expected = run(one, init(fzero.random.key(0)), cases.turned_rows, world=1, steps=2, key=fzero.random.key(0)).final
    for leaves in (found for rank in values(gloo(2, turned_both)) for found in rank):
        assert [path for path, leaf in expected.items() if not torch.equal(leaves[path], leaf)] == []


# --- what users do with a state ---------------------------------------------------------------------------------------


def around(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """On 2 x 2: a checkpoint of a step, evaluation, export, profile; the state loaded back; what went in and out."""
    torch.set_num_threads(1)
    mine = small(**given)
    state = fzero.init(SMALL_INIT, mine, key=fzero.random.key(0))
    place = state.runtime.plan.mesh.data_rank(state.runtime.rank)
    state = fzero.step(state, tokens(place, 0))
    fzero.save(state, folder)
    found = fzero.evaluate(state, tokens(place, 5), SMALL_LOSS)
    interop.export_safetensors(state, f"{folder}/exported")
    state = fzero.profile(state, tokens(place, 1), f"{folder}/profile")
    loaded = fzero.load(folder, mine, like=SMALL_INIT(fzero.random.key(0)))
    again = fzero.step(loaded, tokens(place, 1))
    first, second = (tree.flatten(fzero.unshard(x.tree))[1] for x in (state, again))
    return {
        "evaluated": float(found),
        "equal": all(map(torch.equal, first, second)),
        "held": state.held_bytes,
        "local": {path: leaf.local.numel() for path, leaf in zip(*tree.flatten(again.params)[:2], strict=True)},
        "final": dict(zip(tree.flatten(again.tree)[0], second, strict=True)),
    }


def test_a_state_on_a_grid(tmp_path: Path) -> None:
    """Checkpoint, evaluation, export and profile of a pipeline with ZeRO 3, and the same without."""
    ranks = values(gloo(4, around, str(tmp_path), {"mesh": {"pp": 2, "dp": 2}, "pipeline": "1f1b", "zero": 3}))
    plain = run(small(zero=3), SMALL_INIT(fzero.random.key(0)), tokens, world=2, steps=2, key=fzero.random.key(0))
    for rank in ranks:
        assert rank["equal"]
        assert rank["evaluated"] == ranks[0]["evaluated"]
        assert all(torch.equal(rank["final"][path], leaf) for path, leaf in plain.final.items())
    for path in ranks[0]["local"]:
        assert sum(rank["local"][path] for rank in ranks) == plain.final[f"params/{path}"].numel(), path
    held = [rank["held"]["param"] for rank in ranks]
    assert max(held) < sum(leaf.nbytes for path, leaf in plain.final.items() if path.startswith("params")) / 2
    pages = sorted(path.name for path in (tmp_path / "profile").glob("*.html"))
    assert pages == [f"rank{rank}.html" for rank in range(4)]
    page = (tmp_path / "profile" / "rank2.html").read_text()
    assert "rank 2 (pp=1 dp=0)" in page
    assert "waited for other roles" in page
    for name, leaf in load_file(next((tmp_path / "exported").glob("*.safetensors"))).items():
        assert leaf.shape == plain.final[f"params/{name.replace('.', '/')}"].shape
    # on another mesh: one process, no pipeline
    there = fzero.load(tmp_path, small(zero=1))
    stepped = fzero.step(there, tokens(0, 1))
    assert stepped.step == 2


@pytest.mark.acceptance
def test_a_state_on_two_data_axes(tmp_path: Path) -> None:
    """The same of HSDP: what replicas hold is written once, and loads on any other mesh."""
    given = {"mesh": {"dp_out": 2, "dp": 2}, "zero": "hsdp", "clip_norm": None}
    ranks = values(gloo(4, around, str(tmp_path), given))
    plain = run(small(**given), SMALL_INIT(fzero.random.key(0)), tokens, world=4, steps=2, key=fzero.random.key(0))
    for rank in ranks:
        assert rank["equal"]
        assert all(torch.equal(rank["final"][path], leaf) for path, leaf in plain.final.items())
    saved = fzero.checkpoint.manifest(tmp_path)
    written = sum((piece.stop - piece.start) * leaf.dtype.itemsize for leaf in saved.leaves for piece in leaf.pieces)
    assert written == sum(leaf.nbytes for leaf in plain.final.values())
    there = fzero.load(tmp_path, small(zero=1))
    assert fzero.step(there, tokens(0, 1)).step == 2


# --- bad input --------------------------------------------------------------------------------------------------------


def wrong(_: None) -> list[str]:
    """What a rank of 2 x 2 says to batches that differ along pp, to a mesh of another size, and afterwards."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    said = []
    try:
        fzero.init(SMALL_INIT, small(mesh={"pp": 3, "dp": -1}, pipeline="1f1b"), key=fzero.random.key(0))
    except fzero.FzeroError as error:
        said.append(str(error))
    state = fzero.init(SMALL_INIT, small(mesh={"pp": 2, "dp": 2}, pipeline="1f1b"), key=fzero.random.key(0))
    try:
        fzero.step(state, tokens(rank, 0))
    except fzero.DisagreementError as error:
        said.append(str(error))
    try:
        fzero.step(state, tokens(rank % 2, 0) if rank < 3 else None)
    except fzero.FzeroError as error:
        said.append(str(error))
    state = fzero.step(state, tokens(rank % 2, 0))
    try:
        other = fzero.random.key(rank // 2)
        params = SMALL_INIT(other)
        fzero.init(params, small(mesh={"pp": 2, "dp": 2}, pipeline="1f1b"), key=other)
    except fzero.DisagreementError as error:
        said.append(str(error))
    return [*said, f"{state.step}"]


def test_what_a_grid_says_to_bad_input() -> None:
    for size, batch, failed, values_, step in values(gloo(4, wrong, None)):
        assert "needs 3 ranks, there are 4: start a multiple of 3 ranks" in size
        assert batch.startswith(
            "the batch differs between rank 0 (pp=0 dp=0) and rank 2 (pp=1 dp=0). Ranks that differ"
        )
        assert "in pp alone are given the same batch" in batch
        assert "rank 3 (pp=1 dp=1)" in failed or "batch" in failed
        assert "the ranks do not run the same program" in values_ or "differ" in values_
        assert step == "1"


def test_batches_go_by_data_coordinate() -> None:
    data = fzero.data.Tokens(torch.arange(1000), sequence=8)
    parts = [next(data.batches(4, rank=r, world_size=4, mesh={"pp": 2, "dp": 2})) for r in range(4)]
    assert torch.equal(parts[0]["x"], parts[2]["x"])
    assert torch.equal(torch.cat([parts[0]["x"], parts[1]["x"]]), data.batch(0, size=4)["x"])
