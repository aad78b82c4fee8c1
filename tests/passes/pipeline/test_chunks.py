"""chunks: the chunk of each node of a region, where a border lies, and cuts that do not follow the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import kept
import pytest
import torch
from short_programs import segment, written
from torch import Tensor
from tp_models import gpt

import fzero
from fzero.ir import fx_nodes
from fzero.passes.pipeline.chunks import crossing, node_chunks, pieces
from fzero.passes.rematerialise_views import again
from fzero.passes.segment import segment as segmented

# --- nodes, by hand --------------------------------------------------------------------------------------------------

SQUARE = (8, 8)
CHUNKS = {"b0": 0, "b1": 1, "b2": 2}


def chunks_of(body: Callable[..., Any], buckets: str, forward: int, *shapes: tuple[int, ...]) -> dict[str, int]:
    """The chunk of each op, by its name. The first `forward` ones are the forward, each a group of its own; `buckets`:
    of the inputs, `-` for one in none."""
    names = buckets.split()
    gm = segment(body, *(shapes or [SQUARE] * len(names)))
    bucket_of = {
        holder: name for holder, name in zip(fx_nodes.placeholders(gm.graph), names, strict=True) if name != "-"
    }
    nodes = [n for n in gm.graph.nodes if fx_nodes.is_compute(n) and fx_nodes.op_name(n) != "copy_"]
    work = [n for n in nodes if not fx_nodes.is_view(n)]
    for node in work[forward:]:
        node.meta["phase"] = "backward"
    found = node_chunks([[node] for node in nodes], bucket_of, CHUNKS, again(set(bucket_of)))
    assert set(found) == set(work)
    return {fx_nodes.op_name(node): chunk for node, chunk in found.items()}


def test_forward_work_follows_the_leaves_that_it_uses_or_its_latest_input() -> None:
    def body(x: Tensor, first: Tensor, second: Tensor, embed: Tensor) -> list[Tensor]:
        a = x.mm(embed)  # before all layers
        b = a.mul(first.t())
        c = b.add(second)
        return [x.sin(), c.cos().sub(first)]

    found = chunks_of(body, "- b0 b2 small", 99)
    assert found == {"mm": 0, "mul": 0, "add": 2, "sin": 0, "cos": 2, "sub": 2}


def test_a_group_stays_together() -> None:
    def body(x: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
        a = x.mul(first)
        return [a.cos().add(second)]

    gm = segment(body, *[SQUARE] * 3)
    mul, cos, add = (n for n in gm.graph.nodes if fx_nodes.is_compute(n))
    bucket_of = dict(zip(fx_nodes.placeholders(gm.graph)[1:], ("b0", "b1"), strict=True))
    groups = [[mul], [cos, add]]
    assert node_chunks(groups, bucket_of, CHUNKS, again(set(bucket_of))) == {mul: 0, cos: 1, add: 1}


def test_a_gradient_belongs_to_the_chunk_whose_leaf_it_is_of() -> None:
    def body(x: Tensor, first: Tensor, second: Tensor, into: Tensor, other: Tensor) -> list[Tensor]:
        y = x.mul(first).add(second)
        g = y.cos()
        other.copy_(g.sin())
        into.copy_(g.sub(first).exp())
        return [y]

    found = chunks_of(body, "- b0 b1 b0 b1", 2)
    assert found == {"mul": 0, "add": 1, "cos": 1, "sin": 1, "sub": 0, "exp": 0}


def test_what_may_lie_on_both_sides_of_a_border_is_cut_where_the_fewest_bytes_cross() -> None:
    """Of equal numbers behind the last."""

    def body(x: Tensor, first: Tensor, second: Tensor, into: Tensor) -> list[Tensor]:
        y = x.mul(first).add(second)
        into.copy_(y.sin().amax(0).neg().expand(8, 8).atan())
        return [y]

    found = chunks_of(body, "- b0 b1 b0", 2)
    assert found == {"mul": 0, "add": 1, "sin": 1, "amax": 1, "neg": 1, "atan": 0}


def test_what_would_have_more_bytes_is_made_behind_the_border() -> None:
    def body(x: Tensor, first: Tensor, second: Tensor, wide: Tensor, into: Tensor) -> list[Tensor]:
        y = x.mul(first).add(second)
        into.copy_(y.sin().mm(wide).exp())
        return [y]

    found = chunks_of(body, "- b0 b1 - b0", 2, SQUARE, SQUARE, SQUARE, (8, 64), (8, 64))
    assert found == {"mul": 0, "add": 1, "sin": 1, "mm": 0, "exp": 0}


def test_each_border_is_cut() -> None:
    def body(x: Tensor, first: Tensor, second: Tensor, third: Tensor, into: Tensor) -> list[Tensor]:
        y = x.mul(first).add(second).sub(third)
        into.copy_(y.sin().amax(0).neg().expand(8, 8).atan())
        return [y]

    found = chunks_of(body, "- b0 b1 b2 b0", 3)
    assert found == {"mul": 0, "add": 1, "sub": 2, "sin": 2, "amax": 2, "neg": 2, "atan": 0}


def test_a_value_that_a_later_chunk_reads_is_at_hand_there() -> None:
    """Its gradient's work may stand at each chunk that has it."""

    def body(x: Tensor, first: Tensor, second: Tensor, into: Tensor) -> list[Tensor]:
        y = x.mul(first)
        z = y.add(second)
        into.copy_(z.sin().div(y).atan())
        return [z]

    assert chunks_of(body, "- b0 b1 b0", 2) == {"mul": 0, "add": 1, "sin": 1, "div": 1, "atan": 0}


