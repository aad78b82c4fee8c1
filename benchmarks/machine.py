"""What a record says about where it was made. A fact that cannot be read is left out."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "fzero", "deepspeed", "triton", "numpy")
VARIABLES = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "DS_ACCELERATOR")


def commit() -> str | None:
    """The commit of the working tree, with `+` where tracked files differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "fzero"], cwd=ROOT, check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {"model": platform.processor()}
    fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    wide = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(found.get("flags", "").split())
    named = {k: found[f] for k, f in (("model", "model name"), ("family", "cpu family")) if f in found}
    return {**named, "vector": sorted(wide)}


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The machine, the software, the commit and the date, as JSON holds them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": {**_versions(PACKAGES), "torch": torch.__version__},
        **({"devices": devices, "cuda": torch.version.cuda} if devices else {}),
    }
