"""`fzero plot`: runs to a picture, and what is no run."""

import json
import os
from pathlib import Path

import pytest

from fzero import cli
from fzero.errors import DataError
from fzero.log import plot


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def run(path: Path, steps: int = 5, **more: float) -> Path:
    return write(
        path,
        [{"step": s, "loss": 1 / s, "step_seconds": 0.1, "process_peak_bytes": 1e9, **more} for s in range(1, steps)],
    )


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_two_runs_in_one_picture(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    one, two = run(tmp_path / "one" / "log.jsonl"), run(tmp_path / "two" / "log.jsonl", tokens_per_second=9.0)
    out = tmp_path / f"picture.{kind}"
    assert cli.main(["plot", str(one), str(two.parent), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}
    assert out.read_bytes().startswith(begins[kind])
    if kind == "svg":
        text = out.read_text()
        assert all(
            f"<!-- {title} -->" in text or f">{title}<" in text
            for title in ("loss", "tokens a second", "peak memory, GB", "two")
        )


def test_records_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [{"step": 2, "loss": 1}, {"step": 4, "loss": 2}, {"step": 2, "loss": 3}])
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # a run that was killed as it wrote
    assert plot.read(path) == plot.read(tmp_path) == [{"step": 2, "loss": 3}, {"step": 4, "loss": 2}]


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\nworld\n")
    (tmp_path / "empty").write_text("")
    for name, message in (("text", "line 1 is no record"), ("empty", "holds no record"), ("none", "cannot be read")):
        with pytest.raises(DataError, match=message):
            plot.read(tmp_path / name)
    with pytest.raises(DataError, match="no run has a loss, a speed or a memory to draw: a"):
        plot.plot({"a": [{"step": 1, "other": 2}]}, tmp_path / "x.png")
    run(tmp_path / "log.jsonl")
    with pytest.raises(DataError, match="cannot be written"):
        plot.plot({"a": plot.read(tmp_path)}, tmp_path / "picture.txt2")
    with pytest.raises(DataError, match=r"picture: needed a file's name that ends in \.png, \.svg or \.pdf"):
        plot.plot({"a": plot.read(tmp_path)}, tmp_path / "picture")


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert plot._names([Path("a/one/log.jsonl"), Path("a/two/log.jsonl")]) == ["one/log", "two/log"]
    assert plot._names([Path("runs/a.jsonl")]) == ["a"]


def test_what_a_hostile_file_holds(tmp_path: Path) -> None:
    """Steps and values that are no finite numbers, lines too deep to read, and files that never end."""
    good = json.dumps({"step": 1, "loss": 1.5})
    digits = "1" + "0" * 400
    for number, step in enumerate(("Infinity", "NaN", digits, "-1", "1.5", '"x"', "true", "[" * 100_000)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f'{{"step": {step}, "loss": 1}}\n{good}\n')
        with pytest.raises(DataError, match="line 1 is no record"):
            plot.read(path)
    values = ["Infinity", "-Infinity", "NaN", digits, f"-{digits}", "2.5"]
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {n}, "loss": {v}}}\n' for n, v in enumerate(values)))
    assert plot._points(plot.read(tmp_path), ("loss",)) == [(5, 2.5)]
    os.mkfifo(tmp_path / "fifo")
    for endless in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(DataError, match="is no file, but a pipe or a device"):
            plot.read(endless)
