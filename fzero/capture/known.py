"""known: values in a trace that depend on no input, computed while it is traced.

A mask, an index or a length that is made of numbers and closed-over tensors alone has a value already. `if mask.any()`
and `mask.nonzero()` ask for it, and the trace can answer. Each such fake tensor has a real one beside it, made by the
same ops. The real ones are views of one another as the fakes are. A value into which an input is written is forgotten.

A value that was read decides the program. The closed-over tensor that it came from is remembered with its version. So a
later change of it in place is an error, and not a program of old values.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import optree
import torch
from torch.utils.weak import WeakIdKeyDictionary

from fzero import backend
from fzero._torch_compat import is_fake, unwatched, version
from fzero.capture.provenance import name_of
from fzero.ir.messages import bytes_of
from fzero.ir.op_info import of

aten = torch.ops.aten

MOST = 1 << 22  # elements of a value that is kept: a mask of 2,048 tokens
SHAPED = 1 << 16  # elements of one that is made of a shape (`zeros_like`): an optimizer makes large ones
MOST_BYTES = 4096  # of a closed-over tensor that is compared by its bytes
IN_ALL = 1 << 30  # bytes that one trace computes
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MADE = re.compile("empty|resize|::set_")  # memory without values
# write all of their first operand, whatever was there before
_OVERWRITES = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}
_Sources = frozenset[int]


@dataclass(frozen=True)
class Baked:
    """A closed-over tensor whose value has decided a program, and its version then.

    memory: of a small one its bytes, which `x.data[0] = y` and numpy change without a new version."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    name: str
    memory: bytes

    def change(self) -> tuple[str, str] | None:
        """(what was changed in place since, the remedy); None if it was not."""
        tensor = self.tensor()
        if tensor is None or (version(tensor) == self.version and _memory(tensor) == self.memory):
            return None
        return (
            f"{self.name} is closed over, its value was read while the step was traced (`if mask.any()`, "
            "`mask.nonzero()`, a slice's end), and it was changed in place since: the program would be that of "
            "the old value",
            "Make a new tensor and a new function that closes over it, or pass it in the batch",
        )


@dataclass
class Closed:
    """A closed-over tensor whose memory a program reads at each step.

    memory: its address when it was traced. held: what the program reads: the same memory, or a copy where the tensor
    is not contiguous.
    """

    tensor: weakref.ref[torch.Tensor]
    memory: int
    held: torch.Tensor
    name: str

    @classmethod
    def of(cls, tensor: torch.Tensor, held: torch.Tensor, name: str) -> Closed:
        """Of a tensor with memory."""
        return cls(weakref.ref(tensor), tensor.data_ptr(), held, name)

    def change(self) -> tuple[str, str] | None:
        """(what was given other memory since, the remedy); None if it was not."""
        tensor = self.tensor()
        if tensor is None or tensor.data_ptr() == self.memory:
            return None
        return (
            f"{self.name} is closed over and was given other memory since the step was traced (x.data = y, x.set_(y), "
            "module.to(dtype)): the program would read the old one",
            "Write into it: x.copy_(y), or module.load_state_dict(...)",
        )

    def refresh(self) -> None:
        """Copies what is read as a copy."""
        if self.is_copy and (tensor := self.tensor()) is not None:
            self.held.copy_(tensor.detach())

    @cached_property
    def is_copy(self) -> bool:
        """Whether the program reads other memory than the tensor had when it was traced."""
        return self.held.data_ptr() != self.memory


