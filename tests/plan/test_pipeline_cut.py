"""pipeline_cut: which chunk of a pipeline keeps a leaf, and cuts that cannot be."""

from collections.abc import Mapping

import pytest

import fzero
from fzero.ir.decisions import Choice
from fzero.plan.pipeline_cut import Cut, adapters, cut_layers, in_order, layer_of, tied_heads

LAYERS = {"blocks.10": 4, "blocks.2": 4, "blocks.0": 4, "blocks.1": 4}
GIVEN: list[tuple[Mapping[str, int], int, int]] = []


def cut(*starts: str, layers: Mapping[str, int] = LAYERS, roles: tuple[int, ...] = (0, 1)) -> Cut:
    def choose(layers: Mapping[str, int], last: int, chunks: int) -> Choice[tuple[str, ...]]:
        GIVEN.append((layers, last, chunks))
        return Choice(starts)

    return cut_layers(layers, 7, (), roles, choose)


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


def test_the_chunk_of_a_leaf() -> None:
    """Of a layer with a number its chunk; else the first for what is named as an embedding, the last for the others."""
    made = cut("blocks/1", "blocks/2", roles=(0, 1, 0))
    chunks = {path: made.chunk(path) for path in ("blocks/0/w", "blocks/1/w", "blocks/10/a/b", "wte", "head/w", "pos")}
    assert chunks == {"blocks/0/w": 0, "blocks/1/w": 1, "blocks/10/a/b": 2, "wte": 0, "head/w": 2, "pos": 0}
    assert made.chunk("compose") == 2, "no position"


def test_encoders_come_before_decoders_and_numbers_are_numbers() -> None:
    assert in_order(["dec.1", "dec.0", "enc.10", "enc.9"]) == ["enc.9", "enc.10", "dec.0", "dec.1"]
    assert in_order(["b.0", "a.1"]) == ["a.1", "b.0"]
    assert layer_of("h/3/mlp/0/w") == ("h.3", True)
    assert layer_of("norm/w") == ("norm", False)


def test_adapters_are_dealt_with_their_base() -> None:
    """Their gradients are made where the base's layers run: else one role would keep all adapters, and run all
    backwards."""
    layers = {f"base.{n}": 160 for n in range(4)} | {f"lora.{n}": 10 for n in (1, 2)}
    made = cut("base/2", layers=layers)
    assert GIVEN[-1][0] == {"base/0": 160, "base/1": 170, "base/2": 170, "base/3": 160}
    assert made.chunk_of == {"base.0": 0, "base.1": 0, "base.2": 1, "base.3": 1, "lora.1": 0, "lora.2": 1}
    assert adapters({**layers, "lora.1": 11}) == {}, "too large"
    assert adapters({**layers, "lora.4": 10}) == {}, "there is no base.4"
    assert adapters({**layers, "wide.1": 9999, "wide.2": 9999})["lora.1"] == "wide.1"
    assert adapters({"encoder.0": 1, "decoder.0": 99}) == {}


def test_a_heads_bias_is_no_head() -> None:
    """Of a BERT; that of a linear layer by an embedding's name says that the layer is none."""
    words = {"embeddings/word_embeddings/weight": (64, 8), "embeddings/LayerNorm/weight": (8,)}
    assert tied_heads({**words, "cls/bias": (64,)}) == {"embeddings/word_embeddings/weight"}
    assert tied_heads({**words, "cls/bias": (64,), "cls/weight": (64, 8)}) == set()
    assert tied_heads({"embed/weight": (64, 8), "embed/bias": (64,)}) == set()
