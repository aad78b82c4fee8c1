"""shard_update: the work of an update as slices of buckets, whole leaves, sums and gathers; as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from passed import upto, without_lines
from short_programs import buffer_lines, lines, shown, written
from torch import Tensor

import fzero
from fzero import optim
from fzero.ir.op import StepPhase
from fzero.ir.program import Program, op_text, wire_bytes
from fzero.passes.shard_update import _without_unread


def normed(state: Any, x: Tensor) -> Any:
    """An update that needs the norm of a leaf before it, reads a new leaf whole, and shows both."""
    params = state["params"]
    value, g = fzero.value_and_grad(cases.layers_loss)(params, x)
    first = params["first"] - 0.1 * g["first"] / g["first"].norm()
    z = (params["z"] - 0.1 * g["z"]) * (1 + first.max())
    layers = fzero.tree.map(lambda p, d: p - 0.1 * d, params["layers"], g["layers"])
    total = sum(d.double().square().sum() for d in fzero.tree.flatten(g)[1])
    return {"params": {"first": first, "layers": layers, "z": z}}, {"loss": value, "norm": total, "most": z.abs().sum()}


def product(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["a"] @ p["b"]) @ p["c"] + p["d"]).mean()


def one_product(p: Any, x: Tensor) -> Tensor:
    return (x @ p["a"]).square().mean()


def matrices(case: str) -> Any:
    """Each of three matrices lies whole in a slice. One alone is cut."""
    if case == "matrix_that_is_cut":
        return {"a": torch.empty(8, 24, device="meta")}
    return {
        n: torch.empty(shape, device="meta")
        for n, shape in zip("abcd", ((8, 24), (24, 8), (8, 24), (24,)), strict=True)
    }


MUON = fzero.optim.muon(0.1, others=fzero.optim.sgd(0.1))
CASES: dict[str, dict[str, Any]] = {
    "matrices": {"optimizer": MUON, "loss": product, "zero": 3},
    "matrices_kept_whole": {"optimizer": MUON, "loss": product, "zero": 1},
    "matrices_on_every_rank": {"optimizer": MUON, "loss": product, "zero": 0},
    "matrix_that_is_cut": {"optimizer": MUON, "loss": one_product, "zero": 2},
    "blocks": {"optimizer": fzero.optim.adamw8bit(1e-3), "zero": 2},
    "two_chains": {"optimizer": fzero.optim.adamw(1e-3, mask="**/w"), "zero": 3, "clip_norm": 1.0},
    "of_the_users": {"step": normed, "zero": 1},
}


def sharded(case: str) -> Program:
    layers = cases.layers(width=16, depth=2)
    if case == "of_the_users":
        given, batch = {"params": layers}, cases.batch()
        return fzero.lower(fzero.Spec(**CASES[case]), given, batch, world_size=2).after("shard_update")
    return upto("shard_update", cases.naive(2, matrices(case) if "matri" in case else layers, **CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    """The ops behind the loss, and the columns that they fill."""
    program = sharded(case)
    outer = [i for i, op in enumerate(program.ops) if op.phase is StepPhase.OUTER]
    ops = [f"{op_text(op)}  # {op.why}" for op in program.ops[outer[0] :] if not op.in_region]
    records = [line for line in buffer_lines(program).values() if " scratch" in line or " activation" in line]
    golden(f"shard_update/{case}", without_lines("\n".join([*records, *ops])) + "\n")


def test_a_gather_that_another_one_makes_again_before_anybody_reads_the_column_whole_is_dropped() -> None:
    text = """
        bucket b length=64 w[0:64:64]
        buffer p f32[64] param bucket=b
        buffer q f32[64] param bucket=b
        buffer h f32[8] activation
        run h -> p[0:64:mine]
        all_gather p -> p  axis=dp
        wait p
        all_gather q -> q  axis=dp
        wait q
        run h p[0:64:mine] -> p[0:64:mine]
        run h q -> h
        all_gather p -> p  axis=dp
        wait p
        all_gather q -> q  axis=dp
        wait q
        run p -> h
    """
    wanted = """
        run h -> p[0:64:mine]
        all_gather q -> q  axis=dp
        wait q
        run h p[0:64:mine] -> p[0:64:mine]
        run h q -> h
        all_gather p -> p  axis=dp
        wait p
        all_gather q -> q  axis=dp
        wait q
        run p -> h
    """
    assert shown(_without_unread(list(written(text).ops))) == lines(wanted)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_of_a_full_value_that_all_ranks_have_an_update_reads_the_own_slice(zero: Any) -> None:
    """Noise on a gradient (DP-SGD): no leaf is gathered for it. One transfer of the gradients, and one of the
    parameters: of two layers none is read again in the backward."""
    tx, ranks, elements = optim.adamw(1e-3), 4, 2 * 64 * 64

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()

    def step(state: Any, x: torch.Tensor) -> Any:
        key, noise = fzero.random.split(state["key"])
        value, grads = fzero.value_and_grad(loss)(state["params"], x)
        keys = dict(zip("ab", fzero.random.split(noise, 2), strict=True))
        grads = {name: g + fzero.random.normal(keys[name], g.shape) for name, g in grads.items()}
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": key}, {"loss": value}

    params = {name: torch.empty(64, 64, device="meta") for name in "ab"}
    start = {"params": params, "opt": tx.init(params), "key": fzero.random.key(0)}
    spec = fzero.Spec(step=step, zero=zero)
    lowered = fzero.lower(spec, start, torch.empty(8, 64, device="meta"), world_size=ranks)
    program = lowered.program
    gathered = [op for op in program.ops if op.gathers]
    assert {program.buffers[op.reads[0].name].entry for op in gathered} == {"params"}
    sent = sum(wire_bytes(program, op) for op in program.ops if op.gathers or op.kind == "reduce_scatter")
    assert sent == 2 * 4 * elements * (ranks - 1) // ranks


def test_of_what_differs_between_ranks_no_slice_is_taken() -> None:
    """1-bit Adam's momentum on a rank is its own: the shared one is gathered for it. The mean of codes is equal."""
    params = {name: torch.empty(64, 64, device="meta") for name in "ab"}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=optim.onebit_adam(1e-3, 10), zero=1)
    program = fzero.lower(spec, params, torch.empty(8, 64, device="meta"), world_size=4, phase="coded").program
    sent = sum(wire_bytes(program, op) for op in program.ops if op.gathers)
    codes = 3 * 2 * 64 * 64 * 12 // 64 // 4  # of the own slice, to three ranks
    assert sent == 2 * 4 * (2 * 64 * 64) * 3 // 4 + codes


@pytest.mark.parametrize("zero", [0, 1])
def test_whole_leaves_of_two_buckets_are_two_updates(zero: int) -> None:
    """So that each may run when its own gradients are there."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return fzero.tree.map(lambda g, p: -0.1 * (g @ torch.tanh(p)), grads, params), state

    params = {name: torch.empty(8, 8, device="meta") for name in "ab"}
    whole = fzero.optim.GradientTransformation(lambda params: {}, update)
    spec = fzero.Spec(loss=lambda p, x: ((x @ p["a"]) @ p["b"]).mean(), optimizer=whole, zero=zero, bucket_bytes=256)
    program = fzero.lower(spec, params, torch.empty(4, 8, device="meta"), world_size=2).program
    names = [{program.buffers[ref.name].bucket for ref in op.writes} for op in program.ops if op.is_update]
    assert names == [{"small"}, {"small~2"}]
