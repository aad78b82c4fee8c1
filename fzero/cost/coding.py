"""coding: what codecs save on the wire of a program, what they cost a rank, and below which bandwidth they pay.

Saved are the bytes that the same transfers would send in the dtype of compute (gathers) or in float32 (reductions).
Where every rank gets all of each message, an all-reduce would have been in their place.
The cost is the time that a rank's processor needs to encode and decode, measured here on a stretch of elements. Both
are of one step. Where the wire is hidden behind compute anyway, less is gained than this says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from fzero import backend
from fzero.cost.rates import Rates
from fzero.ir import fx_nodes
from fzero.ir.code_ops import CODES, ENCODES, OPS
from fzero.ir.mesh import parts_of
from fzero.ir.op import Op
from fzero.ir.program import Program, named_bytes, wire_bytes
from fzero.kernels.codecs import CODECS, decode_blocks, encode, message_bytes
from fzero.precision import DTYPES, Precision

SAMPLE = 1 << 17  # elements that are encoded and decoded to measure
SUGGESTED = "int8"  # the codec that a program without one is compared with


@dataclass(frozen=True)
class CodecAccount:
    """Of one rank's step. sent, saved: bytes on the wire by messages, and those that they save. seconds: to encode and
    to decode; None where they were not measured, as for a device that is not there."""

    sent: int
    saved: int
    seconds: float | None

    @property
    def pays_below(self) -> float | None:
        """The bandwidth of a rank, in bits a second, below which what is saved on the wire is more than the cost."""
        return None if self.seconds is None else 8 * self.saved / max(self.seconds, 1e-12)

    def __str__(self) -> str:
        times = (self.sent + self.saved) / max(self.sent, 1)
        if self.saved <= 0:
            return f"{-self.saved:,} bytes a step and rank more: messages do not pay here. Leave the codec out"
        text = f"{self.saved:,} bytes a step and rank less ({times:.1f} times)"
        if self.seconds is None or self.pays_below is None:
            return f"{text}; what encoding costs was not measured: the device is not here"
        return (
            f"{text}; encoding and decoding {self.seconds * 1e3:.3g} ms; pays below {self.pays_below / 1e9:.2g} Gbit/s"
        )


@functools.cache
def nanoseconds(codec: str) -> tuple[float, float]:
    """(to encode, to decode) an element, on this processor.

    >>> all(0 < figure < 1000 for figure in nanoseconds("int8"))
    True
    """
    x = torch.linspace(-1, 1, SAMPLE, dtype=torch.float32)
    message = encode(x, CODECS[codec])
    room, back = torch.empty_like(message), torch.empty_like(x)

    def least(run: Callable[[], object]) -> float:
        spent = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            spent.append(time.perf_counter() - began)
        return min(spent) / SAMPLE * 1e9

    return least(lambda: encode(x, CODECS[codec], out=room)), least(lambda: decode_blocks(message, CODECS[codec], back))


def of_rates(codec: str, rates: Rates | None) -> tuple[float, float]:
    """(seconds to encode an element, to decode it): as the ranks have agreed, else as measured here."""
    if rates is not None and codec in rates.coding:
        return rates.coding[codec]
    encoding, decoding = nanoseconds(codec)
    return encoding * 1e-9, decoding * 1e-9


def coding(program: Program, policy: Precision, rates: Rates | None = None) -> CodecAccount:
    """What the policy's codecs save and cost in a program."""
    sent, saved, seconds = 0, 0.0, 0.0
    measured = backend.of_transport(program.transport) is backend.CPU
    wide = (policy.autocast or DTYPES.get(policy.compute or "", torch.float32)).itemsize
    for op in program.ops:
        if op.is_collective and (per := _per(program, op, policy)) is not None:
            nbytes, kind = wire_bytes(program, op), program.buffers[op.reads[0].name].kind
            sent += nbytes
            less = 2 / program.mesh.size(op.axis or "") if op.kind == "all_gather_values" else 1
            saved += float(nbytes * per) * less * (4 if kind == "grad" else wide) - nbytes
        elif op.computes and measured:
            seconds += _seconds(program, op, policy, rates)
    return CodecAccount(sent, round(saved), seconds if measured else None)


