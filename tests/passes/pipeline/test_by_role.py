"""by_role: the programs of roles: when a message starts, which are waited for, and the one order of exchanges."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
import two_chunks
from short_programs import lines, segment, shown, written
from two_chunks import SQUARE, step

import fzero
from fzero.ir.program import Program
from fzero.passes.pipeline.by_role import Exchange, Message, _received_in_order, by_role
from fzero.pipeline import make_schedule

SAME = {"same": segment(lambda s: [s.clone()], ())}


def roles(program: Program, schedule: str = "1f1b", count: int = 2) -> dict[int, Program]:
    microbatches = sum(name in program.buffers for name in ("h0", "h1", "h2"))
    return by_role(program, make_schedule(schedule, count, microbatches))


def test_a_receive_starts_an_action_early_and_a_send_is_waited_for_an_action_later() -> None:
    first, second = roles(step()).values()
    assert shown(first.ops) == lines(
        """
        run x w0[0:64:8x8] -> h0  chunk=0
        send h0  axis=pp  peer=1  tag=2
        recv  -> d0  axis=pp  peer=1  tag=0
        run x w0[0:64:8x8] -> h1  chunk=0
        send h1  axis=pp  peer=1  tag=3
        recv  -> d1  axis=pp  peer=1  tag=1
        wait h0
        wait d0
        run d0 x -> g0[0:64:8x8]  chunk=0
        wait h1
        wait d1
        run d1 x -> g0[0:64:8x8]  chunk=0
        update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]
        """
    )
    assert shown(second.ops) == lines(
        """
        recv  -> h0  axis=pp  peer=0  tag=2
        wait h0
        run h0 w1[0:64:8x8] -> y0 l0  chunk=1
        recv  -> h1  axis=pp  peer=0  tag=3
        run y0 h0 w1[0:64:8x8] -> d0 g1[0:64:8x8]  chunk=1
        send d0  axis=pp  peer=0  tag=0
        wait h1
        run h1 w1[0:64:8x8] -> y1 l1  chunk=1
        wait d0
        run y1 h1 w1[0:64:8x8] -> d1 g1[0:64:8x8]  chunk=1
        send d1  axis=pp  peer=0  tag=1
        update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]
        wait d1
        """
    )


def test_each_op_says_its_action_and_each_message_whom_it_is_for() -> None:
    first = roles(step())[0]
    assert [op.why for op in first.ops][:5] == [
        "F0.0 low",
        "F0.0 to role 1",
        "F0.0 from role 1",
        "F0.1 low",
        "F0.1 to role 1",
    ]
    assert [op.why for op in first.ops][-3:] == ["B0.1 from role 1", "B0.1 end", "update w0"]


def test_a_role_has_its_own_state_and_what_it_names() -> None:
    records = "bucket b2 length=64 role=1 u[0:64:64]\n buffer w2 f32[64] param bucket=b2\n buffer n f32[] state"
    program = replace(
        step(records=records),
        trainable=fzero.parse("mesh dp=1\ntransport p2p\ntrainable b0:0 b1:0 b2:0\nops").trainable,
    )
    first, second = roles(program).values()
    assert (first.role, second.role) == (0, 1)
    assert set(first.buffers) == {"w0", "g0", "x", "h0", "h1", "d0", "d1", "n"}
    assert set(second.buffers) == {"w1", "g1", "x", "h0", "h1", "d0", "d1", "n", "w2", "y0", "y1", "l0", "l1"}
    assert (set(first.buckets), set(second.buckets)) == ({"b0"}, {"b1", "b2"})
    assert [str(slot) for slot in first.trainable] == ["b0:0"]
    assert [str(slot) for slot in second.trainable] == ["b1:0", "b2:0"]


def test_weights_gradients_fill_the_time_in_which_a_message_travels() -> None:
    assert shown(roles(step(), "zb-h1")[1].ops)[4:] == lines(
        """
        run y0 w1[0:64:8x8] -> d0  chunk=1
        send d0  axis=pp  peer=0  tag=0
        wait h1
        run h1 w1[0:64:8x8] -> y1 l1  chunk=1
        wait d0
        run y1 w1[0:64:8x8] -> d1  chunk=1
        send d1  axis=pp  peer=0  tag=1
        run y0 h0 -> g1[0:64:8x8]  chunk=1
        wait d1
        run y1 h1 -> g1[0:64:8x8]  chunk=1
        update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]
        """
    )


# --- exchanges -------------------------------------------------------------------------------------------------------

LOSS = "buffer loss f32[] metric\n metric loss loss"


def test_a_metric_is_sent_to_every_role_at_the_end() -> None:
    program = step(records=LOSS, after="run l0 -> loss  fresh=1  segment=same", microbatches=1, segments=SAME)
    first, second = roles(program).values()
    assert shown(first.ops)[-3:] == lines(
        """
        update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]
        recv  -> loss  axis=pp  peer=1  tag=2
        wait loss
        """
    )
    assert shown(second.ops)[-5:] == lines(
        """
        run l0 -> loss
        update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]
        send loss  axis=pp  peer=0  tag=2
        wait loss
        wait d0
        """
    )


def test_what_is_read_behind_the_region_is_sent_before_its_reader_and_with_all_that_is_ready() -> None:
    """The value for the update of the first role, and the metric that was made before it."""
    records = LOSS + "\n buffer rate f32[] activation"
    ops = """
        run l0 -> loss  fresh=1  segment=same
        run l0 -> rate  fresh=1  segment=same
        run rate w0[0:64:8x8] -> w0[0:64:8x8]  fresh=1  segment=same
    """
    program = step(records=records, after=ops, microbatches=1, segments=SAME)
    first, second = roles(program).values()
    assert shown(first.ops)[-6:] == lines(
        """
        recv  -> loss  axis=pp  peer=1  tag=2
        recv  -> rate  axis=pp  peer=1  tag=3
        wait loss
        wait rate
        run rate w0[0:64:8x8] -> w0[0:64:8x8]
        update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]
        """
    )
    assert shown(second.ops)[-8:-2] == lines(
        """
        run l0 -> loss
        run l0 -> rate
        send loss  axis=pp  peer=0  tag=2
        send rate  axis=pp  peer=0  tag=3
        wait loss
        wait rate
        """
    )


def sent_by(program: Program, name: str) -> list[str]:
    """The messages of a buffer and the waits for them, without tags."""
    ops = [op for op in shown(program.ops) if op.split()[0] in ("send", "wait") and f" {name}" in op]
    return [op.split("  tag")[0] for op in ops]


def test_a_buffer_for_several_roles_goes_to_one_after_the_other() -> None:
    sent = [Message("a", 0, 1, 0), Message("a", 0, 2, 1), Message("b", 1, 2, 2)]
    a1, a2, b2 = sent
    assert Exchange.of((0, None), sent).rounds == ((a1, b2), (a2,))
    records = "bucket b2 length=64 role=2 u[0:64:8x8]\n buffer w2 f32[64] param bucket=b2\n"
    records += LOSS + "\n buffer k0 f32[] activation"
    regions = two_chunks.microbatch(0) + (
        "run h0 w2[0:64:8x8] -> k0  phase=forward  chunk=2  region=r0  microbatch=0  fresh=1  segment=third\n"
    )
    third = {"third": segment(lambda h, w: [h.mm(w).sum()], SQUARE, SQUARE)}
    ops = "run k0 -> loss  fresh=1  segment=same"
    program = step(
        records=records, regions=regions, after=ops, microbatches=1, segments={**third, **SAME}, mesh="pp=3 dp=1"
    )
    made = roles(program, count=3)
    assert sent_by(made[0], "h0") == lines(
        """
        send h0  axis=pp  peer=1
        wait h0
        send h0  axis=pp  peer=2
        wait h0
        """
    )
    waits = [str(op.target) for op in made[0].ops if op.is_wait]
    assert waits == ["h0", "d0", "h0", "loss"], "role 1 may need role 2 for its d0, and role 2 needs h0"
    assert sent_by(made[2], "loss") == lines(
        """
        send loss  axis=pp  peer=0
        wait loss
        send loss  axis=pp  peer=1
        wait loss
        """
    )


def test_receives_start_in_the_order_of_the_sends_of_the_same_role() -> None:
    """A receive that comes first is preceded by those that were sent before it; those from others stay."""
    records = "".join(f"buffer {name} f32[4] activation\n" for name in "abcd")
    sender = written(records + "send a  axis=pp  peer=1  tag=7\n send b  axis=pp  peer=1  tag=5", mesh="pp=3 dp=1")
    other = written(records + "send c  axis=pp  peer=1  tag=6", mesh="pp=3 dp=1")
    receiver = written(
        records + "recv -> b  axis=pp  peer=0  tag=5\n wait b\n recv -> c  axis=pp  peer=2  tag=6\n"
        "recv -> a  axis=pp  peer=0  tag=7\n wait a",
        mesh="pp=3 dp=1",
    )
    done = _received_in_order({0: sender, 1: receiver, 2: other})
    assert [(op.kind, op.target) for op in done[1].ops] == [
        ("recv", "a"), ("recv", "b"), ("wait", "b"), ("recv", "c"), ("wait", "a"),
    ]  # fmt: skip
    assert done[0].ops == sender.ops


# --- whole steps -----------------------------------------------------------------------------------------------------

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


def long_residual(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """What the first block makes is added behind every other."""
    first, *rest = params["blocks"]
    first = h = torch.tanh(x @ first)
    for w in rest:
        h = torch.tanh(h @ w) + first
    return h.square().mean()


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("roles", [3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(2)
def test_no_role_waits_before_it_has_sent_a_value_to_all_its_readers(
    schedule: str, roles: int, microbatches: int, remat: str
) -> None:
    """The second reader gets it when the first has it: not behind the first gradient, which the second is to make."""
    if schedule == "interleaved":
        microbatches *= roles
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    params = {"blocks": [torch.ones(8, 8) for _ in range(roles * chunks)]}
    spec = fzero.Spec(
        loss=long_residual, optimizer=fzero.optim.sgd(0.1), microbatches=microbatches, mesh={"pp": roles},
        pipeline=schedule, remat=remat,
    )  # fmt: skip
    lowered = fzero.lower(spec, params, torch.zeros(microbatches, 8))  # VerifyError where roles wait in a ring
    sends = [op for program in lowered.programs.values() for op in program.ops if op.is_send]
    assert max(Counter(op.reads[0].name for op in sends).values()) >= 2  # readers of one value
