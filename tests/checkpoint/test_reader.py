"""Reading what is damaged: any flipped bit, a shard that is not what was committed, a device that fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_bits, start
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Quick, flat, noise, write

import fzero
from fzero import tree
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.errors import CheckpointError, CorruptError, DonatedError
from fzero.state import storage
from fzero.training import training_of


def sgd_spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), **options)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with several blocks in a shard."""
    spec = sgd_spec()
    paths, leaves = start(spec, {"w": torch.zeros(2_200_000), "x": torch.zeros(64)})
    plan = plan_for(spec, paths, [noise(x, i) for i, x in enumerate(leaves)], (), mesh_of(spec, 2))
    memory = [storage.shards(plan, [noise(x, i) for i, x in enumerate(leaves)], rank) for rank in range(2)]
    treedef = tree.flatten(training_of(spec).init({"w": leaves[-2], "x": leaves[-1]}, None))[2]
    return write(tmp_path_factory.mktemp("pieces"), plan, memory, treedef)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_found(pieces: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(pieces.iterdir())))
    place, bit = data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(st.integers(0, 7))
    with open(file, "r+b", buffering=0) as raw:
        raw.seek(place)
        was = raw.read(1)
        raw.seek(place)
        raw.write(bytes([was[0] ^ 1 << bit]))
        try:
            with pytest.raises(CorruptError) as caught:
                fzero.load(pieces, sgd_spec(), disk=Quick())
        finally:
            raw.seek(place)
            raw.write(was)
    blamed = ("COMMITTED",) if file.name in ("COMMITTED", "manifest.json") else (file.name,)
    assert Path(caught.value.file).name in blamed


def broken(pieces: Path, how: str) -> None:
    shard = pieces / "shard-00001.safetensors"
    if how == "missing":
        shard.unlink()
    elif how == "truncated":
        with open(shard, "r+b") as raw:
            raw.truncate(shard.stat().st_size - 1)
    elif how == "longer":
        with open(shard, "ab") as raw:
            raw.write(b"\0")
    elif how == "a link":
        other = shard.with_name("elsewhere")
        shard.rename(other)
        shard.symlink_to(other)
    elif how == "another's":
        shard.write_bytes((pieces / "shard-00000.safetensors").read_bytes())
    elif how == "an absurd header":
        data = bytearray(shard.read_bytes())
        data[:8] = (1 << 60).to_bytes(8, "little")
        shard.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "a link", "another's", "an absurd header"])
def test_a_shard_that_is_not_what_was_committed(pieces: Path, how: str, tmp_path: Path) -> None:
    copy = tmp_path / pieces.name
    copy.mkdir()
    for file in pieces.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    state = fzero.load(copy, sgd_spec())
    before = flat(state)
    broken(copy, how)
    with pytest.raises(CorruptError, match=r"shard-00001\.safetensors: "):
        fzero.load(copy, sgd_spec())
    with pytest.raises(CorruptError, match=r"shard-00001\.safetensors: "):
        fzero.load(copy, like=state)
    if how != "an absurd header":  # seen before anything was written
        assert all(same_bits(x, before[path]) for path, x in flat(state).items())
    else:
        with pytest.raises(DonatedError, match=r"is unusable: fzero\.load failed after it began to write"):
            flat(state)
        with pytest.raises(DonatedError, match="Load another checkpoint, or start again"):
            fzero.step(state, torch.ones(1, 2_200_000))


class Failing(Quick):
    """Reading a block of the second shard fails, as a bad device does."""

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        if kind == "read" and path.name == "shard-00001.safetensors":
            raise OSError(errno.EIO, "as a bad device says")
        return super().run(kind, path, call)


def test_a_device_that_fails_names_the_file(pieces: Path) -> None:
    state = fzero.load(pieces, sgd_spec())
    for ask in (
        lambda: fzero.load(pieces, sgd_spec(), disk=Failing()),
        lambda: fzero.load(pieces, like=state, disk=Failing()),
    ):
        with pytest.raises(
            CheckpointError, match=r"shard-00001\.safetensors: read failed: .*the device failed \(EIO\)"
        ):
            ask()
    with pytest.raises(DonatedError, match="is unusable"):
        flat(state)
