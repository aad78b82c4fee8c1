"""state: see README.md."""
