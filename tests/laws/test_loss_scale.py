"""Loss scaling and steps that are not finite: who skips, when, and that a skipped step changes no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import differing, gloo, run, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MLP
from torch import Tensor

import fzero
from fzero import LossScale, backend, optim, random, tree
from fzero.precision import PRESETS

# --- the scale by itself ----------------------------------------------------------------------------------------------


class AtMinimumError(Exception):
    """What DeepSpeed says in "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."."""


@dataclass
class DeepSpeed:
    """`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler` of 0.19.8, with the names of its fields."""

    cur_scale: float
    scale_window: int
    min_scale: float
    delayed_shift: int
    consecutive_hysteresis: bool
    raise_error_at_min_scale: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    scale_factor: float = 2.0

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.delayed_shift

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                if (self.cur_scale == self.min_scale) and self.raise_error_at_min_scale:
                    raise AtMinimumError
                else:
                    self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if (stable_interval > 0) and (stable_interval % self.scale_window == 0):
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    overflows=st.lists(st.sampled_from([True, False, False]), max_size=60),
    power=st.integers(0, 16),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    minimum=st.sampled_from([1.0, 0.25, 64.0]),
    consecutive=st.booleans(),
)
def test_the_scale_follows_deepspeeds_rules(
    overflows: list[bool], power: int, window: int, hysteresis: int, minimum: float, consecutive: bool
) -> None:
    scaler = LossScale(
        initial=2.0**power, window=window, hysteresis=hysteresis, minimum=minimum, consecutive_hysteresis=consecutive
    )
    held, theirs = scaler.init(), DeepSpeed(2.0**power, window, minimum, hysteresis, consecutive)
    for count, overflow in enumerate(overflows, 1):
        before, held = held, scaler.update(held, torch.tensor(not overflow))
        assert int(held["skipped"]) == sum(overflows[:count])
        try:
            theirs.update_scale(overflow)
        except AtMinimumError:
            assert int(held["hysteresis"]) == 0, "which ends the run"
            assert torch.equal(held["scale"], before["scale"])
            return
        assert float(held["scale"]) == theirs.cur_scale
        assert int(held["hysteresis"]) == theirs.cur_hysteresis


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    overflows=st.lists(st.sampled_from([True, *[False] * 7]), max_size=120),
    power=st.integers(-20, 120),
    window=st.integers(1, 6),
)
def test_the_scale_follows_torchs_rule(overflows: list[bool], power: int, window: int) -> None:
    """The complaint: it doubled a step later than `torch.amp.GradScaler`, and stayed at 1."""
    scaler = LossScale.of_torch(2.0**power, window)
    held, theirs, tracker = scaler.init(), torch.full((), 2.0**power), torch.zeros((), dtype=torch.int32)
    for overflow in overflows:
        held = scaler.update(held, torch.tensor(not overflow))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflow)), 2.0, 0.5, window)
        if float(theirs) < scaler.minimum:
            assert int(held["hysteresis"]) == 0, "which ends the run"
            return
        assert float(held["scale"]) == float(theirs)


def test_the_scale_doubles_after_the_window_and_one_step_then_after_each_window() -> None:
    """The same in numbers that a person can count."""
    scaler = LossScale(initial=1.0, window=3)
    held, scales = scaler.init(), []
    for finite in (1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1):
        held = scaler.update(held, torch.tensor(bool(finite)))
        scales.append(float(held["scale"]))
    assert scales == [1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 8]


def test_a_scale_stays_between_its_minimum_and_what_fp32_holds() -> None:
    scaler = LossScale(initial=4.0, window=1, hysteresis=1, minimum=2.0)
    held = scaler.init()
    for _ in range(5):
        held = scaler.update(held, torch.tensor(False))
    assert float(held["scale"]) == 2.0
    for _ in range(200):
        held = scaler.update(held, torch.tensor(True))
    assert torch.isfinite(held["scale"]), "an infinite scale would overflow for ever"


def test_a_fixed_scale_counts_and_stays() -> None:
    scaler = LossScale(initial=128.0, dynamic=False)
    held = scaler.init()
    for finite in (True, False, False, True):
        held = scaler.update(held, torch.tensor(finite))
    assert (float(held["scale"]), int(held["skipped"]), int(held["clean"])) == (128.0, 2, 1)


WRONG = [
    {"initial": 0}, {"minimum": float("inf")}, {"window": 0}, {"hysteresis": 1.5}, {"dynamic": "no"},
    {"consecutive_hysteresis": 1}, {"counts_first": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_scale_of_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(fzero.SpecError, match=rf"LossScale\({next(iter(wrong))}="):
        LossScale(**wrong)


# --- a step that overflows --------------------------------------------------------------------------------------------

BAD = 2  # the step whose batch overflows


def loss(params: Any, batch: Any) -> Tensor:
    return MLP.loss(params, batch[:2]) * batch[2].mean()


def batch(rank: int, step: int, bad: float = 1e30) -> Any:
    """As MLP's; at step BAD the last rank's gradients overflow, and only its."""
    x, y = MLP.batch(rank, step)
    world = dist.get_world_size() if dist.is_initialized() else 2
    return x, y, torch.full((4,), bad if (step, rank) == (BAD, world - 1) else 1.0)


ADAMW = optim.adamw(1e-2)


def spec(**options: Any) -> fzero.Spec:
    scale = LossScale(initial=256.0, window=3, hysteresis=1)
    given = {"precision": replace(PRESETS["fp16"], loss_scale=scale), "optimizer": ADAMW, **options}
    return fzero.Spec(loss=loss, **given)


def split(found: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state proper, and what counts steps."""
    counts = {path: x for path, x in found.items() if path.startswith(("loss_scale", "key"))}
    return {path: x for path, x in found.items() if path not in counts}, counts


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "reduce": "each"}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.sampled(2)
def test_an_overflow_on_one_rank_skips_one_step_on_all(zero: int, options: dict[str, Any]) -> None:
    result = run(spec(zero=zero, **options), MLP.init(random.key(0)), batch, world=2, steps=5, every_step=True)
    states = [split(dict(zip(result.paths, leaves, strict=True))) for leaves in result.leaves]
    assert not differing(states[BAD][0], states[BAD - 1][0])
    for step in (1, 3, 4):
        assert differing(states[step][0], states[step - 1][0])
    assert result.losses("skipped") == [0, 0, 1, 1, 1]
    assert result.losses("finite") == [1, 1, 0, 1, 1]
    assert result.losses("loss_scale") == [256, 256, 256, 128, 128], "the scale that each step used"
    assert float(states[4][1]["loss_scale/scale"]) == 128
    assert int(states[4][0]["opt_state/count"]) == 4


