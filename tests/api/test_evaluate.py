"""fzero.evaluate and fzero.forward: functions of a state that change nothing, exact over ranks, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import gloo, relative, run, same_bits, values
from models import normal
from torch import Tensor

import fzero
from fzero import Mean, api, optim, random, tree
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.step import fakes_on, lower_step
from fzero.ir.liveness import gathered_bytes, live_bytes
from fzero.training import training_of

DEPTH, WIDTH, ROWS = 6, 16, 8


def params(key: Tensor) -> Any:
    keys = random.split(key, DEPTH + 1)
    layers = [{"w": normal(k, WIDTH, WIDTH, scale=0.3), "b": torch.zeros(WIDTH)} for k in keys[1:]]
    return {"layers": layers, "out": normal(keys[0], WIDTH)}


def net(p: Any, x: Tensor) -> Tensor:
    for one in p["layers"]:
        x = torch.tanh(x @ one["w"] + one["b"])
    return x @ p["out"]


def loss(p: Any, batch: Any) -> Tensor:
    return (net(p, batch["x"]) - batch["y"]).square().mean()


def whole(step: int = 0) -> Any:
    x = normal(random.fold_in(random.key(5), step), ROWS, WIDTH)
    return {"x": x, "y": x.sum(1), "mask": (torch.arange(ROWS) % 3 > 0)}


def part(rank: int, world: int, step: int = 0) -> Any:
    return {name: x.chunk(world)[rank].contiguous() for name, x in whole(step).items()}


def scores(p: Any, batch: Any) -> Any:
    out = net(p, batch["x"])
    errors = (out - batch["y"]).square() * batch["mask"]
    return {
        "error": Mean(errors.float().sum(), batch["mask"].sum()),
        "mean": out.mean(),
        "out": out,
        "kept": batch["mask"].sum(),
        "weighted": [
            Mean(errors.float().sum(), batch["mask"].sum() * 2.0),
            Mean(out.float().sum() * 0, batch["mask"].sum() * 0),
        ],
    }


def spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(loss=loss, **{"optimizer": optim.adamw(1e-2), "zero": 3, **options})


def expected() -> dict[str, Any]:
    p, batch = params(random.key(0)), whole()
    out = net(p, batch["x"])
    errors = (out - batch["y"]).square() * batch["mask"]
    return {"error": errors.sum() / batch["mask"].sum(), "mean": out.mean(), "out": out}


def bits(state: fzero.State) -> list[Tensor]:
    leaves: list[Tensor] = tree.flatten(fzero.unshard(state.tree))[1]
    return leaves


# --- on real ranks ----------------------------------------------------------------------------------------------------


def on_gloo(zero: int) -> Any:
    state = fzero.init(params, spec(zero=zero), key=random.key(0))
    rank, world = dist.get_rank(), dist.get_world_size()
    before, memory = bits(state), {name: x.data_ptr() for name, x in state.runtime.memory.items()}
    found = fzero.evaluate(state, part(rank, world), scores)
    again = fzero.evaluate(state, part(rank, world), scores)
    assert all(same_bits(a, b) for a, b in zip(tree.flatten(found)[1], tree.flatten(again)[1], strict=True))
    assert all(same_bits(a, b) for a, b in zip(before, bits(state), strict=True))
    assert memory == {name: x.data_ptr() for name, x in state.runtime.memory.items()}
    assert len(state.runtime.evaluations) == 1
    assert state.step == 0
    trained = fzero.step(state, part(rank, world))  # it was not donated
    kept = {name: x.clone() for name, x in found.items() if isinstance(x, Tensor)}
    after = fzero.evaluate(trained, part(rank, world), scores)
    assert len(state.runtime.evaluations) == 1, "the program is of the state's kind, not of this state"
    assert float(after["error"]) != float(found["error"])
    assert all(same_bits(kept[name], found[name]) for name in kept), "a result is no view of the state"
    return found


def test_a_batch_that_differs_between_ranks_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was batch['batch/x']."""
    state = fzero.init(
        {"w": torch.ones(4)}, fzero.Spec(loss=lambda p, b: (b["x"] @ p["w"]).sum(), optimizer=optim.sgd(0.1))
    )
    told: list[Any] = []

    def agree(*given: Any) -> int:
        told.append(given[7]()[0])
        return 0

    monkeypatch.setattr(api, "agree", agree)
    fzero.evaluate(state, {"x": torch.ones(2, 4)}, lambda p, b: b["x"] @ p["w"])
    fzero.step(state, {"x": torch.ones(2, 4)})
    assert [names["batch['x']"] for names in told] == ["f32[2, 4]"] * 2


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.sampled(1)
def test_on_ranks_means_are_of_the_whole_batch_and_the_state_stays(zero: int) -> None:
    ranks = values(gloo(2, on_gloo, zero))
    want = expected()
    for rank, found in enumerate(ranks):
        assert float(found["error"]) == pytest.approx(float(want["error"]), rel=1e-6)
        assert float(found["weighted"][0]) == pytest.approx(float(want["error"]) / 2, rel=1e-6)
        assert float(found["weighted"][1]) == 0, "of nothing the mean is 0"
        assert float(found["mean"]) == pytest.approx(float(want["mean"]), rel=1e-5)
        assert relative(found["out"], want["out"].chunk(2)[rank]) < 1e-6, "this rank's own"
        assert int(found["kept"]) == int(part(rank, 2)["mask"].sum())


