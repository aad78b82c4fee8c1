"""Modules whose functions see the module otherwise than by `self`: `apply` follows the parameters, or is refused.

The check of the class: parameters that are changed must change what `apply` gives as they change what the module gives.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.interop import from_module
from fzero.interop.closures import leak, own

X = torch.linspace(-1, 1, 12).view(3, 4)


@dataclass
class Holder:
    part: Any


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


class Weak:
    def __init__(self, *parts: nn.Module) -> None:
        self.parts = [weakref.ref(part) for part in parts]

    def __call__(self, x: Tensor) -> Tensor:
        first, second, net = (part() for part in self.parts)
        assert first is not None
        assert second is not None
        assert second.parent() is net
        return first(second(x))


class Recorder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.module.c_fc.bias.sum()


class Net(nn.Module):
    """minGPT's shape: parts in a ModuleDict, and something more that each case below adds."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(4, 8), "c_proj": nn.Linear(8, 4), "norm": nn.BatchNorm1d(4)})
        self.run: Callable[[Tensor], Any] = lambda x: x
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(x)


def closure(net: Net) -> None:
    m = net.mlp
    net.run = lambda x: m.c_proj(F.gelu(m.c_fc(x)))


def over_itself(net: Net) -> None:
    net.run = lambda x: net.mlp.c_proj(net.mlp.c_fc(x))


def over_a_weight(net: Net) -> None:
    weight = net.mlp.c_fc.weight
    net.run = lambda x: x * weight.sum()


def over_a_buffer(net: Net) -> None:
    mean = net.mlp.norm.running_mean
    net.run = lambda x: net.mlp.c_fc(x).sum() + mean


def by_default(net: Net) -> None:
    def run(x: Tensor, m: Any = net.mlp, *, scale: Any = net.mlp.c_proj.bias) -> Tensor:
        return m.c_proj(m.c_fc(x)) * scale

    net.run = run


def by_another_function(net: Net) -> None:
    m = net.mlp

    def inner(x: Tensor) -> Tensor:
        return m.c_fc(x)

    net.run = lambda x: m.c_proj(inner(x))


def recursive(net: Net) -> None:
    m = net.mlp

    def run(x: Tensor, depth: int = 2) -> Tensor:
        return run(m.c_proj(m.c_fc(x)), depth - 1) if depth else x

    net.run = run


def in_a_partial(net: Net) -> None:
    net.run = functools.partial(lambda m, x: m.c_proj(m.c_fc(x)), net.mlp)


def partial_of_a_closure(net: Net) -> None:
    m = net.mlp
    net.run = functools.partial(lambda scale, x: m.c_proj(m.c_fc(x)) * scale, 2.0)


def by_torch_func(net: Net) -> None:
    """Its cells hold one of torch's Python modules, which cannot be pickled."""
    m = net.mlp
    net.run = torch.func.vmap(torch.func.grad(lambda x: m.c_proj(m.c_fc(x)).square().sum()))


def a_python_module(net: Net) -> None:
    net.functional = F  # type: ignore[assignment]
    net.run = lambda x: net.functional.gelu(net.mlp.c_proj(net.mlp.c_fc(x)))


def a_bound_method(net: Net) -> None:
    net.run = net.mlp.c_fc.forward
    net.forward = lambda x: net.mlp.c_proj(net.run(x))  # type: ignore[method-assign]


def in_containers(net: Net) -> None:
    table = {"parts": [(net.mlp.c_fc,), Holder(net.mlp.c_proj), Slotted(net.mlp.c_proj.bias)]}
    net.table = table
    net.run = lambda x: table["parts"][1].part(table["parts"][0][0](x)) + table["parts"][2].part  # type: ignore[index]


class Unsized(tuple[Any, ...]):
    """As e3nn's irreps: a tuple whose length could mean two things, and is refused."""

    def __len__(self) -> int:
        raise NotImplementedError


def in_a_tuple_without_a_length(net: Net) -> None:
    held = Unsized([net.mlp.c_fc])
    net.run = lambda x: next(iter(held))(x).sum()


def a_hook(net: Net) -> None:
    m = net.mlp
    net.register_forward_hook(lambda module, args, output: output * m.c_fc.weight.mean())


def a_pre_hook(net: Net) -> None:
    net.register_forward_pre_hook(lambda module, args: (args[0] * net.mlp.c_fc.weight.mean(),))


def a_hook_of_another_object(net: Net) -> None:
    net.register_forward_hook(Recorder(net.mlp).add)


def a_parametrization(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.mlp.c_fc)
    over_itself(net)


def a_shared_cell(net: Net) -> None:
    m: Any = None

    def first(x: Tensor) -> Tensor:
        return m.c_fc(x)

    def second(x: Tensor) -> Tensor:
        return m.c_proj(x)

    m = net.mlp
    net.first, net.second = first, second
    net.run = lambda x: net.second(net.first(x))


