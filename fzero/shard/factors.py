"""factors: the dims of an op's tensors, named across its operands and results.

A *factor* is an index that runs over dims of several tensors: in mm, `ik,kj->ij` has three. To shard a factor is to
shard every dim that it runs over, and to leave the tensors without it whole. A dim is a chain of factors, outermost
first: the flattened dim of a view has several, a dim of size one has none.

| kind | meaning |
|---|---|
| `FREE` | a part of the results needs the same part of the operands alone |
| `SUM`, `MAX` | a result without the factor is summed over it (or the maximum is taken), so a part gives a `Partial` |
| `WHOLE` | must not be sharded |

The idea is Shardy's (OpenXLA): a rule says how dims correspond, and placements follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values

Dim = tuple[int, ...]  # numbers of factors, outermost first
Dims = tuple[Dim, ...]  # one for each dim of a tensor


class Kind(Enum):
    """What may be done with a factor. The value of `SUM` and `MAX` is the `how` of the `Partial` that they give."""

    FREE = ""
    SUM = "sum"
    MAX = "max"
    WHOLE = "whole"


FREE, SUM, MAX, WHOLE = Kind.FREE, Kind.SUM, Kind.MAX, Kind.WHOLE


@dataclass(frozen=True, slots=True)
class Factor:
    """An index of `size`. `local` names the function of `local_forms` that computes a part where this is sharded."""

    size: int
    kind: Kind
    local: str = ""


@dataclass(frozen=True, slots=True)
class Factors:
    """The dims of an op's tensors as chains of factors.

    inputs, outputs: for each tensor operand and result. addends: the operands that are added to a sum over factors;
    they must be `Partial` where it is. unaffected: (result, factor) where the result lacks the factor and no sum is
    taken.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    addends: frozenset[int] = frozenset()
    unaffected: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Call:
    """A node's arguments by the names in its op's schema, defaults included.

    operands: the tensors among them, in the order of the flattened args and kwargs; one may come twice. names: for each
    operand the argument that it stands in.
    """

    node: fx.Node
    named: dict[str, Any]
    operands: tuple[fx.Node, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(node: fx.Node) -> Call:
        """The call of a node whose op has a schema."""
        schema = fx_nodes.schema(node)
        assert schema is not None
        defaults = {a.name: a.default_value for a in schema.arguments}
        given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        placed = [(name, x) for name, value in given.items() for x in _nodes(value)]
        tensors = [(name, x) for name, x in placed if isinstance(x.meta["val"], torch.Tensor)]
        operands, names = tuple(x for _, x in tensors), tuple(name for name, _ in tensors)
        return Call(node, defaults | given, operands, names)

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of an operand."""
        return tuple(self.named[name].meta["val"].shape)

    def ndim(self, name: str) -> int:
        return len(self.shape(name))

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """The argument `name`, a dim of operand `of`, counted from the front."""
        return int(self.named[name]) % max(self.ndim(of), 1)

    @property
    def values(self) -> list[torch.Tensor]:
        """The (fake) tensors of the operands."""
        return [x.meta["val"] for x in self.operands]

    @property
    def results(self) -> list[torch.Tensor]:
        """The (fake) tensors that the op returns."""
        return fx_values.tensors(self.node.meta["val"])

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return tuple(self.results[0].shape)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


class Maker:
    """Makes the factors of one call: `dim` and `dims` make new ones, `factors` puts them together."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.made: list[Factor] = []

    def dim(self, size: int, kind: Kind = FREE, local: str = "") -> Dim:
        """A dim of one new factor; none where its size is one."""
        if size == 1:
            return ()
        self.made.append(Factor(size, kind, local))
        return (len(self.made) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = FREE, but: Iterable[int] = (), other: Kind = WHOLE) -> Dims:
        """A new factor for each dim of a shape, of `kind`; those of the dims `but` are of kind `other`."""
        apart = set(but)
        return tuple(self.dim(size, other if d in apart else kind) for d, size in enumerate(shape))

    def factors(
        self,
        inputs: dict[str, Dims | list[Dims]],
        *outputs: Dims,
        addends: Sequence[str] = (),
        unaffected: Iterable[tuple[int, Dim]] = (),
    ) -> Factors:
        """The factors of the call from the dims of each argument (a list of dims for a list) and of each result.

        Operands and results that are not named are whole. A result that the op does not return (None) takes no part.
        """
        feeds: dict[str, Iterator[Dims]] = {k: iter(v if isinstance(v, list) else [v]) for k, v in inputs.items()}
        call, values = self.call, self.call.node.meta["val"]
        operands = tuple(
            next(feeds[name]) if name in feeds else self.dims(value.shape, WHOLE)
            for name, value in zip(call.names, call.values, strict=True)
        )
        returned = {
            i: outputs[i] if i < len(outputs) else self.dims(value.shape, WHOLE)
            for i, value in enumerate(values if isinstance(values, (tuple, list)) else [values])
            if isinstance(value, torch.Tensor)
        }
        place = {i: k for k, i in enumerate(returned)}
        kept = frozenset((place[i], f) for i, dim in unaffected for f in dim if i in place)
        added = frozenset(i for i, name in enumerate(call.names) if name in addends)
        result = Factors(tuple(self.made), operands, tuple(returned.values()), added, kept)
        _check(call, result)
        return result


def _check(call: Call, factors: Factors) -> None:
    """A chain has the size of its dim, and no factor runs over two dims of one tensor."""
    for value, dims in zip([*call.values, *call.results], [*factors.inputs, *factors.outputs], strict=True):
        sizes = tuple(math.prod(factors.factors[f].size for f in dim) for dim in dims)
        numbers = [f for dim in dims for f in dim]
        assert sizes == tuple(value.shape), f"{call.node.target}: factors {sizes} of a value of shape {value.shape}"
        assert len(numbers) == len(set(numbers)), f"{call.node.target}: a factor runs over two dims of one value"


def broadcast(shape: Sequence[int], dims: Dims) -> Dims:
    """The dims of an operand of this shape that is broadcast to a value of dims `dims`.

    >>> broadcast((3, 1), ((0,), (1,), (2,)))
    ((1,), ())
    """
    last = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, last, strict=True))
