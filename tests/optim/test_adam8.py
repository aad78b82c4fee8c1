"""Moments in 8 bits: their codes, their op, where they lie, and that sharding them changes no bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import differing, gloo, relative, run, run_reference, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import tree
from fzero.ir.mesh import Mesh
from fzero.ir.parse import parse
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.optim import _adam8
from fzero.plan.layout import layout
from fzero.plan.state_plan import Plan
from fzero.state import storage
from fzero.verify.rules import verify
from lab.mutate.edits import find, put, replaced, with_buffers

HYPER = (0.9, 0.999, 1e-8, 0.1)


def operands(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """param, grad, mu, mu_scales, nu, nu_scales of a leaf in the middle of its training."""
    g = torch.Generator().manual_seed(seed)
    param, grad = (torch.randn(size, generator=g).to(dtype) for _ in range(2))
    codes = torch.randint(-127, 128, (size,), generator=g).to(torch.int8)
    squares = torch.randint(0, 256, (size,), generator=g).to(torch.uint8)
    scales = [torch.rand(-(-size // 64), generator=g) for _ in range(2)]
    return [param, grad, codes, scales[0], squares, scales[1]]


def scalars(count: int = 7) -> tuple[Tensor, Tensor]:
    return torch.tensor(count), torch.tensor(1e-2, dtype=torch.float64)


# --- codes ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.floats(-30, 30))
@settings(max_examples=50, deadline=None)
def test_first_moments_come_back_within_half_a_code(seed: int, size: float) -> None:
    mu = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)).mul_(2.0**size)
    codes, scales = _adam8.encode_mu(mu)
    back = _adam8.decode_mu(codes, scales)
    assert torch.equal(scales, mu.abs().amax(1))
    root, near = ((x.abs() / scales[:, None]).sqrt() for x in (mu, back))
    assert float((root - near).abs().max()) <= 0.5 / 127 + 1e-6
    assert torch.equal(back.sign() * (codes != 0), back.sign())
    assert same_bits(_adam8.encode_mu(back)[0], codes)


def test_second_moments_are_right_on_average_and_never_vanish() -> None:
    g = torch.Generator().manual_seed(0)
    nu = torch.rand(1, 64, generator=g).pow(6)
    draws = [torch.randint(-(2**31), 2**31 - 1, (1, 64), generator=g).to(torch.int32) for _ in range(4000)]
    found = torch.stack([_adam8.decode_nu(*_adam8.encode_nu(nu, d)) for d in draws]).double()
    spread = found.std(0) / len(draws) ** 0.5
    large = nu > (2 / 255) ** 4  # below, a moment is kept from becoming 0
    assert ((found.mean(0) - nu).abs() <= 5 * spread + 1e-7 * nu)[large].all()
    tiny = torch.tensor([[1.0, 1e-30, 0.0]])
    for draw in (-(2**31), -1, 0, 2**31 - 1):
        codes, _ = _adam8.encode_nu(tiny, torch.full((1, 3), draw, dtype=torch.int32))
        assert codes.tolist() == [[255, 1, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_seen_and_does_not_spread_to_other_blocks(bad: float) -> None:
    tensors = operands(192)
    tensors[1][70] = bad
    _, *new = torch.ops.fzero.adamw8(*tensors, *scalars(), *HYPER)
    again = torch.ops.fzero.adamw8(tensors[0], torch.ones(192), *new, *scalars(8), *HYPER)[0]
    finite = again.isfinite().view(3, 64).all(1)
    assert finite.tolist() == [True, False, True]


# --- the op -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(size=st.integers(0, 5000), cuts=st.lists(st.integers(0, 78)), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_slices_on_64_elements_have_the_bits_of_the_whole(dtype: Any, size: int, cuts: list[int], seed: int) -> None:
    whole = operands(size, seed, dtype)
    cut = [t.clone() for t in whole]
    torch.ops.fzero.adamw8_(*whole, *scalars(), *HYPER)
    edges = sorted({0, size, *(64 * c for c in cuts if 64 * c < size)})
    for start, end in zip([0, *edges], edges, strict=False):
        own, blocks = slice(start, end), slice(start // 64, -(-end // 64))
        part = [t[blocks if i in (3, 5) else own] for i, t in enumerate(cut)]
        torch.ops.fzero.adamw8_(*part, *scalars(), *HYPER)
    assert all(map(same_bits, whole, cut))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*operands(1000), *scalars(), *HYPER)
    whole = torch.ops.fzero.adamw8(*args)
    monkeypatch.setattr(_adam8, "CHUNK", 128)
    assert all(map(same_bits, whole, torch.ops.fzero.adamw8(*args)))


def test_the_first_step_is_that_of_adamw() -> None:
    """From zero moments nothing has been rounded yet, so only the order of the last operations differs."""
    p, g, m, ms, v, vs = operands(200)
    ours = torch.ops.fzero.adamw8(p, g, m * 0, ms * 0, v * 0, vs * 0, *scalars(1), *HYPER)[0]
    z = torch.zeros_like(p)
    theirs = torch.ops.fzero.adamw(p, g, z, z, *scalars(1), *HYPER, True)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_op_agrees_with_its_shape_rule_and_takes_any_strides() -> None:
    checks = ("test_schema", "test_faketensor")
    for size in (0, 1, 64, 130):
        args = (*operands(size), *scalars(), *HYPER)
        torch.library.opcheck(torch.ops.fzero.adamw8.default, args, test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.adamw8_.default, args, test_utils=checks)
    plain = [t.view(10, 13) if t.numel() == 130 else t for t in operands(130)]
    strided = [t.t().contiguous().t() if t.ndim == 2 else t.clone() for t in plain]
    for t in (plain, strided):
        torch.ops.fzero.adamw8_(*t, *scalars(), *HYPER)
    assert all(map(same_bits, plain, strided))


def test_the_op_refuses_what_does_not_fit() -> None:
    p, g, m, ms, v, vs = operands(65)
    last = (*scalars(), *HYPER)
    with pytest.raises(ValueError, match=r"mu_scales has shape \(1,\), needed \(2,\) for param of shape \(65,\)"):
        torch.ops.fzero.adamw8(p, g, m, ms[:1], v, vs, *last)
    with pytest.raises(TypeError, match=r"nu is torch.int8, needed torch.uint8"):
        torch.ops.fzero.adamw8(p, g, m, ms, m, vs, *last)
    with pytest.raises(TypeError, match=r"param is torch.int64, but it must be a floating-point tensor"):
        torch.ops.fzero.adamw8(p.long(), g, m, ms, v, vs, *last)
    with pytest.raises(ValueError, match=r"lr has shape \(1,\), but it must be 0-d"):
        torch.ops.fzero.adamw8(p, g, m, ms, v, vs, last[0], last[1][None], *HYPER)


# --- against fp32 moments ---------------------------------------------------------------------------------------------


def mixed(seed: int) -> tuple[Tensor, Any]:
    """A regression whose blocks mix gradients of sizes 1 to 18: what one scale for 64 elements has to bear."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 128, generator=g) * torch.logspace(-2, 0.5, 128)
    y = torch.tanh(x @ (torch.randn(128, 64, generator=g) * 0.3))
    start = torch.randn(64, 128, generator=g) * 0.05

    def loss(params: Any, rows: Tensor) -> Tensor:
        return ((torch.tanh(x[rows] @ params["w"].T) - y[rows]) ** 2).mean()

    return start, loss


