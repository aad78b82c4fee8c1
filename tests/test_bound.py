"""The executor's form of a program: places that do not clash, segments as calls, and the interpreter's bits."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from helpers import gloo, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.capture import trace_step
from fzero.codegen import bind, segment_memory
from fzero.ir import fx_nodes
from fzero.ir.offset_assignment import ALIGN_BYTES, clash, pack
from fzero.ir.records import PERSISTENT
from fzero.runtime import cuda_graphs
from fzero.runtime.executor import Bound
from fzero.runtime.handlers import spoil
from fzero.runtime.interpreter import interpret
from fzero.tools.fuzz import runs
from fzero.tools.fuzz.runs import run_bound
from fzero.tools.mutate import corpus

aten = torch.ops.aten

# --- places -----------------------------------------------------------------------------------------------------------

lives = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 1000)).map(lambda x: (x[0], x[0] + x[1], x[2]))


@given(st.lists(lives, max_size=60))
@settings(max_examples=150, deadline=None)
def test_what_lives_at_one_moment_lies_apart(items: list[tuple[int, int, int]]) -> None:
    places, total = pack(items)
    assert clash([(a, b, place, size) for (a, b, size), place in zip(items, places, strict=True)]) is None
    assert all(
        place % ALIGN_BYTES == 0 and place + size <= total
        for (_, _, size), place in zip(items, places, strict=True)
        if size
    )
    padded = [(a, b, -(-size // ALIGN_BYTES) * ALIGN_BYTES) for a, b, size in items]
    least = max((sum(size for a, b, size in padded if a <= t <= b) for t in range(60)), default=0)
    assert least <= total <= sum(size for _, _, size in padded)


def test_a_clash_is_found() -> None:
    assert clash([(0, 2, 0, 64), (2, 3, 32, 64)]) == (0, 1)
    assert clash([(0, 2, 0, 64), (3, 4, 0, 64), (0, 4, 64, 8)]) is None
    assert clash([(0, 2, 0, 0), (0, 2, 0, 64)]) is None


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_the_arena_is_little_more_than_what_is_alive(zero: int) -> None:
    init, loss = cases.gpt(512, 128, 6)
    spec = cases.fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=zero, clip_norm=1.0)
    program = fzero.lower(spec, init, cases.tokens(4, 64, 512, 0), world_size=4).program
    from fzero.ir.liveness import live_bytes

    held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT)
    batch = sum(b.nbytes for b in program.buffers.values() if b.kind == "batch")
    alive = max(
        level - held + op.workspace
        for level, op in zip(live_bytes(program.ops, program.buffers), program.ops, strict=True)
    )
    assert alive <= program.arena_bytes <= 1.1 * (alive + batch)


# --- segments ---------------------------------------------------------------------------------------------------------


def operands(gm: Any, draw: torch.Generator) -> list[torch.Tensor]:
    """Values for a segment's placeholders: small numbers, valid as indices, probabilities and divisors alike."""
    found = []
    for node in fx_nodes.placeholders(gm.graph):
        like = node.meta["val"]
        value = torch.rand(like.shape, generator=draw) + 0.5 if like.dtype.is_floating_point else torch.ones(like.shape)
        place = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        found.append(place.copy_(value))
    return found


def check(gm: Any, given: Sequence[torch.Tensor] = ()) -> None:
    """The calls of a segment in spoiled memory give the bits of its graph, and so they do a second time."""
    inputs = list(given) or operands(gm, torch.Generator().manual_seed(0))
    plain = [x.clone() for x in inputs]
    expected = gm(*plain)
    layout = segment_memory.layout(gm)
    block = torch.empty(layout.nbytes, dtype=torch.uint8)
    fresh = [
        torch.empty_strided(n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype)
        for n in fx_nodes.outputs(gm.graph)
    ]
    memory = [x.clone() for x in inputs]
    calls = bind.bind(gm, memory, fresh, block)
    for _ in range(2):
        for tensor, was in zip(memory, inputs, strict=True):
            tensor.copy_(was)
        for tensor in (block, *fresh):
            spoil(tensor)
        for call in calls:
            call()
        for found, wanted in zip((*fresh, *memory), (*expected, *plain), strict=True):
            assert same_bits(found, wanted)


