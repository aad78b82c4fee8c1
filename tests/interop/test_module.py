"""`fzero.interop.from_module`: a module as values and a pure function, and the module as it was.

What a module may be (tied, recurrent, parametrised, with buffers, with hooks), what a call may not leave behind, and
what is refused with what to do about it. Hugging Face's models are in test_hf.py.
"""

import copy
import logging
import pickle
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import stage_of
from helpers import relative, run, same_bits
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import prune

import fzero
from fzero import tree
from fzero.errors import CaptureError
from fzero.interop import from_module


def seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """An embedding that is the output matrix too, integer positions, and a mask that forward keeps on the module."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(6)[None])
        self.register_buffer("scale", torch.tensor(0.5))
        self.constant = torch.tensor([2.0])
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
        h = self.embedding(x) * self.scale + self.positions[:, : x.shape[1], None] / 6
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * self.mask[:, None] * self.constant
        return self.head(h)


def words(rank: int = 0, step: int = 0) -> Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(rank + 10 * step))


def tied_loss(apply: Any, buffers: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, buffers, x).flatten(0, 1), x.flatten())

    return loss


# --- the module stays as it was ---------------------------------------------------------------------------------------


def everything(module: nn.Module) -> list[Any]:
    """What of a module could change: objects, versions, values, modes, gradients, hooks, attributes."""
    found: list[Any] = []
    for name, part in module.named_modules():
        found.append((name, part.training, len(part._forward_hooks), sorted(vars(part))))
        found += [
            (k, id(v), v._version, v.clone(), v.requires_grad, v.grad)
            for k, v in part._parameters.items()
            if v is not None
        ]
        found += [(k, id(v), v._version, v.clone()) for k, v in part._buffers.items() if v is not None]
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return same_bits(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)

    return len(a) == len(b) and all(len(x) == len(y) and all(map(equal, x, y)) for x, y in zip(a, b, strict=True))


def test_the_module_is_not_changed() -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)))
    module[0].register_forward_hook(lambda part, args, output: output * 2)
    module[2].eval()
    module(data(3, 4)).sum().backward()
    before = everything(module)
    params, buffers, apply = from_module(module, mutable=True)
    output, new = apply(params, buffers, data(5, 4, seed=1))
    spec = fzero.Spec(
        loss=lambda p, x: apply(p, buffers, x)[0].square().mean(), optimizer=fzero.optim.sgd(0.1), allow_unused=True
    )
    run(spec, params, lambda rank, step: data(5, 4, seed=rank), world=2, steps=1)
    assert same(before, everything(module))
    assert not same_bits(new["1.running_mean"], buffers["1.running_mean"]), "the copy's statistics moved"
    assert torch.equal(output, module(data(5, 4, seed=1))), "the hook is the copy's too"


def test_buffers_given_are_never_written_to() -> None:
    module = nn.BatchNorm1d(4)
    params, buffers, apply = from_module(module, mutable=True)
    kept = {name: value.clone() for name, value in buffers.items()}
    _, new = apply(params, buffers, data(3, 4))
    assert all(same_bits(buffers[name], kept[name]) for name in kept)
    module(data(3, 4))
    assert new.keys() == dict(module.named_buffers()).keys()
    assert all(torch.equal(new[name], value) for name, value in module.named_buffers())


class Switched(nn.Module):
    """As vector quantisers are: a switch that is a buffer, a moving mean, and a loss that begins with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("zero", torch.tensor(0.0))
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not self.ready:
            raise NotImplementedError
        self.mean.lerp_(y.detach().mean(0), 0.5)
        loss = self.zero.requires_grad_()
        return loss + (y - self.mean).square().mean()


class Queued(nn.Module):
    """As MoCo is: the newest rows lie in a queue, at a place that is a buffer too."""

    def __init__(self, as_number: bool) -> None:
        super().__init__()
        self.first, self.as_number = nn.Linear(4, 4), as_number
        self.register_buffer("queue", torch.arange(36.0).view(9, 4) / 36)
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        loss = (y @ self.queue.clone().T).square().mean()
        if self.as_number:
            place = int(self.place)
            self.queue[place : place + len(x)] = y.detach()
        else:
            self.queue[self.place + torch.arange(len(x))] = y.detach()
        self.place[0] = (self.place[0] + len(x)) % len(self.queue)
        return loss


