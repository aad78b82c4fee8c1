"""compile_segments: a program's segments, with their stretches of loops compiled by Inductor.

1. Every segment is cut into stretches (fusion.py). Equal stretches count once, so depth adds nothing to compile.
2. One rank of each machine compiles. Worker processes and the rank itself take stretches from one list, each in order.
   They leave the results in Inductor's cache on disk (TORCHINDUCTOR_CACHE_DIR), keyed by graph, torch, configuration
   and thread count. The other ranks wait and then load from it; so does the next run. The cache holds code. If other
   users may write to it, nothing is compiled.
3. All ranks agree, stretch by stretch. A stretch that failed anywhere stays aten everywhere. So no two ranks differ in
   rounding, and none waits for another. A stretch that is not compiled runs as aten; one log line gives the reason.

A cross entropy is compiled by rows (cross_entropy.py). What fzero has a kernel of its own for is not compiled
(own_kernels.py).

Cost: about a second of a core for each unique stretch the first time, about ten milliseconds from the cache.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fzero import private_folder, progress
from fzero._torch_compat import inductor_cache_dir, inductor_compile, inductor_lacks
from fzero.codegen.cross_entropy import by_rows
from fzero.codegen.fusion import Fused, fuse
from fzero.comm.agree import gathered
from fzero.comm.launcher import usable_cores
from fzero.ir import fx_nodes
from fzero.ir.program import Program

log = logging.getLogger("fzero")
PER_WORKER = 8  # this many stretches pay for the three seconds that a worker takes to start


def compiled(
    program: Program,
    *,
    how: str | None,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    group: Any = None,
) -> dict[str, fx.GraphModule]:
    """Returns, by hash, the segments that gain by compiling, with `Fused` nodes in them. `.forward` keeps the segment's
    calling convention. A segment that is not in the result stays as it is.

    how: "none"; "inductor": every stretch; "auto": the stretches that move `fusion.AUTO_BYTES` or more. Collective: all
    ranks call it with one program. `group` carries CPU tensors.
    """
    segments, pool = fuse(program, how)
    errors = _compile_all(list(pool.values()), torch.device(device), rank, world_size, group)
    if errors:
        first = next(filter(None, errors.values()), "on another rank")
        log.warning("fzero: %d of %d stretches run as plain aten: %s", len(errors), len(pool), first)
    always = {op.segment for op in program.ops if op.get("compile") is not None}  # they have no room to run otherwise
    return {key: gm for key, gm in segments.items() if key in always or len(errors) < len(pool)}


# --- every rank ---------------------------------------------------------------------------------------------------


def _compile_all(
    stretches: Sequence[Fused], device: torch.device, rank: int, world_size: int, group: Any
) -> dict[str, str]:
    """Compiles or loads. Returns the errors of the stretches that stay aten, by hash ("" if another rank failed)."""
    errors: dict[str, str] = {}
    if not stretches:  # the same on every rank, as the program is
        return errors
    lacking = inductor_lacks(device.type) or _foreign(inductor_cache_dir())
    leads = _leads(rank, world_size, group)
    for turn in (leads, not leads):  # on each machine one rank first, then the others
        if turn and lacking:
            errors.update(dict.fromkeys((s.digest for s in stretches), lacking))
        elif turn:
            errors.update(_compile_here(stretches, device, alone=not leads))
        for digest in _failed(stretches, errors, world_size, group):
            errors.setdefault(digest, "")
    for stretch in stretches:
        if stretch.digest in errors:
            stretch.run = stretch.graph.forward
    return errors


def _foreign(folder: str) -> str:
    """The reason why Inductor's cache, which holds code, is not used; "" if it belongs to this user alone."""
    why = private_folder.refused(Path(folder))
    return f"Inductor's cache {folder} is not used: {why}. TORCHINDUCTOR_CACHE_DIR names another" if why else ""


def _leads(rank: int, world_size: int, group: Any) -> bool:
    """Whether this is the first of the ranks that share a cache."""
    if world_size == 1:
        return True
    where = f"{socket.gethostname()} {inductor_cache_dir()}"
    local = torch.frombuffer(bytearray(hashlib.blake2b(where.encode(), digest_size=16).digest()), dtype=torch.uint8)
    digests = gathered(local, world_size, group)
    return next(r for r in range(world_size) if torch.equal(digests[r], local)) == rank


