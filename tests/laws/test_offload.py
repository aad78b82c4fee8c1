"""Where leaves are held never changes a bit: device, host, disk, and any mixture, at every stage and world.

`run` interprets the programs of all ranks with poisoned memory: a copy that is read before its move was waited for, or
after it is gone, is NaN. What lies on disk is memory there.
"""

import errno
import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept
import pytest
import torch
import tp_models
from helpers import differing, gloo, run, values
from models import GPT, MLP, UNTIED
from torch import Tensor

import fzero
from fzero import tree
from fzero.compile import decide
from fzero.compile.decide import reduce_when, update_place
from fzero.cost import step_time
from fzero.cost.rates import H100, Rates
from fzero.disk import Disk, disk_file
from fzero.ir.decisions import Choice
from fzero.state import homes as homes_of_state

TX = {
    "adamw": lambda: fzero.optim.adamw(1e-2),
    "sgd": lambda: fzero.optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw8": lambda: fzero.optim.adamw8bit(1e-2),
    "muon": lambda: fzero.optim.muon(1e-2, others=fzero.optim.adamw(1e-2)),
}
HOMES: dict[str, Any] = {
    "optimizer on cpu": "optimizer",
    "all on cpu": "optimizer+params",
    "optimizer on nvme": {"opt_state/**": "nvme"},
    "all on nvme": {"**": "nvme"},
    "clipped gradients on nvme": {"grads/**": "nvme", "**": "nvme"},
    "clipped gradients on cpu": {"grads/**": "cpu", "optimizer": "cpu"},
    "mixed": {"**/out*": "device", "opt_state/**": "nvme", "params/**": "cpu"},
}
OPTIONS: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (1, 3, "adamw", {}),
    (2, 0, "adamw", {"clip_norm": 0.3}),
    (2, 1, "sgd", {"microbatches": 2, "reduce": "end"}),
    (2, 2, "adamw", {"precision": "bf16", "clip_norm": 0.3}),
    (2, 3, "adamw", {"microbatches": 2, "reduce": "each", "clip_norm": 0.3}),
    (2, 3, "adamw", {"precision": "bf16"}),
    (2, 3, "adamw8", {}),
    (2, 3, "muon", {}),
    (3, 1, "adamw", {"trainable": "part"}),
    (3, 3, "adamw", {"precision": "fp16", "bucket_bytes": 256}),
)
CASES = [(*options, home) for options in OPTIONS for home in HOMES]
SMALL_TILES = replace(decide.DECIDERS, tile_bytes=lambda program: Choice(4096))


