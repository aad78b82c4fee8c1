"""Bytes and JSON only: nothing in fzero unpickles."""

import ast
from pathlib import Path

import fzero

ROOT = Path(fzero.__file__).parent


UNPICKLES = {
    "runtime/compile_segments.py": "hands graphs to its own workers, through a private folder: no checkpoint",
    "interop/_unpickle.py": "a child process of the importers of foreign checkpoints, which no module imports",
}


def test_nothing_unpickles():
    """No pickle, torch.load, torch.save or object collective in fzero, but for the two files above."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if name not in UNPICKLES:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                for word in _words(node):
                    found.setdefault(name, []).append(word)
    assert found == {}


MODULES = ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "_pickle", "_unpickle")
OBJECTS = [f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")]
OBJECTS += ["all_gather_object", "gather_object"]
CALLS = ("torch.load", "torch.save", "torch.serialization", "torch.jit.load", "allow_pickle")


def _words(node):
    if isinstance(node, ast.Import):
        return [a.name for a in node.names if {*a.name.split(".")} & {*MODULES}]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{a.name}" for a in node.names]
        return [
            n
            for n in names
            if {n.split(".")[0], *n.split(".")[2:]} & {*MODULES} or n in CALLS or n.endswith("_object_list")
        ]
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return [text] if text in CALLS or node.attr in OBJECTS else []
    allowed = isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    return ["allow_pickle"] if allowed else []


def test_the_rule_sees_what_it_forbids():
    for line in ("import pickle", "from pickle import loads", "torch.load('x')", "dist.all_gather_object(a, b)",
                 "from torch import load",
                 "from fzero.interop import _unpickle", "np.load(f, allow_pickle=True)"):  # fmt: skip
        assert any(_words(node) for node in ast.walk(ast.parse(line))), line