def _failed(stretches: Sequence[Fused], errors: Mapping[str, str], world_size: int, group: Any) -> list[str]:
    """The stretches that failed on any rank. Collective."""
    bad = torch.tensor([s.digest in errors for s in stretches] or [False], dtype=torch.uint8)
    if world_size > 1:
        bad = torch.stack(gathered(bad, world_size, group)).amax(0)
    return [s.digest for s, failed in zip(stretches, bad.tolist(), strict=False) if failed]


# --- one rank -----------------------------------------------------------------------------------------------------


def _compile_here(stretches: Sequence[Fused], device: torch.device, alone: bool) -> dict[str, str]:
    """Compiles with workers, or (`alone`) loads the results of another rank. What fzero has a kernel for takes that."""
    errors: dict[str, str] = {}
    for stretch in stretches:
        stretch.run = stretch.own or stretch.run
    stretches = [stretch for stretch in stretches if stretch.own is None]
    shown = progress.shown("loading what is compiled" if alone else "compiling", len(stretches), "stretches")
    with shown, tempfile.TemporaryDirectory() as folder:
        for stretch in stretches[:1]:  # it leaves the precompiled headers; else each worker would make them
            _compile(stretch, device, errors)
        workers = [] if alone else _workers(folder, stretches[1:], device)
        later = []
        for stretch in stretches[1:]:
            if workers and not _claim(folder, stretch.digest):
                later.append(stretch)
            else:
                _compile(stretch, device, errors)
        for worker in workers:
            worker.wait()
        for stretch in later:  # from the cache, where the workers left it
            _compile(stretch, device, errors)
    return errors


def _compile(stretch: Fused, device: torch.device, errors: dict[str, str]) -> None:
    progress.advance()
    try:
        stretch.run = inductor_compile(by_rows(stretch.graph), _inputs(stretch.graph, device))
        os.makedirs(_mark(stretch.digest), exist_ok=True)
    except Exception as error:
        errors[stretch.digest] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _inputs(gm: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    vals = [node.meta["val"] for node in fx_nodes.placeholders(gm.graph)]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in vals]


# --- workers ------------------------------------------------------------------------------------------------------


def _workers(folder: str, stretches: Sequence[Fused], device: torch.device) -> list[subprocess.Popen[bytes]]:
    """Starts processes that compile the stretches that nobody has claimed, from the end of the list; none if it would
    not pay."""
    new = sum(not os.path.exists(_mark(stretch.digest)) for stretch in stretches)
    number = min(usable_cores() - 1, new // PER_WORKER)
    if number < 1 or not sys.executable:
        return []
    inputs = [[(x.shape, x.stride(), x.dtype) for x in _inputs(s.graph, torch.device("meta"))] for s in stretches]
    work = [(s.digest, by_rows(s.graph), shapes) for s, shapes in zip(stretches, inputs, strict=True)]
    with open(os.path.join(folder, "work"), "wb") as file:
        pickle.dump((str(device), torch.get_num_threads(), work), file)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from fzero.runtime import compile_segments; compile_segments.work({folder!r})"]
    return [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(number)]


def _mark(digest: str) -> str:
    """A path that exists once a stretch was compiled here. It is only a hint that workers are not worth their start."""
    return os.path.join(inductor_cache_dir(), "fzero", f"{digest}-{torch.__version__}-{torch.get_num_threads()}")


def work(folder: str) -> None:
    """Runs in a worker: compiles the stretches that nobody has claimed. Errors are dropped: the caller meets them
    again."""
    import fzero.optim
    import fzero.random  # noqa: F401  (both register the ops that graphs may name)

    with open(os.path.join(folder, "work"), "rb") as file:
        device, threads, tasks = pickle.load(file)
    torch.set_num_threads(threads)
    for digest, graph, shapes in reversed(tasks):
        if _claim(folder, digest):
            inputs = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in shapes]
            with contextlib.suppress(Exception):
                inductor_compile(graph, inputs)
    gc.freeze()  # Python ends without a walk over all that torch made: a third of a second


def _claim(folder: str, digest: str) -> bool:
    """Whether this process is the first to claim the stretch."""
    try:
        os.mkdir(os.path.join(folder, digest))
    except FileExistsError:
        return False
    return True
