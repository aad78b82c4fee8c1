"""Predicted and measured seconds of a step on this machine: what `fzero.simulate` says of a hardware file, and a clock.

The machine is measured first, as `fzero doctor --hardware` does; then two ranks of one thread train small GPTs over
stages, recomputation, microbatches, precisions, a pipeline and tensor parallelism. A run's seconds are the median of
its steps after two. Nothing is fitted to them.

    python -m benchmarks.predicted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import fzero
from benchmarks import machine
from benchmarks.link import free_port
from benchmarks.run import write
from fzero import optim, tree
from fzero.hardware import load, to_toml
from fzero.tools.measured_machine import measured_machine

RANKS = 2
MODELS = {"deep": (6, 384, 6, 2_048), "wide": (2, 768, 12, 4_096)}  # layers, width, heads, words
TENSOR = {"blocks/*/up": fzero.P("tp", None), "blocks/*/down": fzero.P(None, "tp")}


def cases() -> list[dict[str, Any]]:
    """(model, rows and tokens of a rank, and fields of the Spec) of each run."""
    found: list[dict[str, Any]] = []
    for zero in (0, 1, 3):
        for remat in ("none", "full"):
            for microbatches, precision in ((1, "fp32"), (4, "fp32"), (1, "bf16")):
                fields: dict[str, Any] = {
                    "zero": zero,
                    "remat": remat,
                    "microbatches": microbatches,
                    "precision": precision,
                }
                found.append({"model": "deep", "rows": 4, "fields": {"mesh": {"dp": 2}, **fields}})
    for microbatches in (4, 8):
        fields = {"mesh": {"pp": 2, "dp": 1}, "zero": 0, "microbatches": microbatches}
        found.append({"model": "deep", "rows": 8, "fields": fields})
    for model in MODELS:
        for precision in ("fp32", "bf16"):
            fields = {"mesh": {"dp": 1, "tp": 2}, "zero": 0, "precision": precision}
            found.append({"model": model, "rows": 4, "fields": fields})
    for zero in (0, 3):
        found.append({"model": "wide", "rows": 4, "fields": {"mesh": {"dp": 2}, "zero": zero}})
    return found


def started(model: str) -> Any:
    from plan import empty  # of examples/, which ranks have on their path

    layers, width, _, words = MODELS[model]
    made = torch.Generator().manual_seed(0)
    return tree.map(lambda x: torch.randn(x.shape, generator=made) * 0.02, empty(layers, width, words))


def rank(file: str, out: str, steps: int) -> None:
    """What one rank does: every case, its predicted and measured seconds."""
    from plan import empty, loss_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here, lines = load(file), []
    for case in cases():
        fields = dict(case["fields"])
        if "tp" in fields["mesh"]:
            fields["shard"] = TENSOR
        same = 0 if fields["mesh"].get("dp", 1) == 1 else dist.get_rank()
        words = MODELS[case["model"]][3]
        tokens = torch.randint(0, words, (case["rows"], 256), generator=torch.Generator().manual_seed(same))
        batch = {"x": tokens, "y": tokens}
        loss = loss_of(MODELS[case["model"]][2])
        spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-4), clip_norm=1.0, **fields)
        layers, width, _, _ = MODELS[case["model"]]
        lowered = fzero.lower(spec, empty(layers, width, words), batch, world_size=RANKS)
        predicted = max(fzero.simulate(lowered, here, rank=r).seconds for r in range(RANKS))
        state, seconds = fzero.init(started(case["model"]), spec), []
        for _ in range(steps + 2):
            began = time.perf_counter()
            state = fzero.step(state, batch)
            float(state.metrics["loss"])
            seconds.append(time.perf_counter() - began)
        lines.append({**case, "predicted": predicted, "measured": statistics.median(seconds[2:])})
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(lines))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", default="predicted")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "here.toml", Path(folder) / "out.json"
        here = measured_machine(Path(folder), 16 << 20)
        file.write_text(to_toml(here))
        env = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {
            "OMP_NUM_THREADS": "1",
            "FZERO_PROGRESS": "0",
            "PYTHONPATH": f"{machine.ROOT}{os.pathsep}{machine.ROOT / 'examples'}",
        }
        code = f"from benchmarks.predicted import rank; rank({str(file)!r}, {str(out)!r}, {given.steps})"
        command = [sys.executable, "-c", code]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=machine.ROOT)
            for r in range(RANKS)
        ]
        ended = [process.wait() for process in ranks]
        if any(ended):
            raise SystemExit("a rank failed: its error is above")
        lines = json.loads(out.read_text())
    console = Console()
    for line in lines:
        off = line["predicted"] / line["measured"] - 1
        told = f"{line['predicted']:.3f} s predicted, {line['measured']:.3f} measured, {off:+.1%}"
        console.print(f"{told}  {line['model']} {line['fields']}")
    errors = [line["predicted"] / line["measured"] - 1 for line in lines]
    mean = {
        "cases": len(errors),
        "mean_error": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "worst": max(errors, key=abs),
    }
    console.print(mean)
    write(given.out, {"machine": machine.describe(), "hardware": to_toml(here), "summary": mean, "cases": lines})


if __name__ == "__main__":
    main()
