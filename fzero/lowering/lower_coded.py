"""lower_coded: a mean over ranks that travels in codes, as ops: runs that code and decode, and transfers of bytes.

run x worker                 -> parts worker'      a message for each rank, and what it has lost
all_to_all parts             -> arrived            slice r of every rank goes to rank r
run arrived server           -> own server'        added in rank order, divided once; with both ways coded again
all_gather own               -> gathered
run gathered                 -> mean
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fzero._torch_compat import FakeTensorMode
from fzero.capture.step_ops import CodedCall
from fzero.errors import SpecError
from fzero.ir import coded_mean as kernel
from fzero.ir import fx_nodes, segments
from fzero.ir.mesh import PIPELINE
from fzero.ir.recorder import record
from fzero.ir.records import Ref
from fzero.lowering.emit import Emitter, line_of


class _Value(NamedTuple):
    """Where a value is, and a fake tensor of its form."""

    ref: Ref
    like: Tensor


def coded_mean(to: Emitter, node: fx.Node) -> None:
    """Emits the ops of a `fzero::coded_mean` of the outer graph, and says where its results are.

    Raises SpecError for an error of another world, and for a pipeline.
    """
    call = CodedCall.of(node)
    x, *errors = (_Value(to.where[a], a.meta["val"]) for a in (call.x, *call.errors))
    sizes, codec, axis = call.sizes, call.codec, call.axis
    ranks, line = to.plan.mesh.size(axis), line_of(node)
    _check(to, errors, kernel.slice_length(sizes, ranks))
    if ranks == 1:
        results = _run(to, node, kernel.alone, [x, *errors], ("mean", "worker", "server"), f"mean of one rank {line}")
    else:
        code = partial(kernel.sent, sizes=sizes, ranks=ranks, codec=codec)
        add = partial(kernel.averaged, sizes=sizes, ranks=ranks, codec=codec, both=call.both)
        join = partial(kernel.joined, sizes=sizes, ranks=ranks, codec=codec, both=call.both)
        parts, *lost = _run(to, node, code, [x, *errors[:1]], ("parts", "worker"), f"{codec} {line}")
        arrived = _moved(to, "all_to_all", parts, axis, f"{node.name}.arrived", f"{codec} parts {line}")
        rank = _Value(to.rank(axis), x.like.new_empty((), dtype=torch.int64))
        own, *also = _run(to, node, add, [arrived, rank, *errors[1:]], ("own", "server"), f"mean of {codec} {line}")
        gathered = _moved(to, "all_gather", own, axis, f"{node.name}.gathered", f"coded means {line}")
        mean = _run(to, node, join, [gathered], ("mean",), f"all of the mean {line}")
        results = [*mean, *lost, *also]
    for pick in node.users:
        to.where[pick] = results[int(str(pick.args[1]))].ref


def _run(
    to: Emitter,
    node: fx.Node,
    fn: Callable[..., list[Tensor]],
    values: Sequence[_Value],
    names: Sequence[str],
    why: str,
) -> list[_Value]:
    """Emits `fn` of these values as a run. Returns its results, in new buffers of these names."""
    with FakeTensorMode():
        gm = record(fn, [torch.empty(v.like.shape, dtype=v.like.dtype, device=v.like.device) for v in values])
    body = [n for n in gm.graph.nodes if n.op == "call_function"]
    likes = [out.meta["val"] for out in fx_nodes.outputs(gm.graph)]
    segment = segments.extract(body, fx_nodes.placeholders(gm.graph), fx_nodes.outputs(gm.graph))
    results = []
    for name, like in zip(names, likes, strict=False):
        results.append(_Value(to.new(f"{node.name}.{name}", like, "activation"), like))
    to.segment("run", segment, [v.ref for v in values], [v.ref for v in results], why=why.strip())
    return results


def _moved(to: Emitter, kind: str, source: _Value, axis: str, name: str, why: str) -> _Value:
    """Emits a transfer of bytes among the ranks of an axis, and its wait."""
    shares = to.plan.mesh.size(axis) if kind == "all_gather" else 1
    like = source.like.new_empty(shares * source.like.numel())
    target = to.new(name, like, "activation")
    to.emit(kind, [source.ref], [target], axis=axis, why=why.strip())
    to.emit("wait", [target], why=why.strip())
    return _Value(target, like)


def _check(to: Emitter, errors: Sequence[_Value], length: int) -> None:
    """Raises SpecError for the error of another world, and for a pipeline."""
    if to.plan.mesh.roles > 1:
        raise SpecError(
            f"fzero.coded_mean: all leaves travel in one message, and with mesh axis {PIPELINE!r} a rank has only "
            "those of its stage. Leave it out of the mesh, or reduce by fzero.pmean"
        )
    if len(errors) > 1 and errors[1].like.numel() != length:
        raise SpecError(
            f"fzero.coded_mean(error=...): server has {errors[1].like.numel()} elements, a slice of this world "
            f"has {length}. fzero.coded_error makes the first in the state that fzero.init gets, in an optimizer's "
            "init or in a function of the key"
        )