def test_a_place_in_a_queue_stays_a_tensor() -> None:
    """The refusal's remedy is followed, for as many steps as the queue takes to come round."""

    def trained(module: nn.Module) -> Any:
        params, buffers, apply = from_module(module, mutable=True)
        first, step = fzero.interop.with_buffers(apply, params, buffers, fzero.optim.sgd(0.1))
        state = fzero.init(first, fzero.Spec(step=step))
        for number in range(4):
            state = fzero.step(state, data(3, 4) + number)
        return state

    with pytest.raises(fzero.CaptureError, match=r"self.place is a buffer .*self.place \+ torch.arange\(n\)"):
        trained(Queued(as_number=True))
    plain, module = Queued(as_number=True), Queued(as_number=False)
    plain.load_state_dict(module.state_dict())
    state, sgd = trained(module), torch.optim.SGD(plain.parameters(), 0.1)
    for number in range(4):
        sgd.zero_grad()
        plain(data(3, 4) + number).backward()
        sgd.step()
    for name, value in plain.state_dict().items():
        kept = state.tree["buffers" if name in ("queue", "place") else "params"][name].full()
        torch.testing.assert_close(kept, value)


def test_a_switch_that_is_a_buffer_is_refused_with_its_remedy() -> None:
    """The remedy is followed: what changes is state, the rest is known. That a forward sets the flag of a buffer says
    nothing of training, and the given one keeps its own."""
    module, x = Switched(), data(6, 4)

    def start(params: Any, buffers: Any, loss: Any) -> Any:
        first, step = fzero.interop.with_buffers(loss, params, buffers, fzero.optim.sgd(0.1))
        return fzero.step(fzero.init(first, fzero.Spec(step=step)), x)

    params, buffers, apply = from_module(module, mutable=True)
    with pytest.raises(fzero.CaptureError, match=r"self.ready is a buffer .* leave out of the state.* mutable=\("):
        start(params, buffers, lambda p, buffers, x: apply(p, buffers, x))
    params, buffers, apply = from_module(module, mutable=("mean",))
    changing = {"mean": buffers["mean"]}
    state = start(params, changing, lambda p, changing, x: apply(p, {**buffers, **changing}, x))
    assert not buffers["zero"].requires_grad
    value = module(x)
    (grad,) = torch.autograd.grad(value, [module.first.weight])
    assert float(state.metrics["loss"]) == pytest.approx(float(value.detach()), rel=1e-6)
    torch.testing.assert_close(state.tree["params"]["first.weight"].full(), params["first.weight"] - 0.1 * grad)
    torch.testing.assert_close(state.tree["buffers"]["mean"].full(), module.mean)


class Cloned(nn.Linear):
    """As the parameters of a tensordict: a copy has weights of its own, and holds them in two places."""

    def __deepcopy__(self, memo: Any) -> Any:
        twin = Cloned(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        twin.held = [twin.weight]
        return twin


def test_a_module_whose_copy_has_weights_of_its_own_is_refused() -> None:
    """`apply` ignored what it was given, and computed with the values that the weights once had (TorchRL's losses)."""
    with pytest.raises(fzero.TreeError, match=r"'1.held\[0\]' of Sequential: a copy of .* makes its own tensors"):
        from_module(nn.Sequential(nn.Linear(4, 4), Cloned(4, 4)))


class Pickled(nn.Module):
    """Its inner part is copied by pickle, as e3nn's compiled tensor products are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def __getstate__(self) -> Any:
        modules = {**self._modules}
        return {**self.__dict__, "_modules": modules, "inner": pickle.dumps(modules.pop("norm"))}

    def __setstate__(self, state: Any) -> None:
        inner = pickle.loads(state.pop("inner"))
        self.__dict__.update(state)
        self.norm = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_part_that_is_copied_by_pickle_computes_with_what_apply_is_given() -> None:
    module, x = nn.Sequential(Pickled(), nn.Linear(4, 1)), data(6, 4)
    params, buffers, apply = from_module(module, mutable=True)
    output, new = apply(params, buffers, x)
    assert torch.equal(output, module(x))
    assert torch.equal(new["0.norm.running_mean"], module[0].norm.running_mean)
    doubled = {name: value * 2 if name == "0.norm.weight" else value for name, value in params.items()}
    assert not torch.equal(apply(doubled, buffers, x)[0], output)
    step = fzero.interop.with_buffers(
        lambda p, b, x: ((o := apply(p, b, x))[0].square().mean(), o[1]), params, buffers, fzero.optim.sgd(0.1)
    )
    state = fzero.step(fzero.init(step[0], fzero.Spec(step=step[1])), x)
    assert not torch.equal(state.tree["params"]["0.norm.weight"].full(), params["0.norm.weight"])


class Named(nn.Linear):
    """A copy draws a name for the file of its code, as those of PyTorch Geometric's Sequential do."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.uid = random.randrange(16**6), np.random.rand()


def test_what_the_copy_of_a_module_draws_is_no_draw_of_the_step() -> None:
    params, buffers, apply = from_module(Named(4, 1))
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).square().mean(), optimizer=fzero.optim.sgd(0.1))
    state = fzero.init(params, spec)
    random.seed(3)
    expected = random.Random(3).random()
    fzero.step(state, data(6, 4))
    assert random.random() == expected

    def draws(p: Any, x: Tensor) -> Tensor:
        return apply(p, buffers, x).mean() * random.random()

    with pytest.raises(fzero.CaptureError, match="draws from the global generator of random"):
        fzero.lower(fzero.Spec(loss=draws, optimizer=fzero.optim.sgd(0.1)), params, data(6, 4))


