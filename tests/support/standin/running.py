"""running: scenarios on the stand-in: what they share, and the loop that runs them (`workers/on_standin.py`)."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero
import standin
from fzero import optim
from fzero.capture.reads import frames
from standin import device, kernels, lines, order

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
HERE = f"cuda:{RANK}"
SCENARIOS: dict[str, Callable[[], None]] = {}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


_FOLDER = os.path.dirname(__file__) + os.sep
_plain_kind = frames.kind_of
# below Python in torch, so it is nobody's code that a trace would follow
frames.kind_of = cache(lambda name: frames.OTHER if name.startswith(_FOLDER) else _plain_kind(name))  # type: ignore[assignment]


def scenario(world: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(fn: Callable[[], None]) -> Callable[[], None]:
        if world == WORLD:
            SCENARIOS[fn.__name__] = fn
        return fn

    return register


@contextmanager
def fails(kind: type[BaseException], text: str) -> Iterator[None]:
    """What is in it raises this error."""
    with pytest.raises(kind, match=re.escape(text)):
        yield


@contextmanager
def logged() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("fzero").removeHandler(handler)


def init(key: Any) -> Any:
    one, two = fzero.random.split(key)
    return {"a": fzero.random.normal(one, (8, 8)), "b": fzero.random.normal(two, (8, 8)), "bias": torch.zeros(8)}


def loss(params: Any, b: Any) -> Any:
    return (torch.tanh(b["x"] @ params["a"] + params["bias"]) @ params["b"] - b["x"]).square().mean()


def data(step: int) -> Any:
    return {"x": torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(step))}


def batch_of(where: str, step: int) -> Any:
    return fzero.tree.map(lambda x: x[2 * RANK : 2 * RANK + 2].contiguous().to(where), data(step))


def started(where: str = HERE, **options: Any) -> Any:
    given = {"loss": loss, "optimizer": optim.adamw(1e-2), "device": where, "timeout": 30.0, **options}
    return fzero.init(init(fzero.random.key(0)), fzero.Spec(**given))


def trained(where: str = HERE, steps: int = 3, **options: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    state = started(where, **options)
    losses = []
    for step in range(steps):
        state = fzero.step(state, batch_of(where, step))
        losses.append(float(state.metrics["loss"]))
    return losses, [x.cpu() for x in fzero.tree.flatten(fzero.unshard(state.params))[1]], state


def near(found: Any, wanted: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for a, b in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert all(abs(a - b) < max(1e-3, rtol) * abs(b) for a, b in zip(found[0], wanted[0], strict=True)), (
        found[0],
        wanted[0],
    )


def bound_of(state: Any) -> Any:
    return next(iter(state.runtime.bound.values()))


# --- running ----------------------------------------------------------------------------------------------------------


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    watch = next(finder for finder in sys.meta_path if isinstance(finder, lines.Watch))
    for name, fn in SCENARIOS.items():
        if wanted and name not in wanted:
            continue
        watch.now, began = name, time.process_time()
        try:
            fn()
            assert order.VIOLATIONS == [], order.VIOLATIONS
        except Exception:
            failed[name] = traceback.format_exc()
            if WORLD > 1:
                break  # the other rank may be elsewhere
        order.VIOLATIONS.clear()
        device.CAPTURE = None
        seconds[name] = round(time.process_time() - began, 2)
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
    ran = {key: sorted(names) for key, names in watch.ran.items()}
    told = {"failed": failed, "seconds": seconds, "ran": ran, "kernels": sorted(kernels.LAUNCHED)}
    if standin.other:
        os.waitpid(standin.other, 0)  # two long lines at one time would mix
    print("\n" + json.dumps(told), flush=True)
    os._exit(0)
