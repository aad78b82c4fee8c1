"""The version: of the package, and of what a checkpoint says that it was written by."""

__version__ = "0.1.0"
