"""place_moves: what is brought when, held how long, and written back when: as text, of small steps.

In `SHARDED` each use gathers a parameter that came from the host for it. In `WHOLE` a rank updates its slice of
parameters that it holds whole, and gathers them into place. In `AMID` updates of tiles stand between the layers of the
backward. In `WAITS` a gradient waits on the host. In `WRITTEN` no op reads what
is held: nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_programs import buffer_lines, shown, written
from torch import Tensor

import fzero
from fzero.ir.program import Program, moved_bytes
from fzero.ir.records import DEVICE
from fzero.passes.offload.place_moves import place_moves

TILE = "[0:512:mine:{0}*128]"
TILES = [f"[0:512:mine:{n}*64]" for n in range(4)]
SHARDED = """
    bucket b length=512 w[0:512:512]
    buffer p f32[256] param bucket=b sharded=dp space=host
    buffer mu f32[256] optimizer bucket=b sharded=dp space=disk at=0
    buffer p.in f32[256] staging bucket=b sharded=dp
    buffer mu.in f32[256] staging bucket=b sharded=dp
    buffer full f32[512] gathered bucket=b
    buffer full.1 f32[512] gathered bucket=b
    buffer x f32[8] batch
    buffer h f32[8] activation
    buffer c f32[] state space=host
    buffer c.in f32[] staging
    buffer g f32[256] grad bucket=b sharded=dp
    move p -> p.in
    wait p.in
    move mu -> mu.in
    wait mu.in
    move c -> c.in
    wait c.in
    all_gather p.in -> full  axis=dp  # for forward
    wait full
    run x full[0:512:512] -> h  region=r0  # forward
    run h -> h  region=r0
    run h -> h  region=r0
    all_gather p.in -> full.1  axis=dp  # for backward
    wait full.1
    run h full.1[0:512:512] -> g  region=r0  # backward
    run c.in -> c.in  # count
""" + "".join(
    f"update g{t} p.in{t} mu.in{t} c.in -> p.in{t} mu.in{t}  flat=1  # update {n}\n"
    for n in range(2)
    for t in [TILE.format(n)]
) + """
    move mu.in -> mu
    wait mu
    move p.in -> p
    wait p
    move c.in -> c
    wait c
"""  # fmt: skip

WHOLE = (
    """
    bucket b length=512 w[0:256:256] v[256:512:256]
    buffer p f32[512] param bucket=b space=host
    buffer mu f32[512] optimizer bucket=b space=disk at=0
    buffer s f32[3] state space=host
    buffer p.in f32[512] staging bucket=b
    buffer mu.in f32[512] staging bucket=b
    buffer s.in f32[3] staging
    buffer near f32[128] scratch bucket=b
    buffer x f32[8] batch
    buffer h f32[8] activation
    buffer n f32[4] activation
    buffer g f32[512] grad bucket=b
    move p -> p.in
    wait p.in
    move mu -> mu.in
    wait mu.in
    move s -> s.in
    wait s.in
    run x p.in[0:256:256] -> h  region=r0  # lower
    run h p.in[256:512:256] -> h  region=r0  # upper
    run h s.in -> h  region=r0
    run h -> g  region=r0
    run g -> n[0:1:] n[1:3:2]
"""
    + "".join(f"update g{t} p.in{t} mu.in{t} n[0:1:] n[1:3:2] -> p.in{t} mu.in{t}  flat=1\n" for t in TILES[:2])
    + """
    all_gather p.in -> near  axis=dp_out  # whole
    wait near
    all_gather near -> p.in  axis=dp  # whole
    wait p.in
    move mu.in -> mu
    wait mu
    move p.in -> p
    wait p
"""
)


def _updates(layer: int) -> str:
    """Four tiles of a layer's update, with codes of moments of which 64 share a scale."""
    named = [f"mu{layer}.in{tile} sc{layer}.in{tile}" for tile in TILES]
    return "".join(
        f"update g{layer}{tile} {both} -> p{layer}{tile} {both}  flat=1  # u{layer}.{n}\n"
        for n, (tile, both) in enumerate(zip(TILES, named, strict=True))
    )


def _per_layer(text: str) -> str:
    return "".join(text.format(n) for n in range(3))


