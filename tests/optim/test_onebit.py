"""1-bit Adam: compared with the algorithm written out, at every stage and over every switch; resumed, skipped, refused.
And AdamW with a frozen second moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, run, same_bits, values
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.cost.allocator import measured_peak
from fzero.ir.program import wire_bytes
from fzero.kernels.codecs import CODECS, decode, encode
from fzero.session.session import session_of

WARM, STEPS, LR, DECAY, B1, B2, EPS = 3, 6, 1e-2, 0.1, 0.9, 0.99, 1e-8
SIGN = CODECS["sign"]


def first() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g) * 0.3  # noqa: E731
    return {"embed": draw(20, 64), "a": {"w": draw(64, 50), "b": draw(50)}, "out": draw(50, 3)}


def loss(p: Any, batch: Any) -> Tensor:
    x = p["embed"][batch["ids"]]
    x = torch.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["out"]
    return (x - batch["y"]).square().mean()


def batch(rank: int, step: int) -> dict[str, Tensor]:
    """Rows 10 to 19 of the embedding get no gradient."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return {"ids": torch.randint(10, (8,), generator=g), "y": torch.randn(8, 3, generator=g)}


def spec(corrected: bool = True, **options: Any) -> fzero.Spec:
    made = optim.onebit_adam(LR, WARM, (B1, B2), EPS, DECAY, corrected)
    return fzero.Spec(loss=loss, optimizer=made, **options)


# --- the algorithm, written out ---------------------------------------------------------------------------------------


class ByHand:
    """1-bit Adam of arXiv 2102.02888 on N ranks, leaf by leaf, with a scale for each block of 64 elements of a leaf."""

    def __init__(self, params: dict[str, Tensor], ranks: int, corrected: bool) -> None:
        self.corrected = corrected
        zeros = lambda: {name: torch.zeros_like(p) for name, p in params.items()}  # noqa: E731
        self.params, self.mu, self.nu = dict(params), zeros(), zeros()
        self.worker, self.server, self.count = [zeros() for _ in range(ranks)], zeros(), 0

    def step(self, grads: list[dict[str, Tensor]]) -> None:
        """One step from the gradients of each rank."""
        for name, p in self.params.items():
            if self.count < WARM:
                mean = sum(g[name] for g in grads) / len(grads)
                self.mu[name] = B1 * self.mu[name] + (1 - B1) * mean
                self.nu[name] = B2 * self.nu[name] + (1 - B2) * mean**2
            else:
                self.mu[name] = self.mean_of_signs(name, grads)
            of_mu, of_nu = (1 - b**t for b, t in ((B1, self.count + 1), (B2, min(self.count + 1, WARM))))
            mu, nu = (
                (self.mu[name] / of_mu, self.nu[name] / of_nu) if self.corrected else (self.mu[name], self.nu[name])
            )
            step = torch.where(nu > 0, mu / (nu.sqrt() + EPS), 0.0)
            self.params[name] = p - LR * (step + DECAY * p)
        self.count += 1

    def mean_of_signs(self, name: str, grads: list[dict[str, Tensor]]) -> Tensor:
        total = torch.zeros_like(self.mu[name])
        for own, g in zip(self.worker, grads, strict=True):
            value = B1 * self.mu[name] + (1 - B1) * g[name] + own[name]
            own[name] = value - self.signs(value)
            total = total + self.signs(value)
        value = total / len(grads) + self.server[name]
        self.server[name] = value - self.signs(value)
        return self.signs(value)

    @staticmethod
    def signs(value: Tensor) -> Tensor:
        """The signs of a value, each times the root of the mean square of its block, which is added by halves."""
        done = []
        for block in value.flatten().split(64):
            squares = torch.nn.functional.pad(block * block, (0, 64 - len(block)))
            for half in (32, 16, 8, 4, 2, 1):
                squares = squares[:half] + squares[half:]
            done.append(torch.where(block >= 0, 1.0, -1.0) * (squares / len(block)).sqrt())
        return torch.cat(done).view(value.shape)


def flat(params: Any) -> dict[str, Tensor]:
    return dict(zip(*tree.flatten(params)[:2], strict=True))


def linear(p: Any, batch: Any) -> Tensor:
    """A loss whose gradient is the batch, to the bit: a sign of what is almost zero must not depend on a machine."""
    return sum((x * g).sum() for x, g in zip(tree.flatten(p)[1], tree.flatten(batch)[1], strict=True))


