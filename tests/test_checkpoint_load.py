"""Loading: any layout from any other, bit for bit, reading only what is needed; differences, damage, resuming.

Ranks of any world are saved and loaded in this process: `take` and `shards.write` are what one rank of `fzero.save`
does, `wanted` and `Checkpoint.fill` what one rank of `fzero.load` does. What needs messages runs in gloo processes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from helpers import Outcome, gloo, relative, same_bits, start, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import tree
from fzero.checkpoint import commit, reader, shards
from fzero.checkpoint.compare import SHOWN
from fzero.checkpoint.disk import Disk
from fzero.checkpoint.load import entry, wanted
from fzero.checkpoint.manifest import BLOCK, shard_name
from fzero.checkpoint.reader import Checkpoint
from fzero.checkpoint.save import take
from fzero.checkpoint.source import Entry, Source, Want
from fzero.compile import plan_for, training_of
from fzero.errors import CheckpointError, CorruptError, DonatedError, MismatchError, SpecError
from fzero.plan.layout import Plan
from fzero.runtime import storage
from fzero.runtime.interpret import interpret

WORLDS, STAGES = (1, 2, 3, 4, 8), (0, 1, 2, 3)


class Quick(Disk):
    """Without the waits for the disk; counts the bytes that are read of each file."""

    def __init__(self) -> None:
        self.read_bytes: dict[str, int] = {}
        self.most = 0

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        return None if kind in ("sync", "sync_directory") else call()

    def read_into(self, path: Path, start: int, view: memoryview) -> None:
        self.read_bytes[path.name] = self.read_bytes.get(path.name, 0) + len(view)
        super().read_into(path, start, view)


def write(
    run: Path, plan: Plan, memory: Sequence[dict[str, Tensor]], treedef: Any, step: int = 7, disk: Disk | None = None
) -> Path:
    """A committed checkpoint of every rank's buffers, each shard as its rank writes it."""
    disk = disk or Quick()
    taken = [take(plan, memory[rank], rank, treedef=treedef, step=step) for rank in range(plan.world_size)]
    temporary = run / f".tmp-step-{step:08d}-00000000"
    run.mkdir(exist_ok=True)
    temporary.mkdir()
    records = [shards.write(disk, temporary / shard_name(rank), one.parts) for rank, one in enumerate(taken)]
    return commit.commit(run, temporary, replace(taken[0].manifest, shards=tuple(records)), disk)


def read(directory: Path, plan: Plan, disk: Disk | None = None) -> list[dict[str, Tensor]]:
    """Every rank's buffers from a checkpoint, in memory that was full of something else."""
    ranks = []
    for rank in range(plan.world_size):
        memory = storage.allocate(plan, lambda n: torch.full((n,), 0xAB, dtype=torch.uint8), rank)
        source = Checkpoint(directory, disk or Quick())
        wants = wanted(plan, rank, memory, set())
        source.check(wants)
        source.fill(wants)
        ranks.append(memory)
    return ranks


def noise(like: Tensor, seed: int) -> Tensor:
    """Any bits at all, of a tensor's shape and dtype: NaNs with payloads, infinities, -0.0."""
    bits = torch.randint(0, 256, (like.numel() * like.itemsize,), generator=models.generator(0, seed))
    bits = bits.to(torch.uint8)
    if like.dtype is torch.bool:
        bits &= 1
    return bits.view(like.dtype).view(like.shape)


# --- layouts ----------------------------------------------------------------------------------------------------------

MUON = fzero.optim.muon(0.02, others=fzero.optim.adamw(1e-3))
OPTIMIZERS = {
    "adamw": fzero.optim.adamw(1e-3),
    "adamw8": fzero.optim.adamw8bit(1e-3),
    "muon": MUON,
    "groups": fzero.optim.multi_transform({"**/b": fzero.optim.sgd(0.1, momentum=0.9), "**": fzero.optim.adamw(1e-3)}),
}


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
    plans = [plan_for(replace(spec, zero=zero), paths, leaves, (), world) for world, zero in (one, two)]
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
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layout_loads_any_other_bit_for_bit(
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


@pytest.mark.acceptance
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_pair_of_layouts(optimizer: str, tmp_path: Path) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "trainable": ("blocks/**", "emb"), "bucket_bytes": 1 << 14}
    params = params_of([(65,), (7, 11), (0,)], 64)
    pairs = [(w, z) for w in WORLDS for z in STAGES]
    for n, (one, two) in enumerate((one, two) for one in pairs for two in pairs):
        check(params, options, one, two, tmp_path / str(n))


DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 4)])
def test_leaves_of_every_dtype(worlds: tuple[int, int], tmp_path: Path) -> None:
    known = [d for d in DTYPES if d in fzero.program.DTYPE_NAMES]
    assert len(known) >= 10
    leaves = {
        str(d): {f"{shape}": torch.zeros(shape, dtype=d) for shape in ((), (3,), (0,), (65, 3))} for d in known
    }  # fmt: skip
    paths, tensors, treedef = tree.flatten(leaves)
    tensors = [noise(x, i) for i, x in enumerate(tensors)]
    spec = fzero.Spec(step=lambda s, b: (s, {}), zero=3)
    plans = [plan_for(spec, paths, tensors, (), world) for world in worlds]
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
def test_a_rank_reads_the_blocks_it_needs_once_and_holds_few(
    world: int, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"w": torch.zeros(5200, 1024), "b": torch.zeros(77)}
    spec = fzero.Spec(loss=never, optimizer=fzero.optim.adamw(1e-3), zero=3)
    paths, leaves = start(spec, params)
    leaves = [noise(leaf, i) for i, leaf in enumerate(leaves)]
    treedef = tree.flatten(training_of(spec).init(params, None))[2]
    plan = plan_for(spec, paths, leaves, (), 2)
    saved = write(tmp_path, plan, [storage.shards(plan, leaves, rank) for rank in range(2)], treedef)
    sizes = {path.name: path.stat().st_size for path in saved.glob("*.safetensors")}
    plan = plan_for(replace(spec, zero=zero), paths, leaves, (), world)
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
    plan = plan_for(spec, paths, leaves, (), 3)
    run = tmp_path_factory.mktemp("big")
    return write(run, plan, [storage.shards(plan, leaves, rank) for rank in range(3)], treedef), whole


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


