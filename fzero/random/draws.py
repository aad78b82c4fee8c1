"""Numbers made of a key: `uniform` and `normal`, and the functions built on them and on plain bits.

`bernoulli`, `dropout` and `categorical` read the stream of `uniform`; `randint` and `permutation` read that of the
key's bits. If two of them share a key, their results depend on each other. Give each its own key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.random import _draw_ops, _key_rules

_POSITIVE = (1 << 63) - 1


def uniform(
    key: torch.Tensor,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Numbers spread evenly over [low, high), of this shape and dtype, on the key's device.

    key: of the draw. shape: of the result. low, high: numbers. dtype: float32 (24 random bits), float64 (53), bfloat16
    or float16. The bounds are rounded to it first; `high` itself never comes. Raises TypeError for another dtype or a
    bound that is a tensor. Raises ValueError if the rounded bounds are equal, swapped or not finite. Raises TypeError
    or ValueError for a wrong key or shape.

    >>> from fzero.random import key
    >>> x = uniform(key(0), (2, 3), low=-1, high=1)
    >>> x.shape, bool((x >= -1).all() and (x < 1).all())
    (torch.Size([2, 3]), True)
    """
    _key_rules.key_of("uniform", key)
    _key_rules.float_dtype("uniform", dtype)
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, torch.Tensor):
            raise TypeError(
                f"fzero.random.uniform: {name} must be a Python number, given {_key_rules.describe(bound)}. "
                "Write low + (high - low) * fzero.random.uniform(key, shape)"
            )
    result: torch.Tensor = _draw_ops.uniform(key, _key_rules.as_shape("uniform", shape), dtype, float(low), float(high))
    return result


