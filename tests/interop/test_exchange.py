"""The checkpoints of others: what is read is what was written, bit for bit, a tensor at a time, and no code runs."""

import ctypes
import json
import os
import pickle
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from helpers import gloo, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fzero
from fzero import cli
from fzero.checkpoint.disk import Disk
from fzero.compile.step import plan_for, recipe_for
from fzero.errors import CheckpointError, CorruptError, MismatchError, TreeError
from fzero.interop import (
    _unpickle,
    dcp,
    deepspeed,
    export_dcp,
    export_safetensors,
    fitted,
    from_module,
    pickled,
    safetensors,
    write_checkpoint,
)
from fzero.interop.dcp_folder import Chunk
from fzero.interop.dcp_folder import Folder as DcpFolder
from fzero.interop.huggingface import Folder, split
from fzero.interop.places import Place
from fzero.state import storage
from fzero.state.source import Entry

MIB = 1 << 20


class Tied(nn.Module):
    """Odd sizes, a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tied() -> tuple[dict[str, Tensor], fzero.interop.Apply]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        params, _, apply = from_module(Tied())
    return params, apply


def spec_of(apply: fzero.interop.Apply, zero: int = 3, **options: Any) -> fzero.Spec:
    return fzero.Spec(
        loss=lambda p, b: apply(p, {}, b), optimizer=fzero.optim.adamw(1e-2), zero=zero, bucket_bytes=512, **options
    )


def ids(rank: int = 0) -> Tensor:
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(rank))


def trained(zero: int = 3) -> fzero.State:
    params, apply = tied()
    return fzero.step(fzero.init(params, spec_of(apply, zero)), ids())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def models() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    llama = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, max_position_embeddings=8, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return {"gpt2": lambda: transformers.GPT2LMHeadModel(gpt2), "llama": lambda: transformers.LlamaForCausalLM(llama)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.sampled(1)
def test_transformers_and_fzero_read_each_other(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models()[name]().eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=4000)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    known = {path: value.detach().clone() for path, value in model.named_parameters()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()  # so that what is compared below has come from the files
    params, buffers, apply = from_module(model)
    spec = fzero.Spec(
        loss=lambda p, b: apply(p, buffers, input_ids=b, labels=b).loss, optimizer=fzero.optim.adamw(1e-2), zero=3
    )
    state = fzero.init(safetensors(tmp_path / "theirs", params, tied=apply), spec)
    assert same(fzero.unshard(state.params), known)
    state = fzero.step(state, torch.arange(8).view(1, 8))
    export_safetensors(state, tmp_path / "ours", max_shard_bytes=4000, config=model.config)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    after = fzero.unshard(state.params)
    assert not same(after, known)
    again = type(model).from_pretrained(tmp_path / "ours")
    assert same({path: value.detach() for path, value in again.named_parameters()}, after)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == (name == "gpt2")


class Full(Disk):
    """A disk on which the third write fails."""

    writes = 0

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        self.writes += kind == "write"
        if kind == "write" and self.writes == 3:
            raise OSError(28, "No space left on device")
        return call()


def exported(folder: Path) -> tuple[list[tuple[dict[str, Tensor], dict[str, Tensor]]], str]:
    """On each rank: what was imported, and what was exported after a step, under two stages; and a failure."""
    params, apply = tied()
    found = []
    for zero in (1, 3):
        state = fzero.init(safetensors(folder / "start", params, tied=apply), spec_of(apply, zero))
        read = fzero.unshard(state.params)
        state = fzero.step(state, ids(torch.distributed.get_rank()))
        export_safetensors(state, folder / f"zero{zero}", max_shard_bytes=300)
        found.append((read, fzero.unshard(state.params)))
    try:
        export_safetensors(state, folder / "full", disk=Full())
    except fzero.FzeroError as error:
        ended = f"{type(error).__name__}: {error}"
    export_safetensors(state, folder / "again")  # the state, and the ranks' talk, are as before
    return found, ended


def test_two_ranks_import_and_export(tmp_path: Path) -> None:
    params, _ = tied()
    (tmp_path / "start").mkdir()
    save_file(params, tmp_path / "start" / "model.safetensors")
    (first, told), (second, heard) = values(gloo(2, exported, tmp_path))
    assert same(first[0][0], params)
    for number, zero in enumerate((1, 3)):
        read, after = first[number]
        assert same(read, params)
        assert not same(after, params)
        assert same(after, second[number][1])
        folder = Folder(tmp_path / f"zero{zero}")
        assert same({name: folder.read(name, 0, x.numel()).view(x.shape) for name, x in after.items()}, after)
    assert told.startswith("CheckpointError")
    assert "the disk is full" in told
    assert "rank 0 failed" in heard
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["again", "start", "zero1", "zero3"]  # and nothing of what failed


def test_a_tied_weight_is_read_under_either_name_or_both_if_equal(tmp_path: Path) -> None:
    params, apply = tied()
    other = {("head.weight" if name == "embed.weight" else name): value for name, value in params.items()}
    both = {**params, "head.weight": params["embed.weight"].clone()}
    for number, held in enumerate((params, other, both)):
        save_file(held, tmp_path / f"{number}.safetensors")
        state = fzero.init(safetensors(tmp_path / f"{number}.safetensors", params, tied=apply), spec_of(apply))
        assert same(fzero.unshard(state.params), params)
    assert set(safetensors(tmp_path / "1.safetensors", tied={"head.weight": "embed.weight"}).leaves) == set(params)
    both["head.weight"][3, 2] += 1e-7
    save_file(both, tmp_path / "differ.safetensors")
    with pytest.raises(MismatchError, match=r"'embed\.weight' and 'head\.weight' are one tied weight, but"):
        safetensors(tmp_path / "differ.safetensors", params, tied=apply)
    with pytest.raises(MismatchError, match=r"(?s)extra     head.weight float32\[13, 7\].*tied=apply"):
        safetensors(tmp_path / "2.safetensors", params)


def test_a_tied_weight_is_written_under_one_name_or_all(tmp_path: Path) -> None:
    state, (_, apply) = trained(), tied()
    export_safetensors(state, tmp_path / "one", tied=apply)
    export_safetensors(state, tmp_path / "all", tied=apply, write_tied=True)
    full = fzero.unshard(state.params)
    assert same(load_file(tmp_path / "one" / "model.safetensors"), full)
    assert same(load_file(tmp_path / "all" / "model.safetensors"), {**full, "head.weight": full["embed.weight"]})
    assert Tied().load_state_dict(load_file(tmp_path / "all" / "model.safetensors"))
    with open(tmp_path / "one" / "model.safetensors", "rb") as file:
        assert json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"] == {"format": "pt"}


def test_all_differences_are_in_one_error(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.bfloat16), "x": torch.zeros(1)},
        tmp_path / "model.safetensors",
    )
    like = {name: torch.zeros(2) for name in "abcd"}
    with pytest.raises(MismatchError) as caught:
        safetensors(tmp_path, like)
    for line in (
        "  missing   d\n",
        "  extra     x float32[1]\n",
        "  reshaped  b float32[3], the tree needs [2]\n",
        "  retyped   c bfloat16[2], the tree needs torch.float32",
        "dtype=torch.float32",
    ):
        assert line in str(caught.value)
    assert "  reshaped  a" not in str(caught.value)
    del like["d"]
    like["b"] = torch.zeros(3)
    with pytest.raises(MismatchError, match="extra     x"):
        safetensors(tmp_path, like, dtype=torch.float32)
    assert list(safetensors(tmp_path, like, dtype=torch.float32, strict=False).leaves) == ["a", "b", "c"]


def test_a_prefix_that_is_missing_is_said(tmp_path: Path) -> None:
    params, apply = tied()
    save_file({f"model.{name}": value for name, value in params.items()}, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"names=lambda path: 'model\.' \+ path"):
        safetensors(tmp_path, params)
    source = safetensors(tmp_path, params, names=lambda path: "model." + path)
    assert same(fzero.unshard(fzero.init(source, spec_of(apply)).params), params)


def test_names_lead_from_any_tree(tmp_path: Path) -> None:
    tree = {"blocks": [{"w": torch.randn(3, 5)}, {"w": torch.randn(4)}], "out": torch.randn(2).double()}
    names = {"out": "lm_head.weight"}
    spec = fzero.Spec(
        loss=lambda p, b: p["blocks"][0]["w"].sum(), optimizer=fzero.optim.sgd(0.1), trainable="blocks/0/**"
    )
    state = fzero.init(tree, spec)
    export_safetensors(state, tmp_path / "plain")
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == {"blocks.0.w", "blocks.1.w", "out"}
    export_safetensors(state, tmp_path / "named", names=names, dtype=torch.bfloat16)
    found = load_file(tmp_path / "named" / "model.safetensors")
    assert same_bits(found["lm_head.weight"], tree["out"].bfloat16())
    low = fzero.tree.map(lambda x: x.bfloat16(), tree)
    again = fzero.init(safetensors(tmp_path / "named", low, names=names), spec)
    assert same_bits(fzero.unshard(again.params)["blocks"][1]["w"], low["blocks"][1]["w"])
    wide = safetensors(tmp_path / "plain", names=None, dtype=torch.float64)
    assert same_bits(wide.read("blocks.0.w", 3, 9), tree["blocks"][0]["w"].flatten()[3:9].double())
    with pytest.raises(TreeError, match="both get the name 'x'"):
        export_safetensors(state, tmp_path / "twice", names=lambda path: "x")
    with pytest.raises(TreeError, match="names= needs like="):
        safetensors(tmp_path / "named", names=names)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(8, 120))
def test_shards_are_cut_as_huggingface_hub_cuts_them(sizes: list[int], limit: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"t{i}": torch.empty(n) for i, n in enumerate(sizes)}
    theirs = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    ours = split({name: Entry(tuple(x.shape), x.dtype) for name, x in tensors.items()}, limit)
    empty = [name for name, x in tensors.items() if not x.numel()]  # which share a storage there, and so a file
    where = {name: file for file, members in ours.items() for name in members}
    if len(empty) < 2:
        assert where == theirs.tensor_to_filename


def test_damaged_folders_are_typed_errors_that_name_the_file(tmp_path: Path) -> None:
    params, _ = tied()
    folder = export_safetensors(fitted(Stored(params)), tmp_path / "good", part="", max_shard_bytes=300)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["embed.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CorruptError, match=shard.name):
        safetensors(folder)
    shard.unlink()
    with pytest.raises(CorruptError, match=f"{shard.name}.*missing"):
        safetensors(folder)
    shard.write_bytes(whole)
    for file in ("../secret.safetensors", "/etc/passwd", "x", "", 3, None, "a/b.safetensors"):
        index["weight_map"]["embed.weight"] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptError, match=r"needed the plain name of a \*\.safetensors"):
            safetensors(folder)
    index["weight_map"] = {**index["weight_map"], "embed.weight": shard.name, "ghost": shard.name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="disagree about ghost"):
        safetensors(folder)
    (folder / "model.safetensors.index.json").write_text("[" * 5000)
    with pytest.raises(CorruptError, match="is no index"):
        safetensors(folder)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle"):
        safetensors(tmp_path / "old")
    with pytest.raises(CheckpointError, match="is not empty"):
        export_safetensors(fitted(Stored(params)), folder, part="")


def test_one_file_comes_before_the_index_of_an_earlier_save(tmp_path: Path) -> None:
    """As in transformers, which leaves the index there when it saves a model again, in one file."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00002.safetensors"}}')
    assert torch.equal(Folder(tmp_path).read("w", 0, 2), torch.ones(2))


