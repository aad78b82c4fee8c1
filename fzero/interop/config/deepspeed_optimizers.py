"""deepspeed_optimizers: DeepSpeed's optimizers and learning-rate schedules in the words of fzero.optim.

What a type means is what DeepSpeed 0.19.8 makes of it: "Adam" is AdamW unless `adam_w_mode` is false, an absent weight
decay is 0, and a name that is not DeepSpeed's own is one of `torch.optim`. At update c a schedule has the value of
DeepSpeed's scheduler after c - 1 steps of it: the scheduler starts at -1, and is stepped after the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fzero.interop.config.config_calls import ConfigCall, Name
from fzero.interop.config.config_keys import is_off, says_off
from fzero.interop.config.ledger import Ledger, nearest

Values = Mapping[str, Any]
Rate = Callable[[float], Any]  # what an optimizer of this learning rate is given: the rate, or a schedule


class OptimizerRow(NamedTuple):
    """A type: what makes its call, the parameters that it takes, and those that must be given. note: what differs."""

    make: Callable[[Values, Any], Any]
    names: tuple[str, ...]
    needed: tuple[str, ...] = ()
    note: str = ""


def optimizer(ledger: Ledger) -> tuple[ConfigCall | None, ConfigCall | None]:
    """(the optimizer, the schedule) of a document. The schedule is in the optimizer, and by itself only where the
    document names no optimizer. Refusals go to the ledger."""
    rising, shape = _block(ledger, "scheduler", SCHEDULES, "schedule")
    kind, values = _block(ledger, "optimizer", OPTIMIZERS, "optimizer")
    if rising is SCHEDULES["OneCycle"]:
        values = {**values, **_cycled(ledger, kind, shape)}
    if kind is not None:
        top = shape.get("warmup_max_lr", shape.get("cycle_max_lr", values.get("lr")))
        if rising and top != values.get("lr") and "lr" in values:
            ledger.became("optimizer.params.lr", f"nothing: the schedule sets the rate, up to {top}")
        call = kind.make(values, (lambda lr: rising.make(shape, lr)) if rising else lambda lr: lr)
        ledger.became("optimizer.type", f"Spec(optimizer={call.name}(...)){kind.note}")
        return call, None
    alone = rising.make(shape, None) if rising else None
    if rising and alone is None:
        why = "its highest rate is the optimizer's, and the document has no optimizer"
        ledger.refuse("scheduler.type", why, "write the optimizer with its lr, or WarmupLR with warmup_max_lr")
    return None, alone


def _block(
    ledger: Ledger, block: str, known: Mapping[str, OptimizerRow], noun: str
) -> tuple[OptimizerRow | None, Values]:
    """(the row, the values that are given) of `optimizer` or `scheduler`; no row if it names no type."""
    kind = ledger.take(f"{block}.type")
    name = next((n for n in known if n == kind or (n in CASELESS and n.lower() == str(kind).lower())), None)
    if kind is not None and name is None:
        other = f"take it out, and give Spec(optimizer=). Known are {', '.join(known)}"
        fix = (_is_another(str(kind)) and other) or nearest(str(kind), known, close=True) or other
        ledger.forget(f"{block}.params")
        ledger.refuse(f"{block}.type", REFUSED.get(_letters(str(kind)), f"fzero has no {noun} of this name"), fix)
    row = known[name] if name else None
    values: dict[str, Any] = {}
    for path, key in ledger.table.items():
        if not (path.startswith(f"{block}.params.") and key.verdict.reads):
            continue
        param = path.rpartition(".")[2]
        value = ledger.take(path, **({"auto": AUTO.get(param)} if row is None or param in AUTO else {}))
        taken = row is not None and param in row.names
        given = ledger.has(path) and (taken or not (is_off(value, key.default) or says_off(value)))
        if row and not taken and not given and ledger.has(path):
            ledger.became(path, f"nothing: {name} takes no such parameter")
        if given and row and not taken:
            fix = nearest(path, [f"{block}.params.{n}" for n in row.names]) or "take it out"
            ledger.refuse(path, f"{name} has no such parameter", fix)
        elif given and kind is None:
            ledger.refuse(path, f"no {noun} takes it", f"write {block}.type")
        elif given and value is not None and value != key.default:
            values[param] = value
    for param in row.needed if row else ():
        path = f"{block}.params.{param}"
        if not ledger.has(path):
            ledger.lacks(path, f"{name} needs it", "it")
    return row, values


# --- schedules --------------------------------------------------------------------------------------------------------


def _warmup(values: Values, low: float, peak: float) -> tuple[ConfigCall, int]:
    """(the warm-up, its steps), for the scheduler's own count."""
    steps = max(2, values.get("warmup_num_steps", 1000))
    kind = values.get("warmup_type", "log")
    return ConfigCall("fzero.optim.warmup", (low, peak, steps), {"kind": kind}), steps


