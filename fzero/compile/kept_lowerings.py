"""kept_lowerings: what lowering made of a captured step, kept on this machine, so that a second run starts sooner.

A step is captured anew in every run. From its graph, and all else that lowering reads, a key is made; under it lie the
graphs of one rank and the programs. What is read there is taken as what lowering has just made: the graphs are proven
against the captured ones, the programs must have their meaning, and are verified. So a file that is wrong costs a
lowering, and a message.

The files lie beside fzero's other ones (`kept_costs.folder`), in the folder `lowerings`, which is this user's alone; of
more than `MOST_BYTES` those go that were not used for the longest time. With `FZERO_KEEP_LOWERINGS=0` nothing is read
or written. Nothing is kept of a step with ops or facts of ops that are not torch's or fzero's, nor with functions of
the user's that decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from fzero import private_folder
from fzero._torch_compat import FakeTensorMode, OpOverload, is_fake, kernels_here
from fzero._version import __version__
from fzero.capture import ambient
from fzero.capture.graph import Graph
from fzero.cost import kept_costs
from fzero.ir import op_info
from fzero.ir.packed import pack, unpack
from fzero.ir.scan_op import SCAN, body_of

T = TypeVar("T")
log = logging.getLogger("fzero")
SWITCH = "FZERO_KEEP_LOWERINGS"
MOST_BYTES = 512 << 20  # of all files together
LARGEST = 128 << 20  # bytes of a file
OWN = ("aten", "prims", "fzero")  # namespaces of ops whose facts fzero states
PATIENCE = 60.0  # seconds that a process waits for another one
CPU = torch.device("cpu")
DIGEST = 32  # bytes at the start of a file, of what follows
_IMPORTED = time.time_ns()  # when this process took fzero's code


@dataclass(frozen=True)
class Kept:
    """Where something is kept. key: of all that it is made from; "" keeps nothing. turns: of several processes one
    makes it, and the others wait. writes: whether this process writes files; several of a machine would write the same.
    mode, device: of the fake tensors of what is read. read: the files that were read; only `of` and `forget` write
    it."""

    key: str = "lowering"
    turns: bool = False
    writes: bool = True
    mode: FakeTensorMode | None = None
    device: torch.device = CPU
    read: list[str] = field(default_factory=list)

    def of_step(self, graph: Graph, *parts: Any, lines: bool = True) -> Kept:
        """The place of what is made of a captured step, and of these parts. lines: whether it names the user's."""
        nodes = [node for gm in (graph.gm, *(region.gm for region in graph.regions)) for node in gm.graph.nodes]
        if not self.key or os.environ.get(SWITCH) == "0" or op_info.has_foreign_rows():
            return NOTHING
        if others := sorted(_namespaces(nodes) - {*OWN}):
            log.debug("fzero: nothing of this lowering is kept: the step has ops of %s", ", ".join(others))
            return NOTHING
        value = next((node.meta["val"] for node in nodes if is_fake(node.meta.get("val"))), None)
        if value is None or _edited(_files()):
            return NOTHING
        around = kept_costs.machine(), kernels_here(), ambient.settings(value.device)
        own = dataclasses.replace(self, mode=value.fake_mode, device=value.device)
        return own.at(_here(), around, _of_graph(graph, lines), *parts)

    def at(self, *parts: Any) -> Kept:
        """The place of what is made from these as well. Nothing is kept where one of them has no text."""
        if not self.key:
            return self
        try:
            return dataclasses.replace(self, key=_digest(self.key, *parts))
        except TypeError as error:
            log.debug("fzero: nothing of this lowering is kept: %s", error)
            return NOTHING

    def of(self, make: Callable[[], T]) -> T:
        """What was kept here, else what `make` makes, which is kept."""
        if self.mode is None:
            return make()
        for found in self._found():
            return found
        with _turn(self.key) if self.turns else contextlib.nullcontext():
            for found in self._found() if self.turns else ():  # another process has made it meanwhile
                return found
            made = make()
            if self.writes or self.turns:
                try:
                    _write(self.key, pack(made))
                except (TypeError, KeyError) as error:
                    log.debug("fzero: nothing of this lowering is kept: %s", error)
        return made

    def _found(self) -> Iterator[Any]:
        """What was kept here, if it can be read."""
        for data in _read(self.key):
            try:
                found = unpack(data, self.mode, self.device)  # type: ignore[arg-type]
            except ValueError as error:
                log.debug("fzero: a kept lowering is not read: %s", error)
            else:
                self.read.append(self.key)
                yield found

    def forget(self) -> None:
        """Removes the files that were read."""
        with contextlib.suppress(OSError), private_folder.folder(folder()) as place:
            for key in self.read:
                with contextlib.suppress(FileNotFoundError):  # another rank removed it
                    os.unlink(f"{key}.lowering", dir_fd=place)
        self.read.clear()


