"""Archives and pickles that lie: what is read is what `torch.load` reads, or nothing is, and no bomb goes off."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_bits

from fzero.errors import CorruptError
from fzero.interop import _unpickle, archive, pickled
from fzero.interop._unpickle import UnpickleRefused
from fzero.interop.file_places import FilePlace

HELD = {"a": torch.arange(1000.0), "b": [torch.arange(7), {"c": torch.ones(3, 5).bfloat16()}]}
HELD["view"] = HELD["a"][100:200]  # type: ignore[index]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(HELD, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def inside(file: Path) -> Any:
    (found,) = _unpickle.torch_files({"files": [str(file)], "allow": []})
    return found


def tensors(shown: Any, file: Path) -> list[torch.Tensor]:
    """The tensors of an answer in its order, as the parent reads them."""

    def places(value: Any) -> list[FilePlace]:
        if isinstance(value, FilePlace):
            return [value]
        return [p for one in (value.values() if isinstance(value, dict) else value) for p in places(one)]

    found = places(pickled._value(shown, file))
    return [place.read(0, place.numel).view(place.shape) for place in found]


def same_as_saved(file: Path) -> bool:
    known = [HELD["a"], HELD["b"][0], HELD["b"][1]["c"], HELD["view"]]  # type: ignore[index]
    return all(same_bits(a, b) for a, b in zip(tensors(inside(file), file), known, strict=True))


def rewritten(file: Path, change: Callable[[zipfile.ZipInfo, bytes], Any] = lambda info, data: data) -> None:
    """The archive written again by Python's zipfile, each member as `change` says (None: left out)."""
    with zipfile.ZipFile(file) as old:
        parts = [(info, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(file, "w") as new:
        for info, data in parts:
            fresh = zipfile.ZipInfo(info.filename)
            if (changed := change(fresh, data)) is not None:
                new.writestr(fresh, changed, fresh.compress_type)


def test_tensors_are_found_where_torch_wrote_them(file: Path) -> None:
    assert same_as_saved(file)


def test_an_archive_that_another_program_wrote_is_read_right(file: Path) -> None:
    """torch computes where storages lie from how torch itself pads them: there lies something else."""
    rewritten(file)
    assert same_as_saved(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("member", ["x/data/0", "x/data.pkl", "x/byteorder"])
def test_a_compressed_member_is_refused_by_name(file: Path, method: int, member: str) -> None:
    def change(info: zipfile.ZipInfo, data: bytes) -> bytes:
        info.compress_type = method if info.filename == member else zipfile.ZIP_STORED
        return data

    rewritten(file, change)
    with pytest.raises(UnpickleRefused, match=rf"{file}: its member '{member}' is compressed \(.*without compression"):
        inside(file)


def directory_of(data: bytes, name: bytes) -> int:
    """Where a member's entry begins in the directory."""
    return data.rindex(b"PK\x01\x02", 0, data.rindex(name))


def broken(how: str, data: bytearray) -> bytes | bytearray:
    entry, local = directory_of(data, b"x/data/0"), data.index(b"x/data/0") - 30
    if how == "encrypted":
        data[entry + 8] |= 1
    elif how == "local method":
        struct.pack_into("<H", data, local + 8, 8)
    elif how == "local name":
        data[local + 30 + 7] = ord("7")
    elif how == "local size":
        struct.pack_into("<H", data, local + 6, 0)
        struct.pack_into("<II", data, local + 18, 3, 3)
    elif how == "no local header":
        data[local : local + 4] = b"\0\0\0\0"
    elif how == "offset beyond":
        struct.pack_into("<I", data, entry + 42, len(data) - 40)
    elif how == "size beyond":
        struct.pack_into("<II", data, entry + 20, len(data), len(data))
    elif how == "shorter":
        struct.pack_into("<II", data, entry + 20, 3996, 3996)
    elif how == "longer":
        struct.pack_into("<II", data, entry + 20, 4004, 4004)
    elif how == "lengths differ":
        struct.pack_into("<II", data, entry + 20, 2000, 4000)
    elif how == "overlap":  # of two members at one place
        other = directory_of(data, b"x/data/1")
        struct.pack_into("<I", data, other + 42, struct.unpack_from("<I", data, entry + 42)[0])
    elif how == "truncated":
        return data[:-100]
    elif how == "cut in the middle":
        return data[: local + 1000]
    elif how == "no zip":
        return pickle.dumps(HELD["b"])
    elif how == "a pickle before":  # which torch would read instead
        return pickle.dumps([1]) + data
    return data


BROKEN = {
    "encrypted": "is encrypted",
    "local method": "is another in the archive's directory than in its place",
    "local name": "is another in the archive's directory than in its place",
    "local size": "is another in the archive's directory than in its place",
    "no local header": "has no header at byte",
    "offset beyond": "has no header at byte",
    "size beyond": "ends at byte|lies in",
    "shorter": "is to have 1000 elements of torch.float32, and has 3,996 bytes",
    "longer": "is to have 1000 elements of torch.float32, and has 4,004 bytes",
    "lengths differ": "is another in the archive's directory than in its place",
    "overlap": "lies in|is another",
    "truncated": "is no whole zip archive",
    "cut in the middle": "is no whole zip archive",
    "no zip": "is no whole zip archive",
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_archive_that_contradicts_itself_is_refused(file: Path, how: str) -> None:
    file.write_bytes(broken(how, bytearray(file.read_bytes())))
    with pytest.raises(UnpickleRefused, match=BROKEN[how]):
        inside(file)


def test_what_lies_before_an_archive_moves_its_members(file: Path) -> None:
    file.write_bytes(broken("a pickle before", bytearray(file.read_bytes())))
    assert same_as_saved(file)


def test_any_flipped_byte_of_an_archives_structure_is_refused_or_harmless(file: Path) -> None:
    """Whatever byte outside the members is another: the same tensors, or an error."""
    whole = file.read_bytes()
    with open(file, "rb") as opened:
        held = [range(m.start, m.start + m.size) for m in archive.members(opened).values()]
    outside = [i for i in range(len(whole)) if not any(i in part for part in held)]
    refused = 0
    for i in outside[:: max(1, len(outside) // 250)]:
        data = bytearray(whole)
        data[i] ^= 0x41
        file.write_bytes(data)
        try:
            assert same_as_saved(file), i
        except UnpickleRefused:
            refused += 1
    assert refused > 20


def test_a_member_that_is_missing_or_there_twice_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    rewritten(file, lambda info, data: None if info.filename == "x/data/1" else data)
    with pytest.raises(UnpickleRefused, match="member data/1, which it has not"):
        inside(file)
    file.write_bytes(whole)
    rewritten(file, lambda info, data: None if info.filename == "x/data.pkl" else data)
    with pytest.raises(UnpickleRefused, match=r"has no data\.pkl"):
        inside(file)
    file.write_bytes(whole)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as more:
        more.writestr("x/data/0", bytes(4000))
    with pytest.raises(UnpickleRefused, match="two members 'x/data/0'"):
        inside(file)


@pytest.mark.parametrize("order", [b"big", b"middle", b"little" * 100])
def test_another_byte_order_is_refused(file: Path, order: bytes) -> None:
    rewritten(file, lambda info, data: order if info.filename == "x/byteorder" else data)
    with pytest.raises(UnpickleRefused, match=r"not little-endian|its byteorder is 600 bytes long"):
        inside(file)


def test_bytes_that_mean_another_number_are_refused(tmp_path: Path) -> None:
    """A conjugated or negated view is a flag beside the bytes."""
    for value in (torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(UnpickleRefused, match="conjugated or negated view: save its clone"):
            inside(tmp_path / "x.pt")


def test_a_tensor_beyond_its_storage_is_refused(file: Path) -> None:
    def change(info: zipfile.ZipInfo, data: bytes) -> bytes:
        return data.replace(b"Kd", b"M\x85\x03") if info.filename == "x/data.pkl" else data  # view: from 901 on

    rewritten(file, change)
    with pytest.raises(UnpickleRefused, match=r"out of bounds|outside its storage"):
        inside(file)


# --- bombs ------------------------------------------------------------------------------------------------------------


def raw(file: Path, data: bytes) -> Path:
    """An archive of torch.save with this pickle."""
    with zipfile.ZipFile(file, "w") as new:
        new.writestr("x/data.pkl", data)
        new.writestr("x/byteorder", b"little")
    return file


def text(n: int) -> bytes:
    return b"X" + struct.pack("<I", n) + b"a" * n


def reduced(name: str, *arguments: bytes) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + b"(" + b"".join(arguments) + b"tR"


LARGE = b"\x8a\x05" + (1 << 35).to_bytes(5, "little")  # an int
TWICE = b")q\0" + b"h\0h\0\x86q\0" * 60  # a tuple of twice itself, 60 deep
BYTES = b"c_codecs\nencode\n(" + text(1 << 16) + b"X\x06\0\0\0latin1tRq\0"
BOMBS = {
    "nested": TWICE,
    "named often": text(1 << 16) + b"q\0](" + b"h\0" * 20_000 + b"e",
    "bytearray": reduced("builtins.bytearray", LARGE),
    "tensor": reduced("torch.Tensor", LARGE),
    "doubled": BYTES + b"c_codecs\nencode\n(h\0X\x03\0\0\0hextRq\0" * 30,
    "copied": b"](" + b"".join(b"M" + struct.pack("<H", i) for i in range(20_000)) + b"eq\0](" + (
        reduced("builtins.set", b"h\0") * 4000
    ) + b"e",
}  # fmt: skip


def bounded(call: Callable[[], Any]) -> tuple[str, int]:
    """(how `call` ended, MiB by which the process grew) in a child process that may be killed.

    Memory that the tests before have freed, and that still counts as the process's data, is not growth.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kib = {line[0]: int(line[1]) for line in lines if line[0] in ("VmData:", "RssAnon:")}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + kib["VmData:"] - kib["RssAnon:"]
        try:
            call()
            told = "it was read"
        except UnpickleRefused as error:
            told = str(error)
        grown = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        os.write(writing, f"{grown >> 10} {told}".encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        grown_text, _, told = answers.read().partition(" ")
    status = os.waitpid(child, 0)[1]
    return (told, int(grown_text)) if told else (signal.Signals(os.WTERMSIG(status)).name, 0)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_pickle_takes_no_more_than_its_length_explains(bomb: str, tmp_path: Path) -> None:
    file = raw(tmp_path / "x.pt", b"\x80\x02" + BOMBS[bomb] + b".")
    assert file.stat().st_size < 1 << 20
    request = {"files": [str(file)], "allow": []}
    told, grown = bounded(lambda: list(_unpickle.torch_files(request, _unpickle.room_for)))
    assert "it means far more" in told or "memory" in told, told
    assert grown < 400


def test_nor_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unpickle, "SECONDS", 0)
    file = raw(tmp_path / "x.pt", b"\x80\x02" + TWICE + b"q\0}h\0Ns.")  # its hash takes 2 ** 60 steps
    request = {"files": [str(file)], "allow": []}
    assert bounded(lambda: list(_unpickle.torch_files(request, _unpickle.room_for)))[0] == "SIGXCPU"


METADATA_BOMBS = {
    "long": b"\x80\x04\x8b\xff\xff\xff\x7f1.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 35) + b"a.",
    "memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "integer": b"\x80\x04\x8b\x00\x00\x01\x00" + b"\x11" * (1 << 16) + b".",
    "nested": b"\x80\x04" + TWICE + b".",
}


@pytest.mark.parametrize("bomb", METADATA_BOMBS)
def test_so_it_is_for_torchs_metadata(bomb: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(METADATA_BOMBS[bomb])
    request = {"files": [str(tmp_path / ".metadata")]}
    told, grown = bounded(lambda: list(_unpickle.dcp_metadata(request, _unpickle.room_for)))
    assert "it means far more" in told or "memory" in told or "cannot be read" in told or "bits long" in told, told
    assert grown < 400


def test_a_long_pickle_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unpickle, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(UnpickleRefused, match=r"data\.pkl is 2,003 bytes long: needed at most 1,000"):
        inside(raw(tmp_path / "x.pt", b"\x80\x02" + b"N" * 2000 + b"."))
    (tmp_path / ".metadata").write_bytes(b"N" * 2000)
    with pytest.raises(UnpickleRefused, match="longer than 1,000 bytes"):
        list(_unpickle.dcp_metadata({"files": [str(tmp_path / ".metadata")]}))


def test_the_child_is_bounded_and_named(tmp_path: Path) -> None:
    """Whole: the process that fzero starts."""
    file = raw(tmp_path / "x.pt", b"\x80\x02" + BOMBS["copied"] + b".")
    with pytest.raises(CorruptError, match=r"x\.pt.*it takes far more memory than it has bytes"):
        pickled.torch_files([file])


def test_an_honest_file_of_thousands_of_tensors_is_read(tmp_path: Path) -> None:
    held = {f"model.layers.{i}.mlp.weight": torch.full((3,), float(i)) for i in range(3000)}
    torch.save({"module": held, "ids": list(range(20_000)), "names": [list(held)] * 3}, tmp_path / "x.pt")
    request = {"files": [str(tmp_path / "x.pt")], "allow": []}
    assert bounded(lambda: list(_unpickle.torch_files(request, _unpickle.room_for)))[0] == "it was read"
    found = pickled._value(inside(tmp_path / "x.pt"), tmp_path / "x.pt")["module"]
    assert all(same_bits(found[name].read(0, 3), held[name]) for name in held)
