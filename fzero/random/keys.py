"""Keys, and keys made of keys: `key`, `split`, `fold_in`. The same bits on every backend."""

from __future__ import annotations

import torch

from fzero.random import _draw_ops, _key_rules
from fzero.random._key_rules import is_key as is_key


def key(seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The key of a seed, an int64 tensor of shape (2,) on `device`. Different seeds are different keys.

    device: of the key. seed: a Python int in [0, 2**128); anything else raises TypeError or ValueError.

    >>> key(0)
    tensor([0, 0])
    >>> torch.equal(split(key(7), 3), split(key(7), 3))
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"fzero.random.key: seed must be a Python int, given {_key_rules.describe(seed)}. Write "
            "fzero.random.key(int(seed)); to make a key from a traced value use "
            "fzero.random.fold_in(fzero.random.key(0), value)"
        )
    if not 0 <= seed < 1 << 128:
        raise ValueError(
            f"fzero.random.key: seed must be in [0, 2**128), given {seed}. Write fzero.random.key(seed % 2**64)"
        )
    words = [word - (1 << 64) if word >> 63 else word for word in (seed & ((1 << 64) - 1), seed >> 64)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """`num` independent keys as an int64 tensor of shape (num, 2), on the key's device.

    key: int64 (2,). num: how many, at least 1. Child i does not depend on `num`. Raises TypeError or ValueError for a
    wrong key, or `num` below 1.

    >>> first, second = split(key(0))
    >>> torch.equal(split(key(0), 5)[0], first), torch.equal(first, second)
    (True, False)
    """
    _key_rules.key_of("split", key)
    if isinstance(num, bool) or not isinstance(num, (int, torch.SymInt)):
        raise TypeError(
            f"fzero.random.split: num must be an int, given {_key_rules.describe(num)}. Write split(key, 2)"
        )
    if num < 1:
        raise ValueError(f"fzero.random.split: num must be at least 1, given {num}. Write split(key, 2)")
    result: torch.Tensor = _draw_ops.split(key, num)
    return result


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """The key for use number `data`, an int64 tensor of shape (2,): `fold_in(key, step)`, `fold_in(key, layer)`.

    key: int64 (2,). data: a Python int in [-2**63, 2**63) or a 0-d integer tensor on the key's device, which may be
    traced or mapped over; equal values give equal keys. Raises TypeError for a float or bool, ValueError for another
    shape or device.

    >>> step = torch.tensor(3)
    >>> torch.equal(fold_in(key(0), step), fold_in(key(0), 3)), torch.equal(fold_in(key(0), 0), key(0))
    (True, False)
    """
    _key_rules.key_of("fold_in", key)
    if isinstance(data, torch.Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise TypeError(
                f"fzero.random.fold_in: data must hold integers, given {_key_rules.describe(data)}. Write data.long()"
            )
        if data.dim() != 0:
            raise ValueError(
                f"fzero.random.fold_in: data must be 0-d, given {_key_rules.describe(data)}. For one key per element "
                "write torch.vmap(lambda d: fzero.random.fold_in(key, d))(data)"
            )
        if data.device != key.device:
            raise ValueError(
                f"fzero.random.fold_in: data is on {data.device}, the key on {key.device}. Write data.to(key.device)"
            )
        folded: torch.Tensor = _draw_ops.fold_in_tensor(key, data)
        return folded
    if isinstance(data, bool) or not isinstance(data, (int, torch.SymInt)):
        raise TypeError(
            "fzero.random.fold_in: data must be a Python int or a 0-d integer tensor, "
            f"given {_key_rules.describe(data)}. Write fold_in(key, int(data))"
        )
    if not -(1 << 63) <= data < 1 << 63:
        raise ValueError(
            f"fzero.random.fold_in: data must be in [-2**63, 2**63), given {data}. Fold in its parts one after another"
        )
    result: torch.Tensor = _draw_ops.fold_in(key, data)
    return result
