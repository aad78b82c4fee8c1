"""Saving: what lies on the disk is the state, all of it or nothing, whatever fails; read by `saved`, not by fzero."""

import errno
import itertools
import json
import os
import re
import signal
import threading
from pathlib import Path

import fuzzed
import loading
import pytest
import saved
import torch
from helpers import gloo, same_bits, values
from safetensors.torch import load_file, save_file
from workers.saves import kills, saved_by_two

import fzero
from fzero import tree
from fzero.checkpoint import Disk, manifest, ranks, shards, snapshot, write
from fzero.checkpoint.manifest import Manifest
from fzero.checkpoint.save import held, span, take
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.disk.calls import ADVICE
from fzero.errors import CheckpointError, CorruptError, DisagreementError, DonatedError, TreeError
from fzero.ir.records import DTYPE_NAMES
from fzero.state import storage


def linear(p, b):
    return ((b @ p["w"]) ** 2).mean() + (p["deep"][0] ** 2).sum()


def spec(**given):
    return fzero.Spec(**{"loss": linear, "optimizer": fzero.optim.adamw(0.1), **given})


def params():
    return {"w": torch.arange(60.0).view(6, 10), "deep": [torch.ones(7), torch.zeros(0, 3)]}


def trained(steps=1, **given):
    state = fzero.init(params(), spec(allow_unused=True, **given))
    for _ in range(steps):
        state = fzero.step(state, torch.ones(2, 6))
    return state


def leaves_of(state):
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def same(found, expected):
    return found.keys() == expected.keys() and all(same_bits(found[path], expected[path]) for path in expected)


class Failing(Disk):
    """The n-th operation fails with this error; the kinds and paths of all are kept."""

    def __init__(self, at=-1, number=errno.EIO):
        self.at, self.number, self.log = at, number, []

    def run(self, kind, path, call):
        self.log.append((kind, path))
        if len(self.log) - 1 == self.at:
            raise OSError(self.number, os.strerror(self.number))
        return call()


