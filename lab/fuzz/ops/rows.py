"""rows: a row of the tables, and rows made from names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lab.fuzz.operands import Draw

Row = Callable[[Draw], str]


def each(row: Callable[..., str], *names: str) -> dict[str, Row]:
    """The row of every name: `row(g, name=name)`."""
    return {name: partial(row, name=name) for name in names}


def unary(*names: str) -> dict[str, Row]:
    """A row for each function of one tensor in `torch`."""
    return each(lambda g, name: f"torch.{name}({g.x()})", *names)


def activation(*names: str) -> dict[str, Row]:
    """A row for each function of one tensor in `torch.nn.functional`."""
    return each(lambda g, name: f"F.{name}({g.x()})", *names)


def binary(*names: str) -> dict[str, Row]:
    """A row for each function of two tensors in `torch`; the second broadcasts."""
    return each(lambda g, name: f"torch.{name}({(x := g.x())}, {g.wide(x)})", *names)


def over(*names: str) -> dict[str, Row]:
    """Reductions: whole, or over a dimension."""

    def row(g: Draw, name: str) -> str:
        x = g.full()
        how = g.some("", f", dim={g.dim()}", f", dim={g.dim()}, keepdim=True") if g.value(x).ndim else ""
        return f"torch.{name}({x}{how})"

    return each(row, *names)


def along(*texts: str) -> dict[str, Row]:
    """Of one dimension: {x} and {d}."""

    def row(g: Draw, name: str) -> str:
        x = g.full(1)
        return name.format(x=x, d=g.dim(x))

    return {text.split("(")[0].split(".")[-1]: table_row for text, table_row in each(row, *texts).items()}


def losses(*names: str) -> dict[str, Row]:
    """A row for each loss of two tensors of one shape."""

    def row(g: Draw, name: str) -> str:
        x = g.full(1)
        return f'F.{name}({x}, {g.like(x)}, reduction="{g.some("mean", "sum", "none")}")'

    return each(row, *names)