@dataclass
class Known:
    """The real values of one trace. Only its methods write to it."""

    values: Any = field(
        default_factory=WeakIdKeyDictionary
    )  # fake tensor -> (its real value, ids of the closed-over tensors it came from)
    closed: dict[int, torch.Tensor] = field(default_factory=dict)  # closed-over tensors, by id
    read: set[int] = field(default_factory=set)  # ids of those of which a value was asked for
    guarded: set[int] = field(default_factory=set)  # their storages, which no op may write to
    blank: dict[int, torch.Tensor] = field(default_factory=dict)  # of `torch.empty`, by storage, until overwritten
    computed_bytes: int = 0  # of all values so far

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, forward: bool = True
    ) -> None:
        """After an op: keeps the values of its results, or forgets those that it has written to.

        forward: it is none of the backward, whose first gradient (`ones_like` of the loss) may be scaled later."""
        if "::empty" in func._schema.name or "::new_empty" in func._schema.name:
            self._blanked(_tensors(result))
            return
        real_args = self._real(func, args, kwargs, shaped=forward)
        written = self._written(func, args, kwargs) if func._schema.is_mutable else set()
        large = any(x.numel() > MOST for x in _tensors(result)) or self.computed_bytes > IN_ALL
        if real_args is None or large or written & self.guarded:
            self._forget(written)
            return
        try:
            real = _tensors(self._computed(func, *real_args[:2]))
        except Exception:  # the op raises when the program runs, or now, where fake tensors refuse it too
            self._forget(written)
            return
        if func in _OVERWRITES:
            self._filled(written)
        for fake, value in zip(_tensors(result), real, strict=False):
            if is_fake(fake) and fake.shape == value.shape:
                self.values[fake] = value, real_args[2]
                self.computed_bytes += value.nbytes

    def holds(self, tensor: Any) -> bool:
        """Whether the value of a tensor in the trace is known, so that it may be asked for."""
        return isinstance(tensor, torch.Tensor) and tensor in self.values and not self._is_blank(tensor)

    def value(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """(the result of an op that asks for values,), where all of them are known; else None."""
        real_args = self._real(func, args, kwargs)
        if real_args is None:
            return None
        self.read |= real_args[2]
        return (self._computed(func, *real_args[:2]),)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of a tensor's value that is asked for as a whole; None where it is not known. A closed-over one is
        itself the value."""
        if not is_fake(tensor):
            self.closed[id(tensor)] = tensor
            self.read.add(id(tensor))
            return None
        if not self.holds(tensor):
            return None
        value, sources = self.values[tensor]
        self.read |= sources
        with unwatched():
            return value.clone()

    def places(self, shape: Sequence[int], indices: Sequence[Any]) -> list[Any]:
        """The indices of `x[...]` of an x of this shape, a mask that is known replaced by the indices of its true
        elements. Raises IndexError, as torch does, for one of other dims than x has there."""
        replaced: list[Any] = []
        for index in indices:
            mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            at = len(replaced)
            if mask and tuple(index.shape) != tuple(shape[at : at + index.dim()]):
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {at} does not match the shape of the indexed "
                    f"tensor {list(shape)} at index {at} (a rank, and a micro batch, has its own rows of the batch)"
                )
            value = self.value(torch.ops.aten.nonzero.default, (index,), {}) if mask else None
            with unwatched():
                columns = [] if value is None else [column.clone() for column in value[0].unbind(1)]
            replaced += [self.literal(column, index.device) for column in columns] or [index]
        return replaced

    def literal(self, value: Any, device: torch.device) -> Any:
        """A number as it is; a real tensor as a literal of the trace on this device."""
        if not isinstance(value, torch.Tensor):
            return value
        with unwatched():
            there = value.to(device, copy=True)  # in-place work is done on the known value too
        fake = torch.ops.aten.lift_fresh.default(there)
        self.values[fake] = value, frozenset()
        return fake

    def baked(self, fns: Sequence[Any]) -> tuple[Baked, ...]:
        """The closed-over tensors that were read; `fns` name them."""
        read = [self.closed[key] for key in sorted(self.read)]
        return tuple(Baked(weakref.ref(x), version(x), name_of(x, fns), _memory(x)) for x in read)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op's result on real tensors; no mode sees it."""
        with unwatched(), torch.no_grad():
            if func is torch.ops.aten.lift_fresh.default:  # the copy that a literal's in-place work is done on
                return args[0].clone()
            return func(*args, **kwargs)

    def _real(self, func: Any, args: Any, kwargs: Any, *, shaped: bool = False) -> tuple[Any, Any, _Sources] | None:
        """(args, kwargs, sources) with real tensors for fakes.

        None where one is not known, or where the op's result is not a function of them. shaped: of an op that reads the
        shape of an operand alone no value need be known.
        """
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags or not name.startswith("aten::") or _MADE.search(name):
            return None
        leaves: list[Any]
        leaves, spec = optree.tree_flatten((tuple(args), dict(kwargs)))  # type: ignore[arg-type]
        sources: _Sources = frozenset()
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                known = self._of(leaf)
                if known is not None and self._is_blank(leaf) and not (func.is_view or self._overwritten(func, args)):
                    known = None
                if known is None and shaped and of(func).of_shape and leaf.numel() <= SHAPED:
                    with unwatched():
                        known = torch.empty((), dtype=leaf.dtype).expand(leaf.shape), frozenset()
                if known is None:
                    return None
                leaves[i], sources = known[0], sources | known[1]
            elif isinstance(leaf, torch.device):
                leaves[i] = torch.device("cpu")  # values are kept on the CPU, for a step on any device
        args, kwargs = spec.unflatten(leaves)
        return args, kwargs, sources

    def _of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Sources] | None:
        """(the real value, sources) of a tensor in the trace; a closed-over one becomes known here."""
        if tensor not in self.values:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if is_fake(tensor) or not plain or tensor.numel() > MOST or tensor.is_meta:
                return None
            with unwatched(), torch.no_grad():
                value = tensor.detach().cpu()
            self.values[tensor] = value, frozenset((id(tensor),))
            self.guarded.add(_storage(value))
            self.closed[id(tensor)] = tensor
        return self.values[tensor]

    def _blanked(self, made: Sequence[torch.Tensor]) -> None:
        """Keeps memory beside tensors that have no values yet, so that a `fill_` of it makes them known."""
        for fake in made:
            if is_fake(fake) and fake.layout is torch.strided and 0 < fake.numel() <= SHAPED:
                with unwatched():
                    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
                self.values[fake] = value, frozenset()
                self.blank[_storage(value)] = value

    def _filled(self, written: set[int]) -> None:
        for storage in written:
            self.blank.pop(storage, None)

    def _is_blank(self, tensor: torch.Tensor) -> bool:
        return bool(self.blank) and tensor in self.values and _storage(self.values[tensor][0]) in self.blank

    def _overwritten(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an op writes to all of its first operand's storage, and only that one is blank."""
        if func not in _OVERWRITES or any(self._is_blank(x) for x in _tensors(args[1:])):
            return False
        value = self.values[args[0]][0]
        return bool(value.nbytes == value.untyped_storage().nbytes())

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
        """The storages of known values that an op writes to, by their addresses."""
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return {_storage(self.values[x][0]) for name in targets for x in _tensors(named.get(name)) if x in self.values}

    def _forget(self, written: set[int]) -> None:
        """Drops the values that lie in these storages."""
        for fake, (value, _) in list(self.values.items()) if written else ():
            if _storage(value) in written:
                del self.values[fake]
        self._filled(written)


def _memory(tensor: torch.Tensor) -> bytes:
    """The bytes of a small tensor on the host; of another none."""
    if not backend.of(tensor.device).on_host or tensor.nbytes > MOST_BYTES:
        return b""
    return bytes_of(tensor).numpy().tobytes()


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(value) if isinstance(x, torch.Tensor)]
