"""The graph of one rank is typed: what computes something else is refused, and what `propagate` writes is not.

Mutants break a local graph in one place. All ranks run it in lockstep: it is wrong if an output or a claimed value
changes beyond rounding. Every wrong one must be refused with a VerifyError; no other error may come out.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lockstep import captured, with_whole
from shard_mutants import KINDS, Draft, Meaning
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tp_models import Model, gpt, of_hf, placements

from fzero import Mean, P, Spec, lower, optim
from fzero._torch_compat import is_fake
from fzero.compile import judged
from fzero.errors import VerifyError
from fzero.ir import fx_values
from fzero.shard.write_local_graph import Sharded
from fzero.verify import sharding
from fzero.verify.sharding import check_sharding

EACH = 8  # mutants of a kind for each case, in acceptance


def number() -> Model:
    """A number that every rank has is added to sums, and vectors of two forms: what the others lack."""

    def loss(p: Any, batch: Any) -> Tensor:
        hidden = torch.tanh(batch["x"] @ p["w"])
        return (hidden @ p["v"]).sum() + p["a"] * p["a"] + hidden.mean()

    params = {"w": torch.randn(8, 16), "v": torch.randn(16), "a": torch.tensor(0.7)}
    return Model(params, loss, lambda rank, step: {"x": torch.randn(4, 8)}, {"w": P(None, "tp"), "v": P("tp")})


MODELS = {
    "number": number,
    "gpt": lambda: gpt(layers=1),
    "gpt, fused": lambda: gpt(fused=True, layers=1),
    **{name: lambda name=name: of_hf(name, num_hidden_layers=1) for name in ("Llama", "Qwen3", "BERT", "Mamba")},
    "T5": lambda: of_hf("T5", num_layers=1),
}
SIZES = [(name, n) for name in MODELS for n in (2, 4)]


@cache
def subject(name: str, n: int) -> tuple[Any, Sharded, Meaning]:
    torch.manual_seed(0)
    model = MODELS[name]()

    def loss(params: Any, batch: Any) -> Tensor:
        value = model.loss(params, batch)
        return value.total / value.count if isinstance(value, Mean) else value

    case = captured(loss, model.params, model.batch(0, 0))
    gm, made = with_whole(case, placements(model, n), n)
    g = torch.Generator().manual_seed(1)
    inputs = [  # no weight is one or zero, or half of the mutants would mean the same
        x + 0.1 * torch.randn(x.shape, generator=g) if path is not None else x
        for x, path in zip(case.inputs, case.paths, strict=True)
    ]
    return gm, made, Meaning(gm, made, inputs)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies of a global call are those of the last check: most of a check's time."""
    monkeypatch.setattr(sharding, "strategies", _strategies)


@cache
def _known(node: Any, n: int, groups: tuple[int, ...]) -> Any:
    return KEPT(node, n, groups)


KEPT = sharding.strategies


def _strategies(node: Any, n: int, groups: Any) -> Any:
    return _known(node, n, tuple(groups))


def verdict(whole: Any, made: Sharded) -> str:
    """The refusal of a local graph; "" where it is accepted."""
    try:
        check_sharding(whole, made.gm, made.inputs, made.outputs, made.n, made.axis)
    except VerifyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "n"), SIZES)
@pytest.mark.sampled(1)
def test_what_is_wrong_is_refused(name: str, n: int, whole: bool) -> None:
    gm, made, meaning = subject(name, n)
    assert verdict(gm, made) == "", "an unbroken graph is refused"
    assert verdict(gm, Draft.of(made, gm).made) == "", "a copy of an unbroken graph is refused"
    found = mutants(gm, made, meaning, f"{name} {n}", EACH if whole else 1)
    missed = [text for rows in found.values() for text in rows["missed"]]
    assert not missed, "\n".join(missed)
    for kind, rows in found.items():
        print(f"{name} {n}  {kind:35}", *(f"{key} {count}" for key, count in rows.items() if key != "missed"))


