"""What torch's settings around a call do to a step: nothing, a new program, or a refusal."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, same_bits, values
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import optim
from fzero._torch_compat import FakeTensorMode, by_onednn, compute, product_precision
from fzero.capture import ambient

F = torch.nn.functional
W = {"w": torch.linspace(-1, 1, 64).view(8, 8), "v": torch.linspace(0.1, 1, 8)}
X = torch.linspace(-2, 2, 32).view(4, 8)


def loss(p: Any, b: Tensor) -> Tensor:
    return ((F.linear(b, p["w"]) * p["v"]) ** 2).mean()


def spec(fn: Callable[..., Any] = loss, **options: Any) -> fzero.Spec:
    given = {"loss": fn, "optimizer": optim.adamw(0.1), "clip_norm": 1.0, "microbatches": 2, **options}
    return fzero.Spec(**given)


def everything(fn: Callable[..., Any] = loss, **options: Any) -> list[Any]:
    """What each call of fzero gives: tensors, and a program's digest."""
    state = fzero.init(W, spec(fn, **options))
    for _ in range(2):
        state = fzero.step(state, X)
    found = fzero.evaluate(state, X, fn)
    digest = fzero.lower(spec(fn, **options), W, X, world_size=2).program.digest
    value, grads = fzero.value_and_grad(fn)(W, X)
    forward = fzero.functional.forward(fn)(W, X)
    leaves = fzero.tree.flatten([fzero.unshard(state.tree), state.metrics, found, value, grads, forward])[1]
    return [*leaves, digest]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


@contextmanager
def setting(change: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(back)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.float32)


def default_device(device: str) -> AbstractContextManager[None]:
    return setting(torch.set_default_device, device, None)


# --- no effect --------------------------------------------------------------------------------------------------------

NO_EFFECT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of another device": lambda: torch.autocast("xpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "grad off": lambda: setting(torch.set_grad_enabled, False, True),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return everything()


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.sampled(2)
def test_around_every_call_it_has_no_effect(name: str, plain: list[Any]) -> None:
    with NO_EFFECT[name]():
        found = everything()
        if name == "inference mode":  # whose own tensors are no worse
            held = {name: x.clone() for name, x in W.items()}
            assert all(x.is_inference() for x in held.values())
            _, grads = fzero.value_and_grad(loss)(held, X.clone())
            assert equal([grads["v"], grads["w"]], plain[-4:-2])
    assert equal(found, plain)


@pytest.mark.parametrize("entered_for", ["the first step", "a later step"])
def test_a_program_is_neither_traced_nor_run_in_an_autocast(entered_for: str) -> None:
    contexts: list[Any] = [nullcontext(), torch.autocast("cpu", torch.bfloat16)]
    states = [fzero.init(W, spec()) for _ in range(2)]
    for context in contexts if entered_for == "a later step" else contexts[::-1]:
        with context:
            states[0] = fzero.step(states[0], X)
        states[1] = fzero.step(states[1], X)
    assert equal([states[0].params["w"].full()], [states[1].params["w"].full()])
    assert len(states[0].runtime.programs) == 1