def trained(tx: fzero.optim.GradientTransformation, steps: int, seed: int) -> tuple[Tensor, float]:
    start, loss = mixed(seed)
    params = {"w": start}
    state = tx.init(params)
    for step in range(steps):
        held = params["w"].detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss({"w": held}, torch.arange(64) + 64 * step % 1024), held)
        updates, state = tx.update({"w": grad}, state, params)
        params = fzero.optim.apply_updates(params, updates)
    return params["w"], float(loss(params, torch.arange(1024)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("steps", "lr", "far", "worse"), [(100, 1e-2, 0.04, 0.01), (600, 3e-3, 0.05, 0.01)])
@pytest.mark.sampled(2)
def test_training_is_that_of_fp32_moments(steps: int, lr: float, far: float, worse: float, seed: int) -> None:
    """The parameters end within 4 or 5 % of the way that they went, the loss within 1 %, and not always on one side."""
    ours, theirs = (trained(make(lr), steps, seed) for make in (fzero.optim.adamw8bit, fzero.optim.adamw))
    assert float((ours[0] - theirs[0]).norm() / (theirs[0] - mixed(seed)[0]).norm()) < far
    assert abs(ours[1] / theirs[1] - 1) < worse


def test_the_transformation_refuses_what_adamw_refuses_and_foreign_states() -> None:
    params = {"w": torch.ones(70)}
    tx = fzero.optim.adamw8bit(0.1)
    state = tx.init(params)
    with pytest.raises(fzero.SpecError, match=r"adamw8bit: betas\[1\] is 1.0"):
        fzero.optim.adamw8bit(0.1, betas=(0.9, 1.0))
    with pytest.raises(fzero.SpecError, match=r"adamw8bit: the mask 'bias' matches none"):
        fzero.optim.adamw8bit(0.1, mask="bias").init(params)
    with pytest.raises(fzero.TreeError, match=r"adamw8bit: grads/w has shape \(3,\)"):
        tx.update({"w": torch.ones(3)}, state, params)
    short = state._replace(mu=state.mu._replace(scales={"w": torch.ones(1)}))
    with pytest.raises(fzero.TreeError, match=r"mu.scales/w has shape \(1,\), but params/w has 70 elements, .* 2 blo"):
        tx.update(params, short, params)
    with pytest.raises(TypeError, match="its kernel cannot be differentiated"):
        tx.update(params, state, {"w": torch.ones(70, requires_grad=True)})


# --- where they lie ---------------------------------------------------------------------------------------------------


def state_of(params: Any, tx: fzero.optim.GradientTransformation | None = None) -> tuple[list[str], list[Tensor]]:
    tx = tx or fzero.optim.adamw8bit(1e-3)
    paths, leaves, _ = tree.flatten({"params": params, "opt_state": tx.init(params)})
    return paths, leaves


def planned(params: Any, world: int, zero: int, cap: int = 1 << 20) -> Plan:
    return layout(*state_of(params), mesh=Mesh((("dp", world),)), zero=zero, bucket_bytes=cap)


shapes = st.lists(st.integers(1, 90), min_size=1, max_size=2).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([64, 1 << 20]),
)
def test_codes_and_scales_lie_beside_their_parameter(sizes: Any, world: int, zero: int, cap: int) -> None:
    params = {f"w{i}": torch.ones(shape) for i, shape in enumerate(sizes)}
    plan = planned(params, world, zero, cap)
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    for name in params:
        own = by_path[f"params/{name}"]
        for column, per in (("codes", 1), ("scales", 64)):
            for moment in ("mu", "nu"):
                leaf = by_path[f"opt_state/{moment}/{column}/{name}"]
                buffer = plan.buffers[leaf.buffer]
                assert (buffer.bucket, leaf.slot) == (plan.buffers[own.buffer].bucket, own.slot)
                assert buffer.per == per
    geometry = {n: (b.length, b.slots) for n, b in plan.buckets.items()}
    fp32 = layout(*state_of(params, fzero.optim.adamw(1e-3)), mesh=Mesh((("dp", world),)), zero=zero, bucket_bytes=cap)
    assert {n: (b.length, b.slots) for n, b in fp32.buckets.items()} == geometry
    _, leaves = state_of(params)
    drawn = [torch.randint(0, 100, x.shape).to(x.dtype) for x in leaves]
    parts = [storage.shards(plan, drawn, rank) for rank in range(world)]
    for leaf, value in zip(plan.leaves, drawn, strict=True):
        assert torch.equal(storage.join(plan, leaf, parts), value)


