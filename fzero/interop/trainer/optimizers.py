"""optimizers: an optimizer of torch and its schedule, as a transformation of fzero.optim.

The rate of every update is known before the run: the schedule is run ahead once, into a table of float64, and put back.
So every schedule that depends on the count alone is exact, whoever wrote it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fzero import optim
from fzero.errors import ConfigError
from fzero.interop.trainer.hf_adafactor import adafactor
from fzero.optim import GradientTransformation, Schedule

Values = Mapping[str, Any]
CYCLED = ("betas", "momentum")  # what schedules of cycles change beside the rate


class Handle(torch.optim.Optimizer):
    """What a loop holds in the place of an optimizer: groups whose rates its schedule sets. It updates nothing.

    `step_was_skipped` is Accelerate's name: whether the last step left the parameters as they were.
    """

    def __init__(self, groups: Sequence[Values]) -> None:
        """groups: the hyperparameters of each, without parameters."""
        held = [{**group, "params": [torch.nn.Parameter(torch.zeros(()))]} for group in groups]
        super().__init__(held, {})
        self.step_was_skipped = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the update is in fzero's step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there are no gradients outside of fzero's step."""


def empty(optimizer: torch.optim.Optimizer) -> None:
    """Leaves an optimizer its groups and their rates, and nothing to update: so it holds no parameter alive."""
    for group in optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(torch.zeros(()))] if group["params"] else []
    optimizer.step_was_skipped = False  # type: ignore[attr-defined]  # Accelerate's name


@dataclass(frozen=True)
class Chosen:
    """An optimizer as data: its kind, its hyperparameters, and what differs by parameter. Immutable.

    lr, values: of the first group. decay: the weight decay of each parameter by name; factors: its rate as a multiple
    of `lr`. refusals: (field, why, fix) of what fzero.optim has no counterpart for.
    """

    kind: str
    lr: float
    values: Values
    decay: Mapping[str, float]
    factors: Mapping[str, float] = field(default_factory=dict)
    refusals: tuple[tuple[str, str, str], ...] = ()

    def scheduled(self, course: Mapping[str, Tensor]) -> GradientTransformation:
        """The transformation whose rate is a table, as `course` gives it, and so its momentum or beta1 if it is there.
        Raises ConfigError for a kind whose betas are numbers."""
        cycled: dict[str, Any] = {name: tabled(table) for name, table in course.items() if name != "lr"}
        if cycled and self.kind not in CYCLES:
            _refuse(f"it cycles the {' and '.join(cycled)} of {self.kind}: give cycle_momentum=False")
        if "betas" in cycled:
            cycled["betas"] = (cycled["betas"], self.values["betas"][1])
        return replace(self, values={**self.values, **cycled}).transformation(tabled(course["lr"]))

    def transformation(self, rate: Schedule) -> GradientTransformation:
        """The transformation whose rate is a schedule."""
        made = _MAKE[self.kind](rate, self)
        factors = {name: factor for name, factor in self.factors.items() if factor != 1.0}
        return optim.chain(made, optim.scale_by_path(factors)) if factors else made


