"""Propagation: each rank's graph against the graph as it was captured, and Megatron's transfers to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lockstep import Captured, captured, run, sharded
from torch import Tensor, fx

from fzero.errors import FzeroError, SpecError
from fzero.interop import from_module
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.moves import kind_of, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard, join, split
from fzero.shard.propagate import propagate
from fzero.shard.write_local_graph import Sharded

VOCAB, WIDTH, HEADS, SEQUENCE, ROWS, LAYERS = 512, 64, 8, 32, 4, 2
APART: dict[str, Placement] = {
    "wte": Shard(0), "blocks/*/[qkv]/*": Shard(0), "blocks/*/o/w": Shard(1), "blocks/*/up/*": Shard(0),
    "blocks/*/down/w": Shard(1),
}  # fmt: skip
FUSED: dict[str, Placement] = {**APART, "blocks/*/qkv/*": Shard(0, groups=3)}
LLAMA: dict[str, Placement] = {
    "*embed_tokens.weight": Shard(0), "lm_head.weight": Shard(0), "*.[qkv]_proj.weight": Shard(0),
    "*.o_proj.weight": Shard(1), "*.gate_proj.weight": Shard(0), "*.up_proj.weight": Shard(0),
    "*.down_proj.weight": Shard(1),
}  # fmt: skip


@cache
def gpt(fused: bool) -> Captured:
    """A GPT with a tied embedding, by hand."""
    g = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int) -> dict[str, Tensor]:
        return {"w": torch.randn(rows, columns, generator=g) * 0.05, "b": torch.randn(rows, generator=g) * 0.05}

    def norm() -> dict[str, Tensor]:
        return {"w": torch.ones(WIDTH), "b": torch.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        heads = {"qkv": linear(3 * WIDTH, WIDTH)} if fused else {name: linear(WIDTH, WIDTH) for name in "qkv"}
        up, down = linear(4 * WIDTH, WIDTH), linear(WIDTH, 4 * WIDTH)
        return {"ln1": norm(), "ln2": norm(), "o": linear(WIDTH, WIDTH), "up": up, "down": down, **heads}

    def at(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def loss(p: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        z = F.embedding(x, p["wte"]) + p["wpe"][: x.shape[1]]
        for k in p["blocks"]:
            a = F.layer_norm(z, (WIDTH,), k["ln1"]["w"], k["ln1"]["b"])
            shape = (ROWS, SEQUENCE, HEADS, WIDTH // HEADS)
            if fused:
                one = at(a, k["qkv"]).view(*shape[:2], 3, *shape[2:])
                q, key, v = one.permute(2, 0, 3, 1, 4).unbind(0)
            else:
                q, key, v = (at(a, k[name]).view(shape).transpose(1, 2) for name in "qkv")
            a = F.scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2).reshape(z.shape)
            z = z + at(a, k["o"])
            a = F.layer_norm(z, (WIDTH,), k["ln2"]["w"], k["ln2"]["b"])
            z = z + at(F.gelu(at(a, k["up"]), approximate="tanh"), k["down"])
        z = F.layer_norm(z, (WIDTH,), p["lnf"]["w"], p["lnf"]["b"])
        return F.cross_entropy(F.linear(z, p["wte"]).view(-1, VOCAB), y.view(-1))

    params = {"wte": torch.randn(VOCAB, WIDTH, generator=g) * 0.05, "wpe": torch.randn(SEQUENCE, WIDTH, generator=g),
              "lnf": norm(), "blocks": [block() for _ in range(LAYERS)]}  # fmt: skip
    batch = torch.randint(VOCAB, (2, ROWS, SEQUENCE), generator=g)
    return captured(loss, params, (batch[0], batch[1]))


def of_hf(model: torch.nn.Module) -> Captured:
    """The mean cross entropy of the next token of an unmodified model."""
    params, buffers, apply = from_module(model)

    def loss(p: Any, ids: Tensor) -> Tensor:
        logits = apply(p, buffers, input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1))

    return captured(loss, params, torch.randint(3, VOCAB, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(1)))


@cache
def llama(kv_heads: int = HEADS, attention: str = "sdpa") -> Captured:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, max_position_embeddings=64, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return of_hf(transformers.LlamaForCausalLM(config))


CASES = {
    "gpt": (lambda: gpt(fused=False), APART),
    "gpt, fused": (lambda: gpt(fused=True), FUSED),
    "llama": (llama, LLAMA),
    "llama, eager": (lambda: llama(attention="eager"), LLAMA),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def agrees(case: Captured, made: Sharded) -> None:
    """Loss within 1e-6, gradients within 2e-6 of each leaf's largest; true gradients of zero stay small."""
    reference = case.reference()
    found = run(made, case.inputs)
    largest = max(float(x.abs().max()) for x in reference[1:])
    for i, (one, other) in enumerate(zip(found, reference, strict=True)):
        scale = float(other.abs().max())
        far = float((one - other).abs().max())
        assert far <= (1e-6 * largest if scale < 1e-6 * largest else (2e-6 if i else 1e-6) * scale), case.grad_of.get(i)


