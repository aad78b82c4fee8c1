"""lowered: a step lowered for a world: the program, the graph that it came from, and a record of the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from fzero.capture.graph import Graph
from fzero.compile import judged
from fzero.compile.roofline import Roofline, counted_by_inductor, roofline
from fzero.compile.timeline import draw
from fzero.cost.memory import MemoryAccount, account
from fzero.cost.rates import H100, Rates
from fzero.errors import FzeroError, SpecError
from fzero.hardware import Hardware
from fzero.hardware.toml_file import rates_over
from fzero.html_table import html_facts
from fzero.ir import fx_nodes
from fzero.ir.decisions import Decisions
from fzero.ir.mesh import PIPELINE
from fzero.ir.program import Program
from fzero.lowering.localise import Sharding
from fzero.passes import BEFORE_ROLES, FROM_PREFETCH, UNTIL_PREFETCH, Options, PassRecord, trail
from fzero.passes.pipeline.by_role import by_role
from fzero.pipeline import Schedule
from fzero.plan.state_plan import Plan
from fzero.state.first_state import fingerprint


@dataclass(frozen=True, repr=False)
class Lowered:
    """A step lowered for a world: the result of `fzero.lower`. Nothing is allocated and nothing has run."""

    graph: Graph
    plan: Plan
    programs: Mapping[int, Program]  # by role, the coordinate on the mesh axis `pp`; {0: ...} without a pipeline
    choices: Mapping[str, str]  # what fzero chose, and what it noted of the programs, as sentences by name
    records: Mapping[int, tuple[PassRecord, ...]]  # by role, what each pass changed, in order; see `passes`
    decisions: Decisions  # all that was decided, each with its reason and the runner-up: print it
    asked: Options = field(repr=False)  # what the passes read of the spec; see `options`
    schedule: Schedule | None = None  # the order of work of a pipeline
    sharding: Sharding | None = None  # with an axis that cuts dims, as `tp`: leaves, transfers and reasons; print it
    phase: str = ""  # of a run with phases (`fzero.Phases`), which one it is

    @property
    def program(self) -> Program:
        """The program, where there is one role. Raises FzeroError where there are several: see `programs`."""
        if len(self.programs) > 1:
            raise FzeroError(f"there is a program for each of {len(self.programs)} roles: lowered.programs[role]")
        return next(iter(self.programs.values()))

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """What each pass changed, of the first role, one line each: print(*lowered.passes, sep="\\n")."""
        return self.records[0]

    @property
    def reduce(self) -> str:
        """ "end" or "each": when the gradients of microbatches are reduced."""
        return self.decisions.reduce.value

    @property
    def options(self) -> dict[int, Options]:
        """By role, what its last passes read."""
        return {number: replace(self.asked, decided=role) for number, role in self.decisions.roles.items()}

    @property
    def naive(self) -> Program:
        """The program before all passes. It is built anew, for nothing that runs needs its graphs."""
        transport = next(iter(self.programs.values())).transport
        graph = self.graph if self.sharding is None else self.sharding.local
        return judged.naive(graph, self.plan, reduce=self.reduce, transport=transport)

    @property
    def roles(self) -> dict[int, Program]:
        """By rank, one of each role, the programs that `fzero.verify` takes."""
        mesh = self.plan.mesh
        ranks = mesh.peers(0, PIPELINE) if PIPELINE in mesh else [0]
        return {ranks[role]: program for role, program in self.programs.items()}

    def on(self, rank: int) -> Program:
        """The program of a rank."""
        return self.programs[self.plan.mesh.role(rank)]

    def __str__(self) -> str:
        """The text of the program; in a pipeline of each role's, below its number."""
        if len(self.programs) == 1:
            return str(self.program)
        return "\n".join(f"role {role}\n{program}" for role, program in self.programs.items())

    def __repr__(self) -> str:
        """In one line; `str` has the text of the program.

        >>> import torch, fzero
        >>> spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(1e-3))
        >>> fzero.lower(spec, {"w": torch.zeros(8, 8)}, torch.zeros(4, 8))
        Lowered(mesh dp=1, 6 ops, peak 1,288 bytes a rank: print its program, decisions or passes)
        """
        ops = " and ".join(f"{len(program.ops):,}" for program in self.programs.values())
        what = "programs" if len(self.programs) > 1 else "program"
        shown = f"mesh {self.plan.mesh}, {ops} ops, peak {self.memory.peak:,} bytes a rank"
        return f"Lowered({shown}: print its {what}, decisions or passes)"

    def _repr_html_(self) -> str:
        """What a notebook shows: the memory of the fullest role, and what was decided."""
        memory = self.memory
        bytes_of = {f"{kind}, bytes": size for kind, size in memory.items() if size}
        ops = ", ".join(f"{len(program.ops):,}" for program in self.programs.values())
        facts = {"mesh": str(self.plan.mesh), "ops, by role": ops, "peak, bytes per rank": memory.peak, **bytes_of}
        return html_facts("a step, lowered", facts) + html_facts("what was chosen, and why", self.choices)

    def timeline(self) -> str:
        """A drawing (SVG) of who does what when in the pipeline's schedule, for equal times of forward, input and
        weight halves. Raises FzeroError without a pipeline."""
        if self.schedule is None:
            raise FzeroError("there is no pipeline to draw: Spec(mesh={'pp': 2, ...}, pipeline='1f1b')")
        return draw(self.schedule)

    def after(self, name: str, role: int = 0) -> Program:
        """The program after pass `name`; "lower" gives the one before all passes. The passes run again for it.

        role: in a pipeline, of which role from "by_role" on, where each gets a program of its own; before it there is
        one for all. Raises KeyError, which lists the names, if there is no such pass or role.
        """
        names = ["lower", *(record.name for record in self.passes)]
        if name not in names:
            raise KeyError(f"there is no pass {name!r}: the passes are {', '.join(names)}")
        if role not in self.programs:
            raise KeyError(f"there is no role {role!r}: the roles are {', '.join(map(str, self.programs))}")
        return next(program for done, program in self.trail(role) if done == name)

    def trail(self, role: int = 0) -> Iterator[tuple[str, Program]]:
        """(pass, the program after it), in their order, first "lower", the program before all. The passes run again.

        role: in a pipeline, of which role from "by_role" on.
        """
        program, options = self.naive, self.options[role]
        yield "lower", program
        first = replace(options, chunk_of={} if self.schedule is None else self.plan.chunk_of())
        for record, after in trail(program, first, BEFORE_ROLES):
            yield record.name, (program := after)
        if self.schedule is not None:
            program = by_role(program, self.schedule)[role]
            yield "by_role", program
        for record, after in trail(program, options, (*UNTIL_PREFETCH, *FROM_PREFETCH)):
            yield record.name, after

    @cached_property
    def program_digest(self) -> str:
        """The digest of the program, or of the programs of all roles."""
        digests = [program.digest for program in self.programs.values()]
        return (
            digests[0] if len(digests) == 1 else hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()
        )

    @cached_property
    def digest(self) -> str:
        """A digest that must be the same on every rank: of the program, and of the constants that the update reads."""
        fixed = fx_nodes.placeholders(self.graph.gm.graph)[len(self.plan.leaves) + len(self.graph.batch_paths) :]
        read = [any(u.target is not torch.ops.fzero.region.default for u in node.users) for node in fixed]
        values = [fingerprint(x) for x, used in zip(self.graph.constants.values(), read, strict=True) if used]
        return hashlib.blake2b(" ".join([self.program_digest, *values]).encode(), digest_size=8).hexdigest()

    @cached_property
    def memories(self) -> Mapping[int, MemoryAccount]:
        """By role, the bytes by kind at the planned peak, and the peak: per rank."""
        return {role: account(program) for role, program in self.programs.items()}

    def roofline(
        self, rates: Rates | Hardware | str | Path = H100, role: int = 0, *, by_inductor: bool = False
    ) -> Roofline:
        """The calls, kernels, bytes and operations of a step's compute by kind, with the seconds that they take at
        `rates` (as `fzero.simulate` takes them): an account that prints.

        by_inductor: clusters are counted by the code that Inductor writes for an H100. Raises FzeroError for it outside
        of a process of `fzero fake-cuda`. Else a cluster reads its inputs and writes its results once.

        >>> import torch, fzero
        >>> spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=fzero.optim.adamw(1e-3))
        >>> found = fzero.lower(spec, {"w": torch.zeros(512, 512)}, torch.zeros(64, 512)).roofline()
        >>> found["product"].calls, found["product"].flops, found.unaligned
        (2, 67108864, ())
        """
        if role not in self.programs:
            raise SpecError(f"roofline(role={role!r}): needed one of {', '.join(map(str, self.programs))}")
        program, how, rates = self.programs[role], self.asked.compile, rates_over(rates, self.plan.mesh)
        return roofline(program, how, rates, counted_by_inductor(program, how) if by_inductor else None)

    @property
    def memory(self) -> MemoryAccount:
        """The same of the role with the highest peak."""
        return max(self.memories.values(), key=lambda memory: memory.peak)
