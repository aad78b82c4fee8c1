"""Ray Train: a TorchTrainer starts the workers and their process group, and fzero uses that group.

    python examples/launch/ray_train.py --workers 2 --folder /shared/runs/job

Needs `pip install "ray[train]"`. --folder is a folder that all workers reach.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import job


def worker(config: dict[str, Any]) -> None:
    """What each worker runs: the job, in the process group that Ray started."""
    sys.argv = ["job.py", "--folder", config["folder"], "--steps", str(config["steps"])]
    job.main()


def main() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--folder", default="runs/job")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": str(Path(given.folder).absolute()), "steps": given.steps},
        torch_config=TorchConfig(backend="nccl" if given.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=RunConfig(storage_path=str(Path(given.folder).absolute().parent)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