def test_state_bytes_are_those_of_the_arithmetic() -> None:
    """A parameter's four bytes, two of codes, and two scales of four bytes for 64: 6.125 bytes, an Nth on each rank."""
    plan = planned({"w": torch.zeros(1024, 64)}, 4, 3)
    assert plan.state_bytes == 1024 * 64 * (4 + 2 + 2 * 4 / 64) / 4 + 8  # and the count
    assert plan.padding_bytes() == {}
    moments = [b.nbytes for b in plan.buffers.values() if b.kind == "optimizer"]
    assert sum(moments) * 4 == 1024 * 64 * 2.125
    odd = planned({"w": torch.zeros(100)}, 2, 3)  # two blocks, one a rank
    assert {n.split(":")[0]: size for n, size in odd.padding_bytes().items()} == {
        "params": 28 * 4, "opt_state/mu/codes": 28, "opt_state/nu/codes": 28,
    }  # fmt: skip


def test_only_what_mirrors_is_a_column() -> None:
    leaves = {
        "params": {"scales": {"w": torch.ones(5, 64)}},  # a parameter may have such a name
        "mu": {
            "codes": {"scales": {"w": torch.zeros(5, 64, dtype=torch.int8)}},
            "scales": {"scales": {"w": torch.ones(5)}},
        },
        "image": torch.zeros(6, 64, dtype=torch.uint8),
        "other": {"codes": torch.zeros(9, dtype=torch.int8), "scales": torch.ones(1)},
        "zero": {"codes": torch.tensor(0, dtype=torch.int8), "scales": torch.ones(1)},
    }  # fmt: skip
    paths, values_, _ = tree.flatten(leaves)
    plan = layout(paths, values_, mesh=Mesh((("dp", 2),)), zero=3)
    slots = {leaf.path: leaf.slot for leaf in plan.leaves}
    held = {f"{name}/{column}" for name in ("other", "zero") for column in ("codes", "scales")}
    assert {path for path, slot in slots.items() if slot is None} == {"image", *held}
    assert {n: b.per for n, b in plan.buffers.items() if b.per != 1} == {"mu/scales:small": 64}