def test_frozen_parameters_beside_statistics_stay_as_they_are() -> None:
    """`with_buffers` trained them, and decayed them, in silence."""
    module, x = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 1)), data(6, 4)
    params, buffers, apply = from_module(module, mutable=True)

    def loss(p: Any, buffers: Any, x: Tensor) -> Any:
        output, buffers = apply(p, buffers, x)
        return output.square().mean(), buffers

    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    first, step = fzero.interop.with_buffers(loss, params, buffers, fzero.optim.adamw(0.1, weight_decay=0.1))
    state = fzero.init(first, fzero.Spec(step=step))
    for _ in range(2):
        state = fzero.step(state, x)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    ends = fzero.unshard(state.tree["params"])
    assert same_bits(ends["0.weight"], params["0.weight"])
    for name, value in module.named_parameters():
        torch.testing.assert_close(ends[name], value.detach())


def test_errors_of_a_loss_with_statistics_name_it() -> None:
    """They named fzero's own function around it."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    params, buffers, apply = from_module(net, mutable=True)

    def loss(params: Any, buffers: Any, batch: Tensor) -> Any:
        output, buffers = apply({**params, "1.bias": torch.zeros(4)}, buffers, batch)
        return output.square().mean(), buffers

    first, step = fzero.interop.with_buffers(loss, params, buffers, fzero.optim.sgd(0.1))
    line = rf"'1.bias' gets no gradient from the loss loss \(test_module.py:{loss.__code__.co_firstlineno}\)"
    with pytest.raises(fzero.CaptureError, match=line):
        fzero.step(fzero.init(first, fzero.Spec(step=step)), torch.randn(8, 4))
    fzero.step(fzero.init(first, fzero.Spec(step=step, allow_unused=True)), torch.randn(8, 4))


def test_later_changes_of_the_module_do_not_reach_apply() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    params, buffers, apply = from_module(module)
    expected = module(data(2, 4))
    given = {name: value.clone() for name, value in params.items()}
    module.train()
    module[0].weight.data.zero_()
    module[2].running_mean.add_(1)
    module.append(nn.Linear(4, 4))
    assert torch.equal(apply(given, buffers, data(2, 4)), expected)


def test_modes_are_those_of_each_part_unless_given() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    module[0].eval()
    seen = {}
    for train in (None, True, False):
        _, _, apply = from_module(module, train=train)
        seen[train] = [part.training for part in apply._module]
    assert seen == {None: [False, True], True: [True, True], False: [False, False]}
    assert [part.training for part in module] == [False, True]


# --- what a module may be ---------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_leaf_and_stay_tied() -> None:
    module = seeded(Tied)
    params, buffers, apply = from_module(module)
    assert sorted(params) == ["embedding.weight", *(f"layers.{i}.{n}" for i in range(2) for n in ("bias", "weight"))]
    spec = fzero.Spec(loss=tied_loss(apply, buffers), optimizer=fzero.optim.sgd(0.1), zero=3)
    result = run(spec, params, words, world=2, steps=3)
    stepper = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        stepper.zero_grad()
        x = torch.cat([words(rank, step) for rank in range(2)])
        F.cross_entropy(module(x).flatten(0, 1), x.flatten()).backward()
        stepper.step()
    for name, value in module.named_parameters():
        assert relative(result.final[f"params/{name}"], value.detach()) <= 1e-5, name


def test_dotted_names_make_layers_and_take_rules() -> None:
    params, buffers, apply = from_module(seeded(Tied))
    spec = fzero.Spec(
        loss=tied_loss(apply, buffers),
        optimizer=fzero.optim.sgd(0.1),
        zero={"layers/0/**": 3, "**": 1},
        bucket_bytes=4096,
    )
    plan = fzero.lower(spec, params, words(), world_size=2).plan
    stages = {stage_of(bucket): bucket.name for bucket in plan.buckets.values() if stage_of(bucket) == 3}
    assert list(stages.values()) == ["layers.0"]


def test_what_forward_keeps_on_the_module_does_not_outlive_a_trace() -> None:
    """A mask made in a trace is a fake tensor: a second trace must not meet it, nor an eager call."""
    params, buffers, apply = from_module(seeded(Tied))
    spec = fzero.Spec(loss=tied_loss(apply, buffers), optimizer=fzero.optim.sgd(0.1))
    first = fzero.lower(spec, params, words())
    assert first.digest == fzero.lower(spec, params, words()).digest
    assert apply(params, buffers, words()).shape == (3, 5, 11)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 5, 2), lambda: nn.GRU(4, 5), lambda: nn.RNN(4, 5)])
def test_recurrent_layers(make: Any) -> None:
    """They keep their weights in a list as well, and oneDNN's LSTM cannot be traced."""
    module = seeded(make)
    params, buffers, apply = from_module(module)
    doubled = {name: 2 * value for name, value in params.items()}
    other = copy.deepcopy(module)
    other.load_state_dict(doubled)
    assert torch.equal(apply(doubled, buffers, data(3, 2, 4))[0], other(data(3, 2, 4))[0])
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x)[0].square().mean(), optimizer=fzero.optim.sgd(0.1), zero=3)
    result = run(spec, params, lambda rank, step: data(3, 2, 4, seed=rank), world=2, steps=2)
    stepper = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        stepper.zero_grad()
        module(torch.cat([data(3, 2, 4, seed=rank) for rank in range(2)], 1))[0].square().mean().backward()
        stepper.step()
    for name, value in module.named_parameters():
        assert relative(result.final[f"params/{name}"], value.detach()) <= 1e-5, name


