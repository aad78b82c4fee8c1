"""Stochastic rounding and moments in another dtype: unbiased, right at the edges, equal bits however it is cut."""

from typing import Any

import pytest
import torch
from helpers import differing, run

import fzero
from fzero import optim, tree
from fzero.optim import _round
from tests.optim.test_optim import batch, example, leaves, loss, named, network, train

BF16 = torch.bfloat16


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def to_bits(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFF for b in x.view(torch.int16).tolist()]


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers on both sides of positive float32 numbers, in float64."""
    low = x.view(torch.int32) & ~0xFFFF
    return low.view(torch.float32).double(), (low + 0x10000).view(torch.float32).double()


def rounded(x: torch.Tensor, seed: int) -> torch.Tensor:
    return optim.stochastic_round(x, torch.tensor(seed))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_exact_numbers_stay(seed: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    numbers = every[~every.isnan()]
    assert torch.equal(rounded(numbers.float(), seed).view(torch.int16), numbers.view(torch.int16))


@pytest.mark.parametrize("seed", range(8))
def test_the_edges(seed: int) -> None:
    nans = from_bits(0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF)
    assert rounded(nans, seed).isnan().all()
    beyond = from_bits(0x7F7F0001, 0x7F7FFFFF, 0xFF7FFFFF)  # larger than bfloat16's largest, but finite
    assert to_bits(rounded(beyond, seed)) == [0x7F7F, 0x7F7F, 0xFF7F]
    tiny = rounded(from_bits(0x00000001, 0x80000001, 0x0000FFFF, 0x007FFFFF, 0x807F8000), seed)
    allowed = [{0, 1}, {0x8000, 0x8001}, {0, 1}, {0x7F, 0x80}, {0x807F, 0x8080}]
    assert all(got in two for got, two in zip(to_bits(tiny), allowed, strict=True))
    assert rounded(torch.zeros(0, 3), seed).shape == (0, 3)


@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e30])
def test_it_is_unbiased_over_seeds_and_elements(scale: float) -> None:
    """Errors in units of their own deviation: sums over seeds and over elements are standard normal, and so are the
    products of neighbours, so that neither seeds nor elements go together."""
    torch.manual_seed(0)
    x = (torch.rand(2000) + 1) * scale
    low, high = neighbours(x)
    part = (x.double() - low) / (high - low)
    x, low, high, part = (t[(part > 0.1) & (part < 0.9)] for t in (x, low, high, part))
    outcomes = torch.stack([rounded(x, seed).double() for seed in range(500)])
    assert bool(((outcomes == low) | (outcomes == high)).all())
    errors = (outcomes - x.double()) / ((part * (1 - part)).sqrt() * (high - low))
    along, across = errors.shape
    for sums in (
        errors.sum(0) / along**0.5,
        errors.sum(1) / across**0.5,
        (errors[1:] * errors[:-1]).sum(0) / along**0.5,
        (errors[:, 1:] * errors[:, :-1]).sum(1) / across**0.5,
    ):
        assert sums.mean().abs() < 5 / len(sums) ** 0.5
        assert 0.8 < sums.std() < 1.2


@pytest.mark.acceptance
def test_the_probability_is_the_part_cut_off() -> None:
    for part in (0x0001, 0x0800, 0x4000, 0x8000, 0xFFFF):
        x = from_bits(0x3F800000 + part)
        ups = sum(to_bits(rounded(x, seed))[0] == 0x3F81 for seed in range(4000)) / 4000
        assert ups == pytest.approx(part / 65536, abs=0.03)


def test_bits_do_not_depend_on_slices_strides_or_chunks() -> None:
    torch.manual_seed(0)
    x = torch.randn(3 * _round.PIECE + 17)
    x[5], x[-1] = float("nan"), 3.4e38  # one chunk takes the careful way, the others do not
    whole = rounded(x, 3).view(torch.int16)
    for start, stop in (
        (0, 1),
        (1, 70),
        (64, 200_000),
        (_round.PIECE - 1, _round.PIECE + 1),
        (100, len(x)),
    ):
        assert torch.equal(rounded(x[start:stop], 3).view(torch.int16), whole[start:stop])
    matrix = x[:3000].view(50, 60)
    assert torch.equal(rounded(matrix.t(), 3).t().contiguous().view(torch.int16), whole[:3000].view(50, 60))
    assert torch.equal(rounded(matrix[:, 7:9], 3).view(torch.int16), whole[:3000].view(50, 60)[:, 7:9])
    assert not torch.equal(rounded(x, 4).view(torch.int16), whole)


def test_ops_agree_with_their_shape_rules() -> None:
    checks = ("test_schema", "test_faketensor")
    for x in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(()), torch.randn(0), torch.randn(4, 6)[:, ::2]):
        torch.library.opcheck(torch.ops.fzero.stochastic_round.default, (x, torch.tensor(1)), test_utils=checks)
    for shape in ((3, 5), (5, 3), (0, 3), (4, 4)):
        arguments = (torch.randn(shape), 2, 3.4, -4.8, 2.0, 1e-7)
        torch.library.opcheck(torch.ops.fzero.orthogonalize.default, arguments, test_utils=checks)
    assert torch.Tag.pointwise in torch.ops.fzero.stochastic_round.default.tags
    assert torch.Tag.pointwise not in torch.ops.fzero.orthogonalize.default.tags


def test_it_refuses_what_it_would_misread() -> None:
    x, seed = torch.ones(2), torch.tensor(0)
    with pytest.raises(TypeError, match=r"x is torch.float64, but it must be torch.float32: write x.float\(\)"):
        optim.stochastic_round(x.double(), seed)
    with pytest.raises(TypeError, match=r"seed is torch.int32, but it must be torch.int64"):
        optim.stochastic_round(x, seed.int())
    with pytest.raises(ValueError, match=r"seed has shape \(1,\), but it must be 0-d"):
        optim.stochastic_round(x, seed[None])
    with pytest.raises(TypeError, match=r"seed is int, but it must be a tensor: write torch.tensor\(7\)"):
        optim.stochastic_round(x, 0)
    with pytest.raises(TypeError, match=r"no derivative.*x.detach"):
        optim.stochastic_round(x.requires_grad_(), seed)


# --- moments ----------------------------------------------------------------------------------------------------------


def test_bfloat16_moments_follow_where_rounding_to_nearest_stands_still() -> None:
    """A second moment's step is a thousandth of the way: soon less than half of bfloat16's last place."""
    torch.manual_seed(0)
    g = 1 + torch.rand(1000) / 10  # equal elements would round alike, and be one
    _, exact = train(optim.adamw(1e-3, moments="float32"), [torch.zeros(1000)], [[g]] * 500)
    _, kept = train(optim.adamw(1e-3, moments="bfloat16"), [torch.zeros(1000)], [[g]] * 500)
    wanted = exact.nu[0].mean().item()
    assert kept.nu[0].dtype == BF16
    assert kept.nu[0].float().mean().item() == pytest.approx(wanted, rel=0.01)
    still = torch.zeros(1000, dtype=BF16)
    for _ in range(500):
        still = torch.lerp(still.float(), g * g, 0.001).to(BF16)
    assert still.float().mean().item() < 0.8 * wanted


@pytest.mark.parametrize(
    "make", [optim.adamw, optim.adam, optim.lion, lambda *a, **k: optim.muon(*a, others=optim.sgd(0.1), **k)]
)
@pytest.mark.parametrize("param", [torch.float32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("kept", [None, "float32", "bfloat16"])
def test_dtypes_of_moments_and_updates(make: Any, param: torch.dtype, kept: str | None) -> None:
    params = {"w": torch.ones(2, 3, dtype=param)}
    tx = make(0.1, moments=kept)
    state = tx.init(params)
    grads = {"w": torch.full((2, 3), 0.1, dtype=torch.float32 if kept else param)}
    updates, after = tx.update(grads, state, params)
    stored = getattr(torch, kept) if kept else param
    assert {leaf.dtype for path, leaf in named((state, after)).items() if leaf.dim()} == {stored}
    assert updates["w"].dtype == (torch.promote_types(param, torch.float32) if kept else param)
    assert optim.apply_updates(params, updates)["w"].dtype == param


def test_a_bfloat16_parameter_is_stepped_in_float32() -> None:
    params, gradients = (tree.map(lambda p: p.to(BF16), example()) for _ in range(2))
    wide = tree.map(lambda p: p.float(), params)
    got, _ = optim.adamw(1e-2, moments="float32").update(
        gradients, optim.adamw(1e-2, moments="float32").init(params), params
    )
    wanted, _ = optim.adamw(1e-2).update(wide, optim.adamw(1e-2).init(wide), wide)
    assert all(torch.equal(x, y) for x, y in zip(leaves(got), leaves(wanted), strict=True))


def test_moments_of_another_dtype_are_refused() -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(
        fzero.errors.TreeError, match=r"adamw: mu/w is torch.float32, but it is kept in torch.bfloat16.*init"
    ):
        optim.adamw(0.1, moments="bfloat16").update(params, optim.adamw(0.1).init(params), params)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_apply_updates_rounds_bfloat16_leaves_with_a_seed() -> None:
    params = {"low": torch.ones(20_000, dtype=BF16), "high": torch.ones(3)}
    updates = {"low": torch.linspace(5e-4, 1.5e-3, 20_000), "high": torch.full((3,), 1e-3)}  # no two elements alike
    nearest = optim.apply_updates(params, updates)
    seeded = optim.apply_updates(params, updates, seed=torch.tensor(5))
    assert torch.equal(nearest["low"], params["low"]), "to nearest, the update is lost"
    assert seeded["low"].float().mean().item() == pytest.approx(1.001, abs=1e-4)
    assert torch.equal(seeded["high"], nearest["high"])
    assert seeded["low"].dtype == BF16
    with pytest.raises(ValueError, match=r"seed has shape \(1,\)"):
        optim.apply_updates(params, updates, seed=torch.tensor([5]))


def seeded_step(state: Any, x: torch.Tensor) -> Any:
    tx = optim.adamw(1e-2, moments="bfloat16")
    value, grads = fzero.value_and_grad(loss)(state["params"], x)
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optim.apply_updates(state["params"], updates, seed=opt.count), "opt": opt}, {"loss": value}


def seeded_state() -> Any:
    params = network(BF16)
    return {"params": params, "opt": optim.adamw(1e-2, moments="bfloat16").init(params)}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.acceptance)])
def test_seeded_steps_have_equal_bits_under_every_stage(world: int) -> None:
    runs = [
        run(fzero.Spec(step=seeded_step, zero=z, bucket_bytes=2000), seeded_state(), batch, world=world, steps=3)
        for z in range(4)
    ]
    assert not any(differing(op.final, runs[0].final) for op in runs)
    count = sum(op.gathers for op in runs[3].lowered.program.ops)
    assert count == len(runs[3].lowered.plan.buckets), "only the loss needs whole parameters"


def test_updates_fold_into_the_new_value() -> None:
    """No rounding and no extra pass: the kernel's result is the parameter, through casts and choices too."""
    finite = optim.apply_if_finite(optim.adamw(1e-2))
    for spec, state in (
        (fzero.Spec(step=seeded_step), seeded_state()),
        (fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2, moments="float32")), network(BF16)),
        (fzero.Spec(loss=loss, optimizer=finite), network()),
        (fzero.Spec(loss=loss, optimizer=optim.muon(1e-2, others=optim.adamw(1e-2))), network()),
    ):
        graph = fzero.lower(spec, state, batch(0, 0), world_size=2).graph
        found = {node.target for node in graph.gm.graph.nodes}
        assert torch.ops.fzero.adamw.default in found
        assert not found & {torch.ops.fzero.delta.default, torch.ops.fzero.apply_delta.default}


