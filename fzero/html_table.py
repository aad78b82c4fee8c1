"""html_table: a small table as HTML, for the objects that a notebook shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], most: int = 100) -> str:
    """A table with a title; of more than `most` rows the first are shown, and a line says how many there are.

    >>> html_table("two", ["name", "bytes"], [["a<b", 1024]])
    '<p><b>two</b></p><table><tr><th>name</th><th>bytes</th></tr><tr><td>a&lt;b</td><td>1,024</td></tr></table>'
    """
    lines = [_row(head, "th"), *(_row(row, "td") for row in rows[:most])]
    more = f"<p>{len(rows) - most:,} more rows are not shown.</p>" if len(rows) > most else ""
    return f"<p><b>{escape(title)}</b></p><table>{''.join(lines)}</table>{more}"


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """A table of names and values."""
    return html_table(title, ["", ""], [*facts.items()])


def _row(cells: Sequence[object], tag: str) -> str:
    texts = (f"{cell:,}" if type(cell) is int else str(cell) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"
