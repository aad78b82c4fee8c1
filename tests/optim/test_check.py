"""What fzero.optim refuses: each error says what was given, what was needed and the smallest fix."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.errors import SpecError, TreeError
from tests.optim.test_optim import example

WRONG_VALUES = [
    (lambda: optim.adamw(-1.0), r"adamw: learning_rate is -1.0, but it must be at least 0"),
    (lambda: optim.adamw(float("nan")), r"learning_rate is nan"),
    (lambda: optim.sgd("0.1"), r"sgd: learning_rate is '0.1' \(str\), but it must be a Python number"),
    (lambda: optim.sgd(torch.ones(1)), r"sgd: learning_rate has shape \(1,\) and is torch.float32, .*must be 0-d"),
    (lambda: optim.adamw(0.1, eps=torch.tensor(1e-8)), r"adamw: eps is of type Tensor.*name it in static"),
    (lambda: optim.adamw(0.1, moments="bf16"), r"adamw: moments is 'bf16' \(str\).*'float32', 'bfloat16' or None"),
    (lambda: optim.lion(0.1, betas=0.9), r"lion: betas is 0.9, but it must be two numbers"),
    (lambda: optim.lion(0.1, weight_decay=-1), r"lion: weight_decay is -1.0"),
    (lambda: optim.adafactor(0.1, beta2_decay=0.8), r"beta2_decay is 0.8, but it must be at most 0.*write -0.8"),
    (lambda: optim.adafactor(0.1, eps=1e-3), r"adafactor: eps is 0.001, but it must be two: write eps=\(None, 1e-3\)"),
    (lambda: optim.adafactor(0.1, threshold=0.5), r"adafactor: threshold is 0.5, but it must be at least 1"),
    (lambda: optim.muon(0.1, coefficients=(1.0, 2.0)), r"muon: coefficients is \(1.0, 2.0\).*three numbers"),
    (lambda: optim.muon(0.1, adjust="adamw"), r"muon: adjust is 'adamw'.*'original' or 'match_rms_adamw'"),
    (lambda: optim.muon(0.1, others=optim.adamw), r"muon: others is .*write others=fzero.optim.adamw\(3e-4\)"),
    (lambda: optim.muon(0.1, steps=0), r"muon: steps is 0, but it must be at least 1"),
    (lambda: optim.clip_by_value(0), r"limit is 0.0.*leave clip_by_value out"),
    (lambda: optim.add_decayed_weights(-0.1), r"add_decayed_weights: weight_decay is -0.1"),
    (lambda: optim.trace(1.0), r"trace: decay is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.multi_transform({}), r"multi_transform: rules is empty, but it must be a dict by path rule: write"),
    (lambda: optim.multi_transform([optim.sgd(0.1)]), r"multi_transform: rules is of type list"),
    (
        lambda: optim.multi_transform({"**": optim.sgd}),
        r"the rule '\*\*' has sgd, not a GradientTransformation: call it",
    ),
    (lambda: optim.scale_by_path({"a": "2"}), r"the multiplier of 'a' is '2' \(str\)"),
    (lambda: optim.inject_hyperparams(optim.sgd(0.1)), r"must be a function that makes a transformation: write"),
    (lambda: optim.inject_hyperparams(optim.sgd)(0.1), r"give hyperparameters by name"),
    (
        lambda: optim.inject_hyperparams(optim.adamw, static=["esp"])(learning_rate=0.1, eps=1e-6),
        r"static names 'esp', which is not given. Did you mean 'eps'",
    ),
    (lambda: optim.inject_hyperparams(optim.sgd)(learning_rate=0.1, momentum=0.9).init([]), r"name it in static"),
    (
        lambda: optim.inject_hyperparams(optim.onebit_adam)(learning_rate=0.1, warmup_steps=2).init([]),
        r"onebit_adam: warmup_steps is of type Tensor.*name it in static=\('warmup_steps',\).*phases cannot be wrapped",
    ),
    (
        lambda: optim.inject_hyperparams(optim.freeze_nu)(learning_rate=0.1, after=2).init([]),
        r"freeze_nu: after is of type Tensor.*name it in static=\('after',\).*phases cannot be wrapped",
    ),
    (
        lambda: optim.inject_hyperparams(optim.onebit_adam, static="warmup_steps")(
            learning_rate=0.1, warmup_steps=2
        ).init([]),
        r"^inject_hyperparams: an optimizer with phases \(warmup, coded\) cannot be wrapped.*optimizer of each phase",
    ),
    *(
        (lambda wrap=wrap: wrap(optim.onebit_adam(0.1, warmup_steps=2)), r"an optimizer with phases \(warmup, coded\)")
        for wrap in (
            lambda tx: optim.masked(tx, "w"),
            lambda tx: optim.chain(tx),
            lambda tx: optim.delayed(tx),
            lambda tx: optim.apply_if_finite(tx),
            lambda tx: optim.ema_params(tx, 0.9),
            lambda tx: optim.multi_transform({"**": tx}),
        )
    ),
    (lambda: optim.masked(optim.sgd, "w"), r"masked: tx is sgd, not a GradientTransformation: call it"),
    (
        lambda: optim.inject_hyperparams(optim.adamw)(learning_rat=0.1),
        r"adamw does not take these: .* Its arguments are learning_rate, .* Did you mean 'learning_rate'",
    ),
    (
        lambda: optim.inject_hyperparams(optim.adamw)(lr=0.1),
        r"adamw does not take these: .* Its arguments are learning_rate, .*\. 'lr': here it is learning_rate=",
    ),
    (lambda: optim.apply_if_finite(optim.sgd), r"apply_if_finite: tx is sgd, not a GradientTransformation: call it"),
    (lambda: optim.adam(0.1, betas=(0.9, 1.0)), r"adam: betas\[1\] is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.adam(0.1, betas=0.9), r"write betas=\(0.9, 0.999\)"),
    (lambda: optim.adam(0.1, eps=0), r"adam: eps is 0.0, but it must be greater than 0"),
    (lambda: optim.adamw(0.1, weight_decay=-1), r"weight_decay is -1.0"),
    (lambda: optim.sgd(0.1, momentum=1.0), r"sgd: momentum is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.sgd(0.1, nesterov=True), r"nesterov needs momentum.*write momentum=0.9"),
    (lambda: optim.clip_by_global_norm(0), r"max_norm is 0.0.*leave clip_by_global_norm out"),
    (lambda: optim.scale(float("inf")), r"scale: factor is inf, but it must be finite"),
    (lambda: optim.constant(-1), r"constant: value is -1.0"),
    (lambda: optim.linear_warmup(1.0, -1), r"linear_warmup: steps is -1, but it must be at least 0"),
    (lambda: optim.linear_warmup(1.0, 1e3), r"steps is 1000.0 \(float\).*whole number"),
    (lambda: optim.cosine(1.0, 0), r"cosine: steps is 0, but it must be at least 1"),
    (lambda: optim.cosine(1.0, 5, end=-1), r"cosine: end is -1.0"),
    (lambda: optim.warmup(0.0, 1.0, 0), r"warmup: steps is 0, but it must be at least 1"),
    (lambda: optim.warmup(0.0, 1.0, 5, "cubic"), r"kind is 'cubic', but it must be 'linear' or 'log'"),
    (lambda: optim.polynomial(1.0, 5, power=0), r"polynomial: power is 0.0, but it must be greater than 0"),
    (lambda: optim.exponential(1.0, 5, 0.5, staircase=1), r"staircase is 1 \(int\), but it must be True or False"),
    (lambda: optim.piecewise(1.0, {0.5: 2}), r"a boundary is 0.5 \(float\), but it must be a whole number"),
    (lambda: optim.piecewise(1.0, [3]), r"factors is of type list.*write \{30_000: 0.1\}"),
    (lambda: optim.joined([optim.constant(1.0)], [3]), r"1 schedules have 0 boundaries between them, but 1 are given"),
    (lambda: optim.joined([optim.constant(1.0)] * 3, [3, 2]), r"\[3, 2\], but they must be in increasing order"),
    (lambda: optim.ema(1.0), r"ema: decay is 1.0, but it must be at least 0 and less than 1"),
    (lambda: optim.ema_params(optim.adamw, 0.9), r"tx is adamw, not a GradientTransformation: call it"),
    (lambda: optim.scale_by_trust_ratio(bounds=(2, 1)), r"the least must come first: write bounds=\(1.0, 2.0\)"),
    (lambda: optim.scale_by_trust_ratio(bounds=2), r"bounds is 2, but it must be two numbers"),
    (lambda: optim.rmsprop(1.0, centered=1), r"rmsprop: centered is 1 \(int\), but it must be True or False"),
    (
        lambda: optim.nadam(1.0, betas=(0.9, 1.0)),
        r"nadam: betas\[1\] is 1.0, but it must be at least 0 and less than 1",
    ),
    (lambda: optim.warmup_cosine(1.0, 9, 5), r"warmup_steps is 9.*total_steps, which includes it, is 5"),
    (lambda: optim.chain(optim.identity), r"chain: argument 0 is identity, not a GradientTransformation: call it"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_VALUES)
def test_invalid_values_are_refused_when_given(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        make()
    assert isinstance(error.value, ValueError)


WRONG_GRADS = [
    ({"a": {"w": 1}}, r"params/a/bias has no counterpart there. A leaf the loss does not use has gradient None"),
    ({"a": {"w": 1, "bias": None}}, r"params/a/bias has no counterpart there"),
    ({"a": {"w": 1, "bias": 1, "bais": 1}}, r"grads/a/bais has no counterpart in params. Did you mean 'a/bias'"),
    ({"a": {"w": 1, "bias": 2}}, r"grads/a/bias has shape \(2,\), but params/a/bias has shape \(1,\)"),
    ({"a": {"w": 1, "bias": 0.5}}, r"grads/a/bias is 0.5 \(float\), but it must be a tensor"),
]


@pytest.mark.parametrize("tx", [optim.adamw(0.1), optim.sgd(0.1), optim.masked(optim.identity(), "**")])
@pytest.mark.parametrize(("sizes", "message"), WRONG_GRADS)
def test_gradients_unlike_params_are_named(tx: Any, sizes: Any, message: str) -> None:
    params = {"a": {"w": torch.ones(1), "bias": torch.ones(1)}}
    grads = tree.map(lambda n: torch.ones(n) if isinstance(n, int) else n, sizes)
    with pytest.raises(TreeError, match=message):
        tx.update(grads, tx.init(params), params)


def test_other_unlike_trees_are_named() -> None:
    params = {"a": [torch.ones(2)]}
    tx = optim.adamw(0.1)
    with pytest.raises(TreeError, match=r"grads/a/0 is held by tuple in dict, params/a/0 by list in dict"):
        tx.update({"a": (torch.ones(2),)}, tx.init(params), params)
    with pytest.raises(TreeError, match=r"grads/a/0 is torch.bfloat16, but params/a/0 is torch.float32: write .to"):
        tx.update({"a": [torch.ones(2).bfloat16()]}, tx.init(params), params)
    with pytest.raises(TreeError, match=r"adamw: mu does not have the structure of params: params/a/0"):
        tx.update(params, tx.init({}), params)
    with pytest.raises(TreeError, match=r"agree in every leaf"):
        optim.apply_updates(params, {**params, "b": []})
    with pytest.raises(TreeError, match=r"apply_updates: updates/a/0 has shape \(1,\)"):
        optim.apply_updates(params, {"a": [torch.ones(1)]})
    with pytest.raises(TreeError, match=r"params/step is torch.int64.*fzero.optim.masked"):
        tx.init({"step": torch.tensor(0)})
    with pytest.raises(TreeError, match=r"params/lr is 0.5 \(float\), but it must be a tensor"):
        tx.init({"lr": 0.5})
    with pytest.raises(TreeError, match=r"chain: opt_state has 1 parts, but the chain has 2"):
        optim.chain(tx, optim.identity()).update(params, (tx.init(params),), params)


@dataclass
class Weights:
    w: torch.Tensor


NO_PARAMS = [
    (Weights(torch.ones(2)), r"of type Weights, but it must be a tensor: write vars\(x\).*NamedTuple"),
    ((x for x in [torch.ones(2)]), r"of type generator, .*: give dicts, lists, tuples or named tuples of tensors"),
    ({"act": "relu"}, r"params/act is 'relu' \(str\), .*: leave it out of params"),
    ({"w": torch.ones(2).numpy()}, r"write torch.from_numpy\(x\)"),
    ({"w": torch.ones(2).to(torch.float8_e4m3fn)}, r"float8_e4m3fn, .* hold it in bf16 or fp32, and take x.to\("),
]


@pytest.mark.parametrize(("params", "message"), NO_PARAMS)
def test_what_are_no_parameters_has_a_remedy_of_its_own(params: Any, message: str) -> None:
    """`torch.tensor(...)` of a dataclass, a generator or a string is an error too; 8 bits were torch's raw one."""
    with pytest.raises(TreeError, match=message):
        optim.adamw(0.1).init(params)


