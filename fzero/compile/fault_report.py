"""fault_report: a program of fzero's own that the verifier refuses is a fault of fzero, and is told as one.

The message says so, names fields of the Spec under which another program is made, and a report: a JSON file with the
text of the programs, their segments and the fields of the Spec. It holds no tensor and no code of the user's; names of
leaves and lines of source stand in it. It is read back, and verified again, by

    fzero verify REPORT

or by `fzero.verify(fault_report.read(path).programs)`. Reports lie beside fzero's other files, the last `KEPT` of them.
One whose folder cannot be written to, or that is too large, is left out, and the message says why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fzero import private_folder, tree
from fzero._version import __version__
from fzero.capture.provenance import describe
from fzero.cost import kept_costs
from fzero.errors import VerifyError
from fzero.ir import segment_text
from fzero.ir.parse import parse
from fzero.ir.program import Program
from fzero.ir.records import DTYPE_NAMES
from fzero.ir.segments import digest
from fzero.pipeline import SCHEDULES
from fzero.plan.state_plan import Plan
from fzero.spec import Spec

HEADER = "fzero report 1"
KEPT = 20  # files
MOST_BYTES = 64 << 20  # of a file


@dataclass(frozen=True)
class Report:
    """What a report holds. programs: by rank. facts: fields of the Spec and versions, as text."""

    what: str
    facts: Mapping[str, str]
    programs: Mapping[int, Program] = field(repr=False)


def explained(
    error: VerifyError, spec: Spec, plan: Plan, batch: Any, programs: Mapping[int, Program], reduce: str = ""
) -> VerifyError:
    """The error as a user gets it: what the verifier said, that it is fzero's fault, what to try, where the report is.

    programs: those that were refused, by rank; none where there is none yet. Writes the report; never raises."""
    facts = {f.name: _shown(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    facts |= {"mesh": str(plan.mesh), "reduce": reduce or facts["reduce"], "batch": _forms(batch)}
    facts |= {"leaves": ", ".join(f"{x.path} {DTYPE_NAMES[x.dtype]}{list(x.shape)}" for x in plan.leaves)}
    facts |= {"fzero": __version__, "torch": torch.__version__}
    try:
        where = (
            f"fzero verify {write(Report(str(error), facts, programs))} shows it again: the file holds it, without data"
        )
    except Exception as failed:  # a full disk, no folder: the error itself must reach the user
        where = f"no report of it could be written ({getattr(failed, 'strerror', None) or failed})"
    return VerifyError(
        f"{error}\nThis is a fault of fzero, not of the step, and nothing has run: the program that fzero made for it "
        f"is wrong. Please report it; {where}. Until it is mended another program may do: try "
        f"{' or '.join(remedies(spec, plan, reduce))}"
    )


def remedies(spec: Spec, plan: Plan, reduce: str = "") -> list[str]:
    """Fields of the Spec under which another program is made, as a user writes them."""
    found = []
    if plan.mesh.roles > 1:
        schedule = spec.pipeline if isinstance(spec.pipeline, str) else ""
        found.append(f"pipeline={next(name for name in SCHEDULES if name != schedule)!r}")
    found.append(f"reduce={'each' if (spec.reduce or reduce) != 'each' else 'end'!r}")
    plain: dict[str, Any] = {"remat": "none", "offload": None, "sequence": None, "compile": "none", "zero": 0}
    found += [f"{name}={value!r}" for name, value in plain.items() if getattr(spec, name) != value]
    return found[:4]


def folder() -> Path:
    """The folder of the reports: `faults` in `$FZERO_CACHE`, else in `~/.cache/fzero`."""
    return kept_costs.folder() / "faults"


def write(report: Report) -> Path:
    """Writes a report, named by what it holds, and removes the oldest beyond `KEPT`. Returns its file.

    Raises OSError where it cannot be written, and ValueError for one of more than `MOST_BYTES`.
    """
    pool = {key: gm for program in report.programs.values() for key, gm in program.segments.items()}
    head = {
        "header": HEADER,
        "what": report.what.split("\n"),
        "facts": dict(report.facts),
        "programs": {str(rank): str(program).split("\n") for rank, program in report.programs.items()},
    }
    graphs = ",\n".join(f"{json.dumps(key)}: {json.dumps(segment_text.to_data(gm))}" for key, gm in pool.items())
    data = f'{json.dumps(head, indent=1)[:-2]},\n "segments": {{\n{graphs}\n}}\n}}\n'.encode()
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes")
    name = f"verify-{hashlib.blake2b(data, digest_size=6).hexdigest()}.json"
    with kept_costs.subfolder(folder(), make=True) as place:
        private_folder.replace(place, name, data)
        private_folder.keep_last(place, ".json", files=KEPT)
    return folder() / name


def read(path: str | os.PathLike[str]) -> Report:
    """The report in a file. Raises ValueError for a file that is none, and OSError."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is no report of fzero's: it is no file")
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes: a report has at most {MOST_BYTES:,}")
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict) or content.get("header") != HEADER:
            raise ValueError(f"it does not begin with {HEADER!r}")
        pool = {key: segment_text.from_data(nodes) for key, nodes in content["segments"].items()}
        if wrong := [key for key, gm in pool.items() if digest(gm) != key]:
            raise ValueError(f"segment {wrong[0]} is not what its name says")
        programs = {int(rank): parse("\n".join(lines), pool) for rank, lines in content["programs"].items()}
        facts = {str(name): str(value) for name, value in content["facts"].items()}
        return Report("\n".join(content["what"]), facts, programs)
    except ValueError as error:
        raise ValueError(f"{file} is no report of fzero's: {error}") from None
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} is no report of fzero's: its parts are not those that fzero writes") from None


def _shown(value: Any) -> str:
    """A field of a Spec as text: of a function its name."""
    return getattr(value, "__qualname__", None) or repr(value)


def _forms(batch: Any) -> str:
    pairs = zip(*tree.flatten(batch)[:2], strict=True)
    return ", ".join(f"{path} {describe(leaf)}" for path, leaf in pairs)
