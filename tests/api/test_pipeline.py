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
