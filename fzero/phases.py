"""phases: parts of a run that have programs of their own, chosen by the step number.

The number is known on the host, so no value is read from the device. An optimizer whose first steps differ from its
later ones, work that is done every H-th step, and local steps between reductions are phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from fzero.errors import SpecError

T = TypeVar("T")


@dataclass(frozen=True)
class Phases(Generic[T]):
    """A value for each phase of a run, and which phase a step is of.

    `Spec(optimizer=Phases(...))` takes optimizers, `Spec(step=Phases(...))` steps. Each phase is a program of its own
    over one state, so all of them keep its structure, shapes and dtypes; the first state is made by the optimizer of
    the first phase. The programs of all phases are lowered and verified at the first step with a batch of new shapes.

    of: the name of the phase of a step, from its number: 0 for the first. A pure function, the same on every rank. The
    number is `state.step`: it is in checkpoints, and a step that `nonfinite="skip"` discards counts too.
    each: the values by name.

    Raises SpecError if `of` gives another name.

    >>> phases = Phases(lambda step: "outer" if step % 3 == 2 else "inner", {"inner": 1, "outer": 2})
    >>> [phases.at(step) for step in range(4)], phases.first, phases["outer"]
    (['inner', 'inner', 'outer', 'inner'], 'inner', 2)
    """

    of: Callable[[int], str]
    each: Mapping[str, T]

    def __post_init__(self) -> None:
        if not callable(self.of):
            raise SpecError(f"Phases(of={self.of!r}): needed a function from a step number to the name of its phase")
        if not isinstance(self.each, Mapping) or not all(isinstance(name, str) and name for name in self.each):
            raise SpecError(f"Phases(each={self.each!r}): needed a dict with a value for each name")
        object.__setattr__(self, "each", MappingProxyType(dict(self.each)))
        self.at(0)

    def at(self, step: int) -> str:
        """The name of the phase that a step is of. Raises SpecError if there is none of that name."""
        name = self.of(step)
        if not isinstance(name, str) or name not in self.each:
            raise SpecError(
                f"Phases: step {step} is of phase {name!r}: needed one of {', '.join(map(repr, self.each))}"
            )
        return name

    @property
    def first(self) -> str:
        """The name of the phase of step 0."""
        return self.at(0)

    def __getitem__(self, name: str) -> T:
        return self.each[name]

    @classmethod
    def after(cls, steps: int, before: tuple[str, T], then: tuple[str, T]) -> Phases[T]:
        """Two phases: one for so many steps, the other for the rest of the run.

        >>> Phases.after(2, ("warmup", 1), ("coded", 2)).at(2)
        'coded'

        Raises SpecError for two phases of one name, and for steps that are no int.
        """
        if type(steps) is not int:
            raise SpecError(f"Phases.after(steps={steps!r}): needed an int, the number of steps of the first phase")
        if before[0] == then[0]:
            raise SpecError(f"Phases.after: both phases are named {then[0]!r}: needed two names")
        return cls(lambda step: before[0] if step < steps else then[0], dict((before, then)))

    def __reduce__(self) -> tuple[Any, ...]:  # for copies: `each` is a view of a dict, of which none can be made
        return type(self), (self.of, dict(self.each))

    def __getattr__(self, name: str) -> Any:
        if name in ("init", "update"):
            raise SpecError(
                f"Phases: an optimizer with phases ({', '.join(self.each)}) has no {name} of its own, since its step "
                f"number decides. Give it to Spec(optimizer=...) as it is; wrap the optimizer of each phase instead"
            )
        raise AttributeError(name)


def each_of(value: Any) -> tuple[Any, ...]:
    """The values of all phases; without phases the value itself.

    >>> each_of(Phases(lambda step: "a", {"a": 1, "b": 2})), each_of(3)
    ((1, 2), (3,))
    """
    return tuple(value.each.values()) if isinstance(value, Phases) else (value,)
