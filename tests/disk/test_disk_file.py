"""What a rank keeps on disk: the bits that were written, or an error that says where and what to do. Never other bits.

The oracle is a plain array in memory, or the same file opened a second time by the system's own calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import draw

from fzero.disk import UNIT, Disk, DiskFile, aligned, blocks, direct, disk_file, open_file
from fzero.disk.direct import Direct
from fzero.errors import CorruptError, HangError, OffloadError

MB = 1 << 20


@pytest.fixture(params=["direct", "buffered"])
def either(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with direct I/O, and the same without."""
    if request.param == "buffered":
        monkeypatch.setattr(direct, "alignment", lambda fd: Direct())
    else:
        with DiskFile(folder, UNIT) as file:
            if not file.direct:
                pytest.skip("the disk of the temporary directory has no direct I/O")
    return folder


class Faulty(Disk):
    """The operations that `fault` answers for end as it says: `fault(kind, call)`, for reads and writes alone."""

    def __init__(self, fault: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.fault = fault

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        return self.fault(kind, call) if kind in ("read", "write", "sync") else call()


@contextlib.contextmanager
def released(event: threading.Event) -> Iterator[None]:
    """Sets the event in the end, so that a test that fails does not wait for it."""
    try:
        yield
    finally:
        event.set()


def on_disk(file: DiskFile) -> bytes:
    """The file's bytes, read by nobody of fzero."""
    with open(f"/proc/self/fd/{file.file.fd}", "rb") as again:
        return again.read()


def damage(file: DiskFile, offset: int, data: bytes) -> None:
    with open(f"/proc/self/fd/{file.file.fd}", "r+b", buffering=0) as again:
        again.seek(offset)
        again.write(data)
        os.fsync(again.fileno())


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [True, False])
def test_any_order_of_ranges_has_the_bits_of_an_array(either: Path, checksums: bool) -> None:
    """Ranges of all lengths, in memory that is aligned or not, several at a time, over two blocks and more."""
    pick = random.Random(7)
    size = 2 * blocks.BLOCK + 5 * UNIT
    expected = np.zeros(size, np.uint8)
    source, target = draw(size + 64, 1), aligned(size + 64)
    with DiskFile(either, size - 100, checksums=checksums) as file:
        assert file.nbytes == size
        for n in range(30):
            offset = UNIT * pick.randrange(size // UNIT)
            length = min(pick.choice([1, 4, UNIT, 5000, 64 * UNIT, blocks.BLOCK + 3, size]), size - offset)
            shift = pick.choice([0, 0, 4, 64])
            if n % 2:
                view = target[shift : shift + length].zero_()
                file.read(offset, view).result()
                assert np.array_equal(view.numpy(), expected[offset : offset + length])
            else:
                view = source[shift : shift + length]
                file.write(offset, view).result()
                expected[offset : offset + -(-length // UNIT) * UNIT] = 0
                expected[offset : offset + length] = view.numpy()
        assert on_disk(file) == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_of_every_dtype_come_back(folder: Path, dtype: torch.dtype) -> None:
    values = draw(16 * 24, 3).remainder(2).view(torch.uint8).view(16, 24).to(dtype)
    with DiskFile(folder, 1 << 16) as file:
        for at, value in ((0, values), (UNIT, values[3, 4].clone()), (2 * UNIT, values[:0])):
            file.write(at, value).result()
            back = torch.empty_like(value)
            file.read(at, back).result()
            assert back.shape == value.shape
            assert torch.equal(back.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_many_transfers_at_a_time(either: Path) -> None:
    """Each has its own range; they end in any order, all with their own bits."""
    tiles = [draw(5 * UNIT, n) for n in range(64)]
    back = [aligned(5 * UNIT) for _ in tiles]
    with DiskFile(either, 5 * UNIT * len(tiles), threads=3) as file:
        written = [file.write(5 * UNIT * n, tile) for n, tile in enumerate(tiles)]
        for n, one in enumerate(written):
            one.result()
            written[n] = file.read(5 * UNIT * n, back[n])
        for one in written:
            one.result()
        assert file.bytes_read == file.bytes_written == 5 * UNIT * 64
        assert file.busy() == []
    assert all(torch.equal(a, b) for a, b in zip(tiles, back, strict=True))


def test_the_kernel_counts_the_same_bytes(folder: Path) -> None:
    """Nothing is moved twice, and nothing that is counted was not moved."""

    def counted() -> tuple[int, int]:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])

    size = 3 * blocks.BLOCK
    tile = draw(size)
    with DiskFile(folder, size) as file:
        if not file.direct:
            pytest.skip("through the page cache the kernel counts pages")
        before = counted()
        file.write(0, tile).result()
        file.read(0, tile).result()
        file.read(blocks.BLOCK, tile[: blocks.BLOCK]).result()
        read, written = (after - first for after, first in zip(counted(), before, strict=True))
        assert read == pytest.approx(file.bytes_read, rel=0.005)
        assert written == pytest.approx(file.bytes_written, rel=0.005)
        assert (file.bytes_read, file.bytes_written) == (4 * blocks.BLOCK, size)


def test_a_fresh_file_is_zeros(either: Path) -> None:
    into = draw(3 * UNIT)
    with DiskFile(either, 3 * UNIT) as file:
        file.read(0, into).result()
    assert not into.any()


def test_two_files_in_one_folder_are_apart(folder: Path) -> None:
    one, other, back = draw(UNIT, 1), draw(UNIT, 2), aligned(UNIT)
    with DiskFile(folder, UNIT) as first, DiskFile(folder, UNIT) as second:
        first.write(0, one).result()
        second.write(0, other).result()
        first.read(0, back).result()
        assert torch.equal(back, one)


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_what_no_file_can_do_is_refused(folder: Path) -> None:
    with DiskFile(folder, 4 * UNIT) as file:
        for offset, length in ((1, 8), (512, UNIT), (-UNIT, UNIT), (0, 4 * UNIT + 1), (4 * UNIT, 1)):
            with pytest.raises(ValueError, match=r"needed a range inside it, from a multiple of 4,096 on"):
                file.write(offset, torch.zeros(length, dtype=torch.uint8))
        with pytest.raises(ValueError, match="not contiguous: needed a contiguous tensor on the CPU"):
            file.write(0, torch.zeros(4, 4).t())
        with pytest.raises(ValueError, match="a tensor on meta: needed a contiguous tensor on the CPU"):
            file.read(0, torch.zeros(4, 4, device="meta"))
    for _ in range(2):
        file.close()
    with pytest.raises(OffloadError, match="read of 8 bytes at byte 0: the offload file is closed"):
        file.read(0, torch.zeros(2))
    with pytest.raises(ValueError, match="threads=0"):
        DiskFile(folder, 4, threads=0)


def test_a_range_in_flight_cannot_be_touched(folder: Path) -> None:
    """Reads have threads of their own, so a read that is started after a write might come before it."""
    go = threading.Event()
    disk = Faulty(lambda kind, call: (go.wait(60), call())[1])
    tile = draw(2 * UNIT)
    with DiskFile(folder, 8 * UNIT, disk=disk) as file, released(go):
        writing = file.write(2 * UNIT, tile[:5000], "op 3")
        for begin in (file.read, file.write):
            for offset, length in ((2 * UNIT, 4), (3 * UNIT, 8), (UNIT, UNIT + 1)):
                with pytest.raises(ValueError, match=r"meets one that has not ended \(op 3: write of 5,000"):
                    begin(offset, torch.zeros(length, dtype=torch.uint8))
        others = [file.read(UNIT, aligned(UNIT)), file.read(UNIT, aligned(UNIT)), file.write(4 * UNIT, tile)]
        assert file.busy()[0].startswith("op 3: write of 5,000 bytes at byte 8,192 for ")
        assert len(file.busy()) == 4
        assert not writing.cancel()
        go.set()
        for one in (writing, *others):
            one.result(60)
        file.read(2 * UNIT, tile[:5000]).result()


def test_reading_goes_on_while_writing_is_stuck(folder: Path) -> None:
    go = threading.Event()
    disk = Faulty(lambda kind, call: (kind == "read" or go.wait(60), call())[1])
    with DiskFile(folder, 4 * UNIT, threads=2, disk=disk) as file, released(go):
        stuck = [file.write(UNIT * n, draw(UNIT)) for n in range(3)]
        file.read(3 * UNIT, aligned(UNIT)).result(30)
        assert not any(one.done() for one in stuck)
        go.set()
    assert all(one.done() for one in stuck), "close ends what was started"


def test_a_disk_that_does_not_answer_ends_the_wait_and_is_not_waited_for_again(folder: Path) -> None:
    """The first wait takes the whole timeout, the next none; a disk that answers after all is waited for as before."""
    go = threading.Event()
    disk = Faulty(lambda kind, call: (go.wait(60), call())[1])
    with DiskFile(folder, 16 * UNIT, disk=disk, timeout=0.3, owner="rank 5") as file, released(go):
        stuck = [file.read(UNIT * n, aligned(UNIT), f"op {n}") for n in range(6)]
        began = time.monotonic()
        with pytest.raises(HangError) as found:
            file.wait(stuck[2])
        first = time.monotonic()
        with pytest.raises(HangError):
            file.wait(*stuck)
        assert first - began >= 0.3 > time.monotonic() - first
        lines = str(found.value).splitlines()
        assert lines[0].startswith(
            f"rank 5: the disk of {folder} does not answer, in 0.3 s (Spec(timeout=)), to op 2: "
        )
        assert [line.split(":")[1].strip() for line in lines[1:5]] == [f"op {n}" for n in range(4)]
        assert lines[5] == "  in flight: and 2 more"
        go.set()
        for one in stuck:
            one.result(30)
        file.wait(*stuck)
        assert file.patience == 0.3


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [512, 3 * 512, 4096 + 512, 1000, 1])
def test_short_counts_are_followed_by_the_rest(either: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The system says that it moved `most` bytes. From a place where direct I/O cannot begin, some are moved again."""
    monkeypatch.setattr(blocks, "PAUSE_SECONDS", 0.0)
    counts = []

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def shorter(fd: int, views: list[Any], place: int) -> int:
            counts.append(min(most, call(fd, views, place)))
            return counts[-1]

        return shorter

    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    tile, back = draw(3 * UNIT), aligned(3 * UNIT)
    with DiskFile(either, 3 * UNIT) as file:
        if file.direct and most < file.file.direct.offset:
            with pytest.raises(
                OffloadError, match=r"write of 12,288 bytes at byte 0 .* 8 calls in a row moved nothing"
            ):
                file.write(0, tile).result()
            return
        file.write(0, tile).result()
        file.read(0, back).result()
        assert torch.equal(tile, back)
        assert on_disk(file) == bytes(tile.numpy())
    assert len(counts) >= 2 * 3 * UNIT // max(most, 1)


@pytest.mark.parametrize("error", [InterruptedError(errno.EINTR, "x"), BlockingIOError(errno.EAGAIN, "x"), 0])
def test_a_call_that_moved_nothing_comes_again_a_few_times(folder: Path, error: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "PAUSE_SECONDS", 0.0)
    left = [0]

    def fault(kind: str, call: Callable[[], Any]) -> Any:
        left[0] -= 1
        if left[0] >= 0 and isinstance(error, OSError):
            raise error
        return 0 if left[0] >= 0 else call()

    tile, back = draw(UNIT), aligned(UNIT)
    with DiskFile(folder, UNIT, disk=Faulty(fault)) as file:
        for begin, memory in ((file.write, tile), (file.read, back)):
            left[0] = blocks.IDLE - 1
            begin(0, memory).result(30)
            left[0] = blocks.IDLE
            with pytest.raises(
                OffloadError, match="8 calls in a row moved nothing: look at the kernel's log"
            ) as caught:
                begin(0, memory, "op 9").result(30)
            assert caught.value.errno == errno.EIO
            assert f"{file.folder}: op 9: " in str(caught.value)
    assert torch.equal(tile, back)


# --- errors of the system ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["read", "write", "sync"])
@pytest.mark.sampled(4)
def test_an_error_of_the_system_says_where_and_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """Only the transfer that it struck fails; none hangs. The second of three blocks is struck."""
    if kind == "sync":
        monkeypatch.setattr(direct, "alignment", lambda fd: Direct())
    calls: list[str] = []

    def fault(what: str, call: Callable[[], Any]) -> Any:
        calls.append(what)
        if what == kind and calls.count(kind) == 2:
            raise OSError(number, os.strerror(number))
        return call()

    size = 3 * blocks.BLOCK
    tile, back = draw(size), aligned(size)
    with DiskFile(folder, size, threads=1, disk=Faulty(fault)) as file:
        if kind == "read":
            file.write(0, tile).result()
        struck = file.read(0, back, "tile 4") if kind == "read" else file.write(0, tile, "tile 4")
        with pytest.raises(OffloadError) as caught:
            struck.result(60)
        text = f"{folder}: tile 4: {kind} of 8,388,608 bytes at byte 8,388,608 of the offload file failed: "
        assert str(caught.value).startswith(text + os.strerror(number))
        assert caught.value.errno == number
        assert number == errno.EINVAL or "; " in str(caught.value), "a remedy"
        assert isinstance(caught.value.__cause__, OSError)
        assert calls.count(kind) == 2, "no block after the one that failed"
        file.write(0, tile).result(60)
        file.read(0, back).result(60)
    assert torch.equal(tile, back)


# --- wrong bytes ------------------------------------------------------------------------------------------------------

BAD = 3 * UNIT  # the byte at which the damaged unit begins


def flipped(file: DiskFile) -> None:
    byte = on_disk(file)[BAD + 77]
    damage(file, BAD + 77, bytes([byte ^ 4]))


def zeroed(file: DiskFile) -> None:
    damage(file, BAD, bytes(UNIT))


def swapped(file: DiskFile) -> None:
    data = on_disk(file)
    damage(file, BAD, data[BAD + UNIT : BAD + 2 * UNIT])
    damage(file, BAD + UNIT, data[BAD : BAD + UNIT])


def sectors_swapped(file: DiskFile) -> None:
    data = on_disk(file)
    damage(file, BAD, data[BAD + 512 : BAD + 1024] + data[BAD : BAD + 512])


def torn(file: DiskFile) -> None:
    damage(file, BAD + 512, bytes(UNIT - 512))


@pytest.mark.parametrize("harm", [flipped, zeroed, swapped, sectors_swapped, torn])
def test_damaged_bytes_are_an_error(either: Path, harm: Callable[[DiskFile], None]) -> None:
    tile, back = draw(8 * UNIT), aligned(8 * UNIT)
    for checksums in (True, False):
        with DiskFile(either, 9 * UNIT, checksums=checksums) as file:
            file.write(0, tile).result()
            harm(file)
            read = file.read(0, back, "opt_state/mu, tile 0")
            if not checksums:  # the damage is real, and nobody else finds it
                read.result()
                assert not torch.equal(tile, back)
                continue
            with pytest.raises(CorruptError) as caught:
                read.result()
            found = 2 if harm is swapped else 1
            assert str(caught.value) == (
                f"{either}: opt_state/mu, tile 0: read of 32,768 bytes at byte 0 of the offload file: {found} of 8 "
                "units of 4,096 bytes, the first at byte 12,288, are not what was written there. The disk or its "
                "driver lost or changed them: load the last checkpoint, and look at the kernel's log"
            )
            file.read(0, back[:BAD]).result()
            file.write(0, tile).result()
            file.read(0, back).result()
            assert torch.equal(tile, back)


def test_a_write_that_only_said_yes_is_found(folder: Path) -> None:
    """The tile of the step before is still there. A tail of it too: DeepSpeed's was never written."""
    length, lost = 4 * UNIT, [False]
    disk = Faulty(lambda kind, call: call() if kind == "read" or not lost[0] else length)
    with DiskFile(folder, 8 * UNIT, disk=disk) as file:
        file.write(0, draw(length, 1)).result()
        file.write(length, draw(length, 1)).result()
        lost[0] = True
        file.write(0, draw(length, 2)).result()
        with pytest.raises(CorruptError, match="4 of 4 units"):
            file.read(0, aligned(length)).result()
        file.read(length, aligned(length)).result()


def test_a_lost_tail_is_found(folder: Path) -> None:
    """The last bytes of a tile, in a unit of their own."""
    with DiskFile(folder, 8 * UNIT) as file:
        file.write(0, draw(UNIT + 100)).result()
        damage(file, UNIT, bytes(100))
        file.read(0, aligned(UNIT)).result()
        with pytest.raises(CorruptError, match="at byte 4,096"):
            file.read(0, aligned(UNIT + 1)).result()


def test_a_slow_disk_gives_the_same_bits(folder: Path) -> None:
    disk = Faulty(lambda kind, call: (time.sleep(0.02), call())[1])
    tiles = [draw(UNIT, n) for n in range(6)]
    back = [aligned(UNIT) for _ in tiles]
    with DiskFile(folder, 6 * UNIT, disk=disk) as file:
        for one in [file.write(n * UNIT, tile) for n, tile in enumerate(tiles)]:
            one.result()
        for one in [file.read(n * UNIT, tile) for n, tile in enumerate(back)]:
            one.result()
    assert all(torch.equal(a, b) for a, b in zip(tiles, back, strict=True))


# --- making it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nameless", [True, False])
def test_the_file_has_no_name_and_its_room_is_taken_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    with DiskFile(folder, 3 * MB + 1) as file:
        status = os.fstat(file.file.fd)
        assert (status.st_size, status.st_nlink, status.st_mode & 0o777) == (3 * MB + UNIT, 0, 0o600)
        assert status.st_blocks * 512 >= 3 * MB
        assert list(folder.iterdir()) == []
    assert file.file.fd == -1


def test_a_folder_that_cannot_hold_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = folder / "plain"
    plain.touch()
    for path, text in (
        (folder / "none", "there is no such folder: make it, or name another folder with Spec(nvme_path=)"),
        (plain, "this is no folder: remove what is in its place"),
    ):
        with pytest.raises(OffloadError, match="no file of 4,096 bytes can be made here") as caught:
            DiskFile(path, 8)
        assert text in str(caught.value)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    allocated: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: allocated.append(args[2]))
    with pytest.raises(OffloadError, match=r"no file of [\d,]+ bytes can be made here for what is offloaded") as caught:
        DiskFile(folder, free + (8 << 30))
    assert caught.value.errno == errno.ENOSPC
    assert "are free: No space left on device; the disk is full: free some space" in str(caught.value)
    assert allocated == [], "that would fill the disk before it fails"
    assert [path.name for path in folder.iterdir()] == ["plain"]


@pytest.mark.parametrize("kind", ["free", "create", "allocate"])
@pytest.mark.parametrize("number", sorted(open_file.ADVICE))
def test_what_fails_while_it_is_made(folder: Path, kind: str, number: int) -> None:
    """Every error that has a remedy, in each call; no descriptor is left open."""

    class Failing(Disk):
        def run(self, what: str, path: Path, call: Callable[[], Any]) -> Any:
            if what == kind:
                raise OSError(number, os.strerror(number))
            return call()

    before = os.listdir("/proc/self/fd")
    with pytest.raises(OffloadError) as caught:
        DiskFile(folder, 1 << 20, disk=Failing())
    assert caught.value.errno == number
    assert str(caught.value).startswith(f"{folder}: no file of 1,048,576 bytes can be made here for what is offloaded")
    assert str(caught.value).endswith(f"{os.strerror(number)}; {open_file.ADVICE[number]}")
    assert (" are free: " in str(caught.value)) == (number in open_file.FULL and kind != "free")
    assert os.listdir("/proc/self/fd") == before
    assert list(folder.iterdir()) == []


def test_memory_is_no_disk() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    with pytest.raises(OffloadError) as caught:
        DiskFile(shm, 8)
    assert (
        str(caught.value) == "/dev/shm: lies on tmpfs, which is memory: name a folder on a disk with Spec(nvme_path=)"
    )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Direct(), "the file system has no direct I/O"),
        (Direct(512, 65536), "direct I/O there wants ranges of 65,536 bytes, and they are of 4,096"),
    ],
)
def test_without_direct_io_one_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: Direct, reason: str
) -> None:
    monkeypatch.setattr(direct, "alignment", lambda fd: said)
    with caplog.at_level(logging.WARNING, "fzero"), DiskFile(folder, UNIT) as file:
        assert not file.direct
        file.write(0, draw(8)).result()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{folder}: {reason}, so what is offloaded there passes through the page cache"
    )