class Paused(Disk):
    """Waits for `go` before the first write to a shard."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def run(self, kind, path, call):
        if kind == "write" and path.suffix == ".safetensors" and not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(60)
        return call()


def failure(call):
    """The CheckpointError that a call ends in, or None."""
    try:
        call()
    except CheckpointError as error:
        return error
    return None


# --- contents ---------------------------------------------------------------------------------------------------------


def test_a_saved_state(tmp_path):
    state = trained(2)
    path = fzero.save(state, tmp_path / "new" / "run", extra={"position": 2**70, "lr": 0.1, "note": ["ü", None, True]})
    assert path == tmp_path / "new" / "run" / "step-00000002"
    found, leaves = saved.contents(path)
    assert same(leaves, leaves_of(state))
    assert found["extra"] == {"position": 2**70, "lr": 0.1, "note": ["ü", None, True]}
    assert (found["step"], found["mesh"], found["zero"]) == (2, {"dp": 1}, 3)
    assert found["program"] == state.program.digest
    assert found["versions"]["torch"] == torch.__version__
    assert (path.parent / "latest").read_text() == "step-00000002\n"
    read = manifest(path.parent)
    assert read == manifest(path)
    assert (read.step, read.extra["position"]) == (2, 2**70)
    assert read.to_bytes() == (path / "manifest.json").read_bytes()


def test_the_tree_of_containers_comes_back(tmp_path):
    state = trained()
    read = manifest(fzero.save(state, tmp_path))
    built = read.tree([leaf.path for leaf in read.leaves])
    assert built["params"] == {"w": "params/w", "deep": ["params/deep/0", "params/deep/1"]}
    assert built["opt_state"]["mu"] == {"w": "opt_state/mu/w", "deep": ["opt_state/mu/deep/0", "opt_state/mu/deep/1"]}


NAMES = [
    "w",
    "__metadata__",
    "/__metadata__",
    "../../etc/passwd",
    "/abs",
    "",
    "a\nb",
    "ü/ß",
    "nul\0",
    "x" * 3000,
    "step",
]


def test_every_dtype_under_any_name(tmp_path):
    """Names never become file names; what the format lacks (complex128, a leaf `__metadata__`) is kept all the same."""
    draw = torch.Generator().manual_seed(0)
    leaves = {}
    for number, dtype in enumerate(DTYPE_NAMES):
        bits = torch.randint(0, 256, ((17 + number) * dtype.itemsize,), generator=draw, dtype=torch.uint8)
        leaf = bits.view(dtype) if dtype != torch.bool else bits > 127
        leaves[NAMES[number % len(NAMES)] + str(number) * (number >= len(NAMES))] = leaf

    def my_step(state, batch):
        return {**state, "w": state["w"]}, {}

    state = fzero.init(leaves, fzero.Spec(step=my_step, params="**"))
    path = fzero.save(state, tmp_path)
    assert same(saved.contents(path)[1], leaves)
    assert sorted(p.name for p in path.iterdir()) == ["COMMITTED", "manifest.json", "shard-00000.safetensors"]
    ours, theirs = shards.header(path / "shard-00000.safetensors"), load_file(path / "shard-00000.safetensors")
    data = (path / "shard-00000.safetensors").read_bytes()
    assert ours.keys() == theirs.keys()
    for key, place in ours.items():
        assert data[place.start : place.stop] == bytes(theirs[key].reshape(-1).view(torch.uint8).tolist())


def test_a_file_of_the_library_is_read(tmp_path):
    tensors = {"a": torch.ones(3, 2), "b": torch.zeros(0, 5, dtype=torch.bfloat16), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = shards.header(tmp_path / "x.safetensors")
    assert {key: (place.dtype, place.shape) for key, place in found.items()} == {
        "a": ("F32", (3, 2)), "b": ("BF16", (0, 5)), "c": ("BOOL", ())
    }  # fmt: skip


LAYOUTS = {
    "plain": {},
    "frozen": {"trainable": "w"},
    "rules": {"zero": {"deep/**": 3, "**": 1}},
    "adam8": {"optimizer": fzero.optim.adamw8bit(0.1)},
    "muon": {"optimizer": fzero.optim.muon(0.1, others=fzero.optim.adamw(0.1))},
    "bf16": {"precision": "bf16"},
    "small buckets": {"bucket_bytes": 64},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_once(name):
    """By the ranks together, whatever the layout and stage; and the part of a sharded leaf is the part that is held."""
    like = {"w": torch.empty(70, 65), "deep": [torch.empty(7), torch.empty(0, 3)]}
    recipe = recipe_for(spec(**LAYOUTS[name]), like, None, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    whole = [(torch.randn(x.shape, generator=draw) * 50).to(x.dtype) for x in recipe.values]
    for zero, world in itertools.product((0, 1, 2, 3), (1, 2, 3, 4, 8)):
        given = spec(**{"zero": zero, **LAYOUTS[name]})
        plan = plan_for(given, recipe.paths, recipe.values, recipe.per_rank, mesh_of(given, world))
        memory = [storage.shards(plan, whole, rank) for rank in range(world)]
        for leaf, value in zip(plan.leaves, whole, strict=True):
            parts = [held(plan, memory[rank], leaf, rank) for rank in range(world)]
            assert same_bits(torch.cat(parts), value.reshape(-1)), leaf
            spans = [span(plan, leaf, rank) for rank in range(world)]
            if plan.buffers[leaf.buffer].sharded and leaf.slot is not None:
                cuts = [storage.piece(plan, leaf, rank)[1] for rank in range(world)]
                assert [s for s in spans if s[0] < s[1]] == [(c.start, c.stop) for c in cuts if c.start < c.stop]


def over_tp(mesh):
    """The plan of two leaves, of which one lies over tp by its rows, and whole leaves."""
    given = spec(mesh=mesh, **({"shard": {"w": fzero.P("tp", None)}} if mesh.get("tp", 1) > 1 else {}))
    recipe = recipe_for(given, params(), None, torch.device("cpu"))
    plan = plan_for(given, recipe.paths, recipe.values, recipe.per_rank, mesh_of(given))
    draw = torch.Generator().manual_seed(0)
    return plan, [(torch.randn(x.shape, generator=draw) * 50).to(x.dtype) for x in recipe.values], recipe.treedef


def test_what_tp_ranks_hold_alike_is_written_by_the_first():
    plan, whole, treedef = over_tp({"dp": 2, "tp": 2})
    memory = [storage.shards(plan, whole, rank) for rank in range(4)]
    taken = [take(plan, memory[rank], rank, treedef=treedef, step=0) for rank in range(4)]
    pieces = {x.path: [(p.shard, p.start, p.stop) for p in x.pieces] for x in taken[0].manifest.leaves}
    assert {shard for shard, _, _ in pieces["params/w"]} >= {0, 1}
    assert {shard for path, found in pieces.items() for shard, _, _ in found if not path.endswith("w")} <= {0, 2}
    assert sum(one.nbytes for one in taken) == sum(x.nbytes for x in whole)
    for leaf, value in zip(plan.leaves, whole, strict=True):
        parts = [(span(plan, leaf, r), held(plan, memory[r], leaf, r)) for r in range(4)]
        found = torch.cat(
            [part for (start, stop), part in sorted(parts, key=lambda x: x[0]) if stop > start] or [value]
        )
        assert same_bits(found.reshape(-1), value.reshape(-1)), leaf  # by rows the order is that of the flattened leaf


def test_the_version_says_whether_a_leaf_has_a_cut():
    """A file without cuts is as it was before there were any: older versions read it. They refuse the others."""
    for mesh, version in (({"dp": 4}, 1), ({"dp": 2, "tp": 2}, 2)):
        plan, whole, treedef = over_tp(mesh)
        made = take(plan, storage.shards(plan, whole, 0), 0, treedef=treedef, step=0).manifest
        rows = json.loads(made.to_bytes())
        assert rows["version"] == version
        assert [row.get("cut", "none") for row in rows["leaves"] if row["path"] == "params/w"] == [
            "none" if version == 1 else {"dim": 0, "groups": 1, "ranks": 2}
        ]
        assert all(("cut" in row) == (version == 2) for row in rows["leaves"])


BAD_CUTS = {
    "no object": 3,
    "a dim that is not there": {"dim": 2, "groups": 1, "ranks": 2},
    "a negative dim": {"dim": -1, "groups": 1, "ranks": 2},
    "unequal parts": {"dim": 0, "groups": 1, "ranks": 4},
    "unequal groups": {"dim": 0, "groups": 2, "ranks": 2},
    "no groups": {"dim": 0, "groups": 0, "ranks": 2},
    "one rank": {"dim": 0, "groups": 1, "ranks": 1},
    "a list of one": [{"dim": 0, "groups": 1, "ranks": 2}],
    "more parts than there are": [{"dim": 0, "groups": 1, "ranks": 2}, {"dim": 0, "groups": 1, "ranks": 4}],
    "other groups of a dim": [{"dim": 1, "groups": 1, "ranks": 2}, {"dim": 1, "groups": 2, "ranks": 2}],
    "nine cuts": [{"dim": 0, "groups": 1, "ranks": 2}] * 9,
    "no objects": [1, 2],
    "a missing key": {"dim": 0, "groups": 1},
    "an unknown key": {"dim": 0, "groups": 1, "ranks": 2, "axis": "tp"},
}


@pytest.mark.parametrize("name", BAD_CUTS)
def test_a_bad_cut_is_refused(name, tmp_path):
    plan, whole, treedef = over_tp({"dp": 2, "tp": 2})
    memory = [storage.shards(plan, whole, rank) for rank in range(4)]
    saved_there = loading.write(tmp_path, plan, memory, treedef)
    rows = json.loads((saved_there / "manifest.json").read_bytes())
    Manifest.from_bytes(json.dumps(rows).encode())
    next(row for row in rows["leaves"] if row["path"] == "params/w")["cut"] = BAD_CUTS[name]
    with pytest.raises(CorruptError, match=re.escape("cut")):
        Manifest.from_bytes(json.dumps(rows).encode())
    rows["version"] = 1
    with pytest.raises(CorruptError, match="unknown key 'cut'"):
        Manifest.from_bytes(json.dumps(rows).encode())


def test_per_rank_leaves_are_stacked():
    def my_step(state, batch):
        return state, {}

    state = {"seen": fzero.per_rank(torch.zeros(2, 3)), "w": torch.zeros(4)}
    lowered = fzero.lower(fzero.Spec(step=my_step, params="w"), state, torch.ones(1), world_size=3)
    memory = [storage.shards(lowered.plan, [torch.full((2, 3), float(r)), torch.zeros(4)], r) for r in range(3)]
    parts = [take(lowered.plan, memory[r], r, treedef=tree.flatten(state)[2], step=0) for r in range(3)]
    record = parts[0].manifest.by_path["seen"]
    assert (record.shape, record.per_rank, [(p.shard, p.start, p.stop) for p in record.pieces]) == (
        (3, 2, 3), True, [(0, 0, 6), (1, 6, 12), (2, 12, 18)]
    )  # fmt: skip
    assert [float({p.path: p.data for p in one.parts}["seen"][0]) for one in parts] == [0.0, 1.0, 2.0]


# --- states, snapshots, arguments -------------------------------------------------------------------------------------


def test_a_snapshot_is_of_its_moment(tmp_path):
    """Steps after it, and a second snapshot in the memory of one that is written, change nothing in it."""
    state = trained()
    before = leaves_of(state)
    extra = {"position": [1]}
    first = snapshot(state, extra=extra)
    extra["position"].append(2)
    state = fzero.step(state, torch.ones(2, 6))
    found, leaves = saved.contents(write(first, tmp_path))
    assert same(leaves, before)
    assert found["extra"] == {"position": [1]}
    second = snapshot(state, reuse=first)
    assert second.block.data_ptr() == first.block.data_ptr()
    assert same(saved.contents(write(second, tmp_path))[1], leaves_of(state))


def test_training_goes_on_while_a_snapshot_is_written(tmp_path):
    state, disk = trained(), Paused()
    before = leaves_of(state)
    one = snapshot(state)
    thread = threading.Thread(target=write, args=(one, tmp_path), kwargs={"disk": disk})
    thread.start()
    assert disk.reached.wait(60)
    for _ in range(3):
        state = fzero.step(state, torch.ones(2, 6))
    assert saved.steps(tmp_path) == []
    disk.go.set()
    thread.join()
    assert same(saved.contents(tmp_path / "step-00000001")[1], before)


def test_a_donated_or_failed_state_is_refused_before_anything_is_written(tmp_path):
    old = trained()
    fzero.step(old, torch.ones(2, 6))
    with pytest.raises(DonatedError, match=r"cannot be saved: it was donated to fzero.step at step 2"):
        fzero.save(old, tmp_path / "run")
    with pytest.raises(DonatedError, match="cannot be saved"):
        snapshot(old)
    with pytest.raises(TreeError, match="needs a State, got dict"):
        fzero.save({}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"a": float("nan")}, r"extra\['a'\] is nan"),
        ({"a": [1, float("-inf")]}, r"extra\['a'\]\[1\] is -inf"),
        ({1: 2}, "extra has the key 1: needed text"),
        ({"a": (1, 2)}, r"extra\['a'\] is a tuple"),
        ({"a": torch.ones(1)}, r"extra\['a'\] is a Tensor"),
        ("\ud800", "extra is no text in UTF-8"),
        (10**4001, "more than 4,000 digits"),
    ],
)
def test_what_is_no_json_is_refused(extra, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        fzero.save(trained(0), tmp_path / "run", extra=extra)
    assert not (tmp_path / "run").exists()


def test_deep_extras_are_refused(tmp_path):
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper than 200"):
        fzero.save(trained(0), tmp_path, extra=deep)


# --- the directory of a run -------------------------------------------------------------------------------------------


def test_keep(tmp_path):
    state = trained(0)
    for _ in range(5):
        state = fzero.step(state, torch.ones(2, 6))
        fzero.save(state, tmp_path, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", *(f"step-{s:08d}" for s in (3, 4, 5))]
    for keep in (0, -1, 1.5, True):
        with pytest.raises(CheckpointError, match="needed a positive int"):
            fzero.save(state, tmp_path, keep=keep)
    fzero.save(trained(0), tmp_path, keep=1)  # gone back: what was just saved stays
    assert saved.steps(tmp_path) == [0]


def test_the_same_step_twice(tmp_path):
    state = trained()
    path = fzero.save(state, tmp_path, extra=1)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    assert fzero.save(state, tmp_path, extra=1) == path
    with pytest.raises(CheckpointError, match="saved here already, with other contents: it is kept"):
        fzero.save(state, tmp_path, extra=2)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-00000001"]


def test_a_step_that_was_loaded_is_saved_where_it_is(tmp_path):
    """A run that has ended is started again: it loads its last step, makes none, and saves it."""
    path = fzero.save(trained(), tmp_path, extra=1)
    before = (path / "manifest.json").read_bytes()
    for zero in (3, 0):
        again = fzero.load(tmp_path, spec(allow_unused=True, zero=zero))
        assert fzero.save(again, tmp_path, extra=1) == path
    assert (path / "manifest.json").read_bytes() == before
    with pytest.raises(CheckpointError, match="saved here already, with other contents"):
        fzero.save(trained(optimizer=fzero.optim.adamw(0.2)), tmp_path, extra=1)


def test_a_step_in_slices_of_other_ranks_is_not_called_another(tmp_path):
    paths, leaves, treedef = tree.flatten({"w": torch.arange(64.0)})
    one = fzero.Spec(step=lambda s, b: (s, {}))
    plans = [plan_for(one, paths, leaves, (), mesh_of(one, world)) for world in (1, 2)]
    memory = [[storage.shards(plan, leaves, rank) for rank in range(plan.world_size)] for plan in plans]
    loading.write(tmp_path, plans[0], memory[0], treedef)
    with pytest.raises(CheckpointError, match=r"already, over the mesh \{'dp': 1\}, in other slices.*: it is kept"):
        loading.write(tmp_path, plans[1], memory[1], treedef)


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "shard-00000.safetensors"])
def test_a_step_that_is_damaged_is_saved_again_beside_it(name, tmp_path):
    """A run that went on from an earlier step comes to one whose files are damaged: what is said to be saved loads."""
    state = trained()
    file = fzero.save(state, tmp_path) / name
    torn = file.read_bytes()[:-1]
    file.write_bytes(torn)
    path = fzero.save(state, tmp_path, keep=1)
    assert fzero.load(tmp_path, like=state).step == 1
    (aside,) = tmp_path.glob("step-00000001.damaged-*")
    assert (aside / name).read_bytes() == torn, "it is kept"
    assert fzero.save(trained(), tmp_path) == path


def test_what_nobody_could_read_is_not_committed(tmp_path, monkeypatch):
    state = trained()
    monkeypatch.setattr(fzero.checkpoint.commit.records, "MAX_MANIFEST", 10_000)
    with pytest.raises(
        CheckpointError, match=r"needs a manifest of .* bytes, at most 10,000 are allowed: save less extra"
    ):
        fzero.save(state, tmp_path, extra="x" * 10_000)
    fzero.save(state, tmp_path, extra="x")
    assert manifest(tmp_path).extra == "x"


def test_a_run_in_the_directory_of_another_is_warned(tmp_path, caplog):
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "notes.txt").touch()
    state = trained(2)
    caplog.clear()
    fzero.save(state, tmp_path)
    assert not caplog.text
    fzero.save(trained(1), tmp_path)
    assert "step-00000002 is newer: it is what a load of this run takes" in caplog.text


def test_two_jobs_in_one_directory(tmp_path):
    disk, one = Paused(), snapshot(trained())
    thread = threading.Thread(target=write, args=(one, tmp_path), kwargs={"disk": disk})
    thread.start()
    assert disk.reached.wait(60)
    with pytest.raises(CheckpointError, match="another save into this directory is at work"):
        fzero.save(trained(0), tmp_path)
    disk.go.set()
    thread.join()
    assert saved.steps(tmp_path) == [1]


def test_what_is_not_ours_is_left_alone(tmp_path):
    """Files of the user, a step's directory with a strange file in it, links to elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("mine")
    run = tmp_path / "run"
    (run / "step-00000009").mkdir(parents=True)
    (run / "step-00000009" / "notes.txt").write_text("mine")
    (run / ".tmp-step-00000008-01234567").mkdir()
    (run / "step-00000007").symlink_to(outside)
    (run / "readme").write_text("mine")
    state = trained()
    fzero.save(state, run, keep=1)
    assert (outside / "manifest.json").read_text() == "mine"
    assert {p.name for p in run.iterdir()} == {
        ".lock", "latest", "readme", "step-00000001", "step-00000007", "step-00000009"
    }  # fmt: skip
    (run / "step-00000002").mkdir()
    (run / "step-00000002" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already and is no checkpoint of fzero: move it away"):
        fzero.save(fzero.step(state, torch.ones(2, 6)), run)
    assert (run / "step-00000002" / "notes.txt").read_text() == "mine"


def test_a_stale_marker(tmp_path, caplog):
    """Is passed over by who looks for the newest, refused by who asks for this one, and never removed."""
    state = trained()
    first = fzero.save(state, tmp_path)
    second = fzero.save(fzero.step(state, torch.ones(2, 6)), tmp_path)
    (second / "COMMITTED").write_bytes((first / "COMMITTED").read_bytes())
    assert manifest(tmp_path).step == 1
    assert "its marker is not that of its manifest.json" in caplog.text
    with pytest.raises(CorruptError, match=r"COMMITTED: does not belong to manifest.json"):
        manifest(second)
    fzero.save(trained(3), tmp_path, keep=2)
    assert saved.steps(tmp_path) == [1, 3]
    assert second.exists()
    (first / "COMMITTED").unlink()
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
        manifest(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        manifest(tmp_path / "nowhere")


def test_links_and_pipes_are_not_followed(tmp_path):
    path = fzero.save(trained(), tmp_path / "run")
    (tmp_path / "elsewhere").write_bytes((path / "manifest.json").read_bytes())
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match=r"manifest.json: is a link or no plain file"):
        manifest(path)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CorruptError, match=r"manifest.json: is no plain file"):
        manifest(path)


