"""One record says what a kind of device is like: nothing else compares kinds, and another record changes what runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_bits

import fzero
from fzero import backend, tree
from fzero.compile.lowered import Lowered
from fzero.cost.allocator import measured_peak
from fzero.ir.program import Program, route
from fzero.ir.records import DEVICE, DISK, HOST

ROOT = Path(__file__).parents[2]
MAY = {
    "backend.py": "the records",
    "runtime/stream_lanes.py": "the streams of moves",
    "runtime/cuda_graphs.py": "the recorded step",
    "state/host_memory.py": "page-locked memory",
    "profile/record.py": "events on the computing stream",
    "comm/group.py": "which of torch's process groups is which",
    "comm/transport.py": "which of them is NCCL",
    "tools/machine_probes.py": "says what this machine has",
    "_torch_compat/compute.py": "what Inductor lacks",
}


@contextmanager
def instead(record: backend.Backend) -> Iterator[None]:
    """Uses a record in the place of the one of its name, or as one more, while the context lasts."""
    before = backend.BACKENDS.get(record.name)
    backend.BACKENDS[record.name] = record
    try:
        yield
    finally:
        if before is None:
            del backend.BACKENDS[record.name]
        else:
            backend.BACKENDS[record.name] = before


def compares_kinds(node: ast.AST) -> bool:
    """Whether a node names something of torch.cuda, asks `is_cuda`, or compares a device's type or a transport."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node).startswith("torch.cuda.")
    if isinstance(node, ast.Compare):
        said = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
        of_type = any(isinstance(x, ast.Attribute) and x.attr == "type" for x in ast.walk(node))
        return bool(said & {"cuda", "nccl"}) or (of_type and bool(said & {"cpu", "meta"}))
    return False


def where(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(map(compares_kinds, ast.walk(ast.parse(path.read_text()))))
    }


def test_few_files_know_what_cuda_is() -> None:
    assert where(ROOT / "fzero") == MAY.keys()


@pytest.mark.parametrize(
    "text",
    [
        'x = 3 if program.transport == "nccl" else 1',
        'if tensor.device.type != "cpu":\n    pass',
        "y = x.is_cuda",
        "torch.cuda.synchronize()",
    ],
)
def test_the_law_sees_a_comparison(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.py").write_text(text)
    assert where(tmp_path) == {"one.py"}


# --- a kind of device that nobody has heard of: it computes as the processor does -------------------------------------


class Counting(backend.HostCalls):
    """An allocator that counts, and a device with a name."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def synchronize(self, device: torch.device) -> None:
        self.said.append("synchronize")

    def watch(self, device: torch.device) -> int:
        self.said.append("watch")
        return 100

    def peak(self, device: torch.device) -> int | None:
        return 700

    def describe(self, device: torch.device) -> str:
        return "an abacus"


def drawn() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(8, 8, generator=draw) for _ in range(6)]


def squared(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().mean()


def made(**given: Any) -> tuple[Lowered, list[torch.Tensor]]:
    """The step of a state whose optimizer's part is on the host, and the leaves after two steps."""
    options = {"offload": {"optimizer": "cpu"}, "update_on": "device", "bucket_bytes": 512, **given}
    spec = fzero.Spec(loss=squared, optimizer=fzero.optim.adamw(0.1), **options)
    x = torch.linspace(-1, 1, 32).view(4, 8)
    state = fzero.init(drawn(), spec)
    for _ in range(2):
        state = fzero.step(state, x)
    return fzero.lower(spec, drawn(), x, world_size=1), tree.flatten(fzero.unshard(state.tree))[1]


def test_a_record_in_the_place_of_the_cpus_decides() -> None:
    """How far ahead a fetch starts, whether a disk is reached through the host, whether a step is one graph; no bit."""
    calls = Counting()
    abacus = replace(backend.CPU, calls=calls, fetch_ahead=3, disk_by_host=True)
    plain, without = made()
    with instead(abacus):
        other, leaves = made()
        assert route(other.program, DEVICE, DISK) == (HOST, DISK)
        assert measured_peak(lambda: 1) == (1, 600)
        assert calls.said[-3:] == ["synchronize", "watch", "synchronize"]
    with instead(replace(backend.CPU, records_graphs=True)):
        spec = fzero.Spec(loss=squared, optimizer=fzero.optim.sgd(0.1))
        whole = fzero.lower(spec, drawn(), torch.ones(4, 8), world_size=1)
    assert route(plain.program, DEVICE, DISK) == (DISK,)
    assert "cuda_graph" not in plain.choices
    assert whole.choices["cuda_graph"] == "the step is one graph"
    assert early(plain.program) < early(other.program)
    assert len(leaves) == len(without)
    assert all(map(same_bits, leaves, without))


def early(program: Program) -> int:
    """The most fetches from the host that have started before the run that reads the first of them."""
    started, most = list[str](), 0
    for op in program.ops:
        if op.moves and program.buffers[op.reads[0].name].space == HOST:
            started.append(op.target)
        elif op.computes:
            most = max(most, len(started))
            started = [name for name in started if name not in {ref.name for ref in op.reads}]
    return most


def test_an_unknown_device_is_nobodys() -> None:
    assert not backend.of("meta").on_host
    assert backend.of_transport("shared") is backend.CPU
    assert backend.of_transport("nccl") is backend.CUDA
    with instead(replace(backend.CPU, name="abacus", transports=("beads",))):
        assert backend.of_transport("beads").name == "abacus"
    assert backend.of_transport("beads") is backend.CPU
