"""fzero.data.packed: no token is lost, repeated or seen by another document, and rows resume as any data set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.data import batches, packed

SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=40).filter(any)


def texts(sizes: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, so that each can be found again."""
    ends = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(range(1 + end, 1 + end + size)) for end, size in zip(ends, sizes, strict=True)]


def pieces(row: dict[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each document of a row, by its numbers; what is padding must say so."""
    numbers = row["documents"]
    found = [row["input_ids"][numbers == n] for n in range(int(numbers.max()) + 1)]
    for part, n in zip(found, range(len(found)), strict=True):
        assert row["position_ids"][numbers == n].tolist() == list(range(len(part)))
    assert not row["input_ids"][numbers < 0].any()
    return [part.tolist() for part in found]


def rows_by_hand(sizes: list[int], length: int) -> int:
    """How many rows best fit takes, the longest first, by looking at all rows each time."""
    free: list[int] = []
    for size in sorted((min(length, s - start) for s in sizes for start in range(0, s, length)), reverse=True):
        fitting = [room for room in free if room >= size]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else length) - size)
    return len(free)


@given(SIZES, st.integers(1, 16), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_each_token_is_in_one_row_and_rows_are_as_few_as_best_fit_has(sizes: list[int], length: int, seed: int) -> None:
    rows = packed(texts(sizes), length, lengths=sizes, seed=seed)
    assert isinstance(rows, fzero.data.Packed)
    every = [part for row in map(rows.__getitem__, range(len(rows))) for part in pieces(row)]
    assert sorted(every) == sorted(t[a : a + length] for t in texts(sizes) for a in range(0, len(t), length))
    assert len(rows) == rows_by_hand(sizes, length)
    assert rows.fill == pytest.approx(sum(sizes) / (len(rows) * length))


@given(SIZES, st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_a_stream_is_packed_in_its_order(sizes: list[int], length: int) -> None:
    rows = list(packed(iter(texts(sizes)), length))
    every = [part for row in rows for part in pieces(row)]
    assert every == [t[a : a + length] for t in texts(sizes) for a in range(0, len(t), length)]
    assert all(len(row["input_ids"]) == length for row in rows)
    for row, after in itertools.pairwise(rows):  # the next document did not fit
        assert int((row["documents"] < 0).sum()) < len(pieces(after)[0])


@pytest.mark.parametrize("stream", [False, True])
def test_ranks_have_the_rows_of_one_order_and_a_position_resumes(stream: bool) -> None:
    sizes = [3, 9, 4, 2, 12, 8, 11, 1, 5, 7]
    known: dict[str, Any] = {} if stream else {"lengths": sizes}

    def rows(**more: Any) -> fzero.data.Rows:
        return batches(packed(texts(sizes), 12, **known), 4, **more)

    one = rows()
    straight = [next(one) for _ in range(4)]
    assert one.position == 16
    ranks = [rows(rank=rank, world_size=2, position=8) for rank in (0, 1)]
    for batch in straight[2:]:
        halves = [next(rank) for rank in ranks]
        for name in ("input_ids", "documents", "position_ids"):
            assert torch.equal(torch.cat([half[name] for half in halves]), batch[name])
            assert halves[0][name].shape == halves[1][name].shape == (2, 12)


def test_attention_to_packed_documents_is_that_to_each_alone() -> None:
    """torch's own attention of each document by itself is the oracle."""
    sizes, length = [5, 16, 9, 20, 3], 32
    row = packed(texts(sizes), length, lengths=sizes)[0]  # type: ignore[index]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 8, dtype=torch.float64).unbind(0)
    layout = fzero.sparse.sliding_window(length, window=length, causal=True, block=16)
    out = fzero.sparse.attention(q, k, v, layout, documents=row["documents"][None])
    for n in range(int(row["documents"].max()) + 1):
        own = row["documents"] == n
        alone = F.scaled_dot_product_attention(q[:, :, own], k[:, :, own], v[:, :, own], is_causal=True)
        torch.testing.assert_close(out[:, :, own], alone)
    assert not out[:, :, row["documents"] < 0].any()


def test_a_training_with_packed_rows_resumes_bitwise(tmp_path: Any) -> None:
    sizes = [3, 9, 4, 2, 12, 8, 11, 1]
    spec = fzero.Spec(loss=_loss, optimizer=fzero.optim.adamw(1e-2))

    def train(folder: Any, steps: int) -> torch.Tensor:
        with fzero.Checkpointer(folder, every=2) as saver:
            state = saver.resume({"table": torch.ones(64, 64)}, spec)
            data = packed(texts(sizes), 12, lengths=sizes, values={"input_ids": 0})
            rows = batches(data, 2, position=saver.extra.get("position", 0))
            while state.step < steps:
                state = fzero.step(state, next(rows))
                saver.after(state, {"position": rows.position})
        return state.params["table"].full()

    train(tmp_path / "cut", 4)
    assert torch.equal(train(tmp_path / "cut", 8), train(tmp_path / "whole", 8))


def _loss(params: Any, batch: Any) -> fzero.Mean:
    """Next tokens within documents: no target crosses into the next one."""
    targets = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)[:, 1:]
    targets = targets.masked_fill(batch["documents"][:, 1:] < 0, -100)
    logits = params["table"][batch["input_ids"][:, :-1]]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return fzero.Mean(total, (targets != -100).sum())


def test_leaves_of_a_document_are_padded_by_their_own_values() -> None:
    documents = [{"input_ids": [1, 2], "labels": [3, 4], "vector": torch.ones(2, 3)}]
    row = packed(documents, 4, lengths=[2], values={"input_ids": 9, "labels": -100, "vector": 0.5})[0]  # type: ignore[index]
    assert row["input_ids"].tolist() == [1, 2, 9, 9]
    assert row["labels"].tolist() == [3, 4, -100, -100]
    assert row["vector"].shape == (4, 3)
    assert row["vector"][2:].eq(0.5).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed([[1]], 0), "packed: length=0: needed a positive int"),
        (lambda: packed(3, 4), r"packed\(dataset=int\): needed documents to iterate over"),
        (lambda: packed(iter([[1]]), 4, lengths=[1]), "needs a data set with len"),
        (lambda: packed([[1]], 4, lengths=[1, 2]), "for each of the 1 documents"),
        (lambda: packed([[], []], 4, lengths=[0, 0]), "for each of the 2 documents"),
        (lambda: packed([[1]], 4, lengths=[1], seed=-1), r"seed % 2\*\*64"),
        (lambda: packed([[1, 2]], 4, lengths=[1])[0], "document 0 has 2 tokens, and lengths= says 1"),
        (lambda: next(iter(packed(["text"], 4))), "a document is 'text'.*Leave other columns out"),
        (lambda: next(iter(packed([{"a": [1], "b": [1, 2]}], 4))), "the same number of tokens"),
        (lambda: next(iter(packed([{"documents": [1]}], 4))), "'documents', which packing makes"),
        (lambda: next(iter(packed([{"a": [1]}, {"b": [1]}], 4))), "documents have different leaves"),
    ],
)  # fmt: skip
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(fzero.DataError, match=message):
        call()
