"""A pipeline changes no bit: every schedule against the same step without one, at the same dp and `reduce`.

All ranks of the grid run in this process, with poisoned memory. `by_role` is verified by `fzero.lower` itself.
"""

from __future__ import annotations

from typing import Any

import cases
import hf_models
import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import Run, run
from torch import Tensor

import fzero
from fzero import optim
from fzero.interop import from_module
from fzero.ir import messages
from fzero.pipeline import Pipeline, Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
STEPS = 2  # the second reads what the first wrote
VOCAB, SEQUENCE = 64, 8
ADAMW = optim.adamw(1e-2)
INIT, LOSS = cases.gpt(VOCAB, 16, 4, 2)
PLAIN_INIT, PLAIN_LOSS = cases.tied(VOCAB, 16, 4)  # where the layers' ops do not matter
SHORT_INIT, SHORT_LOSS = cases.tied(VOCAB, 16, 2)  # two layers, for two chunks


def depth(schedule: str) -> int:
    """A layer for each chunk of two roles."""
    return 4 if schedule in ("interleaved", "zb-v") else 2


def plain(whole: bool) -> dict[str, Any]:
    """The quick model, for `both`, where not all cases run."""
    return {} if whole else {"params": PLAIN_INIT(fzero.random.key(0)), "loss": PLAIN_LOSS}


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, SEQUENCE, VOCAB, rank + 10 * step)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": LOSS, "optimizer": ADAMW, "microbatches": 4, "reduce": "end", "transfers": "p2p"}
    return fzero.Spec(**{**made, **given})


def same(a: Run, b: Run) -> None:
    """Equal bits: every leaf at the end, and every metric on every rank; the norm of an overflow is no number."""
    assert a.paths == b.paths
    differing = [p for p, x, y in zip(a.paths, a.leaves[-1], b.leaves[-1], strict=True) if not torch.equal(x, y)]
    assert differing == []
    for one, two in zip(a.metrics, b.metrics, strict=True):
        for rank in two:
            torch.testing.assert_close(rank, one[0], rtol=0, atol=0, equal_nan=True)


def both(
    pp: int, dp: int, schedule: Any, params: Any = None, batch: Any = tokens, steps: int = STEPS,
    key: Tensor | None = None, **given: Any,
) -> Run:  # fmt: skip
    params = INIT(fzero.random.key(0)) if params is None else params
    plain = run(spec(mesh={"dp": dp}, **given), params, batch, world=dp, steps=steps, key=key)
    cut = spec(mesh={"pp": pp, "dp": dp}, pipeline=schedule, **given)
    piped = run(cut, params, batch, world=pp * dp, steps=steps, key=key)
    same(plain, piped)
    return piped


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(1)
def test_every_schedule_at_every_stage(schedule: str, zero: int, whole: bool) -> None:
    """Tied embedding, clipping by the global norm."""
    both(2, 2, schedule, zero=zero, clip_norm=0.5, **plain(whole))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.sampled(1)
