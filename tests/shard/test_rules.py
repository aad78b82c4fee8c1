"""rules: every strategy of every op by brute force, beside DTensor's, and the ops of Hugging Face models."""

import contextlib
import functools
import operator
import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import hf_models
import op_rows
import pytest
import torch
from dtensor_strategies import theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_cases import CASES
from shard_draws import Draw, grouped, tensors
from sharding import call, differs, local_fake, results
from torch import fx

import fzero
from fzero.errors import SpecError
from fzero.interop import from_module
from fzero.ir import op_info
from fzero.ir.op_info import OpInfo
from fzero.shard.factors import Call, Factors, Maker
from fzero.shard.local_forms import forms
from fzero.shard.placements import Partial, Replicated, Shard, local_shape
from fzero.shard.rules import Rule, Strategy, Unknown, localised, rule_of, strategies
from fzero.shard.rules.given import rule
from fzero.shard.rules.pointwise import UNTAGGED
from fzero.shard.rules.whole import whole

aten = torch.ops.aten
TURNS, RANKS, GROUPS = 6, (2, 3), (1, 3)


def drawn(op: Any, turn: int) -> tuple[fx.Node, list[torch.Tensor], Draw]:
    draw = Draw(str(op), turn)
    return (*call(op, *CASES[op](draw)), draw)


def texts(op: Any, *args: Any, n: int = 2, groups: tuple[int, ...] = (1,)) -> list[str]:
    return [str(s) for s in strategies(call(op, args)[0], n, groups)]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


SCALARS = {aten.min.default, aten.all.default, aten.prod.default}  # of all elements; no sum and no maximum


# --- brute force ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CASES, ids=str)
@pytest.mark.sampled(80)
def test_every_strategy_computes_the_op(op: Any) -> None:
    """Parts, the local call, joined: the op on the whole. Ranks of a `Partial` hold random addends."""
    count = 0
    for turn in range(TURNS):
        node, values, draw = drawn(op, turn)
        for n in RANKS:
            offered = strategies(node, n, GROUPS)
            assert set(map(str, offered[0].inputs + offered[0].outputs)) <= {"R"}, "the first is all replicated"
            assert len(offered) == len(set(offered))
            for strategy in offered:
                assert (fault := differs(node, values, strategy, n, draw)) == "", fault
                assert not _only_replicated_gives_partial(strategy), f"{op}: {strategy}"
            count += len(offered)
    assert count > 2 * TURNS or op in SCALARS, "an op of which nothing can be sharded belongs to `whole`"


def pointwise_calls() -> Iterator[tuple[fx.Node, list[torch.Tensor]]]:
    """A call of each op that torch tags as pointwise, on floats or truths, where it takes tensors and numbers alone."""
    known = {"Tensor": 1, "number": 0.5, "float": 0.5, "int": 1, "bool": True}
    for op in (getattr(packet, o) for packet in PACKETS for o in packet.overloads()):
        types = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
        pure = not any(a.is_out or a.alias_info is not None for a in op._schema.arguments)
        if torch.Tag.pointwise in op.tags and pure and set(types) <= known.keys():
            for x in (torch.rand(6, 6, dtype=torch.float64) * 0.8 + 0.1, torch.rand(6, 6) < 0.5):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # not made for truths, or for floats
                    yield call(op, [x.clone() if t == "Tensor" else known[t] for t in types])
                    break


PACKETS = [p for p in (getattr(aten, name) for name in dir(aten)) if hasattr(p, "overloads")]


def test_every_pointwise_op_of_torch() -> None:
    """The tag is believed: here it is seen to be right."""
    seen = set()
    for node, values in pointwise_calls():
        seen.add(node.target)
        for strategy in strategies(node, 2):
            sum_of_truths = torch.bool in {x.dtype for x in values} and "P" in map(str, strategy.inputs)
            assert sum_of_truths or not (fault := differs(node, values, strategy, 2, random.Random(0))), fault
    assert len(seen) > 100


def _only_replicated_gives_partial(strategy: Strategy) -> bool:
    return {str(p) for p in strategy.inputs} <= {"R"} and any(isinstance(p, Partial) for p in strategy.outputs)


