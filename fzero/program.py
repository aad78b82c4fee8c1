"""The program: what one step does, one op per line.

A `Program` is one rank role's schedule. In data parallelism every rank shares one object; verify and interpret take
`{rank: Program}`, so that a pipeline's stages, or a mutation on one rank, are ordinary cases. Everything below is a
frozen record, and a pass makes a new program with `dataclasses.replace`.

A **bucket** is one contiguous 1-D stretch of elements that holds leaves on 64-element boundaries (`Slot`). A **buffer**
is memory: of a bucket's geometry (whole, or a `shard`: the 1/N that this rank owns) or of any shape. A buffer with
`per=64` has one element for each block of 64 of the bucket's (the scales of quantised moments). An op names what it
reads and writes by **`Ref`**: a buffer, or elements [start, stop) of it in the *bucket's* coordinates seen as some
shape. `mine` cuts that range with the rank's own slice, so one text serves every rank.

Text form (`str(program)`, `parse`): one line per record. What follows `#` on an op line is derived (bytes on the wire,
live bytes after the op) and why the op is there; only the why is read back.

    gather params.b1 -> full.b1.0  axis=dp  # wire 4,096 live 1.2M | forward blocks/0 (gpt.py:41)

This file imports nothing of fzero.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any
from urllib.parse import quote, unquote

import torch

ALIGN = 64  # elements; under every stage, so that elementwise kernels give equal bits however a bucket is cut

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

GIVEN = ("batch", "constant", "rank")  # inputs of a step that it never changes; "rank": this rank's place on an axis
PERSISTENT = ("param", "optimizer", "state", *GIVEN)  # live before and after the step
VARYING = ("batch", "rank")  # they differ from rank to rank
KINDS = (*PERSISTENT, "gather", "grad", "scratch", "activation", "metric")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a leaf lies in its bucket: elements [start, stop), seen as `shape`."""

    path: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The geometry that a parameter, its gradient and its moments share: `length` is a multiple of world x ALIGN."""

    name: str
    length: int
    stage: int
    slots: tuple[Slot, ...]

    def end(self, index: int) -> int:
        """Where the padding after slot `index` ends: the next slot's start, or the bucket's length."""
        return self.slots[index + 1].start if index + 1 < len(self.slots) else self.length

    def place(self, index: int, per: int = 1) -> tuple[int, int, tuple[int, ...]]:
        """(start, stop, shape) of slot `index` in a buffer with one element per `per`: whole blocks, counted in 1-D."""
        slot = self.slots[index]
        if per == 1:
            return slot.start, slot.stop, slot.shape
        blocks = -(-(slot.stop - slot.start) // per)
        return slot.start, slot.start + blocks * per, (blocks,)

    def find(self, place: tuple[int | None, int | None, tuple[int, ...] | None], per: int = 1) -> int | None:
        """The slot at exactly this place, or None."""
        for i in range(self._first(place[0] or 0), len(self.slots)):
            if self.slots[i].start != place[0]:
                break
            if self.place(i, per) == place:
                return i
        return None

    def inside(self, start: int, stop: int, per: int = 1) -> list[int]:
        """The slots that lie wholly in elements [start, stop), in a buffer with one element per `per`."""
        first = self._first(start)
        return list(takewhile(lambda i: self.place(i, per)[1] <= stop, range(first, len(self.slots))))

    def _first(self, start: int) -> int:
        """The first slot that begins at `start` or later: slots lie in order."""
        return bisect_left(self.slots, start, key=lambda slot: slot.start)

    @property
    def padding(self) -> int:
        return self.length - sum(slot.stop - slot.start for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory by name. `shape` is this rank's; `at` is its place in the step's arena, in bytes (None: memory of its own,
    from the allocator); of a bucket's geometry it has one element for each `per`. Of a leaf that is `per_rank` every
    rank keeps its own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    bucket: str | None = None
    shard: bool = False
    at: int | None = None
    note: str = ""
    per: int = 1
    per_rank: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer, or elements [start, stop) of it as `shape`; `mine`: only the part in this rank's slice (1-D)."""

    name: str
    start: int | None = None
    stop: int | None = None
    shape: tuple[int, ...] | None = None
    mine: bool = False

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        form = "mine" if self.mine else ("flat" if self.shape is None else _shape_text(self.shape))
        return f"{self.name}[{self.start}:{self.stop}:{form}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One line of a program. `attrs` are sorted (name, value) pairs of int and str."""

    kind: str
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    axis: str | None = None
    attrs: tuple[tuple[str, int | str], ...] = ()
    why: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def with_attrs(self, **attrs: int | str) -> Op:
        return replace(self, attrs=tuple(sorted({**dict(self.attrs), **attrs}.items())))