WRONG_MASKS = [
    ("**/bais", r"the mask '\*\*/bais' matches none of the 4 leaves of params \(.*\). Did you mean '\*\*/bias'"),
    (["a/*", "scal"], r"the mask 'scal' matches none.*Did you mean 'scale'"),
    ({"a": {"w": True}}, r"mask does not have the structure of params: 'a/bias' is in one of them only"),
    (lambda path, leaf: 1, r"mask says 1 \(int\) for 'a/bias', but it must say True or False"),
    (lambda path: True, r"mask is called with a path and its leaf, and <lambda>\(path\) does not take them"),
]


@pytest.mark.parametrize(("mask", "message"), WRONG_MASKS)
def test_wrong_masks_are_refused_at_init(mask: Any, message: str) -> None:
    for tx in (optim.masked(optim.sgd(0.1), mask), optim.adamw(0.1, mask=mask)):
        with pytest.raises(SpecError, match=message):
            tx.init(example())


def test_a_schedule_must_stay_a_tensor() -> None:
    params = [torch.ones(1)]
    for schedule, shown in ((lambda count: 0.1, r"0.1 \(float\)"), (lambda count: torch.ones(1), r"shape \(1,\)")):
        tx = optim.sgd(schedule)
        with pytest.raises(SpecError, match=f"sgd: the schedule returned {shown}.*baked"):
            tx.update(params, tx.init(params), params)