def a_weak_reference(net: Net) -> None:
    parent = weakref.ref(net)
    net.run = lambda x: parent().mlp.c_fc(x).sum()  # type: ignore[union-attr]


def weak_references_as_attributes(net: Net) -> None:
    net.run = Weak(net.mlp["c_proj"], net.mlp["c_fc"], net)
    net.mlp["c_fc"].parent = weakref.ref(net)


FOLLOWED = [
    closure, over_itself, over_a_weight, over_a_buffer, by_default, by_another_function, recursive, in_a_partial,
    partial_of_a_closure, by_torch_func, a_python_module, a_bound_method, in_containers, in_a_tuple_without_a_length,
    a_hook, a_pre_hook, a_hook_of_another_object, a_parametrization, a_shared_cell, a_weak_reference,
    weak_references_as_attributes,
]  # fmt: skip


def changed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x + 0.3 + 0.1 * number for number, (name, x) in enumerate(values.items())}


def in_place(net: Net, values: dict[str, Tensor]) -> None:
    held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        for name, x in values.items():
            held[name].copy_(x)


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: case.__name__)
def test_apply_follows_its_parameters_as_the_module_follows_its_own(case: Callable[[Net], None]) -> None:
    net = Net()
    case(net)
    params, buffers, apply = from_module(net)
    before = net(X).detach()
    assert torch.equal(apply(params, buffers, X), before)
    params = {name: x.clone() for name, x in params.items()}  # they share the module's memory
    new, new_buffers = changed(params), {**buffers, "mlp.norm.running_mean": torch.full((4,), 3.0)}
    found = apply(new, new_buffers, X)
    found_again = apply(params, buffers, X)
    assert torch.equal(found_again, before), "a call leaves nothing behind"
    leaves = {name: x.clone().requires_grad_() for name, x in new.items()}
    grads = torch.autograd.grad(apply(leaves, new_buffers, X).square().sum(), list(leaves.values()), allow_unused=True)
    in_place(net, {**new, **new_buffers})
    net.zero_grad()
    after = net(X)
    assert torch.equal(found, after)
    assert not torch.equal(after, before), "a test of nothing"
    if after.requires_grad:
        after.square().sum().backward()
    for (name, held), grad in zip(net.named_parameters(), grads, strict=True):
        assert (held.grad is None) == (grad is None), name
        assert grad is None or torch.equal(held.grad, grad), name


def test_a_step_trains_them() -> None:
    net = Net()
    closure(net)
    params, buffers, apply = from_module(net)

    def loss(p: Any, x: Tensor) -> Tensor:
        return apply(p, buffers, x).square().mean()

    trained = {name: params[name] for name in params if "norm" not in name}
    rest = {name: params[name] for name in params if "norm" in name}
    spec = fzero.Spec(loss=lambda p, x: loss({**p, **rest}, x), optimizer=fzero.optim.sgd(0.5), zero=3)
    state = fzero.init(trained, spec)
    for _ in range(5):
        state = fzero.step(state, X)
    held = {**fzero.unshard(state.params), **rest}
    assert float(loss(held, X)) < 0.9 * float(loss(params, X))
    in_place(net, held)
    assert torch.equal(net(X), apply(held, buffers, X))


def test_a_function_that_sees_nothing_of_the_module_stays_the_same() -> None:
    """So that what a hook collects arrives where its author looks."""
    seen: list[Any] = []
    net = Net()
    net.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    params, buffers, apply = from_module(net)
    apply(params, buffers, X)
    assert seen == [X.shape]


def test_what_only_made_a_module_is_not_what_its_forward_sees() -> None:
    """Unpickling runs `__setstate__` and, by its `super().__init__`, names what no forward calls: einops' layers did so
    of every module around them."""
    net = Net()

    class Unpickled(nn.Identity):
        def __setstate__(self, state: Any) -> None:
            super().__init__()
            self.__dict__.update(state)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.same = net, Unpickled()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.same(self.net(x))
            return out

    params, buffers, apply = from_module(Around())
    assert torch.equal(apply(params, buffers, X), net(X))


def test_a_default_that_made_a_module_is_not_what_its_forward_sees() -> None:
    """Code that forward reaches names `__init__`, as that of torchtune's LoRA does, and an activation that is a default
    was taken for weights that forward sees."""

    shared = nn.SiLU()

    def made() -> Any:
        return super(dict, {}).__init__

    class Layer(nn.Module):
        def __init__(self, activation: nn.Module = shared) -> None:
            super().__init__()
            self.linear, self.activation = nn.Linear(4, 4), activation

        def forward(self, x: Tensor) -> Tensor:
            made()
            return self.activation(self.linear(x))  # type: ignore[no-any-return]

    layer = Layer()
    params, buffers, apply = from_module(layer)
    x = torch.ones(2, 4)
    assert torch.equal(apply(params, buffers, x), layer(x))


