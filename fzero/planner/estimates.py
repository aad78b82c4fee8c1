"""estimates: what candidates take, roughly, from what was sketched of one rank: seconds of a step, bytes of the device.

Of a microbatch, the transfers of its layers are beside computing, which hides half of itself of them. A pipeline takes
as long as its microbatches and the roles that wait. Memory is the state, what is gathered of it, the gradients, and the
activations of the microbatches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fzero.compile.decide.reduce_when import MORE
from fzero.cost.rates import Rates
from fzero.hardware import Hardware
from fzero.hardware.machine import Host
from fzero.ir.mesh import DATA, Mesh
from fzero.passes.recompute import GATHERS
from fzero.planner.candidates import Candidate, sharded
from fzero.planner.programs import bucket_choice

TENSOR = "tp"  # the axis of rules that were found
FEW_LAYERS = 3  # of which parameters are gathered at once, and gradients not yet reduced
SAVER = 0.002  # of two that are alike, the one with fewer means to save memory


@dataclass(frozen=True)
class Ends:
    """A figure of one row of the batch, and of more: between and beyond them it lies on their line."""

    one: float
    many: float
    rows: int

    def of(self, rows: float) -> float:
        """The figure of so many rows.

        >>> Ends(3.0, 9.0, 4).of(2), Ends(3.0, 9.0, 4).fixed
        (5.0, 1.0)
        """
        return max(self.fixed + self.of_a_row * rows, 0.0)

    @property
    def of_a_row(self) -> float:
        """What each row adds."""
        return (self.many - self.one) / (self.rows - 1)

    @property
    def fixed(self) -> float:
        """What is there for any number of rows, as of parameters that are cast."""
        return max(self.one - self.of_a_row, 0.0)


@dataclass(frozen=True)
class OnDevice:
    """The parts of the bytes of the parameters and of the optimizer's columns that are held on the device, and whether
    gradients wait elsewhere for all others."""

    params: float
    optimizer: float
    gradients: bool

    @property
    def off_device(self) -> bool:
        """Whether anything is elsewhere."""
        return self.params < 1 or self.optimizer < 1 or self.gradients


@dataclass(frozen=True)
class Sketch:
    """Of one rank. seconds: of the loss and its gradient, by the value of `remat`. activations: their bytes at their
    fullest. update: seconds. params, optimizer: bytes. wire: bytes of an element that is gathered, over those of one
    that is held. layers: of the model. waits: whether gradients wait for the last one. held: by the value of `offload`.
    ops: of the program."""

    seconds: dict[Any, Ends]
    activations: dict[Any, Ends]
    update: float
    params: int
    optimizer: int
    wire: float
    layers: int
    waits: bool
    held: dict[Any, OnDevice]
    ops: int

    @property
    def share(self) -> float:
        """Of the activations of a row, those that are kept if all layers are recomputed; 1 if that was not sketched."""
        none = self.activations["none"]
        return self.activations.get("full", none).of_a_row / max(none.of_a_row, 1.0)

    def estimates(
        self, candidates: Iterable[Candidate], rows: int, machine: Hardware, tensor_bytes: float = 0.0
    ) -> dict[Candidate, tuple[float, int]]:
        """(seconds of a step, bytes of the device) of candidates for a global batch of so many rows.
        tensor_bytes: that tensor parallelism sends in the forward of a row."""
        known: dict[tuple[tuple[str, int], ...], _Ranks] = {}
        found = {}
        for one in candidates:
            if one.mesh not in known:
                rates = machine.rates(one.ranks)
                known[one.mesh] = _Ranks(self, one.ranks, rates, bucket_choice(rates, one.ranks).value)
            estimate = _Estimate(self, one, known[one.mesh], machine.host, rows, tensor_bytes)
            found[one] = estimate.seconds, estimate.bytes
        return found


@dataclass(frozen=True)
class _Ranks:
    """What all candidates of a mesh share. bucket: bytes."""

    sketch: Sketch
    mesh: Mesh
    rates: Rates
    bucket: int
    _sent: dict[tuple[int, bool], tuple[float, float, float]] = field(default_factory=dict)  # only `sent` writes it

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The mesh."""
        return dict(self.mesh.axes)

    @cached_property
    def data(self) -> int:
        """Ranks of the data."""
        return math.prod(self.sizes.get(axis, 1) for axis in DATA)

    @cached_property
    def parts(self) -> int:
        """Into how many parts layers are cut."""
        return sharded(self.sizes)

    @cached_property
    def roles(self) -> int:
        """Of a pipeline."""
        return self.mesh.roles

    def sent(self, stage: int, each: bool) -> tuple[float, float, float]:
        """The seconds of what ranks of the data send, bucket after bucket: (with each microbatch, once a step beside
        other work, once a step when there is none). each: whether the gradients of each microbatch are reduced."""
        if (stage, each) not in self._sent:
            self._sent[stage, each] = self._transfers(stage, each) if self.data > 1 else (0.0, 0.0, 0.0)
        return self._sent[stage, each]

    def _transfers(self, stage: int, each: bool) -> tuple[float, float, float]:
        """A pipeline reduces at the end. From stage 2 on it does so chunk by chunk, and compute beside it is slower, on
        one role after the other."""
        of, whole = self.sketch, self.sketch.params / self.parts
        pieces = max(of.layers // self.roles, int(whole / self.bucket), 1)

        def taken(kind: str, nbytes: float) -> float:
            return pieces * self.rates.transfer(kind, int(nbytes / pieces), self.mesh.data_axes, self.data)

        gather, scatter = taken("all_gather", whole * of.wire), taken("reduce_scatter", whole)
        often, last = gather * (2 if stage == 3 else 0) + scatter * each, scatter * (not each)
        once = gather * (stage != 3)
        if self.roles == 1:
            return often, once + last, 0.0
        return often, once, last * (max(1.0, self.roles * (1 - 1 / self.rates.tax)) if stage >= 2 else 1)


@dataclass(frozen=True)
class _Estimate:
    """One candidate. rows: of the global batch. tensor_bytes: as in `estimates`."""

    sketch: Sketch
    one: Candidate
    ranks: _Ranks
    host: Host | None
    rows: int
    tensor_bytes: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        one, roles, of = self.one, self.ranks.roles, self.sketch
        often, once, last = self.ranks.sent(self.stage, self.each)
        fetched, late = self._moves
        computing = self._like(of.seconds).of(self.own) / self.ranks.parts + self._tensor
        hides = computing / 2 if roles == 1 else 0.0  # in a pipeline one role's transfers hold up the next
        each = max(computing + max(0.0, often - hides), fetched)  # of a microbatch
        beside = computing * one.microbatches / 2  # hides transfers
        seconds = each * (one.microbatches + (roles - 1) / one.chunks) + max(0.0, once - beside) + last
        seconds += of.update / self.ranks.parts / self.shares + max(0.0, late - (0 if of.waits else beside))
        savers = (one.remat != "none") + (one.offload is not None) + (roles > 1) + (one.microbatches > 1)
        return seconds * (1 + SAVER * savers)

    @property
    def bytes(self) -> int:
        """Of the device. Between layers, values are whole on each rank of tensor parallelism: as many as it sends. If
        tokens stay in parts, half of that is gathered, and kept if it does not run again."""
        of, held, roles = self.sketch, self.sketch.held[self.one.offload], self.ranks.roles
        keeps = self.shares if self.stage == 3 or (self.stage and of.wire < 1) else 1
        state = held.params * of.params / keeps + held.optimizer * of.optimizer / self.shares
        by_layers = self.stage == 3 or (keeps == 1 and held.params < 1)
        gathered = of.params * of.wire * (self.few if by_layers else keeps > 1)
        activations = self._like(of.activations)
        kept = activations.of_a_row * self.own / roles
        part = 1.0 if not self.one.sequence else 0.0 if self.one.remat in ("full", GATHERS) else 0.5
        whole = min(kept, part * self.tensor_bytes * self.own / roles) if roles < self.ranks.parts else 0.0
        kept = (whole + (kept - whole) * roles / self.ranks.parts) * self._held
        cast = activations.fixed / self.shares
        return int((state + gathered + cast + self._gradients) / self.ranks.parts + kept)

    @cached_property
    def stage(self) -> int:
        """The stage of ZeRO that it is most like."""
        return self.one.zero if isinstance(self.one.zero, int) else 3

    @cached_property
    def shares(self) -> int:
        """Ranks of the data that share the state."""
        return (self.ranks.sizes["dp"] if self.one.zero == "hsdp" else self.ranks.data) if self.stage else 1

    @cached_property
    def own(self) -> float:
        """Rows of a rank's microbatch."""
        return self.rows / self.ranks.data / self.one.microbatches

    @cached_property
    def few(self) -> float:
        """The part of the parameters that is gathered at once where layers are gathered one after the other."""
        return min(1.0, FEW_LAYERS / max(self.sketch.layers, 1))

    @cached_property
    def each(self) -> bool:
        """Whether the gradients of each microbatch are reduced (`fzero.compile.decide.reduce_when`)."""
        of = self.sketch
        if self.one.reduce is not None:
            return self.one.reduce == "each" and self.one.microbatches > 1
        kept = next(iter(of.activations.values())).of(self.own)
        more = of.params * (1 - 1 / self.ranks.data)
        return self.one.microbatches > 1 and more > MORE * (kept + (of.params + of.optimizer) / self.ranks.data)

    @property
    def _held(self) -> float:
        """Microbatches whose activations the first role holds (`fzero.pipeline`)."""
        roles, chunks = self.ranks.roles, self.one.chunks
        ahead = roles if chunks == 1 else (2 * (roles - 1) + (chunks - 1) * roles + 1) / chunks
        return min(ahead, self.one.microbatches)

    @property
    def _gradients(self) -> float:
        """The bytes of gradients, of all parts: those of a few layers are whole, others wait whole or as shares."""
        of = self.sketch
        at_once = self.stage >= 2 or (self.stage == 1 and self.each)
        if self.one.microbatches > 1 and not (self.each and at_once):
            one_round = self.one.chunks > 1 and self.one.microbatches == self.ranks.roles and self.stage
            return of.params * (2 / self.one.chunks if one_round else 1)  # a chunk's sum is ready before the next's
        waiting = 0.0 if of.held[self.one.offload].gradients or not of.waits else 1.0
        return of.params * max(self.few, waiting / (self.shares if at_once else 1))

    @property
    def _tensor(self) -> float:
        """The seconds of what tensor parallelism sends in the forward and the backward of a microbatch."""
        width, nbytes = self.ranks.sizes.get(TENSOR, 1), self.own * self.tensor_bytes / self.ranks.roles
        often = 2.5 if self.one.remat == GATHERS else 2.0  # half of what the forward sends is gathers
        return (
            often * self.ranks.rates.transfer("all_gather", int(nbytes), TENSOR, width) if width > 1 and nbytes else 0.0
        )

    @property
    def _moves(self) -> tuple[float, float]:
        """(the seconds of what is fetched beside a microbatch, of what is moved and updated when it is over)."""
        of, host, held, shares = (
            self.sketch,
            self.host,
            self.sketch.held[self.one.offload],
            self.shares * self.ranks.parts,
        )
        if host is None or not held.off_device or not host.to_device_bytes:
            return 0.0, 0.0
        params, optimizer = of.params * (1 - held.params) / shares, of.optimizer * (1 - held.optimizer) / shares
        gradients = of.params / shares
        late = (optimizer + params + gradients * held.gradients) / min(host.to_device_bytes, host.from_device_bytes)
        if host.adam_bytes:  # or the host updates: gradients go there, parameters come back
            late = min(late, gradients / host.from_device_bytes + 2 * (params + optimizer) / host.adam_bytes)
        return 2 * params / host.to_device_bytes, late

    def _like(self, known: Mapping[Any, Ends]) -> Ends:
        """What was sketched with the candidate's value of `remat`; of rules, the first."""
        remat = "none" if self.one.remat == GATHERS else self.one.remat  # on one rank nothing is gathered
        return known[remat] if isinstance(remat, str) and remat in known else next(iter(known.values()))
