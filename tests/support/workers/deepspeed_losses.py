"""One rank that trains with DeepSpeed's own engine: `python deepspeed_losses.py FOLDER`, under torchrun.

FOLDER/cases.json is a list of ds_configs. Rank 0 writes FOLDER/losses.json: for each the loss of every step, a mean
over micro batches and ranks. A config without an optimizer gets torch's AdamW(1e-2).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, CLASSES, WIDTH = 20, 10, 12


class Net(nn.Module):
    """Sizes that no world divides; the loss is within, and so large that gradients have norms over 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.hidden(x))
        return 4 * nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, step: int, rows: int) -> Tensor:
    """(rows, 6): a rank's batch of a step; of two worlds the first ranks are given the same."""
    return torch.randint(0, CLASSES, (rows, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def train(config: dict[str, Any], rank: int) -> list[float]:
    import deepspeed

    model = net()
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {**config, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for part in batch(rank, step, micro * steps).split(micro):
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / steps / torch.distributed.get_world_size())
    engine.destroy()
    return losses


def main(folder: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    cases = json.loads((folder / "cases.json").read_text())
    losses = [train(config, rank) for config in cases]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
