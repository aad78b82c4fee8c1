"""The main job runs, as a user runs it: a process of its own, tiny size, a few steps."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
import memory
import ranks
import text
from fzero.plan.measured import measured_peak

TRAIN_GPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"
STEPS = 12


def train_gpt(out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What it prints, and its report."""
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(TRAIN_GPT), "--size", "tiny", "--steps", str(STEPS), "--out", str(out), *arguments]
    done = subprocess.run(
        command, env={**outside, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one_rank")
    return out, *train_gpt(out, "--world", "1", "--zero", "0")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("two_ranks")
    return out, *train_gpt(out, "--world", "2", "--zero", "3")


def test_it_learns_and_leaves_what_it_promises(one_rank: tuple[Path, str, dict[str, Any]]) -> None:
    out, printed, report = one_rank
    assert len(report["train"]) == STEPS
    assert report["held_out"][0][0] == 0
    assert report["held_out"][-1][0] == STEPS
    assert report["held_out"][-1][1] < 0.8 * report["held_out"][0][1], "twelve steps should learn byte frequencies"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("def ")
    program = (out / "program.txt").read_text()
    assert str(fzero.parse(program)) == program
    for line in ("planned", "measured", "held-out loss", "tokens/s"):
        assert line in printed


def test_two_ranks_with_zero_3_do_the_same_and_hold_half(
    one_rank: tuple[Path, str, dict[str, Any]], two_ranks: tuple[Path, str, dict[str, Any]]
) -> None:
    whole, half = one_rank[2], two_ranks[2]
    assert half["train"] == pytest.approx(whole["train"], rel=1e-4), "the global batch is the same"
    assert half["held_out"][-1][1] == pytest.approx(whole["held_out"][-1][1], rel=1e-4)
    for rank in half["measured"]:
        assert rank["params"] + rank["optimizer"] == half["planned"]["state"], "held bytes equal the plan"
        for kind in ("params", "optimizer"):
            assert rank[kind] < 0.6 * whole["measured"][0][kind]
        assert rank["batch"] == whole["measured"][0]["batch"] / 2


def test_a_batch_that_ranks_cannot_share_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(TRAIN_GPT),
        "--world",
        "2",
        "--batch",
        "6",
        "--microbatches",
        "2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--batch 6 cannot be cut into 2 ranks x 2 microbatches: needed a multiple of 4" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no luck'); time.sleep(100)"
    start = time.monotonic()
    assert ranks.launch([sys.executable, "-c", program], 3, tmp_path) == 1
    assert time.monotonic() - start < 20
    error = capfd.readouterr().err
    assert "rank 1 ended with exit status 1" in error
    assert "no luck" in error
    assert "all 3 ranks have ended" in error


def test_measured_peak_is_the_allocators() -> None:
    mb = 1 << 20

    def fn() -> int:
        first = torch.empty(3 * mb, dtype=torch.uint8)
        del first
        second, third = torch.empty(mb, dtype=torch.uint8), torch.empty(4 * mb, dtype=torch.uint8)
        return second.numel() + third.numel()

    assert measured_peak(fn) == (5 * mb, 5 * mb)


def test_held_bytes_counts_a_storage_once() -> None:
    x = torch.empty(100)
    assert memory.held_bytes([x[:10], x[10:], torch.empty(1, dtype=torch.int64)]) == 408


def test_held_out_text_is_whole_files_that_training_never_sees(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(f"file {i}: " + "x" * 90)
    corpus = text.load(tmp_path, sequence=16)
    train, held_out = bytes(corpus.train.tolist()).splitlines(), bytes(corpus.held_out.tolist()).splitlines()
    assert sorted(train + held_out) == sorted(p.read_bytes() for p in tmp_path.iterdir())
    assert 0.05 * 40 <= len(held_out) <= 0.1 * 40


def test_too_little_text_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(text.TextError, match="give more text with --data, or a shorter --seq"):
        text.load(tmp_path / "short.txt", sequence=64)


def test_ranks_share_one_global_batch() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)

    def batch(rank: int, world_size: int) -> torch.Tensor:
        drawn = text.batches(corpus, num_sequences=6, sequence=8, rank=rank, world_size=world_size, seed=3)
        return next(drawn)["x"]

    whole = batch(0, 1)
    assert torch.equal(whole, torch.cat([batch(rank, 3) for rank in range(3)]))
    assert torch.equal(whole[:, 1:], whole[:, :-1] + 1)
