"""What runs on {"tp": n} and on {"pp": m} runs on both, whatever the rules, and has the numbers of one process.

A block's rules are tried in every combination: lowered, which verifies them, and some of them run. Of models that
nobody here wrote, those are here whose own plans put a transfer where a pipeline is cut. What is drawn at random has
the bits of no pipeline at the same tp, and the loss of plain PyTorch.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import partial
from typing import Any

import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import Run, differing, run
from hf_models import DECODER, ENCODER, EXPERTS, LENGTH, ROWS, VOCAB, Case, generator, lm, made, same_place
from torch import Tensor
from tp_models import of_case

import fzero
from fzero import P, optim, tree
from fzero.pipeline import SCHEDULES

WIDTH, HIDDEN, WORDS, HEADS, TOKENS = 8, 16, 16, 4, 4
LOSS, GRADIENT = 2e-5, 2e-5  # fp32, of the loss and of the largest of a leaf's gradient
FLOOR = 1e-3  # of the largest gradient of all: what a smaller leaf is compared to
EXACT = 1e-12  # float64

ACROSS: tuple[P, ...] = (P("tp", None), P(None, "tp"), P())
ALONG: tuple[P, ...] = (P("tp"), P())
BLOCK: dict[str, tuple[P, ...]] = {
    "up/w": ACROSS, "up/b": ALONG, "down/w": ACROSS, "down/b": ALONG, "norm/w": ALONG, "norm/b": ALONG,
}  # fmt: skip
ATTENTION: dict[str, tuple[P, ...]] = {"[qkv]/w": ACROSS, "o/w": ACROSS, "before/w": ALONG, "before/b": ALONG}


def norm(z: Tensor, k: Any) -> Tensor:
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6) * k["w"] + k["b"]


def tower(layers: int = 2, tied: bool = False, attends: bool = False, counts: bool = False) -> tuple[Any, Any]:
    """(params, loss) of a tower of blocks, in float64. Every choice of a dim over an axis is legal for its leaves.

    counts: the loss is a `fzero.Mean` over tokens of which every third does not count."""
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64) * 0.3

    def linear(out: int, inner: int) -> dict[str, Tensor]:
        return {"w": drawn(out, inner), "b": drawn(out)}

    def gain() -> dict[str, Tensor]:
        return {"w": 1 + drawn(WIDTH), "b": drawn(WIDTH)}

    def block() -> dict[str, Any]:
        mixer = {"before": gain(), **{name: {"w": drawn(WIDTH, WIDTH)} for name in "qkvo"}} if attends else {}
        return {"norm": gain(), "up": linear(HIDDEN, WIDTH), "down": linear(WIDTH, HIDDEN), **mixer}

    def loss(p: Any, batch: Any) -> Any:
        z = F.embedding(batch["x"], p["wte"])
        for k in p["blocks"]:
            if attends:
                a = norm(z, k["before"])
                q, key, v = (F.linear(a, k[n]["w"]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
                a = F.scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2).flatten(2)
                z = z + F.linear(a, k["o"]["w"])
            a = F.gelu(F.linear(norm(z, k["norm"]), k["up"]["w"], k["up"]["b"]))
            z = z + F.linear(a, k["down"]["w"], k["down"]["b"])
        logits = F.linear(norm(z, p["last"]), p["wte"] if tied else p["head"])
        if counts:
            y = batch["y"].masked_fill(batch["x"] % 3 == 0, -100)
            return fzero.Mean(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), (y >= 0).sum())
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    params = {"wte": drawn(WORDS, WIDTH), "last": gain(), "blocks": [block() for _ in range(layers)]}
    return params | ({} if tied else {"head": drawn(WORDS, WIDTH)}), loss


def tokens(rank: int, step: int, rows: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (rows, TOKENS + 1), generator=generator(rank, step))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


# --- every choice of rules --------------------------------------------------------------------------------------------

PARAMS, TOWER = tower()
PRECISIONS = ("fp16", "fp32", "bf16", "autocast")
SGD = optim.sgd(0.1, momentum=0.9)


def lower(mesh: dict[str, int], rules: dict[str, P], **given: Any) -> fzero.Lowered:
    options = {"loss": TOWER, "optimizer": SGD, "mesh": mesh, "shard": rules, "microbatches": 2, **given}
    return kept.lower(fzero.Spec(**options), PARAMS, tokens(0, 0, 4), math.prod(mesh.values()))


@pytest.mark.parametrize("head", ACROSS, ids=str)
@pytest.mark.parametrize("wte", ACROSS, ids=str)
@pytest.mark.sampled(1)
def test_every_choice_of_a_blocks_rules(wte: P, head: P, whole: bool) -> None:
    """Of 1,295, in make acceptance: what lowers on {"tp": 2}, and so verifies, does with two roles, in each precision
    by turns. A loss scale multiplies the loss behind the last chunk's sums."""
    every = [dict(zip(BLOCK, dims, strict=True)) for dims in itertools.product(*BLOCK.values())]
    every = [{"wte": wte, "head": head, **{f"blocks/*/{leaf}": dims for leaf, dims in one.items()}} for one in every]
    every = [rules for rules in every if any("tp" in dims for dims in rules.values())]
    for number, rules in enumerate(every if whole else random.Random(f"{wte} {head}").sample(every, 4)):
        precision = PRECISIONS[number % len(PRECISIONS)]
        for mesh, pipeline in (({"tp": 2}, None), ({"pp": 2, "tp": 2}, "1f1b"))[not whole :]:
            try:
                lower(mesh, rules, pipeline=pipeline, precision=precision)
            except fzero.FzeroError as error:
                raise AssertionError(f"{mesh} with {rules} in {precision}") from error


