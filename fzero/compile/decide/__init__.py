"""decide: every choice that fzero makes about a program, one pure function each, in one table.

Where the user's Spec leaves a field open, the table is asked (`Deciders`); what it says goes into `Decisions`, and
passes read that. So one choice is replaced by replacing one function:

    always = dataclasses.replace(decide.DECIDERS, prefetch=lambda program, options, rates: Choice(3, "made up"))
    fzero.lower(spec, params, batch, decisions=always)

and a record of another lowering is a table of constants (`pinned`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fzero.capture.graph import Graph
from fzero.compile.decide.budgets import copies, tighter
from fzero.compile.decide.by_cost import bucket_bytes, fetch_ahead, prefetch_depth, product, tile_bytes
from fzero.compile.decide.layers_cut import fewest_elements
from fzero.compile.decide.reduce_when import reduce_by_bytes
from fzero.compile.decide.update_place import cheaper_place
from fzero.cost.kept_costs import Figures
from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.ir.decisions import BUDGET, IDLE, Choice, Decisions, RoleDecisions
from fzero.ir.program import Program
from fzero.passes import Options
from fzero.plan.state_plan import Plan
from fzero.spec import Spec


@dataclass(frozen=True)
class Deciders:
    """The functions that choose, each asked where the user's Spec says nothing.

    bucket_bytes: of the kept costs of buckets by size. cut: of the elements of each numbered layer in order, of those
    after them, and the number of chunks. product: of a matrix product's question and figures. reduce: of the graph of
    one rank. copies: whether 16-bit copies of parameters stay between steps, as tried under a budget of bytes, in
    order. prefetch, fetch_ahead, update_on, tile_bytes: of a role's program before its last passes. tighter: what is
    tried under budgets of bytes, in order; the first that fits is taken.
    """

    bucket_bytes: Callable[[Mapping[str, float]], Choice[int]] = bucket_bytes
    cut: Callable[[Mapping[str, int], int, int], Choice[tuple[str, ...]]] = fewest_elements
    product: Callable[[str, Figures | None], Choice[str]] = product
    reduce: Callable[[Graph, Plan], Choice[str]] = reduce_by_bytes
    copies: Callable[[], tuple[Choice[bool], ...]] = copies
    prefetch: Callable[[Program, Options, Rates | None], Choice[int]] = prefetch_depth
    fetch_ahead: Callable[[Program], Choice[int]] = fetch_ahead
    update_on: Callable[[Program, Rates | None], Choice[str]] = cheaper_place
    tile_bytes: Callable[[Program], Choice[int]] = tile_bytes
    tighter: Callable[[Program, RoleDecisions], Iterator[RoleDecisions]] = tighter


DECIDERS = Deciders()
NONE_MOVES: Choice[tuple[str, ...]] = Choice((), "no axis of this name cuts dims", IDLE)


def pinned(record: Decisions) -> Deciders:
    """A table that gives back what a record says.

    Its functions raise SpecError where the record is of another step: it lacks a matrix product or a role.
    """

    def role(program: Program) -> RoleDecisions:
        number = program.role or 0
        if number not in record.roles:
            shown = ", ".join(map(str, record.roles))
            raise SpecError(
                f"decisions: they are of the roles {shown}, this step has a role {number}: same mesh needed"
            )
        return record.roles[number]

    def known(question: str, figures: Figures | None) -> Choice[str]:
        if question not in record.matmul:
            raise SpecError(
                f"decisions: they know nothing of the matrix product {question!r} of this step. Take decisions of the "
                "same step and batch, or Spec(matmul='default')"
            )
        return record.matmul[question]

    return Deciders(
        bucket_bytes=lambda costs: record.bucket_bytes,
        cut=lambda layers, last, chunks: record.cut,
        product=known,
        reduce=lambda graph, plan: record.reduce,
        copies=lambda: (next(iter(record.roles.values())).copies,),
        prefetch=lambda program, options, rates: role(program).prefetch,
        fetch_ahead=lambda program: role(program).fetch_ahead,
        update_on=lambda program, rates: role(program).update_on,
        tile_bytes=lambda program: role(program).tile_bytes,
        tighter=lambda program, decided: iter([role(program)]),
    )


def table(spec: Spec, given: Decisions | Deciders | None) -> Deciders:
    """The functions that decide. Raises SpecError for a record that says something else than the spec."""
    if given is None:
        return DECIDERS
    if isinstance(given, Deciders):
        return given
    if not isinstance(given, Decisions):
        raise SpecError(f"decisions={given!r}: needed those of another lowering, lowered.decisions")
    _check_given(spec, given)
    return pinned(given)


def check_strategies(made: Decisions, given: Decisions | Deciders | None) -> None:
    """Raises SpecError where values of a step are sharded in another way than given decisions say."""
    if not isinstance(given, Decisions):
        return
    for axis in sorted({*made.strategies, *given.strategies}):
        own, wanted = (record.strategies.get(axis, NONE_MOVES).value for record in (made, given))
        if other := sorted({*own} ^ {*wanted}):
            raise SpecError(
                f"decisions: over {axis!r} this step's values make {len(own)} transfers, the record has {len(wanted)}. "
                f"One that is in one of them alone: {other[0]}. Take decisions of the same step, batch and shard= rules"
            )


def _check_given(spec: Spec, record: Decisions) -> None:
    """Raises SpecError where a field of the spec says something else than a record that is given beside it."""
    roles = tuple(record.roles.values())
    rows: list[tuple[str, object, Sequence[Choice[Any]]]] = [
        ("bucket_bytes", spec.bucket_bytes, [record.bucket_bytes]),
        ("reduce", spec.reduce, [record.reduce]),
        ("prefetch", spec.prefetch, [role.prefetch for role in roles]),
        ("update_on", spec.update_on, [role.update_on for role in roles]),
    ]
    for name, said, choices in rows:
        other = [choice.value for choice in choices if choice.how != BUDGET and choice.value != said]
        if said is not None and other:
            raise SpecError(
                f"Spec({name}={said!r}) with decisions that say {name}={other[0]!r}: leave {name}= out, or change the "
                "record (dataclasses.replace)"
            )
