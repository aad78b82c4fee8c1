"""A file system that becomes read-only during a run: steps go on, saves say so, and go on when it is mended."""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, same_bits, values

import fzero

NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _remounted(folder: str) -> dict[str, Any] | str:
    """What a run says whose folder of checkpoints and logs cannot be written to for a while; a reason where this
    process may not mount."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        return os.strerror(ctypes.get_errno())
    try:
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "none", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    run = Path(folder) / "run"
    spec = fzero.Spec(loss=lambda p, batch: (batch @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(1e-2))
    state = fzero.step(fzero.init({"w": torch.eye(4)}, spec), torch.ones(2, 4))
    fzero.save(state, run)
    _mount("-o", "remount,ro", folder)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said, fzero.Log(f"{folder}/log.jsonl", every=1, show=False) as log:
        warnings.simplefilter("always")
        state = fzero.step(state, torch.ones(2, 4))
        log(state)
    found["log"] = [str(warning.message) for warning in said]
    for name in ("run", "another"):
        try:
            fzero.save(state, Path(folder) / name)
        except fzero.CheckpointError as error:
            found[name] = str(error)
    found["read"] = fzero.load(run, spec, like={"w": torch.empty(4, 4)}).step
    state = fzero.step(state, torch.ones(2, 4))
    _mount("-o", "remount,rw", folder)
    fzero.save(state, run)
    back = fzero.load(run, spec, like={"w": torch.empty(4, 4)})
    return found | {"steps": back.step, "same": same_bits(back.params["w"].full(), state.params["w"].full())}


def test_a_remount_in_the_midst_of_a_run(tmp_path: Path) -> None:
    found = values(gloo(1, _remounted, str(tmp_path), timeout=120))[0]
    if isinstance(found, str):
        pytest.skip(f"no file system can be mounted here: {found}")
    for name in ("run", "another"):
        assert "the file system is read-only: save to another directory, or mount it writable" in found[name]
    assert [text for text in found["log"] if "cannot be written" in text and "Training goes on" in text]
    assert (found["read"], found["steps"], found["same"]) == (1, 3, True)
