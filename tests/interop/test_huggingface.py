"""Folders of Hugging Face: what is read is what was written, bit for bit, a tensor at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exchanged import Stored, Tied, ids, same, spec_of, tied, trained
from helpers import gloo, same_bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fzero
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError, MismatchError, TreeError
from fzero.interop import (
    export_safetensors,
    fitted,
    from_module,
    safetensors,
)
from fzero.interop.huggingface import HuggingFaceFolder, split
from fzero.state.source import Entry


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
        folder = HuggingFaceFolder(tmp_path / f"zero{zero}")
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


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_called_one(zipped: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"model.pt: is of torch.save, a pickle: torch.load it, and write it"):
        safetensors(tmp_path / "model.pt")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).ljust(0x4B50)  # begins with PK
    (tmp_path / "w.safetensors").write_bytes((0x4B50).to_bytes(8, "little") + header.encode() + bytes(4))
    assert HuggingFaceFolder(tmp_path / "w.safetensors").read("w", 0, 1).tolist() == [0.0]


def test_one_file_comes_before_the_index_of_an_earlier_save(tmp_path: Path) -> None:
    """As in transformers, which leaves the index there when it saves a model again, in one file."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00002.safetensors"}}')
    assert torch.equal(HuggingFaceFolder(tmp_path).read("w", 0, 2), torch.ones(2))


def test_links_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert safetensors(tmp_path / "snapshot").read("a", 1, 3).tolist() == [1.0, 2.0]