AMID = (
    _per_layer("""
    bucket b{0} length=512 w{0}[0:512:512]
    buffer p{0} f32[256] param bucket=b{0} sharded=dp
    buffer g{0} f32[256] grad bucket=b{0} sharded=dp
    buffer mu{0} f32[256] optimizer bucket=b{0} sharded=dp space=host
    buffer mu{0}.in f32[256] staging bucket=b{0} sharded=dp
    buffer sc{0} f32[4] optimizer bucket=b{0} sharded=dp per=64 space=host
    buffer sc{0}.in f32[4] staging bucket=b{0} sharded=dp per=64
    """)
    + """
    buffer x f32[8] batch
    buffer h f32[8] activation
    buffer w f32[4] state space=host
    buffer w.in f32[4] staging
    buffer lent f32[4] activation lent=w
    move w -> w.in
    wait w.in
    """
    + _per_layer("move mu{0} -> mu{0}.in\n wait mu{0}.in\n move sc{0} -> sc{0}.in\n wait sc{0}.in\n")
    + "run w.in[0:2:2] -> lent  # for role 1\n run x -> h  region=r0\n run h w.in -> h  region=r0\n"
    + "".join(f"run h -> g{n} h  region=r0\n" + _updates(n) for n in (2, 1, 0))
    + "run h -> h  # the end\n run h w.in[0:2:2] -> h  # late\n run w.in[2:4:flat] -> h  # again\n"
    + _per_layer("move mu{0}.in -> mu{0}\n wait mu{0}\n move sc{0}.in -> sc{0}\n wait sc{0}\n")
)  # fmt: skip
PLAIN = re.sub(r" sc\d\S*", "", re.sub(r"(move|wait|buffer) sc.*", "", AMID))
ON_DISK = PLAIN.replace("sharded=dp space=host", "sharded=dp space=disk at=0")
WAITS = """
    bucket b length=256 w[0:256:256]
    buffer p f32[128] param bucket=b sharded=dp space=host
    buffer p.in f32[128] staging bucket=b sharded=dp
    buffer g f32[128] grad bucket=b sharded=dp
    buffer g.kept f32[128] grad bucket=b sharded=dp space=host
    buffer g.in f32[128] staging bucket=b sharded=dp
    buffer r f32[128] grad bucket=b sharded=dp
    buffer n f32[4] activation
    buffer x f32[8] batch
    move p -> p.in
    wait p.in
    run x -> g r  region=r0
    move g -> g.kept
    wait g.kept
    run x -> n  region=r0
    run r[0:256:mine] -> r[0:256:mine]  flat=1  # on the device
    run x -> n
    run n -> n
    move g.kept -> g.in
    wait g.in
    update g.in[0:256:mine] n[1:3:flat] p.in[0:256:mine] -> p.in[0:256:mine]  flat=1  # first
    update r[0:256:mine] n[1:3:flat] p.in[0:256:mine] -> p.in[0:256:mine]  flat=1  # second
    update r[0:256:mine] p.in[0:256:mine] -> p.in[0:256:mine]  flat=1  # third
    run n -> n
    update r[0:128:mine] n[1:3:flat] p.in[0:128:mine] -> p.in[0:128:mine]  flat=1  # fourth
    move p.in -> p
    wait p
"""
WRITTEN = """
    bucket b length=256 w[0:256:256]
    buffer p f32[256] param bucket=b space=host
    buffer p.in f32[256] staging bucket=b
    buffer c f32[4] state space=host
    buffer c.in f32[4] staging
    buffer own f32[128] scratch bucket=b sharded=dp
    buffer x f32[8] batch
    move p -> p.in
    wait p.in
    move c -> c.in
    wait c.in
    run x -> own c.in
    run x -> own
    all_gather own -> p.in  axis=dp
    wait p.in
    move p.in -> p
    wait p
    move c.in -> c
    wait c
"""
THREE_RUNS = "run x -> h\n" * 3
UNTILED = re.sub(r"(?m)^update .*1\*64.*$", THREE_RUNS, WHOLE).replace(":0*64", "")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sharded": (SHARDED, "p2p", {}),
    "sharded_far_ahead": (SHARDED, "p2p", {"ahead": 3}),
    "sharded_cuda": (SHARDED, "nccl", {"tile_bytes": 128}),
    "sharded_on_host": (SHARDED, "nccl", {"on_host": True}),
    "amid": (AMID, "p2p", {"tile_bytes": 128}),
    "amid_plain": (PLAIN, "p2p", {"tile_bytes": 64}),
    "amid_far_ahead": (PLAIN, "p2p", {"ahead": 2, "tile_bytes": 64}),
    "amid_in_time": (PLAIN, "p2p", {"ahead": 0}),
    "amid_cuda": (ON_DISK, "nccl", {"tile_bytes": 64}),
    "waits": (WAITS, "p2p", {}),
    "waits_on_host": (WAITS, "p2p", {"on_host": True}),
    "written": (WRITTEN, "p2p", {}),
    "whole": (WHOLE, "p2p", {}),
    "whole_on_host": (WHOLE, "nccl", {"on_host": True, "ahead": 2}),
    "whole_untiled": (UNTILED, "p2p", {}),
}


