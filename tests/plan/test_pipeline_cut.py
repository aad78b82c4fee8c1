"""pipeline_cut: which chunk of a pipeline keeps a leaf, and cuts that cannot be."""

from collections.abc import Mapping

import pytest

import fzero
from fzero.ir.decisions import Choice
from fzero.plan.pipeline_cut import Cut, cut_layers

LAYERS = {"blocks.10": 4, "blocks.2": 4, "blocks.0": 4, "blocks.1": 4}
GIVEN: list[tuple[Mapping[str, int], int, int]] = []


def cut(*starts: str, layers: Mapping[str, int] = LAYERS, roles: tuple[int, ...] = (0, 1)) -> Cut:
    def choose(layers: Mapping[str, int], last: int, chunks: int) -> Choice[tuple[str, ...]]:
        GIVEN.append((layers, last, chunks))
        return Choice(starts)

    return cut_layers(layers, 7, roles, choose)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    made = cut("blocks/2")
    assert GIVEN[-1] == ({"blocks/0": 4, "blocks/1": 4, "blocks/2": 4, "blocks/10": 4}, 7, 2)
    assert made.chunk_of == {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.10": 1}
    assert made.role_of == (0, 1)
    assert cut("blocks.1", "blocks/2", roles=(0, 1, 0)).chunk_of["blocks.1"] == 1


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((), r"2 chunks have 1 cuts"),
        (("blocks/1", "blocks/2"), r"2 chunks have 1 cuts"),
        (("blocks/1/w",), r"is inside a layer: chunks are whole layers. Cut at 'blocks/1'"),
        (("blocks/3",), r"names no numbered layer"),
        (("blocks/0",), r"without the first: there the first chunk begins"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(starts: tuple[str, ...], message: str) -> None:
    with pytest.raises(fzero.SpecError, match=message):
        cut(*starts)


def test_cuts_out_of_order_are_refused() -> None:
    with pytest.raises(fzero.SpecError, match="in the order of layers"):
        cut("blocks/2", "blocks/1", roles=(0, 1, 2))


def test_fewer_layers_than_chunks_are_refused() -> None:
    with pytest.raises(fzero.SpecError, match="no layer has a number of its own"):
        cut("blocks/1", layers={})
    with pytest.raises(fzero.SpecError, match=r"2 chunks need as many numbered layers.*there are 1: blocks.0"):
        cut("blocks/1", layers={"blocks.0": 4})
    assert cut("blocks/1", layers={"blocks.0": 4, "blocks.1": 4}).chunk_of == {"blocks.0": 0, "blocks.1": 1}
