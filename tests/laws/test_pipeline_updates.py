"""Updates that need a value of all roles, on every schedule: a mean's count, a norm, trust ratios, a loss scale.

Each is a small message between roles outside of regions, and several are in one step. `fzero.lower` verifies that no
two roles wait for each other, however little a transport buffers; the numbers are those of one process.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Run, gloo, run, values
from torch import Tensor

import fzero
from fzero import P, optim, tree
from fzero.pipeline import SCHEDULES

VOCAB, WIDTH, SEQUENCE, ROWS = 16, 8, 6, 12
RULES = {"**/up": P(None, "tp"), "**/b": P("tp"), "**/down": P("tp")}

UPDATES: dict[str, dict[str, Any]] = {
    "mean": {},
    "clip": {"clip_norm": 0.05},
    "skip": {"nonfinite": "skip"},
    "lamb": {"optimizer": optim.lamb(1e-2)},
    "clipped lamb": {"optimizer": optim.lamb(1e-2), "clip_norm": 0.05},
    "clipped updates": {"optimizer": optim.chain(optim.lamb(1e-2), optim.clip_by_global_norm(1e-3))},
    "loss scale": {"precision": "fp16", "nonfinite": "skip", "clip_norm": 0.05},
}
NARROW = ("loss scale",)  # computed in fp16


def init(layers: int) -> Any:
    keys = iter(fzero.random.split(fzero.random.key(0), 2 * layers + 1))

    def normal(*shape: int) -> Tensor:
        return fzero.random.normal(next(keys), shape) * 0.3

    def block() -> Any:
        return {"up": normal(WIDTH, 2 * WIDTH), "b": torch.zeros(2 * WIDTH), "down": normal(2 * WIDTH, WIDTH),
                "c": torch.zeros(WIDTH)}  # fmt: skip

    return {"embed": normal(VOCAB, WIDTH), "blocks": [block() for _ in range(layers)]}


def loss(p: Any, batch: Any) -> fzero.Mean:
    """Over the tokens that count: another number of them in each microbatch."""
    h = F.embedding(batch["x"], p["embed"])
    for block in p["blocks"]:
        h = h + torch.tanh(h @ block["up"] + block["b"]) @ block["down"] + block["c"]
    counts = (batch["y"] % 3 != 0).float()
    terms = F.cross_entropy((h @ p["embed"].T).float().flatten(0, 1), batch["y"].flatten(), reduction="none")
    return fzero.Mean((terms * counts.flatten()).sum(), counts.sum())


def batch(rank: int, step: int) -> Any:
    drawn = torch.randint(VOCAB, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(7 * step + rank))
    return {"x": drawn[:, :-1].contiguous(), "y": drawn[:, 1:].contiguous()}


def spec(mesh: dict[str, int], update: str, **given: Any) -> fzero.Spec:
    microbatches = 3 if mesh.get("pp") == 3 else 4  # "interleaved" asks for a multiple of the roles
    options = {
        "optimizer": optim.adamw(1e-2),
        "microbatches": microbatches,
        "reduce": "end",
        **UPDATES[update],
        **given,
    }
    shard = RULES if mesh.get("tp", 1) > 1 else None
    return fzero.Spec(loss=loss, mesh=mesh, shard=shard, transfers="p2p", **options)


def layers(schedule: str, roles: int) -> int:
    """A layer for each chunk."""
    return 2 * roles if schedule in ("interleaved", "zb-v") else roles


def alike(a: Run, b: Run, loose: bool = False) -> None:
    """Equal bits, or with `loose` equal but for rounding: every leaf at the end, and every metric on every rank."""
    close = {"rtol": 1e-4, "atol": 1e-6} if loose else {"rtol": 0, "atol": 0}
    for path in a.final:
        torch.testing.assert_close(a.final[path], b.final[path], **close, msg=lambda text, path=path: f"{path}: {text}")
    for one, two in zip(a.metrics, b.metrics, strict=True):
        for rank in two:
            torch.testing.assert_close(rank, one[0], **close)


CASES = list(itertools.product(SCHEDULES, (2, 3, 4), UPDATES, (1, 2)))
RUN = random.Random(0).sample(CASES, 30)


FIRST = [("1f1b", 3, "clipped lamb", 1), ("zb-v", 3, "loss scale", 1), ("gpipe", 2, "clip", 2)]


@pytest.mark.parametrize(("schedule", "roles", "update", "tp"), FIRST)
@pytest.mark.sampled(1)
def test_three_roles_and_two_axes(schedule: str, roles: int, update: str, tp: int) -> None:
    test_every_update_lowers_on_every_schedule(schedule, roles, update, tp)


@pytest.mark.parametrize(("schedule", "roles", "update", "tp"), CASES)
@pytest.mark.sampled(2)
def test_every_update_lowers_on_every_schedule(schedule: str, roles: int, update: str, tp: int) -> None:
    mesh = {"pp": roles, **({"tp": tp} if tp > 1 else {})}
    lowered = fzero.lower(spec(mesh, update, pipeline=schedule), init(layers(schedule, roles)), batch(0, 0))
    assert sum(op.is_send for program in lowered.programs.values() for op in program.ops) > 0


@pytest.mark.parametrize(("schedule", "roles", "update", "tp"), RUN)
@pytest.mark.sampled(1)
def test_the_numbers_are_those_of_no_pipeline(schedule: str, roles: int, update: str, tp: int) -> None:
    """Bit by bit beside the same mesh without roles, and but for rounding beside one process."""
    rest = {"tp": tp} if tp > 1 else {"dp": 1}
    params = init(layers(schedule, roles))
    piped = run(spec({"pp": roles, **rest}, update, pipeline=schedule), params, batch, world=roles * tp, steps=2)
    count = {"microbatches": piped.lowered.graph.regions[0].microbatches}
    alike(piped, run(spec(rest, update, **count), params, batch, world=tp, steps=2))
    if tp > 1 and update not in NARROW:
        alike(piped, run(spec({"dp": 1}, update, **count), params, batch, world=1, steps=2), loose=True)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.sampled(1)
def test_a_mesh_of_three_axes(update: str) -> None:
    """A mean over the whole batch beside clipping, at pp x dp x tp."""
    params, rest = init(2), {"dp": 2, "tp": 2}
    piped = run(spec({"pp": 2, **rest}, update, pipeline="1f1b", zero=2), params, batch, world=8, steps=2)
    alike(piped, run(spec(rest, update, zero=2), params, batch, world=4, steps=2))


# --- real processes ---------------------------------------------------------------------------------------------------


def trained(update: str, transfers: str) -> tuple[dict[str, Tensor], float]:
    """(whole leaves by path, the last loss) of one of three roles."""
    torch.set_num_threads(1)
    state = fzero.init(init(3), replace(spec({"pp": 3}, update, pipeline="1f1b"), transfers=transfers))
    for number in range(2):
        state = fzero.step(state, batch(0, number))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True)), float(state.metrics["loss"])


@pytest.mark.parametrize("transfers", ["p2p", "shared"])
@pytest.mark.sampled(1)
def test_processes_come_to_every_exchange(transfers: str) -> None:
    """Three roles over messages and over shared memory, with the bits of the interpreter."""
    expected = run(spec({"pp": 3}, "clipped lamb", pipeline="1f1b"), init(3), batch, world=3, steps=2)
    for leaves, value in values(gloo(3, trained, "clipped lamb", transfers)):
        assert value == expected.losses()[-1]
        assert [path for path, leaf in expected.final.items() if not torch.equal(leaves[path], leaf)] == []
