"""Kernels: one per file, each with its formula, reference, kernel and launcher. They import nothing of fzero."""
