"""store_prefix: a part of the store for each start of the ranks.

torchrun's agent keeps one store over all restarts of a job. The keys of a dead start are still there (torch 2.11.0 to
2.13.0). A rank that starts again would find the address of a dead rank, and connect to nobody. So before the process
group is made, the ranks agree on a name that no earlier start had:

    each rank   writes a random token under its rank
    rank 0      offers the tokens that it finds, again whenever one has changed: it may have been a dead rank's
    each rank   accepts an offer that holds its own token
    rank 0      lets the offer go that all ranks have accepted

The keys of an earlier start hold no token of this one, so no rank can take them for new. This takes some milliseconds.

When the time is up, each rank finds in the store who is missing. Rank 0, which may hold the store, lets the others read
its answer before it raises.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

import torch.distributed as dist

from fzero.comm.hang_report import not_come

POLL_SECONDS = 0.005
TOLD_SECONDS = 2.0  # that rank 0 waits for the others to read who is missing


def prefixed(store: Any, rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Returns `store` under a prefix that only the ranks of this start have. Collective.

    Raises HangError, which names the missing, if not all ranks come within `timeout_seconds`.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout_seconds
    everyone = range(world_size)
    store = dist.PrefixStore("fzero/rounds", store)
    store.set(f"token/{rank}", token)
    while time.monotonic() < deadline:
        if rank == 0 and store.check([f"token/{r}" for r in everyone]):
            store.set("offer", " ".join(_read(store, f"token/{r}") for r in everyone))
        if store.check(["offer"]):
            offer = _read(store, "offer")
            name = _name(offer)
            tokens = offer.split(" ")
            if len(tokens) == world_size and tokens[rank] == token:
                store.set(f"accepted/{rank}", name)
                accepted = rank == 0 and store.check([f"accepted/{r}" for r in everyone])
                if accepted and all(_read(store, f"accepted/{r}") == name for r in everyone):
                    store.set("go", name)
                if store.check(["go"]) and _read(store, "go") == name:
                    return dist.PrefixStore(name, store)
        if store.check([f"missing/{token}"]):
            told = _read(store, f"missing/{token}").split()
            missing = [r for r in everyone if str(r) in told]
            store.set(f"told/{token}", "")
            raise not_come(rank, world_size, missing, timeout_seconds)
        time.sleep(POLL_SECONDS)
    missing = _missing(store, rank, world_size, token)
    if rank == 0:
        others = [_read(store, f"token/{r}") for r in everyone[1:] if r not in missing]
        for other in others:
            store.set(f"missing/{other}", " ".join(map(str, missing)))
        wait_for_keys(store, [f"told/{other}" for other in others], TOLD_SECONDS)
    raise not_come(rank, world_size, missing, timeout_seconds)


def wait_for_keys(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Returns once all keys are in the store, or after so many seconds. Returns those that are not."""
    until = time.monotonic() + seconds
    while (absent := [key for key in keys if not store.check([key])]) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return absent


def _missing(store: Any, rank: int, world_size: int, token: str) -> list[int]:
    """The ranks that did not do their part in a start that did not come about."""
    if silent := [r for r in range(world_size) if not store.check([f"token/{r}"])]:
        return silent
    offer = _read(store, "offer") if store.check(["offer"]) else ""
    if token not in offer.split(" "):
        return [0]  # it offers what it finds, again and again
    accepted = {r: _read(store, f"accepted/{r}") for r in range(world_size) if store.check([f"accepted/{r}"])}
    return [r for r in range(world_size) if accepted.get(r) != _name(offer)]


def _read(store: Any, key: str) -> str:
    """The text of a key. Whoever reaches the store can write to it: a text that is none is like another's."""
    return str(store.get(key).decode(errors="replace"))


def _name(offer: str) -> str:
    return hashlib.sha256(offer.encode()).hexdigest()[:16]
