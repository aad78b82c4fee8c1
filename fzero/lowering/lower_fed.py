"""lower_fed: gradients whose codes feed back what they lose: the run before a bucket's reduction (`fzero.ir.fed_mean`).

run gradients errors -> lost, sums      what is sent, and what its codes lose: the new errors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.capture.step_ops import FED_MEAN, FedCall
from fzero.errors import SpecError
from fzero.ir import fx_nodes, segments
from fzero.ir.fed_mean import owed_by_all
from fzero.ir.recorder import record
from fzero.ir.records import Ref
from fzero.lowering.emit import Emitter


class Fed(NamedTuple):
    """A gradient: the node of its `fzero::fed_mean`, a fake tensor of its form, and where it is, in its bucket."""

    node: fx.Node
    like: torch.Tensor
    ref: Ref


def owed(to: Emitter, leaves: Sequence[Fed], parts: int, name: str, why: str) -> str:
    """Emits the sums of the gradients of a bucket and of what earlier codes have lost of them. Says where the new
    errors are, and returns the buffer of the sums. parts: microbatches whose mean is taken. name: of the new errors.

    Raises SpecError for an error that is computed in the step, read twice, or not kept.
    """
    calls = [FedCall.of(leaf.node) for leaf in leaves]
    errors = [call.error for call in calls]
    for error in errors:
        if error.op != "placeholder":
            raise SpecError(
                f"value_and_grad(error=...): {error.name} is computed in the step. Give it the state's own leaf: what "
                "earlier steps returned"
            )
        if len([user for user in error.users if user.target is FED_MEAN]) > 1:
            raise SpecError(
                f"value_and_grad(error=...): {error.name} is given twice, and what is owed would be sent twice. Keep "
                "an error for each value_and_grad"
            )
    for leaf, error in zip(leaves, errors, strict=True):
        if not any(pick.args[1] == 1 for pick in leaf.node.users):
            raise SpecError(
                f"value_and_grad(error=...): the step does not keep the new error of {error.name}, so what its codes "
                "lose would be forgotten. Return it in the state"
            )
    grad = to.buffers[leaves[0].ref.name]
    ranks = to.plan.bucket_layouts[grad.bucket or ""].grad.parts
    with FakeTensorMode():
        likes = [*(leaf.like for leaf in leaves), *(e.meta["val"] for e in errors)]
        fakes = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in likes]
        gm = record(partial(owed_by_all, codec=calls[0].codec, parts=parts, ranks=ranks), fakes)
    outs, count = fx_nodes.outputs(gm.graph), len(leaves)
    lost, dests = outs[:count], outs[count:]
    body = [n for n in gm.graph.nodes if n.op == "call_function"]
    gm = segments.extract(body, fx_nodes.placeholders(gm.graph), [*dests, *lost], dests)
    sums = f"{grad.name}.owed"
    to.buffers[sums] = replace(grad, name=sums, dtype=torch.float32)
    kept = [to.new(f"{name}.{e.name}", e.meta["val"], "activation") for e in errors]
    into = [replace(leaf.ref, name=sums) for leaf in leaves]
    to.segment(
        "run", gm, [*(leaf.ref for leaf in leaves), *(to.where[e] for e in errors)], [*kept, *into],
        why=f"what is owed of {why}",
    )  # fmt: skip
    for leaf, ref in zip(leaves, kept, strict=True):
        to.where.update({pick: ref for pick in leaf.node.users if pick.args[1] == 1})
    return sums
