"""Tensor parallelism changes where a step is computed, and nothing else.

Loss and gradients are those of one rank but for rounding: of a GPT written here, and of architectures that nobody here
wrote, with the rules that `interop.tp_plan` takes from them. At one mesh the bits depend on no stage and no schedule.
Ranks send what Megatron's do, to the byte, and a real world does what the interpreter does.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
from collections import Counter
from functools import cache
from typing import Any

import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import Run, differing, gloo, run, values
from hf_models import CASES
from torch import Tensor
from tp_models import SEQUENCE, WIDTH, Model, gpt, of_hf

import fzero
from fzero import P, groups, optim, tree
from fzero.interop import tp_plan
from fzero.ir.fx_nodes import is_compute, op_name
from fzero.ir.op import StepPhase
from fzero.ir.program import Program, wire_bytes
from fzero.lowering import localise
from fzero.pipeline import SCHEDULES

LOSS, GRADIENT = 1e-6, 2e-6  # of the loss; of the largest of a leaf's gradient
NORMS = 1e-5  # over fifty steps
ROWS, LAYERS = 4, 2


def rules(model: Model, mesh: dict[str, int]) -> dict[str, P] | None:
    return dict(model.rules) if mesh.get("tp", 1) > 1 else None


def world_of(mesh: dict[str, int]) -> int:
    return math.prod(mesh.values())


def gradients(model: Model, mesh: dict[str, int], **given: Any) -> tuple[Tensor, dict[str, Tensor], fzero.Lowered]:
    """The loss of a step, the gradient of each leaf, and what was lowered."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(model.loss)(state["params"], batch)
        return {"params": state["params"], "grads": grads}, {"loss": loss}

    start = {"params": model.params, "grads": tree.map(torch.zeros_like, model.params)}
    spec = fzero.Spec(step=step, mesh=mesh, shard=rules(model, mesh), allow_unused=True, **given)
    found = run(spec, start, model.batch, world=world_of(mesh), steps=1)
    prefix = "grads/"
    grads = {path.removeprefix(prefix): x for path, x in found.final.items() if path.startswith(prefix)}
    found.losses()
    return found.metrics[0][0]["loss"], grads, found.lowered


def agree(model: Model, found: tuple[Any, ...], expected: tuple[Any, ...], loose: float = 1.0) -> tuple[float, float]:
    """Asserts that loss and gradients are the same but for rounding, `loose` times; returns how far they are."""
    loss = abs(float(found[0]) / float(expected[0]) - 1)
    assert loss <= loose * LOSS, f"the loss differs by {loss:.1e}"
    largest = max(float(x.abs().max()) for x in expected[1].values())
    worst = 0.0
    for path, one in expected[1].items():
        far, scale = float((found[1][path] - one).abs().max()), float(one.abs().max())
        if any(tree.matches(rule, path) for rule in model.zero_gradient) or scale == 0:
            assert far <= 1e-5 * largest, f"the gradient of {path} is to be zero, and is {far:.1e}"
            continue
        worst = max(worst, far / scale)
        assert far <= loose * GRADIENT * scale, f"the gradient of {path} differs by {far / scale:.1e}"
    return loss, worst


# --- one rank's loss and gradients ------------------------------------------------------------------------------------

GRIDS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}), ({"tp": 4}, {}), ({"tp": 8}, {}), ({"dp": 2, "tp": 2}, {}), ({"dp": 2, "tp": 4}, {}),
    ({"tp": 2}, {"microbatches": 2}), ({"dp": 2, "tp": 2}, {"microbatches": 4, "reduce": "each", "zero": 3}),
    ({"dp": 2, "tp": 2}, {"microbatches": 2, "reduce": "end", "zero": 2}), ({"tp": 4}, {"remat": "full"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GRIDS)), ids=lambda i: f"{GRIDS[i][0]} {GRIDS[i][1]}")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.sampled(1)
def test_a_gpt_has_the_gradients_of_one_rank(fused: bool, number: int, whole: bool) -> None:
    model, (mesh, given) = gpt(fused, layers=2 if whole else 1), GRIDS[number]
    data = {"dp": mesh.get("dp", 1)}
    print(fused, mesh, given, agree(model, gradients(model, mesh, **given), gradients(model, data, **given)))


ONE_TOO_MANY = {"num_attention_heads": 4, "num_key_value_heads": 1}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CASES},
    "Llama, one key head": ("Llama", ONE_TOO_MANY),
    "Qwen3, one key head": ("Qwen3", ONE_TOO_MANY),
}


LOOSE = {"CLIP": 3.0}  # its logits are scaled by 14; in float64 loss and gradients agree to 4e-15


