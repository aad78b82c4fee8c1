"""compile_segments: a program's segments with their stretches of loops compiled by Inductor.

1. Every segment is cut into stretches (fusion.py); equal stretches are one, so depth adds nothing to compile.
2. One rank of each machine compiles: worker processes and the rank itself take stretches from one list, each in order,
   and leave what they make in Inductor's cache on disk (TORCHINDUCTOR_CACHE_DIR), keyed by graph, torch, configuration
   and thread count. The other ranks wait, and then load from it; so does the next run. It holds code: where others may
   write to it, nothing is compiled.
3. All ranks agree, stretch by stretch: one that failed anywhere stays aten everywhere, so that no two ranks differ in
   rounding and none waits for another. What is not compiled runs as aten, with one line that says why.

Cost: about a second of a core for each unique stretch the first time, about ten milliseconds from the cache.
"""

from __future__ import annotations

import contextlib
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

from fzero import private_folder
from fzero._torch_compat import inductor_cache_dir, inductor_compile, inductor_lacks
from fzero.codegen.fusion import Fused, fuse
from fzero.comm.agree import gathered
from fzero.ir import fx_nodes
from fzero.ir.program import Program

log = logging.getLogger("fzero")
PER_WORKER = 8  # stretches that are worth the three seconds a worker takes to start


def compiled(
    program: Program,
    *,
    how: str,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    group: Any = None,
) -> dict[str, fx.GraphModule]:
    """By hash, the segments that gain by compiling, with `Fused` nodes in them; `.forward` has the segment's calling
    convention. Segments that are not in it stay as they are.

    how: "none"; "inductor": every stretch; "auto": those that move `fusion.AUTO_BYTES` or more. All ranks call it
    together, with one program; `group` carries CPU tensors.
    """
    found, pool = fuse(program, how)
    errors = _compile_all(list(pool.values()), torch.device(device), rank, world_size, group)
    if errors:
        first = next(filter(None, errors.values()), "on another rank")
        log.warning("fzero: %d of %d stretches run as plain aten: %s", len(errors), len(pool), first)
    return found if len(errors) < len(pool) else {}


# --- every rank ---------------------------------------------------------------------------------------------------


def _compile_all(
    stretches: Sequence[Fused], device: torch.device, rank: int, world_size: int, group: Any
) -> dict[str, str]:
    """Compiles or loads; returns the errors of those that stay aten, by hash ("" where another rank failed)."""
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
    for one in stretches:
        if one.digest in errors:
            one.run = one.graph.forward
    return errors


def _foreign(folder: str) -> str:
    """Why nothing is loaded from Inductor's cache, which holds code: "" where it is this user's alone."""
    why = private_folder.refused(Path(folder))
    return f"Inductor's cache {folder} is not used: {why}. TORCHINDUCTOR_CACHE_DIR names another" if why else ""


def _leads(rank: int, world_size: int, group: Any) -> bool:
    """Whether this is the first rank of those that share a cache."""
    if world_size == 1:
        return True
    where = f"{socket.gethostname()} {inductor_cache_dir()}"
    mine = torch.frombuffer(bytearray(hashlib.blake2b(where.encode(), digest_size=16).digest()), dtype=torch.uint8)
    theirs = gathered(mine, world_size, group)
    return next(r for r in range(world_size) if torch.equal(theirs[r], mine)) == rank


def _failed(stretches: Sequence[Fused], errors: Mapping[str, str], world_size: int, group: Any) -> list[str]:
    """The stretches that failed on any rank; returns when every rank has called it."""
    bad = torch.tensor([s.digest in errors for s in stretches] or [False], dtype=torch.uint8)
    if world_size > 1:
        bad = torch.stack(gathered(bad, world_size, group)).amax(0)
    return [s.digest for s, failed in zip(stretches, bad.tolist(), strict=False) if failed]


# --- one rank -----------------------------------------------------------------------------------------------------


def _compile_here(stretches: Sequence[Fused], device: torch.device, alone: bool) -> dict[str, str]:
    """Compiles with workers, or (`alone`) loads what another rank compiled."""
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in stretches[:1]:  # leaves behind the precompiled headers, which workers would make once each
            _compile(one, device, errors)
        workers = [] if alone else _workers(folder, stretches[1:], device)
        later = []
        for one in stretches[1:]:
            if workers and not _claim(folder, one.digest):
                later.append(one)
            else:
                _compile(one, device, errors)
        for worker in workers:
            worker.wait()
        for one in later:  # from the cache, where the workers left it
            _compile(one, device, errors)
    return errors


def _compile(one: Fused, device: torch.device, errors: dict[str, str]) -> None:
    try:
        one.run = inductor_compile(one.graph, _inputs(one.graph, device))
        os.makedirs(_mark(one.digest), exist_ok=True)
    except Exception as error:
        errors[one.digest] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _inputs(gm: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    vals = [node.meta["val"] for node in fx_nodes.placeholders(gm.graph)]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in vals]


# --- workers ------------------------------------------------------------------------------------------------------


def _workers(folder: str, stretches: Sequence[Fused], device: torch.device) -> list[subprocess.Popen[bytes]]:
    """Processes that compile what nobody has claimed, from the end of the list; none where they would not pay."""
    new = sum(not os.path.exists(_mark(one.digest)) for one in stretches)
    number = min(len(os.sched_getaffinity(0)) - 1, new // PER_WORKER)
    if number < 1 or not sys.executable:
        return []
    inputs = [[(x.shape, x.stride(), x.dtype) for x in _inputs(s.graph, torch.device("meta"))] for s in stretches]
    work = [(s.digest, s.graph, shapes) for s, shapes in zip(stretches, inputs, strict=True)]
    with open(os.path.join(folder, "work"), "wb") as file:
        pickle.dump((str(device), torch.get_num_threads(), work), file)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from fzero.runtime import compile_segments; compile_segments.work({folder!r})"]
    return [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(number)]


def _mark(digest: str) -> str:
    """A path that exists once a stretch was compiled here: a hint that workers are not worth starting, no more."""
    return os.path.join(inductor_cache_dir(), "fzero", f"{digest}-{torch.__version__}-{torch.get_num_threads()}")


def work(folder: str) -> None:
    """A worker's life: errors are the caller's to meet again."""
    import fzero.optim
    import fzero.random  # noqa: F401  (both register the ops that graphs may name)

    with open(os.path.join(folder, "work"), "rb") as file:
        device, threads, tasks = pickle.load(file)
    torch.set_num_threads(threads)
    for digest, graph, shapes in reversed(tasks):
        if _claim(folder, digest):
            given = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in shapes]
            with contextlib.suppress(Exception):
                inductor_compile(graph, given)


def _claim(folder: str, digest: str) -> bool:
    """Whether nobody was here before."""
    try:
        os.mkdir(os.path.join(folder, digest))
    except FileExistsError:
        return False
    return True