def test_links_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert safetensors(tmp_path / "snapshot").read("a", 1, 3).tolist() == [1.0, 2.0]


class Stored:
    """Tensors as a source."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held
        self.leaves = {name: Entry(tuple(x.shape), x.dtype) for name, x in held.items()}

    def read(self, path: str, start: int, stop: int) -> Tensor:
        return self.held[path].flatten()[start:stop]

    check = fill = None


# --- memory -----------------------------------------------------------------------------------------------------------

LARGEST, COUNT, SLACK = 16 * MIB, 8, 8 * MIB  # the slack: code that is loaded on the way


def grown(call: Callable[[], Any]) -> int:
    """Bytes by which this process's memory grows at most while `call` runs, whatever it returns being kept."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    status = Path("/proc/self/status")

    def kib(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    kept = call()
    most = kib("VmHWM")
    del kept
    return (most - before) << 10


def streaming(folder: Path, what: str) -> int:
    spec = fzero.Spec(loss=lambda p, b: p["w0"].sum(), optimizer=fzero.optim.sgd(0.1), zero=3, transfers="p2p")
    if what == "init":
        fzero.init({"w0": torch.ones(2)}, spec)  # what is imported and cached only once
        held = LARGEST * COUNT // int(os.environ["WORLD_SIZE"])
        return grown(lambda: fzero.init(safetensors(folder), spec)) - held
    if what in ("live safetensors", "live dcp"):
        state = fzero.init(safetensors(folder), spec)
        export = export_safetensors if what == "live safetensors" else export_dcp
        return grown(lambda: export(state, folder / "out"))
    if what == "convert":
        return grown(lambda: export_safetensors(safetensors(folder), folder / "out", part="", dtype=torch.bfloat16))
    if what == "dcp":
        return grown(lambda: export_dcp(safetensors(folder), folder / "out", part=""))
    return grown(lambda: write_checkpoint(safetensors(folder), folder / "out"))


@pytest.mark.parametrize(
    ("what", "world"),
    [
        ("init", 2),
        ("live safetensors", 2),
        ("fzero", 1),
        *(pytest.param(*one, marks=pytest.mark.acceptance) for one in (("live dcp", 2), ("convert", 1), ("dcp", 1))),
    ],
)
def test_import_and_export_hold_few_of_the_largest_tensors(what: str, world: int, tmp_path: Path) -> None:
    save_file({f"w{i}": torch.full((LARGEST // 4,), float(i)) for i in range(COUNT)}, tmp_path / "model.safetensors")
    most = max(values(gloo(world, streaming, tmp_path, what)))
    print(f"{what}: {most / LARGEST:.2f} of the largest tensor")
    kept = 3 if "dcp" in what else 2  # torch's writer keeps a tensor until it has written the next one
    assert most <= kept * LARGEST + SLACK


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


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
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, 3)
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
    for at, here, count in Chunk(offsets, sizes, Place(Path(), 0, sizes, torch.int64)).runs(shape, start, stop):
        found[at : at + count] = box.flatten()[here : here + count]
    assert torch.equal(found[start:stop], whole.flatten()[start:stop])
    assert not found[:start].any()
    assert not found[stop:].any()


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


class Harmless:
    """A class that nobody has allowed."""


@pytest.mark.parametrize("corners", [(0, 0), (0, 3), (1, 2), (0,)])
def test_chunks_that_do_not_cover_a_tensor_once_are_damage(corners: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(8))
    place = Place(tmp_path / "bytes", 0, (2,), torch.float32)
    folder = object.__new__(DcpFolder)
    folder.path = tmp_path
    folder.tensors = {"w": (Entry((4,), torch.float32), [Chunk((at,), (2,), place) for at in corners])}
    with pytest.raises(CorruptError, match="the chunks of 'w' do not cover it once"):
        folder.read("w", 0, 4)


def test_a_malicious_metadata_does_not_execute(tmp_path: Path) -> None:
    folder = export_dcp(fitted(Stored({"a": torch.ones(3)})), tmp_path / "dcp", part="")
    attack = pickle.dumps({"state_dict_metadata": Payload(tmp_path / "owned")})
    pickle.loads(attack)
    (tmp_path / "owned").rmdir()  # which shows that it works
    (folder / ".metadata").write_bytes(attack)
    with pytest.raises(CorruptError, match=r"\.metadata: it asks for posix\.mkdir, which is no part of torch's"):
        dcp(folder)
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CorruptError, match=r"\.metadata: is not torch's metadata"):
        dcp(folder)
    for name in ("builtins.eval", "torch.load", "torch.distributed.checkpoint.metadata.os.system"):
        module, _, attribute = name.rpartition(".")
        (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'1'\ntR.".encode())
        with pytest.raises(_unpickle.Refused, match=f"it asks for {name}"):
            list(_unpickle.dcp_metadata({"files": [str(folder / ".metadata")]}))
    for junk in (b"", b"\x80\x04", b"c", b"\x80\x04]\x94h\x00a."):
        (folder / ".metadata").write_bytes(junk)
        with pytest.raises(_unpickle.Refused):  # the last is a list that holds itself
            list(_unpickle.dcp_metadata({"files": [str(folder / ".metadata")]}))
    assert not (tmp_path / "owned").exists()


def test_malicious_and_damaged_chunks_do_not_execute(tmp_path: Path) -> None:
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
    with pytest.raises(CorruptError, match=r"names the file '../attack'"):
        dcp(folder)
    assert not (tmp_path / "owned").exists()


# --- DeepSpeed --------------------------------------------------------------------------------------------------------

SHAPES = [{"a": (5, 3), "b": (7,)}, {"c": (2, 3, 2), "d": (1,)}]
FROZEN = {"f": (5,)}


def deepspeed_files(folder: Path, stage: int, world: int) -> dict[str, Tensor]:
    """A checkpoint as DeepSpeed's rules cut it, written independently of fzero; the tensors that are in it."""
    torch.manual_seed(stage)
    sizes = {name: shape for group in SHAPES for name, shape in group.items()}
    held = {f"{top}/{name}": torch.randn(shape) for top in ("params", "mu", "nu") for name, shape in sizes.items()}
    frozen = {name: torch.randn(shape).bfloat16() for name, shape in FROZEN.items()}
    folder.mkdir()
    tag = folder / "global_step9"
    tag.mkdir()
    (folder / "latest").write_text("global_step9")

    def cut(top: str, rank: int, lean: bool) -> list[Tensor]:
        parts = []
        for group in SHAPES:
            leaves = [held[f"{top}/{name}"].flatten() for name in group]
            if stage == 3:
                padded = [torch.cat([x, torch.zeros(-len(x) % world)]).view(world, -1)[rank] for x in leaves]
                parts.append(torch.cat(padded))
            else:
                flat = torch.cat(leaves)
                padding = -len(flat) % (2 * world)
                part = torch.cat([flat, torch.zeros(padding)]).view(world, -1)[rank].clone()
                parts.append(part[: len(part) - padding] if lean and rank == world - 1 else part)
        return parts

    for rank in range(world):
        moments = zip(cut("mu", rank, False), cut("nu", rank, False), strict=True)
        adam = {i: {"step": torch.tensor(4.0), "exp_avg": m, "exp_avg_sq": v} for i, (m, v) in enumerate(moments)}
        state: dict[str, Any] = {"zero_stage": stage, "loss_scaler": None}
        if stage == 3:
            state |= {"fp32_flat_groups": cut("params", rank, False), "partition_count": world}
            state["optimizer_state_dict"] = {"state": adam, "param_groups": []}
        else:
            state |= {"single_partition_of_fp32_groups": cut("params", rank, True), "partition_count": [world] * 2}
            state["base_optimizer_state"] = {"state": adam, "param_groups": []}
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": OrderedDict(dict.fromkeys(sizes, torch.zeros(0)) | frozen),
            "param_shapes": [OrderedDict((name, torch.Size(s)) for name, s in group.items()) for group in SHAPES],
            "buffer_names": [], "shared_params": {"tied": "a"}, "global_steps": 9, "tokens": 5, "ds_version": "x",
        }  # fmt: skip
        if stage == 3:
            padded = {name: torch.cat([x, x[:0].new_zeros(-len(x) % world)]) for name, x in frozen.items()}
            model["frozen_param_shapes"] = OrderedDict((name, torch.Size(s)) for name, s in FROZEN.items())
            model["frozen_param_fragments"] = {n: x.view(world, -1)[rank].clone() for n, x in padded.items()}
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, tag / "mp_rank_00_model_states.pt")
    return {**held, **{f"params/{name}": x.float() for name, x in frozen.items()}}


@pytest.mark.parametrize(
    ("stage", "world"),
    [(2, 3), (3, 3), *(pytest.param(*one, marks=pytest.mark.acceptance) for one in ((1, 2), (3, 1)))],
)
@pytest.mark.sampled(1)
def test_masters_and_moments_come_from_deepspeeds_partitions(stage: int, world: int, tmp_path: Path) -> None:
    held = deepspeed_files(tmp_path / "ds", stage, world)
    assert cli.main(["import-deepspeed", str(tmp_path / "ds"), str(tmp_path / "run")]) == 0
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.square().sum() for x in p.values()) + b.sum(),
        optimizer=fzero.optim.adamw(1e-2), zero=3, trainable=["a", "b", "c", "d"],
    )  # fmt: skip
    state = fzero.load(tmp_path / "run", spec)
    opt = state.opt_state
    found = {f"params/{name}": x for name, x in fzero.unshard(state.params).items()}
    found |= {f"mu/{name}": x.full() for name, x in opt.mu.items() if x is not None}
    found |= {f"nu/{name}": x.full() for name, x in opt.nu.items() if x is not None}
    assert same(found, held)
    assert (int(opt.count.full()), state.step) == (4, 9)
    manifest = fzero.checkpoint.manifest(tmp_path / "run")
    assert (manifest.extra["tokens"], manifest.extra["global_steps"]) == (5, 9)
    assert fzero.step(state, torch.zeros(1)).step == 10