def op(
    kind: str,
    reads: Iterable[Ref] = (),
    writes: Iterable[Ref] = (),
    *,
    axis: str | None = None,
    why: str = "",
    **attrs: int | str,
) -> Op:
    """An `Op` from plain arguments."""
    return Op(kind, tuple(reads), tuple(writes), axis, tuple(sorted(attrs.items())), why)


@dataclass(frozen=True)
class Program:
    """A step for one role.

    `metrics` maps a metric's name to the buffer that holds it at the end. `meaning` is the digest of what the captured
    step computes; verify recomputes it from the ops. `trainable` are the slots ("bucket:index") that the step must
    reduce and update once. `segments` maps a hash to its `torch.fx.GraphModule` and takes no part in equality: the hash
    in the op does.
    """

    mesh: tuple[tuple[str, int], ...]
    buckets: Mapping[str, Bucket]
    buffers: Mapping[str, Buffer]
    ops: tuple[Op, ...]
    metrics: Mapping[str, str]
    meaning: str = ""
    gather_cap_bytes: int = 0
    microbatches: int = 1
    trainable: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    segments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def axis_size(self, axis: str | None) -> int:
        return dict(self.mesh)[axis] if axis is not None else 1

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of the one piece of memory that placed buffers and workspaces lie in."""
        ends = [b.at + b.nbytes for b in self.buffers.values() if b.at is not None]
        ends += [int(one.get("at")) + int(one.get("workspace", 0)) for one in self.ops if one.get("at") is not None]
        return -(-max(ends, default=0) // ALIGN) * ALIGN  # whole elements of every dtype

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of the text without comments: equal programs, equal digests."""
        text = "\n".join(line.split("  # ")[0] for line in to_text(self, live=()).splitlines())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def local_range(self, ref: Ref, rank: int) -> tuple[int, int]:
        """The elements of `ref`'s own buffer that it names on `rank`, in that buffer's coordinates."""
        buffer = self.buffers[ref.name]
        start, stop = (0, self.extent(buffer)) if ref.start is None else (ref.start, ref.stop or 0)
        base = 0
        if buffer.shard or ref.mine:
            assert buffer.bucket is not None, f"{ref} has no slice of its own: {buffer.name} is in no bucket"
            size = self.buckets[buffer.bucket].length // self.axis_size("dp")
            low, high = rank * size, (rank + 1) * size
            start, stop = min(max(start, low), high), min(max(stop, low), high)
            base = low if buffer.shard else 0
        return (start - base) // buffer.per, (stop - base) // buffer.per

    def extent(self, buffer: Buffer) -> int:
        """The elements a whole reference spans, in the coordinates references use: the bucket's for a shard."""
        sharded = buffer.shard and buffer.bucket is not None
        return self.buckets[buffer.bucket or ""].length if sharded else buffer.numel * buffer.per

    def __str__(self) -> str:
        return to_text(self, live_bytes(self))


# --- text ---------------------------------------------------------------------------------------------------------


