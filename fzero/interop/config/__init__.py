"""config: configurations of DeepSpeed and Accelerate, as they stand, as the fields of a Spec. See README.md."""

from fzero.interop.config.accelerate import accelerate_config
from fzero.interop.config.deepspeed import ds_config
from fzero.interop.config.given_fields import Given

__all__ = ["Given", "accelerate_config", "ds_config"]
