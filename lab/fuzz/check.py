"""check: runs one case through eager PyTorch and through fzero, and classifies the end.

Ends: `equal`; `refused` by an FzeroError, with a reason that leaves out names and numbers; `wrong`, other numbers than
eager's or other bits from another stage, schedule or executor; `crashed`, any other error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero.capture.graph import Region
from fzero.errors import FzeroError, VerifyError
from lab.fuzz import runs
from lab.fuzz.case import Case
from lab.fuzz.oracle import difference


@dataclass(frozen=True)
class Outcome:
    """The end of a case. Immutable.

    what: details if it is not equal. reason: its class. aten: the ops that were captured.
    """

    end: str
    reason: str = ""
    what: str = ""
    aten: frozenset[str] = field(default_factory=frozenset, repr=False)


def check(case: Case) -> Outcome:
    """Runs a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = runs.prepared(case)
        aten: set[str] = set()
        try:
            what = _wrong(case, prepared, aten)
        except VerifyError as error:
            return Outcome("crashed", _class(error), f"{error}", frozenset(aten))
        except FzeroError as error:
            return Outcome("refused", _class(error), f"{error}", frozenset(aten))
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))[:300]
            text = f"{type(error).__name__}: {error} {notes}"
            return Outcome("crashed", _class(error), text, frozenset(aten))
        return Outcome("wrong" if what else "equal", what.partition(":")[0], what, frozenset(aten))


def apart(case: Case) -> bool:
    """Whether a case must have a program of its own."""
    return case.options.form != "gradients" or bool(case.options.spec)


def check_together(cases: Sequence[Case]) -> list[Outcome]:
    """Returns the outcomes of cases that need no program of their own, from one program with all their losses.

    If that program differs from eager PyTorch, each case is run alone to find the reason. A capture costs more than the
    run of the captured program.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = [runs.prepared(case) for case in cases]
        refused: set[int] = set()
        try:
            joint = runs.joined(prepared, refused)
            low = runs.lowered(joint)
            results = runs.bound(joint, low)
            exact = not any(c.options.interpret for c in cases) or not _bits(results, runs.interpreted(joint, low))
        except Exception:
            return [check(case) for case in cases]
        regions, outcomes = iter(low.graph.regions), []
        for n, case in enumerate(cases):
            if n in refused or not exact:
                outcomes.append(check(case))
                continue
            own = {name.partition("/")[2]: x for name, x in results.items() if name.partition("/")[0] == str(n)}
            what = difference(case, prepared[n], own)
            outcomes.append(check(case) if what else Outcome("equal", aten=_aten([next(regions)])))
            if what and outcomes[-1].end == "equal":
                outcomes[-1] = Outcome("wrong", "together", f"only beside other losses: {what}")
        return outcomes


def _aten(regions: Iterable[Region]) -> frozenset[str]:
    targets = (str(node.target) for region in regions for node in region.gm.graph.nodes)
    return frozenset(text for text in targets if text.startswith("aten."))


def _wrong(case: Case, prepared: runs.Prepared, aten: set[str]) -> str:
    low = runs.lowered(prepared)
    aten |= _aten(low.graph.regions)
    results = runs.bound(prepared, low)
    if what := difference(case, prepared, results):
        return f"eager: {what}"
    if case.options.interpret and (what := _bits(results, runs.interpreted(prepared, low))):
        return f"interpreter: {what}"
    if case.options.other:
        other = {name: eval(text) for name, text in case.options.other.items()}
        if what := _bits(results, runs.bound(prepared, runs.lowered(prepared, **other))):
            return f"stages: {what}"
    return ""


def _bits(a: Any, b: Any) -> str | None:
    wrong = [name for name in a if not runs.same_bits(a[name], b[name])]
    return f"{wrong[0]}: {a[wrong[0]].flatten()[:3].tolist()}, {b[wrong[0]].flatten()[:3].tolist()}" if wrong else None


def _class(error: BaseException) -> str:
    """An error's text without the parts that differ from case to case."""
    text = str(error).split("\n")[0]
    for pattern, kept in (
        (r"<\d+:\d+>:\d+|\w+\.py:\d+|the step", "LINE"),
        (r"(state|params|batch|grads)\[[^]]*\]|'[^']*'", "LEAF"),
        (r"0x[0-9a-f]+|-?\d+(\.\d+)?(e[-+]?\d+)?", "N"),
        (r"\[[N, ]*\]|\([N, ]*\)", "SHAPE"),
    ):
        text = re.sub(pattern, kept, text)
    return f"{type(error).__name__}: {text}"[:200]
