"""Checkpoints of torch.distributed.checkpoint: written, read, and no code of a file runs."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from exchanged import Payload, Stored, Tied, same, tied, trained
from helpers import gloo, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.errors import CheckpointError, CorruptError
from fzero.interop import (
    _unpickle,
    dcp,
    dcp_folder,
    export_dcp,
    fitted,
)
from fzero.interop.dcp_folder import Chunk
from fzero.interop.dcp_folder import DcpFolder as DcpFolder
from fzero.interop.file_places import FilePlace
from fzero.state import storage
from fzero.state.source import Entry


def test_dcp_loads_what_is_exported(tmp_path: Path) -> None:
    state, (_, apply) = trained(), tied()
    export_dcp(state, tmp_path / "params", tied=apply, write_tied=True)
    model = Tied()
    held = model.state_dict()
    torch_dcp.load(held, checkpoint_id=str(tmp_path / "params"), no_dist=True)
    assert same({name: held[name] for name in fzero.unshard(state.params)}, fzero.unshard(state.params))
    export_dcp(state, tmp_path / "all", part="", dtype=torch.float64)
    everything = {
        "params.embed.weight": torch.zeros(13, 7, dtype=torch.float64),
        "opt_state.nu.embed.weight": torch.zeros(13, 7, dtype=torch.float64),
        "opt_state.count": torch.zeros((), dtype=torch.int64),
    }
    torch_dcp.load(everything, checkpoint_id=str(tmp_path / "all"), no_dist=True)
    assert everything["opt_state.count"] == 1
    assert same_bits(everything["opt_state.nu.embed.weight"], state.opt_state.nu["embed.weight"].full().double())


def sharded_by_torch(folder: Path) -> dict[str, Tensor]:
    """FSDP2's parameters after a step of AdamW, with its moments, and tensors cut in other ways; whole, they are
    returned."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    other = {
        "columns": distribute_tensor(torch.randn(4, 9), mesh, [Shard(1)]),
        "middle": distribute_tensor(torch.randn(3, 5, 2).bfloat16(), mesh, [Shard(1)]),
        "whole": distribute_tensor(torch.arange(5), mesh, [Replicate()]),
        "scalar": torch.tensor(2.5),
    }
    moments = {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()}
    saved = {"model": model.state_dict(), "nu": moments, "other": other, "step": 7}
    torch_dcp.save(saved, checkpoint_id=str(folder / "dcp"))
    flat = {f"{top}.{name}": x for top in ("model", "nu", "other") for name, x in saved[top].items()}
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in flat.items()}


@pytest.mark.acceptance
def test_what_fsdp_wrote_is_imported(tmp_path: Path) -> None:
    known = values(gloo(2, sharded_by_torch, tmp_path))[0]
    folder = DcpFolder(tmp_path / "dcp")
    assert folder.others == ["step"]
    for name, x in known.items():
        n = x.numel()
        for start, stop in ((0, n), (n // 3, n), (1, n - 1)):
            if start <= stop:
                assert same_bits(folder.read(name, start, stop), x.flatten()[start:stop]), name
    model = {name.removeprefix("model."): x for name, x in known.items() if name.startswith("model.")}
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.square().sum() for x in p.values()), optimizer=fzero.optim.sgd(0.1), zero=3
    )
    source = dcp(tmp_path / "dcp", model, part="model")
    assert same(fzero.unshard(fzero.init(source, spec).params), model)
    recipe = recipe_for(spec, source, None, torch.device("cpu"))
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh_of(spec, 3))
    leaves = [{f"params/{name}": x for name, x in model.items()}.get(leaf.path) for leaf in plan.leaves]
    whole = [torch.tensor(0) if x is None else x for x in leaves]  # the count
    for rank in range(3):  # each rank of another world reads its part
        memory = storage.shards(plan, [torch.zeros_like(x) for x in whole], rank)
        recipe.place(plan, rank, memory)
        assert same(memory, storage.shards(plan, whole, rank))
    with pytest.raises(CheckpointError, match="has no tensors in 'modle': it has model, nu, other"):
        dcp(tmp_path / "dcp", part="modle")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5)), max_size=4), st.data())
