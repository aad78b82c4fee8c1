"""check: one case, through eager PyTorch and through fzero, and how that ended.

Ends: `equal`; `refused` by an FzeroError, with a reason that leaves out names and numbers; `wrong`, other numbers than
eager's or other bits from another stage, schedule or executor; `crashed`, any other error.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from fzero.errors import FzeroError, VerifyError
from fzero.fuzz import runs
from fzero.fuzz.case import Case
from fzero.fuzz.oracle import difference


@dataclass(frozen=True)
class Outcome:
    """`what` says more about an `end` that is not equal, `reason` is its class; `aten` the ops that were captured."""

    end: str
    reason: str = ""
    what: str = ""
    aten: frozenset[str] = field(default_factory=frozenset, repr=False)


def check(case: Case) -> Outcome:
    """Runs a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = runs.prepared(case)
        aten: set[str] = set()
        try:
            what = _wrong(case, made, aten)
        except VerifyError as error:
            return Outcome("crashed", _class(error), f"{error}", frozenset(aten))
        except FzeroError as error:
            return Outcome("refused", _class(error), f"{error}", frozenset(aten))
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))[:300]
            text = f"{type(error).__name__}: {error} {notes}"
            return Outcome("crashed", _class(error), text, frozenset(aten))
        return Outcome("wrong" if what else "equal", what.partition(":")[0], what, frozenset(aten))


def _wrong(case: Case, made: runs.Prepared, aten: set[str]) -> str:
    low = runs.lowered(made, case)
    graphs = [region.gm.graph for region in low.graph.regions]
    aten |= {text for graph in graphs for node in graph.nodes if (text := str(node.target)).startswith("aten.")}
    found = runs.bound(made, low)
    if what := difference(case, made, found):
        return f"eager: {what}"
    if case.options.interpret and (what := _bits(found, runs.interpreted(made, low))):
        return f"interpreter: {what}"
    if case.options.other:
        other = {name: eval(text) for name, text in case.options.other.items()}
        if what := _bits(found, runs.bound(made, runs.lowered(made, case, **other))):
            return f"stages: {what}"
    return ""


def _bits(a: Any, b: Any) -> str | None:
    wrong = [name for name in a if not runs.same_bits(a[name], b[name])]
    return f"{wrong[0]}: {a[wrong[0]].flatten()[:3].tolist()}, {b[wrong[0]].flatten()[:3].tolist()}" if wrong else None


def _class(error: BaseException) -> str:
    """An error's text without what differs from case to case."""
    text = str(error).split("\n")[0]
    for pattern, kept in (
        (r"<\d+:\d+>:\d+|\w+\.py:\d+|the step", "LINE"),
        (r"(state|params|batch|grads)\[[^]]*\]|'[^']*'", "LEAF"),
        (r"0x[0-9a-f]+|-?\d+(\.\d+)?(e[-+]?\d+)?", "N"),
        (r"\[[N, ]*\]|\([N, ]*\)", "SHAPE"),
    ):
        text = re.sub(pattern, kept, text)
    return f"{type(error).__name__}: {text}"[:200]
