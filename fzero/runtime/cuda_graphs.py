"""cuda_graphs: a bound step on CUDA, recorded as one CUDA graph and replayed as one launch.

A bound program (`fzero.runtime.executor`) is ready for a graph: state, arena and batch have fixed addresses, no Python
decides, and the host does not wait. The first step runs op by op, which loads and tunes kernels. The second step is
recorded (recording runs nothing). From then on the graph is replayed, with collectives and optimizer. NCCL's kernels
are recorded on its own side stream, with the events that join it, and copies to and from the host on theirs. The
agreement of the ranks at the start of a step stays outside.

Not every program allows this: `obstacle` returns the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from fzero import backend
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op_info import of
from fzero.ir.program import Program
from fzero.ir.records import DISK, HOST

log = logging.getLogger("fzero")


def obstacle(program: Program, device: torch.device) -> str | None:
    """The reason why this program cannot be one CUDA graph on `device`; None if no reason is known."""
    if not backend.of(device).records_graphs:
        return f"the state is on {device.type}"
    if not backend.of_transport(program.transport).on_streams and any(
        op.transfers and not op.moves for op in program.ops
    ):
        return f"transfers via {program.transport} run on the host"
    seen: set[str] = set()
    for i, op in enumerate(program.ops):
        spaces = {program.buffers[ref.name].space for ref in (*op.reads, *op.writes)}
        if op.moves and DISK in spaces:
            return f"op {i} ({op.why}) reads or writes the disk, which the host does"
        if op.computes and HOST in spaces:
            return f"op {i} ({op.why}) runs on the host"
        for node in program.segments[op.segment].graph.nodes if op.segment and op.segment not in seen else ():
            if (why := _waits(node)) is not None:
                return f"op {i} ({op.why}) {why}"
        seen.add(op.segment)
    return None


def _waits(node: torch.fx.Node) -> str | None:
    """The reason why a node makes the host wait for the device; None if it does not."""
    tags = getattr(node.target, "tags", ())
    reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if reads or of(node.target).reads_back:
        return f"reads back from the device: {node.target}"
    values = fx_values.tensors(node.meta.get("val"))
    operands = [v for n in node.all_input_nodes for v in fx_values.tensors(n.meta.get("val"))]
    if fx_nodes.is_compute(node) and operands and len({v.device.type for v in (*values, *operands) if v.dim()}) > 1:
        return f"copies between host and device: {node.target}"
    return None


def record(issue: Callable[[], None], device: torch.device) -> Any:
    """Records the launches of `issue` as a graph to `replay()`. Returns None if CUDA refuses: steps then go on op by
    op, and a log line gives the reason.

    The capture runs on the state's device, even if another device is current. The stream of before is current again
    afterwards: after a failed capture, torch leaves the capture's stream current.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.synchronize(device)
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            side = torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                issue()
    except Exception as error:
        log.warning("fzero: steps are launched op by op; CUDA would not record one graph: %s", error)
        return None
    return graph
