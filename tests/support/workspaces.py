"""What the calls of torch's operator database ask the allocator for, beside what fzero plans for them.

`python tests/support/workspaces.py OUT` writes a line of JSON to OUT for each call that asks for memory: of every op,
its gradients too, at three sizes. It goes on where it stopped; what ended the process is not tried again. Lines whose
`given` is above `planned` ask for a rule of `fzero.codegen.workspace`.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import opdb
import torch
from torch import Tensor, fx
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo  # 2.11.0, 2.13.0
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

import fzero
from fzero._torch_compat import allocations
from fzero.capture import trace_step
from fzero.codegen import bind, segment_memory
from fzero.ir import fx_nodes, fx_values

SIZES = (1 << 13, 1 << 15, 1 << 17)  # elements of a sample's largest tensor, about
SAMPLES = 2  # of an op and dtype
SLACK = 8192  # bytes of small values that no rule counts
LIMIT = 4 << 30  # bytes of the process
PATIENCE = 60  # seconds of an op: some make thousands of results


# --- samples of a size ------------------------------------------------------------------------------------------------


def larger(sample: Any, size: int) -> Iterator[Any]:
    """The sample with larger tensors, in several ways, of which an op takes the first that it can.

    The first operand alone grows, or all do. All dims grow by one factor, or the last two, the last, or the first
    alone. Dims of one element stay. The values are the sample's own again and again, so that they stay within the op's
    domain; square matrices get a larger diagonal, so that they stay regular.
    """
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided]
    for those in (tensors[:1], tensors):
        most = max(those, key=Tensor.numel, default=None)
        if most is None or most.numel() < 2:
            continue
        dims = most.dim()
        for grown in dict.fromkeys((range(dims), range(max(dims - 2, 0), dims), range(dims - 1, dims), range(1))):
            count = sum(most.shape[d] > 1 for d in grown)
            factor = round((size / most.numel()) ** (1 / count)) if count else 1
            if factor > 1:
                last = [d - dims for d in grown]
                new = [_tiled(x, factor, last) if any(x is y for y in those) else x for x in leaves]
                value, args, kwargs = pytree.tree_unflatten(new, spec)
                after = sample.output_process_fn_grad
                yield type(sample)(value, args=args, kwargs=kwargs, output_process_fn_grad=after)


def _tiled(x: Tensor, factor: int, dims: list[int]) -> Tensor:
    """x again and again along those of the dims, counted from the last, that it has with more than one element."""
    times = [factor if d in dims and x.shape[d] > 1 else 1 for d in range(-x.dim(), 0)]
    value = x.detach().repeat(times)
    if value.dim() >= 2 and value.shape[-1] == value.shape[-2] and value.is_floating_point():
        value = value + torch.eye(value.shape[-1], dtype=value.dtype) * value.shape[-1]
    return value.requires_grad_(x.requires_grad)


# --- the calls --------------------------------------------------------------------------------------------------------


def graph_of(case: opdb.Case) -> tuple[fx.GraphModule, list[Any]]:
    """A loss with its gradients as a graph, and the graph's inputs."""

    def step(state: Any, batch: Any) -> Any:
        call = fzero.value_and_grad(lambda p, b, f: case.loss(p, f, b), has_aux=True, allow_unused=True)
        (value, outs), grads = call(state["params"], batch, state["frozen"])
        return state, {"loss": value, "out": outs, "grad": grads}

    state = {"params": case.params, "frozen": case.frozen}
    graph = trace_step.capture(step, state, case.batch, axis="dp")
    tensors = [*fzero.tree.flatten(state)[1], *fzero.tree.flatten(case.batch)[1], *graph.constants.values()]
    values = dict(zip(fx_nodes.placeholders(graph.gm.graph), tensors, strict=True))
    for node in graph.gm.graph.nodes:
        if node.target is torch.ops.fzero.region.default:
            return graph.regions[0].gm, [values[n] for n in node.args[0]]
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("a step without a region")