def test_every_rule_has_a_case() -> None:
    """Those of fzero's transfers are watched by test_moved."""
    rules = {op: rule for op, rule in op_info.column("placements").items() if rule.factors is not whole}
    unwatched = {op for op in rules if op.namespace == "aten"} - CASES.keys() - {*UNTAGGED}
    assert not unwatched, "give these a row in tests/support/shard_cases.py"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_views(factors: list[int], draw: random.Random) -> None:
    """Any two groupings of the same factors: each factor can be sharded, wherever it stands in its dim."""
    x = torch.arange(float(functools.reduce(operator.mul, factors)), dtype=torch.float64)
    node, values = call(aten.view.default, (x.view(grouped(draw, factors)), grouped(draw, factors)))
    for n in RANKS:
        offered = strategies(node, n)
        for strategy in offered:
            assert (fault := differs(node, values, strategy, n, draw)) == "", fault
        divided = [k for k in factors if k % n == 0]
        assert not divided or any(isinstance(s.inputs[0], Shard) for s in offered)
        sharded = {(s.inputs[0], s.outputs[0]) for s in offered}
        assert len(sharded) == len(offered), "no two strategies for one placement"


def test_views_offer_what_is_needed() -> None:
    heads = texts(aten.view.default, zeros(2, 3, 12), [2, 3, 3, 4])
    assert heads == ["R -> R", "S0 -> S0", "S2/3 -> S3", "P -> P", "Pmax -> Pmax"]
    rows = texts(aten.view.default, zeros(2, 4, 3), [8, 3])
    assert rows[1:3] == ["S0 -> S0", "S1 -> S0/2"], "the inner of two flattened dims"
    assert texts(aten.view.default, zeros(2, 6), [4, 3])[:1] == ["R -> R"]
    assert not any("S" in text for text in texts(aten.view.default, zeros(6, 5), [10, 3])), "no common factors"


def test_a_fused_weight_is_cut_in_groups() -> None:
    """qkv = x @ w, w of three in one dim, is sharded so that each of q, k, v is."""
    assert "R, S1/3 -> S1/3" in texts(aten.mm.default, zeros(4, 5), zeros(5, 12), groups=(1, 3))
    split = texts(aten.split.Tensor, zeros(5, 12), 4, 1)
    assert "S1/3 -> S1, S1, S1" in split
    assert "S1 -> S1, S1, S1" not in split
    assert "S1, S1, S1 -> S1/3" in texts(aten.cat.default, [zeros(5, 4)] * 3, 1)
    uneven = texts(aten.split_with_sizes.default, zeros(5, 16), [8, 4, 4], 1)
    assert "S1/4 -> S1/2, S1, S1" in uneven, "grouped heads: more q than k and v"
    assert "S1/2 -> S1" in texts(aten.slice.Tensor, zeros(5, 8), 1, 4, 8)


def test_a_padded_dim_is_cut_where_its_parts_are_as_long_as_the_padding() -> None:
    pad = aten.constant_pad_nd.default
    assert texts(pad, zeros(4, 6), [1, 1]) == ["R -> R", "S0 -> S0", "P -> P"]
    assert texts(pad, zeros(4, 6), [6, 6]) == ["R -> R", "S0 -> S0", "S1 -> S1/3", "P -> P"]


def test_megatron() -> None:
    assert "R, S1 -> S1" in texts(aten.mm.default, zeros(4, 6), zeros(6, 8)), "columns"
    assert "S1, S0 -> P" in texts(aten.mm.default, zeros(4, 6), zeros(6, 8)), "rows"
    assert "P, S1, S0 -> P" in texts(aten.addmm.default, zeros(8), zeros(4, 6), zeros(6, 8)), "the bias is added once"
    assert "S0, R -> P by embedding" in texts(aten.embedding.default, zeros(6, 4), torch.zeros(2, 3, dtype=torch.long))
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert "S0, R -> P by index" in texts(aten.index.Tensor, zeros(6, 4), [ids])
    assert "S0, R, R -> S0 by index_put" in texts(aten.index_put.default, zeros(6, 4), [ids], zeros(2, 3, 4), True)
    assert not any(" by " in text for text in texts(aten.index.Tensor, zeros(6, 4), [None, ids])), "no first dim"
    assert not any(" by " in text for text in texts(aten.index_put.default, zeros(6, 4), [ids], zeros(2, 3, 4)))
    assert "S1 -> S1 by log_softmax" in texts(aten._log_softmax.default, zeros(4, 6), 1, False)


