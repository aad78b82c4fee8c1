"""group: the process group of a run.

`open_world` joins the default process group. Under torchrun it starts the group: gloo for states on the CPU, nccl for
states on CUDA. A torchrun agent keeps one store over all restarts of a job. So each start uses a part of that store
that no earlier start has used (`fzero.comm.store_prefix`).
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from fzero.comm import heartbeat, launcher, store_prefix
from fzero.errors import SpecError

TIMEOUT_SECONDS = 600.0  # torch's default for nccl


def open_world(device: str, timeout_seconds: float | None = None) -> tuple[int, int]:
    """Returns (rank, world size) of this process. Collective if there are several ranks.

    An existing default process group is used as it is. Otherwise, under torchrun, this starts one: nccl if `device` is
    CUDA, else gloo. `timeout_seconds` is the timeout of the new group; None means TIMEOUT_SECONDS.

    Raises SpecError in three cases: the existing group has the wrong backend for `device`; this torch was built without
    torch.distributed; or a launcher started several tasks and did not give each a RANK (`fzero.comm.launcher`).
    """
    if dist.is_available() and dist.is_initialized():
        backend, needed = (
            str(dist.get_backend()),
            {"cuda": "nccl", "cpu": "gloo"}.get(torch.device(device).type, "gloo"),
        )
        if backend in ("nccl", "gloo") and backend != needed:
            raise SpecError(f"the default process group is {backend}, a state on {device} needs {needed}")
        return _here()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        if not dist.is_available():
            raise SpecError("WORLD_SIZE is set, but this torch was built without torch.distributed")
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        _start(backend, timeout_seconds or TIMEOUT_SECONDS)
        return _here()
    launcher.check(os.environ)
    return 0, 1


def _start(backend: str, seconds: float) -> None:
    """Starts the default process group. Under torchrun's agent it uses a fresh part of the agent's store."""
    timeout = timedelta(seconds=seconds)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = store_prefix.prefixed(store, rank, world_size, seconds)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def _here() -> tuple[int, int]:
    """Returns (rank, world size) in the default group. With gloo, the presence is made here, at the same call on all
    ranks."""
    if dist.get_backend() == "gloo":
        heartbeat.of()
    return dist.get_rank(), dist.get_world_size()