def slopes(rank: int, step: int) -> Any:
    g = torch.Generator().manual_seed(100 * step + rank)
    given = tree.map(lambda p: torch.randn(p.shape, generator=g), first())
    given["embed"][10:] = 0.0
    return given


@pytest.mark.parametrize(("world", "corrected"), [(2, True), (3, False), (4, True)])
@pytest.mark.sampled(2)
def test_steps_are_those_of_the_algorithm(world: int, corrected: bool) -> None:
    made = replace(spec(corrected, zero=1), loss=linear)
    done = run(made, first(), slopes, world=world, steps=STEPS, every_step=True)
    hand = ByHand(flat(first()), world, corrected)
    for number in range(STEPS):
        hand.step([flat(slopes(rank, number)) for rank in range(world)])
        leaves = dict(zip(done.paths, done.leaves[number], strict=True))
        for name, wanted in hand.params.items():
            assert torch.allclose(leaves[f"params/{name}"], wanted, atol=1e-6, rtol=1e-5), (number, name)
            assert torch.allclose(leaves[f"opt_state/mu/{name}"], hand.mu[name], atol=1e-6, rtol=1e-5), (number, name)
    coded = leaves["opt_state/mu/a/w"].flatten().split(64)
    assert all(len(block.abs().unique()) == 1 for block in coded), "the last mu is signs by blocks"
    owed = leaves["opt_state/error/worker"]
    wanted = torch.cat([torch.nn.functional.pad(e.flatten(), (0, -e.numel() % 64)) for e in hand.worker[1].values()])
    assert torch.allclose(owed[1], wanted, atol=1e-6)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_first_phase_is_adam_bit_for_bit(corrected: bool) -> None:
    adam = fzero.Spec(loss=loss, optimizer=optim.adamw(LR, (B1, B2), EPS, DECAY, bias_correction=corrected), zero=2)
    plain = run(adam, first(), batch, world=2, steps=WARM).final
    warm = run(spec(corrected, zero=2), first(), batch, world=2, steps=WARM).final
    assert all(same_bits(warm[name], value) for name, value in plain.items())


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"precision": "bf16"}, {"nonfinite": "skip"}], ids=str)
@pytest.mark.sampled(1)
def test_every_stage_has_the_same_bits(options: dict[str, Any], whole: bool) -> None:
    runs = [
        run(spec(zero=zero, bucket_bytes=8192, **options), first(), batch, world=2, steps=WARM + 2).final
        for zero in ((0, 1, 2, 3) if whole else (0, 1, 3))
    ]
    assert all(same_bits(runs[0][name], other[name]) for other in runs[1:] for name in runs[0])


@pytest.mark.parametrize("options", [{"remat": "full"}, {"offload": "optimizer"}, {"prefetch": 2}], ids=str)
@pytest.mark.sampled(1)
def test_where_values_are_held_changes_no_bit(options: dict[str, Any]) -> None:
    one, other = (run(spec(zero=3, **given), first(), batch, world=2, steps=WARM + 1).final for given in ({}, options))
    assert all(same_bits(one[name], other[name]) for name in one)


def test_the_bytes_of_each_phase() -> None:
    wide = {"w": torch.empty(1024, 512, device="meta")}
    one = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=optim.onebit_adam(LR, WARM), zero=0)
    of = {}
    for phase in ("warmup", "coded"):
        program = fzero.lower(one, wide, torch.empty(2, 1024), world_size=64, phase=phase).program
        of[phase] = sum(wire_bytes(program, op) for op in program.ops) / (1024 * 512)
    assert of["coded"] <= 0.38
    assert of["coded"] == pytest.approx(2 * (1 / 8 + 4 / 64) * 63 / 64, rel=0.01)
    assert of["warmup"] == pytest.approx(8 * 63 / 64, rel=0.01)
    assert of["warmup"] / (0.15 * of["warmup"] + 0.85 * of["coded"]) >= 5


def test_rows_without_gradients_keep_their_bits() -> None:
    made = optim.onebit_adam(LR, WARM, (B1, B2), EPS)
    done = run(fzero.Spec(loss=loss, optimizer=made), first(), batch, world=2, steps=STEPS).final
    assert torch.equal(done["params/embed"][10:], first()["embed"][10:])
    assert not torch.equal(done["params/embed"][:10], first()["embed"][:10])


