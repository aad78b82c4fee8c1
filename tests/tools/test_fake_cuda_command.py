"""`fzero fake-cuda`: the ops that torch takes on an H100; of attention beside torch's own numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from workers import ops_on_fake_cuda as worker

from fzero import cli
from fzero._torch_compat.device_choices import _attention, _kernel
from fzero.tools import fake_cuda_command

ROOT = Path(__file__).parents[2]
needs_fakes = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="it needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="it needs a torch without CUDA"),
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is of Linux"),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5, 8), torch.float32), ((2, 3, 5, 8), torch.float64), ((2, 3, 5, 7), torch.float32), ((5, 8), torch.float32)],
    ids=["three dims", "64 bits", "odd width", "two dims"],
)
def test_plain_products_where_no_kernel_takes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Three dims ended in an IndexError of the memory-efficient kernel's backward."""
    q, k, v = (torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(
        _attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_a_kernel_where_one_does() -> None:
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_efficient_attention"):
        _attention(*torch.randn(3, 2, 3, 5, 8))


@pytest.mark.parametrize("given", [["-m", "fzero", "version"], ["a.py", "--", "-x"], ["--", "-c", "1"], ["-c", "1"]])
def test_what_follows_is_pythons(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The complaint: `fzero fake-cuda -m fzero explain ...` was "unrecognized arguments: -m"."""
    ran = list[Any]()
    monkeypatch.setattr(fake_cuda_command, "environment", dict)
    monkeypatch.setattr(
        subprocess, "run", lambda args, **_: (ran.append(args), subprocess.CompletedProcess(args, 3))[1]
    )
    assert cli.main(["fake-cuda", *given]) == 3
    assert ran == [[sys.executable, *(given[1:] if given[0] == "--" else given)]]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the worker told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FZERO_CACHE", str(ROOT / "runs" / "standin"))
        env = fake_cuda_command.environment()
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    worker = ROOT / "tests" / "support" / "workers" / "ops_on_fake_cuda.py"
    done = subprocess.run([sys.executable, str(worker)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def ops(told: dict[str, Any]) -> dict[str, list[str]]:
    """Of losses, by name."""
    found: dict[str, list[str]] = told["ops"]
    return found


ATTENTION = {
    "attention": "cudnn",
    "shared heads": "cudnn",
    "mask": "cudnn",
    "mask with a gradient": "efficient",
    "wide": "flash",
    "autocast": "cudnn",
}


class TestOps:
    pytestmark = needs_fakes

    @pytest.mark.parametrize(("case", "kernel"), ATTENTION.items())
    def test_attention(self, ops: dict[str, list[str]], case: str, kernel: str) -> None:
        """A mask, or heads that share k and v, were taken from cuDNN's kernel. Autocast was switched off."""
        names = {f"aten._scaled_dot_product_{kernel}_attention{half}.default" for half in ("", "_backward")}
        assert {name for name in ops[case] if "attention" in name} == names

    def test_a_tensor_of_another_device_names_the_remedy(self, ops: dict[str, list[str]]) -> None:
        assert "ops_on_fake_cuda.py" in ops["closed over"][0]
        assert "move it to Spec.device first, or give it in the state or the batch" in ops["closed over"][0]

    def test_a_library_asks_for_the_capability(self, ops: dict[str, list[str]]) -> None:
        """Transformers' mixtures of experts do."""
        assert "aten.tanh.default" in ops["capability"]

    def test_what_is_switched_off_is_not_taken(self, ops: dict[str, list[str]]) -> None:
        assert not any("attention" in name for name in ops["dropout by products"])

    def test_attention_that_drops_weights_is_products(self, ops: dict[str, list[str]]) -> None:
        """A fused kernel's own draws were refused, so that BERT could not be trained as it is configured."""
        assert ops["dropout"] == ops["dropout by products"]
        assert {"aten.bmm.default", "aten.native_dropout_backward.default"} <= {*ops["dropout in a layer"]}

    def test_the_device_by_name_is_the_one_that_there_is(self, ops: dict[str, list[str]]) -> None:
        """A copy to "cuda" from "cuda:0"."""
        assert "aten._to_copy.default" not in ops["the device by name"]

    def test_a_cell_is_one_kernel(self, ops: dict[str, list[str]]) -> None:
        assert {"aten._thnn_fused_gru_cell.default", "aten._thnn_fused_gru_cell_backward.default"} <= {*ops["gru cell"]}
        assert "aten._thnn_fused_lstm_cell.default" in ops["lstm cell"]  # torch's rule of its shapes asks for biases

    def test_attention_in_vmap_is_a_kernel(self, ops: dict[str, list[str]]) -> None:
        """It was products, in a process of `fzero fake-cuda` too."""
        assert "aten._scaled_dot_product_efficient_attention.default" in ops["attention, vmap"]

    def test_an_op_without_a_rule_of_shapes(self, ops: dict[str, list[str]]) -> None:
        """Torch runs its kernel on zeros: "Torch not compiled with CUDA enabled"."""
        assert "aten.multi_margin_loss_backward.default" in ops["margin"]
        assert {"fzero.ctc_loss.default", "aten._ctc_loss_backward.Tensor"} <= {*ops["ctc"]}


def test_a_kernel_that_is_switched_off() -> None:
    q, k, v = torch.empty(3, 2, 3, 5, 8, dtype=torch.bfloat16)
    on = torch.backends.cuda
    before = on.cudnn_sdp_enabled(), on.flash_sdp_enabled()
    try:
        found = [_kernel(q, k, v, None, True)]
        on.enable_cudnn_sdp(False)
        found.append(_kernel(q, k, v, None, True))
        on.enable_flash_sdp(False)
        found.append(_kernel(q, k, v, None, True))
    finally:
        on.enable_cudnn_sdp(before[0])
        on.enable_flash_sdp(before[1])
    assert found == ["cudnn", "flash", "efficient"]


ANSWERED_BY_THE_DEVICE = {
    "the device by name",
    "ctc",
    "dropout by products",
    "capability",
    "closed over",
    "dropout",
    "dropout in a layer",
}


class TestElsewhere:
    """Traced on the processor, and moved: as this process does, without a device."""

    pytestmark = needs_fakes

    @pytest.mark.parametrize("case", sorted(worker.LOSSES.keys() - ANSWERED_BY_THE_DEVICE))
    def test_losses_have_the_devices_ops(self, ops: dict[str, list[str]], case: str) -> None:
        assert worker.ops(worker.LOSSES[case]) == ops[case]

    @pytest.mark.parametrize("how", worker.SPECS)
    @pytest.mark.parametrize("name", worker.MODELS)
    def test_programs_are_those_of_fake_tensors_of_the_device(self, told: dict[str, Any], name: str, how: str) -> None:
        """The complaint: where there was no device a plan had the processor's ops, and a Llama 16 % too much memory."""
        assert worker.program(name, worker.SPECS[how]) == told["programs"][f"{name}, {how}"]
