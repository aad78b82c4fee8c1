"""check: runs one case through fzero and through plain PyTorch, and classifies the end.

Ends: `equal`; `refused`, by an FzeroError of the listed set (`refusals.TABLE`), whose remedy was followed and then
ended equal; `unlisted`, by another FzeroError, or one whose remedy did not help; `wrong`, other numbers; `crashed`, any
other error, a VerifyError among them. All but the first two are faults.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.errors import FzeroError, VerifyError
from fzero.runtime.interpreter import DeadlockError, HazardError
from lab.fuzz_meshes import optimizers, oracle, refusals, runs
from lab.fuzz_meshes.case import Case, Recipe
from lab.fuzz_meshes.model import Model

REMEDIES = 24  # that are followed, one after another
TIGHT, SINGLE = 1e-12, 2e-5
ROUNDING = 1e-11
LOW = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Outcome:
    """The end of a case. Immutable. reason: its class. what: details if it is not equal."""

    end: str
    reason: str = ""
    what: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the end is one that no case may have."""
        return self.end not in ("equal", "refused")


def check(case: Case, run: Callable[[Case], runs.Result] | None = None) -> Outcome:
    """Runs a case. run: how fzero runs it; None: lowered and interpreted in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, tried = None, case
        for _ in range(REMEDIES):
            outcome = _ended(tried, run or runs.interpreted)
            if outcome.end != "refused":
                break
            first = first or outcome
            remedied = refusals.remedied(tried, outcome.what)
            if remedied is None:
                return Outcome("unlisted", outcome.reason, outcome.what)
            tried = remedied
        if first is None:
            return outcome
        if outcome.end == "equal":
            return first
        return Outcome(
            "unlisted" if outcome.end == "refused" else outcome.end,
            f"remedied: {outcome.reason}",
            f"{outcome.what} (after {first.what})",
        )


def _ended(case: Case, run: Callable[[Case], runs.Result]) -> Outcome:
    try:
        what = difference(case, run(case))
    except (VerifyError, DeadlockError, HazardError) as error:
        return Outcome("crashed", class_of(error), f"{type(error).__name__}: {error}")
    except FzeroError as error:
        return Outcome("refused", class_of(error), f"{type(error).__name__}: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} at {where.filename.rpartition('fzero/')[2]}:{where.lineno}"
        return Outcome("crashed", class_of(error), text)
    return Outcome("wrong", what.partition(":")[0], what) if what else Outcome("equal")


# --- the comparison ---------------------------------------------------------------------------------------------------

_references: list[tuple[Model, Recipe, int, bool, int, list[oracle.Step]]] = []


def _reference(case: Case, wide: bool = False, shares: int = 1) -> list[oracle.Step]:
    """The oracle's steps; the last ones are kept."""
    asked = (case.model, case.recipe, case.data_ranks, wide, shares)
    for *of, steps in _references:
        if tuple(of) == asked:
            return steps
    ranks = [case.data_ranks] * case.recipe.steps
    _references.insert(0, (*asked, oracle.train(case.model, case.recipe, ranks, wide=wide, shares=shares)))
    del _references[12:]
    return _references[0][-1]


def difference(case: Case, result: runs.Result) -> str:
    """Returns the first difference from plain PyTorch in a few words; "" if there is none."""
    recipe = case.recipe
    if recipe.dtype == "f64":
        return against(case, result, _reference(case))
    exact, low = _reference(case, wide=True)[0], oracle.narrow(recipe)
    if low is None:
        return _first(case, result, exact, [], SINGLE)
    plain = _reference(case)[0]
    rounded = [plain] if case.model_ranks == 1 else [plain, _reference(case, shares=case.model_ranks)[0]]
    if any(layer.options.get("cell") == "torch" for layer in (*case.model.layers, *case.model.encoder)):
        return _first(case, result, exact, rounded, 4 * LOW[low])  # one op, which rounds at other places
    if low is torch.bfloat16 and case.model_ranks == 1:  # the same casts and sums
        return _first(case, result, plain, [], SINGLE)
    return _first(case, result, plain, [exact, *rounded[1:]], 4 * LOW[low])