def asked(gm: fx.GraphModule, inputs: list[Tensor]) -> Iterator[tuple[fx.Node, int, int]]:
    """(node, planned bytes, the most that the allocator gave) of every call of a graph, as the executor makes it: into
    memory that is there."""
    values: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), inputs, strict=True))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if fx_nodes.is_compute(node) and not fx_nodes.is_view(node) and not fx_nodes.mutated(node):
            into = {i: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for i, v in fx_values.results(node)}
            calls = list(bind.calls_of(node, args, kwargs, into))
            yield node, segment_memory.heap_bytes(node), given(calls)
        values[node] = node.target(*args, **kwargs)


def given(calls: list[Any]) -> int:
    """The most bytes that the allocator gave while these ran."""
    with allocations() as events:
        for call in calls:
            call()
    level = most = 0
    for _, nbytes in events:
        level += nbytes
        most = max(most, level)
    return most


# --- the whole run ----------------------------------------------------------------------------------------------------


def lines(op: Any, dtype: torch.dtype, sizes: Sequence[int] = SIZES, every: bool = False) -> Iterator[dict[str, Any]]:
    """One for each call of an op's cases that asks for memory or is planned to, or of `every` one; each kind once."""
    seen = set()
    for number, sample in opdb.samples(op, dtype, SAMPLES).items():
        for size in sizes:
            for variant in ("plain", "strided"):
                tried = next(filter(None, (_tried(op, big, variant) for big in larger(sample, size))), [])
                for node, planned, most in tried:
                    line = {"op": op.full_name, "case": f"{number}|{size}|{variant}", "call": str(node.target)}
                    line |= {"args": _text(node), "planned": planned, "given": most}
                    key = (line["call"], line["args"])
                    if key not in seen and (every or planned or most):
                        seen.add(key)
                        yield line


def _tried(op: Any, sample: Any, variant: str) -> list[tuple[fx.Node, int, int]]:
    """The calls of a case; none where PyTorch or fzero refuses it."""
    try:
        return list(asked(*graph_of(opdb.case_of(op, sample, variant))))
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, MemoryError) as error:
        if "-v" in sys.argv:
            print(op.full_name, variant, type(error).__name__, str(error).split("\n")[0][:200])
        return []


def _text(node: fx.Node) -> str:
    """The operands and results of a call: dtypes, shapes and strides; numbers as they are."""

    def one(x: Any) -> str:
        if isinstance(x, fx.Node):
            x = x.meta["val"]
        if isinstance(x, Tensor):
            plain = x.is_contiguous()
            name = str(x.dtype).removeprefix("torch.")
            return f"{name}{list(x.shape)}".replace(" ", "") + (
                "" if plain else f"@{list(x.stride())}".replace(" ", "")
            )
        if isinstance(x, (tuple, list)):
            return "(" + ", ".join(map(one, x)) + ")"
        return str(x)

    return f"{one(list(node.args))} {one(list(node.kwargs.values()))} -> {one(node.meta.get('val'))}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--match", default="")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="every Nth op, from K on")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="so many of the sizes, the smallest first")
    parser.add_argument("--pointwise", action="store_true", help="ops of one element each too, which all are alike")
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))  # a result may grow with a power of the operand
    done = (
        {json.loads(line)["done"] for line in arguments.out.open() if '"done"' in line}
        if arguments.out.exists()
        else set()
    )
    with arguments.out.open("a") as file:
        start, step = arguments.part
        for name, op in [*opdb.OPS.items()][start::step]:
            alike = isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)) and not arguments.pointwise
            if name in done or alike or not re.search(arguments.match, name):
                continue
            file.write(json.dumps({"done": name}) + "\n")  # before, so that what ends the process is not tried again
            file.flush()
            signal.alarm(PATIENCE)
            try:
                for dtype in opdb.dtypes_of(op)[:1]:
                    for line in lines(op, dtype, SIZES[: arguments.sizes]):
                        file.write(json.dumps(line) + "\n")
            except TimeoutError:
                file.write(json.dumps({"late": name}) + "\n")
            signal.alarm(0)
            file.flush()


def _late(*_: Any) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
