"""interop: a `torch.nn.Module`, Hugging Face's among them, as plain values and a pure function of them; and the
checkpoints of others, read and written a tensor at a time."""

from fzero.interop.fitted import Fitted, fitted
from fzero.interop.huggingface import export_safetensors, safetensors
from fzero.interop.module import Apply, Functional, from_module

__all__ = ["Apply", "Fitted", "Functional", "export_safetensors", "fitted", "from_module", "safetensors"]
