"""Hugging Face models, unmodified, train as plain PyTorch trains them.

Every architecture of `hf_models`, five steps, zero=3 on two ranks of this process, beside autograd and torch.optim on
the whole batch. Text is ragged and padded, so the loss is an `fzero.Mean`. What was measured is the table in
docs/models.md: `FZERO_UPDATE_MODELS=1 pytest tests/laws/test_hf.py` writes it, a plain run compares the names.
"""

import copy
import importlib
import os
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from helpers import gloo, relative, run, same_bits, values
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from fzero import tree
from fzero.interop import Functional, from_module

CASES = hf_models.CASES
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

WORLD, STEPS, TOLERANCE = 2, 5, 1e-5
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
UPDATE = "FZERO_UPDATE_MODELS" in os.environ
HEAD = "| model | class | task | parameters | optimizer | loss | parameters' norm | not compared |"

OPTIMIZERS: dict[str, tuple[fzero.optim.GradientTransformation, Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": (fzero.optim.adamw(1e-3, weight_decay=0.01), lambda params: torch.optim.AdamW(params, lr=1e-3)),
    "SGD": (fzero.optim.sgd(0.05, momentum=0.9), lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)),
}


@dataclass(frozen=True)
class Row:
    """What was measured: the largest gap of a loss, and that of all compared parameters, both relative."""

    model: str
    parameters: int
    loss: float
    norm: float
    left_out: tuple[str, ...]


rows: dict[str, Row] = {}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[name].make()


def arguments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def spec_of(name: str, functional: Functional, **options: Any) -> fzero.Spec:
    _, buffers, apply = functional

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> fzero.Mean:
        return fzero.Mean(*CASES[name].loss(apply(params, buffers, **arguments(batch)), batch))

    given = {"optimizer": OPTIMIZERS[CASES[name].optimizer][0], "zero": 3, "bucket_bytes": 8192, **options}
    if apply.frozen:
        given["trainable"] = apply.trainable
    return fzero.Spec(loss=loss, **given)


def eager(name: str, model: nn.Module) -> list[float]:
    """Trains `model` on the whole batch; the losses."""
    case = CASES[name]
    stepper = OPTIMIZERS[case.optimizer][1]([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        whole = tree.map(lambda *parts: torch.cat(parts), *(case.batch(rank, step) for rank in range(WORLD)))
        stepper.zero_grad()
        total, count = case.loss(model(**arguments(whole)), whole)
        (total / count).backward()
        stepper.step()
        losses.append((total / count).item())
    return losses


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_trains_as_torch_does(name: str) -> None:
    case, model = CASES[name], build(name).eval()
    functional = from_module(model)
    result = run(spec_of(name, functional), functional.params, case.batch, world=WORLD, steps=STEPS)
    start = {path: value.clone() for path, value in functional.params.items()}
    losses = eager(name, model)
    assert len({round(loss, 6) for loss in losses}) == STEPS, "the batches must differ"
    gap = max(abs(a - b) / abs(b) for a, b in zip(result.losses(), losses, strict=True))
    assert gap <= TOLERANCE, f"the loss differs by {gap:.1e}"
    known = {path: value.detach() for path, value in model.named_parameters()}
    frozen = functional.apply.frozen
    assert all(same_bits(result.final[f"params/{path}"], start[path]) for path in frozen)
    left_out = [path for path in known if any(tree.matches(rule, path) for rule in case.zero_gradient)]
    assert bool(left_out) == bool(case.zero_gradient), "a rule of a leaf that does not exist"
    compared = [path for path in known if path not in left_out and path not in frozen]
    assert all(relative(known[path], start[path]) > 1e-6 for path in compared), "every compared leaf must have moved"
    both = [torch.cat([of[path].flatten() for path in compared]) for of in (by_path(result.final), known)]
    norm = relative(*both)
    assert norm <= TOLERANCE, f"the parameters differ by {norm:.1e}"
    size = sum(value.numel() for value in known.values())
    rows[name] = Row(type(model).__name__, size, gap, norm, (*case.zero_gradient, *frozen))


def by_path(final: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path.removeprefix("params/"): value for path, value in final.items() if path.startswith("params/")}


def test_the_docs_list_what_is_tested() -> None:
    before, _, rest = DOCS.read_text().partition(HEAD)
    lines = rest.strip().splitlines()
    end = next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))
    if UPDATE:
        assert rows.keys() == CASES.keys(), "to write the table, run the whole file"
        table = [HEAD, "|---" * HEAD.count(" | ") + "|---|", *(_line(name, rows[name]) for name in CASES)]
        DOCS.write_text(before + "\n".join([*table, *lines[end:]]) + "\n")
        return
    listed = [line.split("|")[1].strip() for line in lines[1:end]]
    assert listed == list(CASES), f"{DOCS.name} is out of date: FZERO_UPDATE_MODELS=1 pytest {__file__}"


