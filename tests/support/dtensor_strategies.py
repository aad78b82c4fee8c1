"""What DTensor allows for an op on two ranks, in the words of `fzero.shard`: private names of torch 2.13."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TheirPartial
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh

from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules import Strategy

RANKS, LIMIT = 2, 50


@functools.cache
def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(RANKS), mesh_dim_names=("tp",), _init_backend=False, _rank=0)


def theirs(node: fx.Node, values: list[Tensor]) -> list[Strategy]:
    """The strategies of replicated and sharded operands in equal parts that DTensor lists, most for given operands."""
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    listed = set()
    offers = [
        [TheirReplicate(), *(TheirShard(d) for d in range(x.dim()) if x.shape[d] % RANKS == 0 and x.numel())]
        for x in values
    ]
    for given in itertools.islice(itertools.product(*offers), LIMIT):
        for ins, outs in _listed(node, given, len(values)):
            outs = tuple(o for o, x in zip(outs, results, strict=False) if isinstance(x, Tensor))
            tensors = [x for x in results if isinstance(x, Tensor)]
            equal = len(ins) == len(values) and all(map(_in_equal_parts, (*ins, *outs), (*values, *tensors)))
            if equal and not any(isinstance(p, Partial) for p in ins):
                listed.add(Strategy(ins, outs))
    return sorted(listed, key=str)


def _in_equal_parts(placement: Placement | None, x: Tensor) -> bool:
    if isinstance(placement, Shard):
        return placement.dim < x.dim() and x.shape[placement.dim] % RANKS == 0 and x.numel() > 0
    return placement is not None


def _listed(node: fx.Node, given: Any, num: int) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    try:
        found = _strategies(node, given)
    except Exception:  # where DTensor refuses these operands
        return
    children = found.children if isinstance(found, TupleStrategy) else [found]
    for strategy in children[0].strategies if len(children) == 1 else ():
        outs = strategy.output_specs
        ins = strategy.input_specs if strategy.input_specs is not None else [strategy.output_spec] * num
        outs = outs if isinstance(outs, (tuple, list)) else (outs,) * 9
        yield tuple(map(_ours, ins)), tuple(map(_ours, outs))


def _ours(spec: Any) -> Placement | None:
    """The placement of a spec; None for what `fzero.shard` has no word for."""
    theirs = None if spec is None else spec.placements[0]
    if type(theirs) is TheirReplicate:
        return Replicated()
    if type(theirs) is TheirShard:
        return Shard(theirs.dim)
    return Partial(theirs.reduce_op) if type(theirs) is TheirPartial and theirs.reduce_op in ("sum", "max") else None


def _strategies(node: fx.Node, given: Any) -> Any:
    propagator = DTensor._op_dispatcher.sharding_propagator
    feed = iter(given)

    def spec(x: fx.Node) -> DTensorSpec:
        value = x.meta["val"]
        return DTensorSpec(_mesh(), (next(feed),), TensorMeta(value.shape, value.stride(), value.dtype))

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), spec)
    args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
    schema = OpSchema(node.target, args, dict(kwargs))
    wrapped = propagator._wrap_with_op_strategy(schema)
    single = propagator.op_single_dim_strategy_funcs.get(schema.op)
    if single is None:
        return propagator.op_strategy_funcs[schema.op](wrapped)
    meta = propagator._propagate_tensor_meta_non_cached(schema)
    expanded = _expand_single_dim_strategy_to_mesh(_mesh(), wrapped, single, meta)
    return expanded(schema.op, wrapped.args_meta, wrapped.kwargs_meta)
