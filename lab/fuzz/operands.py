"""operands: the lines of a loss drawn so far, with the value of every name, and the ways to ask for an operand.

Every line is run in eager PyTorch as it is added, so that the next one knows shapes and values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.fuzz.case import HEADER, Options

NUMEL, LARGEST = 400, 60.0
FLOATS = (torch.float32, torch.float64)


class Reject(Exception):
    """This row cannot be drawn here."""


class Draw:
    """The lines drawn so far, and the value of every name. Its methods write the fields; `draw` resets `wrote`, adds to
    `uses` and takes back a row that failed."""

    def __init__(self, rng: random.Random, options: Options) -> None:
        self.rng, self.options = rng, options
        self.names: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}  # by the text that reads it
        self.setup: list[str] = []
        self.params: list[tuple[str, str]] = []
        self.batch: list[tuple[str, str]] = []
        self.body: list[str] = []
        self.uses: set[str] = set()
        self.protected: set[int] = set()  # storages that no line may write to
        self.last = ""
        self.number = 0
        self.wrote = False  # whether the row in hand has written in place
        exec(HEADER, self.names)

    # --- operands

    def pick(self, fits: Callable[[Tensor], bool]) -> str:
        """A tensor that fits, later ones more often."""
        fitting = [name for name, value in self.values.items() if fits(value)]
        if not fitting:
            raise Reject
        position = len(fitting) - 1 - min(int(self.rng.expovariate(0.35)), len(fitting) - 1)
        self.last = fitting[position] if self.rng.random() < 0.8 else self.rng.choice(fitting)
        return self.last

    def value(self, name: str | None = None) -> Tensor:
        """The value of a name; of the last operand by default."""
        return self.values[name or self.last]

    def x(self, least: int = 0, most: int = 9, fits: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A floating tensor with so many dimensions."""
        return self.pick(lambda x: x.dtype in FLOATS and least <= x.ndim <= most and fits(x))

    def full(self, least: int = 0, most: int = 9) -> str:
        """The same with an element or more."""
        return self.x(least, most, lambda x: x.numel() > 0)

    def single(self, least: int = 0, most: int = 9) -> str:
        """The same in fp32."""
        return self.x(least, most, lambda x: x.dtype is torch.float32 and x.numel() > 0)

    def complex(self, least: int = 0) -> str:
        """A complex tensor with an element or more."""
        return self.pick(lambda x: x.is_complex() and x.ndim >= least and x.numel() > 0)

    def ints(self) -> str:
        """An int64 tensor."""
        return self.pick(lambda x: x.dtype is torch.int64)

    def mask(self, like: str) -> str:
        """A mask of this tensor's shape."""
        shape = self.value(like).shape
        masks = [n for n, v in self.values.items() if v.dtype is torch.bool and v.shape == shape]
        if masks and self.rng.random() < 0.6:
            return self.rng.choice(masks)
        return f"({like} > {self.number_text(-0.5, 0.5)})"

    def like(self, name: str) -> str:
        """A tensor of the same shape and dtype."""
        x = self.value(name)
        alike = [n for n, v in self.values.items() if v.shape == x.shape and v.dtype is x.dtype and n != name]
        return (
            self.rng.choice(alike) if alike else self.rng.choice(("{}.sin()", "({} * 0.5)", "({} + 0.3)")).format(name)
        )

    def wide(self, name: str) -> str:
        """A tensor of this dtype that broadcasts with it."""
        x = self.value(name)

        def fits(y: Tensor) -> bool:
            pairs = zip(x.shape[::-1], y.shape[::-1], strict=False)
            return y.dtype is x.dtype and all(a == b or a == 1 or b == 1 for a, b in pairs)

        others = [n for n, v in self.values.items() if fits(v) and n != name]
        return self.rng.choice(others) if others else self.like(name)

    def fitted(self, shape: Sequence[int]) -> str:
        """An fp32 tensor of this shape: one that is there, or one fitted, sometimes with other strides."""
        shape = tuple(shape)
        same_shape = [n for n, v in self.values.items() if v.dtype is torch.float32 and tuple(v.shape) == shape]
        if same_shape and self.rng.random() < 0.7:
            return self.rng.choice(same_shape)
        name = self.single()
        if len(shape) > 1 and self.rng.random() < 0.3:
            order = list(range(len(shape)))
            self.rng.shuffle(order)
            back = tuple(order.index(d) for d in range(len(shape)))
            return f"fit({name}, {tuple(shape[d] for d in order)}).permute{back}"
        return f"fit({name}, {shape})"

    def write(self, least: int = 0) -> str:
        """A floating tensor that may be written to: neither a leaf nor a view of one."""
        return self.x(least, 9, lambda x: x.untyped_storage().data_ptr() not in self.protected and x.numel() > 0)

    # --- numbers

    def dim(self, name: str | None = None) -> int:
        """A dimension of a tensor, counted from either end."""
        ndim = self.value(name).ndim
        if not ndim:
            raise Reject
        dim = self.rng.randrange(ndim)
        return dim - ndim if self.rng.random() < 0.3 else dim

    def dims(self, name: str | None = None) -> tuple[int, ...]:
        """One or more different dimensions."""
        ndim = self.value(name).ndim
        if not ndim:
            raise Reject
        return tuple(self.rng.sample(range(ndim), self.rng.randint(1, ndim)))

    def two(self, name: str | None = None) -> tuple[int, int]:
        """Two different dimensions of a tensor."""
        ndim = self.value(name).ndim
        if ndim < 2:
            raise Reject
        a, b = self.rng.sample(range(ndim), 2)
        return a, b

    def order(self, name: str | None = None) -> tuple[int, ...]:
        """The dimensions of a tensor in a random order."""
        dims = list(range(self.value(name).ndim))
        self.rng.shuffle(dims)
        return tuple(dims)

    def size(self, dim: int, name: str | None = None) -> int:
        """The size of a tensor along a dimension."""
        return self.value(name).shape[dim]

    def within(self, dim: int, name: str | None = None) -> tuple[int, int]:
        """(start, length) of a part of a dimension that is not empty."""
        size = self.size(dim, name)
        if not size:
            raise Reject
        start = self.rng.randrange(size)
        return start, self.rng.randint(1, size - start)

    def index(self, size: int) -> str:
        """A tensor of valid indices."""
        if not size:
            raise Reject
        return f"({self.ints()} % {size})"

    def shape(self, numel: int) -> tuple[int, ...]:
        """A shape of so many elements."""
        sizes: list[int] = []
        while numel > 1 and len(sizes) < 3:
            divisors = [d for d in range(1, numel + 1) if numel % d == 0]
            sizes.append(self.rng.choice(divisors))
            numel //= sizes[-1]
        return (*sizes, numel)

    def number_text(self, low: float = -1.5, high: float = 1.5) -> str:
        """A number between the bounds, as text."""
        return f"{self.rng.uniform(low, high):.2f}"

    def some(self, *choices: Any) -> Any:
        """One of the choices."""
        return self.rng.choice(choices)

    def int(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return self.rng.randint(low, high)

    def slices(self, name: str) -> str:
        """An index by slices, numbers, None and ..., as text."""
        parts: list[str] = []
        for size in self.value(name).shape[: self.rng.randint(1, max(self.value(name).ndim, 1))]:
            chance = self.rng.random()
            if chance < 0.25 and size:
                parts.append(str(self.rng.randrange(-size, size)))
            elif chance < 0.75 and size:
                start = self.rng.randrange(size)
                step = self.rng.choice(("", "", ":2", ":3"))
                stop = self.rng.choice(("", str(self.rng.randint(start + 1, size))))
                parts.append(f"{start}:{stop}{step}")
            elif chance < 0.85:
                parts.append("None")
                parts.append(":")
            else:
                parts.append(":")
        return ", ".join(parts) or "..."

    # --- lines

    def module(self, text: str) -> str:
        """A new module; its parameters are a leaf of the state of the same name."""
        name = f"m{len([line for line in self.setup if line.startswith('m')])}"
        self.run(f"{name} = used({text})")
        self.setup.append(f"{name} = used({text})")
        if self.names[name].functional.params:
            self.leaf("p", name, f"weights({name})")
        return name

    def leaf(self, of: str, name: str, text: str, *, grad: bool = False) -> None:
        """Adds a leaf of the params ("p") or of the batch ("b"), with the value of `text`."""
        self.names.setdefault("rank", 0)
        self.names.setdefault(of, {})
        value = eval(text.replace("{parts}", "1"), self.names)
        for x in value.values() if isinstance(value, dict) else [value]:
            self.protected.add(x.untyped_storage().data_ptr())
            if of == "p" and x.dtype.is_floating_point:
                x.requires_grad_()
        self.names[of][name] = value
        (self.params if of == "p" else self.batch).append((name, text))
        if isinstance(value, Tensor):
            self.values[f'{of}["{name}"]'] = value

    def constant(self, text: str) -> None:
        """Adds a constant with the value of `text`."""
        name = f"c{len([line for line in self.setup if line.startswith('c')])}"
        self.run(f"{name} = {text}")
        self.setup.append(f"{name} = {text}")
        self.values[name] = self.names[name]
        self.protected.add(self.names[name].untyped_storage().data_ptr())

    def run(self, line: str) -> None:
        """Executes a line on the names of the script."""
        exec(line, self.names)

    def add(self, text: str) -> None:
        """Adds one line: an expression, whose result gets a name, or after "!" work in place. Raises if the line is no
        good."""
        if text.startswith("!"):
            self.wrote = True
            self.run(text[1:])
            self.body.append(text[1:])
            self._refresh()
            return
        result = eval(text, self.names)
        many = isinstance(result, (tuple, list))
        results = list(result) if many else [result]
        if not results or len(results) > 5:
            raise Reject
        names = [f"v{self.number + i}" for i in range(len(results))]
        for value in results:
            self._check(value)
        self.number += len(results)
        for name, value in zip(names, results, strict=True):
            self.names[name] = self.values[name] = value
        self.last = names[0]
        self.body.append(f"{', '.join(names)}{',' if many and len(names) == 1 else ''} = {text}")

    def _check(self, value: Any) -> None:
        if not isinstance(value, Tensor) or value.numel() > NUMEL or value.ndim > 5:
            raise Reject
        if (value.dtype.is_floating_point or value.is_complex()) and value.numel():
            largest = float(value.detach().abs().max())
            if not math.isfinite(largest) or largest > LARGEST:
                raise Reject

    def _refresh(self) -> None:
        """After work in place: every value that shares its memory is looked at again."""
        for name in [n for n in self.values if n.startswith("v")]:
            self.values[name] = self.names[name]
            self._check(self.values[name])
