"""Sums of tensor parallelism as messages of blocks: those of a loop by hand, one set of bits over stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Run, differing, gloo, run
from helpers import values as of_ranks
from torch import Tensor

import fzero
from fzero import P, Precision, optim, tree
from fzero.errors import SpecError
from fzero.ir.program import wire_bytes
from fzero.kernels.codecs import CODECS, decode, decode_sum, encode

RULES = {"params/*/up": P(None, "tp"), "params/*/down": P("tp", None)}
WIDTH = 80  # of a row: a block and a part of one


def start() -> Any:
    made = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=made) / 9  # noqa: E731
    return [{"up": draw(WIDTH, 96), "down": draw(96, WIDTH), "norm": 1 + draw(WIDTH)} for _ in range(2)]


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))


def loss(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = x + torch.relu((x * p["norm"]) @ p["up"]) @ p["down"]
    return x.square().mean()


def trained(mesh: dict[str, int], precision: Any, steps: int = 1, **given: Any) -> Run:
    world = 1
    for n in mesh.values():
        world *= n
    made = {"loss": loss, "optimizer": optim.sgd(0.5), "transfers": "p2p", "shard": RULES if "tp" in mesh else None}
    return run(fzero.Spec(mesh=mesh, precision=precision, **{**made, **given}), start(), rows, world=world, steps=steps)


class Summed(torch.autograd.Function):
    """The sum of what two ranks hold, by messages; the gradient of each is what comes back."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return summed([a, b])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class Read(torch.autograd.Function):
    """A value that two ranks read, whose gradients are summed by messages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return summed([a, b])


def summed(parts: list[Tensor]) -> Tensor:
    codec, size = CODECS["int8"], parts[0].numel()
    padded = -(-size // 128) * 128
    flat = [torch.nn.functional.pad(x.reshape(-1), (0, padded - size)) for x in parts]
    total = decode_sum(torch.stack([encode(x, codec) for x in flat]), 1, codec)
    return decode(encode(total, codec), padded, codec)[:size].view(parts[0].shape)


def test_a_step_is_that_of_a_loop_by_hand() -> None:
    held, x = tree.map(lambda p: p.requires_grad_(), start()), rows(0)
    for p in held:
        halves = Read.apply(x * p["norm"])
        parts = [
            torch.relu(half @ up) @ down
            for half, up, down in zip(halves, p["up"].chunk(2, 1), p["down"].chunk(2, 0), strict=True)
        ]
        x = x + Summed.apply(*parts)
    x.square().mean().backward()
    one = trained({"tp": 2}, Precision(sums="int8"))
    assert [op.kind for op in one.lowered.program.ops if op.axis == "tp" and op.kind == "all_to_all"] == [
        "all_to_all"
    ] * 4
    paths, leaves, _ = tree.flatten(held)
    for path, leaf in zip(paths, leaves, strict=True):
        torch.testing.assert_close(one.final[f"params/{path}"], leaf.detach() - 0.5 * leaf.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [{}, {"sequence": "tp"}, {"microbatches": 2, "remat": "full"}], ids=str)
@pytest.mark.sampled(1)
def test_stages_have_one_set_of_bits_near_one_rank(given: dict[str, Any]) -> None:
    policy = Precision(sums="int8", gather="int8", reduce="int8", compute="bf16")
    mesh = {"dp": 2, "tp": 2}
    first = trained(mesh, policy, zero=0, **given)
    for zero in (2, 3):
        assert differing(trained(mesh, policy, zero=zero, **given).final, first.final) == [], zero
    plain = trained({"dp": 2}, "fp32", microbatches=given.get("microbatches", 1))
    before = dict(zip([f"params/{p}" for p in tree.flatten(start())[0]], tree.flatten(start())[1], strict=True))
    for path, leaf in plain.final.items():
        if path in before:
            moved = (leaf - before[path]).abs().max()
            assert (first.final[path] - leaf).abs().max() <= 0.4 * moved, path  # bf16, and int8 thrice


def test_sums_take_a_quarter_of_the_bytes() -> None:
    sent = {}
    for name, precision in (("fp32", "fp32"), ("int8", Precision(sums="int8"))):
        spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.5), mesh={"tp": 4}, shard=RULES, precision=precision)
        lowered = fzero.lower(spec, start(), torch.zeros(16, 8, WIDTH), world_size=4)
        program = lowered.program
        sent[name] = sum(wire_bytes(program, op) for op in program.ops if op.axis == "tp")
    assert sent["fp32"] / sent["int8"] == pytest.approx(4 / 1.0625, rel=0.01)
    assert "sums=int8" in lowered.choices["codec"]
    assert "(3.8 times)" in lowered.choices["codec"]


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("sequence", [None, "tp"])
def test_the_list_of_transfers_says_what_messages_send(mesh: dict[str, int], sequence: str | None) -> None:
    policy = Precision(sums="int8")
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.5), mesh=mesh, shard=RULES, precision=policy, sequence=sequence)
    lowered = fzero.lower(spec, start(), torch.zeros(16, 8, WIDTH))
    assert lowered.sharding is not None
    program, moves = lowered.program, lowered.sharding.regions[0].moves
    coded = [op for op in program.ops if op.axis == "tp" and program.buffers[op.reads[0].name].dtype is torch.uint8]
    sent = sum(wire_bytes(program, op) for op in coded if op.transfers)
    assert sum(move.nbytes for move in moves if move.codec) == sent > 0
    assert " int8 " in str(lowered.sharding)


def processes() -> dict[str, Tensor]:
    spec = fzero.Spec(
        loss=loss, optimizer=optim.sgd(0.5), mesh={"tp": 2}, shard=RULES, precision=Precision(sums="int8"),
        transfers="p2p",
    )  # fmt: skip
    state = fzero.step(fzero.init(start(), spec), rows(0))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def test_processes_have_the_bits_of_the_interpreter() -> None:
    wanted = trained({"tp": 2}, Precision(sums="int8")).final
    for final in of_ranks(gloo(2, processes)):
        assert [path for path, leaf in wanted.items() if not torch.equal(final[path], leaf)] == []


def test_signs_are_no_codec_of_sums() -> None:
    with pytest.raises(SpecError, match=r"Precision\(sums='sign'\): needed one of int8"):
        Precision(sums="sign")
