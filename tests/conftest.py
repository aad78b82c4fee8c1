"""What every test shares: one thread, and text goldens.

One thread, because `sum` has other bits on two threads than on one. A golden is a text file
`tests/golden/<pass>/<case>.txt` that a person can read and edit; `pytest --update-golden` rewrites the files of the
tests that ran, and without it a missing or different file fails.

With several processes the files of `FIRST` run first, so that no long file begins when the rest of the suite has
ended. The Makefile gives xdist `--no-loadscope-reorder`, by which xdist keeps that order. One process runs files in the
order in which they are given.

The garbage collector begins when all tests are collected, and does not walk what there is then: that takes it a second
each time, and torch, transformers and tests ask for hundreds of collections.

Of a test marked `sampled(n)`, n of its cases run in `make test`, drawn by its name, and all in `make acceptance`. A
test that starts processes is found by the names that it uses and marked where `-m` asks for it, as in `make check`.
"""

import gc
import inspect
import itertools
import logging
import os
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

from fzero import collector
from fzero.disk import direct

gc.disable()  # until pytest_collection_finish
os.environ.setdefault("FZERO_PROGRESS", "0")  # under load anything may take seconds, and say so where a test reads
os.environ.setdefault("FZERO_KEEP_LOWERINGS", "0")  # what is tested is lowered
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is installed, says on stdout that it finds no GPU
# pytest listens to each logger that does not propagate, and as long as anybody listens torch writes every graph out
logging.getLogger("torch.__trace").propagate = True
GOLDEN = Path(__file__).parent / "golden"
FIRST = [
    "laws/test_cuda.py", "laws/test_hangs.py", "laws/test_examples.py", "laws/test_coded.py", "laws/test_doctests.py",
    "laws/test_offload.py", "planner/test_plan.py", "laws/test_tensor_parallel.py", "compile/test_decide.py",
    "interop/test_trainer_meshes.py", "lab/test_fuzz_meshes.py", "kernels/test_kernels.py", "laws/test_tp_state.py",
    "codegen/test_workspace.py", "laws/test_hf.py", "sparse/test_attend.py", "lab/test_mutate.py",
    "interop/test_trainer_logged.py", "laws/test_custom_step.py", "laws/test_model_axes.py", "lab/test_fuzz.py",
    "laws/test_mesh_processes.py", "interop/test_trainer.py", "lowering/test_chunk_loss.py",
    "interop/test_trainer_foreign.py", "compile/test_lowered.py", "laws/test_loss_scale.py", "random/test_keys.py",
    "api/test_error_feedback.py", "runtime/test_compile_segments.py", "checkpoint/test_save.py", "optim/test_onebit.py",
    "interop/test_trainer_optimizers.py", "api/test_autocast.py", "checkpoint/test_checkpointer.py",
    "laws/test_bitwise.py", "laws/test_keys.py", "laws/test_pipeline.py", "laws/test_errors.py", "api/test_training.py",
    "tools/test_doctor.py", "interop/test_trainer_statistics.py", "laws/test_pipeline_tensor_parallel.py",
    "laws/test_parity.py", "laws/test_cuda_cost.py", "laws/test_pipeline_formulas.py",
]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")
    parser.addoption("--part", default="1/1", help="one of so many parts of all tests, drawn by their names: 3/10")
    parser.addoption("--cpu", action="store_true", help="show the files of the most CPU seconds, with their processes'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `sampled` leaves out joins the long checks, before `-m` picks; among the long checks nothing is left out."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None and not _left_out(item):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (name, count), found in cases.items():
        kept = random.Random(name).sample(range(len(found)), min(count, len(found)))
        for n, item in enumerate(found):
            if n not in kept or config.option.markexpr == "acceptance":
                item.add_marker("acceptance")
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part % parts]
    for item in items if "processes" in config.option.markexpr else ():
        if isinstance(item, pytest.Function) and _starts_processes(item):
            item.add_marker("processes")
    if hasattr(config, "workerinput"):  # of xdist
        places = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # with little garbage, which it would take most of a second to find
    gc.set_threshold(20_000, 20, 10)  # a lowering makes more than 700 objects
    gc.enable()


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Nothing is frozen, as in a process of users: what was frozen above is thawed, and then all is frozen again."""
    gc.unfreeze()
    monkeypatch.setattr(collector, "_others", False)
    yield
    gc.freeze()


def _left_out(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "acceptance"))


STARTERS = {"gloo", "start_ranks", "started", "kill_loop", "kills", "subprocess", "multiprocessing", "fork"}


def _starts_processes(item: pytest.Function) -> bool:
    """Whether the test, one of its fixtures, or a function of its file that they call, names what starts processes."""
    fixtures = [d.func for name in item.fixturenames for d in item._fixtureinfo.name2fixturedefs.get(name, ())]
    todo = [item.function.__code__, *(f.__code__ for f in fixtures if f.__module__ == item.function.__module__)]
    known = {name: inspect.unwrap(x) for name, x in vars(item.module).items() if callable(x)}
    seen: set[CodeType] = set()
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        if STARTERS & set(code.co_names):
            return True
        todo += [one for one in code.co_consts if isinstance(one, CodeType)]
        called = [known[name] for name in code.co_names if isinstance(known.get(name), FunctionType)]
        todo += [fn.__code__ for fn in called if fn.__module__ == item.module.__name__]
    return False


_spent = [0.0]  # CPU seconds until the last report of this process


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def pytest_runtest_logstart() -> None:
    _spent[0] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    before, _spent[0] = _spent[0], _cpu_seconds()
    report.cpu_seconds = _spent[0] - before
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table of `--cpu`, of all workers."""
    of_file: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            of_file[report.nodeid.partition("::")[0]] += getattr(report, "cpu_seconds", 0.0)
    if config.option.cpu:
        terminalreporter.section(f"{of_file.total():.0f} CPU seconds, by file")
        for name, seconds in of_file.most_common(30):
            terminalreporter.write_line(f"{seconds:6.1f} {name}")


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[[str, str], list[Any]]:
    """`chosen("test_on_gloo", "name")`: the values of that parameter in the cases of a test of this file that run."""

    def values(test: str, parameter: str) -> list[Any]:
        own = [
            item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)
        ]
        return list(dict.fromkeys(item.callspec.params[parameter] for item in own if item.originalname == test))

    return values


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether all cases of a test run, as in `make acceptance`: else it may take a part of them."""
    return request.config.option.markexpr == "acceptance"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("free/two_layers", text)` compares `text` with tests/golden/free/two_layers.txt."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden file {path}: run `pytest --update-golden`, read the file, and commit it")
        expected = path.read_text(encoding="utf-8")
        assert text == expected, (
            f"{path} differs: if the change is meant, run `pytest --update-golden` and read the diff"
        )

    return check


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on a disk; the temporary directory is memory on some systems."""
    fd = os.open(tmp_path, os.O_RDONLY)
    kind = direct.in_memory(fd)
    os.close(fd)
    if kind:
        pytest.skip(f"{tmp_path} lies in memory ({kind}): run with --basetemp on a disk")
    return tmp_path
