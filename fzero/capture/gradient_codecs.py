"""gradient_codecs: whether the gradients of a `value_and_grad` can travel in the codec that its policy asks for."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero.capture.context import Tracing
from fzero.capture.joint import Joint
from fzero.capture.provenance import describe
from fzero.errors import CaptureError, leaf_name
from fzero.kernels.codecs import CODECS


def check_codec(joint: Joint, tracing: Tracing | None, error: Any) -> None:
    """Raises CaptureError where gradients would not travel in the codec that is asked for."""
    chosen = joint.precision
    if error is not None:
        _check_error(joint, error)
    if chosen.reduce not in CODECS or tracing is None:
        return
    if not joint.reduce:
        raise CaptureError(
            f"Precision(reduce={chosen.reduce!r}): these gradients stay on their rank (reduce=False, or an optimizer "
            f"with takes='local'), so none travels in it. Write fzero.coded_mean(grads, codec={chosen.reduce!r}) where "
            "they are averaged, and take reduce= out"
        )
    if chosen.reduce != tracing.precision.reduce:
        raise CaptureError(
            f"value_and_grad(precision=Precision(reduce={chosen.reduce!r})): the codec of gradients lies in the layout "
            "of the state, which the Spec says: Spec(precision=...) with the same reduce="
        )
    if chosen.feeds_back and error is None:
        raise CaptureError(
            f"value_and_grad with Precision(reduce={chosen.reduce!r}): what codes lose is sent with the next "
            "gradients, so it is a part of the state: keep fzero.first_error(params, precision) there, give it as "
            "value_and_grad(loss, error=state['error']), and return the new one"
        )


def _check_error(joint: Joint, error: Any) -> None:
    """Raises CaptureError for errors of other leaves than those whose gradients travel in codes."""
    chosen = joint.precision
    if not chosen.feeds_back:
        raise CaptureError(
            f"value_and_grad(error=...): Precision(reduce={chosen.reduce!r}) feeds nothing back; reduce='sign' does"
        )
    if joint.scale is not None:
        raise CaptureError(
            "value_and_grad(error=..., scale=...): what codes lose of one step is sent with the next, in the units of "
            "a loss scale that changes. Leave scale out: bf16 needs none"
        )
    wanted = [path for path, leaf in zip(joint.paths, joint.leaves, strict=True) if chosen.coding(path, leaf).reduce]
    paths, leaves, _ = tree.flatten(error)
    if odd := sorted({*wanted} ^ {*paths}):
        raise CaptureError(
            f"value_and_grad(error=...): error{' lacks' if odd[0] in wanted else ' has'} {odd[0]!r}: "
            "fzero.first_error(params, precision) makes the first, from the same parameters"
        )
    held = dict(zip(joint.paths, joint.leaves, strict=True))
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (held[path].shape, torch.float32):
            raise CaptureError(
                f"value_and_grad(error=...): {leaf_name('error', path)} is {describe(leaf)}, needed fp32 of shape "
                f"{tuple(held[path].shape)}"
            )
