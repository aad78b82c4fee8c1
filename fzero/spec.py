"""Spec: all the parts of a step, checked when it is written.

The call is flat. The fields are checked, and read, in four groups, each a record of the room that uses it: `parallel`,
`memory`, `numerics` and `run`. A field has its default here and there; a law compares them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fzero import spec_fields
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.errors import SpecError
from fzero.field_checks import needs
from fzero.ir.mesh import DATA
from fzero.kernels.codecs import CODECS
from fzero.optim import GradientTransformation
from fzero.optim.transform import REFUSE
from fzero.phases import Phases, each_of
from fzero.pipeline import Pipeline
from fzero.plan.memory_use import MemoryUse
from fzero.plan.parallelism import DEFAULT_PARAMS, Parallelism
from fzero.precision import Numerics, Precision
from fzero.run_options import RunOptions
from fzero.shard.partition import P
from fzero.tree import suggest

Group = TypeVar("Group")

OPTIMIZER = (  # what is needed of one: another library's changes parameters in place
    "one of fzero.optim, as adamw(3e-4), or your own GradientTransformation(init, update) of its formula "
    "(docs/optimizers.md)"
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The training step and its sharding. Give `loss` and `optimizer`, or `step`. Immutable.

    Functions are traced at the first batch with new shapes. What they read from Python is read then, once, and compared
    before each step (`on_change`, docs/read-once.md).

    loss: `(params, batch) -> scalar floating tensor` or `fzero.Mean`, pure. params are full tensors there; batch is
    this rank's shard of the global batch. Or `-> (that, {"name": tensor or fzero.Mean})`: metrics, averaged over
    microbatches and ranks.
    optimizer: an `fzero.optim` transformation (optax's `init` and `update`), or `fzero.Phases` of them.
    step: instead of the two: `(state, batch) -> (new state, metrics)` over any pytrees, or `fzero.Phases` of such.
    mesh: axis sizes, the last varying fastest over ranks, as {"pp": 2, "dp": 4}. `dp` splits the batch; so does
    `dp_out`, over a slower link (see `zero`). `pp` splits the model into stages (see `pipeline`). An axis of any other
    name, such as `tp`, splits layers (see `shard`). Ranks that differ only in such an axis or in `pp` must be given the
    same batch. One axis may be -1: it gets the remaining ranks. None: all ranks are `dp`. "auto":
    `fzero.init` plans: rank 0 runs `fzero.plan` for all, and what else was not given is chosen too (docs/choosing.md).
    Of other fields that a plan chooses (zero, remat, ...) "auto" says the same as leaving them out.
    shard: with axes such as `tp`, path rules from leaves to `fzero.P`: the mesh axis over which each dim is sharded.
    The first match wins; a leaf without a rule is replicated. As {"blocks/*/attn/w[qkv]": P("tp", None),
    "blocks/*/attn/wo": P(None, "tp")}. The loss does not change: fzero derives the transfers from the rules
    (docs/tensor.md).
    sequence: the name of such an axis. The output of a row-parallel layer stays sharded over it along dim 1 (the tokens
    of a batch of sequences) until an op needs all of it: the same bytes are sent, and norms, dropout and residuals take
    1/n of the memory. None: it is replicated.
    pipeline: with `pp`, the schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", or an `fzero.Pipeline`. None:
    "1f1b". No schedule changes a bit (docs/parallel.md).
    zero: the ZeRO stage 0..3, or path rules to stages, first match wins: `{"blocks/**": 3, "**": 1}`. With an axis
    `dp_out` in mesh also "hsdp" (everything sharded over `dp`, replicated over `dp_out`), "hpz" (everything sharded
    over both, and a second copy of the parameters sharded over `dp` from the forward to the backward), or the axes for
    each of the three: `{"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")}`.
    microbatches: the number of microbatches into which the batch is split along dim 0. Must divide it.
    reduce: "each": reduce the gradients of every microbatch; "end": accumulate them and reduce once. None: "end", which
    sends least, unless full gradients would be more than a tenth of what a rank holds at stage 3. The two differ in
    bits. So the choice does not depend on the stage or on the homes of leaves; `lowered.choices` gives it and its
    reason.
    precision: "fp32", "bf16", "fp16", "bf16_params", "autocast", "autocast_fp16" or an `fzero.Precision`: the dtypes of
    computation and transfers.
    trainable: with `loss`, path rules of the parameters to train. The others get no gradient and no moments, and are
    sharded like the rest. None: if only some of the given tensors require grad, those train; otherwise all do.
    clip_norm: with `loss`, the maximum global gradient norm: g * min(1, clip_norm / (norm + 1e-6)). The norm is then a
    metric, `grad_norm`; math.inf measures it and clips nothing.
    clip_value: with `loss`, instead of clip_norm: the maximum absolute value of an element of a gradient.
    nonfinite: with `loss`, the action if gradients are not finite: "ignore" (the update is applied as it is), "skip"
    (the update is discarded, and the state keeps its bits) or "raise" (NonFiniteError, and the state stays usable).
    None: skip with a loss scale, else ignore.
    bucket_bytes: the maximum size of a bucket; a layer's leaves are split into buckets of this size. A larger leaf has
    a bucket to itself. None: by the measured cost of transfers (docs/performance.md); 32 MiB if nothing was measured.
    prefetch: how many segments ahead a gather starts. 0: when it is needed. None: 0, 1, 2 or 4, by the seconds that
    measured rates predict (docs/performance.md); `lowered.choices` gives the reason. Unless 0, a pipeline gathers what
    stays gathered for the step (stages 1 and 2) at its start.
    gather_bytes: the maximum bytes of gathered buffers at one time. None: as many as `prefetch` needs. With two data
    axes, slices in flight between the two are additional.
    prefetch_bytes: a gather starts early only while gathered buffers stay below this. A segment that needs more still
    gets what it needs, so 1 is enough.
    overlap: False waits for every transfer at its start (same bits, slower).
    remat: "none", "full" (a layer saves its input and recomputes the rest in the backward), "gathers" (with
    `sequence=`: activations that a layer gathered are gathered again), "offload" (saved activations are on the host
    until the backward), or path rules of parameters to them, as {"blocks/**": "full"}. Same bits, less memory; "full"
    takes up to a third more compute, "gathers" sends bytes, "offload" moves them.
    loss_chunks: with a loss of a linear layer's logits (a language model's), the number of chunks of each sequence for
    which logits, loss and their gradients are computed, one after the other: the logits of one chunk exist at a time,
    and nothing is computed twice. The bits are those of a loss written in as many chunks; `fzero.evaluate` is not
    changed. None: all tokens at once. A loss that this does not fit is refused (docs/long-sequences.md).
    offload: path rules from leaves to where they are held between their uses: "device", "cpu" (host memory) or "nvme"
    (a file), as {"opt_state/**": "nvme", "params/**": "cpu"}; the first match wins, and a leaf without a rule stays on
    the device. A rule may be "params", or "optimizer", which matches every leaf that is not a parameter. "optimizer"
    alone is short for {"optimizer": "cpu"}, and "optimizer+params" for both. Rules such as "grads/**" apply to
    gradients that wait to be clipped together; no other rule matches them. Moves fetch leaves before their uses
    (docs/offload.md), and no bit changes.
    nvme_path: with "nvme", the folder on a fast disk where each rank keeps one file, which is deleted when the process
    ends. "{local_rank}" in it is the rank's number on its node, and ranks may give different paths: a drive for each
    device.
    update_on: where elementwise work on offloaded leaves runs: on the "device", or on the "cpu". None: on CPU the one
    that moves fewer bytes, for a CUDA device the one that takes less time; `lowered.choices` gives the reason.
    device_bytes, host_bytes: the maximum bytes that a rank may need there. A step that needs more is refused with
    SpecError, which names the op at its peak and the smallest budget that works.
    matmul: the way to compute matrix products on CPU. "default": torch's own choice. "fastest": for each shape the
    faster of torch's two libraries in fp32, and of torch's own and a product in fp32 in 16 bits, which is 3 to 80 times
    faster on a processor without bf16 instructions. Measured once per machine and kept in a file
    (`fzero.codegen.matmul`): the same accuracy. Another machine may choose differently, so the bits hold for this
    machine only.
    allow_unused: parameters without a gradient get a zero gradient instead of an error.
    on_change: the action if a value that the functions read from Python (a global, a variable of an outer function, an
    attribute) has changed at a later step: "error", or "retrace", which traces a new program.
    compile: "inductor" compiles the loops in each segment, "none" runs plain aten ops, "auto" compiles where that was
    measured to be faster (docs/compile.md). None: "auto" on CUDA, "none" on the CPU. Without a compiler each runs plain
    aten ops, and logs it.
    params: with `step`, path rules of the parameters: stages 1 and 2 keep them replicated, and the moments of each of
    several nets are found by them.
    transfers: on the CPU, "shared" (ranks of one machine read one another's memory), "p2p" (messages over gloo), or
    "auto": shared if possible, each gather by measured cost. Same bits.
    cuda_graph: on CUDA, launch a step as one graph if the step allows it (`lowered.choices` gives the reason if not).
    timeout: seconds that a rank waits for another before HangError names the missing ranks (docs/hangs.md), in process
    groups that fzero starts, and for its disk. None: 600. A group that you started keeps its own timeout:
    init_process_group(timeout=).
    device: the device of the state, as "cuda" (under torchrun: this rank's). None: that of the given tensors, else
    "cpu".

    >>> import fzero
    >>> Spec(loss=lambda p, b: p["w"].sum(), optimizer=fzero.optim.sgd(0.1), zeroo=3)
    Traceback (most recent call last):
    fzero.errors.SpecError: Spec has no field 'zeroo'. Did you mean 'zero'?
    """

    loss: Callable[..., Any] | None = None
    optimizer: GradientTransformation | Phases[GradientTransformation] | None = None
    step: Callable[..., Any] | Phases[Callable[..., Any]] | None = None
    mesh: Mapping[str, int] | str | None = None
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
    loss_chunks: int | None = None
    offload: str | Mapping[str, str] | None = None
    nvme_path: str | None = None
    update_on: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    matmul: str = "default"
    allow_unused: bool = False
    on_change: str = "error"
    compile: str | None = None
    params: str | Sequence[str] = DEFAULT_PARAMS
    transfers: str = "auto"
    cuda_graph: bool = True
    timeout: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for a field that cannot be used."""
        self._check_form()
        _ = self.parallel, self.memory, self.numerics, self.run  # each checks itself when it is made

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that were given, also where they equal the default. `fzero.plan` chooses others."""
        return frozenset(self.__dict__["_given"])

    @functools.cached_property
    def parallel(self) -> Parallelism:
        """How the step is split over ranks: mesh, shard, sequence, pipeline, zero, params, microbatches, reduce."""
        return self._group(Parallelism)

    @functools.cached_property
    def memory(self) -> MemoryUse:
        """Where values are held, and budgets: buckets, gathers, remat, offload, update_on, device_bytes, host_bytes."""
        return self._group(MemoryUse)

    @functools.cached_property
    def numerics(self) -> Numerics:
        """What trains, and in which numbers: precision, trainable, clip_norm, clip_value, nonfinite."""
        return self._group(Numerics)

    @functools.cached_property
    def run(self) -> RunOptions:
        """How the program is run: compile, matmul, transfers, cuda_graph, on_change, allow_unused, timeout, device."""
        return self._group(RunOptions)

    @property
    def phases(self) -> Phases[Any] | None:
        """Of an optimizer or a step with phases, these; else None."""
        chosen = self.optimizer if self.step is None else self.step
        return chosen if isinstance(chosen, Phases) else None

    def in_phase(self, name: str = "") -> Spec:
        """The spec of one phase, "" for the first. Without phases it is the spec itself. Raises SpecError."""
        phases = self.phases
        if phases is None:
            needs(not name, "phase", name, "none: neither the optimizer nor the step has phases")
            return self
        if name and name not in phases.each:
            raise SpecError(f"phase={name!r}: needed one of {', '.join(map(repr, phases.each))}")
        field_name = "optimizer" if self.step is None else "step"
        return self.but(**{field_name: phases[name or phases.first]})

    def but(self, planned: Iterable[str] = (), **fields: Any) -> Spec:
        """The spec with these fields; what it leaves open stays so. (`dataclasses.replace` forgets that.) planned: the
        names of fields that a plan chose."""
        return spec_fields.kept(replace(self, **fields), self, fields, planned)

    @property
    def planned(self) -> frozenset[str]:
        """The names of the fields that `fzero.plan` chose; a checkpoint holds them (docs/choosing.md)."""
        return frozenset(self.__dict__.get("_planned", ()))

    def _group(self, record: type[Group]) -> Group:
        return record(**{f.name: getattr(self, f.name) for f in fields(record)})  # type: ignore[arg-type]

    def _check_form(self) -> None:
        """Checks `loss` and `optimizer`, or `step`."""
        if self.step is not None:
            for step in each_of(self.step):
                needs(callable(step), "step", step, "a function (state, batch) -> (state, metrics)")
            for name in ("loss", "optimizer", "clip_norm", "clip_value", "trainable", "nonfinite"):
                if getattr(self, name) is not None:
                    raise SpecError(
                        f"Spec(step=...) already says what a step does: leave out {name}=, or leave out step="
                    )
            self._check_scale()
            if self.numerics.policy.feeds_back:
                _check_feedback(self)
            return
        if self.loss is None or self.optimizer is None:
            missing = "loss" if self.loss is None else "optimizer"
            raise SpecError(f"Spec needs {missing}=. Give loss= and optimizer=, or step=")
        needs(callable(self.loss), "loss", self.loss, "a function (params, batch) -> loss")
        for tx in each_of(self.optimizer):
            needs(isinstance(tx, GradientTransformation), "optimizer", tx, OPTIMIZER)
        needs(self.params == DEFAULT_PARAMS, "params", self.params, "step=: with loss= the parameters are known")
        if any(tx.takes == "local" for tx in each_of(self.optimizer)):
            _check_local(self)
        if self.numerics.policy.feeds_back:
            _check_feedback(self)

    def _check_scale(self) -> None:
        chosen = self.numerics.policy
        if chosen.loss_scale is not None or chosen.params is not None:
            raise SpecError(
                f"Spec(step=..., precision={self.precision!r}): a step of your own scales its loss and rounds its "
                "parameters itself. Give Precision(compute=...), use fzero.LossScale with value_and_grad(loss, "
                "scale=...), and fzero.optim.stochastic_round"
            )

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


