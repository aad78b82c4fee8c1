"""Loading: any layout from any other, bit for bit, reading only what is needed; differences, damage, resuming.

Ranks of any world are saved and loaded in this process: `take` and `shards.write` are what one rank of `fzero.save`
does, `wanted` and `Checkpoint.fill` what one rank of `fzero.load` does. What needs messages runs in gloo processes.
"""

from __future__ import annotations

import logging
import re
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_bits, start
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import OPTIMIZERS, STAGES, WORLDS, Quick, flat, noise, read, same, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import optim, tree
from fzero.checkpoint import reader
from fzero.checkpoint.compare import SHOWN
from fzero.checkpoint.load import entry, wanted
from fzero.checkpoint.manifest import BLOCK, shard_name
from fzero.checkpoint.reader import Checkpoint
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.errors import CheckpointError, CorruptError, DonatedError, MismatchError, SpecError
from fzero.plan.state_plan import Plan
from fzero.state import source as sources
from fzero.state import storage
from fzero.state.source import Entry, Source, Want
from fzero.training import training_of

# --- layouts ----------------------------------------------------------------------------------------------------------


def never(params: Any, batch: Any) -> Tensor:
    raise AssertionError("a loss that no layout calls")


def params_of(shapes: Sequence[tuple[int, ...]], width: int) -> Any:
    """Layers of equal matrices, then leaves of the given shapes; a 0-d one, integers, and an empty one."""
    block = {"w": torch.zeros(width, 2 * width), "v": torch.zeros(2 * width, width), "b": torch.zeros(width)}
    extra = {f"x{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    plain = {"scale": torch.zeros(()), "mask": torch.zeros(5, dtype=torch.int32), "none": torch.zeros(0, 3)}
    return {"blocks": [dict(block) for _ in range(2)], **extra, **plain, "emb": torch.zeros(3 * width + 1, width)}


def check(params: Any, options: dict[str, Any], one: tuple[int, int], two: tuple[int, int], run: Path) -> None:
    """What (world, stage) `one` saves, `two` loads: all buffers bit for bit, padding included."""
    spec = fzero.Spec(loss=never, zero=one[1], **options)
    paths, leaves = start(spec, params)
    treedef = tree.flatten(training_of(spec).init(params, None))[2]
    leaves = [noise(leaf, i) for i, leaf in enumerate(leaves)]
    plans = [plan_for(replace(spec, zero=zero), paths, leaves, (), mesh_of(spec, world)) for world, zero in (one, two)]
    memory = [storage.shards(plans[0], leaves, rank) for rank in range(one[0])]
    found = read(write(run, plans[0], memory, treedef), plans[1])
    for rank, buffers in enumerate(found):
        wanted_buffers = storage.shards(plans[1], leaves, rank)
        for name, tensor in buffers.items():
            assert same_bits(tensor, wanted_buffers[name]), (name, rank)


layouts = st.tuples(st.sampled_from(WORLDS), st.sampled_from(STAGES))


@given(
    st.lists(st.sampled_from([(1,), (63,), (65,), (7, 11), (130, 3), (0,), (2, 0), (4097,)]), max_size=3),
    st.sampled_from([8, 13, 64]),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([None, "blocks/0/**", ("blocks/**", "emb")]),
    st.sampled_from([1 << 10, 1 << 14, 32 << 20]),
    layouts,
    layouts,
)
def _any_layout_loads_any_other_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    width: int,
    optimizer: str,
    trainable: Any,
    bucket_bytes: int,
    one: tuple[int, int],
    two: tuple[int, int],
) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "trainable": trainable, "bucket_bytes": bucket_bytes}
    check(params_of(shapes, width), options, one, two, tmp_path_factory.mktemp("run"))


def test_any_layout_loads_any_other_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> None:
    settings(max_examples=60 if whole else 16, deadline=None)(_any_layout_loads_any_other_bit_for_bit)(tmp_path_factory)


@pytest.mark.acceptance
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_pair_of_layouts(optimizer: str, tmp_path: Path) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "trainable": ("blocks/**", "emb"), "bucket_bytes": 1 << 14}
    params = params_of([(65,), (7, 11), (0,)], 64)
    pairs = [(w, z) for w in WORLDS for z in STAGES]
    for n, (one, two) in enumerate((one, two) for one in pairs for two in pairs):
        check(params, options, one, two, tmp_path / str(n))


