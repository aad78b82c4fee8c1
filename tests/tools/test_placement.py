"""fzero doctor --mesh: which axes cross nodes, from made-up environments of torchrun and over two real namespaces."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import pytest
from helpers import run

import fzero
from benchmarks import link
from fzero.comm import rendezvous, selftest
from fzero.ir.mesh import Mesh
from fzero.tools import placement, speed_probes
from fzero.tools.finding import line

WORKER = Path(__file__).parents[1] / "support" / "workers" / "two_nodes.py"


def torchrun(world: int, local: int, rank: int = 0, **more: str) -> dict[str, str]:
    """The environment of one rank, without an address: no process group can be had."""
    found = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "RANK": rank, "GROUP_RANK": rank // local}
    return {name: str(value) for name, value in found.items()} | more


def told(mesh: str, environ: dict[str, str]) -> list[str]:
    return [" ".join(text.split()) for one in speed_probes.links(mesh, environ) for text in line(one).splitlines()]


def test_a_mesh_whose_last_axis_stays_inside_a_node() -> None:
    assert told("pp=2,dp=4", torchrun(8, 4, rank=5)) == [
        "ok mesh pp across nodes: ranks 0, 4 are on nodes 0, 1",
        "ok mesh dp inside a node: ranks 0, 1, 2, 3 are on node 0",
        "ok slow link pp crosses nodes; dp stays inside a node",
    ]
    assert told("pp=2,dp=-1", torchrun(8, 4)) == told("pp=2,dp=4", torchrun(8, 4))


def test_a_last_axis_over_nodes_is_a_warning_with_a_fix() -> None:
    assert told("pp=2,dp=4", torchrun(8, 2)) == [
        "ok mesh pp across nodes: ranks 0, 4 are on nodes 0, 2",
        "warning mesh dp across nodes: ranks 0, 1, 2, 3 are on nodes 0, 1",
        '-> mesh={"pp": 2, "dp_out": 2, "dp": 2} with zero="hsdp", or torchrun --nproc-per-node 4',
    ]


def test_a_pipeline_alone_may_cross_nodes() -> None:
    assert told("pp=4", torchrun(4, 2)) == [
        "ok mesh pp across nodes: ranks 0, 1, 2, 3 are on nodes 0, 1",
        "ok slow link pp crosses nodes",
    ]


FIXES = {
    ("dp=8", 4): 'mesh={"dp_out": 2, "dp": 4} with zero="hsdp", or torchrun --nproc-per-node 8',
    ("dp=4,pp=2", 4): "",
    ("dp=2,pp=4", 2): 'mesh={"pp": 4, "dp": 2}, or torchrun --nproc-per-node 4',
    ("pp=2,dp=3", 2): "torchrun --nproc-per-node 3",
    ("dp=4,pp=2", 1): "torchrun --nproc-per-node 2",
    ("dp_out=2,dp=4", 4): "",
    ("dp_out=2,dp=4", 2): "torchrun --nproc-per-node 4",
    ("pp=2,dp=2", 3): "torchrun --nproc-per-node 4",  # nodes of 3, which dp=2 does not divide
}


@pytest.mark.parametrize(("text", "local"), FIXES)
def test_the_smallest_fix(text: str, local: int) -> None:
    axes = placement.parse_mesh(text)
    mesh = Mesh.of(axes)
    nodes = [rank // local for rank in range(mesh.world_size)]
    fix = placement.fix(mesh, nodes)
    assert fix == FIXES[text, local]
    if fix.startswith("mesh={"):  # it does what it says
        better = Mesh.of(json.loads(fix[5 : fix.index("}") + 1]))
        assert placement.fix(better, nodes) == ""
    if "--nproc-per-node" in fix:
        wider = int(fix.rpartition(" ")[2])
        places = placement.places(mesh, [rank // wider for rank in range(mesh.world_size)])
        assert not places[-1].crossing


@pytest.mark.parametrize(
    ("mesh", "environ", "what"),
    [
        ("pp=2,dp=3", torchrun(8, 4), "needs 6 ranks, there are 8"),
        ("pp:2", {}, "--mesh pp:2: needed axes as in pp=2,dp=4"),
        ("pp=-1,dp=-1", {}, "one axis may be -1"),
        ("dp=6", torchrun(6, 4), "LOCAL_WORLD_SIZE=4 does not divide 6 ranks"),
        ("dp=4", torchrun(4, 2) | {"RANK": "1", "NODE_RANK": "1", "GROUP_RANK": "1"}, "not numbered by node"),
    ],
)
def test_what_cannot_be_placed(mesh: str, environ: dict[str, str], what: str) -> None:
    (text,) = told(mesh, environ)
    assert text.startswith("missing mesh ")
    assert what in text


def test_without_torchrun_there_is_one_node() -> None:
    assert told("pp=2,dp=2", {}) == [
        "ok mesh pp inside a node: ranks 0, 2 are on node 0",
        "ok mesh dp inside a node: ranks 0, 1 are on node 0",
    ]


def test_speeds_are_shown_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = torchrun(8, 4, MASTER_ADDR="10.0.0.1")
    monkeypatch.setattr(selftest, "along_axes", lambda mesh, seconds: {"pp": 0.117, "dp": 2.5})
    pp, dp, _ = told("pp=2,dp=4", environ)
    assert pp.endswith("nodes 0, 1; 0.117 GB/s by messages")
    assert dp.endswith("node 0; 2.5 GB/s by messages")

    def fails(mesh: Mesh, seconds: float) -> dict[str, float]:
        raise RuntimeError("connection refused\nby 10.0.0.1")

    monkeypatch.setattr(selftest, "along_axes", fails)
    first, *rest = told("pp=2,dp=4", environ)
    assert first == "warning mesh links not measured: connection refused"
    assert len(rest) == 1 + 3


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fzero import cli

    for name, value in torchrun(2, 2, rank=1).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--mesh", "dp=2"]) == 0
    assert capsys.readouterr().out == ""


# --- two nodes --------------------------------------------------------------------------------------------------------


def test_ranks_of_two_namespaces_share_no_memory() -> None:
    notes = ["boot net:[1] a t", "boot net:[2] b t"]
    assert rendezvous._apart(notes) == "rank 1 is in another network namespace than rank 0"


@pytest.mark.acceptance
def test_two_nodes_have_the_bits_of_one_over_messages() -> None:
    """Two network namespaces and a link of 1 Gbit/s: a pipeline, and what the doctor says of the link."""
    try:
        with link.shaped("1gbit") as wire:
            ranks = on_nodes(wire)
    except SystemExit as lack:
        pytest.skip(str(lack))
    init, loss = cases.gpt(64, 16, 4, 2)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), microbatches=4, reduce="end")
    alone = run(spec, init(fzero.random.key(0)), lambda r, s: cases.tokens(4, 8, 64, s), world=1, steps=3)
    for found in ranks:
        assert found["losses"] == alone.losses()
        assert found["transport"] == "p2p"
        assert "another network namespace" in found["why"]
        (pp,) = found["told"]
        assert pp.startswith("ok mesh pp across nodes: ranks 0, 1 are on nodes 0, 1; 0.1")  # GB/s: a gigabit
        assert found["bits"].keys() == alone.final.keys()
        for path, leaf in alone.final.items():
            assert found["bits"][path] == hashlib.sha256(leaf.contiguous().numpy().tobytes()).hexdigest(), path


def on_nodes(wire: link.Link) -> list[dict]:
    """What `two_nodes.py` prints on each of two nodes of one rank."""
    assert shutil.which("ip")
    processes = []
    for rank in range(2):
        env = {**os.environ, **torchrun(2, 1, rank), **wire.variables[rank], "MASTER_PORT": "29577"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(WORKER.parents[1]), *sys.path])}
        command = [*wire.prefixes[rank], sys.executable, str(WORKER)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [process.communicate(timeout=75) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