@pytest.mark.parametrize("sequence", [None, "tp"])
@pytest.mark.sampled(1)
def test_a_scaled_loss_that_is_a_sum_over_ranks(sequence: str | None) -> None:
    """Of a vocabulary in parts, large enough that its logits stay so. It has the bits of tensor parallelism alone."""
    g = torch.Generator().manual_seed(0)
    blocks = [{name: torch.randn(64, 64, generator=g) / 9 for name in ("up", "down")} for _ in range(2)]
    params = {"wte": torch.randn(256, 64, generator=g) / 9, "blocks": blocks}

    def loss(p: Any, batch: Any) -> Tensor:
        z = F.embedding(batch["x"], p["wte"])
        for k in p["blocks"]:
            z = z + F.linear(F.gelu(F.linear(F.layer_norm(z, (64,)), k["up"])), k["down"])
        return F.cross_entropy(F.linear(z, p["wte"]).flatten(0, 1), batch["y"].flatten())

    given = {"loss": loss, "optimizer": SGD, "precision": "fp16", "microbatches": 2, "sequence": sequence,
             "shard": {"wte": P("tp"), "blocks/*/up": P("tp"), "blocks/*/down": P(None, "tp")}}  # fmt: skip
    alone, both = (
        run(fzero.Spec(mesh=mesh, **given), params, partial(tokens, rows=8), world=math.prod(mesh.values()), steps=2)
        for mesh in ({"tp": 2}, {"pp": 2, "tp": 2})
    )
    assert differing(alone.final, both.final) == []


# --- drawn at random --------------------------------------------------------------------------------------------------


def draw(seed: int) -> tuple[dict[str, int], str, dict[str, Any], dict[str, P], dict[str, Any]]:
    """(mesh, schedule, options of the Spec, rules, arguments of `tower`)."""
    rng = random.Random(seed)
    mesh = {"pp": rng.choice([2, 2, 3]), "dp": rng.choice([1, 1, 2]), "tp": 2}
    schedule = rng.choice(list(SCHEDULES))
    chunks = mesh["pp"] * (2 if schedule in ("interleaved", "zb-v") else 1)
    shape = {"layers": chunks + rng.choice([0, 0, 1]), "tied": rng.random() < 0.3, "attends": rng.random() < 0.5,
             "counts": rng.random() < 0.3}  # fmt: skip
    block = {**BLOCK, **(ATTENTION if shape["attends"] else {})}
    layers = [str(n) for n in range(shape["layers"])] if rng.random() < 0.3 else ["*"]  # each by itself, or alike
    rules = {f"blocks/{n}/{leaf}": rng.choice(dims) for n in layers for leaf, dims in block.items()}
    rules |= {"wte": rng.choice(ACROSS[:2]), "last/w": rng.choice(ALONG), "last/b": rng.choice(ALONG)}
    rules |= {} if shape["tied"] else {"head": rng.choice(ACROSS)}
    given = {"microbatches": mesh["pp"] * rng.choice([1, 2]), "reduce": rng.choice(["end", "each"]),
             "zero": rng.choice([0, 1, 2, 3])}  # fmt: skip
    for name, value in (("remat", "full"), ("sequence", "tp"), ("clip_norm", 0.5), ("transfers", "p2p")):
        given |= {name: value} if rng.random() < 0.3 else {}
    return mesh, schedule, given, rules, shape


