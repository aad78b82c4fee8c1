"""block_layouts: bit for bit DeepSpeed's, and its refusals refused; digests by `record_deepspeed.py`."""

from __future__ import annotations

import json

import record_deepspeed

from fzero.errors import SpecError
from fzero.sparse import block_layouts as layouts


def test_bits_and_refusals_are_deepspeeds() -> None:
    recorded, cases = json.loads(record_deepspeed.GOLDEN.read_text())["layouts"], record_deepspeed.cases()
    assert len(recorded) == len(cases)
    differing = []
    for (name, n, parameters), want in zip(cases, recorded, strict=True):
        try:
            got = record_deepspeed.digest(getattr(layouts, name)(4, 16 * n, block=16, **parameters))
        except SpecError:
            got = "refused"
        if got != want:
            differing.append((name, n, parameters, got, want))
    assert not differing, (len(differing), differing[:6])
