"""matmul: matrix products (matmuls) on CPU by the faster of two ways, chosen once per shape.

torch computes an fp32 `mm` with MKL. oneDNN is in the same build, and can be the faster one (2.1 times on AMD Zen 5, at
the same accuracy) or the slower one (small matmuls: it prepares each call). In bf16 and fp16 torch uses oneDNN where
the processor has instructions for them; elsewhere a loop that is 3 to 80 times slower than the same product in fp32. So

1. every matmul of a captured step is looked up by op, shapes, strides and dtype among the figures that were measured on
   this machine (`fzero.cost.kept_costs`). One that is not there is measured, both ways, into a given output, in 20 to
   70 milliseconds;
2. where the other way is chosen (`fzero.compile.decide`: where it is at least 1.1 times as fast), the node becomes
   `fzero::onednn_mm` or, in 16 bits, `fzero::widened_mm` (`addmm`, `bmm`, `baddbmm`): an op of the same arguments,
   result and strides. That happens in the captured graph, before anything is lowered. The meaning of a step and the
   program of every stage hold the same ops, so bits do not depend on the stage.

    mm = aten.mm(x, t)      becomes      mm = fzero.onednn_mm(x, t)

`widened_mm` casts its operands to fp32, multiplies by oneDNN, and rounds the result once.

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
# relative distance of two results, summed in different orders; rounding to tf32 gives 2e-4
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LARGEST = 1 << 29  # multiplications measured at: of larger matmuls a part is
LARGEST_NARROW = 1 << 24  # in 16 bits, where torch's own may be a hundred times slower
SECONDS, ROUNDS = 0.02, (2, 300)  # of measuring, for both together
NARROW = (torch.bfloat16, torch.float16)

NAMES = ("mm", "addmm", "bmm", "baddbmm")
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
KERNELS: dict[Any, Callable[..., torch.Tensor]] = {}  # each op's function, without the dispatcher's 6 microseconds


def _widened(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A product of 16-bit operands that is computed in fp32 and rounded once."""

    def call(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        wide = kernel(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return wide.to(args[-1].dtype) if out is None else out.copy_(wide)

    return call


def _register(way: str, name: str, overload: str) -> Any:
    """Defines `fzero::<way>_<name>` with the schema and tags of `aten::<name>`; returns the overload."""
    own = getattr(getattr(aten, name), overload)
    _LIBRARY.define(str(own._schema).replace(f"aten::{name}", f"{way}_{name}"), tags=own.tags)
    kernel = by_onednn(own) if way == "onednn" else _widened(by_onednn(getattr(aten, name).default))
    suffix = "" if overload == "default" else f".{overload}"
    _LIBRARY.impl(f"{way}_{name}{suffix}", kernel, "CompositeExplicitAutograd")
    form = getattr(getattr(torch.ops.fzero, f"{way}_{name}"), overload)
    KERNELS[form] = kernel
    return form


FORMS = {getattr(aten, name).default: _register("onednn", name, "default") for name in NAMES}
OUT_FORMS = {getattr(aten, name).out: _register("onednn", name, "out") for name in NAMES}
WIDENED = {getattr(aten, name).default: _register("widened", name, "default") for name in NAMES}
WIDENED_OUT = {getattr(aten, name).out: _register("widened", name, "out") for name in NAMES}


@dataclass(frozen=True)
class Matmul:
    """One op on operands of these shapes and strides: a bias or addend first where there is one, then a and b.

    Its text (`str`) is the question under which figures are kept.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        pairs, dtype = zip(self.shapes, self.strides, strict=True), str(self.dtype).removeprefix("torch.")
        return f"{self.name} {dtype} {' '.join('x'.join(map(str, a)) + _layout(a, s) for a, s in pairs)}"

    @property
    def other(self) -> str:
        """The way beside torch's own: "onednn", or of 16-bit operands "fp32"."""
        return "fp32" if self.dtype in NARROW else "onednn"

    @property
    def forms(self) -> tuple[Any, Any]:
        """The op of the other way, and its `out` form."""
        plain, out = (WIDENED, WIDENED_OUT) if self.dtype in NARROW else (FORMS, OUT_FORMS)
        own = getattr(aten, self.name)
        return plain[own.default], out[own.out]

    @property
    def multiplications(self) -> int:
        """Multiplications of two numbers: m n k, times the batch."""
        *batch, rows, inner = self.shapes[-2]
        return rows * inner * self.shapes[-1][-1] * (batch[0] if batch else 1)


def of(node: fx.Node) -> Matmul | None:
    """The matmul that a node computes; None where there is no choice of how."""
    if node.target not in FORMS:
        return None
    values = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    (dtype, *others) = {v.dtype for v in values}
    if others or dtype not in (torch.float32, *NARROW):
        return None
    if not all(backend.of(v.device).on_host and v.numel() for v in values):
        return None
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    return Matmul(name, tuple(tuple(v.shape) for v in values), tuple(v.stride() for v in values), dtype)


def products(graph: Graph) -> dict[str, Matmul]:
    """The matmuls of a captured step of which a way can be chosen, by the question under which figures are kept."""
    nodes = [n for gm in (graph.gm, *(region.gm for region in graph.regions)) for n in gm.graph.nodes]
    return {str(matmul): matmul for matmul in map(of, nodes) if matmul is not None}


def figures_of(asked: Mapping[str, Matmul], costs: Costs) -> dict[str, Figures]:
    """By question, the speed of both ways; those of which nothing is known are left out."""
    known = costs.find(list(asked), lambda question: measured(asked[question])) if asked else {}
    both = {question: of_it for question, of_it in known.items() if {asked[question].other, "torch"} <= of_it.keys()}
    return {question: of_it for question, of_it in both.items() if of_it["torch"] > 0}  # 0: nothing was multiplied


def rewritten(graph: Graph, chosen: set[Matmul]) -> Graph:
    """The same graph with the op of the other way for the matmuls in `chosen`."""
    return graph.rewritten(lambda gm: _with_forms(gm, chosen), update=True)


def _with_forms(gm: fx.GraphModule, chosen: set[Matmul]) -> fx.GraphModule:
    graph = segments.copied(gm.graph)
    for node in graph.nodes:
        matmul = of(node)
        if matmul in chosen:
            node.target = matmul.forms[0]
    return segments.module(graph)


# --- measuring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured(matmul: Matmul) -> Figures:
    """{"torch", and the other way}: GFLOP/s, the best of interleaved rounds, writing into a given output.

    A way whose result is not that of this dtype has 0.
    """
    matmul = _part(matmul)
    generator = torch.Generator().manual_seed(0)
    likes = zip(matmul.shapes, matmul.strides, strict=True)
    operands = [_filled(*like, matmul.dtype, generator) for like in likes]
    result = torch.empty(*matmul.shapes[-2][:-1], matmul.shapes[-1][-1], dtype=matmul.dtype)
    candidates = {"torch": getattr(aten, matmul.name).out, matmul.other: KERNELS[matmul.forms[1]]}
    wanted = candidates["torch"](*operands, out=result).clone()
    near = candidates[matmul.other](*operands, out=result).sub_(wanted).norm() <= SAME[matmul.dtype] * wanted.norm()
    best = dict.fromkeys(candidates, float("inf"))
    rounds, start = 0, time.perf_counter()
    while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and time.perf_counter() - start < SECONDS):
        for name, kernel in candidates.items():
            begin = time.perf_counter()
            kernel(*operands, out=result)
            best[name] = min(best[name], time.perf_counter() - begin)
        rounds += 1
    figures = {name: 2e-9 * matmul.multiplications / seconds for name, seconds in best.items()}
    return figures if near else {**figures, matmul.other: 0.0}


def _part(matmul: Matmul) -> Matmul:
    """A matmul of about `LARGEST` multiplications, in 16 bits `LARGEST_NARROW`, of the same kind: its longest dimension
    is cut, and the next where 64 of it are still too many.

    A dimension keeps its remainder by 64. A matmul whose operands are not dense is returned as it is.
    """
    most = LARGEST_NARROW if matmul.dtype in NARROW else LARGEST
    if not all(_layout(*like) in ("", ":t") for like in zip(matmul.shapes, matmul.strides, strict=True)):
        return matmul
    while matmul.multiplications > most:
        longest, length = max(_sizes(matmul).items(), key=lambda item: item[1])
        left = most * length // matmul.multiplications // 64 * 64
        size = max(left, 64) + length % 64
        if size >= length:
            break
        matmul = _cut(matmul, longest, size)
        if left >= 64:
            break
    return matmul


def _roles(matmul: Matmul) -> tuple[tuple[str, str], ...]:
    """The names of the last two dims of each operand."""
    return (("rows", "columns"), ("rows", "inner"), ("inner", "columns"))[-len(matmul.shapes) :]


def _sizes(matmul: Matmul) -> dict[str, int]:
    """The size of each dimension."""
    pairs = zip(matmul.shapes, _roles(matmul), strict=True)
    return {role: n for shape, names in pairs for role, n in zip(names[-len(shape) :], shape[-2:], strict=True)}


def _cut(matmul: Matmul, longest: str, size: int) -> Matmul:
    """The matmul with at most `size` of a dimension."""

    def cut(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
        ends = zip(shape[-2:], names[-len(shape) :], strict=True)
        return (*shape[:-2], *(min(n, size) if role == longest else n for n, role in ends))

    forms = [_layout(*like) for like in zip(matmul.shapes, matmul.strides, strict=True)]
    shapes = tuple(cut(*pair) for pair in zip(matmul.shapes, _roles(matmul), strict=True))
    return replace(matmul, shapes=shapes, strides=tuple(_strides(*pair) for pair in zip(shapes, forms, strict=True)))


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


def _filled(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A tensor of these strides with numbers from [-1, 1), which only `generator` draws."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    filled = torch.empty(extent, dtype=torch.float32).uniform_(-1, 1, generator=generator).to(dtype)
    return filled.as_strided(shape, stride)
