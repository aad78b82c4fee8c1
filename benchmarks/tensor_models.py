"""Which architectures run over two ranks of tp, fzero's way and transformers' own; a table.

The architectures are those of tests/support/hf_models.py. fzero takes `tp_plan(model)`, lowers the step and interprets
the program. transformers applies the model's own plan on two ranks over gloo. Either does one step of plain
gradient descent. "runs" stands where the loss and what the step changed agree with one rank's; else it says what not.

    python -m benchmarks.tensor_models                       # all
    python -m benchmarks.tensor_models Llama GPT-2
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import RunError, run_ranks, variables_of
from benchmarks.link import free_port, loopback
from benchmarks.machine import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
CASES: Mapping[str, Any] = importlib.import_module("hf_models").CASES
WORLD = 2
RATE = 0.1
TOLERANCE = 1e-4  # of the loss and of the change of all parameters, relative
WIDEST = 130

Result = tuple[float, dict[str, Tensor]]  # the loss before the step, parameters after it


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = CASES[name].make().eval()
    return model


def loss_of(name: str, call: Callable[..., Any], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A total and a count."""
    found: tuple[Tensor, Tensor] = CASES[name].loss(call(**{k: v for k, v in batch.items() if k != "labels"}), batch)
    return found


def alone(name: str, model: nn.Module) -> Result:
    """A step of one rank. Changes the model."""
    total, count = loss_of(name, model, CASES[name].batch(0, 0))
    loss = total / count
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
    return float(loss.detach()), {path: x.detach() for path, x in model.named_parameters()}


def by_fzero(name: str) -> Result:
    """The same over two ranks of tp, interpreted in this process."""
    import fzero
    from fzero import tree
    from fzero.interop import from_module, tp_plan
    from fzero.runtime.interpreter import interpret
    from fzero.state import storage
    from fzero.training import training_of

    model = build(name)
    params, buffers, apply = from_module(model)

    def loss(p: Any, batch: Any) -> fzero.Mean:
        return fzero.Mean(*loss_of(name, lambda **given: apply(p, buffers, **given), batch))

    spec = fzero.Spec(
        loss=loss,
        optimizer=fzero.optim.sgd(RATE),
        mesh={"tp": WORLD},
        shard=tp_plan(model),
        trainable=apply.trainable if apply.frozen else None,
    )
    batch = CASES[name].batch(0, 0)
    lowered = fzero.lower(spec, params, batch, world_size=WORLD)
    plan, program = lowered.plan, lowered.programs[0]
    _, leaves, _ = tree.flatten(training_of(spec).init(params, None))
    leaves = [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in leaves]
    inputs = [name for name, buffer in program.buffers.items() if buffer.kind == "batch"]
    constants = [name for name, buffer in program.buffers.items() if buffer.kind == "constant"]
    fixed = dict(zip(constants, lowered.graph.constants.values(), strict=True))
    given = dict(zip(inputs, [x for x in tree.flatten(batch)[1] if isinstance(x, Tensor)], strict=True))
    memory = [{**storage.shards(plan, leaves, rank), **fixed, **given} for rank in range(WORLD)]
    with torch.no_grad():
        ranks = interpret(dict.fromkeys(range(WORLD), program), memory)
    held = [{name: rank.memory[name] for name in plan.held_by(rank.rank)} for rank in ranks]
    after = {leaf.path.removeprefix("params/"): storage.join(plan, leaf, held) for leaf in plan.leaves}
    return float(ranks[0].memory[program.metrics["loss"]]), after


def by_transformers(name: str) -> Result:
    """The same as one of two ranks, by transformers' own plan and what its loading does with it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model: Any = build(name)
    for path in model.all_tied_weights_keys:  # when it loads a model, weights are tied after they are cut
        owner, _, leaf = path.rpartition(".")
        part = model.get_submodule(owner)
        setattr(part, leaf, nn.Parameter(getattr(part, leaf).detach().clone()))
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=WORLD, tp_plan="auto"))
    model = apply_tensor_parallelism(model, init_device_mesh("cpu", (WORLD,)), plan)
    model.tie_weights()
    loss, after = alone(name, model)
    return loss, {path: x.full_tensor() if isinstance(x, DTensor) else x for path, x in after.items()}


def judged(name: str, run: Callable[[], Result]) -> str:
    """`runs`, or what is wrong: the error, or how far the loss or the change of the parameters is from one rank's."""
    before = {path: x.detach().clone() for path, x in build(name).named_parameters()}
    loss, after = alone(name, build(name))
    try:
        found, changed = run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."
    if not abs(found - loss) <= TOLERANCE * abs(loss):
        return f"another loss: {found:.4f}, on one rank {loss:.4f}"
    gaps = {path: relative(changed[path] - before[path], x - before[path]) for path, x in after.items()}
    worst = max(gaps, key=lambda path: gaps[path])
    whole = relative(*(torch.cat([(of[path] - before[path]).flatten() for path in after]) for of in (changed, after)))
    return "runs" if whole <= TOLERANCE else f"wrong gradients (by {whole:.1e}; {worst} by {gaps[worst]:.1e})"


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def of_transformers(name: str) -> str:
    """What two ranks say, each a new process."""
    command = [sys.executable, "-m", "benchmarks.tensor_models", name, "--rank"]
    port = free_port()
    with loopback() as link:
        environments = [variables_of(WORLD, link, rank, port) for rank in range(WORLD)]
        try:
            return str(run_ranks(name, command, environments, link, 120.0)[0]["said"])
        except RunError as error:
            return str(error).splitlines()[-1][:WIDEST]


def rank_main(name: str, out: Path) -> None:
    dist.init_process_group("gloo")
    said = judged(name, partial(by_transformers, name))
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps({"said": said}))
    sys.stdout.flush()
    os._exit(0)  # the other rank may have failed elsewhere


def table(names: Sequence[str], say: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """What each side says of each architecture."""
    found = {}
    for name in names:
        found[name] = {"fzero": judged(name, partial(by_fzero, name)), "transformers": of_transformers(name)}
        say(f"{name}: {found[name]}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in CASES:
            parser.error(f"{name}: known are {', '.join(CASES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.rank:
        rank_main(args.names[0], args.out)
    began = time.monotonic()
    console = Console()
    console.width = max(console.width, 180)
    found = table(args.names or list(CASES), lambda text: console.print(text, markup=False, highlight=False))
    shown = Table(title="One step at tp = 2, beside one rank's")
    for column in ("architecture", "fzero", "transformers"):
        shown.add_column(column)
    for name, said in found.items():
        shown.add_row(name, said["fzero"], said["transformers"])
    console.print(shown)
    runs = {side: sum(said[side] == "runs" for said in found.values()) for side in ("fzero", "transformers")}
    console.print(f"of {len(found)}: fzero {runs['fzero']}, transformers {runs['transformers']}")
    console.print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