def flat(state: fzero.State) -> dict[str, Tensor]:
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def same(a: fzero.State, b: fzero.State) -> bool:
    one, two = flat(a), flat(b)
    return one.keys() == two.keys() and all(same_bits(one[path], two[path]) for path in one)


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
        with pytest.raises(MismatchError, match=r"has a Pair at the state/nets, which no file can make.*like=params"):
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
    plan = plan_for(spec, paths, leaves, ("error",), 2)
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


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with several blocks in a shard."""
    spec = sgd_spec()
    paths, leaves = start(spec, {"w": torch.zeros(2_200_000), "x": torch.zeros(64)})
    plan = plan_for(spec, paths, [noise(x, i) for i, x in enumerate(leaves)], (), 2)
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


# --- resuming ---------------------------------------------------------------------------------------------------------

ROWS = 8  # of a global batch


def dropping(params: Any, batch: Any, key: Tensor) -> Tensor:
    x, target = batch
    for i, layer in enumerate(params["layers"]):
        x = torch.tanh(x @ layer["w"] + layer["b"])
        x = fzero.random.dropout(fzero.random.fold_in(key, i), x, 0.2)
    return F.mse_loss(params["scale"] * (x @ params["out"]), target)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    parts = [models.MLP.batch(part, step) for part in range(ROWS // models.NUM_ROWS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


class Ranks:
    """All ranks of a world in this process: their program, and their memory from a checkpoint or a first state."""

    def __init__(self, world: int, zero: int, **options: Any) -> None:
        optimizer = options.pop("optimizer", fzero.optim.adamw(0.01, weight_decay=0.1))
        given = {"loss": dropping, "clip_norm": 0.5, "microbatches": 4 // world, "reduce": "each", **options}
        self.spec = fzero.Spec(zero=zero, optimizer=optimizer, **given)
        self.world, self.step = world, 0
        params = models.MLP.init(fzero.random.key(1))
        key = fzero.random.key(2)
        self.lowered = fzero.lower(self.spec, params, self.part(0, 0), world_size=world, key=key)
        first = training_of(self.spec).init(params, fzero.random.fold_in(key, -2))
        paths, leaves, self.treedef = tree.flatten(first)
        self.paths = paths
        leaves = [x if isinstance(x, Tensor) else torch.tensor(x) for x in leaves]
        self.memory = [storage.shards(self.lowered.plan, leaves, rank) for rank in range(world)]

    def part(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        size = ROWS // self.world
        x, y = global_batch(step)
        return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]

    def steps(self, count: int) -> Ranks:
        program, plan = self.lowered.program, self.lowered.plan
        names = [name for name, b in program.buffers.items() if b.kind == "batch"]
        for _ in range(count):
            given = [dict(zip(names, self.part(rank, self.step), strict=True)) for rank in range(self.world)]
            memory = [{**self.memory[rank], **given[rank]} for rank in range(self.world)]
            with torch.no_grad():
                ranks = interpret(dict.fromkeys(range(self.world), program), memory)
            self.memory = [{name: rank.memory[name] for name in plan.buffers} for rank in ranks]
            self.step += 1
        return self

    def save(self, run: Path) -> Path:
        return write(run, self.lowered.plan, self.memory, self.treedef, self.step)

    def load(self, directory: Path) -> Ranks:
        self.memory = read(directory, self.lowered.plan)
        self.step = Checkpoint(directory).step
        return self

    @property
    def leaves(self) -> dict[str, Tensor]:
        plan = self.lowered.plan
        return {leaf.path: storage.join(plan, leaf, self.memory) for leaf in plan.leaves}

    @property
    def flat_params(self) -> Tensor:
        return torch.cat([x.reshape(-1) for path, x in self.leaves.items() if path.startswith("params/")])


def resumed(one: tuple[int, int], two: tuple[int, int], run: Path, **options: Any) -> tuple[Ranks, Ranks]:
    """(three and three steps under `one`; three of them, a save, a load under `two`, and the other three)."""
    whole = Ranks(*one, **options).steps(3)
    saved = whole.save(run)
    return whole.steps(3), Ranks(*two, **options).load(saved).steps(3)


@pytest.mark.parametrize(("one", "two"), [(0, 3), (3, 1), (2, 0), (3, 3)])
def test_a_run_that_was_stopped_ends_bit_for_bit_at_any_stage(one: int, two: int, tmp_path: Path) -> None:
    whole, again = resumed((2, one), (2, two), tmp_path)
    assert again.step == whole.step == 6
    assert [p for p, x in whole.leaves.items() if not same_bits(x, again.leaves[p])] == []


@pytest.mark.parametrize(("one", "two"), [((1, 3), (2, 3)), ((2, 3), (1, 0)), ((4, 1), (2, 2))])
def test_a_run_goes_on_at_another_world_size(one: tuple[int, int], two: tuple[int, int], tmp_path: Path) -> None:
    whole, again = resumed(one, two, tmp_path)
    assert relative(again.flat_params, whole.flat_params) < 1e-6
    assert same_bits(whole.leaves["key"], again.leaves["key"])
    other = Ranks(*two).load(tmp_path / "step-00000003")
    other.step += 1  # another batch: the bound above would see it
    assert relative(other.steps(3).flat_params, whole.flat_params) > 1e-4


@pytest.mark.acceptance
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8", "muon"])
def test_every_stage_resumes_every_other(optimizer: str, tmp_path: Path) -> None:
    """At one world size bit for bit; clipping's norm is added in another order where matrices are packed (Muon)."""
    options = {"optimizer": OPTIMIZERS[optimizer], **({"clip_norm": None} if optimizer == "muon" else {})}
    for world in (1, 2, 4):
        for one in STAGES:
            for two in STAGES:
                whole, again = resumed((world, one), (world, two), tmp_path / f"{world}{one}{two}", **options)
                assert [p for p, x in whole.leaves.items() if not same_bits(x, again.leaves[p])] == []


