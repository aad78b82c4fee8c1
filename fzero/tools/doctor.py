"""doctor: tries on this machine each thing that fzero needs, and reports it: `python -m fzero.cli doctor`.

A probe is a function that yields findings; `probes` is the list. Each runs in a thread of its own, for a limited number
of seconds. A probe that raises or does not end is a finding too. `--mesh` says which axes of a mesh cross nodes
(`fzero.tools.placement`).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fzero import progress
from fzero.comm import selftest
from fzero.errors import SpecError
from fzero.hardware import to_toml
from fzero.tools import machine_probes, speed_probes
from fzero.tools.finding import MB, Finding, healthy, line
from fzero.tools.measured_machine import measured_machine

Probe = Callable[[], Iterator[Finding]]


def probes(folder: Path, megabytes: int, mesh: str = "") -> list[tuple[str, float, Probe]]:
    """(name, seconds that it may take, probe). The axes of a mesh come first: other ranks wait there."""
    seconds = speed_probes.LINK_SECONDS + 10
    first = [("mesh links", seconds, partial(speed_probes.links, mesh, os.environ))] if mesh else []
    return [
        *first,
        ("versions", 10, machine_probes.versions),
        ("processor", 10, machine_probes.processor),
        ("cuda", 60, machine_probes.cuda),
        ("backends", 10, machine_probes.backends),
        ("compilers", 60, machine_probes.compilers),
        ("host name", 10, machine_probes.names),
        ("shared memory", 10, machine_probes.shared_memory),
        ("loopback", selftest.SECONDS + 10, speed_probes.transfers),
        (f"disk {folder}", 60, partial(speed_probes.disk, folder, megabytes)),
        (f"offload {folder}", 60, partial(speed_probes.offload, folder, megabytes)),
        ("limits", 10, machine_probes.limits),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero doctor`."""
    parser.add_argument("--dir", type=Path, default=Path(), help="whose disk is tried (default: this directory)")
    parser.add_argument("--disk-mb", type=int, default=64, help="how much is written there, at most (default: 64)")
    parser.add_argument("--mesh", default="", help="axes as in pp=2,dp=4: which of them cross nodes, under torchrun")
    parser.add_argument("--hardware", type=Path, help="measure this machine into a file for fzero.plan and simulate")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def command(arguments: argparse.Namespace) -> int:
    """Prints the findings. Returns exit status 0 if all that fzero needs works, else 1. With `--mesh` ranks of
    torchrun other than 0 take part in the measurement and print nothing."""
    if arguments.hardware is not None:
        if not arguments.hardware.absolute().parent.is_dir():
            raise SpecError(f"--hardware {arguments.hardware}: there is no folder {arguments.hardware.parent}")
        text = to_toml(measured_machine(arguments.dir.resolve(), max(arguments.disk_mb, 1) * MB))
        arguments.hardware.write_text(text, encoding="utf-8")
        print(text, end="")
        return 0
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
