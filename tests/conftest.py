"""What every test shares: one thread, and text goldens.

One thread, because `sum` has other bits on two threads than on one. A golden is a text file
`tests/golden/<pass>/<case>.txt` that a person can read and edit; `pytest --update-golden` rewrites the files of the
tests that ran, and without it a missing or different file fails.

Of a test marked `sampled(n)`, n of its cases run in `make test`, drawn by its name, and all in `make acceptance`.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What `sampled` leaves out joins the long checks, before `-m` picks; among the long checks nothing is left out."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (name, count), found in cases.items():
        kept = random.Random(name).sample(range(len(found)), min(count, len(found)))
        for n, item in enumerate(found):
            if n not in kept or config.option.markexpr == "acceptance":
                item.add_marker("acceptance")


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
