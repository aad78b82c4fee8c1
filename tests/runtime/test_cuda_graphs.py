"""A step as one CUDA graph: why one is not, and that it is recorded once; on the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from helpers import same_bits

import fzero
from fzero.ir.program import Program
from fzero.runtime import cuda_graphs

aten = torch.ops.aten


def test_why_a_step_is_not_one_cuda_graph() -> None:
    cuda = torch.device("cuda")
    program = cases.lowered(2, device="cuda").program
    assert cuda_graphs.obstacle(program, cuda) is None
    assert cuda_graphs.obstacle(program, torch.device("cpu")) == "the state is on cpu"
    assert cuda_graphs.obstacle(cases.lowered(2).program, cuda) == "transfers via p2p run on the host"

    assert "one graph" in cases.lowered(2, device="cuda").choices["cuda_graph"]
    # CTC: the complaint, its kernels copy lengths to the host, and a step with one was said to be one graph
    for reads in (aten._local_scalar_dense.default, torch.ops.fzero.ctc_loss.default, aten._ctc_loss_backward.Tensor):
        odd = _with_an_op(program, reads)
        assert f"reads back from the device: {reads}" in str(cuda_graphs.obstacle(odd, cuda))


def _with_an_op(program: Program, target: Any) -> Program:
    """The program with this op alone in its segments."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x0")
    x.meta["val"] = torch.empty(4, device="meta")
    read = graph.call_function(target, (x,))
    read.meta["val"] = 1.0
    graph.output([])
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    ops = [op.with_attrs(segment="odd") if op.is_run else op for op in program.ops]
    return replace(program, ops=tuple(ops), segments={**program.segments, "odd": gm})


class Recorder:
    """Stands for `cuda_graphs.record`: what is recorded is what `issue` does, replayed by calling it."""

    def __init__(self, works: bool) -> None:
        self.works, self.num_recorded, self.num_replayed = works, 0, 0

    def __call__(self, issue: Callable[[], None], device: torch.device) -> Any:
        self.num_recorded += 1
        self.issue = issue
        return self if self.works else None

    def replay(self) -> None:
        self.num_replayed += 1
        self.issue()


@pytest.mark.parametrize("works", [True, False])
def test_the_second_step_is_recorded_once_and_replayed(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(works)
    monkeypatch.setattr(cuda_graphs, "obstacle", lambda program, device: None)
    monkeypatch.setattr(cuda_graphs, "record", recorder)
    init, loss = cases.gpt(64, 64, 1)
    state = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    plain = fzero.init(init, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), cuda_graph=False))
    for step in range(4):
        state, plain = (fzero.step(s, cases.tokens(2, 16, 64, step)) for s in (state, plain))
        assert same_bits(state.metrics["loss"], plain.metrics["loss"])
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 3 if works else 0)
