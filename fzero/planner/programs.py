"""programs: a candidate's programs, lowered and verified; a machine's figures decide, in the place of measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fzero.compile.ahead import lower_again
from fzero.compile.decide import DECIDERS, Deciders
from fzero.compile.decide.budgets import small_tiles
from fzero.compile.decide.by_cost import bucket_bytes, prefetch_depth
from fzero.compile.decide.update_place import cheaper_place
from fzero.compile.lowered import Lowered
from fzero.cost.bucket_costs import LARGE_BUCKETS, bucket_costs
from fzero.cost.rates import Rates
from fzero.cost.step_time import roles_time
from fzero.errors import SpecError
from fzero.hardware import Hardware
from fzero.ir.decisions import Choice
from fzero.ir.mesh import Mesh
from fzero.ir.program import Program
from fzero.ir.records import HOST
from fzero.passes import Options
from fzero.planner.problem import Problem
from fzero.spec import Spec

T = TypeVar("T")

LATENCY_SHARE = 0.1  # of a bucket's time that may be latency: a machine's file says no hop to the last microsecond


def lowered_of(
    problem: Problem, spec: Spec, mesh: Mesh, deciders: Deciders | None = None, *, verified: bool = True
) -> Lowered:
    """The programs of a spec over a mesh. verified: False for probes. Raises FzeroError where there are none."""
    if problem.rows % mesh.data_ranks:
        raise SpecError(f"{mesh.data_ranks} data ranks do not divide {problem.rows} rows: give a multiple")
    batch = problem.batch_of(problem.rows // mesh.data_ranks)
    return lower_again(
        spec, problem.params_like, batch, world_size=mesh.world_size, decisions=deciders, captures=problem.captures,
        verified=verified,
    )  # fmt: skip


def step_seconds(lowered: Lowered, machine: Hardware) -> float:
    """Of all roles together, as simulated."""
    return max(t.seconds for t in roles_time(lowered.programs, machine.rates(lowered.plan.mesh)).values())


def host_bytes(lowered: Lowered) -> int:
    """Of the fullest rank's host, if anything is held there."""
    return max(memory.spaces[HOST] for memory in lowered.memories.values())


class _Once:
    """A choice that is made for the first role that is lowered, and by that for all others. Its call writes `made`."""

    def __init__(self, choose: Callable[..., Choice[int]]) -> None:
        self.choose = choose
        self.made: Choice[int] | None = None

    def __call__(self, *asked: Any) -> Choice[int]:
        self.made = self.made or self.choose(*asked)
        return self.made


def by_rates(machine: Hardware, mesh: Mesh, *, once: bool = False) -> Deciders:
    """The functions that decide, by the machine's figures in place of those measured here. once: how far ahead a role
    fetches is not decided for each apart, for a Spec has one depth, and another takes all programs again."""
    rates = machine.rates(mesh)

    def depth(program: Program, options: Options, _: Rates | None) -> Choice[int]:
        return prefetch_depth(program, options, rates)

    return replace(
        DECIDERS,
        bucket_bytes=lambda _: bucket_choice(rates, mesh),
        prefetch=_Once(depth) if once else depth,
        update_on=lambda program, _: cheaper_place(program, rates),
    )


def bucket_choice(rates: Rates, mesh: Mesh) -> Choice[int]:
    """The bytes of a bucket, by a mesh's figures."""
    axis = mesh.data_axes
    costs = bucket_costs(rates, axis, mesh.size(axis), LARGE_BUCKETS) if mesh.data_ranks > 1 else {}
    return bucket_bytes(costs, LATENCY_SHARE)


def sparing(machine: Hardware, mesh: Mesh) -> Deciders:
    """The same, but nothing is brought before it is needed: the least memory."""
    table = by_rates(machine, mesh)
    ahead = _always(0)
    none_stay = (_always(False)(),)
    return replace(table, copies=lambda: none_stay, prefetch=ahead, fetch_ahead=ahead, tile_bytes=small_tiles)


def _always(value: T) -> Callable[..., Choice[T]]:
    return lambda *_: Choice(value, "as little as there is")
