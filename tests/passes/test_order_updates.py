"""order_updates: the end of a step bucket by bucket, so that little is whole at once."""

from __future__ import annotations

import re
from typing import Any

import cases
import pytest
import torch
from helpers import run_reference
from naive_steps import stepped
from short_programs import lines, shown, written
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.compile.lowered import Lowered
from fzero.ir.program import Program
from fzero.passes.order_updates import order_updates

DEPTH = 6
OF_WHOLE_LEAVES = {"adafactor": optim.adafactor(0.01), "muon": optim.muon(0.1, others=optim.sgd(0.1))}


def lowered(optimizer: Any, **options: Any) -> Lowered:
    return cases.lowered(4, cases.layers(48, DEPTH), optimizer=optimizer, prefetch=1, **options)


def wholes(program: Program) -> list[set[str]]:
    """After each op behind the loss: the layers of which a whole bucket of leaves, gradients or what is made of them is
    on the rank."""
    last_loss = max(i for i, op in enumerate(program.ops) if op.in_region)
    live: set[str] = set()
    found: list[set[str]] = []
    for i, op in enumerate(program.ops):
        if op.is_free:
            live -= {ref.name for ref in op.reads}
        elif i > last_loss:
            live |= {ref.name for ref in op.writes}
        buffers = (program.buffers[name] for name in live)
        whole = (b.bucket for b in buffers if b.bucket and not b.sharded and b.kind in ("scratch", "gathered", "grad"))
        found.append({layer[0] for bucket in whole if (layer := re.search(r"layers\.\d+", bucket))})
    return found