def test_a_system_that_does_not_say_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskFile(folder, UNIT) as file:
        has = file.direct
    monkeypatch.setattr(direct, "alignment", lambda fd: None)
    with DiskFile(folder, UNIT) as file:
        assert file.direct == has
    monkeypatch.setattr(direct, "aligned", lambda nbytes: torch.zeros(nbytes + 64, dtype=torch.uint8)[1 : nbytes + 1])
    with caplog.at_level(logging.WARNING, "fzero"), DiskFile(folder, UNIT) as file:
        assert not file.direct
        back, tile = torch.zeros(UNIT + 1, dtype=torch.uint8)[1:], draw(UNIT + 1)[1:]  # where direct I/O cannot
        file.write(0, tile).result()
        file.read(0, back).result()
        assert torch.equal(tile, back)
    assert not has or "direct I/O of 4,096 bytes failed (Invalid argument)" in caplog.text


def test_a_file_system_without_fallocate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with DiskFile(folder, 3 * UNIT) as file:
        assert os.fstat(file.file.fd).st_size == 3 * UNIT


# --- what it leaves ---------------------------------------------------------------------------------------------------


def test_what_nobody_uses_is_closed(folder: Path) -> None:
    """After its last transfer; the threads end too."""
    go = threading.Event()
    disk = Faulty(lambda kind, call: (go.wait(60), call())[1])
    file = DiskFile(folder, UNIT, disk=disk)
    inner, threads = file.file, list(file._threads)
    writing = file.write(0, draw(UNIT))
    del file
    gc.collect()
    assert inner.fd >= 0
    go.set()
    writing.result(60)
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert inner.fd == -1


