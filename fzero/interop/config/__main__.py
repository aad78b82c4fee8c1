"""Prints every key of both tables as Markdown: `python -m fzero.interop.config`. docs/migration.md has it."""

from fzero.interop.config.accelerate_keys import ACCELERATE
from fzero.interop.config.deepspeed_keys import DEEPSPEED
from fzero.interop.config.report import markdown

print(f"### DeepSpeed\n\n{markdown(DEEPSPEED)}\n\n### Accelerate\n\n{markdown(ACCELERATE)}")