# --- a run ------------------------------------------------------------------------------------------------------------


def bits(state: fzero.State) -> list[bytes]:
    return [leaf.full().numpy().tobytes() for leaf in tree.flatten(state.tree)[1]]


def resumed(folder: str, cuts: Sequence[int]) -> list[list[bytes]]:
    """The state after runs that were cut after so many steps."""

    def on(state: fzero.State, stop: int) -> fzero.State:
        while state.step < stop:
            state = fzero.step(state, batch(session_of(state).rank, state.step))
        return state

    made, found = spec(zero=1), []
    for cut in cuts:
        fzero.save(on(fzero.init(first(), made), cut), Path(folder) / str(cut))
        found.append(bits(on(fzero.load(Path(folder) / str(cut), made, like=first()), STEPS)))
    return found


@pytest.mark.sampled(1)
def test_a_resume_has_the_bits_of_the_whole_run(tmp_path: Path, whole: bool) -> None:
    """Cut before the switch, at it and behind it; in `make test` behind it alone."""
    wanted = run(spec(zero=1), first(), batch, world=2, steps=STEPS)
    interpreted = [leaf.numpy().tobytes() for leaf in wanted.leaves[-1]]
    for rank in values(gloo(2, resumed, str(tmp_path), range(1, STEPS) if whole else [WARM + 1])):
        assert all(one == interpreted for one in rank)


def test_a_step_that_is_not_finite_is_discarded_on_all_ranks_with_its_errors() -> None:
    def lost(rank: int, step: int) -> dict[str, Tensor]:
        given = batch(rank, step)
        if step == WARM + 1 and rank == 1:
            given["y"][0, 0] = torch.inf
        return given

    done = run(spec(nonfinite="skip"), first(), lost, world=2, steps=WARM + 2, every_step=True)
    before, after = (dict(zip(done.paths, done.leaves[n], strict=True)) for n in (WARM, WARM + 1))
    assert all(same_bits(before[name], after[name]) for name in before)
    finite = [[bool(metrics["finite"]) for metrics in step] for step in done.metrics]
    assert finite == [[True, True]] * (WARM + 1) + [[False, False]]
    assert "update_norm" in done.metrics[-1][0]


def test_on_one_rank_nothing_is_coded() -> None:
    """So it is Adam with a frozen variance."""
    one = run(spec(), first(), batch, world=1, steps=STEPS).final
    frozen = optim.freeze_nu(LR, WARM, (B1, B2), EPS, DECAY)
    other = run(fzero.Spec(loss=loss, optimizer=frozen), first(), batch, world=1, steps=STEPS).final
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in other)


def planned_and_held() -> tuple[int, int]:
    """Bytes of a step of the second phase: its planned peak, and what the rank really held."""
    g = torch.Generator().manual_seed(0)
    wide = {"w": torch.randn(100, 1024, generator=g), "u": torch.randn(1024, 100, generator=g)}
    made = fzero.Spec(
        loss=lambda p, x: (torch.tanh(x @ p["w"]) @ p["u"]).square().mean(), optimizer=optim.onebit_adam(LR, 1), zero=0,
        transfers="p2p",
    )  # fmt: skip
    x = torch.ones(2, 100)
    state = fzero.step(fzero.step(fzero.init(wide, made), x), x)
    state, beside = measured_peak(lambda: fzero.step(state, x))
    session = session_of(state)
    lowered = session.compiled(x, None, state.step)
    assert lowered.phase == "coded"
    held = sum(buffer.nbytes for buffer in session.memory.values()) + x.nbytes + lowered.program.arena_bytes
    return lowered.memory.peak, held + beside


def test_what_is_planned_is_what_is_held() -> None:
    for planned, held in values(gloo(2, planned_and_held)):
        assert held <= planned <= 1.05 * held, (planned, held)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"clip_norm": 1.0},
            r"Spec\(clip_norm=1.0\): the optimizer takes each rank's own gradients .*no norm of their",
        ),
        ({"clip_value": 1.0}, r"Spec\(clip_value=1.0\): .*elements of their mean are not known"),
        ({"precision": "fp16"}, r"Spec\(precision='fp16'\): .*in the units of a loss scale that changes"),
        ({"reduce": "each"}, r"Spec\(reduce='each'\): .*once for all microbatches"),
        ({"mesh": {"pp": 2, "dp": 1}}, r"Spec\(mesh=.*a rank of 'pp' has only its part of them. Leave 'pp' out"),
        (
            {"mesh": {"dp": 2, "tp": 2}, "shard": {"out": fzero.P("tp")}},
            r"Spec\(mesh=.*a rank of 'tp' has only its part of them. Leave 'tp' out",
        ),
    ],
)
def test_fields_that_have_no_place(options: dict[str, Any], said: str) -> None:
    with pytest.raises(fzero.SpecError, match=said):
        spec(**options)


