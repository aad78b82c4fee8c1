"""interop: a `torch.nn.Module`, Hugging Face's among them, as plain values and a pure function of them."""

from fzero.interop.module import Apply, Functional, from_module

__all__ = ["Apply", "Functional", "from_module"]