def _behind(schedule: ConfigCall) -> ConfigCall:
    return ConfigCall("fzero.optim.shift", (schedule, -1))


def _warmup_lr(values: Values, lr: float | None) -> ConfigCall | None:
    peak = values.get("warmup_max_lr", lr)
    return None if peak is None else _behind(_warmup(values, values.get("warmup_min_lr", 0.0), peak)[0])


def _warmup_decay_lr(values: Values, lr: float | None) -> ConfigCall | None:
    low, peak = values.get("warmup_min_lr", 0.0), values.get("warmup_max_lr", 0.001)
    rise, steps = _warmup(values, low, peak)
    rest = values.get("total_num_steps", 0) - steps
    fall = (
        ConfigCall("fzero.optim.polynomial", (peak, rest), {"end": low})
        if rest > 0
        else ConfigCall("fzero.optim.constant", (low,))
    )
    return _behind(ConfigCall("fzero.optim.joined", ([rise, fall], [steps])))


def _warmup_cosine_lr(values: Values, lr: float | None) -> ConfigCall | None:
    if lr is None:
        return None
    low = lr * values.get("warmup_min_ratio", 0.0)
    rise, steps = _warmup(values, low, lr)
    rest = max(1, values.get("total_num_steps", 0) - steps)
    fall = ConfigCall("fzero.optim.cosine", (lr, rest), {"end": lr * values.get("cos_min_ratio", 1e-4)})
    curve = ConfigCall("fzero.optim.joined", ([rise, ConfigCall("fzero.optim.shift", (fall, 1))], [steps]))
    if low == 0.0:
        return _behind(curve)
    return ConfigCall(
        "fzero.optim.joined", ([ConfigCall("fzero.optim.constant", (0.0,)), curve], [1])
    )  # its first rate is 0


def _triangle(values: Values, low: Any, peak: Any, after: ConfigCall) -> ConfigCall:
    """A cycle of OneCycle's sizes, and what follows it."""
    rise = values.get("cycle_first_step_size", 2000)
    fall = values.get("cycle_second_step_size", rise)
    up = max(0, values.get("cycle_first_stair_count", 0))
    stairs = (up, max(0, values.get("cycle_second_stair_count", up)))
    cycle = ConfigCall("fzero.optim.triangle", (low, peak, rise, fall), {"stairs": stairs} if any(stairs) else {})
    return ConfigCall("fzero.optim.joined", ([cycle, after], [rise + fall]))


def _afterwards(values: Values, name: str, value: float, rate: float) -> ConfigCall:
    """What follows a cycle: it moves on by `rate` every `decay_step_size`, or stays."""
    steps = values.get("decay_step_size", 0)
    return (
        ConfigCall(f"fzero.optim.{name}", (value, steps, rate))
        if steps and rate
        else ConfigCall("fzero.optim.constant", (value,))
    )


def _one_cycle(values: Values, lr: float | None) -> ConfigCall:
    low, peak = values.get("cycle_min_lr", 0.0), values.get("cycle_max_lr", 0.0)
    return _triangle(values, low, peak, _afterwards(values, "inverse_time", low, values.get("decay_lr_rate", 0.0)))


def _cycled(ledger: Ledger, kind: OptimizerRow | None, values: Values) -> Values:
    """The betas that OneCycle sets. The first is the least momentum at the first update, as the scheduler leaves it."""
    path = "scheduler.params.cycle_momentum"
    if not values.get("cycle_momentum", True):
        return {}
    if kind is not None and "betas" not in kind.names:
        ledger.became(path, "nothing: the optimizer has no betas")
        return {}
    if kind is None or kind not in (OPTIMIZERS["Adam"], OPTIMIZERS["AdamW"]):
        ledger.refuse(path, "fzero cycles the betas of Adam and AdamW alone", f"write {path} false")
        return {}
    if ledger.has("optimizer.params.betas"):
        ledger.became("optimizer.params.betas", "nothing: OneCycle sets them")
    low, high = values.get("cycle_min_mom", 0.8), values.get("cycle_max_mom", 0.9)
    after = _afterwards(values, "linear_growth", high, values.get("decay_mom_rate", 0.0))
    moved = ConfigCall("fzero.optim.shift", (_triangle(values, high, low, after), 1))
    return {
        "betas": (ConfigCall("fzero.optim.joined", ([ConfigCall("fzero.optim.constant", (low,)), moved], [1])), 0.99)
    }


