"""codegen: see README.md."""
