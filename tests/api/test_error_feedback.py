"""error_feedback: means that travel in codes, compared with loops by hand, over every stage, world and transport; local
gradients; what is said of wrong arguments; and that the verifier knows what the ops mean."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gloo, run, run_reference, same_bits, values
from torch import Tensor

import fzero
from fzero import tree
from fzero.ir.program import wire_bytes
from fzero.session.session import session_of
from lab.mutate import Bench
from lab.mutate.corpus import lowered
from lab.mutate.models import MODELS

SHAPES = {"w": (9, 50), "b": (3,), "c": (130,)}  # no leaf is whole blocks
SIZE = sum(-(-math.prod(shape) // 64) * 64 for shape in SHAPES.values())  # each in whole blocks of 64
STEPS = 3


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) * scale for name, shape in SHAPES.items()}


def batch(rank: int, number: int) -> dict[str, Tensor]:
    return drawn(100 * number + rank)


def spec(codec: str, both: bool, feedback: bool = True, **options: Any) -> fzero.Spec:
    """A step that keeps the coded mean of what each rank is given."""

    def step(state: Any, batch: Any) -> Any:
        mean, error = fzero.coded_mean(batch, state.get("error"), codec, both_ways=both)
        return {
            **state,
            "params": tree.map(torch.add, state["params"], mean),
            **({"error": error} if feedback else {}),
        }, {}

    return fzero.Spec(step=step, **options)


def first(both: bool, feedback: bool = True) -> dict[str, Any]:
    zeros = tree.map(torch.zeros_like, drawn(0))
    return {"params": zeros, **({"error": fzero.coded_error(zeros, both_ways=both)} if feedback else {})}


# --- by hand, in numpy and double precision ---------------------------------------------------------------------------


def through(blocks: np.ndarray, codec: str, counts: np.ndarray) -> np.ndarray:
    """What comes back of rows of 64: their signs by the root of their mean square, or 8 bits by their largest."""
    if codec == "sign":
        scale = np.sqrt((blocks**2).sum(1, keepdims=True) / counts[:, None])
        return np.where(blocks >= 0, scale, -scale)
    most = np.abs(blocks).max(1, keepdims=True)
    return np.where(most > 0, np.round(blocks / np.where(most > 0, most, 1) * 127) * most / 127, 0.0)


def flat(leaves: dict[str, Tensor], length: int) -> np.ndarray:
    parts = [np.pad(leaves[k].double().numpy().ravel(), (0, -leaves[k].numel() % 64)) for k in sorted(leaves)]
    return np.pad(np.concatenate(parts), (0, length - SIZE))


def by_hand(world: int, codec: str, both: bool, feedback: bool) -> dict[str, np.ndarray]:
    length = -(-SIZE // (64 * world)) * 64 * world
    held = flat({name: torch.ones(shape) for name, shape in SHAPES.items()}, length).reshape(-1, 64)
    back = lambda x: (through(x.reshape(-1, 64), codec, held.sum(1).clip(1)) * held).ravel()  # noqa: E731
    seen, worker, server = np.zeros(length), np.zeros((world, length)), np.zeros(length)
    for number in range(STEPS):
        total = np.zeros(length)
        for rank in range(world):
            x = flat(batch(rank, number), length) + (worker[rank] if feedback else 0)
            total += back(x)
            worker[rank] = x - back(x)
        mean = total / world
        if both:
            x = mean + (server if feedback else 0)
            mean, server = back(x), x - back(x)
        seen += mean
    result, at = {}, 0
    for name in sorted(SHAPES):
        numel = math.prod(SHAPES[name])
        result[f"params/{name}"] = seen[at : at + numel].reshape(SHAPES[name])
        at += -(-numel // 64) * 64
    errors = {"error/worker": worker[:, :SIZE], **({"error/server": server.reshape(world, -1)} if both else {})}
    return {**result, **errors} if feedback else result


@pytest.mark.parametrize(
    ("codec", "both", "world"), [("sign", True, 2), ("sign", False, 3), ("int8", True, 3), ("int8", False, 2)]
)
def test_the_mean_and_the_errors_are_those_by_hand(codec: str, both: bool, world: int) -> None:
    done = run(spec(codec, both, zero=3), first(both), batch, world=world, steps=STEPS)
    for name, wanted in by_hand(world, codec, both, feedback=True).items():
        assert np.allclose(done.final[name].double().numpy(), wanted, atol=2e-5), name


def test_without_an_error_what_is_lost_is_lost() -> None:
    done = run(spec("sign", True, feedback=False), first(True, feedback=False), batch, world=2, steps=STEPS)
    wanted = by_hand(2, "sign", True, feedback=False)
    assert all(np.allclose(done.final[name].double().numpy(), wanted[name], atol=2e-5) for name in wanted)
    kept = by_hand(2, "sign", True, feedback=True)
    assert not np.allclose(wanted["params/c"], kept["params/c"], atol=1e-2), "the two differ"


@pytest.mark.parametrize(("codec", "world"), [("sign", 2), ("int4", 3), ("e5m2", 1)])
@pytest.mark.sampled(2)
def test_every_stage_has_the_bits_of_the_reference(codec: str, world: int) -> None:
    both = codec != "e5m2"
    leaves = []
    for zero in range(4):
        made = spec(codec, both, zero=zero, bucket_bytes=1024)
        leaves.append(run(made, first(both), batch, world=world, steps=2).final)
        assert all(same_bits(leaves[0][name], leaves[-1][name]) for name in leaves[0]), zero
    one = spec(codec, both)
    if world > 1:  # what each rank keeps differs
        one = spec(codec, both, feedback=False)
        wanted, _ = run_reference(one, first(both, feedback=False), batch, world=world, steps=2)
        got = run(one, first(both, feedback=False), batch, world=world, steps=2).final
        assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_two_data_axes_are_one() -> None:
    mesh = {"dp_out": 2, "dp": 2}
    two = run(spec("sign", True, mesh=mesh), first(True), batch, world=4, steps=2)
    one = run(spec("sign", True), first(True), batch, world=4, steps=2)
    assert all(same_bits(two.final[name], one.final[name]) for name in one.final)


def real(transfers: str, mesh: dict[str, int] | None) -> list[bytes]:
    """The state after some steps, as bytes."""
    state = fzero.init(first(True), spec("sign", True, zero=1, transfers=transfers, mesh=mesh))
    for number in range(STEPS):
        state = fzero.step(state, batch(session_of(state).rank, number))
    return [leaf.full().numpy().tobytes() for leaf in tree.flatten(state.tree)[1]]


@pytest.mark.parametrize(
    ("world", "transfers", "mesh"), [(2, "p2p", None), (3, "shared", None), (4, "p2p", {"dp_out": 2, "dp": 2})]
)
@pytest.mark.sampled(2)
def test_every_transport_has_the_same_bits(world: int, transfers: str, mesh: dict[str, int] | None) -> None:
    done = run(spec("sign", True, zero=1), first(True), batch, world=world, steps=STEPS)
    wanted = [done.final[path].numpy().tobytes() for path in done.paths]
    assert all(got == wanted for got in values(gloo(world, real, transfers, mesh)))


def test_its_bytes_are_those_of_the_codes() -> None:
    program = fzero.lower(spec("sign", True, zero=0), first(True), batch(0, 0), world_size=2).program
    sent = {op.kind: wire_bytes(program, op) for op in program.ops if op.is_collective}
    assert sent == {"all_to_all": 768 // 2 * 12 // 64, "all_gather": 768 // 2 * 12 // 64}
    one_way = fzero.lower(spec("int8", False, zero=0), first(False), batch(0, 0), world_size=2).program
    sent = {op.kind: wire_bytes(one_way, op) for op in one_way.ops if op.is_collective}
    assert sent == {"all_to_all": 768 // 2 * 68 // 64, "all_gather": 768 // 2 * 4}


# --- values -----------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_shows_on_every_rank() -> None:
    def lost(rank: int, number: int) -> dict[str, Tensor]:
        given = batch(rank, number)
        given["w"].view(-1)[70] = torch.nan if rank else 1.0
        return given

    done = run(spec("sign", True), first(True), lost, world=2, steps=1)
    bad = ~done.final["params/w"].view(-1).isfinite()
    assert bad.nonzero().flatten().tolist() == list(range(64, 128)), "its block alone"
    assert done.final["params/c"].isfinite().all()


def test_blocks_of_zeros_stay_zero() -> None:
    def some(rank: int, number: int) -> dict[str, Tensor]:
        given = tree.map(torch.zeros_like, batch(rank, number))
        given["c"][:64] = 1.0 + rank
        return given

    done = run(spec("sign", True), first(True), some, world=2, steps=2)
    assert (done.final["params/c"][64:] == 0).all()
    assert (done.final["params/w"] == 0).all()
    assert torch.allclose(done.final["params/c"][:64], torch.tensor(3.0))


# --- local gradients --------------------------------------------------------------------------------------------------


def loss(params: Any, batch: Any) -> Any:
    error = (torch.tanh(batch["x"] @ params["w"]) - batch["y"]).square().sum(1)
    return fzero.Mean((error * batch["mask"]).sum(), batch["mask"].sum()) if "mask" in batch else error.mean()


def rows(rank: int, number: int, masked: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(10 * number + rank)
    given = {"x": torch.randn(4, 6, generator=g), "y": torch.randn(4, 5, generator=g)}
    return {**given, "mask": torch.tensor([1.0, 1.0, rank, 0.0])} if masked else given


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_of_local_gradients_is_the_gradient(masked: bool, microbatches: int) -> None:
    def step(state: Any, batch: Any) -> Any:
        whole, grads = fzero.value_and_grad(loss)(state["params"], batch)
        value, own = fzero.value_and_grad(loss, reduce=False)(state["params"], batch)
        return {**state, "own": own}, {"loss": whole, "same": value, "mean": fzero.pmean(own), "grads": grads}

    params = {"w": torch.randn(6, 5, generator=torch.Generator().manual_seed(0))}
    state = {"params": params, "own": fzero.per_rank(params)}
    one = fzero.Spec(step=step, microbatches=microbatches, zero=2)
    done = run(one, state, lambda rank, number: rows(rank, number, masked), world=2, steps=1)
    for metrics in done.metrics[0]:
        assert torch.equal(metrics["loss"], metrics["same"])
        assert torch.allclose(metrics["mean/w"], metrics["grads/w"], atol=1e-6)
    first_rank, second = done.final["own/w"]
    assert not torch.allclose(first_rank, second, atol=1e-3)
    w = params["w"].clone().requires_grad_()
    if not masked:
        (wanted,) = torch.autograd.grad(loss({"w": w}, rows(1, 0)), w)
        assert torch.allclose(second, wanted, atol=1e-6)


def test_a_forgotten_reduction_is_told() -> None:
    def step(state: Any, batch: Any) -> Any:
        _, grads = fzero.value_and_grad(loss, reduce=False)(state, batch)
        return tree.map(torch.sub, state, grads), {}

    with pytest.raises(fzero.CaptureError, match=r"state\['w'\] would differ between ranks: .*fzero.coded_mean"):
        fzero.lower(fzero.Spec(step=step), {"w": torch.ones(6, 5)}, rows(0, 0), world_size=2)


# --- errors -----------------------------------------------------------------------------------------------------------


def called(x: Any, error: Any, codec: str = "sign", **options: Any) -> None:
    fzero.coded_mean(x, error, codec, **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({"w": torch.ones(2)}, None, "int3"), r"coded_mean\(codec='int3'\): needed one of int8, int4"),
        (({"w": torch.ones(2).double()}, None), r"x\['w'\]: .*f64.* Reduce such a leaf by fzero.pmean"),
        (({"n": torch.ones(2, dtype=torch.int64)}, None), r"x\['n'\]"),
        (({"w": torch.ones(2)}, torch.zeros(64)), "needed a CodedError of this call, got Tensor"),
        (
            ({"w": torch.ones(2)}, fzero.CodedError(torch.zeros(64), torch.zeros(64))),
            r"that of the other both_ways: fzero.coded_error\(x\) makes the first",
        ),
        (
            ({"w": torch.ones(2)}, fzero.CodedError(torch.zeros(128), None)),
            "worker has 128 elements, x has 64 in whole",
        ),
        (({"w": torch.ones(2)}, fzero.CodedError(torch.zeros(64).bfloat16(), None)), "needed fp32 of one dim"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(fzero.FzeroError, match=said):
        called(*arguments)


def test_the_error_of_another_world_and_a_pipeline_are_refused() -> None:
    state = first(True)
    state["error"] = fzero.CodedError(state["error"].worker, fzero.per_rank(torch.zeros(64)))
    with pytest.raises(fzero.SpecError, match="server has 64 elements, a slice of this world has 384"):
        fzero.lower(spec("sign", True), state, batch(0, 0), world_size=2)

    def inside(params: Any, batch: Any) -> Tensor:
        return fzero.coded_mean(params, None, "sign")[0]["w"].sum()

    one = fzero.Spec(loss=inside, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match="coded_mean was called inside a loss"):
        fzero.lower(one, {"w": torch.ones(64)}, batch(0, 0), world_size=2)


def layered() -> tuple[Any, Any]:
    """(a step of two layers whose gradients travel in signs, its first state)."""

    def of_layers(p: Any, x: Tensor) -> Tensor:
        for name in "01":
            x = torch.tanh(x @ p["layers"][name]["w"])
        return x.square().mean()

    def step(state: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(of_layers, reduce=False)(state["params"], x)
        mean, error = fzero.coded_mean(grads, state["error"], "sign", both_ways=True)
        return {"params": tree.map(torch.sub, state["params"], mean), "error": error}, {"loss": value}

    g = torch.Generator().manual_seed(0)
    params = {"layers": {name: {"w": torch.randn(16, 16, generator=g)} for name in "01"}}
    return step, {"params": params, "error": fzero.coded_error(params, both_ways=True)}


def test_a_pipeline_is_refused_and_tp_is_not() -> None:
    step, state = layered()
    with pytest.raises(fzero.SpecError, match="with mesh axis 'pp' a rank has only those of its stage"):
        fzero.lower(fzero.Spec(step=step, mesh={"pp": 2, "dp": 2}, microbatches=2), state, torch.zeros(4, 16))
    cut = {"**/0/w": fzero.P(None, "tp"), "**/1/w": fzero.P("tp", None)}
    x = lambda rank, number: torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))  # noqa: E731
    runs = [
        run(fzero.Spec(step=step, mesh={"dp": 2, "tp": 2}, shard=cut, zero=zero), state, x, world=4, steps=2).final
        for zero in (0, 3)
    ]
    assert all(same_bits(runs[0][name], runs[1][name]) for name in runs[0])


def test_outside_a_step_it_is_one_rank() -> None:
    x = drawn(1)
    error = fzero.CodedError(torch.full((SIZE,), 0.25), torch.full((SIZE,), 0.5))
    mean, after = fzero.coded_mean(x, error, "sign", both_ways=True)
    assert torch.equal(mean["b"], x["b"] + 0.25 + 0.5)
    assert not after.worker.any()
    assert not after.server.any()


# --- the verifier -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["drop an op", "exchange two ops", "swap two reads", "wrong write", "drop a wait"])
@pytest.mark.sampled(2)
def test_what_changes_its_meaning_is_refused(kind: str) -> None:
    """Codes that do not travel, that are decoded before they arrive, errors that are not kept or of the other end."""
    placed = {"zero": 1, "microbatches": 1}
    bench = Bench(lowered("coded", MODELS["coded"], fzero.optim.sgd(0.1), placed, 2, torch.Generator().manual_seed(0)))
    assert bench.refused is None
    changing = 0
    for mutant in bench.mutants(kind, random.Random(0), tries=40):
        if mutant.changes is not None:
            changing += 1
            assert mutant.refused is not None, f"{kind}: {mutant.changes}"
    assert changing
