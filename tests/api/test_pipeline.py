"""Schedules: the figures of the papers, exactly; torch's own orders; and what a schedule that cannot run is told."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

import fzero
from fzero.compile.timeline import draw
from fzero.errors import SpecError
from fzero.pipeline import SCHEDULES, Action, Pipeline, Schedule, make_schedule

IDLE = {  # for equal F, I and W
    "gpipe": lambda p, m, v: (p - 1) / (m + p - 1),
    "1f1b": lambda p, m, v: (p - 1) / (m + p - 1),
    "interleaved": lambda p, m, v: (p - 1) / (v * m + p - 1),
    "zb-h1": lambda p, m, v: (p - 1) / (3 * m + p - 1),
    "zb-v": lambda p, m, v: (p - 1) / (6 * m + p - 1),
}
LETTER = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}  # torch's names
LEAST = {"zb-h1": lambda p: p, "zb-v": lambda p: 2 * p - 1}  # microbatches for that share


@pytest.mark.parametrize("roles", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sampled(10)
def test_idle_shares_are_those_of_the_papers(name: str, roles: int) -> None:
    least = LEAST.get(name, lambda p: 1)(roles)
    for microbatches in {least, least + 1, 2 * roles, 4 * roles, 4 * roles + 3} - set(range(least)):
        for chunks in (1, 2, 3) if name == "interleaved" else (None,):
            if name == "interleaved" and microbatches % roles:
                continue
            schedule = make_schedule(name, roles, microbatches, chunks)
            assert schedule.idle_share() == pytest.approx(IDLE[name](roles, microbatches, chunks), abs=1e-12)


@pytest.mark.parametrize("roles", [2, 3, 4, 8])
def test_microbatches_held_are_those_of_the_papers(roles: int) -> None:
    many = 4 * roles
    assert make_schedule("gpipe", roles, many).held == (many,) * roles
    assert make_schedule("1f1b", roles, many).held == tuple(roles - r for r in range(roles))
    assert make_schedule("zb-h1", roles, many).held == (roles,) * roles
    assert make_schedule("zb-v", roles, many).held == (2 * roles,) * roles
    for chunks in (2, 3):
        held = tuple(2 * (roles - r - 1) + (chunks - 1) * roles + 1 for r in range(roles))
        assert make_schedule("interleaved", roles, many, chunks).held == held


def test_transfers_are_counted_between_roles_alone() -> None:
    assert make_schedule("1f1b", 2, 4).transfers == 8
    assert make_schedule("interleaved", 2, 4).transfers == 24
    assert make_schedule("zb-v", 2, 4).transfers == 16


def torch_order(schedule: Any, role: int) -> list[tuple[str, int, int]]:
    rows = [a for a in schedule._calculate_single_rank_operations(role) if a is not None]
    return [(LETTER[a.computation_type.name], a.stage_index, a.microbatch_index) for a in rows]


@pytest.mark.parametrize(("roles", "microbatches"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 16)])
def test_zb_v_is_torchs_order(roles: int, microbatches: int) -> None:
    """torch.distributed.pipelining has the same order, with None where a rank waits."""
    theirs = object.__new__(torchs.ScheduleZBVZeroBubble)
    theirs.pp_group_size, theirs._n_microbatches = roles, microbatches
    theirs.num_stages = theirs._num_stages = 2 * roles
    for role, order in enumerate(make_schedule("zb-v", roles, microbatches).orders):
        assert torch_order(theirs, role) == [(a.kind, a.chunk, a.microbatch) for a in order]


@pytest.mark.parametrize(("roles", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_interleaved_is_torchs_order(roles: int, microbatches: int, chunks: int) -> None:
    theirs = object.__new__(torchs.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = roles, chunks, microbatches
    theirs.number_of_rounds = max(1, microbatches // roles)
    theirs.microbatches_per_round = microbatches // theirs.number_of_rounds
    for role, order in enumerate(make_schedule("interleaved", roles, microbatches, chunks).orders):
        assert torch_order(theirs, role) == [(a.kind, a.chunk, a.microbatch) for a in order]


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 13))
@settings(max_examples=25, deadline=None)
def test_texts_round_trip(name: str, roles: int, microbatches: int) -> None:
    if name == "interleaved":
        microbatches = roles * -(-microbatches // roles)
    schedule = make_schedule(name, roles, microbatches)
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.microbatches == microbatches
    assert (schedule.roles, schedule.splits) == (roles, name.startswith("zb"))


@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_damaged_schedule_is_refused(rng: random.Random) -> None:
    """Any two actions of a role exchanged, one left out, or one twice: refused, unless it can run as it stands."""
    schedule = make_schedule(rng.choice(["1f1b", "interleaved", "zb-h1", "zb-v", "gpipe"]), 3, 6)
    orders = [list(order) for order in schedule.orders]
    row = rng.choice(orders)
    i, j = rng.sample(range(len(row)), 2)
    kind = rng.choice(["left out", "twice", "exchanged"])
    if kind == "left out":
        del row[i]
    elif kind == "twice":
        row.insert(j, row[i])
    else:
        row[i], row[j] = row[j], row[i]
    damaged = Schedule(schedule.name, schedule.role_of, tuple(map(tuple, orders)))
    try:
        damaged.check()
    except SpecError:
        return
    assert kind == "exchanged"
    assert max(slot.stop for slots in damaged.timeline() for slot in slots) > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_has_every_action_and_the_idle_share(name: str) -> None:
    schedule = make_schedule(name, 2, 4)
    root = ElementTree.fromstring(draw(schedule))
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert Counter(title.split()[0] for title in titles) == Counter(str(a) for order in schedule.orders for a in order)
    assert f"{schedule.idle_share():.1%}" in draw(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawings_of_the_documents_are_todays(name: str) -> None:
    path = Path(__file__).parents[2] / "docs" / "schedules" / f"{name}.svg"
    assert path.read_text() == draw(make_schedule(name, 4, 8))


def test_messages_say_what_is_wrong() -> None:
    def of(*rows: str) -> Schedule:
        return Schedule.parse("\n".join(["schedule own chunks 0 1", *(f"role {i} {r}" for i, r in enumerate(rows))]))

    with pytest.raises(SpecError, match=r"wait for one another: role 0 at B0\.0 waits for B1\.0; role 1 at F1\.1"):
        of("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(SpecError, match=r"B1\.1 is missing"):
        of("F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0")
    with pytest.raises(SpecError, match=r"role 0 has F0\.1 where F0\.0 is due"):
        of("F0.1 F0.0 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(SpecError, match=r"role 1 has F0\.0, which is of no chunk of its own"):
        of("F0.0 B0.0", "F0.0 F1.0 B1.0")
    with pytest.raises(SpecError, match="starts with 'schedule NAME chunks"):
        Schedule.parse("F0.0")
    with pytest.raises(SpecError, match="expected 'role 1 "):
        Schedule.parse("schedule own chunks 0 1\nrole 0 F0.0 B0.0\nrole 2 F1.0 B1.0")
    with pytest.raises(SpecError, match="Take 6, or '1f1b'"):
        make_schedule("interleaved", 3, 4)
    with pytest.raises(SpecError, match="there is gpipe, 1f1b"):
        make_schedule("2f2b", 2, 4)
    with pytest.raises(SpecError, match="'interleaved' has any"):
        make_schedule("1f1b", 2, 4, chunks=2)
    with pytest.raises(SpecError, match="for 2 roles and 4 microbatches; the mesh has pp=3, microbatches=4"):
        Pipeline(make_schedule("1f1b", 2, 4)).order(3, 4)
    with pytest.raises(SpecError, match="mixes whole and split"):
        Schedule("own", (0,), ((Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0), Action("B", 0, 0)),)).check()


def test_meshes_say_what_fits() -> None:
    def loss(p: Any, b: Any) -> Any:
        return (b @ p["blocks"][0] @ p["blocks"][1]).square().mean()

    def lower(world: int | None = None, **given: Any) -> fzero.Lowered:
        params = {"blocks": [torch.ones(4, 4), torch.ones(4, 4)]}
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=2, **given)
        return fzero.lower(spec, params, torch.ones(4, 4), world_size=world)

    assert str(lower(6, mesh={"pp": 2, "dp": -1}).plan.mesh) == "pp=2 dp=3"
    assert str(lower(mesh={"pp": 2}).plan.mesh) == "pp=2 dp=1"
    with pytest.raises(SpecError, match="needs 4 ranks, there are 6: start 4"):
        lower(6, mesh={"pp": 2, "dp": 2})
    with pytest.raises(SpecError, match="there are 5: start a multiple of 2 ranks"):
        lower(5, mesh={"pp": 2, "dp": -1})
    with pytest.raises(SpecError, match="one axis may be -1"):
        lower(4, mesh={"pp": -1, "dp": -1})
    with pytest.raises(SpecError, match="3 chunks need as many numbered layers"):
        lower(mesh={"pp": 3})
    with pytest.raises(SpecError, match="an axis `pp` in mesh"):
        lower(mesh={"dp": 2}, pipeline="1f1b")
    with pytest.raises(SpecError, match="names no numbered layer"):
        lower(mesh={"pp": 2}, pipeline=Pipeline(cut=["layers/1"]))
    with pytest.raises(SpecError, match="is inside a layer: chunks are whole layers"):
        lower(mesh={"pp": 2}, pipeline=Pipeline(cut=["blocks/1/w"]))


# --- what a spec says that cannot be meant ----------------------------------------------------------------------------


def mlp(p: Any, batch: torch.Tensor) -> torch.Tensor:
    for w in p["layers"]:
        batch = torch.tanh(batch @ w)
    return batch.square().mean()


def lowered_mlp(loss: Any = mlp, world_size: int | None = None, **given: Any) -> Any:
    params = {"layers": [torch.empty(16, 16, device="meta") for _ in range(4)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=4, **given)
    return fzero.lower(spec, params, torch.empty(8, 16, device="meta"), world_size=world_size)


REFUSED = {
    r"needed `dp_out` before `dp`.*mesh=\{'dp_out': 4, 'dp': 2\}": {"mesh": {"dp": 2, "dp_out": 4}, "zero": "hsdp"},
    r"two data axes, as in mesh=\{'dp_out': 2, 'dp': 4\}": {"mesh": {"dp_out": 4}, "zero": "hpz"},
    r"needed an axis `pp` in mesh.*it is None": {"pipeline": "1f1b", "world_size": 4},
    r"pipeline=''.*needed one of": {"pipeline": "", "mesh": {"pp": 2}},
    r"Did you mean 'zb-v'": {"pipeline": "ZB-V", "mesh": {"pp": 2}},
    r"how many roles there are follows from the world": {"mesh": {"pp": -1, "dp": 2}, "pipeline": "1f1b"},
    r"Did you mean 'dp'": {"mesh": {"pp": 2, "dpp": 2}},
    r"needed each axis once": {
        "mesh": {"dp_out": 2, "dp": 2},
        "zero": {"params": (), "grads": (), "optimizer": ("dp", "dp")},
    },
    r"or world_size=4": {"mesh": {"pp": 2, "dp": 2}, "world_size": 6},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_meant_is_refused(message: str) -> None:
    with pytest.raises(SpecError, match=message):
        lowered_mlp(**REFUSED[message])


@pytest.mark.parametrize(
    ("given", "message"),
    [({"chunks": "2"}, "a positive int"), ({"chunks": 0}, "a positive int"), ({"cut": 2}, "a list of layers"),
     ({"cut": "layers/3"}, r"cut=\['layers/3'\]"), ({"schedule": None}, "a schedule's name")],
)  # fmt: skip
def test_a_pipeline_of_wrong_types_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Pipeline(**given)


def test_a_schedule_may_stand_for_a_pipeline() -> None:
    own = make_schedule("1f1b", 2, 4)
    assert lowered_mlp(mesh={"pp": 2}, pipeline=own).schedule == own


def test_the_passes_of_a_pipeline_name_the_cut() -> None:
    lowered = lowered_mlp(mesh={"pp": 2}, pipeline="1f1b")
    cut = next(record for record in lowered.passes if record.name == "by_role")
    assert cut.before["run"] > cut.after["run"]
    assert cut.after["send"] == 4


def test_layers_against_their_order_are_told() -> None:
    """They run, and what that costs is among the choices."""

    def reversed_mlp(p: Any, batch: torch.Tensor) -> torch.Tensor:
        return mlp({"layers": p["layers"][::-1]}, batch)

    lowered = lowered_mlp(reversed_mlp, mesh={"pp": 2}, pipeline="1f1b")
    assert "2,048 bytes of leaves are sent each step" in lowered.choices["pipeline"]
    assert "pipeline" not in lowered_mlp(mesh={"pp": 2}, pipeline="1f1b").choices


def test_an_unknown_transport_is_no_program() -> None:
    text = str(lowered_mlp(mesh={"dp": 2}).program).replace("transport p2p", "transport pigeon")
    with pytest.raises(ValueError, match="transport 'pigeon': there is p2p, shared, nccl"):
        fzero.parse(text)
