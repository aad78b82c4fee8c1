"""common: see README.md."""
