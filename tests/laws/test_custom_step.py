"""Spec(step=...): a user's own step means the same however its state is sharded.

What a step may hold (an EMA, frozen and tied leaves, two networks, casts, transforms, reductions, leaves of every
kind), what it may not (a value that would differ between ranks), and what `init`, `unshard` and `ShardedTensor` show.
Most runs are interpreted; the checks named `rank_*` run in gloo processes, all of them in one world of each size.
"""

import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import differing, gloo, relative, run, run_reference, same_bits, values
from models import generator, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import optim, random, tree
from fzero.cost.allocator import measured_peak
from fzero.ir.mesh import Mesh
from fzero.plan.layout import layout
from fzero.plan.state_plan import Plan
from fzero.state import storage
from fzero.state.first_state import Recipe

worlds = pytest.mark.parametrize("world", [1, 2, 3, 4])
stages = pytest.mark.parametrize("zero", [0, 1, 2, 3])
CLOSE = 1e-5


def ints(rank: int, step: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator(rank, step))


def floats(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(rank, step))


def joined(batch: Callable[[int, int], Any], world: int, step: int) -> Any:
    """The global batch."""
    return tree.map(lambda *parts: torch.cat(parts), *(batch(rank, step) for rank in range(world)))


def by_path(values_of: Any) -> dict[str, Tensor]:
    paths, leaves, _ = tree.flatten(values_of)
    return dict(zip(paths, leaves, strict=True))


def close(found: dict[str, Tensor], expected: Any, prefix: str = "", tolerance: float = CLOSE) -> None:
    for path, value in by_path(expected).items():
        gap = relative(found[prefix + path], value.detach())
        assert gap <= tolerance, f"{prefix + path} differs by {gap:.1e}"


# --- an EMA, a frozen part, tied weights ------------------------------------------------------------------------------

WORDS, WIDTH, DECAY = 23, 10, 0.9
TX = optim.adamw(2e-2)


def tied_params(key: Tensor) -> Any:
    k = random.split(key, 2)
    return {"embedding": normal(k[0], WORDS, WIDTH), "layers": [{"w": normal(k[1], WIDTH, 7), "b": torch.zeros(7)}]}


def frozen_part(key: Tensor) -> Any:
    return {"layers": [{"w": normal(random.fold_in(key, 9), 7, WIDTH)}]}


def tied_state(key: Tensor) -> Any:
    params = tied_params(key)
    return {"params": params, "opt": TX.init(params), "ema": params, "frozen": frozen_part(key)}


def tied_loss(params: Any, batch: Any, frozen: Any) -> Tensor:
    x = F.embedding(batch["x"], params["embedding"])
    x = x + torch.tanh(x @ params["layers"][0]["w"] + params["layers"][0]["b"]) @ frozen["layers"][0]["w"]
    return F.cross_entropy(x @ params["embedding"].T, batch["y"])


