"""wires: how a gradient travels between ranks: the one record that a codec is.

What a codec rounds off is part of what the step means: `fzero.verify.meaning` writes a wire's functions into the
meaning, and lowering into the program.

A `Wire` codes element by element, and what is coded is added up. A block codec (`fzero.ir.code_ops`) codes blocks of 64
into messages, which cannot be added: every rank gets its own slice of each rank's message, decodes them, and adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fzero.ir.code_ops import CodeOps

Elementwise = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Wire:
    """Each rank encodes what it sends, ranks add what is encoded, and the sum is decoded.

    name: in the reasons of ops. dtype: of what travels. encode, decode: elementwise functions of a tensor of any number
    of elements, each a pure function of module level or a frozen record, so that equal wires have equal programs;
    `decode` gives the gradient's dtype.
    """

    name: str
    dtype: torch.dtype
    encode: Elementwise
    decode: Elementwise
    feedback: bool = False  # whether what it loses of gradients is sent later


AnyWire = Wire | CodeOps


@dataclass(frozen=True)
class CastTo:
    """The function that casts a tensor."""

    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)
