"""How a value comes to exist under one more placement, step by step, on graphs of a few ops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from by_hand import Draft, aten, problem_of
from torch import fx

from fzero.errors import FzeroError
from fzero.shard.moves import Move
from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules import Strategy
from fzero.shard.versions import OUTPUT, Versions

R, P, S0, S1 = Replicated(), Partial(), Shard(0), Shard(1)


def steps(versions: Versions, x: fx.Node, want: Placement, reader: fx.Node | None = None) -> list[str]:
    """What is to be written, in order: the value and its way."""

    def text(way: Move | Strategy | None) -> str:
        if isinstance(way, Move):
            return f"{way.kind} {way.source} {way.target} for {way.reader}"
        return "by the first rank" if way is None else f"again {way}"

    return [f"{step.value}: {text(step.way)}" for step in versions.bring(x, want, reader)]


def of(given: Sequence[Placement], draft: Draft, *results: fx.Node, leaves: Sequence[int] = (), n: int = 2) -> Versions:
    gm = draft.returning(*results)
    return Versions(problem_of(gm, given, [R] * len(results), n, leaves))


def test_what_is_there_is_not_brought() -> None:
    draft = Draft()
    x = draft.input(4, 8)
    versions = of([S0], draft, x)
    assert steps(versions, x, S0) == []
    assert steps(versions, x, R) == [f"{x}: all_gather S0 R for {OUTPUT}"]
    assert steps(versions, x, R) == steps(versions, x, S0) == [], "a gathered value is kept, and its parts"
    assert steps(versions, x, S1) == [f"{x}: own_part R S1 for {OUTPUT}"], "from where the fewest bytes travel"
    assert list(versions.have[x]) == [S0, R, S1]


def test_a_sum_is_taken_once() -> None:
    draft = Draft()
    x = draft.input(4, 8)
    versions = of([P], draft, x)
    assert steps(versions, x, R) == [f"{x}: all_reduce P R for {OUTPUT}"]
    assert list(versions.have[x]) == [R], "its addends are gone"


def test_no_way_but_by_the_whole() -> None:
    draft = Draft()
    x, y = draft.input(12, 2), draft.input(4, 8)
    versions = of([Shard(0, 3), Partial("max")], draft, x, y)
    assert steps(versions, x, S0) == [f"{x}: all_gather S0/3 R for {OUTPUT}", f"{x}: own_part R S0 for {OUTPUT}"]
    assert steps(versions, y, S1) == [f"{y}: all_reduce Pmax R for {OUTPUT}", f"{y}: own_part R S1 for {OUTPUT}"]


def test_an_empty_value_comes_by_the_whole_too() -> None:
    """All ways cost nothing there, and the walk went round in a circle for ever."""
    draft = Draft()
    x = draft.input(12, 0)
    versions = of([Shard(0, 3)], draft, x)
    assert steps(versions, x, S0) == [f"{x}: all_gather S0/3 R for {OUTPUT}", f"{x}: own_part R S0 for {OUTPUT}"]


def test_views_are_seen_again_of_what_is_whole() -> None:
    """What three views of one value view is gathered, once."""
    draft = Draft()
    x = draft.input(4, 8)
    wide = draft.call(aten.relu.default, x)
    flat = draft.call(aten.view.default, wide, [32])
    turned = draft.call(aten.permute.default, wide, [1, 0])
    versions = of([S0], draft, flat, turned)
    for node, out in ((wide, S0), (flat, S0), (turned, S1)):
        versions.follow(node, Strategy((S0,), (out,)))
    assert not versions.seen_whole(turned)
    assert steps(versions, flat, R) == [f"{wide}: all_gather S0 R for {OUTPUT}", f"{flat}: again R -> R"]
    assert versions.seen_whole(turned)
    assert steps(versions, turned, R) == [f"{turned}: again R -> R"]


def test_a_view_of_a_leaf_is_gathered_itself() -> None:
    """A leaf never moves; a view of it that must is a view of nothing whole."""
    draft = Draft()
    w = draft.input(4, 8)
    turned = draft.call(aten.permute.default, w, [1, 0])
    gm = draft.returning(turned)
    for leaves, first in (((), f"{w}: all_gather"), ((0,), f"{turned}: all_gather")):
        versions = Versions(problem_of(gm, [S0], [R], leaves=leaves))
        versions.follow(turned, Strategy((S0,), (S1,)))
        assert steps(versions, turned, R)[0].startswith(first)


def test_a_part_of_drawn_numbers_is_drawn() -> None:
    """And what is made of them element by element is made again of parts; nothing travels."""
    draft = Draft()
    key = draft.input(2, dtype=torch.int64)
    numbers = draft.call(torch.ops.fzero.uniform.default, key, [4, 8], torch.float32, 0.0, 1.0)
    kept = draft.call(aten.lt.Scalar, numbers, 0.5)
    versions = of([R], draft, kept)
    for node in (numbers, kept):
        versions.follow(node, Strategy((R,), (R,)))
    found = steps(versions, kept, S0)
    assert [text.split(" ->")[0] for text in found] == [f"{numbers}: again R", f"{kept}: again S0"]
    assert list(versions.have[numbers]) == [R, S0]
    assert steps(versions, numbers, S1)[0].startswith(f"{numbers}: again R"), "and another part is drawn too"


def test_a_number_becomes_an_addend() -> None:
    """A number that all ranks have, for one reader: it is not kept. Nothing else becomes addends."""
    draft = Draft()
    number, vector = draft.input(), draft.input(8)
    reader = draft.call(aten.add.Tensor, vector, number)
    versions = of([R, S0], draft, reader)
    assert versions.is_number(number, P)
    assert steps(versions, number, P, reader) == [f"{number}: by the first rank"]
    assert list(versions.have[number]) == [R]
    with pytest.raises(FzeroError, match=rf"^{reader} is to take {vector} as P, which lies as S0: only a number"):
        steps(versions, vector, P, reader)
    with pytest.raises(FzeroError, match=r"as Pmax, which lies as R"):
        steps(versions, number, Partial("max"), reader)
    versions.have[number] = {Partial("max"): None}
    assert not versions.is_number(number, P), "candidates of a maximum are no addends"


def test_which_strategies_can_be_read() -> None:
    """Addends must be there, or a number; and of a sum that is taken for a call none is left for the same call."""
    draft = Draft()
    x, y, number = draft.input(8), draft.input(8), draft.input()
    square, total = draft.call(aten.mul.Tensor, x, x), draft.call(aten.add.Tensor, y, number)
    versions = of([P, S0, R], draft, square, total)
    assert [versions.can_read(square, Strategy(pair, (P,))) for pair in ((R, R), (P, R), (R, P))] == [
        True,
        False,
        False,
    ]
    assert versions.can_read(total, Strategy((S0, R), (S0,)))
    assert not versions.can_read(total, Strategy((P, P), (P,))), "y has no addends"
    versions.have[y] = {P: None}
    assert versions.can_read(total, Strategy((P, P), (P,)))


def test_a_region_reads_its_inputs_as_they_lie() -> None:
    """But sums, which are taken before it. Its outputs lie as it says by its inputs."""
    draft = Draft()
    x, y, z = (draft.input(8) for _ in range(3))
    region = draft.graph.call_function(torch.ops.fzero.region.default, ([x, y, z], 0))
    region.meta["val"] = [torch.empty(8, device="meta") for _ in range(2)]
    gm = draft.returning(x)
    problem = problem_of(gm, [P, S0, R], [R], ends=lambda node, inputs: inputs[:2])
    assert problem.is_region(region)
    versions = Versions(problem)
    strategy = versions.as_they_lie(region)
    assert strategy == Strategy((R, S0, R), (R, S0))
    versions.follow(region, strategy)
    assert (list(versions.have[x]), list(versions.have[y])) == ([R], [S0])
    assert versions.outputs[region] == (R, S0)