@st.composite
def cut_leaves(draw: st.DrawFn) -> dict[str, tuple[tuple[int, ...], fzero.P]]:
    """Leaves of up to three dims, cut over tp at one of them, in groups or not; and one that no rank has a part of."""
    found = {"whole": ((5, 3), fzero.P())}
    for i in range(draw(st.integers(1, 3))):
        count = draw(st.sampled_from([1, 1, 2, 3]))
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 33]), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] = draw(st.sampled_from([12, 24])) * count
        found[f"x{i}"] = tuple(shape), fzero.P(*[None] * dim, fzero.groups("tp", count))
    return found


PIPELINE = {"pipeline": "1f1b", "microbatches": 4}
GRIDS: list[dict[str, int]] = [
    *({"dp": dp, "tp": tp} for dp in (1, 2, 3, 4) for tp in (1, 2, 3, 4)),
    {"tp": 2}, {"tp": 4, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 3},
]  # fmt: skip


def planned(
    axes: dict[str, int], zero: int, paths: list[str], leaves: list[Tensor], shard: Any, **options: Any
) -> Plan:
    more = {"shard": shard} if axes.get("tp", 1) > 1 else {}
    more |= PIPELINE if "pp" in axes else {}
    spec = fzero.Spec(loss=never, optimizer=OPTIMIZERS["adamw"], mesh=axes, zero=zero, **more, **options)
    return plan_for(spec, paths, leaves, (), mesh_of(spec))


@given(
    cut_leaves(),
    st.booleans(),
    st.tuples(st.sampled_from(GRIDS), st.sampled_from(STAGES)),
    st.tuples(st.sampled_from(GRIDS), st.sampled_from(STAGES)),
    st.sampled_from([1 << 10, 32 << 20]),
    st.sampled_from([64, 1000, 4 << 20]),
)
def _any_mesh_loads_any_other_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    cut: dict[str, tuple[tuple[int, ...], fzero.P]],
    turned: bool,
    one: tuple[dict[str, int], int],
    two: tuple[dict[str, int], int],
    bucket_bytes: int,
    chunk: int,
) -> None:
    """Also where the second cuts leaves at another dim, and where a batch of what is rearranged holds little."""
    params = {"blocks": [{name: torch.zeros(shape) for name, (shape, _) in cut.items()} for _ in range(2)]}
    shard = {f"blocks/*/{name}": dims for name, (_, dims) in cut.items()}
    other = shard
    if turned:  # at the last dim that twelve divides, without groups
        other = {
            f"blocks/*/{name}": fzero.P(*[None] * max((d for d, n in enumerate(shape) if n % 12 == 0), default=0), "tp")
            for name, (shape, dims) in cut.items()
            if name != "whole"
        }
    spec = fzero.Spec(loss=never, optimizer=OPTIMIZERS["adamw"])
    paths, leaves = start(spec, params)
    treedef = tree.flatten(training_of(spec).init(params, None))[2]
    leaves = [noise(leaf, i) for i, leaf in enumerate(leaves)]
    plan = planned(*one, paths, leaves, shard, bucket_bytes=bucket_bytes)
    there = planned(*two, paths, leaves, other, bucket_bytes=bucket_bytes)
    memory = [storage.shards(plan, leaves, rank) for rank in range(plan.world_size)]
    saved = write(tmp_path_factory.mktemp("run"), plan, memory, treedef)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk)
        patch.setattr(sources, "STAGED_BYTES", 4 * chunk)
        found = read(saved, there)
        source = Checkpoint(saved, Quick())
        for path, leaf in zip(paths, leaves, strict=True):
            low = leaf.numel() // 3
            assert same_bits(source.read(path, low, leaf.numel()), leaf.reshape(-1)[low:]), path
    for rank, buffers in enumerate(found):
        expected = storage.shards(there, leaves, rank)
        assert all(same_bits(tensor, expected[name]) for name, tensor in buffers.items()), rank
    for leaf, value in zip(there.leaves, leaves, strict=True):
        assert same_bits(storage.join(there, leaf, found), value), leaf.path
    manifest = source.manifest
    written = sum((piece.stop - piece.start) * leaf.dtype.itemsize for leaf in manifest.leaves for piece in leaf.pieces)
    assert written == sum(leaf.nbytes for leaf in leaves)