def _range_test(values: Values, lr: float | None) -> ConfigCall:
    steps, rate = values.get("lr_range_test_step_size", 2000), values.get("lr_range_test_step_rate", 1.0)
    named = {"staircase": True} if values.get("lr_range_test_staircase") else {}
    return ConfigCall("fzero.optim.linear_growth", (values.get("lr_range_test_min_lr", 1e-3), steps, rate), named)


_RISE = ("warmup_num_steps", "warmup_type")
_TOTAL = ("total_num_steps",)
_BOUNDS = ("cycle_min_lr", "cycle_max_lr")
_CYCLE = (
    "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
    "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
)  # fmt: skip
SCHEDULES = {
    "WarmupLR": OptimizerRow(_warmup_lr, ("warmup_min_lr", "warmup_max_lr", *_RISE)),
    "WarmupDecayLR": OptimizerRow(_warmup_decay_lr, ("warmup_min_lr", "warmup_max_lr", *_RISE, *_TOTAL), _TOTAL),
    "WarmupCosineLR": OptimizerRow(_warmup_cosine_lr, ("warmup_min_ratio", "cos_min_ratio", *_RISE, *_TOTAL), _TOTAL),
    "OneCycle": OptimizerRow(_one_cycle, (*_BOUNDS, *_CYCLE), _BOUNDS),
    "LRRangeTest": OptimizerRow(
        _range_test, tuple(f"lr_range_test_{n}" for n in ("min_lr", "step_size", "step_rate", "staircase"))
    ),
}


# --- optimizers -------------------------------------------------------------------------------------------------------


def _adam(values: Values, rate: Rate, decoupled: bool) -> ConfigCall:
    """FusedAdam's and CPUAdam's formula; with `torch_adam` that of torch, whose AdamW decays by 0.01."""
    decay = values.get("weight_decay", 0.01 if decoupled and values.get("torch_adam") else 0.0)
    named = {**_moments(values), "weight_decay": decay, **_given(values, bias_correction="bias_correction")}
    return ConfigCall(f"fzero.optim.{'adamw' if decoupled else 'adam'}", (rate(values.get("lr", 1e-3)),), named)


def _onebit_adam(values: Values, rate: Rate) -> ConfigCall:
    """DeepSpeed's, which leaves the bias of both moments as it is, whatever `bias_correction` says."""
    named = {**_moments(values), "weight_decay": values.get("weight_decay", 0.0), "bias_correction": False}
    warmup = values.get("freeze_step", 100_000)
    return ConfigCall("fzero.optim.onebit_adam", (rate(values.get("lr", 1e-3)), warmup), named)


def _muon(values: Values, rate: Rate) -> ConfigCall:
    muon_lr, adam_lr = (values.get(own, values.get("lr", d)) for own, d in (("muon_lr", 0.02), ("adam_lr", 3e-4)))
    decay = values.get("weight_decay", 0.0)
    others = _moments({"betas": (0.9, 0.95), "eps": 1e-10, **values})
    aux = ConfigCall(f"fzero.optim.{'adamw' if values.get('adam_w_mode', True) else 'adam'}", (rate(adam_lr),),
               {**others, "weight_decay": decay})  # fmt: skip
    named = {"weight_decay": decay, "mask": Name("fzero.optim.hidden_matrices"), "others": aux}
    return ConfigCall("fzero.optim.muon", (rate(muon_lr),), _given(values, momentum="momentum") | named)


def _of_torch(name: str, lr: float, **renamed: str) -> Callable[[Values, Rate], ConfigCall]:
    """An optimizer of torch.optim, whose formula and defaults fzero's has; `renamed` are fzero's names by torch's."""

    def make(values: Values, rate: Rate) -> ConfigCall:
        return ConfigCall(f"fzero.optim.{name}", (rate(values.get("lr", lr)),), _given(values, **renamed))

    return make


def _moments(values: Values) -> dict[str, Any]:
    return _given(values, betas="betas", eps="eps")


