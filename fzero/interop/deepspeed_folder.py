"""deepspeed_folder: the fp32 masters and Adam moments of a DeepSpeed ZeRO checkpoint, by parameter name.

Ranks 0..N-1 each wrote a pickle with their part of every flat buffer. A child process looks into the pickles
(`fzero.interop.pickled`), and the tensors are read as bytes. DeepSpeed's own partition rules (0.19.8; those of its
`zero_to_fp32.py`) decide which bytes belong to which parameter:

- stages 1 and 2: per parameter group one buffer. It holds the parameters in the order of `param_shapes`, each followed
  by its `param_alignment_paddings`, and is padded to a multiple of 2N at its end. Rank r has the r-th of N equal parts.
  It leaves out the padding at the end of the masters; of the moments it does so only if `elastic_checkpoint` is set.
- stage 3: of each parameter of n elements rank r has elements [r p, (r+1) p) with p = ceil(n / N). Its parts lie one
  behind the other in flat groups, in the order of `param_shapes`. Frozen parameters are cut alike.

Frozen parameters come from the model's states. They and everything else are float32 here. Tied parameters are there
once, under the name that the optimizer used.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError, CorruptError
from fzero.interop import pickled
from fzero.interop.file_places import FilePlace, read_all
from fzero.optim.adam import AdamState
from fzero.state.source import Entry, Source

log = logging.getLogger("fzero")

ALLOWED = (  # classes that DeepSpeed's pickles name; nothing of their objects is kept
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
MASTER, MOMENTS = "master", {"mu": "exp_avg", "nu": "exp_avg_sq"}


@dataclass(frozen=True)
class Stretch:
    """Elements [start, start + count) of a flattened tensor: those of `place` from element `first` on."""

    start: int
    place: FilePlace
    first: int
    count: int


class DeepSpeed(Source):
    """The state of `fzero.Spec(optimizer=adamw(...))` with these parameters: `params` and `opt_state`. Written by
    `__init__` alone."""

    def __init__(self, path: str | Path, *, moments: bool, allow: Sequence[str], timeout: float) -> None:
        self.path: Path = _tagged(Path(path))
        optim, model = _files(self.path)
        contents = pickled.torch_files([*optim, *model], [*ALLOWED, *allow], timeout)
        try:
            self._fill(contents[: len(optim)], contents[len(optim) :], moments)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            text = f"is not a ZeRO checkpoint as DeepSpeed 0.19 writes it ({type(error).__name__}: {error})"
            raise CorruptError(self.path, text) from error

    def _fill(self, optim: Sequence[Any], model: Sequence[Any], moments: bool) -> None:
        """Reads the files' contents into the fields: leaves, step, optimizer count and `extra`."""
        states = [content["optimizer_state_dict"] for content in optim]
        shapes = [{name: _shape(s) for name, s in group.items()} for group in model[0]["param_shapes"]]
        stage3 = "fp32_flat_groups" in states[0]
        _check_world(self.path, states, len(model) if stage3 else len(states))
        columns = {MASTER: "", **(MOMENTS if moments else {})}
        cut = _stage3 if stage3 else _stage12
        whole = {column: cut(states, shapes, key) for column, key in columns.items()}
        frozen = _frozen(model, shapes, stage3)
        sizes = {name: shape for group in shapes for name, shape in group.items()}
        order = [name for name in model[0]["module"] if name in sizes or name in frozen] or [*sizes, *frozen]
        order += [name for name in (*sizes, *frozen) if name not in order]
        self.tensors: dict[str, tuple[Entry, list[Stretch]]] = {}
        for name in order:
            shape, parts = frozen[name] if name in frozen else (sizes[name], whole[MASTER][name])
            self.tensors[f"params/{name}"] = (Entry(shape, torch.float32), parts)
        for column in columns:
            for name in order if column != MASTER else ():
                if name in sizes:
                    self.tensors[f"opt_state/{column}/{name}"] = (
                        Entry(sizes[name], torch.float32),
                        whole[column][name],
                    )
        self.step: int = int(model[0]["global_steps"])
        self.count: int | None = _count(states) if moments else None
        self.like: dict[str, Any] = self._like(order, set(sizes), columns)
        known = ("module", "param_shapes", "buffer_names", "ds_config", "optimizer", "frozen_param_shapes",
                 "frozen_param_fragments", "shared_params", "lr_scheduler", "data_sampler", "random_ltd")  # fmt: skip
        self.extra: dict[str, Any] = {
            name: value for name, value in model[0].items() if name not in known and _plain(value)
        }
        self.tied: dict[str, str] = dict(model[0].get("shared_params") or {})
        if model[0].get("buffer_names"):
            log.warning("fzero: %s: %d buffers are left out", self.path, len(model[0]["buffer_names"]))

    def _like(self, order: Sequence[str], trained: set[str], columns: Mapping[str, str]) -> dict[str, Any]:
        def tree(top: str) -> dict[str, Any]:
            return {name: self._meta(f"{top}/{name}") for name in order}

        if self.count is None:
            return {"params": tree("params")}
        count = torch.empty((), dtype=torch.int64, device="meta")
        moments: dict[str, Any] = {column: tree(f"opt_state/{column}") for column in columns if column != MASTER}
        return {"params": tree("params"), "opt_state": AdamState(count, **moments)}

    def _meta(self, path: str) -> torch.Tensor | None:
        if path not in self.tensors:
            return None
        return torch.empty(self.tensors[path][0].shape, dtype=torch.float32, device="meta")

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """See `Source`."""
        held = {path: entry for path, (entry, _) in self.tensors.items()}
        return held if self.count is None else {**held, "opt_state/count": Entry((), torch.int64)}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`."""
        if path == "opt_state/count":
            return torch.tensor([self.count], dtype=torch.int64)[start:stop]
        values = torch.empty(stop - start)
        for part in self.tensors[path][1]:
            low, high = max(start, part.start), min(stop, part.start + part.count)
            if low < high:
                shift = part.first - part.start
                values[low - start : high - start] = part.place.read(low + shift, high + shift)
        return values


def deepspeed(
    folder: str | Path,
    *,
    moments: bool = True,
    allow: Sequence[str] = (),
    timeout: float = pickled.TIMEOUT,
) -> DeepSpeed:
    """Returns a DeepSpeed checkpoint (stages 1 to 3) as leaves of a state, as `fzero.optim.adamw` has them.

    The leaves are fp32 `params/NAME`, `opt_state/mu/NAME`, `opt_state/nu/NAME`, and `opt_state/count`. `step` comes
    along, and so does `extra`, the plain JSON in the client state.

    folder: the argument of `save_checkpoint` (its `latest` names the tag), or the tag's directory. moments: False reads
    only the parameters. allow: further names of classes to which the pickles may refer, as those of a client state;
    their objects are dropped. timeout: seconds for the child process that looks into the pickles.

    Raises CorruptError for damaged or malicious files. Raises CheckpointError for a checkpoint that is not supported:
    tensor, pipeline and expert parallelism, universal checkpoints, optimizers that are no Adam.
    """
    return DeepSpeed(folder, moments=moments, allow=allow, timeout=timeout)


# --- which files ------------------------------------------------------------------------------------------------------


def _tagged(path: Path) -> Path:
    """The directory of a tag."""
    if (path / "latest").is_file() and not any(OPTIM.fullmatch(file.name) for file in path.iterdir()):
        tag = read_all(path / "latest", 4096).decode(errors="replace").strip()
        if Path(tag).name != tag or tag in ("", "..") or not (path / tag).is_dir():
            raise CorruptError(path / "latest", f"names {tag!r:.80}, which is no directory beside it")
        return path / tag
    if not path.is_dir():
        raise CheckpointError(path, "there is no such directory")
    return path


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """(optimizer states, model states) of ranks 0..N-1. Raises CheckpointError for a checkpoint that is not
    supported."""
    names = sorted(file.name for file in path.iterdir())
    optim = {int(m[1]): path / m[0] for name in names if (m := OPTIM.fullmatch(name))}
    model = {int(m[1] or 0): path / m[0] for name in names if (m := MODEL.fullmatch(name))}
    parallel = [n for n in names if (m := OPTIM.fullmatch(n) or MODEL.fullmatch(n)) and int(m[2])]
    for unsupported, reason in (
        (parallel, "was written with tensor parallelism"),
        ([n for n in names if "expert" in n], "holds experts that are spread over the ranks"),
        ([n for n in names if n.startswith("layer_")], "was written with pipeline parallelism"),
        ([n for n in names if n == "zero"], "is a universal checkpoint"),
    ):
        if unsupported:
            raise CheckpointError(
                path, f"{reason} ({unsupported[0]}), which is not supported: export it to Hugging Face files"
            )
    if not optim or not model:
        raise CheckpointError(
            path, "has no *_optim_states.pt with *_model_states.pt: needed what DeepSpeed saves with ZeRO stages 1 to 3"
        )
    for ranks, kind in ((optim, "optim"), (model, "model")):
        if missing := set(range(max(ranks))) - set(ranks):
            raise CorruptError(path, f"has no {kind}_states.pt of rank {min(missing)}")
    return [optim[rank] for rank in sorted(optim)], [model[rank] for rank in sorted(model)]


def _check_world(path: Path, states: Sequence[Any], files: int) -> None:
    counts = states[0]["partition_count"]
    counts = set(counts) if isinstance(counts, list) else {counts}
    if counts != {len(states)} or files != len(states):
        raise CorruptError(
            path,
            f"was written by {max(counts)} ranks, and has the optimizer states of {len(states)}, the model states of "
            f"{files}",
        )


# --- whose bytes ------------------------------------------------------------------------------------------------------


def _stage12(states: Sequence[Any], shapes: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Stretch]]:
    """By parameter, the stretches of its masters (`key` empty) or of a moment."""
    stretches_of: dict[str, list[Stretch]] = {}
    for g, group in enumerate(shapes):
        paddings = (states[0].get("param_alignment_paddings") or [[0] * len(group)] * len(shapes))[g]
        masters = [state["single_partition_of_fp32_groups"][g] for state in states]
        parts = masters if not key else [_moments(state["base_optimizer_state"], g, key) for state in states]
        size = masters[0].numel  # only the last parts lack their padding
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            n, stretches = math.prod(shape), []
            for rank, part in enumerate(parts):
                low, high = max(start, rank * size), min(start + n, (rank + 1) * size if len(parts) > 1 else start + n)
                if low < high:
                    stretches.append(_stretch(low - start, part, low - rank * size, high - low))
            stretches_of[name] = _whole(name, n, stretches)
            start += n + padding
        aligned = -(-start // (2 * len(states))) * 2
        if len(states) > 1 and aligned != size:
            raise ValueError(f"group {g} needs parts of {aligned} elements, rank 0 has {size}")
    return stretches_of


def _stage3(states: Sequence[Any], shapes: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Stretch]]:
    """By parameter, the stretches of its masters (`key` empty) or of a moment, from the flat groups of stage 3."""
    stretches_of: dict[str, list[Stretch]] = {name: [] for group in shapes for name in group}
    for rank, state in enumerate(states):
        groups = state["fp32_flat_groups"]
        if key:
            groups = [_moments(state["optimizer_state_dict"], g, key) for g in range(len(groups))]
        ends = [0]
        for group in groups:
            ends.append(ends[-1] + group.numel)
        start = 0
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            n = math.prod(shape)
            part = -(-n // len(states))
            low, high = rank * part, min((rank + 1) * part, n)  # of the parameter; the rest of the part is padding
            for g, group in enumerate(groups):
                first, last = max(start, ends[g]), min(start + high - low, ends[g + 1])
                if first < last:
                    stretches_of[name].append(_stretch(low + first - start, group, first - ends[g], last - first))
            start += part
        if start != ends[-1]:
            raise ValueError(f"rank {rank} has {ends[-1]} elements, its parameters {start} (offloaded to NVMe?)")
    return {name: _whole(name, math.prod(s), stretches_of[name]) for group in shapes for name, s in group.items()}


def _moments(state: Any, group: int, key: str) -> FilePlace:
    """A moment of a flat group, from `optimizer.state_dict()` or (elastic) a list of states."""
    state_of_group = state[group] if isinstance(state, list) else state["state"][group]
    if not isinstance(state_of_group.get(key), FilePlace):
        raise CheckpointError(
            "the optimizer's state",
            f"has {', '.join(map(str, state_of_group))} and no {key!r}: needed one of the Adam family. "
            "moments=False (--params-only) leaves the moments out"
        )  # fmt: skip
    moment: FilePlace = state_of_group[key]
    return moment


def _frozen(
    model: Sequence[Any], shapes: Sequence[Mapping[str, Any]], stage3: bool
) -> dict[str, tuple[tuple[int, ...], list[Stretch]]]:
    """(shape, stretches) of the parameters that the optimizer does not know."""
    frozen = {}
    if stage3:
        for name, size in (model[0].get("frozen_param_shapes") or {}).items():
            shape = _shape(size)
            n = math.prod(shape)
            part, stretches = -(-n // len(model)), []
            for rank, rank_model in enumerate(model):
                low, high = rank * part, min((rank + 1) * part, n)
                if low < high:
                    stretches.append(_stretch(low, rank_model["frozen_param_fragments"][name], 0, high - low))
            frozen[name] = (shape, _whole(name, n, stretches))
        return frozen
    known = {name for group in shapes for name in group} | set(model[0]["buffer_names"] or ())
    known |= set(model[0].get("shared_params") or ())
    for name, place in model[0]["module"].items():
        if name not in known and isinstance(place, FilePlace):
            frozen[name] = (place.shape, [_stretch(0, place, 0, place.numel)] if place.numel else [])
    return frozen


def _stretch(start: int, place: FilePlace, first: int, count: int) -> Stretch:
    if not isinstance(place, FilePlace) or not place.dtype.is_floating_point or first + count > place.numel:
        raise ValueError(f"a part of {count} elements from {first} on is not there: {place}")
    return Stretch(start, place, first, count)


def _whole(name: str, n: int, stretches: list[Stretch]) -> list[Stretch]:
    end = 0
    for stretch in stretches:
        if stretch.start != end:
            raise ValueError(f"{name!r} has a gap at element {end}")
        end += stretch.count
    if end != n:
        raise ValueError(f"{name!r} has {end} of its {n} elements")
    return stretches


def _shape(size: Any) -> tuple[int, ...]:
    if not isinstance(size, list) or any(type(n) is not int or not 0 <= n < 1 << 48 for n in size):
        raise ValueError(f"{size} is no shape")
    return tuple(size)


def _count(states: Sequence[Any]) -> int:
    """The number of updates that the moments have seen: the same in every group."""
    whole = states[0].get("base_optimizer_state", states[0].get("optimizer_state_dict"))
    groups = whole if isinstance(whole, list) else list(whole["state"].values())
    steps = [group["step"] for group in groups if "step" in group]
    if not steps:
        steps = [group["step"] for group in ([] if isinstance(whole, list) else whole["param_groups"])]
        steps = steps or [states[0]["base_optimizer_state_step"]]
    counts = {int(step.read(0, 1)) if isinstance(step, FilePlace) else int(step) for step in steps}
    if len(counts) != 1:
        raise ValueError(f"the groups have made {sorted(counts)} updates: needed one number")
    return counts.pop()


def _plain(value: Any) -> bool:
    """Whether a value is JSON as it is."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