@cache
def of_one(name: str) -> tuple[Model, tuple[Any, ...]]:
    model = of_hf(FOREIGN[name][0], **FOREIGN[name][1])
    return model, gradients(model, {"dp": 1})


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "ResNet"])  # it has no names that a plan knows
@pytest.mark.acceptance
def test_models_that_nobody_here_wrote(name: str, n: int) -> None:
    """Decoders, encoders, encoder-decoders, grouped heads, state spaces, experts and images, by their own plans."""
    pytest.importorskip("transformers")
    model, expected = of_one(name)
    found = gradients(model, {"tp": n})
    lowered = found[2]
    assert lowered.sharding is not None
    assert any("S" in leaf.split()[1] for leaf in lowered.sharding.leaves), "nothing is sharded"
    print(
        name,
        n,
        agree(model, found, expected, LOOSE.get(name, 1.0)),
        len([move for move in lowered.sharding.moves if move.nbytes]),
    )


def test_only_q_k_and_v_are_as_many_as_the_weight_says() -> None:
    """ModernBERT's `Wi` makes a gate and a value, also where they are three times as wide as the model together."""
    sizes = {"Wi": 96, "Wqkv": 96, "c_attn": 64}
    layer = torch.nn.ModuleDict({name: torch.nn.Linear(32, out, bias=False) for name, out in sizes.items()})
    parts = {name: str(dims) for name, dims in tp_plan(layer).items()}
    assert parts == {
        f"{name}.weight": f"P(groups('tp', {n}), None)" for name, n in (("Wi", 2), ("Wqkv", 3), ("c_attn", 2))
    }


@pytest.mark.parametrize(("name", "n"), [("Mamba2", 4), ("ModernBERT", 8)])
@pytest.mark.sampled(1)
def test_what_is_no_cut_through_heads_lowers(name: str, n: int) -> None:
    """Tokens in parts that are seen in chunks; and fewer heads than ranks behind a fused q, k and v."""
    pytest.importorskip("transformers")
    model = of_hf(FOREIGN[name][0], **FOREIGN[name][1])
    spec = fzero.Spec(loss=model.loss, optimizer=optim.sgd(0.1), mesh={"tp": n}, shard=model.rules)
    assert fzero.lower(spec, model.params, model.batch(0, 0), world_size=n).sharding is not None


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- training ---------------------------------------------------------------------------------------------------------


def trained(mesh: dict[str, int], model: Model | None = None, steps: int = 2, **given: Any) -> Run:
    model = model or gpt(fused=True, layers=1)
    options = {"loss": model.loss, "optimizer": optim.adamw(1e-2), "clip_norm": 1.0, **given}
    spec = fzero.Spec(mesh=mesh, shard=rules(model, mesh), **options)
    return run(spec, model.params, model.batch, world=world_of(mesh), steps=steps)


def same(a: Run, b: Run) -> None:
    assert a.losses() == b.losses()
    assert differing(a.final, b.final) == []


def test_no_stage_changes_a_bit(whole: bool) -> None:
    mesh = {"dp": 2, "tp": 2}
    first = trained(mesh, zero=0, microbatches=2)
    assert first.losses()[0] != first.losses()[1]
    for zero in (1, 2, 3) if whole else (3,):
        same(trained(mesh, zero=zero, microbatches=2), first)


AGAIN: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}), ({"tp": 2}, {"sequence": "tp"}), ({"tp": 4}, {"sequence": "tp"}),
    ({"dp": 2, "tp": 2}, {"sequence": "tp", "zero": 3, "microbatches": 2}),
    ({"tp": 2}, {"sequence": "tp", "transfers": "p2p", "precision": "bf16"}),
    ({"pp": 2, "tp": 2}, {"pipeline": "1f1b", "microbatches": 2, "reduce": "end"}),
    ({"pp": 2, "tp": 2}, {"sequence": "tp", "pipeline": "1f1b", "microbatches": 2, "reduce": "end"}),
    ({"pp": 2, "tp": 2}, {"sequence": "tp", "pipeline": "zb-h1", "microbatches": 2, "reduce": "end"}),
]  # fmt: skip


SOME = {"blocks/0/**": "full", "**": "gathers"}


@pytest.mark.parametrize(
    "rules", ["full", {"blocks/1/**": "full"}, "gathers", SOME], ids=["full", "rules", "gathers", "some"]
)
@pytest.mark.parametrize("number", range(len(AGAIN)), ids=lambda i: f"{AGAIN[i][0]} {AGAIN[i][1]}")
@pytest.mark.sampled(1)
def test_what_is_computed_again_changes_no_bit(number: int, rules: Any) -> None:
    mesh, given = AGAIN[number]
    model = gpt(fused=True)
    plain, again = (trained(mesh, model, steps=1, remat=remat, **given) for remat in ("none", rules))
    last = max(plain.lowered.programs)  # the role that has the second layer
    if "sequence" in given or (rules != "gathers" and rules is not SOME):  # else nothing is gathered there
        assert again.lowered.programs[last].digest != plain.lowered.programs[last].digest
    same(again, plain)


def between(program: Program) -> dict[str, int]:
    """Bytes of the activations that lie between forward and backward, by the kind of op that made them."""
    found: dict[str, int] = {}
    made: dict[str, str] = {}
    for op in program.ops:
        if op.computes and op.why.startswith("backward"):
            break
        made.update({ref.name: op.kind for ref in op.writes if program.buffers[ref.name].kind == "activation"})
        for ref in op.reads if op.is_free else ():
            made.pop(ref.name, None)
    for name, kind in made.items():
        found[kind] = found.get(kind, 0) + program.buffers[name].nbytes
    return found


