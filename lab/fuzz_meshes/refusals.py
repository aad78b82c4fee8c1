"""refusals: what fzero may refuse of drawn cases, each with the remedy that its message names, as a function of the
case."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fzero import P
from lab.fuzz_meshes.case import Case

Remedy = Callable[[Case, re.Match[str]], Case]


@dataclass(frozen=True)
class Refusal:
    """One row: a pattern that the message has, and the case that follows its remedy."""

    pattern: str
    remedy: Remedy


def _whole(case: Case, match: re.Match[str]) -> Case:
    """Keeps the named leaf whole: P() in place of its rule."""
    rules = dict(case.place["shard"])
    rules[match["path"]] = P()
    return _without_idle_axes(case, rules)


def _without_idle_axes(case: Case, rules: dict[str, P]) -> Case:
    """The case with these rules. The ranks of an axis that cuts no leaf go to `dp`."""
    named = {axis for rule in rules.values() for axis in rule.axes}
    idle = {axis for axis in ("tp", "mp") if axis in case.place["mesh"] and axis not in named}
    if not idle:
        return replace(case, place={**case.place, "shard": rules})
    mesh = {**case.place["mesh"], "dp": math.prod(map(case.axis, ("dp", *idle)))}
    order = [name for name in ("pp", "dp_out", "dp", "tp", "mp") if name in mesh and name not in idle]
    gone = {"sequence", *(() if named else ("shard",))}
    place = {name: value for name, value in {**case.place, "shard": rules}.items() if name not in gone}
    return replace(case, place={**place, "mesh": {name: mesh[name] for name in order}})


def _plain_adamw(case: Case, match: re.Match[str]) -> Case:
    """Takes adamw."""
    return replace(case, recipe=replace(case.recipe, optimizer="adamw"))


def _more_gathered(case: Case, match: re.Match[str]) -> Case:
    """Takes the smallest cap that works."""
    return replace(case, place={**case.place, "gather_bytes": int(match["cap"])})


def _fewer_roles(case: Case, match: re.Match[str]) -> Case:
    """Takes one chunk a role, then as many roles as there are layers."""
    place = {name: value for name, value in case.place.items() if name != "pipeline"}
    if case.axis("pp") > int(match["layers"]):
        place["mesh"] = {**place["mesh"], "pp": int(match["layers"])}
    return replace(case, place=place)


def _plain_schedule(case: Case, match: re.Match[str]) -> Case:
    """Takes 1F1B."""
    return replace(case, place={**case.place, "pipeline": "1f1b"})


def _without_rule(case: Case, match: re.Match[str]) -> Case:
    """Leaves the rule out."""
    rules = {rule: to for rule, to in case.place["offload"].items() if rule != match["rule"]}
    place = {name: value for name, value in case.place.items() if name not in ("offload", "nvme_path", "update_on")}
    kept = {name: case.place[name] for name in ("nvme_path", "update_on") if name in case.place}
    return replace(case, place={**place, **({"offload": rules, **kept} if rules else {})})


PATH = r"(?:params|opt_state/\w+)/(?P<path>[\w/]+)"
TABLE: tuple[Refusal, ...] = (
    Refusal(rf"shard: {PATH} lies as .* needs all of it: .* [Kk]eep it whole", _whole),
    Refusal(rf"shard: {PATH} lies as .* needs it in parts of that dim .* keep it whole: P\(\)", _whole),
    Refusal(rf"as {PATH} does, and becomes .* heads: .* keep the leaves of that product whole: P\(\)", _whole),
    Refusal(r"has moments in blocks of 64 elements, which a part would cut. Take adamw", _plain_adamw),
    Refusal(r"is stepped as a whole matrix .* so no rank may hold a part. Take adamw", _plain_adamw),
    Refusal(r"chunks need as many numbered layers.* there are (?P<layers>\d+)", _fewer_roles),
    Refusal(r"roles need a multiple of \d+ microbatches. Take \d+, or '1f1b'", _plain_schedule),
    Refusal(
        r"offload=\{'(?P<rule>[^']+)': .* all that it matches stays on the device.* Leave the rule out", _without_rule
    ),
    Refusal(r"gather_bytes=\d+ is less than one segment needs.* The smallest cap is (?P<cap>\d+)", _more_gathered),
)


def matches(row: Refusal, message: str) -> re.Match[str] | None:
    """The place of a message where a row's pattern is."""
    return re.search(row.pattern, message, re.DOTALL)


def remedied(case: Case, message: str) -> Case | None:
    """The case after its remedy; None where the refusal is not listed."""
    for row in TABLE:
        if match := matches(row, message):
            return row.remedy(case, match)
    return None
