"""notes: what the user should know of the programs of a step beside what was decided."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero import backend
from fzero.compile.resolve import LoweringOptions
from fzero.ir.op import StepPhase
from fzero.ir.program import Program
from fzero.ir.records import DISK, HOST
from fzero.passes.recompute import FULL, GATHERS
from fzero.runtime.cuda_graphs import obstacle


def notes(programs: Mapping[int, Program], wanted: LoweringOptions) -> dict[str, str]:
    """What the user should know of the programs beside the decisions, by name."""
    said = {}
    if wanted.gradients:
        said["gradients"] = _gradients(programs[0])
    if lent := _lent(programs):
        said["pipeline"] = lent
    if idle := [text for text in (_idle(programs, wanted.remat), _stays(programs, wanted)) if text]:
        said["idle"] = "; ".join(idle)
    known = backend.of_transport(programs[0].transport)
    if known.records_graphs and wanted.cuda_graph:
        found = [why for program in programs.values() if (why := obstacle(program, torch.device(known.name)))]
        said["cuda_graph"] = f"not one graph: {found[0]}" if found else "the step is one graph"
    return said


def _gradients(program: Program) -> str:
    """What waits off the device of gradients that are clipped together, as text."""
    held = dict.fromkeys((HOST, DISK), 0)
    for b in program.buffers.values():
        held[b.space] = held.get(b.space, 0) + (b.nbytes if b.kind == "grad" else 0)
    shown = ", ".join(f"{held[space]:,} bytes on the {space}" for space in (HOST, DISK) if held[space])
    if shown:
        return f"gradients wait for the last of them off the device: {shown} of a rank, written and read once a step"
    return "no gradient waits for others: none leaves the device, whatever offload= says of grads/"


def _idle(programs: Mapping[int, Program], remat: Mapping[str, str]) -> str:
    """That `remat=` asks for work that no program does again, as text; "" if one does, or nothing was asked for."""
    asked = {FULL, GATHERS} & {*remat.values()}
    phases = {op.phase for program in programs.values() for op in program.ops}
    if not asked or StepPhase.RECOMPUTE in phases or phases.isdisjoint((StepPhase.BACKWARD, StepPhase.REGION)):
        return ""
    if asked == {GATHERS}:
        return "remat='gathers' changes nothing: no layer gathers activations, as layers of Spec(sequence='tp') do"
    return (
        "remat='full' changes nothing: no layer whose leaves match its rules keeps a value that only its backward reads"
    )


def _stays(programs: Mapping[int, Program], wanted: LoweringOptions) -> str:
    """That `offload=` takes nothing of the state off the device, as text; "" if it does, or was not given."""
    spaces = {b.space for program in programs.values() for b in program.buffers.values()}
    if not wanted.offloads or wanted.gradients or not spaces.isdisjoint((HOST, DISK)):
        return ""
    return "offload= changes nothing: the optimizer keeps only scalars, which stay on the device"


def _lent(programs: Mapping[int, Program]) -> str:
    """What roles are sent of leaves that others keep, as text; "" if nothing."""
    lent = {b.name: b for p in programs.values() for b in p.buffers.values() if b.lent is not None}
    if not lent:
        return ""
    names = sorted({str(b.lent) for b in lent.values()})
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    nbytes = sum(b.nbytes for b in lent.values())
    return (
        f"pipeline: {nbytes:,} bytes of leaves are sent each step to a role that uses and does not keep "
        f"them ({shown}). So is a tied leaf; layers that run in another order than their numbers send it too"
    )
