"""open_file: an unnamed file of a given size, open for direct I/O where the file system has it.

O_TMPFILE makes it without a name; where that is missing it is made under a random name and unlinked at once. All its
bytes are allocated before this returns. The kernel frees them when the last process that has it open ends, whatever
ended it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from pathlib import Path

from fzero.disk import direct
from fzero.disk.calls import Disk
from fzero.disk.direct import Direct
from fzero.disk.sums import UNIT
from fzero.errors import OffloadError

log = logging.getLogger("fzero")

NAME_ONE = "name a folder on a disk with Spec(nvme_path=)"
ANOTHER = "or name another folder with Spec(nvme_path=)"
ADVICE = {
    errno.ENOSPC: f"the disk is full: free some space, {ANOTHER}",
    errno.EDQUOT: f"your quota is used up: remove files, {ANOTHER}",
    errno.EROFS: f"the file system is read-only: mount it writable, {ANOTHER}",
    errno.EACCES: f"this user may not write there: change the folder's permissions, {ANOTHER}",
    errno.EPERM: f"this user may not write there: change the folder's permissions, {ANOTHER}",
    errno.ENOENT: f"there is no such folder: make it, {ANOTHER}",
    errno.ENOTDIR: f"this is no folder: remove what is in its place, {ANOTHER}",
    errno.EFBIG: "a file may not be that large here: look at `ulimit -f` and at the file system's limit",
    errno.EMFILE: "this process has too many files open: close some, or raise `ulimit -n`",
    errno.EIO: f"the device failed (EIO): look at the kernel's log, {ANOTHER}",
}
FULL = (errno.ENOSPC, errno.EDQUOT)


class OpenFile:
    """An unnamed file that is open. `make` makes one.

    direct: the alignment of direct I/O; false if reads and writes go through the page cache. fd: -1 once it is closed;
    `close` alone writes it. nbytes: `grow` alone writes it.
    """

    def __init__(self, folder: Path, nbytes: int, fd: int, direct: Direct, disk: Disk) -> None:
        self.folder, self.nbytes, self.fd, self.direct, self.disk = folder, nbytes, fd, direct, disk

    def close(self) -> None:
        """Closes it, once. No thread may be in a call on it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def make(folder: Path, nbytes: int, disk: Disk) -> OpenFile:
    """Returns a new file of `nbytes` zeros, rounded up to UNIT, in `folder`. After an error nothing of it is left.

    Raises OffloadError: no such folder, no right to write, a file system in memory, not enough room.
    """
    size = max(-(-nbytes // UNIT), 1) * UNIT
    fd = free = -1
    try:
        free = disk.run("free", folder, lambda: _free(folder))
        fd = disk.run("create", folder, lambda: _create(folder))
        if kind := direct.in_memory(fd):
            raise OffloadError(folder, f"lies on {kind}, which is memory: {NAME_ONE}", errno.EINVAL)
        disk.run("allocate", folder, lambda: _allocate(fd, size, free))
        alignment, why = _direct(fd)
    except OSError as error:
        _close(fd)
        raise _no_room(folder, size, free, error) from error
    except BaseException:
        _close(fd)
        raise
    if why:
        log.warning("%s: %s, so what is offloaded there passes through the page cache, which is slower", folder, why)
        if hasattr(os, "posix_fadvise"):  # nothing is read ahead, which nobody would drop from the cache
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return OpenFile(folder, size, fd, alignment, disk)


def grow(file: OpenFile, nbytes: int) -> None:
    """Makes a file larger, to `nbytes`, rounded up to UNIT. Raises OffloadError: not enough room; it is as it was."""
    size = -(-nbytes // UNIT) * UNIT
    free = -1
    try:
        free = file.disk.run("free", file.folder, lambda: _free(file.folder))
        file.disk.run("allocate", file.folder, lambda: _allocate(file.fd, size, free + file.nbytes))
    except OSError as error:
        raise _no_room(file.folder, size, free, error) from error
    file.nbytes = size


def _no_room(folder: Path, size: int, free: int, error: OSError) -> OffloadError:
    room = f", {free:,} are free" if error.errno in FULL and free >= 0 else ""
    text = f"no file of {size:,} bytes can be made here for what is offloaded{room}: {advised(error)}"
    return OffloadError(folder, text, error.errno)


def advised(error: OSError) -> str:
    """Returns the text of an error of the operating system, with the remedy if one is known."""
    text = os.strerror(error.errno) if error.errno else str(error)
    advice = ADVICE.get(error.errno or 0)
    return f"{text}; {advice}" if advice else text


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _create(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # the plain way says what is wrong, for any reason
            return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    path = folder / f".fzero-offload-{secrets.token_hex(8)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(path)
    return fd


def _allocate(fd: int, size: int, free: int) -> None:
    """Gives the file its size and its room on the disk. A file system without `fallocate` gives the size alone."""
    if size > free:  # allocating would fill the disk before it fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # a system that is not Linux
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _direct(fd: int) -> tuple[Direct, str]:
    """(the alignment of direct I/O, which is on then; the reason why there is none)."""
    said = direct.alignment(fd)
    if said is not None and not said:
        return said, "the file system has no direct I/O"
    if said is not None and said.offset > UNIT:
        return Direct(), f"direct I/O there wants ranges of {said.offset:,} bytes, and they are of {UNIT:,}"
    if not direct.turn_on(fd):
        return Direct(), f"{'the file system refuses' if hasattr(os, 'O_DIRECT') else 'this system has no'} O_DIRECT"
    if said is not None:
        return said, ""
    page = memoryview(direct.aligned(UNIT).numpy())  # type: ignore[arg-type]
    try:  # a kernel before 6.1, or a file system that does not say; a page that was never written is read without I/O
        os.pwritev(fd, [page], 0)
        os.preadv(fd, [page], 0)
    except OSError as error:
        direct.turn_off(fd)
        return Direct(), f"direct I/O of {UNIT:,} bytes failed ({os.strerror(error.errno or 0)})"
    return Direct(UNIT, UNIT), ""


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
