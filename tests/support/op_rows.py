"""Rows of ops that a test adds, and takes away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fzero.ir import op_info


@contextmanager
def restored() -> Iterator[None]:
    """What is added inside to rows of ops (`op_info.add`, `fzero.shard.rule`) is gone afterwards."""
    before = dict(op_info._rows)
    try:
        yield
    finally:
        op_info._rows.clear()
        op_info._rows.update(before)
        op_info._forget()


def drop(*names: str) -> None:
    """Takes rows away."""
    for name in names:
        del op_info._rows[name]
    op_info._forget()