def to_text(program: Program, live: Iterable[int]) -> str:
    """The text form; `live` gives the live bytes after each op, or nothing."""
    lines = ["fzero program 1"]
    lines.append("mesh " + " ".join(f"{axis}={size}" for axis, size in program.mesh))
    lines.append(f"meaning {program.meaning or '-'}")
    lines.append(f"gather_cap_bytes {program.gather_cap_bytes}")
    lines.append(f"microbatches {program.microbatches}")
    lines.append("passes " + (" ".join(program.passes) or "-"))
    lines.append("trainable " + (" ".join(program.trainable) or "-"))
    for bucket in program.buckets.values():
        slots = " ".join(f"{_quote(s.path)}[{s.start}:{s.stop}:{_shape_text(s.shape)}]" for s in bucket.slots)
        lines.append(f"bucket {bucket.name} length={bucket.length} stage={bucket.stage} {slots}")
    for b in program.buffers.values():
        extra = f" bucket={b.bucket}" if b.bucket else ""
        extra += (" shard" if b.shard else "") + (" per_rank" if b.per_rank else "")
        extra += f" per={b.per}" if b.per != 1 else ""
        extra += f" at={b.at}" if b.at is not None else ""
        extra += f"  # {b.note}" if b.note else ""
        lines.append(f"buffer {b.name} {DTYPE_NAMES[b.dtype]}[{_shape_text(b.shape)}] {b.kind}{extra}")
    for name, buffer in program.metrics.items():
        lines.append(f"metric {_quote(name)} {buffer}")
    lines.append("ops")
    levels = list(live)
    for index, one in enumerate(program.ops):
        after = levels[index] if index < len(levels) else None
        lines.append(_op_line(index, one, wire_bytes(program, one), after))
    return "\n".join(lines) + "\n"


def op_text(one: Op) -> str:
    """An op without its number and comment."""
    text = f"{one.kind} " + " ".join(map(str, one.reads))
    text += (" -> " if one.writes else "") + " ".join(map(str, one.writes))
    return text + "".join(f"  {key}={value}" for key, value in ((("axis", one.axis),) if one.axis else ()) + one.attrs)


def _op_line(index: int, one: Op, wire: int, live: int | None) -> str:
    text = f"{index:4d} {op_text(one)}"
    notes = ([f"wire {wire:,}"] if wire else []) + ([f"live {live:,}"] if live is not None else [])
    comment = " ".join(notes) + (f" | {one.why}" if one.why else "")
    return text.rstrip() + (f"  # {comment}" if comment else "")


def parse(text: str, segments: Mapping[str, Any] | None = None) -> Program:
    """The program that `str(program)` printed; `segments` (by hash) make it runnable.

    Raises ValueError with the line's number and text where a line is not understood.
    """
    found: dict[str, Any] = {"buckets": {}, "buffers": {}, "metrics": {}, "ops": []}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _parse_line(line, found)
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"line {number} of the program is not understood: {line!r} ({error})") from error
    if "mesh" not in found:
        raise ValueError("the text is no program: it has no `mesh` line")
    return Program(**{**found, "ops": tuple(found["ops"])}, segments=dict(segments or {}))


def _parse_line(line: str, found: dict[str, Any]) -> None:
    body, _, comment = line.partition("  # ")
    words = body.split()
    if not words or words in (["ops"], ["fzero", "program", "1"]):
        return
    head, *rest = words
    if head.isdigit():
        found["ops"].append(_parse_op(rest, comment))
    elif head == "mesh":
        found["mesh"] = tuple((axis, int(size)) for axis, size in (word.split("=") for word in rest))
    elif head == "meaning":
        found["meaning"] = "" if rest[0] == "-" else rest[0]
    elif head in ("gather_cap_bytes", "microbatches"):
        found[head] = int(rest[0])
    elif head in ("passes", "trainable"):
        found[head] = () if rest == ["-"] else tuple(rest)
    elif head == "bucket":
        length, stage = (int(word.split("=")[1]) for word in rest[1:3])
        slots = tuple(Slot(unquote(r.name), r.start or 0, r.stop or 0, r.shape or ()) for r in map(_ref, rest[3:]))
        found["buckets"][rest[0]] = Bucket(rest[0], length, stage, slots)
    elif head == "buffer":
        found["buffers"][rest[0]] = _parse_buffer(rest, comment)
    elif head == "metric":
        found["metrics"][unquote(rest[0])] = rest[1]
    else:
        raise ValueError(f"unknown record {head!r}")


