"""last_work: what a role does of the gradients of its leaves that another role's work makes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import cases
import pytest
import torch
from short_programs import segment
from torch import Tensor, fx

import fzero
from fzero.ir import fx_nodes, rewrite
from fzero.ir.op import Op
from fzero.ir.records import Ref
from fzero.passes.pipeline.last_work import At, bound_for, by_home, last_work
from fzero.passes.pipeline.split_backward import Halves, in_two

WORDS, WIDTH, TOKENS = 64, 4, 3
TABLE = (WORDS, WIDTH)
IDS = torch.empty(TOKENS, dtype=torch.int64)


def embedded(g: Tensor, ids: Tensor, h: Tensor, into: Tensor) -> None:
    """What the tokens' gradients add to that of a head."""
    into.copy_(torch.ops.aten.embedding_dense_backward(g.tanh(), ids, WORDS, -1, False) + h)


def product(x: Tensor, y: Tensor, into: Tensor) -> None:
    into.copy_((x.T @ y) * 2)


def spread(x: Tensor, into: Tensor) -> None:
    """One of the results of one op, in every row."""
    into.copy_(torch.ops.aten.var_mean.correction(x, [0])[0].expand(TABLE))


def summed(h: Tensor, g: Tensor, ids: Tensor) -> list[Tensor]:
    """A sum that goes on: what the tokens' gradients add to that of a head."""
    return [torch.ops.aten.embedding_dense_backward(g, ids, WORDS, -1, False) + h]


def halves(gm: fx.GraphModule, names: str, sent: Collection[str], own: int = 0, away: Collection[str] = ()) -> Any:
    """away: what is there alone. A name with a `*` is there late."""
    at = [At(name not in away, name not in sent, name.endswith("*")) for name in names.split()]
    return last_work(gm, [own], at)


def computed(found: Halves | None) -> list[list[str]]:
    """Of both halves, what they compute."""
    assert found is not None
    graphs = (found.first.graph, found.second.graph)
    return [[n.target.__name__.split(".")[0] for n in graph.nodes if fx_nodes.is_compute(n)] for graph in graphs]


def test_the_tokens_gradients_are_sent_and_summed_where_the_words_are_kept() -> None:
    gm = segment(embedded, (TOKENS, WIDTH), IDS, TABLE, TABLE)
    found = halves(gm, "g ids h", sent="g")
    assert computed(found) == [["tanh"], ["embedding_dense_backward", "add", "copy_"]]
    op = Op("run", (Ref("g"), Ref("ids"), Ref("h")), (Ref("grad"),))
    split = in_two(op, found, "grad.of0")  # type: ignore[arg-type]
    assert split.first is not None
    assert split.second is not None
    assert [str(split.first.reads[0]), str(split.first.writes[0])] == ["g", "grad.of0.w0"]
    assert list(map(str, split.second.reads)) == ["ids", "h", "grad.of0.w0"]
    assert split.buffers["grad.of0.w0"].shape == (TOKENS, WIDTH)


def test_slices_of_one_gradient_are_sent_in_buffers_of_their_own() -> None:
    """The leaves of one bucket have one gradient; their tokens' gradients may have other shapes."""
    gm = segment(embedded, (TOKENS, WIDTH), IDS, TABLE, TABLE)

    def sent(start: int) -> set[str]:
        op = Op("run", (Ref("g"), Ref("ids"), Ref("h")), (Ref("grad", start, start + WORDS * WIDTH, TABLE),))
        halves = by_home(op, 0, gm, lambda ref: 7, lambda ref, _: At(True, ref.name != "g"), {})
        return {name for split, _, _ in halves for name in split.buffers}

    assert sent(0)
    assert not sent(0) & sent(WORDS * WIDTH)


def test_a_sum_whose_other_part_is_not_there_is_sent() -> None:
    gm = segment(embedded, (TOKENS, WIDTH), IDS, TABLE, TABLE)
    assert halves(gm, "g ids h", sent=("g", "h")) is None


def test_what_follows_from_what_is_there_is_done_there() -> None:
    gm = segment(embedded, (TOKENS, WIDTH), IDS, TABLE, TABLE)
    found = halves(gm, "g ids h", sent=())
    assert computed(found) == [[], ["tanh", "embedding_dense_backward", "add", "copy_"]]
    op = Op("run", (Ref("g"), Ref("ids"), Ref("h")), (Ref("grad"),))
    assert in_two(op, found, "stem").first is None  # type: ignore[arg-type]


def test_no_product_moves() -> None:
    assert halves(segment(product, (1, WORDS), (1, WIDTH), TABLE), "x y", sent=("x", "y")) is None


def test_results_of_one_op_stay_together() -> None:
    found = halves(segment(spread, (9, WIDTH), TABLE), "x", sent="x")
    assert computed(found) == [["var_mean", "getitem"], ["expand", "copy_"]]


