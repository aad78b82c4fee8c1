"""compile: see README.md."""
