"""verify: see README.md."""
