"""The account of CUDA's step, made where there is no device: GPT-2 large (8 x 1,024 tokens) and a Llama of 1.1B
parameters (4 x 2,048), in bf16 with AdamW, on one rank.

A process of `fzero fake-cuda` lowers it (tests/support/workers/on_fake_cuda.py). Goldens hold what it moves, by kind:
of six of GPT-2's 36 layers in `make test`, of all of both in `make acceptance`.
That the formula gives the step times which were recorded on an H100 is tests/cost/test_recorded_steps.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.tools import fake_cuda_command

ROOT = Path(__file__).parents[2]
needs_fakes = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="it needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="it needs a torch without CUDA"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton and the loader's LD_PRELOAD are of Linux"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="Inductor's code is that of torch 2.13"),
]


FEW, ALL = 6, 36  # layers
LONG = pytest.mark.acceptance
STEPS = [("gpt2", FEW), pytest.param(("gpt2", ALL), marks=LONG), pytest.param(("llama", 24), marks=LONG)]


@pytest.fixture(scope="module", params=STEPS, ids=str)
def step(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The model and its layers."""
    found: tuple[str, int] = request.param
    return found


@pytest.fixture(scope="module")
def told(step: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FZERO_CACHE", str(ROOT / "runs" / "standin"))
        env = fake_cuda_command.environment()
    cache = str(tmp_path_factory.mktemp("inductor"))
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *sys.path]),
        "TORCHINDUCTOR_CACHE_DIR": cache,
    }
    worker = ROOT / "tests" / "support" / "workers" / "on_fake_cuda.py"
    done = subprocess.run(
        [sys.executable, str(worker), str(step[1]), step[0], *(["90"] if step[1] == FEW else ["80", "90", "100"])],
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class TestWithoutADevice:
    pytestmark = needs_fakes

    @pytest.mark.parametrize("how", ["none", "auto"])
    def test_what_a_step_moves(
        self, told: dict[str, Any], step: tuple[str, int], how: str, golden: Callable[[str, str], None]
    ) -> None:
        model, layers = step
        name = "" if step == ("gpt2", ALL) else f"_{layers}_layers" if model == "gpt2" else f"_{model}"
        golden(f"cuda_cost/{how}{name}", told[how]["text"])

    def test_no_product_is_unaligned(self, told: dict[str, Any]) -> None:
        assert all("\n0 products with a side" in told[how]["text"] for how in ("none", "auto"))

    @pytest.mark.parametrize("step", STEPS[1:], indirect=True)
    def test_the_model_gives_what_the_documents_say(self, told: dict[str, Any], step: tuple[str, int]) -> None:
        """Measured: 112.1 and 94.3 ms of GPT-2 large, 138.7 ms of the Llama (docs/performance.md)."""
        most = {"gpt2": (110, 93.5), "llama": (math.inf, 150)}[step[0]]
        assert told["none"]["ms"] < most[0]
        assert told["auto"]["ms"] < most[1]

    def test_the_loss_moves_its_logits_three_times(self, told: dict[str, Any], step: tuple[str, int]) -> None:
        """Two readings, and the gradient where they lay: 2.47 GB of GPT-2's (wanted 2.6); it was 9.9 in fp32."""
        rows, width = {"gpt2": (8 * 1024, 50304), "llama": (4 * 2048, 32000)}[step[0]]
        assert told["auto"]["loss"] == pytest.approx(3 * 2 * rows * width, rel=0.01)

    @pytest.mark.parametrize("step", STEPS[1:2], indirect=True)
    def test_a_step_moves_no_more_than_is_said(self, told: dict[str, Any]) -> None:
        """Also where a golden is written anew."""
        auto = told["auto"]
        assert auto["between"] <= 40e9
        assert auto["launches"] <= 1350
        assert auto["copied_after_attention"] <= 1.6e9
        assert auto["casts"] == 0
        assert auto["peak"] <= 24.5e9

    def test_eight_ranks_send_as_before_and_wait_for_little(self, told: dict[str, Any], step: tuple[str, int]) -> None:
        """Each layer's three buckets are gathered for the forward and for the backward, and reduced once."""
        model, layers = step
        sent = told["of_eight"]["sent"]
        if model == "gpt2":
            assert sent == {"all_gather": 6 * layers + 4, "reduce_scatter": 3 * layers + 3, "all_reduce_small": 1}
        assert told["of_eight"]["exposed_ms"] <= 2

    @pytest.mark.parametrize("step", STEPS[1:], indirect=True)
    def test_the_planned_peak_is_the_recorded_one(self, told: dict[str, Any], step: tuple[str, int]) -> None:
        """What lived on an H200 at most. The Llama's was planned 13 % too high: its norms were taken apart."""
        size = {"gpt2": "gpt2_large", "llama": "llama_1b"}[step[0]]
        record = json.loads((ROOT / "benchmarks" / "results" / f"gpu_{size}_h200.json").read_text())
        recorded = record["sizes"][size]["rows"]["fzero3_compiled"]["live_peak_bytes"]
        assert told["auto"]["peak"] == pytest.approx(recorded, rel=0.005)

    def test_it_is_cudas_program(self, told: dict[str, Any]) -> None:
        assert told["none"]["attention"] == [
            "aten._scaled_dot_product_cudnn_attention.default",
            "aten._scaled_dot_product_cudnn_attention_backward.default",
        ]
        assert "cuda:0" in told["none"]["devices"]
        assert "device" not in told["none"]["choices"]

    def test_clusters_are_kernels_that_fit_and_are_not_tuned_by_time(self, told: dict[str, Any]) -> None:
        """At most 128 registers, and no stack, but for large angles of a sine. How a row is summed is decided by rule:
        ranks that time it differ in bits. What holds a row of a norm loads whole vectors."""
        assert told["kernels"]
        for one in told["kernels"]:
            assert one["stack"] == 0 or "_sin" in one["kernel"] or "_cos" in one["kernel"], one
            assert one["registers"] <= 128, one
            assert one["kind"] == "POINTWISE" or one["configurations"] == 1, one
        norms = [one for one in told["kernels"] if "norm" in one["kernel"] and one["kind"] != "POINTWISE"]
        assert all(one["loads"] == one["vectors"] for one in norms), norms

    def test_depth_adds_no_cluster(self, told: dict[str, Any]) -> None:
        assert told["auto"]["clusters"] == told["clusters_of_two_layers"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a device")
@pytest.mark.parametrize("built_for", ["cpu", "cuda"])
def test_the_processors_program_is_not_given_in_silence(built_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA names that as its accelerator, device or not."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(built_for))
    spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).sum(), optimizer=fzero.optim.sgd(0.1), device="cuda")
    lowered = fzero.lower(spec, {"w": torch.empty(4, 4)}, torch.empty(2, 4))
    assert "fzero fake-cuda SCRIPT" in lowered.choices["device"]
    with pytest.raises(fzero.FzeroError, match="fzero fake-cuda SCRIPT"):
        lowered.roofline(by_inductor=True)
