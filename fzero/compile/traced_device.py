"""traced_device: the device that `fzero.lower` makes a program for, on any machine."""

from __future__ import annotations

import torch

from fzero import backend
from fzero._torch_compat import prepare_fake_cuda

ELSEWHERE = (
    "traced on the processor, by the ops that torch takes on {asked}; what the step's own code asks of its device "
    "(x.is_cuda, its capability) was answered by the processor. "
    "`fzero fake-cuda SCRIPT` runs a script where {asked} answers"
)


def traced_device(asked: str | torch.device | None) -> tuple[torch.device, str]:
    """(the device, what the user should know of how its program came about; "" if it was traced there).

    On a machine that has none, a step is traced on the processor (`fzero.ir.elsewhere`), unless this process was
    started by `fzero fake-cuda`.

    >>> traced_device(None)
    (device(type='cpu'), '')
    """
    device = torch.device(asked or "cpu")
    calls = backend.of(device).calls
    if not calls.traceable():
        return device, ELSEWHERE.format(asked=device.type)
    if not calls.available():
        prepare_fake_cuda()
    return device, ""