def _line(name: str, row: Row) -> str:
    case = CASES[name]
    left_out = ", ".join(f"`{rule}`" for rule in row.left_out)
    cells = [name, f"`{row.model}`", case.task, f"{row.parameters:,}", case.optimizer]
    return "| " + " | ".join([*cells, f"{row.loss:.0e}", f"{row.norm:.0e}", left_out]) + " |"


# --- what else a model may do -----------------------------------------------------------------------------------------


def dropout_model(checkpointing: bool = False) -> nn.Module:
    """A Llama with dropout in its attention, in training mode."""
    model = build("Llama")
    model.config.attention_dropout = 0.2
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.2
    model.set_attn_implementation("eager")
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # before 5.20
    return model.train()


def trained(model: nn.Module, key: int | None = None, **options: Any) -> Any:
    functional = from_module(model)
    spec = spec_of("Llama", functional, **options)
    own = None if key is None else fzero.random.key(key)
    return run(spec, functional.params, CASES["Llama"].batch, world=WORLD, steps=2, key=own)


@pytest.mark.acceptance
def test_dropout_is_a_function_of_the_key() -> None:
    first, again, other = (trained(dropout_model(), key) for key in (3, 3, 4))
    assert all(same_bits(first.final[path], again.final[path]) for path in first.final)
    assert first.losses() == again.losses()
    assert first.losses()[0] != other.losses()[0]
    without = trained(build("Llama").eval())
    assert first.losses()[0] != without.losses()[0], "dropout must be on"


def test_gradient_checkpointing_changes_nothing() -> None:
    """The backward of a checkpoint runs the layer again, after `apply` has returned, and with dropout."""
    models = dropout_model(), dropout_model(checkpointing=True)
    plain, again = (trained(model, 3, optimizer=fzero.optim.sgd(0.05)) for model in models)
    assert plain.losses() == pytest.approx(again.losses(), rel=1e-6)
    for path, value in plain.final.items():
        assert relative(again.final[path].float(), value.float()) <= 1e-5, path


@pytest.mark.acceptance
def test_bf16_compute_is_near() -> None:
    low, full = trained(build("Llama").eval(), precision="bf16"), trained(build("Llama").eval())
    assert low.losses() == pytest.approx(full.losses(), rel=1e-2)
    assert low.losses() != full.losses()


def test_a_loop_over_experts_is_refused_with_what_to_do() -> None:
    model = build("Mixtral")
    model.set_experts_implementation("eager")
    functional = from_module(model.eval())
    with pytest.raises(fzero.CaptureError, match=r"loop.*set_experts_implementation\('grouped_mm'\)"):
        fzero.lower(spec_of("Mixtral", functional), functional.params, CASES["Mixtral"].batch(0, 0))


