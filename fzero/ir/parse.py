"""parse: the text of a program, back into the program. See `fzero.ir.program` for the form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import HEADER, TRANSPORTS, Level, Program
from fzero.ir.records import DEVICE, DTYPES, Bucket, Buffer, Per, Ref, Slot, SlotKey


def parse(text: str, segments: Mapping[str, Any] | None = None) -> Program:
    """The program that `str(program)` printed.

    text: all of it. segments: by hash, as `program.segments`; they make it runnable.

    Raises ValueError with the line's number and text where a line is not understood, and for a text that ends before
    its ops. The text does not say how many ops there are: of one that was cut among them, `fzero.verify` refuses what
    is left.
    """
    fields: dict[str, Any] = {"buckets": {}, "buffers": {}, "metrics": {}, "ops": []}
    has_ops = False
    for number, line in enumerate(text.split("\n"), 1):
        try:
            _parse_line(line, fields)
            has_ops = has_ops or line == "ops"
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"line {number} of the program is not understood: {line!r} ({error})") from error
    if "mesh" not in fields:
        raise ValueError("the text is no program: it has no `mesh` line")
    if not has_ops:
        raise ValueError("the text is no whole program: it has no `ops` line. Give all that str(program) is")
    return Program(**{**fields, "ops": tuple(fields["ops"])}, segments=dict(segments or {}))


def _parse_line(line: str, fields: dict[str, Any]) -> None:
    body, _, comment = line.partition("  # ")
    words = body.split()
    if not words or words in (["ops"], HEADER.split()):
        return
    if words[:2] == HEADER.split()[:2]:
        raise ValueError(f"a text of version {words[-1]}; this fzero reads {HEADER!r}: lower the step again")
    head, *rest = words
    if head.isdigit():
        fields["ops"].append(_parse_op(rest, comment))
    elif head == "mesh":
        fields["mesh"] = Mesh(tuple((axis, int(size)) for axis, size in (word.split("=") for word in rest)))
    elif head == "role":
        fields["role"] = int(rest[0])
    elif head == "transport":
        if rest[0] not in TRANSPORTS:
            raise ValueError(f"transport {rest[0]!r}: there is {', '.join(TRANSPORTS)}")
        fields["transport"] = rest[0]
    elif head == "meaning":
        fields["meaning"] = "" if rest[0] == "-" else rest[0]
    elif head in ("gather_cap_bytes", "microbatches"):
        fields[head] = int(rest[0])
    elif head == "passes":
        fields["passes"] = () if rest == ["-"] else tuple(rest)
    elif head == "level":
        fields["level"] = Level[rest[0].upper()]
    elif head == "trainable":
        pairs = [] if rest == ["-"] else [word.rpartition(":") for word in rest]
        fields["trainable"] = tuple(SlotKey(bucket, int(slot)) for bucket, _, slot in pairs)
    elif head == "bucket":
        fields["buckets"][rest[0]] = _parse_bucket(rest)
    elif head == "buffer":
        fields["buffers"][rest[0]] = _parse_buffer(rest, comment)
    elif head == "metric":
        fields["metrics"][_unquoted(rest[0])] = rest[1]
    else:
        raise ValueError(f"unknown record {head!r}")


def _parse_bucket(words: list[str]) -> Bucket:
    name, *rest = words
    facts = dict(word.split("=") for word in rest if "[" not in word and word != "numbered")
    places = [_ref(word) for word in rest if "[" in word]
    slots = tuple(Slot(_unquoted(r.name), r.start or 0, r.stop or 0, r.shape or ()) for r in places)
    whether = {"slices": True, "whole": False, "kept": True, "dropped": False}
    updates, kept = whether[facts["updates"]], whether[facts["gathered"]]
    role = int(facts["role"]) if "role" in facts else None
    layer, numbered = _unquoted(facts.get("layer", "%")), "numbered" in rest
    return Bucket(
        name, int(facts["length"]), slots, facts["axis"], updates, kept, facts["reduced"], role, facts.get("copy"),
        layer, numbered,
    )  # fmt: skip


def _parse_buffer(words: list[str], note: str) -> Buffer:
    name, form, kind, *extra = words
    match = re.fullmatch(r"(\w+)\[([\dx]*)\]", form)
    if match is None:
        raise ValueError(f"{form!r} is no dtype[shape]")
    options = dict(word.split("=") for word in extra if word != "per_rank")
    if unknown := options.keys() - {
        "bucket",
        "sharded",
        "at",
        "per",
        "space",
        "tile",
        "entry",
        "axis",
        "lent",
        "parts",
    }:
        raise ValueError(f"a buffer has no {min(unknown)!r}")
    shape = _shape(match[2])
    offset = int(options["at"]) if "at" in options else None
    block_size = _per(options.get("per", "1"))
    bucket, sharded = options.get("bucket"), options.get("sharded")
    per_rank, space = "per_rank" in extra, options.get("space", DEVICE)
    tile = _tile(options["tile"]) if "tile" in options else None
    return Buffer(
        name, DTYPES[match[1]], shape, kind, bucket, sharded, offset, note, block_size, per_rank, space, tile,
        _unquoted(options.get("entry", "%")), options.get("axis"), options.get("lent"), int(options.get("parts", 1)),
    )  # fmt: skip


def _per(text: str) -> Per:
    if re.fullmatch(r"\d+/[1-9]\d*", text) is None:
        return int(text)
    ratio = Fraction(text)
    return ratio.numerator if ratio.denominator == 1 else ratio


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
            attrs[key] = StepPhase(value) if key == "phase" else int(value) if number else value
        else:
            refs[side].append(_ref(word))
    axis = attrs.pop("axis", None)
    why = comment.partition("| ")[2]
    return Op(kind, tuple(refs[0]), tuple(refs[1]), axis, tuple(sorted(attrs.items())), why)  # type: ignore[arg-type]


def _ref(word: str) -> Ref:
    match = re.fullmatch(r"([^\[\]]+)(?:\[(\d+):(\d+):([\dx]*|flat|mine)(?::(\d+\*\d+))?\])?", word)
    if match is None:
        raise ValueError(f"{word!r} is no reference")
    name, start, stop, form, tile = match.groups()
    if start is None:
        return Ref(name)
    shape = None if form in ("flat", "mine") else _shape(form)
    return Ref(name, int(start), int(stop), shape, form == "mine", _tile(tile) if tile else None)


def _tile(text: str) -> tuple[int, int]:
    number, size = text.split("*")
    return int(number), int(size)


def _unquoted(text: str) -> str:
    return "" if text == "%" else unquote(text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x")) if text else ()
