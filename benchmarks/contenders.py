"""The contenders: one row each, and the dozen lines that make it a function `batch -> loss` that also trains.

Every row trains the same module from the same parameters with the same AdamW, fused, and is set up the way its own
documentation tunes it. No row clips gradients. In bf16 every row keeps fp32 parameters and fp32 moments; how it gets to
bf16 products is in `BF16`, and differs, because the libraries do.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.model import LEARNING_RATE, WEIGHT_DECAY, Batch, Size, make_model

if TYPE_CHECKING:
    from fzero import Spec

Step = Callable[[Batch], Tensor]  # one optimizer step; the loss of this rank's batch, before the step

FROZEN_RATE = LEARNING_RATE / 1000  # by a second moment of one step: time is measured, `coded_loss` has the losses


@dataclass(frozen=True)
class Setup:
    """What a contender is made for. `dtype` is "fp32" or "bf16"."""

    size: Size
    dtype: str
    device: str = "cpu"

    def model(self) -> nn.Module:
        return make_model(self.size, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()


@dataclass(frozen=True)
class Contender:
    """`imports` are loaded before the memory that counts as the import's is read. `coded`: what travels is rounded, so
    its losses may leave the others': how far is reported."""

    title: str
    make: Callable[[Setup], Step]
    imports: tuple[str, ...] = ()
    world: int = 2
    talks: bool = True  # its ranks share gradients, so all such rows have one loss curve
    compiled: bool = False
    parts: int = 1  # ranks whose batches one process takes
    offloads: bool = False  # holds state off the device: runs where it is asked for
    coded: bool = False  # runs where it is asked for

    def missing(self) -> str | None:
        """The first package that it needs and that is not installed."""
        return next((name for name in self.imports if importlib.util.find_spec(name.split(".")[0]) is None), None)


