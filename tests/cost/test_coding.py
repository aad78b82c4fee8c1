"""What codecs save and cost, beside sums by hand."""

from __future__ import annotations

import re

import cases
import pytest
import torch

import fzero
from fzero import Precision, optim
from fzero.cost import coding
from fzero.cost.rates import Rates
from fzero.ir.op import Op
from fzero.ir.program import Program

WIDTH, ROWS = 64, 4
INT8 = Precision(gather="int8", reduce="int8")
RATES = Rates(latency={}, wire_bytes={}, hidden=0.0, flops={2: 1e10, 4: 1e10}, memory_bytes=1e10, ranks=4)


@pytest.fixture(autouse=True)
def a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """To encode, and two to decode."""
    monkeypatch.setattr(coding, "nanoseconds", lambda codec: (1.0, 2.0))


def test_codecs_are_measured_whatever_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of several measures them in `fzero.init`."""
    monkeypatch.undo()
    torch.set_default_dtype(torch.float64)
    try:
        assert min(coding.nanoseconds.__wrapped__("int8")) > 0
    finally:
        torch.set_default_dtype(torch.float32)


def lowered(
    policy: Precision | str, zero: int | str = 2, world: int = 4, mesh: dict[str, int] | None = None
) -> fzero.Lowered:
    spec = fzero.Spec(loss=cases.layers_loss, optimizer=optim.sgd(0.1), precision=policy, zero=zero, mesh=mesh)
    return fzero.lower(spec, cases.layers(WIDTH), cases.batch(ROWS), world_size=world)


def test_bytes_and_seconds_are_those_of_a_sum_by_hand() -> None:
    """Three matrices, of 8 x 64 and twice 64 x 64, gathered once and reduced once."""
    found = coding.coding(lowered(INT8).program, INT8)
    elements = WIDTH * (8 + WIDTH + WIDTH)
    assert found.sent == 2 * elements * 68 // 64 * 3 // 4
    assert found.saved == 2 * elements * 3 - 2 * elements * 68 // 64 * 3 // 4
    # a gather: encode a quarter, decode all in the forward and matrices but the first in the backward; a reduction:
    # encode all, decode a quarter of four ranks
    wanted = elements / 4 + 2 * elements + 2 * WIDTH * WIDTH * 2 + elements + 2 * elements
    assert found.seconds == pytest.approx(wanted * 1e-9)
    assert found.pays_below == pytest.approx(8 * found.saved / (wanted * 1e-9))


def test_choices_say_what_codecs_do() -> None:
    assert "3.8 times); encoding and decoding 0.0" in lowered(INT8).choices["codec"]
    assert lowered(INT8, world=1).choices["codec"].endswith("nothing travels in messages, so nothing is coded there")
    assert "codec" not in lowered("fp32").choices


@pytest.mark.parametrize(("wire", "said"), [(1e7, "none, but Precision(gather='int8', reduce='int8') may pay: int8"),
                                            (1e12, "none: int8 would take")])  # fmt: skip
def test_where_nobody_asks_it_says_what_a_codec_would_do(wire: float, said: str) -> None:
    kinds = ("all_gather", "reduce_scatter")
    rates = Rates(**{**RATES.__dict__, "latency": dict.fromkeys(kinds, 0.0), "wire_bytes": dict.fromkeys(kinds, wire)})
    text = coding.sentence(lowered("fp32").programs, Precision(), rates)
    assert text.startswith(said)
    assert text.endswith("ms to encode and decode")


@pytest.mark.parametrize("nodes", [2, 8])
def test_replicas_of_nodes_are_told_what_messages_to_each_of_them_take(nodes: int) -> None:
    """What is said to come off the wire does, at one byte a second."""
    mesh, kinds = {"dp_out": nodes, "dp": 2}, ("all_gather", "reduce_scatter")
    one = {"latency": dict.fromkeys(kinds, 0.0), "wire_bytes": dict.fromkeys(kinds, 1.0), "ranks": 0}
    rates = Rates(**{**RATES.__dict__, **one})

    def seconds(program: Program) -> float:
        return sum(op_seconds(program, op) for op in program.ops if op.is_collective)

    def op_seconds(program: Program, op: Op) -> float:
        kind, (source, target) = op.row.collective, (program.buffers[ref.name] for ref in (op.reads[0], op.writes[0]))
        assert kind is not None
        assert op.axis is not None
        whole = kind.whole_bytes(source.nbytes, target.nbytes)
        return rates.transfer(op.kind, whole, op.axis, program.mesh.size(op.axis))

    plain, coded = (
        lowered(policy, "hsdp", 2 * nodes, mesh).program
        for policy in ("fp32", Precision(gather="int8", reduce="int8", exact=()))
    )
    assert coding._untaken(plain, rates)[0] == pytest.approx(seconds(plain) - seconds(coded), rel=0.01)


def test_many_replicas_of_nodes_are_told_that_messages_do_not_pay() -> None:
    """Each of 16 nodes sends its int8 slice to 15 others: twice what an all-reduce sends."""
    policy = Precision(reduce="int8", exact=())
    text = lowered(policy, "hsdp", 32, {"dp_out": 16, "dp": 2}).choices["codec"]
    assert re.fullmatch(r"reduce=int8: [\d,]+ bytes a step and rank more: messages do not pay here. Leave .*", text)


def test_figures_are_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for codec in ("int8", "sign"):
        assert all(0 < figure < 1000 for figure in coding.nanoseconds(codec))