NOTHING = Kept("")


def folder() -> Path:
    """The folder of the files: `lowerings` in `$FZERO_CACHE`, else in `~/.cache/fzero`."""
    return kept_costs.folder() / "lowerings"


# --- keys


def _digest(*parts: Any) -> str:
    """A digest of values as text. Raises TypeError for one that has none, as a function."""
    text = json.dumps(parts, default=_plain, check_circular=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(getattr(value, one.name) for one in dataclasses.fields(value))]
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.value]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, OpOverload)):
        return str(value)
    raise TypeError(f"{value!r} has no text that is the same in every run")


def _of_graph(graph: Graph, lines: bool) -> list[Any]:
    """All of a captured step that lowering reads, as text. lines: also where the user's code stands."""
    regions = [
        [*_of_nodes(x.gm, lines), x.grad_of, sorted(x.summed), [*x.wire.items()], x.sliced, x.microbatches]
        + [x.source] * lines
        for x in graph.regions
    ]
    names = [graph.state_paths, graph.batch_paths, [*graph.constants], graph.metric_names, graph.varying_metrics]
    return [_of_nodes(graph.gm, lines), regions, names]


def _of_nodes(gm: fx.GraphModule, lines: bool) -> list[Any]:
    """Of a device the type alone: ranks of one machine have their own."""
    found = []
    for node in gm.graph.nodes:
        given = fx.node.map_aggregate((node.args, node.kwargs), lambda x: x.type if isinstance(x, torch.device) else x)
        left_out = {"val"} if lines else {"val", "source"}
        noted = [(name, str(what)) for name, what in node.meta.items() if name not in left_out]
        found.append([node.name, node.op, str(node.target), str(given), _forms(node.meta.get("val")), noted])
    return found


def _forms(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().nbytes()
        return [value.dtype, value.shape, value.stride(), value.storage_offset(), size, value.device.type]
    return [*map(_forms, value)] if isinstance(value, (tuple, list)) else None


def _namespaces(nodes: Iterable[fx.Node]) -> set[str]:
    """Of the ops of these nodes, and of the bodies that they hold."""
    found = set()
    for node in nodes:
        if isinstance(node.target, OpOverload):
            found.add(node.target.namespace)
        if node.target is SCAN:
            found |= _namespaces(body_of(str(node.args[3])).graph.nodes)
    return found


@functools.cache
def _files() -> tuple[tuple[str, int, int], ...]:
    """fzero's own code: (file, bytes, when it was changed)."""
    root = Path(__file__).parents[1]
    stats = ((str(file.relative_to(root)), file.stat()) for file in sorted(root.rglob("*.py")))
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)


def _edited(files: Iterable[tuple[str, int, int]]) -> bool:
    """Whether a file is newer than what was imported of it: then it does not say what lowers here."""
    now = time.time_ns()
    return any(_IMPORTED < changed < now for _, _, changed in files)


def _here() -> list[Any]:
    """What lowering is here: its own code, torch, Python, and whether fzero's own kernels run on a device."""
    triton = importlib.util.find_spec("triton") is not None
    return [__version__, _files(), torch.__version__, platform.python_version(), triton]


# --- files


@contextlib.contextmanager
def _turn(key: str) -> Iterator[None]:
    """While no other process of this user makes what is kept under a key, or without waiting where the folder is not
    this user's alone."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            place = stack.enter_context(kept_costs.subfolder(folder(), make=True))
            stack.enter_context(private_folder.locked(place, f"{key[:2]}.lock", PATIENCE))
        yield


def _read(key: str) -> list[bytes]:
    """What the file holds; nothing where there is none that is whole and this user's alone."""
    try:
        with private_folder.folder(folder()) as place:
            data = private_folder.read(place, f"{key}.lowering", LARGEST)
            with contextlib.suppress(OSError):  # a read-only disk
                os.utime(f"{key}.lowering", dir_fd=place)  # the last used stay
    except OSError:
        return []
    head, data = data[:DIGEST], data[DIGEST:]
    return [data] if hashlib.blake2b(data, digest_size=DIGEST).digest() == head else []


def _write(key: str, data: bytes) -> None:
    """Writes a file, and removes the oldest of too many. Whatever the disk refuses is left out."""
    if len(data) > LARGEST - DIGEST:
        return
    try:
        with kept_costs.subfolder(folder(), make=True) as place:
            whole = hashlib.blake2b(data, digest_size=DIGEST).digest() + data
            private_folder.replace(place, f"{key}.lowering", whole)
            private_folder.keep_last(place, ".lowering", nbytes=MOST_BYTES)
    except OSError as error:
        log.debug("fzero: lowerings are not kept: %s", error)
