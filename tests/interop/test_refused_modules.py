"""What `fzero.interop` refuses, and what each error says to do instead."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from torch import Tensor, nn

import fzero
from fzero.interop import from_module


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    count: Tensor

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.weight * x


@pytest.mark.parametrize("assigns", [True, False])
def test_writes_to_buffers_need_mutable(assigns: bool) -> None:
    params, buffers, apply = from_module(Counting(assigns))
    with pytest.raises(fzero.CaptureError, match=r"Counting writes to its buffer 'count'.*mutable=True"):
        apply(params, buffers, torch.ones(2))
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).sum(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match=r"changed in place|writes to its buffer"):
        fzero.lower(spec, params, torch.ones(2))
    params, buffers, apply = from_module(Counting(assigns), mutable=True)
    assert float(apply(params, buffers, torch.ones(2))[1]["count"]) == 1
    assert float(buffers["count"]) == 0


def test_statistics_written_by_a_functional_batch_norm_are_refused_too() -> None:
    """torch's op does not say in its schema that it writes them."""
    mean, var = torch.zeros(4), torch.ones(4)

    def loss(params: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, params["w"], training=True).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match="tensor 'mean' is closed over and changed in place"):
        fzero.lower(spec, {"w": torch.ones(4)}, data(3, 4))
    assert same_bits(mean, torch.zeros(4))


class Hidden(nn.Linear):
    """Writes to a tensor that nobody was told of."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * self.seen


def test_writes_to_other_tensors_are_refused() -> None:
    params, buffers, apply = from_module(Hidden())
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).sum(), optimizer=fzero.optim.sgd(0.1))
    for _ in range(2):
        with pytest.raises(fzero.CaptureError, match=r"Hidden writes to a tensor that is no buffer: register it"):
            apply(params, buffers, data(1, 2))
    with pytest.raises(fzero.CaptureError, match="closed over and changed in place"):
        fzero.lower(spec, params, data(1, 2))


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None: ...


class Nothing(Extra):
    """As layers do that keep extra state in some modes only."""

    def get_extra_state(self) -> Any:
        return torch.empty(0)


def test_extra_state_without_content_is_none() -> None:
    assert list(from_module(Nothing()).params) == ["weight", "bias"]


class Described(nn.Linear):
    """As models that keep how they were made in their checkpoints (neuraloperator)."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "_metadata": {"width": 2, "act": F.gelu, 3: None}}


def test_what_a_state_dict_says_beside_tensors_is_no_state() -> None:
    assert list(from_module(Described(2, 2)).params) == ["weight", "bias"]


def test_complex_parameters_are_told_what_to_hold_and_that_trains() -> None:
    """The complaint: "no gradient exists for it. Quantised weights do not train", of a Fourier layer's weight."""
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(torch.complex(torch.eye(2), 0.5 * torch.ones(2, 2)))
    params, buffers, apply = from_module(module)
    x = torch.ones(3, 2, dtype=torch.complex64)

    def loss(p: Any, x: Tensor) -> Tensor:
        return apply({"weight": torch.view_as_complex(p["weight"])}, buffers, x).abs().square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.TreeError, match=r"params/weight is torch.complex64.*hold torch.view_as_real\(x\)"):
        fzero.init(params, spec)
    state = fzero.step(fzero.init({"weight": torch.view_as_real(params["weight"])}, spec), x)
    module(x).abs().square().mean().backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(
        torch.view_as_complex(state.params["weight"].full()), module.weight.detach() - 0.1 * module.weight.grad
    )


def twice() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def integer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    return module


class Subclass(nn.Parameter):
    pass


def subclass() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = Subclass(torch.ones(2, 2))
    return module


def hooked(name: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module.weight, name)(lambda x: None)
    return module