def test_sums_not_yet_taken_pass_only_where_the_op_is_linear() -> None:
    x = zeros(4, 6)
    assert "P, P -> P" in texts(aten.add.Tensor, x, x)
    assert "P -> P" not in texts(aten.add.Tensor, x, 1.0), "every rank would add the number"
    assert "P -> P" in texts(aten.mul.Tensor, x, 2.0)
    assert {"P, R -> P (costly)", "R, P -> P (costly)"} <= set(texts(aten.mul.Tensor, x, x))
    assert not any("P" in text for text in texts(aten.exp.default, x))
    assert "P -> R" in texts(aten.zeros_like.default, x)
    assert {"S1 -> S1", "P -> R"} <= {*texts(aten.fill.Scalar, x, 2.0)}  # an op of a GPU's activations was not known
    for op in (aten.mul.Tensor, aten.mm.default, aten.bmm.default):
        node, *_ = drawn(op, 0)
        for strategy in strategies(node, 2):
            assert sum(isinstance(p, Partial) for p in strategy.inputs) < 2, f"{op}: {strategy}"


def test_a_narrowing_cast_of_a_sum_is_costly() -> None:
    node, _ = call(aten._to_copy.default, (torch.zeros(4),), {"dtype": torch.bfloat16})
    assert "P -> P (costly)" in map(str, strategies(node, 2))
    node, _ = call(aten._to_copy.default, (torch.zeros(4),), {"dtype": torch.float64})
    assert "P -> P" in map(str, strategies(node, 2))


def test_one_rank_is_replicated() -> None:
    node, *_ = drawn(aten.mm.default, 0)
    assert [str(s) for s in strategies(node, 1)] == ["R, R -> R"]


def test_uniform_numbers_are_drawn_in_parts() -> None:
    given = (fzero.random.key(0), [4, 6], torch.float32, 0.0, 1.0)
    node, _ = call(torch.ops.fzero.uniform.default, given)
    assert [str(s) for s in strategies(node, 2)] == ["R -> R", "R -> S0 by uniform:0", "R -> S1 by uniform:1"]
    whole = torch.ops.fzero.uniform.default(*given)
    for dim in (0, 1):
        for rank, part in enumerate(whole.chunk(2, dim)):
            assert torch.equal(forms()["uniform"](None, rank, 2, *given, dim=dim), part)
    node, _ = call(torch.ops.fzero.uniform.default, (torch.zeros(3, 2, dtype=torch.int64), *given[1:]))
    assert [str(s) for s in strategies(node, 2)] == ["R -> R"]  # of several keys


def test_other_random_draws_are_whole() -> None:
    node, _ = call(torch.ops.fzero.normal.default, (fzero.random.key(0), [4, 6], torch.float32))
    assert [str(s) for s in strategies(node, 2)] == ["R -> R"]
    node, _ = call(aten.native_dropout.default, (torch.zeros(4, 6), 0.5, True))
    assert [str(s) for s in strategies(node, 2)] == ["R -> R, R"]


def test_an_op_without_a_rule_says_where_to_add_one() -> None:
    node, _ = call(aten.linalg_qr.default, (torch.eye(2),))
    with pytest.raises(Unknown, match=r"aten.linalg_qr.default: no rule says .* fzero/shard/rules/") as caught:
        strategies(node, 2)
    assert caught.value.op is aten.linalg_qr.default


def test_a_rule_that_a_user_gives() -> None:
    """Letters of operands and results may be in parts, summed ones give addends; a dim that no operand has is whole.
    It is the column `placements` of the op's row, and a later one holds."""
    op = aten._cdist_forward.default
    with op_rows.restored():
        rule(op, "x1:id x2:jd -> ij")
        node, _ = call(op, (zeros(4, 6), zeros(2, 6), 2.0, None))
        assert [str(s) for s in strategies(node, 2)] == ["R, R -> R", "S0, R -> S0", "R, S0 -> S1"]
        assert op_info.of(op).placements is rule_of(op)
        rule(op, "x1:id x2:jd -> ab")
        assert [str(s) for s in strategies(node, 2)] == ["R, R -> R"]
        rule(op, "x1:i. x2:.j -> i.")
        assert [str(s) for s in strategies(node, 2)] == ["R, R -> R", "S0, R -> S0"], "a dot is a dim that is whole"
        rule(op, "x1:id x2:jd -> ij", summed="d")
        assert [str(s) for s in strategies(node, 2)][1:] == ["S0, R -> S0", "S1, S1 -> P", "R, S0 -> S1"]
        rule(op, "x1:idk x2:jd -> ij")
        with pytest.raises(SpecError, match="'idk' is for 3 dims, there are 2"):
            strategies(node, 2)
        for text, said in (
            ("x1:id x2:jd", "needed an op's overload"), ("x1id x2:jd -> ij", "needed an op's overload"),
            ("y:id -> i", "the op has no 'y': its arguments are x1, x2, p, compute_mode"),
        ):  # fmt: skip
            with pytest.raises(SpecError, match=said):
                rule(op, text)
    with pytest.raises(Unknown):
        rule_of(op)


