"""plan: see README.md."""
