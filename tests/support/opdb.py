"""Every op of torch's own operator database as a loss: what fzero makes of it, beside eager PyTorch.

`python tests/support/opdb.py OUT` writes a line of JSON per case to OUT and goes on where it stopped; a case is (op,
dtype, sample, variant). Cases run in a child, so that one that kills or hangs its process is a line too.
FZERO_TEST_DEVICE is the device.

The tensors of a sample are leaves of the state (differentiable ones are parameters, other floating ones are not) and of
the batch (integers). The loss is a random projection of the op's floating results; results, loss and gradients are
metrics, so that all of them are compared: the executor in spoiled memory with the interpreter, bit for bit, and both
with autograd on the same function.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers import same_bits
from torch import Tensor, fx
from torch.testing._internal import common_utils  # 2.11.0, 2.13.0
from torch.testing._internal.common_methods_invocations import op_db  # 2.11.0, 2.13.0
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

import fzero
from fzero.ir import fx_nodes, fx_values
from fzero.ir.op_info import kernel_for
from fzero.runtime import handlers
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from lab.fuzz.runs import run_bound

common_utils.extract_test_fn = lambda: None  # for each list of samples it reads the lines of the whole stack
DEVICE = os.environ.get("FZERO_TEST_DEVICE", "cpu")
AT_ONCE = 8  # cases in one loss
SAMPLES = {"plain": 10, "strided": 3, "in place": 3}  # of an op and dtype, by variant
DTYPES = (torch.float32, torch.float64)
INSTEAD = (torch.complex64, torch.complex128, torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-12, torch.complex128: 1e-12}
LOW = 1e-2  # of dtypes of 16 bits
# jiterator's launch their kernels on whatever memory they are given, a trace's too
OPS = {op.full_name: op for op in op_db if not op.name.startswith("jiterator")}

# what these return is whatever lay in memory: only forms are compared
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

Loss = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Case:
    """A loss of (params, frozen, batch) -> (0-d tensor, results), and what it is called with. `python` are the results
    that are no tensors, of the last call."""

    loss: Loss
    params: dict[str, Tensor]
    frozen: dict[str, Tensor]
    batch: dict[str, Tensor]
    python: list[Any]


# --- samples ----------------------------------------------------------------------------------------------------------


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The dtypes an op is tried in: float32 and float64, or the first two it has."""
    has = op.supported_dtypes(DEVICE)
    return [d for d in DTYPES if d in has] or [d for d in INSTEAD if d in has][:2]


def samples(op: Any, dtype: torch.dtype, most: int) -> dict[int, Any]:
    """Up to `most` samples of an op, spread over its list, by their number there."""
    torch.manual_seed(0)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    drawn = list(op.sample_inputs(DEVICE, dtype, requires_grad=grad))
    count = min(most, len(drawn))
    picked = sorted({round(i * (len(drawn) - 1) / max(count - 1, 1)) for i in range(count)})
    return {i: drawn[i] for i in picked}


