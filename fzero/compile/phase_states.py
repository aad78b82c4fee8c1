"""phase_states: why an optimizer of `fzero.Phases` cannot work on the state that the first phase's made.

It is asked when the step of a phase cannot be lowered. Until then only what an update reads counts, and not what its
own `init` would make.
"""

from __future__ import annotations

from typing import Any

from fzero import tree
from fzero.capture.provenance import describe
from fzero.errors import SpecError, leaf_name
from fzero.phases import Phases
from fzero.spec import Spec
from fzero.training import training_of


def check_phase_state(spec: Spec, phase: str, state: Any, failure: Exception) -> None:
    """Raises SpecError, from what ended the lowering of a phase, if its optimizer's state differs from the run's.

    Of `state` only shapes and dtypes count.
    """
    phases = spec.optimizer
    if not isinstance(phases, Phases) or phase == phases.first:
        return
    try:
        made = training_of(spec.in_phase(phase)).init(state["params"])["opt_state"]
    except Exception:  # of the optimizer, as `failure` may be
        return
    held, own = _leaves(state["opt_state"]), _leaves(made)
    told = [f"{leaf_name('state', f'opt_state/{path}')}, which it has not" for path in held if path not in own]
    told += [f"no {leaf_name('state', f'opt_state/{path}')}, which it needs" for path in own if path not in held]
    told += [
        f"{leaf_name('state', f'opt_state/{path}')} as {held[path]}, and its own is {own[path]}"
        for path in own
        if path in held and held[path] != own[path]
    ]
    if told:
        more = f", and {len(told) - 3} more" if len(told) > 3 else ""
        raise SpecError(
            f"Phases: the optimizer of phase {phase!r} cannot work on the state that phase {phases.first!r} made: it "
            f"holds {'; '.join(told[:3])}{more}. Give all phases one kind of optimizer with the same leaves, as "
            "fzero.optim.sgd(lr, momentum=0.9) with other numbers"
        ) from failure


def _leaves(opt_state: Any) -> dict[str, str]:
    """Shape and dtype of each leaf by path."""
    return {path: describe(leaf) for path, leaf in zip(*tree.flatten(opt_state)[:2], strict=True)}
