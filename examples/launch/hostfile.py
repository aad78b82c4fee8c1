"""A hostfile, as DeepSpeed's and MPI's launchers read it, as one torchrun line for each machine. Nothing is started.

    python examples/launch/hostfile.py hostfile -- train.py --folder /shared/runs/job

Each line of the file is `NAME slots=N`; text after # is a comment. Machines may have different numbers of slots only
if torchrun is told so on each: then the lines differ.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path

LINE = re.compile(r"^(?P<name>[^\s#]+)(?:\s+slots=(?P<slots>[1-9]\d*))?$")


def read(text: str) -> dict[str, int]:
    """Slots by machine, in the file's order. Raises ValueError, which names the line."""
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if (match := LINE.match(line)) is None:
            raise ValueError(f"line {number} is {line!r}: needed `NAME slots=N`")
        if match["name"] in hosts:
            raise ValueError(f"line {number} names {match['name']!r} again: add its slots to the first line")
        hosts[match["name"]] = int(match["slots"] or 1)
    if not hosts:
        raise ValueError("the file names no machine: needed lines of `NAME slots=N`")
    return hosts


def lines(hosts: dict[str, int], command: list[str], port: int = 29500, job: str = "job") -> dict[str, str]:
    """The torchrun line of each machine. The first one holds the rendezvous."""
    head = next(iter(hosts))
    return {
        name: shlex.join(
            ["torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(slots), "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"{head}:{port}", "--rdzv-id", job, *command]
        )
        for name, slots in hosts.items()
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hostfile", type=Path)
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--job", default="job", help="a name, the same on all machines and new for each run")
    parser.add_argument("command", nargs="+", help="the script and its arguments, behind --")
    given = parser.parse_args()
    try:
        hosts = read(given.hostfile.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{given.hostfile}: {error}", file=sys.stderr)
        return 2
    for name, line in lines(hosts, given.command, given.port, given.job).items():
        print(f"# on {name}:\n{line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
