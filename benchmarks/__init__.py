"""Side-by-side measurements of fzero and its peers. `python -m benchmarks.run --help`; see README.md beside this."""
