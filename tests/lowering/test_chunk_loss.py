"""chunk_loss and chunk_body, `Spec(loss_chunks=)`: the oracle is a loop over chunks in plain PyTorch, whose gradients
autograd sums.

A chunk that is taken twice, left out, shifted by a token or summed in another order is another result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Run, run
from torch import Tensor

import fzero
from fzero.errors import SpecError
from fzero.planner import NothingFitsError

V, D, S = 96, 16, 24
SGD = fzero.optim.sgd(1.0)
IGNORED = -100
Params = dict[str, Tensor]


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embed": (V, D), "w": (D, D), "head": (V, D), "bias": (V,)}
    return {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}


def batch(rank: int = 0, step: int = 0, rows: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randint(0, V, (2, rows, S), generator=draw)
    y[:, 5:8] = IGNORED
    return {"x": x, "y": y}


def body(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(F.embedding(x, p["embed"]) @ p["w"])


def pieces(chunks: int, *values: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(value.chunk(chunks, 1) for value in values), strict=True))


# --- losses, and the same as a loop over chunks: (loss(p, b), by hand(p, b, chunks) -> what it is the gradient of)


def mean(p: Params, b: Any) -> Tensor:
    logits = F.linear(body(p, b["x"]), p["head"], p["bias"])
    return F.cross_entropy(logits.flatten(0, 1), b["y"].flatten())


def mean_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    totals = [
        F.cross_entropy(F.linear(h, p["head"], p["bias"]).flatten(0, 1), y.flatten(), reduction="sum")
        for h, y in pieces(chunks, body(p, b["x"]), b["y"])
    ]
    return sum(totals[1:], totals[0]) / (b["y"] != IGNORED).sum()


def tied(p: Params, b: Any) -> Tensor:
    """A tied embedding, logits cut to 30, classes in dim 1, and a term of the normalisers."""
    logits = 30 * torch.tanh(body(p, b["x"]) @ p["embed"].mT / 30)
    normal = torch.where(b["y"] == IGNORED, 0.0, logits.logsumexp(-1))
    return F.cross_entropy(logits.mT, b["y"], reduction="sum") + 1e-2 * (normal**2).sum()


def tied_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    found = []
    for h, y in pieces(chunks, body(p, b["x"]), b["y"]):
        logits = 30 * torch.tanh(h @ p["embed"].mT / 30)
        normal = torch.where(y == IGNORED, 0.0, logits.logsumexp(-1))
        found.append((F.cross_entropy(logits.mT, y, reduction="sum"), (normal**2).sum()))
    first, second = zip(*found, strict=True)
    return sum(first[1:], first[0]) + 1e-2 * sum(second[1:], second[0])


def shifted(p: Params, b: Any) -> Tensor:
    """Each token's logits against the next token, in numbers of 32 bits."""
    logits = (body(p, b["x"]) @ p["head"].T).float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), b["x"][:, 1:].reshape(-1))


def shifted_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    totals = []
    for h, y in pieces(chunks, body(p, b["x"]), F.pad(b["x"][:, 1:], (0, 1), value=IGNORED)):
        logits = (h @ p["head"].T).float()
        totals.append(F.cross_entropy(logits.reshape(-1, V), y.reshape(-1), reduction="sum"))
    return sum(totals[1:], totals[0]) / b["x"][:, 1:].numel()


def weighed(p: Params, b: Any) -> Tensor:
    """Log probabilities that are gathered, and weighed by token."""
    each = -(body(p, b["x"]) @ p["head"].T).log_softmax(-1).gather(-1, b["x"][..., None])[..., 0]
    weight = (b["y"] % 3).to(each.dtype)
    return (each * weight).sum() / weight.sum()


def weighed_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    weight, totals = (b["y"] % 3).to(p["w"].dtype), []
    for h, x, w in pieces(chunks, body(p, b["x"]), b["x"], weight):
        each = -(h @ p["head"].T).log_softmax(-1).gather(-1, x[..., None])[..., 0]
        totals.append((each * w).sum())
    return sum(totals[1:], totals[0]) / weight.sum()


