"""last_work: the last work on gradients of another role's leaves, which the role that keeps these may do.

A leaf that two roles use, as a vocabulary that is embedding and head, has a gradient that is a sum of both uses. Whole,
it would go from role to role with each microbatch: for 50,000 words of 4,096 dims, 400 MB. What it is made of is
often at hand where the leaf is kept, or small: gradients of the tokens, from which an embedding's rows are summed. Then
that is sent, and the sum is taken there: the same ops on the same values.

    role 0: run g ids h -> grad.back;  send grad.back      role 7: run grad.back -> grad          becomes
    role 0: run g -> g0;  send g0                          role 7: run g0 ids h -> grad

A leaf that more roles use has a sum with a term of each. The sums before the last one are *bound for* its role too
(`bound_for`): each is taken there of the term that is there and of what its own role sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.records import Ref
from fzero.passes.pipeline.split_backward import Halves, Split, destinations, in_two, parted, work


class At(NamedTuple):
    """Of a value that a run reads: whether its role has it, whether the role that keeps the leaf does, and whether it
    is there late, after the run."""

    here: bool
    there: bool
    late: bool = False


class Tail(NamedTuple):
    """The end of a run: copies into the destinations that another role keeps, outputs that are bound for it, and, in
    order, the nodes that only these need, as far up as the products."""

    copies: Sequence[fx.Node]
    outs: Sequence[fx.Node]
    loose: Sequence[fx.Node]

    @classmethod
    def of(cls, gm: fx.GraphModule, num_reads: int, own: Iterable[int]) -> Tail:
        """own: positions of the op's writes."""
        outs = fx_nodes.outputs(gm.graph)
        ends = [*outs, *destinations(gm, num_reads)]
        copies, given = [ends[i] for i in own if i >= len(outs)], [ends[i] for i in own if i < len(outs)]
        returned = fx_nodes.output(gm.graph)
        found: dict[fx.Node, None] = {}
        for node in reversed(work(gm, num_reads)):
            users = node.users.keys() - ({returned} if node in given else {})
            if of(node.target).flops is None and all(user in found or user in copies for user in users):
                found[node] = None
        return cls(copies, given, [*found][::-1])


def by_home(
    op: Op,
    role: int,
    gm: fx.GraphModule | None,
    keeps: Callable[[Ref], int | None],
    at: Callable[[Ref, int], At],
    known: dict[tuple[object, ...], Halves | None],
) -> Iterator[tuple[Split, Op, int]]:
    """The runs that a role's run of a region becomes, each with the split that it is of, and with its role.

    gm: its segment; None of an op that computes nothing. keeps: the role that keeps the leaves of a reference, or that
    a value is bound for; None without one. at: where what a run reads is, if the second role is the one that keeps.
    known: the halves of runs like it, as of another microbatch.
    """
    home = next((home for ref in op.writes if (home := keeps(ref)) not in (None, role)), None)
    parts = None
    if home is not None and gm is not None:
        own = [i for i, ref in enumerate(op.writes) if keeps(ref) == home]
        places = [at(ref, home) for ref in op.reads]
        if (like := (op.segment, *own, *places)) not in known:
            known[like] = last_work(gm, own, places)
        parts = known[like]
    if home is None or parts is None:
        yield Split(op, None, {}, {}), op, role
        return
    name, start = op.writes[own[0]].name, op.writes[own[0]].start
    split = in_two(op, parts, f"{name}.{start}.of{role}" if start else f"{name}.of{role}")
    if split.first is not None:
        yield split, split.first, role
    if split.second is not None:
        yield split, split.second, home


def last_work(gm: fx.GraphModule, own: Sequence[int], at: Sequence[At]) -> Halves | None:
    """The halves of a run: the second writes these of its writes, on the role that keeps them. None where the fewest
    bytes are sent if all of it is done first. No product moves.

    gm: the run's segment. at: of each value that the run reads.
    """
    tail = Tail.of(gm, len(at), own)
    places = dict(zip(fx_nodes.placeholders(gm.graph), at, strict=False))
    others = [n for n in (*work(gm, len(at)), *destinations(gm, len(at))) if n not in tail.copies]
    returned = [n for n in fx_nodes.outputs(gm.graph) if n not in tail.outs]
    least, chosen = float("inf"), 0
    for count in range(1 + len(tail.loose)):
        late = tail.loose[len(tail.loose) - count :]
        there = _read([*late, *tail.copies], late) | {n for n in tail.outs if n not in late}
        here = {a for n in others if n not in late for a in n.all_input_nodes} | {*returned}
        if count and any(not isinstance(value.meta["val"], torch.Tensor) for value in there):
            continue  # some results of one op
        if any(places[a].late for a in here & places.keys()):
            continue
        whole = () if count else [fx_nodes.operand(copy) for copy in tail.copies]
        sent = [*(whole or (v for v in there if v not in places or not places[v].there))]
        sent += [a for a in here & places.keys() if not places[a].here]
        nbytes = sum(int(node.meta["val"].nbytes) for node in sent)
        if nbytes < least:
            least, chosen = nbytes, count
    late = tail.loose[len(tail.loose) - chosen :]
    copied = [i - len(fx_nodes.outputs(gm.graph)) for i in own if i >= len(fx_nodes.outputs(gm.graph))]
    return parted(gm, len(at), {*late}, copied) if chosen else None


def _read(nodes: Iterable[fx.Node], late: Collection[fx.Node]) -> set[fx.Node]:
    """What these nodes, of which the copies are no work, read of others, without views."""
    reads = (a for node in nodes for a in node.all_input_nodes[node not in late :] if a not in late)
    return {fx_nodes.base(a) for a in reads}


def bound_for(
    ops: Sequence[tuple[Op, int, fx.GraphModule | None]],
    keeps: Callable[[Ref], int | None],
    elsewhere: Iterable[str],
) -> dict[str, int]:
    """The values that only the last work on a leaf's gradient reads, each with the role that keeps the leaf.

    ops: in order, each with its role, and with its segment if it is a run whose last work may move. elsewhere: values
    that are read by no op.
    """
    found: dict[str, int] = {}
    readers: dict[str, set[int | None]] = defaultdict(set)
    for name in elsewhere:
        readers[name].add(None)
    known: dict[tuple[object, ...], Mapping[int, int]] = {}
    for op, role, gm in reversed(ops):
        found |= {ref.name: home for ref in op.writes if gm is not None
                  for home in readers[ref.name] if home is not None and len(readers[ref.name]) == 1}  # fmt: skip
        homes = [home if (home := found.get(ref.name, keeps(ref))) != role else None for ref in op.writes]
        if (like := (op.segment if gm is not None else None, *homes)) not in known:
            known[like] = {} if gm is None else _bound_reads(gm, len(op.reads), homes)
        for number, ref in enumerate(op.reads):
            readers[ref.name].add(known[like].get(number))
    return found


def _bound_reads(gm: fx.GraphModule, num_reads: int, homes: Sequence[int | None]) -> dict[int, int]:
    """Which of a run's reads only the last work for a role needs, and that role. homes: of each of its writes."""
    found = {}
    for home in {*homes} - {None}:
        tail = Tail.of(gm, num_reads, [i for i, each in enumerate(homes) if each == home])
        own = {*tail.loose, *tail.copies}
        if all(isinstance(value.meta["val"], torch.Tensor) for value in _read(own, tail.loose)):
            inputs = enumerate(fx_nodes.placeholders(gm.graph)[:num_reads])
            found.update({i: home for i, node in inputs if node.users and node.users.keys() <= own})
    return found  # type: ignore[return-value]
