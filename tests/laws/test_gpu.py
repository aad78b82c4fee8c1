"""What needs a CUDA device (`make test-gpu`): a step there agrees with the CPU's; several devices agree with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

import fzero
from fzero.cost.allocator import measured_peak

pytestmark = pytest.mark.gpu
WORKERS = Path(__file__).parents[1] / "support" / "workers"
ENV = {**os.environ, "FZERO_TEST_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join([str(WORKERS.parent), *sys.path])}


def trained(device: str, steps: int = 5, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters after some steps of a two-layer GPT."""
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    spec = fzero.Spec(
        **{"loss": loss, "optimizer": fzero.optim.adamw(1e-3), "clip_norm": 1.0, "device": device, **options}
    )
    params = init(fzero.random.key(0))
    state = fzero.init(params, spec)
    losses = []
    for step in range(steps):
        batch = fzero.tree.map(lambda x: x.to(device), cases.tokens(4, 64, 256, step))
        state = fzero.step(state, batch)
        losses.append(float(state.metrics["loss"]))
    full = fzero.unshard(state.params)
    return losses, {path: x.cpu() for path, x in zip(*fzero.tree.flatten(full)[:2], strict=True)}


def total(x: torch.Tensor) -> float:
    return float(x.double().sum())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_cuda_step_agrees_with_the_cpu(microbatches: int) -> None:
    cpu, cuda = (trained(device, microbatches=microbatches) for device in ("cpu", "cuda"))
    assert cuda[0] == pytest.approx(cpu[0], rel=1e-4)
    gap = sum(float((cpu[1][p] - cuda[1][p]).double().square().sum()) for p in cpu[1])
    norm = sum(float(x.double().square().sum()) for x in cpu[1].values())
    assert (gap / norm) ** 0.5 < 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_stages_have_the_same_bits(precision: str) -> None:
    """Without cuDNN's attention, whose backward does not repeat its own."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        first, *others = (trained("cuda", zero=zero, precision=precision) for zero in range(4))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    for losses, params in others:
        assert losses == first[0]
        assert all(torch.equal(params[path], value) for path, value in first[1].items())


def test_processes_that_compile_for_themselves_have_the_same_bits(tmp_path: Path) -> None:
    """How rows are summed is not timed: each rank runs its kernels for the first time by itself."""
    script = "import test_gpu as t; losses, params = t.trained('cuda'); print(losses, *map(t.total, params.values()))"
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), ENV["PYTHONPATH"]])}
    alone = [{**env, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number))} for number in range(3)]
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=e) for e in alone]
    said = [run.communicate(timeout=300)[0] for run in runs]
    assert said[0]
    assert said == said[:1] * 3


def test_a_cuda_step_repeats_bitwise() -> None:
    first, second = trained("cuda"), trained("cuda")
    assert first[0] == second[0]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "microbatches": 2}, {"precision": "bf16"}])
def test_one_cuda_graph_has_the_bits_of_single_launches(options: dict[str, Any]) -> None:
    graph, single = (trained("cuda", **{"clip_norm": None, **options, "cuda_graph": how}) for how in (True, False))
    assert graph[0] == single[0]
    assert all(torch.equal(graph[1][path], single[1][path]) for path in single[1])


def test_the_steps_after_the_first_are_one_graph() -> None:
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda"))
    batch = fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 64, 256))
    for _ in range(3):
        state = fzero.step(state, batch)
    bound = next(iter(state.runtime.bound.values()))
    assert bound.recording is not None
    assert bound.recordable


HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer": {"offload": "optimizer", "update_on": "device"},
    "optimizer+params": {"offload": "optimizer+params", "update_on": "device"},
    "updates on the host": {"offload": "optimizer+params", "update_on": "cpu"},
}


@pytest.mark.parametrize("homes", HOMES)
def test_the_planned_peak_holds_on_cuda(homes: str) -> None:
    init, loss = cases.gpt(vocab=4096, width=256, depth=4)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda", cuda_graph=False, **HOMES[homes])
    state = fzero.init(init, spec)
    batch = fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 256, 4096))
    state = fzero.step(state, batch)
    state.runtime.bound.clear()
    state.runtime.arena = state.runtime.arena.new_empty(0)  # so that the arena is allocated where it is measured
    on_device = [t for t in [*state.runtime.memory.values(), *batch.values()] if t.is_cuda]
    held = sum(t.numel() * t.element_size() for t in on_device)
    planned = state.runtime.compiled(batch).memory.spaces["device"]
    _, extra = measured_peak(lambda: fzero.step(state, batch), "cuda")
    assert abs(planned - held - extra) <= 0.05 * (held + extra)


@pytest.mark.parametrize("homes", [name for name in HOMES if name != "device"])
def test_offloaded_state_trains_as_state_on_the_device(homes: str) -> None:
    plain, moved = trained("cuda"), trained("cuda", **HOMES[homes])
    assert moved[0] == pytest.approx(plain[0], rel=1e-4)
    if HOMES[homes]["update_on"] == "device":
        assert all(torch.equal(plain[1][path], moved[1][path]) for path in plain[1])


def test_what_the_stand_in_runs_runs_here() -> None:
    done = subprocess.run(
        [sys.executable, str(WORKERS / "on_standin.py")], capture_output=True, text=True, env=ENV, check=False
    )
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"failed"')))
    assert found["failed"] == {}
    assert len(found["seconds"]) >= 10


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16_params"},
        {"remat": "full", "microbatches": 2},
        {"nonfinite": "skip", "clip_value": 0.01, "clip_norm": None},
        {"optimizer": fzero.optim.adamw8bit(1e-3)},
        {"optimizer": fzero.optim.lion(1e-4)},
        {"optimizer": fzero.optim.sgd(0.1, momentum=0.9)},
        {"compile": "auto"},
        {"compile": "inductor", "precision": "bf16"},
        {"zero": 0},
    ],
    ids=lambda options: "-".join(f"{k}={v if isinstance(v, (str, int)) else ''}" for k, v in options.items()),
)
def test_options_agree_with_the_cpu(options: dict[str, Any]) -> None:
    cpu, cuda = (
        trained(device, **(options if device == "cuda" else {**options, "compile": "none"}))
        for device in ("cpu", "cuda")
    )
    low = "precision" in options
    assert cuda[0] == pytest.approx(cpu[0], rel=2e-2 if low else 1e-3)


def test_a_run_resumes_with_its_bits(tmp_path: Path) -> None:
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda", precision="bf16")
    batches = [fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 64, 256, n)) for n in range(6)]
    state = fzero.init(init, spec)
    for batch in batches[:3]:
        state = fzero.step(state, batch)
    path = fzero.save(state, tmp_path / "run")
    for batch in batches[3:]:
        state = fzero.step(state, batch)
    again = fzero.load(path, like=fzero.init(init, spec))
    for batch in batches[3:]:
        again = fzero.step(again, batch)
    pairs = zip(*(fzero.tree.flatten(fzero.unshard(s.params))[1] for s in (state, again)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_batch_on_the_host_is_told_where_to_go() -> None:
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda"))
    with pytest.raises(fzero.FzeroError, match="cuda"):
        fzero.step(state, cases.tokens(4, 64, 256))
    fzero.step(state, fzero.tree.map(lambda x: x.cuda(), cases.tokens(4, 64, 256)))


NCCL = """
import torch, torch.distributed as dist
from fzero.comm import heartbeat, transfers
from fzero.comm.group import Line
from fzero.ir.op import Op
from fzero.ir.records import Ref
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
comm = transfers.Nccl(Line(), heartbeat.ALONE)
source, dest = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
ops = [Op("all_gather", (Ref("a"),), (Ref("b"),), axis="dp")]
for kind in ("all_reduce", "reduce_scatter"):
    for op, divisor in (("sum", 2), ("max", 1)):
        attrs = (("divisor", divisor), ("op", op))
        ops.append(Op(kind, (Ref("a"),), (Ref("b"),), axis="dp", attrs=attrs))
def once(one):
    comm.start("b", one, [source, dest]); comm.wait("b")
for one in ops:
    dest.zero_(); once(one)
    wanted = source / one.divisor
    assert torch.equal(dest, wanted), (one, dest)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        once(one)
    dest.zero_(); graph.replay(); torch.cuda.synchronize()
    assert torch.equal(dest, wanted), ("graph", one, dest)
print("fine")
dist.destroy_process_group()
"""


def test_nccls_collectives_of_one_rank_run_and_record() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NCCL], capture_output=True, text=True, timeout=240, env=ENV, check=False
    )
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr[-3000:]


def test_random_losses_have_eagers_numbers_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.fuzz", "--device", "cuda", "--count", "48", "--seed", "2"]
    env = {**ENV, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FZERO_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices_over_nccl_agree_with_each_stage(zero: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(WORKERS / "nccl.py"), str(zero)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENV, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert row["gap"] < 1e-3, row


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_pipeline_over_nccl_agrees_with_the_interpreter() -> None:
    """Two roles on two devices, with a communicator for each direction, as one CUDA graph."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(WORKERS / "on_standin.py"), "a_pipeline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENV, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"failed"')]
    assert [row["failed"] for row in rows] == [{}, {}], done.stderr[-3000:]