def test_a_step_that_was_moved_and_linked_is_the_newest_and_stays(tmp_path):
    """It was passed over in silence: a run went on from an older step, or began anew."""
    run, there = tmp_path / "run", tmp_path / "there"
    state = trained(2)
    fzero.save(state, run).rename(there)
    (run / "step-00000002").symlink_to(there)
    assert fzero.load(run, like=state).step == 2
    with fzero.Checkpointer(run) as saver:
        assert saver.resume(params(), spec(allow_unused=True)).step == 2
    for steps in (3, 4):
        fzero.save(trained(steps), run, keep=1)
    assert sorted(p.name for p in run.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert (there / "COMMITTED").is_file()
    (run / "step-00000005").symlink_to("gone")
    assert fzero.load(run, spec(allow_unused=True)).step == 4


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.sampled(1)
def test_every_operation_may_fail(number, tmp_path):
    """Whichever it is: the error names a file of the run and says what to do, the older checkpoints stay, and the next
    save succeeds and leaves nothing behind."""
    state = fzero.init(params(), spec(allow_unused=True))
    ones = [snapshot(state)]
    for _ in range(2):
        state = fzero.step(state, torch.ones(2, 6))
        ones.append(snapshot(state))
    counted = Failing()
    write(ones[0], tmp_path / "count")
    write(ones[1], tmp_path / "count", keep=1, disk=counted)
    assert len(counted.log) > 40
    for at, (kind, path) in enumerate(counted.log):
        run = tmp_path / str(at)
        write(ones[0], run)
        after = [name for name, _ in counted.log[:at]].count("rename") > 1  # COMMITTED has its name
        disk = Failing(at, number)
        failed = failure(lambda run=run, disk=disk: write(ones[1], run, keep=1, disk=disk))
        if failed is None:
            assert 1 in saved.steps(run), (kind, path)
        else:
            assert failed.errno == number
            assert f"{failed.file}/".startswith(f"{run}/")
            assert ADVICE[number] in str(failed)
            assert kind.replace("_", " ") in str(failed)
            assert saved.steps(run) == ([0, 1] if after else [0]), (kind, path)
            assert not list(run.glob(".tmp*")), "the space is not freed"
        for step in saved.steps(run):
            saved.contents(run / f"step-{step:08d}")
        write(ones[2], run, keep=1)
        assert saved.steps(run) == [2]
        assert sorted(p.name for p in run.iterdir()) == [".lock", "latest", "step-00000002"]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EROFS, "mkdir", "the file system is read-only: save to another directory"),
        (errno.EACCES, "lock", "this user may not: change the permissions"),
        (errno.EDQUOT, "sync", "your quota is used up: remove files, keep fewer"),
        (errno.EMFILE, "create", "too many files open"),
        (errno.ESTALE, "close", "the network file system lost the file"),
        (errno.ENXIO, "sync", "sync failed: No such device or address"),
    ],
)
def test_errors_say_what_to_do(number, kind, said, tmp_path):
    one, counted = snapshot(trained()), Failing()
    write(one, tmp_path / "count", disk=counted)
    at = next(n for n, (name, _) in enumerate(counted.log) if name == kind)
    with pytest.raises(CheckpointError, match=said) as caught:
        write(one, tmp_path / "run", disk=Failing(at, number))
    assert caught.value.file.startswith(str(tmp_path / "run"))
    assert write(one, tmp_path / "run").name == "step-00000001"


