"""Where leaves are held never changes a bit: device, host, disk, and any mixture, at every stage and world.

`run` interprets the programs of all ranks with poisoned memory: a copy that is read before its move was waited for, or
after it is gone, is NaN. What lies on disk is memory there.
"""

from typing import Any

import pytest
from helpers import differing, run
from models import MLP, UNTIED, Model

import fzero
from fzero.compile import step

TX = {
    "adamw": lambda: fzero.optim.adamw(1e-2),
    "sgd": lambda: fzero.optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw8": lambda: fzero.optim.adamw8bit(1e-2),
    "muon": lambda: fzero.optim.muon(1e-2, others=fzero.optim.adamw(1e-2)),
}
HOMES: dict[str, Any] = {
    "optimizer on cpu": "optimizer",
    "all on cpu": "optimizer+params",
    "optimizer on nvme": {"opt_state/**": "nvme"},
    "all on nvme": {"**": "nvme"},
    "mixed": {"**/out*": "device", "opt_state/**": "nvme", "params/**": "cpu"},
}
OPTIONS: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (1, 3, "adamw", {}),
    (2, 0, "adamw", {"clip_norm": 0.3}),
    (2, 1, "sgd", {"microbatches": 2, "reduce": "end"}),
    (2, 2, "adamw", {"precision": "bf16", "clip_norm": 0.3}),
    (2, 3, "adamw", {"microbatches": 2, "reduce": "each", "clip_norm": 0.3}),
    (2, 3, "adamw", {"precision": "bf16"}),
    (2, 3, "adamw8", {}),
    (2, 3, "muon", {}),
    (3, 1, "adamw", {"trainable": "part"}),
    (3, 3, "adamw", {"precision": "fp16", "bucket_bytes": 256}),
)
CASES = [(*options, home) for options in OPTIONS for home in HOMES]


def spec(model: Model, tx: Any, **options: Any) -> fzero.Spec:
    rules = options.get("offload")
    if isinstance(rules, dict) and "nvme" in rules.values():
        options["nvme_path"] = "/tmp"
    return fzero.Spec(loss=model.loss, optimizer=tx, **options)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("model", ["mlp", "tiles of untied"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
@pytest.mark.parametrize(
    ("world", "zero", "tx", "options", "home"), CASES, ids=[f"{w}-{z}-{t}-{'-'.join(o)}-{h}" for w, z, t, o, h in CASES]
)
def test_bits_do_not_depend_on_where_leaves_are_held(
    world: int,
    zero: int,
    tx: str,
    options: dict[str, Any],
    home: str,
    update_on: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of whole columns; then tiles of 1,024 elements, several of the large columns."""
    if model != "mlp":
        monkeypatch.setattr(step, "TILE_BYTES", 4096)
    chosen = MLP if model == "mlp" else UNTIED
    if "trainable" in options:
        options = {"trainable": "layers/**" if chosen is MLP else "[eh]*"}
    params, optimizer = chosen.init(fzero.random.key(0)), TX[tx]()
    plain = run(spec(chosen, optimizer, zero=zero, **options), params, chosen.batch, world=world, steps=3)
    moved = spec(chosen, optimizer, zero=zero, offload=HOMES[home], update_on=update_on, **options)
    found = run(moved, params, chosen.batch, world=world, steps=3)
    assert differing(plain.final, found.final) == []
    assert plain.losses() == found.losses()
    assert any(op.moves for op in found.lowered.program.ops)
    assert not any(op.moves for op in plain.lowered.program.ops)
    tiled = any(ref.tile for op in found.lowered.program.ops for ref in op.reads)
    assert tiled == (model != "mlp")
