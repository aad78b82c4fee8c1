"""calls: every file operation of a save or a load goes through one small object, `Disk`.

Each operation has a kind and a path and passes `Disk.run`. So a test can kill a process before or after it, make it
fail, slow it down or record it. An error of the operating system becomes a `CheckpointError` that names the file and
the remedy. Nothing here follows a symbolic link or waits for a pipe: a file of a checkpoint is a plain file in its
directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from fzero.errors import CheckpointError, CorruptError

T = TypeVar("T")
MAX_VIEWS = 512  # parts that one writev takes; IOV_MAX is 1,024 on Linux
WRITE_BACK = 32 << 20  # bytes after which the kernel begins to send them to the disk

ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, keep fewer checkpoints (keep=), or save to another directory",
    errno.EDQUOT: "your quota is used up: remove files, keep fewer checkpoints (keep=), or save to another directory",
    errno.EROFS: "the file system is read-only: save to another directory, or mount it writable",
    errno.EACCES: "this user may not: change the permissions of the directory, or save to another one",
    errno.EPERM: "this user may not: change the permissions of the directory, or save to another one",
    errno.EIO: "the device failed (EIO): look at the kernel's log, and save to another disk",
    errno.ENOTDIR: "a directory was needed here or above, and a file is in its place",
    errno.EISDIR: "a file was needed, this is a directory",
    errno.ELOOP: "a symbolic link is not followed: files of a checkpoint lie in its own directory",
    errno.ENAMETOOLONG: "the path is too long: save to a directory with a shorter one",
    errno.EMFILE: "this process has too many files open: close some, or raise `ulimit -n`",
    errno.ESTALE: "the network file system lost the file (ESTALE): is another machine removing this directory?",
}


class Disk:
    """The file system. It has no state. Its methods raise CheckpointError.

    `kind` is the name of the method that `run` is called for.
    """

    def run(self, kind: str, path: Path, call: Callable[[], T]) -> T:
        """Runs one operation, `call`. Tests override this."""
        return call()

    def do(self, kind: str, path: Path, call: Callable[[], T]) -> T:
        """Runs one operation, and turns OSError into CheckpointError."""
        try:
            return self.run(kind, path, call)
        except OSError as error:
            raise refused(kind, path, error) from error

    # --- writing

    def mkdir(self, path: Path) -> None:
        """Makes a directory in a parent that exists. Raises CheckpointError if it is there already."""
        self.do("mkdir", path, lambda: os.mkdir(path))

    def create(self, path: Path) -> File:
        """Makes a file to write to. Raises CheckpointError if it is there already."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return File(self, path, self.do("create", path, lambda: os.open(path, flags, 0o666)))

    def write(self, path: Path, data: bytes) -> None:
        """Makes a file with these bytes; it is on the disk when this returns."""
        with self.create(path) as file:
            file.write([memoryview(data)])
            file.sync()

    def sync_directory(self, path: Path) -> None:
        """Syncs a directory: its names are on the disk when this returns."""

        def call() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                on_disk(fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems whose directories need none
                    raise
            finally:
                os.close(fd)

        self.do("sync_directory", path, call)

    def rename(self, old: Path, new: Path) -> None:
        """Renames atomically. A file at `new` is replaced; a directory there that is not empty is an error."""
        self.do("rename", new, lambda: os.rename(old, new))

    def unlink(self, path: Path) -> None:
        """Removes a file."""
        self.do("unlink", path, lambda: os.unlink(path))

    def rmdir(self, path: Path) -> None:
        """Removes an empty directory."""
        self.do("rmdir", path, lambda: os.rmdir(path))

    def lock(self, path: Path) -> Callable[[], None] | None:
        """Takes the lock of a file, which is made if it is missing. Returns the function that releases it.

        The kernel releases it when the process dies. Returns None if another process holds it. If the file system has
        no locks, nothing is locked.
        """

        def call() -> Callable[[], None] | None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                    os.close(fd)
                    raise

            def release() -> None:
                try:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold the file open
                except OSError:
                    pass
                finally:
                    os.close(fd)

            return release

        return self.do("lock", path, call)

    # --- reading

    def size(self, path: Path) -> int | None:
        """Returns the bytes of a plain file; None if there is none of this name."""

        def call() -> int | None:
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

        return self.do("size", path, call)

    def is_directory(self, path: Path, *, links: bool = False) -> bool:
        """Whether there is a directory of this name; with `links` also a link to one."""

        def call() -> bool:
            try:
                return stat.S_ISDIR((os.stat if links else os.lstat)(path).st_mode)
            except FileNotFoundError:
                return False

        return self.do("is_directory", path, call)

    def names(self, path: Path) -> list[str] | None:
        """Returns the names in a directory, sorted; None if there is no such directory."""

        def call() -> list[str] | None:
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                return None

        return self.do("names", path, call)

    def read(self, path: Path, *, limit: int) -> bytes:
        """Returns all bytes of a file. Raises CorruptError if it is missing, no plain file, or longer than `limit`
        bytes."""

        def call() -> bytes:
            fd = _open(path)
            try:
                size = os.fstat(fd).st_size
                if size > limit:
                    raise CorruptError(path, f"is {size:,} bytes long: such a file has at most {limit:,}")
                data = bytearray(size)
                _fill(fd, path, 0, memoryview(data))
                return bytes(data)
            finally:
                os.close(fd)

        return self.do("read", path, call)

    def read_into(self, path: Path, start: int, view: memoryview) -> None:
        """Fills `view` (bytes) from byte `start` of a file. Raises CorruptError if the file ends before."""

        def call() -> None:
            fd = _open(path)
            try:
                _fill(fd, path, start, view)
            finally:
                os.close(fd)

        self.do("read", path, call)

    def free(self, path: Path) -> int | None:
        """Returns the bytes that this user may still write to a directory's file system; None if that is not known."""
        status = self.do("free", path, lambda: os.statvfs(path))
        return status.f_bavail * status.f_frsize if status.f_blocks else None


class File:
    """A new file that is being written.

    Only the methods here write its fields, on one thread. written: bytes that the kernel has accepted. started: bytes
    that it was asked to send to the disk. fd: -1 after the file was closed.
    """

    def __init__(self, disk: Disk, path: Path, fd: int) -> None:
        self.disk: Disk = disk
        self.path: Path = path
        self.fd: int = fd
        self.written: int = 0  # bytes that the kernel accepted
        self.started: int = 0  # bytes on their way to the disk

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends these bytes, at most MAX_VIEWS parts at a time."""
        left = [view.cast("B") for view in views if view.nbytes]
        while left:
            part = left[:MAX_VIEWS]
            done = self.disk.do("write", self.path, lambda part=part: os.writev(self.fd, part))  # type: ignore[misc]
            self.written += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]
        if self.written - self.started >= WRITE_BACK:
            self._start_write_back()

    def _start_write_back(self) -> None:
        """Advises Linux that the range will not be needed, which starts its write-out. `sync` waits for it."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, self.started, self.written - self.started, os.POSIX_FADV_DONTNEED)
        self.started = self.written

    def sync(self) -> None:
        """Syncs the file: the written bytes are on the disk when this returns."""
        self.disk.do("sync", self.path, lambda: on_disk(self.fd))

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        fd, self.fd = self.fd, -1
        if kind is not None:
            os.close(fd)
        else:
            self.disk.do("close", self.path, lambda: os.close(fd))


def on_disk(fd: int) -> None:
    """Waits until what was written to an open file or directory lies on the disk. macOS's fsync waits for the drive to
    have it, which may then lose it with the power; what waits for more is F_FULLFSYNC, where the file system has it.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def _open(path: Path) -> int:
    """Opens a plain file for reading; never a link, a pipe or a device, since opening those could wait for ever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptError(path, "is missing", errno.ENOENT) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptError(
                path, "is a link or no plain file: files of a checkpoint lie in its own directory"
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptError(path, "is no plain file")
    return fd


def _fill(fd: int, path: Path, start: int, view: memoryview) -> None:
    place, wanted = start, start + len(view)
    while place < wanted:
        done = os.preadv(fd, [view[place - start :]], place)
        if not done:
            raise CorruptError(path, f"ends at byte {place:,}, needed up to {wanted:,}: it is truncated")
        place += done


def refused(kind: str, path: Path, error: OSError) -> CheckpointError:
    """Returns the error for an operation that the operating system refused, with the file and the remedy."""
    message = f"{kind.replace('_', ' ')} failed: {os.strerror(error.errno) if error.errno else error}"
    advice = ADVICE.get(error.errno or 0)
    return CheckpointError(path, f"{message}; {advice}" if advice else message, error.errno)
