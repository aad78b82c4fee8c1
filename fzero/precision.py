"""precision: the dtypes that are held, computed in, and sent; and the loss scale of fp16.

A policy is data. `value_and_grad` reads it where it makes a region. Parameters are cast inside the region, so the
gather moves the narrow copy (`passes/cast_before_gather`) and the gradient arrives at the held leaf. The copy stays
between steps where the optimizer's kernel writes it (`passes/keep_copies`). Nothing else is held beyond a line of this
table:

| precision       | held            | gathered, computed | gradients reduced | summed over microbatches | moments |
|-----------------|-----------------|--------------------|-------------------|--------------------------|---------|
| "fp32"          | as given        | as given           | as held, >= fp32  | as reduced               | as held |
| "bf16"          | as given (fp32) | bf16               | fp32              | fp32                     | fp32    |
| "fp16"          | as given (fp32) | fp16, loss scaled  | fp32              | fp32                     | fp32    |
| "bf16_params"   | bf16            | bf16               | fp32              | fp32                     | fp32    |
| "autocast"      | as given (fp32) | by op             | fp32              | fp32                     | fp32    |
| "autocast_fp16" | as given (fp32) | by op, scaled     | fp32              | fp32                     | fp32    |

By op: the loss is captured under `torch.autocast`, so its casts are ops of the program, by torch's own lists of the
device. A bucket of matrices whose every use begins with the cast is gathered narrow, as under "bf16".

Gradients may be sent in 16 bits instead (`reduce="bf16"`). They are summed over microbatches in fp32 all the same.

Parameters may be gathered, and gradients reduced, in blocks of 64 with a scale each (`fzero.kernels.codecs`): `gather=`
is one more format in which leaves are computed, at every ZeRO stage; `reduce=` is what travels alone, for ranks add in
fp32 what they decode.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError
from fzero.field_checks import choice, needs, path_rules
from fzero.kernels.codecs import CODECS, EXACT, Coding

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
AUTOCAST = {"autocast": torch.bfloat16, "autocast_fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)
_CODECS = tuple(name for name, codec in CODECS.items() if not codec.feedback)
_TABLE = re.compile(r"emb|tok|pos|vocab|\b(wte|wpe|shared)\b")  # a part of the name of an embedding
_MOST = 2.0**127  # of a loss scale: fp32 holds it


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale that follows overflows, as pure functions over a small state of 0-d tensors.

    The scale starts at `initial`. An overflow uses up one of `hysteresis`; at the last one it halves the scale, never
    below `minimum`, and at `minimum` it ends the run: `fzero.step` raises NonFiniteError. A first step without an
    overflow and `window` more in a row double the scale and give the hysteresis back; so does every `window` after
    that. With `consecutive_hysteresis` every step without one gives it back. These are DeepSpeed's rules and defaults.
    With `counts_first` the first step counts too, as in torch.amp.GradScaler, whose rule is `LossScale.of_torch()`.
    With `dynamic=False` the scale does not change.

    >>> scaler = LossScale(hysteresis=1)
    >>> held = scaler.update(scaler.init(), torch.tensor(False))  # an overflow
    >>> float(held["scale"]), int(held["skipped"])
    (32768.0, 1)
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    dynamic: bool = True
    consecutive_hysteresis: bool = False
    counts_first: bool = False

    @classmethod
    def of_torch(cls, initial: float = 2.0**16, window: int = 2000) -> LossScale:
        """The rule of `torch.amp.GradScaler(init_scale=initial, growth_interval=window)`. One that falls to 2**-64 ends
        the run, where torch's goes on to zero."""
        return cls(initial=initial, window=window, hysteresis=1, minimum=2.0**-64, counts_first=True)

    def __post_init__(self) -> None:
        for name in ("initial", "minimum"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise SpecError(f"LossScale({name}={value!r}): needed a finite number > 0")
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SpecError(f"LossScale({name}={value!r}): needed a positive int")
        for name in ("dynamic", "consecutive_hysteresis", "counts_first"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"LossScale({name}={getattr(self, name)!r}): needed True or False")

    def init(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """`scale` (fp32), and counts (int64): `clean` steps in a row, `hysteresis` left (0 after an overflow at the
        least scale), steps `skipped` in all."""
        counts = {"clean": 0, "hysteresis": self.hysteresis, "skipped": 0}
        held = {name: torch.full((), n, dtype=torch.int64, device=device) for name, n in counts.items()}
        return {"scale": torch.full((), float(self.initial), dtype=torch.float32, device=device), **held}

    def update(self, held: Mapping[str, Tensor], finite: Tensor) -> dict[str, Tensor]:
        """The state after a step whose gradients were `finite` (a 0-d bool, the same on every rank)."""
        scale, clean, left = held["scale"], held["clean"] + 1, held["hysteresis"]
        counts = {"clean": torch.where(finite, clean, 0), "skipped": held["skipped"] + (~finite).to(torch.int64)}
        if not self.dynamic:
            return {"scale": scale, "hysteresis": left, **counts}
        counted = clean if self.counts_first else clean - 1
        grown = (counted > 0) & (counted % self.window == 0)
        last = left <= 1
        after_clean = torch.where(grown, (scale * 2).clamp(max=_MOST), scale)
        after_overflow = torch.where(last, (scale / 2).clamp(min=self.minimum), scale)
        given_back = torch.where(grown | self.consecutive_hysteresis, self.hysteresis, left.clamp(min=1))
        used_up = torch.where(last, (scale != self.minimum).to(torch.int64), left - 1)
        return {
            "scale": torch.where(finite, after_clean, after_overflow),
            "hysteresis": torch.where(finite, given_back, used_up),
            **counts,
        }


def _dtype(where: str, value: Any, close: str, *, none: bool, others: Collection[str] = ()) -> None:
    names = (*DTYPES, *others)
    if not (isinstance(value, str) and value in names) and not (value is None and none):
        short = {dtype: name for name, dtype in DTYPES.items()}
        hint = tree.suggest(value, names) if isinstance(value, str) else ""
        hint = f" Write {short[value]!r}" if isinstance(value, torch.dtype) and value in short else hint
        known = f"{', '.join(names)}{' or None' if none else ''}"
        raise SpecError(f"{where}{value!r}{close}: needed one of {known}.{hint}")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A policy. Each dtype is "fp32", "bf16", "fp16", "fp64" or None (as given).

    params: the dtype that the state holds. With "bf16" the update is made in fp32 and rounded stochastically.
    compute: the dtype inside the loss, to which parameters and floating leaves of its other arguments are cast; or
        "autocast" ("autocast_fp16"): nothing is cast but by op, as in torch.autocast to bf16 (fp16).
    reduce: the dtype in which gradients are sent. None: the held one, and at least fp32. Or a codec, of "int8", "int4",
        "e4m3" and "e5m2": each rank sends messages, and the sums are in fp32. "sign" too: what signs lose is kept on
        each rank, 4 bytes an element, and sent with the next gradients. Only an optimizer that is linear in gradients
        may have these, as `optim.freeze_nu` after its warm-up, or `optim.sgd`.
    gather: a codec for parameters: the loss is computed on what they are once they were encoded and decoded, and their
        messages are gathered. Gradients pass it straight through.
    sums: a codec for sums of activations over axes that cut dims, as those of tensor parallelism: each rank sends
        messages, and they are added in fp32. Coded is each sum of a value of two or more dims, whose last has 64
        elements or more, in the forward and the backward; `exact` says nothing of them.
    exact: path rules of leaves that no codec touches, instead of the default: leaves of one dim, those of `keep`, and
        embeddings, which are known by their names: those that contain "emb", "tok", "pos" or "vocab", or are "wte",
        "wpe" or "shared". (): codecs touch every leaf but scalars.
    keep: path rules to dtypes: leaves that are computed in another dtype, as {"**/norm*/**": "fp32"}. First match wins.
    loss_scale: for fp16, in the `loss=` form.
    cast_batch: False leaves the loss's other arguments as they are.

    >>> Precision(compute="bf16", keep={"**/norm/**": "fp32"}).compute_dtype("blocks/0/norm/w", torch.float32)
    torch.float32
    """

    params: str | None = None
    compute: str | None = None
    reduce: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict)
    loss_scale: LossScale | None = None
    cast_batch: bool = True
    gather: str | None = None
    sums: str | None = None
    exact: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for a field that cannot be used."""
        for name in ("params", "compute", "reduce"):
            others = AUTOCAST if name == "compute" else CODECS if name == "reduce" else ()
            _dtype(f"Precision({name}=", getattr(self, name), ")", none=True, others=others)
        if self.params == "fp16":
            raise SpecError(
                "Precision(params='fp16'): parameters without a master are rounded stochastically, to bf16 only. Hold "
                "params='bf16', or fp32 ones with compute='fp16'"
            )
        if not isinstance(self.keep, Mapping):
            raise SpecError(f"Precision(keep={self.keep!r}): needed path rules to dtypes, as {{'**/norm/**': 'fp32'}}")
        for rule, value in self.keep.items():
            _dtype(f"Precision(keep={{{rule!r}: ", value, "})", none=False)
        if self.keep and self.autocast:
            raise SpecError(
                f"Precision(compute={self.compute!r}, keep={dict(self.keep)!r}): autocast casts by op, so a rule by "
                "leaf keeps nothing. Take keep out; in the loss, torch.autocast(device, enabled=False) around some "
                f"ops keeps them wide. Or cast by leaf: compute={'bf16' if self.compute == 'autocast' else 'fp16'!r}"
            )
        if self.gather is not None and self.gather not in _CODECS:
            raise SpecError(
                f"Precision(gather={self.gather!r}): needed one of {', '.join(_CODECS)} or None. A dtype in which "
                "parameters are gathered is compute="
            )
        if self.sums is not None and self.sums not in _CODECS:
            raise SpecError(f"Precision(sums={self.sums!r}): needed one of {', '.join(_CODECS)} or None")
        if self.exact is not None:
            if self.exact not in ((), []):
                path_rules("exact", self.exact, "**/norm*/**", "Precision")
            if self.gather is None and self.reduce not in CODECS:
                raise SpecError(
                    f"Precision(exact={self.exact!r}): no codec is given that would touch a leaf: give gather= or "
                    f"reduce= one of {', '.join(CODECS)}"
                )
        if self.feeds_back and self.loss_scale is not None:
            raise SpecError(
                f"Precision(reduce={self.reduce!r}, loss_scale=...): what codes lose of one step is sent with the "
                "next, in the units of a loss scale that changes. Use compute='bf16', which needs none"
            )
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise SpecError(f"Precision(loss_scale={self.loss_scale!r}): needed an fzero.LossScale")

    def held_dtype(self, path: str, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the state holds a leaf of this dtype. A leaf that is computed in a wider dtype is
        also held in it."""
        if not (self.params and dtype.is_floating_point):
            return dtype
        computed = self.compute_dtype(path, dtype) if self._rule(path) else DTYPES[self.params]
        return computed if computed.itemsize > DTYPES[self.params].itemsize else DTYPES[self.params]

    def compute_dtype(self, path: str, held: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a leaf is computed. Rules are matched against its path within the parameters."""
        if not held.is_floating_point:
            return held
        name = self._rule(path) or self.compute
        return DTYPES[name] if name and not self.autocast else held

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to which ops are cast, by torch's lists; None where leaves are cast."""
        return AUTOCAST.get(self.compute or "")

    def gathered_dtype(self, path: str, leaf: Tensor) -> torch.dtype:
        """Returns the narrowest dtype in which a leaf may be gathered. Leaves of one bucket have the same.

        Under autocast that of matrices is the narrow one, for products read them. Leaves of one dim (norms) stay wide.
        """
        if self.autocast and leaf.dtype is torch.float32:
            return self.autocast if leaf.ndim > 1 else leaf.dtype
        return self.compute_dtype(path, leaf.dtype)

    def coding(self, path: str, leaf: Tensor) -> Coding:
        """Returns the codecs in which a leaf is gathered and its gradient is reduced, by its path within the parameters
        and a part of it. Raises SpecError for a leaf that codecs would spoil.

        >>> Precision(gather="int8", reduce="int4").coding("blocks/0/w", torch.zeros(8, 8))
        Coding(gather='int8', reduce='int4')
        >>> Precision(gather="int8", reduce="int4").coding("wte", torch.zeros(8, 8))
        Coding(gather=None, reduce=None)
        """
        reduce = self.reduce if self.reduce in CODECS else None
        if (self.gather is None and reduce is None) or not leaf.dtype.is_floating_point or self._exact(path, leaf):
            return EXACT
        if leaf.dtype is torch.float64:
            asked = f"gather={self.gather!r}" if self.gather else f"reduce={reduce!r}"
            raise SpecError(
                f"Precision({asked}): {path} is float64, and codecs scale in float32. Hold it in float32, or name it "
                f"in exact=, as exact=({path!r},)"
            )
        return Coding(self.gather, reduce)

    @property
    def feeds_back(self) -> bool:
        """Whether what the codes of gradients lose is a part of the state."""
        return self.reduce in CODECS and CODECS[self.reduce].feedback

    def _exact(self, path: str, leaf: Tensor) -> bool:
        if not leaf.numel():
            return True
        if self.exact is None:
            return leaf.ndim < 2 or self._rule(path) is not None or _TABLE.search(path.lower()) is not None
        return leaf.ndim == 0 or any(tree.matches(rule, path) for rule in self.exact_rules)

    @property
    def exact_rules(self) -> tuple[str, ...]:
        """The path rules of `exact`; none where the default holds."""
        return (self.exact,) if isinstance(self.exact, str) else tuple(self.exact or ())

    def _rule(self, path: str) -> str | None:
        return next((name for rule, name in self.keep.items() if tree.matches(rule, path)), None)

    def wire_dtype(self, held: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the gradient of a leaf is sent."""
        return DTYPES.get(self.reduce or "", torch.float32 if held in LOW else held)

    def sum_dtype(self, held: torch.dtype) -> torch.dtype:
        """Returns the dtype in which its gradients are summed over microbatches."""
        wire = self.wire_dtype(held)
        return torch.float32 if wire in LOW else wire


PRESETS = {
    "fp32": Precision(),
    "bf16": Precision(compute="bf16", reduce="fp32"),
    "fp16": Precision(compute="fp16", reduce="fp32", loss_scale=LossScale()),
    "bf16_params": Precision(params="bf16", compute="bf16", reduce="fp32"),
    "autocast": Precision(compute="autocast", reduce="fp32"),
    "autocast_fp16": Precision(compute="autocast_fp16", reduce="fp32", loss_scale=LossScale()),
}


def policy(value: Any) -> Precision:
    """The `Precision` that a name stands for.

    >>> policy("bf17")
    Traceback (most recent call last):
    fzero.errors.SpecError: precision='bf17': needed one of fp32, bf16, fp16, bf16_params, autocast, autocast_fp16, or \
a Precision. Did you mean 'bf16'?
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    hint = tree.suggest(value, PRESETS) if isinstance(value, str) else ""
    raise SpecError(f"precision={value!r}: needed one of {', '.join(PRESETS)}, or a Precision.{hint}")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Which parameters train, in which dtypes, and what bounds their gradients; the fields are those of `fzero.Spec`.

    Raises SpecError for a field that cannot be used.
    """

    precision: str | Precision = "fp32"
    trainable: str | Sequence[str] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str | None = None

    def __post_init__(self) -> None:
        if self.trainable is not None:
            path_rules("trainable", self.trainable, "**/lora/**")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            needs(value is None or (type(value) in (int, float) and value > 0), name, value, "a number > 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise SpecError("Spec(clip_norm=, clip_value=): give one of them, or chain both in the optimizer")
        choice("nonfinite", self.nonfinite, (None, "ignore", "skip", "raise"))
        if self.policy.loss_scale is not None and self.nonfinite in ("ignore", "raise"):
            raise SpecError(
                f"Spec(nonfinite={self.nonfinite!r}) with a loss scale, which finds its size by steps that overflow "
                "and are skipped: leave nonfinite out"
            )

    @property
    def policy(self) -> Precision:
        """The policy of `precision`."""
        return policy(self.precision)

    @property
    def nonfinite_policy(self) -> str:
        """`nonfinite` with its default filled in."""
        return self.nonfinite or ("ignore" if self.policy.loss_scale is None else "skip")

    @property
    def trainable_rules(self) -> tuple[str, ...] | None:
        """`trainable` as a tuple of path rules; None if it was not given."""
        if self.trainable is None:
            return None
        return (self.trainable,) if isinstance(self.trainable, str) else tuple(self.trainable)
