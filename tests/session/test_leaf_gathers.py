"""Whole leaves on every rank of every mesh: the oracle is the values that the ranks' parts were cut from.

Each rank is a thread of this process. Transfers are the interpreter's, with poison: memory that is read too early is
NaN, and a source that was not given back is noticed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero import P, tree
from fzero.ir.decisions import Choice
from fzero.ir.mesh import Mesh
from fzero.plan.layout import layout
from fzero.plan.pipeline_cut import cut_layers
from fzero.plan.stages import Columns
from fzero.plan.state_plan import Leaf, Plan
from fzero.runtime.interpreter import LocalComm, Mailbox
from fzero.session.leaf_gathers import LeafGathers
from fzero.state import storage

CPU = torch.device("cpu")
LOCK = threading.Lock()
PATIENCE = 5.0  # seconds: then a rank waits in vain


class Threaded(LocalComm):
    """Transfers among ranks that are threads."""

    def start(self, *given: Any) -> None:
        with LOCK:
            super().start(*given)

    def wait(self, name: str) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with LOCK:
                if self.ready(name):
                    super().wait(name)
                    return
            time.sleep(1e-4)
        raise TimeoutError(f"rank {self.rank} waits for {name} in vain")

    def settle(self, name: str) -> None:
        with LOCK:
            super().settle(name)


def gathered(plan: Plan, memory: Sequence[Any], leaves: Sequence[Leaf], joined: bool = True) -> list[list[Tensor]]:
    """What each rank gets."""
    mailbox = Mailbox(plan.mesh, poison=True)
    comms = [Threaded(mailbox, rank) for rank in range(plan.world_size)]

    def of(rank: int) -> list[Tensor]:
        return LeafGathers(plan, memory[rank], comms[rank], CPU, rank).gathered(leaves, joined)

    with ThreadPoolExecutor(plan.world_size) as pool:
        found = list(pool.map(of, range(plan.world_size)))
    for comm in comms:
        assert [comm.lent, comm.inbox, comm.outbox, comm.pending] == [{}] * 4, "every transfer has ended"
    return found


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


STATE = {
    "params": {"blocks": [{"w": drawn(6, 8, seed=i), "b": drawn(5, seed=9 + i)} for i in range(2)], "head": drawn(70)},
    "mu": {"codes": {"head": torch.arange(70, dtype=torch.int8)}, "scales": {"head": drawn(2)}},
    "count": torch.tensor(3), "own": torch.zeros(3),
}  # fmt: skip


def _second(layers: Any, last: int, chunks: int) -> Choice[tuple[str, ...]]:
    return Choice(("blocks/1",))


def planned(mesh: dict[str, int], **options: Any) -> tuple[Plan, list[Tensor]]:
    paths, values, _ = tree.flatten(STATE)
    cut = partial(cut_layers, role_of=(0, 1), choose=_second) if mesh.get("pp", 1) > 1 else None
    plan = layout(paths, values, mesh=Mesh(tuple(mesh.items())), pipeline=cut, per_rank=("own",), **options)
    return plan, values


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({"dp": 1}, {"zero": 3}),
    "whole": ({"dp": 2}, {"zero": 0}),
    "slices": ({"dp": 3}, {"zero": 3}),
    "slices of the rest": ({"dp": 2}, {"zero": 1}),
    "two data axes": ({"dp_out": 2, "dp": 2}, {"zero": 3}),
    "slices within a node": ({"dp_out": 2, "dp": 2}, {"zero": Columns(("dp",), ("dp",), ("dp",))}),
    "roles": ({"pp": 2, "dp": 2}, {"zero": 3}),
    "by rows": ({"dp": 2, "tp": 2}, {"zero": 3, "shard": {"blocks/*/w": P("tp", None)}}),
    "by columns of two axes": ({"tp": 2, "mp": 2}, {"shard": {"blocks/*/w": P(None, ("tp", "mp"))}}),
    "both dims": ({"tp": 2, "mp": 2}, {"shard": {"blocks/*/w": P("mp", "tp")}}),
    "roles that cut": ({"pp": 2, "tp": 2}, {"shard": {"blocks/*/w": P("tp", None)}}),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_gets_every_leaf(name: str) -> None:
    mesh, options = MESHES[name]
    plan, values = planned(mesh, **options)
    memory = [storage.shards(plan, values, rank) for rank in range(plan.world_size)]
    for rank, held in enumerate(memory):
        held["own"].fill_(plan.mesh.data_rank(rank))  # each rank of the data has its own
    own = torch.arange(plan.data_ranks).to(torch.float32)[:, None].expand(-1, 3)
    for found in gathered(plan, memory, plan.leaves):
        for leaf, value, wanted in zip(plan.leaves, found, values, strict=True):
            assert value.dtype == leaf.dtype
            assert torch.equal(value, own if leaf.per_rank else wanted), leaf.path


def test_a_leaf_is_left_as_the_part_of_a_rank() -> None:
    plan, values = planned({"dp": 2, "tp": 2}, zero=3, shard={"blocks/*/w": P("tp", None)})
    memory = [storage.shards(plan, values, rank) for rank in range(4)]
    chosen = [(leaf, value) for leaf, value in zip(plan.leaves, values, strict=True) if leaf.path != "own"]
    for rank, found in enumerate(gathered(plan, memory, [leaf for leaf, _ in chosen], joined=False)):
        for (leaf, value), part in zip(chosen, found, strict=True):
            assert torch.equal(part, leaf.layout.own_part(value, plan.mesh, rank)), leaf.path


def test_leaves_come_in_the_order_in_which_they_are_asked_for_by_one_gather_a_column() -> None:
    plan, values = planned({"dp": 2}, zero=3)
    memory = [storage.shards(plan, values, rank) for rank in range(2)]
    of_path = {leaf.path: i for i, leaf in enumerate(plan.leaves)}
    asked = [of_path[path] for path in ("params/blocks/0/w", "params/head", "params/blocks/0/b")]
    started: list[str] = []
    start = Threaded.start

    class Counted(Threaded):
        def start(self, *given: Any) -> None:
            started.append(given[1].kind)
            start(self, *given)

    mailbox = Mailbox(plan.mesh, poison=True)
    with ThreadPoolExecutor(2) as pool:
        gathers = [LeafGathers(plan, memory[rank], Counted(mailbox, rank), CPU, rank) for rank in range(2)]
        found = list(pool.map(lambda one: one.gathered([plan.leaves[i] for i in asked], True), gathers))
    assert all(torch.equal(x, values[i]) for one in found for x, i in zip(one, asked, strict=True))
    assert started == ["all_gather"] * 2 * 2, "two columns, two ranks"


def test_what_is_returned_is_a_copy() -> None:
    """A step that follows writes the state, not what the user holds."""
    plan, values = planned({"dp": 1}, zero=3)
    memory = [storage.shards(plan, values, 0)]
    (found,) = gathered(plan, memory, plan.leaves)
    for tensor in memory[0].values():
        tensor.fill_(1)
    kept = [(leaf, x, value) for leaf, x, value in zip(plan.leaves, found, values, strict=True) if not leaf.per_rank]
    assert all(torch.equal(x, value) for _, x, value in kept)
