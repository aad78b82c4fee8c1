"""matmul: fp32 matrix products (matmuls) on CPU by the faster of torch's two libraries, chosen once per shape.

torch computes an fp32 `mm` with MKL. oneDNN is in the same build, and torch uses it for bf16. It can be the faster one
(2.1 times on AMD Zen 5, at the same accuracy) or the slower one (small matmuls: it prepares each call). So

1. every matmul of a captured step is looked up by op, shapes, strides and dtype among the figures that were measured on
   this machine (`fzero.cost.kept_costs`). One that is not there is measured, both ways, into a given output, in 20 to
   70 milliseconds;
2. where oneDNN is chosen (`fzero.compile.decide`: where it is at least 1.1 times as fast), the node becomes
   `fzero::onednn_mm` (`addmm`, `bmm`, `baddbmm`), an op of the same arguments, result and strides. That happens in the
   captured graph, before anything is lowered. The meaning of a step and the program of every stage hold the same ops,
   so bits do not depend on the stage.

    mm = aten.mm(x, t)      becomes      mm = fzero.onednn_mm(x, t)

The kernel is torch's own. `aten.mm` computes with oneDNN where torch allows it bfloat16 inside fp32 matmuls, and only
with AMX has oneDNN a kernel that uses the permission. Elsewhere it runs its ordinary fp32 kernel, with the bits of
torch's oneDNN linear. `fzero._torch_compat` gives the permission for the one call and only where there is no AMX. A
result that is not that of fp32 rules oneDNN out for the shape. Results go straight into `out=`.

Some ops stay with MKL: `mv`, `dot`, and fused attention. Attention's tiles are small, and the permission makes it up to
four times slower; therefore the whole process is not given it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import by_onednn
from fzero.capture.graph import Graph
from fzero.cost.kept_costs import Costs, Figures
from fzero.ir import segments

aten = torch.ops.aten
SAME = 1e-5  # relative distance of two fp32 results, summed in different orders; rounding to tf32 gives 2e-4
LARGEST = 1 << 29  # multiplications measured at: of larger matmuls a part is
SECONDS, ROUNDS = 0.02, (2, 300)  # of measuring, for both together

NAMES = ("mm", "addmm", "bmm", "baddbmm")
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
KERNELS: dict[Any, Callable[..., torch.Tensor]] = {}  # each op's function, without the dispatcher's 6 microseconds


def _register(name: str, overload: str) -> Any:
    """Defines `fzero::onednn_<name>` with the schema and tags of `aten::<name>`; returns the overload."""
    own = getattr(getattr(aten, name), overload)
    _LIBRARY.define(str(own._schema).replace(f"aten::{name}", f"onednn_{name}"), tags=own.tags)
    kernel = by_onednn(own)
    suffix = "" if overload == "default" else f".{overload}"
    _LIBRARY.impl(f"onednn_{name}{suffix}", kernel, "CompositeExplicitAutograd")
    form = getattr(getattr(torch.ops.fzero, f"onednn_{name}"), overload)
    KERNELS[form] = kernel
    return form


FORMS = {getattr(aten, name).default: _register(name, "default") for name in NAMES}
OUT_FORMS = {getattr(aten, name).out: _register(name, "out") for name in NAMES}


@dataclass(frozen=True)
class Matmul:
    """One op on fp32 operands of these shapes and strides: a bias or addend first where there is one, then a and b.

    Its text (`str`) is the question under which figures are kept.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        pairs = zip(self.shapes, self.strides, strict=True)
        return f"{self.name} float32 {' '.join('x'.join(map(str, a)) + _layout(a, s) for a, s in pairs)}"

    @property
    def multiplications(self) -> int:
        """Multiplications of two numbers: m n k, times the batch."""
        *batch, rows, inner = self.shapes[-2]
        return rows * inner * self.shapes[-1][-1] * (batch[0] if batch else 1)


def of(node: fx.Node) -> Matmul | None:
    """The matmul that a node computes; None where there is no choice of library."""
    if node.target not in FORMS:
        return None
    values = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if not all(v.dtype is torch.float32 and backend.of(v.device).on_host and v.numel() for v in values):
        return None
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    return Matmul(name, tuple(tuple(v.shape) for v in values), tuple(v.stride() for v in values))


def products(graph: Graph) -> dict[str, Matmul]:
    """The matmuls of a captured step of which a library can be chosen, by the question under which figures are kept."""
    nodes = [n for gm in (graph.gm, *(region.gm for region in graph.regions)) for n in gm.graph.nodes]
    return {str(matmul): matmul for matmul in map(of, nodes) if matmul is not None}


