"""The scripts of transformers' examples/pytorch as they are, and with one import changed: Trainer from fzero.interop.

A script and the modules beside it are copied; in the second copy `ast` moves `Trainer` and `Seq2SeqTrainer` from
`from transformers import ...` to `from fzero.interop import ...`, and nothing else. Data and metrics are local, models
small and from a configuration (`example_inputs`). The scripts lie in the folder that FZERO_EXAMPLES names.
"""

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import example_inputs
import numpy as np
from foreign import sources

STOCK, OURS = "stock", "ours"
MOVED = ("Trainer", "Seq2SeqTrainer")
QUIET = """--use_cpu True --report_to none --disable_tqdm True --seed 5 --learning_rate 3e-3 --logging_steps 1
    --save_strategy no --do_train --do_eval --num_train_epochs 3 --per_device_train_batch_size 4
    --per_device_eval_batch_size 4 --log_level error"""  # 13 rows to train on and 11 to evaluate: short last batches
NO_TEXT = ("predict_results.json", "eval_nbest_predictions.json", "predict_nbest_predictions.json")  # hold floats
NO_NUMBERS = ("runtime", "per_second", "planned_peak_bytes", "total_flos")


class Loop(NamedTuple):
    """What an evaluation loop returned: arrays of predictions and labels, and metrics."""

    predictions: list[Any]
    labels: list[Any]
    metrics: dict[str, float]


class Ran(NamedTuple):
    """What a script left: what its Trainer logged, its evaluation loops, and the text of files of predictions."""

    logged: list[dict[str, float]]
    loops: list[Loop]
    files: dict[str, str]


def home() -> Path:
    """The folder of the scripts: flat, or transformers' examples/pytorch."""
    return Path(os.environ["FZERO_EXAMPLES"])


def on_rank(case: str, folder: str) -> tuple[Ran, Ran]:
    """A case by the stock Trainer and by fzero's, one after the other, in this process. At the top for `gloo`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    sources.operators()
    inputs = Path(folder) / "inputs"
    script, argv = example_inputs.CASES[case](inputs)
    return ran(STOCK, script, argv, Path(folder)), ran(OURS, script, argv, Path(folder))


def ran(kind: str, script: str, argv: str, folder: Path) -> Ran:
    """One run of a script's main() by a Trainer of a kind."""
    import transformers

    results = folder / kind / "results"
    rank = os.environ.get("RANK", "0")
    source = copied(script, folder / kind / f"source_{rank}", kind == OURS)
    words = [script, *QUIET.split(), *argv.split(), "--output_dir", str(results), "--cache_dir", str(folder / kind)]
    with imported(source, script) as module, noted() as loops, mock.patch.object(sys, "argv", words):
        module.main()
    trainer = loops[-1][0]
    assert isinstance(trainer, transformers.Trainer)
    assert (getattr(trainer, "engine", None) is not None) == (kind == OURS)
    files = {
        path.name: path.read_text()
        for path in sorted(results.glob("*predict*") if rank == "0" else ())
        if path.name not in NO_TEXT
    }
    return Ran([numbers(entry) for entry in trainer.state.log_history], [loop for _, loop in loops], files)


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in entry.items() if not any(k.endswith(name) for name in NO_NUMBERS)}


# --- the change of the import -----------------------------------------------------------------------------------------


def copied(script: str, folder: Path, ours: bool) -> Path:
    """A folder with the script and the modules beside it, with or without the change of the import."""
    folder.mkdir(parents=True)
    (path,) = home().rglob(f"{script}.py")
    moved = 0
    for source in path.parent.glob("*.py"):
        text, count = changed(source.read_text())
        (folder / source.name).write_text(text if ours else source.read_text())
        moved += count
    assert moved, f"{script} imports no Trainer from transformers"
    return folder


def changed(text: str) -> tuple[str, int]:
    """(a source that imports the Trainers from fzero.interop, and its number of changes)."""
    tree = ast.parse(text)
    body: list[ast.stmt] = []
    count = 0
    for statement in tree.body:
        names: list[ast.alias] = []
        if isinstance(statement, ast.ImportFrom) and statement.module == "transformers":
            names = [alias for alias in statement.names if alias.name in MOVED]
            statement.names = [alias for alias in statement.names if alias.name not in MOVED]
        count += len(names)
        body += [ast.ImportFrom("fzero.interop", names, 0)] if names else []
        body += [statement] if getattr(statement, "names", True) else []
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))), count


