"""Real processes on a grid, for long: 20 steps end in the bits of no pipeline, and checkpoints go between meshes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from helpers import gloo, same_bits, values
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.interop import export_safetensors, from_module

pytestmark = pytest.mark.acceptance

VOCAB, SEQUENCE, STEPS = 64, 16, 20
INIT, LOSS = cases.gpt(VOCAB, 64, 4, 2)
ADAMW = optim.adamw(1e-2)
OPTIMIZERS = {
    "adamw": ADAMW,
    "muon": optim.muon(0.02, others=ADAMW),
    "8-bit": optim.adamw8bit(1e-2),
}


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, SEQUENCE, VOCAB, rank + 10 * step)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": LOSS, "optimizer": ADAMW, "microbatches": 4, "reduce": "end", "clip_norm": 0.5, "zero": 1}
    return fzero.Spec(**{**made, **given})


def place(state: fzero.State) -> int:
    return state.runtime.plan.mesh.data_rank(state.runtime.rank)


def leaves(state: fzero.State) -> dict[str, Tensor]:
    paths, found, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, found, strict=True))


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [path for path in a if not same_bits(a[path], b[path])]


# --- 20 steps ---------------------------------------------------------------------------------------------------------


def trained(runs: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Of each run, in these processes: the leaves after 20 steps, and the losses."""
    torch.set_num_threads(1)
    found = []
    for given in runs:
        named = {**given, "optimizer": OPTIMIZERS[given["optimizer"]]}
        state = fzero.init(INIT, spec(**named), key=fzero.random.key(0))
        losses = []
        for number in range(STEPS):
            state = fzero.step(state, tokens(place(state), number))
            losses.append(float(state.metrics["loss"]))
        found.append((leaves(state), losses))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_have_the_bits_of_no_pipeline(optimizer: str, precision: str) -> None:
    given = {"optimizer": optimizer, "precision": precision}
    (plain,) = values(gloo(2, trained, [given]))[0]
    grids = [{**given, "mesh": {"pp": 2, "dp": 2}, "pipeline": schedule} for schedule in ("1f1b", "zb-v")]
    for rank in values(gloo(4, trained, grids)):
        for piped in rank:
            assert piped[1] == plain[1]
            assert differing(piped[0], plain[0]) == []


# --- checkpoints between meshes ---------------------------------------------------------------------------------------

MESHES: dict[str, tuple[int, dict[str, Any]]] = {  # (ranks, fields of the spec)
    "grid": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": "1f1b"}),
    "data": (2, {"mesh": {"dp": 2}}),
    "roles": (2, {"mesh": {"pp": 2, "dp": 1}, "pipeline": "zb-h1"}),
    "one": (1, {"mesh": {"dp": 1}}),
}


def gone_on(name: str, folder: str, until: int) -> dict[str, Tensor]:
    """Goes on from the last save to step `until`; saves every second step in the background."""
    torch.set_num_threads(1)
    with fzero.Checkpointer(folder, every=2, background=True) as saver:
        state = saver.resume(INIT, spec(**MESHES[name][1], zero=3), key=fzero.random.key(0))
        while state.step < until:
            state = fzero.step(state, tokens(place(state), state.step))
            saver.after(state)
    return leaves(state)


def on(name: str, folder: Path, until: int) -> dict[str, Tensor]:
    ranks = values(gloo(MESHES[name][0], gone_on, name, str(folder), until))
    assert all(differing(rank, ranks[0]) == [] for rank in ranks)
    return ranks[0]


def test_a_run_goes_on_on_other_meshes(tmp_path: Path) -> None:
    """Begun on a grid, it goes on without a pipeline as if it had never had one; and on roles alone, as on one rank."""
    on("grid", tmp_path / "run", 4)
    assert differing(on("data", tmp_path / "run", 8), on("data", tmp_path / "straight", 8)) == []
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    assert differing(on("roles", tmp_path / "run", 12), on("one", tmp_path / "alone", 12)) == []


def moved(name: str, source: str, target: str) -> dict[str, Tensor]:
    """The state as a mesh loads it and saves it again."""
    torch.set_num_threads(1)
    state = fzero.load(source, spec(**MESHES[name][1], zero=3), like=INIT(fzero.random.key(0)))
    fzero.save(state, target)
    return leaves(state)


def test_a_state_travels_between_meshes_and_back(tmp_path: Path) -> None:
    before = on("data", tmp_path / "0", 2)
    for number, name in enumerate(("roles", "grid", "data", "one")):
        given = (name, str(tmp_path / str(number)), str(tmp_path / str(number + 1)))
        for rank in values(gloo(MESHES[name][0], moved, *given)):
            assert differing(rank, before) == [], name


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def exported(given: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Trains a Llama for two steps on a mesh, and exports it."""
    torch.set_num_threads(1)
    model = llama()
    params, buffers, apply = from_module(model)

    def loss(p: Any, b: Any) -> Tensor:
        return apply(p, buffers, input_ids=b["x"], labels=b["x"]).loss

    state = fzero.init(params, spec(**given, loss=loss, zero=3))
    for number in range(2):
        state = fzero.step(state, tokens(place(state), number))
    export_safetensors(state, folder, config=model.config)
    return dict(zip(*tree.flatten(fzero.unshard(state.params))[:2], strict=True))


def test_a_llama_trained_on_a_grid_is_read_by_transformers(tmp_path: Path) -> None:
    plain = values(gloo(2, exported, MESHES["data"][1], str(tmp_path / "plain")))[0]
    for rank in values(gloo(4, exported, MESHES["grid"][1], str(tmp_path / "grid"))):
        assert differing(rank, plain) == []
    again = type(llama()).from_pretrained(tmp_path / "grid")
    assert differing({path: value.detach() for path, value in again.named_parameters()}, plain) == []
