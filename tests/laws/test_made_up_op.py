"""An op that fzero has never heard of: with one row each it and its backward trace, shard, fuse, cost and verify."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import op_rows
import pytest
import torch
from fusing import stretches, use
from helpers import differing, run
from torch import Tensor, fx

import fzero
from fzero import P, optim, tree
from fzero.codegen import clusters, fusion, out_forms
from fzero.codegen.workspace import workspace_bytes
from fzero.cost import step_time
from fzero.cost.allocator import measured_peak
from fzero.cost.flops import flops
from fzero.cost.rates import Rates
from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo
from fzero.shard.rules.given import parsed

# --- the op: silu(x w) * (x v), of rows (b, k) and weights (k, n) -----------------------------------------------------

LIBRARY = torch.library.Library("made_up", "DEF")
LIBRARY.define("gated(Tensor x, Tensor w, Tensor v) -> Tensor")
LIBRARY.define("gated.out(Tensor x, Tensor w, Tensor v, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("gated_backward(Tensor grad, Tensor x, Tensor w, Tensor v) -> (Tensor, Tensor, Tensor)")


def gated_out(x: Tensor, w: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
    gate = x @ w
    return torch.mul(torch.nn.functional.silu(gate, inplace=True), x @ v, out=out)


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return gated_out(x, w, v, out=x.new_empty(len(x), w.shape[1]))


def gated_backward(grad: Tensor, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = x @ w, x @ v
    gate = torch.ops.aten.silu_backward(grad * b, a)
    other = grad * torch.nn.functional.silu(a)
    return gate @ w.t() + other @ v.t(), x.t() @ gate, x.t() @ other


LIBRARY.impl("gated", gated, "CPU")
LIBRARY.impl("gated.out", gated_out, "CPU")
LIBRARY.impl("gated_backward", gated_backward, "CPU")
OP, BACKWARD = torch.ops.made_up.gated.default, torch.ops.made_up.gated_backward.default
torch.library.register_fake("made_up::gated", lambda x, w, v: x.new_empty(len(x), w.shape[1]), lib=LIBRARY)
torch.library.register_fake("made_up::gated.out", lambda x, w, v, *, out: out, lib=LIBRARY)
torch.library.register_fake(
    "made_up::gated_backward", lambda grad, *of: tuple(torch.empty_like(x) for x in of), lib=LIBRARY
)
torch.library.register_autograd(
    "made_up::gated",
    lambda ctx, grad: BACKWARD(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=LIBRARY,
)


# --- its row, and that of its backward --------------------------------------------------------------------------------


def sizes(node: fx.Node) -> tuple[int, int, int]:
    """(rows, width, width of the result) of a call; the last two operands are the weights."""
    x, w = (fx_nodes.operand(node, len(node.args) - i).meta["val"] for i in (3, 2))
    return len(x), *w.shape


def products(count: int) -> Any:
    def formula(node: fx.Node) -> int:
        rows, width, wide = sizes(node)
        return count * 2 * rows * width * wide

    return formula


def held(count: int) -> Any:
    def formula(node: fx.Node) -> int:
        rows, _, wide = sizes(node)
        return count * 4 * rows * wide

    return formula


ROW = OpInfo(
    placements=parsed(OP, "x:bk w:kn v:kn -> bn"), flops=products(2), workspace=held(2), out_form="program", fake="kept"
)
ROW_BACKWARD = OpInfo(
    placements=parsed(BACKWARD, "grad:bn x:bk w:kn v:kn -> bk, kn, kn", summed="bn"), flops=products(6), fake="kept"
)


@pytest.fixture
def _rows() -> Iterator[None]:
    with op_rows.restored():
        op_info.add("made_up.gated", ROW)  # of both overloads
        op_info.add(BACKWARD, ROW_BACKWARD)
        yield


KINDS = ("all_gather", "all_reduce", "reduce_scatter")
RATES = Rates(dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 1e10), 1.0, {2: 1e12, 4: 1e12}, 1e12)

# --- a model with it --------------------------------------------------------------------------------------------------

ROWS, WIDTH, WIDE = 8, 16, 32


def loss(params: Any, batch: Any) -> Tensor:
    hidden = torch.tanh(batch["x"] * params["scale"])
    hidden = torch.ops.made_up.gated(hidden, params["w"], params["v"])
    return ((torch.tanh(hidden + 0.5) @ params["down"] - batch["y"]) ** 2).mean()


def params() -> Any:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=draw)

    return {"scale": normal(WIDTH), "w": normal(WIDTH, WIDE), "v": normal(WIDTH, WIDE), "down": normal(WIDE, WIDTH)}


def batch(rank: int, step: int) -> Any:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(ROWS, WIDTH, generator=draw) for name in ("x", "y")}


def ranks(mesh: dict[str, int], **given: Any) -> Any:
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(0.05), mesh=mesh, **given)
    return run(spec, params(), batch, world=torch.Size(mesh.values()).numel(), steps=2)


def calls(program: fzero.Program, *targets: Any) -> list[fx.Node]:
    return [n for gm in program.segments.values() for n in gm.graph.nodes if n.target in targets]


SHARD = {"w": P(None, "tp"), "v": P(None, "tp"), "down": P("tp")}

pytestmark = pytest.mark.usefixtures("_rows")


def test_it_is_traced_and_every_stage_has_the_same_bits() -> None:
    plain = ranks({"dp": 2}, zero=0)
    nodes = calls(plain.lowered.program, OP, torch.ops.made_up.gated.out, BACKWARD)
    assert len(nodes) == 2
    for zero in (1, 2, 3):
        found = ranks({"dp": 2}, zero=zero)
        fzero.verify(found.lowered.roles)
        assert differing(found.final, plain.final) == []


def test_it_is_sharded_by_its_row() -> None:
    """Each rank calls it on its own columns, and nothing is gathered for it: one sum after `down`, one for `x`."""
    whole, found = ranks({"dp": 1}), ranks({"dp": 1, "tp": 2}, shard=SHARD, zero=3)
    fzero.verify(found.lowered.roles)
    for node in calls(found.lowered.program, OP, torch.ops.made_up.gated.out, BACKWARD):
        assert sizes(node) == (ROWS, WIDTH, WIDE // 2)
    for path, x in whole.final.items():
        torch.testing.assert_close(found.final[path], x, rtol=1e-5, atol=1e-6)


def test_without_its_row_nothing_of_it_is_sharded() -> None:
    """What the row is for: every rank gathers both weights, and computes all of it."""
    op_rows.drop("made_up.gated", str(BACKWARD))
    assert op_info.of(OP) == OpInfo()
    found = ranks({"dp": 1, "tp": 2}, shard=SHARD, zero=3)
    assert [sizes(n) for n in calls(found.lowered.program, OP, BACKWARD)] == [(ROWS, WIDTH, WIDE)] * 2
    assert [flops(n) for n in calls(found.lowered.program, OP, BACKWARD)] == [0, 0]


def test_it_writes_into_given_memory() -> None:
    """By the row's `out_form`, in the bound calls of a segment."""
    program = ranks({"dp": 2}).lowered.program
    (node,) = calls(program, OP, torch.ops.made_up.gated.out)
    assert node.target is torch.ops.made_up.gated.out or out_forms.form_of(node) is torch.ops.made_up.gated.out