@contextmanager
def imported(folder: Path, script: str) -> Iterator[Any]:
    """The script as a module, and those beside it, for a while. `evaluate` and nltk are local."""
    import evaluate

    nltk: Any = SimpleNamespace(sent_tokenize=str.splitlines, data=SimpleNamespace(find=str))
    local = {**dict.fromkeys(path.stem for path in folder.glob("*.py")), "nltk": nltk}
    before = {name: sys.modules.pop(name, None) for name in local}
    sys.modules["nltk"] = nltk
    importlib.invalidate_caches()
    try:
        with (
            mock.patch.object(evaluate, "load", example_inputs.Metric),
            mock.patch.object(sys, "path", [str(folder), *sys.path]),
        ):
            yield importlib.import_module(script)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def noted() -> Iterator[list[tuple[Any, Loop]]]:
    """Notes (the Trainer, what its evaluation loop returned) of each evaluation, of either kind."""
    import transformers

    loops: list[tuple[Any, Loop]] = []
    stock = transformers.Trainer.evaluation_loop

    def loop(self: Any, *given: Any, **named: Any) -> Any:
        if self.args.world_size > 1 and not hasattr(self, "engine"):
            _averaged(self.model)
        output = stock(self, *given, **named)
        loops.append((self, Loop(arrays(output.predictions), arrays(output.label_ids), numbers(output.metrics))))
        return output

    with mock.patch.object(transformers.Trainer, "evaluation_loop", loop):
        yield loops


def _averaged(model: Any) -> None:
    """Running statistics of the stock Trainer become the mean over the ranks, which fzero keeps. Otherwise they are
    those of rank 0, or with ddp_broadcast_buffers=False each rank's own."""
    import torch

    for name, value in model.named_buffers():
        if "running" in name:
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()


def arrays(values: Any) -> list[Any]:
    if values is None:
        return []
    return [a for value in values for a in arrays(value)] if isinstance(values, tuple | list) else [np.array(values)]


# --- the comparison ---------------------------------------------------------------------------------------------------


def worst(ours: Ran, stock: Ran, shifted: bool) -> float:
    """The largest difference of numbers, relative to values above 1. Integers, choices and files must be equal.

    shifted: the scores are those of one softmax over the last dim, and one bias shifts them all. Its gradient is 0 but
    for rounding, of which AdamW makes whole steps: only differences of scores are compared.
    """
    gaps = [_gap(a, b) for a, b in zip(ours.logged, stock.logged, strict=True)]
    assert any("loss" in entry for entry in stock.logged)
    for a, b in zip(ours.loops, stock.loops, strict=True):
        assert b.predictions
        gaps.append(_gap(a.metrics, b.metrics))
        gaps += [_far(x, y, shifted) for x, y in zip(a.predictions, b.predictions, strict=True)]
        assert all(np.array_equal(x, y) for x, y in zip(a.labels, b.labels, strict=True))
    assert ours.files == stock.files
    return max(gaps)


def of_losses(ours: Ran, stock: Ran) -> float:
    """The largest difference of the logged losses, of training and evaluation, relative to values above 1."""
    pairs = zip(ours.logged, stock.logged, strict=True)
    return max(_gap(*({k: v for k, v in entry.items() if k.endswith("loss")} for entry in pair)) for pair in pairs)


def _gap(a: dict[str, float], b: dict[str, float]) -> float:
    assert a.keys() == b.keys(), (a, b)
    return max((abs(a[k] - b[k]) / max(1.0, abs(b[k])) for k in a), default=0.0)


def _far(a: Any, b: Any, shifted: bool) -> float:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype.kind != "f":
        assert np.array_equal(a, b)
        return 0.0
    assert a.ndim < 2 or np.array_equal(a.argmax(-1), b.argmax(-1))
    if shifted:
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    return float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max())