def _check_local(spec: Spec) -> None:
    """Raises SpecError for a field that an optimizer of local gradients leaves no place for."""
    takes = "the optimizer takes each rank's own gradients and reduces them itself"
    if spec.clip_norm is not None:
        raise SpecError(f"Spec(clip_norm={spec.clip_norm}): {takes}, so there is no norm of their mean. Leave it out")
    if spec.clip_value is not None:
        raise SpecError(
            f"Spec(clip_value={spec.clip_value}): {takes}, so the elements of their mean are not known. Leave it out"
        )
    if spec.numerics.policy.loss_scale is not None:
        raise SpecError(
            f"Spec(precision={spec.precision!r}): {takes}, and what it keeps of one step for the next would be in the "
            "units of a loss scale that changes. Use precision='bf16', which needs none"
        )
    if (codec := spec.numerics.policy.reduce) in CODECS:
        raise SpecError(
            f"Precision(reduce={codec!r}): {takes}, in codes of its own, so none travels in this one. Take reduce= out"
        )
    if spec.reduce == "each":
        raise SpecError(f"Spec(reduce='each'): {takes}, once for all microbatches. Leave reduce out")
    axes = dict(spec.parallel.axes or {})
    if other := next((axis for axis in axes if axis not in DATA), None):
        raise SpecError(
            f"Spec(mesh={axes}): {takes}, all leaves in one message, and a rank of {other!r} has only its part of "
            f"them. Leave {other!r} out"
        )


