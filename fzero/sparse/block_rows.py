"""block_rows: what one block of queries looks at: its runs of key blocks, the edges that are masked, and blind queries.

A table of columns is int32 (1 or batch, 1 or heads, rows, width): the key blocks of each row in ascending order, then
-1. None is all blocks. A query at token i sees a key at j where -left <= j - i <= right (-1 is no bound), and where
documents are given, only keys of its own id; a token of a negative id is padding: it sees and is seen by none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.errors import SpecError

QUERIES = 64  # rows of smaller blocks are taken together up to so many queries, where that pays
VISIT = 8192  # what a row costs beside its pairs, in pairs of a query and a key


class Rules(NamedTuple):
    """Tokens of a block, and how far a query looks back and ahead, in tokens; -1 without a bound."""

    block: int
    left: int
    right: int

    def columns(self, row: int, rows: int) -> range:
        """The key blocks of a row that the bounds reach."""
        first = 0 if self.left < 0 else max(0, (row * self.block - self.left) // self.block)
        last = rows - 1 if self.right < 0 else min(rows - 1, ((row + 1) * self.block - 1 + self.right) // self.block)
        return range(first, last + 1)

    def width(self, rows: int) -> int:
        """The most key blocks of a row that the bounds reach."""
        back = rows if self.left < 0 else -(-self.left // self.block)
        ahead = rows if self.right < 0 else -(-self.right // self.block)
        return min(rows, back + 1 + ahead)


class HeadSpan(NamedTuple):
    """The heads that share a table and ids: of some batches and key heads, and query heads of each key head."""

    batches: range
    groups: range
    repeats: slice
    table: Tensor | None  # (rows, width)
    ids: Tensor | None  # (tokens,)


class BlockRow(NamedTuple):
    """Blocks of queries that follow one another, and the keys that any of them looks at.

    start: of its queries. runs: its keys as (first, past the last) token. edges: (place among its queries, among its
    keys, additive mask (block, block)). hidden: an additive mask of its blocks of queries and of keys; None where each
    looks at all. blind: bool (queries, 1), the queries without a key; None where there is none.
    """

    start: int
    queries: int
    runs: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int, Tensor], ...]
    hidden: Tensor | None
    blind: Tensor | None

    @property
    def keys(self) -> int:
        """The number of its keys."""
        return sum(stop - start for start, stop in self.runs)


def spans(batch: int, heads: int, groups: int, table: Tensor | None, documents: Tensor | None) -> Iterator[HeadSpan]:
    """The heads of a call, by table and ids, in order."""
    by_batch = documents is not None or (table is not None and table.shape[0] > 1)
    tables, repeat = 1 if table is None else table.shape[1], heads // groups
    for batches in [range(i, i + 1) for i in range(batch)] if by_batch else [range(batch)]:
        first = batches.start if table is not None and table.shape[0] > 1 else 0
        ids = None if documents is None else documents[batches.start]
        for number in range(tables):
            own = None if table is None else table[first, number]
            if tables == 1:
                yield HeadSpan(batches, range(groups), slice(0, repeat), own, ids)
            elif tables == groups:
                yield HeadSpan(batches, range(number, number + 1), slice(0, repeat), own, ids)
            else:
                group, place = divmod(number, repeat)
                yield HeadSpan(batches, range(group, group + 1), slice(place, place + 1), own, ids)


def rows(span: HeadSpan, count: int, rules: Rules, like: Tensor) -> Iterator[BlockRow]:
    """The rows of a span one by one, so that the masks of one are held at a time: on the device and of the dtype of
    `like`. A row is a block of queries, or some that follow one another. Raises SpecError for a bad table."""
    table = None if span.table is None else span.table.tolist()
    masks = _Masks(rules, like, span.ids)
    many = together(rules.block, span.ids is not None)
    for first in range(0, count, many):
        group = []
        for number in range(first, min(first + many, count)):
            columns: Sequence[int] = rules.columns(number, count)
            if table is not None:
                columns = [c for c in _checked(table[number], number, count) if c in columns]
            group.append([c for c in columns if not masks.nothing(number, c)])
        if _pays(group, rules.block):
            yield _row(first, group, masks)
        else:
            yield from (_row(first + i, [columns], masks) for i, columns in enumerate(group))


def together(block: int, documents: bool) -> int:
    """How many blocks of queries may be one row. With documents one: each pair of blocks may have a mask of its own."""
    return 1 if documents else max(1, QUERIES // block)


def most_keys(block: int, width: int, count: int, documents: bool) -> int:
    """The most keys of a row, whatever the table says, of `count` blocks of which a query sees `width`."""
    many = together(block, documents)
    own = width * block
    return min(count * block, many * own, own + VISIT * (many - 1) // (many * block))


def _pays(group: Sequence[Sequence[int]], block: int) -> bool:
    """Whether blocks of queries are one row: by the pairs that it computes, so that bits depend on the table alone."""
    joined = len(group) * len(set().union(*group)) * block * block + VISIT
    return joined <= sum(len(columns) * block * block + VISIT for columns in group)


def _checked(columns: list[int], number: int, count: int) -> list[int]:
    """The blocks of a row without the -1 behind them."""
    own = columns[: columns.index(-1)] if -1 in columns else columns
    ascending = all(a < b for a, b in itertools.pairwise(own)) and set(columns[len(own) :]) <= {-1}
    if not ascending or (own and not 0 <= own[0] <= own[-1] < count):
        raise SpecError(
            f"block_sparse_attention: row {number} of the table is {columns}; needed blocks from 0 to {count - 1} in "
            "ascending order, each once, then -1"
        )
    return own


def _row(first: int, group: Sequence[Sequence[int]], masks: _Masks) -> BlockRow:
    block, runs = masks.rules.block, list[tuple[int, int]]()
    union = sorted(set().union(*group))
    for column in union:
        if runs and runs[-1][1] == column * block:
            runs[-1] = (runs[-1][0], (column + 1) * block)
        else:
            runs.append((column * block, (column + 1) * block))
    place = {column: i * block for i, column in enumerate(union)}
    edges, blind = [], []
    for i, columns in enumerate(group):
        own = [(column, masks.of(first + i, column)) for column in columns]
        edges += [(i * block, place[column], mask) for column, mask in own if mask is not None]
        blind.append(masks.blind([mask for _, mask in own]))
    hidden = None
    if any(len(columns) < len(union) for columns in group):
        seen = [set(columns) for columns in group]
        hidden = masks.additive(torch.tensor([[column not in own for column in union] for own in seen]))
    unseeing = torch.cat(blind) if any(x is not masks.none and bool(x.any()) for x in blind) else None
    return BlockRow(first * block, len(group) * block, tuple(runs), tuple(edges), hidden, unseeing)


class _Masks:
    """Additive masks of pairs of blocks. Those of the bounds depend on the distance alone, and are kept."""

    def __init__(self, rules: Rules, like: Tensor, ids: Tensor | None) -> None:
        self.rules, self.like, self.ids = rules, like, ids
        self.by_distance: dict[int, Tensor] = {}
        self.inside = torch.arange(rules.block, device=like.device)
        self.none = torch.zeros(rules.block, 1, dtype=torch.bool, device=like.device)
        blocks = [] if ids is None else ids.view(-1, rules.block).tolist()
        self.seen = [{i for i in own if i >= 0} for own in blocks]
        self.plain = [len(set(own)) == 1 for own in blocks]

    def nothing(self, row: int, column: int) -> bool:
        """Whether no document is in both blocks."""
        return self.ids is not None and self.seen[row].isdisjoint(self.seen[column])

    def of(self, row: int, column: int) -> Tensor | None:
        """The mask (block, block) of 0 and -inf; None where all is seen."""
        bounds = self._of_bounds(column - row)
        if self.ids is None or (self.plain[row] and self.plain[column]):
            return bounds
        own, other = self.ids.view(-1, self.rules.block)[row], self.ids.view(-1, self.rules.block)[column]
        mask = self.additive((own[:, None] != other) | (other < 0))
        return mask if bounds is None else mask.add_(bounds)

    def blind(self, masks: Sequence[Tensor | None]) -> Tensor:
        """bool (block, 1): the queries of a block that see nothing, by the masks of all blocks that it looks at."""
        if any(mask is None for mask in masks):
            return self.none
        hidden = [mask.isinf().all(-1, keepdim=True) for mask in masks if mask is not None]
        return torch.stack(hidden).all(0) if hidden else ~self.none

    def additive(self, hidden: Tensor) -> Tensor:
        """0 and, where hidden, -inf."""
        return self.like.new_zeros(hidden.shape).masked_fill_(hidden.to(self.like.device), -torch.inf)

    def _of_bounds(self, distance: int) -> Tensor | None:
        (block, left, right), far = self.rules, distance * self.rules.block
        if (left < 0 or far - (block - 1) >= -left) and (right < 0 or far + block - 1 <= right):
            return None
        if distance not in self.by_distance:
            ahead = far + self.inside - self.inside[:, None]
            self.by_distance[distance] = self.additive(
                ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
            )
        return self.by_distance[distance]
