"""leaf_classes: which leaves mirror one another, by the ends of their paths and their shapes; and the stage of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero import tree
from fzero.kernels.codecs import EXACT
from fzero.plan.leaf_classes import LeafClass, leaf_classes, stages_of


def classes(*paths: str, **shapes: tuple[int, ...]) -> dict[str, list[tuple[str, str]]]:
    """By the common path of a class, its (prefix, path of the leaf). shapes: of leaves that are not (2, 3), by their
    paths with `_` for `/`."""
    leaves = [torch.empty(shapes.get(path.replace("/", "_"), (2, 3)), device="meta") for path in paths]
    found = leaf_classes([*range(len(paths))], paths, leaves)
    assert sorted(i for c in found for _, i in c.members) == [*range(len(paths))]
    return {c.path: [(prefix, paths[i]) for prefix, i in c.members] for c in found}


def test_moments_mirror_their_parameter() -> None:
    assert classes("params/a/w", "params/b/w", "opt/mu/a/w", "opt/nu/b/w", "ema/a/w") == {
        "a/w": [("params", "params/a/w"), ("opt/mu", "opt/mu/a/w"), ("ema", "ema/a/w")],
        "b/w": [("params", "params/b/w"), ("opt/nu", "opt/nu/b/w")],
    }


def test_a_leaf_of_another_shape_or_of_the_same_entry_is_apart() -> None:
    assert len(leaf_classes([0, 1], ["params/w", "mu/w"], [torch.ones(2), torch.ones(3)])) == 2
    assert len(classes("params/x/w", "params/y/w")) == 2


def test_parameters_of_one_entry_are_apart() -> None:
    """As BERT's `attention.output.dense.bias` and `output.dense.bias`: one path is the other but for a part inside."""
    paths = ["layer/0/attention/output/b", "layer/0/output/b"]
    found = classes(*(f"{entry}/{path}" for entry in ("opt/mu", "opt/nu", "params") for path in paths))
    assert [*found] == paths


def test_the_longest_end_decides() -> None:
    assert classes("params/w", "params/a/w", "mu/a/w") == {
        "w": [("params", "params/w")], "a/w": [("params", "params/a/w"), ("mu", "mu/a/w")]
    }  # fmt: skip


def test_moments_by_net_mirror_the_parameters_of_their_net() -> None:
    """The state of an optimizer for each net: its field stands inside the path."""
    paths = ["nets/d/a/w", "nets/g/a/w", "opt/d/mu/a/w", "opt/g/0/nu/a/w", "ema/g/a/w"]
    found = leaf_classes([*range(5)], paths, [torch.empty(2, 3, device="meta")] * 5)
    assert [[paths[i] for _, i in c.members] for c in found] == [
        ["nets/d/a/w", "opt/d/mu/a/w"], ["nets/g/a/w", "opt/g/0/nu/a/w", "ema/g/a/w"]
    ]  # fmt: skip
    assert len(classes("nets/d/a/w", "opt/d/mu/b/w")) == 2


STATES = {
    "nets, opt": lambda nets, opt: {"nets": nets, "opt": opt},
    "d, d_opt": lambda nets, opt: {**nets, **{f"{name}_opt": one for name, one in opt.items()}},
    "d: net, opt": lambda nets, opt: {name: {"net": nets[name], "opt": opt[name]} for name in nets},
    "d: 0, 1": lambda nets, opt: {name: (nets[name], opt[name]) for name in nets},
}
ENTRIES = {
    "nets, opt": {"nets/d", "nets/g"}, "d, d_opt": {"d", "g"},
    "d: net, opt": {"d/net", "g/net"}, "d: 0, 1": {"d/0", "g/0"},
}  # fmt: skip
PARAMS = {"nets, opt": ["nets/**"], "d, d_opt": ["d/**", "g/**"], "d: net, opt": ["*/net/**"], "d: 0, 1": ["*/0/**"]}


@pytest.mark.parametrize("shape", STATES)
def test_the_moments_of_two_nets_are_gathered_by_no_step(shape: str) -> None:
    """As in the recipe of a GAN: each net has an optimizer's state of its own, which is updated in slices, wherever in
    the state it is."""
    tx = fzero.optim.adam(1e-3)

    def loss(net: Any, x: torch.Tensor, other: Any) -> torch.Tensor:
        return (torch.tanh(x @ net["a"]) @ net["b"] @ other["b"]).square().mean()

    def parts(state: Any) -> Any:
        if shape == "nets, opt":
            return dict(state["nets"]), dict(state["opt"])
        if shape == "d, d_opt":
            return {n: state[n] for n in "dg"}, {n: state[f"{n}_opt"] for n in "dg"}
        first, second = (0, 1) if shape == "d: 0, 1" else ("net", "opt")
        return {n: state[n][first] for n in "dg"}, {n: state[n][second] for n in "dg"}

    def step(state: Any, x: torch.Tensor) -> Any:
        nets, opt = parts(state)
        for name, other in (("d", "g"), ("g", "d")):
            value, grads = fzero.value_and_grad(loss)(nets[name], x, nets[other])
            updates, opt[name] = tx.update(grads, opt[name], nets[name])
            nets[name] = fzero.optim.apply_updates(nets[name], updates)
        return STATES[shape](nets, opt), {"loss": value}

    nets = {name: {leaf: torch.empty(64, 64, device="meta") for leaf in "ab"} for name in "dg"}
    start = STATES[shape](nets, {name: tx.init(net) for name, net in nets.items()})
    spec = fzero.Spec(step=step, zero=3, params=PARAMS[shape])
    lowered = fzero.lower(spec, start, torch.empty(8, 64, device="meta"), world_size=2)
    fzero.verify(lowered.roles)
    gathered = {lowered.program.buffers[op.reads[0].name].entry for op in lowered.program.ops if op.gathers}
    assert gathered - {""} == ENTRIES[shape]  # the second loss is given the first net's new values, in a column


