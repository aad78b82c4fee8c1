"""rows: a row of the tables, and rows made from names."""

from __future__ import annotations

from collections.abc import Callable

from fzero.fuzz.operands import Draw

Row = Callable[[Draw], str]


def unary(*names: str) -> dict[str, Row]:
    return {name: (lambda g, name=name: f"torch.{name}({g.x()})") for name in names}


def activation(*names: str) -> dict[str, Row]:
    return {name: (lambda g, name=name: f"F.{name}({g.x()})") for name in names}


def binary(*names: str) -> dict[str, Row]:
    def row(g: Draw, name: str) -> str:
        x = g.x()
        return f"torch.{name}({x}, {g.wide(x)})"

    return {name: (lambda g, name=name: row(g, name)) for name in names}


def over(*names: str) -> dict[str, Row]:
    """Reductions: whole, or over a dimension."""

    def row(g: Draw, name: str) -> str:
        x = g.full()
        how = g.some("", f", dim={g.dim()}", f", dim={g.dim()}, keepdim=True") if g.value(x).ndim else ""
        return f"torch.{name}({x}{how})"

    return {name: (lambda g, name=name: row(g, name)) for name in names}


def along(*texts: str) -> dict[str, Row]:
    """Of one dimension: {x} and {d}."""

    def row(g: Draw, text: str) -> str:
        x = g.full(1)
        return text.format(x=x, d=g.dim(x))

    return {text.split("(")[0].split(".")[-1]: (lambda g, text=text: row(g, text)) for text in texts}


def losses(*names: str) -> dict[str, Row]:
    def row(g: Draw, name: str) -> str:
        x = g.full(1)
        return f'F.{name}({x}, {g.like(x)}, reduction="{g.some("mean", "sum", "none")}")'

    return {name: (lambda g, name=name: row(g, name)) for name in names}