def normal(key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers of this shape and dtype (float32, float64, bfloat16 or float16), on the key's device.

    key: of the draw. shape, dtype: of the result. Raises TypeError for another dtype, and TypeError or ValueError for a
    wrong key or shape.

    >>> from fzero.random import key, split
    >>> weights = 0.02 * normal(key(0), (4, 3), torch.bfloat16)
    >>> weights.shape, weights.dtype
    (torch.Size([4, 3]), torch.bfloat16)
    >>> torch.vmap(lambda k: normal(k, 5))(split(key(0), 3)).shape       # for each key what it gives alone
    torch.Size([3, 5])
    """
    _key_rules.key_of("normal", key)
    _key_rules.float_dtype("normal", dtype)
    result: torch.Tensor = _draw_ops.normal(key, _key_rules.as_shape("normal", shape), dtype)
    return result


def bernoulli(key: torch.Tensor, p: float | torch.Tensor, shape: int | Sequence[int] = ()) -> torch.Tensor:
    """True with probability `p`: a bool tensor of this shape, on the key's device. It is `uniform(key, shape) < p`.

    key: of the draw. shape: of the result. p: a Python number in [0, 1] (0 is never, 1 always), or a floating tensor of
    probabilities that broadcasts with `shape`. The values of the tensor are not checked. Probabilities are kept to
    2**-24. Raises TypeError or ValueError for another `p`, a wrong key or shape.

    >>> from fzero.random import key
    >>> bernoulli(key(0), 0.5, 4)
    tensor([False,  True, False, False])
    >>> bernoulli(key(0), torch.tensor([0.0, 1.0]), (3, 2)).sum(0)
    tensor([0, 3])
    """
    _key_rules.key_of("bernoulli", key)
    sizes = _key_rules.as_shape("bernoulli", shape)
    if isinstance(p, torch.Tensor):
        if not p.is_floating_point():
            raise TypeError(
                f"fzero.random.bernoulli: p must hold floating numbers, given {_key_rules.describe(p)}. Write p.float()"
            )
        _key_rules.same_device("bernoulli", "p", p, key)
        sizes = list(torch.broadcast_shapes(sizes, p.shape))
    else:
        p = _key_rules.probability("bernoulli", p)
    return uniform(key, sizes) < p


def dropout(key: torch.Tensor, x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """`x / (1 - p)` with each element zeroed with probability `p`; of x's shape and dtype, and differentiable in x.

    key: of the draw. x: any shape, floating. p: a Python number in [0, 1]: 0 gives `x` itself, 1 gives zeros. The mask
    is `bernoulli(key, 1 - p, x.shape)`, so it does not depend on x's dtype. Under `torch.vmap` over x alone every
    example has the same mask. To give each its own, map over `split(key, n)` too. Raises TypeError or ValueError for
    another p, x or key.

    >>> from fzero.random import key, split
    >>> dropout(key(0), torch.ones(4, dtype=torch.bfloat16), 0.5)
    tensor([0., 2., 0., 0.], dtype=torch.bfloat16)
    >>> keys, x = split(key(0), 3), torch.ones(3, 100)
    >>> torch.vmap(dropout)(keys, x).shape
    torch.Size([3, 100])
    """
    _key_rules.key_of("dropout", key)
    p = _key_rules.probability("dropout", p)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"fzero.random.dropout: x must be a floating tensor, given {_key_rules.describe(x)}")
    _key_rules.same_device("dropout", "x", x, key)
    if p == 0:
        return x
    keep = 1 - p
    return torch.where(bernoulli(key, keep, x.shape), x / keep if keep else x, 0.0)


def randint(key: torch.Tensor, low: int, high: int, shape: int | Sequence[int] = ()) -> torch.Tensor:
    """Integers of [low, high), an int64 tensor of this shape on the key's device; the same on every backend.

    key: of the draw. shape: of the result. low, high: Python ints, -2**63 <= low < high <= 2**63, at most 2**62 apart;
    no value is likelier than another by more than (high - low) / 2**63 of its share. Raises TypeError or ValueError for
    other bounds, a wrong key or shape.

    >>> from fzero.random import key
    >>> randint(key(0), 0, 10, 5)
    tensor([7, 2, 7, 2, 7])
    """
    _key_rules.key_of("randint", key)
    _key_rules.integer_range(low, high)
    bits: torch.Tensor = _draw_ops.bits(key, _key_rules.as_shape("randint", shape))
    return (bits & _POSITIVE) % (high - low) + low


def permutation(key: torch.Tensor, x: int | torch.Tensor) -> torch.Tensor:
    """The numbers 0 to x - 1 in random order, int64 of shape (x,) on the key's device; the same on every backend.

    key: of the draw. x: a number or a tensor. Given a tensor (n, ...), its rows in that order instead:
    `x[permutation(key, n)]`, differentiable in x. Raises TypeError or ValueError for a negative number, a 0-d tensor,
    or a wrong key.

    >>> from fzero.random import key
    >>> permutation(key(0), 5)
    tensor([2, 3, 0, 4, 1])
    >>> torch.equal(permutation(key(0), torch.arange(5)), permutation(key(0), 5))
    True
    """
    _key_rules.key_of("permutation", key)
    if isinstance(x, torch.Tensor):
        if x.dim() == 0:
            raise ValueError(
                f"fzero.random.permutation: a tensor must have rows, given {_key_rules.describe(x)}. "
                "Write permutation(key, int(x))"
            )
        _key_rules.same_device("permutation", "x", x, key)
        return x.index_select(0, permutation(key, x.shape[0]))
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"fzero.random.permutation: needed an int or a tensor, given {_key_rules.describe(x)}")
    bits: torch.Tensor = _draw_ops.bits(key, _key_rules.as_shape("permutation", x))
    return bits.argsort(stable=True)  # two of n numbers are equal with probability n**2 / 2**65


def categorical(key: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Classes drawn with probabilities `softmax(logits, -1)`: logits (..., n), floating, to int64 of shape (...).

    key: of the draw. logits: (..., n). A class of logit -inf never comes. For several draws of each row write
    `logits.expand(num, *logits.shape)`. Raises TypeError or ValueError for logits that are not floating or have no
    classes, or a wrong key.

    >>> from fzero.random import key
    >>> categorical(key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))
    tensor([0, 1])
    """
    _key_rules.key_of("categorical", key)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        raise TypeError(
            f"fzero.random.categorical: logits must be a floating tensor, given {_key_rules.describe(logits)}"
        )
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            "fzero.random.categorical: logits must have classes along the last dimension, "
            f"given {_key_rules.describe(logits)}"
        )
    _key_rules.same_device("categorical", "logits", logits, key)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    gumbel = -torch.log(-torch.log(uniform(key, logits.shape, dtype)))  # -inf for a draw of 0, which wins nothing
    return torch.argmax(logits.to(dtype) + gumbel, dim=-1)