def chosen(optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: Iterable[str] = ()) -> Chosen:
    """An optimizer of torch as data. names: those of the parameters by their identity. trained: those that require
    grad; what is in no group has the rate 0, but counts in the norm of all gradients."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    owner = type(optimizer).__module__.split(".")[0]
    kind = f"{owner}.{kind}" if f"{owner}.{kind}" in _MAKE else kind
    refusals = []
    if any(group["lr"] is None for group in groups):
        fix = "give transformers.optimization.AdafactorSchedule(optimizer) as optimizers[1], or a rate"
        return Chosen(kind, 0.0, {}, {}, {}, (("optimizer.lr", "it is None, and no schedule says the rate", fix),))
    first = groups[_leading(groups)]
    values = {name: value for name, value in first.items() if name not in ("params", "lr", "initial_lr")}
    lr = group_rate(first)
    if kind not in _MAKE or owner not in ("torch", "fzero", kind.split(".")[0]):
        why = f"fzero has no counterpart of {type(optimizer).__module__}.{kind}"
        refusals.append(("optimizer", why, f"take one of torch.optim's {', '.join(TORCH)}"))
    for option in ("amsgrad", "maximize", "dampening", "beta1"):
        if values.get(option):
            refusals.append((f"optimizer.{option}", "fzero.optim has no such option", "leave it out"))
    if values.pop("decoupled_weight_decay", False) and kind == "Adam":
        kind = "AdamW"
    if any(float(own.get("step", 0)) or own.get("momentum_buffer") is not None for own in optimizer.state.values()):
        fix = "give a new one, or resume from a checkpoint of this Trainer"
        refusals.append(("optimizer", "it has made steps already, and its moments would be lost", fix))
    decay, factors = dict.fromkeys(trained, 0.0), dict.fromkeys(trained, 0.0)
    for group in groups:
        beside = {n: v for n, v in group.items() if n not in ("params", "lr", "initial_lr", "weight_decay")}
        if any(beside[name] != values[name] for name in beside.keys() & values.keys()):
            differing = sorted(name for name in beside if beside[name] != values.get(name))
            refusals.append((f"optimizer.{differing[0]}", "it differs between groups", "give all groups one value"))
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            decay[name] = float(group.get("weight_decay", 0.0))
            factors[name] = group_rate(group) / lr if lr else 1.0
    if kind == "Adafactor" and len(set(decay.values())) > 1:
        fix = "give all groups one, or take transformers.Adafactor"
        refusals.append(("optimizer.weight_decay", "torch.optim.Adafactor has one decay for all leaves here", fix))
    if len({value for value in decay.values() if value}) > 1:
        refusals.append(("optimizer.weight_decay", "groups have several decays above 0", "give them one value, or 0"))
    return Chosen(kind, lr, values, decay, factors, tuple(refusals))


def _leading(groups: Sequence[Values]) -> int:
    """The place of the group whose rate the others' are multiples of: the first with parameters and a rate above 0."""
    filled = [i for i, group in enumerate(groups) if group["params"]] or [0]
    return next((i for i in filled if group_rate(groups[i])), filled[0])


def group_rate(group: Values) -> float:
    """The rate that a group began with."""
    return float(group.get("initial_lr", group["lr"]))


def rates(optimizer: torch.optim.Optimizer, schedule: Any, num_updates: int) -> Tensor:
    """As `course`, of a schedule that changes the rate alone. Raises ConfigError for another.

    >>> handle = Handle([{"lr": 1.0}])
    >>> rates(handle, torch.optim.lr_scheduler.StepLR(handle, 2, 0.5), 4).tolist()
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    found = course(optimizer, schedule, num_updates)
    if len(found) > 1:
        _refuse("it changes more than the rate: give cycle_momentum=False", schedule)
    return found["lr"]


def course(optimizer: torch.optim.Optimizer, schedule: Any, num_updates: int) -> dict[str, Tensor]:
    """What a schedule sets: the rate "lr" of the first group with parameters at each of `num_updates` updates and one
    more, and "momentum" or "betas" (the first of them) if it moves them: each float64 of shape (num_updates + 1,). The
    schedule and the optimizer are as before then. Raises ConfigError for a schedule that changes groups differently.
    """
    groups = optimizer.param_groups
    place = _leading(groups)
    before, held = copy.deepcopy(schedule.state_dict()), [_changing(group) for group in groups]
    lead = group_rate(groups[place])
    found: dict[str, list[float]] = {name: [] for name in held[place]}
    refused = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule that goes ahead of its optimizer
        for count in range(num_updates + 1):
            if count:  # a schedule may end there, and refuse one more
                schedule.step()
            for name, value in _changing(groups[place]).items():
                found[name].append(float(value[0] if isinstance(value, tuple) else value))
            for group in groups:
                share = group_rate(group) / lead if lead else 1.0
                if group["params"] and not math.isclose(
                    group["lr"], found["lr"][-1] * share, rel_tol=1e-9, abs_tol=1e-15
                ):
                    refused = "the rates of groups are no multiples of one another's: give all groups one schedule"
                if group["params"] and any(group[name] != groups[place].get(name) for name in CYCLED if name in group):
                    refused = "it changes groups in several ways: give cycle_momentum=False"
    schedule.load_state_dict(before)
    for group, was in zip(groups, held, strict=True):
        group.update(was)
    if refused:
        _refuse(refused, schedule)
    moved = {name: values for name, values in found.items() if name == "lr" or len(set(values)) > 1}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in moved.items()}


def _refuse(why: str, schedule: Any = None) -> NoReturn:
    text = f"lr_scheduler{f', a {type(schedule).__name__}' if schedule else ''}: {why}"
    raise ConfigError(f"Trainer: one thing is in the way\n  {text}", [("lr_scheduler", text)])


def _changing(group: Values) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", *CYCLED) if name in group}


def tabled(table: Tensor) -> Schedule:
    """The schedule that reads a table, and stays at its last value.

    >>> tabled(torch.tensor([0.5, 0.25], dtype=torch.float64))(torch.tensor(7))
    tensor(0.2500, dtype=torch.float64)
    """
    return lambda count: table.index_select(0, count.clamp(max=len(table) - 1).reshape(1)).reshape(())


# --- the kinds --------------------------------------------------------------------------------------------------------


def _decoupled(make: Callable[..., GradientTransformation], *taken: str) -> Any:
    """Of an optimizer whose decay is no gradient, and is masked."""

    def made(rate: Schedule, of: Chosen) -> GradientTransformation:
        decay = max(of.decay.values(), default=0.0)
        mask = None if all(of.decay.values()) or not decay else lambda path, leaf: bool(of.decay[path])
        given = {name: of.values[name] for name in taken if name in of.values}
        return make(rate, **given, weight_decay=decay, mask=mask)

    return made


def _coupled(make: Callable[..., GradientTransformation], **taken: str) -> Any:
    """Of an optimizer whose decay is an L2 term: it comes before, for the leaves that have one. taken: fzero's names by
    torch's."""

    def made(rate: Schedule, of: Chosen) -> GradientTransformation:
        decay = max(of.decay.values(), default=0.0)
        given = {ours: of.values[theirs] for theirs, ours in taken.items() if theirs in of.values}
        given = {name: value for name, value in given.items() if value is not None}
        made = make(rate, **given)
        if not decay:
            return made
        decayed = optim.masked(optim.add_decayed_weights(decay), lambda path, leaf: bool(of.decay[path]))
        return optim.chain(decayed, made)

    return made


