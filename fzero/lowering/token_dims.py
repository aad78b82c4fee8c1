"""token_dims: along which dim of a value its tokens lie, followed from op to op by the factors of `fzero.shard`.

A loss by chunks runs the same ops on a chunk of the tokens at a time. A value takes part if one of its dims runs over
tokens: it has a `TokenDim`. The rules of sharding say where that dim goes; a chunk is to time what a rank is to space.
Two ops are followed beyond these rules: `slice` along the tokens and its backward shift the first and the last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fzero.errors import FzeroError
from fzero.shard.factors import FREE, SUM, Call, Dims, Factors
from fzero.shard.rules import rule_of

aten = torch.ops.aten
SHAPED = {  # ops that are told the shape of their result, by the place of that argument
    aten.view.default: 1, aten._unsafe_view.default: 1, aten.reshape.default: 1, aten.expand.default: 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenDim:
    """Dim `dim` of a value is (outer, tokens, inner), flattened; it holds the tokens `first` to `last` - 1.

    outer: of a flattened batch and sequence the number of sequences.
    """

    dim: int
    outer: int
    first: int
    last: int

    @property
    def num(self) -> int:
        return self.last - self.first

    def of(self, chunk: range) -> tuple[int, int]:
        """(first, last) of those of a chunk's tokens that the value holds."""
        first = min(max(chunk.start, self.first), self.last)
        return first, max(first, min(chunk.stop, self.last))

    def local_shape(self, shape: Sequence[int], chunk: range) -> list[int]:
        """The shape of a chunk's part of a value of this shape."""
        first, last = self.of(chunk)
        return [size // self.num * (last - first) if d == self.dim else size for d, size in enumerate(shape)]


class Summed:
    """A result that is summed over the tokens: that of all is the sum of those of the chunks."""


SUMMED = Summed()
Way = TokenDim | Summed


class NotByTokensError(FzeroError):
    """An op that does not work token by token. The text says why."""


@dataclass(frozen=True)
class TokenWays:
    """How a node works token by token. operands: of each operand its tokens, or None. results: of each result."""

    operands: tuple[TokenDim | None, ...]
    results: tuple[Way, ...]


def by_tokens(node: fx.Node, known: Mapping[fx.Node, TokenDim]) -> TokenWays:
    """How a node works token by token, where the tokens of some operands are known.

    Raises NotByTokensError for one that does not, or of which nothing is known.
    """
    call = Call.of(node)
    shifted = _shifted(call, known)
    if shifted is not None:
        return shifted
    try:
        rule = rule_of(node.target).factors(call)
    except LookupError:
        raise NotByTokensError("nothing is known of its dims") from None
    number, within, tokens = _factor(call, rule, known)
    factor = rule.factors[number]
    if factor.kind not in (FREE, SUM) or factor.local or (rule.addends and factor.kind is SUM):
        raise NotByTokensError("it needs all tokens at once")
    operands = tuple(_tokens(rule, dims, number, within, tokens) for dims in rule.inputs)
    results: list[Way] = []
    for i, dims in enumerate(rule.outputs):
        own = _tokens(rule, dims, number, within, tokens)
        if own is None and (i, number) in rule.unaffected and _read(node, i):
            raise NotByTokensError("it needs all tokens at once")
        results.append(own or SUMMED)
    return TokenWays(operands, tuple(results))


def local_args(
    node: fx.Node, args: Sequence[Any], result: Way, chunk: range, known: Mapping[fx.Node, TokenDim]
) -> list[Any]:
    """The positional arguments of a node's call on a chunk: shapes and bounds are those of the chunk."""
    args = list(args)
    if not isinstance(result, TokenDim) or not isinstance(node.meta["val"], torch.Tensor):
        return args  # only ops of one result are told their shape
    shape = result.local_shape(node.meta["val"].shape, chunk)
    if node.target in SHAPED:
        args[SHAPED[node.target]] = shape
    elif node.target in (aten.slice.Tensor, aten.slice_backward.default):
        call = Call.of(node)
        back, operand = node.target is aten.slice_backward.default, known[call.operands[0]]
        sizes = [shape] if back else []
        if int(call["dim"]) % len(shape) != operand.dim:
            return [args[0], *sizes, *args[1 + len(sizes) :]]
        whole, part = (result, operand) if back else (operand, result)
        (low, _), (first, last) = whole.of(chunk), part.of(chunk)
        args = [args[0], *sizes, call["dim"], first - low, last - low, 1]
    return args


def _read(node: fx.Node, result: int) -> bool:
    return isinstance(node.meta["val"], torch.Tensor) or any(u.users for u in node.users if u.args[1] == result)


def _shifted(call: Call, known: Mapping[fx.Node, TokenDim]) -> TokenWays | None:
    """Of a slice along the tokens, and of its backward, how they work; else None."""
    target = call.node.target
    if target not in (aten.slice.Tensor, aten.slice_backward.default):
        return None
    tokens, back = known[call.operands[0]], target is aten.slice_backward.default
    whole = call.result if back else call.shape("self")
    if int(call["dim"]) % len(whole) != tokens.dim:
        return None
    start, end, step = slice(call["start"], call["end"]).indices(whole[tokens.dim])
    part = call.shape("grad_output") if back else call.result
    if call["step"] != 1 or step != 1 or tokens.outer != 1 or tokens.num != (part if back else whole)[tokens.dim]:
        raise NotByTokensError("it takes other than a stretch of the tokens")
    if back:
        first = tokens.first - start
        return TokenWays((tokens,), (replace(tokens, first=first, last=first + whole[tokens.dim]),))
    first = tokens.first + start
    return TokenWays((tokens,), (replace(tokens, first=first, last=max(first, tokens.first + end)),))


def _factor(call: Call, rule: Factors, known: Mapping[fx.Node, TokenDim]) -> tuple[int, int, TokenDim]:
    """(the factor that runs over the tokens, how many groups of it lie outside of them, tokens of an operand)."""
    found: set[tuple[int, int, int, int]] = set()
    for operand, dims in zip(call.operands, rule.inputs, strict=True):
        if (tokens := known.get(operand)) is None:
            continue
        outside = 1
        for number in dims[tokens.dim]:
            size = rule.factors[number].size
            if tokens.outer < outside * size:
                within = tokens.outer // outside
                if tokens.outer % outside or size % (within * tokens.num):
                    raise NotByTokensError("it mixes tokens with another dim")
                found.add((number, within, tokens.first, tokens.last))
                break
            outside *= size
        else:
            raise NotByTokensError("it mixes tokens with another dim")
    if len(found) != 1:
        raise NotByTokensError("its operands do not hold the same tokens along one dim")
    ((number, within, first, last),) = found
    return number, within, TokenDim(0, 1, first, last)


def _tokens(rule: Factors, dims: Dims, number: int, within: int, tokens: TokenDim) -> TokenDim | None:
    """The tokens of a value with these dims; None for a value without the factor."""
    for d, dim in enumerate(dims):
        if number in dim:
            outside = math.prod(rule.factors[f].size for f in dim[: dim.index(number)])
            return replace(tokens, dim=d, outer=outside * within)
    return None
