"""estimates: what candidates take, roughly, from what was sketched of one rank: seconds of a step, bytes of the device.

Of a microbatch, the transfers of its layers are beside computing, which hides half of itself of them. A pipeline takes
as long as its microbatches and the roles that wait. Memory is the state, what is gathered of it, the gradients, and the
activations of the microbatches in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        """Of the activations of a row, those that are kept if all layers are recomputed."""
        return self.activations["full"].of_a_row / max(self.activations["none"].of_a_row, 1.0)

    def estimates(
        self, candidates: Iterable[Candidate], rows: int, machine: Hardware, tensor_bytes: float = 0.0
    ) -> dict[Candidate, tuple[float, int]]:
        """(seconds of a step, bytes of the device) of candidates for a global batch of so many rows.
        tensor_bytes: that tensor parallelism sends in the forward of a row."""
        known: dict[Mesh, tuple[Rates, int]] = {}
        found = {}
        for one in candidates:
            if one.ranks not in known:
                rates = machine.rates(one.ranks)
                known[one.ranks] = rates, bucket_choice(rates, one.ranks).value
            estimate = _Estimate(self, one, *known[one.ranks], machine.host, rows, tensor_bytes)
            found[one] = estimate.seconds, estimate.bytes
        return found


@dataclass(frozen=True)
class _Estimate:
    """One candidate. rates: of its mesh. bucket: bytes. rows: of the global batch. tensor_bytes: as in `estimates`."""

    sketch: Sketch
    one: Candidate
    rates: Rates
    bucket: int
    host: Host | None
    rows: int
    tensor_bytes: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        one, roles, of = self.one, self.one.ranks.roles, self.sketch
        often, once, last = self._transfers
        fetched, late = self._moves
        computing = self._like(of.seconds).of(self.own) / self.parts + self._tensor
        hides = computing / 2 if roles == 1 else 0.0  # in a pipeline one role's transfers hold up the next
        each = max(computing + max(0.0, often - hides), fetched)  # of a microbatch
        beside = computing * one.microbatches / 2  # hides transfers
        seconds = each * (one.microbatches + (roles - 1) / one.chunks) + max(0.0, once - beside) + last
        seconds += of.update / self.parts / self.shares + max(0.0, late - (0 if of.waits else beside))
        savers = (one.remat != "none") + (one.offload is not None) + (roles > 1) + (one.microbatches > 1)
        return seconds * (1 + SAVER * savers)

    @property
    def bytes(self) -> int:
        """Of the device. Between layers, values are whole on each rank of tensor parallelism: as many as it sends. If
        tokens stay in parts, half of that is gathered, and kept if it does not run again."""
        of, held, roles = self.sketch, self.sketch.held[self.one.offload], self.one.ranks.roles
        keeps = self.shares if self.stage == 3 or (self.stage and of.wire < 1) else 1
        state = held.params * of.params / keeps + held.optimizer * of.optimizer / self.shares
        by_layers = self.stage == 3 or (keeps == 1 and held.params < 1)
        gathered = of.params * of.wire * (self.few if by_layers else keeps > 1)
        activations = self._like(of.activations)
        kept = activations.of_a_row * self.own / roles
        part = 1.0 if not self.one.sequence else 0.0 if self.one.remat in ("full", GATHERS) else 0.5
        whole = min(kept, part * self.tensor_bytes * self.own / roles) if roles < self.parts else 0.0
        kept = (whole + (kept - whole) * roles / self.parts) * self._held
        cast = activations.fixed / self.shares
        return int((state + gathered + cast + self._gradients) / self.parts + kept)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The mesh."""
        return dict(self.one.mesh)

    @cached_property
    def data(self) -> int:
        """Ranks of the data."""
        return math.prod(self.sizes.get(axis, 1) for axis in DATA)

    @cached_property
    def parts(self) -> int:
        """Into how many parts layers are cut."""
        return sharded(self.sizes)

    @cached_property
    def stage(self) -> int:
        """The stage of ZeRO that it is most like."""
        return self.one.zero if isinstance(self.one.zero, int) else 3

    @cached_property
    def shares(self) -> int:
        """Ranks of the data that share the state."""
        return (self.sizes["dp"] if self.one.zero == "hsdp" else self.data) if self.stage else 1

    @cached_property
    def own(self) -> float:
        """Rows of a rank's microbatch."""
        return self.rows / self.data / self.one.microbatches

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
        more = of.params * (1 - 1 / self.data)
        return self.one.microbatches > 1 and more > MORE * (kept + (of.params + of.optimizer) / self.data)

    @property
    def _held(self) -> float:
        """Microbatches whose activations the first role holds (`fzero.pipeline`)."""
        roles, chunks = self.one.ranks.roles, self.one.chunks
        ahead = roles if chunks == 1 else (2 * (roles - 1) + (chunks - 1) * roles + 1) / chunks
        return min(ahead, self.one.microbatches)

    @property
    def _gradients(self) -> float:
        """The bytes of gradients, of all parts: those of a few layers are whole, others wait whole or as shares."""
        of = self.sketch
        at_once = self.stage >= 2 or (self.stage == 1 and self.each)
        if self.one.microbatches > 1 and not (self.each and at_once):
            one_round = self.one.chunks > 1 and self.one.microbatches == self.one.ranks.roles and self.stage
            return of.params * (2 / self.one.chunks if one_round else 1)  # a chunk's sum is ready before the next's
        waiting = 0.0 if of.held[self.one.offload].gradients or not of.waits else 1.0
        return of.params * max(self.few, waiting / (self.shares if at_once else 1))

    @property
    def _transfers(self) -> tuple[float, float, float]:
        """The seconds of what ranks of the data send, bucket after bucket: (with each microbatch, once a step beside
        other work, once a step when there is none).

        A pipeline reduces at the end. From stage 2 on it does so chunk by chunk, and compute beside it is slower, on
        one role after the other."""
        mesh, of = self.one.ranks, self.sketch
        if self.data < 2:
            return 0.0, 0.0, 0.0
        whole = of.params / self.parts
        pieces = max(of.layers // mesh.roles, int(whole / self.bucket), 1)

        def taken(kind: str, nbytes: float) -> float:
            return pieces * self.rates.transfer(kind, int(nbytes / pieces), mesh.data_axes, self.data)

        gather, scatter = taken("all_gather", whole * of.wire), taken("reduce_scatter", whole)
        often, last = gather * (2 if self.stage == 3 else 0) + scatter * self.each, scatter * (not self.each)
        once = gather * (self.stage != 3)
        if mesh.roles == 1:
            return often, once + last, 0.0
        return often, once, last * (max(1.0, mesh.roles * (1 - 1 / self.rates.tax)) if self.stage >= 2 else 1)

    @property
    def _tensor(self) -> float:
        """The seconds of what tensor parallelism sends in the forward and the backward of a microbatch."""
        width, nbytes = self.sizes.get(TENSOR, 1), self.own * self.tensor_bytes / self.one.ranks.roles
        often = 2.5 if self.one.remat == GATHERS else 2.0  # half of what the forward sends is gathers
        return often * self.rates.transfer("all_gather", int(nbytes), TENSOR, width) if width > 1 and nbytes else 0.0

    @property
    def _moves(self) -> tuple[float, float]:
        """(the seconds of what is fetched beside a microbatch, of what is moved and updated when it is over)."""
        of, host, held, shares = self.sketch, self.host, self.sketch.held[self.one.offload], self.shares * self.parts
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