@pytest.mark.acceptance
def test_experts_by_gathered_weights_are_the_same() -> None:
    case = CASES["Mixtral"]
    found = []
    for implementation in ("grouped_mm", "batched_mm"):
        model = build("Mixtral").eval()
        model.set_experts_implementation(implementation)
        functional = from_module(model)
        spec = spec_of("Mixtral", functional)
        found.append(run(spec, functional.params, case.batch, world=WORLD, steps=2).losses())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_model_without_memory_is_planned_for_a_thousand_ranks() -> None:
    with torch.device("meta"):
        model = build("Llama")
    with pytest.raises(fzero.TreeError, match=r"buffer 'model.rotary_emb.inv_freq' .* is on the meta device"):
        from_module(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    functional = from_module(model.eval())
    lowered = fzero.lower(spec_of("Llama", functional), functional.params, CASES["Llama"].batch(0, 0), world_size=1024)
    assert {"model/layers/0", "model/layers/1"} <= {bucket.replace(".", "/") for bucket in lowered.plan.buckets}


def test_what_a_model_reads_is_compared_in_a_500th_of_its_step() -> None:
    """Places are counted: layers of one kind share all. Their comparison is timed at its quickest; 0.01 % is usual."""
    make = hf_models.made("LlamaForCausalLM", "LlamaConfig", **hf_models.DECODER)
    tokens = torch.randint(0, hf_models.VOCAB, (16, 32), generator=torch.Generator().manual_seed(0))
    counts = []
    for layers in (1, 2):
        model = make(num_hidden_layers=layers, hidden_size=256, intermediate_size=512).eval()
        params = {name: value.detach() for name, value in model.named_parameters()}

        def loss(params: Any, batch: Tensor, model: Any = model) -> Tensor:
            return functional_call(model, params, (batch,)).logits.float().logsumexp(-1).mean()

        spec = fzero.Spec(loss=loss, optimizer=TX)
        reads = fzero.lower(spec, params, tokens).graph.reads
        counts.append(len(reads.places))
    state = fzero.step(fzero.init(params, spec), tokens)
    compared = min(timeit.repeat(reads.changes, number=20, repeat=100)) / 20
    steps = []
    for _ in range(5):
        start = time.monotonic()
        state = fzero.step(state, tokens)
        steps.append(time.monotonic() - start)
    assert counts[1] == counts[0]
    assert counts[1] <= 120
    assert compared <= min(steps) / 500


# --- BatchNorm in training, and real processes ------------------------------------------------------------------------

TX = fzero.optim.sgd(0.05, momentum=0.9)


def resnet() -> tuple[fzero.Spec, dict[str, Any]]:
    """Running statistics in the state: of each rank's own part, averaged, as a step of one's own says it."""
    params, buffers, apply = from_module(build("ResNet").train(), mutable=True)

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        output, buffers = apply(params, buffers, **arguments(batch))
        return fzero.Mean(*CASES["ResNet"].loss(output, batch)), buffers

    def step(state: Any, batch: Any) -> Any:
        (value, new), grads = fzero.value_and_grad(loss, has_aux=True)(state["params"], batch, state["buffers"])
        new = tree.map(lambda b: fzero.pmean(b) if b.is_floating_point() else fzero.pmax(b), new)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = fzero.optim.apply_updates(state["params"], updates)
        return {"params": params, "buffers": new, "opt": opt}, {"loss": value}

    return fzero.Spec(step=step, zero=3), {"params": params, "buffers": buffers, "opt": TX.init(params)}


def eager_resnet() -> tuple[list[float], nn.Module]:
    """Each rank's part through its own BatchNorm, statistics averaged after it: what data parallelism means."""
    case, model = CASES["ResNet"], build("ResNet").train()
    stepper = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(STEPS):
        stepper.zero_grad()
        before, after, value = copy.deepcopy(dict(model.named_buffers())), [], 0.0
        for rank in range(WORLD):
            model.load_state_dict(before, strict=False)
            batch = case.batch(rank, number)
            total, count = case.loss(model(**arguments(batch)), batch)
            loss = total / (count * WORLD)
            loss.backward()
            value += loss.item()
            after.append(copy.deepcopy(dict(model.named_buffers())))
        stepper.step()
        model.load_state_dict({n: (after[0][n] + after[1][n]) / 2 for n in before}, strict=False)
        losses.append(value)
    return losses, model


def test_batch_norm_trains_and_its_statistics_are_state() -> None:
    spec, state = resnet()
    result = run(spec, state, CASES["ResNet"].batch, world=WORLD, steps=STEPS)
    losses, model = eager_resnet()
    assert result.losses() == pytest.approx(losses, rel=TOLERANCE)
    buffers = dict(model.named_buffers())
    for path, value in {**buffers, **dict(model.named_parameters())}.items():
        kind = "buffers" if path in buffers else "params"
        gap = relative(result.final[f"{kind}/{path}"].float(), value.detach().float())
        assert gap <= TOLERANCE, f"{path} differs by {gap:.1e}"
    assert int(result.final["buffers/resnet.embedder.embedder.normalization.num_batches_tracked"]) == STEPS


def prepared(name: str) -> tuple[fzero.Spec, Any]:
    """A spec and what `fzero.init` starts from: with BatchNorm in training, or a padded language model."""
    if name == "ResNet":
        return resnet()
    functional = from_module(build(name).eval())
    return spec_of(name, functional), functional.params


REAL = ("Llama", "ResNet")


def rank_trains() -> dict[str, list[float]]:
    """The losses on one rank of a real world."""
    losses: dict[str, list[float]] = {}
    for name in REAL:
        spec, start = prepared(name)
        state = fzero.init(start, spec)
        for number in range(STEPS):
            state = fzero.step(state, CASES[name].batch(int(os.environ["RANK"]), number))
            losses.setdefault(name, []).append(float(state.metrics["loss"]))
    return losses


@pytest.mark.acceptance
def test_real_ranks_do_the_same() -> None:
    found = values(gloo(WORLD, rank_trains))
    assert found[0] == found[1]
    for name in REAL:
        spec, start = prepared(name)
        result = run(spec, start, CASES[name].batch, world=WORLD, steps=STEPS)
        assert found[0][name] == pytest.approx(result.losses(), rel=1e-6)


# --- the example ------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_hf.py"


def example(*arguments: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**outside, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.acceptance
def test_the_example_trains_saves_and_continues(tmp_path: Path) -> None:
    data = tmp_path / "text.py"
    data.write_text("def add(first, second):\n    return first + second\n\n\n" * 40)
    small = ["--steps", "10", "--batch", "4", "--seq", "32", "--data", str(data), "--out", str(tmp_path / "model")]
    done = example(str(EXAMPLE), *small, "--dropout", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (float(x) for x in re.findall(r"held-out loss (\d+\.\d+)", done.stdout))
    assert last < 0.8 * first
    assert (tmp_path / "model" / "program.txt").read_text().startswith("fzero program")
    again = example(str(EXAMPLE), *small, "--model", str(tmp_path / "model"), "--world", "1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert float(re.findall(r"held-out loss (\d+\.\d+)", again.stdout)[0]) == pytest.approx(last, abs=2e-3)


def test_the_example_says_how_to_get_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "finetune_hf", raising=False)
    with pytest.raises(SystemExit, match=r"needs transformers: pip install 'fzero\[hf\]'"):  # a text: the status is 1
        importlib.import_module("finetune_hf")


# --- draws of a library -----------------------------------------------------------------------------------------------


def test_a_mask_that_a_model_draws_with_numpy_is_refused() -> None:
    """Wav2Vec2 masks its input by numpy: a program would train on one mask for ever. Without that the model runs."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    def state(augment: bool) -> fzero.State:
        config = Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(16, 16),
            conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, vocab_size=8, mask_time_length=2,
            mask_time_prob=0.3, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
            apply_spec_augment=augment,
        )  # fmt: skip
        params, buffers, apply = from_module(Wav2Vec2ForCTC(config))

        def loss(p: Any, x: Tensor) -> Tensor:
            return apply(p, buffers, x).logits.square().mean()

        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), allow_unused=True)
        return fzero.init(params, spec, key=fzero.random.key(0))

    place = r"_compute_mask_indices \(modeling_wav2vec2.py:\d+\) draws from the global generator of numpy.random"
    with pytest.raises(fzero.CaptureError, match=rf"{place} .* What a library draws for itself, switch off"):
        fzero.step(state(True), torch.randn(2, 400))
    assert fzero.step(state(False), torch.randn(2, 400)).step == 1


# --- models that ask for values ---------------------------------------------------------------------------------------

IDS = torch.arange(2, 26).view(2, 12) % 29 + 3
FIRST = torch.zeros_like(IDS).index_fill(1, torch.tensor([0]), 1)  # the first token has global attention
LABELS = torch.tensor([[1, 2, 2, 7, -100], [5, 3, 1, -100, -100]])


def told() -> dict[str, Any]:
    from foreign import hf

    return hf._told()


def heard() -> dict[str, Any]:
    return {"input_values": torch.linspace(-3, 3, 800).sin().view(2, 400), "labels": LABELS}


def own_loss(model: Callable[..., Any], batch: Any) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


def ctc_of_logits(model: Callable[..., Any], batch: Any) -> Tensor:
    """What the refusal says: padded labels, chosen by their lengths."""
    labels, log_probs = batch["labels"], model(batch["input_values"]).logits.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(labels),), len(log_probs))
    return nn.functional.ctc_loss(log_probs, labels.clamp(min=0), lengths, (labels >= 0).sum(-1), reduction="sum")


WAYS: dict[str, tuple[str, Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "Longformer": ("Longformer", own_loss, lambda: {"input_ids": IDS, "labels": IDS}),
    "Longformer, static": (
        "Longformer",
        own_loss,
        lambda: {"input_ids": IDS, "labels": IDS, "global_attention_mask": fzero.static(FIRST)},
    ),
    "Longformer, both static": (
        "Longformer",
        own_loss,
        lambda: {
            "input_ids": IDS,
            "labels": IDS,
            "global_attention_mask": fzero.static(FIRST),
            "attention_mask": fzero.static((IDS < 29).long()),
        },
    ),
    "LED": ("LED", own_loss, lambda: {"input_ids": IDS, "labels": IDS, "global_attention_mask": fzero.static(FIRST)}),
    "ProphetNet": (
        "ProphetNet",
        own_loss,
        lambda: {"input_ids": IDS, "labels": IDS, "decoder_input_ids": IDS.roll(1, 1)},
    ),
    "LLaVA": ("LLaVA", own_loss, told),
    "CTC": ("wav2vec 2.0, CTC", ctc_of_logits, heard),
    "CTC, static labels": ("wav2vec 2.0, CTC", own_loss, lambda: {**heard(), "labels": fzero.static(LABELS)}),
}


def asking(family: str, loss: Callable[..., Tensor]) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    from foreign import hf

    torch.manual_seed(0)
    module = hf.case(family).make()
    params, buffers, apply = from_module(module)
    return module, params, lambda p, b: loss(lambda *args, **named: apply(p, buffers, *args, **named), b)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled(1)
def test_a_model_that_asks_for_values_runs_where_they_are_known(name: str) -> None:
    """The complaint: these models could not be trained, and the refusal named no argument."""
    family, loss, batch = WAYS[name]
    module, params, of = asking(family, loss)
    spec = fzero.Spec(loss=of, optimizer=fzero.optim.sgd(0.1), allow_unused=True)
    given = batch()
    state = fzero.step(fzero.init(params, spec), given)
    wanted = loss(module, {key: getattr(value, "value", value) for key, value in given.items()})
    wanted.backward()
    assert torch.allclose(state.metrics["loss"], wanted.detach(), atol=1e-6)
    for path, x in module.named_parameters():
        if path in state.params and x.grad is not None:
            assert torch.allclose(state.params[path].full(), (x - 0.1 * x.grad).detach(), atol=1e-6), path


REFUSED_WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "Longformer": (
        {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)},
        r"leave attention_mask= out where nothing is padded, or give both closed over or as fzero.static\(mask\)",
    ),
    "LED": ({"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}, "leave attention_mask= out"),
    "ProphetNet": ({"input_ids": IDS, "labels": IDS}, "pass decoder_input_ids= beside labels="),
    "wav2vec 2.0, CTC": (heard(), r"leave labels= out, and give F.ctc_loss the padded ones"),
}


@pytest.mark.parametrize("family", REFUSED_WAYS)
@pytest.mark.sampled(1)
def test_a_model_that_asks_for_a_value_of_the_batch_is_refused_with_the_argument(family: str) -> None:
    batch, says = REFUSED_WAYS[family]
    _, params, of = asking(family, own_loss)
    spec = fzero.Spec(loss=of, optimizer=fzero.optim.sgd(0.1), allow_unused=True)
    with pytest.raises(fzero.CaptureError, match=says):
        fzero.lower(spec, params, batch, world_size=1)


SMALL = {"vocab_size": hf_models.VOCAB, "max_position_embeddings": 32}
BOTH = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}  # fmt: skip
XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2}
ENDS = torch.cat([IDS, torch.full((2, 1), 2)], 1)  # each row with an end token
BY_OPTION: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "LayerDrop": ("M2M100ForConditionalGeneration", BOTH, {"input_ids": IDS, "labels": IDS}, "layerdrop=0.0"),
    "lengths": ("XLMWithLMHeadModel", XLM, {"input_ids": IDS, "labels": IDS}, r"lengths=torch.full\("),
    "end tokens": (
        "BartForSequenceClassification", BOTH, {"input_ids": ENDS, "labels": torch.tensor([0, 1])}, "below its head"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_OPTION)
def test_a_model_that_asks_for_a_value_is_refused_with_what_avoids_it(name: str) -> None:
    """The complaint: the advice was to rewrite a library's `if`."""
    model, options, batch, says = BY_OPTION[name]
    params, buffers, apply = from_module(hf_models.made(model, model_config(model), **SMALL, **options)().train())
    spec = fzero.Spec(loss=lambda p, b: apply(p, buffers, **b).loss, optimizer=fzero.optim.sgd(0.1), allow_unused=True)
    with pytest.raises(fzero.CaptureError, match=says):
        fzero.lower(spec, params, batch, world_size=1, key=fzero.random.key(0))


def model_config(model: str) -> str:
    import transformers

    return str(getattr(transformers, model).config_class.__name__)


def test_a_check_of_values_is_made_when_the_program_runs() -> None:
    """LLaVA counts its image tokens: a batch with another number raises, and the state is as it was."""
    _, params, of = asking("LLaVA", own_loss)
    state = fzero.init(params, fzero.Spec(loss=of, optimizer=fzero.optim.sgd(0.1), allow_unused=True))
    batch = told()
    wrong = {**batch, "input_ids": batch["input_ids"].index_fill(1, torch.tensor([1]), 5)}
    with pytest.raises(RuntimeError, match="Image features and image tokens do not match") as error:
        fzero.step(state, wrong)
    assert "tokens: a tensor of shape ()" in str(error.value)  # the complaint: "FakeTensor(..., size=(), ...)"
    assert fzero.step(state, batch).step == 1