WRONG_GROUPS = [
    (lambda: optim.multi_transform({"a/**": optim.sgd(0.1)}), r"no rule matches params/rest/0. Add a last rule"),
    (
        lambda: optim.multi_transform({"**": optim.sgd(0.1), "scale": optim.sgd(1.0)}),
        r"'\*\*', before it, takes.*Put it",
    ),
    (lambda: optim.scale_by_path({"**/bais": 0.1}), r"'\*\*/bais' matches none of the 4.*Did you mean '\*\*/bias'"),
    (lambda: optim.muon(0.1), r"params/a/bias of shape \(6,\).*write muon\(0.02, others=fzero.optim.adamw"),
    (lambda: optim.muon(0.1, mask="a/*", others=optim.sgd(0.1)), r"selects params/a/bias of shape \(6,\).*others="),
    (lambda: optim.lion(0.1, mask="**/bais"), r"lion: the mask '\*\*/bais' matches none"),
    (lambda: optim.add_decayed_weights(0.1, "**/bais"), r"add_decayed_weights: the mask '\*\*/bais' matches none"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_GROUPS)
def test_wrong_groups_are_refused_at_init(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make().init(example())


def test_an_update_that_returns_no_pair_is_named() -> None:
    own = optim.GradientTransformation(lambda params: (), lambda grads, state, params: None)  # type: ignore[arg-type]
    spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).sum(), optimizer=own)
    with pytest.raises(TreeError, match=r"the optimizer's update returned NoneType: needed \(updates, opt_state\)"):
        fzero.lower(spec, {"w": torch.ones(2)}, torch.ones(3, 2))


