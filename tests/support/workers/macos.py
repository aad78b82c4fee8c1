"""What most users do, in a process that has only what macOS has: `python macos.py FOLDER` prints a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import macos


def main(folder: Path) -> None:
    macos.pretend()
    import fzero
    from fzero.tools import machine_probes

    params = {"w": torch.arange(32.0).reshape(8, 4) / 32, "b": torch.zeros(4)}
    batch = {"x": torch.ones(16, 8), "y": torch.ones(16, 4)}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return ((torch.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2).mean()

    said = {"memory": machine_probes.memory_bytes()}
    homes: dict[str, dict[str, Any]] = {
        "device": {},
        "cpu": {"offload": {"**": "cpu"}},
        "nvme": {"offload": {"opt_state/**": "nvme"}, "nvme_path": str(folder)},
    }
    for home, options in homes.items():
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3, **options)
        with fzero.Log(folder / f"{home}.jsonl") as log, fzero.Checkpointer(folder / home) as checkpointer:
            state = fzero.init(params, spec)
            for _ in range(3):
                state = fzero.step(state, batch)
                log(state)
            checkpointer.save(state)
        again = fzero.step(fzero.load(folder / home, spec), batch)
        state = fzero.step(state, batch)
        said[home] = [leaf.full().tolist() for each in (state, again) for leaf in each.params.values()]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
