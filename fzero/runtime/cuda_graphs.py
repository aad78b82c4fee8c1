"""cuda_graphs: a bound step on CUDA recorded as one CUDA graph, and replayed as one launch.

A bound program (`fzero.runtime.executor`) has what a graph needs: fixed addresses for state, arena and batch, no Python
that decides, no host that waits. The first step runs op by op, which loads and tunes kernels; the second is recorded
(recording runs nothing) and replayed from then on, collectives and optimizer included: NCCL's kernels are recorded on
its own side stream with the events that join it. The agreement of the ranks at the start of a step stays outside.

Not every program allows it: `obstacle` says why not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from fzero.ir import segments
from fzero.ir.program import Program

log = logging.getLogger("fzero")


def obstacle(program: Program, device: torch.device) -> str | None:
    """Why this program cannot be one CUDA graph on `device`; None where nothing is known against it."""
    if device.type != "cuda":
        return f"the state is on {device.type}"
    if program.transport != "nccl" and any(op.transfers for op in program.ops):
        return f"transfers via {program.transport} run on the host"
    for i, op in enumerate(program.ops):
        for node in program.segments[op.segment].graph.nodes if op.segment else ():
            if (why := _waits(node)) is not None:
                return f"op {i} ({op.why}) {why}"
    return None


def _waits(node: torch.fx.Node) -> str | None:
    """Why a node makes the host wait for the device."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return f"reads back from the device: {node.target}"
    values = segments.tensors(node.meta.get("val"))
    given = [v for n in node.all_input_nodes for v in segments.tensors(n.meta.get("val"))]
    if segments.is_compute(node) and given and len({v.device.type for v in (*values, *given) if v.dim()}) > 1:
        return f"copies between host and device: {node.target}"
    return None


def record(issue: Callable[[], None], device: torch.device) -> Any:
    """The launches of `issue` as a graph to `replay()`, or None where CUDA refuses: then steps go on op by op, and a
    line says why.

    It is captured on the state's device, whichever is current, and the stream of before is current again: torch leaves
    the capture's current where a capture fails."""
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
