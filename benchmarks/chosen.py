"""Is what `fzero.plan` chooses as fast as the default? Two ranks, twelve cases, a clock.

Models of three shapes, loopback and 1 Gbit/s, memory that is loose and memory that is tight: three quarters of the
default's planned peak, or half way from it to the least where nothing fits that. The machine is measured first. Every
rank holds both states and runs them in turn, some steps each; a step counts for its slowest rank. With tight memory the
default does not fit and is timed all the same. Beside it stands the first that fits of what people write by hand.

    python -m benchmarks.chosen                        # about twenty minutes; needs root for the link
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import fzero
from benchmarks import machine
from benchmarks.launch import variables_of
from benchmarks.link import LINKS, Link, free_port
from benchmarks.run import write
from fzero import optim, tree
from fzero.hardware import Hardware, load, to_toml
from fzero.planner.chosen import chosen_of, with_chosen
from fzero.planner.nothing_fits import NothingFitsError
from fzero.planner.programs import host_bytes
from fzero.tools.measured_machine import measured_machine

RANKS, TIGHT = 2, 0.75
MODELS = {  # layers, width, heads, words; rows and tokens of the global batch
    "deep": ((6, 384, 6, 2_048), (8, 256)),
    "wide": ((2, 768, 12, 4_096), (4, 128)),
    "words": ((2, 256, 4, 32_000), (4, 64)),
}
BY_HAND: tuple[dict[str, Any], ...] = ({"remat": "full"}, {"remat": "full", "offload": "optimizer"})


def problem(model: str) -> tuple[fzero.Spec, Any, Any]:
    """(the spec, shapes of the parameters and of the global batch) of a model."""
    from plan import empty, loss_of  # of examples/, which is on the path

    (layers, width, heads, words), shape = MODELS[model]
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    spec = fzero.Spec(loss=loss_of(heads), optimizer=optim.adamw(1e-4), clip_norm=1.0)
    return spec, empty(layers, width, words), {"x": tokens, "y": tokens}


def rows_of(spec: fzero.Spec, batch: Any, rank: int) -> Any:
    """A rank's part of the global batch."""
    ways = dict(spec.mesh).get("dp", 1) if isinstance(spec.mesh, Mapping) else RANKS
    return tree.map(lambda x: x.chunk(ways)[rank] if ways > 1 else x, batch)


def contenders(model: str, here: Hardware, tight: bool) -> dict[str, dict[str, Any]]:
    """By name, what each chooses (`chosen_of`), and what is said of it: its seconds, and the bytes of a rank."""
    spec, params, batch = problem(model)

    def lowered(fields: dict[str, Any]) -> dict[str, Any]:
        fields = {"mesh": {"dp": RANKS}, **fields}
        own = spec.but(planned=list(fields), **fields)
        made = fzero.lower(own, params, rows_of(own, batch, 0), world_size=RANKS)
        peak = made.memory.peak + host_bytes(made)  # the host of a processor is the same memory
        return {"chosen": chosen_of(own), "seconds": fzero.simulate(made, here).seconds, "peak": peak}

    found = {"default": lowered({})}
    memory = int(found["default"]["peak"] * (TIGHT if tight else 4))
    began = time.process_time()
    try:
        planned = fzero.plan(spec, params, batch, world_size=RANKS, hardware=here, memory=memory)
    except NothingFitsError as error:
        if error.least is None:
            raise
        memory = (error.least.peak + found["default"]["peak"]) // 2
        began = time.process_time()
        planned = fzero.plan(spec, params, batch, world_size=RANKS, hardware=here, memory=memory)
    found["planned"] = {"chosen": chosen_of(planned.spec), "seconds": planned.seconds, "peak": planned.peak,
                        "python": planned.python(), "planning_cpu_s": time.process_time() - began}  # fmt: skip
    if tight:
        for fields in BY_HAND:
            one = lowered(fields)
            if one["peak"] <= memory:
                return {**found, "by hand": one}
    return found