def _parse_buffer(words: list[str], note: str) -> Buffer:
    name, form, kind, *extra = words
    match = re.fullmatch(r"(\w+)\[([\dx]*)\]", form)
    if match is None:
        raise ValueError(f"{form!r} is no dtype[shape]")
    options = dict(word.split("=") for word in extra if "=" in word)
    shape = _shape(match[2])
    at = int(options["at"]) if "at" in options else None
    per = int(options.get("per", 1))
    return Buffer(
        name, DTYPES[match[1]], shape, kind, options.get("bucket"), "shard" in extra, at, note, per, "per_rank" in extra
    )


def _parse_op(words: list[str], comment: str) -> Op:
    kind, *rest = words
    attrs: dict[str, int | str] = {}
    refs: list[list[Ref]] = [[], []]
    side = 0
    for word in rest:
        if word == "->":
            side = 1
        elif "=" in word:
            key, _, value = word.partition("=")
            number = re.fullmatch(r"-?\d+", value) and key != "segment"  # a hash may be all digits
            attrs[key] = int(value) if number else value
        else:
            refs[side].append(_ref(word))
    axis = attrs.pop("axis", None)
    why = comment.partition("| ")[2]
    return Op(kind, tuple(refs[0]), tuple(refs[1]), axis, tuple(sorted(attrs.items())), why)  # type: ignore[arg-type]


def _ref(word: str) -> Ref:
    match = re.fullmatch(r"([^\[\]]+)(?:\[(\d+):(\d+):([\dx]*|flat|mine)\])?", word)
    if match is None:
        raise ValueError(f"{word!r} is no reference")
    name, start, stop, form = match.groups()
    if start is None:
        return Ref(name)
    shape = None if form in ("flat", "mine") else _shape(form)
    return Ref(name, int(start), int(stop), shape, form == "mine")


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x")) if text else ()


def _quote(text: str) -> str:
    return quote(text, safe="/._-+*@,()'!:") or "%"


# --- bytes --------------------------------------------------------------------------------------------------------


def wire_bytes(program: Program, one: Op) -> int:
    """Bytes that one rank sends for `one`: (N-1)/N of the whole for a gather or a scatter, twice that for both."""
    if any(ref.name not in program.buffers for ref in (*one.reads, *one.writes)):
        return 0  # verify refuses it, and prints it
    if one.kind == "send":
        return sum(program.buffers[ref.name].nbytes for ref in one.reads)
    n = dict(program.mesh).get(one.axis or "", 1)
    if one.kind not in ("gather", "reduce") or n == 1:
        return 0
    refs = one.writes if one.kind == "gather" else one.reads
    if not refs:
        return 0
    whole = program.buffers[refs[0].name].nbytes
    if one.get("mode") == "exchange":
        return whole * (n - 1)
    passes = 1 if one.kind == "gather" or one.get("mode") == "scatter" else 2
    return passes * whole * (n - 1) // n


def live_bytes(program: Program, counted: Callable[[Buffer], bool] = lambda buffer: True) -> list[int]:
    """Bytes of buffers alive after each op, of those `counted`. What an op needs only while it runs is not in here."""
    size = {name: b.nbytes if counted(b) else 0 for name, b in program.buffers.items()}
    held = {name for name, b in program.buffers.items() if b.kind in PERSISTENT}
    live = sum(size[name] for name in held)
    levels = []
    for one in program.ops:
        for ref in one.writes:
            if ref.name in size and ref.name not in held:
                held.add(ref.name)
                live += size[ref.name]
        if one.kind == "free":
            for ref in one.reads:
                if ref.name in held:
                    held.discard(ref.name)
                    live -= size[ref.name]
        levels.append(live)
    return levels
