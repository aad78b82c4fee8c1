"""model_states: the bytes of the model that a rank holds: by ZeRO's accounting, and by the program.

ZeRO (Rajbhandari et al., 2020, figure 1) counts for mixed-precision Adam 2 bytes of 16-bit parameters, 2 of gradients
and 12 of optimizer state (fp32 master and two moments) per parameter, each whole or a 1/N part by stage, and nothing
else. In fzero the master is the parameter. Its 16-bit copy stays between steps where AdamW's kernel writes it, sharded
as the master (`fzero.passes.keep_copies`); else it is cast at the start of a step. So the own figure is read off the
program, at the op where it is largest. It has by name every buffer of parameters, gradients or moments, copies and
buffers in flight included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fzero.ir.liveness import live_bytes, live_names
from fzero.ir.program import Program

KINDS = {
    "param": "fp32 parameters",
    "copy": "16-bit copies",
    "optimizer": "moments",
    "gathered": "gathered parameters",
    "grad": "gradients",
    "scratch": "casts and receive buffers",
}


@dataclass(frozen=True)
class Held:
    """One tensor that is counted: a buffer of the program, its kind in words, and its bytes on a rank."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class ModelStates:
    """zero: bytes per rank of params, gradients and optimizer, by ZeRO's accounting.

    own: the buffers that the program holds at op number `op`, where they are most.
    """

    zero: Mapping[str, int]
    own: tuple[Held, ...]
    op: int

    @property
    def zero_bytes(self) -> int:
        """The sum by ZeRO's accounting."""
        return sum(self.zero.values())

    @property
    def own_bytes(self) -> int:
        """The sum of the program's own buffers."""
        return sum(held.nbytes for held in self.own)

    @property
    def between_steps_bytes(self) -> int:
        """The bytes that stay from step to step: parameters, their copies and moments."""
        return sum(h.nbytes for h in self.own if h.kind in (KINDS["param"], KINDS["copy"], KINDS["optimizer"]))


def model_states(program: Program) -> ModelStates:
    """The bytes of the model that a rank holds in this step. `program` is that of a `fzero.lower`.

    >>> import torch, fzero
    >>> def loss(p, x):
    ...     return ((x @ p["w"]) ** 2).mean()
    >>> spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=3, precision="bf16")
    >>> lowered = fzero.lower(spec, {"w": torch.empty(1024, 64)}, torch.empty(2, 1024), world_size=64)
    >>> held = model_states(lowered.program)
    >>> held.zero, held.zero_bytes == 16 * 65536 // 64
    ({'params': 2048, 'gradients': 2048, 'optimizer': 12288}, True)
    """
    op, names = _most(program)
    own = [Held(name, KINDS[program.buffers[name].kind], program.buffers[name].nbytes) for name in names]
    return ModelStates(_zero(program), tuple(own), op)


def _zero(program: Program) -> dict[str, int]:
    """2 + 2 + 12 bytes for every element of a trainable leaf, each whole or a part by its bucket's stage."""
    count = {"params": 0, "gradients": 0, "optimizer": 0}
    for slot_key in program.trainable:
        bucket = program.buckets[slot_key.bucket]
        n = program.mesh.size(bucket.axis)
        slot = bucket.slots[slot_key.slot]
        size = slot.stop - slot.start
        scattered = bucket.updates_slices and bucket.reduce_when == "produced"
        count["params"] += 2 * (size if bucket.keeps_gathered else size // n)
        count["gradients"] += 2 * (size // n if scattered else size)
        count["optimizer"] += 12 * (size // n if bucket.updates_slices else size)
    return count


def _most(program: Program) -> tuple[int, list[str]]:
    """The op at which buffers of the model are most, and their names there."""
    counted = {name for name, b in program.buffers.items() if b.kind in KINDS and (b.bucket or b.kind == "scratch")}
    levels = live_bytes(program.ops, program.buffers, lambda buffer: buffer.name in counted)
    op = max(range(len(levels)), key=levels.__getitem__, default=-1)
    return op, sorted(counted & live_names(program.ops, program.buffers, op))