def rank(file: str, out: str, rounds: int, steps: int) -> None:
    """What one rank does: the steps of all cases of `file`, by contender."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own, done = dist.get_rank(), []
    for case in json.loads(Path(file).read_text()):
        spec, params, batch = problem(case["model"])
        made = torch.Generator().manual_seed(0)
        start = tree.map(lambda x, made=made: torch.randn(x.shape, generator=made) * 0.02, params)
        words = MODELS[case["model"]][0][3]
        whole = tree.map(lambda x, made=made, words=words: torch.randint(0, words, x.shape, generator=made), batch)
        states, batches = dict[str, Any](), dict[str, Any]()
        seconds: dict[str, list[list[float]]] = {}
        for name, one in case["contenders"].items():
            chosen = with_chosen(spec, one["chosen"], name)
            states[name], batches[name] = fzero.init(start, chosen), rows_of(chosen, whole, own)
            seconds[name] = [[] for _ in range(rounds + 1)]
        losses: dict[str, list[float]] = {name: [] for name in states}
        for at in range(rounds + 1):  # the first does not count
            for name in states:
                for _ in range(steps):
                    began = time.perf_counter()
                    states[name] = fzero.step(states[name], batches[name])
                    losses[name].append(float(states[name].metrics["loss"]))
                    seconds[name][at].append(time.perf_counter() - began)
        done.append({"seconds": {name: found[1:] for name, found in seconds.items()}, "losses": losses})
        states.clear()
    Path(f"{out}.{own}").write_text(json.dumps(done))
    dist.barrier()


def timed(cases: list[dict[str, Any]], link: Link, folder: Path, rounds: int, steps: int) -> None:
    """Runs cases over a link, and adds to each contender the median step of each round."""
    file, out = folder / "cases.json", folder / "out"
    file.write_text(json.dumps(cases))
    code = f"from benchmarks.chosen import rank; rank({str(file)!r}, {str(out)!r}, {rounds}, {steps})"
    port = free_port()
    ranks = []
    for r in range(RANKS):
        env = variables_of(RANKS, link, r, port)
        env |= {"PYTHONPATH": f"{env['PYTHONPATH']}:{machine.ROOT / 'examples'}", "FZERO_PROGRESS": "0"}
        ranks.append(subprocess.Popen([*link.prefixes[r], sys.executable, "-c", code], env=env, cwd=machine.ROOT))
    ended = [process.wait() for process in ranks]
    if any(ended):
        raise SystemExit("a rank failed: its error is above")
    told = [json.loads(Path(f"{out}.{r}").read_text()) for r in range(RANKS)]
    for case, *by_rank in zip(cases, *told, strict=True):
        for name, one in case["contenders"].items():
            all_rounds = zip(*(found["seconds"][name] for found in by_rank), strict=True)
            one["step_s_rounds"] = [statistics.median(map(max, zip(*each, strict=True))) for each in all_rounds]
            one["step_s"] = statistics.median(one["step_s_rounds"])
            one["losses"] = by_rank[-1]["losses"][name]


def ratio(case: Mapping[str, Any], other: str) -> float | None:
    """The planned step's seconds over another's: the median of the rounds' ratios."""
    if other not in case["contenders"]:
        return None
    ours, theirs = (case["contenders"][name]["step_s_rounds"] for name in ("planned", other))
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measured(link: Link, folder: Path) -> Hardware:
    """This machine, its ranks joined by the link."""
    here = measured_machine(folder, 16 << 20)
    if link.bits_per_s is None:
        return here
    level = replace(here.levels[0], name=link.name, bytes=link.bits_per_s / 8, latency_us=100.0)
    return replace(here, levels=(level,), sources={**here.sources, f"level.{link.name}.bytes": "measured"})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="loopback,1gbit", help="of loopback, 1gbit, 100mbit")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hardware", help="a TOML file instead of measuring this machine's loopback")
    parser.add_argument("--out", default="chosen")
    given = parser.parse_args(argv)
    sys.path.append(str(machine.ROOT / "examples"))
    console, cases, hardware = Console(width=160), [], {}
    for name in given.link.split(","):
        with LINKS[name]() as link, tempfile.TemporaryDirectory() as folder:
            here = load(given.hardware) if given.hardware else measured(link, Path(folder))
            hardware[name] = to_toml(here)
            own = [
                {"model": model, "link": name, "tight": tight, "contenders": contenders(model, here, tight)}
                for model in given.models.split(",")
                for tight in (False, True)
            ]
            timed(own, link, Path(folder), given.rounds, given.steps)
            cases += own
    for case in cases:
        case["ratio"] = {other: ratio(case, other) for other in ("default", "by hand")}
        console.print(f"{case['model']}, {case['link']}, {'tight' if case['tight'] else 'loose'}: {case['ratio']}")
        for name, one in case["contenders"].items():
            told = f"{one['step_s']:.3f} s measured, {one['seconds']:.3f} foretold, {one['peak'] / 1e6:.0f} MB"
            console.print(f"    {name:8} {told}  {one['chosen']}")
    against = [case["ratio"]["default"] for case in cases]
    summary = {"cases": len(cases), "within_2_percent_or_faster": sum(r <= 1.02 for r in against),
               "faster": sum(r < 0.98 for r in against)}  # fmt: skip
    console.print(summary)
    write(given.out, {"machine": machine.describe(), "hardware": hardware, "summary": summary, "cases": cases})


if __name__ == "__main__":
    main()
