"""machine_probes: what this machine has: packages, processor, devices, compilers, shared memory, limits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fzero._torch_compat import NEWEST, OLDEST, inductor_lacks, tried
from fzero.errors import FzeroError
from fzero.tools.finding import MB, Finding, size_text

LEAST_FILES = 1024  # descriptors: gloo and the arenas take some for each rank of a machine
# package, least version, the extra of fzero that brings it ("": fzero needs it), what for
PACKAGES = (
    ("torch", OLDEST, "", ""),
    ("optree", (0, 13), "", ""),
    ("numpy", (1, 26), "", ""),
    ("safetensors", (0, 7), "", ""),
    ("transformers", (5, 11), "hf", "Hugging Face models"),
    ("rich", (13,), "examples", "the demo's display"),
    ("matplotlib", (3, 9), "examples", "charts"),
    ("deepspeed", (0, 19), "bench", "comparisons"),
)


def versions() -> Iterator[Finding]:
    """The versions of Python and of the packages that fzero uses."""
    python = sys.version_info[:2]
    right = (3, 11) <= python < (3, 15)
    fix = "" if right else "use Python 3.11, 3.12, 3.13 or 3.14"
    yield Finding("python", "ok" if right else "missing", platform.python_version(), fix, needed=True)
    for name, least, extra, use in PACKAGES:
        needed, wanted = not extra, ".".join(map(str, least))
        fix = f"pip install 'fzero[{extra}]'" if extra else f"pip install '{name}>={wanted}'"
        installed = _version(name)
        if installed is None:
            yield Finding(name, "missing", f"not installed{f': {use} need it' if use else ''}", fix, needed)
        elif _numbers(installed) < least:
            yield Finding(name, "missing", f"{installed}: {wanted} or newer is needed", fix, needed)
        else:
            newer = name == "torch" and _numbers(installed)[:2] > NEWEST
            yield Finding(name, "ok", f"{installed}: tried were {tried()}" if newer else installed, needed=needed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:2])


def processor() -> Iterator[Finding]:
    """The cores, threads and memory of this machine."""
    usable, all_cores = len(_affinity()), os.cpu_count() or 1
    pinned = f", of {all_cores}: this process is pinned to {_spans(_affinity())}" if usable < all_cores else ""
    threads = torch.get_num_threads()
    status, fix = "ok", ""
    if threads > usable:
        status, fix = "warning", f"OMP_NUM_THREADS={usable}: more threads than cores slow each other down"
    yield Finding("processor", status, f"{usable} cores{pinned}; torch uses {threads} threads", fix)
    memory = _meminfo()
    if memory:
        limit, total = _cgroup_limit(), memory["MemTotal"]
        bound = f"; this container may use {size_text(limit)}" if limit is not None and limit < total else ""
        text = f"{size_text(total)}, {size_text(memory['MemAvailable'])} available{bound}"
        yield Finding("memory", "ok", text, figures={f"{name}_bytes": float(size) for name, size in memory.items()})


def _meminfo() -> dict[str, int]:
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    return {name: int(size) << 10 for name, size in re.findall(r"(MemTotal|MemAvailable):\s+(\d+) kB", meminfo)}


def memory_bytes() -> int:
    """Of this machine, or of its container. Raises FzeroError where the system does not say."""
    known = [size for size in (_meminfo().get("MemTotal") or _pages(), _cgroup_limit()) if size]
    if not known:
        raise FzeroError("this system does not say how much memory it has: write the file by hand (docs/choosing.md)")
    return min(known)


def _pages() -> int:
    """Of this machine, where no /proc tells it, as on macOS. 0 where nothing does."""
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _spans(numbers: list[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None


def cuda() -> Iterator[Finding]:
    """The CUDA devices that torch sees."""
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "this torch sees none"
        yield Finding("cuda", "ok", f"no device ({why}): steps run on the processor")
        return
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{it.name}, {size_text(free)} of {size_text(total)} free, capability {it.major}.{it.minor}"
        old = it.major < 7
        fix = "Triton needs capability 7.0 or newer" if old else ""
        yield Finding(f"cuda:{index}", "warning" if old else "ok", text, fix)


def backends() -> Iterator[Finding]:
    """The backends of torch.distributed: gloo, and nccl if there is a CUDA device."""
    if not dist.is_available():
        fix = "install a torch with torch.distributed"
        yield Finding("gloo", "warning", "this torch has no torch.distributed: one process only", fix)
        return
    fix = "install a torch that is built with gloo, as those of pytorch.org are"
    gloo = dist.is_gloo_available()
    yield Finding(
        "gloo", "ok" if gloo else "missing", "available" if gloo else "not in this torch", "" if gloo else fix, True
    )
    if torch.cuda.is_available():
        nccl = dist.is_nccl_available()
        fix = "" if nccl else "install a torch for Linux with CUDA"
        yield Finding("nccl", "ok" if nccl else "missing", "available" if nccl else "not in this torch", fix, True)
    else:
        yield Finding("nccl", "ok", "not tried: there is no CUDA device")
    yield Finding("mpi", "ok", "available, not used" if dist.is_mpi_available() else "not in this torch, not used")


def compilers() -> Iterator[Finding]:
    """The compilers that fzero can use."""
    lack = inductor_lacks("cpu")
    yield Finding("c++", "warning" if lack else "ok", lack or "Spec(compile=) can compile for the processor",
                  "apt install g++" if lack else "")  # fmt: skip
    triton = _version("triton")
    if not torch.cuda.is_available():
        text = f"{triton}, not tried: there is no CUDA device" if triton else "not installed: only CUDA devices use it"
        yield Finding("triton", "ok", text)
        return
    lack = inductor_lacks("cuda")
    yield Finding(
        "triton", "missing" if lack else "ok", lack or str(triton), "pip install 'triton>=3.6'" if lack else "", True
    )


def names() -> Iterator[Finding]:
    """Whether gloo can listen at the address of the host's name."""
    host = socket.gethostname()
    try:
        addresses = sorted({str(address[4][0]) for address in socket.getaddrinfo(host, None)})
        yield Finding("host name", "ok", f"{host} is {', '.join(addresses)}")
    except OSError as error:
        yield Finding(
            "host name", "warning", f"{host} leads nowhere ({error})", "set GLOO_SOCKET_IFNAME, as to lo or eth0"
        )