# --- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"precision": "bf16_params"}, {"remat": "full"}], ids=str)
@pytest.mark.sampled(2)
def test_nothing_of_the_state_changes(options: dict[str, Any]) -> None:
    state = fzero.step(fzero.init(params, spec(**options), key=random.key(0)), whole())
    before, metrics = bits(state), dict(state.metrics)
    fzero.evaluate(state, whole(), scores)
    fzero.evaluate(state, whole(), lambda p, b: tree.map(lambda x: x + 1, p))
    assert all(same_bits(a, b) for a, b in zip(before, bits(state), strict=True))
    assert all(same_bits(x, state.metrics[name]) for name, x in metrics.items())
    assert fzero.step(state, whole()).step == 2


def test_an_evaluation_between_two_steps_changes_no_bit_of_the_second() -> None:
    ends = []
    for evaluates in (False, True):
        state = fzero.init(params, spec(), key=random.key(0))
        for step in range(3):
            state = fzero.step(state, whole(step))
            if evaluates:
                fzero.evaluate(state, whole(step), scores)
        ends.append(bits(state))
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


def test_the_whole_state_of_a_step_of_ones_own() -> None:
    tx = optim.sgd(0.1)

    def step(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], batch)
        return {**state, "params": tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": value}

    start = params(random.key(0))
    state = fzero.init({"params": start, "opt": tx.init(start), "n": torch.tensor(4)}, fzero.Spec(step=step, zero=3))
    found = fzero.evaluate(state, whole(), lambda s, b: {"out": net(s["params"], b["x"]) * s["n"]})
    assert relative(found["out"], 4 * expected()["out"]) < 1e-6


@pytest.mark.acceptance
def test_new_parameters_are_seen_and_another_shape_is_another_program() -> None:
    state = fzero.init(params, spec(), key=random.key(0))
    first = fzero.evaluate(state, whole(), scores)
    state = fzero.step(state, whole())
    assert float(fzero.evaluate(state, whole(), scores)["error"]) != float(first["error"])
    assert len(state.runtime.evaluations) == 1
    fzero.evaluate(state, part(0, 2), scores)
    assert len(state.runtime.evaluations) == 2
    for _ in range(20):
        fzero.evaluate(state, whole(), lambda p, b: p["out"].sum())
    assert len(state.runtime.evaluations) == 16, "functions made anew do not fill the memory"


def test_random_ones_need_a_key() -> None:
    def noisy(p: Any, b: Any) -> Tensor:
        return F.dropout(net(p, b["x"]), 0.5).sum()

    def keyed(p: Any, b: Any, key: Tensor) -> Tensor:
        return net(p, b["x"]).sum() + random.normal(key)

    state = fzero.init(params, spec(), key=random.key(0))
    for fn in (noisy, keyed):
        one, two, other = (float(fzero.evaluate(state, whole(), fn, key=random.key(k))) for k in (1, 1, 2))
        assert one == two != other
    with pytest.raises(fzero.CaptureError, match=r"fzero\.evaluate\(\.\.\., key=key\)"):
        fzero.evaluate(state, whole(), noisy)
    with pytest.raises(fzero.TreeError, match=r"fzero\.evaluate\(key=3\): needed a key"):
        fzero.evaluate(state, whole(), noisy, key=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (3, "fn is int: needed a function"),
        (lambda p, b: 3.0, "result of .*float 3.0: needed a tensor or fzero.Mean"),
        (lambda p, b: {"a": Mean(p["out"], b["x"].sum())}, r"Mean\(total="),
        (lambda p, b: p["out"].add_(1), "changed in place"),
        (lambda p, b: fzero.value_and_grad(loss)(p, b), "value_and_grad was called inside a loss"),
        (lambda p, b: fzero.pmean(p["out"]), "pmean was called inside a loss"),
        (lambda p, b: p["out"] if p["out"].sum() > 0 else b["x"], "torch.where"),
    ],
)
def test_refusals_leave_the_state_usable(fn: Any, message: str) -> None:
    state = usable.pop() if usable else fzero.init(params, spec(), key=random.key(0))
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.evaluate(state, whole(), fn)
    after = fzero.step(state, whole())
    assert after.step == state.step + 1
    usable.append(after)


