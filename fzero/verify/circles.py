"""circles: ranks that wait for one another, each in another group's collective.

With several axes a rank is in several groups. The order within each may be the same on all of its ranks, and still one
rank may be in a collective of a first group, for which another must come, while that one is in a second group's and
waits for the first rank. NCCL asks for one order over all communicators that ranks share, however late they wait.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fzero.ir.program import Program


class Meeting(NamedTuple):
    """One collective of a group: the axis, the first rank of the group on it, and the how manieth it is there."""

    axis: str
    leader: int
    number: int


def waiting_in_a_circle(programs: Mapping[int, Program]) -> Iterator[tuple[int, int, str]]:
    """(rank, op, what is wrong), if ranks that have the same collectives along each axis never get to their ends.

    Each goes on from a collective when all given ranks of its group are there.
    """
    if len({id(program) for program in programs.values()}) == 1:  # ranks of one order meet
        return
    roads = {rank: _road(program, rank) for rank, program in programs.items()}
    expected = Counter(meeting for road in roads.values() for _, meeting in road)
    passed, there, coming = dict.fromkeys(roads, 0), defaultdict[Meeting, list[int]](list), list(roads)
    while coming:
        rank = coming.pop()
        if passed[rank] == len(roads[rank]):
            continue
        _, meeting = roads[rank][passed[rank]]
        there[meeting].append(rank)
        if len(there[meeting]) == expected[meeting]:
            on = there.pop(meeting)
            passed.update({each: passed[each] + 1 for each in on})
            coming += on
    if not there:
        return
    stands = {rank: roads[rank][passed[rank]] for ranks in there.values() for rank in ranks}
    chain = [min(stands)]
    while chain[-1] not in chain[:-1]:
        meeting = stands[chain[-1]][1]
        chain.append(next(r for r in stands if stands[r][1] != meeting and meeting in (m for _, m in roads[r])))
    circle = chain[chain.index(chain[-1]) :]
    waits = (f"rank {a} waits for rank {b} over {stands[a][1].axis}" for a, b in itertools.pairwise(circle))
    yield circle[0], stands[circle[0]][0], f"{', '.join(waits)}: ranks start what they share in one order over all axes"


def _road(program: Program, rank: int) -> list[tuple[int, Meeting]]:
    """The collectives of a rank with others, with the number of the op of each."""
    mesh, seen = program.mesh, Counter[str]()
    road = []
    for i, op in enumerate(program.ops):
        if op.is_collective and op.axis is not None and op.axis in mesh and mesh.size(op.axis) > 1:
            road.append((i, Meeting(op.axis, mesh.leader(rank, op.axis), seen[op.axis])))
            seen[op.axis] += 1
    return road
