"""docs/foreign.md: what became of every foreign model. `python tests/support/foreign/table.py LINES...` writes it."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[3] / "docs" / "foreign.md"
HEAD = "## Measured"
FINE = ("equal", "refused")
NAMES = {"examples": "The shapes of pytorch/examples", "hf": "Hugging Face transformers", "timm": "timm"}

Line = Mapping[str, Any]


def first_sentence(text: str) -> str:
    """Up to the first stop that ends one, with no line numbers.

    >>> first_sentence("vae.py:3: the program would depend on x.y. Instead of a write b")
    'the program would depend on x.y.'
    """
    text = re.sub(r"\S+\.py:\d+:? ?", "", text)
    return (re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0] if text else text)[:240].replace("|", "\\|")


def tables(lines: Iterable[Line]) -> str:
    lines = sorted(lines, key=lambda line: line["key"].lower())
    text = []
    for source, title in NAMES.items():
        own = [line for line in lines if line["key"].startswith(f"{source}/")]
        if not own:
            continue
        count = Counter(line["status"] for line in own)
        said = ", ".join(f"{count[status]} {status}" for status in count)
        text += [f"### {title}", "", f"{len(own)}: {said}.", "", "| family | parameters | gap, or the refusal |"]
        text += ["|---|---|---|", *map(_row, own), ""]
    return "\n".join(text).rstrip()


def _row(line: Line) -> str:
    dtype = f" in {line['dtype']}" if "dtype" in line else ""
    note = f" ({line['note']})" if "note" in line else ""
    result = f"{line['gap']:.0e}{dtype}{note}" if line["status"] == "equal" else first_sentence(line.get("detail", ""))
    shown = result if line["status"] in FINE else f"**{line['status']}**: {result}"
    return f"| {line['key'].partition('/')[2]} | {line.get('parameters', 0):,} | {shown} |"


def write(lines: Iterable[Line]) -> None:
    before = DOCS.read_text().partition(HEAD)[0]
    DOCS.write_text(f"{before}{HEAD}\n\ntorch {torch.__version__}, on the CPU.\n\n{tables(lines)}\n")


if __name__ == "__main__":
    found = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    write({line["key"]: line for line in found}.values())