def step(text: str, transport: str) -> Program:
    return written(text, mesh="dp_out=2 dp=2" if "dp_out" in text else "dp=2", transport=transport)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, golden: Callable[[str, str], None]) -> None:
    """The copies that there are, and each op, with the reason of a move."""
    text, transport, options = CASES[case]
    before = step(text, transport)
    done = place_moves(before, **options)
    copies = [line for name, line in buffer_lines(done).items() if name not in before.buffers]
    why = [f"  # {op.why}" if op.moves else "" for op in done.ops]
    ops = [line + reason for line, reason in zip(shown(done.ops), why, strict=True)]
    golden(f"place_moves/short_{case}", "\n".join([*copies, *ops]) + "\n")


def test_a_program_without_copies_of_what_is_held_elsewhere_is_itself() -> None:
    program = step(SHARDED.partition("    move")[0] + "run x -> h", "p2p")
    assert place_moves(program) is program


@pytest.mark.parametrize("zero", [1, 2])
def test_an_update_of_whole_parameters_fetches_the_own_slice(zero: int) -> None:
    """The gather behind it brings the rest: of n ranks each fetches 1/n of the parameters, beside those of its layers.
    So with 4 ranks it is a quarter of the parameters less than with 2. (On the device updates may find the copy of
    their layer's backward: below.)"""

    def loss(p: Any, x: Tensor) -> Tensor:
        for w in p["layers"]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    params = {"layers": [torch.empty(64, 64, device="meta") for _ in range(4)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), zero=zero, offload={"params": "cpu"}, update_on="cpu")

    def fetched(ranks: int) -> int:
        program = fzero.lower(spec, params, torch.empty(8, 64, device="meta"), world_size=ranks).program
        up = [op for op in program.ops if op.moves and program.buffers[op.reads[0].name].kind == "param"]
        return sum(moved_bytes(program, op) for op in up if program.buffers[op.target].space == DEVICE)

    assert fetched(2) - fetched(4) == 4 * 64 * 64 * 4 // 4


@pytest.mark.parametrize(("zero", "world"), [(3, 1), (1, 2)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_parameters_are_brought_twice_a_microbatch(remat: str, zero: int, world: int) -> None:
    """The complaint: a third time for the update behind the last backward, for the gradients of microbatches are added
    between the two; and for the backward of a layer that was recomputed, for the layer before is updated between."""
    layers, width, microbatches = 6, 64, 3

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + torch.tanh(x @ layer["a"]) @ layer["b"]
        return x.square().mean()

    params = {"layers": [{name: torch.empty(width, width, device="meta") for name in "ab"} for _ in range(layers)]}
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=zero, remat=remat, offload={"params": "cpu"},
        microbatches=microbatches, bucket_bytes=2 * 4 * width * width,
    )  # fmt: skip
    batch = torch.empty(2 * microbatches, width, device="meta")
    program = fzero.lower(spec, params, batch, world_size=world).program
    up = [op for op in program.ops if op.moves and program.buffers[op.reads[0].name].kind == "param"]
    brought = sum(moved_bytes(program, op) for op in up if program.buffers[op.target].space == DEVICE)
    assert brought <= 2 * microbatches * layers * 2 * 4 * width * width


def test_new_parameters_that_are_whole_on_the_host_pass_through_the_device_a_few_at_a_time() -> None:
    """Fetches and write-backs are timed by runs, and between their gathers there is none: all were there at once."""

    def loss(p: Any, x: Tensor) -> Tensor:
        for w in p["layers"]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    params = {"layers": [torch.empty(2048, 2048, device="meta") for _ in range(20)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), zero=2, offload={"params": "cpu"}, update_on="cpu")
    lowered = fzero.lower(spec, params, torch.empty(8, 2048, device="meta"), world_size=4)
    assert lowered.memory.peak < 11 * 2048 * 2048 * 4
