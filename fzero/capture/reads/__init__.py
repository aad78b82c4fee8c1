"""reads: what a traced step read from Python, noted and compared before it runs. See README.md."""
