"""plot: `fzero plot RUN...`: loss, throughput and memory of runs, from their JSON lines, as a picture."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fzero.errors import DataError

PANELS = (  # title, names of a record (the first that a run has is drawn), factor
    ("loss", ("loss",), 1.0),
    ("tokens a second", ("tokens_per_second",), 1.0),
    ("seconds a step", ("step_seconds",), 1.0),
    ("peak memory, GB", ("measured_peak_bytes", "process_peak_bytes", "planned_peak_bytes"), 1e-9),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero plot`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="files of fzero.Log, or folders with log.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("log.png"), help="a .png, .svg or .pdf (log.png)")


def command(arguments: argparse.Namespace) -> int:
    """Draws the picture. Returns the exit status."""
    names = _names(arguments.runs)
    written = plot({name: read(path) for name, path in zip(names, arguments.runs, strict=True)}, arguments.out)
    print(f"wrote {written}")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a run, in the order of steps. A step that was run again after a restart is there once, as it ran
    last. A last line that is cut off is left out. Raises DataError for another line that is no record."""
    file = path / "log.jsonl" if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise DataError(f"{file}: is no file, but a pipe or a device, which may never end")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = record["step"]
            if type(step) is not int or not 0 <= step < 1 << 53:
                raise ValueError
            records[step] = record
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise DataError(f"{file}: line {number} is no record of fzero.Log: {line[:40]!r}") from None
    if not records:
        raise DataError(f"{file}: holds no record of fzero.Log")
    return [records[step] for step in sorted(records)]


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> Path:
    """Draws the panels that a run has something for, a line for each run. Returns the path of the picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("fzero plot needs matplotlib: pip install matplotlib") from None
    if not out.suffix:  # matplotlib would add one, and the file would be another than is told
        raise DataError(f"{out}: needed a file's name that ends in .png, .svg or .pdf")
    panels = [panel for panel in PANELS if any(_points(records, panel[1]) for records in runs.values())]
    if not panels:
        raise DataError(f"no run has a loss, a speed or a memory to draw: {', '.join(runs)}")
    figure = Figure(figsize=(5.0 * min(2, len(panels)), 3.2 * ((len(panels) + 1) // 2)), layout="constrained")
    grid = figure.subplots((len(panels) + 1) // 2, min(2, len(panels)), squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, names, factor) in zip(grid, panels, strict=False):
        for name, records in runs.items():
            points = _points(records, names)
            axes.plot([step for step, _ in points], [value * factor for _, value in points], label=name)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    grid[0].legend()
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        raise DataError(f"{out}: cannot be written: {error}") from None
    return out


def _points(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[tuple[int, float]]:
    """(step, value) of the first of the names that a run has, without values that are not finite."""
    name = next((n for n in names if any(n in record for record in records)), "")
    return [(record["step"], float(record[name])) for record in records if _is_finite(record.get(name))]


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _names(paths: Sequence[Path]) -> list[str]:
    """A name for each run: the shortest end of its path that differs from the others."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.with_suffix("").parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
