"""fitted: the tensors of a source under the leaf paths of a pytree.

A foreign checkpoint names its tensors; a pytree has paths. `names` maps a path to a name. By default the parts of the
path are joined with dots, so that the trees of `fzero.interop.from_module` map by themselves. Everything is compared
before anything is read: missing, extra, reshaped and retyped tensors are in one error.

Tied weights are one leaf. A file may hold them under any of their names, or under several. Then they must be equal, bit
for bit; they are compared piece by piece.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.errors import MismatchError, TreeError
from fzero.interop.module import Apply
from fzero.state.source import Entry, Source

log = logging.getLogger("fzero")

PIECE = 1 << 20  # elements that are compared at a time

Names = Mapping[str, str] | Callable[[str], str] | None
Tied = Mapping[str, str] | Apply | torch.nn.Module | None


@dataclass(frozen=True)
class Fitted(Source):
    """A `Source` whose leaves are those of the pytree `like` (tensors on the meta device), read from another source.

    `fzero.init(fitted, spec)` makes a state of it, tensor by tensor. Floating leaves are converted on reading to their
    dtype in `leaves`.
    """

    source: Source
    like: Any
    names: Mapping[str, str]  # by leaf path, the name in the source
    entries: Mapping[str, Entry]

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """See `Source`."""
        return self.entries

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """See `Source`; converts to the leaf's dtype."""
        return self.source.read(self.names[path], start, stop).to(self.entries[path].dtype)


def fitted(
    source: Source,
    like: Any = None,
    *,
    names: Names = None,
    tied: Tied = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Fitted:
    """Returns the source's tensors as the leaves of `like`, a pytree of tensors of which only shapes and dtypes are
    read.

    source: of `safetensors`, `dcp` or `deepspeed`. like: the pytree; None makes every name a leaf of a flat dict.
    names: from a leaf's path to the tensor's name, a dict or a function (default: `/` becomes `.`). tied: a dict from
    each further name of a tied tensor to the name of its leaf, or the module, or the `apply` of `from_module`. dtype:
    the dtype to which floating tensors are converted as they are read. strict: False leaves out tensors that `like` has
    no place for, and logs them.

    Raises MismatchError with every missing, extra, reshaped and retyped tensor, and for tied names whose tensors
    differ.
    """
    others, where = tied_names(tied), str(getattr(source, "path", type(source).__name__))
    held = source.leaves
    first = {name: others.get(name, name) for name in held}  # the first name of a tied tensor, by each of its names
    known: dict[str, list[str]] = {}
    for name, stands in first.items():
        known.setdefault(stands, []).append(name)
    if like is None:
        if names is not None:
            raise TreeError("names= needs like=, the pytree whose paths it leads from (tensors on meta are enough)")
        wanted = {name: name for name in known}
        like = {name: torch.empty(held[n[0]].shape, dtype=held[n[0]].dtype, device="meta") for name, n in known.items()}
        if dtype is not None:
            like = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, like)
    else:
        like = tree.map_with_path(_meta, like)
        wanted = renamed(tree.flatten(like)[0], names)
    paths, leaves, _ = tree.flatten(like)
    wanted = {path: others.get(name, name) for path, name in wanted.items()}
    _compare(dict(zip(paths, leaves, strict=True)), wanted, known, held, dtype, strict, where)
    for stands in wanted.values():
        _same(source, known[stands], where)
    entries = {path: Entry(tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves, strict=True)}
    return Fitted(source, like, {path: known[name][0] for path, name in wanted.items()}, entries)


def renamed(paths: Iterable[str], names: Names) -> dict[str, str]:
    """Returns the name of each path. Raises TreeError if two paths get one name."""
    name_of: dict[str, str] = {}
    for path in paths:
        if isinstance(names, Mapping):
            name = names.get(path, dotted(path))
        else:
            name = dotted(path) if names is None else names(path)
        if not isinstance(name, str) or not name:
            raise TreeError(f"names({path!r}) is {name!r}: needed the tensor's name, a string")
        name_of[path] = name
    by_name: dict[str, str] = {}
    for path, name in name_of.items():
        if by_name.setdefault(name, path) != path:
            raise TreeError(f"leaves {by_name[name]!r} and {path!r} both get the name {name!r}: needed one each")
    return name_of


