"""`python -m benchmarks.timelines`: torch.distributed.pipelining's orders beside fzero's; docs/schedules/torch.svg.

Each order is drawn for equal times of a forward, the input half and the weight half, with the idle share above. It says
what the orders cost by themselves; `benchmarks.pipelining` measures who runs them how fast.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from benchmarks.machine import ROOT
from fzero.compile.timeline import draw
from fzero.pipeline import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, make_schedule

OUT = ROOT / "docs" / "schedules" / "torch.svg"
ROLES, MICROBATCHES, CHUNKS = 4, 8, 2
KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}  # torch's
PAIRS = {  # ours, and torch's classes
    "interleaved": (schedules.ScheduleInterleaved1F1B,),
    "zb-h1": (schedules.ScheduleInterleavedZeroBubble,),
    "zb-v": (schedules.ScheduleZBVZeroBubble,),
}


def torchs(kind: Any, roles: int, microbatches: int, chunks: int = CHUNKS) -> Schedule:
    """The order of a multi-stage schedule of torch.distributed.pipelining, checked.

    >>> torchs(schedules.ScheduleZBVZeroBubble, 2, 4).orders == make_schedule("zb-v", 2, 4).orders
    True
    """
    about = {"group_size": roles, "num_stages": roles * chunks, "group_rank": 0, "group": None, "submod": None}
    stages = [
        SimpleNamespace(**about, stage_index=i, has_backward=True, is_first=False, is_last=False) for i in range(chunks)
    ]
    order = kind(stages, microbatches, loss_fn=max).pipeline_order
    rows = [
        tuple(Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in order[role] if a)
        for role in range(roles)
    ]
    role_of = {action.chunk: role for role, row in enumerate(rows) for action in row}
    return Schedule(kind.__name__, tuple(role_of[c] for c in range(roles * chunks)), tuple(rows)).check()


def below(drawings: list[str]) -> str:
    """Drawings of `draw` in one, each below the last."""
    inner, top = [], 0
    for drawing in drawings:
        head, _, rest = drawing.partition(">")
        inner.append(f'{head} y="{top}">{rest}')
        top += int(head.partition('height="')[2].partition('"')[0]) + 12
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="980" height="{top}">\n{"".join(inner)}</svg>\n'


def main(out: Path = OUT) -> None:
    drawings = []
    for name, kinds in PAIRS.items():
        drawings.append(draw(make_schedule(name, ROLES, MICROBATCHES, CHUNKS if name == "interleaved" else None)))
        drawings += [draw(torchs(kind, ROLES, MICROBATCHES)) for kind in kinds]
    out.write_text(below(drawings))
    print(f"in {out}")


if __name__ == "__main__":
    main()
