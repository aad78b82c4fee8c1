"""direct: what the system says about a file: its kind of file system, and the alignment that direct I/O needs.

Python has neither `statx` nor the type of `statfs`, so both are asked of the C library. A system that does not answer
is told apart from one that says no.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}  # f_type: linux/magic.h
HUGE = 2 << 20  # bytes of a huge page, on x86 and most of ARM
DIOALIGN, EMPTY_PATH = 0x2000, 0x1000  # STATX_DIOALIGN (Linux 6.1), AT_EMPTY_PATH
MASK_AT, MEMORY_AT, OFFSET_AT, STATX_BYTES = 0, 152, 156, 256  # of struct statx

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Direct:
    """Whether a file can be read and written past the page cache.

    memory, offset: bytes of which addresses, and offsets and lengths, are multiples; both 0 if it cannot be.
    """

    memory: int = 0
    offset: int = 0

    def __bool__(self) -> bool:
        return self.offset > 0


def in_memory(fd: int) -> str:
    """Returns the name of a file system that lies in memory ("tmpfs"); "" for one on a device."""
    out = ctypes.create_string_buffer(512)
    if not hasattr(_libc, "fstatfs") or _libc.fstatfs(fd, out) != 0:
        return ""
    return IN_MEMORY.get(ctypes.c_long.from_buffer(out).value & 0xFFFFFFFF, "")


def alignment(fd: int) -> Direct | None:
    """Returns what statx says about direct I/O on an open file; None if the system does not say."""
    out = ctypes.create_string_buffer(STATX_BYTES)
    if not hasattr(_libc, "statx") or _libc.statx(fd, b"", EMPTY_PATH, DIOALIGN, out) != 0:
        return None
    mask, memory, offset = (ctypes.c_uint32.from_buffer(out, at).value for at in (MASK_AT, MEMORY_AT, OFFSET_AT))
    return Direct(memory, offset) if mask & DIOALIGN else None


@runtime_checkable
class Lockable(Protocol):
    """Pages of memory that can be page-locked (`fzero.state.host_memory`)."""

    def lock(self) -> None:
        """Locks all of them."""


def aligned(nbytes: int, kind: type[mmap.mmap] = mmap.mmap, *, huge: bool = True) -> Tensor:
    """Returns zeroed memory of this process: uint8, 1-D, `nbytes` long, at the beginning of a page, as direct I/O needs
    it. It is freed with the last tensor on it. A page that is only read takes none. kind: what makes the pages; those
    that are `Lockable` are locked.

    huge: the kernel is asked for huge pages, but for the end that fills none. A request to a disk has a limited number
    of pieces, so with small pages it is cut into more (`is_huge`). Where no disk reads the memory, small pages are
    better: a virtual machine whose host takes free memory back may need seconds for each GB of huge ones.

    >>> aligned(5000).shape, aligned(5000).data_ptr() % 4096
    (torch.Size([5000]), 0)
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    unit = HUGE if huge and nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + unit
    pages = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % unit if unit else 0
    if unit:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE, first, nbytes // unit * unit)
            _remember(pages, first, nbytes)
    if isinstance(pages, Lockable):
        pages.lock()
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=first)


def is_huge(address: int) -> bool:
    """Whether memory of `aligned` is there that lies in huge pages."""
    return any(first <= address < end for first, end in list(_huge.items()))


def _remember(pages: mmap.mmap, first: int, nbytes: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages, first))
    _huge[address] = address + nbytes
    weakref.finalize(pages, _huge.pop, address, None)


_huge: dict[int, int] = {}  # where memory in huge pages begins and ends


def turn_on(fd: int) -> bool:
    """Turns direct I/O on for an open file. Returns whether the file system has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):  # AttributeError: a system without O_DIRECT
        return False
    return True


def turn_off(fd: int) -> None:
    """Turns direct I/O off for an open file for which it is on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