def test_any_mesh_loads_any_other_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> None:
    settings(max_examples=80 if whole else 16, deadline=None)(_any_mesh_loads_any_other_bit_for_bit)(tmp_path_factory)


DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 4)])
def test_leaves_of_every_dtype(worlds: tuple[int, int], tmp_path: Path) -> None:
    known = [d for d in DTYPES if d in fzero.ir.records.DTYPE_NAMES]
    assert len(known) >= 10
    leaves = {
        str(d): {f"{shape}": torch.zeros(shape, dtype=d) for shape in ((), (3,), (0,), (65, 3))} for d in known
    }  # fmt: skip
    paths, tensors, treedef = tree.flatten(leaves)
    tensors = [noise(x, i) for i, x in enumerate(tensors)]
    spec = fzero.Spec(step=lambda s, b: (s, {}), zero=3)
    plans = [plan_for(spec, paths, tensors, (), mesh_of(spec, world)) for world in worlds]
    memory = [storage.shards(plans[0], tensors, rank) for rank in range(worlds[0])]
    found = read(write(tmp_path, plans[0], memory, treedef), plans[1])
    for leaf, value in zip(plans[1].leaves, tensors, strict=True):
        assert same_bits(storage.join(plans[1], leaf, found), value), leaf.path


# --- only what is needed ----------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that was allocated."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, result.numel() * result.itemsize)
        return result


