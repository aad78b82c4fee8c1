"""commands: `fzero convert` and `fzero import-deepspeed`. Neither needs a process group, a device or the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.commit import locate
from fzero.checkpoint.reader import Checkpoint
from fzero.errors import CheckpointError, SpecError
from fzero.interop import dcp_folder, huggingface
from fzero.interop.config.read import read
from fzero.interop.deepspeed_folder import deepspeed
from fzero.interop.fitted import fitted
from fzero.interop.incoming import write_checkpoint
from fzero.state.source import Source

TO = ("safetensors", "dcp", "fzero")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero convert`."""
    parser.add_argument(
        "source", type=Path, help="a run or a step of fzero, a Hugging Face folder, or one of torch DCP"
    )
    parser.add_argument("target", type=Path, help="the new directory")
    parser.add_argument("--to", choices=TO, required=True, help="what to write")
    parser.add_argument("--part", help="whose leaves: params (default for fzero), model (of a DCP state dict), ...")
    parser.add_argument("--dtype", choices=DTYPES, help="what floating tensors become")
    parser.add_argument("--config", type=Path, help="a config.json to write beside safetensors")
    parser.add_argument("--max-shard-bytes", type=int, help="of safetensors")


def convert(arguments: argparse.Namespace) -> int:
    """Writes the tensors of one checkpoint as another. Returns the exit status."""
    source, target, part = arguments.source, arguments.target, arguments.part
    dtype = DTYPES.get(arguments.dtype or "")
    for option in ("config", "max_shard_bytes"):
        if arguments.to != "safetensors" and (given := getattr(arguments, option)) is not None:
            name = option.replace("_", "-")
            raise SpecError(f"--{name} {given}: --to {arguments.to} has none. Leave it out, or write --to safetensors")
    checkpoint = opened(source, part)
    below = ("params" if part is None else part) if isinstance(checkpoint, Checkpoint) else ""
    if arguments.to == "safetensors":
        config = read(arguments.config)[1] if arguments.config else None
        most = huggingface.MAX_SHARD_BYTES if arguments.max_shard_bytes is None else arguments.max_shard_bytes
        written = huggingface.export_safetensors(
            checkpoint, target, part=below, dtype=dtype, config=config, max_shard_bytes=most
        )
    elif arguments.to == "dcp":
        written = dcp_folder.export_dcp(checkpoint, target, part=below, dtype=dtype)
    elif isinstance(checkpoint, Checkpoint):
        raise CheckpointError(source, "is a checkpoint of fzero already: fzero.load takes it to any world and layout")
    else:
        written = write_checkpoint(Params(fitted(checkpoint, dtype=dtype)), target)
    print(f"wrote {written}")
    return 0


def deepspeed_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero import-deepspeed`."""
    parser.add_argument("source", type=Path, help="the directory that save_checkpoint was given, or one tag's")
    parser.add_argument("target", type=Path, help="the directory of a run: it gets a checkpoint of fzero")
    parser.add_argument("--params-only", action="store_true", help="leave the optimizer's moments out")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help="a class that pickles may name")


def import_deepspeed(arguments: argparse.Namespace) -> int:
    """Writes a DeepSpeed checkpoint as one of fzero: `fzero.load(target, spec)` goes on from it. Returns the exit
    status."""
    source = deepspeed(arguments.source, moments=not arguments.params_only, allow=arguments.allow)
    written = write_checkpoint(source, arguments.target, step=source.step, extra=source.extra)
    print(f"wrote {written}")
    return 0


def opened(path: Path, part: str | None) -> Source:
    """The checkpoint at a path. The files in the directory decide its kind."""
    if (path / dcp_folder.METADATA).is_file():
        return dcp_folder.NamedPart(dcp_folder.DcpFolder(path), part or "")
    if path.is_file() or (path / huggingface.INDEX).is_file() or (path / huggingface.SINGLE).is_file():
        if part:
            raise CheckpointError(path, f"holds tensors alone, so there is no part {part!r} of it. Leave --part out")
        return huggingface.HuggingFaceFolder(path)
    return Checkpoint(locate(path))


class Params(Source):
    """A source as the `params` of a state. Nothing in it changes."""

    def __init__(self, source: Source) -> None:
        self.source = source
        held = {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in source.leaves.items()}
        self.like = {"params": held}

    @property
    def leaves(self) -> Any:
        """See `Source`."""
        return {f"params/{name}": entry for name, entry in self.source.leaves.items()}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`."""
        return self.source.read(path.removeprefix("params/"), start, stop)
