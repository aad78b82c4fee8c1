"""shrink: makes a failing case smaller, until nothing more can be left out and it still fails in the same way.

Options go back to their defaults, axes lose ranks, rules and layers are left out. A change stays if `check` ends as it
did, with the same class of message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lab.fuzz_meshes.case import Case, Recipe
from lab.fuzz_meshes.check import Outcome, check
from lab.fuzz_meshes.layers import Layer
from lab.fuzz_meshes.model import Model

PLAIN = {
    "norm": "none", "bias": False, "gated": False, "rope": False, "qk_norm": False, "mask": "none", "way": "softmax",
    "turned": False, "after": "none", "balance": False, "act": "tanh", "residual": True, "fused": False,
}  # fmt: skip


def shrink(
    case: Case, outcome: Outcome | None = None, tries: int = 300, run: Callable[[Case], Outcome] = check
) -> Case:
    """The smallest case found in so many tries."""
    target = outcome or run(case)

    def fails(smaller: Case) -> bool:
        try:
            ended = run(smaller)
        except Exception:  # plain PyTorch does not run it
            return False
        return (ended.end, ended.reason) == (target.end, target.reason)

    going = True
    while going and tries > 0:
        going = False
        for smaller in _smaller(case):
            fitted = _fitted(smaller)
            if fitted is None or fitted == case:
                continue
            tries -= 1
            if fails(fitted):
                case, going = fitted, True
                break
            if tries <= 0:
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less, those that leave out most first."""
    yield from (replace(case, model=model) for model in _models(case.model))
    for n in range(len(case.model.layers)):
        if len(case.model.layers) > 1:
            yield _without(case, n)
    yield from _meshes(case)
    for name in case.place:
        if name not in ("mesh", "shard", "nvme_path", "zero"):
            yield _with(case, {k: v for k, v in case.place.items() if k != name})
    if case.place.get("zero") != 0:
        yield _with(case, {**case.place, "zero": 0})
    yield from (replace(case, recipe=recipe) for recipe in _recipes(case.recipe))
    rules = case.place.get("shard") or {}
    for path in rules:
        if len(rules) > 1:
            yield _with(case, {**case.place, "shard": {k: v for k, v in rules.items() if k != path}})
    yield from (replace(case, model=model) for model in _plainer(case.model))


def _with(case: Case, place: dict[str, Any]) -> Case:
    return replace(case, place=place)


def _meshes(case: Case) -> Iterator[Case]:
    mesh = case.place["mesh"]
    for name, size in mesh.items():
        for less in sorted({1, size - 1} - {0, size}):
            yield _with(case, {**case.place, "mesh": {**mesh, name: less}})
        if size == 1 and len(mesh) > 1:
            yield _with(case, {**case.place, "mesh": {k: v for k, v in mesh.items() if k != name}})


def _recipes(recipe: Recipe) -> Iterator[Recipe]:
    plain = Recipe()
    for name in ("optimizer", "precision", "clip", "trainable", "nonfinite", "bad", "dtype", "microbatches", "rows"):
        if getattr(recipe, name) != getattr(plain, name):
            yield replace(recipe, **{name: getattr(plain, name)})
    for name in ("microbatches", "steps"):
        if getattr(recipe, name) > 1:
            yield replace(recipe, **{name: getattr(recipe, name) - 1})


def _models(model: Model) -> Iterator[Model]:
    if model.second is not None:
        yield replace(model, second=None, encoder=())
    for name, value in (
        ("encoder", ()),
        ("aux", ()),
        ("shared", None),
        ("mean", False),
        ("head", "values"),
        ("input", "floats"),
    ):
        if getattr(model, name) != value:
            changed: dict[str, Any] = {name: value}
            yield replace(model, **changed)


def _plainer(model: Model) -> Iterator[Model]:
    for n, layer in enumerate(model.layers):
        for name, value in PLAIN.items():
            if name in layer.options and layer.options[name] != value:
                smaller = Layer(layer.kind, {**layer.options, name: value})
                yield replace(model, layers=(*model.layers[:n], smaller, *model.layers[n + 1 :]))


def _without(case: Case, n: int) -> Case:
    """Layer n left out; rules and cuts of later layers are renumbered."""
    model = case.model
    shared = {a - (a > n): b - (b > n) for a, b in (model.shared or {}).items() if n not in (a, b)} or None
    aux = tuple((a - (a > n), kind) for a, kind in model.aux if a != n)
    layers = (*model.layers[:n], *model.layers[n + 1 :])
    place = dict(case.place)
    if "shard" in place:
        place["shard"] = {_moved(k, n): v for k, v in place["shard"].items() if not k.startswith(f"blocks/{n}/")}
    return Case(case.name, replace(model, layers=layers, shared=shared, aux=aux), case.recipe, place)


def _moved(path: str, n: int) -> str:
    match = re.match(r"blocks/(\d+)/(.*)", path)
    return path if match is None or int(match[1]) < n else f"blocks/{int(match[1]) - 1}/{match[2]}"


def _fitted(case: Case) -> Case | None:
    """The case without rules of leaves and fields that it has no more; None where it is no case."""
    place, leaves = dict(case.place), case.model.leaves()
    if any(layer.options.get("cross") for layer in case.model.layers) and case.model.second != "cross":
        plain = [Layer(x.kind, {k: v for k, v in x.options.items() if k != "cross"}) for x in case.model.layers]
        case = replace(case, model=replace(case.model, layers=tuple(plain)))
    if case.model.head == "tied" and case.model.input != "tokens":
        return None
    if "shard" in place:
        place["shard"] = {k: v for k, v in place["shard"].items() if k in leaves}
        named = {axis for rule in place["shard"].values() for axis in rule.axes}
        if not named <= place["mesh"].keys() or any(case.axis(axis) > 1 for axis in {"tp", "mp"} - named):
            return None
        if not named:
            place = {k: v for k, v in place.items() if k not in ("shard", "sequence")}
    if "pp" not in place["mesh"]:
        place.pop("pipeline", None)
    offload = place.get("offload")
    if not (isinstance(offload, dict) and "nvme" in offload.values()):
        place.pop("nvme_path", None)
    if offload is None:
        place.pop("update_on", None)
    return replace(case, place=place)