def _per(program: Program, op: Op, policy: Precision) -> Fraction | int | None:
    """Elements for each byte that a transfer sends, of a bucket's messages or of those of a sum; None for others."""
    buffer = program.buffers[op.reads[0].name]
    if buffer.bucket is None and policy.sums is not None and buffer.dtype is torch.uint8:
        return OPS[policy.sums].per
    return None if buffer.per == 1 else buffer.per


def _seconds(program: Program, op: Op, policy: Precision, rates: Rates | None) -> float:
    """That an op encodes and decodes: flat ones what their references name, others all that is in their segment."""
    amounts: list[tuple[str | None, int, float]] = []  # (codec, 0 to encode and 1 to decode, elements)
    if op.is_flat:
        for which, refs in enumerate((op.writes, op.reads)):
            for ref in refs:
                buffer = program.buffers[ref.name]
                codec = policy.reduce if buffer.kind == "grad" else policy.gather
                if buffer.per != 1:
                    amounts.append((codec, which, float(named_bytes(program, ref) * buffer.per)))
    else:
        for node in program.segments[op.segment].graph.nodes:
            if node.target in CODES:
                encodes = node.target in ENCODES
                value = fx_nodes.operand(node).meta["val"]  # the messages of all ranks, where they are added
                elements = float(value.numel() * (1 if encodes else CODES[node.target].per))
                amounts.append((CODES[node.target].name, 0 if encodes else 1, elements))
    return sum(of_rates(codec, rates)[which] * n for codec, which, n in amounts if codec in CODECS)


def sentence(programs: Mapping[int, Program], policy: Precision, rates: Rates | None) -> str:
    """What codecs do for a step, for `lowered.choices`; "" where there is nothing to say: no data is split over ranks,
    or nobody asked and nothing was measured."""
    given = {"gather": policy.gather, "reduce": policy.reduce, "sums": policy.sums}
    asked = ", ".join(f"{name}={value}" for name, value in given.items() if value in CODECS)
    if asked:
        most = max((coding(program, policy, rates) for program in programs.values()), key=lambda found: found.sent)
        return f"{asked}: {most}" if most.sent else f"{asked}: nothing travels in messages, so nothing is coded there"
    if rates is None or backend.of_transport(programs[0].transport) is not backend.CPU:
        return ""
    saved, cost = map(max, zip(*(_untaken(program, rates) for program in programs.values()), strict=True))
    if not cost:
        return ""
    chosen = "none" if saved < cost else f"none, but Precision(gather={SUGGESTED!r}, reduce={SUGGESTED!r}) may pay"
    return (
        f"{chosen}: {SUGGESTED} would take {saved * 1e3:.3g} ms off the wire of a step at the measured rates, and "
        f"{cost * 1e3:.3g} ms to encode and decode"
    )


def _untaken(program: Program, rates: Rates) -> tuple[float, float]:
    """Seconds of a step that a codec would take off the wire, and those that it would cost a rank."""
    saved = cost = 0.0
    encoding, decoding = of_rates(SUGGESTED, rates)
    for op in program.ops:
        source, kind = program.buffers[op.reads[0].name] if op.reads else None, op.row.collective
        if kind is None or source is None or source.bucket is None or op.axis is None or op.row.small:
            continue
        n, target = program.mesh.size(op.axis), program.buffers[op.writes[0].name]
        whole = kind.whole_bytes(source.nbytes, target.nbytes)
        elements = whole // source.dtype.itemsize
        less = message_bytes(elements, CODECS[SUGGESTED])
        if op.axis in parts_of(program.buckets[source.bucket].axis):
            seconds = rates.transfer(op.kind, whole, op.axis, n) - rates.transfer(op.kind, less, op.axis, n)
            seconds /= 2 if kind.scattered else 1  # of an all-reduce the first half is coded
            decoded = elements
        else:  # every rank would get all of each message
            seconds = rates.transfer(op.kind, whole, op.axis, n) - rates.transfer("all_gather_values", less, op.axis, n)
            decoded = elements * n
        saved += seconds
        cost += elements * (encoding / (n if op.gathers else 1)) + decoded * decoding
    return max(saved, 0.0), cost
