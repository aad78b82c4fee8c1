"""A state on disk is filled some buffers at a time, however many there are."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from helpers import gloo, values

import fzero
from fzero.disk.direct import is_huge
from fzero.state import homes

LEAVES = 70


def first_state(folder: Path) -> tuple[int, list[torch.Tensor]]:
    """The rounds in which a state of many buckets was filled, and its parameters."""
    homes.ROUND_BYTES = 1  # in a process of its own: each buffer alone
    params = {f"w{n:02}": torch.full((64,), float(n)) for n in range(LEAVES)}
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.sum() for x in p.values()) * b.sum(), optimizer=fzero.optim.adamw(1e-3),
        offload={"**": "nvme"}, nvme_path=str(folder), bucket_bytes=64, zero=3,
    )  # fmt: skip
    state = fzero.init(params, spec)
    runtime = fzero.session.session.session_of(state)
    return len(runtime.memory.on_disk), [state.tree["params"][name].full() for name in params]


def test_more_rounds_than_a_note_to_the_other_ranks_has_room_for(tmp_path: Path) -> None:
    """Each round has a digest; the ranks compare one of them all."""
    for rounds, params in values(gloo(2, first_state, tmp_path)):
        assert rounds >= 3 * LEAVES
        assert [float(x[0]) for x in params] == list(range(LEAVES))


def loss(p: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return (batch @ p["w"]).square().mean()


def on_disk(path: str) -> fzero.Spec:
    away = {"offload": {"**": "nvme"}, "nvme_path": path} if path else {}
    return fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3, **away)


def train(folder: Path, path: str, params: dict[str, torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
    """The folder below `folder` where this rank's files without a name lie; the parameter after two steps, and as a
    checkpoint of it gives it back. The file is closed then."""
    gc.collect()  # closes the file of an earlier state
    state = fzero.init(params, on_disk(path))
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    seen = {Path(link).parent.name for link in links if link.startswith(str(folder))}
    for _ in range(2):
        state = fzero.step(state, torch.linspace(0, 1, 32).view(4, 8))
    there = fzero.save(state, folder / "saved" / ("disk" if path else "memory"), keep=1)
    found = [state.params["w"].full(), fzero.load(there.parent, on_disk(path)).params["w"].full()]
    return " ".join(seen), found


def on_drives(folder: Path) -> tuple[list[str], list[list[torch.Tensor]], str]:
    """`train` without a disk, with the drives that "{local_rank}" names, and with paths that differ; the error where
    rank 1 alone has no folder."""
    rank, params = os.environ["RANK"], {"w": torch.linspace(-1, 1, 64).view(8, 8)}
    seen, found = [], []
    for path in ("", str(folder / "nvme{local_rank}"), str(folder / f"drive{rank}")):
        where, parameters = train(folder, path, params)
        seen.append(where)
        found.append(parameters)
    with pytest.raises(fzero.FzeroError) as caught:
        fzero.init(params, on_disk(str(folder / ("drive0" if rank == "0" else "gone"))))
    return seen, found, f"{type(caught.value).__name__}: {caught.value}"


def test_a_drive_for_each_rank(tmp_path: Path) -> None:
    """Each rank's file lies on its own drive, with the bits of a run in memory; a drive that one rank lacks is an error
    of all."""
    for name in ("nvme", "drive"):
        for rank in range(2):
            (tmp_path / f"{name}{rank}").mkdir()
    for rank, (seen, (plain, *others), error) in enumerate(values(gloo(2, on_drives, tmp_path))):
        assert seen == ["", f"nvme{rank}", f"drive{rank}"]
        assert all(torch.equal(x, plain[0]) for pair in [plain, *others] for x in pair)
        assert f"{tmp_path}/gone: no file of " in error
        assert "there is no such folder" in error
        assert error.startswith("OffloadError: " if rank else "DisagreementError: rank 1 failed before ")


@pytest.mark.parametrize("on_disk", [False, True])
def test_only_memory_that_a_disk_reads_lies_in_huge_pages(on_disk: bool, tmp_path: Path) -> None:
    """A virtual machine may need seconds to find a GB of huge pages: half of the first step of 100M parameters."""
    there = {"offload": {"optimizer": "nvme"}, "nvme_path": str(tmp_path)} if on_disk else {}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), **there)
    state = fzero.step(fzero.init({"w": torch.zeros(1024, 1024)}, spec), torch.zeros(4, 1024))
    runtime = fzero.session.session.session_of(state)
    held = [x.data_ptr() for x in runtime.memory.in_memory.values() if x.numel() > 1 << 20]
    assert [is_huge(address) for address in (runtime.arena.data_ptr(), *held)] == [on_disk] * (1 + len(held))