def _muon(rate: Schedule, of: Chosen) -> GradientTransformation:
    """Of the matrices in its groups; nothing else moves. Those without a decay are stepped by a second one."""
    names = {"coefficients": "ns_coefficients", "eps": "eps", "steps": "ns_steps", "momentum": "momentum",
             "nesterov": "nesterov"}  # fmt: skip
    given = {ours: of.values[theirs] for ours, theirs in names.items()}
    given["adjust"] = of.values["adjust_lr_fn"] or "original"
    made = optim.sgd(0.0)
    for value in sorted({of.decay[name] for name, factor in of.factors.items() if factor}):
        own = {name for name, factor in of.factors.items() if factor and of.decay[name] == value}
        made = optim.muon(rate, weight_decay=value, mask=lambda path, leaf, own=own: path in own, others=made, **given)
    return made


def _adafactor(rate: Schedule, of: Chosen) -> GradientTransformation:
    """torch's, with one decay."""
    named = {"beta2_decay": of.values["beta2_decay"], "eps": of.values["eps"], "threshold": of.values["d"]}
    return optim.adafactor(rate, weight_decay=max(of.decay.values(), default=0.0), **named)


_TRANSFORMERS = ("eps", "clip_threshold", "decay_rate", "scale_parameter", "relative_step", "warmup_init")
_MOMENTS = {"betas": "betas", "eps": "eps"}
_MAKE: dict[str, Callable[[Schedule, Chosen], GradientTransformation]] = {
    "AdamW": _decoupled(optim.adamw, "betas", "eps"),
    "Lion": _decoupled(optim.lion, "betas"),
    "AdamW8bit": _decoupled(optim.adamw8bit, "betas", "eps"),
    "Adam": _coupled(optim.adam, **_MOMENTS),
    "SGD": _coupled(optim.sgd, momentum="momentum", nesterov="nesterov"),
    "Adagrad": _coupled(optim.adagrad, lr_decay="lr_decay", initial_accumulator_value="initial", eps="eps"),
    "Adadelta": _coupled(optim.adadelta, rho="rho", eps="eps"),
    "Muon": _muon,
    "Adafactor": _adafactor,
    "transformers.Adafactor": _decoupled(adafactor, *_TRANSFORMERS),
    "RMSprop": _coupled(optim.rmsprop, alpha="alpha", eps="eps", momentum="momentum", centered="centered"),
}
CYCLES = ("AdamW", "Adam", "SGD")  # kinds whose momentum may be a schedule
OURS = ("Lion", "AdamW8bit")  # kinds without an optimizer of torch
TORCH = tuple(kind for kind in _MAKE if kind not in OURS and "." not in kind)
