"""closed_over: whether the closed-over tensors of losses have the same values on all ranks.

What the update of the state reads is compared with the program (`Lowered.digest`). Of a loss over whole rows of the
batch each rank may have its own tensors. But a module that each rank builds from another seed has other buffers, and
each rank would train another function, in silence. Large tensors are compared by some of their elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from fzero.capture.graph import Graph
from fzero.comm.agree import gathered
from fzero.errors import DisagreementError
from fzero.ir.mesh import Mesh
from fzero.state.first_state import fingerprint

log = logging.getLogger("fzero")

ELEMENTS = 1 << 16  # of a tensor that are compared, evenly spread


def compare(graph: Graph, mesh: Mesh, group: object, label: Callable[[int], str]) -> None:
    """Compares the closed-over tensors of a step. Collective, where there are several ranks and such tensors.

    One that differs is a warning. Raises DisagreementError on all ranks where some of them share a batch, as over `tp`
    and `pp`. label: the name of a rank.
    """
    if mesh.world_size == 1 or not graph.constants:
        return
    own = torch.tensor([_number(value) for value in graph.constants.values()])
    rows = torch.stack(gathered(own, mesh.world_size, group))
    for name, others in zip(graph.constants, (rows != rows[0]).T, strict=True):
        if not others.any():
            continue
        found = f"{name} is closed over, and differs between {label(0)} and {label(int(others.nonzero()[0]))}"
        remedy = "Build it from one seed on all ranks, or broadcast it"
        if mesh.data_ranks < mesh.world_size:
            raise DisagreementError(f"{found}: some of the ranks compute one batch together. {remedy}")
        log.warning("fzero: %s: each computes the loss with its own. %s, unless that is meant", found, remedy)


def _number(value: torch.Tensor) -> int:
    """A number that two tensors of one shape share if what is compared of them is the same."""
    if value.is_meta:
        return 0
    some = value.detach().reshape(-1)[:: max(1, -(-value.numel() // ELEMENTS))]
    return int(fingerprint(some), 16) >> 1  # int64 has a sign