def test_local_arguments() -> None:
    node, _ = call(aten.view.default, (zeros(4, 6), [4, 2, 3]))
    at = {str(s): localised(node, s, 2)[0][1] for s in strategies(node, 2)}
    assert at == {"R -> R": [4, 2, 3], "S0 -> S0": [2, 2, 3], "S1 -> S1": [4, 1, 3], "P -> P": [4, 2, 3]} | {
        "Pmax -> Pmax": [4, 2, 3]
    }
    node, _ = call(aten.mm.default, (zeros(4, 6), zeros(6, 2)))
    assert all(localised(node, s, 2) == (node.args, node.kwargs) for s in strategies(node, 2))


def test_every_local_form_is_used() -> None:
    used = set()
    for op in CASES:
        for turn in range(TURNS):
            used |= {s.local for s in strategies(drawn(op, turn)[0], 2)}
    assert used - {""} == forms().keys() - {"uniform"}  # which has a test of its own


# --- broken rules: the brute force fails ------------------------------------------------------------------------------


def swapped(call: Call) -> Factors:
    m = Maker(call)
    i, k, j = (m.dim(6) for _ in range(3))
    return m.factors({"self": (i, k), "mat2": (j, k)}, (i, j))


def unsummed(call: Call) -> Factors:
    m = Maker(call)
    i, k, j = (m.dim(6) for _ in range(3))
    return m.factors({"self": (i, k), "mat2": (k, j)}, (i, j))


