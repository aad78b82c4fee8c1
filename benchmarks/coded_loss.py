"""The training loss of optimizers whose gradients or momenta travel in codes, compared with Adam's, by seed.

A transformer of two layers on bytes of the .py files of Python's standard library, on ranks of this process
(`fzero.runtime.interpreter`, whose results are those of real ranks bit for bit). Variants of one seed see the same
parameters and batches, so the gaps to Adam are paired.

    python -m benchmarks.coded_loss --seeds 4 --steps 600 --out coded_loss

What a file of that name has is not trained again.

`unfed` and `live` are controls: signs without error feedback, and signs fed back into a live second moment. They must
lose at least 0.1 nats, or the comparison says nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from benchmarks.machine import ROOT
from fzero import optim, tree
from fzero.capture.graph import PerRank
from fzero.phases import Phases
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from fzero.training import training_of

RANKS, ROWS, LENGTH, WIDTH, LAYERS = 4, 4, 64, 64, 2
LR, BETAS = 3e-3, (0.9, 0.99)
LAST = 50  # steps whose mean loss is compared
EXACT = ("**/one", "**/two", "last")  # the norms; all else is coded
CONTROLS = {"unfed": 0.1, "live": 0.1}


def first(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g) * 0.02  # noqa: E731
    layer = lambda: {  # noqa: E731
        "one": torch.ones(WIDTH), "two": torch.ones(WIDTH), "qkv": draw(3 * WIDTH, WIDTH), "out": draw(WIDTH, WIDTH),
        "up": draw(4 * WIDTH, WIDTH), "down": draw(WIDTH, 4 * WIDTH),
    }  # fmt: skip
    return {
        "tokens": draw(128, WIDTH), "places": draw(LENGTH, WIDTH), "last": torch.ones(WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }  # fmt: skip


def loss(p: Any, batch: Tensor) -> Tensor:
    seen, wanted = batch[:, :-1], batch[:, 1:]
    x = p["tokens"][seen] + p["places"]
    for layer in p["layers"]:
        q, k, v = (F.layer_norm(x, (WIDTH,), layer["one"]) @ layer["qkv"].T).chunk(3, -1)
        q, k, v = (y.view(*y.shape[:2], 4, WIDTH // 4).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + mixed @ layer["out"].T
        x = x + F.gelu(F.layer_norm(x, (WIDTH,), layer["two"]) @ layer["up"].T) @ layer["down"].T
    logits = F.layer_norm(x, (WIDTH,), p["last"]) @ p["tokens"].T
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def text() -> Tensor:
    """Bytes below 128 of the standard library's first files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    whole = b"".join(path.read_bytes() for path in sorted(root.glob("*.py"))[:80])
    return torch.tensor([byte for byte in whole if byte < 128])


# --- variants ---------------------------------------------------------------------------------------------------------