def shared_memory() -> Iterator[Finding]:
    """Whether ranks of this machine can share memory, and the free bytes of /dev/shm."""
    lacks = [] if hasattr(os, "memfd_create") else ["memfd_create"]
    lacks += [path for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net") if not os.path.exists(path)]
    text = (
        "ranks can read one another's memory (memfd)" if not lacks else f"this system has no {' and no '.join(lacks)}"
    )
    fix = "" if not lacks else "nothing needs it: ranks send messages instead, which is slower. Linux has it"
    yield Finding("shared memory", "warning" if lacks else "ok", text, fix)
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        small = free < 64 * MB
        fix = "docker run --shm-size=1g: torch's DataLoader needs it" if small else ""
        yield Finding("/dev/shm", "warning" if small else "ok", f"{size_text(free)} free; fzero uses none of it", fix)


def limits() -> Iterator[Finding]:
    """The limits of this process: open files, locked memory, and the clock's resolution."""
    try:
        import resource
    except ImportError:
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < LEAST_FILES
    fix = f"ulimit -n {4 * LEAST_FILES}" if few else ""
    yield Finding("open files", "warning" if few else "ok", f"at most {_limit(files)}", fix)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    small = torch.cuda.is_available() and locked != resource.RLIM_INFINITY and locked < 64 * MB
    fix = "ulimit -l unlimited: InfiniBand needs it" if small else ""
    yield Finding("locked memory", "warning" if small else "ok", f"at most {_limit(locked, size_text)}", fix)
    tick = time.get_clock_info("perf_counter").resolution
    yield Finding("clock", "ok" if tick <= 1e-6 else "warning", f"counts {tick * 1e9:g} ns")


def _limit(value: int, show: Callable[[int], str] = "{:,}".format) -> str:
    return "any" if value < 0 or value >= 1 << 62 else show(value)