def test_the_moments_of_two_nets_mirror_a_parameter_rather_than_one_another() -> None:
    def found(*paths: str, params: str) -> list[list[str]]:
        leaves = [torch.empty(2, 3, device="meta")] * len(paths)
        known = [tree.matches(params, path) for path in paths]
        return [[paths[i] for _, i in c.members] for c in leaf_classes([*range(len(paths))], paths, leaves, known)]

    assert found("g/a/w", "g_opt/mu/a/w", "h_opt/mu/a/w", params="g/**") == [["g/a/w", "g_opt/mu/a/w", "h_opt/mu/a/w"]]
    assert found("g/net/w", "g/opt/mu/w", "h/opt/mu/v", params="*/net/**") == [
        ["g/net/w", "g/opt/mu/w"], ["h/opt/mu/v"]
    ]  # fmt: skip
    assert len(found("p/w", "p/x/w", "p/x/y/w", params="p/**")) == 3, "parameters of one entry are apart"


def test_an_entry_that_is_one_leaf() -> None:
    """Its moment is below an entry of its own; of several such leaves none is the one."""
    assert classes("w", "opt/mu/w") == {"w": [("", "w"), ("opt/mu", "opt/mu/w")]}
    assert classes("params", "mu/params") == {"params": [("", "params"), ("mu", "mu/params")]}
    assert len(classes("a", "b")) == 2
    assert classes("w", "b", "opt/mu/w", "opt/mu/b") == {
        "w": [("", "w"), ("opt/mu", "opt/mu/w")], "b": [("", "b"), ("opt/mu", "opt/mu/b")]
    }  # fmt: skip


def test_names_of_a_class() -> None:
    paths = ["params/a/w", "opt_state/mu/a/w"]
    (one,) = leaf_classes([0, 1], paths, [torch.ones(2, 3)] * 2)
    assert (one.key, one.path, one.shown(paths)) == (("a", "w"), "a/w", "params/a/w")
    assert one.names(paths) == ["a/w", *paths]
    assert LeafClass(("w",), (("params", 0),), lead=torch.ones(2, 3, dtype=torch.bfloat16)).nbytes == 12


def staged(zero: Any) -> list[Any]:
    state = {"params": {"a": torch.ones(2), "b": torch.ones(2)}, "mu": {"a": torch.ones(2)}, "n": torch.tensor(1)}
    paths, leaves, _ = tree.flatten(state)
    flat = [i for i, leaf in enumerate(leaves) if leaf.ndim]
    return stages_of(leaf_classes(flat, paths, leaves), paths, zero)


def test_the_first_rule_that_matches_a_member_says_the_stage() -> None:
    assert staged(2) == [2, 2]
    assert staged({"mu/a": 1, "a": 3, "**": 0}) == [1, 0]
    assert staged({"a": 3, "**": 0}) == [3, 0]
    assert staged({"params/**": 3, "**": 0}) == [3, 3]
    assert staged({"n": 1, "**": 3}) == [3, 3], "a rule may be of a leaf in no bucket"


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"a": 3}, "zero has no rule for 'params/b': add a last rule, as in {..., '**': 1}"),
        ({"c": 3, "**": 1}, "the zero rule 'c' matches no leaf"),
        ({"params/**": 3, "aa/**": 1, "**": 1}, "the zero rule 'aa/\\*\\*' matches no leaf. Did you mean 'a/\\*\\*'?"),
    ],
)
def test_a_rule_that_misses_is_refused(zero: Any, message: str) -> None:
    with pytest.raises(fzero.SpecError) as error:
        staged(zero)
    assert message.replace("\\", "") in str(error.value)


def test_a_leaf_alone_is_named_below_its_entry() -> None:
    paths = ["params/a/w", "b"]
    first, second = leaf_classes([0, 1], paths, [torch.ones(2), torch.ones(3)])
    assert (first.key, first.members) == (("a", "w"), (("params", 0),))
    assert (second.key, second.members) == (("b",), (("b", 1),)), "its column has the name of its entry"


def test_what_is_not_yet_decided_of_a_class_is_the_plainest() -> None:
    """Whole on every rank, in fp32, coded not at all, in the first chunk."""
    one = LeafClass(("w",), (("params", 0),))
    assert (str(one.layout), one.stage, one.cast, one.coding, one.chunk) == ("", 0, torch.float32, EXACT, 0)
    assert one.nbytes == 0


def test_leaves_join_through_one_another() -> None:
    """Two moments and an average, none of which is the first in the tree."""
    assert classes("ema/w", "opt/mu/w", "opt/nu/w", "params/w") == {
        "w": [("ema", "ema/w"), ("opt/mu", "opt/mu/w"), ("opt/nu", "opt/nu/w"), ("params", "params/w")]
    }
    assert [*classes("b/x/w", "c/x/w", "a/y/w", "d/y/w")] == ["x/w", "y/w"], "in the order of the tree"