def _check_feedback(spec: Spec) -> None:
    """Raises SpecError for a field that does not go with gradients whose codes feed back what they lose."""
    asked = f"Precision(reduce={spec.numerics.policy.reduce!r})"
    if spec.step is None and any(tx.feedback == REFUSE for tx in each_of(spec.optimizer)):
        raise SpecError(
            f"{asked}: what signs lose is sent with the next gradients, and this optimizer squares them or is not "
            "known to be linear in them: it would train worse than without. Give fzero.optim.freeze_nu(lr, after=...), "
            "whose second moment is frozen after a warm-up with whole gradients, or sgd; an own "
            "GradientTransformation that is linear says feedback='fed', one of a warm-up feedback='whole'. Or take "
            "reduce='int8', which needs no feedback"
        )
    if spec.reduce == "each":
        raise SpecError(
            f"Spec(reduce='each') with {asked}: what is lost is kept once for a step, not once for each microbatch. "
            "Leave reduce= out"
        )
    axes = dict(spec.parallel.axes or {})
    if other := next((axis for axis, n in axes.items() if axis not in DATA and n != 1), None):
        raise SpecError(
            f"Spec(mesh={axes}) with {asked}: what is lost is kept for whole leaves, and a rank of {other!r} has only "
            f"its part of them. Leave {other!r} out, or take reduce='int8', which needs no feedback"
        )
    if all(axis in axes and axes[axis] != 1 for axis in DATA):
        raise SpecError(
            f"Spec(mesh={axes}) with {asked}: gradients are summed over one data axis and then over the other, and "
            "signs of sums would lose more, which nobody keeps. Give one data axis, or take reduce='int8'"
        )


