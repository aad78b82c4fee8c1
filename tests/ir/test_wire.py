"""The bytes on the wire have one formula: programs, comms and shardings give its figures."""

from __future__ import annotations

import cases
import pytest
import torch

from fzero.comm.by_axis import sent
from fzero.ir import kinds
from fzero.ir.collectives import Collective
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program, wire_bytes
from fzero.ir.records import Ref
from fzero.ir.wire import kind_bytes, op_bytes
from fzero.shard import moves
from fzero.shard.placements import Partial, Placement, Replicated, Shard

MOVES: dict[str, tuple[Placement, Placement]] = {
    "all_gather": (Shard(0), Replicated()),
    "all_reduce": (Partial(), Replicated()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_to_all": (Shard(0), Shard(1)),
}


def tensors(program: Program, op: Op) -> list[torch.Tensor]:
    named = [program.buffers[ref.name] for ref in (*op.reads, *op.writes)]
    return [torch.empty(buffer.shape, dtype=buffer.dtype, device="meta") for buffer in named]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_program_counts_what_its_comm_sends(zero: int) -> None:
    program = cases.lowered(4, zero=zero, mesh={"dp_out": 2, "dp": 2}).program
    transfers = [op for op in program.ops if op.is_collective]
    assert transfers
    for op in transfers:
        assert wire_bytes(program, op) == sent(op, tensors(program, op), program.mesh.size(str(op.axis)))


def test_bytes_by_hand() -> None:
    gather = make_op("all_gather", [Ref("a")], [Ref("b")])
    assert op_bytes(gather, [8], [32], 4) == 24
    assert op_bytes(make_op("send", [Ref("a")]), [8], [], 2) == 8
    assert op_bytes(make_op("recv", writes=[Ref("a")]), [], [8], 2) == 0
    assert op_bytes(make_op("wait", [Ref("a")]), [8], [], 2) == 0
    assert kind_bytes("reduce_scatter", 32, 4) == 24
    assert kind_bytes("own_part", 32, 4) == 0


def test_there_is_one_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one in the record of transfers is at once that of programs, comms and shardings."""
    program, value = cases.lowered(2, zero=3).program, torch.empty(8, 8, device="meta")
    ops = [op for op in program.ops if op.is_collective]
    monkeypatch.setattr(Collective, "wire_bytes", lambda record, whole, world: 7)
    assert {wire_bytes(program, op) for op in ops} == {7}
    assert {sent(op, tensors(program, op), 2) for op in ops} == {7}
    assert {moves.wire_bytes(*ends, value, 2) for ends in MOVES.values()} == {7}


@pytest.mark.parametrize("kind", MOVES)
def test_a_move_sends_what_its_transfer_does(kind: str) -> None:
    source, want = MOVES[kind]
    assert moves.kind_of(source, want) == kind
    value = torch.empty(12, 12, device="meta")
    whole = value.nbytes // 3 if kind == "all_to_all" else value.nbytes
    record = kinds.of(kind).collective
    assert record is not None
    assert moves.wire_bytes(source, want, value, 3) == record.wire_bytes(whole, 3)