CHECKS: dict[str, dict[str, Any]] = {
    "nothing": {}, "clip": {"clip_norm": 1.0}, "skip": {"nonfinite": "skip"}, "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"}, "fp16 and clip": {"precision": "fp16", "clip_norm": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", OF_WHOLE_LEAVES)
@pytest.mark.sampled(3)
def test_what_works_on_whole_leaves_has_those_of_one_layer_at_a_time(name: str, check: str) -> None:
    """The complaint: over 8 ranks ZeRO-3 with Adafactor took four times the parameters, with Muon once; AdamW an
    eighth. (A gather may start while the layer before it is at work.)"""
    found = wholes(lowered(OF_WHOLE_LEAVES[name], zero=3, **CHECKS[check]).programs[0])
    assert max(map(len, found)) <= 2
    assert len(set().union(*found)) == DEPTH


def test_a_norm_over_all_updates_leaves_layers_apart() -> None:
    over = optim.chain(OF_WHOLE_LEAVES["adafactor"], optim.clip_by_global_norm(1.0))
    assert max(map(len, wholes(lowered(over, zero=3).programs[0]))) <= 2


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.sampled(3)
def test_a_model_of_matrices_alone_is_updated_in_parts_too(check: str) -> None:
    """Nothing of Adafactor is flat there: the whole update was one run."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for w in p["layers"]:
            x = x + torch.tanh(x @ w["up"]) @ w["down"]
        return x.square().mean()

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    params = {"layers": [{"up": meta(32, 64), "down": meta(64, 32)} for _ in range(DEPTH)]}
    spec = fzero.Spec(loss=loss, optimizer=optim.adafactor(0.01), zero=3, prefetch=1, **CHECKS[check])
    found = wholes(fzero.lower(spec, params, torch.zeros(16, 32), world_size=4).programs[0])
    assert max(map(len, found)) <= 2
    assert len(set().union(*found)) == DEPTH


def test_each_gradient_is_gathered_once() -> None:
    """The complaint: Adafactor's was, and so were its squares."""
    program = lowered(OF_WHOLE_LEAVES["adafactor"], zero=3, clip_norm=1.0).programs[0]
    gathers = [program.buffers[op.target].bucket for op in program.ops if op.gathers and op.why.startswith("whole")]
    assert len(gathers) == len({*gathers}) >= DEPTH


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_adafactor_takes_about_what_an_optimizer_with_a_moment_does(zero: int, clip: float | None) -> None:
    """Without stages, too: what it works with was kept for all leaves beside their gradients."""
    adafactor, sgd = (
        lowered(one, zero=zero, clip_norm=clip).memory.peak
        for one in (OF_WHOLE_LEAVES["adafactor"], optim.sgd(0.1, momentum=0.9))
    )
    assert adafactor <= 1.1 * sgd


def test_a_new_leaf_is_kept_behind_what_only_it_needs() -> None:
    text = """
        bucket a length=64 w[0:64:64]
        bucket b length=64 w[0:64:64]
        buffer pa f32[64] param bucket=a
        buffer pb f32[64] param bucket=b
        buffer pa.new f32[64] scratch bucket=a
        buffer pb.new f32[64] scratch bucket=b
        buffer fa f32[64] scratch bucket=a
        buffer fb f32[64] scratch bucket=b
        buffer count i64[] other
        buffer count.new i64[] activation
        buffer h f32[8] activation
        buffer norm f32[] metric
        run count -> count.new  phase=outer
        run pa[0:64:mine] -> fa[0:64:mine]
        run pb[0:64:mine] -> fb[0:64:mine]
        all_gather fa -> fa  axis=dp
        wait fa
        all_gather fb -> fb  axis=dp
        wait fb
        run h -> norm
        run fa -> pa.new[0:64:mine]
        run fb -> pb.new[0:64:mine]
        update count.new -> count
        update pa.new[0:64:mine] -> pa[0:64:mine]
        update pb.new[0:64:mine] -> pb[0:64:mine]
    """
    wanted = """
        run h -> norm
        run pa[0:64:mine] -> fa[0:64:mine]
        all_gather fa -> fa  axis=dp
        wait fa
        run fa -> pa.new[0:64:mine]
        update pa.new[0:64:mine] -> pa[0:64:mine]
        run pb[0:64:mine] -> fb[0:64:mine]
        all_gather fb -> fb  axis=dp
        wait fb
        run fb -> pb.new[0:64:mine]
        update pb.new[0:64:mine] -> pb[0:64:mine]
        run count -> count.new
        update count.new -> count
    """
    assert shown(order_updates(written(text)).ops) == lines(wanted)


def test_what_reads_a_leaf_before_it_is_written_does_so_still() -> None:
    """Else the new value could not be written where the old one lies."""
    text = """
        bucket a length=64 w[0:64:64]
        buffer p f32[64] param bucket=a
        buffer p.new f32[64] scratch bucket=a
        buffer q f32[64] param bucket=a
        buffer q.new f32[64] scratch bucket=a
        buffer h f32[8] activation
        run p -> h  phase=outer
        run q -> p.new
        run h -> q.new
        update p.new -> p
        update q.new -> q
    """
    wanted = """
        run p -> h
        run q -> p.new
        update p.new -> p
        run h -> q.new
        update q.new -> q
    """
    assert shown(order_updates(written(text)).ops) == lines(wanted)


def own_scalar(of: str) -> Any:
    """Momentum, and a number made of what a leaf or its moment was."""

    def init(p: Any) -> Any:
        return {"m": tree.map(torch.zeros_like, p), "most": tree.map(lambda a: a.new_zeros(()), p)}

    def update(g: Any, s: Any, p: Any) -> Any:
        m = tree.map(lambda m, g: 0.9 * m + 0.1 * g, s["m"], g)
        old = p if of == "p" else s["m"]
        most = tree.map(lambda r, a, g: torch.maximum(r, (a @ g.T).diagonal().amax()), s["most"], old, g)
        return tree.map(lambda m: -0.1 * m, m), {"m": m, "most": most}

    return fzero.optim.GradientTransformation(init, update)


@pytest.mark.parametrize("of", ["m", "p"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(4)
def test_what_reads_an_old_value_whole_comes_before_the_new_one(zero: int, of: str) -> None:
    """What is gathered may be gathered again, from where it lies: so it counts as read there."""
    params = {"layers": [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]}
    spec = fzero.Spec(loss=deep, optimizer=own_scalar(of), zero=zero)
    found = stepped(spec, params, rows, world=2, steps=2)
    exact, _ = run_reference(spec, params, rows, world=2, steps=2)
    assert all(torch.equal(value, exact[path]) for path, value in found.leaves.items())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_layers_that_exchange_their_values(zero: int) -> None:
    def step(s: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(deep)(s, x)
        (a, b), (da, db) = s["layers"], grads["layers"]
        return {"layers": [b - 0.1 * db, a - 0.1 * da * da.norm()]}, {"loss": value}

    params = {"layers": [torch.empty(8, 8, device="meta") for _ in range(2)]}
    lowered = fzero.lower(fzero.Spec(step=step, zero=zero, params="**"), params, torch.empty(4, 8), world_size=2)
    assert lowered.program.ops


def deep(p: Any, x: Tensor) -> Tensor:
    for w in p["layers"]:
        x = torch.tanh(x @ w)
    return x.square().mean()


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))