def spec(model: Any, tx: Any, **options: Any) -> fzero.Spec:
    rules = options.get("offload")
    if isinstance(rules, dict) and "nvme" in rules.values():
        options["nvme_path"] = "/tmp"
    return fzero.Spec(loss=model.loss, optimizer=tx, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["mlp", "tiles of untied"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
@pytest.mark.parametrize(
    ("world", "zero", "tx", "options", "home"), CASES, ids=[f"{w}-{z}-{t}-{'-'.join(o)}-{h}" for w, z, t, o, h in CASES]
)
def test_bits_do_not_depend_on_where_leaves_are_held(
    world: int,
    zero: int,
    tx: str,
    options: dict[str, Any],
    home: str,
    update_on: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
) -> None:
    """Copies of whole columns; then tiles of 1,024 elements, several of the large columns. Three steps, or 20."""
    steps = 20 if whole else 3
    if model != "mlp":
        monkeypatch.setattr(decide, "DECIDERS", SMALL_TILES)
    chosen = MLP if model == "mlp" else UNTIED
    if "trainable" in options:
        options = {"trainable": "layers/**" if chosen is MLP else "[eh]*"}
    params, optimizer = chosen.init(fzero.random.key(0)), TX[tx]()
    plain = run(spec(chosen, optimizer, zero=zero, **options), params, chosen.batch, world=world, steps=steps)
    moved = spec(chosen, optimizer, zero=zero, offload=HOMES[home], update_on=update_on, **options)
    found = run(moved, params, chosen.batch, world=world, steps=steps)
    assert differing(plain.final, found.final) == []
    assert plain.losses() == found.losses()
    assert any(op.moves for op in found.lowered.program.ops)
    assert not any(op.moves for op in plain.lowered.program.ops)
    tiled = any(ref.tile for op in found.lowered.program.ops for ref in op.reads)
    if tx != "adamw8":  # the scales of a tile are to fill pages of the disk: these columns are too small for two tiles
        assert tiled == (model != "mlp")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("home", ["optimizer on cpu", "all on cpu", "all on nvme"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.3, "precision": "bf16"}], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    ("mesh", "zero"), [({"tp": 2}, 0), ({"tp": 2}, 3), ({"dp": 2, "tp": 2}, 1), ({"dp": 2, "tp": 2}, 3)]
)
def test_bits_over_tp_do_not_depend_on_where_leaves_are_held(
    mesh: dict[str, int], zero: int, options: dict[str, Any], update_on: str, home: str
) -> None:
    model, tx, world = tp_models.gpt(layers=1), TX["adamw"](), 2 * mesh.get("dp", 1)
    given = {"mesh": mesh, "shard": model.rules, "zero": zero, **options}

    def ran(**homes: Any) -> Any:
        return run(spec(model, tx, **given, **homes), model.params, model.batch, world=world, steps=2)

    plain, moved = ran(), ran(offload=HOMES[home], update_on=update_on)
    assert differing(plain.final, moved.final) == []
    assert plain.losses() == moved.losses()
    assert any(op.moves for op in moved.lowered.program.ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("homes", [*(name for name in HOMES if name != "mixed"), "activations"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.3, "precision": "bf16"}], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    ("mesh", "zero", "schedule"),
    [
        ({"pp": 2}, 0, "1f1b"),
        ({"pp": 2}, 3, "gpipe"),
        ({"pp": 2, "dp": 2}, 1, "zb-h1"),
        ({"pp": 2, "dp": 2}, 3, "1f1b"),
    ],
)
def test_bits_of_a_pipeline_do_not_depend_on_where_leaves_are_held(
    mesh: dict[str, int], zero: int, schedule: str, options: dict[str, Any], update_on: str, homes: str
) -> None:
    """Each role moves what it holds. A cast of a leaf that another role reads lies on the device."""
    params, tx, world = GPT.init(fzero.random.key(0)), TX["adamw"](), 2 * mesh.get("dp", 1)
    given = {"mesh": mesh, "pipeline": fzero.Pipeline(schedule), "zero": zero, "microbatches": 2, **options}
    moves = {"offload": HOMES[homes], "update_on": update_on} if homes in HOMES else {"remat": "offload"}

    def ran(**homes: Any) -> Any:
        return run(spec(GPT, tx, **given, **homes), params, GPT.batch, world=world, steps=2)

    plain, moved = ran(), ran(**moves)
    assert differing(plain.final, moved.final) == []
    assert plain.losses() == moved.losses()
    assert any(op.moves for program in moved.lowered.programs.values() for op in program.ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("home", ["all on cpu", "all on nvme", "optimizer on cpu", "params on cpu", "activations"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
@pytest.mark.parametrize("reduce", ["end", "each"])
@pytest.mark.parametrize("zero", [1, 2, 3, 0, "hsdp", "hpz"])
def test_bits_on_two_data_axes_do_not_depend_on_where_leaves_are_held(
    zero: Any, reduce: str, update_on: str, home: str
) -> None:
    """A gather over both axes is two: what they bring together after an update is not fetched in between."""
    moves = {"offload": {**HOMES, "params on cpu": {"params": "cpu"}}.get(home), "update_on": update_on}
    moves = {"remat": "offload", "offload": {"params": "cpu"}} if home == "activations" else moves
    given = {"mesh": {"dp_out": 2, "dp": 2}, "zero": zero, "microbatches": 2, "reduce": reduce}
    tx, params = TX["adamw"](), MLP.init(fzero.random.key(0))

    def ran(**homes: Any) -> Any:
        return run(spec(MLP, tx, **given, **homes), params, MLP.batch, world=4, steps=2)

    plain, moved = ran(), ran(**moves)
    assert differing(plain.final, moved.final) == []
    assert plain.losses() == moved.losses()
    assert any(op.moves for op in moved.lowered.program.ops)


@pytest.mark.parametrize(("beside", "chosen"), [(0.999, "each"), (1.001, "end")])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.acceptance
def test_what_moves_a_planned_peak_does_not_choose_reduce(
    mesh: dict[str, int], beside: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reduce=None` at the edge between its two sums: homes, stages and prefetch choose the same, and have its bits."""
    world, given = 2 * mesh.get("pp", 1), {"mesh": mesh, "microbatches": 2}
    params, tx = GPT.init(fzero.random.key(0)), TX["adamw"]()
    lowered = kept.lower(spec(GPT, tx, **given), params, GPT.batch(0, 0), world)
    graph, low, high = lowered.graph, 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        monkeypatch.setattr(reduce_when, "MORE", middle)
        low, high = (
            (middle, high) if reduce_when.reduce_by_bytes(graph, lowered.plan).value == "each" else (low, middle)
        )
    monkeypatch.setattr(reduce_when, "MORE", beside * high)
    kinds: list[dict[str, Any]] = [{}, {"remat": "offload"}, {"prefetch": 0}, {"prefetch": 2, "zero": 3}]
    kinds += [{"zero": zero, "offload": HOMES[home]} for zero in (1, 2, 3) for home in ("all on cpu", "all on nvme")]
    plain, *others = [run(spec(GPT, tx, **given, **kind), params, GPT.batch, world=world, steps=2) for kind in kinds]
    assert {found.lowered.reduce for found in (plain, *others)} == {chosen}
    for kind, found in zip(kinds[1:], others, strict=True):
        assert differing(plain.final, found.final) == [], kind
        assert plain.losses() == found.losses(), kind


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp_out": 2, "dp": 2}])
def test_a_parameter_is_fetched_and_kept_once_an_update(mesh: dict[str, int]) -> None:
    """On two data axes as on one: from the update to the gather that brings it together it stays on the device."""
    given = {"mesh": mesh, "zero": 1, "microbatches": 2, "reduce": "end", "offload": {"params": "cpu"}}
    lowered = kept.lower(spec(MLP, TX["adamw"](), **given), MLP.init(fzero.random.key(0)), MLP.batch(0, 0), 4)
    ops, held = lowered.program.ops, [name for name, b in lowered.program.buffers.items() if b.kind == "param"]
    assert held
    for name in held:
        assert sum(op.moves and op.target == name for op in ops) == 1, name


# --- real memory and real files ---------------------------------------------------------------------------------------

ADAMW = fzero.optim.adamw(1e-2)


def train(options: dict[str, Any], steps: range, state: Any = None) -> tuple[Any, list[float]]:
    """The state after these steps, and their losses; the state's tiles are of 1,024 elements."""
    if state is None:
        state = fzero.init(UNTIED.init(fzero.random.key(0)), fzero.Spec(loss=UNTIED.loss, optimizer=ADAMW, **options))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    losses = []
    for number in steps:
        state = fzero.step(state, UNTIED.batch(rank, number))
        losses.append(float(state.metrics["loss"]))
    return state, losses


def leaves(state: Any) -> dict[str, Tensor]:
    """The whole leaves, by path, on every rank."""
    paths, found, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, found, strict=True))


def homes(folder: Path) -> dict[str, dict[str, Any]]:
    disk = {"nvme_path": str(folder)}
    return {
        "none": {},
        "cpu": {"offload": "optimizer+params"},
        "nvme": {"offload": {"**": "nvme"}, **disk},
        "mixed": {"offload": {"params/output": "device", "optimizer": "nvme", "**": "cpu"}, **disk},
    }


def in_a_world(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """In a rank's process: of each home the losses, the state, the bytes held, and what lies in the folder."""
    decide.DECIDERS = SMALL_TILES
    result = {}
    with kept.captures():
        for name, home in homes(folder).items():
            state, losses = train({**options, **home}, range(3))
            result[name] = losses, leaves(state), state.held_bytes, os.listdir(folder)
    return result


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"zero": 3, "transfers": "shared", "clip_norm": 1.0}),
        pytest.param(2, {"zero": 2, "transfers": "p2p", "precision": "bf16"}, marks=pytest.mark.acceptance),
        pytest.param(3, {"zero": 3, "microbatches": 2, "transfers": "p2p"}, marks=pytest.mark.acceptance),
    ],
    ids=["2 shared", "2 p2p", "3"],
)
@pytest.mark.acceptance
def test_ranks_with_files_of_their_own_give_the_same_bits(world: int, options: dict[str, Any], folder: Path) -> None:
    for found in values(gloo(world, in_a_world, folder, options)):
        losses, state, _, _ = found["none"]
        for name, (other_losses, other, held, files) in found.items():
            assert other_losses == losses, name
            assert differing(state, other) == [], name
            assert files == [], f"{name} left files"
            assert (held.get("disk", 0) > 0) == (name in ("nvme", "mixed"))
        assert found["nvme"][2]["param"] == found["nvme"][2]["optimizer"] == 0


def in_a_pipeline(folder: Path) -> list[Any]:
    """In a role's process: losses and leaves of each home; on disk, with a checkpoint on the way."""
    found = []
    for home in ({}, {"offload": {"**": "nvme"}, "nvme_path": folder}):
        given = fzero.Spec(
            loss=GPT.loss,
            optimizer=ADAMW,
            mesh={"pp": 2},
            microbatches=2,
            clip_norm=1.0,
            pipeline=fzero.Pipeline("1f1b"),
            **home,
        )
        state, losses = fzero.init(GPT.init(fzero.random.key(0)), given), []
        for number in range(4):
            state = fzero.step(state, GPT.batch(0, number))
            losses.append(float(state.metrics["loss"]))
            if home and number == 1:
                state = fzero.load(fzero.save(state, folder / "run"), given)
        found.append((losses, leaves(state), state.held_bytes.get("disk", 0)))
    return found


def test_the_roles_of_a_pipeline_have_files_of_their_own(folder: Path) -> None:
    for plain, moved in values(gloo(2, in_a_pipeline, folder)):
        assert plain[0] == moved[0]
        assert differing(plain[1], moved[1]) == []
        assert plain[2] == 0 < moved[2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["none", "cpu", "nvme", "mixed"])
def test_a_checkpoint_goes_from_any_home_to_any_other(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved after two steps under one home, loaded under another, two more steps: the bits of four under one."""
    monkeypatch.setattr(decide, "DECIDERS", SMALL_TILES)
    monkeypatch.setattr(homes_of_state, "ROUND_BYTES", 20_000)
    whole, losses = train({}, range(4))
    source = homes(folder)[name]
    state, first = train(source, range(2))
    fzero.save(state, folder / "run")
    for other, home in homes(folder).items():
        loaded = fzero.load(folder / "run", fzero.Spec(loss=UNTIED.loss, optimizer=ADAMW, **home))
        after, rest = train(home, range(2, 4), loaded)
        assert first + rest == losses, other
        assert differing(leaves(after), leaves(whole)) == [], other
    later, _ = train(source, range(2, 3), state)
    again, rest = train(source, range(2, 4), fzero.load(folder / "run", like=later))
    assert first + rest == losses
    assert differing(leaves(again), leaves(whole)) == []


def test_a_snapshot_of_what_lies_on_disk_stays_while_steps_go_on(folder: Path) -> None:
    state, _ = train(homes(folder)["nvme"], range(1))
    taken, before = fzero.checkpoint.snapshot(state), leaves(state)
    train({}, range(1, 2), state)
    fzero.checkpoint.write(taken, folder / "run")
    loaded = fzero.load(folder / "run", fzero.Spec(loss=UNTIED.loss, optimizer=ADAMW))
    assert differing(leaves(loaded), before) == []


# --- what is said, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "optimiser"}, "needed one of ['optimizer', 'optimizer+params']. Did you mean 'optimizer'?"),
        ({"offload": {"params/**": "gpu"}}, 'needed path rules to "device", "cpu" or "nvme"'),
        ({"offload": {"**": "nvme"}}, "'nvme' needed nvme_path=, a folder on a fast local disk"),
        ({"offload": "optimizer", "nvme_path": "/tmp"}, "needed a rule of offload= to 'nvme', or none"),
        ({"nvme_path": "/tmp"}, "needed offload=, which says what lies off the device"),
        ({"update_on": "cpu"}, "needed offload=, which says what lies off the device"),
        ({"offload": "optimizer", "update_on": "gpu"}, "needed one of [None, 'device', 'cpu']"),
        ({"device_bytes": -1}, "needed a positive int"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_written(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fzero.SpecError, match=re.escape(says)):
        fzero.Spec(loss=UNTIED.loss, optimizer=ADAMW, **options)


def lower(**options: Any) -> fzero.Lowered:
    given = fzero.Spec(loss=UNTIED.loss, optimizer=options.pop("optimizer", ADAMW), **options)
    with kept.captures():
        return fzero.lower(given, UNTIED.init(fzero.random.key(0)), UNTIED.batch(0, 0), world_size=2)


def deep(depth: int, width: int) -> Any:
    return {"layers": [torch.empty(width, width, device="meta") for _ in range(depth)]}


def deep_loss(params: Any, x: Tensor) -> Tensor:
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return x.square().mean()


def test_a_rule_that_matches_no_leaf_or_moves_none_is_refused() -> None:
    with pytest.raises(fzero.SpecError, match=r"offload=...\): the rule 'param/\*\*' matches no leaf"):
        lower(offload={"param/**": "cpu"})
    spec = fzero.Spec(loss=lambda p, x: (x @ p["layers"][0]).sum(), optimizer=ADAMW, offload={"layers/**": "cpu"})
    with pytest.raises(fzero.SpecError, match=r"'layers/\*\*' matches no leaf. Did you mean 'params/layers/\*\*'"):
        fzero.lower(spec, deep(2, 8), torch.empty(4, 8), world_size=2)
    with pytest.raises(fzero.SpecError, match="all that it matches stays on the device, as opt_state/count"):
        lower(offload={"opt_state/count": "cpu"})


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_works() -> None:
    plain = lower(offload="optimizer")
    assert plain.memory.spaces == {**plain.memory.spaces, "device": plain.memory.peak, "disk": 0}
    with pytest.raises(
        fzero.SpecError, match=r"needs [\d,]+ bytes of the device on a rank, most of them at op \d+"
    ) as found:
        lower(offload="optimizer", device_bytes=plain.memory.peak // 2)
    least = int(re.findall(r"The least that works is device_bytes=(\d+)", str(found.value))[0])
    fits = lower(offload="optimizer", device_bytes=least)
    assert fits.memory.spaces["device"] == least <= plain.memory.peak
    with pytest.raises(fzero.SpecError, match="device_bytes"):
        lower(offload="optimizer", device_bytes=least - 1)
    with pytest.raises(fzero.SpecError, match=r"host_bytes=1000.*Or keep more on 'nvme'"):
        lower(offload="optimizer", host_bytes=1000)


@pytest.mark.parametrize("space", ["disk", "host"])
def test_clipped_gradients_may_wait_off_the_device(space: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is written and read once, what does not is not, and the choice says so."""
    monkeypatch.setattr("fzero.passes.offload.place_moves.IN_FLIGHT", 0)  # all of this model would be
    to = {"disk": "nvme", "host": "cpu"}[space]

    def lower(rules: Any, **options: Any) -> fzero.Lowered:
        away = {"nvme_path": str(folder), "update_on": "device"}
        given = fzero.Spec(loss=deep_loss, optimizer=ADAMW, zero=3, offload=rules, **away, **options)
        return fzero.lower(given, deep(8, 64), torch.empty(8, 64, device="meta"), world_size=2)

    rules = {"optimizer": "nvme"}
    stays, waits = lower(rules, clip_norm=1.0), lower({**rules, "grads/**": to}, clip_norm=1.0)
    kept = [b for b in waits.program.buffers.values() if b.kind == "grad" and b.space == space]
    size = sum(b.nbytes for b in kept)
    assert len(kept) >= 6
    assert f"{size:,} bytes on the {space}" in waits.choices["gradients"]
    for way in (f"device→{space}", f"{space}→device"):
        assert waits.memory.lanes[way] - stays.memory.lanes.get(way, 0) == size
    assert waits.memory.spaces["device"] < stays.memory.spaces["device"]
    free = lower({**rules, "grads/**": to})
    assert free.choices["gradients"].startswith("no gradient waits for others")
    assert free.program.ops == lower(rules).program.ops
    assert "gradients" not in stays.choices


@pytest.mark.sampled(1)
@pytest.mark.parametrize("to", ["nvme", "cpu"])
@pytest.mark.parametrize(("world", "options"), [(2, {"zero": 3, "microbatches": 2}), (3, {"zero": 1}), (1, {})])
def test_bits_do_not_depend_on_where_clipped_gradients_wait(
    to: str, world: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of 1,024 elements, of which the slices of a layer have several."""
    monkeypatch.setattr(decide, "DECIDERS", SMALL_TILES)
    keys = fzero.random.split(fzero.random.key(0), 5)
    params = {"layers": [fzero.random.normal(key, (96, 96)) * 0.1 for key in keys]}
    options = {"loss": deep_loss, "optimizer": ADAMW, "clip_norm": 0.01, "bucket_bytes": 1 << 10, **options}

    def batch(rank: int, number: int) -> Tensor:
        return torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * number + rank))

    plain = run(fzero.Spec(**options), params, batch, world=world, steps=3)
    path = "/tmp" if to == "nvme" else None
    for rules in ({"optimizer": to}, {"params/**": "device"}):
        away = fzero.Spec(**options, offload={"grads/**": to, **rules}, nvme_path=path)
        found = run(away, params, batch, world=world, steps=3)
        assert differing(plain.final, found.final) == []
        assert plain.losses() == found.losses()
        held = {"nvme": "disk", "cpu": "host"}[to]
        buffers = found.lowered.program.buffers.values()
        assert sum(b.kind == "grad" and b.space == held for b in buffers) >= 2


def test_a_file_grows_for_gradients(folder: Path) -> None:
    """Nothing of the state lies on disk; two programs, of which the first has no gradient that waits."""
    params = {"layers": [torch.ones(96, 96) / 96 for _ in range(5)]}
    finals, files = [], []
    for away in ({}, {"offload": {"grads/**": "nvme"}, "nvme_path": str(folder)}):
        given = fzero.Spec(loss=deep_loss, optimizer=ADAMW, clip_norm=0.01, bucket_bytes=1 << 10, **away)
        state = fzero.init(params, given)
        for rows in (2, 4, 4):
            state = fzero.step(state, torch.ones(rows, 96))
        finals.append(leaves(state))
        files.append(state.runtime.memory.file)
    assert differing(*finals) == []
    assert files[1].nbytes >= files[1].bytes_written / 3 >= 2 * 96 * 96 * 4
    assert files[1].bytes_read == files[1].bytes_written
    files[1].file.disk = Broken("allocate", 0)
    with pytest.raises(fzero.FzeroError, match=r"no file of .* bytes can be made here"):
        files[1].grow(1 << 30)
    assert files[1].nbytes < 1 << 30


def test_a_rule_of_gradients_that_matches_none_is_refused() -> None:
    with pytest.raises(fzero.SpecError, match=r"the rule 'grads/block/\*\*' matches no leaf"):
        lower(offload={"grads/block/**": "cpu", "optimizer": "cpu"}, clip_norm=1.0)


def test_the_account_and_the_text_say_what_moves(folder: Path) -> None:
    """AdamW in fp32: for each element of a parameter the update reads and writes 12 bytes of the file, and a gather
    reads 4. On the host, gradients go there. On a CUDA device, what lies on disk goes through the host."""
    lowered = lower(**homes(folder)["nvme"], update_on="cpu")
    elements = sum(b.numel for b in lowered.plan.buffers.values() if b.kind == "param")
    lanes, program = lowered.memory.lanes, lowered.program
    gathered = sum(program.buffers[op.reads[0].name].nbytes for op in program.ops if op.gathers)
    assert gathered >= 4 * elements
    assert lanes == {
        "disk→host": 12 * elements,
        "host→disk": 12 * elements,
        "disk→device": gathered,
        "device→host": 4 * elements + 16,  # the gradient, the count and the learning rate
    }
    assert "  # disk→host " in str(lowered.program)
    beside = lower(**homes(folder)["nvme"], update_on="device")
    assert beside.memory.lanes == {"disk→device": 12 * elements + gathered, "device→disk": 12 * elements}
    cuda = lower(**homes(folder)["nvme"], update_on="device", device="cuda").memory.lanes
    assert cuda == dict.fromkeys(("disk→host", "host→device"), 12 * elements + gathered) | dict.fromkeys(
        ("device→host", "host→disk"), 12 * elements
    )
    assert fzero.parse(str(lowered.program), lowered.program.segments) == lowered.program
    assert "update_on='device' by the bytes that a step moves" in lower(**homes(folder)["nvme"]).choices["update_on"]


def test_a_cuda_step_updates_where_that_takes_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formulas: the moments go both ways, or a gradient comes down and 28 bytes of the host are used."""

    def choice() -> str:
        return lower(offload="optimizer+params", device="cuda").choices["update_on"]

    elements = sum(leaf.numel() for leaf in tree.flatten(UNTIED.init(fzero.random.key(0)))[1])
    assert "update_on='device' by the time of copies at 45 GB/s each way" in choice()
    monkeypatch.setattr(update_place, "H100", replace(H100, host_bytes=1e15))
    assert "update_on='cpu'" in choice()
    monkeypatch.setattr(update_place, "H100", replace(H100, lanes=dict.fromkeys(H100.lanes, 1e15), host_bytes=28.0))
    seconds = re.search(r"cpu: (\S+) s", choice())
    assert seconds is not None
    assert elements / 2 <= float(seconds[1]) <= 1.2 * elements / 2, "a rank's half and padding, at 28 bytes a second"


# --- activations, a late update, and what programs cost ---------------------------------------------------------------


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 1, "microbatches": 2, "offload": "optimizer"}])
def test_activations_that_wait_on_the_host_change_no_bit(options: dict[str, Any]) -> None:
    params = GPT.init(fzero.random.key(0))
    plain = run(spec(GPT, ADAMW, **options), params, GPT.batch, world=2, steps=2)
    rules = {"blocks/0/**": "offload", "blocks/1/**": "full"}
    moved = run(spec(GPT, ADAMW, remat=rules, **options), params, GPT.batch, world=2, steps=2)
    assert differing(plain.final, moved.final) == []
    assert plain.losses() == moved.losses()
    program = moved.lowered.program
    down = [op.reads[0].name for op in program.ops if op.moves and op.why.startswith("activations of forward blocks.0")]
    assert len(down) >= 3
    assert not any("forward blocks.1" in op.why for op in program.ops if op.moves)


def test_activations_on_the_host_lower_the_devices_peak() -> None:
    """A deep stack whose activations are nearly all of its memory."""
    peaks = {}
    for remat in ("none", "offload"):
        given = fzero.Spec(loss=deep_loss, optimizer=fzero.optim.sgd(0.1), remat=remat)
        peaks[remat] = fzero.lower(given, deep(12, 32), torch.empty(4096, 32, device="meta")).memory.spaces
    assert peaks["offload"]["device"] < 0.6 * peaks["none"]["device"]
    assert peaks["offload"]["host"] > 0.4 * peaks["none"]["device"]
    assert peaks["none"]["host"] == 0


@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_a_delayed_update_is_plain_adamw_with_the_gradients_of_the_step_before(offload: str | None) -> None:
    """The oracle: torch's AdamW, given at each step the gradients that the step before computed."""
    params = MLP.init(fzero.random.key(0))
    found = run(
        spec(MLP, fzero.optim.delayed(fzero.optim.adamw(1e-2, weight_decay=0.1)), offload=offload),
        params,
        MLP.batch,
        world=1,
        steps=4,
    )
    paths, leaves_, treedef = tree.flatten(params)
    own = [leaf.clone().requires_grad_() for leaf in leaves_]
    reference = torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1)
    pending = None
    for number in range(4):
        loss = MLP.loss(tree.unflatten(treedef, own), MLP.batch(0, number))
        grads = torch.autograd.grad(loss, own)
        if pending is not None:
            for leaf, grad in zip(own, pending, strict=True):
                leaf.grad = grad
            reference.step()
        pending = grads
    for path, leaf in zip(paths, own, strict=True):
        torch.testing.assert_close(found.final[f"params/{path}"], leaf.detach(), rtol=1e-5, atol=1e-6)
    assert found.final["opt_state/steps"] == 4


def test_a_step_takes_as_long_as_its_slowest_lane() -> None:
    """Predicted seconds: nothing without rates of lanes; with a slow disk, its bytes."""
    lowered = lower(offload={"optimizer": "nvme"}, nvme_path="/nvme", update_on="cpu")
    some = dict.fromkeys(("all_gather", "reduce_scatter"), 1e-9), dict.fromkeys(("all_gather", "reduce_scatter"), 1e18)
    free = Rates(*some, 1.0, {2: 1e18, 4: 1e18}, 1e18)
    slow = replace(free, lanes={"disk→host": 1e6, "host→disk": 1e6})
    bytes_read, bytes_written = (lowered.memory.lanes[way] for way in ("disk→host", "host→disk"))
    assert step_time.seconds(lowered.program, free) < 1e-6
    taken = step_time.seconds(lowered.program, slow)
    assert max(bytes_read, bytes_written) / 1e6 <= taken <= (bytes_read + bytes_written) / 1e6 + 1e-6


def test_a_profile_shows_the_lanes(folder: Path) -> None:
    state, _ = train(homes(folder)["nvme"], range(1))
    fzero.profile(state, UNTIED.batch(0, 1), folder / "profile")
    page = (folder / "profile" / "rank0.html").read_text()
    trace = (folder / "profile" / "rank0.trace.json").read_text()
    for way in ("disk→device", "device→disk"):
        assert way in page
        assert json.dumps(way)[1:-1] in trace or way in trace


# --- faults -----------------------------------------------------------------------------------------------------------


class Broken(Disk):
    """A disk whose n-th call of a kind fails."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.left = kind, at

    def run(self, kind: str, path: Path, call: Any) -> Any:
        if kind == self.kind:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "Input/output error")
        return call()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_of_the_disk_names_leaf_and_op_and_ends_the_state_only_once_it_was_written(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = train(homes(folder)["nvme"], range(1))
    file = state.runtime.memory.file
    monkeypatch.setattr(file.file, "disk", Broken(kind, 0))
    with pytest.raises(fzero.FzeroError, match=r"params|opt_state") as found:
        fzero.step(state, UNTIED.batch(0, 1))
    assert any("in op " in note for note in found.value.__notes__)
    monkeypatch.setattr(file.file, "disk", Disk())
    if kind == "read":  # the first read comes before the first write
        again, losses = train({}, range(1, 2), state)
        whole, wanted = train({}, range(2))
        assert losses == wanted[1:]
        assert differing(leaves(again), leaves(whole)) == []
    else:
        with pytest.raises(fzero.DonatedError, match="failed after it began to write"):
            fzero.step(state, UNTIED.batch(0, 1))


class Stuck(Disk):
    """A disk whose calls of a kind do not return before `go`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.go = kind, threading.Event()

    def run(self, kind: str, path: Path, call: Any) -> Any:
        if kind == self.kind:
            self.go.wait(60)
        return call()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_does_not_answer_is_a_hang_that_names_rank_op_leaf_and_folder(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, in the next step, and in `full`. When it answers after all, a state that was not written goes on."""
    state, _ = train({**homes(folder)["nvme"], "timeout": 0.3}, range(1))
    file, disk = state.runtime.memory.file, Stuck(kind)
    monkeypatch.setattr(file.file, "disk", disk)
    try:
        with pytest.raises(fzero.HangError, match=r"^rank 0: the disk of .* does not answer, in 0\.3 s") as found:
            fzero.step(state, UNTIED.batch(0, 1))
        first, *others = str(found.value).splitlines()
        assert str(folder) in first
        assert re.search(rf"to (params|opt_state).*: {kind} of [\d,]+ bytes at byte", first), first
        assert any(re.match(rf"  in flight: .*: {kind} of .* for 0\.[3-9] s", line) for line in others)
        assert any(re.match(r"in op \d+: wait ", note) for note in found.value.__notes__)
        if kind == "read":
            began = time.monotonic()
            with pytest.raises(fzero.HangError):
                fzero.step(state, UNTIED.batch(0, 1))
            with pytest.raises(fzero.HangError, match="a read of params"):
                state.params["output"].full()
            assert time.monotonic() - began < 0.6
    finally:
        disk.go.set()
    monkeypatch.setattr(file.file, "disk", Disk())
    if kind == "write":
        with pytest.raises(fzero.DonatedError, match="failed after it began to write"):
            fzero.step(state, UNTIED.batch(0, 1))
        return
    while file.busy():
        time.sleep(0.001)
    again, losses = train({}, range(1, 2), state)
    whole, wanted = train({}, range(2))
    assert losses == wanted[1:]
    assert differing(leaves(again), leaves(whole)) == []


def test_a_disk_that_does_not_answer_is_a_hang_of_init(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Stuck("write")
    monkeypatch.setattr(disk_file, "Disk", lambda: disk)
    try:
        with pytest.raises(fzero.HangError, match=r"rank 0: the disk .* to the first (params|opt_state).*: write of "):
            train({**homes(folder)["nvme"], "timeout": 0.3}, range(1))
    finally:
        disk.go.set()


def test_a_folder_that_cannot_hold_the_file_is_an_error_of_init(folder: Path) -> None:
    with pytest.raises(fzero.FzeroError, match="there is no such folder: make it"):
        train({"offload": {"**": "nvme"}, "nvme_path": str(folder / "missing")}, range(1))
    with pytest.raises(fzero.FzeroError, match="tmpfs"):
        train({"offload": {"**": "nvme"}, "nvme_path": "/dev/shm"}, range(1))
    assert os.listdir(folder) == []


def test_the_bytes_that_the_program_names_are_those_that_the_kernel_counts(folder: Path) -> None:
    """Past the page cache each byte of the file is one of the device."""
    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count")

    def counted() -> dict[str, int]:
        rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {name: int(value) for name, value in rows}

    params = {"layers": [torch.ones(512, 512) for _ in range(3)]}
    given = fzero.Spec(loss=deep_loss, optimizer=ADAMW, **homes(folder)["nvme"])
    state = fzero.step(fzero.init(params, given), torch.ones(8, 512))
    file, before = state.runtime.memory.file, counted()
    done = file.bytes_read, file.bytes_written
    state = fzero.step(state, torch.ones(8, 512))
    after, (lowered,) = counted(), state.runtime.programs.values()
    read, written = (lowered.memory.lanes[way] for way in ("disk→device", "device→disk"))
    assert (file.bytes_read - done[0], file.bytes_written - done[1]) == (read, written)
    assert written == 12 * 3 * 512 * 512
    if file.direct:
        assert after["read_bytes"] - before["read_bytes"] == pytest.approx(read, rel=0.005)
        assert after["write_bytes"] - before["write_bytes"] == pytest.approx(written, rel=0.005)
