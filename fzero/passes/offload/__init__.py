"""offload: see fzero/passes/README.md."""