def megatron(n: int, rows: int = ROWS * SEQUENCE) -> float:
    """Bytes that a rank sends: 4 sums a layer and one each for embedding and head; three small ones of the rows of the
    loss, and the loss."""
    share, stream = (n - 1) / n, ROWS * SEQUENCE * WIDTH * 4
    return (8 * LAYERS + 4) * share * stream + 3 * 2 * share * rows * 4 + 2 * share * 4


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_megatrons_transfers_arise(name: str, n: int) -> None:
    """Fourteen for two layers, to the byte, none of it written into the model; loss and gradients are the whole's."""
    make, rules = CASES[name]
    case = make()
    made = sharded(case, rules, n)
    sent = [move for move in made.moves if move.nbytes]
    assert Counter(move.kind for move in sent) == {"all_reduce": 14}
    assert not any(move.is_leaf for move in sent)
    rows = ROWS * (SEQUENCE - (not name.startswith("gpt")))  # an unmodified model is cut after the last position
    assert made.sent_bytes == pytest.approx(megatron(n, rows), abs=1e-6)
    agrees(case, made)


def test_what_the_transfers_are() -> None:
    """Their kinds in the local graph are those of the list, and the list says line, phase and reader."""
    made = sharded(gpt(fused=True), FUSED, 2)
    held = [node for node in made.gm.graph.nodes if node.target in ops.TRANSFERS]
    assert len(held) == len([move for move in made.moves if move.nbytes])
    assert Counter(move.phase for move in made.moves if move.nbytes) == {"forward": 7, "backward": 7}
    assert all("test_propagate.py" in str(move) for move in made.moves if move.phase == "forward")
    assert str(made.moves[0]).startswith("all_reduce     f32         32,768 bytes  forward embedding P -> R for add ")


def test_what_the_backward_asks_for_is_of_the_backward() -> None:
    """A part of a forward value that only the backward reads: in a pipeline it runs with the backward."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (F.gelu(x @ p["up"]) @ p["down"]).square().mean()

    params = {"up": torch.randn(4, 8), "down": torch.randn(8, 4)}
    made = sharded(captured(loss, params, torch.randn(6, 4)), {"down": Shard(0)}, 2)
    nodes = [node for node in made.gm.graph.nodes if node.op == "call_function"]
    phases = [str(node.meta.get("phase") or "forward") for node in nodes]
    assert phases == sorted(phases, reverse=True), "forward work stands in the backward"
    late = [node for node, phase in zip(nodes, phases, strict=True) if phase == "backward"]
    assert any(node.target is ops.OWN_PART for node in late)


ARCHITECTURES: dict[str, tuple[dict[str, Any], Mapping[str, Placement], int]] = {  # options, rules, transfers
    "Qwen3": ({"head_dim": 16}, LLAMA, 18),  # and the gains of its norms of q and k
    "Qwen2": ({}, {**LLAMA, "*.[qkv]_proj.bias": Shard(0)}, 14),
    "Mistral": ({}, LLAMA, 14),
    "Gemma2": ({"head_dim": 16}, LLAMA, 14),
    "Olmo2": ({}, LLAMA, 32),  # its norms run over all heads
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled(1)
def test_models_that_nobody_here_wrote(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    options, rules, transfers = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    case = of_hf(getattr(transformers, f"{name}ForCausalLM")(config))
    made = sharded(case, rules, 2)
    assert len([move for move in made.moves if move.nbytes]) <= transfers
    assert not any(move.is_leaf for move in made.moves if move.nbytes)
    agrees(case, made)


def test_more_ranks_than_key_heads() -> None:
    """Keys and values are brought to the query's heads; no leaf moves."""
    case = llama(kv_heads=2)
    made = sharded(case, LLAMA, 4)
    assert not any(move.is_leaf for move in made.moves if move.nbytes)
    assert made.sent_bytes < 1.2 * megatron(4)
    agrees(case, made)