def test_what_was_gathered_is_gathered_again_and_not_kept() -> None:
    """A layer then keeps its parts of the residual stream, and sends the bytes of its gathers once more."""
    n, layers = 4, 2
    model = gpt(fused=True, layers=layers, rows=16)
    plain, again = (
        kept.lower(
            fzero.Spec(loss=model.loss, optimizer=optim.adamw(1e-2), mesh={"tp": n}, shard=model.rules,
                       sequence="tp", remat=remat), model.params, model.batch(0, 0), n,
        ) for remat in ("none", "full")
    )  # fmt: skip
    stream = 16 * SEQUENCE * WIDTH * 4
    held, was = between(again.program), between(plain.program)
    print("kept, streams:", {kind: nbytes / stream for kind, nbytes in held.items()}, "without:", was)
    assert "all_gather" not in held
    parts = (2 * layers + 1) * stream // n  # and half a stream of the loss, with the labels
    assert parts <= sum(held.values()) < parts + stream < sum(was.values()) / 2
    assert again.memory.peak < plain.memory.peak
    gathers = 2 * layers + 1
    repeated = [op for op in again.program.ops if op.gathers and op.why.startswith("again ")]
    assert len(repeated) == gathers
    assert sent_over_tp(again.program) - sent_over_tp(plain.program) == gathers * (n - 1) * stream // n
    part = (n - 1) * stream // n
    saved = [re.search(r"([\d,]+) bytes less are kept for ([\d,]+) sent", op.why) for op in repeated]
    assert {match[2] for match in saved if match} == {f"{part:,}"}
    assert Counter(match[1] for match in saved if match) == {f"{stream:,}": gathers - 1, f"{part:,}": 1}  # the head's


@pytest.mark.acceptance
def test_a_llama_keeps_nothing_that_was_gathered() -> None:
    """The complaint: at tp 4 each layer kept two residual streams gathered. It keeps its parts of two."""
    kept_bytes = []
    for layers in (1, 3):
        model = of_hf("Llama", num_hidden_layers=layers, num_key_value_heads=4)
        spec = fzero.Spec(
            loss=model.loss, optimizer=optim.sgd(0.1), mesh={"tp": 4}, shard=model.rules, sequence="tp", remat="full"
        )
        batch = model.batch(0, 0)
        stream = batch["input_ids"].numel() * model.params["model.embed_tokens.weight"].shape[1] * 4
        kept_bytes.append(sum(between(kept.lower(spec, model.params, batch, 4).program).values()) / stream)
    assert 2 * 2 / 4 <= kept_bytes[1] - kept_bytes[0] < 2 * 3 / 4


def test_gathers_alone_are_repeated_and_nothing_is_computed_again() -> None:
    """As Megatron's sequence parallelism: of what was gathered the rank's own part is kept."""
    n, layers = 4, 2
    model = gpt(fused=True, layers=layers, rows=16)
    given: dict[str, Any] = {"mesh": {"tp": n}, "shard": model.rules, "sequence": "tp"}
    plain, again = (
        kept.lower(
            fzero.Spec(loss=model.loss, optimizer=optim.adamw(1e-2), remat=remat, **given), model.params,
            model.batch(0, 0), n,
        ) for remat in ("none", "gathers")
    )  # fmt: skip
    stream, part = 16 * SEQUENCE * WIDTH * 4, 16 * SEQUENCE * WIDTH * 4 // n
    held, was = between(again.program), between(plain.program)
    gathers = 2 * layers + 1
    assert sum(was.values()) - sum(held.values()) == gathers * (stream - part)
    assert sum(op.gathers and op.why.startswith("again ") for op in again.program.ops) == gathers
    runs = [op for op in again.program.ops if op.computes and op.phase is StepPhase.RECOMPUTE]
    nodes = [node for op in runs for node in again.program.segments[op.segment].graph.nodes if is_compute(node)]
    assert {op_name(node) for node in nodes} <= {"permute", "clone", "view"}
    assert sent_over_tp(again.program) - sent_over_tp(plain.program) == gathers * (stream - part)
    assert again.memory.peak < plain.memory.peak


