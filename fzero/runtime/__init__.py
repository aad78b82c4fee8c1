"""runtime: see README.md."""
