# ruff: noqa: E402
"""fzero on a stand-in for CUDA (`standin`): run by test_cuda.py as one process, and as two ranks. With
FZERO_TEST_DEVICE=cuda it is no stand-in but the device that is there (test_gpu.py).

Each scenario is a function; the last line of the output is JSON: what failed, and which of CUDA's lines each ran.
"""

from __future__ import annotations

import os
import signal

import standin
from standin import lines

lines.Watch().install()
STANDIN = os.environ.get("FZERO_TEST_DEVICE") != "cuda"
if STANDIN:
    os.environ["TRITON_INTERPRET"] = "1"
    standin.install()

import fzero
from fzero._torch_compat import FakeTensorMode

if "RANK" not in os.environ and os.environ.get("WORLD_SIZE") == "2":  # torch is imported once for both
    FakeTensorMode()  # as is torch._dynamo
    standin.other = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if standin.other else "1"
    signal.alarm(600)  # whoever reads waits for both

import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from sparse_calls import drawn, masked
from standin import device, nccl, order
from standin.running import (
    BF16,
    F16,
    F32,
    HERE,
    RANK,
    WORLD,
    batch_of,
    bound_of,
    data,
    fails,
    init,
    logged,
    loss,
    main,
    near,
    scenario,
    started,
    trained,
)
from torch.utils.checkpoint import checkpoint

from fzero import backend, optim
from fzero._torch_compat import is_fake
from fzero.codegen import bind, handed, own_kernels
from fzero.comm import heartbeat, transfers
from fzero.comm.group import Line
from fzero.cost.allocator import measured_peak
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref
from fzero.kernels import (
    adam8_kernel,
    adamw,
    block_sparse,
    cast,
    codec_kernels,
    codecs,
    flat_norms,
    hyper,
    philox,
    row_sums,
    softmax_loss,
)
from fzero.kernels import round as rounding
from fzero.kernels.codecs import CODECS
from fzero.optim import _adam8
from fzero.random import _draw_ops
from fzero.runtime import compile_segments, cuda_graphs, stream_lanes
from fzero.runtime.executor import Executor
from fzero.runtime.interpreter import interpret
from fzero.session.session import session_of
from fzero.state import storage
from fzero.state.host_memory import host_memory
from fzero.tools import machine_probes

if STANDIN:  # Inductor's code does not run there
    backend.BACKENDS["cuda"] = replace(backend.CUDA, compiles="none")

# --- one process ------------------------------------------------------------------------------------------------------


@scenario(1)
def training_agrees_with_the_cpu() -> None:
    options = {"clip_norm": 1.0, "nonfinite": "skip"}
    graph, cpu = trained("cuda", **options), trained("cpu", **options)
    near(graph, cpu)
    assert bound_of(graph[2]).recording is not None
    assert not STANDIN or any("replay" in line for line in device.LOG)
    single = trained(cuda_graph=False, **options)
    assert single[0] == graph[0]
    assert all(map(torch.equal, single[1], graph[1]))


@scenario(1)
def a_transformer() -> None:
    make, its_loss = cases.gpt(vocab=8, width=4, depth=1)
    params = make(fzero.random.key(0))
    losses: dict[str, list[float]] = {"cpu": [], HERE: []}
    for where, found in losses.items():
        state = fzero.init(params, fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=where))
        for step in range(3):
            state = fzero.step(state, fzero.tree.map(lambda x, w=where: x.to(w), cases.tokens(2, 4, 8, step)))
            found.append(float(state.metrics["loss"]))
    assert bound_of(state).recording is not None
    assert all(abs(a - b) < 1e-4 for a, b in zip(*losses.values(), strict=True)), losses


LAYERS = 1 if STANDIN else 2  # on the stand-in each costs seconds