def test_a_deepspeed_checkpoint_runs_no_code(tmp_path: Path) -> None:
    deepspeed_files(tmp_path / "ds", 2, 2)
    tag = tmp_path / "ds" / "global_step9"
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = torch.load(file)
    torch.save({**whole, "x": Payload(tmp_path / "owned")}, file)
    torch.load(file, weights_only=False)
    (tmp_path / "owned").rmdir()  # which shows that it works
    with pytest.raises(CorruptError, match=f"{file.name}: it asks for posix.mkdir, which is not allowed"):
        deepspeed(tmp_path / "ds")
    with pytest.raises(_unpickle.Refused, match=r"posix\.mkdir"):  # not even where the user allows it
        list(_unpickle.torch_files({"files": [str(file)], "allow": ["posix.mkdir"]}))
    assert not (tmp_path / "owned").exists()
    torch.save({**whole, "x": Harmless()}, file)
    with pytest.raises(_unpickle.Refused, match=rf"it asks for {__name__}\.Harmless"):
        list(_unpickle.torch_files({"files": [str(file)], "allow": []}))
    assert deepspeed(tmp_path / "ds", allow=[f"{__name__}.Harmless"]).count == 4


def test_the_child_may_hang_or_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_files(tmp_path / "ds", 2, 1)

    def python(text: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "python").chmod(stat.S_IRWXU)

    monkeypatch.setattr(pickled.sys, "executable", str(tmp_path / "python"))
    python("exec sleep 60")
    with pytest.raises(CorruptError, match=r"did not end within 0\.2 s"):
        deepspeed(tmp_path / "ds", timeout=0.2)
    python("kill -SEGV $$")
    with pytest.raises(CorruptError, match=r"died \(exit status -11\)"):
        deepspeed(tmp_path / "ds")
    for answer in ("", "nonsense", "{}", '{"found": []}', "[1]"):
        python(f"echo '{answer}'")
        with pytest.raises(CorruptError, match="gave no answer"):
            deepspeed(tmp_path / "ds")
    (tmp_path / "python").unlink()
    with pytest.raises(CheckpointError, match="no process could be started"):
        deepspeed(tmp_path / "ds")


