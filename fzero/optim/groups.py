"""Parameter groups by path: another optimizer, or another learning rate, for the leaves that a rule names.

Rules are path patterns on the paths within params (`fzero.tree.matches`). The first rule that matches a leaf decides. A
rule that decides for no leaf is an error: it is misspelt, or a rule before it takes all its leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero import tree
from fzero.errors import SpecError, TreeError
from fzero.optim import _check
from fzero.optim.transform import GradientTransformation, PyTree, _with_holes


def multi_transform(rules: Mapping[str, GradientTransformation]) -> GradientTransformation:
    """Returns a transformation that treats each group of leaves with the transformation of its rule.

    rules: path rules to transformations, the first match wins. Every leaf needs a rule; `"**"` is a rule for all leaves
    that are left. The state is the tuple of the transformations' states in the order of the rules. Each is over params
    with `None` for the leaves of other rules, so these take no memory. A norm in one of them is that of its own leaves.

    Raises `SpecError` for a leaf without a rule, for a rule that wins for no leaf, and for a value that is no
    transformation. Raises `TreeError` for gradients unlike params and for a state of another length.

    >>> from fzero.optim import adamw, sgd
    >>> tx = multi_transform({"**/bias": sgd(0.5), "**": adamw(0.1)})
    >>> params = {"a": {"bias": torch.ones(1), "w": torch.ones(1)}}
    >>> updates, opt_state = tx.update(params, tx.init(params), params)
    >>> updates, tree.flatten(opt_state)[0]
    ({'a': {'bias': tensor([-0.5000]), 'w': tensor([-0.1010])}}, ['0/count', '1/count', '1/mu/a/w', '1/nu/a/w'])
    """
    where = "multi_transform"
    _check_rules(where, rules, "{'**/bias': sgd(0.1), '**': adamw(3e-4)}")
    for rule, tx in rules.items():
        if not isinstance(tx, GradientTransformation):
            shown = getattr(tx, "__name__", _check.kind(tx))
            raise SpecError(
                f"{where}: the rule {rule!r} has {shown}, not a GradientTransformation: call it, as in "
                f"{{{rule!r}: adamw(3e-4)}}"
            )
    transformations = list(rules.values())

    def grouped(params: PyTree) -> list[int]:
        numbers = first_matches(where, list(rules), params)
        for path, number in zip(tree.flatten(params)[0], numbers, strict=True):
            if number is None:
                raise SpecError(
                    f"{where}: no rule matches params/{path}. Add a last rule for all that are left, as in "
                    "{..., '**': adamw(3e-4)}, or '**': fzero.optim.scale(0.0) to leave them as they are"
                )
        return [number for number in numbers if number is not None]

    def init(params: PyTree) -> PyTree:
        groups = grouped(params)
        return tuple(tx.init(_with_holes(params, [g == i for g in groups])) for i, tx in enumerate(transformations))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        _check.alike(where, "grads", grads, params, dtypes=False)
        if len(state) != len(transformations):
            raise TreeError(
                f"{where}: opt_state has {len(state)} parts, but there are {len(transformations)} rules: make it with "
                "this transformation's init"
            )
        groups, structure = grouped(params), tree.flatten(params)[2]
        states, results = [], []
        for i, (tx, part) in enumerate(zip(transformations, state, strict=True)):
            chosen = [g == i for g in groups]
            held = _with_holes(params, chosen)
            inner, part = tx.update(_with_holes(grads, chosen), part, held)
            results.append(iter(_check.alike(where, "updates", inner, held, dtypes=False)))
            states.append(part)
        return tree.unflatten(structure, [next(results[g]) for g in groups]), tuple(states)

    return GradientTransformation(init, update)


def scale_by_path(rules: Mapping[str, float]) -> GradientTransformation:
    """Returns a transformation that multiplies the updates of the leaves that a rule names; all others pass.

    rules: path rules to numbers, the first match wins. The numbers are learning-rate multipliers if it stands at the
    end of a chain. Weight decay is part of an update, so it is multiplied too. 0 keeps a leaf unchanged; its moments
    are still updated.

    Raises `SpecError` for a multiplier that is not a finite number and for a rule that wins for no leaf, `TreeError`
    for gradients unlike params.

    >>> tx = scale_by_path({"embed": 0.1, "head/**": 2.0})
    >>> params = {"embed": torch.ones(1), "body": torch.ones(1), "head": {"w": torch.ones(1)}}
    >>> tx.update(params, tx.init(params), params)[0]
    {'embed': tensor([0.1000]), 'body': tensor([1.]), 'head': {'w': tensor([2.])}}
    """
    where = "scale_by_path"
    _check_rules(where, rules, "{'embed/**': 0.1}")
    factors = [
        _check.hyper(f"{where}: the multiplier of {rule!r}", factor, low=-float("inf"), above=True)
        for rule, factor in rules.items()
    ]

    def init(params: PyTree) -> PyTree:
        first_matches(where, list(rules), params)
        return ()

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = _check.alike(where, "updates", grads, params, dtypes=False)
        numbers = first_matches(where, list(rules), params)
        scaled = [
            u if number is None else (u * factors[number]).to(u.dtype)
            for u, number in zip(leaves, numbers, strict=True)
        ]
        return tree.unflatten(tree.flatten(params)[2], scaled), state

    return GradientTransformation(init, update)


def first_matches(where: str, rules: Sequence[str], params: PyTree) -> list[int | None]:
    """For each leaf of `params` the number of the first rule that matches it, or None.

    >>> first_matches("scale_by_path", ["b", "**"], {"a": 1, "b": 2})
    [1, 0]
    >>> first_matches("scale_by_path", ["**", "b"], {"a": 1, "b": 2})
    Traceback (most recent call last):
    fzero.errors.SpecError: scale_by_path: the rule 'b' decides for no leaf: '**', before it, takes params/b. Put it \
before '**'
    """
    paths = tree.flatten(params)[0]
    numbers = [next((i for i, rule in enumerate(rules) if tree.matches(rule, path)), None) for path in paths]
    for i, rule in enumerate(rules):
        if i in numbers:
            continue
        taken = [
            (path, rules[n])
            for path, n in zip(paths, numbers, strict=True)
            if n is not None and tree.matches(rule, path)
        ]
        if taken:
            path, winner = taken[0]
            raise SpecError(
                f"{where}: the rule {rule!r} decides for no leaf: {winner!r}, before it, takes params/{path}. Put it "
                f"before {winner!r}"
            )
        known = [*paths, *(f"**/{tree.parts(path)[-1]}" for path in paths if path)]
        shown = ", ".join(repr(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
        raise SpecError(
            f"{where}: the rule {rule!r} matches none of the {len(paths)} leaves of params ({shown})."
            + tree.suggest(rule, known)
        )
    return numbers


def _check_rules(where: str, rules: Any, example: str) -> None:
    if not isinstance(rules, Mapping) or not rules or not all(isinstance(rule, str) for rule in rules):
        shown = "empty" if isinstance(rules, Mapping) and not rules else f"of type {type(rules).__name__}"
        raise SpecError(f"{where}: rules is {shown}, but it must be a dict by path rule: write {example}")
    _check.takes_mean(where, *rules.values())
