"""The errors that fzero raises. Each message names the leaf, the given value, the needed one, and the smallest fix."""

from __future__ import annotations

from collections.abc import Sequence

NO_KERNEL = (
    "torch has no kernel of this op for the dtype of its operands on this device. Compute it in a wider one, as in "
    "op(x.float()).to(x.dtype)"
)


class FzeroError(Exception):
    """Every error of fzero."""


class SpecError(FzeroError, ValueError):
    """A `Spec`, a mesh or a path rule that cannot be used."""


class ConfigError(SpecError):
    """A configuration of another library that cannot be taken over as it stands.

    `refusals` has a (path, text) for each key that is in the way; the message holds all texts. `lines` are the report
    of the other keys, as (path, value, what became of it); `open` the paths of refusals that a value would settle.
    """

    def __init__(
        self,
        message: str,
        refusals: Sequence[tuple[str, str]] = (),
        lines: Sequence[tuple[str, str, str]] = (),
        open: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.refusals: tuple[tuple[str, str], ...] = tuple(refusals)
        self.lines: tuple[tuple[str, str, str], ...] = tuple(lines)
        self.open: tuple[str, ...] = tuple(open)


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


class DataError(FzeroError, ValueError):
    """Tokens that cannot be trained on, or a batch that cannot be cut; names the file."""


class DisagreementError(FzeroError, RuntimeError):
    """The ranks do not run the same program; names the ranks."""


class LimitError(FzeroError, OSError):
    """This process may not open as many files as it needs; says which limit to raise."""


class PeerError(FzeroError, RuntimeError):
    """A transfer with another rank ended badly: that rank ended, or did not come in time."""


class HangError(DisagreementError):
    """This rank waited in vain for another, or for its disk. `missing` holds the ranks that did not come; the message
    says where every rank was, or what the disk was asked for.

    The process group cannot be used any more. The given state stays usable unless it says that it is not.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[int, ...] = tuple(missing)


class CheckpointError(FzeroError):
    """A checkpoint that cannot be written or read.

    file: the file or directory that it is about; the message begins with it. errno: the operating system's number, if
    it reported one.
    """

    def __init__(self, file: object, text: str, errno: int | None = None) -> None:
        self.file: str = str(file)
        self.text: str = text
        self.errno: int | None = errno
        super().__init__(f"{printable(self.file)}: {text}")


class CorruptError(CheckpointError):
    """Bytes of a checkpoint that are not those that were committed: damaged, truncated, missing or foreign. Also bytes
    of an offload file that are not those that were written."""


class MismatchError(CheckpointError):
    """A checkpoint whose leaves are not those that were asked for: names all of them. Nothing was loaded."""


class OffloadError(FzeroError):
    """The file for what a rank keeps on disk cannot be made, written or read, or the host's memory cannot be locked.

    file: the folder that it is in, or "the host's memory"; the message begins with it. errno: the operating system's
    number, if it reported one.
    """

    def __init__(self, file: object, text: str, errno: int | None = None) -> None:
        self.file: str = str(file)
        self.text: str = text
        self.errno: int | None = errno
        super().__init__(f"{printable(self.file)}: {text}")


def printable(text: str) -> str:
    """Text for a terminal: what would move the cursor or colour it is shown as Python writes it.

    >>> printable("a key\\x1b[2J\\n of two lines")
    'a key\\\\x1b[2J\\n of two lines'
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def named(error: BaseException) -> str:
    """An error's type and text; the type alone where it has no text, as that of Ctrl-C.

    >>> named(ValueError("bad row")), named(KeyboardInterrupt())
    ('ValueError: bad row', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def leaf_name(tree: str, path: str) -> str:
    """`state['a/b']`: a leaf as messages name it; the tree's name alone if the pytree is one leaf.

    >>> leaf_name("batch", "x/0"), leaf_name("batch", "")
    ("batch['x/0']", 'batch')
    """
    return f"{tree}[{path!r}]" if path else tree
