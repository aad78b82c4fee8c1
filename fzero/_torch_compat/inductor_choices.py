"""inductor_choices: where fzero's clusters want another kernel of Inductor's than its heuristics choose.

A reduction over rows of up to `ROW` elements holds its row in registers, which is read once. Inductor's own limit is
1,024; above it a norm reads its row twice or three times. A norm of 8,192 rows of 1,280 in 16 bits took 42 us on an
H100 that way, where its bytes take 14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

ROW = 4096


@cache
def _choices() -> Any:
    from torch._inductor.choices import InductorChoices  # 2.11.0, 2.13.0
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        """Inductor's, but for rows."""

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            along = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
            if along and V.graph.sizevars.statically_known_leq(features.reduction_numel, ROW):
                return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    return Choices


@contextlib.contextmanager
def rows_in_registers() -> Iterator[None]:
    """Inductor makes its choices so while this is open, in this thread. Its cache keeps such code apart."""
    import torch.compiler.config as shared
    from torch._inductor.virtualized import V

    tag = f"{shared.cache_key_tag} rows of {ROW} in registers"
    with V.set_choices_handler(_choices()()), shared.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield
