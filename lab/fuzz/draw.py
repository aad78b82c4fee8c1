"""draw: a random case, line by line.

A row of the tables gives a line, which is run as it is drawn. A line that raises in eager PyTorch is drawn again. So is
one whose value is not finite, too large or without a gradient. A case is thus a loss that PyTorch computes.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fzero.capture.ambient_rng import Keyed
from fzero.random import key
from lab.fuzz.case import Case, Options
from lab.fuzz.operands import FLOATS, Draw
from lab.fuzz.options import draw_options
from lab.fuzz.tables import row


def draw(seed: int, number: int) -> Case:
    """The case of this number: the same in every run of one version."""
    rng = random.Random(f"{seed}:{number}")
    options = draw_options(rng)
    for _ in range(40):
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            case = _try(rng, f"{seed}:{number}", options)
        if case is not None:
            return case
    raise RuntimeError(f"no case {seed}:{number} in 40 tries")


def _try(rng: random.Random, name: str, options: Options) -> Case | None:
    drawn = Draw(rng, options)
    _leaves(drawn)
    wanted = rng.randint(2, 8)
    here = key(0, torch.get_default_device())
    with Keyed(here) if options.keyed else nullcontext():  # so that random ops draw from a key here too
        for _ in range(4 * wanted):
            if len(drawn.body) >= wanted:
                break
            before = len(drawn.body), drawn.number, len(drawn.setup), len(drawn.params)
            used, build = row(rng, options)
            drawn.wrote = False
            try:
                for line in build(drawn).split("\n"):
                    drawn.add(line)
                drawn.uses.add(used)
            except Exception:
                if drawn.wrote:
                    return None  # values that were changed are no good now
                _undo(drawn, *before)
        if not drawn.body:
            return None
        terms = _terms(drawn)
        try:
            total = eval(" + ".join(terms), drawn.names)
            leaves = [x for x in _floats(drawn.names["p"]) if x.requires_grad]
            if not total.requires_grad or not math.isfinite(float(total.detach())) or abs(float(total)) > 1e4:
                return None
            grads = [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]
        except RuntimeError:
            return None
    if not grads or not all(bool(g.isfinite().all()) for g in grads) or max(_largest(g) for g in grads) > 1e4:
        return None
    count = None
    if options.form == "gradients" and rng.random() < 0.08:
        count = '(b["i0"] + 1).sum()'
    return Case(
        name, tuple(drawn.setup), tuple(drawn.params), tuple(drawn.batch),
        tuple(drawn.body), tuple(terms), count, options,
        frozenset(drawn.uses),
    )  # fmt: skip


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _undo(drawn: Draw, lines: int, number: int, setup: int, params: int) -> None:
    for n in range(number, drawn.number):
        drawn.values.pop(f"v{n}", None)
    del drawn.body[lines:], drawn.setup[setup:], drawn.params[params:]
    drawn.number = number


def _floats(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in _floats(value)]
    return [tree] if tree.dtype.is_floating_point else []


def _leaves(drawn: Draw) -> None:
    rng = drawn.rng
    rows = rng.randint(1, 3)

    def shape(least: int = 1) -> tuple[int, ...]:
        return tuple(rng.randint(1, 5) for _ in range(rng.randint(least, 3)))

    drawn.names["p"], drawn.names["b"] = {}, {}
    for n in range(rng.randint(2, 4)):
        chance = rng.random()
        text = f"normal({n}, {shape()})"
        if chance < 0.08:
            text = f"normal({n}, ())"
        elif chance < 0.13:
            text = f"normal({n}, {shape()}, torch.float64)"
        elif chance < 0.17:
            text = f"normal({n}, {shape()}, torch.bfloat16)"
        elif chance < 0.21:
            text = f"normal({n}, {rng.choice(((0,), (0, 3), (2, 0)))})"
        drawn.leaf("p", f"w{n}", text)
    if rng.random() < 0.12:
        drawn.leaf("p", "n0", f"integers(50, {shape()})")
    text = ", ".join(map(str, ("{parts}" if rows == 1 else f"{{parts}} * {rows}", *shape())))
    drawn.leaf("b", "x0", f"normal(100 + rank, ({text}))")
    if rng.random() < 0.5:
        text = ", ".join(map(str, ("{parts}" if rows == 1 else f"{{parts}} * {rows}", *shape())))
        drawn.leaf("b", "x1", f"normal(200 + rank, ({text}))")
    drawn.leaf("b", "i0", f"integers(300 + rank, ({{parts}} * {rows}, {rng.randint(1, 4)}))")
    if rng.random() < 0.2:
        drawn.constant(f"normal(400, {shape()})")


def _terms(drawn: Draw) -> list[str]:
    """Summands of the loss: of the values that no later line has used, and of a few others."""
    rng = drawn.rng
    later = " ".join(line.partition(" = ")[2] or line for line in drawn.body)
    names = [n for n in drawn.values if n.startswith("v")]
    chosen = [n for n in names if not re.search(rf"\b{n}\b", later) or rng.random() < 0.1]
    chosen += [n for n in drawn.values if n.startswith('p["w') and n not in later and rng.random() < 0.7]
    return [_term(drawn, n) for n in chosen[:6]] or ['p["w0"].sum()']


def _term(drawn: Draw, name: str) -> str:
    x = drawn.values[name]
    if x.is_complex():
        name, x = f"torch.view_as_real({name}.resolve_conj())", torch.view_as_real(x.resolve_conj())
    if x.dtype not in FLOATS:
        name = f"{name}.to(torch.float32)"
    ways = ["({x} * wave({x})).sum()", "{x}.sum()"]
    ways += ["{x}.mean()", "{x}.square().mean()"] if x.numel() else []
    return drawn.some(*ways).format(x=name)