def adamw(size: Size, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """PyTorch's own, fused, as all contenders have it."""
    return torch.optim.AdamW(parameters, **adamw_options(size))


def adamw_options(size: Size) -> dict[str, Any]:
    """Its arguments."""
    return {"lr": size.rate, "weight_decay": WEIGHT_DECAY, "fused": True}


def _trains(setup: Setup, net: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """The plain loop around a module. Gradients are let go at the end of a step."""

    def step(batch: Batch) -> Tensor:
        loss: Tensor = net(batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _autocast(setup: Setup, net: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        with setup.autocast():
            return net(x, y)

    return forward


def alone(setup: Setup, compiled: bool = False) -> Step:
    model = setup.model()
    net = torch.compile(_autocast(setup, model)) if compiled else _autocast(setup, model)
    return _trains(setup, net, adamw(setup.size, model.parameters()))


def ddp(setup: Setup, zero_redundancy: bool = False, hook: str = "") -> Step:
    """hook: of `torch.distributed.algorithms.ddp_comm_hooks`: "fp16", or "powersgd" of rank 1 from the second step, of
    one bucket: its all-reduces of several would start in another order on each rank of gloo."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = setup.model()
    cap = 4096 if hook == "powersgd" else None
    net = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=cap)
    if hook:
        _register(net, hook)
    optimizer: torch.optim.Optimizer
    if zero_redundancy:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_options(setup.size)
        )
    else:
        optimizer = adamw(setup.size, model.parameters())
    forward = _autocast(setup, net)
    buckets: list[Tensor | None] = []

    def step(batch: Batch) -> Tensor:
        loss = forward(batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        buckets[:] = [p.grad for p in model.parameters()]  # views: shows the memory account what DDP holds on to
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _register(net: nn.parallel.DistributedDataParallel, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def fsdp2(setup: Setup, reshard: bool, compiled: bool = False, offload: bool = False) -> Step:
    """`fully_shard` on each block, then on the rest (the embedding, tied, which stays gathered between the two passes:
    torch's own default for the root). Compiled per block, as torchtitan does. offload: parameters, gradients and
    optimizer on the CPU, in page-locked memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = setup.model().cpu() if offload else setup.model()
    homes = CPUOffloadPolicy() if offload else OffloadPolicy()
    mesh = init_device_mesh(setup.device, (torch.distributed.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if setup.dtype == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=homes, reshard_after_forward=reshard)
    again = None if reshard else False
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=homes, reshard_after_forward=again)
    return _trains(setup, model, adamw(setup.size, model.parameters()))


def nvme_path() -> str:
    """The folder for what is offloaded to a disk: FZERO_BENCH_NVME, or that of temporary files."""
    return os.environ.get("FZERO_BENCH_NVME") or tempfile.gettempdir()


def deepspeed(setup: Setup, stage: int, nvme: bool = False) -> Step:
    """Its default buckets of 5e8 elements hold 2 GB each and are no faster here; neither is overlap_comm, on gloo.

    Its bf16 mode has no fp32 masters at stage 0, where its autocast is the nearest that has. nvme: the optimizer's
    state on disk, read and written in a pipeline; with parameters there too it would train in bf16, whatever it is
    told."""
    import deepspeed

    model = setup.model()
    buckets = {"reduce_bucket_size": 25_000_000, "allgather_bucket_size": 25_000_000}
    away: dict[str, Any] = {}
    if nvme:
        swapped = {"device": "nvme", "nvme_path": nvme_path(), "buffer_count": 12}
        away = {"offload_optimizer": {**swapped, "pipeline_read": True, "pipeline_write": True}}
    config = {
        "train_micro_batch_size_per_gpu": setup.size.batch,
        "gradient_clipping": 0.0,  # its default is 1.0
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False, **buckets, **away},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as everybody's
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setup.dtype == "bf16" and stage > 0},
        "torch_autocast": {"enabled": setup.dtype == "bf16" and stage == 0, "dtype": "bfloat16"},
        "steps_per_print": 10**9,
    }
    optimizer = adamw(setup.size, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    del model, optimizer

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(batch["x"], batch["y"])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fzero_spec(setup: Setup, zero: int, **options: Any) -> tuple[dict[str, Tensor], Spec]:
    """(parameters, the Spec of the contenders' step); `options` are further fields of the Spec."""
    from fzero import Spec, optim
    from fzero.interop import from_module

    params, buffers, apply = from_module(setup.model())
    spec = Spec(
        loss=lambda params, batch: apply(params, buffers, batch["x"], batch["y"]),
        zero=zero,
        **{
            "optimizer": optim.adamw(setup.size.rate, weight_decay=WEIGHT_DECAY),
            "precision": setup.dtype,
            "compile": "none",
            **options,
        },
    )
    return params, spec


def fzero(setup: Setup, zero: int, **options: Any) -> Step:
    import fzero

    params, spec = fzero_spec(setup, zero, **options)
    state = fzero.init(params, spec)
    del params

    def step(batch: Batch) -> Tensor:
        nonlocal state
        state = fzero.step(state, batch)
        loss: Tensor = state.metrics["loss"]
        return loss

    return step


def fzero_coded(setup: Setup, zero: int, gather: str, reduce: str) -> Step:
    from fzero import Precision, optim

    compute = "bf16" if setup.dtype == "bf16" else None
    policy = Precision(compute=compute, gather=gather, reduce=reduce, exact=("norm.*",))  # of 1,536 elements
    more = {}
    if reduce == "sign":  # after a first step with whole gradients, which is not timed
        more["optimizer"] = optim.freeze_nu(FROZEN_RATE, after=1, weight_decay=WEIGHT_DECAY)
    return fzero(setup, zero, precision=policy, matmul="fastest", **more)


def fzero_onebit(setup: Setup) -> Step:
    """Its first phase is one step, which is not timed."""
    from fzero import optim

    onebit = optim.onebit_adam(FROZEN_RATE, warmup_steps=1, weight_decay=WEIGHT_DECAY)
    return fzero(setup, 0, optimizer=onebit, matmul="fastest")


def on_disk(setup: Setup) -> Step:
    return fzero(setup, 3, offload={"optimizer": "nvme"}, nvme_path=nvme_path())


FSDP = ("torch.distributed.fsdp",)
DDP = ("torch.distributed.optim",)
HOME = ("fzero.interop",)

CONTENDERS: dict[str, Contender] = {
    "reference": Contender(
        "one process with both ranks' batches", alone, world=1, parts=2
    ),  # never timed: the loss curve of the others must be its
    "alone": Contender("one process, the other core idle", alone, world=1, talks=False),
    "floor": Contender("floor: two processes, no communication", alone, talks=False),
    "floor_compiled": Contender("floor, compiled", partial(alone, compiled=True), talks=False, compiled=True),
    **{f"fzero{zero}": Contender(f"fzero zero={zero}", partial(fzero, zero=zero), HOME) for zero in range(4)},
    **{
        f"fzero{zero}_fastest": Contender(
            f"fzero zero={zero}, matmul='fastest'", partial(fzero, zero=zero, matmul="fastest"), HOME
        )
        for zero in (0, 2, 3)
    },
    "fzero0_onebit": Contender("fzero zero=0, 1-bit Adam, second phase", fzero_onebit, HOME, coded=True),
    "fzero3_compiled": Contender(
        "fzero zero=3, compile='auto'", partial(fzero, zero=3, compile="auto"), HOME, compiled=True
    ),
    "fzero3_moments": Contender(
        "fzero zero=3, moments on the host",
        partial(fzero, zero=3, offload="optimizer", update_on="device"),
        HOME,
        offloads=True,
    ),
    "fzero3_moved": Contender(
        "fzero zero=3, all on the host, updates on the device",
        partial(fzero, zero=3, offload="optimizer+params", update_on="device"),
        HOME,
        offloads=True,
    ),
    "fzero3_on_cpu": Contender(
        "fzero zero=3, all on the host, updates there",
        partial(fzero, zero=3, offload="optimizer+params", update_on="cpu"),
        HOME,
        offloads=True,
    ),
    "fzero3_nvme": Contender("fzero zero=3, moments on disk", on_disk, HOME, offloads=True),
    "deepspeed3_nvme": Contender(
        "DeepSpeed stage 3, optimizer on disk", partial(deepspeed, stage=3, nvme=True), ("deepspeed",), offloads=True
    ),
    "fsdp_offload": Contender(
        "FSDP2, all on the host, updates there", partial(fsdp2, reshard=True, offload=True), FSDP, offloads=True
    ),
    "fzero3_p2p": Contender("fzero zero=3, over gloo", partial(fzero, zero=3, transfers="p2p"), HOME),
    **{
        f"fzero{zero}_{gather}_{reduce}": Contender(
            f"fzero zero={zero}, gather={gather}, reduce={reduce}",
            partial(fzero_coded, zero=zero, gather=gather, reduce=reduce),
            HOME,
            coded=True,
        )
        for zero, gather, reduce in (
            (2, "int8", "int8"),
            (2, "int8", "int4"),
            (2, "int4", "int4"),
            (2, "int8", "sign"),
            (3, "int8", "int8"),
            (3, "int8", "int4"),
            (3, "int4", "int4"),
        )
    },
    **{
        f"ddp_{hook}": Contender(f"DDP, {hook} hook", partial(ddp, hook=hook), DDP, coded=True)
        for hook in ("fp16", "powersgd")
    },
    "ddp": Contender("DDP", ddp, DDP),
    "ddp_zero": Contender("DDP + ZeroRedundancyOptimizer", partial(ddp, zero_redundancy=True), DDP),
    "fsdp": Contender("FSDP2, resharding", partial(fsdp2, reshard=True), FSDP),
    "fsdp_keep": Contender("FSDP2, no resharding", partial(fsdp2, reshard=False), FSDP),
    "fsdp_compiled": Contender(
        "FSDP2, resharding, compiled", partial(fsdp2, reshard=True, compiled=True), FSDP, compiled=True
    ),
    "fsdp_keep_compiled": Contender(
        "FSDP2, no resharding, compiled", partial(fsdp2, reshard=False, compiled=True), FSDP, compiled=True
    ),
    **{
        f"deepspeed{stage}": Contender(f"DeepSpeed stage {stage}", partial(deepspeed, stage=stage), ("deepspeed",))
        for stage in range(4)
    },
}

BF16 = {
    "fzero": 'precision="bf16": fp32 masters, every leaf cast to bf16 before it is gathered, gradients reduced in fp32',
    "fsdp": "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32): the same",
    "ddp": "torch.autocast(bfloat16): products in bf16, norms in fp32; fp32 gradients are reduced, nothing is gathered",
    "floor": "torch.autocast(bfloat16), as DDP",
    "alone": "torch.autocast(bfloat16), as DDP",
    "deepspeed": "stages 1-3: bf16.enabled, bf16 parameters and fp32 masters; gradients reduced in bf16 (its default)",
    "deepspeed0": "torch_autocast(bfloat16), as DDP: its bf16 mode has no fp32 masters at stage 0",
}