def test_four_roles(schedule: str, whole: bool) -> None:
    both(4, 1, schedule, zero=0, clip_norm=0.5, **plain(whole))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("roles", [3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.sampled(1)
def test_a_value_that_several_roles_read(schedule: str, roles: int, microbatches: int) -> None:
    """An encoder's result goes to every role of the decoder before the first waits for a gradient of it."""
    init, loss = cases.translating(VOCAB, 16, 4)
    both(roles, 1, schedule, params=init(fzero.random.key(0)), loss=loss, microbatches=microbatches, zero=0)


OTHERS: dict[str, dict[str, Any]] = {
    "each": {"reduce": "each", "zero": 2},
    "remat": {"remat": "full", "zero": 3},
    "bf16": {"precision": "bf16", "zero": 3},
    "fp16": {"precision": "fp16", "nonfinite": "skip", "zero": 1},
    "muon": {"optimizer": optim.muon(0.02, others=optim.adamw(1e-2)), "zero": 1},
    "muon at 3": {"optimizer": optim.muon(0.02, others=optim.adamw(1e-2)), "zero": 3},
    "8-bit": {"optimizer": optim.adamw8bit(1e-2), "zero": 3},
    "clipped values": {"clip_value": 1e-3, "zero": 2},
    "small buckets": {"bucket_bytes": 1024, "zero": 3},
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sampled(1)
def test_with_everything_else(name: str, schedule: str, whole: bool) -> None:
    both(2, 2, schedule, **{**plain(whole), **OTHERS[name]})


MODELS = ("Llama", "GPT-2", "T5", "BERT", "ViT", "Mixtral", "Qwen3", "Mamba")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_border_whose_dims_lie_in_another_order(schedule: str) -> None:
    """What is sent is memory as it lies; the receiver's segments read it by the strides of the captured step."""
    init, loss = cases.turned(2)
    run = both(2, 1, schedule, params=init(fzero.random.key(0)), batch=cases.turned_rows, loss=loss, microbatches=2)
    sent = [form for program in run.lowered.roles.values() for form in messages.forms(program).values()]
    assert any(not form.is_contiguous() for form in sent)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.acceptance  # in make test those of test_pipeline_tensor_parallel.py, on four roles
def test_models_that_nobody_here_wrote(name: str, schedule: str) -> None:
    pytest.importorskip("transformers")
    case = hf_models.CASES[name]
    torch.manual_seed(0)
    params, buffers, apply = from_module(case.make().eval())

    def loss(p: Any, b: dict[str, Tensor]) -> fzero.Mean:
        given = {key: value for key, value in b.items() if key != "labels"}
        return fzero.Mean(*case.loss(apply(p, buffers, **given), b))

    def batch(rank: int, step: int) -> dict[str, Tensor]:
        more = case.batch(rank + 7, step)
        return {key: torch.cat([value, more[key]]) for key, value in case.batch(rank, step).items()}

    both(2, 1, schedule, params=params, batch=batch, steps=2, loss=loss, microbatches=2, zero=1)


# --- leaves that lie elsewhere than where they are used ---------------------------------------------------------------


def odd_init(key: Tensor) -> Any:
    """`first` is used before the blocks and keeps a name of the last; `embed` after them, with one of the first."""
    k = fzero.random.split(key, 4)
    w = [fzero.random.normal(each, (16, 16)) * 0.3 for each in k]
    return {"first": w[0], "embed": w[1], "blocks": [{"w": w[2]}, {"w": w[3]}]}


def deep_init(key: Tensor) -> Any:
    """The same with four blocks."""
    return {
        **odd_init(key),
        "blocks": [{"w": fzero.random.normal(k, (16, 16)) * 0.3} for k in fzero.random.split(key, 4)],
    }


def odd_loss(p: Any, b: Tensor) -> Tensor:
    x = torch.tanh(b @ p["first"])
    for block in p["blocks"]:
        x = x + torch.tanh(x @ block["w"])
    return F.mse_loss(x @ p["embed"] @ p["first"], b)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.sampled(1)
def test_leaves_that_another_role_uses_are_lent_to_it(zero: int) -> None:
    params = odd_init(fzero.random.key(1))
    piped = both(2, 2, "1f1b", params=params, batch=rows, loss=odd_loss, zero=zero, clip_norm=0.5)
    lent = {role: [n for n in p.buffers if ".lent" in n] for role, p in piped.lowered.programs.items()}
    assert len(set(lent[0]) | set(lent[1])) >= 2
    assert any(".back" in name for name in piped.lowered.programs[1].buffers)


def test_a_gradient_whose_dims_lie_in_another_order_goes_home() -> None:
    """A convolution's over pixels whose channels come last in memory; the bucket's leaf is contiguous."""
    g = torch.Generator().manual_seed(0)
    params = {"embed": torch.randn(8, 8, 3, 3, generator=g, dtype=torch.float64) * 0.1}
    params["blocks"] = [{"w": torch.randn(8, 8, generator=g, dtype=torch.float64) * 0.3} for _ in range(2)]

    def loss(p: Any, x: Tensor) -> Tensor:
        for block in p["blocks"]:
            x = x + torch.tanh(x @ block["w"])
        return F.conv2d(x.permute(0, 3, 1, 2), p["embed"], padding=1).square().mean()

    def pixels(rank: int, step: int) -> Tensor:
        return torch.randn(4, 6, 6, 8, generator=torch.Generator().manual_seed(9 * rank + step), dtype=torch.float64)

    piped = both(2, 1, "zb-h1", params=params, batch=pixels, loss=loss, microbatches=2)
    assert any(".back" in name for name in piped.lowered.programs[1].buffers)


def test_a_step_of_ones_own_with_two_regions() -> None:
    def step(state: Any, batch: Any) -> Any:
        for _ in range(2):
            value, grads = fzero.value_and_grad(SHORT_LOSS, microbatches=2)(state["params"], batch)
            state = {**state, "params": fzero.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}
        return {**state, "count": state["count"] + 1}, {"loss": fzero.pmean(value)}

    state = {"params": SHORT_INIT(fzero.random.key(0)), "count": torch.zeros((), dtype=torch.int64)}
    given = {"step": step, "zero": 3, "transfers": "p2p", "reduce": "end"}
    plain = run(fzero.Spec(mesh={"dp": 2}, **given), state, tokens, world=2, steps=2)
    cut = fzero.Spec(mesh={"pp": 2, "dp": 2}, microbatches=2, **given)
    same(plain, run(cut, state, tokens, world=4, steps=2))


def test_a_step_of_ones_own_with_aux() -> None:
    """Aux of a loss becomes a running mean in the state, and a metric that is a maximum."""

    def loss(p: Any, b: Any) -> Any:
        value = PLAIN_LOSS(p, b)
        return value, {"square": value**2, "norm": p["blocks"][0]["w"].norm()}

    def step(state: Any, batch: Any) -> Any:
        given = fzero.value_and_grad(loss, has_aux=True, microbatches=4)
        (value, aux), grads = given(state["params"], batch)
        params = fzero.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        mean = 0.5 * state["mean"] + 0.5 * fzero.pmean(aux["square"]).mean()
        metrics = {"loss": fzero.pmean(value), "most": fzero.pmax(aux["norm"].max())}
        return {"params": params, "mean": mean}, metrics

    state = {"params": PLAIN_INIT(fzero.random.key(0)), "mean": torch.zeros(())}
    given = {"step": step, "zero": 2, "transfers": "p2p", "reduce": "end"}
    plain = run(fzero.Spec(mesh={"dp": 2}, **given), state, tokens, world=2, steps=STEPS)
    cut = fzero.Spec(mesh={"pp": 2, "dp": 2}, microbatches=4, **given)
    same(plain, run(cut, state, tokens, world=4, steps=STEPS))


def test_a_schedule_of_ones_own() -> None:
    own = Schedule.parse(
        """
        schedule own chunks 0 1 0 1
        role 0 F0.0 F0.1 F2.0 F2.1 B2.1 B2.0 B0.0 B0.1
        role 1 F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
        """.replace("B2.1 B2.0", "B2.0 B2.1")
    )
    given = {"params": PLAIN_INIT(fzero.random.key(0)), "loss": PLAIN_LOSS}
    both(2, 1, Pipeline(own), microbatches=2, zero=0, **given)


def penalised_loss(p: Any, b: Tensor) -> Tensor:
    """The loss adds a norm of every layer's weights, behind the last layer."""
    return lora_loss(p, b) + 1e-2 * sum(layer["w"].square().sum() for layer in p["blocks"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.sampled(1)
def test_a_penalty_on_the_weights_of_all_layers(schedule: str) -> None:
    params = lora_init(fzero.random.key(3), depth(schedule))
    both(2, 2, schedule, params=params, batch=rows, loss=penalised_loss, zero=2)


# --- random numbers ---------------------------------------------------------------------------------------------------


def keyed_loss(p: Any, b: Any, key: Tensor) -> Tensor:
    """Dropout between layers, whose masks the backward of the next layer reads, and one on the last."""
    x = torch.tanh(b @ p["embed"])
    for number, block in enumerate(p["blocks"]):
        x = fzero.random.dropout(fzero.random.fold_in(key, number), x + torch.tanh(x @ block["w"]), 0.3)
    return F.mse_loss(fzero.random.dropout(key, x, 0.1) @ p["first"], b)


def ambient_loss(p: Any, b: Any) -> Tensor:
    """The same with torch's dropout, as modules draw it: each use gets a key of its own."""
    x = torch.tanh(b @ p["embed"])
    for block in p["blocks"]:
        x = F.dropout(x + torch.tanh(x @ block["w"]), 0.3)
    return F.mse_loss(x @ p["first"], b)


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank + 10 * step))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss", [keyed_loss, ambient_loss])
@pytest.mark.sampled(1)
def test_every_role_draws_the_bits_of_no_pipeline(loss: Any, schedule: str, remat: str) -> None:
    init = deep_init if depth(schedule) > 2 else odd_init
    given = {"params": init(fzero.random.key(1)), "batch": rows, "key": fzero.random.key(4)}
    both(2, 2, schedule, loss=loss, remat=remat, zero=1, **given)


def test_each_microbatch_has_a_key_of_its_own() -> None:
    """Equal rows in all microbatches: equal masks would make the step that of one microbatch."""

    def equal(rank: int, step: int) -> Tensor:
        return torch.ones(4, 16) * (1 + step)

    given = {"params": odd_init(fzero.random.key(1)), "batch": equal, "loss": keyed_loss, "optimizer": optim.sgd(0.1)}
    four = both(2, 1, "1f1b", **given)
    one = both(2, 1, "1f1b", microbatches=1, **given)
    assert not torch.equal(four.final["params/blocks/0/w"], one.final["params/blocks/0/w"])


# --- other models -----------------------------------------------------------------------------------------------------


def conv_init(key: Tensor, layers: int) -> Any:
    k = iter(fzero.random.split(key, 6))
    kernels = [fzero.random.normal(next(k), (4, 4, 3, 3)) * 0.2 for _ in range(layers)]
    blocks = [{"kernel": kernel, "bias": torch.zeros(4)} for kernel in kernels]
    stem = {"kernel": fzero.random.normal(next(k), (4, 1, 3, 3)) * 0.3}
    return {"stem": stem, "blocks": blocks, "head": fzero.random.normal(next(k), (4, 5)) * 0.5}


def conv_loss(p: Any, b: Any) -> Tensor:
    x = torch.relu(F.conv2d(b["image"], p["stem"]["kernel"], padding=1))
    for block in p["blocks"]:
        x = x + torch.relu(F.conv2d(x, block["kernel"], block["bias"], padding=1))
    return F.cross_entropy(x.mean((2, 3)) @ p["head"], b["label"])


def images(rank: int, step: int) -> Any:
    g = torch.Generator().manual_seed(rank + 10 * step)
    return {"image": torch.randn(4, 1, 6, 6, generator=g), "label": torch.randint(5, (4,), generator=g)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.sampled(1)
def test_a_conv_net(schedule: str) -> None:
    params = conv_init(fzero.random.key(2), depth(schedule))
    both(2, 2, schedule, params=params, batch=images, loss=conv_loss, zero=2, clip_norm=0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", cases.PLAIN)
@pytest.mark.sampled(1)
def test_layers_whose_backward_reads_no_leaf_at_a_border(name: str, schedule: str) -> None:
    """A layer for each chunk."""
    params, loss, batch = cases.plain(name, depth(schedule))
    both(2, 2, schedule, params=params, batch=batch, loss=loss, zero=1)


def lora_init(key: Tensor, layers: int) -> Any:
    """Adapters beside frozen weights, in each block and on a frozen head."""
    k = iter(fzero.random.split(key, 20))

    def layer() -> Any:
        lora = {"a": fzero.random.normal(next(k), (16, 2)) * 0.3, "b": fzero.random.normal(next(k), (2, 16)) * 0.1}
        return {"w": fzero.random.normal(next(k), (16, 16)) * 0.3, "lora": lora}

    return {
        "embed": fzero.random.normal(next(k), (16, 16)) * 0.3,
        "blocks": [layer() for _ in range(layers)],
        "head": layer(),
    }


def lora_loss(p: Any, b: Tensor) -> Tensor:
    x = b @ p["embed"]
    for layer in [*p["blocks"], p["head"]]:
        x = x + torch.tanh(x @ layer["w"] + x @ layer["lora"]["a"] @ layer["lora"]["b"])
    return F.mse_loss(x, b)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.sampled(1)
def test_lora_trains_a_part_of_the_leaves(schedule: str, zero: int) -> None:
    params = lora_init(fzero.random.key(3), depth(schedule))
    given = {"loss": lora_loss, "trainable": "**/lora/**", "zero": zero, "clip_norm": 0.5}
    piped = both(2, 2, schedule, params=params, batch=rows, **given)
    assert torch.equal(piped.final["params/blocks/0/w"], params["blocks"][0]["w"])
    assert not torch.equal(piped.final["params/blocks/0/lora/a"], params["blocks"][0]["lora"]["a"])


# --- formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(1)
def test_sends_are_those_of_the_formula(schedule: str) -> None:
    """2 m activations for each border between roles, each of batch x sequence x width x 4 bytes; beside them a tied
    embedding's one value, m gradients of its tokens, which are as large as activations, and the metrics."""
    given = {"mesh": {"pp": 2}, "pipeline": schedule, "zero": 0, "loss": PLAIN_LOSS}
    lowered = fzero.lower(spec(**given), PLAIN_INIT(fzero.random.key(0)), tokens(0, 0))
    assert lowered.schedule is not None
    sizes: list[int] = []
    small = tied = 0
    for program in lowered.programs.values():
        for op in program.ops:
            if op.is_send:
                size = program.buffers[op.reads[0].name].nbytes
                if size <= 8:
                    small += 1
                elif program.buffers[op.reads[0].name].shape == (VOCAB, 16):
                    tied += 1
                else:
                    sizes.append(size)
    lent = schedule != "zb-v"
    assert len(sizes) == lowered.schedule.transfers + 4 * lent
    assert set(sizes) == {1 * SEQUENCE * 16 * 4}
    assert tied == lent
    assert small == 1  # the loss


def test_peaks_fall_with_the_microbatches_held() -> None:
    """1F1B holds p - r microbatches of activations, GPipe all: the planned peak of a deep role says so."""
    params, sgd = INIT(fzero.random.key(0)), optim.sgd(0.1)
    batch = cases.tokens(16, 64, VOCAB)

    def peaks(schedule: str) -> list[int]:
        given = {"mesh": {"pp": 4}, "pipeline": schedule, "microbatches": 8, "zero": 0}
        programs = kept.lower(spec(**given, optimizer=sgd), params, batch, 4).programs
        return [
            max(fzero.ir.liveness.live_bytes(p.ops, p.buffers, lambda b: b.kind == "activation"))
            for p in programs.values()
        ]

    whole, held = peaks("gpipe"), peaks("1f1b")
    assert all(b < a for a, b in zip(whole, held, strict=True))
    assert held == sorted(held, reverse=True)
    assert held[0] < 0.6 * whole[0]