def tied_step(state: Any, batch: Any) -> Any:
    loss, grads = fzero.value_and_grad(tied_loss)(state["params"], batch, state["frozen"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optim.apply_updates(state["params"], updates)
    ema = tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, state["ema"], params)
    return {"params": params, "opt": opt, "ema": ema, "frozen": state["frozen"]}, {"loss": loss}


def tied_batch(rank: int, step: int) -> Any:
    x = ints(rank, step, WORDS, 4, 2)
    return {"x": x[:, 0].contiguous(), "y": x[:, 1].contiguous()}


def tied_spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(step=tied_step, **options)


@stages
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.sampled(1)
def test_ema_frozen_and_tied_train_as_torch_does(world: int, zero: int) -> None:
    start = tied_state(random.key(3))
    result = run(tied_spec(zero=zero, microbatches=2), start, tied_batch, world=world, steps=8, every_step=True)
    paths, leaves, structure = tree.flatten(tied_params(random.key(3)))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    stepper = torch.optim.AdamW(leaves, lr=2e-2)
    averages = [leaf.detach().double() for leaf in leaves]
    for step, (loss, now) in enumerate(zip(result.losses(), result.leaves, strict=True)):
        stepper.zero_grad()
        own = tied_loss(tree.unflatten(structure, leaves), joined(tied_batch, world, step), start["frozen"])
        own.backward()
        stepper.step()
        assert math.isclose(loss, own.item(), rel_tol=CLOSE)
        state = dict(zip(result.paths, now, strict=True))
        close(state, dict(zip(paths, leaves, strict=True)), "params/")
        for i, path in enumerate(paths):
            averages[i] = DECAY * averages[i] + (1 - DECAY) * state[f"params/{path}"].double()
            assert relative(state[f"ema/{path}"], averages[i]) <= 1e-6, f"the EMA of {path} at step {step}"
        assert same_bits(state["frozen/layers/0/w"], start["frozen"]["layers"][0]["w"])
    assert relative(result.final["params/embedding"], start["params"]["embedding"]) > 1e-2, "it trained"


def test_ema_frozen_and_tied_have_equal_bits_under_every_stage() -> None:
    finals = [run(tied_spec(zero=z), tied_state(random.key(3)), tied_batch, world=3, steps=5).final for z in range(4)]
    assert [differing(final, finals[0]) for final in finals] == [[], [], [], []]


@stages
def test_an_ema_is_updated_where_it_lies(zero: int) -> None:
    """One elementwise op a bucket does optimizer and EMA, on the own slices; no moment and no EMA is gathered."""
    program = fzero.lower(tied_spec(zero=zero), tied_state(random.key(3)), tied_batch(0, 0), world_size=4).program
    gathered = {ref.name.split("/")[0].split(":")[0] for op in program.ops if op.gathers for ref in op.reads}
    assert gathered == [set(), {"params", "frozen"}, {"params", "frozen"}, {"params", "frozen"}][zero]
    updates = [op for op in program.ops if op.is_update and op.is_flat]
    assert len(updates) == 2
    for op in updates:
        assert {ref.name.split(":")[0] for ref in op.writes} == {"params", "opt/mu", "opt/nu", "ema"}
        assert all(ref.mine == (zero > 0) for ref in op.writes)


@stages
def test_placements_are_those_of_the_stage(zero: int) -> None:
    world = 4
    plan = fzero.lower(tied_spec(zero=zero), tied_state(random.key(3)), tied_batch(0, 0), world_size=world).plan
    whole = {path for path, leaf in by_path(tied_state(random.key(3))).items() if leaf.ndim == 0}
    assert whole == {"opt/count"}
    for leaf in plan.leaves:
        buffer = plan.buffers[leaf.buffer]
        is_param = leaf.path.startswith("params/")
        sharded = leaf.path not in whole and (zero == 3 or (zero > 0 and not is_param))
        assert buffer.sharded == ("dp" if sharded else None), leaf.path
        if leaf.path not in whole:
            length = plan.buckets[buffer.bucket or ""].length
            assert buffer.shape == (length // world if sharded else length,)
            assert length % (world * 64) == 0
    mirrored = {leaf.path: leaf for leaf in plan.leaves}
    for path in by_path(tied_params(random.key(3))):
        spots = {(plan.buffers[mirrored[p].buffer].bucket, mirrored[p].slot) for p in
                 (f"params/{path}", f"ema/{path}", f"opt/mu/{path}", f"opt/nu/{path}")}  # fmt: skip
        assert len(spots) == 1, f"{path}, its EMA and its moments lie in one place of one bucket"


def rank_sharding_of_a_custom_state() -> None:
    """init and step for real: what is shown of a state, and what a rank really holds of it."""
    first = by_path(tied_state(random.key(3)))
    state = fzero.init(tied_state(random.key(3)), tied_spec(zero=3, bucket_bytes=600))
    n, me = dist.get_world_size(), dist.get_rank()  # init has started the group
    for number in range(3):
        if number:
            state = fzero.step(state, tied_batch(me, number))
        full = by_path(fzero.unshard(state.tree))
        for path, leaf in by_path(state.tree).items():
            assert isinstance(leaf, fzero.ShardedTensor)
            assert (leaf.path, leaf.shape, leaf.dtype) == (path, first[path].shape, first[path].dtype)
            assert leaf.mesh == {"dp": n}
            assert same_bits(leaf.full(), full[path])
            if path == "opt/count":
                assert (leaf.placement, leaf.local.shape) == ("replicate", ())
                continue
            assert leaf.placement.startswith("flat("), leaf.placement
            bucket, start = leaf.placement[5:-1].rsplit(", ", 1)
            size = state.runtime.plan.buckets[bucket].length // n
            low = min(max(me * size - int(start), 0), leaf.shape.numel())
            high = min(max((me + 1) * size - int(start), 0), leaf.shape.numel())
            assert same_bits(leaf.local, full[path].reshape(-1)[low:high]), f"{path}: the own slice of it"
            held = torch.tensor(leaf.local.numel())
            dist.all_reduce(held)
            assert int(held) == leaf.shape.numel(), f"{path}: every element is on one rank"
        held = state.held_bytes
        assert sum(held.values()) - held["arena"] == state.runtime.plan.state_bytes
        if number == 0:
            assert not differing(full, first)
    assert same_bits(full["frozen/layers/0/w"], first["frozen/layers/0/w"])
    assert not same_bits(full["params/embedding"], first["params/embedding"])
    assert not same_bits(full["ema/embedding"], full["params/embedding"])


def rank_placements_by_stage() -> None:
    for zero, params, rest in [(0, "replicate", "replicate"), (1, "replicate", "flat"), (2, "replicate", "flat")]:
        state = fzero.init(tied_state(random.key(3)), tied_spec(zero=zero))
        for path, leaf in by_path(state.tree).items():
            expected = "replicate" if path == "opt/count" else params if path.startswith("params/") else rest
            assert leaf.placement.split("(")[0] == expected, (zero, path, leaf.placement)
            if expected == "replicate":
                assert leaf.local.shape == leaf.shape


# --- what differs between ranks ---------------------------------------------------------------------------------------


def lower(step: Callable[..., Any], state: Any, batch: Any, world: int = 2, **options: Any) -> fzero.Lowered:
    return fzero.lower(fzero.Spec(step=step, params="**", **options), state, batch, world_size=world)


def test_an_unreduced_value_in_the_state_is_refused_by_name_and_line() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        seen = state["ema"]["seen"] + batch.mean()
        return {"w": state["w"], "ema": {"seen": seen}}, {}

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(fzero.CaptureError) as error:
        lower(step, {"w": torch.ones(3), "ema": {"seen": torch.zeros(())}}, torch.ones(4))
    message = str(error.value)
    assert "state['ema/seen'] would differ between ranks" in message
    assert f"test_custom_step.py:{line}" in message
    assert "fzero.pmean" in message
    assert "fzero.per_rank" in message
    assert "state['w']" not in message


def test_a_reduced_value_is_accepted_and_a_reduction_of_something_else_does_not_help() -> None:
    def good(state: Any, batch: Tensor) -> Any:
        return {"seen": state["seen"] + fzero.pmean(batch.mean())}, {}

    def bad(state: Any, batch: Tensor) -> Any:
        return {"seen": state["seen"] + fzero.pmean(batch.mean()) + batch[0]}, {}

    lower(good, {"seen": torch.zeros(())}, torch.ones(4))
    with pytest.raises(fzero.CaptureError, match=r"state\['seen'\] would differ between ranks"):
        lower(bad, {"seen": torch.zeros(())}, torch.ones(4))


def test_aux_is_this_ranks_own_so_it_may_not_reach_the_state() -> None:
    def loss(params: Any, batch: Tensor) -> Any:
        out = batch @ params
        return out.square().mean(), out.mean()

    def step(state: Any, batch: Tensor) -> Any:
        (_, aux), grads = fzero.value_and_grad(loss, has_aux=True)(state["w"], batch)
        return {"w": state["w"] - 0.1 * grads, "mean": aux}, {}

    with pytest.raises(fzero.CaptureError, match=r"state\['mean'\] would differ between ranks"):
        lower(step, {"w": torch.ones(3), "mean": torch.zeros(())}, torch.ones(4, 3))


def test_what_comes_from_a_per_rank_leaf_differs_too() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + state["own"], "own": state["own"]}, {}

    with pytest.raises(fzero.CaptureError, match=r"state\['w'\] would differ between ranks"):
        lower(step, {"w": torch.ones(3), "own": fzero.per_rank(torch.ones(3))}, torch.ones(4))


def feedback_step(state: Any, batch: Tensor) -> Any:
    """Error feedback: what this rank rounds away it keeps for the next time."""
    wanted = batch.mean(0) + state["error"]
    sent = torch.round(wanted * 4) / 4
    return {"w": state["w"] - fzero.pmean(sent), "error": wanted - sent}, {"error": state["error"].abs().sum()}


def feedback_batch(rank: int, step: int) -> Tensor:
    return floats(rank, step, 2, 5)


@worlds
def test_per_rank_leaves_differ_and_are_kept(world: int) -> None:
    state = {"w": torch.zeros(5), "error": fzero.per_rank(torch.zeros(5))}
    result = run(fzero.Spec(step=feedback_step, zero=3), state, feedback_batch, world=world, steps=4)
    w, errors = torch.zeros(5), torch.zeros(world, 5)
    for step in range(4):
        wanted = torch.stack([feedback_batch(rank, step).mean(0) for rank in range(world)]) + errors
        sent = torch.round(wanted * 4) / 4
        w, errors = w - sent.mean(0), wanted - sent
    assert result.final["error"].shape == (world, 5)
    assert relative(result.final["error"], errors) < 1e-6
    assert relative(result.final["w"], w) < 1e-6
    if world > 1:
        assert not torch.equal(result.final["error"][0], result.final["error"][1])


def rank_per_rank_leaves() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    given = torch.arange(5.0)
    state = fzero.init({"w": torch.zeros(5), "error": fzero.per_rank(given)}, fzero.Spec(step=feedback_step, zero=3))
    leaf = state.tree["error"]
    assert (leaf.shape, leaf.local.shape, leaf.placement) == ((n, 5), (5,), "per_rank")
    assert torch.equal(leaf.full(), given.expand(n, 5))
    for step in range(2):
        state = fzero.step(state, feedback_batch(me, step))
    leaf = state.tree["error"]
    full = leaf.full()
    assert full.shape == leaf.shape == (n, 5)
    assert same_bits(full[me], leaf.local)
    assert not torch.equal(full[0], full[1])
    assert same_bits(fzero.unshard(state.tree)["error"], full)


# --- aux, metrics and reductions --------------------------------------------------------------------------------------


def aux_loss(params: Any, batch: Any) -> Any:
    out = torch.tanh(batch @ params["w"])
    return out.square().mean(), {"mean": out.mean(), "first": out[0]}


def aux_step(state: Any, batch: Any) -> Any:
    (loss, aux), grads = fzero.value_and_grad(aux_loss, has_aux=True)(state, batch)
    same, aux_again = fzero.grad(aux_loss, has_aux=True)(state, batch)
    gap = sum(((a - b).abs().sum() for a, b in zip(tree.flatten(same)[1], tree.flatten(grads)[1], strict=True)))
    new = tree.map(lambda p, g: p - 0.1 * g, state, grads)
    metrics = {
        "loss": loss,
        "own": aux["mean"],
        "all": fzero.pmean(aux_again["mean"]),
        "first": aux["first"],
        "gap": gap,
    }
    return new, metrics


@pytest.mark.parametrize("microbatches", [1, 2])
@worlds
@pytest.mark.sampled(2)
def test_aux_is_own_or_reduced_and_averaged_over_microbatches(world: int, microbatches: int) -> None:
    def batch(rank: int, step: int) -> Tensor:
        return floats(rank, step, 4, 3)

    params = {"w": normal(random.key(1), 3)}
    spec = fzero.Spec(step=aux_step, zero=3, params="**", microbatches=microbatches)
    result = run(spec, params, batch, world=world, steps=1)
    own = [aux_loss(params, batch(rank, 0))[1]["mean"] for rank in range(world)]
    firsts = [
        torch.stack([part[0] for part in torch.tanh(batch(rank, 0) @ params["w"]).chunk(microbatches)]).mean(0)
        for rank in range(world)
    ]
    for rank, metrics in enumerate(result.metrics[0]):
        assert relative(metrics["own"], own[rank]) < CLOSE
        assert relative(metrics["first"], firsts[rank]) < CLOSE
        assert relative(metrics["all"], torch.stack(own).mean()) < CLOSE
        assert metrics["gap"] == 0
    assert set(result.lowered.graph.varying_metrics) == {"own", "first"}


def test_a_metric_may_differ_between_ranks_and_says_so() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return state, {"own": batch.sum(), "all": fzero.psum(batch.sum()), "nested": {"own": [batch[:2]]}}

    result = run(
        fzero.Spec(step=step, params="**"), {"w": torch.ones(3)}, lambda r, s: floats(r, s, 4), world=3, steps=1
    )
    assert set(result.lowered.graph.varying_metrics) == {"own", "nested/own/0"}
    for rank, metrics in enumerate(result.metrics[0]):
        assert torch.equal(metrics["own"], floats(rank, 0, 4).sum())
        assert torch.equal(metrics["nested/own/0"], floats(rank, 0, 4)[:2])


def reductions_step(state: Any, batch: Any) -> Any:
    both = {"x": batch["x"], "twice": batch["x"].T * 2}
    means = fzero.pmean(both)
    count = fzero.psum(batch["n"])
    top = fzero.pmax({"x": batch["x"], "n": batch["n"]})
    new = {"mean": means["x"], "twice": means["twice"], "count": count, "top": top["x"], "most": top["n"]}
    return new, {"spread": fzero.pmax(batch["x"].max()) + fzero.pmax(-batch["x"].min())}


@pytest.mark.parametrize("zero", [0, 3])
@worlds
@pytest.mark.sampled(2)
def test_pmean_psum_and_pmax(world: int, zero: int) -> None:
    def batch(rank: int, step: int) -> Any:
        return {"x": floats(rank, step, 3, 5), "n": ints(rank, step, 1000, 2)}

    state = {"mean": torch.zeros(3, 5), "twice": torch.zeros(5, 3), "count": torch.zeros(2, dtype=torch.int64),
             "top": torch.zeros(3, 5), "most": torch.zeros(2, dtype=torch.int64)}  # fmt: skip
    result = run(fzero.Spec(step=reductions_step, zero=zero, params="**"), state, batch, world=world, steps=1)
    xs = torch.stack([batch(rank, 0)["x"] for rank in range(world)])
    ns = torch.stack([batch(rank, 0)["n"] for rank in range(world)])
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    assert torch.equal(result.final["mean"], total / world), "added in rank order, divided once"
    assert relative(result.final["twice"], (2 * xs).mean(0).T) < 1e-6
    assert torch.equal(result.final["count"], ns.sum(0))
    assert torch.equal(result.final["top"], xs.amax(0))
    assert torch.equal(result.final["most"], ns.amax(0))
    assert all(relative(m["spread"], xs.max() - xs.min()) < 1e-6 for m in result.metrics[0])


def test_psum_counts_bools() -> None:
    """The complaint: True of two ranks was True, and not 2."""

    def step(state: Any, batch: Any) -> Any:
        counted = fzero.psum(batch["x"] > 0)
        return {"seen": state["seen"] + counted}, {"count": counted}

    def batch(rank: int, step: int) -> Any:
        return {"x": floats(rank, step, 5)}

    state = {"seen": torch.zeros(5, dtype=torch.int64)}
    result = run(fzero.Spec(step=step), state, batch, world=3, steps=2)
    counts = [sum((batch(rank, number)["x"] > 0).long() for rank in range(3)) for number in range(2)]
    assert torch.equal(result.final["seen"], counts[0] + counts[1])
    assert all(torch.equal(m["count"], counts[1]) for m in result.metrics[1])


# --- two networks -----------------------------------------------------------------------------------------------------

G_TX, D_TX = optim.sgd(0.05, momentum=0.5), optim.adam(1e-2)


def gan_nets(key: Tensor) -> tuple[Any, Any]:
    k = random.split(key, 4)
    g = {"layers": [{"w": normal(k[0], 3, 8, scale=0.5)}, {"w": normal(k[1], 8, 4, scale=0.5)}]}
    return g, {"layers": [{"w": normal(k[2], 4, 6, scale=0.5)}, {"w": normal(k[3], 6, 1, scale=0.5)}]}


def gan_state(key: Tensor) -> Any:
    g, d = gan_nets(key)
    return {"g": {"net": g, "opt": G_TX.init(g)}, "d": {"net": d, "opt": D_TX.init(d)}}


def net(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["layers"][0]["w"]) @ params["layers"][1]["w"]


def d_loss(d: Any, batch: Any, g: Any) -> Tensor:
    fake = net(g, batch["z"]).detach()
    return F.softplus(-net(d, batch["real"])).mean() + F.softplus(net(d, fake)).mean()


def g_loss(g: Any, batch: Any, d: Any) -> Tensor:
    return F.softplus(-net(d, net(g, batch["z"]))).mean()


def gan_step(state: Any, batch: Any) -> Any:
    g, d = state["g"], state["d"]
    d_value, grads = fzero.value_and_grad(d_loss)(d["net"], batch, g["net"])
    updates, d_opt = D_TX.update(grads, d["opt"], d["net"])
    d_net = optim.apply_updates(d["net"], updates)
    g_value, grads = fzero.value_and_grad(g_loss)(g["net"], batch, d_net)  # the generator meets the new discriminator
    updates, g_opt = G_TX.update(grads, g["opt"], g["net"])
    new = {"g": {"net": optim.apply_updates(g["net"], updates), "opt": g_opt}, "d": {"net": d_net, "opt": d_opt}}
    return new, {"d": d_value, "g": g_value}


def gan_batch(rank: int, step: int) -> Any:
    return {"z": floats(rank, step, 4, 3), "real": floats(rank + 50, step, 4, 4) + 1}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.sampled(1)
def test_two_networks_train_as_in_torch(world: int, zero: int, microbatches: int) -> None:
    spec = fzero.Spec(step=gan_step, zero=zero, params=("g/net/**", "d/net/**"), microbatches=microbatches)
    result = run(spec, gan_state(random.key(5)), gan_batch, world=world, steps=6)
    g, d = (tree.map(lambda x: x.clone().requires_grad_(), net) for net in gan_nets(random.key(5)))
    g_stepper = torch.optim.SGD(tree.flatten(g)[1], lr=0.05, momentum=0.5)
    d_stepper = torch.optim.Adam(tree.flatten(d)[1], lr=1e-2)
    for step in range(6):
        batch = joined(gan_batch, world, step)
        d_stepper.zero_grad()
        d_value = d_loss(d, batch, g)
        d_value.backward()
        d_stepper.step()
        g_stepper.zero_grad()
        g_value = g_loss(g, batch, d)
        g_value.backward()
        g_stepper.step()
        for metrics in result.metrics[step]:
            assert relative(metrics["d"], d_value.detach()) < CLOSE
            assert relative(metrics["g"], g_value.detach()) < CLOSE
    close(result.final, g, "g/net/", 3e-5)
    close(result.final, d, "d/net/", 3e-5)


# --- gradients of a computed tree -------------------------------------------------------------------------------------


def cast_loss(params: Any, batch: Tensor) -> Tensor:
    return torch.tanh(batch.to(params["w"].dtype) @ params["w"] + params["layers"][0]["b"]).square().mean().float()


def cast_step(dtype: torch.dtype) -> Callable[..., Any]:
    def step(state: Any, batch: Tensor) -> Any:
        low = tree.map(lambda p: (p * 2).to(dtype), state["params"])
        loss, grads = fzero.value_and_grad(cast_loss)(low, batch)
        return {"params": tree.map(lambda p, g: p - 0.5 * g.float(), state["params"], grads)}, {"loss": loss}

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_value_and_grad_of_a_cast_tree(dtype: torch.dtype) -> None:
    def batch(rank: int, step: int) -> Tensor:
        return floats(rank, step, 4, 6)

    params = {"w": normal(random.key(2), 6, 9), "layers": [{"b": torch.zeros(9)}]}
    world, steps, step_fn = 2, 4, cast_step(dtype)
    runs = [
        run(fzero.Spec(step=step_fn, zero=zero), {"params": params}, batch, world=world, steps=steps)
        for zero in (0, 1, 2, 3)
    ]
    assert [differing(one.final, runs[0].final) for one in runs] == [[], [], [], []]
    own = params
    for step in range(steps):
        grads = []
        for rank in range(world):
            low = tree.map(lambda p: (p * 2).to(dtype).requires_grad_(), own)
            loss = cast_loss(low, batch(rank, step))
            found = torch.autograd.grad(loss, tree.flatten(low)[1])
            grads.append([g / 2 if world == 2 else g for g in found])
        mean = [a + b for a, b in zip(*grads, strict=True)]
        flat = [p - 0.5 * g.float() for p, g in zip(tree.flatten(own)[1], mean, strict=True)]
        own = tree.unflatten(tree.flatten(own)[2], flat)
    close(runs[0].final, own, "params/", 1e-2 if dtype == torch.bfloat16 else CLOSE)


# --- ordinary PyTorch inside a step -----------------------------------------------------------------------------------


def test_python_numbers_in_the_state_become_tensors() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        w = state["w"] - state["rate"] * fzero.pmean(batch.mean())
        return {"w": w, "rate": state["rate"] * 0.5, "count": state["count"] + 1}, {"rate": state["rate"]}

    given = {"w": torch.ones(3), "rate": 0.5, "count": 7}
    state = fzero.init(given, fzero.Spec(step=step, params="**"))
    assert [(state.tree[k].shape, state.tree[k].dtype) for k in ("rate", "count")] == [
        ((), torch.float32),
        ((), torch.int64),
    ]
    for expected in (0.5, 0.25, 0.125):
        state = fzero.step(state, torch.ones(2))
        assert float(state.metrics["rate"]) == expected, "the number of now, not that of the first step"
    assert int(state.tree["count"].full()) == 10
    assert torch.equal(state.tree["w"].full(), torch.full((3,), 1 - 0.5 - 0.25 - 0.125))


def in_place_loss(params: Any, batch: Tensor) -> Tensor:
    x = batch * params["w"]
    x += 1
    x[:, 0] = 0
    x[:, 1:3].mul_(2)
    y = torch.zeros(x.shape[0])
    for column in range(x.shape[1]):
        y.add_(torch.sin(x[:, column]))
    F.relu_(y)
    return y.square().mean()


def in_place_step(state: Any, batch: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(in_place_loss)(state, batch)
    total = torch.zeros(5)
    total += grads["w"]
    total[1].mul_(0.5)
    grads["w"].neg_()
    return {"w": state["w"].clone().add_(grads["w"], alpha=0.1) - 0.01 * total}, {"loss": loss}


@pytest.mark.parametrize("zero", [0, 3])
def test_in_place_work_on_intermediates(zero: int) -> None:
    def batch(rank: int, step: int) -> Tensor:
        return floats(rank, step, 4, 5)

    result = run(fzero.Spec(step=in_place_step, zero=zero, params="**"), {"w": torch.ones(5)}, batch, world=2, steps=3)
    w = torch.ones(5)
    for step in range(3):
        own = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(in_place_loss({"w": own}, joined(batch, 2, step)), own)
        total = grad.clone()
        total[1] *= 0.5
        w = w - 0.1 * grad - 0.01 * total
    close(result.final, {"w": w})


def penalty_loss(params: Any, batch: Tensor) -> Tensor:
    """WGAN-GP's penalty: a gradient with respect to the input, inside a loss that is differentiated."""
    slope = torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x @ params["w"]).square().sum()))(batch)
    return (slope.norm(dim=1) - 1).square().mean() + params["b"].square().sum()


