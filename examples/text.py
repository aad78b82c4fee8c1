"""Bytes to train on: a directory or a file, or by default the standard library of the running Python.

The order of the files, the split and every batch are functions of their arguments alone: two runs, and runs at
different world sizes, see the same bytes in the same order. Batches to train on come from `fzero.data`.
"""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CAP_BYTES = 8 << 20
HELD_OUT = 0.07  # the share of the bytes, in whole files from the end, that training never sees
TEXT_SUFFIXES = frozenset(
    {".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".cu", ".rs", ".js", ".ts", ".java", ".tex"}
)


class TextError(ValueError):
    """Text that cannot be trained on."""


@dataclass(frozen=True)
class Corpus:
    """`train` and `held_out` are 1-D uint8; `description` says where they come from."""

    train: Tensor
    held_out: Tensor
    description: str


def load(data: Path | None, sequence: int) -> Corpus:
    """The corpus at `data` (None: the standard library's .py files), at most `CAP_BYTES` of it.

    Raises TextError where there is too little for one sequence of `sequence` bytes.
    """
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        texts = _read(root, _python_files(root))
        source = "the .py files of Python's standard library"
    elif data.is_dir():
        texts = _read(data, [p for p in data.rglob("*") if p.is_file() and p.suffix.lower() in TEXT_SUFFIXES])
        source = f"the text files under {data}"
    else:
        texts = _cut(data.read_bytes()[:CAP_BYTES])
        source = str(data)
    train, held_out = _split(texts)
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= sequence:
            raise TextError(
                f"{source}: only {len(part)} bytes of {name} text, and one sequence needs {sequence + 1}; "
                f"give more text with --data, or a shorter --seq"
            )
    description = f"{source}: {len(train) / 1e6:.2f} MB to train on, {len(held_out) / 1e6:.2f} MB held out"
    return Corpus(_tensor(train), _tensor(held_out), description)


def _python_files(root: Path) -> list[Path]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [p for p in root.rglob("*.py") if left_out.isdisjoint(p.relative_to(root).parts)]


def _read(root: Path, paths: list[Path]) -> list[bytes]:
    """Files in an order that mixes directories (by the hash of the relative name), cut at `CAP_BYTES` in all."""
    texts, room = [], CAP_BYTES
    for path in sorted(paths, key=lambda p: (zlib.crc32(name := p.relative_to(root).as_posix().encode()), name)):
        text = path.read_bytes()[:room]
        if b"\0" not in text:
            texts.append(text + b"\n")
            room -= len(text)
        if room <= 0:
            break
    return texts


def _cut(text: bytes, num_parts: int = 100) -> list[bytes]:
    """One file as parts, so that its end can be held out."""
    size = -(-len(text) // num_parts) or 1
    return [text[i : i + size] for i in range(0, len(text), size)]


def _split(texts: list[bytes]) -> tuple[bytes, bytes]:
    wanted = HELD_OUT * sum(map(len, texts))
    cut, held_out = len(texts), 0
    while cut > 0 and held_out < wanted:
        cut -= 1
        held_out += len(texts[cut])
    return b"".join(texts[:cut]), b"".join(texts[cut:])


def _tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def window(text: Tensor, starts: Tensor, sequence: int) -> dict[str, Tensor]:
    """`x`, and `y` one byte further: int64 of shape (len(starts), sequence)."""
    spans = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return {"x": spans[:, :-1].contiguous(), "y": spans[:, 1:].contiguous()}


def on_disk(text: Tensor, path: Path) -> Path:
    """`text` as a file to be memory-mapped. Every rank may write it, at any time: the bytes are the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    mine.write_bytes(text.numpy().tobytes())
    mine.replace(path)
    return path


def held_out_batches(
    text: Tensor, *, num_batches: int, num_sequences: int, sequence: int, rank: int, world_size: int
) -> Iterator[dict[str, Tensor]]:
    """This rank's part of `num_batches` fixed batches, spread evenly over `text`."""
    part = num_sequences // world_size
    starts = torch.linspace(0, len(text) - sequence - 1, num_batches * num_sequences, dtype=torch.float64).long()
    for i in range(num_batches):
        yield window(text, starts[i * num_sequences :][rank * part : (rank + 1) * part], sequence)
