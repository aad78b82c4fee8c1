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
    for number, ((name, n, parameters), want) in enumerate(zip(cases, recorded, strict=True)):
        drawn = record_deepspeed.random_blocks(number, name, n, parameters)
        given = parameters if drawn is None else {**parameters, "random_blocks": drawn}
        if drawn is None and parameters.get("num_random_blocks"):
            assert want == "refused", "DeepSpeed raises where it cannot draw"
            continue
        try:
            layout = getattr(layouts, name)(4, 16 * n, block=16, **given)
            got = record_deepspeed.digest(layout.table(4))
        except SpecError:
            got = "refused"
        if got != want:
            differing.append((name, n, parameters, got, want))
    assert not differing, (len(differing), differing[:6])