@pytest.mark.acceptance
def test_what_is_not_supported_is_said(tmp_path: Path) -> None:
    deepspeed_files(tmp_path / "ds", 2, 2)
    tag = tmp_path / "ds" / "global_step9"
    for name, message in (
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_01-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("zero", "universal"),
    ):
        (tag / name).touch()
        with pytest.raises(CheckpointError, match=message):
            deepspeed(tag)
        (tag / name).unlink()
    first = tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    moved = first.rename(tmp_path / "away")
    with pytest.raises(CorruptError, match=r"has no optim_states\.pt of rank 0"):
        deepspeed(tag)
    moved.rename(first)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptError, match="was written by 2 ranks, and has the optimizer states of 1"):
        deepspeed(tag)
    state = torch.load(first)
    state["optimizer_state_dict"]["partition_count"] = [1, 1]
    torch.save(state, first)
    with pytest.raises(CorruptError, match="is not a ZeRO checkpoint"):  # half of the elements are not there
        deepspeed(tag)
    with pytest.raises(CheckpointError, match=r"has no \*_optim_states\.pt"):
        deepspeed(tmp_path)
    for name in ("../..", "..", ""):
        (tmp_path / "ds" / "latest").write_text(name)
        with pytest.raises(CorruptError, match="which is no directory beside it"):
            deepspeed(tmp_path / "ds")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.acceptance
