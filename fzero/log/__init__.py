"""log: what a run does, every few steps: JSON lines, trackers, a bar or a line; and pictures of it. See README.md."""

from fzero.log.log import Log

__all__ = ["Log"]