# --- ops, by hand ----------------------------------------------------------------------------------------------------

VALUES = "".join(f"buffer {name} f32[4] activation\n" for name in "abcde") + "buffer x f32[4] batch\n"


def said(text: str) -> dict[int, tuple[int, bool]]:
    return {i: (work.chunk, work.forward) for i, work in pieces(written(VALUES + text)).items()}


def test_an_op_has_the_chunk_that_it_says_and_a_wait_that_of_its_transfer() -> None:
    text = """
        run x -> a  phase=forward  chunk=0
        all_reduce a -> b  axis=dp  phase=forward  chunk=0
        wait b
        run b -> c  phase=forward  chunk=1
        run x -> x
        run c -> d  phase=backward  chunk=1
        run d -> e  phase=backward  chunk=0
    """
    assert said(text) == {0: (0, True), 1: (0, True), 2: (0, True), 3: (1, True), 5: (1, False), 6: (0, False)}


def test_where_both_meet_a_segment_is_of_the_backward_and_so_is_what_reads_it() -> None:
    text = """
        run x -> a  phase=forward  chunk=0
        run a -> b  phase=region  chunk=1
        run b -> c  phase=forward  chunk=1
        run c -> d  phase=backward  chunk=0
    """
    assert said(text) == {0: (0, True), 1: (1, False), 2: (1, False), 3: (0, False)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run x -> a  phase=forward  chunk=1  # one\n run a -> b  phase=forward  chunk=0  # two",
            "`two` on chunk 0 reads what `one` makes on chunk 1",
        ),
        (
            "run x -> a  phase=backward  chunk=0  # one\n run a -> b  phase=backward  chunk=1  # two",
            "`two` on chunk 1 reads what `one` makes on chunk 0",
        ),
        (
            "run x -> a  phase=backward  chunk=1  # one\n run a -> b  phase=forward  chunk=0",
            "`run` on chunk 0 reads what `one` makes on chunk 1",
        ),
    ],
)
def test_a_value_that_goes_the_wrong_way_is_refused(text: str, message: str) -> None:
    with pytest.raises(fzero.SpecError, match=f"the pipeline's cut does not follow the step: {message}: values go up"):
        said(text)


def test_values_of_the_forward_that_the_backward_of_another_chunk_reads_cross() -> None:
    text = """
        run x -> a  phase=forward  chunk=0
        run a -> b  phase=forward  chunk=1
        run b -> c  phase=forward  chunk=1
        run a c -> d  phase=backward  chunk=1
        run b d -> e  phase=backward  chunk=0
    """
    with pytest.raises(fzero.SpecError):
        crossing(written(VALUES + text))  # b goes down from the forward
    assert crossing(written(VALUES + text.replace("run b d", "run d"))) == {"a"}
    assert crossing(written(VALUES + text.replace("  chunk=0", "").replace("  chunk=1", ""))) == frozenset()


# --- whole steps ------------------------------------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """Its backward reads a value before the sum and one after it: a border between them is the smallest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope, scale = torch.cos(x), x.sum(-1, keepdim=True).exp()
        ctx.save_for_backward(slope, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        slope, scale = ctx.saved_tensors
        return g * (slope * scale)


def test_a_value_that_the_next_chunk_reads_is_not_made_again() -> None:
    def loss(p: Any, batch: Tensor) -> Tensor:
        for w in p["blocks"]:
            batch = Gate.apply(batch @ w)
        return batch.square().mean()

    params = {"blocks": [torch.empty(1, 8, device="meta") for _ in range(4)]}

    def made_again(**given: Any) -> int:
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=2, remat="full", **given)
        programs = fzero.lower(spec, params, torch.empty(4, 1, device="meta")).programs
        return sum(name.endswith(".again") for program in programs.values() for name in program.buffers)

    whole, cut = made_again(), made_again(mesh={"pp": 2}, pipeline="1f1b")
    assert 0 < cut < whole