def test_states_of_another_transformation_are_refused() -> None:
    params = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    sgd = optim.sgd(0.1)
    injected = optim.inject_hyperparams(optim.sgd)(learning_rate=0.1)
    state = injected.init(params)
    grows = optim.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, (*state, grads)))
    both = optim.multi_transform({"a": sgd, "b": sgd})
    wrong = [
        (both, (sgd.init(params),), r"multi_transform: opt_state has 1 parts, but there are 2 rules"),
        (injected, state._replace(hyper={}), r"opt_state has hyperparameters \[\], but this .* \['learning_rate'\]"),
        (injected, state._replace(hyper={"learning_rate": 0.5}), r"hyper/learning_rate in opt_state is 0.5 \(float\)"),
        (injected, state._replace(hyper={"learning_rate": torch.ones(1)}), r"of shape \(1,\), but it must be a 0-d"),
        (optim.apply_if_finite(grows), optim.IfFiniteState(torch.tensor(0), ()), r"a state of another structure"),
        (
            optim.adafactor(),
            optim.adafactor().init({"a": torch.ones(3, 3), "b": torch.ones(2)}),
            r"adafactor: row/a has shape \(3,\), but params/a with shape \(2, 3\) needs \(2,\)",
        ),
    ]
    for tx, given, message in wrong:
        with pytest.raises(TreeError, match=message):
            tx.update(params, given, params)