# --- any stage, the same bits -----------------------------------------------------------------------------------------


def odd_params() -> Any:
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 0.3

    block = [{"w": r(20, 20), "b": r(20)} for _ in range(2)]
    return {"first": r(8, 20), "layers": block, "gain": r(1), "wide": r(20, 64), "last": r(64, 3)}


def odd_loss(p: Any, x: Tensor) -> Tensor:
    h = x @ p["first"]
    for block in p["layers"]:
        h = torch.tanh(h @ block["w"] + block["b"])
    return (torch.tanh(h @ p["wide"]) @ p["last"]).pow(2).mean() * p["gain"].sum()


def odd_batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


@cache
def odd_tx(mask: str | None) -> fzero.optim.GradientTransformation:
    return fzero.optim.adamw8bit(1e-2, weight_decay=0.1, mask=mask)


def odd_spec(zero: Any, mask: str | None = None, **options: Any) -> fzero.Spec:
    return fzero.Spec(loss=odd_loss, optimizer=odd_tx(mask), zero=zero, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.3},
    "masked": {"mask": "**/w"},
    "small buckets": {"bucket_bytes": 800},
    "accumulated": {"microbatches": 2, "reduce": "each"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.sampled(1)
def test_every_stage_gives_the_same_bits(options: str, world: int) -> None:
    given_ = OPTIONS[options]
    runs = [run(odd_spec(zero, **given_), odd_params(), odd_batch, world=world, steps=3) for zero in range(4)]
    finals = [one.final for one in runs]
    for zero in (1, 2, 3):
        assert differing(finals[0], finals[zero]) == [], f"zero={zero}"
    how = {"world": world, "steps": 3, "graph": runs[0].lowered.graph}
    reference, _ = run_reference(odd_spec(0, **given_), odd_params(), odd_batch, **how)
    for path, value in finals[0].items():
        assert relative(value.double(), reference[path].double()) < 1e-2, path


def test_gradients_that_are_not_zero_in_the_padding_stay_out_of_the_blocks() -> None:
    """A transformation before the moments that makes padding 1, or not a number, changes no leaf."""

    def shifted(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: g / g.abs() + 1.0, grads), state

    tx = fzero.optim.chain(fzero.optim.GradientTransformation(lambda p: (), shifted), fzero.optim.adamw8bit(1e-2))
    specs = [fzero.Spec(loss=odd_loss, optimizer=tx, zero=zero) for zero in (0, 3)]
    finals = [run(spec, odd_params(), odd_batch, world=2, steps=3).final for spec in specs]
    assert differing(*finals) == []
    reference, _ = run_reference(specs[0], odd_params(), odd_batch, world=2, steps=3)
    assert differing(finals[0], reference) == []


def test_elementwise_work_on_codes_and_scales_runs_on_slices_too() -> None:
    """A flag that keeps the old state where a gradient is not finite: a choice between columns of either ratio."""
    tx = fzero.optim.apply_if_finite(fzero.optim.adamw8bit(1e-2))
    specs = [fzero.Spec(loss=odd_loss, optimizer=tx, zero=zero) for zero in (0, 1, 3)]
    runs = [run(spec, odd_params(), odd_batch, world=2, steps=3) for spec in specs]
    assert [differing(runs[0].final, op.final) for op in runs] == [[], [], []]
    gathered = {op.reads[0].name for op in runs[2].lowered.program.ops if op.gathers}
    assert all(name.startswith("params") for name in gathered)


def real(zero: int) -> dict[str, Tensor]:
    state = fzero.init(odd_params(), odd_spec(zero))
    for step in range(3):
        state = fzero.step(state, odd_batch(torch.distributed.get_rank(), step))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def test_processes_give_the_bits_of_the_interpreter() -> None:
    interpreted = run(odd_spec(3), odd_params(), odd_batch, world=2, steps=3).final
    for found in values(gloo(2, real, 3)):
        assert differing(found, interpreted) == []


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> Program:
    return fzero.lower(odd_spec(3), odd_params(), odd_batch(0, 0), world_size=2).program


def test_the_update_is_one_op_in_place_for_leaves_without_padding() -> None:
    params = {"layers": [{"w": torch.zeros(64, 64), "b": torch.zeros(64)} for _ in range(2)]}

    def loss(p: Any, x: Tensor) -> Tensor:
        for block in p["layers"]:
            x = torch.tanh(x @ block["w"] + block["b"])
        return x.sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw8bit(1e-2), zero=3)
    program = fzero.lower(spec, params, torch.zeros(2, 64), world_size=4).program
    updates = [op for op in program.ops if op.is_update and op.is_flat]
    assert len(updates) == len(program.buckets) == 2
    for op in updates:
        nodes = program.segments[op.segment].graph.nodes
        assert [n.target for n in nodes if n.op == "call_function"] == [torch.ops.fzero.adamw8_.default]
    moved = {ref.name for op in program.ops if op.is_collective for ref in op.reads}
    assert not any("opt_state" in name for name in moved)


