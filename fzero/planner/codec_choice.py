"""codec_choice: whether messages of blocks pay, where the user allows them: a plan for each, and the fastest.

A codec changes the numbers, so none is tried that was not named (docs/slow-links.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fzero.errors import SpecError
from fzero.ir.decisions import CHOSEN, Choice, RunnerUp
from fzero.kernels.codecs import CODECS
from fzero.phases import each_of
from fzero.planner.nothing_fits import NothingFitsError
from fzero.planner.planned import Planned
from fzero.spec import Spec


def fastest_codec(spec: Spec, codecs: Sequence[str], gain: float, planned: Callable[[Spec], Planned]) -> Planned:
    """The plan without a codec, or with the one of `codecs`, for gathers and reductions, that saves more than `gain` of
    the step. What was chosen is in `choices["precision"]`.

    planned: the plan of a spec. Raises SpecError for a name that is no codec, and for a spec that has one already;
    NothingFitsError where nothing fits with any.
    """
    known = [name for name, codec in CODECS.items() if not codec.feedback]
    codecs = [codecs] if isinstance(codecs, str) else codecs
    if not isinstance(codecs, Sequence):
        raise SpecError(f"fzero.plan(codecs={codecs!r}): needed names, as ('int8', 'int4')")
    for name in codecs:
        if name not in known:
            raise SpecError(f"fzero.plan(codecs={tuple(codecs)!r}): {name!r} is none of {', '.join(known)}")
    policy = spec.numerics.policy
    if policy.gather is not None or policy.reduce in CODECS:
        raise SpecError(
            f"fzero.plan(codecs={tuple(codecs)!r}): the Spec's precision says gather={policy.gather!r}, "
            f"reduce={policy.reduce!r} already. Leave codecs out, or these"
        )
    found: dict[str, Planned] = {}
    refused: NothingFitsError | None = None
    for name in ("none", *codecs):
        try:
            found[name] = planned(spec if name == "none" else _coded(spec, name))
        except NothingFitsError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    seconds = {name: one.seconds for name, one in found.items()}
    best = min(seconds, key=lambda name: (seconds[name], name != "none"))
    if "none" in seconds and seconds["none"] <= seconds[best] / (1 - gain):
        best = "none"
    others = {name: s for name, s in seconds.items() if name != best}
    shown = ", ".join(f"{name} {s:.4g} s" for name, s in sorted(seconds.items(), key=lambda item: item[1]))
    second = min(others, key=others.__getitem__) if others else None
    runner_up = RunnerUp(found[second].spec.precision, seconds[second]) if second is not None else None
    value = found[best].spec.precision
    choice = Choice(value, f"by codec: {shown}", CHOSEN, seconds[best], runner_up, "s")
    return replace(found[best], choices={**found[best].choices, "precision": choice})


def _coded(spec: Spec, codec: str) -> Spec:
    """The spec with a codec for gathers and reductions; what it leaves open stays so."""
    policy = spec.numerics.policy
    local = any(getattr(tx, "takes", "mean") == "local" for tx in each_of(spec.optimizer))  # it reduces them itself
    reduce = codec if policy.reduce in (None, "fp32") and not local else policy.reduce
    return spec.but(precision=replace(policy, gather=codec, reduce=reduce))