def in_plain_torch(
    params: Any, loss: Any, ranks: int, steps: int, clip: float | None
) -> tuple[list[float], list[Tensor]]:
    """The losses and the parameters at the end, of one process that has all ranks' rows."""
    mine = tree.map(lambda x: x.clone().requires_grad_(), params)
    leaves = tree.flatten(mine)[1]
    optimizer, losses = torch.optim.SGD(leaves, lr=0.1, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        given = [loss(mine, tokens(rank, step)) for rank in range(ranks)]
        if isinstance(given[0], fzero.Mean):
            value = sum(mean.total for mean in given) / sum(mean.count for mean in given)
        else:
            value = sum(given) / ranks
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, [leaf.detach() for leaf in leaves]


SMALL = 1


@pytest.mark.parametrize(
    "seed", [n if n == SMALL else pytest.param(n, marks=pytest.mark.acceptance) for n in range(120)]
)
def test_what_is_drawn_has_the_bits_of_no_pipeline(seed: int) -> None:
    """And the losses and parameters of plain PyTorch."""
    mesh, schedule, given, rules, shape = draw(seed)
    print(mesh, schedule, given, rules, shape)
    params, loss = tower(**shape)

    def trained(mesh: dict[str, int], **more: Any) -> Run:
        mesh = {axis: n for axis, n in mesh.items() if n > 1}
        spec = fzero.Spec(loss=loss, optimizer=SGD, mesh=mesh, shard=rules, **given, **more)
        return run(spec, params, tokens, world=math.prod(mesh.values()), steps=2)

    piped, flat = trained(mesh, pipeline=schedule), trained({**mesh, "pp": 1})
    assert piped.losses() == flat.losses()
    assert differing(piped.final, flat.final) == []
    losses, leaves = in_plain_torch(params, loss, mesh["dp"], 2, given.get("clip_norm"))
    assert piped.losses() == pytest.approx(losses, rel=EXACT)
    for path, leaf in zip(tree.flatten(params)[0], leaves, strict=True):
        torch.testing.assert_close(piped.final[f"params/{path}"], leaf, rtol=EXACT, atol=EXACT)


# --- models that nobody here wrote ------------------------------------------------------------------------------------


def unmasked(rank: int, step: int) -> dict[str, Tensor]:
    """Without a mask: a Longformer asks a mask's values for tokens that attend to all."""
    g = generator(rank, step)
    ids, labels = (torch.randint(3, VOCAB, (ROWS, LENGTH), generator=g) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def unmasked_sequences(rank: int, step: int) -> dict[str, Tensor]:
    return {**unmasked(rank, step), "decoder_input_ids": unmasked(rank, step + 500)["labels"]}


BOTH = {f"{part}_{name}": n for part in ("encoder", "decoder")
        for name, n in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
LED = {**BOTH, "vocab_size": VOCAB, "d_model": 32, "attention_window": 4}
LED |= {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}
LONG = {**ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 40, "attention_window": 4}
CODEGEN = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32}
WINDOW = {**DECODER, "sliding_window": 6}
FAMILIES: dict[str, Case] = {
    "Qwen3-MoE": lm("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS, num_experts=4, moe_intermediate_size=16),
    "gpt-oss": lm("GptOssForCausalLM", "GptOssConfig", **EXPERTS, num_local_experts=4, sliding_window=6),
    "Gemma3": lm("Gemma3ForCausalLM", "Gemma3TextConfig", **WINDOW, query_pre_attn_scalar=8),
    "OLMoE": lm("OlmoeForCausalLM", "OlmoeConfig", **EXPERTS, num_experts=4),
    "LED": Case("", made("LEDForConditionalGeneration", "LEDConfig", **LED), unmasked_sequences, same_place),
    "Longformer": Case("", made("LongformerForMaskedLM", "LongformerConfig", **LONG), unmasked, same_place),
    "CodeGen": lm("CodeGenForCausalLM", "CodeGenConfig", **CODEGEN, rotary_dim=4, n_inner=64),
    "Exaone4": lm("Exaone4ForCausalLM", "Exaone4Config", **WINDOW),
    "HunYuan": lm("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", **DECODER),
    "HunYuan-MoE": lm("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", **DECODER, num_experts=4, moe_topk=2),
    "Apertus": lm("ApertusForCausalLM", "ApertusConfig", **DECODER),
    "Qwen3": lm("Qwen3ForCausalLM", "Qwen3Config", **DECODER),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(1)
def test_models_by_their_own_plans(name: str, schedule: str) -> None:
    """On two roles of two ranks: the loss and the gradients of the module itself."""
    pytest.importorskip("transformers")
    case = FAMILIES[name]
    model, module = of_case(case)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(model.loss)(state["params"], batch)
        return {"params": state["params"], "grads": grads}, {"loss": loss}

    spec = fzero.Spec(
        step=step, mesh={"pp": 2, "tp": 2}, pipeline=schedule, shard=model.rules, microbatches=2, allow_unused=True
    )
    start = {"params": model.params, "grads": tree.map(torch.zeros_like, model.params)}
    found = run(spec, start, model.batch, world=4, steps=1)
    batch = case.batch(0, 0)
    total, count = case.loss(module(**{key: x for key, x in batch.items() if key != "labels"}), batch)
    leaves = {path: x for path, x in module.named_parameters() if path in model.params}
    grads = torch.autograd.grad(total / count, list(leaves.values()), allow_unused=True)
    assert found.losses()[0] == pytest.approx(float((total / count).detach()), rel=LOSS)
    largest = max(float(grad.abs().max()) for grad in grads if grad is not None)
    for path, grad in zip(leaves, grads, strict=True):
        mine = found.final[f"grads/{path}"]
        grad = torch.zeros_like(mine) if grad is None else grad
        scale = max(float(grad.abs().max()), FLOOR * largest)
        assert float((mine - grad).abs().max()) <= GRADIENT * scale, path


CLIPPED: dict[str, Case] = {
    "SmolLM3": lm("SmolLM3ForCausalLM", "SmolLM3Config", **{**DECODER, "num_hidden_layers": 4}, pad_token_id=0),
    "Granite": lm("GraniteForCausalLM", "GraniteConfig", **{**DECODER, "num_hidden_layers": 4}),
    "Phi3": lm("Phi3ForCausalLM", "Phi3Config", **{**DECODER, "num_hidden_layers": 4}, pad_token_id=0),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.sampled(1)
def test_models_on_four_roles_have_exact_means_and_are_clipped(name: str, schedule: str) -> None:
    """A mean's count is known to the last role, and the norm needs all: they waited for one another."""
    pytest.importorskip("transformers")
    model, module = of_case(CLIPPED[name])
    spec = fzero.Spec(
        loss=model.loss, optimizer=optim.sgd(1.0), mesh={"pp": 4}, pipeline=schedule, microbatches=2, clip_norm=0.01,
        nonfinite="skip", allow_unused=True,
    )  # fmt: skip
    found, batch = run(spec, model.params, model.batch, world=4, steps=1), model.batch(0, 0)
    given = {key: x for key, x in batch.items() if key != "labels"}
    total, count = CLIPPED[name].loss(module(**given), batch)
    leaves = {path: x for path, x in module.named_parameters() if path in model.params}
    grads = torch.autograd.grad(total / count, list(leaves.values()))
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert norm > 0.02
    assert found.losses()[0] == pytest.approx(float((total / count).detach()), rel=LOSS)
    for (path, leaf), grad in zip(leaves.items(), grads, strict=True):
        torch.testing.assert_close(
            found.final[f"params/{path}"], leaf.detach() - grad * 0.01 / norm, rtol=1e-4, atol=1e-6
        )
