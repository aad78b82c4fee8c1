"""The main job and the recipes run, tiny and a few steps: one rank here, two in processes of their own."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import gloo, values

import dp_sgd
import fzero
import gan
import long_text
import lora
import maml
import memory
import offload_gpt2xl
import pipeline_gpt
import ranks
import text
import train_gpt as main_job
from fzero.cost.allocator import measured_peak

TRAIN_GPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 12
SMALL = ["--size", "tiny", "--steps", str(STEPS), "--batch", "8", "--seq", "64"]


def train_gpt(out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What it prints, and its report."""
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(TRAIN_GPT), *SMALL, "--out", str(out), *arguments]
    done = subprocess.run(
        command, env={**outside, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one_rank")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main_job.main([*SMALL, "--out", str(out), "--world", "1", "--zero", "0"]) == 0
    return out, printed.getvalue(), json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("two_ranks")
    return out, *train_gpt(out, "--world", "2", "--zero", "3", "--checkpoint-every", "5", "--kill-at", "8")


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
    assert f"digest of the parameters: {report['digest']}" in printed
    for line in ("planned", "measured", "held-out loss", "tokens/s"):
        assert line in printed


@pytest.mark.acceptance
def test_two_ranks_with_zero_3_do_the_same_and_hold_half(
    one_rank: tuple[Path, str, dict[str, Any]], two_ranks: tuple[Path, str, dict[str, Any]]
) -> None:
    """One of the two is killed on the way, and what it had trained since the last save is trained again."""
    whole, half = one_rank[2], two_ranks[2]
    assert "going on after step 5, saved in " in two_ranks[1]
    assert half["train"] == pytest.approx(whole["train"], rel=1e-4), "the global batch is the same"
    assert half["held_out"][-1][1] == pytest.approx(whole["held_out"][-1][1], rel=1e-4)
    for rank in half["measured"]:
        assert rank["params"] + rank["optimizer"] == half["planned"]["state"], "held bytes equal the plan"
        for kind in ("params", "optimizer"):
            assert rank[kind] < 0.6 * whole["measured"][0][kind]
        assert rank["batch"] == whole["measured"][0]["batch"] / 2


def test_a_batch_that_ranks_cannot_share_is_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "launch", lambda *given: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as end:
        main_job.main(["--world", "2", "--batch", "6", "--microbatches", "2", "--out", str(tmp_path)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--batch 6 cannot be cut into 2 ranks x 2 microbatches: needed a multiple of 4" in said
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no luck'); time.sleep(1000)"
    start = time.monotonic()
    assert ranks.launch([sys.executable, "-c", program], 3, tmp_path) == 1
    assert time.monotonic() - start < 500, "a hang"
    error = capfd.readouterr().err
    assert "rank 1 ended with exit status 1" in error
    assert "no luck" in error
    assert "all 3 ranks have ended" in error


def test_ranks_start_again_as_often_as_they_may(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """if True:
        import os, signal
        os.environ["RANK"] == "0" and print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] < "2":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    assert ranks.launch([sys.executable, "-c", program], 2, tmp_path, restarts=1) == 1
    assert ranks.launch([sys.executable, "-c", program], 2, tmp_path, restarts=3) == 0
    printed, error = capfd.readouterr()
    assert error.count("rank 1 was killed by SIGKILL") == 4
    assert "all 2 ranks start again (2 of at most 3 times)" in error
    assert printed.splitlines()[-1] == "attempt 2"


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


# --- recipes ----------------------------------------------------------------------------------------------------------


def printed_by(main: Any, out: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an example prints, run here as one rank."""
    assert main(["--world", "1", "--out", str(out), *arguments]) == 0
    return capsys.readouterr().out


LONGEST = [pytest.param(one, marks=pytest.mark.acceptance, id=one.__name__) for one in (maml, lora)]


@pytest.mark.parametrize("example", [gan, dp_sgd, *LONGEST], ids=lambda example: example.__name__)
@pytest.mark.acceptance
def test_recipes_on_two_ranks(example: Any, tmp_path: Path) -> None:
    """As torchrun would start them; `ranks.launch` is tested above."""
    assert values(gloo(2, example.main, ["--steps", "2", "--out", str(tmp_path)])) == [0, 0]


ONE_FILE = ["--data", str(TRAIN_GPT)]  # read in no time
PIPELINE = ["--size", "tiny", "--seq", "32", "--batch", "8", "--schedule", "zb-v"]


def test_a_pipeline_on_two_ranks(tmp_path: Path) -> None:
    given = [*PIPELINE, *ONE_FILE, "--steps", "2", "--out", str(tmp_path)]
    given[given.index("zb-v")] = "1f1b"  # the tiny model has two layers: a chunk for each rank
    assert values(gloo(2, pipeline_gpt.main, given)) == [0, 0]
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


def offloaded(folder: Path) -> dict[str, str]:
    """What rank 0 prints of the example, tiny, with its state in memory and on a disk."""
    small = ["--size", "tiny", "--seq", "32", "--steps", "3", "--lr", "1e-3"]
    printed = {}
    for where in ("none", "nvme"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            args = offload_gpt2xl.parse([*small, "--offload", where, "--nvme-path", str(folder), "--out", str(folder)])
            offload_gpt2xl.train(args, fzero.data._here()[0])
        printed[where] = out.getvalue()
    return printed


@pytest.mark.acceptance
def test_a_state_on_a_disk_on_two_ranks(tmp_path: Path) -> None:
    """The losses of no offload, and what was read and written, as the program said."""
    losses = {}
    for where, shown in values(gloo(2, offloaded, tmp_path))[0].items():
        losses[where] = re.findall(r"loss +([\d.]+)", shown)
        lanes = re.search(r"moved by each in a step: disk→device ([\d.]+) MB.* device→disk ([\d.]+) MB", shown)
        assert (lanes is not None) == (where == "nvme")
    assert losses["none"] == losses["nvme"]
    assert float(losses["nvme"][2]) < float(losses["nvme"][0])
    assert lanes is not None
    last = re.findall(r"read ([\d.]+) MB, written ([\d.]+) MB", shown)[-1]
    assert [float(x) for x in last] == pytest.approx([2 * float(lanes[1]), 2 * float(lanes[2])], abs=0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpt2xl.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(SystemExit) as caught:
        offload_gpt2xl.main([*ONE_FILE, "--size", "tiny", "--seq", "32", "--world", "1", "--nvme-path", str(tmp_path)])
    text = str(caught.value)
    assert re.match(
        rf"{tmp_path} has 0.1 MB free, and the parameters and moments of all ranks take [\d.]+ MB\.\n", text
    )
    assert "Name a folder on a larger disk with --nvme-path" in text


@pytest.mark.acceptance
def test_a_pipeline_on_four_ranks_with_one_command(tmp_path: Path) -> None:
    """The losses of two ranks without one, the timeline, and the bytes of each rank."""
    shown = {}
    for world, pp in ((4, 2), (2, 1)):
        given = [*PIPELINE, "--size", "small", "--steps", "6", "--world", str(world), "--pp", str(pp)]
        command = [sys.executable, pipeline_gpt.__file__, *given, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        shown[pp] = done.stdout
    losses = {pp: [line for line in text.splitlines() if " loss " in line] for pp, text in shown.items()}
    assert losses[1] == losses[2]
    assert len(losses[2]) == 6
    for line in ("tokens/s", "role 1, dp 1", "role 0 |F0 ", "zb-v: idle 4.0 %"):
        assert line in shown[2]
    assert (tmp_path / "timeline.svg").exists()


@pytest.mark.acceptance
def test_layers_over_four_ranks_with_one_command(tmp_path: Path) -> None:
    """The losses of four ranks without them, leaves and transfers in a file, and the bytes of a step."""
    pytest.importorskip("transformers")
    job = TRAIN_GPT.with_name("tensor_parallel_llama.py")
    shown = {}
    for tp, more in ((2, ["--sequence"]), (1, [])):
        given = ["--layers", "1", "--steps", "4", "--seq", "32", "--tp", str(tp), *more, "--out", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, str(job), *given], capture_output=True, text=True, timeout=600, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown[tp] = done.stdout
    losses = {tp: [line for line in text.splitlines() if line.startswith("step ")] for tp, text in shown.items()}
    assert losses[1] == losses[2]
    assert len(losses[2]) == 4
    for line in ("tokens/s", "sent over tp: ", "held bytes: param "):
        assert line in shown[2]
    assert "reduce_scatter" in (tmp_path / "sharding.txt").read_text()


def test_a_timeline_as_text() -> None:
    schedule = fzero.pipeline.make_schedule("1f1b", roles=2, microbatches=2)
    assert pipeline_gpt.drawn(schedule).splitlines()[1:] == [
        "role 0 |F0 F1 ......B0    ...B1    |",
        "role 1 |...F0 B0    F1 B1    ......|",
    ]


@pytest.mark.acceptance
def test_the_gan_moves_towards_its_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_by(gan.main, tmp_path, capsys, "--steps", "120").splitlines()[-2]
    before, after = (float(word.rstrip("%")) for word in shown.split() if word.endswith("%"))
    assert after > before


@pytest.mark.acceptance
def test_maml_adapts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_by(maml.main, tmp_path, capsys, "--steps", "300").splitlines()
    at_first, trained = ([float(x) for x in line.split() if "." in x] for line in shown[-3:-1])
    assert trained[2] < 0.8 * trained[0], "two steps on ten points help"
    assert trained[2] < 0.8 * at_first[2], "and they did not before"


def test_private_training_learns_and_counts_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_by(dp_sgd.main, tmp_path, capsys, "--steps", "60", "--noise", "0.3")
    assert shown.endswith("good\n")
    assert f"step    60  epsilon {dp_sgd.epsilon(0.3, 60):.2f}" in shown


def test_private_gradients_are_clipped() -> None:
    data = dp_sgd.data_set(fzero.random.key(3), 30)
    batch = {**data, "weight": torch.ones(30)}
    params = fzero.optim.apply_updates(*[dp_sgd.init(fzero.random.key(4))["params"]] * 2)  # twice: longer gradients
    norms = dp_sgd.gradient_norms(params, batch)
    assert norms.max() > dp_sgd.NORM
    for i in range(30):
        _, grads = fzero.value_and_grad(dp_sgd.clipped_loss)(params, {k: x[i : i + 1] for k, x in batch.items()})
        size = float(fzero.optim.global_norm(grads))
        assert size == pytest.approx(min(float(norms[i]), dp_sgd.NORM), rel=1e-4)


def test_epsilon_is_that_of_published_accountants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings and values of the MNIST tutorial of TensorFlow Privacy: batches of 256 of 60,000, delta 1e-5."""
    monkeypatch.setattr(dp_sgd, "RATE", 256 / 60_000)
    for noise, epochs, published in ((1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)):
        assert dp_sgd.epsilon(noise, epochs * 60_000 // 256) == pytest.approx(published, rel=0.005)


def test_a_sampled_batch_is_shared_among_ranks() -> None:
    data = dp_sgd.data_set(fzero.random.key(0), dp_sgd.NUM_EXAMPLES)
    key = fzero.random.key(1)
    whole = dp_sgd.sampled(data, key, 0, 1)
    parts = [dp_sgd.sampled(data, key, rank, 2) for rank in range(2)]
    assert sum(float(part["weight"].sum()) for part in parts) == float(whole["weight"].sum())
    assert torch.equal(torch.stack([part["x"] for part in parts], 1).flatten(0, 1), whole["x"])


@pytest.mark.acceptance
def test_lora_trains_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_by(lora.main, tmp_path, capsys, "--steps", "30", "--seq", "32")
    assert "the base has the bits it had" in shown
    alone, adapted = (float(x) for x in shown.splitlines()[-2].replace(",", "").split() if "." in x)
    assert adapted < alone


# --- scripts of transformers' shape -----------------------------------------------------------------------------------


def peaks(printed: str) -> tuple[float, float]:
    """The planned and the measured peak that an example prints, in bytes."""
    found = re.search(r"peak: ([\d.]+) (\w+) planned, ([\d.]+) (\w+) measured", printed)
    assert found, printed
    unit = {"kB": 1e3, "MB": 1e6}
    return float(found[1]) * unit[found[2]], float(found[3]) * unit[found[4]]


@pytest.mark.acceptance
def test_a_classifier_by_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GLUE's shape; the bytes that the allocator saw are those that were planned."""
    pytest.importorskip("accelerate")
    import finetune_bert

    printed = printed_by(finetune_bert.main, tmp_path, capsys, "--steps", "3", "--batch", "8", "--seq", "32")
    planned, measured = peaks(printed)
    assert measured == pytest.approx(planned, rel=0.1)
    assert "accuracy on 400 other lines" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_causal_language_model_by_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments of run_clm_no_trainer.py; what it leaves, it takes."""
    pytest.importorskip("transformers")
    import run_clm

    small = [
        "--train_file",
        str(TRAIN_GPT),
        "--block_size",
        "32",
        "--per_device_train_batch_size",
        "4",
        "--gradient_accumulation_steps",
        "2",
    ]
    printed = printed_by(run_clm.main, tmp_path / "a", capsys, *small, "--max_train_steps", "20")
    planned, measured = peaks(printed)
    assert measured == pytest.approx(planned, rel=0.1)
    first = float(re.findall(r"perplexity ([\d.]+)", printed)[-1])
    assert first < 0.8 * 256
    more = ["--model_name_or_path", str(tmp_path / "a" / "model"), "--max_train_steps", "2", "--learning_rate", "1e-6"]
    printed = printed_by(run_clm.main, tmp_path / "b", capsys, *small, *more)
    again = float(re.findall(r"perplexity ([\d.]+)", printed)[-1])
    assert again == pytest.approx(first, rel=0.01), "it went on from the saved model"
    steps = [json.loads(line)["step"] for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert steps == [20]


def test_long_text_learns_and_says_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_text.main([*ONE_FILE, "--size", "tiny", "--seq", "512", "--window", "64", "--steps", "6"]) == 0
    said = capsys.readouterr().out
    window, every = (float(x) for x in re.findall(r"planned peak with .*: ([\d.]+) MB", said))
    assert 0 < window <= 1.3 * every, "scratch of a few MB"
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.5
    with pytest.raises(SystemExit):
        long_text.parse(["--seq", "500"])
    assert "needed a multiple of 16, as 512" in capsys.readouterr().err