def figures_of(asked: Mapping[str, Matmul], costs: Costs) -> dict[str, Figures]:
    """By question, the speed of both libraries; those of which nothing is known are left out."""
    known = costs.find(list(asked), lambda question: measured(asked[question])) if asked else {}
    return {question: figures for question, figures in known.items() if {"onednn", "torch"} <= figures.keys()}


def rewritten(graph: Graph, chosen: set[Matmul]) -> Graph:
    """The same graph with oneDNN's op for the matmuls in `chosen`."""
    regions = tuple(replace(region, gm=_with_forms(region.gm, chosen)) for region in graph.regions)
    return replace(graph, gm=_with_forms(graph.gm, chosen), regions=regions)


def _with_forms(gm: fx.GraphModule, chosen: set[Matmul]) -> fx.GraphModule:
    graph = segments.copied(gm.graph)
    for node in graph.nodes:
        if of(node) in chosen:
            node.target = FORMS[node.target]
    return segments.module(graph)


# --- measuring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured(matmul: Matmul) -> Figures:
    """{"torch", "onednn"}: GFLOP/s, the best of interleaved rounds, writing into a given output.

    A library whose result is not that of fp32 has 0.
    """
    matmul = _part(matmul)
    generator = torch.Generator().manual_seed(0)
    operands = [_filled(*like, generator) for like in zip(matmul.shapes, matmul.strides, strict=True)]
    result = torch.empty(*matmul.shapes[-2][:-1], matmul.shapes[-1][-1], dtype=torch.float32)
    own = getattr(aten, matmul.name).out
    candidates = {"torch": own, "onednn": KERNELS[OUT_FORMS[own]]}
    wanted = own(*operands, out=result).clone()
    near = KERNELS[OUT_FORMS[own]](*operands, out=result).sub_(wanted).norm() <= SAME * wanted.norm()
    best = dict.fromkeys(candidates, float("inf"))
    rounds, start = 0, time.perf_counter()
    while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and time.perf_counter() - start < SECONDS):
        for name, kernel in candidates.items():
            begin = time.perf_counter()
            kernel(*operands, out=result)
            best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    figures = {name: 2e-9 * matmul.multiplications / seconds for name, seconds in best.items()}
    return figures if near else {**figures, "onednn": 0.0}


def _part(matmul: Matmul) -> Matmul:
    """A matmul of about `LARGEST` multiplications of the same kind: its longest dimension is cut.

    The dimension keeps its remainder by 64. A matmul whose operands are not dense is returned as it is.
    """
    roles = (("rows", "columns"), ("rows", "inner"), ("inner", "columns"))[-len(matmul.shapes) :]
    forms = [_layout(*like) for like in zip(matmul.shapes, matmul.strides, strict=True)]
    sizes = {role: size for shape, names in zip(matmul.shapes, roles, strict=True)
             for role, size in zip(names[-len(shape) :], shape[-2:], strict=True)}  # fmt: skip
    longest = max(sizes, key=sizes.__getitem__)
    size = LARGEST * sizes[longest] // matmul.multiplications // 64 * 64 + sizes[longest] % 64
    if size >= sizes[longest] or not all(form in ("", ":t") for form in forms):
        return matmul

    def cut(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
        ends = zip(shape[-2:], names[-len(shape) :], strict=True)
        return (*shape[:-2], *(min(n, size) if role == longest else n for n, role in ends))

    shapes = tuple(cut(*pair) for pair in zip(matmul.shapes, roles, strict=True))
    return Matmul(matmul.name, shapes, tuple(_strides(*pair) for pair in zip(shapes, forms, strict=True)))


def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """A tensor's layout: "" row by row, ":t" with its last two dimensions the other way round, else its strides."""
    for form in ("", ":t"):
        if stride == _strides(shape, form):
            return form
    return f":{stride}".replace(" ", "")


def _strides(shape: tuple[int, ...], form: str) -> tuple[int, ...]:
    """The strides of a shape in the layout "" or ":t"."""
    order = list(range(len(shape)))
    if form == ":t" and len(shape) > 1:
        order[-2:] = order[:-3:-1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def _filled(shape: tuple[int, ...], stride: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor of these strides with numbers from [-1, 1), which only `generator` draws."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    filled = torch.empty(extent, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return filled.as_strided(shape, stride)
