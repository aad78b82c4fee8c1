"""checked: a step lowered and verified. What the verifier refuses here is a fault of fzero, and is told as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fzero.compile import fault_report
from fzero.compile.kept_lowerings import NOTHING
from fzero.compile.lowered import Lowered
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.phase_states import check_phase_state
from fzero.compile.step import lower_step
from fzero.errors import VerifyError
from fzero.plan.state_plan import Plan
from fzero.spec import Spec
from fzero.verify.rules import verify

log = logging.getLogger("fzero")


def checked_step(
    spec: Spec,
    state: Any,
    batch: Any,
    plan: Plan,
    context: LoweringContext,
    fn: Callable[..., Any] | None = None,
    phase: str = "",
) -> Lowered:
    """`lower_step`, and its programs verified. phase: of a spec with phases, which one; "" for the first. What was read
    of kept lowerings and is refused is made anew.

    Raises VerifyError with a report (`fault_report`).
    """
    if spec.phases is not None and fn is None:
        phase = phase or spec.phases.first
    given, spec = spec, spec.in_phase(phase)

    def made(context: LoweringContext) -> Lowered:
        lowered: Lowered | None = None
        try:
            lowered = replace(lower_step(spec, state, batch, plan, context, fn), phase=phase)
            if context.verified:
                verify(lowered.roles)
        except VerifyError as error:
            if context.kept.read:
                raise  # no fault of fzero, as long as nothing was made
            error = VerifyError(f"{error} (in phase {phase!r})") if phase else error
            programs, reduce = ({}, "") if lowered is None else (lowered.roles, lowered.reduce)
            raise fault_report.explained(error, spec, plan, batch, programs, reduce) from error
        except Exception as error:
            if phase:
                check_phase_state(given, phase, state, error)
                error.add_note(f"in phase {phase!r}")
            raise
        return lowered

    try:
        return made(context)
    except Exception as error:
        if not context.kept.read:
            raise
        refused = str(error)
    again = made(replace(context, kept=NOTHING))  # raises the same where the step, and not what was read, is at fault
    log.warning("fzero: what was kept of a lowering is of no use, and it is made anew (%s)", refused)
    context.kept.forget()
    return again