def dotted(path: str) -> str:
    """A leaf path as Hugging Face and torch name tensors.

    >>> dotted("model/layers/3/mlp.weight")
    'model.layers.3.mlp.weight'
    """
    return path.replace("/", ".")


def tied_names(tied: Tied) -> dict[str, str]:
    """Returns the further names of tied tensors: {other name: the leaf's name}."""
    if tied is None:
        return {}
    if isinstance(tied, Mapping):
        return dict(tied)
    module = tied._module if isinstance(tied, Apply) else tied
    if not isinstance(module, torch.nn.Module):
        raise TreeError(f"tied is {type(tied).__name__}: needed a dict of names, a module, or from_module's apply")
    first: dict[int, str] = {}
    name_of_other: dict[str, str] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(value), name) != name:
            name_of_other[name] = first[id(value)]
    return name_of_other


def _meta(path: str, leaf: Any) -> torch.Tensor:
    if not hasattr(leaf, "shape") or not isinstance(getattr(leaf, "dtype", None), torch.dtype):
        raise TreeError(f"like[{path!r}] is {type(leaf).__name__}: needed a tensor (one on the meta device is enough)")
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")


def _compare(
    leaves: Mapping[str, torch.Tensor],
    wanted: Mapping[str, str],
    known: Mapping[str, list[str]],
    held: Mapping[str, Entry],
    dtype: torch.dtype | None,
    strict: bool,
    where: str,
) -> None:
    """Raises MismatchError with all differences."""
    lines, retyped = [], False
    missing = [name for name in wanted.values() if name not in known]
    extra = [name for stands, group in known.items() if stands not in set(wanted.values()) for name in group]
    lines += [f"  missing   {name}" for name in missing]
    if extra and not strict:
        log.warning("fzero: left out %d tensors that the tree has no place for: %s", len(extra), _some(extra))
    elif extra:
        lines += [f"  extra     {name} {_shown(held[name])}" for name in extra]
    for path, name in wanted.items():
        leaf = leaves[path]
        for other in known.get(name, ()):
            entry = held[other]
            converts = dtype is not None and leaf.dtype == dtype and entry.dtype.is_floating_point
            if tuple(entry.shape) != tuple(leaf.shape):
                lines.append(f"  reshaped  {other} {_shown(entry)}, the tree needs {list(leaf.shape)}")
            elif entry.dtype != leaf.dtype and not converts:
                lines.append(f"  retyped   {other} {_shown(entry)}, the tree needs {leaf.dtype}")
                retyped = True
    if lines:
        hint = _hint(missing, extra)
        hint += "\ndtype=torch.float32 (or another) converts floating tensors as they are read" if retyped else ""
        raise MismatchError(where, "the tensors do not fit the tree; nothing was read:\n" + "\n".join(lines) + hint)


def _hint(missing: list[str], extra: list[str]) -> str:
    """The `names=` that would help, if all missing names differ from extra ones by one prefix."""
    for less, more, fix in ((extra, missing, "path.removeprefix({!r})"), (missing, extra, "{!r} + path")):
        pairs = [(a, b) for b in more for a in less if b.endswith("." + a)][:1]
        prefix = pairs[0][1].removesuffix(pairs[0][0]) if pairs else ""
        if prefix and {name.removeprefix(prefix) for name in more} & set(less):
            return f"\nnames=lambda path: {fix.format(prefix)} may be what is missing"
    if extra and not missing:
        return "\nIf they are another name of a tied weight: tied=apply (from_module's). strict=False leaves them out"
    return ""


def _same(source: Source, group: list[str], where: str) -> None:
    """Raises MismatchError unless tensors under tied names are equal bit for bit."""
    for other in group[1:]:
        first, entry = group[0], source.leaves[group[0]]
        total = math.prod(entry.shape)
        same = source.leaves[other] == entry and all(
            _bits(source, first, low, total).equal(_bits(source, other, low, total)) for low in range(0, total, PIECE)
        )
        if not same:
            raise MismatchError(
                where,
                f"{first!r} and {other!r} are one tied weight, but hold different tensors: nothing was read. Say which "
                "of them counts by leaving the other out of the file, or untie them: tied=None",
            )


def _bits(source: Source, name: str, low: int, total: int) -> torch.Tensor:
    return source.read(name, low, min(low + PIECE, total)).view(torch.uint8)


def _shown(entry: Entry) -> str:
    return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
