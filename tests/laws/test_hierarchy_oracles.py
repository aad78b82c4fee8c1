"""Two data axes beside eager PyTorch, sums of the ranks' own values, formulas, and states of other meshes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from helpers import Run, gloo, relative, run, same_bits, start, values
from loading import noise, read, write

import fzero
from fzero import functional, optim, tree
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.errors import VerifyError
from fzero.ir.liveness import gathered_bytes
from fzero.ir.mesh import Mesh
from fzero.ir.program import Program, wire_bytes
from fzero.state import storage
from fzero.training import training_of
from fzero.verify.rules import verify

INIT, LOSS = cases.gpt(64, 16, 2, 2)
BOTH = {"dp_out": 2, "dp": 2}
HFSDP = {"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")}
NAMED: dict[str, Any] = {"hsdp": "hsdp", "hpz": "hpz", "optimizer over both": HFSDP}


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, 8, 64, rank + 10 * step)


ADAMW = optim.adamw(1e-2)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": LOSS, "optimizer": ADAMW, "transfers": "p2p", "mesh": BOTH}
    return fzero.Spec(**{**made, **given})


# --- eager PyTorch ----------------------------------------------------------------------------------------------------


def eager(steps: int, world: int = 4) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(parameters by path, losses) of `torch.optim.AdamW` on the mean of the ranks' losses."""
    paths, leaves, treedef = tree.flatten(INIT(fzero.random.key(0)))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    adam = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        params = tree.unflatten(treedef, leaves)
        loss = torch.stack([LOSS(params, tokens(rank, step)) for rank in range(world)]).mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return {path: leaf.detach() for path, leaf in zip(paths, leaves, strict=True)}, losses


@pytest.mark.parametrize("zero", NAMED)
@pytest.mark.sampled(1)
def test_beside_eager_adamw(zero: str) -> None:
    params, losses = eager(5)
    tx = optim.adamw(1e-2, weight_decay=0.01)
    found = run(spec(zero=NAMED[zero], optimizer=tx), INIT(fzero.random.key(0)), tokens, world=4, steps=5)
    assert found.losses() == pytest.approx(losses, rel=1e-5)
    worst = {path: relative(found.final[f"params/{path}"], leaf) for path, leaf in params.items()}
    assert max(worst.values()) < 1e-5, worst


# --- leaves and reductions of one's own -------------------------------------------------------------------------------


def reductions(state: Any, batch: Any) -> Any:
    """Every reduction there is, over all data ranks, beside a leaf that every rank keeps for itself."""
    own = state["own"] + batch.sum(0)
    new = {"w": state["w"] + functional.pmean(batch), "sum": functional.psum(own), "own": own}
    return new, {"top": functional.pmax(batch.max()), "place": functional.psum(fzero.axis_index() * own[0])}


@pytest.mark.parametrize("mesh", [BOTH, {"dp_out": 3, "dp": 2}, {"dp_out": 2, "dp": 3}])
@pytest.mark.parametrize("zero", [0, 3, "hsdp", "hpz"])
@pytest.mark.sampled(1)
def test_per_rank_leaves_and_reductions(zero: Any, mesh: dict[str, int]) -> None:
    world = mesh["dp_out"] * mesh["dp"]
    state = {"w": torch.zeros(3, 5), "sum": torch.zeros(5), "own": fzero.per_rank(torch.zeros(5))}
    batches = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    one = fzero.Spec(step=reductions, mesh=mesh, zero=zero, params="**")
    found = run(one, state, lambda rank, step: batches[rank], world=world, steps=1)
    own = [batch.sum(0) for batch in batches]
    in_order, total = batches[0], own[0]
    for rank in range(1, world):
        in_order, total = in_order + batches[rank], total + own[rank]
    assert torch.equal(found.final["w"], in_order / world), "added in the order of ranks, divided once"
    assert torch.equal(found.final["sum"], total)
    assert torch.equal(found.final["own"], torch.stack(own)), "each rank keeps its own"
    assert found.losses("top") == [float(torch.stack(batches).max())]
    assert found.losses("place")[0] == pytest.approx(float(sum(r * x[0] for r, x in enumerate(own))), rel=1e-5)