def test_convert_leads_from_every_form_to_every_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, (params, apply) = trained(), tied()
    fzero.save(state, tmp_path / "run")

    def convert(source: str, target: str, *options: str) -> None:
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / target), *options]) == 0
        assert f"wrote {tmp_path / target}" in capsys.readouterr().out

    (tmp_path / "c.json").write_text('{"model_type": "x"}')
    convert("run", "hf", "--to", "safetensors", "--config", str(tmp_path / "c.json"))
    convert("hf", "dcp", "--to", "dcp")
    convert("dcp", "again", "--to", "fzero")
    full = fzero.unshard(state.params)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), full)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "x"}
    loaded = fzero.load(tmp_path / "again", spec_of(apply), like=params, strict=False)  # it has no moments
    assert same(fzero.unshard(loaded.params), full)
    nested = fzero.Spec(loss=lambda p, b: p["a"]["b"].sum(), optimizer=spec_of(apply).optimizer)
    with pytest.raises(MismatchError, match="has no leaf of this state that fits: strict=False would load nothing"):
        fzero.load(tmp_path / "again", nested, like={"a": {"b": torch.ones(2)}}, strict=False)
    for more, said in (
        (["/proc/nowhere/x"], "mkdir failed"),
        (["x", "--config", "none.json"], "none.json"),
    ):
        assert cli.main(["convert", str(tmp_path / "run"), "--to", "safetensors", *more]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "x"), "--to", "fzero"]) == 2
    assert "is a checkpoint of fzero already" in capsys.readouterr().err