def check_spec(name: str, spec: Any) -> None:
    """Raises SpecError if `spec` is no Spec."""
    if not isinstance(spec, Spec):
        calls = {
            "init": "fzero.init(params, spec)",
            "lower": "fzero.lower(spec, params_like, batch_like)",
            "plan": "fzero.plan(spec, params_like, batch_like, world_size=..., hardware=...)",
            "load": "fzero.load(dir, spec) or fzero.load(dir, like=state)",
        }
        raise SpecError(f"fzero.{name} needed a Spec, got {type(spec).__name__}: call {calls[name]}")
    spec_fields.refuse_opened(name, spec)


OPTIMIZERS = {  # what users give a Spec and an optimizer takes
    "lr": "3e-4", "learning_rate": "3e-4", "weight_decay": "3e-4, weight_decay=0.1", "betas": "3e-4, betas=(0.9, 0.95)",
    "eps": "3e-4, eps=1e-8",
}  # fmt: skip


def _named(init: Callable[..., None]) -> Callable[..., None]:
    """`Spec.__init__` with an error that suggests the field for an unknown name."""
    defaults = {f.name: f.default for f in fields(Spec)}
    known = [*defaults]

    @short_tracebacks
    @functools.wraps(init)
    def checked(self: Spec, **values: Any) -> None:
        for name in values:
            if name not in known:
                mine = suggest(name, known)
                of_optimizer = f" It is the optimizer's: Spec(optimizer=fzero.optim.adamw({OPTIMIZERS.get(name)}), ...)"
                raise SpecError(f"Spec has no field {name!r}.{of_optimizer if name in OPTIMIZERS else mine}")
        if isinstance(folder := values.get("nvme_path"), os.PathLike):
            values["nvme_path"] = os.fsdecode(folder)  # which can be pasted, and kept
        init(self, **spec_fields.noted(self, values, defaults))

    return checked


Spec.__init__ = _named(Spec.__init__)  # type: ignore[method-assign]
