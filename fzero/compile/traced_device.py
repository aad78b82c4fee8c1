"""traced_device: the device whose program `fzero.lower` makes on this machine."""

from __future__ import annotations

import torch

from fzero import backend
from fzero._torch_compat import prepare_fake_cuda

OTHER = (
    "this is the program of {here}: torch cannot trace fake tensors of {asked} here, so the attention op and what "
    "depends on the device are not those of {asked}. `fzero fake-cuda SCRIPT` runs a script where it can"
)


def traced_device(asked: str | torch.device | None) -> tuple[torch.device, str]:
    """(the device, what the user should know of it; "" where it is the one that was asked for).

    Shapes do not need a device, its own ops do. On a machine that has none, the program is the processor's, unless
    this process was started by `fzero fake-cuda`.

    >>> traced_device(None)
    (device(type='cpu'), '')
    """
    device, host = torch.device(asked or "cpu"), torch.device("cpu")
    calls = backend.of(device).calls
    if not calls.traceable():
        return host, OTHER.format(here=host.type, asked=device.type)
    if not calls.available():
        prepare_fake_cuda()
    return device, ""
