"""plan_command: `fzero plan FILE:FUNCTION`: plans what a function of the user's returns."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from fzero.compile.simulation import simulation
from fzero.errors import FzeroError, SpecError
from fzero.hardware import presets
from fzero.planner.choose import plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero plan`."""
    parser.add_argument("problem", help="FILE.py:FUNCTION, which returns (spec, params_like, batch_like)")
    parser.add_argument("--ranks", type=int, required=True, help="of the world")
    parser.add_argument("--hardware", required=True, help=f"a TOML file, or one of {', '.join(presets())}")
    parser.add_argument("--memory", type=int, help="bytes that a rank may use of its device")
    parser.add_argument("--codecs", default="", help="that may be taken, as int8,int4: they change the numbers")
    parser.add_argument("--phase", default="", help="of a spec with fzero.Phases, which one (default: the first)")
    parser.add_argument("--picture", help="a file, .svg: who does what when in the plan's step, and its memory")
    parser.add_argument("--trace", help="a file, .json: the same as a trace, which ui.perfetto.dev opens")
    parser.add_argument("--python", action="store_true", help="print the answer alone, as Python")


def command(arguments: argparse.Namespace) -> int:
    """Prints the plan."""
    if arguments.picture and Path(arguments.picture).suffix != ".svg":
        raise SpecError(f"--picture={arguments.picture}: it is written as .svg. Name it so")
    spec, params, batch = problem(arguments.problem)
    found = plan(
        spec, params, batch, world_size=arguments.ranks, hardware=arguments.hardware, memory=arguments.memory,
        codecs=[*filter(None, arguments.codecs.split(","))], phase=arguments.phase,
    )  # fmt: skip
    print(found.python() if arguments.python else found)
    if arguments.picture or arguments.trace:
        step = simulation(found.lowered, found.machine)
        for path, text in ((arguments.picture, step.svg), (arguments.trace, step.json)):
            if path:
                Path(path).write_text(text(), encoding="utf-8")
    return 0


def problem(text: str) -> tuple[Any, Any, Any]:
    """What the function of `FILE.py:FUNCTION` returns. Raises SpecError where there is none, or it returns other."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not name.isidentifier() or path.suffix != ".py" or not path.is_file():
        gone = f"there is no file {file or text}; " if not path.is_file() else ""
        needed = "needed FILE.py:FUNCTION, a function that returns (spec, params_like, batch_like)"
        raise SpecError(f"{text!r}: {gone}{needed}")
    sys.path.insert(0, str(path.parent.resolve()))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            raise SpecError(f"{text!r}: {path} has no function {name!r}")
        made = function()
    except FzeroError:
        raise
    except Exception as error:
        raise SpecError(f"{text!r}: {_where(error, path)}{type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 3):
        given = f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise SpecError(f"{text!r}: it returned {given}; needed (spec, params_like, batch_like)")
    return made


def _where(error: Exception, path: Path) -> str:
    """The last line of the user's file that led to an error; of one of syntax its text says the line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}:{lines[-1]}: " if lines else ""