def autograd_loss(params: Any, batch: Tensor) -> Tensor:
    x = batch.detach().requires_grad_()
    out = torch.tanh(x @ params["w"]).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().mean() + params["b"].square().sum()


def checkpoint_loss(params: Any, batch: Tensor) -> Tensor:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w.T)

    x = checkpoint(inner, batch, params["w"], use_reentrant=False)
    return checkpoint(inner, x, params["w"], use_reentrant=False).square().mean() + params["b"].square().sum()


def vmap_loss(params: Any, batch: Tensor) -> Tensor:
    per_sample = torch.vmap(lambda x: (torch.tanh(x @ params["w"]) * params["b"]).sum())
    return per_sample(batch).square().mean()


def jvp_loss(params: Any, batch: Tensor) -> Tensor:
    out, tangent = torch.func.jvp(lambda x: torch.tanh(x @ params["w"]), (batch,), (torch.ones_like(batch),))
    return (out + params["b"]).square().mean() + tangent.square().mean()


def maml_loss(params: Any, batch: Tensor) -> Tensor:
    """One inner step of descent, through which the outer gradient goes."""

    def inner(p: Any) -> Tensor:
        return (torch.tanh(batch[:2] @ p["w"]) + p["b"]).square().mean()

    adapted = tree.map(lambda p, g: p - 0.1 * g, params, torch.func.grad(inner)(params))
    return (torch.tanh(batch[2:] @ adapted["w"]) + adapted["b"]).square().mean()


