"""Compiled segments: the same numbers, everywhere the same, and nothing hangs where nothing can be compiled."""

import logging
import os
import pickle
import pickletools
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import helpers
import models
import pytest
import torch
from fusing import graph_of, stretches, use
from torch import fx

import fzero
from fzero import backend
from fzero._torch_compat import compute, inductor_lacks, inductor_rounds
from fzero.codegen.fusion import Fused
from fzero.ir import segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.runtime import compile_segments

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(bool(inductor_lacks("cpu")), reason="no C++ compiler")


# --- compiled ---------------------------------------------------------------------------------------------------------


def spec_of(zero: int, precision: str) -> fzero.Spec:
    return fzero.Spec(
        loss=models.GPT.loss,
        optimizer=fzero.optim.lion(1e-3),  # its update is a chain of pointwise ops, and is compiled
        zero=zero,
        precision=precision,
        clip_norm=1.0,
        bucket_bytes=1 << 12,
    )


def train(zero: int, precision: str, how: str, monkeypatch: Any) -> helpers.Run:
    memo: dict[str, dict[str, Any]] = {}

    def calls(program: Program) -> dict[str, Any]:
        if program.digest not in memo:
            made = compile_segments.compiled(program, how=how)
            memo[program.digest] = {key: gm.forward for key, gm in made.items()}
        return memo[program.digest]

    with monkeypatch.context() as patched:
        use(patched, calls)
        params = models.GPT.init(fzero.random.key(0))
        return helpers.run(spec_of(zero, precision), params, models.GPT.batch, world=2, steps=2)


