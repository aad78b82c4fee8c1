"""profile: one real step, with the place of its time and memory.

A step is watched while it runs (`record`) and seen as lanes of spans (`lanes`). It is written three times: as a trace
for Perfetto (`trace`), as a page to read (`page`, `charts`, `tables`), and as numbers for programs (`summary`). The
watched program is the one that every other step runs too. Between its ops the clock is read, and nothing else differs.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fzero._torch_compat import untraced_by_dynamo
from fzero.api import advanced, agreed
from fzero.capture import ambient
from fzero.comm.agree import agree
from fzero.errors import FzeroError
from fzero.profile.chrome_trace import trace
from fzero.profile.page import page
from fzero.profile.record import StepRecord, record
from fzero.profile.span_rows import op_args
from fzero.session.interrupts import keeps_state
from fzero.session.session import session_of
from fzero.state.state import State

log = logging.getLogger("fzero")


@keeps_state
@untraced_by_dynamo
@ambient.steady()
def profile(state: State, batch: Any, folder: str | Path = "runs/profile") -> State:
    """`fzero.step(state, batch)`, watched: the same bits, the same donation, the same checks, and three files per rank.

    state, batch: as in `fzero.step`. folder: where the files go, of a name for each rank.

    `rank<k>.html` is a page to read, `rank<k>.trace.json` a trace for ui.perfetto.dev, `rank<k>.json` the numbers (see
    docs/profile.md). Every rank must call it, each with a folder it can write. Do not profile the first step: it also
    touches its memory for the first time. Watching costs about a microsecond per op, which counts in no op's time.

    Raises FzeroError, with the state unchanged, if the folder cannot be written.

    >>> import fzero, tempfile
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = fzero.step(fzero.init({"w": torch.ones(2)}, spec), torch.eye(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = profile(state, torch.eye(2), folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['rank0.html', 'rank0.json', 'rank0.trace.json']
    >>> state.step
    2
    """
    failure = _unwritable(folder)
    call = f"a profile of step {state.step + 1}" if isinstance(state, State) else ""
    lowered, batch = agreed("profile", call, state, batch)
    runtime = session_of(state)

    def ready() -> None:
        """All ranks begin at one time, or none does."""
        agree(runtime.rank, runtime.world_size, f"the start of {call}", "", runtime.group, failure)

    metrics, step_record = record(state, lowered, batch, ready)
    new = advanced(state, lowered, metrics)
    try:
        _write(step_record, Path(folder))
    except Exception:  # the old state is donated: the new one must not be lost with it
        log.warning("fzero: %s was not written to %s", call, folder, exc_info=True)
    return new


def summary(record: StepRecord) -> dict[str, Any]:
    """Returns the numbers of a record, for JSON; `docs/profile.md` describes each."""
    return {
        "format": 1,
        "step": record.step,
        "rank": record.rank,
        "mesh": dict(record.program.mesh),
        "zero": record.stage,
        "batch": list(record.batch),
        "machine": record.machine,
        "program": record.program.digest,
        "clock_ns": record.began,
        "step_us": (record.ended - record.began) / 1e3,
        "shares_us": {name: ns / 1e3 for name, ns in record.shares.items()},
        "sent_bytes": record.sent_bytes,
        "held_bytes": record.held_bytes,
        "planned_peak_bytes": record.memory.peak,
        "measured_peak_bytes": record.measured_peak,
        "page_faults": record.page_faults,
        "transfers": [
            {**asdict(op), "in_flight_us": (record.stop[op.wait] - record.start[op.op]) / 1e3}
            for op in record.transfers
        ],
        "ops": [
            {
                **{name: value for name, value in op_args(record, i).items() if name not in ("text", "leaves")},
                "kind": op.kind,
                "why": op.why,
                "start_us": (record.start[i] - record.began) / 1e3,
                "duration_us": record.duration(i) / 1e3,
            }
            for i, op in enumerate(record.program.ops)
        ],
    }


def _unwritable(folder: str | Path) -> FzeroError | None:
    """The error to raise if a folder cannot be made or written; None if it can."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, TypeError) as error:
        return FzeroError(
            f"fzero.profile(folder={str(folder)!r}) cannot be written ({type(error).__name__}: {error}). No step was "
            "taken and the state is as it was: name another folder"
        )


def _write(record: StepRecord, folder: Path) -> None:
    for name, text in (
        ("trace.json", json.dumps(trace(record))),
        ("json", json.dumps(summary(record), indent=1)),
        ("html", page(record)),
    ):
        (folder / f"rank{record.rank}.{name}").write_text(text, encoding="utf-8")