def test_an_autocast_around_is_told_once_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    ambient._say.cache_clear()
    caplog.set_level(logging.WARNING, logger="fzero")
    with torch.autocast("cpu", torch.bfloat16):
        everything()
        assert torch.is_autocast_enabled("cpu")
        assert F.linear(X, W["w"]).dtype == torch.bfloat16
    said = [record.getMessage() for record in caplog.records if "autocast" in record.getMessage()]
    assert len(said) == 1
    assert "torch.autocast (cpu, torch.bfloat16) is on around a call of fzero, where it has no effect" in said[0]
    assert "fzero.Precision(compute=...)" in said[0]
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_compiled_segments_too(whole: bool) -> None:
    ends = []
    contexts = [nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")]
    for context in contexts if whole else contexts[:2]:
        with context:
            state = fzero.step(fzero.init(W, spec(compile="inductor")), X)
        ends.append([state.params["w"].full(), state.metrics["loss"]])
    assert all(equal(ends[0], end) for end in ends[1:])


# --- what a loss enters works as it is written ------------------------------------------------------------------------


def inside(p: Any, b: Tensor) -> Tensor:
    """With casts of a weight first without gradients, then with: torch's cache would lose the second."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        target = F.linear(b, p["w"])
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(b, p["w"])
        with torch.autocast("cpu", enabled=False):
            wide = F.linear(b, p["w"]) * p["v"]
    assert (target.dtype, out.dtype, wide.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    return ((out - 0.5 * target).float() + wide).square().mean()


@pytest.mark.parametrize("around", [nullcontext(), torch.autocast("cpu", torch.bfloat16)], ids=["alone", "in another"])
def test_an_autocast_of_the_loss_is_eager_pytorchs(around: Any) -> None:
    leaves = {name: x.clone().requires_grad_() for name, x in W.items()}
    inside(leaves, X).backward()
    with around:
        value, grads = fzero.value_and_grad(inside)(W, X)
        state = fzero.init(W, spec(inside, optimizer=optim.sgd(1.0), clip_norm=None, microbatches=1))
        state = fzero.step(state, X)
    assert float(state.metrics["loss"]) == float(value)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert same_bits(grads[name], leaf.grad)
        assert torch.allclose(W[name] - state.params[name].full(), leaf.grad, rtol=1e-4, atol=1e-5)
    assert fzero.evaluate(state, X, lambda p, b: F.linear(b, p["v"][None])).dtype == torch.float32


def test_a_step_of_ones_own_may_enter_one_around_value_and_grad() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            value, grads = fzero.value_and_grad(loss)(state, batch)
        return fzero.tree.map(lambda p, g: p - g, state, grads), {"loss": value}

    leaves = {name: x.clone().requires_grad_() for name, x in W.items()}
    with torch.autocast("cpu", torch.bfloat16):
        loss(leaves, X).backward()
    state = fzero.step(fzero.init(W, fzero.Spec(step=step)), X)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.allclose(W[name] - state.tree[name].full(), leaf.grad, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(fzero.grad(loss)(W, X)[name], leaf.grad, rtol=1e-4, atol=1e-5), "a test of nothing"


# --- what the loss sees, and a new program ----------------------------------------------------------------------------


def makes(p: Any, b: Tensor) -> Tensor:
    return (F.linear(b, p["w"]) * p["v"]).square().mean().to(torch.zeros(()).dtype)


def attends(p: Any, b: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(b[None], F.linear(b, p["w"])[None], (b * p["v"])[None]).square().mean()


def bare_autocast(p: Any, b: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return F.linear(b * p["v"], p["w"]).square().mean().float()


NEW_PROGRAM: dict[str, tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]], str]] = {
    "default dtype": (makes, lambda: default_dtype(torch.float64), "default dtype torch.float32 became default dtype"),
    "deterministic": (
        loss,
        NO_EFFECT["deterministic"],
        "deterministic algorithms off became deterministic algorithms on",
    ),
    "attention": (
        attends,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        "became attention by math",
    ),
    "autocast's dtype": (
        bare_autocast,
        lambda: setting(lambda d: torch.set_autocast_dtype("cpu", d), torch.float16, torch.bfloat16),
        "autocast's own dtype torch.bfloat16 became autocast's own dtype torch.float16",
    ),
}


@pytest.mark.parametrize("name", NEW_PROGRAM)
def test_what_a_loss_depends_on_traces_a_new_program(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each program is right where it is used, whichever came first."""
    fn, context, message = NEW_PROGRAM[name]
    caplog.set_level(logging.WARNING, logger="fzero")
    state = fzero.init(W, spec(fn, optimizer=optim.sgd(0.0), microbatches=1, clip_norm=None))
    for around in (nullcontext, context, nullcontext, context):
        with around():
            state = fzero.step(state, X)
            wanted = fn(W, X)
        assert state.metrics["loss"].dtype == wanted.dtype
        assert torch.allclose(state.metrics["loss"], wanted, rtol=1e-6)
    assert len(state.runtime.programs) == 2
    assert message in "\n".join(record.getMessage() for record in caplog.records)


def test_the_users_functions_see_the_callers_default_device() -> None:
    seen = []

    def looking(p: Any, b: Tensor) -> Tensor:
        seen.append(torch.empty(2).device.type)
        return loss(p, b)

    with torch.device("meta"):
        state = fzero.init(W, spec(looking))
        state = fzero.step(state, X)
    fzero.step(state, X)
    assert seen == ["meta", "cpu"]
    assert len(state.runtime.programs) == 2


def ranks_with_default_devices() -> list[float]:
    """Each rank has another, as with `torch.set_default_device(f"cuda:{local_rank}")`."""
    torch.set_default_device(
        ["meta", "cpu"][torch.distributed.get_rank()] if torch.distributed.is_initialized() else "cpu"
    )
    try:
        state = fzero.init(W, spec(zero=3))
        for _ in range(2):
            state = fzero.step(state, X)
        return [float(state.metrics["loss"]), float(fzero.unshard(state.params)["w"].sum())]
    finally:
        torch.set_default_device(None)


def test_ranks_may_have_different_default_devices() -> None:
    found = values(gloo(2, ranks_with_default_devices))
    assert found[0] == found[1]


# --- refused ----------------------------------------------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


REFUSED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "functions": (Doubling, "Doubling is active around a call that traces a program"),
    "dispatch": (Watching, "Watching is active around a call that traces"),
    "fake": (FakeTensorMode, "FakeTensorMode is active around a call that traces"),
    "hooks": (torch.autograd.graph.save_on_cpu, "hooks on saved tensors .* are active"),
    "anomalies": (
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        r"Switch it off around fzero.(step|lower) \(torch.autograd.set_detect_anomaly\(False\)\)",
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_would_keep_is_refused_where_it_is_traced(name: str) -> None:
    context, message = REFUSED[name]
    state = fzero.init(W, spec())
    calls: list[Callable[[], Any]] = [lambda: fzero.step(state, X), lambda: fzero.lower(spec(), W, X)]
    if name != "anomalies":
        calls += [lambda: fzero.init(W, spec()), lambda: fzero.evaluate(state, X, loss)]
    for call in calls:
        with context(), pytest.raises(fzero.CaptureError, match=message):
            call()
    assert fzero.step(state, X).step == 1, "nothing was lost"


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_is_refused_at_a_later_step_too() -> None:
    state = fzero.step(fzero.init(W, spec()), X)
    with torch.autograd.detect_anomaly(), pytest.raises(fzero.CaptureError, match="Switch it off around fzero"):
        fzero.step(state, X)
    assert fzero.step(state, X).step == 2


def test_a_mode_may_watch_a_program_that_runs() -> None:
    """It sees what it would see of any code, and the program is the one without it."""
    states = [fzero.step(fzero.init(W, spec()), X) for _ in range(2)]
    with Watching():
        states[0] = fzero.step(states[0], X)
    assert equal([states[0].params["w"].full()], [fzero.step(states[1], X).params["w"].full()])


AROUND: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda fn: torch.vmap(lambda x: fn(X))(torch.ones(2)),
    "grad": lambda fn: torch.func.grad(lambda x: fn(x).sum())(X),
    "functionalize": lambda fn: torch.func.functionalize(fn)(X),
    "make_fx": lambda fn: make_fx(fn)(X),
}


def test_no_call_of_fzero_may_be_inside_a_loss(tmp_path: Path) -> None:
    """It told of a mode of fzero's own; what `.full()` said depended on the number of ranks."""
    held = fzero.step(fzero.init(W, spec()), X)
    calls: dict[str, Callable[[], Any]] = {
        "fzero.step": lambda: fzero.step(held, X),
        "fzero.evaluate": lambda: fzero.evaluate(held, X, loss),
        "fzero.init": lambda: fzero.init(W, spec()),
        "fzero.lower": lambda: fzero.lower(spec(), W, X),
        "fzero.save": lambda: fzero.save(held, tmp_path),
        "fzero.load": lambda: fzero.load(tmp_path, like=held),
        "fzero.unshard or .full()": lambda: held.params["w"].full(),
    }
    fzero.save(held, tmp_path)
    for name, call in calls.items():
        inside = spec(lambda p, b, call=call: (call(), loss(p, b))[1])
        with pytest.raises(fzero.CaptureError, match=re.escape(f"{name} is called inside a loss or a step")):
            fzero.step(fzero.init(W, inside), X)


@pytest.mark.parametrize("name", AROUND)
def test_no_transform_or_tracer_may_be_around_a_call(name: str) -> None:
    state = fzero.step(fzero.init(W, spec()), X)
    calls: list[Callable[[Any], Any]] = [
        lambda x: fzero.step(state, x).metrics["loss"],
        lambda x: fzero.evaluate(state, x, loss),
        lambda x: fzero.init(W, spec()).params["w"].full(),
        lambda x: fzero.lower(spec(), W, x),
    ]
    for call in calls:
        with pytest.raises(fzero.CaptureError, match=r"fzero\.\w+ was called (inside a torch.func|while make_fx)"):
            AROUND[name](call)
    assert fzero.step(state, X).step == 2


# --- threads ----------------------------------------------------------------------------------------------------------


def trained(number: int) -> list[Any]:
    def deep(p: Any, b: Tensor) -> Tensor:
        for _ in range(2 + number):
            b = torch.tanh(b @ p["w"]) * p["v"]
        return (b**2).mean()

    state = fzero.init(W, spec(deep, precision="bf16" if number % 2 else "fp32", zero=3))
    for _ in range(3):
        state = fzero.step(state, X)
    return [
        *fzero.tree.flatten(fzero.unshard(state.tree))[1],
        fzero.lower(spec(deep), W, X, world_size=2).program.digest,
    ]


@pytest.mark.parametrize(("count", "rounds"), [(2, 1), pytest.param(4, 4, marks=pytest.mark.acceptance)])
def test_threads_may_trace_and_step_at_one_time(count: int, rounds: int) -> None:
    wanted = [trained(number) for number in range(count)]
    found: dict[int, Any] = {}
    start = threading.Barrier(count)

    def work(number: int) -> None:
        start.wait()
        try:
            found[number] = trained(number)
        except BaseException as error:
            found[number] = error

    for _ in range(rounds):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(count):
            assert isinstance(found[number], list), found[number]
            assert equal(found[number], wanted[number])


def test_a_setting_of_the_process_comes_back_though_calls_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products by oneDNN, the second begun before the first has ended and ended after it."""
    before = product_precision()
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def slow() -> None:
        inside.set()
        go_on.wait(10)

    def fast() -> None:
        go_on.set()
        first.join(10)
        seen.append(product_precision())

    monkeypatch.setattr(compute, "_KEEPS_FP32", True)
    first = threading.Thread(target=by_onednn(slow))
    first.start()
    assert inside.wait(10)
    by_onednn(fast)()
    assert seen == [before], "what the user set, though a product is at work"
    assert product_precision() == before