def pairs(p: Params, b: Any) -> Tensor:
    """Two labels of half the vocabulary for each token: rows of one token lie side by side."""
    logits = (body(p, b["x"]) @ p["head"].T).unflatten(-1, (2, V // 2)).flatten(0, 2)
    labels = torch.stack([b["x"], b["y"].clamp(min=0)], -1) % (V // 2)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def pairs_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    totals = []
    for h, x, y in pieces(chunks, body(p, b["x"]), b["x"], b["y"]):
        labels = torch.stack([x, y.clamp(min=0)], -1) % (V // 2)
        logits = (h @ p["head"].T).unflatten(-1, (2, V // 2)).flatten(0, 2)
        totals.append(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
    return sum(totals[1:], totals[0])


def unreduced(p: Params, b: Any) -> Tensor:
    """A cross entropy of each token, weighed by a mask and divided by its sum."""
    logits, weight = body(p, b["x"]) @ p["head"].T, (b["y"] % 3).to(p["w"].dtype)
    each = F.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), reduction="none")
    return (each.view_as(weight) * weight).sum() / weight.sum()


def unreduced_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    weight, totals = (b["y"] % 3).to(p["w"].dtype), []
    for h, y, w in pieces(chunks, body(p, b["x"]), b["y"], weight):
        each = F.cross_entropy((h @ p["head"].T).flatten(0, 1), y.flatten(), reduction="none")
        totals.append((each.view_as(w) * w).sum())
    return sum(totals[1:], totals[0]) / weight.sum()


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "mean": (mean, mean_by_hand), "tied": (tied, tied_by_hand), "shifted": (shifted, shifted_by_hand),
    "weighed": (weighed, weighed_by_hand), "pairs": (pairs, pairs_by_hand),
    "unreduced": (unreduced, unreduced_by_hand),
}  # fmt: skip


def after(loss: Callable[..., Any], chunks: int | None, **given: Any) -> Run:
    made = {"optimizer": SGD, "zero": 0, "allow_unused": True, **given}
    world = made.pop("world", 1)
    spec = fzero.Spec(loss=loss, loss_chunks=chunks, **made)
    return run(spec, params(), lambda rank, step: batch(rank, step, 2 * spec.microbatches), world=world, steps=1)


def expected(by_hand: Callable[..., Tensor], chunks: int, low: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the parameters after a step of plain gradient descent."""
    leaves = {name: x.requires_grad_() for name, x in params().items()}
    own = {name: x.bfloat16() if low else x for name, x in leaves.items()}
    loss = by_hand(own, batch(), chunks)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    new = {
        name: x.detach() if g is None else x.detach() - g for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return loss.detach(), new


@pytest.mark.parametrize("chunks", [1, 5, S])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(2)
def test_the_bits_are_those_of_a_loop_over_chunks(form: str, chunks: int) -> None:
    loss, by_hand = FORMS[form]
    found, (value, new) = after(loss, chunks), expected(by_hand, chunks)
    assert found.losses() == [float(value)]
    for name, leaf in new.items():
        assert torch.equal(found.final[f"params/{name}"], leaf), name


def test_products_in_16_bits_have_the_bits_of_the_loop() -> None:
    found, (value, new) = after(shifted, 4, precision="bf16"), expected(shifted_by_hand, 4, low=True)
    assert found.losses() == [float(value)]
    for name, leaf in new.items():
        assert torch.equal(found.final[f"params/{name}"], leaf), name


def test_a_mean_of_16_bit_terms_is_summed_in_32() -> None:
    """Their sum would not fit: 48 terms of 4.5, in bf16, round to steps of 1."""
    whole, found = after(mean, None, precision="bf16"), after(mean, 4, precision="bf16")
    assert found.losses()[0] == pytest.approx(whole.losses()[0], rel=4e-3)


def test_a_cross_entropy_of_each_token_runs_by_chunks() -> None:
    """It was refused: the count that torch's op gives beside the losses was taken to be read."""
    found, (value, _) = after(unreduced, 5), expected(unreduced_by_hand, 5)
    assert found.losses() == [float(value)]


def of_rows(p: Params, b: Any) -> Tensor:
    """Features of a product of rows: the gradient of all chunks' features is one of rows again."""
    rows = body(p, b["x"]).flatten(0, 1) @ p["w"]
    return F.cross_entropy((rows @ p["head"].T).unflatten(0, b["x"].shape).mT, b["y"], reduction="sum")


def of_rows_by_hand(p: Params, b: Any, chunks: int) -> Tensor:
    parts = pieces(chunks, body(p, b["x"]) @ p["w"], b["y"])
    totals = [F.cross_entropy((h @ p["head"].T).mT, y, reduction="sum") for h, y in parts]
    return sum(totals[1:], totals[0])


def test_features_that_are_rows_have_the_bits_of_the_loop() -> None:
    found, (value, new) = after(of_rows, 5), expected(of_rows_by_hand, 5)
    assert found.losses() == [float(value)]
    for name, leaf in new.items():
        assert torch.equal(found.final[f"params/{name}"], leaf), name


def exact(p: Params, b: Any) -> fzero.Mean:
    logits = body(p, b["x"]) @ p["embed"].T
    total = F.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), reduction="sum")
    return fzero.Mean(total, (b["y"] != IGNORED).sum())


WAYS: dict[str, dict[str, Any]] = {f"zero={zero}": {"zero": zero} for zero in (1, 2, 3)}
WAYS |= {"remat": {"zero": 3, "remat": "full"}, "nothing ahead": {"zero": 3, "prefetch": 0, "overlap": False}}


@pytest.mark.parametrize("loss", [mean, exact])
def test_no_stage_and_no_schedule_changes_a_bit(loss: Callable[..., Any]) -> None:
    """On two ranks, with two microbatches."""
    first = after(loss, 3, world=2, microbatches=2)
    for way, given in WAYS.items():
        other = after(loss, 3, world=2, microbatches=2, **given)
        assert other.losses() == first.losses(), way
        for name, leaf in first.final.items():
            assert torch.equal(other.final[name], leaf), (way, name)


def test_a_mean_over_microbatches_and_ranks_is_that_of_all_tokens() -> None:
    whole, found = after(exact, None, world=2, microbatches=2), after(exact, 3, world=2, microbatches=2)
    assert found.losses() == pytest.approx(whole.losses(), rel=1e-6)
    for name, leaf in whole.final.items():
        torch.testing.assert_close(found.final[name], leaf, rtol=1e-5, atol=1e-6)


SHARDS = {"rows": fzero.P("tp", None), "columns": fzero.P(None, "tp")}


@pytest.mark.parametrize("how", SHARDS)
def test_a_head_that_is_sharded(how: str) -> None:
    """By classes each rank has its part of the logits of a chunk; by features they are sums over ranks."""
    one = after(mean, 3)
    rules = {"head": SHARDS[how]} | ({"bias": fzero.P("tp")} if how == "rows" else {})
    two = after(mean, 3, world=2, mesh={"tp": 2}, shard=rules)
    assert two.losses() == pytest.approx(one.losses(), rel=1e-6)
    for name, leaf in one.final.items():
        torch.testing.assert_close(two.final[name], leaf, rtol=1e-5, atol=1e-6)


def layered(p: Any, b: Any) -> Tensor:
    h = F.embedding(b["x"], p["embed"])
    for layer in p["layers"]:
        h = h + torch.tanh(h @ layer["w"])
    return F.cross_entropy((h @ p["head"].T).flatten(0, 1), b["y"].flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_last_role_of_a_pipeline_has_the_chunks(schedule: str) -> None:
    leaves = params()
    deep = {
        "embed": leaves["embed"],
        "layers": [{"w": leaves["w"]}, {"w": leaves["w"].T.clone()}],
        "head": leaves["head"],
    }
    found = []
    for world, mesh in ((1, None), (2, {"pp": 2})):
        given: dict[str, Any] = {} if mesh is None else {"mesh": mesh, "pipeline": schedule}
        spec = fzero.Spec(loss=layered, optimizer=SGD, zero=0, microbatches=2, loss_chunks=3, **given)
        found.append(run(spec, deep, lambda rank, step: batch(rank, step, 4), world=world, steps=1))
    assert found[0].losses() == found[1].losses()
    for name, leaf in found[0].final.items():
        assert torch.equal(found[1].final[name], leaf), name


def test_the_logits_of_one_chunk_exist_at_a_time() -> None:
    """The planned peak falls by what the other chunks' logits and their gradient were."""
    peaks = {}
    for chunks in (None, 8):
        spec = fzero.Spec(loss=exact_head, optimizer=SGD, loss_chunks=chunks)
        lowered = fzero.lower(spec, wide_head(), LONG, world_size=1)
        peaks[chunks] = lowered.memory.peak
        wide = [x.meta["val"] for x in lowered.graph.regions[0].gm.graph.nodes if isinstance(x.meta.get("val"), Tensor)]
        assert max(x.numel() for x in wide) == 1024 * 4096 // (chunks or 1)
    assert peaks[8] < 0.3 * peaks[None]


def exact_head(p: Params, b: Any) -> Tensor:
    return F.cross_entropy((body(p, b["x"]) @ p["head"].T).flatten(0, 1), b["y"].flatten())


def test_two_heads_are_two_loops() -> None:
    def both(p: Params, b: Any) -> Tensor:
        return exact_head(p, b) + 0.5 * tied(p, b) / b["y"].numel()

    whole, found = after(both, None), after(both, 3)
    assert found.losses() == pytest.approx(whole.losses(), rel=1e-6)
    for name, leaf in whole.final.items():
        torch.testing.assert_close(found.final[name], leaf, rtol=1e-5, atol=1e-6)
    sizes = [x.meta["val"].shape for x in found.lowered.graph.regions[0].gm.graph.nodes if x.target is MM]
    assert max(shape[0] for shape in sizes if shape[1] == V) == 2 * S // 3


MM = torch.ops.aten.mm.default


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    leaves, buffers, apply = fzero.interop.from_module(transformers.AutoModelForCausalLM.from_config(config))

    def loss(p: Any, b: Any) -> Tensor:
        return apply(p, buffers, input_ids=b["x"], labels=b["y"], use_cache=False).loss

    found = {}
    for chunks in (None, 4):
        spec = fzero.Spec(loss=loss, optimizer=SGD, loss_chunks=chunks)
        found[chunks] = run(spec, leaves, batch, world=2, steps=1)
    assert found[4].losses() == pytest.approx(found[None].losses(), rel=1e-6)
    for name, leaf in found[None].final.items():
        torch.testing.assert_close(found[4].final[name], leaf, rtol=1e-5, atol=1e-6)
    nodes = found[4].lowered.graph.regions[0].gm.graph.nodes
    assert max(x.meta["val"].shape[0] for x in nodes if x.target is MM and x.meta["val"].shape[1] == V) == 2 * S // 4


# --- what is proposed, and what is refused

NAMES = ("embed", "w", "head")
LONG = {name: torch.zeros(1, 1024, dtype=torch.int64, device="meta") for name in "xy"}


def wide_head() -> Params:
    leaves = {**params(), "head": torch.empty(4096, D)}
    return {name: leaves[name].to("meta") for name in NAMES}


def test_a_budget_proposes_chunks() -> None:
    spec = fzero.Spec(loss=exact_head, optimizer=SGD, device_bytes=6_000_000)
    said = "Or say loss_chunks=32, which has other bits .* those of all tokens are 16,777,216 bytes"
    with pytest.raises(SpecError, match=said):
        fzero.lower(spec, wide_head(), LONG, world_size=1)
    taken = replace(spec, loss_chunks=32)
    assert fzero.lower(taken, wide_head(), LONG, world_size=1).memory.peak < 6_000_000
    with pytest.raises(SpecError) as caught:  # what has chunks, or no logits, is told nothing of them
        fzero.lower(replace(taken, device_bytes=100_000), wide_head(), LONG, world_size=1)
    assert "loss_chunks" not in str(caught.value)


def test_a_plan_that_fits_nowhere_proposes_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fzero.planner.nothing_fits.alternatives", lambda *_: ())  # the other ways out
    spec = fzero.Spec(loss=exact_head, optimizer=SGD, mesh={"dp": 1}, zero=0, microbatches=1, remat="none")
    with pytest.raises(NothingFitsError) as caught:
        fzero.plan(spec, wide_head(), LONG, world_size=1, hardware="h100", memory=6_000_000, most=2)
    first = caught.value.alternatives[0]
    assert first.words == "loss_chunks=32"
    assert first.row.peak <= 6_000_000


def of_all(p: Params, b: Any) -> Tensor:
    """The gradient of a square needs the sum of all tokens."""
    return exact_head(p, b) ** 2


def over_tokens(p: Params, b: Any) -> Tensor:
    logits = body(p, b["x"]) @ p["head"].T
    return F.cross_entropy(logits.flatten(0, 1), b["y"].flatten()) + logits.softmax(1).square().mean()


def of_weighted_classes(p: Params, b: Any) -> Tensor:
    logits = body(p, b["x"]) @ p["head"].T
    return F.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), weight=p["bias"].detach().exp())


def of_features(p: Params, b: Any) -> Tensor:
    return body(p, b["x"]).square().mean()


@pytest.mark.parametrize(
    ("loss", "chunks", "said"),
    [
        (of_all, 3, "does not run by chunks of the sequence: it reads"),
        (over_tokens, 3, "it needs all tokens at once. Write the loss token by token"),
        (of_weighted_classes, 3, "Use reduction='sum' and divide by the sum of the weights"),
        (of_features, 3, r"Spec\(loss_chunks=3\): no loss of a linear layer's logits was found"),
        (mean, S + 1, r"a sequence has 24 tokens. Needed at most loss_chunks=24"),
    ],
)
def test_what_is_refused(loss: Callable[..., Any], chunks: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        after(loss, chunks)


@pytest.mark.parametrize("chunks", [0, -2, 2.0, True])
def test_a_number_of_chunks_is_a_positive_int(chunks: Any) -> None:
    with pytest.raises(SpecError, match="loss_chunks"):
        fzero.Spec(loss=mean, optimizer=SGD, loss_chunks=chunks)


def test_an_evaluation_is_not_changed() -> None:
    """It has no gradients, and may return logits."""
    spec = fzero.Spec(loss=mean, optimizer=SGD, loss_chunks=3, allow_unused=True)
    state = fzero.init(params(), spec)
    shown = fzero.evaluate(state, batch(), lambda p, b: F.linear(body(p, b["x"]), p["head"], p["bias"]))
    assert torch.equal(shown, F.linear(body(params(), batch()["x"]), params()["head"], params()["bias"]))


# --- an MLP by chunks, as docs/long-sequences.md writes it ------------------------------------------------------------


def with_mlp(p: Params, b: Any, chunks: int, keep: Callable[..., Any]) -> Tensor:
    """`keep(fn)` says what is kept of each chunk's MLP."""

    def mlp(part: Tensor) -> Tensor:
        return F.gelu(part @ p["head"].T) @ p["head"]

    h = F.embedding(b["x"], p["embed"])
    h = h + torch.cat([keep(mlp)(part) for part in h.chunk(chunks, 1)], 1)
    return F.cross_entropy((torch.tanh(h @ p["w"]) @ p["embed"].T).flatten(0, 1), b["y"].flatten())


@pytest.mark.parametrize("chunks", [1, 5])
def test_an_mlp_by_chunks_has_the_bits_of_the_loop(chunks: int) -> None:
    found = after(lambda p, b: with_mlp(p, b, chunks, fzero.remat), None)
    value, new = expected(lambda p, b, chunks: with_mlp(p, b, chunks, lambda fn: fn), chunks)
    assert found.losses() == [float(value)]
    for name, leaf in new.items():
        assert torch.equal(found.final[f"params/{name}"], leaf), name