def test_layers_are_made_again_one_at_a_time() -> None:
    """The complaint: what a layer hands on in parts was made again out of what the layer before hands on, so all layers
    were made again before the first backward: 4.5 residual streams of memory for each."""
    width, length, rows, n = 64, 16, 4, 2

    def loss(p: Any, x: Tensor) -> Tensor:
        for block in p["blocks"]:
            q, k, v = F.linear(x, block["qkv"]).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(mixed, block["out"])  # of which each rank has a part of the columns
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), block["up"])), block["down"])
        return x.square().mean()

    def params(layers: int) -> Any:
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        return {"blocks": [{name: drawn(*shape) / 8 for name, shape in shapes.items()} for _ in range(layers)]}

    rules = {"blocks/*/qkv": P(groups("tp", 3)), "blocks/*/up": P("tp"), "blocks/*/down": P(None, "tp")}
    spec = {"loss": loss, "optimizer": optim.sgd(0.1), "mesh": {"dp": 2, "tp": n}, "zero": 3, "shard": rules}
    batch = torch.empty(rows, length, width, device="meta")
    peaks = []
    for layers in (2, 4, 6):
        lowered = fzero.lower(fzero.Spec(remat="full", **spec), params(layers), batch, world_size=2 * n)
        peaks.append(lowered.memory.kinds["activations"] / (rows * length * width * 4))
    print("activations, streams:", peaks)
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] <= 2 * 1.05 / n  # a part of the stream each, and statistics
    plain, again = (
        run(
            fzero.Spec(remat=remat, **spec),
            params(2),
            lambda rank, step: drawn(rows, length, width),
            world=2 * n,
            steps=1,
        )
        for remat in ("none", "full")
    )
    same(again, plain)