@scenario(1)
def recurrent_layers() -> None:
    from fzero.interop import from_module

    found = []
    for where in ("cpu", HERE):
        params, buffers, apply = from_module(torch.nn.LSTM(3, 2, LAYERS, bidirectional=True))
        params = {name: torch.linspace(-1, 1, value.numel()).view(value.shape) for name, value in params.items()}
        x = torch.linspace(0, 1, 24).view(4, 2, 3)[: 2 * LAYERS].to(where)
        its_loss = lambda p, b, f=apply, s=buffers: f(p, s, b)[0].square().mean()  # noqa: E731
        state = fzero.init(params, fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=where))
        state = fzero.step(fzero.step(state, x), x)
        found.append([x.cpu() for x in fzero.tree.flatten(fzero.unshard(state.params))[1]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@scenario(1)
def norms_of_two_dtypes() -> None:
    def normed(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x @ p["w"], (4,), p["norm"]).square().sum()

    spec = fzero.Spec(
        loss=normed, optimizer=optim.sgd(0.1), device=HERE,
        precision=fzero.Precision(compute="bf16", keep={"norm": "fp32"}),
    )  # fmt: skip
    state = fzero.init({"w": torch.eye(4), "norm": torch.ones(4)}, spec)
    with pytest.raises(fzero.CaptureError, match=r"is given bf16.* and f32.*: on cuda this norm needs one dtype"):
        fzero.step(state, torch.ones(2, 4, device=HERE))


@scenario(1)
def low_precision_and_microbatches() -> None:
    for options in (
        {"precision": "bf16", "microbatches": 2},
        {"precision": fzero.Precision(compute="bf16", params="bf16")},
        {"optimizer": optim.adamw8bit(1e-2)},
    ):
        near(trained(**options), trained("cpu", **options), 3e-2, 3e-2)


@scenario(1)
def copies_that_the_kernel_writes() -> None:
    """AdamW's kernel writes the bf16 copies, in the graph too; the numbers are the CPU's, whose casts are ops."""
    options = {"precision": "bf16", "optimizer": optim.adamw(1e-2)}
    found, cpu = trained(steps=4, **options), trained("cpu", steps=4, **options)
    near(found, cpu, 3e-2, 3e-2)
    bound, kept = bound_of(found[2]), session_of(found[2]).copies
    assert bound.recording is not None
    assert kept.tensors
    for (master, dtype), copy in kept.tensors.items():
        assert torch.equal(copy, kept.masters[master].to(dtype)), master
    calls = [call for op in bound.calls for call in op if isinstance(call, partial)]
    assert len([call for call in calls if "copy" in call.keywords]) == len(bound.program.copies)


@scenario(1)
def evaluating_profiling_and_saving() -> None:
    state = trained(steps=2)[2]
    cpu = trained("cpu", steps=2)[2]
    fn = lambda params, b: {"loss": loss(params, b)}  # noqa: E731
    a, b = (fzero.evaluate(s, batch_of(w, 9), fn) for s, w in ((state, HERE), (cpu, "cpu")))
    torch.testing.assert_close(a["loss"].cpu(), b["loss"], rtol=1e-4, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        state = fzero.profile(state, batch_of(HERE, 2), folder)
        found = json.loads((Path(folder) / "rank0.json").read_text())
    assert found["machine"].startswith("stand-in" if STANDIN else torch.cuda.get_device_name())
    assert found["measured_peak_bytes"] > 0
    assert all(one["duration_us"] >= 0 for one in found["ops"])
    saved_and_loaded(state)


@scenario(1)
def a_record_of_a_run() -> None:
    state = trained(steps=2)[2]
    with fzero.Log(every=1, flops=1e9, show=False) as log:
        log(state)
        record = log(fzero.step(state, batch_of(HERE, 2)))
    assert record is not None
    assert record["measured_peak_bytes"] > 0
    assert not STANDIN or "mfu" not in record, "nobody knows what a stand-in can do"


OFFLOADED: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer", "update_on": "device"},
    "optimizer+params": {"offload": "optimizer+params", "update_on": "device", "clip_norm": 1.0, "microbatches": 2},
    "on the host": {"offload": "optimizer", "update_on": "cpu", "clip_norm": 1.0},
    "all on the host": {"offload": "optimizer+params", "update_on": "cpu", "precision": "bf16"},
    "nvme": {"offload": {"opt_state/**": "nvme", "params/**": "cpu"}, "nvme_path": tempfile.gettempdir()},
    "activations": {"remat": {"**": "offload"}, "offload": "optimizer", "update_on": "device"},
}


ADAMW = optim.adamw(1e-2)


@scenario(1)
def offloaded() -> None:
    """State on the host and on disk: the bits of the state on the device; a graph where nothing needs the host."""
    saved_and_loaded(_offloaded(ADAMW), "offloaded")


@scenario(1)
def offloaded_with_moments_of_8_bits() -> None:
    """The same of another optimizer."""
    _offloaded(optim.adamw8bit(1e-2))


def _offloaded(tx: optim.Optimizer) -> Any:
    """Trains it in every home; the last run is returned."""
    on_device: dict[str, Any] = {}  # what was trained without moves, by its options
    for name, given in OFFLOADED.items():
        plain = {k: v for k, v in given.items() if k not in ("offload", "update_on", "nvme_path", "remat")}
        key = str(plain)
        if key not in on_device:
            on_device[key] = trained(optimizer=tx, **plain)[:2]
        moved = trained(optimizer=tx, **given)
        recorded = bound_of(moved[2]).recording is not None
        assert recorded == (name in ("optimizer", "optimizer+params", "activations")), name
        loose = (3e-2, 3e-2) if tx is not ADAMW or "precision" in given else ()  # the host rounds otherwise
        near(moved, on_device[key], *loose)
        if given.get("update_on") == "device":
            assert all(map(torch.equal, moved[1], on_device[key][1])), name
    return moved[2]


@scenario(1)
def a_state_larger_than_the_device() -> None:
    """On a device that holds neither the moments nor the parameters at once."""
    width, layers = 64, 12

    def make(key: Any) -> Any:
        return {"blocks": [fzero.random.normal(k, (width, width)) / 8 for k in fzero.random.split(key, layers)]}

    def deep(params: Any, x: Any) -> Any:
        for w in params["blocks"]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    given: dict[str, Any] = {"loss": deep, "optimizer": ADAMW, "bucket_bytes": width * width * 4}
    moved = {"offload": "optimizer+params", "update_on": "device", "cuda_graph": False, "device_bytes": 140_000}
    x = torch.ones(2, width)
    need = fzero.lower(fzero.Spec(**given, device=HERE, **moved), make, x).memory.spaces["device"]
    held = 3 * 4 * layers * width * width
    assert need < held / 4, (need, held)
    losses = []
    for options, budget in (({}, 0), (moved, need + 65536)):
        if STANDIN and budget:
            order.Memory.budget = order.Memory.num_bytes.get(0, 0) + budget
        try:
            state = fzero.init(make, fzero.Spec(**given, device=HERE, **options))
            for _ in range(2):
                state = fzero.step(state, x.to(HERE))
            losses.append(float(state.metrics["loss"]))
        finally:
            order.Memory.budget = 0
        del state
    assert losses[0] == losses[1], losses


class _Drive:
    """A file whose transfers end at once."""

    def __init__(self) -> None:
        self.content = torch.zeros(4)

    def read(self, offset: int, into: torch.Tensor, what: str = "") -> Future[None]:
        into.copy_(self.content)
        return self.done()

    def write(self, offset: int, source: torch.Tensor, what: str = "") -> Future[None]:
        self.content.copy_(source)
        return self.done()

    def wait(self, *transfers: Future[None]) -> None:
        """They have ended."""

    def done(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


@scenario(1)
def work_on_the_host_is_waited_for() -> None:
    where, drive = torch.device(HERE), _Drive()
    slot, there = host_memory(where, 16).view(F32), torch.zeros(4, device=HERE)
    lanes = stream_lanes.StreamLanes(where, drive)

    def add(n: float) -> None:
        time.sleep(0.05)
        slot.add_(n)

    def update(n: float) -> None:
        (start,) = lanes.on_host([partial(add, n)], [slot], f"op {n}")
        start()

    update(1)
    lanes.copy("there", slot, there)  # behind the update, and nobody waits for it here
    update(10)  # behind the copy
    lanes.wait("there")
    assert there.tolist() == [1.0] * 4
    lanes.write("disk", 0, slot, "what is written is updated")
    lanes.wait("disk")
    assert drive.content.tolist() == [11.0] * 4
    update(100)
    lanes.read("slot", 0, slot, "what is filled is not in use")
    assert slot.tolist() == [11.0] * 4
    update(1)
    lanes.finish()
    assert slot.tolist() == [12.0] * 4
    (broken,) = lanes.on_host([lambda: 1 / 0], [slot], "op 7: an update")
    broken()
    update(1000)
    with pytest.raises(ZeroDivisionError) as error:
        lanes.finish()
    assert error.value.__notes__ == ["in op 7: an update"]
    lanes.drain()
    assert slot.tolist() == [12.0] * 4, "nothing runs behind work that failed"
    lanes.finish()
    cudart, full = torch.cuda.cudart(), mock.Mock(return_value=2)
    with mock.patch.object(cudart, "cudaHostRegister", full), fails(fzero.FzeroError, "memlock"):
        host_memory(where, 4096)


@scenario(1)
def updates_on_the_host_in_slots_used_again() -> None:
    """Ten layers: gradients come down into places where updates worked before, and workspaces lie between them."""
    keys, after = fzero.random.split(fzero.random.key(0), 10), stream_lanes._after

    def deep(params: Any, x: Any) -> Any:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    def late(*given: Any) -> None:
        time.sleep(0.003)
        after(*given)

    def ran(where: str, **options: Any) -> list[torch.Tensor]:
        given = {"loss": deep, "bucket_bytes": 4096, "device": where, **options}
        state = fzero.init([fzero.random.normal(key, (32, 32)) / 6 for key in keys], fzero.Spec(**given))
        for number in range(2):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            state = fzero.step(state, x.to(where))
        return [x.cpu() for x in fzero.unshard(state.params)]

    for options in ({"optimizer": optim.adamw(1e-2), "clip_norm": 1e-3}, {"optimizer": optim.sgd(0.1, momentum=0.9)}):
        wanted = ran("cpu", **options)
        for offload, delay in (("optimizer", after), ("optimizer+params", late)):
            with mock.patch.object(stream_lanes, "_after", delay):
                found = ran(HERE, **options, offload=offload, update_on="cpu")
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def saved_and_loaded(state: Any, name: str = "device") -> None:
    folder = Path(os.environ.get("FZERO_STANDIN_RUN") or tempfile.mkdtemp()) / name
    before = [x.cpu() for x in fzero.tree.flatten(fzero.unshard(state.params))[1]]
    path = fzero.save(state, folder / "run")
    again = fzero.load(path, like=state)
    assert all(map(torch.equal, before, [x.cpu() for x in fzero.tree.flatten(fzero.unshard(again.params))[1]]))
    with fzero.Checkpointer(folder / "other") as checkpointer:
        checkpointer.save(again)
        again = fzero.step(again, batch_of(HERE, 5))  # while it writes
    assert order.VIOLATIONS == []


@scenario(1)
def memory_is_measured() -> None:
    _, extra = measured_peak(lambda: torch.ones(1 << 20, device="cuda") + 1, "cuda")
    assert extra >> 20 == 8


@scenario(1)
def the_doctor_looks() -> None:
    found = {
        one.name: one
        for probe in (machine_probes.cuda, machine_probes.backends, machine_probes.compilers, machine_probes.limits)
        for one in probe()
    }
    assert f"capability {'.'.join(map(str, torch.cuda.get_device_capability()))}" in found["cuda:0"].text
    assert not STANDIN or found["cuda:1"].text.startswith("stand-in, 64.0 GiB of 64.0 GiB free")
    assert found["nccl"].text == "available"
    assert found["triton"].status == "ok"
    with mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=0):
        assert "sees none" in next(machine_probes.cuda()).text
        with fails(fzero.SpecError, "sees no CUDA device"):
            started("cuda")
    state = fzero.lower(fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2), device="cuda"), init, data(0), world_size=2)
    assert state.choices["cuda_graph"] == "the step is one graph"


