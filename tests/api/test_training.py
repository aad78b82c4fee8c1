"""The step that loss and optimizer stand for: what trains, how gradients are clipped, how they are reduced."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import differing, relative, run
from models import GPT, MLP, normal
from torch import Tensor

import fzero
from fzero import P, optim, random, tree

stages = pytest.mark.parametrize("zero", [0, 1, 2, 3])


# --- trainable --------------------------------------------------------------------------------------------------------


def mixed_params() -> Any:
    k = random.split(random.key(3), 4)
    return {
        "base": {"w": normal(k[0], 12, 12, scale=0.3), "b": normal(k[1], 67)},
        "lora": {"up": normal(k[2], 12, 2, scale=0.3), "down": normal(k[3], 2, 12, scale=0.3)},
        "embedding": normal(k[1], 11, 12, scale=0.5),
        "ids": torch.arange(11),
        "nothing": torch.zeros(0, 5),
        "scale": torch.tensor(1.5),
    }


def mixed_loss(p: Any, batch: Any) -> Tensor:
    h = F.embedding(p["ids"][batch["x"]], p["embedding"])
    h = torch.tanh(h @ (p["base"]["w"] + p["lora"]["up"] @ p["lora"]["down"])) * p["scale"]
    h = h + p["base"]["b"].mean() + p["nothing"].sum()
    return F.cross_entropy(h @ p["embedding"].T, batch["y"])  # the embedding is tied


def mixed_batch(rank: int, step: int) -> Any:
    g = torch.Generator().manual_seed(100 * step + rank)
    return {"x": torch.randint(11, (4,), generator=g), "y": torch.randint(11, (4,), generator=g)}


RULES: list[Any] = ["lora/**", ["lora/**", "scale"], ["embedding", "base/b"], ["**/w", "lora/up", "nothing"]]


@stages
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.sampled(4)
def test_only_what_a_rule_names_trains_and_has_moments(rules: Any, zero: int) -> None:
    spec = fzero.Spec(loss=mixed_loss, optimizer=optim.adamw(1e-2), trainable=rules, zero=zero, microbatches=2)
    result = run(spec, mixed_params(), mixed_batch, world=3, steps=3)
    start = dict(zip(*tree.flatten(mixed_params())[:2], strict=True))
    listed = [rules] if isinstance(rules, str) else rules
    chosen = {path for path in start if any(tree.matches(rule, path) for rule in listed)}
    changed = set(differing({p: result.final[f"params/{p}"] for p in start}, start))
    assert changed == chosen - {"nothing"}
    moments = {path.removeprefix("opt_state/mu/") for path in result.final if path.startswith("opt_state/mu/")}
    assert moments == chosen
    grads = {slot for name, b in result.lowered.program.buffers.items() if b.kind == "grad" and b.bucket
             for slot in [s.path for s in result.lowered.program.buckets[b.bucket].slots]}  # fmt: skip
    assert chosen - {"scale", "nothing"} <= grads


def test_it_is_the_update_of_torch_with_requires_grad() -> None:
    spec = fzero.Spec(loss=mixed_loss, optimizer=optim.adamw(1e-2), trainable=["embedding", "lora/up"], zero=3)
    result = run(spec, mixed_params(), mixed_batch, world=2, steps=4)
    own = mixed_params()
    learned = [own["embedding"].requires_grad_(), own["lora"]["up"].requires_grad_()]
    stepper = torch.optim.AdamW(learned, lr=1e-2)
    for step in range(4):
        stepper.zero_grad()
        both = [mixed_batch(rank, step) for rank in range(2)]
        mixed_loss(own, {name: torch.cat([b[name] for b in both]) for name in ("x", "y")}).backward()
        stepper.step()
    for path, value in (("embedding", learned[0]), ("lora/up", learned[1])):
        assert relative(result.final[f"params/{path}"], value.detach()) < 1e-5


def test_frozen_leaves_are_sharded_and_get_no_gradient_memory() -> None:
    def made(rules: Any) -> fzero.Lowered:
        spec = fzero.Spec(loss=layers_loss, optimizer=optim.adamw(1e-2), trainable=rules, zero=3)
        return fzero.lower(spec, layers_params, torch.empty(4, 32), world_size=4)

    def layers_params(key: Tensor) -> Any:
        return {
            "layers": [{"w": torch.zeros(32, 32), "a": torch.zeros(32, 2), "b": torch.zeros(2, 32)} for _ in range(4)]
        }

    def layers_loss(p: Any, x: Tensor) -> Tensor:
        for one in p["layers"]:
            x = torch.tanh(x @ (one["w"] + one["a"] @ one["b"]))
        return x.mean()

    some, every = made(["**/a", "**/b"]), made(None)
    whole = 4 * 32 * 32 * 4  # bytes of the frozen matrices
    assert whole // 4 <= every.memory.state // 3
    assert some.memory.state <= every.memory.state - 2 * whole // 4, "no moments"
    assert all(some.plan.buffers[leaf.buffer].sharded for leaf in some.plan.leaves if leaf.path.startswith("params/"))

    def sent(one: fzero.Lowered) -> int:
        return sum(one.program.buffers[op.reads[0].name].nbytes for op in one.program.ops if op.reduces)

    assert sent(some) < sent(every) / 4, "no gradients on the wire"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("laro/**", r"Spec\(trainable=\.\.\.\): the rule 'laro/\*\*' matches no leaf\. Did you mean 'lora/\*\*'"),
        (["lora/**", "params/base/**"], r"the rule 'params/base/\*\*' matches no leaf"),
        ([], "needed path rules"),
        (3, "needed path rules"),
    ],
)
def test_a_rule_that_names_nothing_is_refused(rules: Any, message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        fzero.init(mixed_params(), fzero.Spec(loss=mixed_loss, optimizer=optim.sgd(0.1), trainable=rules))


@stages
def test_integers_among_the_parameters_stay_what_they_are(zero: int) -> None:
    spec = fzero.Spec(loss=mixed_loss, optimizer=optim.adamw(1e-2), zero=zero, precision="bf16")
    result = run(spec, mixed_params(), mixed_batch, world=2, steps=2)
    assert torch.equal(result.final["params/ids"], torch.arange(11))
    assert not any("ids" in path for path in result.paths if path != "params/ids"), "and have no moments"
    assert not torch.equal(result.final["params/base/w"], mixed_params()["base"]["w"])


# --- batch norm -------------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_through_aux() -> None:
    """As two modules would on their halves, their running statistics averaged."""
    norms = [torch.nn.BatchNorm1d(6, momentum=0.1) for _ in range(2)]

    def loss(p: Any, x: Tensor, stats: Any) -> Any:
        mean, var = stats["mean"].clone(), stats["var"].clone()
        out = F.batch_norm(x @ p["w"], mean, var, training=True, momentum=0.1)
        return (out * p["scale"]).square().mean() + out[:, 0].mean(), {"mean": mean, "var": var}

    def step(state: Any, x: Tensor) -> Any:
        (value, stats), grads = fzero.value_and_grad(loss, has_aux=True)(state["params"], x, state["stats"])
        params = tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "stats": fzero.pmean(stats)}, {"loss": value}

    k = random.split(random.key(1), 4)
    start = {
        "params": {"w": normal(k[0], 5, 6), "scale": torch.ones(6)},
        "stats": {"mean": torch.zeros(6), "var": torch.ones(6)},
    }
    data = [normal(k[2], 7, 5), 2 * normal(k[3], 7, 5)]
    finals = [
        run(fzero.Spec(step=step, zero=zero), start, lambda rank, _: data[rank], world=2, steps=1).final
        for zero in (0, 3)
    ]
    assert not differing(*finals)
    for one, x in zip(norms, data, strict=True):
        one(x @ start["params"]["w"])
    for name, own in (("mean", "running_mean"), ("var", "running_var")):
        expected = (getattr(norms[0], own) + getattr(norms[1], own)) / 2
        assert relative(finals[0][f"stats/{name}"], expected) < 1e-6


# --- clipping ---------------------------------------------------------------------------------------------------------


def torch_clipped(clip: Callable[[Any], Any]) -> tuple[dict[str, Tensor], Any]:
    paths, leaves, structure = tree.flatten(MLP.init(random.key(0)))
    leaves = [x.clone().requires_grad_() for x in leaves]
    both = [MLP.batch(rank, 0) for rank in range(2)]
    MLP.loss(tree.unflatten(structure, leaves), tuple(torch.cat(x) for x in zip(*both, strict=True))).backward()
    result = clip(leaves)
    return {path: (x - x.grad).detach() for path, x in zip(paths, leaves, strict=True)}, result


def clipped(**options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    spec = fzero.Spec(loss=MLP.loss, optimizer=optim.sgd(1.0), **options)
    result = run(spec, MLP.init(random.key(0)), MLP.batch, world=2, steps=1)
    found = {p.removeprefix("params/"): x for p, x in result.final.items() if p.startswith("params/")}
    return found, result.metrics[0][0]


@stages
@pytest.mark.parametrize("limit", [0.05, 100.0])
@pytest.mark.sampled(3)
def test_clip_norm_is_torchs(limit: float, zero: int) -> None:
    found, metrics = clipped(clip_norm=limit, zero=zero)
    expected, norm = torch_clipped(lambda leaves: torch.nn.utils.clip_grad_norm_(leaves, limit))
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
    start = MLP.init(random.key(0))
    for path, x in dict(zip(*tree.flatten(start)[:2], strict=True)).items():
        assert relative(x - found[path], x - expected[path]) < 1e-5
    assert 0.1 < float(norm) < 100


MESHES = [{"dp": 2}, {"dp_out": 2, "dp": 1}, {"pp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}]


def deep_params() -> Any:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64) * 0.5  # noqa: E731
    return {"layers": [{"up": draw(6, 8), "b": draw(8), "down": draw(8, 6)} for _ in range(2)], "scale": draw(6)}


def deep_loss(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for layer in p["layers"]:
        x = x + torch.tanh(x @ layer["up"] + layer["b"]) @ layer["down"]
    return ((x * p["scale"] - batch["y"]) ** 2).mean()


def deep_batch(rank: int, step: int) -> Any:
    g = torch.Generator().manual_seed(rank)
    return {name: torch.randn(4, 6, generator=g, dtype=torch.float64) for name in ("x", "y")}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.sampled(3)
def test_float64_is_clipped_in_float64(mesh: dict[str, int], zero: int) -> None:
    """Beside torch, on every axis: a norm that is rounded to float32 anywhere on the way is 1e-8 off."""
    rules = {"**/up": P(None, "tp"), "**/b": P("tp"), "**/down": P("tp", None)} if "tp" in mesh else None
    limit, num = 0.3, 2 if "pp" in mesh else 1
    spec = fzero.Spec(loss=deep_loss, optimizer=optim.sgd(1.0), clip_norm=limit, mesh=mesh, shard=rules, zero=zero,
                      microbatches=num)  # fmt: skip
    world = math.prod(mesh.values())
    result = run(spec, deep_params(), deep_batch, world=world, steps=1)
    paths, leaves, structure = tree.flatten(deep_params())
    leaves = [x.requires_grad_() for x in leaves]
    both = [deep_batch(rank, 0) for rank in range(mesh.get("dp", 1) * mesh.get("dp_out", 1))]
    deep_loss(tree.unflatten(structure, leaves), tree.map(lambda *x: torch.cat(x), *both)).backward()
    norm = torch.nn.utils.clip_grad_norm_(leaves, limit)
    for metrics in result.metrics[0]:
        if "grad_norm" in metrics:
            torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-12, atol=0)
    assert float(norm) > 2 * limit
    for path, x in zip(paths, leaves, strict=True):
        wanted = (x - x.grad).detach()
        torch.testing.assert_close(result.final[f"params/{path}"], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num", [1, 2])
def test_clip_value_is_torchs(num: int) -> None:
    found, metrics = clipped(clip_value=0.01, microbatches=num)
    expected, _ = torch_clipped(lambda leaves: torch.nn.utils.clip_grad_value_(leaves, 0.01))
    assert "grad_norm" not in metrics
    for path, x in expected.items():
        assert relative(found[path], x) < 1e-6
    unclipped, _ = clipped(microbatches=num)
    assert all(relative(found[path], unclipped[path]) > 1e-4 for path in found)


def test_an_infinite_clip_norm_measures_only() -> None:
    plain, _ = clipped()
    found, metrics = clipped(clip_norm=math.inf)
    assert not differing(found, plain)
    assert float(metrics["grad_norm"]) > 0
    spec = fzero.Spec(loss=lambda p, b: (p["a"] * b).sum() + p["b"].sum(), optimizer=optim.sgd(1.0), clip_norm=math.inf)
    state = fzero.step(fzero.init({"a": torch.ones(2), "b": torch.ones(2)}, spec), torch.tensor([1.0, math.inf]))
    assert state.params["b"].full().tolist() == [0, 0]
    assert state.params["a"].full().tolist() == [0, -math.inf]


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0}, {"clip_value": -1.0}, {"clip_norm": math.nan}, {"clip_norm": "1"}]
)
def test_a_limit_of_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fzero.SpecError, match="needed a number > 0"):
        clipped(**options)
    with pytest.raises(fzero.SpecError, match="give one of them"):
        clipped(clip_norm=1.0, clip_value=1.0)


# --- how gradients are reduced ----------------------------------------------------------------------------------------


def chosen(rows: int, **options: Any) -> fzero.Lowered:
    def loss(p: Any, x: Tensor) -> Tensor:
        for one in p["layers"]:
            x = torch.tanh(x @ one["w"])
        return x.mean()

    def params(key: Tensor) -> Any:
        return {"layers": [{"w": torch.zeros(64, 64)} for _ in range(8)]}

    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), **{"zero": 3, "microbatches": 4, **options})
    return fzero.lower(spec, params, torch.empty(rows, 64), world_size=8)


def reductions(one: fzero.Lowered) -> int:
    return sum(op.reduces and op.row.scatters for op in one.program.ops)


@pytest.mark.acceptance
def test_the_reduction_is_chosen_by_memory_and_says_so() -> None:
    """Whole gradients are a small part beside large activations, and most of it beside small ones."""
    end, each = chosen(8192), chosen(4)
    assert end.choices["reduce"].startswith("reduce='end': whole gradients would be ")
    assert each.choices["reduce"].startswith("reduce='each': whole gradients would be ")
    assert "Spec(reduce=...) chooses otherwise" in each.choices["reduce"]
    assert (reductions(end), reductions(each)) == (8, 32)
    assert each.memory.peak * 1.1 < chosen(4, reduce="end").memory.peak
    assert end.memory.peak <= chosen(8192, reduce="each").memory.peak * 1.1


@pytest.mark.parametrize("rows", [256, 2240])  # of small activations, and where both ways are near
@pytest.mark.sampled(1)
def test_the_reduction_is_chosen_without_regard_to_what_changes_no_bit(rows: int) -> None:
    """Each option changes the planned memory, and promises to change no bit: the two ways differ in bits."""
    plain = chosen(rows).reduce
    options: list[dict[str, Any]] = [
        {"zero": 0},
        {"offload": "optimizer+params"},
        {"offload": {"params/**": "cpu", "grads/**": "cpu"}, "clip_norm": 1.0},
        {"prefetch": 4},
        {"remat": "full"},
        {"transfers": "p2p", "bucket_bytes": 1 << 14},
    ]
    assert [one for one in options if chosen(rows, **one).reduce != plain] == []


def test_a_budget_chooses_no_other_bits() -> None:
    need = chosen(4096, reduce="each").memory.spaces["device"]
    assert chosen(4096).reduce == "end"
    assert chosen(4096, reduce="each", device_bytes=need).reduce == "each"
    with pytest.raises(fzero.SpecError, match=r"Or say reduce='each', which holds no whole gradients"):
        chosen(4096, device_bytes=need)


def test_there_is_nothing_to_choose_without_microbatches_or_when_told() -> None:
    assert chosen(8, microbatches=1).choices.keys() <= {"prefetch"}
    assert chosen(8, reduce="each").choices.keys() <= {"prefetch"}
    assert reductions(chosen(8, reduce="end")) == 8


def gaps_loss(p: Any, batch: Any) -> Tensor:
    return (p["a"].sum() + p["c"].square().sum() + p["d"].sin().sum()) * batch.mean()


@stages
@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.parametrize("how", [{"allow_unused": True}, {"allow_unused": True, "trainable": ["a", "b", "d"]}], ids=str)
@pytest.mark.sampled(4)
def test_small_leaves_without_a_gradient_lie_between_those_with_one(how: Any, reduce: str, zero: int) -> None:
    """Sums over parts of the batch read the gradients that there are, and nothing between them."""
    params = {"a": torch.ones(3), "b": torch.ones(2, 1), "c": torch.full((70,), 0.5), "d": torch.tensor([0.2])}
    spec = fzero.Spec(
        loss=gaps_loss, optimizer=optim.sgd(0.1), zero=zero, microbatches=2, reduce=reduce, clip_norm=9.0, **how
    )
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    result = run(spec, params, lambda rank, _: parts[rank], world=2, steps=1)
    scale = torch.cat(parts).mean()
    slopes = {"a": torch.ones(3), "b": torch.zeros(2, 1), "c": 2 * params["c"], "d": params["d"].cos()}
    if "trainable" in how:
        slopes["c"] = torch.zeros(70)
    norm = scale * torch.cat([x.flatten() for x in slopes.values()]).norm()
    for path, slope in slopes.items():
        wanted = params[path] - 0.1 * scale * slope * min(1.0, 9.0 / float(norm))
        torch.testing.assert_close(result.final[f"params/{path}"], wanted)


# --- losses compiled, steps within compiled code ----------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_compiled_loss_is_traced_through() -> None:
    plain = fzero.Spec(loss=GPT.loss, optimizer=optim.adamw(1e-2))
    compiled = fzero.Spec(loss=torch.compile(GPT.loss, backend="eager"), optimizer=optim.adamw(1e-2))
    ends = [run(spec, GPT.init(random.key(0)), GPT.batch, world=2, steps=2) for spec in (plain, compiled)]
    assert not differing(ends[0].final, ends[1].final)
    assert ends[0].losses() == ends[1].losses()


@pytest.mark.timeout(120)
def test_a_compiled_loop_around_the_step_gives_the_same_bits() -> None:
    spec = fzero.Spec(loss=MLP.loss, optimizer=optim.adamw(1e-2), zero=3)

    def loop(state: fzero.State) -> tuple[fzero.State, Tensor]:
        total = torch.zeros(())
        for step in range(3):
            state = fzero.step(state, MLP.batch(0, step))
            total = total + state.metrics["loss"]
        return state, total

    ends = []
    for fn in (loop, torch.compile(loop, backend="eager")):
        state, total = fn(fzero.init(MLP.init(random.key(0)), spec))
        paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
        ends.append({**dict(zip(paths, leaves, strict=True)), "total": total})
    assert not differing(*ends)


# --- in-place work on what is made of a closed-over tensor ------------------------------------------------------------

FIXED = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "write",
    [
        lambda w: torch.zeros_like(FIXED).copy_(w),
        lambda w: FIXED.clone().mul_(w),
        lambda w: (FIXED * 2).index_copy_(0, torch.arange(3), w),
        lambda w: FIXED.new_zeros(3).add_(w),
    ],
)
def test_what_is_made_of_a_closed_over_tensor_may_be_written_to(write: Callable[[Tensor], Tensor]) -> None:
    spec = fzero.Spec(loss=lambda p, b: (write(p["w"]) * b).sum(), optimizer=optim.sgd(1.0))
    state = fzero.step(fzero.init({"w": torch.ones(3)}, spec), torch.tensor([1.0, 10.0, 100.0]))
    w = torch.ones(3, requires_grad=True)
    value = (write(w) * torch.tensor([1.0, 10.0, 100.0])).sum()
    value.backward()
    assert float(state.metrics["loss"]) == value.item()
    assert torch.equal(state.params["w"].full(), (w - w.grad).detach())
    assert FIXED.tolist() == [1, 2, 3]


# --- what cannot be meant ---------------------------------------------------------------------------------------------


def plain(p: Any, batch: Any) -> Tensor:
    return (batch @ p["w"]).square().mean()


W, M = torch.ones(4), torch.ones(3, 4)
MISTAKES: dict[str, tuple[Any, str]] = {
    "one tensor as two parameters": ({"w": W, "v": W}, r"params\['v'\] and params\['w'\] are one tensor.*clone\(\)"),
    "a view as a second parameter": (
        {"w": M, "v": M.t()},
        r"params\['[vw]'\] and params\['[vw]'\] share memory.*take the other.*clone\(\)",
    ),
    "views that share a row": ({"w": M[:2], "v": M[1:]}, r"params\['w'\] and params\['v'\] share memory"),
    "a view of another dtype": ({"w": M, "v": M.view(torch.int32)}, r"share memory"),
    "complex": ({"w": W, "v": W.to(torch.complex64)}, r"params/v is torch\.complex64"),
    "per_rank": ({"w": W, "v": fzero.per_rank(torch.ones(2))}, r"params\['v'\] is per_rank.*step="),
    "integers alone": ({"w": torch.arange(4)}, r"no leaf of params under '\*\*' can train"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_params_that_cannot_be_meant_are_refused(name: str) -> None:
    given, message = MISTAKES[name]
    with pytest.raises(fzero.TreeError, match=message):
        fzero.init(given, fzero.Spec(loss=plain, optimizer=optim.sgd(0.1)))


APART = {
    "halves": lambda w: (w[:2], w[2:]),
    "columns": lambda w: (w[:, :2], w[:, 2:]),
    "columns that alternate": lambda w: (w[:, ::2], w[:, 1::2]),
    "of one column": lambda w: (w[:, 0], w[:, 1:]),
}


@pytest.mark.parametrize("name", APART)
def test_views_that_share_no_element_are_parameters(name: str) -> None:
    w, v = APART[name](torch.arange(16.0).reshape(4, 4))
    spec = fzero.Spec(
        loss=lambda p, batch: (p["w"].sum() + p["v"].square().sum()) * batch.sum(), optimizer=optim.sgd(1)
    )
    state = fzero.step(fzero.init({"w": w, "v": v}, spec), torch.ones(1))
    assert torch.equal(state.params["w"].full(), w - 1)
    assert torch.equal(state.params["v"].full(), -v)


def test_two_frozen_views_of_one_memory_stay_equal() -> None:
    base = torch.ones(2, 3)
    params = {"w": base, "v": base.t(), "a": torch.ones(3, requires_grad=True)}
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * p["v"].t() * p["a"]).sum() * b.sum(), optimizer=optim.sgd(1.0))
    state = fzero.step(fzero.init(params, spec), torch.ones(1))
    assert torch.equal(state.params["v"].full(), state.params["w"].full().t())


def test_a_rule_for_integers_alone_trains_nothing() -> None:
    with pytest.raises(fzero.TreeError, match="no leaf of params under 'i' can train"):
        fzero.init(
            {"w": torch.ones(4), "i": torch.arange(3)},
            fzero.Spec(loss=plain, optimizer=optim.sgd(0.1), trainable=["w", "i"]),
        )


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"key": 3}, r"value_and_grad\(key=int 3\): needed a key"),
    "scale": ({"scale": 1024.0}, r"value_and_grad\(scale=float 1024\.0\): needed a floating 0-d tensor"),
    "vector scale": ({"scale": torch.ones(3)}, r"scale=f32\[3\]\): needed a floating 0-d tensor"),
    "scale left out": ({"precision": "fp16"}, r"with a loss scale.*scale=state"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_value_and_grad_are_checked(name: str) -> None:
    options, message = CALLS[name]
    with pytest.raises(fzero.CaptureError, match=message):
        fzero.value_and_grad(plain, **options)({"w": torch.ones(4)}, torch.eye(4))


def test_no_rows_are_no_microbatches() -> None:
    state = fzero.init({"w": torch.ones(4)}, fzero.Spec(loss=plain, optimizer=optim.sgd(0.1), microbatches=2))
    with pytest.raises(fzero.CaptureError, match=r"batch is f32\[0, 4\]: dim 0 must be divisible.*and not 0"):
        fzero.step(state, torch.ones(0, 4))
    assert fzero.step(state, torch.ones(2, 4)).step == 1


class Encoding(UserDict[str, Any]):
    """As a tokenizer's BatchEncoding: a Mapping that is no dict."""


def test_a_mapping_of_any_type_is_a_batch(tmp_path: Path) -> None:
    def loss(p: Any, b: Any) -> torch.Tensor:
        return (b["x"] @ p["w"] - b["more"]["y"]).square().mean()

    x, y = torch.arange(6.0).view(2, 3), torch.ones(2)
    batch = {"x": x, "more": {"y": y}}
    given = Encoding(x=x, more=MappingProxyType({"y": y}))
    state, other = (
        fzero.init({"w": torch.ones(3)}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))) for _ in "ab"
    )
    state, other = fzero.step(state, batch), fzero.step(other, given)
    assert state.metrics["loss"] == other.metrics["loss"]
    assert fzero.evaluate(state, batch, loss) == fzero.evaluate(other, given, loss)
    assert fzero.profile(other, given, tmp_path).step == 2
    lowered = (fzero.lower(state.runtime.spec, {"w": torch.ones(3)}, one, world_size=2) for one in (batch, given))
    assert len({one.program.digest for one in lowered}) == 1