def test_what_other_results_need_stays() -> None:
    def both(g: Tensor, ids: Tensor, h: Tensor, into: Tensor) -> list[Tensor]:
        embedded(g, ids, h, into)
        return [g.tanh() * 2]

    gm = segment(both, (TOKENS, WIDTH), IDS, TABLE, TABLE)
    found = halves(gm, "g ids h", sent="g", own=1)
    assert found is not None
    assert "mul" in computed(found)[0]
    assert len(fx_nodes.outputs(found.first.graph)) == 2, "its own output, and the tokens' gradients"


def test_a_sum_is_taken_where_its_other_term_is() -> None:
    """Either way one table is sent to that role; the other term would come here first."""

    def add(x: Tensor, y: Tensor, h: Tensor, into: Tensor) -> None:
        into.copy_(x.T @ y + h)

    gm = segment(add, (1, WORDS), (1, WIDTH), TABLE, TABLE)
    assert halves(gm, "x y h", sent="xy") is None
    assert computed(halves(gm, "x y h", sent="xy", away="h")) == [["permute", "mm"], ["add", "copy_"]]


def test_a_sum_on_the_way_is_taken_there_too() -> None:
    gm = segment(summed, TABLE, (TOKENS, WIDTH), IDS)
    found = halves(gm, "h g ids", sent="g", away="h")
    assert computed(found) == [[], ["embedding_dense_backward", "add"]]
    split = in_two(Op("run", tuple(map(Ref, ("h", "g", "ids"))), (Ref("v"),)).with_attrs(fresh=1), found, "stem")
    assert split.first is None
    assert split.second is not None
    assert (split.second.num_outputs, split.second.target) == (1, "v")


def test_what_is_there_late_is_read_by_no_earlier_work() -> None:
    """Though more bytes are sent."""

    def small(v: Tensor, into: Tensor) -> None:
        into.copy_(v.sum() + torch.zeros(()))

    gm = segment(small, TABLE, ())
    assert computed(halves(gm, "v*", sent="v", away="v"))[0] == []


def test_sums_that_only_a_gradient_needs_are_bound_for_its_role() -> None:
    def embeds(v: Tensor, g: Tensor, ids: Tensor, into: Tensor) -> None:
        embedded(g, ids, v, into)

    def shows(v: Tensor, g: Tensor, ids: Tensor, into: Tensor) -> list[Tensor]:
        embeds(v, g, ids, into)
        return [v.sum()]

    first = segment(summed, TABLE, (TOKENS, WIDTH), IDS)
    shapes = TABLE, (TOKENS, WIDTH), IDS, TABLE
    refs = [Ref(name) for name in ("h", "g1", "ids")]
    one = rewrite.run_op(Op("run"), first, refs, [Ref("v")])

    def bound(last: fx.GraphModule, outs: list[str], role: int = 0, others: Collection[str] = ()) -> dict[str, int]:
        refs = [Ref(name) for name in ("v", "g0", "ids")]
        two = rewrite.run_op(Op("run"), last, refs, [*map(Ref, outs), Ref("grad")])
        rows = [(one, 1, first), (two, role, last)]
        return bound_for(rows, lambda ref: 2 if ref.name == "grad" else None, others)

    assert bound(segment(embeds, *shapes), []) == {"v": 2}
    assert bound(segment(embeds, *shapes), [], others=["v"]) == {}
    assert bound(segment(embeds, *shapes), [], role=2) == {}, "there it is read in time"
    assert bound(segment(shows, *shapes), ["out"]) == {}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.sampled(2)
def test_of_a_table_that_three_roles_read_only_its_value_is_sent_whole(schedule: str, pp: int) -> None:
    """An encoder, a decoder and a head share it."""
    words, width = 512, 16
    init, loss = cases.translating(words, width, 4)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-2), mesh={"pp": pp}, microbatches=4, pipeline=schedule, zero=0
    )
    lowered = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(4, 8, words), world_size=pp)
    programs = lowered.programs.values()
    sent = [p.buffers[op.reads[0].name] for p in programs for op in p.ops if op.is_send]
    assert [b.lent is not None for b in sent if b.numel >= words * width] == [True]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.sampled(2)
def test_a_tied_embeddings_gradients_are_never_sent_whole(pp: int, schedule: str, zero: int) -> None:
    """Its value is, once a step; of its gradient what the tokens add to it. No role holds more than one of each
    microbatch in flight."""
    words, width = 512, 16
    init, loss = cases.tied(words, width, 4)

    def made(microbatches: int) -> fzero.Lowered:
        spec = fzero.Spec(
            loss=loss, optimizer=fzero.optim.adamw(1e-2), mesh={"pp": pp, "dp": 2}, zero=zero, precision="bf16",
            microbatches=microbatches, pipeline=schedule,
        )  # fmt: skip
        batch = cases.tokens(microbatches, 8, words)
        return fzero.lower(spec, init(fzero.random.key(0)), batch, world_size=2 * pp)

    few, many = made(2 * pp), made(4 * pp)
    for lowered in (few, many):
        programs = lowered.programs.values()
        sent = [p.buffers[op.reads[0].name] for p in programs for op in p.ops if op.is_send]
        assert [b.lent is not None for b in sent if b.numel >= words * width] == [True]
    if schedule != "gpipe":
        assert many.memory.peak < few.memory.peak + 2 * words * width