@scenario(1)
def random_numbers() -> None:
    key = fzero.random.key(3)
    there = key.to(HERE)
    data = torch.tensor(5)
    assert torch.equal(fzero.random.split(there, 3).cpu(), fzero.random.split(key, 3))
    assert torch.equal(fzero.random.fold_in(there, 7).cpu(), fzero.random.fold_in(key, 7))
    assert torch.equal(fzero.random.fold_in(there, data.to(HERE)).cpu(), fzero.random.fold_in(key, data))
    assert torch.equal(_draw_ops.bits(there, [9]).cpu(), _draw_ops.bits(key, [9]))
    for dtype in (F32, torch.float64, BF16):
        numbers = fzero.random.uniform(there, (300,), dtype=dtype, low=2.0, high=4.0).cpu()
        assert 2 <= numbers.min() < 2.2 < 3.8 < numbers.max() < 4
        for normal, numbers_of in ((False, fzero.random.uniform), (True, fzero.random.normal)):
            exact = philox.fill_reference(key[None].numpy(), 1100, normal=normal, double=dtype == torch.float64)[0]
            error = numbers_of(there, (1100,), dtype=dtype).cpu().double() - torch.tensor(exact)
            least = 64 * torch.finfo(torch.promote_types(dtype, F32)).eps
            assert (error.abs() <= torch.finfo(dtype).eps * torch.tensor(exact).abs() + least).all()
            assert normal or (error <= 0).all()
    keys, far = torch.tensor([[-3, 2**62 + 5], [2**63 - 1, -(2**63)]]), torch.empty(2, 300, device=HERE)
    philox.fill(far, keys.to(HERE), normal=False, offset=2**35 + 7)
    exact = philox.fill_reference(keys.numpy(), 300, normal=False, offset=2**35 + 7)
    assert torch.equal(far.cpu().double(), torch.tensor(exact))
    whole = _draw_ops.uniform(there, [4, 6], F32, 0.0, 1.0)
    part = _draw_ops.uniform_part(there, [4, 6], F32, 0.0, 1.0, torch.ones((), dtype=torch.int64, device=HERE), 2, 1)
    assert torch.equal(part, whole[:, 3:])
    assert abs(fzero.random.normal(there, (2000,)).mean().item()) < 0.1
    assert fzero.random.normal(there, (0,)).shape == (0,)
    assert _draw_ops.split(there.new_empty(0, 2), 2).shape == (0, 2, 2)