# --- other states -----------------------------------------------------------------------------------------------------


def odd_init(key: torch.Tensor) -> Any:
    """Leaves of prime sizes: no slice ends with a leaf."""
    shapes = {"a": (7, 13), "b": (13, 11), "c": (11, 5), "bias": (5,)}
    return {name: fzero.random.normal(fzero.random.fold_in(key, n), s) * 0.3 for n, (name, s) in
            enumerate(shapes.items())}  # fmt: skip


def odd_loss(p: Any, batch: Any) -> torch.Tensor:
    x = torch.tanh(torch.tanh(batch["x"] @ p["a"]) @ p["b"]) @ p["c"] + p["bias"]
    return ((x - batch["y"]) ** 2).mean()


def pairs(rank: int, step: int) -> Any:
    g = torch.Generator().manual_seed(rank + 10 * step)
    return {"x": torch.randn(4, 7, generator=g), "y": torch.randn(4, 5, generator=g)}


STATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two microbatches": {"microbatches": 2, "reduce": "each"},
    "8-bit moments": {"optimizer": optim.adamw8bit(1e-2)},
    "trainable": {"trainable": ("b", "bias")},
    "buckets of a leaf": {"bucket_bytes": 64, "transfers": "shared"},
}


@pytest.mark.parametrize("given", STATES)
@pytest.mark.parametrize("mesh", [BOTH, {"dp_out": 3, "dp": 2}, {"dp_out": 2, "dp": 3}], ids=str)
@pytest.mark.sampled(1)
def test_odd_sizes_have_the_bits_of_zero_3(given: str, mesh: dict[str, int]) -> None:
    world = mesh["dp_out"] * mesh["dp"]

    def trained(zero: Any) -> Run:
        one = spec(loss=odd_loss, mesh=mesh, zero=zero, **STATES[given])
        return run(one, odd_init(fzero.random.key(1)), pairs, world=world, steps=3)

    expected = trained(3)
    for zero in (*NAMED.values(), 1):
        found = trained(zero)
        assert [p for p in expected.final if not same_bits(found.final[p], expected.final[p])] == [], zero
        assert found.losses() == expected.losses(), zero


def test_frozen_parameters_stay_as_they_were() -> None:
    given = odd_init(fzero.random.key(1))
    for zero in NAMED.values():
        one = spec(loss=odd_loss, zero=zero, trainable="b")
        found = run(one, given, pairs, world=4, steps=2)
        assert [p for p, x in given.items() if torch.equal(found.final[f"params/{p}"], x)] == ["a", "c", "bias"]


# --- checkpoints ------------------------------------------------------------------------------------------------------

PLACED: dict[str, tuple[Any, dict[str, int]]] = {
    "hsdp": ("hsdp", BOTH),
    "hpz": ("hpz", {"dp_out": 3, "dp": 2}),
    "optimizer over both": (HFSDP, BOTH),
    "zero=3 on 4": (3, {"dp": 4}),
    "zero=3 on 2": (3, {"dp": 2}),
    "zero=1 on both": (1, {"dp_out": 2, "dp": 3}),
}


@pytest.mark.parametrize("one", PLACED)
@pytest.mark.parametrize("two", PLACED)
@pytest.mark.sampled(2)
def test_a_checkpoint_of_one_placement_is_loaded_in_another(one: str, two: str, tmp_path: Path) -> None:
    """Bit for bit, padding included; every shard is written by one rank of those that hold it."""
    specs = [spec(zero=zero, mesh=mesh, loss=odd_loss) for zero, mesh in (PLACED[one], PLACED[two])]
    params = odd_init(fzero.random.key(1))
    paths, leaves = start(specs[0], params)
    treedef = tree.flatten(training_of(specs[0]).init(params, None))[2]
    leaves = [noise(leaf, i) for i, leaf in enumerate(leaves)]
    plans = [plan_for(s, paths, leaves, (), mesh_of(s, None)) for s in specs]
    memory = [storage.shards(plans[0], leaves, rank) for rank in range(plans[0].world_size)]
    for rank, found in enumerate(read(write(tmp_path, plans[0], memory, treedef), plans[1])):
        wanted = storage.shards(plans[1], leaves, rank)
        assert [name for name, x in found.items() if not same_bits(x, wanted[name])] == [], rank


