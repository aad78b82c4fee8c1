"""interop: a `torch.nn.Module` (Hugging Face's too) as plain values and a pure function of them; and checkpoints of
other libraries, read and written one tensor at a time. See README.md."""

from fzero.interop.config import Given, accelerate_config, ds_config
from fzero.interop.dcp_folder import dcp, export_dcp
from fzero.interop.deepspeed_folder import deepspeed
from fzero.interop.fitted import Fitted, fitted
from fzero.interop.huggingface import export_safetensors, safetensors
from fzero.interop.incoming import write_checkpoint
from fzero.interop.module import Apply, Functional, from_module
from fzero.interop.statistics import with_buffers
from fzero.interop.tp_plan import tp_plan

__all__ = [
    "Apply",
    "Fitted",
    "Functional",
    "Given",
    "accelerate_config",
    "dcp",
    "deepspeed",
    "ds_config",
    "export_dcp",
    "export_safetensors",
    "fitted",
    "from_module",
    "safetensors",
    "tp_plan",
    "with_buffers",
    "write_checkpoint",
]