@scenario(1)
def kernels_have_their_references_numbers() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    there, none = x.to(HERE), torch.empty(0, device=HERE)
    for codec in CODECS.values():
        wanted = codecs.encode(x, codec)
        message = codec_kernels.encode(codec, there)
        assert torch.equal(message.cpu(), wanted)
        assert torch.equal(codec_kernels.decode(codec, message).cpu(), codecs.decode_blocks(wanted, codec))
        assert codec_kernels.decode(codec, codec_kernels.encode(codec, none)).numel() == 0
    with fails(ValueError, "must be multiples of 4"):
        codec_kernels.encode(codec, there[:64], out=message[1:13])
    with fails(ValueError, "a block is 12 bytes"):
        codec_kernels.decode(codec, message[1:])
    seed, flag = torch.tensor(-5), torch.tensor(False, device=HERE)
    assert torch.equal(rounding.stochastic_round(there, seed.to(HERE)).cpu(), optim.stochastic_round(x, seed))
    out = torch.empty(1000, dtype=F16, device=HERE)
    cast.cast(out, there, torch.tensor(0.5, device=HERE))
    assert torch.equal(out.cpu(), (x * 0.5).half())
    total = flat_norms.sum_squares(there, nonfinite=flag)
    assert abs(total.item() - x.double().square().sum().item()) < 1e-9
    assert not flag.item()


@scenario(1)
def block_sparse_attention() -> None:
    """A step with a window of attention, by the kernels: the numbers of the processor."""
    layout = fzero.sparse.sliding_window(32, window=12, causal=True, block=16)
    x = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(0))

    def loss(params: Any, batch: Any) -> Any:
        q, k, v = (batch["x"] @ params["w"]).view(1, 32, 3, 1, 16).permute(2, 0, 3, 1, 4).unbind()
        return fzero.sparse.attention(q, k, v, layout).square().mean()

    ends = []
    for at in (HERE, "cpu"):
        state = fzero.init({"w": torch.eye(16, 48)}, fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), device=at))
        state = fzero.step(state, {"x": x.to(at)})
        ends.append((float(state.metrics["loss"]), fzero.unshard(state.params)["w"].cpu()))
    assert abs(ends[0][0] - ends[1][0]) < 1e-5
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-4, atol=1e-5)
    call = drawn(2, block=16, rows=2, batch=1, groups=2, repeat=2, table="all", documents=True, dim=8, value_dim=3)
    q, k, v, grad, columns, documents = (x.to(HERE) for x in (*call.tensors, call.columns, call.documents))
    found = [block_sparse.attention_out(q, k, v, columns, documents, *call.numbers, out=torch.empty_like(grad))]
    into = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    found += block_sparse.backward_out(grad, q, k, v, columns, documents, *call.numbers, **into)
    for a, b in zip(found, masked(call, torch.float64), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=1e-4)


