"""placements: parts and wholes, shapes, text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.errors import SpecError
from fzero.shard.placements import Partial, Placement, Replicated, Shard, join, local_shape, split

PLACEMENTS = st.one_of(
    st.just(Replicated()),
    st.builds(Shard, st.integers(0, 2), st.sampled_from((1, 2, 3, 4))),
    st.builds(Partial, st.sampled_from(("sum", "max"))),
)


@settings(max_examples=150, deadline=None)
@given(PLACEMENTS, st.integers(1, 4), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.booleans())
def test_join_undoes_split(placement: Placement, n: int, sizes: list[int], whole_numbers: bool) -> None:
    if isinstance(placement, Shard):
        sizes[placement.dim] *= placement.groups * n
    value = torch.randn(sizes, dtype=torch.float64)
    value = (value * 100).long() if whole_numbers else value
    parts = split(value, placement, n)
    assert len(parts) == n
    assert {tuple(part.shape) for part in parts} == {local_shape(sizes, placement, n)}
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(join(parts, placement), value)


def test_each_rank_has_its_part_of_each_group() -> None:
    """A fused q, k, v: rank 1 holds the second half of each."""
    q, k, v = (torch.arange(4) + start for start in (0, 10, 20))
    parts = split(torch.cat([q, k, v]), Shard(0, groups=3), 2)
    assert torch.equal(parts[1], torch.cat([q[2:], k[2:], v[2:]]))


def test_a_flattened_dim_of_which_the_inner_is_sharded_has_groups() -> None:
    whole = torch.arange(24).view(3, 8)
    flat = split(whole.flatten(), Shard(0, groups=3), 4)
    assert all(torch.equal(a, b.flatten()) for a, b in zip(flat, split(whole, Shard(1), 4), strict=True))


def test_sums_are_taken_in_rank_order() -> None:
    parts = [torch.tensor(x, dtype=torch.float32) for x in (1e8, 1.0, -1e8)]
    assert join(parts, Partial()).item() == 0.0, "(1e8 + 1) - 1e8 in float32"
    assert join([parts[0], parts[2], parts[1]], Partial()).item() == 1.0


def test_text() -> None:
    placements = (Replicated(), Shard(0), Shard(2, groups=3), Partial(), Partial("max"))
    assert [str(p) for p in placements] == ["R", "S0", "S2/3", "P", "Pmax"]
    assert len({str(p) for p in placements}) == len(set(placements))


def test_unequal_parts_are_refused_with_the_next_size() -> None:
    with pytest.raises(SpecError, match=r"S1 on 4 ranks needs dim 1 in 4 equal parts: 6 .* next that is: 8"):
        local_shape((2, 6), Shard(1), 4)
    with pytest.raises(SpecError, match=r"S0/3 on 2 ranks needs dim 0 in 3 groups of 2 equal parts.* is: 12"):
        split(torch.zeros(8), Shard(0, groups=3), 2)
    with pytest.raises(SpecError, match=r"shards dim 2 of a value of shape \(2, 6\): it has 2 dims"):
        local_shape((2, 6), Shard(2), 2)
    with pytest.raises(SpecError, match=r"Partial\('avg'\)"):
        Partial("avg")
