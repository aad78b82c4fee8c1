"""One rank that trains with DeepSpeed and saves: `python deepspeed_checkpoint.py FOLDER STAGE DTYPE`, under torchrun.

The model has what its partition rules are about: sizes that no world divides, a tied weight, a frozen parameter, two
parameter groups, and at stage 3 several sub-groups. Beside the checkpoint in FOLDER/checkpoint rank 0 writes
FOLDER/held.safetensors: the fp32 masters and moments that DeepSpeed itself says it holds, and the losses of two more
steps.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import Tensor, nn

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.ones(7), requires_grad=False)
        self.hidden = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def moment(zero: Any, stage: int, p: Tensor, key: str) -> Tensor:
    """A whole moment as DeepSpeed holds it. In stages 1 and 2 its own function knows those alone that were there
    before the first step, so that they are put together here from where it says that each rank's part is."""
    if stage == 3:
        return safe_get_full_optimizer_state(p, key)
    whole = torch.zeros(p.numel())
    if p._hp_mapping is not None:
        group = next(g for g, members in enumerate(zero.round_robin_bit16_groups) if any(one is p for one in members))
        flat = zero.optimizer.state[zero.single_partition_of_fp32_groups[group]][key]
        here, there = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
        whole.narrow(0, here.start, here.numel).copy_(flat.narrow(0, there.start, there.numel))
    torch.distributed.all_reduce(whole)
    return whole.view(p.shape)


def main(folder: Path, stage: int, dtype: str) -> None:
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    net = model()
    trains = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trains if p.ndim > 1]}, {"params": [p for p in trains if p.ndim < 2]}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "sub_group_size": 40, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups, **ADAM)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    losses = []
    for step in range(5):
        if step == 3:
            engine.save_checkpoint(str(folder / "checkpoint"), client_state={"tokens": 72})
            held = {}
            for name, p in engine.module.named_parameters():
                if p.requires_grad:
                    held[f"params/{name}"] = safe_get_full_fp32_param(p)
                    held[f"mu/{name}"] = moment(engine.optimizer, stage, p, "exp_avg")
                    held[f"nu/{name}"] = moment(engine.optimizer, stage, p, "exp_avg_sq")
        loss = engine(batch(rank, step))
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach().float())
        losses.append(loss / torch.distributed.get_world_size())
    if rank == 0:
        held["losses"] = torch.stack(losses[3:])
        save_file({name: value.contiguous().clone() for name, value in held.items()}, folder / "held.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
