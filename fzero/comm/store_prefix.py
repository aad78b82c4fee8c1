"""store_prefix: a part of the store for each start of the ranks.

torchrun's agent keeps one store over all restarts of a job. The keys of a dead start are still there (torch 2.11.0 to
2.13.0). A rank that starts again would find the address of a dead rank, and connect to nobody. So before the process
group is made, the ranks agree on a name that no earlier start had:

    each rank   writes a random token under its rank
    rank 0      offers the tokens that it finds, again whenever one has changed: it may have been a dead rank's
    each rank   accepts an offer that holds its own token
    rank 0      lets the offer go that all ranks have accepted

The keys of an earlier start hold no token of this one, so no rank can take them for new. This takes some milliseconds.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

import torch.distributed as dist

from fzero.errors import DisagreementError

POLL_SECONDS = 0.005


def prefixed(store: Any, rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Returns `store` under a prefix that only the ranks of this start have. Collective.

    Raises DisagreementError if not all ranks come within `timeout_seconds`.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout_seconds
    everyone = range(world_size)
    store = dist.PrefixStore("fzero/rounds", store)
    store.set(f"token/{rank}", token)
    while time.monotonic() < deadline:
        if rank == 0 and store.check([f"token/{r}" for r in everyone]):
            store.set("offer", " ".join(store.get(f"token/{r}").decode() for r in everyone))
        if store.check(["offer"]):
            offer = store.get("offer").decode()
            name = hashlib.sha256(offer.encode()).hexdigest()[:16]
            tokens = offer.split(" ")
            if len(tokens) == world_size and tokens[rank] == token:
                store.set(f"accepted/{rank}", name)
                accepted = rank == 0 and store.check([f"accepted/{r}" for r in everyone])
                if accepted and all(store.get(f"accepted/{r}").decode() == name for r in everyone):
                    store.set("go", name)
                if store.check(["go"]) and store.get("go").decode() == name:
                    return dist.PrefixStore(name, store)
        time.sleep(POLL_SECONDS)
    raise DisagreementError(
        f"rank {rank}: not all {world_size} ranks came within {timeout_seconds:g} s. Look at what the others printed, "
        "or give them more time: Spec(timeout=)"
    )
