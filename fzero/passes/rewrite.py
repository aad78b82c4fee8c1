"""rewrite: what passes share. Finding who reads and writes a buffer, and renaming references; nothing here decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import fx

from fzero import segments
from fzero.program import PERSISTENT, Buffer, Op, Program, Ref


def finish(
    program: Program,
    name: str,
    *,
    ops: Iterable[Op],
    buffers: Mapping[str, Buffer] | None = None,
    new_segments: Mapping[str, fx.GraphModule] | None = None,
) -> Program:
    """The program with these ops, without the buffers and segments that no op names any more, `name` noted as run."""
    ops = tuple(ops)
    named = {ref.name for one in ops for ref in (*one.reads, *one.writes)} | set(program.metrics.values())
    every = program.buffers if buffers is None else buffers
    kept = {n: b for n, b in every.items() if n in named or b.kind in PERSISTENT}
    used = {str(one.get("segment")) for one in ops if one.get("segment") is not None}
    pool = {**program.segments, **(new_segments or {})}
    return replace(
        program,
        ops=ops,
        buffers=kept,
        segments={key: gm for key, gm in pool.items() if key in used},
        passes=(*program.passes, name),
    )


def reads_of(ops: Iterable[Op]) -> dict[str, list[tuple[int, Ref]]]:
    """(op number, reference) of every real read of a buffer: a wait or a free of it is none."""
    found: dict[str, list[tuple[int, Ref]]] = {}
    for index, one in enumerate(ops):
        if one.kind not in ("wait", "free"):
            for ref in one.reads:
                found.setdefault(ref.name, []).append((index, ref))
    return found


def renamed(one: Op, change: Callable[[Ref], Ref]) -> Op:
    """The op with every reference changed."""
    return replace(one, reads=tuple(map(change, one.reads)), writes=tuple(map(change, one.writes)))


def overlap(a: Ref, b: Ref) -> bool:
    """Whether two references to one buffer may share elements."""
    if a.name != b.name:
        return False
    if a.start is None or b.start is None:
        return True
    return a.start < (b.stop or 0) and b.start < (a.stop or 0)


def run_op(
    like: Op,
    gm: fx.GraphModule,
    reads: Iterable[Ref],
    writes: Iterable[Ref],
    pool: dict[str, fx.GraphModule],
    **attrs: int | str,
) -> Op:
    """A run of a segment in the place of `like`; the segment joins `pool`."""
    reads, writes = tuple(reads), tuple(writes)
    key = segments.digest(gm)
    pool.setdefault(key, gm)
    fresh = len(writes) - (len(segments.placeholders(gm.graph)) - len(reads))
    kept = {k: v for k, v in like.attrs if k not in ("segment", "fresh", "flat")}
    done = replace(like, kind="run", reads=reads, writes=writes, attrs=())
    return done.with_attrs(**kept, segment=key, **({"fresh": fresh} if fresh else {}), **attrs)
