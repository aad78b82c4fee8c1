"""last_work: the last work on gradients of another role's leaves, which the role that keeps these may do.

A leaf that two roles use, as a vocabulary that is embedding and head, has a gradient that is a sum of both uses. Whole,
it would go from role to role with each microbatch: for 50,000 words of 4,096 dims, 400 MB. What it is made of is
often at hand where the leaf is kept, or small: gradients of the tokens, from which an embedding's rows are summed. Then
that is sent, and the sum is taken there: the same ops on the same values.

    role 0: run g ids h -> grad.back;  send grad.back      role 7: run grad.back -> grad          becomes
    role 0: run g -> g0;  send g0                          role 7: run g0 ids h -> grad
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.records import Ref
from fzero.passes.pipeline.split_backward import Halves, Split, destinations, in_two, parted, work


def by_home(
    op: Op,
    role: int,
    gm: fx.GraphModule | None,
    keeps: Callable[[Ref], int | None],
    sent: Callable[[Ref, int], bool],
    known: dict[tuple[object, ...], Halves | None],
) -> Iterator[tuple[Split, Op, int]]:
    """The runs that a role's run of a region becomes, each with the split that it is of, and with its role.

    gm: its segment; None of an op that computes nothing. keeps: the role that keeps the leaves of a reference; None
    without one. sent: whether what a run reads is not at a role. known: the halves of runs like it, as of another
    microbatch.
    """
    dests = op.writes[op.num_outputs :]
    home = next((home for ref in dests if (home := keeps(ref)) not in (None, role)), None)
    parts = None
    if home is not None and gm is not None:
        own = [i for i, ref in enumerate(dests) if keeps(ref) == home]
        away = [sent(ref, home) for ref in op.reads]
        if (like := (op.segment, *own, *away)) not in known:
            known[like] = last_work(gm, op, own, away)
        parts = known[like]
    if home is None or parts is None:
        yield Split(op, None, {}, {}), op, role
        return
    split = in_two(op, parts, f"{dests[own[0]].name}.of{role}")
    if split.first is not None:
        yield split, split.first, role
    if split.second is not None:
        yield split, split.second, home


def last_work(gm: fx.GraphModule, op: Op, dests: Sequence[int], sent: Sequence[bool]) -> Halves | None:
    """The halves of a run: the second writes these destinations, on the role that keeps them. None where fewer bytes go
    there if all of it is done first. No product moves.

    gm: the run's segment. sent: of each value that the run reads, whether it is not there.
    """
    copies = destinations(gm, len(op.reads))
    ends = [copies[i] for i in dests]
    away = dict(zip(fx_nodes.placeholders(gm.graph), sent, strict=False))
    least = sum(_nbytes(fx_nodes.operand(copy)) for copy in ends)
    chosen: list[fx.Node] = []
    loose = _loose(work(gm, len(op.reads)), ends)
    for count in range(1, 1 + len(loose)):
        late = loose[-count:]
        values = _crossing(late, ends)
        if any(not isinstance(value.meta["val"], torch.Tensor) for value in values):
            continue  # some results of one op
        nbytes = sum(_nbytes(value) for value in values if away.get(value, True))
        if nbytes < least:
            least, chosen = nbytes, late
    return parted(gm, len(op.reads), {*chosen}, dests) if chosen else None


def _loose(body: Sequence[fx.Node], ends: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that only these copies need, in order, as far up as the products."""
    found: dict[fx.Node, None] = {}
    for node in reversed(body):
        if of(node.target).flops is None and all(user in found or user in ends for user in node.users):
            found[node] = None
    return [*found][::-1]


def _crossing(late: Collection[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """What the work of these nodes, and the copies of their results, read of others, without views."""
    reads = [a for node in (*late, *ends) for a in node.all_input_nodes[node in ends :] if a not in late]
    return {fx_nodes.base(a) for a in reads}


def _nbytes(node: fx.Node) -> int:
    return int(node.meta["val"].nbytes)