@pytest.mark.parametrize(("world", "zero"), [(1, 3), (3, 3), (4, 1), (8, 3)])
@pytest.mark.sampled(1)
def test_a_rank_reads_the_blocks_it_needs_once_and_holds_few(
    world: int, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"w": torch.zeros(5200, 1024), "b": torch.zeros(77)}
    spec = fzero.Spec(loss=never, optimizer=fzero.optim.adamw(1e-3), zero=3)
    paths, leaves = start(spec, params)
    leaves = [noise(leaf, i) for i, leaf in enumerate(leaves)]
    treedef = tree.flatten(training_of(spec).init(params, None))[2]
    plan = plan_for(spec, paths, leaves, (), mesh_of(spec, 2))
    saved = write(tmp_path, plan, [storage.shards(plan, leaves, rank) for rank in range(2)], treedef)
    sizes = {path.name: path.stat().st_size for path in saved.glob("*.safetensors")}
    plan = plan_for(replace(spec, zero=zero), paths, leaves, (), mesh_of(spec, world))
    monkeypatch.setattr(reader, "_num_threads", lambda: 1)  # in this thread, where allocations are seen
    for rank in range(world):
        disk = Quick()
        memory = storage.allocate(plan, storage.block_of("cpu"), rank)
        wants = wanted(plan, rank, memory, set())
        source = Checkpoint(saved, disk)
        with Largest() as seen:
            source.fill(wants)
        assert seen.most <= BLOCK
        read_bytes = sum(disk.read_bytes.values())
        needs = source._needs(wants)
        assert set(disk.read_bytes) == {shard_name(number) for number in needs}
        assert all(count <= sizes[name] for name, count in disk.read_bytes.items()), "a block was read twice"
        needed = sum(want.out.numel() * want.out.itemsize for want in wants)
        assert read_bytes <= needed + (2 * sum(map(len, needs.values())) + len(needs)) * BLOCK
        if world == 8:
            assert read_bytes < 0.6 * sum(sizes.values())
        assert all(same_bits(x, storage.shards(plan, leaves, rank)[n]) for n, x in memory.items())


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_read_gives_any_range(big: tuple[Path, Tensor], data: st.DataObject) -> None:
    saved, whole = big
    low = data.draw(st.integers(0, whole.numel()))
    high = data.draw(st.integers(low, min(whole.numel(), low + 3_000_000)))
    disk = Quick()
    found = Checkpoint(saved, disk).read("w", low, high)
    assert same_bits(found, whole.view(-1)[low:high])
    touched = -(-(high - low) * 4 // BLOCK) + 1
    assert sum(disk.read_bytes.values()) <= (touched + 2 + 2) * BLOCK


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A leaf of 12 MB on three ranks, and a small one before it."""
    whole = noise(torch.zeros(3000, 1001), 1)
    spec = fzero.Spec(step=lambda s, b: (s, {}), zero=3)
    paths, leaves, treedef = tree.flatten({"a": noise(torch.zeros(101), 2), "w": whole})
    plan = plan_for(spec, paths, leaves, (), mesh_of(spec, 3))
    run = tmp_path_factory.mktemp("big")
    return write(run, plan, [storage.shards(plan, leaves, rank) for rank in range(3)], treedef), whole


ROWS, COLUMNS, FUSED = fzero.P("tp", None), fzero.P(None, "tp"), fzero.P(fzero.groups("tp", 3), None)


@pytest.mark.parametrize(
    ("one", "two", "parts"),
    [
        (({"tp": 2}, COLUMNS), ({"tp": 2}, COLUMNS), 1),
        (({"tp": 2}, FUSED), ({"tp": 2}, FUSED), 1),
        (({"dp": 1}, None), ({"tp": 2}, ROWS), 1),
        (({"tp": 2}, ROWS), ({"tp": 4}, ROWS), 1),
        (({"dp": 1}, None), ({"tp": 2}, COLUMNS), 2),  # every block has a part of each row
        (({"tp": 2}, COLUMNS), ({"tp": 4}, COLUMNS), 2),
        (({"tp": 4}, COLUMNS), ({"dp": 1}, None), 1),
    ],
)
@pytest.mark.sampled(2)
def test_the_bytes_read_for_a_part_over_tp(one: Any, two: Any, parts: int, tmp_path: Path) -> None:
    """`parts` times what is held, but for the blocks at the edges of a range; and few wants, however many rows."""
    leaves = [noise(torch.zeros(6144, 1024), 1)]
    plans = [planned(axes, 3, ["params/w"], leaves, {"w": dims}) for axes, dims in (one, two)]
    memory = [storage.shards(plans[0], leaves, rank) for rank in range(plans[0].world_size)]
    saved = write(tmp_path, plans[0], memory, tree.flatten({"params": {"w": leaves[0]}})[2])
    rank, disk = plans[1].world_size - 1, Quick()
    memory[0] = storage.allocate(plans[1], storage.block_of("cpu"), rank)
    source, wants = Checkpoint(saved, disk), wanted(plans[1], rank, memory[0], set())
    source.check(wants)
    source.fill(wants)
    held = len(wants[0].out) * 4
    shards = len(source.manifest.shards)
    assert sum(disk.read_bytes.values()) <= parts * held + 2 * shards * BLOCK
    assert sum(len(batch.wants) for batch in source._batches(wants)) <= shards * -(-leaves[0].nbytes // BLOCK)
    assert same_bits(memory[0]["params:w"], storage.shards(plans[1], leaves, rank)["params:w"])


class Tensors(Source):
    """Leaves in memory: a source without a way of its own to fill."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held

    @property
    def leaves(self) -> dict[str, Entry]:
        return {path: Entry(tuple(x.shape), x.dtype) for path, x in self.held.items()}

    def read(self, path: str, start: int, stop: int) -> Tensor:
        assert (stop - start) * self.held[path].itemsize <= 4 << 20
        return self.held[path].reshape(-1)[start:stop].clone()


def test_a_source_that_only_reads_fills_in_chunks(big: tuple[Path, Tensor]) -> None:
    out = torch.zeros(2_500_000)
    Tensors({"w": big[1]}).fill([Want("w", 300_000, out)])
    assert same_bits(out, big[1].view(-1)[300_000:2_800_000])


# --- differences ------------------------------------------------------------------------------------------------------


def sgd_spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), **options)


def adam_spec(**options: Any) -> fzero.Spec:
    return replace(sgd_spec(**options), optimizer=fzero.optim.adamw(0.1))


@pytest.fixture
def trained(tmp_path: Path) -> tuple[fzero.State, Path]:
    """A state of one rank after two steps, and where it is saved."""
    state = fzero.init({"w": torch.arange(1.0, 4.0), "x": torch.ones(2, 2)}, adam_spec(allow_unused=True))
    for _ in range(2):
        state = fzero.step(state, torch.eye(3))
    fzero.save(state, tmp_path)
    return state, tmp_path