@scenario(1)
def optimizer_kernels() -> None:
    hyperparameters = (0.9, 0.999, 1e-8, 0.1)
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    own = [t.to(HERE) for t in (x, x * 2, x * 0.1, x.square())]
    cpu = [t.clone() for t in (x, x * 2, x * 0.1, x.square())]
    count, lr = torch.tensor(3), torch.tensor(1e-2, dtype=torch.float64)
    copy, skip = torch.empty(300, dtype=BF16, device=HERE), torch.tensor(False, device=HERE)
    adamw.adamw_(*own, count.to(HERE), 1e-2, *hyperparameters, copy=copy, skip=skip)
    torch.ops.fzero.adamw_(*cpu, count, lr, *hyperparameters, True)
    for a, b in zip(own, cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
    assert torch.equal(copy.cpu(), own[0].cpu().bfloat16())
    scalars = count.to(HERE), lr.to(HERE)
    none = [t[:0] for t in own]
    adamw.adamw_(*none, *scalars, *hyperparameters)
    seeds = [torch.tensor(1, device=HERE)] * 3
    with fails(TypeError, "only bfloat16 is rounded at random"):
        adamw.adamw_(*own, *scalars, *hyperparameters, seeds=adamw.Seeds(*seeds))
    low = [t.bfloat16() for t in own]
    adamw.adamw_(*low, *scalars, *hyperparameters, seeds=adamw.Seeds(*seeds))
    with fails(ValueError, "must be 0-d"):
        hyper.bias_corrections(own[0], scalars[1], 0.9, 0.999)
    with fails(TypeError, "must be torch.int64"):
        adamw.adamw_(*low, *scalars, *hyperparameters, seeds=adamw.Seeds(skip))
    sizes = (0, torch.int8), (0, F32), (0, torch.uint8), (0, F32)
    moments = [torch.zeros(n, dtype=dtype, device=HERE) for n, dtype in sizes]
    adam8_kernel.adamw8_(*none[:2], *moments, *scalars, *hyperparameters)
    sizes = (300, torch.int8), (5, F32), (300, torch.uint8), (5, F32)
    eight, plain = ([torch.zeros(n, dtype=dtype, device=to) for n, dtype in sizes] for to in (HERE, "cpu"))
    own = [t.to(HERE) for t in cpu]  # whose bits decide how the second moment is rounded
    for gradient in (1, 2):
        adam8_kernel.adamw8_(own[0], own[gradient], *eight, *scalars, *hyperparameters)
        _adam8.adamw8_(cpu[0], cpu[gradient], *plain, count, lr, *hyperparameters)
    for a, b, most in zip((own[0], *eight), (cpu[0], *plain), (1e-3, 2, 0, 2, 0), strict=True):  # 2: of the codes
        error = (a.cpu().float() - b.float()).abs() - 1e-4 * b.abs() - 1e-5
        assert (error > 0).sum() <= 0.01 * len(a)  # MKL's root
        assert error.max() <= most


@scenario(1)
def programs_that_are_no_graph() -> None:
    def moves(params: Any, b: Any) -> Any:
        return (params["w"] * b.cpu().to(HERE)).sum()

    state = fzero.init({"w": torch.ones(4)}, fzero.Spec(loss=moves, optimizer=optim.sgd(0.1), device=HERE))
    for _ in range(2):
        state = fzero.step(state, torch.ones(4, device=HERE))
    assert bound_of(state).recording is None
    why = cuda_graphs.obstacle(bound_of(state).program, torch.device(HERE))
    assert "copies between host and device" in (why or ""), why
    lowered = fzero.lower(fzero.Spec(loss=loss, optimizer=optim.sgd(0.1)), init, data(0), world_size=2)
    assert "run on the host" in (cuda_graphs.obstacle(lowered.program, torch.device(HERE)) or "")
    nonzero = SimpleNamespace(target=torch.ops.aten.nonzero.default)
    assert "reads back" in (cuda_graphs._waits(nonzero) or "")  # type: ignore[arg-type]


@scenario(1)
def a_graph_that_cuda_refuses() -> None:
    before = torch.cuda.current_stream(HERE)
    plain = Executor.issue

    def waits(self: Executor, watch: Any = None) -> None:
        plain(self, watch)
        torch.cuda.current_stream(HERE).synchronize()

    with logged() as said, mock.patch.object(Executor, "issue", waits):
        found = trained()
    assert any("would not record one graph" in line for line in said), said
    assert bound_of(found[2]).recording is None
    assert torch.cuda.current_stream(HERE) == before, "the stream of before is current again"
    near(found, trained("cpu"))


@scenario(1)
def compiled_stretches() -> None:
    seen = []

    def compiled(gm: Any, inputs: Any) -> Any:
        seen.extend(x.device for x in inputs)
        return gm.forward

    with mock.patch.object(compile_segments, "inductor_compile", compiled):
        near(trained(compile="inductor"), trained("cpu"))
    assert set(seen) == {torch.device(HERE)}


UNCOMPILED = mock.patch.object(compile_segments, "inductor_compile", lambda gm, _: gm.forward)


ROWS = ("gelu_backward_sum", "layer_norm_backward_sums")


@scenario(1)
def a_compiled_transformer() -> None:
    """A block with biases: gradients whose rows are added up, by kernels of fzero's own; one graph replays them."""
    from torch import nn

    from benchmarks.model import Block, Size
    from fzero.interop import from_module

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = Block(Size(1, 16, 2, 8, 4, 2, 32)), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.block(x)).square().mean()

    params, buffers, apply = from_module(Net())
    generator = torch.Generator().manual_seed(0)
    params = {name: 0.5 * torch.randn(value.shape, generator=generator) for name, value in params.items()}
    x = torch.randn(2, 4, 16, generator=generator)
    used: list[str] = []
    run = own_kernels._run

    def noted(name: str, *rest: Any) -> None:
        used.append(name)
        run(name, *rest)

    found = []
    for where, how in ((HERE, "inductor"), ("cpu", "none")):
        its_loss = lambda p, b: apply(p, buffers, b)  # noqa: E731
        spec = fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=where, compile=how)
        with UNCOMPILED, mock.patch.object(own_kernels, "_run", noted):
            state = fzero.init(params, spec)
            for _ in range(3):
                state = fzero.step(state, x.to(where))
        found.append((float(state.metrics["loss"]), fzero.tree.flatten(fzero.unshard(state.params))[1]))
    assert set(ROWS) <= set(used) <= {*ROWS, "pack_sum"}, used  # by where attention leaves the heads
    heads = [
        torch.randn(2, 3, 4, 8, generator=generator).to(HERE) for _ in range(3)
    ]  # as attention on CUDA leaves them
    packed, total = torch.empty(2, 4, 3, 3, 8, device=HERE), torch.empty(72, device=HERE)
    row_sums.pack_sum(*heads, packed, total)
    assert torch.equal(packed.cpu(), torch.stack([x.cpu() for x in heads]).permute(1, 3, 0, 2, 4))
    torch.testing.assert_close(total.cpu(), packed.cpu().reshape(-1, 72).sum(0))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-5)


