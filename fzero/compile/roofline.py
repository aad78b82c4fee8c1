"""roofline: the account of a step's compute: calls, kernels, bytes and operations by kind, and the seconds predicted.

It is read off a program and its segments as they run: with the clusters of `Spec(compile=)`, without the copies whose
source lies in its destination already, with those of results that an op cannot write where they belong. Nothing runs,
so the account of CUDA's program needs no device (`fzero fake-cuda`). The seconds are those of the kernels of one rank
alone: transfers are `fzero.simulate`'s.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from fzero import backend
from fzero._torch_compat import inductor_count
from fzero.codegen import inplace, out_forms, segment_memory
from fzero.codegen.cross_entropy import by_rows
from fzero.codegen.fusion import Fused, fuse
from fzero.codegen.own_kernels import OwnKernel
from fzero.codegen.widened import is_widened, narrowed
from fzero.cost.memory import account
from fzero.cost.node_work import CallWork, seconds, with_copies, work_of
from fzero.cost.rates import Rates
from fzero.cost.tensor_cores import ALIGNED_BYTES
from fzero.errors import FzeroError
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op_info import of
from fzero.ir.program import Program

WORK = ("product", "attention", "update")  # kinds whose time is not that of moving values between them


@dataclass(frozen=True)
class KindRow:
    """The calls of one kind in a step (`fzero.cost.node_work.CallWork`). seconds: predicted."""

    kind: str
    calls: int = 0
    kernels: int = 0
    read: int = 0
    written: int = 0
    copied: int = 0
    flops: int = 0
    seconds: float = 0.0

    def plus(self, work: CallWork, taken: float, times: int) -> KindRow:
        """The row with so many calls more, of `taken` seconds each."""
        more = {"calls": 1, "kernels": work.kernels, "read": work.read, "written": work.written, "copied": work.copied}
        more["flops"] = work.flops
        counts = {name: getattr(self, name) + times * value for name, value in more.items()}
        return replace(self, **counts, seconds=self.seconds + times * taken)

    @property
    def nbytes(self) -> int:
        """All bytes that its kernels move."""
        return self.read + self.written + self.copied


@dataclass(frozen=True)
class Roofline:
    """The account of a step. rows: by kind, the longest first. unaligned: the matrix products in 16 bits that tensor
    cores cannot take as they are, as text. peak: planned bytes of a rank. clusters: how many of the program's are
    different, each compiled once. Print it."""

    rows: tuple[KindRow, ...]
    unaligned: tuple[str, ...]
    peak: int
    clusters: int = 0

    def __getitem__(self, kind: str) -> KindRow:
        """The row of a kind; one without calls where there is none."""
        return next((row for row in self.rows if row.kind == kind), KindRow(kind))

    @property
    def seconds(self) -> float:
        """Predicted, of all calls."""
        return sum(row.seconds for row in self.rows)

    @property
    def calls(self) -> int:
        """Calls of a step."""
        return sum(row.calls for row in self.rows)

    @property
    def kernels(self) -> int:
        """Kernels that are launched in a step."""
        return sum(row.kernels for row in self.rows)

    @property
    def between(self) -> int:
        """Bytes moved between products, attention and updates: all but theirs. Copies of their results count."""
        return sum(row.copied if row.kind in WORK else row.nbytes for row in self.rows)

    def __str__(self) -> str:
        head = f"{'kind':34}{'calls':>7}{'kernels':>9}{'GB read':>9}{'written':>9}{'copied':>9}{'TFLOP':>8}{'ms':>8}"
        rows = [
            f"{row.kind:34}{row.calls:7,}{row.kernels:9,}{row.read / 1e9:9.2f}{row.written / 1e9:9.2f}"
            f"{row.copied / 1e9:9.2f}{row.flops / 1e12:8.2f}{row.seconds * 1e3:8.2f}"
            for row in self.rows
        ]
        end = [
            f"{self.calls:,} calls, {self.kernels:,} kernels, {self.clusters} different clusters, "
            f"{self.between / 1e9:.1f} GB between products, attention and updates",
            f"{len(self.unaligned)} products with a side that is no multiple of {ALIGNED_BYTES} bytes"
            + "".join(f"\n    {text}" for text in self.unaligned),
            f"planned peak {self.peak / 1e9:.2f} GB, predicted {self.seconds * 1e3:.1f} ms",
        ]
        return "\n".join([head, *rows, *end])


def roofline(
    program: Program, how: str | None, rates: Rates, counted: Mapping[str, tuple[int, int]] | None = None
) -> Roofline:
    """The account of a program.

    how: `Spec(compile=)`. counted: by digest of a cluster, (its kernels, the bytes that they move), as a compiler's
    code says; of a cluster that is not in it, a kernel for each reduction, inputs and results once.
    """
    with_clusters, pool = fuse(program, how)
    done = Counter((op.segment, inplace.apart(op)) for op in program.ops if op.segment)
    rows: dict[str, KindRow] = {}
    unaligned: Counter[str] = Counter()
    for (key, apart), times in done.items():
        for work in _of_segment(with_clusters.get(key, program.segments[key]), apart, counted or {}):
            rows[work.kind] = rows.get(work.kind, KindRow(work.kind)).plus(work, seconds(work, rates), times)
            if work.product is not None and work.product.itemsize == 2 and not work.product.aligned:
                unaligned[str(work.product)] += times
    ordered = sorted(rows.values(), key=lambda row: -row.seconds)
    texts = tuple(f"{times} x {text}" if times > 1 else text for text, times in unaligned.items())
    return Roofline(tuple(ordered), texts, account(program).peak, len(pool))


def counted_by_inductor(program: Program, how: str | None) -> dict[str, tuple[int, int]]:
    """{digest of a cluster: (kernels, the bytes that they move)}, by the code that Inductor writes for an H100.

    Raises FzeroError outside of a process of `fzero fake-cuda`.
    """
    calls = backend.CUDA.calls
    if calls.available() or not calls.traceable():
        raise FzeroError("Inductor's code for CUDA is counted in a process of `fzero fake-cuda SCRIPT`: start it so")
    left = {digest: cluster.graph for digest, cluster in fuse(program, how)[1].items() if cluster.own is None}
    return {digest: _by_inductor(graph) for digest, graph in left.items()}


def _by_inductor(gm: fx.GraphModule) -> tuple[int, int]:
    """Inductor counts what a kernel writes into a given tensor as read too: that is taken off again."""
    gm = by_rows(gm)
    holders = fx_nodes.placeholders(gm.graph)
    kernels, nbytes = inductor_count(gm, [n.meta["val"] for n in holders])
    given = [n for n in holders if n.users and all(n in fx_nodes.mutated(user) for user in n.users)]
    return kernels, nbytes - sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in given)


def _of_segment(
    gm: fx.GraphModule, apart: frozenset[int], counted: Mapping[str, tuple[int, int]]
) -> Iterator[CallWork]:
    """What each call of a segment does, in order."""
    plan = segment_memory.layout(gm, apart)
    casts = {node: cast for node in gm.graph.nodes if (cast := narrowed(node, plan.homes)) is not None}
    done = set(casts.values())
    for node in gm.graph.nodes:
        if node in done or not fx_nodes.is_compute(node) or node.target is operator.getitem or fx_nodes.is_view(node):
            continue
        if isinstance(node.target, Fused):
            yield _of_cluster(node, counted)
        elif not _lies_there(node, plan) and not is_widened(node):
            work = _with_copies(node, work_of(node), plan.handed)
            read = work.read - sum(_not_read(n) for n in node.all_input_nodes)
            written = work.written + (casts[node].meta["val"].nbytes if node in casts else 0)
            yield replace(work, read=read, written=written)


def _of_cluster(node: fx.Node, counted: Mapping[str, tuple[int, int]]) -> CallWork:
    work = replace(work_of(node), kind="cluster")
    cluster = node.target
    assert isinstance(cluster, Fused)
    if cluster.digest in counted:
        kernels, nbytes = counted[cluster.digest]
        return replace(work, kernels=kernels, read=nbytes - work.written)
    if cluster.own is not None:
        return _of_own(work, cluster.own, node)
    inside = [n for n in cluster.graph.graph.nodes if fx_nodes.is_compute(n)]
    reductions = sum(of(n.target).fusion == "loop" and not fx_nodes.is_pointwise(n) for n in inside)
    return replace(work, kernels=max(1, reductions))


def _of_own(work: CallWork, own: OwnKernel, node: fx.Node) -> CallWork:
    """Of fzero's own kernel: a second one adds up partial sums. What lies where it is written is read once more, by the
    kernel that needs all of it first."""
    again = fx_nodes.operand(node, own.over[0]).meta["val"].nbytes if own.over is not None else 0
    return replace(work, kind=own.name, kernels=2 + (own.over is not None), read=work.read + again)


def _not_read(node: fx.Node) -> int:
    """The bytes of an operand that are not read, since the kernel reads a narrower tensor in its place."""
    if not is_widened(node):
        return 0
    wide, narrow = node.meta["val"], fx_nodes.operand(node).meta["val"]
    return int(wide.nbytes - narrow.nbytes)


def _lies_there(node: fx.Node, plan: segment_memory.SegmentMemory) -> bool:
    """Whether a node is a copy of what was computed in its destination already."""
    if fx_nodes.op_name(node) != "copy_" or not isinstance(node.args[1], fx.Node):
        return False
    into = fx_nodes.base(fx_nodes.operand(node))
    return {plan.homes.get(key) for key in fx_values.memory(fx_nodes.operand(node, 1))} == {into}


def _with_copies(node: fx.Node, work: CallWork, handed: Collection[fx_values.Value]) -> CallWork:
    """The work with that of copying results which the op cannot write to their places, but for those handed on."""
    if fx_nodes.mutated(node) or out_forms.special_form(node) or out_forms.form_of(node):
        return work
    results = [(index, value) for index, value in fx_values.results(node) if (node, index) not in handed]
    if isinstance(node.meta.get("val"), (tuple, list)):
        copied = out_forms.copied(node)
        results = [(index, value) for index, value in results if index in copied]
    return with_copies(work, len(results), sum(value.numel() * value.element_size() for _, value in results))
