"""What fzero raises. Each message names the leaf, what was given, what was needed, and the smallest fix."""

from __future__ import annotations


class FzeroError(Exception):
    """Every error of fzero."""


class SpecError(FzeroError, ValueError):
    """A `Spec`, a mesh or a path rule that cannot be used."""


class TreeError(FzeroError, ValueError):
    """A pytree that differs from the one expected; names the path."""


class CaptureError(FzeroError, TypeError):
    """The step cannot be captured as a pure program; names the user's source line."""


class DonatedError(FzeroError, RuntimeError):
    """A leaf of a state that `fzero.step` consumed, or that a failed step left half written."""


class NonFiniteError(FzeroError, ArithmeticError):
    """Gradients were not finite under `nonfinite="raise"`; the state that was given is unchanged and still usable."""


class VerifyError(FzeroError, RuntimeError):
    """A program breaks a rule; names the op and the pass."""


class DisagreementError(FzeroError, RuntimeError):
    """The ranks do not run the same program; names the ranks."""


class CheckpointError(FzeroError):
    """A checkpoint that cannot be written or read. `file` is the file or directory that it is about, which the message
    begins with; `errno` what the operating system said, if it did."""

    def __init__(self, file: object, text: str, errno: int | None = None) -> None:
        self.file, self.text, self.errno = str(file), text, errno
        super().__init__(f"{self.file}: {text}")


class CorruptError(CheckpointError):
    """Bytes of a checkpoint that are not those that were committed: damaged, truncated, missing or foreign."""


class MismatchError(CheckpointError):
    """A checkpoint whose leaves are not those that were asked for: names all of them. Nothing was loaded."""


def at(tree: str, path: str) -> str:
    """`state['a/b']`: a leaf as messages name it; `batch` alone where the pytree is one leaf.

    >>> at("batch", "x/0"), at("batch", "")
    ("batch['x/0']", 'batch')
    """
    return f"{tree}[{path!r}]" if path else tree
