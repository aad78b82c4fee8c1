"""pipeline_cut: which chunk of a pipeline holds a leaf, from the tree alone.

A layer is what a bucket is made for: a path up to its first number (`blocks/3`). Layers with a number are dealt to the
chunks in order; which begin a chunk is chosen elsewhere (`fzero.compile.decide`). Encoders come before decoders. An
adapter, a small layer of a list beside that of a base, is dealt with the base's layer of its number. A leaf without a
number lies on the first chunk if its name is that of an embedding (`FIRST`), else on the last. There too lies an
embedding that is the head as well: a head's gradient is whole with each microbatch, an embedding's is a sum of the
rows that the tokens name (`fzero.passes.pipeline.last_work`). All this decides who keeps a leaf's state, not where it
is used: a chunk that uses a leaf of another is sent its value, and sends its gradient back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fzero import tree
from fzero.errors import SpecError
from fzero.ir.decisions import IDLE, Choice

FIRST = re.compile(r"emb|wte|wpe|tok|(?<![a-z])pos|patch|stem|shared|conv_?in|conv1|bn1|relative", re.IGNORECASE)
WORDS = re.compile(r"^(?!.*(wpe|pos|type|relative|patch)).*(emb|wte|tok|shared)", re.IGNORECASE)
DECODER = re.compile(r"dec", re.IGNORECASE)
UNCUT: Choice[tuple[str, ...]] = Choice((), "there is no pipeline", IDLE)


@dataclass(frozen=True)
class Cut:
    """The chunks of a model. role_of: of each chunk, the role that holds it. chunk_of: of each numbered layer. choice:
    of each chunk but the first, the first layer in it, and why. heads: paths of embeddings that are heads too."""

    role_of: tuple[int, ...]
    chunk_of: Mapping[str, int]
    choice: Choice[tuple[str, ...]] = UNCUT
    heads: Collection[str] = ()

    def chunk(self, path: str) -> int:
        """The chunk that keeps a leaf, by its path below its entry of the state."""
        layer, _ = layer_of(path)
        if layer in self.chunk_of:
            return self.chunk_of[layer]
        return 0 if FIRST.search(path) and path not in self.heads else len(self.role_of) - 1


CutLayers = Callable[[Mapping[str, int], int, Collection[str]], Cut]  # `cut_layers`, but for its last arguments


def layer_of(path: str) -> tuple[str, bool]:
    """The layer of a leaf, by its path below its entry of the state, and whether it has a number.

    >>> layer_of("blocks/3/attn/wq"), layer_of("wte")
    (('blocks.3', True), ('wte', False))
    """
    parts = tree.parts(path)
    number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: 1 if number is None else number + 1]), number is not None


def tied_heads(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """The path of the embedding that is the head too, as far as names and shapes tell: of those of words the one of the
    most rows, where no other leaf has a dim of so many, but for a head's bias.

    shapes: of the leaves without a number, by path.

    >>> tied_heads({"wte": (50257, 768), "wpe": (99999, 768), "norm": (768,)})
    frozenset({'wte'})
    >>> tied_heads({"wte": (50257, 768), "head": (768, 50257)})
    frozenset()
    >>> tied_heads({"wte": (50257, 768), "head_bias": (50257,)})
    frozenset({'wte'})
    """
    rows = {path: shape[0] for path, shape in shapes.items() if WORDS.search(path) and len(shape) == 2}
    found = max(rows, key=rows.__getitem__, default="")
    others = (shape for path, shape in shapes.items() if path != found and (len(shape) > 1 or FIRST.search(path)))
    return frozenset({found} if found and all(rows[found] not in shape for shape in others) else ())


def in_order(layers: Sequence[str]) -> list[str]:
    """Numbered layers as the forward runs them: by number, and the encoder's before the decoder's.

    >>> in_order(["decoder.0", "encoder.10", "encoder.9"])
    ['encoder.9', 'encoder.10', 'decoder.0']
    """

    def key(layer: str) -> tuple[object, ...]:
        words = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]
        return bool(DECODER.search(layer)), words

    return sorted(layers, key=key)


def adapters(layers: Mapping[str, int]) -> dict[str, str]:
    """Of each layer of a list of adapters, the layer that it is dealt with: that of its number in a list of layers at
    least sixteen times as large. A small encoder is no adapter of its decoder.

    >>> adapters({"base.0": 4096, "base.1": 4096, "lora.0": 16, "lora.1": 16})
    {'lora.0': 'base.0', 'lora.1': 'base.1'}
    """
    rows: dict[str, dict[str, int]] = {}
    for layer, size in layers.items():
        name, _, number = layer.rpartition(".")
        rows.setdefault(name, {})[number] = size
    found: dict[str, str] = {}
    for name, row in rows.items():
        bases = [
            other
            for other, large in rows.items()
            if bool(DECODER.search(other)) == bool(DECODER.search(name))
            and all(16 * size <= large.get(number, 0) for number, size in row.items())
        ]
        base = max(bases, key=lambda other: sum(rows[other].values()), default=None)
        found |= {} if base is None else {f"{name}.{number}": f"{base}.{number}" for number in row}
    return found


def cut_layers(
    layers: Mapping[str, int],
    last: int,
    heads: Collection[str],
    role_of: Sequence[int],
    choose: Callable[[Mapping[str, int], int, int], Choice[tuple[str, ...]]],
) -> Cut:
    """The chunks of these layers.

    layers: elements of each numbered layer. last: elements of the leaves after them, such as a head. heads: paths
    of embeddings among these. choose: of the
    layers in order (as "blocks/6"), `last` and the number of chunks, the first layer of each chunk but the first.

    Raises SpecError where there are fewer layers than chunks, and for a choice that names no layer or is out of order.
    """
    mates = adapters(layers)
    names = in_order([layer for layer in layers if layer not in mates])
    chunks = len(role_of)
    if chunks > len(names):
        if not names:
            raise SpecError(
                "Spec(pipeline=): no layer has a number of its own in its path, as params['blocks'][0] has. Put the "
                "layers that are dealt to roles into a list"
            )
        raise SpecError(
            f"Spec(pipeline=): {chunks} chunks need as many numbered layers, as in params['blocks'][0]; there are "
            f"{len(names)}: {', '.join(names)}. Use fewer chunks or fewer roles (mesh pp)"
        )
    sizes = {name: layers[name] for name in names}
    for layer, base in mates.items():
        sizes[base] += layers[layer]
    chosen = choose({name.replace(".", "/"): size for name, size in sizes.items()}, last, chunks)
    starts = _starts(chosen.value, names, chunks)
    chunk_of = {name: sum(start <= i for start in starts) for i, name in enumerate(names)}
    chunk_of |= {layer: chunk_of[base] for layer, base in mates.items()}
    return Cut(tuple(role_of), chunk_of, chosen, heads)


def _starts(cut: Sequence[str], names: Sequence[str], chunks: int) -> list[int]:
    if len(cut) != chunks - 1:
        raise SpecError(
            f"Pipeline(cut={list(cut)!r}): {chunks} chunks have {chunks - 1} cuts, each the first layer of a chunk"
        )
    known = {name.replace(".", "/"): i for i, name in enumerate(names)}
    starts = []
    for name in cut:
        wanted = str(name).replace(".", "/")
        inside = next((layer for layer in known if wanted.startswith(layer + "/")), None)
        if inside is not None:
            raise SpecError(f"Pipeline(cut=[{name!r}]) is inside a layer: chunks are whole layers. Cut at {inside!r}")
        if wanted not in known:
            raise SpecError(
                f"Pipeline(cut=[{name!r}]) names no numbered layer with a leaf of one dim or more."
                f"{tree.suggest(wanted, known)}"
            )
        starts.append(known[wanted])
    if starts != sorted(set(starts)) or 0 in starts:
        raise SpecError(
            f"Pipeline(cut={list(cut)!r}): cuts are in the order of layers ({', '.join(known)}), each once, "
            "without the first: there the first chunk begins"
        )
    return starts
