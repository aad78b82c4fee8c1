"""options: how a case is run: its form, world, optimizer and the fields of `fzero.Spec`, drawn as texts."""

from __future__ import annotations

import random

from lab.fuzz.case import Options

SMOOTH = (
    "optim.sgd(0.1)",
    "optim.sgd(0.1)",
    "optim.sgd(0.1, momentum=0.9, nesterov=True)",
    "optim.sgd(optim.warmup_cosine(0.1, 2, 10))",
    "optim.adam(0.01, eps=1e-2)",
    "optim.adamw(0.01, eps=1e-2, weight_decay=0.1)",
    "optim.chain(optim.clip_by_value(0.5), optim.sgd(0.1))",
    "optim.chain(optim.add_decayed_weights(0.1), optim.trace(0.9), optim.scale(-0.1))",
)
ROUGH = (
    "optim.lion(0.01)",
    "optim.adamw8bit(0.01)",
    "optim.adafactor(0.01)",
    "optim.muon(0.02, others=optim.adamw(0.01))",
)


def draw_options(rng: random.Random) -> Options:
    """Mostly gradients on one rank, which is cheap; else a training step on one to three."""
    keyed = rng.random() < 0.08
    if rng.random() < 0.75:
        spec = {"microbatches": "2"} if rng.random() < 0.06 else {}
        return Options(spec=spec, keyed=keyed, interpret=rng.random() < 0.3)
    world = rng.choice((1, 2, 2, 2, 3))
    exact = rng.random() < 0.85
    spec = {
        "optimizer": rng.choice(SMOOTH if exact else ROUGH),
        "zero": rng.choice(("0", "1", "2", "3", "3", '{"**/w0": 1, "**": 3}')),
        "microbatches": rng.choice(("1", "1", "1", "2", "3")),
        "reduce": rng.choice(("None", '"each"', '"end"')),
        "bucket_bytes": rng.choice(("64", "300", "None")),
        "prefetch": rng.choice(("None", "0", "1", "2")),
        "overlap": rng.choice(("True", "True", "False")),
        "remat": rng.choice(('"none"', '"none"', '"full"')),
    }
    chance = rng.random()
    if chance < 0.2:
        spec["clip_norm"] = "0.5"
    elif chance < 0.3:
        spec["clip_value"] = "0.1"
    elif chance < 0.4:
        spec["nonfinite"] = '"skip"'
    if rng.random() < 0.15:
        spec["trainable"] = rng.choice(('["w0"]', '["w0", "w1"]'))
    other: dict[str, str] = {}
    if rng.random() < 0.25:
        if spec["reduce"] == "None":
            spec["reduce"] = '"each"'
        other = {"zero": rng.choice(("0", "1", "2", "3")), "prefetch": rng.choice(("0", "1")), "overlap": "True"}
        other["remat"] = rng.choice(('"none"', '"full"'))
        if "clip_norm" not in spec:
            other["bucket_bytes"] = rng.choice(("64", "None"))
    return Options("training", world, spec, other, keyed, rng.random() < 0.4, exact)