@scenario(1)
def results_that_are_handed_on() -> None:
    """From an op without an `out=` form straight to the stretch that reads them, in the planned strides."""
    taken: list[Any] = []
    taking = handed.taking

    def noted(*args: Any) -> None:
        taken.append(args)
        taking(*args)

    for name in ("three", "three_turned"):

        def three(x: torch.Tensor, turned: bool = name == "three_turned") -> tuple[torch.Tensor, ...]:
            made = [x + 1, x * 2, -x]
            return tuple(y.T.contiguous().T if turned and not is_fake(y) else y for y in made)

        op = torch.library.custom_op(
            f"standin::{name}", three, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor, Tensor)"
        )
        op.register_fake(lambda x: tuple(torch.empty_like(x) for _ in range(3)))
        op.register_autograd(lambda ctx, a, b, c: a + 2 * b - c)

        def its_loss(p: Any, b: torch.Tensor, op: Any = op) -> torch.Tensor:
            packed = torch.stack(op(b @ p["w"])).permute(1, 0, 2).contiguous()
            return (packed.exp() * p["v"]).mean()

        params = {"w": torch.eye(4, 6), "v": torch.ones(6)}
        ends = []
        for where, how in ((HERE, "inductor"), ("cpu", "none")):
            spec = fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=where, compile=how)
            with UNCOMPILED, mock.patch.object(bind, "taking", noted):
                state = fzero.init(params, spec)
                for _ in range(3):
                    state = fzero.step(state, torch.linspace(-1, 1, 20).view(5, 4).to(where))
            ends.append(fzero.tree.flatten(fzero.unshard(state.params))[1])
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-6)
    assert len(taken) == 4, "of each op, the first step and the graph of the others"


@scenario(1)
def a_loss_over_a_vocabulary() -> None:
    """Its gradient lies where the logits lay, which are padded where the device has 16-bit products."""
    x, y = torch.linspace(-1, 1, 60).view(6, 10), torch.tensor([0, 3, -100, 8, 8, 1])
    params = {"w": torch.linspace(-1, 1, 90).view(10, 9).cos()}

    def its_loss(p: Any, b: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((b["x"] @ p["w"]).float(), b["y"])

    for precision, far in (("fp32", 1e-5), ("bf16", 2e-2)):
        ends, used = [], []
        run = own_kernels._run

        def noted(name: str, places: Any, options: Any, *tensors: Any, used: list[Any] = used, run: Any = run) -> None:
            used.append((name, tensors[places[0]].data_ptr() == tensors[places[4]].data_ptr()))
            run(name, places, options, *tensors)

        for where, how in ((HERE, "inductor"), ("cpu", "none")):
            spec = fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=where, compile=how, precision=precision)
            with UNCOMPILED, mock.patch.object(own_kernels, "_run", noted):
                state = fzero.init(params, spec)
                for _ in range(3):
                    state = fzero.step(state, {"x": x.to(where), "y": y.to(where)})
            ends.append((float(state.metrics["loss"]), fzero.unshard(state.params)["w"].cpu()))
        assert set(used) == {("softmax_loss", True)}, used
        assert abs(ends[0][0] - ends[1][0]) < far
        torch.testing.assert_close(ends[0][1], ends[1][1], rtol=far, atol=far)
    logits, total = torch.linspace(-9, 9, 72, device=HERE).view(6, 12).cos(), torch.empty((), device=HERE)
    exact = logits[:, :10].cpu().double().requires_grad_()
    (wanted := torch.nn.functional.cross_entropy(exact, y, reduction="sum")).backward()
    logits[:, 10:] = torch.nan  # behind the vocabulary
    with mock.patch.multiple(softmax_loss, AT_ONCE=8, WRITTEN=8):
        softmax_loss.softmax_loss(logits, y.to(HERE), None, total, logits, columns=10, mean=False, ignored=-100)
    for a, b in ((total, wanted.detach()), (logits[:, :10], exact.grad)):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-6)
    assert not logits[:, 10:].any()


SETTINGS = {"scale": 1.0}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * SETTINGS["scale"]


