"""wires: a codec of gradients is one record, of functions that are equal where what they do is."""

from __future__ import annotations

import pickle

import torch

from fzero.plan.wires import CastTo, Wire

NARROW = Wire("bf16", torch.bfloat16, CastTo(torch.bfloat16), CastTo(torch.float32))


def test_what_travels_is_cast_there_and_back() -> None:
    x = torch.tensor([1.0, 1 + 2**-12, -3.5])
    coded = NARROW.encode(x)
    assert coded.dtype == NARROW.dtype
    assert NARROW.decode(coded).dtype == torch.float32
    assert NARROW.decode(coded).tolist() == [1.0, 1.0, -3.5]


def test_equal_wires_are_one_and_others_are_not() -> None:
    """Programs of equal wires are shared, so what they are told apart by is all that they do."""
    same = Wire("bf16", torch.bfloat16, CastTo(torch.bfloat16), CastTo(torch.float32))
    assert {NARROW, same, pickle.loads(pickle.dumps(NARROW))} == {NARROW}
    others = {Wire("bf16", torch.bfloat16, CastTo(torch.bfloat16), CastTo(torch.float64)), CastTo(torch.bfloat16)}
    assert len(others | {NARROW}) == 3


def test_what_a_wire_loses_is_forgotten_unless_it_says_otherwise() -> None:
    assert not NARROW.feedback
