"""lab: programs that search for faults of fzero. They are no part of the wheel. See README.md."""