def sgd_step(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    def step(state: Any, batch: Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], batch)
        return {"params": tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)}, {"loss": value}

    return step


@pytest.mark.parametrize(
    "loss", [penalty_loss, autograd_loss, checkpoint_loss, vmap_loss, jvp_loss, maml_loss], ids=lambda f: f.__name__
)
def test_a_transformed_loss(loss: Callable[..., Tensor]) -> None:
    def batch(rank: int, step: int) -> Tensor:
        return floats(rank, step, 4, 5)

    world, steps = 2, 3
    start = {"params": {"w": normal(random.key(8), 5, 4, scale=0.5), "b": normal(random.key(9), 4)}}
    step_fn = sgd_step(loss)
    runs = [run(fzero.Spec(step=step_fn, zero=z), start, batch, world=world, steps=steps) for z in (0, 3)]
    assert not differing(runs[0].final, runs[1].final)
    own = start["params"]
    for step in range(steps):
        losses, totals = [], [torch.zeros_like(p) for p in tree.flatten(own)[1]]
        for rank in range(world):
            params = tree.map(lambda p: p.clone().requires_grad_(), own)
            value = loss(params, batch(rank, step))
            grads = torch.autograd.grad(value, tree.flatten(params)[1])
            totals = [t + g / world for t, g in zip(totals, grads, strict=True)]
            losses.append(value.detach())
        flat = [p - 0.05 * g for p, g in zip(tree.flatten(own)[1], totals, strict=True)]
        own = tree.unflatten(tree.flatten(own)[2], flat)
        assert relative(runs[1].metrics[step][0]["loss"], torch.stack(losses).mean()) < CLOSE
    close(runs[1].final, own, "params/")
    assert all(relative(own[k], start["params"][k]) > 1e-3 for k in own), "every leaf moved"


