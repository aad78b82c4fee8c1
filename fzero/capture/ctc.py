"""ctc: torch's CTC loss in a trace: `fzero::ctc_loss`, whose results have shapes that no value decides.

Torch's kernel sizes its table of paths by the longest target, a value. Here the table has the size that padded targets
allow, (N, T, 2 * S + 1). Both torch's kernel and its backward run as they are, and read lengths when the program runs:
the same bits. The cost is memory, (2 * S + 1) * T numbers a row, where S is the padded length of (N, S) targets; of
targets in one dim it is the longest target where lengths are known, else the sum of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.capture.known import Known
from fzero.capture.refuse import REPLACED
from fzero.ir import op_info

aten = torch.ops.aten
_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int longest, int blank, "
    "bool zero_infinity) -> (Tensor, Tensor)"
)


def _results(log_probs: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, rows, _ = log_probs.shape
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, 2 * longest + 1))


@torch.library.register_fake("fzero::ctc_loss", lib=_LIBRARY)
def _fake(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, longest: int, blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _results(log_probs, longest)


@torch.library.impl("fzero::ctc_loss", "CompositeExplicitAutograd", lib=_LIBRARY)
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, longest: int, blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        loss, paths = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
        table = _results(log_probs, longest)[1].fill_(-torch.inf)
        table[:, :, : paths.shape[2]] = paths
    return loss, table


def traced(
    known: Known, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`aten::_ctc_loss` of lengths in tensors as `fzero::ctc_loss`."""
    longest = targets.shape[-1]
    if targets.ndim == 1 and (lengths := known.value(aten.clone.default, (target_lengths,), {})) is not None:
        longest = max(lengths[0].flatten().tolist(), default=0)
    result: tuple[Tensor, Tensor] = torch.ops.fzero.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, longest, blank, zero_infinity
    )
    return result


def _of_tensors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A CTC loss of torch's, with Python numbers for lengths as tensors: torch reads numbers into real memory."""

    def called(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any, **kw: Any
    ) -> Any:
        lengths = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths))
        return fn(log_probs, targets, *(x.to(log_probs.device) for x in lengths), *rest, **kw)

    return called


op_info.fill("traced", {aten._ctc_loss.Tensor: traced})
REPLACED.update({fn: _of_tensors(fn) for fn in (F.ctc_loss, torch.ctc_loss)})