def test_no_room(tmp_path):
    """Is said before anything is written."""

    class Full(Failing):
        def free(self, path):
            return 100

    disk = Full()
    with pytest.raises(CheckpointError, match="needs 812 bytes and the disk has 100: free some space"):
        write(snapshot(trained()), tmp_path, disk=disk)
    assert "create" not in [kind for kind, _ in disk.log]


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="a directory was needed here or above, and a file is in its place"):
            fzero.save(trained(), path)


def test_torn_writes(tmp_path, monkeypatch):
    """The kernel says that it wrote, and did not. A lost tail is seen when the checkpoint is committed, a hole in the
    middle by its hash when it is read: `saved.contents` fails here, as a load does."""
    real, one = os.writev, snapshot(trained())

    def tail(fd, views):
        data = b"".join(views)
        real(fd, [data[:-10]])
        return len(data)

    def hole(fd, views):
        data = b"".join(views)
        return real(fd, [data[:-20], bytes(10), data[-10:]])

    monkeypatch.setattr(os, "writev", tail)
    with pytest.raises(
        CheckpointError, match=r"shard-00000.safetensors: rank 0 has written [\d,]+ bytes, the file has"
    ):
        write(one, tmp_path)
    monkeypatch.setattr(os, "writev", lambda fd, views: (hole if sum(map(len, views)) > 1000 else real)(fd, views))
    path = write(one, tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        saved.contents(path)


def test_short_writes_are_finished(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: real(fd, [views[0][:7]]))
    state = trained()
    assert same(saved.contents(fzero.save(state, tmp_path))[1], leaves_of(state))


def test_a_power_loss_between_any_two_operations():
    """What has no sync behind it may be gone after one. When the marker gets its name, all that it vouches for has one:
    the bytes of each file, the names in the directory, the directory's name; and a prune loses the marker first."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run, disk = Path(folder), Failing()
        write(snapshot(trained(0)), run)
        write(snapshot(trained(1)), run, keep=1, disk=disk)
    log, renamed = disk.log, [i for i, (kind, _) in enumerate(disk.log) if kind == "rename"]
    to_final, to_marker, to_latest = renamed
    final = log[to_final][1]
    assert [log[i][1] for i in renamed] == [run / "step-00000001", final / "COMMITTED", run / "latest"]
    written = {path for kind, path in log[:to_final] if kind == "create"}
    assert {p.name for p in written} == {"shard-00000.safetensors", "manifest.json"}
    for path in written:
        ops = [kind for kind, p in log[:to_final] if p == path]
        assert ops.index("sync") > max(i for i, kind in enumerate(ops) if kind == "write")
    made = max(i for i, (kind, _) in enumerate(log[:to_final]) if kind == "create")
    (temporary,) = {path.parent for path in written}
    assert ("sync_directory", temporary) in log[made:to_final]
    assert ("sync_directory", run) in log[to_final:to_marker]
    assert ("sync", final / ".COMMITTED") in log[to_final:to_marker]
    assert ("sync_directory", final) in log[to_marker:to_latest]
    old = run / "step-00000000"
    pruned = [entry for entry in log[to_latest:] if entry[0] in ("unlink", "sync_directory", "rmdir")]
    assert pruned[:4] == [
        ("sync_directory", run),
        ("unlink", old / "COMMITTED"),
        ("sync_directory", old),
        ("unlink", old / "manifest.json"),
    ]


def test_kills():
    """A part of what tests/acceptance does with every operation."""
    assert kills("1:8", "2:4") == [(8, []), (4, [])]


@pytest.mark.parametrize(("kind", "count"), [("manifest", 400), ("header", 300), ("marker", 300)])
def test_damaged_files(kind, count, tmp_path):
    """A part of what tests/acceptance reads."""
    ends = fuzzed.read_damaged(saved_by_two(tmp_path), tmp_path, kind, count, seed=0)
    assert ends["refused"] > 0.9 * count


# --- several ranks ----------------------------------------------------------------------------------------------------


def _two_ranks(folder):
    folder = Path(folder)
    state = fzero.init({"w": torch.arange(180.0).view(6, 30), "deep": [torch.ones(7)]}, spec())
    state = fzero.step(state, torch.ones(2, 6))
    rank, said = state.runtime.rank, []

    def refused(call):
        try:
            call()
        except (CheckpointError, DisagreementError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    path = fzero.save(state, folder / "run", extra={"position": 7})
    refused(lambda: fzero.save(state, folder / "run", extra={"position": rank}))
    refused(lambda: fzero.save(state, folder / "run", extra={rank: 1} if rank else None))
    refused(lambda: fzero.save(state, folder / f"of-{rank}"))
    refused(lambda: fzero.step(state, torch.ones(2, 6)) if rank else fzero.save(state, folder / "run"))
    full = leaves_of(state)
    state = fzero.step(state, torch.ones(2, 6))
    counted = Failing()
    one = snapshot(state)
    for number, name in ((errno.ENOSPC, "create"), (errno.EIO, "sync")):
        at = {"create": 1, "sync": 3}[name] if rank == 1 else -1
        refused(lambda at=at, number=number: write(one, folder / "run", disk=Failing(at, number)))
    refused(lambda: fzero.save(state, folder / "run", disk=Failing(5 if rank == 0 else -1, errno.EDQUOT)))
    write(one, folder / "run", keep=1, disk=counted)
    return path, full, said, leaves_of(state), [kind for kind, _ in counted.log]


def test_two_ranks(tmp_path):
    """Each writes its part once; what fails on one is said on both, with the rank and the file."""
    (path, full, said, later, _), (path1, _, said1, _, kinds) = values(gloo(2, _two_ranks, str(tmp_path)))
    assert path == path1
    assert kinds == ["names", "create", "write", "sync", "close"]
    assert not path.exists(), "keep=1"
    assert saved.steps(tmp_path / "run") == [2]
    found, leaves = saved.contents(tmp_path / "run" / "step-00000002")
    assert same(leaves, later)
    assert not same(leaves, full)
    assert {piece["shard"] for leaf in found["leaves"] for piece in leaf["pieces"]} == {0, 1}
    assert said == said1
    shard = r"shard-00001.safetensors: rank 1 failed while writing its shard: "
    for text, pattern in zip(said, [
        "DisagreementError: .*extra is not the same",
        "CheckpointError: the state to save: rank 1 failed while beginning a save: extra has the key 1",
        "CheckpointError: .*rank 1 failed while writing its shard: rank 0 has made this directory, and it is not here",
        "DisagreementError: the ranks do not run the same program .rank 0: save; rank 1: step 2 of .*different calls",
        f"CheckpointError: .*{shard}create failed: No space left on device; the disk is full",
        f"CheckpointError: .*{shard}sync failed: Input/output error; the device failed",
        "CheckpointError: .*run.*: rank 0 failed while preparing a save: .*your quota is used up",
    ], strict=True):  # fmt: skip
        assert re.match(pattern, text, re.DOTALL), text


def _lost_in_a_save(folder):
    """Rank 1 is killed when it sends its first note of a save; rank 0 writes down what it is told."""
    state = trained(zero=2)
    if os.environ["RANK"] == "1":
        ranks.Ranks.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        fzero.save(state, folder)
    except CheckpointError as error:
        Path(folder, "said").write_text(str(error))


def test_a_rank_that_is_lost_in_a_save_is_named(tmp_path):
    """Gloo's words were passed on, of a pair and a connection, without a rank."""
    gloo(2, _lost_in_a_save, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert "a rank was lost while beginning a save: rank 1 is missing: it does not answer" in said
    assert "rank 0: waiting in save" in said
