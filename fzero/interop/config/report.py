"""report: a table of keys as Markdown, block by block, for docs/migration.md."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fzero.interop.config.config_keys import Key


def markdown(table: Mapping[str, Key]) -> str:
    """The rows, keys with the same block, verdict and sentence in one.

    >>> from fzero.interop.config.config_keys import Verdict, keys, table
    >>> print(markdown(table(keys("aio", Verdict.HINT, "its own queue", depth=8, single=False))))
    | key | | what becomes of it |
    |---|---|---|
    | `aio`: `depth` (8), `single` (false) | hint | its own queue |
    """
    rows: dict[tuple[str, str, str], list[str]] = {}
    for path, key in table.items():
        block, _, name = path.rpartition(".")
        told = key.says + (f". {key.fix[:1].upper()}{key.fix[1:]}" if key.fix else "")
        rows.setdefault((block, key.verdict.value, told), []).append(_name(name, key))
    lines = [
        f"| {f'`{block}`: ' if block else ''}{', '.join(names)} | {verdict} | {told} |"
        for (block, verdict, told), names in rows.items()
    ]
    return "\n".join(["| key | | what becomes of it |", "|---|---|---|", *lines])


def _name(name: str, key: Key) -> str:
    """A key with its default, and where "auto" may stand."""
    default = "" if key.default is None else f" ({json.dumps(key.default)})"
    return f"`{name}`{default}{', auto' if key.auto else ''}"