def strided(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A contiguous leaf, and the view of it that has x's values: dims reversed, one element in two, from the second."""
    dims = list(range(x.ndim))[::-1]
    leaf = torch.stack([torch.zeros_like(x), x], -1).permute(*dims, x.ndim).contiguous()
    return leaf, lambda leaf: leaf.select(-1, 1).permute(dims)


def real(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A real leaf for a complex parameter (gradients need floating leaves), and the view of it that has x's values."""
    return torch.view_as_real(x.resolve_conj()).clone(), torch.view_as_complex


def case_of(op: Any, sample: Any, variant: str) -> Case:
    """The loss of a sample. Its values are copied: no case sees what another did."""
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    places: dict[int, tuple[str, str]] = {}
    groups: dict[str, dict[str, Tensor]] = {"params": {}, "frozen": {}, "batch": {}}
    views: dict[int, Callable[[Tensor], Tensor]] = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            continue
        value = x.detach().to(DEVICE, copy=True)
        if variant == "strided" and value.layout is torch.strided:
            value, views[i] = strided(value)
        if x.requires_grad and x.dtype.is_complex:
            value, whole = real(value)
            views[i] = _after(whole, views.get(i))
        wide = x.dtype.is_floating_point or x.dtype.is_complex
        group = "params" if x.requires_grad else "frozen" if wide else "batch"
        groups[group][f"x{i}"] = value if value.layout is not torch.strided else value.contiguous()
        places[i] = (group, f"x{i}")
    call = op.inplace_variant if variant == "in place" else op
    python: list[Any] = []

    def results(given: dict[str, dict[str, Tensor]]) -> list[Tensor]:
        filled = list(leaves)
        for i, (group, name) in places.items():
            filled[i] = views[i](given[group][name]) if i in views else given[group][name]
        x, args, kwargs = pytree.tree_unflatten(filled, spec)
        if variant == "in place":
            x = x.clone() if isinstance(x, Tensor) else type(x)(y.clone() for y in x)
        found = call(x, *args, **kwargs)
        outs = pytree.tree_leaves(sample.output_process_fn_grad(found))
        python[:] = [y for y in outs if not isinstance(y, Tensor)]
        tensors = [y.to(DEVICE) for y in outs if isinstance(y, Tensor)]
        return [torch.zeros_like(y) for y in tensors] if op.name in UNDEFINED else tensors

    with torch.no_grad():
        like = results(groups)
    wide = any(x.dtype in (torch.float64, torch.complex128) for x in (*like, *groups["params"].values()))
    floating = torch.float64 if wide else torch.float32
    draw = torch.Generator().manual_seed(1)
    for i, y in enumerate(like):
        if y.dtype.is_floating_point or y.dtype.is_complex:
            dtype = (torch.complex128 if wide else torch.complex64) if y.dtype.is_complex else floating
            groups["batch"][f"w{i}"] = torch.randn(y.shape, dtype=dtype, generator=draw).to(DEVICE)
    groups["params"]["anchor"] = torch.zeros(
        (), dtype=floating, device=DEVICE
    )  # so that there is a gradient, whatever the op

    def loss(params: Any, frozen: Any, batch: Any) -> Any:
        outs = results({"params": params, "frozen": frozen, "batch": batch})
        total = params["anchor"] * 1
        for i, y in enumerate(outs):
            if f"w{i}" in batch:
                weighted = y.to(batch[f"w{i}"].dtype) * batch[f"w{i}"]
                total = total + (weighted.real if weighted.is_complex() else weighted).sum()
        return total, outs

    return Case(loss, groups["params"], groups["frozen"], groups["batch"], python)


def _after(first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    return first if then is None else lambda x: then(first(x))


def together(cases: Sequence[Case]) -> Case:
    """The sum of several losses as one: its segments are longer, and the cases' values share memory."""
    python: list[Any] = []

    def merged(group: str) -> dict[str, Any]:
        return {f"c{n}{name}": x for n, case in enumerate(cases) for name, x in getattr(case, group).items()}

    def loss(params: Any, frozen: Any, batch: Any) -> Any:
        found = []
        for n, case in enumerate(cases):
            pairs = zip((params, frozen, batch), (case.params, case.frozen, case.batch), strict=True)
            found.append(case.loss(*({name: given[f"c{n}{name}"] for name in own} for given, own in pairs)))
        python[:] = [x for case in cases for x in case.python]
        total = found[0][0]
        for value, _ in found[1:]:
            total = total + value
        return total, [y for _, outs in found for y in outs]

    return Case(loss, merged("params"), merged("frozen"), merged("batch"), python)


# --- eager and fzero --------------------------------------------------------------------------------------------------


def eager(case: Case) -> dict[str, Tensor]:
    """Loss, results and gradients as autograd has them."""
    params = {name: x.clone().requires_grad_() for name, x in case.params.items()}
    value, outs = case.loss(params, _cloned(case.frozen), _cloned(case.batch))
    grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    found = {"loss": value.detach(), **{f"out/{i}": y.detach().clone() for i, y in enumerate(outs)}}
    for (name, x), g in zip(params.items(), grads, strict=True):
        found[f"grad/{name}"] = torch.zeros_like(x) if g is None else g
    return {name: x.resolve_conj().resolve_neg() for name, x in found.items()}


def lowered(case: Case, world: int = 1) -> fzero.Lowered:
    def step(state: Any, batch: Any) -> Any:
        call = fzero.value_and_grad(lambda p, b, f: case.loss(p, f, b), has_aux=True, allow_unused=True)
        (value, outs), grads = call(state["params"], batch, state["frozen"])
        return state, {"loss": value, "out": outs, "grad": grads}

    state = {"params": case.params, "frozen": case.frozen}
    return fzero.lower(fzero.Spec(step=step, zero=3, device=DEVICE), state, case.batch, world_size=world)


def by_fzero(case: Case, low: fzero.Lowered) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """The metrics of the interpreter and of the executor, in memory that is spoiled first, and what was not as
    its graph says."""
    plan, program = low.plan, low.program
    leaves = fzero.tree.flatten({"params": case.params, "frozen": case.frozen})[1]
    inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
    constants = [name for name, b in program.buffers.items() if b.kind == "constant"]
    memory = storage.shards(plan, [x.clone() for x in leaves], 0)
    memory |= dict(zip(constants, low.graph.constants.values(), strict=True))
    memory |= dict(zip(inputs, fzero.tree.flatten(_cloned(case.batch))[1], strict=True))
    copy = _cloned(memory)
    found: set[str] = set()
    with torch.no_grad(), mock.patch.object(handlers, "as_planned", partial(_watched, found)):
        (rank,) = interpret({0: program}, [memory], poison=True)
    plain = {name: rank.memory[buffer].clone() for name, buffer in program.metrics.items()}
    (bound,) = run_bound({0: program}, [copy], steps=2)
    return plain, bound, found


def _watched(found: set[str], gm: fx.GraphModule, *given: Tensor) -> list[Tensor]:
    """`handlers.as_planned`; `found` receives what is not as the segment's graph says: forms, strides and sharing."""
    env: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), given, strict=True))
    for node in filter(fx_nodes.is_compute, gm.graph.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        made = (kernel_for(node.target, *args, **kwargs) or node.target)(*args, **kwargs)
        env[node] = made if fx_nodes.source(node) is not None else handlers.strided(made, node.meta.get("val"))
        if node.target is operator.getitem or fx_nodes.mutated(node):
            continue
        pairs = list(zip(fx_values.tensors(node.meta.get("val")), fx_values.tensors(made), strict=True))
        if any(planned.shape != real.shape or planned.dtype != real.dtype for planned, real in pairs):
            found.add(f"{node.target} form")
        elif any(fx_values.steps(planned) != fx_values.steps(real) for planned, real in pairs):
            found.add(f"{node.target} strides")
        memory = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        shares = [real.untyped_storage().data_ptr() in memory for _, real in pairs if real.numel()]
        if any(shared != fx_nodes.is_view(node) for shared in shares):
            found.add(f"{node.target} shares")
    return list(fx.node.map_arg(fx_nodes.outputs(gm.graph), env.__getitem__))


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


# --- comparisons ------------------------------------------------------------------------------------------------------


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference in units of what is allowed; NaN is NaN, an infinity itself. 0 for equal bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    if same_bits(a, b) or not a.numel():
        return 0.0
    if a.dtype.is_complex:
        return max(gap(*(torch.view_as_real(x.resolve_conj())[..., i] for x in (a, b))) for i in (0, 1)) or 1e-9
    if not a.dtype.is_floating_point:
        return float("inf")
    wide, wanted = a.double(), b.double()
    finite = wanted.isfinite()
    if (
        not torch.equal(wide.nan_to_num(7.0)[~finite], wanted.nan_to_num(7.0)[~finite])
        or not wide[finite].isfinite().all()
    ):
        return float("inf")
    if not finite.any() or torch.equal(wide[finite], wanted[finite]):
        return 0.0
    scale = float(wanted[finite].abs().max())
    allowed = TOLERANCE.get(a.dtype, LOW) * scale
    return float((wide[finite] - wanted[finite]).abs().max()) / allowed if allowed else float("inf")


def same_values(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for the sign and payload of a NaN."""
    if same_bits(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    return same_bits(*(torch.where(x.isnan(), torch.ones_like(x), x) for x in (a, b)))


# eager's addbmm_ gives a 0-d tensor another shape in place, which torch's own shape rule refuses
BY_SHAPE_RULE = "output with shape [] doesn't match the broadcast shape"


def outcome(case: Case) -> dict[str, Any]:
    """What became of a case: `status` and, where there is something to say, `detail`."""
    try:
        wanted = eager(case)
        python = str(case.python)
        again = eager(case)
    except (RuntimeError, IndexError) as error:
        return {"status": "not eager", "detail": _first_line(error)}
    steady = all(same_values(wanted[name], again[name]) for name in wanted if wanted[name].layout is torch.strided)
    try:
        low = lowered(case)
        if str(case.python) != python:
            return {"status": "wrong", "detail": f"results that are no tensors: {case.python}, eager has {python}"}
        at = "run"
        plain, bound, unlike = by_fzero(case, low)
    except fzero.FzeroError as error:
        return {"status": "refused", "error": type(error).__name__, "detail": _first_line(error), "steady": steady}
    except Exception as error:
        if BY_SHAPE_RULE in str(error):
            return {"status": "refused", "error": "torch", "detail": _first_line(error), "steady": steady}
        at = "run" if "low" in locals() else "lower"
        return {"status": "error", "error": type(error).__name__, "detail": f"{at}: {_first_line(error)}"}
    if not steady:
        return {"status": "unsteady", "detail": "eager differs from itself"}
    if plain.keys() != wanted.keys():
        return {"status": "wrong", "detail": f"metrics {sorted(plain)} for {sorted(wanted)}"}
    differing = [name for name in sorted(plain) if not same_values(plain[name], bound[name])]
    gaps = {name: max(gap(found[name], wanted[name]) for found in (plain, bound)) for name in sorted(wanted)}
    far = [name for name in gaps if not gaps[name] <= 1]
    if far:
        return {"status": "wrong", "detail": f"{', '.join(far)}: {max(gaps.values()):.2g} of what is allowed"}
    if faults := [what for what in sorted(unlike) if not what.endswith("strides")]:
        return {"status": "wrong", "detail": f"not as planned: {', '.join(faults)}"}
    if differing:
        return {"status": "wrong", "detail": f"interpreter and executor differ in {', '.join(differing)}"}
    return {"status": "equal", "gap": max(gaps.values()), "unlike": sorted(unlike)}


def outcomes(op: Any, given: dict[str, tuple[Any, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, outcome) of several (sample, variant) of an op: as one loss; where that does not end well, each alone."""
    cases: dict[str, Case] = {}
    for key, (sample, variant) in given.items():
        try:
            cases[key] = case_of(op, sample, variant)
        except (RuntimeError, IndexError, AssertionError) as error:
            yield key, {"status": "not eager", "detail": _first_line(error)}
    whole = outcome(together(list(cases.values()))) if len(cases) > 1 else {"status": "apart"}
    if whole["status"] == "equal":
        yield from ((key, whole) for key in cases)
        return
    apart = {key: outcome(case) for key, case in cases.items()}
    if len(cases) > 1 and whole["status"] != "apart" and all(x["status"] == "equal" for x in apart.values()):
        apart = {key: {**whole, "detail": f"only together: {whole.get('detail')}"} for key in cases}
    yield from apart.items()


def _first_line(error: Exception) -> str:
    return f"{error}".strip().split("\n")[0][:400] or type(error).__name__


# --- the whole run ----------------------------------------------------------------------------------------------------


def keys(op: Any, most: dict[str, int]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """(key, (sample, variant)) of every case of an op."""
    for dtype in dtypes_of(op):
        name = str(dtype).removeprefix("torch.")
        for variant, count in most.items():
            if variant == "in place" and op.inplace_variant is None:
                continue
            for number, sample in samples(op, dtype, count).items():
                yield f"{op.full_name}|{name}|{number}|{variant}", (sample, variant)


def child(names: Sequence[str], out: Path, most: dict[str, int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = finished(out)
    with out.open("a") as file:
        for name in names:
            Path(f"{out}.at").write_text("")
            left = {key: one for key, one in keys(OPS[name], most) if key not in done}
            for dtype in dict.fromkeys(key.split("|")[1] for key in left):
                own = [key for key in left if key.split("|")[1] == dtype]
                for start in range(0, len(own), AT_ONCE):
                    group = own[start : start + AT_ONCE]
                    died = f"{group[0]} ..." in done  # together: now each alone
                    parts = [[key] for key in group] if died else [group]
                    for part in parts:
                        Path(f"{out}.at").write_text(part[0] + (" ..." if len(part) > 1 else ""))
                        began = time.monotonic()
                        for key, found in list(outcomes(OPS[name], {key: left[key] for key in part})):
                            seconds = round((time.monotonic() - began) / len(part), 3)
                            file.write(json.dumps({"key": key, **found, "seconds": seconds}) + "\n")
                        file.flush()


def finished(out: Path) -> dict[str, dict[str, Any]]:
    if not out.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, out.read_text().splitlines())}


def whole(out: Path, names: Sequence[str], most: dict[str, int], at_once: int = 40, patience: float = 120.0) -> None:
    """Every case of these ops, in children; what a child died of or hung in is the outcome of its case."""
    for start in range(0, len(names), at_once):
        chunk = names[start : start + at_once]
        while True:
            command = [sys.executable, __file__, str(out), "--child", "--ops", *chunk, "--samples", json.dumps(most)]
            Path(f"{out}.at").write_text("")
            process = subprocess.Popen(command)
            while (code := _ended(process, 1.0)) is None:
                if time.time() - Path(f"{out}.at").stat().st_mtime > patience:
                    process.kill()
                    process.wait()
                    code = -9
                    break
            key = Path(f"{out}.at").read_text()
            if code == 0:
                break
            if not key:
                raise RuntimeError(f"the child for {chunk} ended with {code} before its first case")
            with out.open("a") as file:
                file.write(json.dumps({"key": key, "status": "crash", "detail": f"exit {code}"}) + "\n")


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--match")
    parser.add_argument("--samples", type=json.loads, default=SAMPLES)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    names = given.ops or [name for name in OPS if not given.match or re.search(given.match, name)]
    (child if given.child else whole)(*((names, given.out) if given.child else (given.out, names)), given.samples)


if __name__ == "__main__":
    sys.path[:0] = [os.path.dirname(__file__)]
    main()