def test_a_sum_that_no_leaf_reads_is_made_before_the_border() -> None:
    """Of a broadcast bias: its gradient and that of what it was added to read one large value."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        return torch.tanh(batch @ p["blocks"][0]["w"] + p["blocks"][1]["b"]).square().mean()

    params = {"blocks": [{"w": torch.empty(8, 1, device="meta")}, {"b": torch.empty(64, device="meta")}]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2}, microbatches=2, transfers="p2p")
    program = fzero.lower(spec, params, torch.empty(4, 8, device="meta")).programs[1]
    sent = [program.buffers[op.reads[0].name].shape for op in program.ops if op.is_send]
    assert sent == [(2, 1), (2, 1), ()]  # and the loss


# --- borders ----------------------------------------------------------------------------------------------------------

MICROBATCHES = 4


@pytest.mark.parametrize("roles", [2, 4])
@pytest.mark.parametrize("name", cases.PLAIN)
@pytest.mark.sampled(3)
def test_a_border_carries_one_activation_and_one_gradient(name: str, roles: int) -> None:
    """And every role works with the leaves of its own layers alone. One layer a role, which may begin without a leaf
    and whose backward may read none."""
    params, loss, batch = cases.plain(name, roles)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-3), microbatches=MICROBATCHES, mesh={"pp": roles}, pipeline="1f1b"
    )
    programs = fzero.lower(spec, params, batch(0, 0)).programs
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for role, program in programs.items():
        regions = [op for op in program.ops if op.in_region]
        buckets = {program.buffers[ref.name].bucket for op in regions for ref in (*op.reads, *op.writes)} - {None}
        assert {program.buckets[name].slots[0].path.split("/")[1] for name in buckets} == {str(role)}
        for op in program.ops:
            if op.is_send and op.target not in program.metrics.values():
                sent[role, op.peer].append(program.buffers[op.target].nbytes)
    assert sent.keys() == {(a, b) for a in range(roles) for b in range(roles) if abs(a - b) == 1}
    assert all(len(sizes) == MICROBATCHES for sizes in sent.values())
    assert all(sent[role, role + 1] == sent[role + 1, role] for role in range(roles - 1))


def test_a_penalty_sends_the_gradient_of_a_number() -> None:
    """The loss lies on the last role, and so does each layer's norm. What a norm's gradient multiplies lies with the
    layer, so its own gradient is sent, a number, and no weight's."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        x = batch
        for layer in p["layers"]:
            x = torch.tanh(x @ layer)
        return x.square().mean() + 1e-2 * sum(layer.square().sum() for layer in p["layers"])

    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-3), microbatches=MICROBATCHES, mesh={"pp": 4}, pipeline="1f1b"
    )
    params = {"layers": [torch.empty(16, 16, device="meta") for _ in range(4)]}
    programs = fzero.lower(spec, params, torch.empty(4, 16, device="meta")).programs
    down = [
        program.buffers[op.target].numel
        for role, program in programs.items()
        for op in program.ops
        if op.is_send and op.peer < role
    ]
    assert set(down) == {1, 16}


class Mirrored(torch.autograd.Function):
    """Its backward is its forward: the gradient of its input is taken by the same product."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return z @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g @ ctx.saved_tensors[0], None


def mirrored(p: Any, batch: Tensor) -> Tensor:
    z = batch @ p["embed"]
    for w in p["blocks"]:
        z = Mirrored.apply(z, w)
    return z.square().mean() + sum(w.square().sum() for w in p["blocks"])


def of_mirrored(mesh: dict[str, int], **given: Any) -> fzero.Lowered:
    params = {"embed": torch.empty(8, 8), "blocks": [torch.empty(8, 8) for _ in range(4)]}
    spec = fzero.Spec(loss=mirrored, optimizer=fzero.optim.sgd(0.1), mesh=mesh, bucket_bytes=64, **given)
    return kept.lower(spec, params, torch.empty(4, 8), math.prod(mesh.values()))


def test_a_segment_that_forward_and_backward_share() -> None:
    """Each run of it says its phase. Read off the segment, a backward run would be forward work of a later chunk."""
    phases: dict[str, set[str | None]] = defaultdict(set)
    for op in of_mirrored({"dp": 1}).after("segment").ops:
        phases[op.segment] |= {op.phase} if op.in_region else set()
    assert {"forward", "backward"} in phases.values()
    of_mirrored({"pp": 4}, pipeline="1f1b", microbatches=2)


def test_a_cut_that_does_not_follow_the_step_names_both_ops() -> None:
    program = segmented(of_mirrored({"dp": 1}).after("rematerialise_views"), {f"blocks.{n}": n for n in range(4)})
    assert {piece.chunk for piece in pieces(program).values()} == {0, 1, 2, 3}
    at = next(i for i, op in enumerate(program.ops) if op.chunk == 1 and op.phase == "forward")
    wrong = replace(program, ops=(*program.ops[:at], program.ops[at].with_attrs(chunk=3), *program.ops[at + 1 :]))
    text = r"`forward blocks\.2 .*` on chunk 2 reads what `forward blocks\.1 .*` makes on chunk 3: values go up"
    with pytest.raises(fzero.SpecError, match=text):
        pieces(wrong)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.sampled(1)
def test_a_gradient_that_a_transfer_brings_stays_in_its_chunk(schedule: str) -> None:
    """With the sequence over tp a norm's gain has its gradient's sum at the end of its layer, next to the border."""
    model = gpt(layers=2)
    spec = fzero.Spec(
        loss=model.loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2, "tp": 2}, shard=model.rules, sequence="tp",
        pipeline=schedule, microbatches=2,
    )  # fmt: skip
    programs = fzero.lower(spec, model.params, model.batch(0, 0), world_size=4).programs
    assert [name for program in programs.values() for name in program.buffers if ".back" in name] == []
