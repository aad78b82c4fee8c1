"""local_graph: each transfer that is written, run on all ranks: it makes of the parts of a value what is wanted.

A transfer moves a value's elements in the order of memory, so what is cut is brought to the front before, and put back
behind. Where it lies there already nothing is copied.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import Draft
from helpers import Run, run
from lockstep import evaluated
from torch import fx

import fzero
from fzero.shard import ops
from fzero.shard.claims import claim_of
from fzero.shard.local_graph import AROUND, LocalGraph, _memory_order
from fzero.shard.moves import Move, kind_of, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard, join, split
from fzero.shard.rules import Strategy

aten = torch.ops.aten
R, SUM, MAX = Replicated(), Partial(), Partial("max")
SHAPES = [(4, 12, 8), (2, 8, 4), (1, 8, 12), (1, 1, 16)]


def value(shape: tuple[int, ...], order: tuple[int, ...] = ()) -> fx.Node:
    """A node of the global graph, whose dims lie in memory in this order."""
    node = Draft().input(*shape)
    if order:
        back = sorted(range(len(order)), key=order.__getitem__)
        node.meta["val"] = torch.empty([shape[d] for d in order], device="meta").permute(back)
    return node


def begun(x: fx.Node, source: Placement, n: int) -> tuple[LocalGraph, fx.Node]:
    """(a local graph, its input)."""
    local = LocalGraph(n, "tp")
    mine = local.placeholder(x, source)
    local.rank = local.graph.placeholder("rank")
    local.rank.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
    return local, mine


def moved(
    x: fx.Node, source: Placement, want: Placement, n: int, before: Any = None
) -> tuple[LocalGraph, fx.Node, list[torch.Tensor], torch.Tensor]:
    """(the local graph, the node of the moved value, what each rank has of it, the whole value)."""
    local, mine = begun(x, source, n)
    given = mine if before is None else local.node(before, (mine,), {}, x)
    nbytes = wire_bytes(source, want, x.meta["val"], n)
    move = Move(kind_of(source, want), "x", source, want, nbytes, "forward", "y", "f:1", False, torch.float32)
    done = local.move(given, move, x)
    local.graph.output([done])
    gm = fx.GraphModule(torch.nn.Module(), local.graph)
    whole = torch.randint(-9, 9, tuple(x.meta["val"].shape), generator=torch.Generator().manual_seed(0)).float()
    whole = torch.empty_strided(whole.shape, x.meta["val"].stride()).copy_(whole)
    made: Any = SimpleNamespace(gm=gm, inputs=[source], n=n)
    found = evaluated(made, [whole])[done]
    assert local.moves == [move]
    (transfer,) = [node for node in local.graph.nodes if node.target in ops.TRANSFERS] or [done]
    assert transfer.target is ops.OWN_PART or transfer.meta["moved"] == move.why
    for part in found:
        assert part.shape == done.meta["val"].shape
        assert part.stride() == done.meta["val"].stride()
    return local, done, found, whole


def sharded(shape: tuple[int, ...], n: int) -> list[Shard]:
    """The ways to cut a value in n equal parts, by one group and by two."""
    return [Shard(d, g) for d, size in enumerate(shape) for g in (1, 2) if size % (g * n) == 0]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_transfer_makes_of_the_parts_what_is_wanted(shape: tuple[int, ...], n: int) -> None:
    ways = sharded(shape, n)
    pairs: list[tuple[Placement, Placement]] = [(SUM, R), (MAX, R)]
    pairs += [(s, R) for s in ways] + [(R, s) for s in ways] + [(SUM, s) for s in ways]
    pairs += [(s, t) for s in ways for t in ways if s.dim != t.dim]
    for source, want in pairs:
        local, done, found, whole = moved(value(shape), source, want, n)
        assert torch.equal(join(found, want), whole), (source, want)
        for part, wanted in zip(found, split(whole, want, n), strict=True):
            assert torch.equal(part, wanted), (source, want)
        said = claim_of(done)
        assert said is not None
        assert (said.kind, said.of, said.placements, said.given[0].op) == ("move", "x0", (want,), "placeholder")
        assert all(node.meta["phase"] == local.phase for node in local.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_dims_lie_in_memory_as_those_of_the_value(order: tuple[int, ...]) -> None:
    """Views after it count on that."""
    shape = (4, 12, 8)
    for source, want in ((SUM, R), (Shard(0), R), (Shard(2), R), (SUM, Shard(1)), (Shard(0), Shard(2)), (Shard(1), R)):
        _, done, found, whole = moved(value(shape, order), source, want, 2)
        assert torch.equal(join(found, want), whole)
        strides = done.meta["val"].stride()
        assert sorted(range(3), key=lambda d: -strides[d]) == [*order], (source, want)


@pytest.mark.parametrize(
    ("shape", "source", "want", "copies"),
    [
        ((4, 12), Shard(0), R, 0), ((4, 12), Shard(1), R, 1), ((1, 12), Shard(1), R, 0), ((2, 12), Shard(1), R, 1),
        ((4, 12), Shard(0, 2), R, 1), ((4, 12), SUM, Shard(0), 0), ((4, 12), SUM, Shard(1), 1), ((4, 12), SUM, R, 0),
        ((4, 12), Shard(0), Shard(1), 1), ((4, 12), Shard(1), Shard(0), 1), ((4, 12), SUM, Shard(0, 2), 1),
    ],
)  # fmt: skip
def test_what_lies_in_front_is_not_copied(shape: Any, source: Placement, want: Placement, copies: int) -> None:
    """Of a value with memory of its own, as relu makes it."""
    local, *_ = moved(value(shape), source, want, 2, before=aten.neg.default if source != MAX else None)
    targets = [node.target for node in local.graph.nodes if node.op == "call_function"]
    assert targets.count(aten.clone.default) == copies
    assert targets.count(aten.permute.default) == copies


def test_a_view_is_read_through_and_put_back() -> None:
    """Of an all-reduce: elements keep their places. The views around it are none of the step."""
    x = value((4, 12))
    local, mine = begun(x, SUM, 2)
    made = local.node(aten.neg.default, (mine,), {}, x)
    seen = local.node(aten.view.default, (made, [48]), {}, x)
    flat = value((48,))
    move = Move("all_reduce", "x", SUM, R, 0.0, "forward", "y", "", False, torch.float32)
    done = local.move(seen, move, flat)
    (sums,) = (node for node in local.graph.nodes if node.target is ops.ALL_REDUCE)
    assert sums.args == (made, "tp", 2, "sum")
    assert (done.target, done.meta.get(AROUND)) == (aten.view.default, True)
    assert seen.meta.get(AROUND) is None
    assert done.meta["val"].shape == (48,)


def test_an_input_or_a_strided_value_is_copied_before_it_is_sent() -> None:
    x = value((4, 12))
    local, mine = begun(x, R, 2)
    copied = local.in_memory(mine, x)
    assert (copied.target, copied.args) == (aten.clone.default, (mine,))
    assert local.in_memory(copied, x) is copied
    turned = local.node(aten.t.default, (copied,), {}, x)
    assert local.in_memory(turned, x).target is aten.clone.default
    assert local.in_memory(turned, x).meta["val"].is_contiguous()


def test_a_view_that_local_strides_do_not_allow_is_made_of_a_copy() -> None:
    x = value((4, 12))
    local, mine = begun(x, R, 2)
    turned = local.node(aten.t.default, (mine,), {}, x)
    done = local.node(aten.view.default, (turned, [48]), {}, x)
    assert done.args[0].target is aten.clone.default
    with pytest.raises((RuntimeError, ValueError)):
        local.node(aten.view.default, (turned, [49]), {}, x)
    with pytest.raises(RuntimeError):
        local.node(aten.mm.default, (mine, mine), {}, x)


def test_a_number_is_kept_by_the_first_rank_alone() -> None:
    x = value(())
    local, mine = begun(x, R, 3)
    first, again = (local.addend(mine, x) for _ in range(2))
    assert [node.target for node in local.graph.nodes].count(aten.ne.Scalar) == 1, "asked once"
    local.graph.output([first])
    gm = fx.GraphModule(torch.nn.Module(), local.graph)
    made: Any = SimpleNamespace(gm=gm, inputs=[R], n=3)
    parts = evaluated(made, [torch.tensor(5.0)])[first]
    assert [float(part) for part in parts] == [5.0, 0.0, 0.0]
    said = claim_of(again)
    assert said is not None
    assert (said.kind, said.placements) == ("addend", (SUM,))


def test_the_transfers_within_a_form_are_noted() -> None:
    """A form of one result is a node, one of several a list; a sum sends what an all-reduce of its value does."""
    draft = Draft()
    x = draft.input(6, 4)
    call = draft.call(aten._log_softmax.default, x, 1, False)
    call.meta |= {"phase": "backward", "source": "train.py:3"}
    local, mine = begun(x, Shard(1), 2)
    made = local.form(call, Strategy((Shard(1),), (Shard(1),), "log_softmax"), (mine, 1, False), {})
    assert isinstance(made, fx.Node)
    assert made.meta["val"].shape == (6, 2)
    sums = [node for node in local.graph.nodes if node.target is ops.ALL_REDUCE]
    assert [node.args[3] for node in sums] == ["max", "sum"]
    assert [(move.kind, move.source, move.nbytes, move.phase, move.line) for move in local.moves] == [
        ("all_reduce", Partial(how), 6 * 4.0, "backward", "train.py:3") for how in ("max", "sum")
    ]
    assert [node.meta["moved"] for node in sums] == [move.why for move in local.moves]
    target = draft.input(6, dtype=torch.int64)
    loss = draft.call(aten.nll_loss_forward.default, x, target, None, 1, -100)
    local, mine = begun(x, Shard(1), 2)
    labels = local.placeholder(target, R)
    strategy = Strategy((Shard(1), R), (SUM, R), "nll_loss_forward")
    several = local.form(loss, strategy, (mine, labels, None, 1, -100), {})
    assert isinstance(several, list)
    assert [tuple(node.meta["val"].shape) for node in several] == [(), ()]
    assert local.moves == []


def test_a_norm_of_narrow_values_with_wide_parameters() -> None:
    """The complaint: under autocast its statistics had another dtype on a rank than in the whole graph, by torch's rule
    for shapes, and the verifier refused the program (BERT's head, VideoMAE's)."""
    made = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(8, 8, generator=made), "head": torch.randn(8, 8, generator=made)}
    params |= {"scale": torch.ones(8), "shift": torch.zeros(8)}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(F.linear(x, p["w"]), (8,), p["scale"], p["shift"])
        return F.linear(y, p["head"]).square().mean()

    def trained(n: int) -> Run:
        spec = fzero.Spec(
            loss=loss, optimizer=fzero.optim.sgd(0.1), precision="autocast", mesh={"tp": n},
            shard={"params/head": fzero.P("tp", None)},
        )  # fmt: skip
        return run(spec, params, lambda rank, step: torch.linspace(-1, 1, 32).view(4, 8), world=n, steps=2)

    alone, both = trained(1), trained(2)
    for path, leaf in alone.final.items():
        torch.testing.assert_close(both.final[path], leaf, rtol=0, atol=1e-2, msg=path)


def test_an_expanded_dim_lies_in_memory_where_a_copy_has_it() -> None:
    assert _memory_order(torch.empty(4, 1).expand(4, 3)) == [0, 1]
    assert _memory_order(torch.empty(3).expand(4, 3)) == [0, 1]
    assert _memory_order(torch.empty(4, 3).t()) == [1, 0]