def _given(values: Values, **renamed: str) -> dict[str, Any]:
    """The arguments that are given, under fzero's names."""
    found = {ours: values[theirs] for theirs, ours in renamed.items() if theirs in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


_ADAM = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam", "bias_correction")
_L2 = {"weight_decay": "weight_decay"}
_BOTH = {"betas": "betas", "eps": "eps", **_L2, "decoupled_weight_decay": "decoupled_weight_decay"}
_ADAGRAD = {"lr_decay": "lr_decay", **_L2, "initial_accumulator_value": "initial", "eps": "eps"}
_DELTA = {"rho": "rho", "eps": "eps", **_L2}
_RMS = {"alpha": "alpha", "eps": "eps", **_L2, "momentum": "momentum", "centered": "centered"}
_SGD = {"momentum": "momentum", "nesterov": "nesterov", **_L2}
OPTIMIZERS = {
    "Adam": OptimizerRow(lambda values, rate: _adam(values, rate, values.get("adam_w_mode", True)), _ADAM),
    "AdamW": OptimizerRow(lambda values, rate: _adam(values, rate, True), _ADAM),
    "Lion": OptimizerRow(
        lambda values, rate: _of_torch("lion", 1e-3, betas="betas", **_L2)({"betas": (0.9, 0.999), **values}, rate),
        ("lr", "betas", "weight_decay"),
    ),
    "Muon": OptimizerRow(
        _muon, ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "adam_w_mode")
    ),
    "Adagrad": OptimizerRow(_of_torch("adagrad", 1e-2, **_ADAGRAD), ("lr", *_ADAGRAD)),
    "OneBitAdam": OptimizerRow(
        _onebit_adam,
        ("lr", "betas", "eps", "weight_decay", "bias_correction", "freeze_step"),
        note=": each 64 elements have a scale of their own, and checkpoints keep what the codes have lost",
    ),
    "SGD": OptimizerRow(_of_torch("sgd", 1e-3, **_SGD), ("lr", *_SGD)),
    "RMSprop": OptimizerRow(_of_torch("rmsprop", 1e-2, **_RMS), ("lr", *_RMS)),
    "Adadelta": OptimizerRow(_of_torch("adadelta", 1.0, **_DELTA), ("lr", *_DELTA)),
    "NAdam": OptimizerRow(
        _of_torch("nadam", 2e-3, **_BOTH, momentum_decay="momentum_decay"), ("lr", *_BOTH, "momentum_decay")
    ),
    "RAdam": OptimizerRow(_of_torch("radam", 1e-3, **_BOTH), ("lr", *_BOTH)),
}
CASELESS = ("Adam", "AdamW", "Lion", "Muon", "Adagrad", "OneBitAdam")  # DeepSpeed's own names, in any case
TAKES_LOCAL = ("fzero.optim.onebit_adam",)  # these reduce what they make of each rank's gradients
REFUSED = {
    "lamb": "DeepSpeed's FusedLamb bounds its trust ratio and leaves out the bias: fzero.optim.lamb has other numbers",
    "zerooneadam": "DeepSpeed 0.19 has removed it; examples/coded_training.py has it as a Spec(step=), OneBitAdam maps",
    "onebitlamb": "DeepSpeed 0.19 has removed it; examples/coded_training.py has it as a Spec(optimizer=)",
    "muadam": "it is of the library mup",
    "muadamw": "it is of the library mup",
    "musgd": "it is of the library mup",
}
OTHERS = (  # algorithms of other libraries, whose names are near those of the tables
    "AdaBelief", "AdaBound", "AdaHessian", "Adan", "AdamP", "AdEMAMix", "Apollo", "CAME", "CPUAdam", "DiffGrad",
    "GaLore", "Grams", "LaProp", "LARS", "MARS", "NovoGrad", "PAdam", "Prodigy", "QHAdam", "Ranger", "SAM", "Shampoo",
    "SOAP", "Sophia", "StableAdamW", "Tiger", "Yogi", "AdamMini", "AdaGC", "AdaMax", "AMSGrad", "DAdapt",
    "DAdaptAdam", "ScheduleFree",
)  # fmt: skip
AUTO = {"warmup_min_lr": 0.0, "warmup_max_lr": None}  # as transformers fills them: 0, and the optimizer's own rate


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _is_another(name: str) -> bool:
    """Whether a name is that of an algorithm that is not in the tables, so that no other one is meant by it."""
    known = {_letters(own) for own in (*OPTIMIZERS, *SCHEDULES)}
    others = {_letters(other) for other in (*vars(torch.optim), *vars(torch.optim.lr_scheduler), *OTHERS)}
    return _letters(name) in (others | REFUSED.keys()) - known