def test_memory_against_bytes_decides_what_is_sent_again() -> None:
    """Gathers and exchanges are repeated; sums over ranks would send more than they save."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for block in p["blocks"]:
            x = (F.gelu(x @ block["up"]) @ block["down"]).square()  # of which the backward reads the sum
            x = fzero.constrain(torch.exp(-fzero.constrain(x, P(None, "tp"))), P(None, None, "tp")).square()
        return x.mean()

    params = {"blocks": [{"up": drawn(16, 32), "down": drawn(32, 16)} for _ in range(2)]}
    shard = {"blocks/*/up": P(None, "tp"), "blocks/*/down": P("tp", None)}
    spec = {"loss": loss, "optimizer": optim.sgd(0.1), "mesh": {"tp": 4}, "shard": shard}
    plain, again = (
        run(fzero.Spec(remat=remat, **spec), params, lambda rank, step: drawn(2, 8, 16), world=4, steps=1)
        for remat in ("none", "full")
    )
    same(again, plain)
    ops = [op for op in again.lowered.program.ops if op.transfers and op.phase in ("forward", "recompute")]
    print(*(f"{op.kind}: {op.why}" for op in ops), sep="\n")
    repeated = [op for op in ops if op.why.startswith("again ")]
    assert {op.kind: op.why.rpartition(": ")[2] for op in repeated} == {
        "all_to_all": "256 bytes less are kept for 192 sent",
        "all_gather": "768 bytes less are kept for 768 sent",
    }
    sums = [op.why for op in ops if op.kind == "all_reduce" and "kept: else" in op.why]
    assert sums
    assert all(why.endswith("; kept: else 1,024 bytes less are kept for 1,536 sent") for why in sums)


def test_a_pipeline_changes_no_bit() -> None:
    model = gpt(layers=2)
    pipe, flat = ({"pp": 2, "tp": 2}, "1f1b"), ({"tp": 2}, None)
    found = [
        trained(mesh, model, pipeline=pipeline, microbatches=2, reduce="end", steps=1)
        for mesh, pipeline in (pipe, flat)
    ]
    same(*found)


@pytest.mark.acceptance
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_a_bit(schedule: str, zero: int) -> None:
    """A pipeline of sharded layers, on eight ranks: the bits of no pipeline at the same dp and tp."""
    model = gpt(layers=4)
    given = {"microbatches": 4, "reduce": "end", "zero": zero}
    piped = trained({"pp": 2, "dp": 2, "tp": 2}, model, pipeline=schedule, **given)
    same(piped, trained({"dp": 2, "tp": 2}, model, **given))


@pytest.mark.acceptance
@pytest.mark.parametrize("zero", ["hsdp", "hpz"])
def test_a_grid_of_three_axes_within_a_hierarchy(zero: str) -> None:
    mesh = {"dp_out": 2, "dp": 2, "tp": 2}
    model = gpt(layers=1)
    found = trained(mesh, model, zero=zero, clip_norm=None)
    same(found, trained(mesh, model, zero=3, clip_norm=None))
    flat = trained({"dp": 4}, model, zero=3, clip_norm=None)
    assert found.losses() == pytest.approx(flat.losses(), rel=1e-5)


PRECISIONS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": fzero.Precision(compute="fp16", reduce="fp32", loss_scale=fzero.LossScale(initial=128.0)),
}


@pytest.mark.acceptance
@pytest.mark.parametrize("precision", PRECISIONS)
def test_narrow_types_train_as_on_one_rank(precision: str) -> None:
    model = gpt(fused=True, layers=1)
    given = PRECISIONS[precision]
    found, one = (trained(mesh, model, precision=given, steps=3) for mesh in ({"tp": 2}, {"dp": 1}))
    assert found.losses()[-1] != found.losses()[-2], "no step was taken"
    assert all(bool(leaf.isfinite().all()) for leaf in found.final.values() if leaf.is_floating_point())
    assert found.losses() == pytest.approx(one.losses(), rel=2e-2)
    assert found.losses("grad_norm") == pytest.approx(one.losses("grad_norm"), rel=5e-2)


def test_a_norm_counts_each_element_once(whole: bool) -> None:
    """Whole leaves once, sharded ones by their parts: the norm of one rank, and that of the gradients."""
    model = gpt(layers=1)
    found, one = (trained(mesh, model, steps=1) for mesh in ({"tp": 4}, {"dp": 1}))
    assert found.losses("grad_norm") == pytest.approx(one.losses("grad_norm"), rel=1e-6)
    if whole:
        grads = gradients(model, {"tp": 4})[1]
        expected = math.sqrt(sum(float(x.double().square().sum()) for x in grads.values()))
        assert found.losses("grad_norm")[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.acceptance
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 8}, {"dp": 2, "tp": 2}], ids=str)
def test_fifty_steps_keep_the_norms_of_one_rank(mesh: dict[str, int]) -> None:
    """With SGD, for Adam lets rounding grow where a gradient is next to nothing."""
    given = {"steps": 50, "optimizer": optim.sgd(0.02, momentum=0.9), "clip_norm": 1e9}
    found, one = trained(mesh, **given), trained({"dp": mesh.get("dp", 1)}, **given)
    for name in ("loss", "grad_norm"):
        gap = max(abs(a / b - 1) for a, b in zip(found.losses(name), one.losses(name), strict=True))
        print(mesh, name, f"{gap:.1e}")
        assert gap <= NORMS, f"{name} differs by {gap:.1e}"


# --- bytes, and real processes ----------------------------------------------------------------------------------------


def sent_over_tp(program: Program) -> int:
    return sum(wire_bytes(program, op) for op in program.ops if op.axis == "tp")


def megatron(n: int, rows: int, layers: int, microbatches: int, clip: bool) -> float:
    """For each microbatch: four sums of the residual stream a layer, one for the embedding and one for the head; three
    numbers of each row of the loss, and the loss, which is too small to be cut. The norm is 8 bytes to each other rank.
    """
    share, each = (n - 1) / n, rows // microbatches
    stream = each * SEQUENCE * WIDTH * 4
    one = (8 * layers + 4) * share * stream + 3 * 2 * share * each * SEQUENCE * 4 + 4 * (n - 1)
    return microbatches * one + clip * 8 * (n - 1)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.sampled(1)
def test_ranks_send_what_megatrons_do(fused: bool, n: int, microbatches: int, clip: float | None) -> None:
    model = gpt(fused=fused)
    spec = fzero.Spec(
        loss=model.loss, optimizer=optim.adamw(1e-2), mesh={"tp": n}, shard=model.rules, clip_norm=clip,
        microbatches=microbatches,
    )  # fmt: skip
    program = fzero.lower(spec, model.params, model.batch(0, 0), world_size=n).program
    assert sent_over_tp(program) == megatron(n, ROWS, LAYERS, microbatches, clip is not None)


REAL: dict[int, list[dict[str, Any]]] = {
    2: [{"mesh": {"tp": 2}, "transfers": "auto"}, {"mesh": {"tp": 2}, "transfers": "p2p"}],
    4: [
        {"mesh": {"dp": 2, "tp": 2}, "transfers": transfers, "zero": zero, "microbatches": 2}
        for transfers, zero in (("auto", 3), ("p2p", 1))
    ] + [{"mesh": {"tp": 4}, "transfers": "p2p"}, {"mesh": {"pp": 2, "tp": 2}, "pipeline": "1f1b", "microbatches": 2}],
}  # fmt: skip


def real_model(given: dict[str, Any]) -> Model:
    return gpt(fused=True, layers=2 if "pp" in given["mesh"] else 1)


def rank_trains(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], list[float], dict[str, int]]]:
    """Of each case the whole leaves, the losses, and the bytes that this rank sent in two steps."""
    found = []
    for given in cases:
        model = real_model(given)
        spec = fzero.Spec(
            loss=model.loss, optimizer=optim.adamw(1e-2), clip_norm=1.0, shard=model.rules, **given
        )  # fmt: skip
        state = fzero.init(model.params, spec)
        losses = []
        for number in range(2):
            batch = model.batch(state.runtime.plan.mesh.data_rank(int(os.environ["RANK"])), number)
            state = fzero.step(state, batch)
            losses.append(float(state.metrics["loss"]))
        sent = dict(state.sent_bytes)
        paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
        found.append((dict(zip(paths, leaves, strict=True)), losses, sent))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.acceptance)])
def test_real_ranks_have_the_bits_of_the_interpreter(world: int) -> None:
    """And send the bytes that are written in the program."""
    ranks = values(gloo(world, rank_trains, REAL[world]))
    for number, given in enumerate(REAL[world]):
        options = {key: value for key, value in given.items() if key not in ("mesh", "transfers")}
        expected = trained(
            given["mesh"],
            real_model(given),
            **options,
            transfers=given.get("transfers", "auto"),
        )
        for mine in ranks:
            leaves, losses, _ = mine[number]
            assert losses == expected.losses(), given
            assert differing(leaves, expected.final) == [], given
        if "pp" in given["mesh"]:
            continue
        if given["mesh"] == {"tp": 2}:
            assert sent_over_tp(expected.lowered.program) == megatron(2, ROWS, 1, 1, clip=True)
        for mine in ranks:
            assert mine[number][2]["tp"] == 2 * sent_over_tp(expected.lowered.program), given


# --- the sums in blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_bits_are_those_of_sums_in_blocks(n: int) -> None:
    """One rank that computes in n blocks of hidden units, each of a rank's width, and adds them in order: the loss and
    the gradients have its bits. (Measured on x86 with AVX-512: it rests on kernels that give a row the same bits.)"""
    params = {"up": drawn(16, 8 * n), "down": drawn(8 * n, 16), "gain": drawn(16)}
    batch = drawn(6, 16)

    def ends(x: Tensor, y: Tensor, p: Any) -> Tensor:
        return (F.layer_norm(x + y, (16,), p["gain"]) - batch).square().mean()

    def whole(p: Any, x: Tensor) -> Tensor:
        a = x * p["gain"]
        return ends(x, F.gelu(a @ p["up"]) @ p["down"], p)

    def blocks(p: Any, x: Tensor) -> Tensor:
        a = x * p["gain"]
        parts = list(zip(p["up"].chunk(n, 1), p["down"].chunk(n, 0), strict=True))
        made = [F.gelu(a @ up.contiguous()) @ down for up, down in reversed(parts)]  # autograd adds the last read first
        total, *rest = reversed(made)
        return ends(x, sum(rest, total), p)

    shard = {"up": P(None, "tp"), "down": P("tp", None)}
    found = gradients(Model(params, whole, lambda rank, step: batch, shard), {"tp": n})
    expected = gradients(Model(params, blocks, lambda rank, step: batch, {}), {"dp": 1})
    assert torch.equal(found[0], expected[0])
    assert differing(found[1], expected[1]) == []


# --- small losses that are odd ----------------------------------------------------------------------------------------


def odd_conv(p: Any, x: Tensor) -> Tensor:
    """Channels of the operand in parts, and a bias: it is added once, after the sum."""
    return F.conv1d(F.conv1d(x, p["w"]).relu(), p["v"], p["b"]).square().mean()


def odd_rows(p: Any, x: Tensor) -> Tensor:
    """A mean over rows in parts: the number of rows that count is a sum over ranks."""
    return F.cross_entropy((p["w"] * x) @ x.t(), torch.tensor([0, 1, 5, -100, 3, 3]))


def odd_inverse(p: Any, x: Tensor) -> Tensor:
    """The op of a check, which returns nothing, is in the graph."""
    return (torch.linalg.inv(p["w"] @ p["w"].t() + torch.eye(4)) @ x).square().mean()


def odd_einsum(p: Any, x: Tensor) -> Tensor:
    """A rank holds one of two elements of the last dim: in memory its part has gaps."""
    return torch.einsum("bi,iho->bh", x, p["w"]).sin().square().mean()


def odd_constrained(p: Any, x: Tensor) -> Tensor:
    """A value that is placed within gradients of examples, and one that is placed within a derivative along x."""

    def one(y: Tensor) -> Tensor:
        return fzero.constrain(fzero.constrain(y @ p["w"], P()).sin(), P("tp")).square().sum()

    def rows(y: Tensor) -> Tensor:
        return fzero.constrain(y @ p["w"], P(None, "tp")).sin()

    along: Tensor = torch.func.jvp(rows, (x,), (x.sin(),))[1]
    return torch.vmap(torch.func.grad(one))(x).square().mean() + along.square().mean()


def odd_bias(p: Any, x: Tensor) -> Tensor:
    """A bias of rows behind a product that is a sum over ranks, and a view after it that joins rows."""
    return torch.addmm(p["b"], (x @ p["v"]).tanh(), p["w"]).view(2, 4, 4).sin().sum()


def odd_heads(p: Any, x: Tensor) -> Tensor:
    """A bias behind such a product, cut into heads."""
    y = F.linear((x @ p["v"]).relu(), p["w"].t(), p["b"]).reshape(-1, 2, 4)
    return (y[:, :, :0].sum() + (0.1 * y).sin()).mean()


def odd_layers(p: Any, x: Tensor) -> Tensor:
    """Layers in one leaf, with biases."""
    for i in range(2):
        x = F.linear((x @ p["v"][i]).relu(), p["w"][i].t(), p["b"][i])
    return x.square().mean()


def odd_empty(p: Any, x: Tensor) -> Tensor:
    """Pieces of no elements along a dim in parts."""
    h = x @ p["w"]
    return torch.cat([h[:, :0], h], -1).square().mean() + torch.split(h, [0, 8], -1)[1].sin().mean()


ODD: dict[str, tuple[Any, dict[str, Tensor], Tensor, dict[str, P]]] = {
    "conv": (
        odd_conv, {"w": drawn(6, 4, 3), "v": drawn(4, 6, 2), "b": drawn(4)}, drawn(2, 4, 7),
        {"w": P("tp"), "v": P(None, "tp")},
    ),
    "rows": (odd_rows, {"w": drawn(6, 8)}, drawn(6, 8), {"w": P("tp")}),
    "inverse": (odd_inverse, {"w": drawn(4, 8)}, drawn(4, 3), {"w": P(None, "tp")}),
    "einsum": (odd_einsum, {"w": drawn(4, 3, 2)}, drawn(6, 4), {"w": P(None, None, "tp")}),
    "bias": (odd_bias, {"v": drawn(8, 16), "w": drawn(16, 8), "b": drawn(4, 1)}, drawn(4, 8),
             {"v": P(None, "tp"), "w": P("tp", None)}),
    "heads": (odd_heads, {"v": drawn(8, 16), "w": drawn(16, 8), "b": drawn(8)}, drawn(4, 8),
              {"v": P(None, "tp"), "w": P("tp", None)}),
    "layers": (odd_layers, {"v": drawn(2, 8, 16), "w": drawn(2, 16, 8), "b": drawn(2, 8)}, drawn(4, 8),
               {"v": P(None, None, "tp"), "w": P(None, "tp", None)}),
    "empty": (odd_empty, {"w": drawn(4, 8)}, drawn(6, 4), {"w": P(None, "tp")}),
    "constrained": (odd_constrained, {"w": drawn(4, 8)}, drawn(6, 4), {"w": P(None, "tp")}),
}  # fmt: skip


def test_a_part_of_one_element_is_stored() -> None:
    """In memory it has the stride of the whole: (1, 2) over two ranks."""
    batch = drawn(6, 2)
    spec = fzero.Spec(
        loss=lambda p, x: (x * p["w"]).square().mean(), optimizer=optim.sgd(0.1), mesh={"dp": 2, "tp": 2}, zero=3,
        shard={"w": P(None, "tp")},
    )  # fmt: skip
    for w in (torch.zeros(1, 2), torch.ones(1, 2)):
        found = run(spec, {"w": w}, lambda rank, step: batch, world=4, steps=1)
        gradient = batch.square().mean(0, keepdim=True) * w
        torch.testing.assert_close(found.final["params/w"], w - 0.1 * gradient)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.sampled(3)
def test_an_odd_loss_has_the_gradients_of_one_rank(name: str) -> None:
    loss, params, batch, shard = ODD[name]
    model = Model(params, loss, lambda rank, step: batch, shard)
    agree(model, gradients(model, {"tp": 2}), gradients(model, {"dp": 1}))


@pytest.mark.parametrize("bad", ["id", "target", "negative"])
def test_ids_that_no_rank_has_are_refused(bad: str) -> None:
    ids = {"x": torch.tensor([1, 5, 7]), "y": torch.tensor([0, 3, 6])}
    ids["x" if bad == "id" else "y"][1] = -1 if bad == "negative" else 8

    def loss(p: Any, b: Any) -> Tensor:
        return F.cross_entropy(F.embedding(b["x"], p["w"]) @ p["w"].t(), b["y"])

    model = Model({"w": drawn(8, 4)}, loss, lambda rank, step: ids, {"w": P("tp", None)})
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        gradients(model, {"tp": 2})


@pytest.mark.parametrize("bad", [None, 8, -9])
def test_rows_are_looked_up_by_an_index(bad: int | None) -> None:
    """`table[ids]`, as a functional model writes it: a rank has some rows, and ids may count from the end."""
    ids = torch.tensor([[1, 5, -1], [0, bad or -8, 5]])

    def loss(p: Any, ids: Tensor) -> Tensor:
        return (torch.tanh(p["w"][ids] @ p["v"]) @ p["w"].t()).square().mean()

    model = Model({"w": drawn(8, 4), "v": drawn(4, 4)}, loss, lambda rank, step: ids, {"w": P("tp")})
    if bad is not None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            gradients(model, {"tp": 2})
        return
    for mesh in ({"tp": 2}, {"tp": 4}):
        agree(model, found := gradients(model, mesh), gradients(model, {"dp": 1}))
        assert "all_gather" not in {op.kind for op in found[2].program.ops}


def test_what_is_rewritten_before_propagation_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(gm: Any, placed: Any) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.target = torch.ops.aten.silu.default
                node.kwargs = {}

    model = gpt(layers=1)
    monkeypatch.setattr(localise, "join_sums", worse)
    with pytest.raises(fzero.VerifyError, match=r"output .* is not what was captured"):
        gradients(model, {"tp": 2})


def test_grouped_heads_on_more_ranks_than_key_heads() -> None:
    """A copy of an expanded value keeps its last dim innermost: attention reads it so."""
    pytest.importorskip("transformers")
    model = of_hf("Llama", **ONE_TOO_MANY, num_hidden_layers=1)
    agree(model, gradients(model, {"tp": 2}), gradients(model, {"dp": 1}))


def test_means_of_rows_and_columns_lie_as_their_leaf() -> None:
    """Adafactor holds means over rows and over columns: one of them lies in parts, unless a rule for it says other."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return ((x @ p["a"]).relu() @ p["b"]).square().mean()

    params, batch = {"a": drawn(4, 8), "b": drawn(8, 4)}, drawn(6, 4)
    rules = {"a": P(None, "tp"), "b": P("tp")}
    base: dict[str, Any] = {"loss": loss, "optimizer": optim.adafactor(0.1)}
    one = run(fzero.Spec(**base, mesh={"dp": 1}), params, lambda rank, step: batch, world=1, steps=2)
    for more in ({}, {"opt_state/row/b": P("tp"), "opt_state/col/a": P("tp")}):
        spec = fzero.Spec(**base, mesh={"tp": 2}, shard={**more, **rules})
        found = run(spec, params, lambda rank, step: batch, world=2, steps=2)
        for path, x in one.final.items():
            torch.testing.assert_close(found.final[path], x, rtol=5e-6, atol=5e-6)
    spec = fzero.Spec(**base, mesh={"tp": 2}, shard={"opt_state/row/b": P(), **rules})
    with pytest.raises(fzero.SpecError, match=r"new value of opt_state/row/b \[8\].*row/b': P\('tp'\)"):
        fzero.lower(spec, params, batch, world_size=2)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(match: str, **given: Any) -> None:
    model = gpt(layers=1)
    options = {"loss": model.loss, "optimizer": optim.adamw(1e-2), "mesh": {"tp": 2}, "shard": model.rules, **given}
    with pytest.raises(fzero.SpecError, match=match):
        fzero.lower(
            fzero.Spec(**options), model.params, model.batch(0, 0), world_size=world_of(options["mesh"] or {"dp": 1})
        )