def test_close_names_a_call_that_does_not_return(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_file, "CLOSE_SECONDS", 0.05)
    go = threading.Event()
    file = DiskFile(folder, UNIT, disk=Faulty(lambda kind, call: (go.wait(60), call())[1]))
    file.write(0, draw(UNIT), "op 2")
    file.close()
    assert (
        "the offload file stays open, a call does not return: op 2: write of 4,096 bytes at byte 0 for " in caplog.text
    )
    go.set()
    for thread in file._threads:
        thread.join(60)
    assert file.file.fd == -1


def resident(file: DiskFile) -> int:
    """Bytes of the file in the page cache, as mincore says."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = np.frombuffer(mmap.mmap(file.file.fd, file.nbytes), np.uint8)
    states = np.zeros(file.nbytes // mmap.PAGESIZE, np.uint8)
    address, out = ctypes.c_void_p(pages.ctypes.data), ctypes.c_void_p(states.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(file.nbytes), out) == 0
    return mmap.PAGESIZE * int((states & 1).sum())


def test_the_page_cache_does_not_grow(either: Path) -> None:
    size = 4 * blocks.BLOCK
    tile, back = draw(size), aligned(size)
    with DiskFile(either, size) as file:
        file.write(0, tile).result()
        assert resident(file) == 0
        file.read(0, back).result()
        assert resident(file) == 0
        if not file.direct:  # mincore sees pages that are there
            with open(f"/proc/self/fd/{file.file.fd}", "rb") as again:
                again.read(MB)
            assert resident(file) >= MB


def test_aligned_memory() -> None:
    for nbytes in (0, 1, 4095, 4096, 100_000):
        memory = aligned(nbytes)
        assert (memory.numel(), memory.dtype, bool(memory.any())) == (nbytes, torch.uint8, False)
        assert nbytes == 0 or memory.data_ptr() % mmap.PAGESIZE == 0
