"""doctor: tries on this machine each thing that fzero needs, and reports it: `python -m fzero.cli doctor`.

A probe is a function that yields findings; `PROBES` is the list. Each runs in a thread of its own, for a limited number
of seconds. A probe that raises or does not end is a finding too. Figures are measured here and now: transfers between
two processes of this machine, and files written and read in the given directory
(`fzero.tools.disk_speed`). `--mesh` says which axes of
a mesh cross nodes (`fzero.tools.placement`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fzero import progress
from fzero._torch_compat import inductor_lacks
from fzero.comm import selftest
from fzero.errors import FzeroError, OffloadError
from fzero.ir.mesh import Mesh
from fzero.tools import disk_speed, placement

MB = 1 << 20
LEAST_FREE_BYTES = 256 * MB
LEAST_FILES = 1024  # descriptors: gloo and the arenas take some for each rank of a machine


@dataclass(frozen=True)
class Finding:
    """The result of one probe about one thing.

    status: "ok", "warning" or "missing". needed: if true, "missing" makes fzero unusable here. fix: the remedy.
    figures: measured numbers, with units in their names.
    """

    name: str
    status: str
    text: str
    fix: str = ""
    needed: bool = False
    figures: dict[str, float] = field(default_factory=dict)


# --- versions ---------------------------------------------------------------------------------------------------------

# package, least version, the extra of fzero that brings it ("": fzero needs it), what for
PACKAGES = (
    ("torch", (2, 11), "", ""),
    ("optree", (0, 13), "", ""),
    ("numpy", (1, 26), "", ""),
    ("safetensors", (0, 4), "", ""),
    ("transformers", (5, 0), "hf", "Hugging Face models"),
    ("rich", (13,), "examples", "the demo's display"),
    ("matplotlib", (3, 9), "examples", "charts"),
    ("deepspeed", (0, 19), "bench", "comparisons"),
)


def versions() -> Iterator[Finding]:
    """The versions of Python and of the packages that fzero uses."""
    python = sys.version_info[:2]
    right = (3, 11) <= python < (3, 14)
    fix = "" if right else "use Python 3.11, 3.12 or 3.13"
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
            yield Finding(name, "ok", installed, needed=needed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:2])


# --- devices ----------------------------------------------------------------------------------------------------------


def processor() -> Iterator[Finding]:
    """The cores, threads and memory of this machine."""
    usable, all_cores = len(_affinity()), os.cpu_count() or 1
    pinned = f", of {all_cores}: this process is pinned to {_spans(_affinity())}" if usable < all_cores else ""
    threads = torch.get_num_threads()
    status, fix = "ok", ""
    if threads > usable:
        status, fix = "warning", f"OMP_NUM_THREADS={usable}: more threads than cores slow each other down"
    yield Finding("processor", status, f"{usable} cores{pinned}; torch uses {threads} threads", fix)
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    memory = {name: int(size) << 10 for name, size in re.findall(r"(MemTotal|MemAvailable):\s+(\d+) kB", meminfo)}
    if memory:
        limit = _cgroup_limit()
        bound = f"; this container may use {_size(limit)}" if limit is not None and limit < memory["MemTotal"] else ""
        text = f"{_size(memory['MemTotal'])}, {_size(memory['MemAvailable'])} available{bound}"
        yield Finding("memory", "ok", text, figures={f"{name}_bytes": float(size) for name, size in memory.items()})


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
        text = f"{it.name}, {_size(free)} of {_size(total)} free, capability {it.major}.{it.minor}"
        old = it.major < 7
        fix = "Triton needs capability 7.0 or newer" if old else ""
        yield Finding(f"cuda:{index}", "warning" if old else "ok", text, fix)


# --- backends ---------------------------------------------------------------------------------------------------------


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
        text = (
            f"{triton}, not tried: there is no CUDA device" if triton else "not installed, and no CUDA device to use it"
        )
        yield Finding("triton", "ok" if triton else "warning", text, "" if triton else "pip install 'triton>=3.6'")
        return
    lack = inductor_lacks("cuda")
    yield Finding(
        "triton", "missing" if lack else "ok", lack or str(triton), "pip install 'triton>=3.6'" if lack else "", True
    )


# --- how ranks of this machine meet -----------------------------------------------------------------------------------


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
        yield Finding("/dev/shm", "warning" if small else "ok", f"{_size(free)} free; fzero uses none of it", fix)


def transfers() -> Iterator[Finding]:
    """Two ranks: an all-gather and a reduce-scatter each way, with the bits that they must have."""
    try:
        results = selftest.run()
    except selftest.LoopbackError as error:
        fix = "set GLOO_SOCKET_IFNAME (as to lo), and see that a firewall lets this machine talk to itself"
        yield Finding("loopback", "missing", str(error), fix, True)
        return
    for name, result in results.items():
        figures = {f"{kind}_mb_per_s": speed for kind, speed in result.mb_per_s.items()}
        if result.lack:
            yield Finding(f"loopback {name}", "warning", result.lack, "nothing needs it: messages are slower")
            continue
        speeds = ", ".join(f"{speed:,.0f} MB/s {kind}" for kind, speed in result.mb_per_s.items())
        status = "ok" if result.right else "missing"
        yield Finding(
            f"loopback {name}", status, speeds + ("" if result.right else ", with wrong bits"), "", True, figures
        )


# --- axes of a mesh ---------------------------------------------------------------------------------------------------

LINK_SECONDS = 120.0  # for all ranks to come and measure


def links(text: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Each axis of the mesh in `text`: inside a node or across nodes, and its GB/s if torchrun started the ranks."""
    try:
        mesh = placement.mesh_here(text, environ)
        nodes = placement.nodes_of(mesh.world_size, environ)
    except FzeroError as error:
        yield Finding("mesh", "missing", str(error), needed=True)
        return
    speeds, lack = _speeds(mesh, environ)
    if lack:
        yield Finding("mesh links", "warning", lack, "see that all ranks run, and that nodes reach one another")
    fix = placement.fix(mesh, nodes)
    places = placement.places(mesh, nodes)
    for place in places:
        wrong = bool(fix) and place is places[-1]
        status = "warning" if wrong else "ok"
        figures = {"gb_per_s": speeds[place.axis]} if place.axis in speeds else {}
        yield Finding(
            f"mesh {place.axis}", status, _placed(place, nodes, speeds), fix if wrong else "", figures=figures
        )
    slow = [place.axis for place in places if place.crossing]
    if slow and not fix:
        inside = f"; {places[-1].axis} stays inside a node" if places[-1].axis not in slow else ""
        yield Finding("slow link", "ok", f"{' and '.join(slow)} crosses nodes{inside}")