@scenario(1)
def what_a_backward_reads_is_watched() -> None:
    """Autograd has a thread for each device: there nothing was watched, and Python 3.11 followed each later step."""
    state = fzero.step(started(loss=lambda p, b: Scaled.apply(loss(p, b))), batch_of(HERE, 0))
    assert sys.gettrace() is None
    SETTINGS["scale"] = 2.0
    with pytest.raises(fzero.errors.CaptureError, match=r"SETTINGS\['scale'\]"):
        fzero.step(state, batch_of(HERE, 1))


@scenario(1)
def recomputed_layers_draw_again() -> None:
    """`torch.utils.checkpoint` asks for the state of the device's generator too."""

    def losses(again: bool) -> list[float]:
        def layer(x: Any, w: Any) -> Any:
            return torch.nn.functional.dropout(torch.tanh(x @ w), 0.5)

        def its_loss(p: Any, b: Any) -> Any:
            x = checkpoint(layer, b["x"], p["a"], use_reentrant=False) if again else layer(b["x"], p["a"])
            return loss(p, {"x": x})

        state = fzero.init(init(fzero.random.key(0)), fzero.Spec(loss=its_loss, optimizer=optim.sgd(0.1), device=HERE),
                           key=fzero.random.key(1))  # fmt: skip
        found = []
        for step in range(3):
            state = fzero.step(state, batch_of(HERE, step))
            found.append(float(state.metrics["loss"]))
        return found

    assert losses(True) == losses(False)


# --- two processes ----------------------------------------------------------------------------------------------------