@pytest.mark.parametrize("programs", [10, pytest.param(24, marks=pytest.mark.acceptance)])
def test_segments_as_calls_have_the_bits_of_their_graphs(programs: int) -> None:
    rng = random.Random(3)
    seen: set[str] = set()
    for number in range(programs):
        for program in corpus.draw(rng, number).programs.values():
            for key, gm in program.segments.items():
                if key not in seen:
                    seen.add(key)
                    check(gm)
    assert len(seen) > 4 * programs


def _every_form(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Ops with an `out=` form, with a special form, and with neither; several results; padded embeddings; in place."""
    rows = F.embedding(x.long(), p["table"]) + F.embedding(x.long(), p["table"], padding_idx=1)
    h = F.layer_norm(rows, rows.shape[-1:], p["scale"], p["shift"])
    h = F.silu(h).to(torch.bfloat16).float() * 2 + torch.zeros_like(h) + torch.ones_like(h) / 3
    h = torch.where(h > 0.1, h, torch.full_like(h, 0.1)).clone()
    var, mean = torch.var_mean(h, -1, keepdim=True)
    h = F.pad(h - mean, (1, 2)) * torch.rsqrt(var + 1e-5)
    h = h.transpose(0, 1).contiguous().cumsum(0) + h.transpose(0, 1)
    h.add_(1)
    top, _ = h.sort(-1)
    picked = F.log_softmax(top.flatten(0, 1), -1).gather(1, x.long().flatten()[:, None].clamp(0, 3))
    return torch.logsumexp(top, (0, 1)).sum() - picked.mean() + torch.stack([h.amax(), h.amin()]).sum()


def test_ops_of_every_form() -> None:
    params = {"table": torch.randn(7, 16), "scale": torch.rand(16) + 1, "shift": torch.randn(16)}
    x = torch.randint(0, 7, (4, 8)).float()

    def step(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(_every_form)(state, batch)
        return state, {"loss": value, "grads": grads}

    gm = trace_step.capture(step, params, x).regions[0].gm
    targets = {node.target for node in gm.graph.nodes if fx_nodes.is_compute(node)}
    assert {aten.embedding_dense_backward.default, aten.sort.default, aten.native_layer_norm.default} <= targets
    check(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_an_embedding_is_atens(dtype: torch.dtype) -> None:
    """Rows that are met often: the order of additions, and in what dtype they are made, shows."""
    table, index = torch.randn(9, 24).to(dtype), torch.randint(0, 9, (5, 40))

    def step(state: Any, batch: Any) -> Any:
        return state, fzero.grad(lambda p, b: (F.embedding(b["x"], p) * b["y"]).float().sum())(state, batch)

    gm = trace_step.capture(step, table, {"x": index, "y": torch.randn(5, 40, 24).to(dtype)}).regions[0].gm
    assert aten.embedding_dense_backward.default in {node.target for node in gm.graph.nodes}
    inputs = {torch.int64: [index], dtype: [table, torch.randn(5, 40, 24).to(dtype)]}
    takes = [n.meta["val"] for n in fx_nodes.placeholders(gm.graph)]
    check(gm, given=[x for like in takes for x in inputs[like.dtype] if x.shape == like.shape])


MASK = torch.linspace(-1, 1, 64).view(8, 8).t()
LOSSES = {
    "binary_cross_entropy": lambda p, b: F.binary_cross_entropy(torch.sigmoid(b @ p["w"]), (b > 0).float()),
    "huber_loss": lambda p, b: F.huber_loss(b @ p["w"], b) + (p["w"] ** 2).sum(),
    "soft_margin_loss": lambda p, b: F.soft_margin_loss(b @ p["w"], torch.sign(b)),
    "smooth_l1_loss": lambda p, b: F.smooth_l1_loss(b @ p["w"], b),
    "mse_loss": lambda p, b: F.mse_loss(b @ p["w"], b) + F.mse_loss(p["w"], b, reduction="sum"),
    "qr": lambda p, b: torch.linalg.qr(p["w"])[1].square().mean() + b.mean(),
    "inv": lambda p, b: torch.linalg.inv(p["w"] + 9 * torch.eye(8)).mean() + b.mean(),
    "split_copy": lambda p, b: sum(x.square().sum() for x in torch.split_copy(b @ p["w"], 3)),
    "add with alpha": lambda p, b: torch.ops.aten.add.Scalar(b @ p["w"], 2, 3).square().mean(),
    "a log_softmax that is transposed": lambda p, b: (F.log_softmax(b @ p["w"], -1).t() * b.exp()).sum(),
    "a mask that is not contiguous": lambda p, b: (b @ p["w"] * MASK).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ops_that_use_their_out_for_more_than_the_result(name: str) -> None:
    """Losses whose `out=` kernels resize it or want memory of their own, checks without a result, odd arguments."""
    loss, w, x = LOSSES[name], torch.randn(8, 8), torch.randn(8, 8)
    state = fzero.init({"w": w}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    state = fzero.step(state, x)
    leaf = w.clone().requires_grad_()
    value = loss({"w": leaf}, x)
    value.backward()
    torch.testing.assert_close(state.metrics["loss"], value.detach())
    torch.testing.assert_close(state.params["w"].full(), w - 0.1 * leaf.grad)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(40))
@pytest.mark.sampled(14)
def test_bound_programs_have_the_bits_of_the_interpreter(number: int) -> None:
    case = corpus.draw(random.Random(f"11 {number}"), number)
    plain = [{n: t.clone() for n, t in own.items()} for own in case.memory]
    bound = [{n: t.clone() for n, t in own.items()} for own in case.memory]
    for _ in range(2):
        ranks = interpret(case.programs, plain)
    metrics = run_bound(case.programs, bound, steps=2)
    for rank, a, b, found in zip(ranks, plain, bound, metrics, strict=True):
        assert all(same_bits(a[name], b[name]) for name in case.plan.buffers), case.name
        assert all(same_bits(rank.memory[rank.program.metrics[n]], value) for n, value in found.items()), case.name


def test_the_interpreter_walks_over_memory_as_the_plan_says() -> None:
    """A kernel that returns other strides than torch's shape rule: the mean of its result has the executor's bits."""

    def step(state: Any, batch: Any) -> Any:
        x = batch.view(32, 64).t()
        return state, {"mean": F.batch_norm(x, None, None, state["w"], training=True, eps=0.1).mean()}

    batch = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    made = runs.Prepared({}, {"w": torch.linspace(1, 2, 32)}, [batch], {"step": step, "zero": 0})
    low = runs.lowered(made)
    assert same_bits(runs.bound(made, low)["mean"], runs.interpreted(made, low)["mean"])


def test_a_step_keeps_its_addresses_and_allocates_next_to_nothing() -> None:
    from fzero.cost.allocator import measured_peak

    init, loss = cases.gpt(512, 128, 3)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3)))
    batch = cases.tokens(4, 64, 512, 0)
    state = fzero.step(state, batch)
    where = {name: tensor.data_ptr() for name, tensor in state.runtime.memory.items()}
    arena = state.runtime.arena.data_ptr()
    state, extra = measured_peak(lambda s=state: fzero.step(s, batch))
    assert {name: tensor.data_ptr() for name, tensor in state.runtime.memory.items()} == where
    assert state.runtime.arena.data_ptr() == arena
    program = state.runtime.compiled(batch).program
    heap = max(op.heap for op in program.ops)
    assert extra <= heap + 4096 < program.arena_bytes / 4


def test_an_error_names_its_op_and_marks_the_state_where_it_was_written() -> None:
    state = fzero.init(
        cases.gpt(64, 64, 1)[0], fzero.Spec(loss=cases.gpt(64, 64, 1)[1], optimizer=fzero.optim.sgd(0.1))
    )
    batch = cases.tokens(2, 16, 64, 0)
    state = fzero.step(state, batch)
    bound = state.runtime.bind(state.runtime.compiled(batch))
    ops = bound.program.ops
    update = next(i for i, op in enumerate(ops) if op.is_update)
    assert bound.first_write == update

    def fail() -> None:
        raise RuntimeError("broken kernel")

    early, bound.calls[update - 1] = bound.calls[update - 1], [fail]
    with pytest.raises(RuntimeError, match="broken kernel") as caught:
        fzero.step(state, batch)
    assert f"in op {update - 1}: {ops[update - 1].kind}" in caught.value.__notes__[0]
    bound.calls[update - 1] = early
    state = fzero.step(state, batch)  # nothing had been written
    bound.calls[update].append(fail)
    with pytest.raises(RuntimeError, match="broken kernel"):
        fzero.step(state, batch)
    with pytest.raises(fzero.DonatedError, match="unusable"):
        fzero.step(state, batch)


# --- one CUDA graph ---------------------------------------------------------------------------------------------------


def test_why_a_step_is_not_one_cuda_graph() -> None:
    cuda = torch.device("cuda")
    program = cases.lowered(2, device="cuda").program
    assert cuda_graphs.obstacle(program, cuda) is None
    assert cuda_graphs.obstacle(program, torch.device("cpu")) == "the state is on cpu"
    assert cuda_graphs.obstacle(cases.lowered(2).program, cuda) == "transfers via p2p run on the host"

    assert "one graph" in cases.lowered(2, device="cuda").choices["cuda_graph"]
    graph = torch.fx.Graph()
    x = graph.placeholder("x0")
    x.meta["val"] = torch.empty(4, device="meta")
    read = graph.call_function(aten._local_scalar_dense.default, (x,))
    read.meta["val"] = 1.0
    graph.output([])
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    ops = [op.with_attrs(segment="odd") if op.is_run else op for op in program.ops]
    odd = replace(program, ops=tuple(ops), segments={**program.segments, "odd": gm})
    assert "reads back from the device: aten._local_scalar_dense" in str(cuda_graphs.obstacle(odd, cuda))


class Recorder:
    """Stands for `graphs.record`: what is recorded is what `issue` does, replayed by calling it."""

    def __init__(self, works: bool) -> None:
        self.works, self.num_recorded, self.num_replayed = works, 0, 0

    def __call__(self, bound: Bound) -> Any:
        self.num_recorded += 1
        self.replay_of = bound
        return self if self.works else None

    def replay(self) -> None:
        self.num_replayed += 1
        self.replay_of.issue()


@pytest.mark.parametrize("works", [True, False])
def test_the_second_step_is_recorded_once_and_replayed(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(works)
    monkeypatch.setattr(cuda_graphs, "obstacle", lambda program, device: None)
    monkeypatch.setattr(cuda_graphs, "record", recorder)
    init, loss = cases.gpt(64, 64, 1)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    plain = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), cuda_graph=False))
    for step in range(4):
        state, plain = (fzero.step(s, cases.tokens(2, 16, 64, step)) for s in (state, plain))
        assert same_bits(state.metrics["loss"], plain.metrics["loss"])
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 3 if works else 0)


# --- several ranks ----------------------------------------------------------------------------------------------------


def _retraces(compile: str) -> list[float]:
    """Rank 0 traces the second step again, to the same program."""
    rank = int(os.environ["RANK"])
    init, loss = cases.gpt(64, 64, 2)
    spec = fzero.Spec(loss=lambda p, b: loss(p, b["tokens"]), optimizer=fzero.optim.sgd(0.1), compile=compile)
    state = fzero.init(init, spec)
    found = []
    for number in range(3):
        batch = {"tokens": cases.tokens(2, 16, 64, number), "last": rank == 0 and number == 1}
        state = fzero.step(state, batch)
        found.append(float(state.metrics["loss"]))
    return found


def test_a_rank_that_traces_the_same_program_again_goes_on() -> None:
    first, second = values(gloo(2, _retraces, "none"))
    assert first == second
    assert first[-1] < first[0]


def _fails_once(transfers: str) -> tuple[str, bool]:
    """All ranks fail in the middle of a step, before it writes; the step after has the bits of a run without that."""
    init, loss = cases.gpt(64, 64, 2)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), transfers=transfers, prefetch=2)
    state, twin = fzero.init(init, spec), fzero.init(init, spec)
    state, twin = (fzero.step(s, cases.tokens(2, 16, 64, 0)) for s in (state, twin))
    bad = cases.tokens(2, 16, 64, 1)
    bad["x"][0, 0] = 1000
    try:
        fzero.step(state, bad)
        message = ""
    except IndexError as error:
        message = str(error)
    state, twin = (fzero.step(s, cases.tokens(2, 16, 64, 2)) for s in (state, twin))
    pairs = zip(*(fzero.tree.flatten(fzero.unshard(s.tree))[1] for s in (state, twin)), strict=True)
    return message, all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("transfers", ["shared", "p2p"])
@pytest.mark.sampled(1)
def test_a_step_after_one_that_failed_on_all_ranks(transfers: str) -> None:
    for message, same in values(gloo(2, _fails_once, transfers)):
        assert "index out of range" in message
        assert same