BROKEN: dict[str, tuple[Any, tuple[Any, ...], Rule]] = {
    "two factors of mm swapped": (aten.mm.default, (6, 6), Rule(swapped)),
    "a product that is not summed": (aten.mm.default, (6, 6), Rule(unsummed)),
    "a product of two sums": (aten.mul.Tensor, (6, 6), Rule(rule_of(aten.mul.Tensor).factors, ("self other",))),
    "exp as if it were linear": (aten.exp.default, (6,), Rule(rule_of(aten.exp.default).factors, ("self",))),
    "softmax along a sharded dim": (aten._softmax.default, (6, 1, False), Rule(rule_of(aten.exp.default).factors)),
    "mean as if it were a sum": (aten.mean.dim, (6, [1]), Rule(rule_of(aten.sum.dim_IntList).factors)),
    "the global sizes of a view": (aten.view.default, (6, [36]), Rule(rule_of(aten.view.default).factors)),
    "the global sizes of a split": (aten.split.Tensor, (6, 2, 1), Rule(rule_of(aten.split.Tensor).factors)),
    "a maximum as a sum": (aten.amax.default, (6, [1]), Rule(rule_of(aten.sum.dim_IntList).factors)),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_rule_is_seen(fault: str) -> None:
    op, args, rule = BROKEN[fault]
    own = [torch.randn(6, 6, dtype=torch.float64) if x == 6 else x for x in args]
    node, values = call(op, own)
    right = {str(s): differs(node, values, s, 2, random.Random(0)) for s in strategies(node, 2)}
    assert set(right.values()) == {""}
    with op_rows.restored():
        op_info.add(op, OpInfo(placements=rule))
        assert any(differs(node, values, s, 2, random.Random(0)) for s in strategies(node, 2))


def test_dims_that_do_not_fit_are_refused_at_once() -> None:
    node, _ = call(aten.mm.default, (zeros(4, 6), zeros(6, 2)))
    m = Maker(Call.of(node))
    with pytest.raises(AssertionError, match=r"factors \(4, 6\) of a value of shape torch.Size\(\[4, 2\]\)"):
        m.factors({}, m.dims((4, 6)))


# --- DTensor, whose strategies others wrote ---------------------------------------------------------------------------

USUAL = (
    aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self, aten._to_copy.default, aten.clone.default,
    aten.gelu_backward.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.sum.dim_IntList,
    aten.mean.dim, aten.amax.default, aten.view.default, aten._unsafe_view.default, aten.transpose.int,
    aten.permute.default, aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.split.Tensor,
    aten.cat.default, aten.stack.default, aten.slice.Tensor, aten.select.int, aten.embedding.default,
    aten.gather.default, aten._softmax.default, aten._softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten.convolution.default, aten.convolution_backward.default,
    aten.nll_loss_forward.default, aten.cumsum.default, aten.logsumexp.default, aten.any.dim, aten.squeeze.dims,
    aten.embedding_dense_backward.default,
)  # fmt: skip
NOT_OFFERED = {  # what DTensor accepts; brute force refuses it, but for `any`
    aten.embedding_dense_backward.default: "sharded indices under scale_grad_by_freq: each rank counts its own",
}
if torch.__version__ < (2, 14):  # mended there
    NOT_OFFERED |= {
        aten.cumsum.default: "along a sharded dim that is counted from the end",
        aten.any.dim: "a sum of truths: ours is the maximum",
    }


@pytest.mark.sampled(13)
@pytest.mark.parametrize("op", USUAL, ids=str)
def test_what_dtensor_accepts_is_offered(op: Any) -> None:
    missing = [
        (node, values, strategy)
        for turn in range(TURNS // 2)
        for node, values, _ in [drawn(op, turn)]
        for strategy in theirs(node, values)
        if (strategy.inputs, strategy.outputs) not in {(s.inputs, s.outputs) for s in strategies(node, 2)}
    ]
    if op not in NOT_OFFERED:
        assert not missing, f"{missing[0][0].target} {missing[0][0].args}: {missing[0][2]}"
        return
    assert missing, "offered by now: remove it from the list"
    faults = [differs(node, values, strategy, 2, random.Random(0)) for node, values, strategy in missing]
    assert any(faults) or op is aten.any.dim, f"{op}: {missing[0][2]} is right and not offered"


# --- the ops of whole models ------------------------------------------------------------------------------------------


def joint_graph(name: str) -> fx.GraphModule:
    case = hf_models.CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = from_module(case.make().eval())

    def loss(params: Any, batch: Any) -> Any:
        arguments = {k: v for k, v in batch.items() if k != "labels"}
        return fzero.Mean(*case.loss(model.apply(params, model.buffers, **arguments), batch))

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    return fzero.lower(spec, model.params, case.batch(0, 0), world_size=1).graph.regions[0].gm


def ops(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """A node for each op and shapes of its operands."""
    seen = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            shapes = fx.node.map_arg((node.args, node.kwargs), lambda x: str(getattr(x.meta["val"], "shape", None)))
            if (key := f"{node.target} {shapes}") not in seen:
                seen.add(key)
                yield node


class Alone:
    """A communicator of shapes."""

    def all_reduce(self, x: torch.Tensor, how: str) -> torch.Tensor:
        return x


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", hf_models.CASES)
@pytest.mark.sampled(1)
def test_every_op_of_a_model_has_a_rule(name: str) -> None:
    """And its local calls, on fake tensors, give results of the local shapes."""
    for node in ops(joint_graph(name)):
        for n in RANKS:
            for strategy in strategies(node, n, GROUPS):
                check_shapes(node, strategy, n)


def check_shapes(node: fx.Node, strategy: Strategy, n: int) -> None:
    operands = Call.of(node).values
    feed = iter([local_fake(x, p, n) for x, p in zip(operands, strategy.inputs, strict=True)])
    args, kwargs = fx.node.map_arg(localised(node, strategy, n), lambda _: next(feed))
    target: Any = node.target
    with next(x.fake_mode for x in [*operands, *Call.of(node).results]):  # type: ignore[attr-defined]
        own = forms()[strategy.local](Alone(), 0, n, *args, **kwargs) if strategy.local else target(*args, **kwargs)
    whole = results(node.meta["val"])
    wanted = [local_shape(x.shape, p, n) for x, p in zip(whole, strategy.outputs, strict=True)]
    found = [tuple(x.shape) for x in results(own)]
    assert found == wanted, f"{node.target} n={n} {strategy}"


def test_partial_and_replicated_are_told_apart() -> None:
    make = tensors("ab")
    node, values = call(aten.neg.default, *make(Draw("neg", 0)))
    wrong = Strategy((Replicated(),), (Partial(),))
    assert differs(node, values, wrong, 2, random.Random(0)) != ""
