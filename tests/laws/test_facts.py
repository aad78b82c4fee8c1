"""What a program's records say is in their fields: no module of `fzero/` parses a buffer's or a bucket's name, a
reason, or the list of passes. `ir/parse.py` alone reads the text form, where all of them are words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fzero"
PARSERS = {
    "endswith", "find", "index", "isdecimal", "isdigit", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
}  # fmt: skip
MARKS = {":", "~", ".lent", ".again", ".new", ".full", ".low", "for ", "again "}  # that names and reasons are made with
TEXT = ("name", "why", "note", "bucket", "target")  # fields of records that hold text
ELSEWHERE = ("capture/", "comm/", "interop/", "tools/")  # rooms that see no program, but names that others gave
EXCEPT = {
    "cost/kept_costs.py": "/proc/cpuinfo", "ir/parse.py": "the text form", "shard/local_forms.py": "forms of rules",
    "planner/plan_command.py": "FILE.py:FUNCTION",
    "shard/rules/given.py": "rules as text", "shard/rules/products.py": "rules as text",
}  # fmt: skip


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a record's text: `b.name`, `op.why`, `op.target`, `str(op.why)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return _is_text(node.args[0])
    if isinstance(node, ast.Subscript):
        return _is_text(node.value)
    return isinstance(node, ast.Attribute) and node.attr in TEXT and "_schema" not in ast.unparse(node)  # torch's ops


def parsed(source: str) -> Iterator[tuple[int, str]]:
    """(line, expression) of what takes a record's text apart, compares a part of it, or asks which passes ran."""
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARSERS
        marked = call and any(isinstance(arg, ast.Constant) and arg.value in MARKS for arg in node.args[:1])
        if call and (marked or _is_text(node.func.value)):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and any(map(_is_text, node.args)):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            inside = node.comparators[0]
            if isinstance(inside, ast.Attribute) and inside.attr in ("name", "why", "note", "passes"):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and _is_text(node.value):
            yield node.lineno, ast.unparse(node)


def test_no_module_parses_a_name_or_a_reason() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in EXCEPT and not name.startswith(ELSEWHERE):
            found += [f"{name}:{line}: {text}" for line, text in parsed(path.read_text(encoding="utf-8"))]
    assert found == []


def test_each_exception_is_there() -> None:
    for name in EXCEPT:
        assert list(parsed((ROOT / name).read_text(encoding="utf-8"))), f"{name} needs no exception any more"


@pytest.mark.parametrize(
    "line",
    [
        'axis = buffer.name.partition(":")[2]', 'layer = b.name.split("~")[0]', 'if LENT in b.name: pass',
        'why = op.why.removeprefix("for ")', 'if "again " in op.why: pass', 'if "free" in program.passes: pass',
        'column = self.run.dest[node].name.removesuffix(".new")', 're.match(r"F", op.why)', "op.target[:4]",
        'bucket, _, slot = slot_key.rpartition(":")',
    ],
)  # fmt: skip
def test_each_way_to_parse_a_record_is_seen(line: str) -> None:
    """All but three stood in `fzero/`."""
    assert list(parsed(line))
