"""tried: the versions of torch that fzero's tests have run with, and what is said where one lacks a name."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 11), (2, 14)


def tried() -> str:
    """
    >>> tried()
    '2.11 to 2.14'
    """
    return " to ".join(".".join(map(str, one)) for one in (OLDEST, NEWEST))


def lacking(error: Exception) -> ImportError:
    """Says of a name that torch lacks which versions have it."""
    (major, minor), least = NEWEST, ".".join(map(str, OLDEST))
    return ImportError(
        f"torch {torch.__version__} has not all names that fzero uses: {error}. fzero was tried with torch {tried()}. "
        f"Install one of these: pip install 'torch>={least},<{major}.{minor + 1}'"
    )
