"""scan_op: `fzero::scan`, a loop over time as one op. Its body is a segment, which the op holds as text.

`scan(carry, xs, closed, body, length, reverse)`: with the body's (carry, x of step t, closed) -> (carry, y of step t)
the op gives the last carry, then each y stacked along a new dim 0. The body's placeholders are contiguous. As the body
is part of the op's arguments, a program that holds a scan is whole: in its text, its digest, and on disk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fzero.ir import fx_nodes, segment_text

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("scan(Tensor[] carry, Tensor[] xs, Tensor[] closed, str body, int length, bool reverse) -> Tensor[]")
SCAN = torch.ops.fzero.scan.default
BODY = 3  # the place of the body among its arguments


def text_of(body: fx.GraphModule) -> str:
    """A body as the op holds it. Raises TypeError for one with an argument that has no text."""
    return json.dumps(segment_text.to_data(body), separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def body_of(text: str) -> fx.GraphModule:
    """The body of this text. Raises ValueError for a text that is none. It must not be changed."""
    return unshared_body_of(text)


def unshared_body_of(text: str) -> fx.GraphModule:
    """The same for a caller who changes it."""
    return segment_text.from_data(json.loads(text))


def _shapes(
    carry: Sequence[Tensor], xs: Sequence[Tensor], closed: Sequence[Tensor], body: str, length: int, reverse: bool
) -> list[Tensor]:
    like = (carry or xs or closed)[0]
    results = [node.meta["val"] for node in fx_nodes.outputs(body_of(body).graph)]
    shapes = [v.shape if i < len(carry) else (length, *v.shape) for i, v in enumerate(results)]
    return [like.new_empty(shape, dtype=v.dtype) for shape, v in zip(shapes, results, strict=True)]


def _run(
    carry: Sequence[Tensor], xs: Sequence[Tensor], closed: Sequence[Tensor], body: str, length: int, reverse: bool
) -> list[Tensor]:
    results = _shapes(carry, xs, closed, body, length, reverse)
    step, count, stacks = body_of(body).forward, len(carry), [y.unbind(0) for y in results[len(carry) :]]
    rows = [x.unbind(0) for x in xs]
    with torch.no_grad():
        for t in reversed(range(length)) if reverse else range(length):
            outs = step(*carry, *(row[t] for row in rows), *closed)
            for i, stack in enumerate(stacks, count):
                stack[t].copy_(outs[i])
            carry = outs[:count]
            del outs  # before the next step, but for the carry
        for result, last in zip(results, carry, strict=False):
            result.copy_(last)
    return results


torch.library.register_fake("fzero::scan", _shapes, lib=_LIBRARY)
torch.library.impl("fzero::scan", "CompositeExplicitAutograd", _run, lib=_LIBRARY)