def test_the_seed_of_a_step_is_its_number() -> None:
    """Two runs draw alike; elements that are equal too, which is what makes bits independent of slices."""
    params, gradients = [torch.zeros(1000)], [[torch.full((1000,), 0.123)]] * 2
    states = [train(optim.lion(0.1, moments="bfloat16"), params, gradients[:n])[1] for n in (1, 2, 2)]
    assert torch.equal(states[1].mu[0], states[2].mu[0])
    assert len(states[0].mu[0].unique()) == 1, "equal elements round alike"


def test_moments_draw_anew_at_every_step() -> None:
    """A moment that stays the same is rounded one way at one step and the other way at the next."""
    params, kept = [torch.zeros(1000)], []
    for count in range(20):
        state = optim.LionState(torch.tensor(count), [torch.zeros(1000, dtype=BF16)])
        _, state = optim.lion(0.1, moments="bfloat16").update([torch.linspace(1, 2, 1000)], state, params)
        kept.append(state.mu[0].float())
    assert torch.stack(kept).std(0).median() > 0
    adam = optim.AdamState(torch.tensor(0), [torch.zeros(1000, dtype=BF16)], [torch.zeros(1000, dtype=BF16)])
    _, adam = optim.adam(0.1, (0.9, 0.9), moments="bfloat16").update([torch.ones(1000)], adam, params)
    rounded_alike = 0
    for count in range(40):  # both moments are 0.1 (1 - 0.9) here
        _, one = optim.adam(0.1, (0.9, 0.9), moments="bfloat16").update(
            [torch.ones(1000)],
            adam._replace(
                count=torch.tensor(count), mu=[torch.zeros(1000, dtype=BF16)], nu=[torch.zeros(1000, dtype=BF16)]
            ),
            params,
        )
        rounded_alike += int(torch.equal(one.mu[0], one.nu[0]))
    assert 8 < rounded_alike < 32, "the two moments draw by seeds of their own"


@pytest.mark.gpu
def test_cuda_rounds_as_the_cpu_and_does_not_synchronise() -> None:
    torch.manual_seed(0)
    x = torch.randn(100_003)
    x[:4] = from_bits(0x7F800001, 0x7F7FFFFF, 0xFF800000, 0x80000001)
    device, seed = x.cuda(), torch.tensor(9, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = optim.stochastic_round(device, seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu().view(torch.int16), rounded(x, 9).view(torch.int16))
