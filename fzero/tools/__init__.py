"""tools: see README.md."""
