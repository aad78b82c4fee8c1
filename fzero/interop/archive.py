"""archive: the places of the members of an uncompressed zip archive, the format of `torch.save`.

Tensors are read from the archive by their place, so a place must be right. The directory at the end gives the start and
length of each member. It is believed only if each member's own header agrees, and if no two members share a byte. A
compressed or encrypted member has no place: it is refused. Nothing of the members is read here.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD = struct.Struct("<4s5H3I2H")  # of a member: mark, version, flags, method, time, date, crc, sizes, two lengths
MARK = b"PK\x03\x04"
ENCRYPTED, SIZES_BEHIND = 1, 8  # flags
IN_ZIP64 = 0xFFFFFFFF  # for a size: it is in the header's extra field
METHODS = {8: "deflated", 9: "deflated", 12: "bzip2", 14: "lzma", 93: "zstandard"}


class Damaged(Exception):
    """The fault of an archive, and the remedy."""


@dataclass(frozen=True)
class Member:
    """The bytes [start, start + size) of the file."""

    start: int
    size: int


def members(file: Any) -> Mapping[str, Member]:
    """The members of an archive by name. `file` is opened for reading bytes, and can seek. Raises Damaged."""
    try:
        directory = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise Damaged(f"it is no whole zip archive, as torch.save has written since 1.6: {error}") from error
    members_of: dict[str, Member] = {}
    end, last = 0, ""
    for info in sorted(directory.infolist(), key=lambda info: info.header_offset):
        name = info.orig_filename
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ENCRYPTED:
            how = METHODS.get(info.compress_type, f"method {info.compress_type}")
            how = "encrypted" if info.flag_bits & ENCRYPTED else f"compressed ({how})"
            raise Damaged(
                f"its member {name!r:.200} is {how}: needed one that is stored as it is. Write the archive again as "
                "torch.save does, without compression (unpacked, with `zip -0 -r`)"
            )
        if name in members_of:
            raise Damaged(f"it has two members {name!r:.200}")
        if info.header_offset < end:
            raise Damaged(f"its member {name!r:.200} lies in {last!r:.200}")
        members_of[name] = _placed(file, info)
        end, last = members_of[name].start + members_of[name].size, name
        if end > directory.start_dir:
            raise Damaged(
                f"its member {name!r:.200} ends at byte {end:,}, beyond what the file has before its directory"
            )
    return members_of


def _placed(file: Any, info: zipfile.ZipInfo) -> Member:
    """The place of a member by its own header, which must agree with the directory."""
    file.seek(info.header_offset)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size or head[:4] != MARK:
        raise Damaged(f"its member {info.orig_filename!r:.200} has no header at byte {info.header_offset:,}")
    _, _, flags, method, _, _, _, packed, size, name_length, extra_length = HEAD.unpack(head)
    name = file.read(name_length)
    sizes = {packed, size} - {IN_ZIP64} if not flags & SIZES_BEHIND else set()
    same = name == _encoded(info) and method == info.compress_type and not flags & ENCRYPTED
    if not same or info.file_size != info.compress_size or sizes - {info.file_size}:
        raise Damaged(f"its member {info.orig_filename!r:.200} is another in the archive's directory than in its place")
    return Member(info.header_offset + HEAD.size + name_length + extra_length, info.file_size)


def _encoded(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


def read(file: Any, member: Member, limit: int, label: str) -> bytes:
    """The bytes of a small member. Raises Damaged for a larger one."""
    if member.size > limit:
        raise Damaged(f"its {label} is {member.size:,} bytes long: needed at most {limit:,}")
    file.seek(member.start)
    data: bytes = file.read(member.size)
    if len(data) != member.size:
        raise Damaged(f"its {label} ends before it should")
    return data
