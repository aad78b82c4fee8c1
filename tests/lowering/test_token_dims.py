"""token_dims: along which dim the tokens of a value lie, op by op. The oracle is the op itself on a part of the tokens:
what it gives of a chunk of its operands is the chunk of what it gives of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.ir.recorder import record
from fzero.lowering.token_dims import SUMMED, NotByTokensError, TokenDim, by_tokens, local_args

aten = torch.ops.aten
S = 6  # tokens
WHOLE = TokenDim(1, 1, 0, S)  # of a value (sequences, tokens, features)


def node_of(fn: Callable[..., Any], *inputs: Tensor) -> tuple[fx.Node, list[fx.Node]]:
    """(the one op that fn calls, its inputs)."""
    with FakeTensorMode():
        gm = record(lambda *xs: [fn(*xs)], [torch.empty(x.shape, dtype=x.dtype) for x in inputs])
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
    return node, [x for x in gm.graph.nodes if x.op == "placeholder"]


def ways(fn: Callable[..., Any], *inputs: Tensor, known: dict[int, TokenDim]) -> Any:
    node, holders = node_of(fn, *inputs)
    return by_tokens(node, {holders[i]: tokens for i, tokens in known.items()})


# --- a chunk of a value -----------------------------------------------------------------------------------------------


def test_the_tokens_of_a_chunk_that_a_value_holds() -> None:
    held = TokenDim(0, 1, 2, 5)
    assert held.num == 3
    assert held.of(range(3)) == (2, 3)
    assert held.of(range(3, 6)) == (3, 5)
    assert held.of(range(2)) == (2, 2), "none of these"
    assert held.of(range(5, 6)) == (5, 5)
    assert TokenDim(0, 1, 0, 6).of(range(2, 4)) == (2, 4)


def test_the_shape_of_a_chunk() -> None:
    assert TokenDim(1, 1, 0, 6).local_shape((2, 6, 3), range(1, 3)) == [2, 2, 3]
    assert TokenDim(0, 2, 0, 6).local_shape((12, 6), range(1, 3)) == [4, 6], "of each of two sequences"


# --- ops --------------------------------------------------------------------------------------------------------------

H, W = torch.randn(2, S, 4), torch.randn(4, 8)
ROWS = H.view(-1, 4)
FLAT = TokenDim(0, 2, 0, S)  # of a value (sequences x tokens, features)


@pytest.mark.parametrize(
    ("fn", "inputs", "known", "result"),
    [
        (torch.tanh, (H,), {0: WHOLE}, WHOLE),
        (lambda x: x.view(2 * S, 4), (H,), {0: WHOLE}, FLAT),
        (lambda x: x.view(2, S, 4), (ROWS,), {0: FLAT}, WHOLE),
        (lambda x: x.view(2, S, 2, 2), (ROWS,), {0: FLAT}, WHOLE),
        (lambda x: x.transpose(1, 2), (H,), {0: WHOLE}, TokenDim(2, 1, 0, S)),
        (torch.mm, (ROWS, W), {0: FLAT}, FLAT),
        (lambda x: x.sum(2), (H,), {0: WHOLE}, WHOLE),
        (lambda x: x[:, 1:], (H,), {0: WHOLE}, TokenDim(1, 1, 1, S)),
        (lambda x: x[:, :-2], (H,), {0: WHOLE}, TokenDim(1, 1, 0, S - 2)),
        (lambda x: x[..., 1:], (H,), {0: WHOLE}, WHOLE),
        (lambda x: x.log_softmax(2), (H,), {0: WHOLE}, WHOLE),
    ],
)  # fmt: skip
def test_the_dim_of_the_tokens_is_followed(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...], known: dict[int, TokenDim], result: TokenDim
) -> None:
    found = ways(fn, *inputs, known=known)
    assert found.results == (result,)
    assert found.operands == tuple(known.get(i) for i in range(len(inputs)))


def test_a_sum_over_tokens_is_the_sum_of_those_of_chunks() -> None:
    assert ways(lambda x: x.sum((0, 1)), H, known={0: WHOLE}).results == (SUMMED,)
    assert ways(torch.sum, H, known={0: WHOLE}).results == (SUMMED,)
    grad = ways(torch.mm, torch.ones(4, 2 * S), ROWS, known={1: FLAT})
    assert grad.results == (SUMMED,)
    assert grad.operands == (TokenDim(1, 2, 0, S), FLAT), "what is summed with it has its tokens too"


@pytest.mark.parametrize(
    ("fn", "inputs", "known", "said"),
    [
        (lambda x: x.softmax(1), (H,), {0: WHOLE}, "all tokens at once"),
        (lambda x: x.cumsum(1), (H,), {0: WHOLE}, "all tokens at once|nothing is known"),
        (lambda x: x.view(-1), (H,), {0: TokenDim(0, 1, 0, 2)}, None),
        (lambda x: x.view(4, 12), (H,), {0: WHOLE}, "mixes tokens with another dim"),
        (torch.add, (H, H), {0: WHOLE, 1: TokenDim(1, 1, 1, S + 1)}, "do not hold the same tokens"),
        (torch.add, (H, torch.randn(6, 6, 4)[:2]), {0: WHOLE, 1: TokenDim(2, 1, 0, 4)}, "do not hold the same tokens"),
        (lambda x: x[:, ::2], (H,), {0: WHOLE}, "other than a stretch"),
        (lambda x: x[1:], (ROWS,), {0: FLAT}, "other than a stretch"),
        (
            torch.cholesky_inverse,
            (torch.randn(2, S, S),),
            {0: WHOLE},
            "nothing is known of its dims|all tokens at once",
        ),
        (lambda x: x.view(3, 4, 4), (ROWS,), {0: FLAT}, "mixes tokens with another dim"),
        (lambda x: x.view(2, 3, 2, 4), (H,), {0: WHOLE}, "mixes tokens with another dim"),
        (torch.add, (H, H), {0: WHOLE, 1: TokenDim(2, 1, 0, 4)}, "do not hold the same tokens"),
    ],
)
def test_what_does_not_work_token_by_token(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...], known: dict[int, TokenDim], said: str | None
) -> None:
    if said is None:
        assert ways(fn, *inputs, known=known).results == (TokenDim(0, 1, 0, 2),)
        return
    with pytest.raises(NotByTokensError, match=said):
        ways(fn, *inputs, known=known)


# --- a call on a chunk ------------------------------------------------------------------------------------------------

CALLS: list[tuple[Callable[..., Any], Tensor, TokenDim]] = [
    (lambda x: x.view(2 * S, 4), H, WHOLE), (lambda x: x.view(2, S, 2, 2), ROWS, FLAT), (lambda x: x[:, 1:], H, WHOLE),
    (lambda x: x[:, :-1], H, WHOLE), (lambda x: x[:, 2:-1], H, WHOLE), (lambda x: x[..., 1:3], H, WHOLE),
    (lambda x: x.expand(2, S, 4), torch.randn(1, S, 4), WHOLE), (torch.tanh, H, WHOLE),
    (lambda x: aten.slice_backward(x, [2, S + 1, 4], 1, 1, S + 1, 1), H, TokenDim(1, 1, 1, S + 1)),
    (lambda x: aten.slice_backward(x, [2, S + 2, 4], 1, 0, S, 1), H, WHOLE),
    (lambda x: aten.slice_backward(x, [2, S, 7], 2, 1, 5, 1), H, WHOLE),
]  # fmt: skip


def part(x: Tensor, tokens: TokenDim, chunk: range) -> Tensor:
    """A chunk's tokens of a value."""
    first, last = tokens.of(chunk)
    apart = x.unflatten(tokens.dim, (tokens.outer, -1))
    inner = apart.shape[tokens.dim + 1] // tokens.num
    taken = apart.narrow(tokens.dim + 1, (first - tokens.first) * inner, (last - first) * inner)
    return taken.flatten(tokens.dim, tokens.dim + 1).contiguous()


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("chunk", [range(2), range(2, 5), range(5, 8), range(8)], ids=str)
def test_a_call_on_a_chunk_gives_the_chunk_of_the_call(number: int, chunk: range) -> None:
    fn, x, tokens = CALLS[number]
    node, (holder,) = node_of(fn, x)
    found = by_tokens(node, {holder: tokens})
    (result,) = found.results
    args = local_args(node, (part(x, tokens, chunk), *node.args[1:]), result, chunk, {holder: tokens})
    assert torch.equal(node.target(*args), part(fn(x), result, chunk))


def test_the_arguments_of_a_sum_stay() -> None:
    node, (holder,) = node_of(lambda x: x.sum((0, 1)), H)
    assert local_args(node, node.args, SUMMED, range(2), {holder: WHOLE}) == [*node.args]
