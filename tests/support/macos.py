"""A stand-in for macOS: what its Python and its system lack is hidden from this process, after torch was imported.

It hides Linux's calls of `os`, `mmap`, `socket` and the C library, and all of `/proc` and `/sys`. It cannot show what
macOS does otherwise than Linux, only what is missing there.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import os
import platform
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

GONE = {
    os: "memfd_create posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity fdatasync pidfd_open eventfd "
    "getrandom copy_file_range splice setns unshare O_DIRECT O_TMPFILE O_NOATIME POSIX_FADV_RANDOM POSIX_FADV_DONTNEED",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_REMOVE MADV_MERGEABLE MAP_POPULATE MAP_NORESERVE",
    socket: "SO_PEERCRED SCM_CREDENTIALS AF_NETLINK AF_PACKET AF_VSOCK",
    fcntl: "F_OFD_SETLK F_ADD_SEALS F_GETPIPE_SZ F_SETPIPE_SZ F_NOTIFY",
}
OF_GLIBC = ("statx", "malloc_trim", "memfd_create", "mallopt", "gnu_get_libc_version")
HIDDEN = ("/proc", "/sys", "/dev/shm")


def pretend() -> None:
    """Makes this process one of macOS, as far as that goes."""
    import torch._dynamo  # noqa: F401  # torch asks for its own system while it is imported

    sysconfig.get_config_vars(), platform.uname()  # both keep what they find
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]  # found at its import
    for module, names in GONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "darwin"
    builtins.open = io.open = _without(io.open)  # type: ignore[assignment]
    for name in ("stat", "lstat", "readlink", "open", "listdir", "scandir"):
        setattr(os, name, _without(getattr(os, name)))
    load = ctypes.CDLL
    ctypes.CDLL = lambda name, *args, **kwargs: (_Libc if name is None else _as_is)(load(name, *args, **kwargs))  # type: ignore[assignment, misc]


def _without(call: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if any(name == folder or name.startswith(f"{folder}/") for folder in HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return call(path, *args, **kwargs)

    return hidden


def _as_is(library: Any) -> Any:
    return library


class _Libc:
    """The C library without what glibc and Linux add."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in OF_GLIBC:
            raise AttributeError(name)
        return getattr(self._library, name)