def test_a_dim_that_the_axis_does_not_divide() -> None:
    text = r"params/wte of shape \(64, 32\) as P\('tp', None\).*64 is no multiple of 3; the next that is: 66"
    refused(text, mesh={"tp": 3}, shard={"wte": P("tp", None)})


def test_a_rule_that_matches_nothing() -> None:
    refused(r"the rule 'blocks/\*/upp/w' matches no leaf.*blocks", shard={"blocks/*/upp/w": P("tp", None)})


def test_a_rule_that_places_nothing() -> None:
    """Behind another one, or for a leaf that is never cut: the reason is said. `P()` for such a leaf is no error."""
    refused(
        r"the rule 'wte' places no leaf: '\*' comes before it and places params/wte",
        shard={"*": P(None, "tp"), "wte": P()},
    )
    spec = {"loss": lambda p, x: (x @ p["w"] * p["s"]).square().mean(), "optimizer": optim.sgd(0.1), "mesh": {"tp": 2}}
    params, batch = {"w": drawn(4, 8), "s": torch.tensor(1.5)}, drawn(2, 4)
    with pytest.raises(fzero.SpecError, match=r"the rule 's' is to cut params/s, of shape \(\)"):
        fzero.lower(fzero.Spec(**spec, shard={"s": P("tp"), "w": P()}), params, batch, world_size=2)
    fzero.lower(fzero.Spec(**spec, shard={"s": P(), "w": P(None, "tp")}), params, batch, world_size=2)


