"""fzero.data.batches: every rank's rows are those of one global order, from any position, at any number of ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.data import Rows, batches


class Squares(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style data set of n samples."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": i, "pair": [i, i * i]}


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The same without a length; `epochs` are those that it was told."""

    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Squares(self.n)[i] for i in range(self.n))


def taken(rows: Rows, count: int) -> list[int]:
    return [int(x) for _ in range(count) for x in next(rows)["x"]]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40), part=st.integers(1, 4), ranks=st.integers(1, 4), steps=st.integers(0, 6),
    stream=st.booleans(), seed=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_ranks_side_by_side_are_one_rank_and_a_resumed_run_is_one_run(
    n: int, part: int, ranks: int, steps: int, stream: bool, seed: int
) -> None:
    """A sample that is lost, repeated or given to two ranks shows."""
    dataset: Any = Stream(n) if stream else Squares(n)
    size, of = part * ranks, {} if stream else {"seed": seed}
    alone = batches(dataset, size, rank=0, world_size=1, **of)
    whole = [taken(alone, 1) for _ in range(steps + 4)]
    for rank in range(ranks):
        mine = batches(dataset, size, rank=rank, world_size=ranks, position=steps * size, **of)
        for batch in whole[steps:]:
            assert taken(mine, 1) == batch[rank * part : (rank + 1) * part]
    assert alone.position == (steps + 4) * size


def test_an_epoch_has_every_sample_once_in_another_order_each() -> None:
    rows = batches(Squares(30), 6, seed=3)
    first, second = taken(rows, 5), taken(rows, 5)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert taken(batches(Squares(30), 6, seed=4), 5) != first
    assert taken(batches(Squares(30), 6, order="sequential"), 5) == list(range(30))


def test_the_rows_are_those_of_torchs_distributed_sampler_as_a_set() -> None:
    """The reference of how an epoch is divided: both give each sample to one rank."""
    sampler = torch.utils.data.distributed.DistributedSampler
    reference = {i for rank in range(3) for i in sampler(Squares(24), num_replicas=3, rank=rank)}  # type: ignore[var-annotated]
    ours = [i for rank in range(3) for i in taken(batches(Squares(24), 6, rank=rank, world_size=3), 4)]
    assert sorted(ours) == sorted(reference)


def test_workers_read_ahead_and_the_position_is_that_of_what_was_returned() -> None:
    before = set(multiprocessing.active_children())
    rows = batches(Squares(20), 4, seed=1, workers=2)
    ahead = [taken(rows, 1) for _ in range(3)]
    assert rows.position == 12
    assert ahead == [taken(plain, 1) for plain in [batches(Squares(20), 4, seed=1)] for _ in range(3)]
    workers = set(multiprocessing.active_children()) - before
    del rows
    assert len(workers) == 2
    assert not workers & set(multiprocessing.active_children()), "a collection of garbage would wait 10 s for them"


@pytest.mark.parametrize("workers", [0, 2, None])
def test_a_position_that_is_set_between_batches_is_the_next_ones(workers: int | None) -> None:
    """As of `Tokens.batches` and `by_length`: a run that looks at a batch before it resumes."""
    options: dict[str, Any] = {"seed": 1, "workers": workers} if workers is not None else {}
    data: Any = Squares(20) if workers is not None else Stream(20)
    rows = batches(data, 4, **options)
    taken(rows, 2)
    for position in (20, 8, 8):
        rows.position = position
        assert taken(rows, 2) == taken(batches(data, 4, position=position, **options), 2)
        assert rows.position == position + 8


def test_a_stream_is_told_its_epoch() -> None:
    stream = Stream(4)
    taken(batches(stream, 2), 5)
    assert stream.epochs == [0, 1, 2]


def test_samples_are_pytrees_and_collate_is_the_users() -> None:
    rows = batches([(1, {"a": torch.ones(2)}), (2, {"a": torch.zeros(2)})], 2, order="sequential")
    first, second = next(rows)
    assert first.tolist() == [1, 2]
    assert second["a"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    texts = batches(["a", "bcd"], 2, order="sequential", collate=lambda rows: torch.tensor([len(x) for x in rows]))
    assert next(texts).tolist() == [1, 3]


def test_a_hugging_face_data_set_with_and_without_a_length() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_dict({"x": list(range(12)), "ids": [[n, n + 1] for n in range(12)]})
    rows = batches(table, 4, order="sequential")
    assert next(rows)["ids"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    stream = batches(table.to_iterable_dataset(), 4, position=4)
    assert next(stream)["x"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": []}, "has no samples"),
        ({"dataset": Stream(0)}, "has no samples"),
        ({"dataset": iter([{"x": 1}] * 3)}, "gave no samples the second time"),
        ({"dataset": 3}, "needed a data set with len"),
        ({"dataset": {"train": Squares(8)}}, r"Give one of its data sets, as dataset\['train'\]"),
        ({"dataset": torch.utils.data.DataLoader(Squares(8), 2)}, "Give its data set, loader.dataset"),
        ({"dataset": Stream(3), "order": "shuffled"}, "Shuffle the stream itself"),
        ({"dataset": Stream(3), "workers": 2}, "leave out order= and workers="),
        ({"order": "random"}, "needed one of shuffled, sequential"),
        ({"world_size": 3, "rank": 0}, "cannot be cut for 3 ranks"),
        ({"position": -1}, "needed the number of samples so far"),
        ({"seed": -1}, "Write seed % 2"),
        ({"workers": -1}, "needed a positive int"),
        ({"dataset": [torch.ones(2), torch.ones(3)]}, "do not stack"),
        ({"dataset": [{"a": 1}, {"b": 1}]}, "one holds ., another .. Give each the same entries, or collate="),
        ({"dataset": [{"text": "a"}, {"text": "b"}]}, "leave the column out"),
    ],
)
def test_what_cannot_be_divided_or_stacked_is_refused(arguments: dict[str, Any], said: str) -> None:
    options = {"dataset": Squares(8), **arguments}
    with pytest.raises(fzero.DataError, match=said):  # noqa: PT012 - some are found at the first batches
        rows = batches(options.pop("dataset"), 2, **options)
        for _ in range(3):
            next(rows)


def _resumes(folder: str) -> dict[str, list[int]]:
    """Three steps, the end of the process, and three more, on each rank: what it was given."""
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b["x"].float()).mean(), optimizer=fzero.optim.sgd(0.1), zero=3)
    seen: dict[str, list[int]] = {"first": [], "then": []}
    for name, steps in (("first", 3), ("then", 6)):
        with fzero.Checkpointer(folder, every=1, background=False) as saver:
            state = saver.resume({"w": torch.ones(4)}, spec)
            rows = batches(Squares(16), 4, position=saver.extra.get("position", 0))
            while state.step < steps:
                batch = next(rows)
                seen[name] += batch["x"].tolist()
                state = fzero.step(state, {"x": batch["x"].repeat_interleave(2).view(-1, 4)})
                saver.after(state, {"position": rows.position})
    return seen


def test_a_checkpointer_resumes_it_on_two_ranks(tmp_path: Path) -> None:
    """Together the ranks see, before and after, the samples of one process that never stopped."""
    ranks = values(gloo(2, _resumes, str(tmp_path / "run")))
    alone = batches(Squares(16), 4)
    order = [taken(alone, 1) for _ in range(6)]
    for name, steps in (("first", order[:3]), ("then", order[3:])):
        assert [ranks[r][name] for r in (0, 1)] == [
            [i for batch in steps for i in batch[2 * r : 2 * r + 2]] for r in (0, 1)
        ]
