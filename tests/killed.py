"""Which kills a save is put to: see workers/saves.py."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "workers" / "saves.py"


@cache
def every_kill(world: int) -> list[list[Any]]:
    """[rank, operation, when, who] for each operation of each rank."""
    kinds = ask(world)
    return [
        [rank, n, when, who]
        for rank in range(world)
        for n, kind in enumerate(kinds[rank])
        for when in (("before", "middle", "after") if kind == "write" else ("before", "after"))
        for who in (("one", "all") if world > 1 else ("one",))
    ]


def ask(world: int, *cases: list[Any]) -> Any:
    """What the worker prints: what went wrong, or without cases the operations of each rank."""
    command = [sys.executable, str(WORKER), str(world), *([json.dumps(cases)] if cases else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