def test_the_three_ways_to_ask(trained: tuple[fzero.State, Path], caplog: pytest.LogCaptureFixture) -> None:
    state, run = trained
    spec = adam_spec(allow_unused=True)
    like = {"w": torch.empty(3, device="meta"), "x": torch.full((2, 2), torch.nan)}
    with caplog.at_level(logging.INFO, "fzero"):
        for found in (
            fzero.load(run, spec),
            fzero.load(run / "step-00000002", spec),
            fzero.load(str(run), spec, like=like),
            fzero.load(run, spec, like=lambda key: {"w": torch.zeros(3), "x": torch.zeros(2, 2)}),
            fzero.load(run, spec, like=state.params),
            fzero.load(run, like=fzero.init(like | {"w": torch.zeros(3)}, spec)),
        ):
            assert found.step == 2
            assert found.metrics == {}
            assert same(found, state)
    assert caplog.text.count(f"loaded step 2 from {run / 'step-00000002'}") == 6


def test_a_state_given_as_like_is_donated_and_its_programs_stay(trained: tuple[fzero.State, Path]) -> None:
    state, run = trained
    old = fzero.step(state, torch.eye(3))
    program = old.program
    found = fzero.load(run, like=old)
    with pytest.raises(DonatedError, match=r"donated to fzero\.load: use the state that it returned"):
        old.params["w"].full()
    with pytest.raises(DonatedError, match=r"fzero.load\(like=state\)"):
        fzero.load(run, like=old)
    assert found.runtime is old.runtime
    assert fzero.step(found, torch.eye(3)).program is program


def test_a_load_at_the_same_layout_runs_the_same_program(trained: tuple[fzero.State, Path]) -> None:
    state, run = trained
    found = fzero.load(run, adam_spec(allow_unused=True))
    one, two = fzero.step(found, torch.eye(3)), fzero.step(state, torch.eye(3))
    assert one.program.digest == two.program.digest == fzero.checkpoint.manifest(run).program
    assert same(one, two)
    assert one.step == 3


def test_a_run_gives_its_newest_committed_step(trained: tuple[fzero.State, Path]) -> None:
    state, run = trained
    state = fzero.step(state, torch.eye(3))
    newest = fzero.save(state, run)
    assert fzero.load(run, adam_spec(allow_unused=True)).step == 3
    (newest / "COMMITTED").write_text("0" * 64 + "\n")
    (run / "latest").write_text("step-00000003\n")
    assert fzero.load(run, adam_spec(allow_unused=True)).step == 2
    with pytest.raises(CorruptError, match="step-00000003/COMMITTED"):
        fzero.load(newest, adam_spec(allow_unused=True))
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        fzero.load(run / "step-00000002" / "..", like=fzero.init({"w": torch.ones(3)}, sgd_spec())) if (
            (run / "step-00000002" / "COMMITTED").unlink() is None
        ) else None


FOLDERS = [
    (("fzero", "trainer_state.json", "model.safetensors"), r"a Trainer wrote it\. Give its folder 'fzero'"),
    ((".metadata", "__0_0.distcp"), r"fzero\.init\(fzero\.interop\.dcp\(folder, like=params\), spec\)"),
    (("model.safetensors",), r"but safetensors\. Give fzero\.init\(fzero\.interop\.safetensors\("),
    (("latest", "global_step10"), r"DeepSpeed wrote it\. Import it first: fzero import-deepspeed"),
    (("step-00000001",), r"no committed checkpoint \(step-00000001 began and did not end\)"),
    ((), "no committed checkpoint$"),
]


@pytest.mark.parametrize(("names", "said"), FOLDERS, ids=[said[:20] for _, said in FOLDERS])
def test_a_folder_that_others_wrote_says_what_reads_it(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=said):
        fzero.load(tmp_path, sgd_spec())


