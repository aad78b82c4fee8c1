"""docs/ops.md: what became of the cases of `opdb`. `python tests/support/opdb_table.py LINES...` writes its tables."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db  # 2.11.0, 2.13.0

DOCS = Path(__file__).parents[2] / "docs" / "ops.md"
HEAD = "## Counted"
FINE = ("equal", "refused", "not eager")

REASONS = {
    "draws from torch's ambient generator": "draws from torch's generator, and the loss was given no key",
    "is changed in place": "changes a leaf in place (statistics, or its operand): return the new value instead",
    "would depend on": "the shape of its result, or what it computes, depends on values",
    "values are needed": "the shape of its result, or what it computes, depends on values",
    "follows in-place work": "in-place work that torch cannot make pure",
    "of a storage": "looks at memory outside of its operand",
    "torch.sparse": "sparse tensors",
    "needed a dense tensor of one of": "a dtype that fzero has no buffers for",
}

Line = Mapping[str, Any]


def reason(detail: str) -> str:
    """Why a case was refused, in words; what fzero said where it is none of the known reasons.

    >>> reason("aten.rand.default at x.py:3 draws from torch's ambient generator: ...")
    "draws from torch's generator, and the loss was given no key"
    """
    return next((why for part, why in REASONS.items() if part in detail), re.sub(r"\S+\.py:\d+:? ?", "", detail)[:90])


def tables(lines: Iterable[Line]) -> str:
    """The counts by dtype, then the refused ops by reason."""
    by_dtype: dict[str, list[Line]] = defaultdict(list)
    of_op: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        name, dtype, *_ = line["key"].split("|")
        by_dtype[dtype].append(line)
        of_op[name].append(line)
    text = [
        "| dtype | ops | cases | equal, bit for bit | equal within rounding | refused | not in eager PyTorch | wrong |"
    ]
    text.append("|---" * 8 + "|")
    whole = [line for own in by_dtype.values() for line in own]
    for dtype, own in [*sorted(by_dtype.items()), ("all", whole)]:
        count: dict[str, int] = defaultdict(int)
        for line in own:
            bits = line["status"] == "equal" and line["gap"] == 0
            count["bits" if bits else line["status"]] += 1
        wrong = len(own) - sum(count[status] for status in ("bits", *FINE))
        ops = len({line["key"].split("|")[0] for line in own})
        cells = [ops, len(own), count["bits"], count["equal"], count["refused"], count["not eager"], wrong]
        text.append(f"| {dtype} | " + " | ".join(f"{n:,}" for n in cells) + " |")
    refused: dict[str, dict[str, bool]] = defaultdict(dict)
    for name, own in of_op.items():
        wholly = not any(line["status"] == "equal" for line in own)
        for line in own:
            if line["status"] == "refused":
                refused[reason(line["detail"])][name] = wholly
    text += ["", "| refused, for it | ops (in brackets: in some of their cases) |", "|---|---|"]
    for why, names in sorted(refused.items()):
        shown = (f"`{name}`" if wholly else f"(`{name}`)" for name, wholly in sorted(names.items()))
        text.append(f"| {why} | {', '.join(shown)} |")
    return "\n".join(text)


def write(lines: Iterable[Line]) -> None:
    before = DOCS.read_text().partition(HEAD)[0]
    lines = list(lines)
    ops = len({line["key"].split("|")[0] for line in lines})
    DOCS.write_text(f"{before}{HEAD}\n\n{ops} of the {len(op_db)} ops, torch {torch.__version__}.\n\n{tables(lines)}\n")


if __name__ == "__main__":
    found = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    write({line["key"]: line for line in found}.values())
