"""comm: see README.md."""