# --- real processes ---------------------------------------------------------------------------------------------------


def measured(params: Any, batch: Any) -> Any:
    rows = batch["x"].float().sum(1)
    mean = fzero.Mean(rows.sum(), torch.tensor(float(len(rows))))
    return {"mean": LOSS(params, batch), "rows": mean, "norm": params["wte"].norm()}


def around(folder: str) -> dict[str, Any]:
    """On 2 x 2: a step under HSDP, evaluated and saved; loaded under hpZ, and a step more there and here."""
    torch.set_num_threads(1)
    state = fzero.init(INIT, spec(zero="hsdp"), key=fzero.random.key(0))
    rank = state.runtime.rank
    state = fzero.step(state, tokens(rank, 0))
    before = fzero.evaluate(state, tokens(rank, 1), measured)
    fzero.save(state, folder)
    other = fzero.load(folder, spec(zero="hpz"), like=INIT(fzero.random.key(1)))
    after = fzero.evaluate(other, tokens(rank, 1), measured)
    same = [tree.flatten(fzero.unshard(fzero.step(s, tokens(rank, 1)).tree))[1] for s in (state, other)]
    return {
        "evaluated": [{name: float(value) for name, value in found.items()} for found in (before, after)],
        "differ": [i for i, (a, b) in enumerate(zip(*same, strict=True)) if not torch.equal(a, b)],
        "params": [leaf.clone() for leaf in same[0]][:1],
    }


@pytest.mark.acceptance
def test_processes_evaluate_save_and_go_on(tmp_path: Path) -> None:
    found = values(gloo(4, around, str(tmp_path)))
    expected = run(spec(zero=3), INIT(fzero.random.key(0)), tokens, world=4, steps=1, key=fzero.random.key(0))
    params = expected.final
    rebuilt = tree.unflatten(
        tree.flatten(INIT(fzero.random.key(0)))[2], [x for p, x in params.items() if p.startswith("params/")]
    )
    losses = [float(LOSS(rebuilt, tokens(rank, 1))) for rank in range(4)]
    rows = torch.cat([tokens(rank, 1)["x"].float().sum(1) for rank in range(4)])
    wanted = {"mean": sum(losses) / 4, "rows": float(rows.mean()), "norm": float(rebuilt["wte"].norm())}
    for rank in found:
        assert rank["differ"] == []
        for evaluated in rank["evaluated"]:
            assert evaluated == pytest.approx(wanted, rel=1e-5)


# --- bytes over each axis ---------------------------------------------------------------------------------------------
# P: bytes of the parameters, g gathers of each in a step, k reductions; D = dp, O = dp_out.

WIDE: Any = {f"{n}": {"w": torch.empty(96, 96, device="meta")} for n in range(4)}


def wide_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in p.values():
        x = torch.tanh(x @ layer["w"])
    return x.square().mean()


FORMULAS: dict[str, tuple[Any, str, str, str]] = {  # zero, then as docs/parallel.md has them: held, inner, outer
    "0": (0, "3 P", "2 k r P", "2 s P"),
    "1, 2": (1, "P + 2 P / DO", "(k + 1) r P", "2 s P / D"),
    "3": (3, "3 P / DO", "(k + g) r P", "(g + 1) s P / D"),
    '"hsdp"': ("hsdp", "3 P / D", "(k + g) r P", "2 s P / D"),
    '"hpz"': ("hpz", "3 P / DO", "(k + g) r P", "2 s P / D"),
    "optimizer over both": (HFSDP, "P / D + 2 P / DO", "(k + g) r P", "2 s P / D"),
}


def value_of(formula: str, known: dict[str, float]) -> float:
    """A formula of the table: names beside one another are multiplied."""
    one = {"r": (known["D"] - 1) / known["D"], "s": (known["O"] - 1) / known["O"], **known}
    text = formula.replace("DO", "(D * O)")
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    return float(eval(text, {"__builtins__": {}}, one))