def test_every_difference_is_shown_and_nothing_is_loaded(trained: tuple[fzero.State, Path]) -> None:
    _, run = trained
    like = {"w": torch.zeros(4), "x": torch.zeros(2, 2, dtype=torch.float64), "xx": torch.zeros(1)}
    state = fzero.init(like, adam_spec(allow_unused=True))
    before = {path: x.clone() for path, x in flat(state).items()}
    for ask in (lambda: fzero.load(run, like=state), lambda: fzero.load(run, adam_spec(), like=like)):
        with pytest.raises(MismatchError) as caught:
            ask()
        assert caught.value.file == str(run / "step-00000002")
        assert str(caught.value) == (
            f"{run / 'step-00000002'}: does not have the leaves of this state. Nothing was loaded.\n"
            "  3 missing (this state has them, the checkpoint does not):\n"
            "    state['opt_state/mu/xx']\n"
            "    state['opt_state/nu/xx']\n"
            "    state['params/xx']\n"
            "  3 of another shape:\n"
            "    state['opt_state/mu/w'] is [3] there, [4] here\n"
            "    state['opt_state/nu/w'] is [3] there, [4] here\n"
            "    state['params/w'] is [3] there, [4] here\n"
            "  3 of another dtype:\n"
            "    state['opt_state/mu/x'] is f32 there, f64 here\n"
            "    state['opt_state/nu/x'] is f32 there, f64 here\n"
            "    state['params/x'] is f32 there, f64 here\n"
            "Give fzero.load the spec and tree that were saved, or strict=False, which loads what fits"
        )
    assert all(same_bits(x, before[path]) for path, x in flat(state).items())


def test_another_optimizer_and_a_renamed_leaf(trained: tuple[fzero.State, Path]) -> None:
    _, run = trained
    with pytest.raises(MismatchError, match=r"extra \(the checkpoint has them.*\n    state\['opt_state/mu/w'\]"):
        fzero.load(run, sgd_spec())
    renamed = {"w": torch.zeros(3), "x2": torch.zeros(2, 2)}
    with pytest.raises(MismatchError, match=r"state\['params/x2'\] Did you mean 'params/x'\?"):
        fzero.load(run, adam_spec(), like=renamed)


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(SHOWN + 5)]
    spec = fzero.Spec(loss=never, optimizer=fzero.optim.sgd(0.1))
    fzero.save(fzero.init({name: torch.zeros(2) for name in names} | {"w": torch.zeros(3)}, spec), tmp_path)
    with pytest.raises(MismatchError) as caught:
        fzero.load(tmp_path, spec, like={"w": torch.zeros(3)})
    assert f"{SHOWN + 5} extra" in str(caught.value)
    assert str(caught.value).count("state['params/w") == SHOWN
    assert "    and 5 more\n" in str(caught.value)


def test_not_strict_loads_what_fits_and_says_what_it_skipped(
    trained: tuple[fzero.State, Path], caplog: pytest.LogCaptureFixture
) -> None:
    state, run = trained
    like = {"w": torch.full((3,), 7.0), "x": torch.full((4,), 8.0), "y": torch.full((2,), 9.0)}
    spec = adam_spec(allow_unused=True)
    given = fzero.step(fzero.init(like, spec), torch.eye(3))
    moved = flat(given)
    for found, kept in (
        (fzero.load(run, spec, like=like, strict=False), flat(fzero.init(like, spec))),
        (fzero.load(run, like=given, strict=False), moved),
    ):
        leaves, saved = flat(found), flat(state)
        for path, value in leaves.items():
            fits = path in saved and saved[path].shape == value.shape
            assert fits == (path[-1] in "wt"), path
            assert same_bits(value, saved[path] if fits else kept[path]), path
        assert found.step == 2
        assert fzero.step(found, torch.eye(3)).step == 3
    assert caplog.text.count("these leaves were not loaded") == 2
    assert "state['params/y']" in caplog.text
    assert "state['params/x'] is [2, 2] there, [4] here" in caplog.text


def test_not_strict_keeps_what_is_on_disk(trained: tuple[fzero.State, Path], tmp_path: Path) -> None:
    """Of a state whose leaves are in a file: those that the checkpoint lacks became zeros."""
    state, run = trained
    like = {"w": torch.full((3,), 7.0), "x": torch.full((4,), 8.0), "y": torch.full((2,), 9.0)}
    spec = adam_spec(allow_unused=True, offload={"params": "nvme"}, nvme_path=str(tmp_path))
    given = fzero.step(fzero.init(like, spec), torch.eye(3))
    kept, saved = flat(given), flat(state)
    leaves = flat(fzero.load(run, like=given, strict=False))
    for path, value in leaves.items():
        assert same_bits(value, (saved if path[-1] in "wt" else kept)[path]), path


