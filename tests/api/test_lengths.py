"""Batches of few lengths: nothing is lost or repeated, and all ranks have the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capturing import said
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.data import ByLength, by_length, pad_to
from fzero.errors import DataError

SIZES = [3, 9, 4, 2, 12, 8, 11, 1, 5, 5, 16, 7, 2]
TEXTS = [
    {"x": torch.full((n,), i), "y": torch.full((n, 2), float(i)), "label": torch.tensor(i)} for i, n in enumerate(SIZES)
]
RULES = {"x": -1, "y": 0.5}


def batches(size: int = 4, **given: Any) -> ByLength:
    return by_length(TEXTS, SIZES, size, **{"to": [4, 8, 16], "values": RULES, "seed": 5, **given})


# --- pad_to -----------------------------------------------------------------------------------------------------------


def test_each_leaf_goes_to_its_own_length_with_its_own_value() -> None:
    batch = {"in": {"x": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5, dtype=torch.bool)},
             "out": torch.ones(2, 9), "label": torch.tensor([1, 2]), "name": "a"}  # fmt: skip
    padded = pad_to(batch, 8, {"in/x": 7, "in/mask": False, "out": -100})
    assert padded["in"]["x"].tolist() == [[1] * 5 + [7] * 3] * 2
    assert padded["in"]["mask"].tolist() == [[True] * 5 + [False] * 3] * 2
    assert padded["out"].tolist() == [[1.0] * 9 + [-100.0] * 7] * 2
    assert padded["label"] is batch["label"]
    assert padded["name"] == "a"
    assert pad_to(batch, [5, 16])["in"]["x"] is batch["in"]["x"], "what fits is not copied"


def test_choices_have_their_length_in_the_last_dim() -> None:
    """The complaint: multiple choice has (rows, choices, tokens), and its tokens were not padded."""
    batch = {"input_ids": torch.ones(2, 4, 5), "labels": torch.tensor([1, 2])}
    assert pad_to(batch, 8, {"input_ids": 0}, dim=-1)["input_ids"].shape == (2, 4, 8)
    assert pad_to(batch, 8, {"input_ids": 0}, dim=2)["input_ids"].shape == (2, 4, 8)


def test_what_cannot_be_padded_is_refused_by_name() -> None:
    x = {"x": torch.ones(2, 5)}
    said(DataError, lambda: pad_to(x, [2, 4]), "batch['x'] has length 5", "[2, 4]", "give a longer one")
    said(DataError, lambda: pad_to(x, 8, {"xs": 0}), "the rule 'xs' matches no leaf", "Did you mean 'x'?")
    said(DataError, lambda: pad_to({"n": torch.ones(2)}, 8), "no leaf of the batch has such a dim", "Give the dim")
    said(DataError, lambda: pad_to(x, 8, {"x": "0"}), "'x' is padded with '0'", "needed a number")
    said(DataError, lambda: pad_to({"x": x["x"].long()}, 8, 0.5), "'x' is torch.int64, and 0.5 is no such number")
    for leaf, value in ((x["x"].byte(), -100), (x["x"].long(), float("nan")), (x["x"].bool(), 2)):
        said(
            DataError, lambda leaf=leaf, value=value: pad_to({"x": leaf}, 8, value), "is no such number. Give an int in"
        )
    for to in (0, -1, [], [0], 2.5):
        said(DataError, lambda to=to: pad_to(x, to), "needed a positive int")


def test_padded_lengths_are_few_programs() -> None:
    def loss(p: Any, b: Any) -> Any:
        return fzero.Mean(((b["x"] @ p["w"]).tanh() * b["mask"]).sum(), b["mask"].sum())

    state = fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))
    for length in (3, 5, 8, 9, 2, 12, 6):
        batch = {"x": torch.linspace(0, 1, 2 * length * 3).view(2, length, 3), "mask": torch.ones(2, length)}
        state = fzero.step(state, pad_to(batch, 8))
        wanted = (batch["x"] @ torch.ones(3)).tanh().mean()
        assert torch.allclose(state.metrics["loss"], wanted, atol=1e-6)
    assert len(state.runtime.programs) == 2


# --- by_length --------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 40), min_size=6, max_size=60), size=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_each_sample_once(sizes: list[int], size: int, seed: int) -> None:
    data = [torch.full((n,), i) for i, n in enumerate(sizes)]
    given = by_length(data, sizes, size, to=[8, 16, 64], seed=seed)
    for number in range(2):
        rows = given.epoch(number)
        assert rows.shape == (len(sizes) // size, size)
        assert len(set(rows.reshape(-1).tolist())) == rows.size
        wasted = sum(int(given.padded[row].max() != given.padded[i]) for row in rows for i in row)
        assert wasted <= 2 * (size - 1), "only what is left of a length goes to the next"


def test_samples_arrive_whole_and_padded() -> None:
    seen: list[int] = []
    given = batches()
    for _ in range(3):
        batch = next(given)
        length = batch["x"].shape[1]
        assert length in (4, 8, 16)
        for x, y, label in zip(batch["x"], batch["y"], batch["label"], strict=True):
            n = SIZES[int(label)]
            assert x.tolist() == [int(label)] * n + [-1] * (length - n)
            assert y.tolist() == [[float(label)] * 2] * n + [[0.5] * 2] * (length - n)
            seen.append(int(label))
    assert len(set(seen)) == 12
    assert given.position == given.samples == 12


def test_the_position_is_all_of_its_state_and_epochs_differ() -> None:
    given = batches()
    all_of = [next(given) for _ in range(9)]
    for start in (0, 1, 4, 8):
        again = batches(position=4 * start)
        for batch in all_of[start:]:
            assert all(torch.equal(batch[name], other) for name, other in next(again).items())
    labels = [torch.cat([b["label"] for b in all_of[i : i + 3]]).tolist() for i in (0, 3, 6)]
    assert labels[0] != labels[1] != labels[2]
    assert batches(seed=6).epoch(0).tolist() != given.epoch(0).tolist()
    assert len({frozenset(epoch) for epoch in labels}) > 1, "another sample is left out each time"


@pytest.mark.parametrize("mesh", [None, {"pp": 2, "dp": 2}], ids=["dp", "pp"])
def test_ranks_have_the_same_shapes_and_the_parts_of_one_batch(mesh: Any) -> None:
    world = 4
    ranks = [batches(rank=r, world_size=world, mesh=mesh) for r in range(world)]
    whole = batches()
    for _ in range(7):
        parts, batch = [next(r) for r in ranks], next(whole)
        assert len({tuple(part["x"].shape) for part in parts}) == 1
        distinct = parts[:2] if mesh else parts
        assert torch.equal(torch.cat([part["x"] for part in distinct]), batch["x"])


def test_a_collator_of_ones_own_is_padded_after() -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        rows = [sample["x"] for sample in samples]
        return {"x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)}

    own = by_length(TEXTS, SIZES, 4, to=[4, 8, 16], values={"x": -1}, seed=5, collate=collate)
    for plain, batch in zip([next(batches()) for _ in range(1)], [next(own)], strict=True):
        assert torch.equal(plain["x"], batch["x"])


def test_arguments_are_checked_by_name() -> None:
    said(DataError, lambda: batches(5, world_size=2, rank=0), "size=5 cannot be cut for 2 ranks")
    said(DataError, lambda: batches(position=3), "position=3", "a multiple of batch_size=4")
    said(DataError, lambda: batches(40), "13 samples make no batch of 40")
    said(DataError, lambda: batches(to=[4, 8]), "has length 9")
    said(DataError, lambda: batches(dim=0), "dim=0", "the dim of the rows")
    said(DataError, lambda: batches(seed=-1), "seed=-1")
    said(DataError, lambda: by_length(TEXTS, SIZES[:3], 2, to=8), "an int of at least 0 for each of the 13 samples")
    short = by_length(TEXTS, [1] * 13, 4, to=[2], values=RULES)
    said(
        DataError,
        lambda: next(short),
        "dataset[",
        "]['x'] has length",
        "none of [2] holds",
        "lengths=) gives no sample",
    )
    bare = by_length([torch.arange(7)], [4], 1, to=[4, 8])
    said(DataError, lambda: next(bare), "dataset[0] has length 7, which none of [4] holds", "lengths=)")
    made = by_length(TEXTS, [1] * 13, 1, to=[2], values={"x": -1}, collate=lambda rows: {"x": rows[0]["x"][None]})
    said(DataError, lambda: [next(made) for _ in range(13)], "batch['x'] has length", "lengths=)")