def test_parametrised_weights() -> None:
    module = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    params, buffers, apply = from_module(module)
    assert "parametrizations.weight.original0" in params
    assert torch.equal(apply(params, buffers, data(2, 4)), module(data(2, 4)))
    spectral = seeded(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    params, buffers, apply = from_module(spectral, mutable=True)
    output, new = apply(params, buffers, data(2, 4))
    assert torch.equal(output, spectral(data(2, 4)))
    assert all(torch.equal(new[name], value) for name, value in spectral.named_buffers())


WEIGHTS_OF_HOOKS: dict[str, Any] = {
    "weight_norm": nn.utils.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "pruned twice": lambda layer: prune.random_unstructured(prune.l1_unstructured(layer, "weight", 0.3), "weight", 0.3),
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", WEIGHTS_OF_HOOKS)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_a_hook_computes(name: str, ran: bool) -> None:
    """The complaint: "cannot be copied ... tensors with a graph", of a weight that the next forward makes anew."""
    module = seeded(lambda: nn.Sequential(WEIGHTS_OF_HOOKS[name](nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)))
    if ran:
        module(data(2, 4))
    weight = module[0].weight
    params, buffers, apply = from_module(module)
    assert module[0].weight is weight
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).square().mean(), optimizer=fzero.optim.sgd(0.1), zero=3)
    result = run(spec, params, lambda rank, step: data(6, 4, seed=rank), world=2, steps=2)
    stepper = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        stepper.zero_grad()
        module(torch.cat([data(6, 4, seed=rank) for rank in range(2)])).square().mean().backward()
        stepper.step()
    for path, value in module.named_parameters():
        assert relative(result.final[f"params/{path}"], value.detach()) <= 1e-5, path


def test_apply_takes_transforms_and_keywords() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, params: float = 1.0) -> Tensor:  # type: ignore[override]
            return super().forward(x) * params

    module = seeded(lambda: Scaled(4, 1))
    given, buffers, apply = from_module(module)
    x = data(3, 4)
    assert torch.equal(apply(given, buffers, x, params=2.0), 2 * module(x))
    each = torch.func.vmap(torch.func.grad(lambda p, row: apply(p, buffers, row).sum()), (None, 0))(given, x)
    assert torch.equal(each["weight"][:, 0], x)


