"""Parameters that tensor parallelism moves, in formats that are made again where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Run, differing, run
from torch import Tensor

import fzero
from fzero import P, Precision, optim
from fzero.ir import fx_nodes
from fzero.ir.recorder import record
from fzero.shard.ops import ALL_REDUCE
from fzero.shard.owned_operands import owned_operands


def start() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)
    return {"emb": torch.randn(32, 64, generator=made) / 8, "head": torch.randn(64, 64, generator=made) / 8}


def words(rank: int, step: int) -> Tensor:
    return torch.randint(32, (4, 3), generator=torch.Generator().manual_seed(rank + 7 * step))


def loss(p: Any, b: Tensor) -> Tensor:
    return (p["emb"][b] @ fzero.constrain(p["head"], P(None, None))).square().mean()


def trained(mesh: dict[str, int], precision: Any, zero: int) -> Run:
    rules = {"params/head": P(None, "tp")} if "tp" in mesh else None
    spec = fzero.Spec(
        loss=loss, optimizer=optim.sgd(0.5), mesh=mesh, shard=rules, precision=precision, zero=zero, transfers="p2p"
    )
    world = 2 * mesh.get("tp", 1)
    return run(spec, start(), words, world=world, steps=2)


@pytest.mark.parametrize(
    ("made", "copied"),
    [
        (lambda p: p, False),
        (lambda p: p.t(), False),
        (lambda p: p.bfloat16(), True),
        (lambda p: p.bfloat16().t(), True),
        (lambda p: p.t().bfloat16(), True),
        (lambda p: p * 2, False),
        (lambda p: (p * 2).bfloat16(), False),
    ],
)
def test_only_a_cast_of_an_input_is_copied_before_it_is_sent(made: Callable[[Tensor], Tensor], copied: bool) -> None:
    gm = record(lambda p: (ALL_REDUCE(made(p), "tp", 2, "sum"), p.t()), [torch.randn(4, 6)])
    for node in gm.graph.nodes:
        node.meta |= {"moved": "for y"} if node.target is ALL_REDUCE else {}
    owned = owned_operands(gm)
    assert (owned is not gm) == copied
    (sent,) = (node for node in owned.graph.nodes if node.target is ALL_REDUCE)
    source = fx_nodes.operand(sent)
    assert [node for node in owned.graph.nodes if "moved" in node.meta] == [sent], "the copy moves nothing"
    assert (source.target is torch.ops.aten.clone.default) == copied
    assert not copied or source.meta["val"].is_contiguous()


@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16", "autocast", Precision(gather="int8", exact=("emb",))],
    ids=["fp32", "bf16", "autocast", "int8"],
)
@pytest.mark.sampled(2)
def test_a_cast_or_coded_parameter_is_gathered_for_its_use(precision: Any) -> None:
    first = trained({"dp": 2, "tp": 2}, precision, 0)
    assert differing(trained({"dp": 2, "tp": 2}, precision, 3).final, first.final) == []
    plain = trained({"dp": 2}, precision, 0)
    for path, leaf in plain.final.items():
        torch.testing.assert_close(first.final[path], leaf, rtol=0, atol=2e-3, msg=path)
