"""lowering: see README.md."""