def rate_of(steps: int) -> optim.Schedule:
    return optim.warmup_cosine(LR, steps // 20, steps)


def coded_gradients(steps: int, codec: str, feedback: bool) -> optim.GradientTransformation:
    """Adam of gradients whose mean has travelled in codes."""
    adam = optim.adamw(rate_of(steps), BETAS, weight_decay=0.0)

    def init(params: Any) -> Any:
        return adam.init(params), fzero.coded_error(params) if feedback else None

    def update(grads: Any, state: Any, params: Any) -> Any:
        mean, owed = fzero.coded_mean(grads, state[1], codec)
        updates, inner = adam.update(mean, state[0], params)
        return updates, (inner, owed)

    return optim.GradientTransformation(init, update, takes="local")


def without_feedback(phases: Phases[optim.GradientTransformation]) -> Phases[optim.GradientTransformation]:
    """1-bit Adam that forgets what its codes have lost."""
    coded = phases["coded"]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, after = coded.update(grads, state, params)
        return updates, after._replace(error=tree.map(torch.zeros_like, after.error))

    return Phases(phases.of, {**phases.each, "coded": coded._replace(update=update)})


def _coded(gather: str | None, reduce: str) -> fzero.Precision:
    return fzero.Precision(gather=gather, reduce=reduce, exact=EXACT)


def variants(steps: int) -> dict[str, Any]:
    """By name, optimizers, or (the first state of params, the step), or fields of a Spec at stage 2."""
    sys.path.insert(0, str(ROOT / "examples"))
    recipes: Any = importlib.import_module("coded_training")
    warm, rate, faster = steps // 5, rate_of(steps), optim.warmup_cosine(1e-2, steps // 20, steps)
    adam = optim.adamw(rate, BETAS, weight_decay=0.0)
    onebit, frozen = optim.onebit_adam(rate, warm, BETAS), optim.freeze_nu(rate, warm, BETAS, weight_decay=0.0)
    return {
        "adam": adam,
        "both int8": {"optimizer": adam, "precision": _coded("int8", "int8")},
        "int8 and int4": {"optimizer": adam, "precision": _coded("int8", "int4")},
        "both int4": {"optimizer": adam, "precision": _coded("int4", "int4")},
        "signs": {"optimizer": frozen, "precision": _coded(None, "sign")},
        "int8 and signs": {"optimizer": frozen, "precision": _coded("int8", "sign")},
        "int8": coded_gradients(steps, "int8", False),
        "int4": coded_gradients(steps, "int4", False),
        "frozen": frozen,
        "onebit": onebit,
        "unfed": without_feedback(onebit),
        "live": coded_gradients(steps, "sign", True),
        "diloco": recipes.diloco(loss, adam, 16),
        "zero-one": recipes.zero_one_adam(loss, rate, steps // 2, BETAS, doubled_after=warm),
        "lamb": optim.lamb(faster, BETAS),
        "onebit-lamb": recipes.onebit_lamb(faster, warm, BETAS),
    }


BASE = {"onebit-lamb": "lamb"}  # what a variant is compared with; the others with Adam


# --- runs -------------------------------------------------------------------------------------------------------------


def trained(optimizer: Any, seed: int, steps: int, data: Tensor) -> list[float]:
    """The loss of each step."""
    if isinstance(optimizer, tuple) and not hasattr(optimizer, "update"):
        start, step_of = optimizer
        spec, params = fzero.Spec(step=step_of, zero=0), start(first(seed))
    elif isinstance(optimizer, dict):
        spec, params = fzero.Spec(loss=loss, zero=2, **optimizer), first(seed)
    else:
        spec, params = fzero.Spec(loss=loss, optimizer=optimizer, zero=0), first(seed)
    like = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    names = [""] if spec.phases is None else [*spec.phases.each]
    lowered = {name: fzero.lower(spec, params, like, world_size=RANKS, phase=name) for name in names}
    plan = next(iter(lowered.values())).plan
    leaves = tree.flatten(params if spec.loss is None else training_of(spec).init(params))[1]
    leaves = [leaf.on(RANKS) if isinstance(leaf, PerRank) else leaf for leaf in leaves]
    memory = [storage.shards(plan, leaves, rank) for rank in range(RANKS)]
    batches = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)]
    found = []
    for step in range(steps):
        one = lowered["" if spec.phases is None else spec.phases.at(step)]
        (given,) = (name for name, b in one.program.buffers.items() if b.kind == "batch")
        for own, generator in zip(memory, batches, strict=True):
            at = torch.randint(len(data) - LENGTH - 1, (ROWS, 1), generator=generator)
            own[given] = data[at + torch.arange(LENGTH + 1)]
        with torch.no_grad():
            ranks = interpret(dict.fromkeys(range(RANKS), one.program), memory, poison=False)
        found.append(float(ranks[0].memory[one.program.metrics["loss"]]))
        memory = [{name: rank.memory[name] for name in plan.buffers} for rank in ranks]
        if not math.isfinite(found[-1]):
            break
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", default="", help="names of variants, with commas between")
    parser.add_argument("--out", default="coded_loss")
    asked = parser.parse_args(argv)
    data = text()
    only = [*filter(None, asked.only.split(","))]
    place = ROOT / "benchmarks" / "results" / f"{asked.out}.json"
    curves: dict[str, dict[str, list[float]]] = json.loads(place.read_text())["curves"] if place.exists() else {}
    for seed in range(asked.seeds):
        for name, optimizer in variants(asked.steps).items():
            if (only and name not in only) or str(seed) in curves.get(name, {}):
                continue
            begun = time.monotonic()
            curves.setdefault(name, {})[str(seed)] = curve = trained(optimizer, seed, asked.steps, data)
            print(name, seed, f"{_last(curve):.4f}", f"{time.monotonic() - begun:.0f} s", flush=True)
            record = {"ranks": RANKS, "steps": asked.steps, "last": LAST, "gaps": gaps(curves), "curves": curves}
            place.write_text(json.dumps(record))
    table = gaps(curves)
    for name, (mean, each) in table.items():
        print(f"{name:12} {mean:+.4f} nats to {BASE.get(name, 'adam')}  ({', '.join(f'{x:+.4f}' for x in each)})")


def gaps(curves: dict[str, dict[str, list[float]]]) -> dict[str, tuple[float, list[float]]]:
    """By variant, the mean and each seed's difference of the loss to what it is compared with."""
    found = {}
    for name, seeds in curves.items():
        base = BASE.get(name, "adam")
        if name != base and {*seeds} & {*curves.get(base, {})}:
            each = [_last(curve) - _last(curves[base][seed]) for seed, curve in seeds.items() if seed in curves[base]]
            found[name] = statistics.mean(each), each
    return found


def _last(curve: list[float]) -> float:
    return statistics.mean(curve[-LAST:]) if math.isfinite(curve[-1]) else math.inf


if __name__ == "__main__":
    main()
