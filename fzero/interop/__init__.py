"""interop: a `torch.nn.Module`, Hugging Face's among them, as plain values and a pure function of them; and the
checkpoints of others, read and written a tensor at a time."""

from fzero.interop.dcp_folder import dcp, export_dcp
from fzero.interop.deepspeed_folder import deepspeed
from fzero.interop.fitted import Fitted, fitted
from fzero.interop.huggingface import export_safetensors, safetensors
from fzero.interop.incoming import write_checkpoint
from fzero.interop.module import Apply, Functional, from_module
from fzero.interop.statistics import with_buffers

__all__ = [
    "Apply",
    "Fitted",
    "Functional",
    "dcp",
    "deepspeed",
    "export_dcp",
    "export_safetensors",
    "fitted",
    "from_module",
    "safetensors",
    "with_buffers",
    "write_checkpoint",
]
