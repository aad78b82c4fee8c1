"""A codec that nobody built in: gradients of one bucket travel in bf16, scaled. It is one record, made here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import kept
import pytest
import torch
from helpers import Run, run
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.compile.lowered import Lowered
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.compile.step import fakes_on, lower_step
from fzero.errors import VerifyError
from fzero.plan.wires import Wire

SCALE, WORLD, BUCKET = 256.0, 4, "layers.0"
CPU = torch.device("cpu")
MESHES: dict[str, dict[str, int]] = {"dp": {"dp": 4}, "dp_out": {"dp_out": 2, "dp": 2}}
WAYS = [("dp", 0), ("dp", 1), ("dp", 2), ("dp", 3), ("dp_out", 3), ("dp_out", "hsdp")]


def encode(x: Tensor) -> Tensor:
    return (x * SCALE).to(torch.bfloat16)


def decode(x: Tensor) -> Tensor:
    return x.to(torch.float32) / SCALE


CODEC = Wire("scaled bf16", torch.bfloat16, encode, decode)


def lowered(spec: fzero.Spec, params: Any, batch: Any, world: int, codec: Wire | None) -> Lowered:
    """The spec's program, with the gradients of one bucket on this wire."""
    recipe = recipe_for(spec, params, None, CPU)
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh_of(spec, world))
    rows = {**plan.bucket_layouts, BUCKET: replace(plan.bucket_layouts[BUCKET], wire=codec)}
    state = tree.unflatten(recipe.treedef, recipe.values)
    return lower_step(spec, state, fakes_on(batch, CPU), replace(plan, bucket_layouts=rows), LoweringContext())


def values(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def start() -> Any:
    made = torch.Generator().manual_seed(7)
    return tree.map(lambda x: torch.randn(x.shape, generator=made) / 4, cases.layers())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """One step of SGD, on a wire of the bucket's own or without; every program is verified."""

    def train(codec: Wire | None, **given: Any) -> Run:
        def lower(spec: fzero.Spec, params: Any, batch: Any, world: int, key: Any, phase: str) -> Lowered:
            made = lowered(spec, params, batch, world, codec)
            fzero.verify(made.programs)
            return made

        monkeypatch.setattr(kept, "lower", lower)
        spec = fzero.Spec(loss=cases.layers_loss, optimizer=optim.sgd(0.5), transfers="p2p", **given)
        return run(spec, start(), values, world=WORLD, steps=1)

    return train


def gradients() -> list[Any]:
    """Those of each rank's part of the batch."""
    found = []
    for rank in range(WORLD):
        params = tree.map(lambda x: x.clone().requires_grad_(), start())
        cases.layers_loss(params, values(rank)).backward()
        found.append([x.grad for x in tree.flatten(params["layers"][0])[1]])
    return found


def summed(parts: list[Tensor], mesh: dict[str, int]) -> Tensor:
    """The mean over ranks as it travels: over each axis it is encoded, added in rank order, and decoded. The last sum
    is divided before it is decoded."""
    sizes = [n for _, n in reversed(mesh.items())]
    for number, n in enumerate(sizes):
        coded = [encode(part) for part in parts]
        sums = [sum(coded[i + 1 : i + n], coded[i]) for i in range(0, len(coded), n)]
        parts = [decode(x / WORLD if number == len(sizes) - 1 else x) for x in sums]
    return parts[0]


@pytest.mark.parametrize(("mesh", "zero"), WAYS)
@pytest.mark.sampled(2)
def test_one_bucket_is_coded_and_every_other_keeps_its_bits(trained: Any, mesh: str, zero: Any) -> None:
    coded, plain = (trained(codec, mesh=MESHES[mesh], zero=zero) for codec in (CODEC, None))
    others = [path for path in plain.paths if not path.startswith("params/layers/0/")]
    assert all(torch.equal(coded.final[path], plain.final[path]) for path in others)
    for i, path in enumerate(["b", "w"]):
        mean = summed([grads[i] for grads in gradients()], MESHES[mesh])
        wanted = start()["layers"][0][path] - 0.5 * mean
        assert torch.equal(coded.final[f"params/layers/0/{path}"], wanted)
        assert not torch.equal(wanted, plain.final[f"params/layers/0/{path}"])


@pytest.mark.parametrize(("mesh", "zero"), WAYS)
def test_only_that_bucket_travels_in_half_the_bytes(trained: Any, mesh: str, zero: Any) -> None:
    program = trained(CODEC, mesh=MESHES[mesh], zero=zero).lowered.program
    sums = [program.buffers[op.reads[0].name] for op in program.ops if op.reduces and not op.row.small]
    dtypes = {b.bucket: b.dtype for b in sums}
    assert dtypes.pop(BUCKET) is torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert any(op.why.startswith("scaled bf16 gradients of layers.0") for op in program.ops)


def test_what_the_codec_rounds_off_is_part_of_the_meaning() -> None:
    """A program with the codec is none of the step without it, and the reverse."""
    spec = fzero.Spec(loss=cases.layers_loss, optimizer=optim.sgd(0.5), transfers="p2p", zero=2)
    coded, plain = (lowered(spec, start(), values(0), 2, codec).program for codec in (CODEC, None))
    assert coded.meaning != plain.meaning
    for program, other in ((coded, plain), (plain, coded)):
        fzero.verify(program)
        with pytest.raises(VerifyError):
            fzero.verify(replace(program, meaning=other.meaning))


def test_a_codec_without_its_decoder_is_refused() -> None:
    """The judge writes the codec into the meaning by itself: what lowering forgets is found."""
    spec = fzero.Spec(loss=cases.layers_loss, optimizer=optim.sgd(0.5), transfers="p2p", zero=2)
    whole = lowered(spec, start(), values(0), 2, CODEC).program
    half = lowered(spec, start(), values(0), 2, replace(CODEC, decode=lambda x: x.to(torch.float32))).program
    with pytest.raises(VerifyError):
        fzero.verify(replace(half, meaning=whole.meaning))


def test_four_files_know_what_a_wire_is() -> None:
    """The record, the layout that asks for it, the builder that writes it and the judge. A codec adds its record, and
    is asked for where the layout is made."""
    root = Path(fzero.__file__).parent
    named = re.compile(r"^(class Wire\b|from fzero\.plan\.wires import)", re.MULTILINE)
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if named.search(path.read_text("utf-8"))}
    assert found == {"plan/wires.py", "plan/stages.py", "lowering/lower_region.py", "verify/meaning.py"}
