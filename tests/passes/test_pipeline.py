"""Programs by role: messages in one order at both ends, and what recomputation leaves alone at a border."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import cases
import kept
import pytest
import torch
from torch import Tensor
from tp_models import gpt

import fzero
from fzero.passes.pipeline.chunks import pieces
from fzero.passes.segment import segment

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@pytest.mark.parametrize("roles", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(1)
def test_receives_start_in_the_order_of_the_sends(schedule: str, roles: int) -> None:
    """A tied embedding, its gradients and a norm beside the activations: NCCL tells them apart by order alone."""
    init, loss = cases.tied(64, 16, 2 * roles if schedule in ("interleaved", "zb-v") else roles)  # a layer a chunk
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-2), microbatches=4, clip_norm=1.0, transfers="p2p",
        mesh={"pp": roles}, pipeline=schedule,
    )  # fmt: skip
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for role, program in fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(4, 8, 64)).programs.items():
        for op in program.ops:
            if op.is_send:
                sent[role, op.peer].append(op.tag)
            elif op.is_recv:
                received[op.peer, role].append(op.tag)
    assert sent == received
    assert len(sent) >= 2 * (roles - 1)


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


def test_what_follows_from_the_batch_is_made_for_the_first_chunk_that_reads_it() -> None:
    """A mask that all layers read: a role of two chunks makes it once, before both."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        mask, x = (batch > 0).float().cumsum(-1).cos(), batch
        for w in p["blocks"]:
            x = torch.tanh(x @ w) * mask
        return x.square().mean()

    params = {"blocks": [torch.empty(8, 8, device="meta") for _ in range(4)]}
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2}, pipeline="interleaved", microbatches=2,
        transfers="p2p",
    )  # fmt: skip
    program = fzero.lower(spec, params, torch.empty(4, 8, device="meta")).programs[1]
    makes = [
        op.chunk for op in program.ops
        if op.computes and any("cos" in str(n.target) for n in program.segments[op.segment].graph.nodes)
        and all(program.buffers[ref.name].kind == "batch" for ref in op.reads)
    ]  # fmt: skip
    assert makes == [1, 1]  # of two microbatches


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_lent_says_whose_leaf_it_is_and_moves_say_whom_they_serve(zero: int) -> None:
    """A tied embedding, held on the host: it is brought for the copy that goes to the last role, or for its gather."""
    init, loss = cases.tied(64, 16, 2)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=2, zero=zero, offload={"params/**": "cpu"},
        mesh={"pp": 2, "dp": 2}, pipeline="1f1b", prefetch=1,
    )  # fmt: skip
    programs = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(8, 8, 64), world_size=4).programs
    lent = {role: {b.name: b.lent for b in p.buffers.values() if b.lent is not None} for role, p in programs.items()}
    column = "params:small.full" if zero == 3 else "params:small"
    assert list(lent[0].values()) == [column], "of the embedding alone, by both roles"
    assert lent[0] == lent[1]
    assert all(fzero.parse(str(program)) == program for program in programs.values())
    copied = next(op for op in programs[0].ops if op.writes and op.writes[0].name in lent[0])
    assert copied.why.startswith("for role 1: ")
    gather = next((op for op in programs[0].ops if op.gathers and op.target == copied.reads[0].name), copied)
    brought = next(op for op in programs[0].ops if op.moves and op.target == gather.reads[0].name)
    assert brought.why == gather.why, "not once more `for`"


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
    program = segment(of_mirrored({"dp": 1}).after("rematerialise_views"), {f"blocks.{n}": n for n in range(4)})
    assert {piece.chunk for piece in pieces(program).values()} == {0, 1, 2, 3}
    at = next(i for i, op in enumerate(program.ops) if op.chunk == 1 and op.phase == "forward")
    wrong = replace(program, ops=(*program.ops[:at], program.ops[at].with_attrs(chunk=3), *program.ops[at + 1 :]))
    text = r"`forward blocks\.2 .*` on chunk 2 reads what `forward blocks\.1 .*` makes on chunk 3: values go up"
    with pytest.raises(fzero.SpecError, match=text):
        pieces(wrong)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_that_a_transfer_brings_stays_in_its_chunk(schedule: str) -> None:
    """With the sequence over tp a norm's gain has its gradient's sum at the end of its layer, next to the border."""
    model = gpt(layers=2)
    spec = fzero.Spec(
        loss=model.loss, optimizer=fzero.optim.sgd(0.1), mesh={"pp": 2, "tp": 2}, shard=model.rules, sequence="tp",
        pipeline=schedule, microbatches=2,
    )  # fmt: skip
    programs = fzero.lower(spec, model.params, model.batch(0, 0), world_size=4).programs
    assert [name for program in programs.values() for name in program.buffers if ".back" in name] == []