def test_a_count_that_fits_any_state_is_not_a_leaf_that_fits(tmp_path: Path) -> None:
    fzero.save(fzero.init({"w": torch.ones(3)}, sgd_spec()), tmp_path)
    other = fzero.Spec(loss=lambda p, b: p["v"].sum(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(MismatchError, match="has no leaf of this state that fits: strict=False would load nothing"):
        fzero.load(tmp_path, other, like={"v": torch.ones(3)}, strict=False)


def test_a_kept_leaf_needs_values(tmp_path: Path) -> None:
    fzero.save(fzero.init({"w": torch.ones(3)}, sgd_spec()), tmp_path)
    with pytest.raises(MismatchError, match="'params/x', whose first value depends on values that are not there"):
        fzero.load(
            tmp_path, sgd_spec(), like={k: torch.empty(3, device="meta") for k in "wx"}, strict=False
        )  # fmt: skip


def test_what_cannot_be_asked(trained: tuple[fzero.State, Path]) -> None:
    state, run = trained
    with pytest.raises(SpecError, match=r"fzero.load\(dir, spec\) or fzero.load\(dir, like=state\)"):
        fzero.load(run)
    with pytest.raises(SpecError, match="leave spec out"):
        fzero.load(run, adam_spec(), like=state)
    with pytest.raises(SpecError, match="needs 2 ranks"):
        fzero.load(run, adam_spec(mesh={"dp": 2}))
    with pytest.raises(CheckpointError, match=re.escape(f"{run / 'nowhere'}: there is no such directory")):
        fzero.load(run / "nowhere", adam_spec())
    (file := run.parent / "a.pt").write_text("")
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: is a file: give the directory of a step")):
        fzero.load(file, adam_spec())
    with pytest.raises(fzero.TreeError, match="needed a key"):
        fzero.load(run, adam_spec(), key=torch.zeros(3))


# --- keys, custom steps, per-rank leaves ------------------------------------------------------------------------------


def noisy(params: Any, batch: Tensor, key: Tensor) -> Tensor:
    return (fzero.random.dropout(key, batch @ params["w"], 0.5) ** 2).mean()


def test_a_key_in_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    spec = fzero.Spec(loss=noisy, optimizer=fzero.optim.sgd(0.1))
    state = fzero.init({"w": torch.ones(3)}, spec, key=fzero.random.key(5))
    state = fzero.step(state, torch.eye(3))
    fzero.save(state, tmp_path)
    for found in (fzero.load(tmp_path, spec), fzero.load(tmp_path, spec, key=fzero.random.key(9))):
        assert same(found, state)
    quiet = sgd_spec()  # its loss asks for no key: the state holds one because the checkpoint does
    assert same(fzero.load(tmp_path, quiet), state)
    fzero.save(fzero.init({"w": torch.ones(3)}, quiet), tmp_path / "without")
    with pytest.raises(MismatchError, match=r"1 missing .*\n    state\['key'\]"):
        fzero.load(tmp_path / "without", quiet, key=fzero.random.key(3))
    found = fzero.load(tmp_path / "without", quiet, key=fzero.random.key(3), strict=False)
    assert same(found, fzero.init({"w": torch.ones(3)}, quiet, key=fzero.random.key(3)))


def in_turn(params: Any, batch: Tensor) -> Tensor:
    """A loss that meets its layers in the order of the dict."""
    for w in params.values():
        batch = torch.tanh(batch @ w)
    return batch.square().mean()


def test_a_dict_comes_back_in_its_order(tmp_path: Path) -> None:
    """By key, the step after a load would be another one: stem, body, head become body, head, stem."""
    spec = fzero.Spec(loss=in_turn, optimizer=fzero.optim.sgd(0.1))
    layers = {
        name: fzero.random.normal(fzero.random.key(seed), (3, 3)) for seed, name in enumerate(("stem", "body", "head"))
    }
    state = fzero.step(fzero.init(layers, spec), torch.eye(3))
    fzero.save(state, tmp_path)
    found = fzero.load(tmp_path, spec)
    assert list(found.params) == list(layers)
    assert same(found, state)
    assert same(fzero.step(found, torch.eye(3)), fzero.step(state, torch.eye(3)))
    held = fzero.checkpoint.manifest(tmp_path)
    assert list(held.tree(list(held.leaves))["params"].items()) == [(n, held.by_path[f"params/{n}"]) for n in layers]


Pair = namedtuple("Pair", "fast slow")


def ema_step(state: Any, batch: Tensor) -> tuple[Any, Any]:
    nets = state["nets"]
    loss, grads = fzero.value_and_grad(lambda p, b: ((b @ p["w"]) ** 2).mean())(nets[0], batch)
    fast = tree.map(lambda p, g: p - 0.1 * g, nets[0], grads)
    slow = tree.map(lambda s, p: 0.9 * s + 0.1 * p, nets[1], fast)
    new = {**state, "nets": Pair(fast, slow) if isinstance(nets, Pair) else [fast, slow], "n": state["n"] + 1}
    return new, {"loss": loss}


@pytest.mark.parametrize("named", [False, True])
def test_a_state_of_ones_own(named: bool, tmp_path: Path) -> None:
    def make() -> Any:
        nets = [{"w": torch.ones(3)}, {"w": torch.ones(3)}]
        return {"nets": Pair(*nets) if named else nets, "n": 0, "z": (torch.ones(2, dtype=torch.complex64), None)}

    spec = fzero.Spec(step=ema_step)
    state = fzero.step(fzero.init(make(), spec), torch.eye(3))
    fzero.save(state, tmp_path)
    if named:
        with pytest.raises(MismatchError, match=r"has Pair at state\['nets'\], which no file can make.*like=state"):
            fzero.load(tmp_path, spec)
    found = fzero.load(tmp_path, spec, like=make() if named else None)
    assert tree.flatten(found.tree)[2] == tree.flatten(state.tree)[2]
    assert same(found, state)
    assert same(fzero.step(found, torch.eye(3)), fzero.step(state, torch.eye(3)))
    with pytest.raises(MismatchError, match=r"has no 'params'"):
        fzero.load(tmp_path, sgd_spec())


def test_what_each_rank_keeps_needs_as_many_ranks(tmp_path: Path) -> None:
    paths, leaves, treedef = tree.flatten({"error": torch.zeros(5), "w": torch.ones(7)})
    spec = fzero.Spec(step=lambda s, b: (s, {}), zero=3)
    plan = plan_for(spec, paths, leaves, ("error",), mesh_of(spec, 2))
    memory = [storage.shards(plan, [torch.full((5,), float(rank)), leaves[1]], rank) for rank in range(2)]
    saved = write(tmp_path, plan, memory, treedef)
    found = read(saved, plan)
    assert [m["error"].tolist() for m in found] == [[0.0] * 5, [1.0] * 5]
    given = {"error": fzero.per_rank(torch.full((5,), 3.0)), "w": torch.zeros(7)}
    one_per_rank = r"state\['error'\] is \[2, 5\] \(one per rank\) there, \[1, 5\] \(one per rank\) here.*load it on 2"
    for like in (None, given):
        with pytest.raises(MismatchError, match=one_per_rank):
            fzero.load(tmp_path, spec, like=like)
    found_one = fzero.load(tmp_path, spec, like=given, strict=False)
    assert found_one.tree["error"].full().tolist() == [[3.0] * 5]
    assert found_one.tree["w"].full().tolist() == [1.0] * 7
    assert entry((5,), torch.float32, True, 2) == Checkpoint(saved).leaves["error"]


def test_what_trains_by_flags_is_resumed_by_them(tmp_path: Path) -> None:
    """Parameters that do not require grad have no moments, in a checkpoint neither."""
    spec = fzero.Spec(loss=lambda p, x: (x @ p["w"] + p["z"]).square().mean(), optimizer=optim.adamw(1e-2))
    params = {"w": torch.ones(4, 4, requires_grad=True), "z": torch.ones(4)}
    for steps in (1, 2):
        with fzero.Checkpointer(tmp_path) as run:
            state = fzero.step(run.resume(params, spec), torch.ones(2, 4))
            run.save(state)
        assert state.step == steps
    assert state.params["z"].full().tolist() == [1.0] * 4
