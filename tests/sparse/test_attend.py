"""attend: in a step it is what masked sdpa is, whatever the stage, axis or pipeline; what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from helpers import Run, differing, run
from torch import Tensor

import fzero
import gpt as byte_gpt
from fzero import P, groups, optim, sparse
from fzero.cost.allocator import measured_peak
from fzero.errors import SpecError
from fzero.sparse import sparse_ops

VOCAB, WIDTH, DEPTH, HEADS, TOKENS = 64, 16, 2, 4, 32
WINDOW = sparse.sliding_window(TOKENS, window=11, causal=True, block=8)
LAYOUTS = {
    "window": WINDOW,
    "fixed": sparse.fixed(
        HEADS, TOKENS, block=8, num_local_blocks=2, attention="unidirectional", different_layout_per_head=True,
        num_different_global_patterns=2,
    ),
    "bigbird": sparse.bigbird(HEADS, TOKENS, block=4, key=fzero.random.key(0)),
}  # fmt: skip
SHARD = {
    "blocks/*/qkv": P(None, groups("tp", 3)), "blocks/*/out": P("tp", None), "blocks/*/up": P(None, "tp"),
    "blocks/*/down": P("tp", None),
}  # fmt: skip


def attending(layout: sparse.BlockLayout) -> Callable[..., Tensor]:
    return lambda q, k, v: sparse.attention(q, k, v, layout)


def masked(layout: sparse.BlockLayout) -> Callable[..., Tensor]:
    mask = layout.tokens(HEADS)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def trained(attend: Callable[..., Tensor], mesh: dict[str, int] | None = None, steps: int = 2, **given: Any) -> Run:
    init, loss = cases.gpt(VOCAB, WIDTH, DEPTH, HEADS, attend)
    mesh = mesh or {"dp": 1}
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2), mesh=mesh, **given)
    world = int(torch.tensor(list(mesh.values())).prod())
    batch = lambda rank, step: cases.tokens(4, TOKENS, VOCAB, rank + 10 * step)  # noqa: E731
    return run(spec, init(fzero.random.key(0)), batch, world=world, steps=steps)


def calls(found: Run) -> list[torch.fx.Node]:
    names = ("fzero::block_sparse_attention", "fzero::block_sparse_attention_backward")
    nodes = [
        n for program in found.lowered.programs.values() for gm in program.segments.values() for n in gm.graph.nodes
    ]
    return [n for n in nodes if getattr(getattr(n.target, "_schema", None), "name", "") in names]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(1)
def test_a_step_has_the_loss_of_the_masked_one(name: str) -> None:
    layout = LAYOUTS[name]
    found, wanted = trained(attending(layout), steps=5), trained(masked(layout), steps=5)
    assert len({str(node.target) for node in calls(found)}) == 2, "the op and its backward"
    for a, b in zip(found.losses(), wanted.losses(), strict=True):
        assert abs(a - b) <= 1e-5


def test_every_stage_has_the_same_bits() -> None:
    attend = attending(LAYOUTS["fixed"])
    plain = trained(attend, {"dp": 2}, zero=0)
    for given in ({"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "remat": "full"}):
        assert differing(trained(attend, {"dp": 2}, **given).final, plain.final) == [], given


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(1)
def test_heads_are_sharded(name: str) -> None:
    """Each rank calls the op on its heads, with its rows of the table."""
    attend = attending(LAYOUTS[name])
    whole, found = trained(attend), trained(attend, {"dp": 1, "tp": 2}, shard=SHARD, zero=0)
    for node in calls(found):
        q = node.args[1 if "backward" in str(node.target) else 0]
        assert q.meta["val"].shape[1] == HEADS // 2  # type: ignore[union-attr]
    for path, x in whole.final.items():
        torch.testing.assert_close(found.final[path], x, rtol=1e-4, atol=1e-5)


def test_a_pipeline_has_the_bits_of_one_rank() -> None:
    attend = attending(WINDOW)
    given = {"microbatches": 4, "reduce": "end"}
    plain = trained(attend, {"dp": 1}, **given)
    piped = trained(attend, {"pp": 2, "dp": 1}, pipeline="1f1b", transfers="p2p", **given)
    assert differing(piped.final, plain.final) == []


def test_a_step_may_choose_its_blocks() -> None:
    """As a learned attention does: the table is computed from the queries and keys, for each batch and head."""
    block, rows = 8, TOKENS // 8

    def choose(q: Tensor, k: Tensor) -> Tensor:
        pooled = [x.detach().unflatten(2, (-1, block)).mean(3) for x in (q, k)]
        scores = pooled[0] @ pooled[1].transpose(2, 3)
        chosen = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf).topk(2, dim=-1)
        return chosen.indices.masked_fill(chosen.values.isinf(), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse.attention(q, k, v, sparse.from_columns(choose(q, k), block=block, causal=True))

    def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = (choose(q, k)[..., None] == torch.arange(rows)).any(3)
        wide = chosen.repeat_interleave(block, 2).repeat_interleave(block, 3).tril()
        seen = wide.any(3, keepdim=True)
        return torch.where(seen, F.scaled_dot_product_attention(q, k, v, attn_mask=wide | ~seen), 0)

    wanted = trained(by_mask, steps=3)
    for found in (trained(attend, steps=3), trained(attend, {"dp": 1, "tp": 2}, shard=SHARD, zero=0, steps=3)):
        for a, b in zip(found.losses(), wanted.losses(), strict=True):
            assert abs(a - b) <= 1e-5


def test_a_layout_may_be_made_within_the_loss() -> None:
    outside = trained(attending(sparse.longformer(HEADS, TOKENS, block=4)))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse.attention(q, k, v, sparse.longformer(HEADS, q.shape[2], block=4))

    assert differing(trained(attend).final, outside.final) == []


def test_padding_and_documents() -> None:
    """Packed documents are attended to as if each stood alone."""
    q, k, v = torch.randn(3, 1, 2, 32, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    documents = torch.tensor([[5] * 10 + [2] * 13 + [7] * 9])
    padding = torch.arange(32)[None] >= 28
    layout = sparse.sliding_window(32, window=6, block=8)
    out = sparse.attention(q, k, v, layout, documents=documents, key_padding_mask=padding)
    for start, stop in ((0, 10), (10, 23), (23, 28)):
        own = [x[:, :, start:stop] for x in (q, k, v)]
        alone = F.scaled_dot_product_attention(*own, attn_mask=layout.tokens()[0, start:stop, start:stop])
        torch.testing.assert_close(out[:, :, start:stop], alone, rtol=1e-5, atol=1e-6)
    assert (out[:, :, 28:] == 0).all()


def test_memory_is_linear_in_the_length() -> None:
    def peak(tokens: int) -> int:
        q, k, v = torch.randn(3, 1, 2, tokens, 32).unbind(0)
        own = [x.requires_grad_() for x in (q, k, v)]
        layout = sparse.sliding_window(tokens, window=64, causal=True, block=32)
        return measured_peak(lambda: torch.autograd.grad(sparse.attention(*own, layout).sum(), own))[1]

    short, long = peak(2048), peak(8192)
    assert long <= 4.2 * short


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0.1.*Drop the result instead: fzero.random.dropout\(key, out, p\)"),
        (
            {"layout": sparse.dense(1, 48)},
            "q has 32 tokens, the layout 48; .*or 16 tokens of padding and a key_padding",
        ),
        ({"layout": sparse.dense(1, 16)}, "q has 32 tokens, the layout 16; needed a layout of 32 tokens$"),
        ({"documents": torch.zeros(1, 32)}, r"documents is torch.float32 \(1, 32\); needed int \(1, 32\)"),
        ({"key_padding_mask": torch.zeros(1, 32)}, r"key_padding_mask is torch.float32 .* True at padding"),
        ({"k": torch.zeros(1, 2, 32, 5)}, r"k has shape \(1, 2, 32, 5\); needed \(1, 2, 32, 4\)"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    given = {name: torch.zeros(1, 2, 32, 4) for name in "qkv"} | {"layout": sparse.dense(1, 32)} | change
    with pytest.raises(SpecError, match=said):
        sparse.attention(**given)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        q = x * p["w"]
        out = sparse.attention(q, q, q, sparse.dense(1, 8, block=4))
        return torch.autograd.grad(out.sum(), q, create_graph=True)[0].square().sum() * p["w"].sum()

    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1))
    with pytest.raises(SpecError, match="a gradient of its gradient is asked for"):
        fzero.lower(spec, {"w": torch.ones(2)}, torch.ones(1, 1, 8, 2))


def test_derivatives_that_it_has_not_are_refused() -> None:
    """torch takes a missing forward-mode derivative to be 0, and has no torch.func.grad of a registered backward."""
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, 8).unbind(0)

    def own(x: Tensor) -> Tensor:
        return sparse.attention(x, k, v, WINDOW)

    with pytest.raises(SpecError, match=r"forward-mode derivative .* which it has not. Take F.scaled_dot"):
        torch.func.jvp(own, (q,), (q,))
    with pytest.raises(SpecError, match=r"torch.func.grad of it is asked for. Take torch.autograd.grad"):
        torch.func.grad(lambda x: own(x).sum())(q)
    assert torch.equal(torch.vmap(own)(q[None])[0], own(q))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.zeros(4)}, r"q is of shape \(4,\); needed \(batch, heads, tokens, dim\)"),
        ({"k": [1.0]}, r"k is a list; needed \(batch, heads, tokens, dim\)"),
        ({"layout": WINDOW.tokens()}, r"layout is a Tensor; needed .* sparse.from_mask\(mask\)"),
        ({"documents": torch.zeros(1, TOKENS, dtype=torch.bool)}, r"documents is torch.bool .*; needed int \(1, 32\)"),
        ({"documents": [0]}, r"documents is a list; needed a tensor of shape \(1, 32\)"),
        ({"layout": sparse.from_columns(torch.tensor([[[[0, 4]]] * 1]).expand(1, 1, 4, 2), block=8)},
         r"row 0 of the table is \[0, 4\]; needed blocks from 0 to 3"),
    ],
)  # fmt: skip
def test_what_is_no_operand_is_refused(change: dict[str, Any], said: str) -> None:
    q, k, v = torch.zeros(3, 1, HEADS, TOKENS, 8).unbind(0)
    with pytest.raises(SpecError, match=said):
        sparse.attention(**{"q": q, "k": k, "v": v, "layout": WINDOW, **change})


@pytest.mark.acceptance
def test_a_model_of_8192_tokens_follows_the_masked_one() -> None:
    """Two layers, twenty steps, on one core."""
    tokens = 8192
    layout = sparse.sliding_window(tokens, window=256, causal=True)
    mask = layout.tokens()[0]
    params = byte_gpt.init_gpt(fzero.random.key(0), byte_gpt.sizes(tokens)["tiny"])
    losses = []
    for attend in (
        lambda q, k, v: sparse.attention(q, k, v, layout),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ):
        loss = functools.partial(byte_gpt.loss_fn, attend=attend)
        state = fzero.init(params, fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3)))
        own = []
        for number in range(20):
            state = fzero.step(state, cases.tokens(1, tokens, 64, number))
            own.append(float(state.metrics["loss"]))
        losses.append(own)
    assert losses[0][-1] < losses[0][0] - 0.3
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= 1e-4


def mutated(args: tuple[Any, ...], at: int) -> list[tuple[Any, ...]]:
    """Calls that mean something else: of other operands, bounds and scales. at: where q is."""
    q, k, v = args[at : at + 3]
    block, left, right, scale = args[at + 5 :]
    found = [(*args[:at], *three, *args[at + 3 :]) for three in ((k, q, v), (q, v, k), (k, k, v), (q, k, k), (v, k, v))]
    numbers = [(block, x, right, scale) for x in range(-1, 32) if x != left]
    numbers += [(block, left, x, scale) for x in range(-1, 32) if x != right]
    numbers += [(block, left, right, scale * x) for x in (-1.0, 0.0, 0.5, 2.0, 1.0001)]
    return found + [(*args[: at + 5], *four) for four in numbers]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(1)
def test_a_program_that_means_something_else_is_refused(name: str) -> None:
    """Mutants of operands, windows and scales, of the op and of its backward."""
    init, loss = cases.gpt(VOCAB, WIDTH, 2, HEADS, attending(LAYOUTS[name]))
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1))
    lowered = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(2, TOKENS, VOCAB))
    nodes = [n for gm in lowered.program.segments.values() for n in gm.graph.nodes]
    count = 0
    for node in nodes:
        if "block_sparse_attention" in str(node.target):
            kept = node.args
            for args in mutated(kept, int("backward" in str(node.target))):
                node.args = args
                with pytest.raises((fzero.VerifyError, SpecError)):
                    fzero.verify(lowered.roles)
                count += 1
            node.args = kept
    fzero.verify(lowered.roles)
    assert count >= 130


def test_both_ops_have_a_full_row() -> None:
    for op in (sparse_ops.FORWARD, sparse_ops.BACKWARD):
        row = fzero.ir.op_info.of(op).stated()
        assert {"placements", "fake", "out_form", "workspace", "flops", "attends"} <= row.keys()