def test_an_op_that_needs_all_of_a_leaf() -> None:
    """The leaf's own placement is named, not that of a view of it."""
    with pytest.raises(fzero.SpecError, match=r"params/w lies as S1, and aten.slice.*needs all of it"):
        fzero.lower(
            fzero.Spec(
                loss=lambda p, x: (x @ p["w"].t()[1:]).square().mean(), optimizer=optim.sgd(0.1), mesh={"tp": 2},
                shard={"w": P(None, "tp")},
            ),
            {"w": drawn(4, 8)}, drawn(2, 7), world_size=2,
        )  # fmt: skip


def test_dims_are_copied_and_pickled() -> None:
    dims = P(None, fzero.groups("tp", 3))
    assert copy.deepcopy(dims) == pickle.loads(pickle.dumps(dims)) == dims


def test_dims_that_make_no_sense() -> None:
    refused(r"shard.*P\('dp', None\).*axes that cut dims: zero= cuts leaves over dp_out", shard={"wte": P("dp", None)})
    refused(r"shard.*\('dp', 'tp'\).*axes that cut dims", shard={"wte": P(("dp", "tp"), None)})
    refused(r"P\('tp', None, None\) names 3 dims; params/wte has shape", shard={"wte": P("tp", None, None)})
    with pytest.raises(fzero.SpecError, match="axis 'tp' cuts two dims"):
        P("tp", "tp")
    with pytest.raises(fzero.SpecError, match=r"P\(\['tp'\]\): \['tp'\] is none of an axis, a tuple of axes"):
        P(["tp"])  # type: ignore[arg-type]


def test_an_axis_and_rules_belong_together() -> None:
    refused(r"mesh=.*shard= with 'tp'", shard=None)
    refused(r"shard=.*an axis 'tp' in mesh", mesh={"dp": 2})


def test_an_optimizer_that_needs_all_of_a_leaf() -> None:
    muon = optim.muon(1e-2, others=optim.adamw(1e-2))
    refused(r"params/.*is stepped as a whole matrix.*P\(\)", optimizer=muon)
    refused(r"params/.*has moments in blocks of 64 elements.*P\(\)", optimizer=optim.adamw8bit(1e-2))
