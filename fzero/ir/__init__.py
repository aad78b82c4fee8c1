"""ir: see README.md."""
