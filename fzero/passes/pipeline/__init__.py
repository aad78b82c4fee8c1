"""pipeline: see README.md."""
