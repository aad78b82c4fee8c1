"""The version of the package. A checkpoint names the version that wrote it."""

__version__ = "0.1.0"
