"""copies: the 16-bit copies of parameters that programs keep between steps (`fzero.passes.keep_copies`).

A program that keeps one reads it at the start of a step as the cast of its master, and leaves it so. All else that
writes a master leaves the copy stale: a program of another phase, or a user who asked for `leaf.local`. Then the copy
is cast anew before it is read. So no checkpoint holds one. Of a tensor that a user kept from before the last step, the
writes that torch counts are seen. Those of collectives, fused optimizers, `.data`, numpy and DLPack are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fzero.ir.program import Program

Key = tuple[str, torch.dtype]  # a master's name, and the dtype of a copy of it


@dataclass
class Copies:
    """The copies of one state's parameters.

    masters: the state's buffers in memory. block: makes memory that transfers can read, of a number of bytes. tensors:
    the copies that programs have asked for. fresh: of each that equals the cast of its master, the number of writes
    that torch had counted on the master then. Only the methods write the last two.
    """

    masters: Mapping[str, torch.Tensor]
    block: Callable[[int], torch.Tensor]
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    fresh: dict[Key, int] = field(default_factory=dict)

    def of(self, program: Program) -> dict[str, torch.Tensor]:
        """A program's copies by name, those that are new cast from their masters."""
        found = {}
        for copy, master in program.copies.items():
            buffer = program.buffers[copy]
            if (key := (master, buffer.dtype)) not in self.tensors:
                self.tensors[key] = self.block(buffer.nbytes).view(buffer.dtype).view(buffer.shape)
                self._cast(key)
            found[copy] = self.tensors[key]
        return found

    def refresh(self, program: Program) -> None:
        """Casts the masters anew whose copies the program reads and which are not what they were."""
        for key in _keys(program):
            if self.fresh.get(key) != self.masters[key[0]]._version:
                self._cast(key)

    def wrote(self, program: Program) -> None:
        """Notes that a program has run: what it keeps is fresh; other copies of what it has written are stale."""
        kept = _keys(program)
        self.fresh.update({key: self.masters[key[0]]._version for key in kept})
        if others := self.fresh.keys() - kept:
            written = {ref.name for op in program.ops for ref in op.writes}
            for key in others:
                if key[0] in written:
                    del self.fresh[key]

    def spoiled(self, master: str) -> None:
        """Notes that a master may be written by others."""
        self.fresh = {key: version for key, version in self.fresh.items() if key[0] != master}

    def _cast(self, key: Key) -> None:
        master = self.masters[key[0]]
        with torch.no_grad():
            self.tensors[key].copy_(master)
        self.fresh[key] = master._version


def _keys(program: Program) -> set[Key]:
    return {(master, program.buffers[copy].dtype) for copy, master in program.copies.items()}
