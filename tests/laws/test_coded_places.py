"""Codecs on random models and meshes: no bit changes with the stage, homes, buckets, recomputation or prefetch.

A block of a code is cut by no leaf, rank or bucket. The models and places are those of `lab.fuzz_meshes`, whose oracle
knows no codec: here a place is compared with another one of the same ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fzero import Precision
from fzero.errors import FzeroError, VerifyError
from lab.fuzz_meshes import runs
from lab.fuzz_meshes.case import Case
from lab.fuzz_meshes.draw import draw, draw_place

CASES = 8  # of a part
# the same in both places, but that a stage may be another one
OF_BOTH = ("mesh", "shard", "sequence", "pipeline", "reduce", "zero")
FREE = ("bucket_bytes", "prefetch", "overlap", "remat", "offload", "update_on", "nvme_path")


def precision(rng: random.Random) -> Precision:
    gather, reduce = rng.choice(("int8", "int8", "int4", "e4m3", None)), rng.choice(("int8", "int4", "e5m2", None))
    sums, compute = rng.choice((None, None, "int8")), rng.choice((None, None, None, "bf16"))
    if gather is None and reduce is None:
        gather = "int8"
    return Precision(gather=gather, reduce=reduce, sums=sums, compute=compute, exact=rng.choice((None, None, ())))


def places(number: int) -> tuple[Case, Case]:
    """A case and the same elsewhere."""
    rng, case = random.Random(f"coded:{number}"), draw(3, number)
    recipe = replace(case.recipe, dtype="f32", precision=precision(rng), bad=None)
    other = draw_place(rng, case.model, recipe)
    kept = {name: value for name, value in case.place.items() if name in OF_BOTH}
    stages = [kept.get("zero", 3), other.get("zero", 3)]
    if all(isinstance(stage, int) for stage in stages) and rng.random() < 0.6:
        kept["zero"] = stages[1]
    elsewhere = kept | {name: value for name, value in other.items() if name in FREE}
    return replace(case, recipe=recipe), replace(case, recipe=recipe, place=elsewhere)


def trained(case: Case) -> dict[str, Tensor]:
    world = runs.World(case, runs.lowered(case))
    for number in range(case.recipe.steps):
        world.step(number)
    return world.leaves()


@pytest.mark.parametrize("part", range(25))
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
def test_no_bit_changes_with_the_place(part: int, whole: bool) -> None:
    equal = 0
    for number in range(part * CASES, part * CASES + (CASES if whole else 2)):
        one, other = places(number)
        try:
            found = [trained(one), trained(other)]
        except VerifyError:
            raise
        except FzeroError:
            continue  # as without codecs: which refusals there are, `lab.fuzz_meshes` lists
        differ = [path for path, leaf in found[0].items() if not torch.equal(leaf, found[1][path])]
        assert differ == [], (number, one.place, other.place, one.recipe.precision)
        equal += 1
    assert equal > 0 or not whole
