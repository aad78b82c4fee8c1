"""explain: a program for a reader: memory, transfers, passes, the road of a leaf. `fzero explain` is the command."""