def _speeds(mesh: Mesh, environ: Mapping[str, str]) -> tuple[dict[str, float], str]:
    """GB/s by axis, and the reason why there are none although torchrun started the ranks."""
    started = "RANK" in environ and "MASTER_ADDR" in environ and mesh.world_size > 1
    if not started or not dist.is_available():
        return {}, ""
    try:
        return selftest.along_axes(mesh, LINK_SECONDS), ""
    except (FzeroError, RuntimeError) as error:
        return {}, f"not measured: {error}".partition("\n")[0]


def _placed(place: placement.AxisPlace, nodes: Sequence[int], speeds: Mapping[str, float]) -> str:
    """
    >>> _placed(placement.AxisPlace("pp", 2, 2, 2, (0, 2)), [0, 0, 1, 1], {"pp": 0.117})
    'across nodes: ranks 0, 2 are on nodes 0, 1; 0.117 GB/s by messages'
    """
    ranks = ", ".join(map(str, place.example))
    on = list(dict.fromkeys(nodes[rank] for rank in place.example))
    where = f"ranks {ranks} are on node{'s' if place.crossing else ''} {', '.join(map(str, on))}"
    part = f" in {place.crossing} of {place.lines} groups" if 0 < place.crossing < place.lines else ""
    speed = f"; {speeds[place.axis]:.3g} GB/s by messages" if place.axis in speeds else ""
    return f"{'across nodes' if place.crossing else 'inside a node'}{part}: {where}{speed}"


# --- disk and limits --------------------------------------------------------------------------------------------------


def disk(folder: Path, megabytes: int) -> Iterator[Finding]:
    """The disk of `folder`, as checkpoints use it, and its free bytes; writes at most `megabytes`."""
    name = f"disk {folder}"
    free = shutil.disk_usage(folder).free
    size = _tried(free, megabytes)
    if not size:
        yield Finding(
            name, "missing", f"{_size(free)} free: too little to write anything", "free some, or name --dir", True
        )
        return
    speed = disk_speed.of_checkpoints(folder, size)
    figures = {"write_mb_per_s": speed.write, "read_mb_per_s": speed.read, "free_bytes": float(free)}
    text = (
        f"{_size(free)} free; {speed.write:,.0f} MB/s written and synced, "
        f"{speed.read:,.0f} MB/s read {'' if speed.cold else 'from memory '}({size // MB} MB)"
    )
    if not speed.right:
        yield Finding(name, "missing", f"{text}, and not what was written", "name another --dir", True, figures)
    elif free < LEAST_FREE_BYTES:
        yield Finding(name, "warning", text, "free some, or name another --dir", figures=figures)
    else:
        yield Finding(name, "ok", text, figures=figures)