def test_but_for_the_skipped_step_it_is_the_run_without_it() -> None:
    def without(rank: int, step: int) -> Any:
        return batch(rank, step + (step >= BAD))

    fixed = replace(PRESETS["fp16"], loss_scale=LossScale(initial=256.0, dynamic=False))
    ends = [
        run(spec(precision=fixed), MLP.init(random.key(0)), given, world=2, steps=steps).final
        for given, steps in ((batch, 5), (without, 4))
    ]
    assert not differing(split(ends[0])[0], split(ends[1])[0])


def test_a_scale_too_large_finds_its_place() -> None:
    high = replace(PRESETS["fp16"], loss_scale=LossScale(initial=2.0**24, hysteresis=1))
    result = run(spec(precision=high), MLP.init(random.key(0)), clean, world=1, steps=15)
    assert result.losses("skipped")[-1] > 2
    assert result.losses("finite")[-3:] == [1, 1, 1]
    assert result.losses("loss_scale")[-1] == 2.0 ** (24 - result.losses("skipped")[-1])


def exhausting(hysteresis: int = 1, folder: str = "") -> tuple[list[str], list[bool], fzero.State]:
    """In a rank's process (or alone): two steps, five that overflow, one more. The errors' messages, whether each error
    left the parameters' bits and a state that can be read (and with a folder saved), and the last state."""
    scaler = LossScale(initial=4.0, minimum=2.0, hysteresis=hysteresis)
    given = spec(precision=replace(PRESETS["fp16"], loss_scale=scaler), zero=3)
    state, messages, kept = fzero.init(MLP.init(random.key(0)), given), [], []
    rank = dist.get_rank() if dist.is_initialized() else 1
    for number in [0, 1, BAD, BAD, BAD, BAD, BAD, 3]:
        before = split(whole(state))[0]
        try:
            state = fzero.step(state, batch(rank, number))
        except fzero.NonFiniteError as error:
            messages.append(str(error))
            kept.append(not differing(before, split(whole(state))[0]))
            if folder:
                fzero.save(state, f"{folder}/{len(kept)}")
    return messages, kept, state


def whole(state: fzero.State) -> dict[str, Tensor]:
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def exhausted_over_gloo() -> Any:
    messages, kept, state = exhausting()
    return messages, kept, state.step


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_an_overflow_at_the_least_scale_ends_the_run_and_no_state_is_lost(hysteresis: int, tmp_path: Any) -> None:
    messages, kept, state = exhausting(hysteresis, str(tmp_path))
    assert kept == [True] * (5 - hysteresis), "the first overflows find the least scale"
    first = f"the gradients overflow at the least loss scale, 2 (step {3 + hysteresis})"
    assert messages[0].startswith(first)
    assert "LossScale(minimum=...)" in messages[0]
    assert "No step that overflowed changed" in messages[0]
    assert "did update" not in messages[0], "there was no finite one"
    assert state.step == 3 + hysteresis, "and the last batch was a good one"
    assert int(whole(state)["loss_scale/skipped"]) == 5
    loaded = fzero.load(str(tmp_path / "1"), like=state)
    assert loaded.step == 2 + hysteresis
    assert fzero.step(loaded, batch(1, 3)).step == 3 + hysteresis, "a run may go on from it"