@pytest.mark.parametrize("zero", FORMULAS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.sampled(2)
def test_held_and_sent_bytes_are_those_of_the_table(zero: str, k: int) -> None:
    mesh = {"dp_out": 3, "dp": 2}
    placed, held, inner, outer = FORMULAS[zero]
    one = spec(zero=placed, loss=wide_loss, mesh=mesh, microbatches=k, reduce="each", bucket_bytes=1 << 12)
    lowered = fzero.lower(one, WIDE, torch.empty(4, 96, device="meta"))
    program = lowered.program
    sent: Counter[str] = Counter()
    gathers: Counter[str] = Counter()
    for op in program.ops:
        if op.is_collective and not op.row.small:
            sent[str(op.axis)] += wire_bytes(program, op)
            gathers[str(op.axis)] += op.gathers
    size = sum(b.length for b in lowered.plan.buckets.values()) * 4
    known = {"P": size, "D": 2, "O": 3, "k": k, "g": gathers["dp"] / len(lowered.plan.buckets)}  # of equal buckets
    assert lowered.plan.state_bytes - 24 <= value_of(held, known) <= lowered.plan.state_bytes
    assert sent["dp"] == pytest.approx(value_of(inner, known), rel=1e-12)
    assert sent["dp_out"] == pytest.approx(value_of(outer, known), rel=1e-12)


def test_the_table_is_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    for zero, (_, held, inner, outer) in FORMULAS.items():
        shown = zero if '"' not in zero else f"`{zero}`"
        rows = [line for line in text.splitlines() if line.startswith(f"| {shown} |")]
        assert any(f"| {held} | {inner} | {outer} |" in row for row in rows), zero


# --- larger slices on their way ---------------------------------------------------------------------------------------


def test_two_larger_slices_are_on_their_way_at_most() -> None:
    """zero=3 holds no layer's larger slice from the start of the step: gathers over the outer axis start one ahead."""
    one = spec(zero=3, loss=wide_loss, bucket_bytes=1 << 12, prefetch=0)
    program = fzero.lower(one, WIDE, torch.empty(4, 96, device="meta")).program
    live: set[str] = set()
    most = 0
    for op in program.ops:
        live |= {ref.name for ref in op.writes if ref.name.endswith(".near")}
        most = max(most, len(live))
        live -= {ref.name for ref in op.reads} if op.is_free else set()
    assert 1 < most <= 3  # two on their way, and the source of a gather over the inner axis


@pytest.mark.parametrize("zero", [3, "hsdp", "hpz", HFSDP], ids=str)
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.sampled(2)
def test_the_cap_counts_larger_slices_until_they_are_freed(zero: Any, prefetch: int) -> None:
    """Lowering verifies, and so it refuses its own program if the cap is too small."""
    one = spec(zero=zero, loss=wide_loss, bucket_bytes=1 << 12, prefetch=prefetch, microbatches=2, remat="full")
    lowered = fzero.lower(one, WIDE, torch.empty(4, 96, device="meta"))
    assert max(gathered_bytes(lowered.program.ops, lowered.program.buffers)) == lowered.program.gather_cap_bytes


# --- what lab.mutate found --------------------------------------------------------------------------------------------


def hsdp_over_shared_memory() -> Program:
    one = spec(zero="hsdp", loss=wide_loss, mesh={"dp_out": 3, "dp": 2}, transfers="shared")
    return fzero.lower(one, WIDE, torch.empty(4, 96, device="meta")).program


def test_a_bucket_is_not_sent_whole_to_every_rank() -> None:
    program = hsdp_over_shared_memory()
    at = next(i for i, op in enumerate(program.ops) if op.kind == "all_reduce")
    ops = [replace(op, kind="all_reduce_small") if i == at else op for i, op in enumerate(program.ops)]
    with pytest.raises(VerifyError, match="all_reduce sends each rank its part"):
        verify(replace(program, ops=tuple(ops)))


def test_another_number_of_outer_ranks_is_another_meaning() -> None:
    """No slice shows it: under HSDP all are cut along the inner axis."""
    program = hsdp_over_shared_memory()
    with pytest.raises(VerifyError, match="computes something else"):
        verify(replace(program, mesh=Mesh((("dp_out", 4), ("dp", 2)))))