usable: list[fzero.State] = []  # the state of the test above, which goes on from case to case: its step is traced once


def test_a_function_of_nothing_is_evaluated() -> None:
    """A region that reads no value: cutting it into segments was an IndexError."""
    state = fzero.init(params, spec(), key=random.key(0))
    assert fzero.evaluate(state, whole(), lambda p, b: torch.arange(3) + 1).tolist() == [1, 2, 3]


def test_a_donated_state_cannot_be_evaluated() -> None:
    state = fzero.init(params, spec(), key=random.key(0))
    fzero.step(state, whole())
    with pytest.raises(fzero.DonatedError, match=r"was donated to fzero\.step"):
        fzero.evaluate(state, whole(), scores)


# --- the schedule -----------------------------------------------------------------------------------------------------


def evaluation(fn: Callable[..., Any], **options: Any) -> fzero.Lowered:
    """The program that `fzero.evaluate` would run on each of four ranks."""
    one = spec(**options)
    made = fzero.lower(one, params, whole(), world_size=4)
    like = training_of(one).init(params(random.key(0)))
    given = {"batch": whole(), "key": None}
    return lower_step(one, *(fakes_on(x, torch.device("cpu")) for x in (like, given)), made.plan, LoweringContext(), fn)


def test_it_gathers_layer_by_layer() -> None:
    program = evaluation(scores).program
    order = [op.reads[0].name for op in program.ops if op.gathers]
    layers = [name for name in order if "layers" in name]
    assert layers == [f"params:layers.{i}" for i in range(DEPTH)], "each once, in order"
    total = sum(b.length * 4 for name, b in program.buckets.items() if name.startswith("layers"))
    held = gathered_bytes(program.ops, program.buffers)
    assert max(held) < total / 2
    assert max(live_bytes(program.ops, program.buffers)) - evaluation(scores).memory.state < total
    frees = [i for i, op in enumerate(program.ops) if op.is_free]
    starts = [i for i, op in enumerate(program.ops) if op.gathers]
    assert any(a < f < b for a, b in pairwise(starts) for f in frees), "a layer is freed before the next are there"
    assert not any(op.is_update for op in program.ops)


def test_a_frozen_teacher_is_gathered_layer_by_layer() -> None:
    def step(state: Any, batch: Any) -> Any:
        target = fzero.forward(net)(state["teacher"], batch["x"])
        value, grads = fzero.value_and_grad(loss)(state["params"], {**batch, "y": target})
        return {**state, "params": tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {
            "loss": value, "target": target,
        }  # fmt: skip

    start = {"params": params(random.key(0)), "teacher": params(random.key(1))}
    runs = [
        run(fzero.Spec(step=step, zero=zero), start, lambda r, s: part(r, 2, s), world=2, steps=2) for zero in (0, 3)
    ]
    assert runs[0].losses() == runs[1].losses()
    for path, value in runs[1].final.items():
        assert same_bits(value, runs[0].final[path])
        if path.startswith("teacher/"):
            assert same_bits(value, dict(zip(*tree.flatten(start)[:2], strict=True))[path])
    assert relative(runs[1].metrics[0][1]["target"], net(start["teacher"], part(1, 2)["x"])) < 1e-6
    order = [op.reads[0].name for op in runs[1].lowered.program.ops if op.gathers]
    assert [n for n in order if n.startswith("teacher:layers")] == [f"teacher:layers.{i}" for i in range(DEPTH)]


def test_forward_of_a_mean_in_a_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {"scores": fzero.forward(scores)(state, batch)}

    result = run(
        fzero.Spec(step=step, params="layers/**"), params(random.key(0)), lambda r, s: part(r, 4), world=4, steps=1
    )
    for metrics in result.metrics[0]:
        assert float(metrics["scores/error"]) == pytest.approx(float(expected()["error"]), rel=1e-6)
        assert float(metrics["scores/mean"]) == pytest.approx(float(expected()["mean"]), rel=1e-5)


@dataclass
class Scaled:
    """A function that is equal to others and has no hash."""

    by: float = field(compare=False)

    def __call__(self, p: Any, b: Any) -> Any:
        return self.by * p["w"].sum()


def test_functions_that_are_equal_and_not_the_same_have_programs_of_their_own() -> None:
    """The second gave the numbers of the first."""
    spec = fzero.Spec(loss=lambda p, b: p["w"].sum(), optimizer=fzero.optim.sgd(0.1))
    state = fzero.init({"w": torch.ones(3)}, spec)
    assert [float(fzero.evaluate(state, None, Scaled(by))) for by in (1.0, 2.0)] == [3.0, 6.0]