@needs_compiler
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 2e-2)])
@pytest.mark.sampled(1)
def test_training_compiled(precision: str, tolerance: float, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to aten, the same again, and (among the long checks) the same under every stage."""
    plain = train(0, precision, "none", monkeypatch)
    first, again = (train(0, precision, "inductor", monkeypatch) for _ in range(2))
    assert not helpers.differing(first.final, again.final)
    assert first.losses() == pytest.approx(plain.losses(), rel=tolerance)
    for zero in (1, 2, 3) if whole else ():
        other = train(zero, precision, "inductor", monkeypatch)
        assert other.losses() == first.losses()
        assert not helpers.differing(other.final, first.final)


@needs_compiler
def test_a_read_that_is_the_written_memory_is_read_before_it_is_written() -> None:
    """x is written in place and summed as it was: two loops, that may not change places."""

    def body(g: fx.Graph, x: fx.Node, into: fx.Node) -> list[fx.Node]:
        rows = g.call_function(aten.sum.dim_IntList, (x, [1], True))
        columns = g.call_function(aten.sum.dim_IntList, (x, [0]))
        new = g.call_function(aten.mul.Tensor, (x, rows))
        g.call_function(aten.copy_.default, (into, new))
        return [columns]

    gm = graph_of(body, torch.empty(64, 64), torch.empty(64, 64))
    key, x = segments.digest(gm), torch.randn(64, 64)
    buffers = {"x": Buffer("x", torch.float32, (64, 64), "state"), "s": Buffer("s", torch.float32, (64,), "activation")}
    one = make_op("update", [Ref("x")], [Ref("s"), Ref("x")], segment=key, fresh=1)
    program = Program(Mesh((("dp", 1),)), {}, buffers, (one,), {}, segments={key: gm})
    made = compile_segments.compiled(program, how="inductor")[key]
    given = x.clone()
    (columns,) = made.forward(given, given)
    torch.testing.assert_close(columns, x.sum(0))
    torch.testing.assert_close(given, x * x.sum(1, keepdim=True))


KINDS = {
    "bf16": (torch.bfloat16, lambda x: x.t()),
    "strided": (torch.float32, lambda x: x[:, ::2]),
    "offset": (torch.float32, lambda x: x.view(-1)[1:49].view(6, 8)),
    "int64": (torch.int64, lambda x: x),
    "bool": (torch.bool, lambda x: x),
    "empty": (torch.float32, lambda x: x[:0]),
    "0-d": (torch.float64, lambda x: x[0, 0]),
}


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_inputs_of_every_kind(kind: str) -> None:
    dtype, cut = KINDS[kind]
    x = cut((torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * 3).to(dtype))

    def body(g: fx.Graph, a: fx.Node) -> list[fx.Node]:
        positive = g.call_function(aten.gt.Scalar, (a, 0))
        other = g.call_function(aten.where.self, (positive, a, g.call_function(aten.logical_not.default, (a,))))
        return [positive, other, g.call_function(aten.add.Tensor, (other, other))]

    gm = graph_of(body, x)
    key = segments.digest(gm)
    buffers = {name: Buffer(name, torch.float32, (1,), "activation") for name in "xabc"}
    one = make_op("run", [Ref("x")], [Ref("a"), Ref("b"), Ref("c")], segment=key, fresh=3)
    program = Program(Mesh((("dp", 1),)), {}, buffers, (one,), {}, segments={key: gm})
    made = compile_segments.compiled(program, how="inductor")
    assert (key in made) == (kind != "empty" and (kind != "bf16" or inductor_rounds("cpu")))  # nothing to gain there
    if key in made:
        for ours, theirs in zip(made[key].forward(x), gm.forward(x), strict=True):
            assert helpers.same_bits(ours, theirs)
            assert ours.stride() == theirs.stride()


LOADED = """
import sys, pickle, torch, random
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import tests.runtime.test_compile_segments as t
from torch._dynamo.utils import counters
bits = t.step_bits()
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"] > 0, bits)
"""


def step_bits() -> str:
    """Digest of a compiled step's results."""
    with pytest.MonkeyPatch.context() as patch:
        final = train(3, "fp32", "inductor", patch).final
    return str(fzero.tree.flatten({k: v.double().sum().item().hex() for k, v in final.items()})[1])


@needs_compiler
@pytest.mark.acceptance
def test_another_process_loads_what_was_compiled() -> None:
    bits = step_bits()
    here = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", LOADED, here], capture_output=True, text=True, env=_env(), check=True)
    assert done.stdout.strip() == f"0 True {bits}"


def test_the_cache_key_names_no_module_of_the_user() -> None:
    """A module with a global `torch` that came before torch was in the key of this process, and not of its workers."""
    assert helpers.values(helpers.gloo(1, named)) == [["mine", "fzero._torch_compat.compute"]]


def named() -> list[str]:
    """The module by which torch's objects are pickled, where the user's comes first; and in fzero's context."""
    mine, others = types.ModuleType("mine"), dict(sys.modules)
    mine.torch = torch  # type: ignore[attr-defined]
    sys.modules.clear()
    sys.modules.update(mine=mine, **others)

    def first_word() -> str:
        data = pickle.dumps(torch.contiguous_format, 4)
        assert pickle.loads(data) is torch.contiguous_format
        return next(arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str))

    with compute._one_key_in_all_processes():
        inside = first_word()
    return [first_word(), inside]


@needs_compiler
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.acceptance
def test_workers_share_what_is_new(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    started: list[Any] = []
    real = compile_segments._workers
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_segments, "PER_WORKER", 1)
    monkeypatch.setattr(compile_segments, "_workers", lambda *args: started.extend(real(*args)) or started)
    monkeypatch.setattr(compile_segments, "_claim", lambda folder, digest: False)  # this rank leaves everything to them
    program, before = cases.lowered(2, optimizer=fzero.optim.lion(1e-3)).program, dict(counters["inductor"])
    made = compile_segments.compiled(program, how="inductor")
    found = {n.target for gm in made.values() for n in gm.graph.nodes if isinstance(n.target, Fused)}
    assert started
    assert all(worker.returncode == 0 for worker in started)
    loaded = counters["inductor"]["fxgraph_cache_hit"] - before.get("fxgraph_cache_hit", 0)
    assert loaded == len(found) - 1  # the first is compiled here, for the headers
    assert all(one.run != one.graph.forward for one in found)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# --- where it cannot be -----------------------------------------------------------------------------------------------


def small() -> Program:
    return cases.lowered(2, cases.layers(depth=1), optimizer=fzero.optim.lion(1e-3)).program


