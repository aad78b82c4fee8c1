"""Brute force for the rules of `fzero.shard`: an op on n ranks, part by part, beside the op on the whole values."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shard_references import REFERENCES
from torch import Tensor, fx

from fzero.shard.local_forms import forms
from fzero.shard.placements import Partial, Placement, join, local_shape, split
from fzero.shard.rules import Strategy, localised

Draw = random.Random


def call(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> tuple[fx.Node, list[Tensor]]:
    """A node that calls `op`, its tensors replaced by placeholders, and these tensors in order."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placed(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = x
            return node
        return [placed(y) for y in x] if isinstance(x, (list, tuple)) else x

    own = [placed(x) for x in args], {k: placed(v) for k, v in (kwargs or {}).items()}
    node = graph.call_function(op, tuple(own[0]), own[1])
    node.meta["val"] = REFERENCES.get(op, op)(*args, **(kwargs or {}))
    return node, tensors


def results(value: Any) -> list[Tensor]:
    """The tensors among what an op returns."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [x for x in values if isinstance(x, Tensor)]


def parts(whole: Tensor, placement: Placement, n: int, draw: Draw) -> list[Tensor]:
    """Like `split`, but every rank of a `Partial` holds random numbers: a rule that is not linear shows."""
    if not isinstance(placement, Partial):
        return split(whole, placement, n)
    g = torch.Generator().manual_seed(draw.randrange(1 << 30))
    noise = [torch.randint(-9, 9, whole.shape, generator=g).to(whole.dtype) for _ in range(n)]
    if placement.how == "sum":
        return [whole - sum(noise[1:]), *noise[1:]]  # type: ignore[list-item]
    if whole.dtype is torch.bool:
        owner = torch.randint(0, n, whole.shape, generator=g)
        return [whole & (owner == rank) for rank in range(n)]
    owner = torch.randint(0, n, whole.shape, generator=g)
    return [torch.where(owner == rank, whole, whole - noise[rank].abs()) for rank in range(n)]


class Ranks:
    """The communicators of n ranks, which are threads of this process."""

    def __init__(self, n: int) -> None:
        self.n, self.barrier = n, threading.Barrier(n, timeout=60)
        self.board: list[Any] = [None] * n

    def run(self, form: Callable[..., Any]) -> list[Any]:
        """`form(comm, rank)` on every rank."""
        values: list[Any] = [None] * self.n

        def one(rank: int) -> None:
            try:
                values[rank] = form(_Comm(self, rank), rank)
            except Exception as error:
                values[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for value in values:
            if isinstance(value, Exception):
                raise value
        return values


class _Comm:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        self.ranks.barrier.wait()
        self.ranks.board[self.rank] = x
        self.ranks.barrier.wait()
        return join(list(self.ranks.board), Partial(how))


def on_ranks(node: fx.Node, tensors: list[Tensor], strategy: Strategy, n: int, draw: Draw) -> list[Tensor]:
    """The results of a call whose operands lie on n ranks as the strategy says, joined."""
    held = [parts(x, p, n, draw) for x, p in zip(tensors, strategy.inputs, strict=True)]
    args, kwargs = localised(node, strategy, n)

    def local(rank: int) -> tuple[Any, Any]:
        feed = (x[rank].clone() for x in held)
        return fx.node.map_arg((args, kwargs), lambda _: next(feed))

    if strategy.local:
        form = forms()[strategy.local]

        def on_rank(comm: Any, rank: int) -> Any:
            own, options = local(rank)
            return form(comm, rank, n, *own, **options)

        found = Ranks(n).run(on_rank)
    else:
        found = []
        for rank in range(n):
            own, options = local(rank)
            found.append(REFERENCES.get(node.target, node.target)(*own, **options))  # type: ignore[operator]
    each = zip(*map(results, found), strict=True)
    return [join(list(x), p) for x, p in zip(each, strategy.outputs, strict=True)]


def differs(node: fx.Node, tensors: list[Tensor], strategy: Strategy, n: int, draw: Draw) -> str:
    """What is wrong with a strategy, in words; "" where the joined results are those of the whole."""
    try:
        joined = on_ranks(node, tensors, strategy, n, draw)
    except Exception as error:
        return f"{node.target} n={n} {strategy}: {type(error).__name__}: {error}"
    for i, (a, b) in enumerate(zip(joined, results(node.meta["val"]), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{node.target} n={n} {strategy}: result {i} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        exact = not (b.dtype.is_floating_point or b.dtype.is_complex)
        same = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
        if not same and "empty" not in str(node.target):
            return f"{node.target} n={n} {strategy}: result {i} differs by {(a - b).abs().max()}"
    return ""


def local_fake(x: Tensor, placement: Placement, n: int) -> Tensor:
    """A fake tensor of a part's shape; its dims have the order in memory that the dims of the fake `x` have."""
    shape = local_shape(x.shape, placement, n)
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    with x.fake_mode:  # type: ignore[attr-defined]
        made = torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device)
        return made.permute(sorted(range(x.dim()), key=order.__getitem__))
