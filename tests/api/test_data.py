"""Data: what stands at a position never depends on who asks, how much is asked for, or what was asked before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.data import DTYPES, Tokens, permute

ORDERS = ("shuffled", "random", "sequential")


def tokens(**options: Any) -> Tokens:
    return Tokens(np.arange(1000, dtype=np.uint16), **{"sequence": 7, "seed": 5, **options})


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_permute_is_a_permutation(n: int, key: int) -> None:
    found = permute(np.arange(n, dtype=np.uint64), n, key)
    assert np.array_equal(np.sort(found), np.arange(n))


def test_an_index_is_permuted_alone_as_among_all() -> None:
    """Also where no list of all of them could be held."""
    n = 10**15 + 7
    some = np.array([0, 1, 2, n - 1, n // 3], dtype=np.uint64)
    together = permute(some, n, 9)
    assert [int(permute(some[i : i + 1], n, 9)[0]) for i in range(5)] == together.tolist()
    assert (together < n).all()
    assert len(set(together.tolist())) == 5


def test_places_are_taken_evenly() -> None:
    """Over 4,000 keys, where index 3 of 10 goes: each place 400 times, within 5 standard deviations (19 each)."""
    index = np.array([3], dtype=np.uint64)
    counts = np.bincount([int(permute(index, 10, key)[0]) for key in range(4000)], minlength=10)
    assert (abs(counts - 400) < 5 * 19).all(), counts


def test_neighbours_part() -> None:
    """That i and i + 1 stay neighbours happens as often as by chance: about 2 of 1,000."""
    found = permute(np.arange(1000, dtype=np.uint64), 1000, 1).astype(np.int64)
    assert (abs(np.diff(found)) == 1).sum() < 12


def test_an_epoch_has_every_sample_once_and_the_next_has_another_order() -> None:
    source = tokens()
    n = source.samples
    epochs = [source.starts(i * n, n) for i in range(3)]
    for starts in epochs:
        assert np.array_equal(np.sort(starts), np.arange(n) * 7)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert np.array_equal(source.starts(n - 2, 4), np.concatenate([epochs[0][-2:], epochs[1][:2]]))


def test_seeds_differ() -> None:
    for order in ("shuffled", "random"):
        assert not np.array_equal(tokens(order=order).starts(0, 20), tokens(order=order, seed=6).starts(0, 20))


@pytest.mark.parametrize("order", ORDERS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_batch_sizes_and_worlds_make_one_sequence_of_samples(order: str, data: st.DataObject) -> None:
    """Batch size and world change between any two batches; the samples, in rank order, are those of one big batch."""
    source, position, seen = tokens(order=order), data.draw(st.integers(0, 500)), []
    first = position
    for _ in range(5):
        world = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
        size = world * data.draw(st.integers(1, 20))
        streams = [source.batches(size, position=position, rank=r, world_size=world) for r in range(world)]
        seen += [next(stream)["x"] for stream in streams]
        assert {stream.position for stream in streams} == {position + size}
        position += size
    assert torch.equal(torch.cat(seen), source.batch(first, size=position - first)["x"])


def test_the_order_is_the_same_in_every_release() -> None:
    """Else a run that resumes under another version would repeat samples."""
    assert tokens().starts(140, 4).tolist() == [147, 70, 952, 28]
    assert tokens(order="random").starts(140, 4).tolist() == [787, 291, 158, 420]
    assert tokens(order="sequential").starts(140, 4).tolist() == [980, 987, 0, 7]


def test_random_windows_reach_both_ends() -> None:
    source = Tokens(np.arange(12, dtype=np.uint8), sequence=8, order="random")
    assert set(source.starts(0, 200).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_give_what_memory_gives_and_are_mapped(dtype: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 250, 300).astype(dtype)
    array.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", array)
    wanted = Tokens(array, sequence=5).batch(3, size=8)
    for source in (Tokens(tmp_path / "a.bin", sequence=5, dtype=dtype), Tokens(tmp_path / "a.npy", sequence=5)):
        assert isinstance(source.array, np.memmap)
        found = source.batch(3, size=8)
        assert all(torch.equal(found[name], wanted[name]) for name in ("x", "y"))
    assert torch.equal(wanted["x"][:, 1:], wanted["y"][:, :-1])


def test_largest_values_survive() -> None:
    array = np.array([0, 2**32 - 1, 2**31, 7], dtype=np.uint32)
    assert Tokens(array, sequence=3, order="sequential").batch(0, size=1)["y"].tolist() == [[2**32 - 1, 2**31, 7]]


def refused(text: str, *args: Any, **options: Any) -> None:
    with pytest.raises(fzero.DataError, match=text):
        Tokens(*args, **{"sequence": 4, **options})


def test_wrong_files_are_errors_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"12345")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "bad.npy").write_bytes(b"no header here")
    np.save(tmp_path / "float.npy", np.ones(10))
    np.save(tmp_path / "square.npy", np.ones((4, 4), dtype=np.uint8))
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.ones(4, dtype=np.uint8))
    refused(r"odd.bin has 5 bytes, no whole number of uint16 \(2 bytes each\)", tmp_path / "odd.bin", dtype="uint16")
    refused("empty.bin has 0 bytes", tmp_path / "empty.bin", dtype="uint8")
    refused("odd.bin does not say what its tokens are: give Tokens", tmp_path / "odd.bin")
    refused("dtype='uint12'.*needed one of uint8", tmp_path / "odd.bin", dtype="uint12")
    refused("bad.npy cannot be read as tokens", tmp_path / "bad.npy")
    refused("gone.npy cannot be read as tokens: .*No such file", tmp_path / "gone.npy")
    refused("gone.bin cannot be read as tokens: .*No such file", tmp_path / "gone.bin", dtype="uint8")
    refused("float.npy is float64 of shape .10.: needed one dimension of uint8", tmp_path / "float.npy")
    refused("square.npy is uint8 of shape .4, 4.", tmp_path / "square.npy")
    refused("objects.npy cannot be read as tokens", tmp_path / "objects.npy")
    refused("square.npy holds uint8, as its header says, not uint16", tmp_path / "square.npy", dtype="uint16")
    refused("list: needed a file's path, an array or a tensor: torch.tensor", [1, 2, 3])
    refused("dtype='uint8'.: the array holds int64", np.arange(9), dtype="uint8")
    refused("short.npy holds 4 tokens, and one sample of sequence=4 needs 5", tmp_path / "short.npy")


def test_wrong_numbers_are_errors() -> None:
    array = np.arange(50)
    refused("order='shuffle'.: needed one of shuffled, random, sequential", array, order="shuffle")
    refused("seed=-1", array, seed=-1)
    refused("sequence=0: needed a positive int", array, sequence=0)
    source = tokens()
    for text, arguments in {
        "size=0": {"size": 0},
        "size=6 cannot be cut for 4 ranks": {"size": 6, "world_size": 4},
        r"rank=2: needed an int in \[0, 2\)": {"size": 4, "world_size": 2, "rank": 2},
        "position=-1": {"size": 4, "position": -1},
        "position=1.0": {"size": 4, "position": 1.0},
    }.items():
        with pytest.raises(fzero.DataError, match=text):
            source.batches(**arguments)  # type: ignore[arg-type]


def test_the_world_is_torchruns_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that forgets to say who it is must not train on the samples of another."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = tokens()
    assert torch.equal(next(source.batches(4))["x"], source.batch(2, size=2)["x"])
