"""ambient_rng: random ops of a module (`F.dropout`, `torch.randn_like`, ...) drawn from a key, not from torch's state.

Inside `Keyed(key)` every draw from the ambient generator becomes one from `fold_in(fold_in(key, -1), i)`. Here i is the
number of draws before it, in the order in which the function runs. So the function's draws are a pure function of the
key. A checkpoint's recompute draws the same numbers as its forward: `torch.utils.checkpoint` saves and restores
`torch.get_rng_state()`, and while the mode is on that state is the number of draws so far.

Three kinds of draws are refused: inside a fused kernel of torch (attention with dropout on CUDA), by an op without a
rule here, and from a `torch.Generator` that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero import random
from fzero._torch_compat import RngStateMode
from fzero.capture.provenance import user_line
from fzero.errors import CaptureError
from fzero.ir import op_info
from fzero.ir.op_info import of

aten = torch.ops.aten
_AMBIENT = -1  # keeps the ambient draws apart from those that a loss makes from its own key


# what draws within a fused kernel
MATH = "Call it within torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), in the loss, or drop nothing"


class Keyed(RngStateMode):
    """While it is on, draws from torch's generator are made from `key` (int64, shape (2,)).

    `count`: the draws so far. Only this class writes it.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.count = key, 0
        self.base: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces a draw by the op's `draws`. Raises CaptureError for a draw without one, or from a given
        generator."""
        kwargs = dict(kwargs or {})
        rule = of(func).draws
        if torch.Tag.nondeterministic_seeded not in func.tags or no_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        generators = [x for x in named.values() if isinstance(x, torch.Generator)]
        if rule is None or generators:
            why = "is given a torch.Generator" if generators else "has no version that draws from a key"
            instead = "Leave generator= out" if generators else "Use fzero.random"
            remedy = MATH if "dropout_p" in named else f"{instead}, or draw it outside and pass it in the batch"
            raise CaptureError(
                f"{func} at {user_line()} {why}: the step would not be a function of its state. {remedy}"
            )
        kwargs.pop("generator", None)
        return rule(self, *args, **kwargs)

    def draw(self) -> Tensor:
        """The key of the next call site."""
        if self.base is None:
            self.base = random.fold_in(self.key, _AMBIENT)
        self.count += 1
        return random.fold_in(self.base, self.count - 1)

    def get_rng_state(self) -> Any:
        """The number of draws so far, as checkpoint's recompute sets it again."""
        return _Count(self.count)

    def set_rng_state(self, state: Any) -> None:
        """Sets the number of draws. A state of torch's generator is ignored."""
        if isinstance(state, _Count):
            self.count = state.number


class _Count:
    """Stands for the generator's state: the number of draws."""

    def __init__(self, number: int) -> None:
        self.number = number


def draws_so_far() -> int:
    """How many draws from the loss's key there were; 0 without a key."""
    state = torch.get_rng_state()
    return state.number if isinstance(state, _Count) else 0


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    positional = {a.name: x for a, x in zip(arguments, args, strict=False)}
    return {**{a.name: a.default_value for a in arguments}, **positional, **kwargs}


def no_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op that is tagged as drawing draws nothing with these arguments.

    Attention kernels carry the tag for their dropout, and draw nothing with probability 0. Some layers carry it for
    training, and draw nothing outside of it.
    """
    named = _named(func, args, kwargs)
    return bool(named.get("dropout_p", 1.0) == 0.0) or named.get("training") is False


def _uniform(mode: Keyed, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return random.uniform(mode.draw(), tuple(shape), wide)


def _normal(mode: Keyed, shape: Any, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        raise CaptureError(f"complex draws at {user_line()}: draw the two parts, as torch.complex(randn(n), randn(n))")
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return random.normal(mode.draw(), tuple(shape), wide).to(dtype)


def _native_dropout(mode: Keyed, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _uniform(mode, x.shape) >= p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(mode: Keyed, x: Tensor) -> Tensor:
    return (_uniform(mode, x.shape, x.dtype) < x).to(x.dtype)


def _bernoulli_p(mode: Keyed, x: Tensor, p: Any) -> Tensor:
    return (_uniform(mode, x.shape) < p).to(x.dtype)


def _rand(mode: Keyed, shape: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return random.uniform(mode.draw(), tuple(shape), dtype)


def _rand_like(mode: Keyed, x: Tensor, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return random.uniform(mode.draw(), tuple(x.shape), dtype or x.dtype)


def _randn(mode: Keyed, shape: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _normal(mode, shape, dtype or torch.get_default_dtype())


def _randn_like(mode: Keyed, x: Tensor, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _normal(mode, x.shape, dtype or x.dtype)


def _integers(mode: Keyed, low: int, high: int, shape: Any, dtype: torch.dtype) -> Tensor:
    drawn = random.uniform(mode.draw(), tuple(shape), torch.float64)
    return (drawn * (high - low)).floor().to(torch.int64).clamp(max=high - low - 1).add(low).to(dtype)


def _randint(mode: Keyed, high: int, shape: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _integers(mode, 0, high, shape, dtype or torch.int64)


def _randint_low(
    mode: Keyed, low: int, high: int, shape: Any, *, dtype: torch.dtype | None = None, **how: Any
) -> Tensor:
    return _integers(mode, low, high, shape, dtype or torch.int64)


def _randint_like(mode: Keyed, x: Tensor, high: int, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return _integers(mode, 0, high, x.shape, dtype or x.dtype)


def _randint_like_low(
    mode: Keyed, x: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **how: Any
) -> Tensor:
    return _integers(mode, low, high, x.shape, dtype or x.dtype)


def _randperm(mode: Keyed, n: int, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    return random.uniform(mode.draw(), (n,), torch.float64).argsort(stable=True).to(dtype or torch.int64)


def _uniform_(mode: Keyed, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(low + (high - low) * _uniform(mode, x.shape, x.dtype))


def _normal_(mode: Keyed, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(mean + std * _normal(mode, x.shape, x.dtype))


def _exponential_(mode: Keyed, x: Tensor, rate: float = 1.0) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    return x.copy_((-torch.log1p(-_uniform(mode, x.shape, x.dtype))).clamp(min=tiny) / rate)  # never 0, as torch's


def _normal_of(
    mode: Keyed, mean: Any, std: Any = 1.0, size: Any = None, *, dtype: torch.dtype | None = None, **how: Any
) -> Any:
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = tuple(size) if size is not None else torch.broadcast_shapes(*(x.shape for x in tensors))
    return mean + std * _normal(mode, shape, dtype or (tensors[0].dtype if tensors else torch.get_default_dtype()))


def _multinomial(mode: Keyed, p: Tensor, num: int, replacement: bool = False) -> Tensor:
    if replacement:
        return random.categorical(mode.draw(), p.log().unsqueeze(-2).expand(*p.shape[:-1], num, p.shape[-1]))
    rates = _exponential_(mode, torch.empty_like(p))  # the order of arrival of events of these rates
    return (p / rates).topk(num, dim=-1).indices


_DRAWS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli_.float: lambda mode, x, p=0.5: x.copy_(_bernoulli_p(mode, x, p)),
    aten.bernoulli_.Tensor: lambda mode, x, p: x.copy_(_bernoulli_p(mode, x, p)),
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.rand_like.default: _rand_like,
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.randn_like.default: _randn_like,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.normal.float_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.multinomial.default: _multinomial,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.exponential_.default: _exponential_,
}
op_info.fill("draws", _DRAWS)