def test_where_a_look_waits_for_the_device_it_is_rare_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: what was overflown between two looks is told by the later one."""
    scaler = LossScale(initial=2.0, minimum=2.0, hysteresis=1)
    given = spec(precision=replace(PRESETS["fp16"], loss_scale=scaler))
    state = fzero.init(MLP.init(random.key(0)), given)
    monkeypatch.setitem(backend.BACKENDS, "cpu", replace(backend.CPU, looks_after=backend.CUDA.looks_after))
    for number in range(backend.CUDA.looks_after - 1):
        state = fzero.step(state, batch(1, BAD if number == 3 else number % 2))
    assert int(state.metrics["skipped"]) == 1
    seen = r"at the least loss scale, 2 \(step 16, or one of the 15 before; the finite.* did update"
    before = split(whole(state))[0]
    with pytest.raises(fzero.NonFiniteError, match=seen):
        fzero.step(state, batch(1, 0))
    assert differing(before, split(whole(state))[0]), "as the message says"
    assert fzero.step(state, batch(1, 0)).step == backend.CUDA.looks_after


def clean(rank: int, step: int) -> Any:
    return (*MLP.batch(rank, step), torch.ones(4))


def test_losses_and_norms_are_those_without_the_scale() -> None:
    params = MLP.init(random.key(0))
    norms = []
    for initial in (2.0, 2.0**12):
        how = replace(PRESETS["fp16"], loss_scale=LossScale(initial=initial))
        found = run(spec(precision=how, clip_norm=1.0), params, clean, world=2, steps=1).metrics[0][0]
        norms.append((float(found["loss"]), float(found["grad_norm"])))
    assert norms[0][0] == norms[1][0]
    assert norms[0][1] == pytest.approx(norms[1][1], rel=2e-2)  # small gradients are below fp16's range at a scale of 2


# --- other policies ---------------------------------------------------------------------------------------------------


def fp32(nonfinite: str | None, **options: Any) -> fzero.Spec:
    return spec(precision="fp32", nonfinite=nonfinite, **options)


def infinite(rank: int, step: int) -> Any:
    return batch(rank, step, bad=float("inf"))


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_params"])
@pytest.mark.sampled(2)
def test_skip_keeps_every_bit_in_other_precisions(name: str) -> None:
    given = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2), precision=name, nonfinite="skip")
    result = run(given, MLP.init(random.key(0)), infinite, world=2, steps=4, every_step=True, key=random.key(1))
    states = [dict(zip(result.paths, leaves, strict=True)) for leaves in result.leaves]
    assert differing(states[BAD], states[BAD - 1]) == ["key"], "another draw may do better"
    assert "params/out" in differing(states[3], states[2])
    assert result.losses("finite") == [1, 1, 0, 1]
    assert all(torch.isfinite(x).all() for x in states[3].values())


def test_ignore_does_what_the_numbers_say() -> None:
    for policy in (None, "ignore"):
        result = run(fp32(policy), MLP.init(random.key(0)), infinite, world=2, steps=BAD + 1)
        assert "finite" not in result.metrics[0][0]
        assert not torch.isfinite(result.final["params/out"]).all()


def raising() -> tuple[list[str], list[bool]]:
    """In a rank's process (or alone): the messages, and whether bits stayed and steps went on."""
    state = fzero.init(MLP.init(random.key(0)), fp32("raise", zero=3), key=random.key(1))
    rank = dist.get_rank() if dist.is_initialized() else 1
    messages, kept = [], []
    for step in range(4):
        before = tree.flatten(fzero.unshard(state.tree))[1]
        try:
            new = fzero.step(state, infinite(rank, step))
        except fzero.NonFiniteError as error:
            messages.append(str(error))
            after = tree.flatten(fzero.unshard(state.tree))[1]
            kept.append(all(same_bits(a, b) for a, b in zip(before, after, strict=True)))
            new = fzero.step(state, infinite(rank, step + 10))
        kept.append(new.step == step + 1)
        state = new
    return messages, kept


def overflowing() -> tuple[dict[str, Tensor], list[float]]:
    state = fzero.init(MLP.init(random.key(0)), spec(zero=3))
    skipped = []
    for step in range(5):
        state = fzero.step(state, batch(dist.get_rank(), step))
        skipped.append(float(state.metrics["skipped"]))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True)), skipped


def all_three() -> Any:
    return overflowing(), raising(), exhausted_over_gloo()


def test_raise_leaves_the_state_usable_and_its_bits() -> None:
    messages, kept = raising()
    assert len(messages) == 1
    assert "gradients of step 3 are not finite (loss inf)" in messages[0]
    assert kept == [True] * 5


def test_over_gloo_every_rank_skips_and_every_rank_raises() -> None:
    found = values(gloo(2, all_three))
    expected = run(spec(zero=3), MLP.init(random.key(0)), batch, world=2, steps=5)
    for (final, skipped), (messages, kept), ended in found:
        assert not differing(final, expected.final)
        assert skipped == [0, 0, 1, 1, 1]
        assert len(messages) == 1
        assert "loss inf" in messages[0]
        assert kept == [True] * 5
        assert ended == found[0][2]
        assert ended[1:] == ([True] * 4, 4)
