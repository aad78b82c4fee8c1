"""lower_coded: a mean that travels in codes, compared with a loop by hand over whole blocks; and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_steps import stepped, written
from torch import Tensor

import fzero
from fzero.errors import SpecError
from fzero.kernels.codecs import CODECS, decode, decode_sum, encode

SIZE, BLOCK = 192, 64  # elements of the value, whole blocks


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def spec(codec: str, both: bool, feedback: bool = True, **options: Any) -> fzero.Spec:
    def step(state: Any, x: Tensor) -> Any:
        mean, error = fzero.coded_mean(x, state["error"] if feedback else None, codec, both_ways=both)
        return {"seen": state["seen"] + mean, **({"error": error} if feedback else {})}, {}

    return fzero.Spec(step=step, zero=0, **options)


def first(both: bool, feedback: bool = True) -> dict[str, Any]:
    zeros = torch.zeros(SIZE)
    return {"seen": zeros, **({"error": fzero.coded_error(zeros, both_ways=both)} if feedback else {})}


def by_hand(world: int, steps: int, codec: str, both: bool, feedback: bool) -> tuple[Tensor, Tensor]:
    """(the sum of the means, what each rank has lost)."""
    how, part = CODECS[codec], -(-SIZE // (BLOCK * world)) * BLOCK
    length = part * world
    seen, lost, server = torch.zeros(SIZE), torch.zeros(world, SIZE), torch.zeros(world, part)
    for step in range(steps):
        messages = []
        for rank in range(world):
            value = batch(rank, step) + lost[rank] * feedback
            sent = encode(torch.nn.functional.pad(value, (0, length - SIZE)), how)
            lost[rank] = value - decode(sent, length, how)[:SIZE]
            messages.append(sent.view(world, -1))
        slices = []
        for rank in range(world):
            own = decode_sum(torch.stack([sent[rank] for sent in messages]), world, how)
            if both:
                value = own + server[rank] * feedback
                own = decode(encode(value, how), part, how)
                server[rank] = value - own
            slices.append(own)
        seen = seen + torch.cat(slices)[:SIZE]
    return seen, lost


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("codec", "both", "world"), [("int8", False, 3), ("sign", True, 3), ("int8", True, 2)])
def test_a_mean_in_codes_is_that_of_a_loop_by_hand(codec: str, both: bool, world: int, feedback: bool) -> None:
    found = stepped(spec(codec, both, feedback), first(both, feedback), batch, world=world, steps=2)
    seen, lost = by_hand(world, 2, codec, both, feedback)
    torch.testing.assert_close(found.leaves["seen"], seen, rtol=1e-5, atol=1e-5)
    if feedback:
        torch.testing.assert_close(found.leaves["error/worker"], lost, rtol=1e-4, atol=1e-5)


def test_one_rank_loses_nothing() -> None:
    found = stepped(spec("sign", True), first(True), batch, world=1)
    assert torch.equal(found.leaves["seen"], batch(0, 0))
    assert not found.leaves["error/worker"].any()
    assert not found.leaves["error/server"].any()


def test_the_transfers_are_two_of_bytes() -> None:
    program = written(spec("int8", True), first(True), batch(0, 0), 3).program
    sent = [op for op in program.ops if op.is_collective and not op.row.small]
    assert [(op.kind, op.axis) for op in sent] == [("all_to_all", "dp"), ("all_gather", "dp")]
    message = 3 * (BLOCK + 4)  # a number of 8 bits for each element, one of 32 for each block
    sizes = [(program.buffers[op.reads[0].name], program.buffers[op.target]) for op in sent]
    assert [(source.numel, target.numel) for source, target in sizes] == [(message, message), (message // 3, message)]
    assert {b.dtype for pair in sizes for b in pair} == {torch.uint8}
    waits = [op.reads[0].name for op in program.ops if op.kind == "wait"]
    assert waits == [op.target for op in sent]


def test_ranks_of_a_pipeline_have_other_leaves() -> None:
    def step(state: Any, x: Tensor) -> Any:
        mean, _ = fzero.coded_mean(x, None, "int8")
        return {"params": {"blocks": [w + mean for w in state["params"]["blocks"]]}}, {}

    one = fzero.Spec(step=step, mesh={"pp": 2, "dp": 2})
    state = {"params": {"blocks": [torch.zeros(SIZE)] * 2}}
    with pytest.raises(SpecError, match="only those of its stage"):
        written(one, state, batch(0, 0), 4)


def test_the_error_of_another_world_is_refused() -> None:
    def step(state: Any, x: Tensor) -> Any:
        mean, error = fzero.coded_mean(x, state["error"], "int8", both_ways=True)
        return {"seen": state["seen"] + mean, "error": error}, {}

    state = first(True)
    server = fzero.per_rank(torch.zeros(2 * BLOCK))
    state["error"] = state["error"]._replace(server=server)
    with pytest.raises(SpecError, match="server has 128 elements, a slice of this world has 64"):
        written(fzero.Spec(step=step, zero=0), state, batch(0, 0), 3)