def test_muon_refuses_to_be_differentiated() -> None:
    params = [torch.ones(2, 2, requires_grad=True)]
    with pytest.raises(TypeError, match=r"muon: its orthogonalisation cannot be differentiated"):
        optim.muon(0.1).update([torch.ones(2, 2)], optim.muon(0.1).init(params), params)


def test_adam_refuses_to_be_differentiated() -> None:
    params = {"w": torch.ones(2, requires_grad=True)}
    tx = optim.adamw(0.1)
    with pytest.raises(TypeError, match=r"adamw: its fused kernel cannot be differentiated.*torch.no_grad"):
        tx.update({"w": torch.ones(2)}, tx.init(params), params)
    with torch.no_grad():
        tx.update({"w": torch.ones(2)}, tx.init(params), params)


TORCHS = {  # of the same algorithm in torch
    "adadelta": "Adadelta", "adafactor": "Adafactor", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW",
    "muon": "Muon", "nadam": "NAdam", "radam": "RAdam", "rmsprop": "RMSprop", "sgd": "SGD",
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_arguments_are_taken_or_answered(name: str) -> None:
    """Whatever name torch has for an argument: it is the same here, or the error says what to do instead."""
    make = getattr(optim, name)
    here = inspect.signature(make).parameters
    for other in inspect.signature(getattr(torch.optim, TORCHS[name])).parameters:
        if other not in here:
            with pytest.raises(
                TypeError, match=rf"^{name} has no argument '{other}'(: here it is (\w+)=|\. [A-Z])"
            ) as e:
                make(**{other: 1})
            assert "It has" not in str(e.value), other
            if named := re.search(r"here it is (\w+)=", str(e.value)):
                assert named[1] in here


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (optim.adamw, {"lr": 3e-4}, r"adamw has no argument 'lr': here it is learning_rate="),
        (optim.adam, {"b1": 0.9}, r"adam has no argument 'b1': here it is betas=\(first, second\)"),
        (optim.sgd, {"beta": 0.9}, r"here it is momentum="),
        (optim.cosine, {"T_max": 10}, r"here it is steps="),
        (optim.warmup_cosine, {"num_training_steps": 10}, r"here it is total_steps="),
        (optim.warmup_cosine, {"decay_steps": 10}, r"here it is total_steps="),
        (optim.adamw, {"fused": True}, r"adamw has no argument 'fused'. Leave it out"),
        (optim.adamw, {"max_grad_norm": 1.0}, r"It is Spec\(clip_norm=...\)"),
        (
            optim.adamw,
            {"weight_decoy": 1.0},
            r"'weight_decoy'. Did you mean 'weight_decay'\? It has learning_rate, betas",
        ),
    ],
)
def test_arguments_of_other_names(make: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(**given)


def test_parameters_are_not_given_to_an_optimizer() -> None:
    for params in ([torch.ones(2)], iter([torch.ones(2)]), {"w": torch.ones(2)}):
        with pytest.raises(SpecError, match=r"must be a Python number: parameters are given to fzero.init"):
            optim.adamw(params)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"must be a Python number$"):
        optim.adamw("0.1")  # type: ignore[arg-type]
