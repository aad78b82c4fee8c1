"""fzero.data.batches over shards as WebDataset and MosaicML Streaming write them, if these libraries are installed.

docs/data.md says what to tell each library: fzero divides the rows, so the library must not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fzero.data import Rows, batches


def check(rows: Any) -> None:
    """Two ranks together have each batch of one process, and a position resumes in the middle of a shard."""
    one = rows(rank=0, world_size=1)
    assert isinstance(one, Rows)
    straight = [next(one) for _ in range(8)]
    assert one.position == 32
    ranks = [rows(rank=rank, world_size=2, position=12) for rank in (0, 1)]
    for batch in straight[3:]:
        halves = [next(rank)["x"] for rank in ranks]
        assert torch.equal(torch.cat(halves), batch["x"])
    assert sorted(torch.cat([batch["x"] for batch in straight[:5]]).tolist()) == list(range(20))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher sets, and these libraries look at."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_ranks")
def test_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed (pip install webdataset)")
    with wds.ShardWriter(f"{tmp_path}/%06d.tar", maxcount=6, verbose=0) as sink:
        for n in range(20):
            sink.write({"__key__": f"{n:04}", "json": json.dumps({"x": n}).encode()})

    class Shards:
        def __iter__(self) -> Any:
            urls = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
            whole = wds.WebDataset(urls, shardshuffle=False, nodesplitter=lambda urls: urls).decode()
            return ({"x": sample["json"]["x"]} for sample in whole)

    check(lambda **place: batches(Shards(), 4, **place))


def test_mosaicml_streaming(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    with streaming.MDSWriter(out=str(tmp_path), columns={"x": "int"}, size_limit=200) as sink:
        for n in range(20):
            sink.write({"x": n})
    shards = streaming.LocalDataset(str(tmp_path))
    assert len(shards) == 20
    check(lambda **place: batches(shards, 4, seed=1, **place))
