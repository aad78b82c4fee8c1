"""last_work: what a role does of the gradients of its leaves that another role's work makes."""

from __future__ import annotations

from collections.abc import Collection

import cases
import pytest
import torch
from short_programs import segment
from torch import Tensor, fx

import fzero
from fzero.ir import fx_nodes, rewrite
from fzero.ir.op import Op
from fzero.ir.records import Ref
from fzero.passes.pipeline.last_work import last_work
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


def halves(gm: fx.GraphModule, names: str, sent: Collection[str]) -> Halves | None:
    op = Op("run", tuple(map(Ref, names.split())), (Ref("grad"),))
    return last_work(gm, op, [0], [name in sent for name in names.split()])


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
    op = rewrite.run_op(Op("run"), gm, [Ref(n) for n in ("g", "ids", "h")], [Ref("out"), Ref("grad")])
    found = last_work(gm, op, [0], [True, False, False])
    assert found is not None
    assert "mul" in computed(found)[0]
    assert len(fx_nodes.outputs(found.first.graph)) == 2, "its own output, and the tokens' gradients"


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.sampled(4)
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

    few, many = made(4), made(12)
    for lowered in (few, many):
        programs = lowered.programs.values()
        sent = [p.buffers[op.reads[0].name] for p in programs for op in p.ops if op.is_send]
        assert [b.lent is not None for b in sent if b.numel >= words * width] == [True]
    if schedule != "gpipe":
        assert many.memory.peak < few.memory.peak + 4 * words * width
