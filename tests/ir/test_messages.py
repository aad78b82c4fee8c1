"""messages: the bytes of a tensor, as they are sent."""

from __future__ import annotations

import pytest
import torch

from fzero.ir.messages import bytes_of, flat_bytes


@pytest.mark.parametrize("length", [0, 1])
def test_no_element_and_one_may_have_any_stride(length: int) -> None:
    """The gradient of an empty leaf, which a sum's backward expanded, ended in torch's RuntimeError."""
    sent = flat_bytes(torch.tensor(1.5).expand(length))
    assert sent.tolist() == torch.full((length,), 1.5).view(torch.uint8).tolist()


def test_several_have_no_gaps() -> None:
    assert flat_bytes(torch.tensor([1.0, 2.0])).numel() == 8
    with pytest.raises(RuntimeError, match="stride"):
        flat_bytes(torch.zeros(4)[::2])


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).view(2, 3).t(), torch.arange(9.0)[::4], torch.arange(9.0)[::5][:1]]
)
def test_bytes_are_in_the_order_of_the_elements(tensor: torch.Tensor) -> None:
    assert bytes_of(tensor).tolist() == torch.tensor(tensor.flatten().tolist()).view(torch.uint8).tolist()