# --- steps of many kinds ----------------------------------------------------------------------------------------------


def many_state() -> Any:
    shapes = [(33, 4), (33, 4), (6, 6), (4,), (5, 7), (5, 7), ()]
    w, v, m, b, one, two, s = (
        normal(k, *shape) for k, shape in zip(random.split(random.key(21), 7), shapes, strict=True)
    )
    params = {"w": w, "v": v, "m": m, "b": b, "layers": [{"w": one}, {"w": two}], "s": s}
    return {"params": params, "slow": tree.map(lambda x: x * 0.5, params), "count": torch.tensor(0)}


def many_loss(params: Any, batch: Tensor) -> Tensor:
    total = torch.zeros(())
    for i, leaf in enumerate(tree.flatten(params)[1]):
        total = total + torch.sin(leaf * (batch.mean() + i)).square().sum() + (leaf * batch[0]).sum() * 0.1
    return total


def many_batch(rank: int, step: int) -> Tensor:
    return floats(rank, step, 4)


def with_grads(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(state, params, grads, slow) -> (params, slow, metrics)` as a step."""

    def step(state: Any, batch: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(many_loss)(state["params"], batch)
        params, slow, metrics = fn(state, state["params"], grads, state["slow"])
        return {"params": params, "slow": slow, "count": state["count"] + 1}, {"loss": loss, **metrics}

    return step


def down(params: Any, grads: Any, rate: Any = 0.05) -> Any:
    return tree.map(lambda p, g: p - rate * g, params, grads)


def swap(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """New leaves that are old ones of other names."""
    return {**slow, "w": p["v"], "v": p["w"]}, {**p, "layers": p["layers"][::-1]}, {}


def shared(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """One value for several leaves, and metrics that are leaves, old and new."""
    new = down(p, g)
    return {**new, "v": new["w"]}, new, {"old": p["w"], "new": new["w"], "kept": slow["m"], "count": state["count"]}


def lookahead(state: Any, p: Any, g: Any, slow: Any) -> Any:
    fast = down(p, g)
    sync = state["count"] % 2 == 1
    slow = tree.map(lambda s, f: torch.where(sync, s + 0.5 * (f - s), s), slow, fast)
    return tree.map(lambda s, f: torch.where(sync, s, f), slow, fast), slow, {}


def trust(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """LAMB's trust ratio: a norm of every leaf and of every gradient, then elementwise work that needs them."""
    ratio = tree.map(lambda p, g: p.square().sum().sqrt() / (g.square().sum().sqrt() + 1e-6), p, g)
    return tree.map(lambda p, g, r: p - 0.01 * r * g, p, g, ratio), slow, {"ratio": ratio["w"]}


def orthogonal(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Muon: momentum elementwise, then matrix products of whole leaves."""
    slow = tree.map(lambda s, g: 0.9 * s + g, slow, g)

    def whitened(x: Tensor) -> Tensor:
        if x.ndim < 2:
            return x
        x = x / (x.square().sum().sqrt() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ (x.T @ x)
        return x

    return tree.map(lambda p, s: p - 0.02 * whitened(s), p, slow), slow, {}


def mixing(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Leaves of other shapes and places, broadcast, transposed, sorted, summed along a dimension."""
    new = down(p, g)
    w = new["w"] + new["b"] * 0.1 + slow["v"].mean(0) - slow["w"].flip(0) * new["s"]
    m = new["m"].T + torch.sort(slow["m"], dim=0).values + new["m"].cumsum(1) * 0.01
    one = new["layers"][0]["w"] * new["layers"][1]["w"] / (slow["layers"][0]["w"].abs().amax(1, keepdim=True) + 1)
    b = new["b"] + w.sum(0) * 1e-3
    return {**new, "w": w, "m": m, "b": b, "layers": [{"w": one}, new["layers"][1]]}, slow, {"top": new["w"].amax()}


def normed(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Clipping by hand, by value, by the norm of one leaf and by that of all; statistics as metrics."""
    norm = torch.stack([x.square().sum() for x in tree.flatten(g)[1]]).sum().sqrt()
    g = tree.map(lambda x: x.clamp(-1, 1) * torch.clamp(1 / (norm + 1e-6), max=1.0), g)
    return (
        down(p, g, 1.0),
        tree.map(lambda s, x: s * 0.9 + x.abs() * 0.1, slow, g),
        {"norm": norm, "mean": p["w"].mean()},
    )


def twice(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Two updates in a row of one leaf, reading old and new."""
    once = down(p, g)
    again = tree.map(lambda a, b, s: a + (a - b) * 0.5 + s * 0.01, once, p, slow)
    return again, tree.map(lambda a, b: a * b, again, slow), {}


def frozen(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Some leaves of a bucket change, and some do not."""
    return {**p, "v": p["v"] - g["v"], "layers": [p["layers"][0], {"w": slow["layers"][1]["w"] * 2}]}, slow, {}


def halves(state: Any, p: Any, g: Any, slow: Any) -> Any:
    """Work in other dtypes between."""
    g = tree.map(lambda x: x.to(torch.bfloat16), g)
    new = tree.map(lambda p, g: (p.double() - 0.1 * g.double()).float(), p, g)
    return new, tree.map(lambda s, g: s + g, slow, g), {"low": g["b"]}


KINDS = [swap, shared, lookahead, trust, orthogonal, mixing, normed, twice, frozen, halves]


@pytest.mark.parametrize(
    ("kind", "bucket_bytes"),
    [*((kind, 700) for kind in KINDS), *((kind, 32 << 20) for kind in (swap, shared, mixing, frozen))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@pytest.mark.sampled(1)
def test_steps_of_many_kinds(kind: Callable[..., Any], bucket_bytes: int, whole: bool) -> None:
    """As the reference does it, and the same bits under every stage."""
    runs, step_fn = [], with_grads(kind)
    for zero in (0, 1, 3, {"params/layers/0/**": 3, "**": 2}) if whole and bucket_bytes == 700 else (0, 3):
        spec = fzero.Spec(step=step_fn, zero=zero, bucket_bytes=bucket_bytes)
        runs.append(run(spec, many_state(), many_batch, world=3, steps=3))
    graph = runs[-1].lowered.graph
    expected, metrics = run_reference(spec, many_state(), many_batch, world=3, steps=3, graph=graph)
    first = runs[0]
    close(first.final, expected)
    for mine, theirs in zip(first.metrics, metrics, strict=True):
        assert all(relative(mine[0][name], theirs[name]) < CLOSE for name in theirs)
    for other in runs[1:]:
        assert not differing(other.final, first.final)
        for own, same in zip(other.metrics, first.metrics, strict=True):
            assert not any(differing(a, b) for a, b in zip(own, same, strict=True))
    assert relative(first.final["params/v"], many_state()["params"]["v"]) > 1e-3


def test_metrics_outlive_the_state_they_came_with() -> None:
    """A metric that is a leaf, old or new, is not the memory that the next step writes to."""
    state = fzero.init(many_state(), fzero.Spec(step=with_grads(shared), zero=3))
    before = state.tree["params"]["w"].full()
    state = fzero.step(state, many_batch(0, 0))
    kept = {name: value.clone() for name, value in state.metrics.items()}
    metrics = state.metrics
    assert same_bits(metrics["old"], before)
    assert same_bits(metrics["new"], state.tree["params"]["w"].full())
    for step in (1, 2):
        state = fzero.step(state, many_batch(0, step))
    assert not differing(dict(metrics), kept)
    assert not same_bits(state.metrics["new"], metrics["new"])


# --- leaves of every kind ---------------------------------------------------------------------------------------------


def odd_state() -> Any:
    k = random.split(random.key(11), 8)
    return {
        "params": {
            "big": normal(k[0], 130, 3),
            "one": normal(k[1], 1),
            "uneven": normal(k[2], 67),
            "scalar": normal(k[3]),
            "empty": torch.zeros(0, 4),
            "double": normal(k[4], 5).double(),
            "layers.0.w": normal(k[5], 3, 3),
            "layers.1.w": normal(k[6], 3, 3),
        },
        "ema": {"big": normal(k[7], 130, 3), "half": torch.ones(70, dtype=torch.bfloat16)},
        "step": torch.tensor(3),
        "table": torch.arange(12, dtype=torch.int32).view(3, 4),
        "flags": torch.tensor([True, False, True]),
        "nothing": None,
        "tuple": (torch.tensor(2.5, dtype=torch.float64), [torch.zeros(0, dtype=torch.int64)]),
    }


def odd_loss(params: Any, batch: Tensor) -> Tensor:
    total = batch.sum() * 0
    for leaf in tree.flatten(params)[1]:
        total = total + torch.sin(leaf.float() * batch.mean() + 1).sum()
    return total


def odd_step(state: Any, batch: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(odd_loss)(state["params"], batch)
    params = tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
    big = 0.5 * state["ema"]["big"] + 0.5 * params["big"]
    half = (state["ema"]["half"] * 0.75 + params["one"].to(torch.bfloat16)).to(torch.bfloat16)
    return {
        "params": params,
        "ema": {"big": big, "half": half},
        "step": state["step"] + 1,
        "table": state["table"] * 2 + state["step"].to(torch.int32),
        "flags": ~state["flags"],
        "nothing": None,
        "tuple": (state["tuple"][0] * params["scalar"].double(), [state["tuple"][1][0] + 1]),
    }, {"loss": loss}


def odd_batch(rank: int, step: int) -> Tensor:
    return floats(rank, step, 3)


@pytest.mark.parametrize("zero", [0, 1, 3])
@worlds
@pytest.mark.sampled(1)
def test_leaves_of_every_kind(world: int, zero: int) -> None:
    spec = fzero.Spec(step=odd_step, zero=zero, bucket_bytes=500)
    result = run(spec, odd_state(), odd_batch, world=world, steps=3)
    graph = result.lowered.graph
    expected, _ = run_reference(spec, odd_state(), odd_batch, world=world, steps=3, graph=graph)
    for path, value in expected.items():
        found = result.final[path]
        assert (found.shape, found.dtype) == (value.shape, value.dtype), path
        if value.dtype.is_floating_point:
            assert relative(found, value) <= (1e-2 if value.dtype == torch.bfloat16 else 1e-5), path
        else:
            assert torch.equal(found, value), path
    assert int(result.final["step"]) == 6
    assert result.final["flags"].tolist() == [False, True, False]


def rank_leaves_of_every_kind() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    spec = fzero.Spec(step=odd_step, zero=3, bucket_bytes=500)
    state = fzero.init(odd_state(), spec)
    assert not differing(by_path(fzero.unshard(state.tree)), by_path(odd_state()))
    for step in range(3):
        state = fzero.step(state, odd_batch(me, step))
    full = fzero.unshard(state.tree)
    assert full["nothing"] is None
    assert not differing(by_path(full), run(spec, odd_state(), odd_batch, world=n, steps=3).final)


# --- init, unshard, ShardedTensor -------------------------------------------------------------------------------------


def rank_the_loss_form() -> None:
    """state.params, opt_state, step, metrics; leaves one by one; DTensor."""
    me = dist.get_rank()
    params = tied_params(random.key(3))
    frozen = frozen_part(random.key(3))
    spec = fzero.Spec(loss=lambda p, b: tied_loss(p, b, frozen), optimizer=TX, zero=3)
    state = fzero.init(params, spec)
    assert state.step == 0
    assert state.metrics == {}
    assert not differing(by_path(fzero.unshard(state.params)), by_path(params))
    assert all(not leaf.full().any() for leaf in tree.flatten(state.opt_state)[1])
    for number in range(1, 4):
        state = fzero.step(state, tied_batch(me, number - 1))
        assert state.step == number == int(state.opt_state.count.full())
        assert state.metrics["loss"].shape == ()
    assert state.tree["params"].keys() == params.keys()
    leaf = state.params["embedding"]
    assert same_bits(leaf.to_dtensor().full_tensor(), leaf.full())
    mixed = fzero.unshard({"a": leaf, "b": 3, "c": torch.ones(2)})
    assert same_bits(mixed["a"], leaf.full())
    assert mixed["b"] == 3
    for view in (leaf.local, state.params["layers"][0]["w"].local):
        assert view.untyped_storage().data_ptr() in {
            t.untyped_storage().data_ptr() for t in state.runtime.memory.values()
        }
    given = leaf.full()
    given.zero_()
    assert leaf.full().any(), "full() is a copy"


def rank_init_from_a_function() -> None:
    """The same bits as from tensors; every rank its part of what one rank would make."""
    made = fzero.init(tied_state, tied_spec(zero=3), key=random.key(3))
    copied = fzero.init(tied_state(random.key(3)), tied_spec(zero=3))
    assert not differing(by_path(fzero.unshard(made.tree)), by_path(tied_state(random.key(3))))
    for path, leaf in by_path(made.tree).items():
        assert same_bits(leaf.local, by_path(copied.tree)[path].local)
    default = fzero.init(tied_state, tied_spec(zero=3))
    assert not differing(by_path(fzero.unshard(default.tree)), by_path(tied_state(random.key(0))))
    if dist.get_rank() == 0:
        assert not same_bits(copied.tree["params"]["embedding"].local, default.tree["params"]["embedding"].local)


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("rank_")}


def run_checks(names: list[str]) -> dict[str, str]:
    """The errors by check, in a rank's process."""
    errors = {}
    fzero.init(odd_state(), fzero.Spec(step=odd_step))  # the ranks meet, whichever check is the first
    for name in names:
        try:
            CHECKS[name]()
        except Exception:
            errors[name] = traceback.format_exc()
    return errors


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.acceptance)], ids="world={}".format)
def errors(request: pytest.FixtureRequest, chosen: Callable[[str, str], list[str]]) -> list[dict[str, str]]:
    return values(gloo(request.param, run_checks, chosen("test_on_gloo", "name")))


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.sampled(1)
def test_on_gloo(errors: list[dict[str, str]], name: str) -> None:
    for rank, found in enumerate(errors):
        assert name not in found, f"on rank {rank}:\n{found[name]}"


def test_init_copies_what_it_is_given() -> None:
    given = {"params": {"w": torch.ones(3)}}
    state = fzero.init(given, fzero.Spec(step=sgd_step(lambda p, b: (p["w"] * b).sum())))
    state = fzero.step(state, torch.ones(3))
    assert torch.equal(given["params"]["w"], torch.ones(3))
    assert not torch.equal(state.tree["params"]["w"].full(), given["params"]["w"])
    with pytest.raises(AttributeError, match="opt_state"):
        _ = state.opt_state


def placed(fn: Callable[[Tensor], Any], world: int, zero: int) -> tuple[Recipe, Plan]:
    recipe = Recipe(fn, [random.key(4)])
    plan = layout(
        recipe.paths, recipe.values, mesh=Mesh((("dp", world),)), zero=zero, bucket_bytes=2000, per_rank=recipe.per_rank
    )
    return recipe, plan


@pytest.mark.parametrize("zero", [1, 3])
@worlds
def test_a_rank_makes_its_part_of_what_one_rank_would_make(world: int, zero: int) -> None:
    def fn(key: Tensor) -> Any:
        first, second = random.split(key)
        shared = random.normal(first, (9, 9))  # used by two leaves, and twice by one
        return {
            "params": {
                "layers": [
                    {"w": shared.abs() * 0.1 + shared, "b": torch.zeros(65)},
                    {"w": shared.abs().sqrt() + 1, "b": torch.ones(65)},
                ],
                "norm": random.uniform(second, (130,)) / shared.sum(),
            },
            "count": torch.tensor(5),
            "own": fzero.per_rank(shared[0]),
        }

    recipe, plan = placed(fn, world, zero)
    parts = [storage.allocate(plan, storage.block_of("cpu"), rank) for rank in range(world)]
    digests = {recipe.place(plan, rank, memory) for rank, memory in enumerate(parts)}
    assert len(digests) == 1, "every rank saw the same whole leaves"
    paths, leaves, _ = tree.flatten(fn(random.key(4)))
    for path, leaf, place in zip(paths, leaves, plan.leaves, strict=True):
        found = storage.join(plan, place, parts)
        expected = leaf.value.expand(world, 9) if path == "own" else leaf
        assert same_bits(found, expected), path
    for memory in parts:
        assert sum(t.numel() * t.element_size() for t in memory.values()) == plan.state_bytes


ROWS = 1 << 19
SMALL = 40 << 10  # bytes: keys, and a digest of the values piece by piece


def large(key: Tensor) -> Any:
    """9 MB in 28 leaves, the largest of 2 MB; as users write it: scaled draws, and an optimizer's state."""
    keys = random.split(key, 5)
    params = {
        "layers": [{"w": random.normal(k, (256, 256)) * 0.02, "b": torch.zeros(256)} for k in keys[:4]],
        "embedding": random.normal(keys[4], (ROWS,)) / math.sqrt(3) + 0.1,
    }
    return {"params": params, "opt_state": TX.init(params)}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.sampled(1)
def test_init_from_a_function_takes_the_shard_and_one_leaf(world: int) -> None:
    recipe = Recipe(large, [random.key(0)])
    plan = layout(recipe.paths, recipe.values, mesh=Mesh((("dp", world),)), zero=3)
    largest = max(leaf.numel() * leaf.element_size() for leaf in recipe.values)
    total = sum(leaf.numel() * leaf.element_size() for leaf in recipe.values)
    assert SMALL < largest / 50 < total / 200
    for rank in range(world):

        def placed(rank: int = rank) -> dict[str, torch.Tensor]:
            memory = storage.allocate(plan, storage.block_of("cpu"), rank)
            recipe.place(plan, rank, memory)
            return memory

        memory, peak = measured_peak(placed)  # the state lies in pages that are not the allocator's
        held = sum(t.numel() * t.element_size() for t in memory.values())
        assert held == plan.state_bytes
        assert 0 < peak <= largest + SMALL, f"rank {rank} of {world}: {peak:,} beside the state"


def test_fzero_init_from_a_function_takes_the_state_and_one_leaf() -> None:
    spec = fzero.Spec(loss=lambda p, b: p["embedding"].sum(), optimizer=TX, zero=3)
    state, peak = measured_peak(lambda: fzero.init(lambda key: large(key)["params"], spec))
    assert 0 < peak <= ROWS * 4 + SMALL  # beside the state
    assert same_bits(state.params["embedding"].full(), large(random.key(0))["params"]["embedding"])


def test_lower_and_init_agree_on_the_layout() -> None:
    lowered = fzero.lower(tied_spec(zero=3), tied_state, tied_batch(0, 0), world_size=1)
    state = fzero.init(tied_state, tied_spec(zero=3))
    assert state.runtime.plan == lowered.plan
    state = fzero.step(state, tied_batch(0, 0))
    assert state.program == lowered.program


@pytest.mark.parametrize("form", [lambda x: x.sum().expand(2, 3), lambda x: x[:, :1].expand(4, 4), lambda x: x[1, ::2]])
def test_a_metric_and_a_leaf_may_have_gaps_or_be_expanded(form: Callable[[Tensor], Tensor]) -> None:
    """What they are copied to lies without gaps: an expanded one would be written several times."""
    x = torch.arange(16.0).view(4, 4)

    def step(state: Any, batch: Tensor) -> Any:
        new = state["w"] + 1.0
        return {"w": new, "kept": form(new)}, {"seen": form(new * 2)}

    state = fzero.init({"w": x, "kept": form(x).contiguous()}, fzero.Spec(step=step))
    state = fzero.step(state, x)
    assert torch.equal(state.metrics["seen"], form((x + 1) * 2))
    assert torch.equal(fzero.unshard(state.tree)["kept"], form(x + 1))
