"""given_fields: what a configuration gives: fields of a Spec, what is beside them, and a line for each of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import optim
from fzero.errors import SpecError
from fzero.interop.config.config_calls import ConfigCall, text_of, value_of
from fzero.interop.config.ledger import Ledger, LedgerLine, table_of
from fzero.shard.partition import P
from fzero.spec import Spec


@dataclass(frozen=True, eq=False)
class Given(Mapping[str, Any]):
    """The fields of a `Spec`, as a mapping: `fzero.Spec(loss=loss, **given)`. Immutable.

    where: the file. ranks: all of them. micro_batch: rows of a micro batch. rank_batch: rows of the batch that a rank
    gives to `fzero.step`; global_batch: rows over all ranks. every: steps between two printed lines, or None.
    trackers: name to its own settings, of those that are enabled. export_dtype: that of an export, or None for the held
    one. schedule: the learning rate, if the document has a schedule and no optimizer. profile, dump, log_level: what
    the document asks to see. lines: what became of each key; `print(given)` shows them.

    >>> from fzero.interop import ds_config
    >>> given = ds_config({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}, world_size=4)
    >>> dict(given), given.rank_batch, given.global_batch
    ({'zero': 2, 'microbatches': 1, 'clip_norm': 1.0, 'allow_unused': True}, 2, 8)
    """

    where: str
    ranks: int
    expressions: Mapping[str, Any]
    lines: tuple[LedgerLine, ...] = ()
    micro_batch: int | None = None
    rank_batch: int | None = None
    global_batch: int | None = None
    every: int | None = None
    trackers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    export_dtype: torch.dtype | None = None
    schedule: optim.Schedule | None = None
    profile: bool = False
    dump: bool = False
    log_level: str | None = None
    _values: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._values.update({name: value_of(expression) for name, expression in self.expressions.items()})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __str__(self) -> str:
        """A line for each key: its path, its value, and what became of it."""
        return "\n".join([self._head(), *([table_of(self.lines)] if self.lines else [])])

    def _head(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.rank_batch is None:
            return f"{self.where}, on {ranks}"
        return f"{self.where}, on {ranks}: {self.global_batch} rows a step; a rank's batch has {self.rank_batch}"

    def python(self) -> str:
        """The Python that does the same without the file.

        >>> from fzero.interop import ds_config
        >>> print(ds_config({"train_batch_size": 8, "optimizer": {"type": "Adam"}}, world_size=2).python())
        import fzero
        <BLANKLINE>
        spec = fzero.Spec(
            loss=loss,
            optimizer=fzero.optim.adamw(0.001, weight_decay=0.0),
            zero=0,
            microbatches=1,
            clip_norm=1.0,
            allow_unused=True,
        )
        """
        named = {"loss": "loss", **({} if "optimizer" in self else {"optimizer": "optimizer"})}
        named |= {name: text_of(expression) for name, expression in self.expressions.items()}
        written = "".join(f"    {name}={text},\n" for name, text in named.items())
        return f"import fzero\n\nspec = fzero.Spec(\n{written})"


def finish(ledger: Ledger, expressions: Mapping[str, Any], owners: Mapping[str, str], **beside: Any) -> Given:
    """Closes the ledger and returns what its document gives. A value that `Spec` or an optimizer refuses is a refusal
    at the path that `owners` names for its field. Raises ConfigError."""
    named = {"loss": _no_loss, "optimizer": ConfigCall("fzero.optim.sgd", (0.0,)), **expressions}
    if "tp" in (expressions.get("mesh") or {}):
        named.setdefault("shard", {"**": P("tp")})  # the caller's: rules of a model
    values: dict[str, Any] = {}
    for name, expression in named.items():
        with _refusing(ledger, owners.get(name, "")):
            values[name] = value_of(expression)
    if not ledger.refusals:
        with _refusing(ledger, owners.get("mesh", "")):
            Spec(**values)
    lines = ledger.close()
    return Given(ledger.where, expressions=dict(expressions), lines=lines, **beside)


@contextmanager
def _refusing(ledger: Ledger, path: str) -> Iterator[None]:
    """What fzero refuses within is a refusal at this path."""
    try:
        yield
    except SpecError as error:
        ledger.refuse(path, str(error))


def _no_loss(params: Any, batch: Any) -> Any:
    """Stands for the caller's loss while the other fields are checked."""
