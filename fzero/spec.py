"""Spec: all the parts of a step, checked when it is written."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch

from fzero.errors import SpecError
from fzero.ir.mesh import DATA, PIPELINE
from fzero.optim import GradientTransformation
from fzero.pipeline import SCHEDULES, Pipeline, Schedule
from fzero.precision import Precision, policy
from fzero.shard.partition import P
from fzero.tree import suggest

OWN_AXES = (PIPELINE, *DATA)  # of a mesh; an axis of any other name cuts the dims that rules of `shard` say
NAMED_STAGES = ("hsdp", "hpz")
COLUMNS = {"params", "grads", "optimizer"}  # of the state, which `zero` may place one by one
DEFAULT_PARAMS = ("params/**",)
SPACE_OF = {"device": "device", "cpu": "host", "nvme": "disk"}  # the user's words, and those of programs
KINDS_OF_LEAVES = OPTIMIZER, PARAMS = "optimizer", "params"  # rules of `offload`: all that is no parameter; those
GRADS = "grads/"  # rules of `offload` that begin so name gradients that wait for all others: grads/blocks/**
SHORT_OFFLOADS = {"optimizer": (OPTIMIZER,), "optimizer+params": (OPTIMIZER, PARAMS)}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The training step and its placement. Give `loss` and `optimizer`, or `step`. Immutable.

    Functions are traced when a batch of a new kind is first seen. What they read from Python is read then, once, and
    compared before each step (`on_change`, docs/read-once.md).

    loss: `(params, batch) -> 0-d floating tensor` or `fzero.Mean`, pure; params are whole tensors there, batch this
    rank's part. Or `-> (that, {"name": tensor or fzero.Mean})`: metrics, means over microbatches and ranks.
    optimizer: an `fzero.optim` transformation (optax's `init` and `update`).
    step: instead of the two: `(state, batch) -> (new state, metrics)` over any pytrees.
    mesh: axis sizes, the last varying fastest over ranks, as {"pp": 2, "dp": 4}. `dp` splits the batch; so does
    `dp_out`, over a slower link (see `zero`). `pp` splits the model (see `pipeline`): ranks that differ in `pp` alone
    are given the same batch. An axis of any other name, as `tp`, splits layers (see `shard`): its ranks are given the
    same batch too. One axis may be -1: the rest of the world. None: all ranks are `dp`.
    shard: with axes as `tp`, path rules of leaves to `fzero.P`: the dims that their ranks hold parts of; the first
    match wins, and a leaf without one is held by each. As {"blocks/*/attn/w[qkv]": P("tp", None), "blocks/*/attn/wo":
    P(None, "tp")}. The loss stays as it is: what ranks must exchange follows from the rules (docs/tensor.md).
    sequence: such an axis: what its ranks sum lies in parts along dim 1 (the tokens of a batch of sequences) until it
    is needed whole: the same bytes travel, and norms, dropout and residuals take a share of the memory. None: whole.
    pipeline: with `pp`, the order of work: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", or an `fzero.Pipeline`.
    None: "1f1b". No order changes a bit (docs/parallel.md).
    zero: the ZeRO stage 0..3, or path rules to stages, first match wins: `{"blocks/**": 3, "**": 1}`. With an axis
    `dp_out` in mesh also "hsdp" (all over `dp`, a replica for each place on `dp_out`), "hpz" (all over both, and a
    second copy of the parameters over `dp` from the forward to the backward), or the axes of each column:
    `{"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")}`.
    microbatches: parts the batch is cut into along dim 0. Must divide it.
    reduce: "each" microbatch's gradients, or their sum at the "end". None: "end", which sends least, unless whole
    gradients would be more than a tenth of what a rank holds at stage 3. The two differ in bits, so neither the stage
    nor the homes of leaves enter; `lowered.choices` gives the choice and its reason.
    precision: "fp32", "bf16", "fp16", "bf16_params", "autocast", "autocast_fp16" or an `fzero.Precision`: the dtypes of
    the computation and of transfers.
    trainable: with `loss`, path rules of the parameters that train. The others get no gradient and no moments, and are
    sharded all the same. None: if only some of the given tensors require grad, those train; otherwise all do.
    clip_norm: with `loss`, the largest global gradient norm: g * min(1, clip_norm / (norm + 1e-6)). The norm is then
    a metric, `grad_norm`; with math.inf it is measured and nothing clipped.
    clip_value: with `loss`, instead of clip_norm: the largest absolute value of an element of a gradient.
    nonfinite: with `loss`, the action if gradients are not finite: "ignore", "skip" (the state keeps its bits) or
    "raise" (NonFiniteError, and the state stays usable). None: skip with a loss scale, else ignore.
    bucket_bytes: the size at which a layer's bucket is cut. A larger leaf has a bucket to itself. None: by the measured
    cost of transfers, once per machine and way; 32 MiB if nothing was measured (docs/performance.md).
    prefetch: how many segments ahead a gather starts. 0: when it is needed. None: 0, 1, 2 or 4 by the seconds that
    measured rates predict for the program (docs/performance.md); `lowered.choices` gives the reason.
    gather_bytes: the most bytes of gathered buffers at one time. None: as many as `prefetch` needs. With two data axes,
    slices on their way from one to the other come on top.
    prefetch_bytes: up to how many bytes of gathered buffers a gather starts early. A segment that needs more has what
    it needs, so no number is too small.
    overlap: False waits for every transfer at its start (same bits, slower).
    remat: "none", "full" (a layer keeps its input and computes the rest again in the backward), "offload" (what it
    keeps waits on the host until then), or path rules of parameters to them, as {"blocks/**": "full"}. Same bits, less
    memory; "full" takes up to a third more compute, "offload" moves bytes.
    offload: path rules of leaves to where they are held between their uses: "device", "cpu" (the host's memory) or
    "nvme" (a file), as {"opt_state/**": "nvme", "params/**": "cpu"}; the first match wins, and a leaf without one stays
    on the device. A rule may be "params", or "optimizer" for all that is no parameter. "optimizer" alone is short for
    {"optimizer": "cpu"}, and "optimizer+params" for both. Rules as "grads/**" say where gradients wait that are clipped
    together; no other rule means them. Moves bring leaves to their uses (docs/offload.md), and no bit changes.
    nvme_path: with "nvme", the folder on a fast disk where each rank keeps its one file, which ends with the process.
        "{local_rank}" in it is the rank's number on its node, and ranks may give other paths: a drive for each device.
    update_on: where elementwise work on offloaded leaves runs: on the "device", or on the "cpu". None: where fewer
    bytes move, for a CUDA device where it takes less time; `lowered.choices` gives the reason.
    device_bytes, host_bytes: the most bytes that a rank may need there. A step that needs more is refused with
    SpecError, which names its fullest op and the least that works.
    matmul: the library for fp32 matrix products on CPU. "default": torch's own choice. "fastest": the faster of
    torch's two libraries for each shape, measured once per machine and kept in a file (`fzero.codegen.matmul`): the
    same accuracy. Another machine may choose otherwise, so the bits hold for this machine only.
    allow_unused: parameters without a gradient get a zero one instead of an error.
    on_change: where a value that the functions have read from Python (a global, a variable of an outer function, an
    attribute) is another at a later step: "error", or "retrace", which makes a new program.
    compile: "inductor" compiles the stretches of loops in each segment, "none" runs plain aten, "auto" compiles if
    that was measured to gain (docs/compile.md). Without a compiler both run plain aten, and log it.
    params: with `step` and stage 1 or 2, path rules of the leaves that stay whole.
    transfers: on the CPU, "shared" (ranks of one machine read one another's memory), "p2p" (messages over gloo), or
    "auto": shared if possible, each gather by measured cost. Same bits.
    cuda_graph: on CUDA, launch a step as one graph if the step allows it (`lowered.choices` gives the reason if not).
    timeout: seconds that a rank waits for another before HangError names the missing ranks (docs/hangs.md), in process
    groups that fzero starts, and for its disk. None: 600. A group that you started has its own:
    init_process_group(timeout=).
    device: the device of the state, as "cuda" (under torchrun: this rank's). None: that of the given tensors, else
    "cpu".

    >>> import fzero
    >>> Spec(loss=lambda p, b: p["w"].sum(), optimizer=fzero.optim.sgd(0.1), zeroo=3)
    Traceback (most recent call last):
    fzero.errors.SpecError: Spec has no field 'zeroo'. Did you mean 'zero'?
    """

    loss: Callable[..., Any] | None = None
    optimizer: GradientTransformation | None = None
    step: Callable[..., Any] | None = None
    mesh: Mapping[str, int] | None = None
    shard: Mapping[str, P] | None = None
    sequence: str | None = None
    pipeline: str | Pipeline | None = None
    zero: int | str | Mapping[str, Any] = 3
    microbatches: int = 1
    reduce: str | None = None
    precision: str | Precision = "fp32"
    trainable: str | Sequence[str] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str | None = None
    bucket_bytes: int | None = None
    prefetch: int | None = None
    gather_bytes: int | None = None
    prefetch_bytes: int | None = None
    overlap: bool = True
    remat: str | Mapping[str, str] = "none"
    offload: str | Mapping[str, str] | None = None
    nvme_path: str | None = None
    update_on: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    matmul: str = "default"
    allow_unused: bool = False
    on_change: str = "error"
    compile: str = "none"
    params: str | Sequence[str] = DEFAULT_PARAMS
    transfers: str = "auto"
    cuda_graph: bool = True
    timeout: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for a field that cannot be used."""
        self._check_form()
        self._check_mesh()
        self._check_zero()
        self._check_shard()
        rules = self.param_rules if isinstance(self.params, (str, Sequence)) else ()
        text = bool(rules) and all(isinstance(rule, str) and rule for rule in rules)
        _needs(text, "params", self.params, "path rules, as in 'model/**'")
        self._check_device()
        _positive("microbatches", self.microbatches)
        if self.bucket_bytes is not None:
            _positive("bucket_bytes", self.bucket_bytes)
        if self.prefetch is not None:
            _needs(type(self.prefetch) is int and self.prefetch >= 0, "prefetch", self.prefetch, "0 or a positive int")
        if self.gather_bytes is not None:
            _positive("gather_bytes", self.gather_bytes)
        if self.prefetch_bytes is not None:
            _positive("prefetch_bytes", self.prefetch_bytes)
        _choice("reduce", self.reduce, (None, "each", "end"))
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _needs(value is None or (type(value) in (int, float) and value > 0), name, value, "a number > 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise SpecError("Spec(clip_norm=, clip_value=): give one of them, or chain both in the optimizer")
        if self.timeout is not None:
            fits = type(self.timeout) in (int, float) and 0 < self.timeout < 1e8  # the range of a timedelta and of gloo
            _needs(fits, "timeout", self.timeout, "seconds > 0")
        _choice("transfers", self.transfers, ("auto", "shared", "p2p"))
        _choice("compile", self.compile, ("none", "auto", "inductor"))
        _choice("nonfinite", self.nonfinite, (None, "ignore", "skip", "raise"))
        _choice("on_change", self.on_change, ("error", "retrace"))
        if self.trainable is not None:
            rules = (self.trainable_rules or ()) if isinstance(self.trainable, (str, Sequence)) else ()
            text = bool(rules) and all(isinstance(rule, str) and rule for rule in rules)
            _needs(text, "trainable", self.trainable, "path rules, as in '**/lora/**'")
        _choice("matmul", self.matmul, ("default", "fastest"))
        self._check_precision()
        self._check_remat()
        self._check_offload()
        for name in ("overlap", "allow_unused", "cuda_graph"):
            _needs(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    def _check_form(self) -> None:
        """Checks `loss` and `optimizer`, or `step`."""
        if self.step is not None:
            _needs(callable(self.step), "step", self.step, "a function (state, batch) -> (state, metrics)")
            for name in ("loss", "optimizer", "clip_norm", "clip_value", "trainable", "nonfinite"):
                if getattr(self, name) is not None:
                    raise SpecError(
                        f"Spec(step=...) already says what a step does: leave out {name}=, or leave out step="
                    )
            return
        if self.loss is None or self.optimizer is None:
            missing = "loss" if self.loss is None else "optimizer"
            raise SpecError(f"Spec needs {missing}=. Give loss= and optimizer=, or step=")
        _needs(callable(self.loss), "loss", self.loss, "a function (params, batch) -> loss")
        _needs(
            isinstance(self.optimizer, GradientTransformation),
            "optimizer",
            self.optimizer,
            "one of fzero.optim, as adamw(3e-4)",
        )
        _needs(self.params == DEFAULT_PARAMS, "params", self.params, "step=: with loss= the parameters are known")

    def _check_remat(self) -> None:
        remat = self.remat
        for rule, choice in remat.items() if isinstance(remat, Mapping) else [("**", remat)]:
            form = '"none", "full", "offload", or path rules to them, as {"blocks/**": "full"}'
            _needs(isinstance(rule, str) and choice in ("none", "full", "offload"), "remat", remat, form)

    def _check_offload(self) -> None:
        """Checks `offload`, what belongs to it, and the budgets."""
        for name in ("device_bytes", "host_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        _choice("update_on", self.update_on, (None, "device", "cpu"))
        if self.offload is None:
            for name in ("nvme_path", "update_on"):
                given = getattr(self, name)
                _needs(
                    given is None, name, given, "offload=, which says what lies off the device, as offload='optimizer'"
                )
            return
        if isinstance(self.offload, str):
            _choice("offload", self.offload, tuple(SHORT_OFFLOADS))
        else:
            form = 'path rules to "device", "cpu" or "nvme", as {"opt_state/**": "cpu"}'
            _needs(isinstance(self.offload, Mapping) and bool(self.offload), "offload", self.offload, form)
            for rule, home in self.offload.items():
                _needs(isinstance(rule, str) and home in SPACE_OF, "offload", {rule: home}, form)
        moves = any(home != "device" for home in self.offload_rules.values())
        _needs(moves, "offload", self.offload, "a rule that takes something off the device, or no offload=")
        away = "nvme" in self.offload_rules.values()
        if self.nvme_path is None and away:
            raise SpecError(
                f"Spec(offload={self.offload!r}): 'nvme' needed nvme_path=, a folder on a fast local disk, as "
                "nvme_path='/local_nvme'"
            )
        if self.nvme_path is not None:
            text = isinstance(self.nvme_path, (str, os.PathLike))
            text = text and "\0" not in os.fsdecode(self.nvme_path) and bool(self.nvme_path)
            _needs(text, "nvme_path", self.nvme_path, "the path of a folder")
            _needs(away, "nvme_path", self.nvme_path, "a rule of offload= to 'nvme', or none")

    def _check_precision(self) -> None:
        """Checks the precision policy against `step` and `nonfinite`."""
        chosen = self.policy
        if self.step is not None and (chosen.loss_scale is not None or chosen.params is not None):
            raise SpecError(
                f"Spec(step=..., precision={self.precision!r}): a step of your own scales its loss and rounds its "
                "parameters itself. Give Precision(compute=...), use fzero.LossScale with value_and_grad(loss, "
                "scale=...), and fzero.optim.stochastic_round"
            )
        if chosen.loss_scale is not None and self.nonfinite in ("ignore", "raise"):
            raise SpecError(
                f"Spec(nonfinite={self.nonfinite!r}) with a loss scale, which finds its size by steps that overflow "
                "and are skipped: leave nonfinite out"
            )

    def _check_device(self) -> None:
        try:
            known = self.device is None or isinstance(self.device, torch.device) or bool(torch.device(str(self.device)))
        except RuntimeError:
            known = False
        _needs(known, "device", self.device, "a device's name, as 'cuda' or 'cpu'")

    def _check_zero(self) -> None:
        if isinstance(self.zero, str):
            _needs(self.zero in NAMED_STAGES, "zero", self.zero, "a stage 0, 1, 2 or 3, 'hsdp' or 'hpz', or path rules")
            both = {"dp_out", "dp"} <= {*(self.mesh or {})}
            _needs(
                both, "zero", self.zero, "two data axes, as in mesh={'dp_out': 2, 'dp': 4}: nodes, and ranks of a node"
            )
            return
        if by_column(self.zero):
            self._check_columns(dict(self.zero))
            return
        stages = self.zero.values() if isinstance(self.zero, Mapping) else [self.zero]
        for stage in stages:
            fits = type(stage) is int and stage in (0, 1, 2, 3)
            _needs(fits, "zero", stage, "a stage 0, 1, 2 or 3, or path rules to them")
        _needs(bool(stages), "zero", self.zero, "at least one rule, as in {'**': 3}")
        for rule in self.zero if isinstance(self.zero, Mapping) else ():
            text = f"path rules that are text, as in {{'**': 3}}; not {rule!r}"
            _needs(isinstance(rule, str), "zero", self.zero, text)

    def _check_columns(self, zero: Mapping[str, Any]) -> None:
        """Raises SpecError for columns whose axes the mesh has not, or whose slices do not lie within one another."""
        axes = [axis for axis in self.mesh or {"dp": -1} if axis in DATA]
        _needs(zero.keys() == COLUMNS, "zero", zero, "all of params, grads and optimizer")
        for name, column in zero.items():
            fits = isinstance(column, (tuple, list)) and all(axis in axes for axis in column)
            _needs(fits, "zero", {name: column}, f"a tuple of axes of the mesh, of {axes}")
            _needs(len(set(column)) == len(column), "zero", {name: column}, "each axis once")
            inner = not column or axes[-1] in column
            _needs(inner, "zero", {name: column}, f"the inner axis {axes[-1]!r}, before one outside of it")
        smaller = {*zero["params"]} <= {*zero["grads"]} <= {*zero["optimizer"]}
        _needs(smaller, "zero", zero, "params over no more axes than grads, and grads over no more than the optimizer")

    def _check_mesh(self) -> None:
        self._check_pipeline()
        if self.mesh is None:
            return
        _needs(isinstance(self.mesh, Mapping) and bool(self.mesh), "mesh", self.mesh, "axis sizes, as in {'dp': 2}")
        for axis, size in self.mesh.items():
            fits = isinstance(axis, str) and axis.isidentifier()
            _needs(fits, "mesh", dict(self.mesh), f"names as 'dp' and 'tp', not {axis!r}")
            if size != -1:
                _positive(f"mesh[{axis!r}]", size)
        if list(self.mesh.values()).count(-1) > 1:
            raise SpecError(f"mesh={dict(self.mesh)}: one axis may be -1, the rest of the world")
        names = [*self.mesh]
        if {"dp_out", "dp"} <= {*names} and names.index("dp_out") > names.index("dp"):
            fixed = {**{name: self.mesh[name] for name in names if name != "dp"}, "dp": self.mesh["dp"]}
            _needs(False, "mesh", dict(self.mesh), f"`dp_out` before `dp`, the axis inside it: mesh={fixed}")

    def _check_shard(self) -> None:
        """Raises SpecError for rules that are none, for an axis that cuts no leaf, and for one that cuts nothing."""
        mesh, rules = dict(self.mesh or {}), self.shard
        form = "path rules to fzero.P, as in {'blocks/*/w1': fzero.P('tp', None)}"
        if rules is not None:
            _needs(isinstance(rules, Mapping) and bool(rules), "shard", rules, form)
            for rule, dims in rules.items():
                _needs(isinstance(rule, str) and isinstance(dims, P), "shard", {rule: dims}, form)
                only = f"axes that cut dims: zero= cuts leaves over {' and '.join(DATA)}, pipeline= over {PIPELINE!r}"
                _needs({*dims.axes}.isdisjoint(OWN_AXES), "shard", {rule: dims}, only)
        _needs(
            self.sequence is None or rules is not None,
            "sequence",
            self.sequence,
            "shard=, which says what lies in parts",
        )
        named = {axis for dims in (rules or {}).values() for axis in dims.axes}
        cuts = "a rule that cuts something over an axis, as P('tp', None)"
        _needs(rules is None or bool(named), "shard", dict(rules or {}), cuts)
        for axis, size in mesh.items():
            if axis not in (*OWN_AXES, *named) and size != 1:
                example = f"shard= with {axis!r} in a rule, as in shard={{'blocks/*/w1': P({axis!r}, None)}}"
                hint = suggest(axis, [name for name in (*OWN_AXES, *named) if name not in mesh])
                _needs(False, "mesh", mesh, example + (f".{hint}" if hint else ""))
        for axis in sorted(named - mesh.keys()):
            wanted = f"an axis {axis!r} in mesh, as in mesh={{'dp': -1, {axis!r}: 2}}"
            hint = suggest(axis, [name for name in mesh if name not in OWN_AXES])
            _needs(False, "shard", dict(rules or {}), wanted + (f".{hint}" if hint else ""))
        _choice("sequence", self.sequence, (None, *sorted(named)))

    def _check_pipeline(self) -> None:
        if self.pipeline is None:
            return
        known = isinstance(self.pipeline, (str, Pipeline, Schedule))
        _needs(known, "pipeline", self.pipeline, "a schedule's name, an fzero.Pipeline or an fzero.Schedule")
        if isinstance(self.pipeline, str):
            _choice("pipeline", self.pipeline, tuple(SCHEDULES))
        shown = self.pipeline if isinstance(self.pipeline, str) else type(self.pipeline).__name__
        fits = isinstance(self.mesh, Mapping) and PIPELINE in self.mesh
        _needs(fits, "pipeline", shown, f"an axis `pp` in mesh, as in mesh={{'pp': 2, 'dp': -1}}; it is {self.mesh}")

    def __copy__(self) -> Spec:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: Any) -> Spec:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.optimizer is None:
            return super().__reduce_ex__(protocol)
        raise SpecError(
            "a Spec cannot be pickled: it holds functions. Make it in each process, by a function of your own. What "
            "training made is kept by fzero.save(state, folder), or on the host by fzero.checkpoint.snapshot(state)"
        )

    @property
    def policy(self) -> Precision:
        """The precision policy of `precision`."""
        return policy(self.precision)

    @property
    def remat_rules(self) -> dict[str, str]:
        """`remat` as path rules, in order."""
        return dict(self.remat) if isinstance(self.remat, Mapping) else {"**": str(self.remat)}

    @property
    def offload_rules(self) -> dict[str, str]:
        """`offload` as rules to "device", "cpu" or "nvme", in order: path rules, and names of `KINDS_OF_LEAVES`."""
        if isinstance(self.offload, str):
            return dict.fromkeys(SHORT_OFFLOADS[self.offload], "cpu")
        return dict(self.offload or {})

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

    @property
    def param_rules(self) -> tuple[str, ...]:
        """`params` as a tuple of path rules."""
        return (self.params,) if isinstance(self.params, str) else tuple(self.params)


def by_column(zero: Any) -> TypeGuard[Mapping[str, Sequence[str]]]:
    """Whether `Spec(zero=...)` names the axes of each column, and no stages.

    >>> by_column({"params": ("dp",), "grads": ("dp",), "optimizer": ("dp",)}), by_column({"params/**": 3})
    (True, False)
    """
    if not isinstance(zero, Mapping) or not zero:
        return False
    return COLUMNS.issuperset(zero) and not any(isinstance(column, int) for column in zero.values())


def _needs(ok: bool, name: str, value: Any, needed: str) -> None:
    if not ok:
        raise SpecError(f"Spec({name}={value!r}): needed {needed}")


def _positive(name: str, value: Any) -> None:
    _needs(type(value) is int and value > 0, name, value, "a positive int")


def _choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        hint = suggest(value, [k for k in known if isinstance(k, str)]) if isinstance(value, str) else ""
        raise SpecError(f"Spec({name}={value!r}): needed one of {list(known)}.{hint}")


OPTIMIZERS = {  # what users give a Spec and an optimizer takes
    "lr": "3e-4", "learning_rate": "3e-4", "weight_decay": "3e-4, weight_decay=0.1", "betas": "3e-4, betas=(0.9, 0.95)",
    "eps": "3e-4, eps=1e-8",
}  # fmt: skip


def _named(init: Callable[..., None]) -> Callable[..., None]:
    """`Spec.__init__` with an error that suggests the field for an unknown name."""
    known = [f.name for f in fields(Spec)]

    @functools.wraps(init)
    def checked(self: Spec, **values: Any) -> None:
        for name in values:
            if name not in known:
                mine = suggest(name, known)
                of_optimizer = f" It is the optimizer's: Spec(optimizer=fzero.optim.adamw({OPTIMIZERS.get(name)}), ...)"
                raise SpecError(f"Spec has no field {name!r}.{of_optimizer if name in OPTIMIZERS else mine}")
        init(self, **values)

    return checked


Spec.__init__ = _named(Spec.__init__)  # type: ignore[method-assign]
