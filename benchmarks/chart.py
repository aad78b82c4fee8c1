"""The README's chart, drawn from a record: seconds a step and peak memory of every contender of one case.

python -m benchmarks.chart benchmarks/results/gpt2_fp32.json --out docs/bench.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fzero", "font.size": 9})  # text, and equal files

from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first)

OURS, PEER, FLOOR = "#c2410c", "#94a3b8", "#475569"
PANELS = (("step_s", "seconds a step", 1.0), ("rss_peak_bytes", "peak RSS over the import, GB", 1e9))
SKIPPED = ("alone",)


def find_case(record: Mapping[str, Any], wanted: Mapping[str, str]) -> Mapping[str, Any]:
    """The case with these values. Raises SystemExit, naming those there are."""
    cases: list[Mapping[str, Any]] = record["cases"]
    for case in cases:
        if all(case[key] == value for key, value in wanted.items()):
            return case
    there = "; ".join(", ".join(case[key] for key in wanted) for case in cases)
    raise SystemExit(f"no case {', '.join(wanted.values())} in the record; there are: {there}")


def draw(record: Mapping[str, Any], case: Mapping[str, Any], path: Path) -> None:
    """Horizontal bars, the fastest at the top; whiskers are the rounds; the floor is a line through the others."""
    rows = {n: one for n, one in case["contenders"].items() if n not in SKIPPED and "failed" not in one}
    names = sorted(rows, key=lambda name: -rows[name]["step_s"])
    colors = [OURS if name.startswith("fzero") else FLOOR if name.startswith("floor") else PEER for name in names]
    figure, axes = plt.subplots(1, len(PANELS), sharey=True, figsize=(8.2, 0.9 + 0.25 * len(names)))
    for panel, (key, label, unit) in zip(axes, PANELS, strict=True):
        values = [rows[name].get(key, float("nan")) / unit for name in names]
        bars = panel.barh([rows[name]["title"].split(":")[0] for name in names], values, color=colors, height=0.72)
        panel.bar_label(bars, fmt="%.2f", padding=6, fontsize=8)
        panel.set_xlabel(label)
        panel.margins(x=0.16)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    low = [rows[n]["step_s"] - min(rows[n]["step_s_rounds"]) for n in names]
    high = [max(rows[n]["step_s_rounds"]) - rows[n]["step_s"] for n in names]
    times = [rows[n]["step_s"] for n in names]
    axes[0].errorbar(times, range(len(names)), xerr=[low, high], fmt="none", ecolor="#1e293b", elinewidth=0.8)
    if "floor" in rows:
        axes[0].axvline(rows["floor"]["step_s"], color=FLOOR, linewidth=0.8, linestyle=":", zorder=0)
    figure.suptitle(title(record, case), fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def title(record: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    model, machine = case["model"], record["machine"]
    return (
        f"GPT of {model['parameters'] / 1e6:.0f}M, {case['dtype']}, batch {model['batch']} x {model['sequence']} per "
        f"rank, 2 gloo ranks over {case['link']}, one thread each, malloc {case['malloc']}\n"
        f"median of {case['rounds']} rounds; {machine['cpu']['model']}, torch {machine['packages']['torch']}, "
        f"{machine['date'][:10]}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    for name, default in (("size", "gpt2"), ("dtype", "fp32"), ("link", "loopback"), ("malloc", "default")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    record = json.loads(args.record.read_text())
    wanted = {name: getattr(args, name) for name in ("size", "dtype", "link", "malloc")}
    draw(record, find_case(record, wanted), args.out)
    print(args.out)


if __name__ == "__main__":
    main()