def test_a_dim_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is no multiple of 3; the next that is"):
        sharded(gpt(fused=False), APART, 3)


def test_heads_that_ranks_would_cut_through_are_refused() -> None:
    """Also behind a bias and what is done element by element. Of a graph without names the message says its own."""

    def loss(p: Any, x: Tensor) -> Tensor:
        q = (torch.tanh(x @ p["q"] + p["b"]) * 2).view(4, 3, 4)
        return (q.transpose(0, 1) @ q.permute(1, 2, 0)).square().mean()

    case = captured(loss, {"q": drawn(8, 12), "b": drawn(12)}, drawn(4, 8))
    with pytest.raises(
        SpecError, match=r"12 lies in parts over 2 ranks of .tp., as \w+ does, and becomes 3 heads.*\(3\), or"
    ):
        sharded(case, {"q": Shard(1), "b": Shard(0)}, 2)


def test_tokens_are_no_heads() -> None:
    """The twelve tokens of three rows may lie in parts; to see them as rows they are joined, and nothing is refused."""

    def loss(p: Any, x: Tensor) -> Tensor:
        y = torch.tanh((x.view(-1, 8) @ p["up"]).view(3, 4, 8) * p["norm"])
        return (y @ p["down"]).square().mean()

    case = captured(loss, {"up": drawn(8, 8), "norm": drawn(8), "down": drawn(8, 8)}, drawn(3, 4, 8))
    agrees(case, sharded(case, {"norm": Shard(0)}, 2))


def test_an_op_of_which_nothing_is_known() -> None:
    """Small operands are gathered, and listed; large ones are refused, with the op and what to do."""
    case = captured(
        lambda p, x: torch.linalg.matrix_exp(p["w"]).mul(x).sum(), {"w": torch.rand(64, 64)}, torch.rand(64)
    )
    made = sharded(case, {"w": Shard(0)}, 2)
    assert any("linalg_matrix_exp" in text for text in made.replicated)
    agrees(case, made)
    big = captured(
        lambda p, x: torch.linalg.matrix_exp(p["w"]).mul(x).sum(), {"w": torch.rand(520, 520)}, torch.rand(520)
    )
    with pytest.raises(FzeroError, match=r"linalg_matrix_exp.*nothing is known.*1,081,600 bytes.*fzero\.shard\.rule"):
        sharded(big, {"w": Shard(0)}, 2)


@pytest.mark.parametrize(
    ("source", "want"),
    [(Partial(), Replicated()), (Partial("max"), Replicated()), (Partial(), Shard(1)), (Shard(0), Replicated()),
     (Shard(1, 2), Replicated()), (Shard(0), Shard(1, 2)), (Replicated(), Shard(1, 2))],
    ids=str,
)  # fmt: skip
def test_every_transfer(source: Placement, want: Placement) -> None:
    """A value of which the graph is the identity, whose dims lie in memory in another order."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = torch.arange(48.0).view(4, 12).t().contiguous().t()
    x.meta["val"] = torch.empty_strided(whole.shape, whole.stride(), device="meta")
    graph.output((x,))
    made = propagate(fx.GraphModule(torch.nn.Module(), graph), [source], [want], 2, "tp", leaves=[False])
    assert [move.kind for move in made.moves] == [kind_of(source, want)]
    assert made.sent_bytes == wire_bytes(source, want, whole, 2)
    (found,) = run(made, [whole])
    assert torch.equal(found, join(split(whole, source, 2), source))
    assert fx_nodes.outputs(made.gm.graph)[0].meta["val"].stride(0) == 1


def test_a_maximum_is_joined_before_it_is_cut() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 2, device="meta")
    graph.output((x,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    made = propagate(gm, [Partial("max")], [Shard(0)], 2, "tp", leaves=[False])
    assert [move.kind for move in made.moves] == ["all_reduce", "own_part"]
    whole = torch.arange(8.0).view(4, 2) - 4
    assert torch.equal(run(made, [whole])[0], whole)