def test_its_memory_is_planned() -> None:
    program = ranks({"dp": 2}).lowered.program
    (node,) = calls(program, OP, torch.ops.made_up.gated.out)
    given = [torch.randn(n.meta["val"].shape) for n in node.args]
    with torch.no_grad():
        _, peak = measured_peak(lambda: OP(*given))
    assert workspace_bytes(node) == 2 * 4 * ROWS * WIDE
    assert peak == 4 * ROWS * WIDE + workspace_bytes(node), "the result, and both products"


def test_it_runs_in_planned_memory() -> None:
    """A step of one process, as calls on its arena, has the bits of the interpreted one."""
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(0.05))
    state = fzero.init(params(), spec)
    for number in range(2):
        state = fzero.step(state, batch(0, number))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    assert differing(dict(zip(paths, leaves, strict=True)), ranks({"dp": 1}).final) == []


def test_its_operations_cost_time() -> None:
    program = ranks({"dp": 2}).lowered.program
    there, back = calls(program, OP, torch.ops.made_up.gated.out, BACKWARD)
    assert [flops(there), flops(back)] == [4 * ROWS * WIDTH * WIDE, 12 * ROWS * WIDTH * WIDE]
    priced = step_time.step_time(program, RATES).compute
    op_info.add("made_up.gated", OpInfo(flops=lambda node: 10**12))
    assert step_time.step_time(program, RATES).compute > priced + 0.01


@pytest.mark.parametrize("how", ["", "loop"])
def test_stretches_of_loops_end_at_it_or_take_it_in(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a border of what a compiler fuses; where its row says "loop" it lies inside. The bits are the same."""
    if how:
        op_info.add("made_up.gated", OpInfo(fusion="loop"))
    plain = ranks({"dp": 2})
    program = plain.lowered.program
    (node,) = calls(program, OP, torch.ops.made_up.gated.out)
    assert clusters.is_fusible(node) == bool(how)
    inside = [n.target for one in stretches(program).values() for n in one.graph.graph.nodes]
    assert (node.target in inside) == bool(how)

    def with_stretches(program: fzero.Program) -> dict[str, Any]:
        cut = {key: fusion.fused(program.segments[key], same) for key, same in fusion.aliased(program).items()}
        return {key: gm.forward for key, (gm, _) in cut.items() if gm is not None}

    assert with_stretches(program)
    use(monkeypatch, with_stretches)
    assert differing(ranks({"dp": 2}).final, plain.final) == []


def test_a_wrong_program_with_it_is_refused() -> None:
    """The verifier knows its meaning: a call with `w` and `v` exchanged is another value."""
    lowered = ranks({"dp": 2}).lowered
    (program, *_) = lowered.roles if isinstance(lowered.roles, tuple) else tuple(lowered.roles.values())
    (node,) = calls(program, OP, torch.ops.made_up.gated.out)
    x, w, v = node.args
    node.args = (x, v, w)
    try:
        with pytest.raises(fzero.VerifyError, match="meaning"):
            fzero.verify(lowered.roles)
    finally:
        node.args = (x, w, v)


def test_all_that_is_known_of_it_is_one_row() -> None:
    assert list(op_info.of(OP).stated()) == ["placements", "fake", "out_form", "workspace", "flops"]
    assert op_info.of(operator.getitem).stated() == {}
