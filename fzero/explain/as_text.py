"""as_text: an explanation as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fzero.compile.lowered import Lowered
from fzero.cost.memory import MemoryAccount, account
from fzero.explain.exposure import InFlight, Spans, in_flight, most_exposed
from fzero.explain.held import at_fullest
from fzero.explain.leaf_road import LeafRoad
from fzero.explain.pass_changes import pass_changes
from fzero.ir.op import Op
from fzero.ir.program import Program, op_text
from fzero.ir.records import DEVICE, DTYPE_NAMES, Buffer
from fzero.profile.charts import bytes_text, time_text

MOST = 12  # rows of a table
WIDTH = 96  # of an op in a line


def program_report(program: Program, spans: Spans | None, lowered: Lowered | None, role: int) -> str:
    """What a program does with memory and transfers, and what each pass changed, if the way to it is known."""
    parts = [*head(program), "", *memory(program), "", *transfers(program, spans)]
    if lowered is not None:
        parts += ["", *passes(lowered, role)]
    return "\n".join(parts)


def head(program: Program) -> Iterator[str]:
    """What is explained, in two lines."""
    role = "" if program.role is None else f", role {program.role}"
    yield f"{program.world_size:,} ranks, mesh {program.mesh}{role}"
    yield f"program {program.digest}: {len(program.ops):,} ops, {len(program.buckets):,} buckets"


def memory(program: Program) -> Iterator[str]:
    """The planned peak of the device by kind, and what holds it there."""
    at = account(program)
    where = "between steps" if at.op < 0 else f"at op {at.op}: {short(program.ops[at.op])}"
    yield f"MEMORY: {bytes_text(at.peak)} at the peak, {where}"
    yield from columns(
        [(f"  {kind}", bytes_text(size), f"{size / at.peak:.0%}") for kind, size in at.kinds.items() if size], "<>>"
    )
    for space, peak in at.spaces.items():
        if space != DEVICE and peak:
            yield f"  beside it, on the {space}: {bytes_text(peak)}"
    yield "  held there, names that differ in numbers together:"
    rows = at_fullest(program)
    yield from columns(
        [
            (f"    {bytes_text(h.nbytes)}", h.kind, f"{h.count} x {h.name}" if h.count > 1 else h.name)
            for h in rows[:MOST]
        ],
        "><<",
    )
    if len(rows) > MOST:
        yield f"    and {len(rows) - MOST} more of {bytes_text(sum(h.nbytes for h in rows[MOST:]))}"


def transfers(program: Program, spans: Spans | None) -> Iterator[str]:
    """The transfers by kind, and those for which a rank stands still."""
    found = in_flight(program, spans)
    yield f"TRANSFERS: {len(found):,}, {bytes_text(sum(t.nbytes for t in found))} sent or moved per step by one rank"
    groups: dict[tuple[str, str], list[InFlight]] = {}
    for one in found:
        op = program.ops[one.op]
        groups.setdefault((op.kind, op.axis or ""), []).append(one)
    yield from columns(
        [
            (f"  {kind}", axis, f"{len(of):,}", bytes_text(sum(t.nbytes for t in of)), exposed_text(of))
            for (kind, axis), of in groups.items()
        ],
        "<<>><",
    )
    if spans is not None:
        whole = spans[-1][1] if spans else 0.0
        waited = sum(t.exposed or 0.0 for t in found)
        yield f"  a step takes {time_text(whole * 1e9)}; {time_text(waited * 1e9)} of it the rank waits for transfers"
    rows = most_exposed(found, MOST)
    if spans is not None:
        yield "  exposed for longest:"
    else:
        yield "  nothing computes beside these:" if rows else "  something computes beside each of them"
        yield "  (seconds need --hardware)"
    yield from columns(
        [
            (f"    op {t.op}", bytes_text(t.nbytes), "" if t.exposed is None else time_text(t.exposed * 1e9),
             short(program.ops[t.op]))
            for t in rows
        ],
        "<>><",
    )  # fmt: skip


def exposed_text(found: Sequence[InFlight]) -> str:
    """How long a rank waits for these, if that is known."""
    if any(t.exposed is None for t in found):
        return ""
    return f"exposed {time_text(sum(t.exposed or 0.0 for t in found) * 1e9)}"


def passes(lowered: Lowered, role: int) -> Iterator[str]:
    """What each pass changed."""
    yield "PASSES, those that changed something:"
    rows = []
    for change in pass_changes(lowered, role):
        counts = ", ".join(
            kind + "".join(f" {sign}{n[kind]}" for sign, n in (("-", change.removed), ("+", change.added)) if n[kind])
            for kind in {**change.removed, **change.added}
        )
        rows.append(
            (
                f"  {change.name}",
                "" if change.sent is None else bytes_text(change.sent),
                f"{counts or 'the order'}  # {change.why}",
            )
        )
    yield from columns([("  pass", "sent after", "ops"), *rows], "<><")


def roles_of(accounts: Mapping[int, MemoryAccount]) -> str:
    """Each role of a pipeline and its peak; equal ones in a row together."""
    peaks = [(role, bytes_text(memory.peak)) for role, memory in accounts.items()]
    rows: list[list[int]] = []
    texts: list[str] = []
    for role, text in peaks:
        if texts and texts[-1] == text:
            rows[-1].append(role)
        else:
            rows.append([role])
            texts.append(text)
    ranges = (f"{of[0]} to {of[-1]}" if len(of) > 1 else f"{of[0]}" for of in rows)
    return ", ".join(f"{of}: {text}" for of, text in zip(ranges, texts, strict=True))


def leaf_report(program: Program, road: LeafRoad, lowered: Lowered | None) -> str:
    """The road of a leaf: at rest, in use, and every op that touches it."""
    lines = [f"LEAF {road.path}" + ("" if program.role is None else f", of role {road.role}")]
    if road.bucket is not None and road.slot is not None:
        shape = list(road.slot.shape)
        lines.append(
            f"  elements {road.slot.start:,} to {road.slot.stop:,} of bucket {road.bucket.name} "
            f"({road.bucket.length:,} elements), seen as {shape}"
        )
    if lowered is not None:
        lines += [
            f"  of the model: {list(leaf.shape)} {DTYPE_NAMES[leaf.dtype]}"
            + (f", {leaf.layout}" if str(leaf.layout) else "")
            for leaf in lowered.plan.leaves
            if leaf.path in (road.path, f"params/{road.path}")
        ]
    lines += ["  at rest:", *columns([at_rest(program, buffer) for buffer in road.at_rest], "<<>")]
    lines.append("  in use:" if road.in_use else "  in use: as it is at rest")
    for name, (first, last) in road.in_use.items():
        buffer = program.buffers[name]
        lines.append(f"    {name}: {buffer.kind}, {bytes_text(buffer.nbytes)}, op {first} to op {last}")
    lines.append(f"  {len(road.touches)} ops touch it:")
    rows = [(f"    {t.index}", t.op.kind, sends(t.nbytes), t.op.why, touched(t.reads, t.writes)) for t in road.touches]
    lines += columns(rows, "><><<")
    return "\n".join(lines)


def at_rest(program: Program, buffer: Buffer) -> tuple[str, str, str]:
    """(the buffer, how it lies on the ranks, its bytes on one of them)."""
    how = "replicated"
    if buffer.sharded:
        how = f"sharded: a slice of each of {program.mesh.size(buffer.sharded):,} ranks of {buffer.sharded}"
    how += "" if buffer.space == DEVICE else f", on the {buffer.space}"
    return f"    {buffer.name}", f"{DTYPE_NAMES[buffer.dtype]}, {how}", bytes_text(buffer.nbytes)


def sends(nbytes: int) -> str:
    """What one rank sends or moves for an op."""
    return f"sends {bytes_text(nbytes)}" if nbytes else ""


def touched(reads: Sequence[str], writes: Sequence[str]) -> str:
    """The leaf's buffers in an op."""
    return f"{' '.join(reads)} -> {' '.join(writes)}" if writes else f"{' '.join(reads)}"


def short(op: Op) -> str:
    """An op in a line: its text, cut, and its reason."""
    text = op_text(op).split("  ")[0]
    text = text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
    return f"`{text}`" + (f" ({op.why})" if op.why else "")


def columns(rows: Sequence[tuple[str, ...]], align: str) -> list[str]:
    """Rows with their columns as wide as the widest cell; the last column keeps its width.

    >>> columns([("a", "1"), ("bcd", "22")], "<>")
    ['a     1', 'bcd  22']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
