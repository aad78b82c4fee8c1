"""session: see README.md."""
