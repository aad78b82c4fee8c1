"""The accounts of CUDA's programs, made without a device: run by test_cuda_cost.py in the process of `fzero fake-cuda`.

Its arguments are the number of layers, the model, and the capabilities for which the kernels of clusters are built.
Prints one line of JSON: by name, an account as text and what the test asks of it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from cubins import cubins

import fzero
from benchmarks.model import Size, empty_model
from fzero import optim
from fzero._torch_compat.inductor_count import inductor_code
from fzero.codegen.cross_entropy import by_rows
from fzero.codegen.fusion import fuse
from fzero.cost.rates import H100
from fzero.interop import from_module
from fzero.ir import fx_nodes

GPT2_LARGE = Size(layers=36, width=1280, heads=20, vocabulary=50257, sequence=1024, batch=8, inner=5120)
LLAMA = Size(
    layers=24, width=2048, heads=16, vocabulary=32000, sequence=2048, batch=4, inner=5504, family="llama"
)  # 1.1B parameters
MODELS = {"gpt2": GPT2_LARGE, "llama": LLAMA}


KINDS = ("all_gather", "reduce_scatter", "all_reduce")
LATENCY, WIRE = dict.fromkeys(KINDS, 15e-6), dict.fromkeys(KINDS, 370e9)  # seconds, bytes a second


def lowered(size: Size, how: str, world: int = 1) -> Any:
    """A step in bf16 with AdamW, for CUDA."""
    params, buffers, apply = from_module(empty_model(size))
    spec = fzero.Spec(
        loss=lambda p, b: apply(p, buffers, b["x"], b["y"]),
        optimizer=optim.adamw(3e-4, weight_decay=0.1),
        zero=3,
        precision="bf16",
        device="cuda",
        compile=how,
    )
    tokens = torch.empty(size.batch, size.sequence, dtype=torch.int64, device="meta")
    return fzero.lower(spec, params, {"x": tokens, "y": tokens}, world_size=world)


def of_eight(found: Any) -> dict[str, Any]:
    """What a step of eight ranks sends, and how long the device waits for it over NVLink."""
    sent = Counter(op.kind for op in found.program.ops if op.is_collective)
    simulated = fzero.simulate(found, replace(H100, latency=LATENCY, wire_bytes=WIRE))
    return {"sent": sent, "exposed_ms": sum(simulated.waited.values()) * 1e3}


def told(found: Any, how: str) -> dict[str, Any]:
    """What is kept of a lowered step."""
    account = found.roofline(by_inductor=how != "none")
    nodes = [n for gm in found.program.segments.values() for n in gm.graph.nodes if fx_nodes.is_compute(n)]
    return {
        "text": str(account),
        "ms": account.seconds * 1e3,
        "peak": account.peak,
        "attention": sorted({str(n.target) for n in nodes if "attention" in str(n.target)}),
        "devices": sorted({str(n.meta["val"].device) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)}),
        "choices": dict(found.choices),
        "clusters": account.clusters,
        "between": account.between,
        "launches": account.kernels,
        "copied_after_attention": account["attention"].copied,
        "casts": account["_to_copy"].calls,
        "loss": account["softmax_loss"].nbytes,
    }


def kernels(found: Any, capabilities: list[int]) -> list[dict[str, Any]]:
    """What the kernels that Inductor writes for clusters become."""
    made = []
    for cluster in fuse(found.program, "auto")[1].values():
        if cluster.own is None:
            gm = by_rows(cluster.graph)
            code, *_ = inductor_code(gm, [n.meta["val"] for n in fx_nodes.placeholders(gm.graph)])
            made += cubins(code, capabilities)
    return made


if __name__ == "__main__":
    layers, size = int(sys.argv[1]), MODELS[sys.argv[2]]
    shallow = lowered(replace(size, layers=2), "auto")
    built = kernels(shallow, [int(number) for number in sys.argv[3:]])
    accounts = {how: told(lowered(replace(size, layers=layers), how), how) for how in ("none", "auto")}
    found = {"clusters_of_two_layers": shallow.roofline().clusters, "kernels": built}
    found["of_eight"] = of_eight(lowered(replace(size, layers=layers), "auto", 8))
    print(json.dumps({**accounts, **found}))
