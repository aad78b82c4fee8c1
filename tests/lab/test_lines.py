"""lines: a line that is broken, and the tests that see it."""

import ast
from pathlib import Path

import pytest

from lab import lines

SOURCE = '''"""A module."""

from math import inf

LIMIT: int = 3
PAIR = 3, 4


def pick(xs, least=0):
    """One or the other."""
    if not xs or LIMIT <= 2:
        raise ValueError(f"{len(xs) + 1} given")
    log.info("so many", 3)
    xs.append(inf)
    return [x + 1 if x > least else True for x in zip(xs, xs, strict=True)]
'''


def test_lines_that_compute_are_broken_and_no_others() -> None:
    found = lines.broken_lines(SOURCE)
    assert sorted(found) == [6, 9, 11, 14, 15]  # no docstring, import, annotation, threshold, log or text of an error
    assert found[6] == ["PAIR = 4, 4\n", "PAIR = 3, 5\n"]
    assert "    if not xs and LIMIT <= 2:\n" in found[11]
    assert "    if xs or LIMIT <= 2:\n" in found[11]
    assert "    if not xs or LIMIT < 2:\n" in found[11]
    assert found[14] == ["    pass\n"]
    assert not any("strict=False" in after for after in found[15])


def test_what_is_shown_of_a_stretch_of_work_is_text() -> None:
    source = (
        "def load(name):\n    with progress.shown('a' if name == 'load' else 'b'):\n        return name == 'load'\n"
    )
    assert sorted(lines.broken_lines(source)) == [3]


def test_of_two_moments_none_is_the_other() -> None:
    source = "def late(now, end):\n    return now < end or time.monotonic() > end or end < 3 or now in end\n"
    assert sorted(lines.broken_lines(source)[2]) == [
        f"    return {text}\n"
        for text in (
            "now < end and time.monotonic() > end and (end < 3) and (now in end)",
            "now < end or time.monotonic() > end or end < 3 or now not in end",
            "now < end or time.monotonic() > end or end < 4 or now in end",
            "now < end or time.monotonic() > end or end <= 3 or now in end",
        )
    ]


def test_a_rooms_tests_come_in_the_order_in_which_they_concern_a_module() -> None:
    files = [Path(name).name for name in lines.tests_of("plan", Path("fzero/plan/leaf_classes.py"))]
    assert files[0] == "test_leaf_classes.py"
    text = [(lines.ROOT / "tests" / "plan" / name).read_text() for name in files[1:]]
    named = ["leaf_classes" in one for one in text]
    assert named == sorted(named, reverse=True)
    of_all = lines.tests_of("passes", Path("fzero/passes/__init__.py"))
    assert of_all[0] == "tests/passes/test_passes.py", "that of its folder"
    assert sorted(files) == sorted(file.name for file in (lines.ROOT / "tests" / "plan").glob("test_*.py"))


@pytest.mark.parametrize("room", lines.ROOMS)
@pytest.mark.sampled(2)
def test_each_broken_line_is_python_and_another_program(room: str) -> None:
    broken = lines.drawn(room, 40, seed=1)
    assert len({(b.path, b.number) for b in broken}) == 40
    for line in broken:
        assert ast.dump(ast.parse(line.source)) != ast.dump(ast.parse((lines.ROOT / line.path).read_text())), line


def test_a_seed_draws_the_same_lines() -> None:
    assert lines.drawn("plan", 5, seed=3) == lines.drawn("plan", 5, seed=3) != lines.drawn("plan", 5, seed=4)


@pytest.mark.acceptance
def test_a_broken_line_is_caught_or_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("fzero/plan/small.py", "def double(x):\n    return x + x\n\n\ndef unseen(x):\n    return x + 1\n"),
        (
            "tests/plan/test_small.py",
            "from fzero.plan.small import double\n\n\ndef test():\n    assert double(2) == 4\n",
        ),
        ("fzero/__init__.py", ""),
        ("fzero/plan/__init__.py", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    ends = {line.number: lines.caught(line, "plan", tmp_path, 60.0) for line in lines.drawn("plan", 2, seed=0)}
    assert ends == {2: "failed", 6: "passed"}
    assert (tmp_path / "fzero/plan/small.py").read_text().startswith("def double")
    endless = lines.BrokenLine(Path("fzero/plan/small.py"), 2, "", "    while True:\n        x + 1\n")
    assert lines.caught(endless, "plan", tmp_path, 3.0) == "too slow"
    assert lines.main(["plan", "--count", "2"]) == 1
    assert "plan: 50% of 2 caught" in capsys.readouterr().out
    (tmp_path / "tests/plan/test_small.py").write_text("def test():\n    assert False\n")
    assert lines.main(["plan", "--count", "2"]) == 1
    assert capsys.readouterr().out == "plan: its tests fail as they are: nothing is told by what they catch\n"
