"""sparse: which blocks of keys a block of queries looks at."""