def test_none_compiles_nothing_and_auto_leaves_small_stretches() -> None:
    assert compile_segments.compiled(small(), how="none") == {}
    assert compile_segments.compiled(small(), how="auto") == {}


def test_without_a_compiler_one_line_says_so(caplog: Any) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), caplog.at_level(logging.WARNING, "fzero"):
        assert compile_segments.compiled(small(), how="inductor") == {}
    assert len(caplog.records) == 1
    assert "no C++ compiler was found, looked for no-such-compiler: install g++, or set CXX" in caplog.text


@needs_compiler
def test_a_stretch_that_does_not_compile_stays_aten(monkeypatch: Any, caplog: Any) -> None:
    bad = next(iter(stretches(small())))
    fail_for(bad, monkeypatch)
    with caplog.at_level(logging.WARNING, "fzero"):
        made = compile_segments.compiled(small(), how="inductor")
    assert len(caplog.records) == 1
    assert "RuntimeError: broken" in caplog.text
    found = {n.target for gm in made.values() for n in gm.graph.nodes if isinstance(n.target, Fused)}
    assert {one.digest for one in found if one.run == one.graph.forward} <= {bad}
    assert any(one.run != one.graph.forward for one in found)


@pytest.mark.parametrize("lacking", ["", "no working Triton was found"])
def test_a_kernel_of_fzeros_own_needs_triton_too(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks on one rank must be aten on all: such a stretch is among those that the ranks agree on."""

    def body(g: fx.Graph, grad: fx.Node, x: fx.Node, into: fx.Node, total: fx.Node) -> list[fx.Node]:
        made = g.call_function(aten.gelu_backward.default, (grad, x))
        rows = g.call_function(aten.sum.dim_IntList, (made, [0]))
        g.call_function(aten.copy_.default, (into, made))
        g.call_function(aten.copy_.default, (total, rows))
        return []

    rows, row = torch.empty(8, 16), torch.empty(16)
    stretch = Fused(graph_of(body, rows, rows, rows, row), [], [rows, row])
    monkeypatch.setitem(backend.BACKENDS, "cpu", replace(backend.CPU, has_kernels=True))
    monkeypatch.setattr(compile_segments, "inductor_lacks", lambda _: lacking)
    monkeypatch.setattr(compile_segments, "inductor_compile", lambda *_: pytest.fail("fzero has a kernel for it"))
    errors = compile_segments._compile_all([stretch], torch.device("cpu"), 0, 1, None)
    assert list(errors.values()) == ([lacking] if lacking else [])
    assert (stretch.run == stretch.graph.forward) == bool(lacking)


def fail_for(digest: str, monkeypatch: Any) -> None:
    real = compile_segments.inductor_compile

    def broken(gm: Any, inputs: Any) -> Any:
        if segments.digest(gm) == digest:
            raise RuntimeError("broken")
        return real(gm, inputs)

    monkeypatch.setattr(compile_segments, "inductor_compile", broken)


def one_rank(bad: str, failing: int) -> list[str]:
    """What is aten on this rank. Nothing is compiled: another function takes the place of what compiles."""
    rank, world = fzero.comm.group.open_world("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_segments, "inductor_compile", lambda gm, inputs: partial(gm.forward))
        patch.setattr(compile_segments, "_workers", lambda *_: [])
        if rank == failing:
            fail_for(bad, patch)
        made = compile_segments.compiled(small(), how="inductor", rank=rank, world_size=world)
    found = {n.target for gm in made.values() for n in gm.graph.nodes if isinstance(n.target, Fused)}
    return sorted(one.digest for one in found if one.run == one.graph.forward)


@needs_compiler
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.sampled(1)
def test_what_fails_on_one_rank_is_aten_on_all(failing: int) -> None:
    bad = next(iter(stretches(small())))
    assert helpers.values(helpers.gloo(2, one_rank, bad, failing)) == [[bad], [bad]]


def test_the_field_is_checked() -> None:
    with pytest.raises(fzero.SpecError, match=r"compile='inducter'\): needed one of .* Did you mean 'inductor'"):
        cases.spec(compile="inducter")
    assert replace(cases.spec(), compile="auto").compile == "auto"