def offload(folder: Path, megabytes: int) -> Iterator[Finding]:
    """The disk of `folder`, as `Spec(nvme_path=)` uses it: direct I/O, its alignment, and rates."""
    name = f"offload {folder}"
    size = _tried(shutil.disk_usage(folder).free, megabytes)
    try:
        if not size:
            raise OffloadError(folder, "too little is free to write anything")
        speed = disk_speed.of_offload(folder, size)
    except FzeroError as error:
        fix = "only offload to nvme needs it: name a folder on a disk with --dir to try that one"
        yield Finding(name, "warning", getattr(error, "text", str(error)), fix)
        return
    figures = {
        "write_mb_per_s": speed.write, "read_mb_per_s": speed.read, "mixed_mb_per_s": speed.mixed,
        "direct": float(bool(speed.direct)), "memory_alignment_bytes": float(speed.direct.memory),
        "offset_alignment_bytes": float(speed.direct.offset),
    }  # fmt: skip
    how = f"direct I/O (memory at {speed.direct.memory:,}, ranges at {speed.direct.offset:,} bytes)"
    rates = f"{speed.write:,.0f} MB/s written, {speed.read:,.0f} read, {speed.mixed:,.0f} of both at a time"
    text = f"{how if speed.direct else 'no direct I/O: through the page cache'}; {rates} ({size // MB} MB)"
    fix = "" if speed.direct else "name a folder with --dir on a file system with direct I/O, as ext4 or xfs"
    yield Finding(name, "ok" if speed.direct else "warning", text, fix, figures=figures)


def _tried(free: int, megabytes: int) -> int:
    """The bytes that a measurement writes: a tenth of what is free, at most."""
    return min(megabytes * MB, free // 10) // MB * MB


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
    yield Finding("locked memory", "warning" if small else "ok", f"at most {_limit(locked, _size)}", fix)
    tick = time.get_clock_info("perf_counter").resolution
    yield Finding("clock", "ok" if tick <= 1e-6 else "warning", f"counts {tick * 1e9:g} ns")


def _limit(value: int, show: Callable[[int], str] = "{:,}".format) -> str:
    return "any" if value < 0 or value >= 1 << 62 else show(value)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MB:.1f} MiB"


# --- all of them ------------------------------------------------------------------------------------------------------

Probe = Callable[[], Iterator[Finding]]


def probes(folder: Path, megabytes: int, mesh: str = "") -> list[tuple[str, float, Probe]]:
    """(name, seconds that it may take, probe). The axes of a mesh come first: other ranks wait there."""
    first = [("mesh links", LINK_SECONDS + 10, partial(links, mesh, os.environ))] if mesh else []
    return [
        *first,
        ("versions", 10, versions),
        ("processor", 10, processor),
        ("cuda", 60, cuda),
        ("backends", 10, backends),
        ("compilers", 60, compilers),
        ("host name", 10, names),
        ("shared memory", 10, shared_memory),
        ("loopback", selftest.SECONDS + 10, transfers),
        (f"disk {folder}", 60, partial(disk, folder, megabytes)),
        (f"offload {folder}", 60, partial(offload, folder, megabytes)),
        ("limits", 10, limits),
    ]


def guarded(name: str, seconds: float, probe: Probe) -> list[Finding]:
    """Returns the findings of a probe; if it raised or did not end, a finding that reports this."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            for finding in probe():
                findings.append(finding)
        except Exception as error:
            findings.append(
                Finding(name, "missing", f"{type(error).__name__}: {error}".partition("\n")[0], needed=True)
            )

    thread = threading.Thread(target=work, name=f"fzero doctor: {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    late = [Finding(name, "missing", f"no answer within {seconds:g} s", needed=True)] if thread.is_alive() else []
    return [*findings, *late]


def line(finding: Finding) -> str:
    """
    >>> print(line(Finding("rich", "missing", "not installed", "pip install rich")))
    missing  rich                 not installed
                                  -> pip install rich
    """
    text = f"{finding.status:8} {finding.name:20} {finding.text}"
    return f"{text}\n{'':29} -> {finding.fix}" if finding.fix else text


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether all that fzero needs works."""
    return not any(finding.needed and finding.status == "missing" for finding in findings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero doctor`."""
    parser.add_argument("--dir", type=Path, default=Path(), help="whose disk is tried (default: this directory)")
    parser.add_argument("--disk-mb", type=int, default=64, help="how much is written there, at most (default: 64)")
    parser.add_argument("--mesh", default="", help="axes as in pp=2,dp=4: which of them cross nodes, under torchrun")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def command(arguments: argparse.Namespace) -> int:
    """Prints the findings. Returns exit status 0 if all that fzero needs works, else 1. With `--mesh` ranks of
    torchrun other than 0 take part in the measurement and print nothing."""
    findings: list[Finding] = []
    tried = probes(arguments.dir.resolve(), max(arguments.disk_mb, 1), arguments.mesh)
    if arguments.mesh and os.environ.get("RANK", "0") != "0":
        guarded(*tried[0])
        return 0
    for name, seconds, probe in tried:
        with progress.shown(f"trying {name}"):
            new = guarded(name, seconds, probe)
        findings += new
        if not arguments.json:
            print("\n".join(map(line, new)), flush=True)
    right = healthy(findings)
    if arguments.json:
        print(json.dumps({"ok": right, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        wrong = [finding.name for finding in findings if finding.needed and finding.status == "missing"]
        print("\nfzero can run here" if right else f"\nfzero cannot run here as it should: {', '.join(wrong)}")
    return 0 if right else 1
