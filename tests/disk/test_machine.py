"""What a rank keeps on disk, on real disks that are full, small, broken or odd (loop devices, which need root), and in
processes that are killed, fork, or have few rights."""

from __future__ import annotations

import ast
import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import disks
import pytest
import torch
from disks import draw
from helpers import server

from fzero.disk import DiskFile, aligned, open_file
from fzero.errors import OffloadError

ROOT = Path(__file__).parents[2]
MB = 1 << 20
Mount = Callable[..., Path]


def call(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(megabytes, sector=512, options="", image=None)`: a folder with an ext4 of its own, on a loop device over
    `image`, a sparse file."""
    undo: list[tuple[object, ...]] = []

    def mounted(megabytes: int, sector: int = 512, options: str = "defaults", image: Path = tmp_path / "image") -> Path:
        folder = tmp_path / f"mounted{len(undo)}"
        folder.mkdir()
        with open(image, "wb") as file:
            file.truncate(megabytes * MB)
        try:
            call("mkfs.ext4", "-q", "-F", "-m", 0, "-b", 4096, image)
            device = call("losetup", "--find", "--show", "--sector-size", sector, "--direct-io=on", image).strip()
            undo.append(("losetup", "--detach", device))
            call("mount", "-o", options, device, folder)
            undo.append(("umount", folder))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device here: {getattr(error, 'stderr', '') or error}")
        return folder

    yield mounted
    for words in reversed(undo):
        call(*words)


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def same(file: DiskFile, nbytes: int) -> bool:
    tile, back = draw(nbytes), aligned(nbytes)
    file.write(0, tile).result(60)
    file.read(0, back).result(60)
    return torch.equal(tile, back)


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small(mount: Mount) -> None:
    """The error says how many bytes are needed and free, and leaves both as they were; what fits then fits."""
    folder = mount(24)
    room = free(folder)
    with pytest.raises(
        OffloadError, match=rf"no file of 67,108,864 bytes .*, {room:,} are free: No space left"
    ) as caught:
        DiskFile(folder, 64 * MB)
    assert caught.value.errno == errno.ENOSPC
    assert free(folder) == room
    with DiskFile(folder, 8 * MB) as file:
        assert free(folder) <= room - 8 * MB, "taken at once, so that no step finds the disk full"
        assert same(file, 8 * MB)
    assert free(folder) == room


def test_a_disk_that_fills_up_between_the_ranks(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank took the room after this one had asked: the allocation itself fails, and gives back what it took."""
    folder = mount(24)
    room = free(folder)
    monkeypatch.setattr(open_file, "_free", lambda folder: 1 << 40)
    with pytest.raises(OffloadError, match="No space left on device; the disk is full: free some space"):
        DiskFile(folder, 64 * MB)
    assert free(folder) == room


def test_a_disk_that_is_read_only(mount: Mount) -> None:
    folder = mount(24, options="ro")
    with pytest.raises(
        OffloadError, match="Read-only file system; the file system is read-only: mount it writable"
    ) as e:
        DiskFile(folder, MB)
    assert e.value.errno == errno.EROFS


def test_sectors_of_4096_bytes(mount: Mount) -> None:
    """Nothing is assumed: the system says 4,096, and a tile of any length comes back."""
    folder = mount(24, sector=4096)
    with DiskFile(folder, 4 * MB) as file:
        assert file.file.direct.offset == 4096
        assert same(file, 4 * MB)
        assert same(file, MB + 513)


def test_a_file_system_without_direct_io(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """ext4 that journals its data has none, and says so."""
    folder = mount(48, options="data=journal")
    with caplog.at_level(logging.WARNING, "fzero"), DiskFile(folder, 4 * MB) as file:
        assert not file.direct
        assert same(file, 4 * MB)
    assert len(caplog.records) == 1


def test_a_device_that_fails_in_a_read(mount: Mount, tmp_path: Path) -> None:
    """The image is cut under the device, so what lay behind the cut is gone."""
    folder = mount(48)
    with DiskFile(folder, 32 * MB) as file:
        file.write(0, draw(32 * MB)).result(60)
        os.truncate(tmp_path / "image", 8 * MB)
        try:
            with pytest.raises(OffloadError, match=rf"{folder}: op 5, tile 2: read of [\d,]+ bytes at byte") as caught:
                file.read(0, aligned(32 * MB), "op 5, tile 2").result(60)
            assert caught.value.errno == errno.EIO
            assert "the device failed (EIO): look at the kernel's log" in str(caught.value)
        finally:
            os.truncate(tmp_path / "image", 48 * MB)  # so that it can be unmounted


def test_a_device_that_fails_in_a_write(mount: Mount) -> None:
    """A thin device: the file system has room, and the disk under it has none. Nothing that was said to be written is
    wrong when it is read."""
    folder = mount(64, image=mount(24) / "image")
    with DiskFile(folder, 40 * MB) as file:
        file.write(0, draw(MB)).result(60)
        with pytest.raises(OffloadError, match=rf"{folder}: op 5: write of [\d,]+ bytes at byte") as caught:
            file.write(MB, draw(39 * MB), "op 5").result(60)
        assert caught.value.errno in (errno.EIO, errno.ENOSPC)
        assert "; " in str(caught.value), "a remedy"
        back = aligned(MB)
        file.read(0, back).result(60)
        assert torch.equal(back, draw(MB))


# --- processes --------------------------------------------------------------------------------------------------------


def started(fn: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs `fn(*args, pipe)`, and our end of the pipe."""
    context = server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=fn, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def received(pipe: Connection) -> Any:
    assert pipe.poll(60), "nothing came in a minute"
    return pipe.recv()


def test_a_killed_process_leaves_nothing(mount: Mount, whole: bool) -> None:
    """Not a name, not a byte. Killed while it reads and writes, at moments that nobody chose."""
    folder, pick = mount(48), random.Random(11)
    room = free(folder)
    for _ in range(50 if whole else 5):
        process, pipe = started(disks.fill, folder)
        assert received(pipe) == "begun"
        assert free(folder) <= room - disks.SIZE
        time.sleep(pick.uniform(0, 0.1))
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert [path.name for path in folder.iterdir()] == ["lost+found"]
        assert free(folder) == room


def test_a_forked_child_touches_nothing(folder: Path) -> None:
    """It cannot write, keeps no room, ends by itself; its parent goes on."""
    process, pipe = started(disks.fork, folder)
    gone = (
        "the offload file belongs to the process that made it, and this is a fork of that: train in the process that "
        "began"
    )
    assert received(pipe) == f"{folder}: read of 32 bytes at byte 0: {gone}"
    assert received(pipe) == f"{folder}: write of 32 bytes at byte 0: {gone}"
    assert received(pipe) == [], "descriptors of the child"
    assert received(pipe) == ("parent", True, 7)
    process.join(60)
    assert process.exitcode == 0


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_files_that_may_not_be_large(folder: Path) -> None:
    _, pipe = started(disks.limited, small_files, folder)
    assert "File too large; a file may not be that large here: look at `ulimit -f`" in received(pipe)


def few_rights() -> None:
    os.umask(0o777)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


def test_no_right_to_lock_memory_and_no_rights_by_default(folder: Path) -> None:
    _, pipe = started(disks.limited, few_rights, folder)
    assert received(pipe) == "same []"


def test_nothing_rests_on_assert() -> None:
    """`python -O` leaves it out."""
    for path in (ROOT / "fzero" / "disk").glob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)], path


@pytest.mark.acceptance
def test_under_python_without_assertions(folder: Path) -> None:
    words = [sys.executable, "-O", disks.__file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.stdout, done.stderr) == ("same []\n", "")


def test_too_many_open_files(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        with pytest.raises(OffloadError, match="this process has too many files open: close some, or raise") as caught:
            DiskFile(folder, MB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