# --- what no copy can follow ------------------------------------------------------------------------------------------


class Stubborn:
    """Copies itself as itself."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __deepcopy__(self, memo: Any) -> Stubborn:
        return self


def a_cache(net: Net) -> None:
    m = net.mlp
    net.run = functools.lru_cache(lambda x: m.c_proj(m.c_fc(x)))


def an_object_that_stays(net: Net) -> None:
    net.helper = Stubborn(net.mlp)


def a_class_made_around_it(net: Net) -> None:
    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return net.mlp.c_fc(x)

    net.around = Around()


def an_attribute_of_its_class(net: Net) -> None:
    class Sharing(Net):
        shared = net.mlp["c_fc"]

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(x)

    net.__class__ = Sharing


def a_global(net: Net) -> None:
    globals()["the_net"] = net
    net.run = lambda x: the_net.mlp.c_fc(x).sum()  # type: ignore[name-defined]  # noqa: F821


def a_method_that_forward_calls(net: Net) -> None:
    class Calling(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.outer(x)

        def outer(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def inner(self, x: Tensor) -> Tensor:
            return net.mlp.c_fc(x)

    net.__class__ = Calling


def a_method_by_its_name_as_text(net: Net) -> None:
    class Calling(Net):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, "inner")(x)  # noqa: B009

        def inner(self, x: Tensor) -> Tensor:
            return net.mlp.c_fc(x)

    net.__class__ = Calling


def a_method_that_torch_calls(net: Net) -> None:
    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return net.mlp.c_fc(x)

    net.layer = Layer(4, 1, 4)


def a_decorated_forward(net: Net) -> None:
    class Around(nn.Module):
        @torch.autocast("cpu")
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

        @property
        def inner(self) -> nn.Module:
            return net.mlp["c_fc"]

    net.around = Around()


def by_the_global(x: Tensor) -> Tensor:
    return the_net.mlp.c_fc(x)  # type: ignore[name-defined]  # noqa: F821


def a_global_function(net: Net) -> None:
    globals()["the_net"] = net
    net.run = lambda x: by_the_global(x)


REFUSED = {
    a_cache: r"run\.__wrapped__ \(test_closures.py:\d+\) by closure over 'm'",
    an_object_that_stays: r"helper\.part",
    a_class_made_around_it: r"around\.forward \(test_closures.py:\d+\) by closure over 'net'",
    an_attribute_of_its_class: r"shared",
    a_method_that_forward_calls: r"inner \(test_closures.py:\d+\) by closure over 'net'",
    a_method_by_its_name_as_text: r"inner \(test_closures.py:\d+\) by closure over 'net'",
    a_method_that_torch_calls: r"layer._ff_block \(test_closures.py:\d+\) by closure over 'net'",
    a_decorated_forward: r"around.inner \(test_closures.py:\d+\) by closure over 'net'",
    a_global_function: r"run > by_the_global \(test_closures.py:\d+\) by the global 'the_net'",
    a_global: r"run \(test_closures.py:\d+\) by the global 'the_net'",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_no_copy_can_follow_is_refused_with_the_way(case: Callable[[Net], None]) -> None:
    net = Net()
    case(net)
    try:
        with pytest.raises(fzero.TreeError, match=rf"sees its own weights through {REFUSED[case]}.*Write it with self"):
            from_module(net)
    finally:
        globals().pop("the_net", None)


def test_a_plain_copy_would_leak() -> None:
    """Or `leak` would find nothing."""
    net = Net()
    closure(net)
    assert "by closure over 'm'" in leak(copy.deepcopy(net), own(net))
    assert not leak(copy.deepcopy(Net()), own(net))


# --- what is no leak, though it looks like one ------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from fzero.interop import from_module

class Net(nn.Module):
    registry = []

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(8, 8)
        self.encoder = [nn.Linear(8, 8)]
        Net.registry.append(self)

    def forward(self, x):
        return self.model(x) + self.encoder[0](x) + sum(self.weight(i) for i in range(2))

    def weight(self, i):
        return i * self.model.weight.sum()

    def evaluate(self, x):
        encoder.eval()
        return model(x)

    @property
    def best(self):
        return model, weight

    @classmethod
    def make(cls):
        return model

model = Net()
encoder, weight = model.model, model.model.weight
params, buffers, apply = from_module(model)
"""


def test_a_script_may_name_its_globals_as_the_modules_attributes() -> None:
    """Attributes are no globals, and what forward does not come to may see what it likes."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    x, params = torch.linspace(-1, 1, 8), script["params"]
    assert torch.equal(script["apply"](params, {}, x), script["model"](x))
    assert not torch.equal(script["apply"](changed(params), {}, x), script["model"](x))
