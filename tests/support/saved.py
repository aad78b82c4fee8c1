"""A reader of checkpoints that shares no code with fzero: what a test believes about bytes on a disk."""

import hashlib
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

BLOCK = 4 << 20
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
          "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
          "c64": torch.complex64, "c128": torch.complex128, "u16": torch.uint16, "u32": torch.uint32,
          "u64": torch.uint64, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}  # fmt: skip


def is_committed(folder: Path) -> bool:
    marker, manifest = folder / "COMMITTED", folder / "manifest.json"
    if not (marker.is_file() and manifest.is_file()):
        return False
    return marker.read_text() == hashlib.sha256(manifest.read_bytes()).hexdigest() + "\n"


def steps(run: Path) -> list[int]:
    """The committed steps of a run, in order."""
    return sorted(int(p.name[5:]) for p in run.iterdir() if p.name.startswith("step-") and is_committed(p))


def contents(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(manifest, whole leaves by path) of a step's directory, every hash, size and piece of it checked."""
    assert is_committed(folder), f"{folder} is not committed"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    expected = {"COMMITTED", "manifest.json", *(shard["file"] for shard in manifest["shards"])}
    assert {p.name for p in folder.iterdir()} == expected
    shards = []
    for shard in manifest["shards"]:
        data = (folder / shard["file"]).read_bytes()
        digests = [hashlib.sha256(data[i : i + BLOCK]).digest() for i in range(0, len(data), BLOCK)]
        assert (len(data), [d.hex() for d in digests]) == (shard["bytes"], shard["blocks"]), shard["file"]
        assert hashlib.sha256(b"".join(digests)).hexdigest() == shard["sha256"]
        shards.append(load_file(folder / shard["file"]))
    leaves = {}
    for leaf in manifest["leaves"]:
        parts, end = [], 0
        for piece in leaf["pieces"]:
            key = "/" + leaf["path"] if leaf["path"].strip("/") == "__metadata__" else leaf["path"]
            part = shards[piece["shard"]].pop(key)
            part = part.view(DTYPES[leaf["dtype"]]) if leaf["dtype"] == "c128" else part
            assert (part.dtype, part.numel()) == (DTYPES[leaf["dtype"]], piece["stop"] - piece["start"]), leaf
            assert piece["start"] == end
            end = piece["stop"]
            parts.append(part)
        assert end == math.prod(leaf["shape"])
        empty = torch.empty(0, dtype=DTYPES[leaf["dtype"]])
        leaves[leaf["path"]] = torch.cat([empty, *parts]).view(leaf["shape"])
    assert not any(shards), "a shard holds what no leaf has"
    return manifest, leaves