def alone(steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """The same training on the global batch, by plain autograd on the CPU."""
    params, losses = init(fzero.random.key(0)), []
    for step in range(steps):
        value, grads = fzero.value_and_grad(loss)(params, data(step))
        losses.append(float(value))
        params = fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return losses, fzero.tree.flatten(params)[1]


def stage(zero: int, **options: Any) -> Any:
    found = trained(zero=zero, optimizer=optim.sgd(0.1), **options)
    near(found, alone())
    recording = bound_of(found[2]).recording
    assert recording is not None
    assert any("nccl" in what for what, _, _ in recording.calls), "the graph has no transfers"
    return found[2]


@scenario(2)
def stage_0() -> None:
    stage(0)


@scenario(2)
def stage_1() -> None:
    stage(1, clip_norm=100.0)


@scenario(2)
def stage_2() -> None:
    stage(2, microbatches=2)


@scenario(2)
def stage_3() -> None:
    state = stage(3, bucket_bytes=512)
    assert any("reduce_scatter" in call for call in nccl.CALLS)
    saved_and_loaded(state)


@scenario(2)
def stage_3_op_by_op() -> None:
    near(trained(optimizer=optim.sgd(0.1), cuda_graph=False), alone())


def coded(x: torch.Tensor, name: str) -> torch.Tensor:
    return codecs.decode(codecs.encode(x.reshape(-1), CODECS[name]), x.numel(), CODECS[name]).view(x.shape)


def coded_by_hand(steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """The training of `coded_messages` by plain autograd and the codecs on the CPU: matrices alone are coded."""
    held, losses = init(fzero.random.key(0)), []
    for step in range(steps):
        used = fzero.tree.map(lambda x: coded(x, "int8") if x.ndim > 1 else x, held)
        rows = data(step)["x"].split(2)
        values, grads = zip(*(fzero.value_and_grad(loss)(used, {"x": part}) for part in rows), strict=True)
        grads = [fzero.tree.map(lambda g: coded(g, "int4") if g.ndim > 1 else g, grad) for grad in grads]
        held = fzero.tree.map(lambda p, g, h: p - 0.1 * ((g + h) / WORLD), held, *grads)
        losses.append(float(sum(values)) / WORLD)
    return losses, fzero.tree.flatten(held)[1]


@scenario(2)
def coded_messages() -> None:
    """Parameters gathered and gradients reduced as messages, which the kernels encode, decode and add."""
    for zero in (1, 3):
        with mock.patch.object(codecs, "_parts", side_effect=AssertionError("aten codes what a kernel could")):
            found = trained(
                zero=zero, optimizer=optim.sgd(0.1), precision=fzero.Precision(gather="int8", reduce="int4")
            )
        assert bound_of(found[2]).recording is not None
        near(found, coded_by_hand(), *(() if STANDIN else (3e-2, 3e-2)))


@scenario(2)
def the_group_must_be_nccl() -> None:
    with fails(fzero.SpecError, "a state on cpu needs gloo"):
        started("cpu")


@scenario(2)
def messages() -> None:
    """A kind of transfer that NCCL has no collective for."""
    comm = transfers.Nccl(Line.whole(RANK, WORLD), heartbeat.ALONE)
    for dtype in (torch.float32, torch.int16, torch.complex64):  # NCCL knows the first
        x = torch.full((4,), RANK, dtype=dtype, device=HERE)
        kind = "send" if RANK == 0 else "recv"
        refs = {"reads": (Ref("x"),), "writes": ()} if RANK == 0 else {"reads": (), "writes": (Ref("x"),)}
        comm.start("x", Op(kind, **refs, attrs=(("peer", 1 - RANK),)), [x])  # type: ignore[arg-type]
        assert comm.ready("x"), "the host never waits for another rank"
        comm.wait("x")
        assert x.tolist() == [0] * 4


@scenario(2)
def values_that_nccl_does_not_know() -> None:
    """What is moved travels as bytes, and a complex number is added as two."""
    comm, dtypes = transfers.Nccl(Line.whole(RANK, WORLD), heartbeat.ALONE), (torch.int16, torch.complex64)
    for kind, dtype in itertools.product(("all_gather_values", "all_to_all", "reduce_scatter", "all_reduce"), dtypes):
        adds = "reduce" in kind
        if adds and not dtype.is_complex:
            continue
        source = torch.arange(4, device=HERE).to(dtype) + 4 * RANK
        shape = {"all_gather_values": 8, "reduce_scatter": 2}.get(kind, 4)
        dest = torch.zeros(shape, dtype=dtype, device=HERE)
        given = {"op": "sum", "divisor": 2} if adds else {}
        comm.start("b", make_op(kind, [Ref("a")], [Ref("b")], axis="dp", **given), [source, dest])
        comm.wait("b")
        assert (
            dest.tolist()
            == {
                "all_gather_values": [*range(8)],
                "all_to_all": [2 * RANK, 2 * RANK + 1, 4 + 2 * RANK, 5 + 2 * RANK],
                "reduce_scatter": [2 + 2 * RANK, 3 + 2 * RANK],
                "all_reduce": [2, 3, 4, 5],
            }[kind]
        )


def piped_loss(params: Any, b: Any) -> Any:
    x = b["x"] @ params["embed"]
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"])
    return (x @ params["embed"].T - b["x"]).square().mean()


@scenario(2)
def a_pipeline() -> None:
    """Two roles that share a leaf. Messages up and down have a communicator each: the bits of the interpreter."""
    keys = fzero.random.split(fzero.random.key(0), 3)
    weights = [fzero.random.normal(one, (8, 8)) * 0.3 for one in keys]
    params = {"embed": weights[0], "blocks": [{"w": w} for w in weights[1:]]}
    given = {"loss": piped_loss, "optimizer": optim.sgd(0.1), "microbatches": 4, "clip_norm": 1.0, "device": HERE}
    spec = fzero.Spec(mesh={"pp": 2}, pipeline="1f1b", timeout=30.0, **given)
    state = fzero.init(params, spec)
    session = session_of(state)
    comm = session.transport.comm.comms["pp"]
    assert isinstance(comm, transfers.Nccl)
    assert comm.messages.back is not None, "messages down have a communicator of their own"
    leaves = fzero.tree.flatten(fzero.unshard(state.tree))[1]
    own = [storage.shards(session.plan, leaves, rank) for rank in range(WORLD)]
    for step in range(4):
        batch = fzero.tree.map(lambda x: x.to(HERE), data(step))
        lowered = session.compiled(batch)
        interpreted(lowered, own, batch)
        state = fzero.step(state, batch)
    assert bound_of(state).recording is not None, "the step is one graph, with its messages"
    for name, value in session.memory.items():
        if STANDIN:
            assert torch.equal(value, own[RANK][name]), name
        else:
            torch.testing.assert_close(value, own[RANK][name])
    if STANDIN:
        assert {call.split()[1] for call in nccl.CALLS if call.startswith(("send", "recv"))} == {f"{RANK}-{1 - RANK}"}


def parted_loss(params: Any, b: Any) -> Any:
    x = torch.tanh(fzero.constrain(b["x"] @ params["up"], fzero.P("tp")))  # rows to ranks, where columns were
    return (x @ params["down"] - b["x"]).square().mean()


@scenario(2)
def layers_in_parts() -> None:
    """Matrices over two ranks, and every kind of transfer of a value: the bits of the interpreter."""
    keys = fzero.random.split(fzero.random.key(0), 2)
    params = {"up": fzero.random.normal(keys[0], (8, 16)) * 0.3, "down": fzero.random.normal(keys[1], (16, 8)) * 0.3}
    shard = {"up": fzero.P(None, "tp"), "down": fzero.P("tp", None)}
    given = {"loss": parted_loss, "optimizer": optim.sgd(0.1), "clip_norm": 1.0, "device": HERE}
    state = fzero.init(params, fzero.Spec(mesh={"tp": 2}, shard=shard, timeout=30.0, **given))
    session = session_of(state)
    leaves = fzero.tree.flatten(fzero.unshard(state.tree))[1]
    own = [storage.shards(session.plan, leaves, rank) for rank in range(WORLD)]
    for step in range(3):
        batch = fzero.tree.map(lambda x: x.to(HERE), data(step))
        lowered = session.compiled(batch)
        assert "all_to_all" in {op.kind for op in lowered.program.ops}
        interpreted(lowered, own, batch)
        state = fzero.step(state, batch)
    for name, value in session.memory.items():
        if STANDIN:
            assert torch.equal(value, own[RANK][name]), name
        else:
            torch.testing.assert_close(value, own[RANK][name])


def interpreted(lowered: Any, own: list[dict[str, torch.Tensor]], batch: Any) -> None:
    """A step of all roles in this process, on the states of `own`."""
    inputs = [name for name, b in lowered.programs[0].buffers.items() if b.kind == "batch"]
    more = dict(zip(inputs, fzero.tree.flatten(batch)[1], strict=True))
    constants = [name for name, b in lowered.programs[0].buffers.items() if b.kind == "constant"]
    more |= dict(zip(constants, lowered.graph.constants.values(), strict=True))
    with torch.no_grad():
        programs = {rank: lowered.on(rank) for rank in range(WORLD)}
        interpret(programs, [{**memory, **more} for memory in own])


if __name__ == "__main__":
    if STANDIN:
        from standin import faults  # noqa: F401  (registers its scenarios)

    main()