@pytest.mark.acceptance
@pytest.mark.parametrize("one", [1, 2, 4])
def test_every_world_resumes_every_other(one: int, tmp_path: Path) -> None:
    for two in (1, 2, 4):
        for zero in STAGES:
            whole, again = resumed((one, zero), (two, 3 - zero), tmp_path / f"{two}{zero}")
            assert relative(again.flat_params, whole.flat_params) < 1e-6


# --- real ranks -------------------------------------------------------------------------------------------------------


def gloo_cases(run: str) -> dict[str, Any]:
    """On each of two ranks: steps, a save, loads, and a shard that is damaged for one rank alone."""
    rank = int(os.environ["RANK"])
    spec = fzero.Spec(
        loss=dropping, optimizer=fzero.optim.adamw(0.01, weight_decay=0.1), clip_norm=0.5, microbatches=2, reduce="each", zero=3
    )  # fmt: skip
    state = fzero.init(models.MLP.init, spec, key=fzero.random.key(2))

    def steps(state: fzero.State, count: int) -> fzero.State:
        for _ in range(count):
            x, y = global_batch(state.step)
            state = fzero.step(state, (x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]))
        return state

    state = steps(state, 2)
    saved = fzero.save(state, run)
    state = steps(state, 2)
    whole = {path: x.clone() for path, x in flat(state).items()}
    digest = state.program.digest
    found: dict[str, Any] = {"whole": whole}
    for zero in (3, 1):
        again = steps(fzero.load(run, replace(spec, zero=zero)), 2)
        found[f"zero={zero}"] = [p for p, x in flat(again).items() if not same_bits(x, whole[p])]
        found["digest"] = found.get("digest") or again.program.digest == digest
    again = steps(fzero.load(saved, like=again), 2)
    found["like"] = [p for p, x in flat(again).items() if not same_bits(x, whole[p])]
    torch.distributed.barrier()
    shard = saved / "shard-00001.safetensors"
    if rank == 0:
        shutil.copytree(run, Path(run) / "kept")
        data = bytearray(shard.read_bytes())
        data[-2] ^= 4
        shard.write_bytes(data)
    torch.distributed.barrier()
    for name, ask in {
        "new": lambda: fzero.load(run, spec),
        "over": lambda: fzero.load(run, like=again),
        "one mismatch": lambda: fzero.load(run, spec, like={"w": torch.ones(2)} if rank else None),
        "one without a spec": lambda: fzero.load(run, spec if rank == 0 else None),
    }.items():
        try:
            ask()
        except fzero.FzeroError as error:
            found[name] = (type(error).__name__, str(error))
    found["ended"] = again.life.ended
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    run = tmp_path_factory.mktemp("gloo")
    outcomes: list[Outcome] = gloo(2, gloo_cases, str(run))
    return run, values(outcomes)


def test_real_ranks_resume_bit_for_bit(ranks: tuple[Path, list[Any]]) -> None:
    for found in ranks[1]:
        assert found["zero=3"] == found["zero=1"] == found["like"] == []
        assert found["digest"]


def test_what_real_ranks_saved_goes_on_in_this_process(ranks: tuple[Path, list[Any]]) -> None:
    run, found = ranks
    alone = Ranks(1, 3).load(run / "kept" / "step-00000002")
    alone.steps(2)
    whole = torch.cat([found[0]["whole"][p].reshape(-1) for p in alone.leaves if p.startswith("params/")])
    assert relative(alone.flat_params, whole) < 1e-6
    assert same_bits(alone.leaves["key"], found[0]["whole"]["key"])


def test_damage_that_one_rank_meets_is_an_error_on_all(ranks: tuple[Path, list[Any]]) -> None:
    for rank, found in enumerate(ranks[1]):
        for name in ("new", "over"):
            assert found[name][0] == "CorruptError", found[name]
            assert "shard-00001.safetensors" in found[name][1]
        assert "is unusable: fzero.load failed after it began to write" in found["ended"]
        assert found["one mismatch"][0] == "MismatchError"
        assert ("rank 1 failed before" in found["one mismatch"][1]) == (rank == 0)
        assert found["one without a spec"][0] == ("SpecError" if rank else "DisagreementError")
