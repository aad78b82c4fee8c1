"""Models that nobody here wrote, and what fzero makes of them beside eager PyTorch (docs/foreign.md)."""
