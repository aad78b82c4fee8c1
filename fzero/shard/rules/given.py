"""given: rules for ops that fzero does not know, as a user writes them (`fzero.shard.rule`)."""

from __future__ import annotations

from typing import Any

from fzero.errors import SpecError
from fzero.ir import op_info
from fzero.ir.op_info import OpInfo
from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dim, Factors, Maker
from fzero.shard.rules.rule import Rule


def rule(op: Any, text: str, *, summed: str = "") -> None:
    """Says how the dims of an op's tensors belong together, so that a step may shard them.

    op: an overload, as `torch.ops.mylib.mix.default`. text: a letter for each dim of each tensor operand, in the order
    of the arguments, then of each result: `"name:letters ... -> letters, letters"`. A dim whose letter is in an operand
    and in every result may be in parts, with the op called on the parts. A letter in `summed` is added over: parts of
    it give addends of the result. Any other letter that a result lacks stays whole, and so does `.`, each by itself.

    Sharded calls get the arguments of the whole one, so an op that takes sizes needs a rule of its own in
    `fzero/shard/rules`. Raises SpecError for a text that does not fit the op.

    >>> import torch
    >>> rule(torch.ops.aten._cdist_forward.default, "left:id -> i")
    Traceback (most recent call last):
    fzero.errors.SpecError: rule(aten._cdist_forward.default, 'left:id -> i'): the op has no 'left': its arguments are \
x1, x2, p, compute_mode
    """
    op_info.add(op, OpInfo(placements=parsed(op, text, summed=summed)))


def parsed(op: Any, text: str, *, summed: str = "") -> Rule:
    """The rule that a text says (see `rule`), for the row of an op: `OpInfo(placements=parsed(op, "x:ij -> ij"))`."""
    schema = getattr(op, "_schema", None)
    left, arrow, right = text.partition("->")
    operands = dict(word.split(":", 1) for word in left.split() if ":" in word)
    if schema is None or not arrow or len(operands) != len(left.split()):
        raise SpecError(f"rule({op}, {text!r}): needed an op's overload, and 'name:letters ... -> letters'")
    names = [argument.name for argument in schema.arguments]
    if unknown := [name for name in operands if name not in names]:
        raise SpecError(f"rule({op}, {text!r}): the op has no {unknown[0]!r}: its arguments are {', '.join(names)}")
    results = [result.strip() for result in right.split(",")]

    def factors(call: Call) -> Factors:
        m = Maker(call)
        of: dict[str, Dim] = {}

        def dims(letters: str, shape: tuple[int, ...]) -> tuple[Dim, ...]:
            if len(letters) != len(shape):
                raise SpecError(f"rule({op}, {text!r}): {letters!r} is for {len(letters)} dims, there are {len(shape)}")
            found = []
            for letter, size in zip(letters, shape, strict=True):
                if letter == ".":
                    found.append(m.dim(size, WHOLE))
                    continue
                if letter not in of:
                    read = any(letter in own for own in operands.values())
                    everywhere = read and all(letter in result for result in results)
                    of[letter] = m.dim(size, SUM if letter in summed else FREE if everywhere else WHOLE)
                found.append(of[letter])
            return tuple(found)

        inputs = {name: dims(letters, call.shape(name)) for name, letters in operands.items()}
        outputs = [dims(one, tuple(x.shape)) for one, x in zip(results, call.results, strict=True)]
        return m.factors(dict(inputs), *outputs)

    return Rule(factors)
