"""shrink: makes a failing case smaller, until nothing more can be left out and it still fails in the same way.

Options go back to their defaults. Summands and lines are left out. The result of a line is replaced by a tensor that is
there already, or by a constant. A change stays if the case still runs in eager PyTorch and `check` ends as it did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from lab.fuzz.case import Case, Options, defines, names_in
from lab.fuzz.check import Outcome, check


def shrink(
    case: Case, outcome: Outcome | None = None, tries: int = 400, run: Callable[[Case], Outcome] = check
) -> Case:
    """The smallest case found in so many tries."""
    target = outcome or run(case)

    def fails(smaller: Case) -> bool:
        try:
            ended = run(smaller)
        except Exception:  # not even eager PyTorch runs it
            return False
        return (ended.end, ended.reason) == (target.end, target.reason)

    left, going = tries, True
    while going and left > 0:
        going = False
        for smaller in _smaller(case):
            left -= 1
            if smaller != case and fails(smaller):
                case, going = smaller, True
                break
            if left <= 0:
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less, those that leave out most first."""
    yield from _plainer(case)
    for n in range(len(case.terms)):
        if len(case.terms) > 1:
            yield tidy(replace(case, terms=(*case.terms[:n], *case.terms[n + 1 :])))
    if case.count:
        yield replace(case, count=None)
    for n in reversed(range(len(case.body))):
        yield from _without(case, n)
    for n, term in enumerate(case.terms):
        name = next(iter(sorted(names_in(term), reverse=True)), None)
        if name and term != f"{name}.sum()":
            yield tidy(replace(case, terms=(*case.terms[:n], f"{name}.sum()", *case.terms[n + 1 :])))


def _plainer(case: Case) -> Iterator[Case]:
    options = case.options
    if options != Options(options.form):
        yield replace(case, options=Options(options.form, spec=_needed(options)))
    if options.form == "training":
        yield replace(case, options=Options(keyed=options.keyed))
    if options.world > 1:
        yield replace(case, options=replace(options, world=options.world - 1))
    for name in options.spec:
        if name not in _needed(options):
            yield replace(case, options=replace(options, spec={k: v for k, v in options.spec.items() if k != name}))
    if "optimizer" in options.spec and options.spec["optimizer"] != "optim.sgd(0.1)":
        yield replace(case, options=replace(options, spec={**options.spec, "optimizer": "optim.sgd(0.1)"}))
    for name in options.other:
        yield replace(case, options=replace(options, other={k: v for k, v in options.other.items() if k != name}))
    if options.keyed:
        yield replace(case, options=replace(options, keyed=False))
    if options.interpret:
        yield replace(case, options=replace(options, interpret=False))


def _needed(options: Options) -> dict[str, str]:
    return {name: text for name, text in options.spec.items() if name == "optimizer"}


def _without(case: Case, n: int) -> Iterator[Case]:
    """Line n left out, with the lines that need it; or its result replaced."""
    line, rest = case.body[n], (*case.body[:n], *case.body[n + 1 :])
    names = defines(line)
    if not names:
        yield tidy(replace(case, body=rest))
        return
    gone, body = set(names), []
    for other in rest:
        if gone & names_in(other.partition(" = ")[2] or other):
            gone |= set(defines(other))
        else:
            body.append(other)
    terms = tuple(term for term in case.terms if not gone & names_in(term))
    if terms:
        yield tidy(replace(case, body=tuple(body), terms=terms))
    for used in sorted(names_in(line) - set(names)):
        if len(names) == 1 and not used.startswith("m"):
            yield tidy(_renamed(case, n, names[0], used))
    for used in sorted(name for name in names_in(line) if name.startswith(("p", "b", "v")) and name not in names):
        if len(names) == 1 and not line.endswith(".clone()"):
            yield tidy(replace(case, body=(*case.body[:n], f"{names[0]} = {used}.clone()", *case.body[n + 1 :])))


def _renamed(case: Case, n: int, name: str, other: str) -> Case:
    """Line n left out, and its result read from another name."""

    def put(text: str) -> str:
        return re.sub(rf"\b{name}\b", other, text)

    return replace(case, body=(*case.body[:n], *map(put, case.body[n + 1 :])), terms=tuple(map(put, case.terms)))


def tidy(case: Case) -> Case:
    """Without lines, leaves, modules and constants that nothing reads."""
    read = {name for term in case.terms for name in names_in(term)}
    kept: list[str] = []
    for line in reversed(case.body):
        names = defines(line)
        if read & (set(names) or names_in(line)):
            kept.append(line)
            read |= names_in(line)
    body = kept[::-1]
    text = "\n".join([*body, *case.terms, case.count or "", *case.setup])
    setup = tuple(s for s in case.setup if re.search(rf"\b{s.split(' ')[0]}\b", "\n".join([*body, *case.terms])))
    params = tuple((n, t) for n, t in case.params if f'p["{n}"]' in text)
    batch = tuple((n, t) for n, t in case.batch if f'b["{n}"]' in text or n == "x0")
    return replace(case, body=tuple(body), setup=setup, params=params or case.params[:1], batch=batch)
