"""The package as pip installs it: wheel and sdist, each extra alone in a fresh environment, and what it is for.

Needs an index that pip reaches, with the torch of constraints.txt. An environment takes half a minute and 1 GB, and is
removed after its test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
STEP = """
import torch, fzero
missing = [name for name in fzero.__all__ if not hasattr(fzero, name)]
assert not missing, missing
spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=fzero.optim.adamw(0.1), zero=3)
state = fzero.step(fzero.init({"w": torch.ones(4, 1)}, spec), torch.randn(8, 4))
assert float(state.metrics["loss"]) > 0
"""
USES = {  # extra: what it is for
    "": STEP,
    "examples": "import rich.progress, matplotlib.figure\n" + STEP,
    "hf": """
from transformers import LlamaConfig, LlamaForCausalLM
import accelerate, torch, fzero
from fzero.interop import Trainer, TrainingArguments, export_safetensors, from_module
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
params, buffers, apply = from_module(LlamaForCausalLM(config))
loss = lambda p, x: apply(p, buffers, input_ids=x, labels=x).loss
state = fzero.init(params, fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(0.1)))
export_safetensors(fzero.step(state, torch.ones(2, 8, dtype=torch.int64)), "model", tied=apply, config=config)
LlamaForCausalLM.from_pretrained("model")
""",
    "config": """
from pathlib import Path
from fzero.interop import accelerate_config
Path("a.yaml").write_text("distributed_type: FSDP\\nnum_processes: 2\\nfsdp_config: {fsdp_version: 2}\\n")
assert accelerate_config("a.yaml")["zero"] == 3
""",
    "bench": "import deepspeed, rich, matplotlib\n" + STEP,
    "test": "import pytest, hypothesis, expecttest, transformers, peft, nbclient\n" + STEP,
    "docs": "import sphinx, furo, myst_parser\n" + STEP,
    "dev": "import ruff, mypy.api, importlinter, pre_commit\n" + STEP,
}


def ran(*command: str | Path, cwd: Path) -> str:
    """What a command printed, on a machine that does not know this checkout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RANK", "WORLD_SIZE"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and an sdist of the files that git knows, by the backend that pyproject.toml names."""
    tmp = tmp_path_factory.mktemp("built")
    ran("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", tmp / "checkout", cwd=tmp)
    ran(sys.executable, "-m", "venv", tmp / "venv", cwd=tmp)
    got = subprocess.run([tmp / "venv/bin/pip", "install", "-q", "hatchling"], capture_output=True, check=False)
    if got.returncode:
        pytest.skip("pip reaches no index from here")
    ran(tmp / "venv/bin/python", "-m", "hatchling", "build", "-d", tmp / "dist", cwd=tmp / "checkout")
    return tmp / "dist"


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_every_extra_has_a_use() -> None:
    assert set(USES) - {""} == set(project()["optional-dependencies"])


def test_wheel_and_sdist_hold_what_they_should(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {name for name in tracked if name.startswith("fzero/")}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked if name and not name.startswith((".ci/", ".github/"))} <= packed


@pytest.mark.parametrize("extra", USES, ids=lambda extra: extra or "none")
def test_an_extra_alone_in_a_fresh_environment(built: Path, tmp_path: Path, extra: str) -> None:
    (wheel,) = built.glob("*.whl")
    python = tmp_path / "venv" / "bin" / "python"
    ran(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    named = f"fzero[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    try:
        ran(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", named, cwd=tmp_path)
        ran(python, "-m", "pip", "check", cwd=tmp_path)
        ran(python, "-c", USES[extra], cwd=tmp_path)
        assert f"fzero {project()['version']}" in ran(python.with_name("fzero"), "version", cwd=tmp_path)
        if not extra:
            assert "fzero can run here" in ran(python.with_name("fzero"), "doctor", cwd=tmp_path)
    finally:
        shutil.rmtree(tmp_path / "venv")


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, sdist, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert {n: zipfile.ZipFile(again).read(n) for n in zipfile.ZipFile(again).namelist() if n.startswith("fzero/")} == {
        n: zipfile.ZipFile(wheel).read(n) for n in zipfile.ZipFile(wheel).namelist() if n.startswith("fzero/")
    }
