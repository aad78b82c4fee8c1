"""What estimators of memory say of GPT-2 (124M, fp32, AdamW, two ranks), beside what was measured.

DeepSpeed's and Accelerate's estimators count parameters; fzero plans the step. The measured bytes are those of
`benchmarks/results/gpt2_fp32.json` (`make bench`): the most bytes of tensors that live on a rank during a step of the
same library. Nothing runs here. An estimator that is not installed is left out.

    python -m benchmarks.estimators
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

import fzero
from benchmarks import machine
from benchmarks.contenders import Setup, fzero_spec
from benchmarks.model import SIZES, empty_model
from benchmarks.run import RESULTS, write

SIZE, RANKS, MEASURED = "gpt2", 2, "gpt2_fp32"


def of_deepspeed() -> Iterator[tuple[str, int]]:
    """(contender, bytes of a device) by `deepspeed.runtime.zero`'s estimators, with their defaults."""
    model = empty_model(SIZES[SIZE])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in model.modules())
    for stage, module in (("2", "stage_1_and_2"), ("3", "stage3")):
        tools = importlib.import_module(f"deepspeed.runtime.zero.{module}")
        estimate = getattr(tools, f"estimate_zero{stage}_model_states_mem_needs")
        sizes = (parameters, largest) if stage == "3" else (parameters,)
        found = estimate(*sizes, num_gpus_per_node=RANKS, num_nodes=1, cpu_offload=False)
        yield f"deepspeed{stage}", int(found[1])


def of_accelerate() -> Iterator[tuple[str, int]]:
    """What `accelerate estimate-memory` prints as training with Adam: four times the model."""
    total, _largest = importlib.import_module("accelerate.utils").calculate_maximum_sizes(empty_model(SIZES[SIZE]))
    yield "ddp", 4 * int(total)


def of_fzero() -> Iterator[tuple[str, int]]:
    """The planned peak of a rank, by stage."""
    size = SIZES[SIZE]
    tokens = torch.empty((size.batch, size.sequence), dtype=torch.int64, device="meta")
    for zero in range(4):
        params, spec = fzero_spec(Setup(size, "fp32"), zero)
        lowered = fzero.lower(spec, params, {"x": tokens, "y": tokens}, world_size=RANKS)
        yield f"fzero{zero}", lowered.memory.peak


ESTIMATORS = {"DeepSpeed": of_deepspeed, "Accelerate": of_accelerate, "fzero": of_fzero}


def main() -> None:
    console = Console(width=120)
    record = json.loads((RESULTS / f"{MEASURED}.json").read_text())
    measured = record["cases"][0]["contenders"]
    rows: list[dict[str, Any]] = []
    for tool, estimate in ESTIMATORS.items():
        try:
            rows += [
                {"tool": tool, "of": name, "says": says, "measured": int(measured[name]["live_peak_bytes"])}
                for name, says in estimate()
            ]
        except ImportError as error:
            console.print(f"{tool} is left out: {error}")
    for row in rows:
        says, was = row["says"] / 1e9, row["measured"] / 1e9
        console.print(f"{row['tool']:10} {row['of']:10} {says:.2f} GB, {was:.2f} measured: {says / was - 1:+.0%}")
    write("estimators", {"machine": machine.describe(), "measured": f"{MEASURED}.json", "rows": rows})


if __name__ == "__main__":
    main()
