"""Damaged manifests, markers and safetensors headers, by seed; and what reading them may do.

`read_damaged` writes each into a copy of a real checkpoint and reads it as a load would: it may end well (a change that
means nothing, as a space), or with CheckpointError; it may not end in another way, open a file outside the checkpoint's
directory, believe in more bytes than there are, or take much memory.
"""

import copy
import json
import random
import shutil
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero.checkpoint import Disk
from fzero.checkpoint import manifest as read_manifest
from fzero.checkpoint.manifest import MANIFEST, MARKER, Manifest, marker_of, shard_name
from fzero.checkpoint.shards import header
from fzero.errors import CheckpointError

SHARDS = [
    "shard-00001.safetensors",
    "shard-99999.safetensors",
    "./shard-00000.safetensors",
    "shard-00000.safetensors\0",
]
NODES = [{"list": []}, {"dict": [["a", "*"]]}, {"tuple": "*"}, {"other": ["x", []]}]
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**300, 0.5, -0.0,
    1e308, "", "*", "..", "../../etc/passwd", "/etc/passwd", "a" * 5000, "\u0000", "\ud800", "f32", "c128", "F64", "I8",
    [], {}, [[]], [0], [1 << 47, 1 << 47], [0, 0], *SHARDS, *NODES,
]  # fmt: skip
RAW = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"-", b"01", b"\\ud800", b"\xff", b"\x00", b"[" * 3000,
    b'{"a":' * 3000, b"{}", b"[]", b",", b":", b'"', b"]", b"}", b'"step":1,', b'"format":"fzero",', b"1.5", b"-1",
]  # fmt: skip


class Watched(Disk):
    """Keeps the paths that it was asked for."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        self.paths.add(path)
        return call()


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """One to three changes that know nothing of the content."""
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randrange(len(data) + 1), draw.randint(1, 12)
        what = draw.randrange(6)
        if what == 0:
            at = min(at, max(len(data) - 1, 0))
            data = data[:at] + bytes([(data[at : at + 1] or b"\0")[0] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        elif what == 1:
            data = data[:at] + data[at + size :]
        elif what == 2:
            data = data[:at] + draw.randbytes(size) + data[at:]
        elif what == 3:
            data = data[:at]
        elif what == 4:
            start = draw.randrange(len(data) + 1)
            data = data[:at] + data[start : start + 10 * size] + data[at:]
        else:
            raw = draw.choice(RAW)
            data = data[:at] + raw + data[at + draw.choice([0, 1, len(raw)]) :]
    return data


def damaged_json(draw: random.Random, value: Any) -> bytes:
    """One to three nodes replaced, removed, copied to another place, or renamed."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        node, key = draw.choice(list(_places(value)))
        what = draw.randrange(5)
        if what == 0 and isinstance(node, dict):
            node[draw.choice(["x", "file", "path", "step", "", "__metadata__"])] = node.pop(key)
        elif what == 1:
            del node[key]
        elif what == 2:
            other, name = draw.choice(list(_places(value)))
            node[key] = copy.deepcopy(other[name])
        elif what == 3 and type(node[key]) is int:
            node[key] += draw.choice([-1, 1, 64, -64, 1 << 40])
        else:
            node[key] = copy.deepcopy(draw.choice(NASTY))
        if not value:
            break
    text = json.dumps(value)
    if draw.randrange(8) == 0:  # a key twice
        at = text.find("{", draw.randrange(len(text)))
        text = text if at < 0 else f'{text[: at + 1]}"step": 3, "step": 4, {text[at + 1 :]}'
    return text.encode()


def _places(value: Any) -> Any:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def damage(draw: random.Random, kind: str, folder: Path) -> list[Path]:
    """Damages a file of this kind in a checkpoint's directory. Returns the files that were written."""
    if kind == "marker":
        file = folder / MARKER
        file.write_bytes(damaged_bytes(draw, file.read_bytes()))
        return [file]
    if kind == "manifest":
        file = folder / MANIFEST
        data = file.read_bytes()
        data = damaged_bytes(draw, data) if draw.randrange(2) else damaged_json(draw, json.loads(data))
        file.write_bytes(data)
        if draw.randrange(20):  # else the marker notices
            (folder / MARKER).write_bytes(marker_of(data))
        return [file, folder / MARKER]
    file = folder / shard_name(draw.randrange(2))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text, rest = data[8:end], data[end:]
    text = damaged_bytes(draw, text) if draw.randrange(2) else damaged_json(draw, json.loads(text))
    length = len(text).to_bytes(8, "little")
    if draw.randrange(4) == 0:
        length = damaged_bytes(draw, length)
    file.write_bytes(length + text + rest)
    return [file]


def read_damaged(original: Path, scratch: Path, kind: str, count: int, seed: int) -> Counter[str]:
    """How many of `count` damaged files were refused, and how many read. Fails on any other end."""
    draw = random.Random(f"{kind} {seed}")
    ends: Counter[str] = Counter()
    whole = {p.name: p.read_bytes() for p in original.iterdir()}
    folder = scratch / original.name
    shutil.copytree(original, folder)
    for number in range(count):
        written = damage(draw, kind, folder)
        watched = number % 50 == 0
        if watched:
            tracemalloc.start()
        disk, began = Watched(), time.monotonic()
        try:
            manifest = read_manifest(folder, disk)
            for name in range(len(manifest.shards)):
                header(folder / shard_name(name), disk)
            believable(manifest)
            ends["read"] += 1
        except CheckpointError as error:
            ends["refused" if str(folder) in str(error) else f"refused without the file: {error}"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind} {number} of seed {seed} ended in {error!r}") from error
        if watched:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 4 << 20, f"{kind} {number} of seed {seed} took {peak:,} bytes"
        assert time.monotonic() - began < 300, f"{kind} {number} of seed {seed} took too long"
        outside = [p for p in disk.paths if p != folder and p.parent != folder]
        outside += [p for p in disk.paths if ".." in p.parts]
        assert not outside, f"{kind} {number} of seed {seed} looked at {outside}"
        for file in written:
            file.write_bytes(whole[file.name])
    shutil.rmtree(folder)
    assert set(ends) <= {"refused", "read"}, ends
    return ends


def believable(manifest: Manifest) -> None:
    """What was read holds no more bytes than its shards are said to have, its pieces partition the leaves, and it
    writes itself again."""
    assert manifest.nbytes <= sum(shard.bytes for shard in manifest.shards)
    for leaf in manifest.leaves:
        edges = [0, *(edge for piece in leaf.pieces for edge in (piece.start, piece.stop)), leaf.numel]
        assert edges == sorted(edges)
        assert edges[::2] == edges[1::2], f"the pieces of {leaf} leave a gap or overlap"
        assert all(piece.shard < len(manifest.shards) for piece in leaf.pieces)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    manifest.tree([0] * len(manifest.leaves))
