"""speed_probes: what is measured here and now: transfers between two processes of this machine and along the axes of a
mesh, and files written and read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from fzero.comm import selftest
from fzero.errors import FzeroError, OffloadError
from fzero.ir.mesh import Mesh
from fzero.tools import disk_speed, placement
from fzero.tools.finding import MB, Finding, size_text

LEAST_FREE_BYTES = 256 * MB
LINK_SECONDS = 120.0  # for all ranks to come and measure


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


def disk(folder: Path, megabytes: int) -> Iterator[Finding]:
    """The disk of `folder`, as checkpoints use it, and its free bytes; writes at most `megabytes`."""
    name = f"disk {folder}"
    free = shutil.disk_usage(folder).free
    size = _tried(free, megabytes)
    if not size:
        yield Finding(
            name, "missing", f"{size_text(free)} free: too little to write anything", "free some, or name --dir", True
        )
        return
    speed = disk_speed.of_checkpoints(folder, size)
    figures = {"write_mb_per_s": speed.write, "read_mb_per_s": speed.read, "free_bytes": float(free)}
    text = (
        f"{size_text(free)} free; {speed.write:,.0f} MB/s written and synced, "
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
