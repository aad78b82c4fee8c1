"""capture: see README.md."""
