"""A torch that lacks a name that fzero uses is told at the import, with the versions that have it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fzero._torch_compat import NEWEST, OLDEST, tried
from fzero.tools import machine_probes


@pytest.mark.parametrize("name", ["torch._compile._disable_dynamo", "torch.utils._python_dispatch.TorchDispatchMode"])
@pytest.mark.sampled(1)
def test_a_name_that_is_gone(name: str) -> None:
    module, _, gone = name.rpartition(".")
    program = f"import {module}; del {name}; import fzero"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(f"ImportError: torch {torch.__version__} has not all names that fzero uses")
    assert gone in said
    assert said.endswith("pip install 'torch>=2.11,<2.15'")


def test_the_doctor_says_of_a_newer_torch_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
    for version, said in ((newer, f"{newer}: tried were {tried()}"), ("2.14.1+cu130", "2.14.1+cu130")):
        monkeypatch.setattr(machine_probes, "_version", lambda name, version=version: version)
        found = {finding.name: finding for finding in machine_probes.versions()}["torch"]
        assert (found.status, found.text) == ("ok", said)
    assert OLDEST < NEWEST
