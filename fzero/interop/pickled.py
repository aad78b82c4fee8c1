"""pickled: the contents of other libraries' pickles, as a child process reports them.

Some checkpoints are pickles. fzero never unpickles: a child process does (`fzero.interop._unpickle` describes its
limits). The child answers in JSON, which is checked here. For a tensor it reports the place of its bytes. They are read
from there, as from a safetensors file. If the child is refused something, crashes, hangs or answers nonsense, the error
is a CorruptError.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero.errors import CheckpointError, CorruptError
from fzero.interop.file_places import FilePlace

TIMEOUT = 600.0  # seconds


@dataclass(frozen=True)
class MetadataObject:
    """An object of torch's checkpoint metadata: its class's name, its constructor's arguments, and its fields."""

    name: str
    args: tuple[Any, ...]
    state: Any

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a field, or `default` if there is none."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class Other:
    """A value that was not kept."""

    kind: str


def torch_files(files: Sequence[Path], allow: Sequence[str] = (), timeout: float = TIMEOUT) -> list[Any]:
    """Returns the object that `torch.save` wrote to each file, with a `FilePlace` for each tensor.

    allow: names of classes to which the files may refer; their objects are not kept.
    """
    request = {"kind": "torch", "files": [str(file.absolute()) for file in files], "allow": list(allow)}
    answers = _asked(request, files[0].parent, len(files), timeout)
    return [_value(answer, file) for answer, file in zip(answers, files, strict=True)]


def dcp_metadata(file: Path, timeout: float = TIMEOUT) -> Any:
    """Returns the metadata of a torch.distributed.checkpoint, made of MetadataObjects."""
    (answer,) = _asked({"kind": "dcp metadata", "files": [str(file.absolute())]}, file, 1, timeout)
    return _value(answer, file)


def dcp_chunks(chunks: Sequence[tuple[Path, int, int]], timeout: float = TIMEOUT) -> list[Any]:
    """Returns the objects that `torch.save` wrote to parts (file, start, size) of files: places."""
    if not chunks:
        return []
    request = {"kind": "dcp chunks", "chunks": [[str(file.absolute()), start, size] for file, start, size in chunks]}
    answers = _asked(request, chunks[0][0].parent, len(chunks), timeout)
    return [_value(answer, file) for answer, (file, _, _) in zip(answers, chunks, strict=True)]


def _asked(request: Mapping[str, Any], where: Path, count: int, timeout: float) -> list[Any]:
    """The child's answers to a request, `count` of them. Raises CorruptError, and CheckpointError if no process can
    start."""
    root = str(Path(fzero.__file__).parent.parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FORCE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "fzero.interop._unpickle"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        raise CorruptError(where, f"the process that looks into its pickles did not end within {timeout:g} s") from None
    except OSError as error:
        raise CheckpointError(where, f"no process could be started to look into its pickles: {error}") from error
    if done.returncode:
        if done.returncode == -signal.SIGXCPU:
            raise CorruptError(where, "one of its pickles takes far longer than its length explains: it was given up")
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CorruptError(
            where, f"the process that looks into its pickles died (exit status {done.returncode}){': ' if last else ''}"
            f"{''.join(last)}"
        )  # fmt: skip
    answers = []
    try:
        for line in done.stdout.splitlines():
            ((kind, answer),) = json.loads(line).items()
            if kind == "refused":
                file, _, text = str(answer).partition(": ")
                raise CorruptError(file, text)
            answers.append(answer)
    except (ValueError, AttributeError):
        answers = []
    if len(answers) != count:
        raise CorruptError(where, "the process that looks into its pickles gave no answer")
    return answers


def _value(answer: Any, file: Path) -> Any:
    """A value of an answer."""
    if isinstance(answer, list):
        return [_value(item, file) for item in answer]
    if not isinstance(answer, dict):
        return answer
    ((kind, inner),) = answer.items()
    if kind == "dict":
        pairs = [(_value(k, file), _value(v, file)) for k, v in inner]
        return dict(pairs) if all(isinstance(k, (str, int)) for k, _ in pairs) else pairs
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "record":
        name, args, state = inner
        return MetadataObject(name, tuple(_value(args, file)), _value(state, file))
    if kind == "tensor":
        return _place(inner, file)
    return Other(str(inner))


def _place(shown: Mapping[str, Any], file: Path) -> FilePlace:
    place = FilePlace(file, shown["start"], tuple(shown["shape"]), getattr(torch, shown["dtype"]))
    if not shown["contiguous"]:
        raise CheckpointError(file, f"a tensor of shape {list(place.shape)} is not contiguous, which is not supported")
    if place.start < 0 or place.start + place.nbytes > file.stat().st_size:
        raise CorruptError(file, f"a tensor of shape {list(place.shape)} lies outside it")
    return place