def against(case: Case, result: runs.Result, steps: list[oracle.Step]) -> str:
    """Returns the first difference of steps in float64 from the oracle's; "" if there is none."""
    row = optimizers.TABLE[case.recipe.optimizer]
    for number, step in enumerate(steps[: row.steps]):
        metrics, leaves = result.metrics[number], result.leaves[number]
        if what := _gap(metrics["loss"], step.loss, TIGHT * max(1.0, float(step.loss.nan_to_num().abs()))):
            return f"loss: step {number}: {what}"
        if "grad_norm" in metrics and (
            what := _gap(metrics["grad_norm"], step.norm, TIGHT * max(1.0, float(step.norm.nan_to_num(posinf=0.0))))
        ):
            return f"grad_norm: step {number}: {what}"
        for path, value in step.leaves.items():
            if path.startswith("params/") and (not row.exact or (row.jumps and _rounding(steps, path))):
                continue
            if what := _gap(leaves[path], value, row.tolerance * max(1.0, _largest(value)) + _noise(steps, path)):
                return f"{path.partition('/')[0]}: step {number}: {path}: {what}"
    return ""


def _rounding(steps: list[oracle.Step], path: str) -> bool:
    """Whether a gradient of this leaf has an element that is no more than what sums leave of zero."""
    grads = [step.grads.get(path.removeprefix("params/")) for step in steps]
    return any(bool(((g.abs() < ROUNDING) & (g != 0)).any()) for g in grads if g is not None)


def _noise(steps: list[oracle.Step], path: str) -> float:
    """What a gradient that is zero but for rounding, as that of a bias before a norm, may move its leaf. Such noise is
    as large as its summands make it, and optimizers with EPS take ten times that."""
    grads = [step.grads.get(path.removeprefix("params/")) for step in steps]
    largest = max((_largest(g) for g in grads if g is not None), default=0.0)
    return 100 * largest if largest < ROUNDING else 0.0


def _first(case: Case, result: runs.Result, step: oracle.Step, others: Sequence[oracle.Step], most: float) -> str:
    """Compares the loss of the first step, and its gradient as moments show it, with `step`: to `most` of the largest
    element and four times what rounding does, the largest distance of `step` and `others`. Sums over `tp` are in other
    groups, and a loss scale that is divided by a count rounds otherwise."""
    row = optimizers.TABLE[case.recipe.optimizer]
    spread = max((_apart(step.loss, other.loss) for other in others), default=0.0)
    allowed = most * max(0.1, float(step.loss.nan_to_num().abs())) + 4 * spread
    if what := _gap(result.metrics[0]["loss"], step.loss, allowed):
        return f"loss: {what}"
    if case.recipe.bad == 0:
        return ""
    largest = max(map(_largest, step.grads.values()))
    for path, value in step.leaves.items():
        kind, name, leaf = [*path.split("/", 2), ""][:3]
        if kind != "opt_state" or name not in row.linear:
            continue
        share = _largest(value) / max(_largest(step.grads[leaf]), 1e-30)
        spread = max((_apart(value, other.leaves[path]) for other in others), default=0.0)
        allowed = most * max(_largest(value), 0.1 * share * largest) + 4 * spread
        if what := _gap(result.leaves[0][path], value, allowed):
            return f"opt_state: {path}: {what}"
    return ""


def _apart(a: Tensor, b: Tensor) -> float:
    return _largest(a.double() - b.double())


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def _gap(a: Tensor, b: Tensor, most: float) -> str:
    """ "" if no element of a and b is further apart, and both are finite at the same places."""
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, wanted {tuple(b.shape)}"
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return f"not finite elsewhere: {a.flatten()[:3].tolist()}, wanted {b.flatten()[:3].tolist()}"
    gap = _largest(a.nan_to_num(0.0, 0.0, 0.0) - b.nan_to_num(0.0, 0.0, 0.0))
    return "" if gap <= most else f"off by {gap:.3g}, allowed {most:.3g}"


def class_of(error: BaseException) -> str:
    """An error's text without the parts that differ from case to case."""
    text = str(error).split("\n")[0]
    for pattern, kept in (
        (r"\w+\.py:\d+", "LINE"),
        (r"'[^']*'|`[^`]*`", "NAME"),
        (r"(params|opt_state|grads|batch|blocks|encoder)[/\w\[\]*.]*", "LEAF"),
        (r"0x[0-9a-f]+|-?\d+(\.\d+)?(e[-+]?\d+)?", "N"),
        (r"\[[N, ]*\]|\([N, ]*\)", "SHAPE"),
    ):
        text = re.sub(pattern, kept, text)
    return f"{type(error).__name__}: {text}"[:200]
