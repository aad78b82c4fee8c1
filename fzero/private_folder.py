"""private_folder: a folder that this user alone can write to, and small files in it.

Other users of a machine may plant a folder, a file or a link at the place of a cache. Under the temporary directory
anyone can. So a folder is opened once. It is trusted only if it belongs to this user and nobody else may write to it.
All later operations go through its descriptor. No link is followed, and nothing is truncated: files are made new and
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no advisory locks on this system: the last of two writers at once wins
    fcntl = None  # type: ignore[assignment]

LEFT = 3600  # seconds after which no process writes to a new file any more
POLL = 0.003  # seconds between two looks at a lock that another process holds
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """Returns a descriptor of the folder. With `make`, a missing folder is made, for this user alone.

    Raises OSError if it belongs to another user, or others may write to it. An empty folder that a group may write to,
    as with a umask of 0002, is made this user's alone.
    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | SAFE)
    except NotADirectoryError:
        raise PermissionError(errno.EPERM, "it is a link or no folder, needed a folder") from None
    try:
        _close(descriptor)
        _ours(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def read(within: int, name: str, limit: int) -> bytes:
    """Returns the bytes of a file of a folder. Raises OSError, also if it is a link, another user's, or longer than
    `limit`."""
    descriptor = os.open(name, os.O_RDONLY | SAFE, dir_fd=within)
    with os.fdopen(descriptor, "rb") as file:
        _ours(descriptor, plain=True)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit:,} bytes")
    return data


def replace(within: int, name: str, data: bytes) -> None:
    """Gives a file of a folder these bytes, atomically. Raises OSError; then the old file is still there."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=within)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)
    except BaseException:
        os.unlink(temporary, dir_fd=within)
        raise


def keep_last(within: int, ending: str, files: int | None = None, nbytes: int | None = None) -> None:
    """Removes the oldest of a folder's files of an ending, beyond so many files or bytes, and what a process that was
    killed has left of its writing."""
    found = []
    for name in os.listdir(within):
        temporary = name.startswith(".") and f"{ending}." in name
        if temporary or (name.endswith(ending) and not name.startswith(".")):
            with contextlib.suppress(FileNotFoundError):  # another rank removed it
                status = os.stat(name, dir_fd=within, follow_symlinks=False)
                if not temporary:
                    found.append((status.st_mtime_ns, name, status.st_size))
                elif time.time() - status.st_mtime > LEFT:
                    os.unlink(name, dir_fd=within)
    held = 0
    for number, (_, name, size) in enumerate(sorted(found, reverse=True), 1):
        held += size
        if (files is not None and number > files) or (nbytes is not None and held > nbytes):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=within)


@contextlib.contextmanager
def locked(within: int, name: str, patience: float = math.inf) -> Iterator[None]:
    """Holds the lock on a file of a folder, which is made if it is missing; after `patience` seconds without it."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | SAFE, 0o600, dir_fd=within)
    try:
        _ours(descriptor, plain=True)
        if fcntl is not None:
            end = time.monotonic() + patience
            while not _lock(descriptor) and time.monotonic() < end:
                time.sleep(POLL)
        yield
    finally:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the file open as well
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def refused(path: Path) -> str:
    """Returns the reason why a folder is not this user's alone; "" if it is, or is not there yet."""
    try:
        with folder(path):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)


def _ours(descriptor: int, plain: bool = False) -> None:
    status = os.fstat(descriptor)
    if plain and not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "it is no plain file")
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o002 or (status.st_mode & 0o020 and not _own_group(descriptor, status.st_gid)):
        raise PermissionError(errno.EPERM, "other users may write to it: chmod go-w makes it this user's")


def _close(descriptor: int) -> None:
    """Takes the group's right to write from a folder of this user that nobody has written to yet."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0o020 and not os.listdir(descriptor):
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~0o020)
        if os.listdir(descriptor):  # written to meanwhile
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def _own_group(descriptor: int, gid: int) -> bool:
    """Whether a file's group is this user alone, as with a umask of 0002: named as the user, and nobody else in it.

    False for root's group, which other accounts have too, and if an access list gives others the right to write.
    """
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        listed = "system.posix_acl_access" in getattr(os, "listxattr", lambda _: ())(descriptor)
    except KeyError:
        return False
    except OSError:  # a file system without access lists
        listed = False
    named = gid == user.pw_gid != 0 and group.gr_name == user.pw_name
    return named and not listed and set(group.gr_mem) <= {user.pw_name}