def test_the_text_form_keeps_the_ratio(good: Program) -> None:
    assert parse(str(good), good.segments) == good
    assert " per=64" in str(good)


def update_of(program: Program, path: str) -> int:
    return find(program, lambda op: op.is_update and op.why == f"update {path}")[0]


def scales(program: Program, at: int) -> list[int]:
    return [i for i, ref in enumerate(program.ops[at].reads) if program.buffers[ref.name].per == 64]


def test_broken_columns_are_refused(good: Program) -> None:
    verify(good)
    name = next(n for n, b in good.buffers.items() if b.per == 64)
    buffer = good.buffers[name]
    uneven = replace(buffer, per=48, shape=(buffer.numel * 64 // 48,))
    with pytest.raises(
        fzero.VerifyError, match=r"\[partition\] .* one element for each 48: they do not part 64 evenly"
    ):
        verify(with_buffers(good, uneven))
    at = update_of(good, "layers/0/w")
    which = scales(good, at)[0]
    ref = good.ops[at].reads[which]
    with pytest.raises(fzero.VerifyError, match=r"\[partition\] .*cuts through a block: .* one element for each 64"):
        verify(put(good, at, replaced(good.ops[at], "reads", which, replace(ref, stop=(ref.stop or 0) - 1))))
    first, second = (good.ops[at].reads[i] for i in scales(good, at))
    other = {first: second, second: first}
    reads, writes = (tuple(other.get(r, r) for r in refs) for refs in (good.ops[at].reads, good.ops[at].writes))
    with pytest.raises(fzero.VerifyError, match=r"\[meaning\] .* computes something else"):
        verify(put(good, at, replace(good.ops[at], reads=reads, writes=writes)))


def test_padding_in_a_block_is_refused(good: Program) -> None:
    """The whole bucket in one range: right for elementwise work, wrong for blocks, which would take in the padding."""
    at = update_of(good, "layers/0/w")
    op = good.ops[at]
    end = good.buckets["layers.0"].slots[1].start

    def wider(ref: Ref) -> Ref:
        return ref if ref.start is None else replace(ref, stop=end)

    wide = replace(op, reads=tuple(map(wider, op.reads)), writes=tuple(map(wider, op.writes)))
    with pytest.raises(fzero.VerifyError, match=r"\[meaning\] .* takes padding into the blocks of a leaf"):
        verify(put(good, at, wide))


def test_a_program_without_the_ratio_of_its_scales_is_refused(good: Program) -> None:
    """A column of scales in the place of a float column of elements: equal dtypes, another ratio."""
    from fzero.verify.terms import Undefined, Vec, apply

    whole, coarse = Vec({0: "a"}, True, (0, 128)), Vec({0: "b"}, True, (0, 128), block_size=64)
    with pytest.raises(Undefined, match="works on ranges that do not match"):
        apply(torch.ops.aten.mul.Tensor, (whole, coarse), {})
    with pytest.raises(Undefined, match="wants columns with an element for each"):
        apply(torch.ops.fzero.adamw8.default, (whole, whole, whole, whole, whole, coarse), {})
    short = replace(coarse, span=(0, 64))
    with pytest.raises(Undefined, match="works on ranges that do not match"):
        apply(torch.ops.fzero.adamw8.default, (whole, whole, whole, short, whole, coarse), {})
