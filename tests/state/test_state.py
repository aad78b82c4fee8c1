"""state: whole tensors written into a state's leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values
from torch import Tensor

import fzero
from fzero import P
from fzero.errors import DonatedError, TreeError

WAYS: list[dict[str, Any]] = [
    {"zero": 3, "precision": "bf16"}, {"zero": 1, "offload": "optimizer+params"},
    {"mesh": {"tp": 2}, "shard": {"w": P(None, "tp")}}, {"mesh": {"pp": 2}, "microbatches": 2},
]  # fmt: skip


def params(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(8, 6, generator=draw), "layers": [torch.randn(6, 6, generator=draw) for _ in range(2)]}


def loss(p: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x @ p["w"])
    for layer in p["layers"]:
        x = torch.tanh(x @ layer)
    return x.square().mean()


def spec(**given: Any) -> fzero.Spec:
    return fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **given)


def stepped(state: fzero.State) -> Any:
    return fzero.unshard(fzero.step(state, torch.linspace(-1, 1, 32).view(4, 8)).params)


def ways() -> list[tuple[bool, Any, Any]]:
    """Of each way: whether what was written is read, and what a step makes of it and of a state that began with it."""
    found = []
    for given in WAYS:
        state, other = fzero.init(params(0), spec(**given)), params(1)
        stepped_once = fzero.step(state, torch.ones(4, 8))
        for leaf, value in zip((stepped_once.params["w"], *stepped_once.params["layers"]),
                               (other["w"], *other["layers"]), strict=True):  # fmt: skip
            assert leaf.copy_(value) is leaf
        whole = fzero.unshard(stepped_once.params)
        read = torch.equal(whole["w"], other["w"]) and torch.equal(whole["layers"][1], other["layers"][1])
        found.append((read, stepped(stepped_once), stepped(fzero.init(params(1), spec(**given)))))
    return found


def test_a_whole_tensor_is_what_the_next_step_reads() -> None:
    for found in values(gloo(2, ways)):
        for read, after, wanted in found:
            assert read
            assert torch.equal(after["w"], wanted["w"])
            assert torch.equal(after["layers"][0], wanted["layers"][0])


def test_zeros_are_written_too() -> None:
    state = fzero.init(params(0), spec())
    assert not state.params["w"].copy_(torch.zeros(8, 6)).full().any()


def of_layers(p: Any, x: Tensor) -> Tensor:
    for w in p["blocks"]:
        x = torch.tanh(x @ w)
    return x.square().mean()


def written_on_disk(folder: str) -> list[str]:
    given = {"optimizer": fzero.optim.sgd(0.1), "mesh": {"pp": 2}, "offload": {"**": "nvme"}, "nvme_path": folder}
    state = fzero.init({"blocks": [torch.eye(4), torch.eye(4)]}, fzero.Spec(loss=of_layers, **given))  # type: ignore[arg-type]
    said = []
    for leaf in state.params["blocks"]:
        with pytest.raises(TreeError) as caught:
            leaf.copy_(torch.zeros(4, 4))
        said.append(str(caught.value))
    return said


def test_a_leaf_on_disk_is_refused_by_roles_that_do_not_hold_it(tmp_path: Path) -> None:
    """Ranks that went on would wait for those that raised."""
    first, second = values(gloo(2, written_on_disk, str(tmp_path)))
    assert first == second
    assert all("lies on disk" in one for one in first)


@pytest.mark.parametrize("value", [torch.zeros(6, 8), torch.zeros(8, 6, dtype=torch.float64), [0.0]])
def test_what_is_no_such_tensor_is_refused(value: Any) -> None:
    leaf = fzero.init(params(0), spec()).params["w"]
    with pytest.raises(
        TreeError, match=r"state\['params/w'\].copy_: needed a tensor \[8, 6\] torch.float32, the whole"
    ):
        leaf.copy_(value)


def test_leaves_that_have_no_whole_are_refused(tmp_path: Path) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return state, {}

    own = fzero.init({"h": fzero.per_rank(torch.zeros(3))}, fzero.Spec(step=step))
    with pytest.raises(TreeError, match=r"differs by rank. Write this rank's part: .local.copy_\(x\)"):
        own.tree["h"].copy_(torch.zeros(1, 3))
    on_disk = fzero.init(params(0), spec(offload={"params/w": "nvme"}, nvme_path=str(tmp_path)))
    with pytest.raises(TreeError, match="lies on disk, which only steps and"):
        on_disk.params["w"].copy_(torch.zeros(8, 6))
    old = fzero.init(params(0), spec())
    fzero.step(old, torch.ones(4, 8))
    with pytest.raises(DonatedError, match="params/w"):
        old.params["w"].copy_(torch.zeros(8, 6))


def test_leaves_are_keys_of_a_dict_as_tensors_are() -> None:
    """They raised "unhashable type: 'Session'"."""
    state = fzero.init(params(0), spec())
    seen = {leaf: leaf.path for leaf in (state.params["w"], *state.params["layers"])}
    assert len(seen) == 3
    assert seen[state.params["w"]] == "params/w"
    assert state.params["layers"][0] != state.params["layers"][1]
