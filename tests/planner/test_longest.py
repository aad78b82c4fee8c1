"""`fzero.longest`: the oracle is `fzero.lower` under the same budget: it takes the answer and refuses a step more."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F

import fzero
from fzero import sparse
from fzero.errors import SpecError

SGD = fzero.optim.sgd(0.1)
V, D = 2048, 16


def loss(p: Any, b: Any) -> torch.Tensor:
    h = torch.tanh(F.embedding(b["x"], p["embed"]) @ p["w"])
    return F.cross_entropy((h @ p["embed"].T).flatten(0, 1), b["y"].flatten())


LIKE = {"embed": torch.empty(V, D, device="meta"), "w": torch.empty(D, D, device="meta")}


def batch(length: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1, length, dtype=torch.int64, device="meta") for name in "xy"}


@pytest.mark.parametrize(
    ("given", "start"), [({}, 16), ({"loss_chunks": 8}, 4096), ({"remat": "full", "prefetch": 0}, 512)], ids=str
)
@pytest.mark.sampled(1)
def test_the_answer_fits_and_a_step_more_does_not(given: dict[str, Any], start: int) -> None:
    budget = 3_000_000
    spec = fzero.Spec(loss=loss, optimizer=SGD, **given)
    found = fzero.longest(spec, LIKE, batch(start), device_bytes=budget)
    assert found.refused == found.length + 16
    fits = fzero.Spec(loss=loss, optimizer=SGD, device_bytes=budget, **given)
    assert fzero.lower(fits, LIKE, batch(found.length), world_size=1).memory.peak == found.peak <= budget
    with pytest.raises(SpecError, match=rf"needs {found.needed:,} bytes of the device"):
        fzero.lower(fits, LIKE, batch(found.refused), world_size=1)
    assert str(found).startswith(f"{found.length:,} tokens need {found.peak:,} bytes of 3,000,000; ")


@pytest.mark.acceptance
def test_a_spec_may_follow_the_length() -> None:
    """The layout of a window is of one length; attention to all tokens by scores holds fewer of them."""
    init, _ = cases.gpt(64, 64, 1, 2)

    def windowed(length: int) -> fzero.Spec:
        layout = sparse.sliding_window(length, window=32, causal=True)
        _, own = cases.gpt(64, 64, 1, 2, attend=lambda q, k, v: sparse.attention(q, k, v, layout))
        return fzero.Spec(loss=own, optimizer=SGD, device_bytes=16_000_000)

    def scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    _, dense = cases.gpt(64, 64, 1, 2, attend=scored)
    like = fzero.tree.map(lambda x: x.to("meta"), init(fzero.random.key(0)))
    like["wpe"] = torch.empty(1 << 12, 64, device="meta")
    long = fzero.longest(windowed, like, batch(256), step=64)
    short = fzero.longest(fzero.Spec(loss=dense, optimizer=SGD, device_bytes=16_000_000), like, batch(256), step=64)
    assert long.length % 64 == 0
    assert long.length > short.length


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_bytes": 1000}, r"16 tokens need .* so none fit. The least that works is device_bytes="),
        ({}, r"device_bytes=None\): needed a positive int"),
        ({"device_bytes": 1_000_000, "dim": 2}, r"no tensor has that dim; needed tensors of one length along dim 2"),
        ({"device_bytes": 1_000_000, "step": 0}, r"step=0\): needed a positive int"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        fzero.longest(fzero.Spec(loss=loss, optimizer=SGD), LIKE, batch(64), **given)


@pytest.mark.parametrize(
    ("spec", "said"), [(None, "spec=a NoneType"), (lambda length: 3, "spec=a function that returns a int")]
)
def test_what_is_no_spec_is_refused(spec: Any, said: str) -> None:
    with pytest.raises(SpecError, match=rf"{said}\): needed a Spec, or a function of the length"):
        fzero.longest(spec, LIKE, batch(64), device_bytes=1_000_000)


def test_lengths_that_differ_are_refused_by_name() -> None:
    uneven = {**batch(64), "y": torch.zeros(1, 32, dtype=torch.int64, device="meta")}
    with pytest.raises(SpecError, match=r"batch\['x'\] has 64, batch\['y'\] has 32; needed tensors of one length"):
        fzero.longest(fzero.Spec(loss=loss, optimizer=SGD), LIKE, uneven, device_bytes=1_000_000)


def test_an_error_of_a_length_says_which_was_tried() -> None:
    """A table of positions ends the search: the error was torch's of two sizes, with a length that nobody gave."""

    def positions(p: Any, b: Any) -> torch.Tensor:
        return loss(p, b) + (F.embedding(b["x"], p["embed"]) * p["at"][: b["x"].shape[1]]).sum()

    like = {**LIKE, "at": torch.empty(64, D, device="meta")}
    with pytest.raises(RuntimeError) as caught:
        fzero.longest(fzero.Spec(loss=positions, optimizer=SGD), like, batch(48), device_bytes=1 << 30)
    (note,) = [note for note in caught.value.__notes__ if "fzero.longest" in note]
    assert note.startswith("fzero.longest tried 96 tokens: dim 1 of the batch's tensors")


def test_memory_that_does_not_grow_is_refused() -> None:
    spec = fzero.Spec(loss=lambda p, b: p["w"].square().sum() + b["x"][:, 0].sum(), optimizer=SGD)
    with pytest.raises(SpecError, match="Needed a step whose memory grows with the length"):
        fzero.longest(spec, {"w": LIKE["w"]}, batch(64), device_bytes=1 << 40)