def test_parameters_of_another_dtype_and_the_state_of_another_are_refused() -> None:
    with pytest.raises(fzero.TreeError, match=r"onebit_adam: params/w is torch.float64, but what travels in codes"):
        fzero.lower(spec(), {"w": torch.ones(3).double()}, batch(0, 0), world_size=2)
    coded = optim.onebit_adam(LR, WARM)["coded"]
    adam = optim.adamw(LR).init({"w": torch.ones(3)})
    with pytest.raises(fzero.SpecError, match="onebit_adam: opt_state is of type AdamState"):
        coded.update({"w": torch.ones(3)}, adam, {"w": torch.ones(3)})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optim.chain(optim.scale(1.0), tx),
        lambda tx: optim.masked(tx, "**"),
        lambda tx: optim.multi_transform({"**": tx}),
        lambda tx: optim.ema_params(tx, 0.9),
        optim.apply_if_finite,
        optim.delayed,
    ],
)
def test_what_takes_local_gradients_is_not_wrapped(wrap: Any) -> None:
    with pytest.raises(fzero.SpecError, match="a transformation that takes local gradients reduces them itself"):
        wrap(optim.onebit_adam(LR, WARM)["coded"])


def test_wrong_numbers() -> None:
    with pytest.raises(fzero.SpecError, match="onebit_adam: warmup_steps is 0, but it must be at least 1"):
        optim.onebit_adam(LR, 0)
    with pytest.raises(fzero.SpecError, match=r"freeze_nu: after is 1\.5"):
        optim.freeze_nu(LR, 1.5)  # type: ignore[arg-type]


# --- freeze_nu --------------------------------------------------------------------------------------------------------


def test_a_frozen_second_moment_keeps_its_bits_and_the_step_is_adams() -> None:
    made = fzero.Spec(loss=loss, optimizer=optim.freeze_nu(LR, WARM, (B1, B2), EPS, DECAY), zero=2)
    done = run(made, first(), batch, world=2, steps=WARM + 1, every_step=True)
    at = [dict(zip(done.paths, leaves, strict=True)) for leaves in done.leaves]
    before, after = at[WARM - 1], at[WARM]
    assert all(same_bits(before[name], after[name]) for name in before if "/nu/" in name)
    for name, p in flat(first()).items():
        held = {key: before[f"{key}/{name}"].double() for key in ("params", "opt_state/nu")}
        mu = after[f"opt_state/mu/{name}"].double() / (1 - B1 ** (WARM + 1))
        nu = held["opt_state/nu"] / (1 - B2**WARM)
        step = torch.where(nu > 0, mu / (nu.sqrt() + EPS), 0.0)
        wanted = held["params"] - LR * (step + DECAY * held["params"])
        assert torch.allclose(after[f"params/{name}"].double(), wanted, atol=1e-6), name
        assert p.shape == wanted.shape
    assert math.isfinite(done.losses()[-1])


def test_signs_by_hand_are_those_of_the_codec() -> None:
    value = first()["a"]["b"]
    assert torch.allclose(decode(encode(value, SIGN), 50, SIGN), ByHand.signs(value), atol=1e-7)


def test_float64_parameters_are_updated_in_float64() -> None:
    phases = optim.freeze_nu(LR, 1, (B1, B2), EPS, DECAY)
    draw = torch.Generator().manual_seed(0)
    p, g = (torch.randn(5, dtype=torch.float64, generator=draw) for _ in range(2))
    _, opt_state = phases["warmup"].update([g], phases["warmup"].init([p]), [p])
    (update,), _ = phases["frozen"].update([g], opt_state, [p])
    mu, root = (1 - B1**2) * g, g.abs()  # their biases divided out
    wanted = -LR * (mu / (1 - B1**2) / (root + EPS) + DECAY * p)
    torch.testing.assert_close(update, wanted, rtol=1e-13, atol=0)