def test_checkpoints_recompute_with_the_given_parameters() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: torch.tanh(F.linear(y, self.weight, self.bias)) ** 2, x, use_reentrant=False)

    _, buffers, apply = from_module(seeded(lambda: Checkpointed(4, 2)))
    given = {"weight": data(2, 4).requires_grad_(), "bias": data(2).requires_grad_()}
    apply(given, buffers, data(3, 4, seed=1)).sum().backward()
    expected = {name: value.detach().requires_grad_() for name, value in given.items()}
    (torch.tanh(F.linear(data(3, 4, seed=1), expected["weight"], expected["bias"])) ** 2).sum().backward()
    assert all(torch.equal(given[name].grad, expected[name].grad) for name in given)  # type: ignore[arg-type]


def test_integer_buffers_are_state_too() -> None:
    params, buffers, apply = from_module(seeded(Tied))

    def step(state: Any, x: Tensor) -> Any:
        loss = tied_loss(apply, state["buffers"])
        value, grads = fzero.value_and_grad(loss)(state["params"], x)
        return {**state, "params": tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": value}

    start = {"params": params, "buffers": buffers}
    in_state = run(fzero.Spec(step=step, zero=3), start, words, world=2, steps=2)
    closed = fzero.Spec(loss=tied_loss(apply, buffers), optimizer=fzero.optim.sgd(0.1), zero=3)
    assert in_state.losses() == run(closed, params, words, world=2, steps=2).losses()
    assert same_bits(in_state.final["buffers/positions"], buffers["positions"])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_batch_norm_in_a_loss_normalises_by_its_own_part(microbatches: int) -> None:
    """The statistics may also be left alone: the loss drops the new buffers."""
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
    params, buffers, apply = from_module(module, mutable=True)
    spec = fzero.Spec(
        loss=lambda p, x: apply(p, buffers, x)[0].square().mean(),
        optimizer=fzero.optim.sgd(0.1),
        microbatches=microbatches,
    )
    result = run(spec, params, lambda rank, step: data(6, 4, seed=rank), world=2, steps=1)
    parts = [part for rank in range(2) for part in data(6, 4, seed=rank).chunk(microbatches)]
    expected = torch.stack([module(part).square().mean() for part in parts]).mean()
    assert result.losses() == pytest.approx([expected.item()], rel=1e-5)


def test_a_batch_norm_that_averages_all_batches_so_far_is_refused_with_its_remedy() -> None:
    """The complaint: advice about `if x > 0:` and x.item(), which nobody can follow in torch's own code."""
    params, buffers, apply = from_module(nn.BatchNorm1d(4, momentum=None), mutable=True)

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        output, buffers = apply(params, buffers, x)
        return output.square().sum(), buffers

    first, step = fzero.interop.with_buffers(loss, params, buffers, fzero.optim.sgd(0.1))
    with pytest.raises(fzero.CaptureError, match=r"momentum=None .* a value of the state: give it a number"):
        fzero.lower(fzero.Spec(step=step), first, data(6, 4))


def test_fake_quantisation() -> None:
    """torch's fused one trains; the other one asks for switches that are buffers, and the refusal names the fused."""
    asks, fused = (
        nn.Sequential(nn.Linear(4, 3), make(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255))
        for make in (FakeQuantize, FusedMovingAvgObsFakeQuantize)
    )

    def made(module: nn.Module) -> Any:
        params, buffers, apply = from_module(module, mutable=True)

        def loss(params: Any, buffers: Any, x: Tensor) -> Any:
            output, buffers = apply(params, buffers, x)
            return output.square().mean(), buffers

        return fzero.interop.with_buffers(loss, params, buffers, fzero.optim.sgd(0.1))

    first, step = made(asks)
    with pytest.raises(
        fzero.CaptureError, match=r"fake_quantize.py:\d+ in forward asks .*FusedMovingAvgObsFakeQuantize"
    ):
        fzero.lower(fzero.Spec(step=step), first, data(6, 4))
    first, step = made(fused)
    result = run(fzero.Spec(step=step), first, lambda rank, step: data(6, 4, seed=step), world=2, steps=2)
    for number in range(2):
        fused(data(6, 4, seed=number)).square().mean().backward()
        with torch.no_grad():
            for p in fused.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    for path, value in [*fused.named_parameters()]:
        assert relative(result.final[f"params/{path}"], value.detach()) <= 1e-5, path
    for path, value in fused.named_buffers():
        assert torch.allclose(result.final[f"buffers/{path}"], value, rtol=1e-5), path


@pytest.mark.parametrize("make", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_an_embedding_with_a_maximum_norm_is_refused_and_its_remedy_has_the_same_numbers(make: Any) -> None:
    words, module = torch.tensor([[0, 2, 2], [1, 0, 3]]), seeded(lambda: make(5, 4, max_norm=0.5))
    params, buffers, apply = from_module(module)
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x).sin().mean(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(
        fzero.CaptureError, match=r"params\['weight'\] is changed in place by .*max_norm= .*leave it out"
    ):
        fzero.lower(spec, params, words)
    _, _, plain = from_module(make(5, 4))

    def step(state: Any, x: Tensor) -> Any:
        w = state["weight"]
        state = {"weight": w * (0.5 / (w.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1)}
        value, grads = fzero.value_and_grad(lambda p, x: plain(p, buffers, x).sin().mean())(state, x)
        return tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    result = run(fzero.Spec(step=step), params, lambda rank, step: words, world=2, steps=2)
    weight = module.weight.detach().clone()
    for _ in range(2):
        module.weight.grad = None
        module(words).sin().mean().backward()
        with torch.no_grad():
            module.weight -= 0.1 * module.weight.grad
    assert relative(result.final["weight"][:4], module.weight.detach()[:4]) <= 1e-6  # row 4 is never looked up
    assert not torch.equal(module.weight.detach(), weight)


def test_frozen_parameters_are_named_and_can_stay(caplog: pytest.LogCaptureFixture) -> None:
    module = seeded(Tied)
    module.layers[0].requires_grad_(False)
    with caplog.at_level(logging.INFO, logger="fzero"):
        params, buffers, apply = from_module(module)
    assert "Tied has 2 frozen parameters (requires_grad=False): layers.0.weight, layers.0.bias" in caplog.text
    assert "unless Spec(trainable=...) names them" in caplog.text
    assert apply.frozen == ("layers.0.weight", "layers.0.bias")
    assert apply.trainable == ("embedding.weight", "layers.1.weight", "layers.1.bias")
    spec = fzero.Spec(
        loss=tied_loss(apply, buffers), optimizer=fzero.optim.adamw(0.1), trainable=apply.trainable, zero=3
    )
    result = run(spec, params, words, world=2, steps=1)
    moved = {name for name in params if not same_bits(result.final[f"params/{name}"], params[name])}
    assert moved == set(apply.trainable)
    plain = fzero.Spec(loss=tied_loss(apply, buffers), optimizer=fzero.optim.adamw(0.1), zero=3)
    assert set(fzero.init(params, plain).runtime.spec.trainable) == set(apply.trainable), "the flags say it too"
    assert len(fzero.lower(plain, params, words(0, 0)).program.trainable) == 3
    everything = fzero.Spec(loss=tied_loss(apply, buffers), optimizer=fzero.optim.adamw(0.1), trainable="**")
    assert fzero.init(params, everything).runtime.spec.trainable == "**"


class Warming(nn.Module):
    """Its loss grows with its calls, as that of an autoencoder whose KL term is warmed up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how, self.calls, self.beside = nn.Linear(2, 1), how, 0, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.out(x).square().mean()
        if self.how == "a part's":
            self.beside.calls += 1
            return loss * min(1.0, self.beside.calls / 10)
        self.calls += 1
        return loss if self.how == "unread" else loss * min(1.0, self.calls / 10)


@pytest.mark.parametrize("how", ["its own", "a part's", "unread"])
def test_a_number_that_a_module_counts_is_refused(how: str) -> None:
    """The complaint: each step had a copy of the module whose count was 0, without a word. One that nothing reads is
    allowed."""
    params, buffers, apply = from_module(nn.Sequential(Warming(how)))
    spec = fzero.Spec(loss=lambda p, x: apply(p, buffers, x), optimizer=fzero.optim.sgd(0.1))
    state = fzero.init(params, spec, key=fzero.random.key(0))
    if how == "unread":
        fzero.step(state, torch.ones(4, 2))
        return
    with pytest.raises(CaptureError, match=r"self\.(beside\.)?calls, which Warming.forward .* from 0 to 1"):
        fzero.step(state, torch.ones(4, 2))
