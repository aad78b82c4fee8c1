"""Microseconds that `fzero.Log` takes for a record: with a file alone, and with the trackers that are installed.

    OMP_NUM_THREADS=1 python -m benchmarks.log

A record is made of a state with a loss scale and a clipped norm, by a schedule, tokens and flops. A step between two
records costs nothing but a comparison; `every=10` divides what is printed by ten.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fzero

RECORDS, WARM, STEP = 300, 20, 0.1  # the last: seconds of the step that it is compared with


class Own:
    def log(self, record: dict[str, Any], step: int) -> None:
        pass


def board(folder: Path) -> Any:
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder / "board")


def wandb(folder: Path) -> Any:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    return importlib.import_module("wandb").init(project="fzero", dir=folder)


def mlflow(folder: Path) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    module = importlib.import_module("mlflow")
    module.set_tracking_uri(f"file:{folder}/mlflow")
    module.start_run()
    return module


TRACKERS: dict[str, Callable[[Path], Any]] = {
    "an object with log()": lambda folder: Own(), "TensorBoard": board, "W&B, offline": wandb, "MLflow, files": mlflow,
}  # fmt: skip


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = stepped()
        show("the file alone", seconds(state, folder, []))
        for tracker, make in TRACKERS.items():
            try:
                made = make(folder)
            except Exception as error:  # not installed, or not able to start here
                print(f"{tracker:24} {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
            show(f"and {tracker}", seconds(state, folder, [made]))
    return 0


def stepped() -> fzero.State:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), clip_norm=1.0, precision="fp16")
    return fzero.step(fzero.init({"w": torch.ones(64, 8)}, spec), torch.randn(8, 64))


def seconds(state: fzero.State, folder: Path, trackers: list[Any]) -> list[float]:
    schedule = fzero.optim.warmup_cosine(1e-3, 10, 100)
    given: dict[str, Any] = {"tokens": 1024, "flops": 1e9, "peak_flops": 1e12, "rate": schedule, "show": False}
    taken = []
    with fzero.Log(folder / "log.jsonl", every=1, to=trackers, **given) as log:
        for _ in range(WARM + RECORDS):
            start = time.perf_counter()
            log(state)
            taken.append(time.perf_counter() - start)
    return taken[WARM:]


def show(name: str, taken: list[float]) -> None:
    mean, median = statistics.mean(taken), statistics.median(taken)
    print(f"{name:24} median {1e6 * median:5.0f}, mean {1e6 * mean:5.0f} microseconds a record, "
          f"{100 * mean / STEP:.2f} % of a step of {1e3 * STEP:g} ms at every=1", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