REFUSED = {
    "not a module": (lambda: F.relu, r"needs a torch.nn.Module, got function"),
    "lazy": (lambda: nn.LazyLinear(2), r"parameter 'weight' of LazyLinear has no shape yet.*Run one batch"),
    "lazy buffer": (lambda: nn.LazyBatchNorm1d(affine=False), r"buffer 'running_mean' .* no shape yet"),
    "meta buffer": (lambda: nn.BatchNorm1d(2, device="meta"), r"buffer 'running_mean' of BatchNorm1d is on the meta"),
    "batch norm": (
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)),
        r"'0' and 1 more layers .*mutable=True",
    ),
    "one memory": (twice, r"'0.weight' and '1.weight' of Sequential are two Parameters over one memory.*Tie them"),
    "integers": (integer, r"parameter 'weight' of Linear is i8\[2, 2\]: no gradient.*quantisation"),
    "subclass": (subclass, r"parameter 'weight' of Linear is a Subclass: needed a plain"),
    "hook": (lambda: hooked("register_hook"), r"parameter 'weight' of Linear has hooks on its gradient.*no step calls"),
    "late hook": (lambda: hooked("register_post_accumulate_grad_hook"), r"'weight' .*hooks.*fzero.optim.chain"),
    "extra state": (Extra, r"'_extra_state' of Extra is state outside its parameters and buffers \(dict\)"),
    "wrapped": (lambda: nn.DataParallel(nn.Linear(2, 2)), r"DataParallel is wrapped in DataParallel.*module.module"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2)), r"wrapped in OptimizedModule.*module._orig_mod"),
    "locked": (Locked, r"Locked cannot be copied \(TypeError: cannot pickle '_thread.lock' object\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_do(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(fzero.TreeError, match=message):
        from_module(make())


def test_apply_checks_what_it_is_given() -> None:
    params, buffers, apply = from_module(nn.Linear(4, 2))
    x = data(3, 4)
    for given, message in (
        ({"weight": params["weight"]}, r"params\['bias'\] of Linear is missing"),
        ({**params, "wieght": data(1)}, r"params\['wieght'\]: Linear has no such name. Did you mean 'weight'\?"),
        ({**params, "bias": data(3)}, r"params\['bias'\] is f32\[3\], Linear needs f32\[2\]"),
        ({**params, "bias": 0.0}, r"params\['bias'\] is float 0.0"),
        ([params], r"apply\(params\) of Linear is list"),
    ):
        with pytest.raises(fzero.TreeError, match=message):
            apply(given, buffers, x)
    low = {name: value.to(torch.bfloat16) for name, value in params.items()}
    assert apply(low, buffers, x.to(torch.bfloat16)).dtype == torch.bfloat16


class Scaling(nn.Module):
    """Writes to its own weight, in one of several ways."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.l)
        return self.l(x).relu_()


def no_grad(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight *= 3


WRITES = {
    "data": lambda layer: layer.weight.data.div_(3),
    "a view": lambda layer: layer.weight.detach()[1].zero_(),
    "no_grad": no_grad,
    "copy_": lambda layer: layer.weight.data.copy_(torch.zeros(2, 2)),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.data], 2.0),
}


@pytest.mark.parametrize("how", WRITES)
def test_weights_given_to_apply_are_never_written_to(how: str) -> None:
    """Eagerly, where nothing else would tell: `.data` is seen by no version counter."""
    params, buffers, apply = from_module(Scaling(WRITES[how]))
    before = {name: value.clone() for name, value in params.items()}
    with pytest.raises(
        fzero.CaptureError,
        match=r"Scaling changes params\W+l\.weight\W+ in place by .*test_refused_modules.py:\d+: the w",
    ):
        apply(params, buffers, data(1, 2))
    assert all(same_bits(params[name], before[name]) for name in params)
    _, _, apply = from_module(Scaling(lambda layer: None))
    assert apply(params, buffers, data(1, 2)).shape == (1, 2), "what is in place elsewhere is its own affair"


@pytest.mark.parametrize("where", [torch.float32, "cpu"])
def test_a_module_that_is_cast_or_moved_in_its_forward_is_refused_with_the_line(where: Any) -> None:
    params, buffers, apply = from_module(Scaling(lambda layer: layer.to(where)))
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).sum(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(
        fzero.CaptureError,
        match=r"test_refused_modules.py:\d+: a module is moved or cast .*Leave the move out, even to w",
    ):
        fzero.lower(spec, params, data(1, 2))