def test_the_graph_around_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are those of a norm's terms; a region is read and written where its graph says."""
    given: list[tuple[Any, ...]] = []

    def check(*args: Any) -> None:
        given.append((args, Draft.of(Sharded(args[1], args[4], args[5], *[()] * 4), args[0])))
        check_sharding(*args)

    monkeypatch.setattr(judged, "check_sharding", check)
    model = gpt(layers=1)
    spec = Spec(loss=model.loss, optimizer=optim.adamw(1e-2), mesh={"tp": 2}, shard=model.rules, clip_norm=1.0)
    lower(spec, model.params, model.batch(0, 0), world_size=2)
    ((gm, _, *rest), kept) = given[0]
    assert rest[-1] is not None, "the first graph is the outer one"
    nodes = [x.name for x in kept.nodes if str(x.target) in ("fzero.reduce.default", "fzero.region.default")]
    assert len(nodes) > 1
    broken = 0
    for name in nodes:
        for edit in OUTER:
            draft = Draft.of(kept.made, gm)
            node = next(x for x in draft.nodes if x.name == name)
            if edit(node):
                broken += 1
                with pytest.raises(VerifyError, match=r"^\[sharding\]"):
                    check_sharding(gm, draft.made.gm, *rest)
    assert broken >= 6


def _left_out(node: Any) -> bool:
    return "reduce" in node.name and bool(node.replace_all_uses_with(node.args[0]))


def _argument(place: int, value: Any) -> Any:
    def edit(node: Any) -> bool:
        if "reduce" not in node.name or node.args[place] == value:
            return False
        node.update_arg(place, value)
        return True

    return edit


def _inputs_swapped(node: Any) -> bool:
    if "reduce" in node.name:
        return False
    first, second, *others = node.args[0]
    node.args = ([second, first, *others], *node.args[1:])
    return True


def _fewer_inputs(node: Any) -> bool:
    if "reduce" in node.name:
        return False
    node.args = (list(node.args[0])[:-1], *node.args[1:])
    return True


OUTER = [_left_out, _argument(1, "max"), _argument(2, "dp"), _inputs_swapped, _fewer_inputs]


def mutants(gm: Any, made: Sharded, meaning: Meaning, seed: str, each: int) -> dict[str, dict[str, Any]]:
    """Of each kind, how many were made, wrong and refused, and those that were missed."""
    table: dict[str, dict[str, Any]] = {}
    for kind, change in KINDS.items():
        counts: Counter[str] = Counter()
        missed = []
        for number in range(each):
            rng = random.Random(f"{seed} {kind} {number}")
            draft = Draft.of(made, gm)
            node = change(draft, rng)
            if node is None:
                continue
            if rng.random() < 0.5:
                draft.renew()
            counts["made"] += 1
            why = meaning.wrong(draft)
            try:
                refused = verdict(gm, draft.made)
            except Exception as error:  # any but a VerifyError is a fault of the checker
                missed.append(f"{seed}: {kind} {number}, {node}: {type(error).__name__}: {error}")
                continue
            counts["wrong"] += bool(why)
            counts["refused"] += bool(why and refused)
            counts["refused, though right"] += bool(refused and not why)
            if why and not refused:
                missed.append(f"{seed}: {kind} {number}, {node.format_node()}: {why}")
        table[kind] = {**counts, "missed": missed}
    return table


class _Fakes(TorchDispatchMode):
    """Refuses ops that make real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert all(map(is_fake, fx_values.tensors(result if isinstance(result, (tuple, list)) else [result]))), func
        return result


def test_no_memory_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The complaint: a number that a loss over a vocabulary makes on its device was made there for real, which a
    machine without that device cannot."""

    def check(*args: Any) -> None:
        with _Fakes():
            check_sharding(*args)

    def loss(p: Any, batch: Any) -> Tensor:
        return F.cross_entropy(batch["x"] @ p["w"], batch["y"])

    monkeypatch.setattr(judged, "check_sharding", check)
    spec = Spec(loss=loss, optimizer=optim.adamw(1e-2), mesh={"tp": 2}, shard={"w": P(None, "tp")})
    lower(
        spec, {"w": torch.empty(8, 16)}, {"x": torch.empty(4, 8), "y": torch.empty(4, dtype=torch.long)}, world_size=2
    )