def test_a_box_lies_in_a_tensor_where_torch_puts_it(dims: list[tuple[int, int, int]], data: st.DataObject) -> None:
    offsets = tuple(offset for _, offset, _ in dims)
    sizes = tuple(size for size, _, _ in dims)
    shape = tuple(size + offset + more - 1 for size, offset, more in dims)
    whole = torch.zeros(shape, dtype=torch.int64)
    box = torch.arange(1, torch.Size(sizes).numel() + 1).view(sizes)
    whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = box
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = torch.zeros(whole.numel(), dtype=torch.int64)
    for at, here, count in Chunk(offsets, sizes, FilePlace(Path(), 0, sizes, torch.int64)).runs(shape, start, stop):
        found[at : at + count] = box.flatten()[here : here + count]
    assert torch.equal(found[start:stop], whole.flatten()[start:stop])
    assert not found[:start].any()
    assert not found[stop:].any()


@pytest.mark.parametrize("corners", [(0, 0), (0, 3), (1, 2), (0,)])
def test_chunks_that_do_not_cover_a_tensor_once_are_damage(corners: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(8))
    place = FilePlace(tmp_path / "bytes", 0, (2,), torch.float32)
    folder = object.__new__(DcpFolder)
    folder.path = tmp_path
    folder.tensors = {"w": (Entry((4,), torch.float32), [Chunk((at,), (2,), place) for at in corners])}
    with pytest.raises(CorruptError, match="the chunks of 'w' do not cover it once"):
        folder.read("w", 0, 4)


def test_a_malicious_metadata_does_not_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_dcp(fitted(Stored({"a": torch.ones(3)})), tmp_path / "dcp", part="")
    attack = pickle.dumps({"state_dict_metadata": Payload(tmp_path / "owned")})
    pickle.loads(attack)
    (tmp_path / "owned").rmdir()  # which shows that it works
    (folder / ".metadata").write_bytes(attack)
    with pytest.raises(CorruptError, match=r"\.metadata: it asks for posix\.mkdir, which is no part of torch's"):
        dcp(folder)
    with monkeypatch.context() as patch:
        patch.setattr(dcp_folder.pickled, "dcp_metadata", lambda *_: {"a": 1})  # as a child answers
        with pytest.raises(CorruptError, match=r"\.metadata: is not torch's metadata"):
            dcp(folder)
    for name in ("builtins.eval", "torch.load", "torch.distributed.checkpoint.metadata.os.system"):
        module, _, attribute = name.rpartition(".")
        (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
        with pytest.raises(_unpickle.UnpickleRefused, match=f"it asks for {name}"):
            list(_unpickle.dcp_metadata({"files": [str(folder / ".metadata")]}))
    for junk in (b"", b"\x80\x04", b"c", b"\x80\x04]\x94h\x00a."):
        (folder / ".metadata").write_bytes(junk)
        with pytest.raises(_unpickle.UnpickleRefused):  # the last is a list that holds itself
            list(_unpickle.dcp_metadata({"files": [str(folder / ".metadata")]}))
    assert not (tmp_path / "owned").exists()


def test_malicious_and_damaged_chunks_do_not_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_dcp(fitted(Stored({"a": torch.ones(3)})), tmp_path / "dcp", part="")
    (file,) = folder.glob("*.distcp")
    torch.save(Payload(tmp_path / "owned"), tmp_path / "attack")
    attack = (tmp_path / "attack").read_bytes()
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.length = len(attack)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(attack)
    with pytest.raises(CorruptError, match=r"it asks for posix\.mkdir, which is not allowed: nothing was executed"):
        dcp(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../attack"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (known,) = _unpickle.dcp_metadata({"files": [str(folder / ".metadata")]})
    monkeypatch.setattr(dcp_folder.pickled, "_asked", lambda *_: [known])  # as a child answers
    with pytest.raises(CorruptError, match=r"names the file '../attack'"):
        dcp(folder)
    assert not (tmp_path / "owned").exists()
