"""op_info: one row per op, and what two columns must say of one op together."""

from __future__ import annotations

from typing import Any

import op_rows
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fzero  # noqa: F401  (all rooms fill their columns)
from fzero.codegen.workspace import workspace_bytes
from fzero.cost.allocator import measured_peak
from fzero.cost.flops import flops
from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo, column, named, of
from fzero.ir.recorder import record
from fzero.shard.local_forms import forms
from fzero.shard.rules import Rule, rule_of
from fzero.shard.rules.whole import whole

aten = torch.ops.aten
NOT_LOADED = ("transformers.", "torch_nn.")  # made by other libraries, or when they are first called


def overloads() -> list[Any]:
    """Every op of aten's and fzero's: those of torch's operator database dispatch to some of them."""
    names = sorted({s.name.replace("::", ".") for s in torch._C._jit_get_all_schemas()})
    return [op for name in names if name.startswith(("aten.", "fzero.")) for op in named(name)]


def pure(column_name: str) -> dict[Any, Any]:
    """A column's facts of ops that take tensors, write nothing and return something."""

    def fits(op: Any) -> bool:
        takes = any(str(a.type) in ("Tensor", "List[Tensor]") for a in op._schema.arguments)
        return takes and bool(op._schema.returns) and not op._schema.is_mutable

    return {op: fact for op, fact in column(column_name).items() if fits(op)}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_row_is_of_an_op() -> None:
    """A word that names no op would never be asked for."""
    gone = {"aten.cholesky.default"} if not hasattr(aten, "cholesky") else set()  # torch 2.14
    named_none = {name for name in op_info._rows if not named(name) and not name.startswith(NOT_LOADED)}
    assert named_none == gone


def test_every_op_has_each_fact_from_one_row_or_by_default() -> None:
    seen = 0
    for op in overloads():
        own = op_info._rows.get(str(op), OpInfo()).stated()
        every = op_info._rows.get(str(op).rpartition(".")[0], OpInfo()).stated()
        assert not own.keys() & every.keys(), f"{op}: stated for it and for all overloads"
        rest = of(op).stated()
        assert {k: rest.pop(k) for k in (*own, *every)} == {**own, **every}
        assert rest.keys() <= {"pointwise", *(name for name, _ in op_info._defaults)}, f"{op}: {rest}"
        assert not rest or torch.Tag.pointwise in op.tags or of(op).pointwise or rest.keys() == {"placements"}
        seen += bool(own or every or rest)
    assert seen > 1000


def test_a_fact_is_stated_once_by_the_rooms_and_anew_by_a_user() -> None:
    with op_rows.restored():
        with pytest.raises(ValueError, match=r"aten.mm.default: its placements are Rule.*product.* already"):
            op_info.fill("placements", {aten.mm.default: Rule(whole)})
        op_info.add(aten.mm.default, OpInfo(placements=Rule(whole)))
        assert rule_of(aten.mm.default).factors is whole
        assert of(aten.mm.default).flops is not None, "other facts stay"
    assert rule_of(aten.mm.default).factors is not whole


def test_a_row_is_read_by_one_call() -> None:
    text = str(of(aten.mm.default))
    facts = dict(line.split(None, 1) for line in text.splitlines())
    assert facts.keys() == {"placements", "fake", "one_dtype", "out_form", "workspace", "flops"}
    assert "fzero.shard.rules.products" in facts["placements"]
    assert " at 0x" not in text


# --- columns that belong together -------------------------------------------------------------------------------------


def test_what_writes_over_an_operand_writes_into_given_memory() -> None:
    """A result that lies in its operand's memory is written there by the kernel: a copy of it would come too late."""
    for op, by in pure("overwrites").items():
        assert of(op).pointwise or by == "rows" or str(op).startswith("aten.where."), op
        assert of(op).out_form or str(op).startswith("aten.where."), op


def test_an_out_form_is_there() -> None:
    for op, how in pure("out_form").items():
        form = fx_nodes.out_overload(op) if how in ("call", "program") else named(how)[0]
        assert form is not None or op.overloadpacket is aten.index, f"{op}: torch has no form that writes"


def test_the_form_that_writes_holds_what_the_op_holds() -> None:
    """`write_in_place` makes `mm.out` of `mm`: the bytes that the kernel allocates stay planned."""
    for op in column("workspace"):
        if of(op).out_form == "program" and (form := fx_nodes.out_overload(op)) is not None:
            assert of(form).workspace is of(op).workspace, f"{form}: no workspace, as {op} has"


@pytest.mark.parametrize("case", ["product", "sum"])
def test_the_bytes_of_a_form_that_writes(case: str) -> None:
    a, b, x = torch.randn(512, 512)[::2, ::2], torch.randn(256, 256), torch.randn(1000, 300).bfloat16()

    def product(a: Any, b: Any, into: Any) -> Any:
        return aten.mm.out(a, b, out=into)

    def total(x: Any, into: Any) -> Any:
        return aten.sum.IntList_out(x, [0], False, dtype=torch.float32, out=into)

    fn, given = {"product": (product, [a, b, torch.empty(256, 256)]), "sum": (total, [x, torch.empty(300)])}[case]
    (node,) = [n for n in _graph(fn, given).nodes if fx_nodes.is_compute(n)]
    _, peak = measured_peak(lambda: fn(*given))
    assert peak == workspace_bytes(node) > 250_000


def _graph(fn: Any, given: list[torch.Tensor]) -> torch.fx.Graph:
    with torch._subclasses.FakeTensorMode() as mode, torch.no_grad():
        return record(fn, [mode.from_tensor(x) for x in given]).graph


def test_a_draw_is_tagged_and_never_sharded_by_halves() -> None:
    """Capture asks torch's tag first: a rule of an untagged op would never be used."""
    for op in column("draws"):
        assert torch.Tag.nondeterministic_seeded in op.tags, op
        assert op._schema.is_mutable or rule_of(op).factors is whole, op


def test_a_copy_moves_elements_and_a_view_can_be_sharded() -> None:
    recorded_as_a_copy = {aten.lift_fresh.default}
    for op in {op for op, meaning in pure("meaning").items() if meaning == "copy"} - recorded_as_a_copy:
        assert rule_of(op).moves, op
    for op in pure("view").keys() - recorded_as_a_copy:
        assert of(op).placements is not None or "out" in op._overloadname, op


def test_an_op_in_place_says_what_its_pure_form_says() -> None:
    for op, (form, places) in column("in_place").items():
        written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        assert list(places) == written
        assert len(places) == len(form._schema.returns)
        assert of(form).pointwise or of(form).blockwise
        assert (of(op).kernel is None, of(op).workspace) == (of(form).kernel is None, of(form).workspace)


def test_a_flat_form_is_of_the_op_that_it_is_of() -> None:
    for op, flat in column("flat_form").items():
        assert of(flat).whole_form is op
        assert of(flat).workspace is of(op).workspace


def test_no_two_local_forms_have_one_name() -> None:
    """A strategy knows its form by name."""
    assert set(forms().values()) == {form for of_op in column("local_forms").values() for form in of_op}


def test_a_norms_weight_is_where_its_row_says() -> None:
    for op, place in column("norm_weight").items():
        assert op._schema.arguments[place].name == "weight", op


# --- flops, beside torch's own count ----------------------------------------------------------------------------------

BELOW = {  # kernels under the ops that a capture sees
    "_convolution", "cudnn_convolution", "convolution_overrideable", "_slow_conv2d_forward", "_flash_attention_forward",
    "_efficient_attention_forward", "_flash_attention_backward", "_efficient_attention_backward",
}  # fmt: skip


def test_all_that_torch_counts_is_counted() -> None:
    packets = [p for p in flop_registry if hasattr(p, "overloads") and p.__name__ not in BELOW]
    assert len(packets) > 10
    assert [str(op) for p in packets for op in named(str(p)) if of(op).flops is None] == []


def test_the_counts_are_torchs() -> None:
    cases = {
        torch.mm: (torch.randn(3, 4), torch.randn(4, 5)),
        torch.addmm: (torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)),
        torch.bmm: (torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
        torch.baddbmm: (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
        torch.conv2d: (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)),
    }
    for fn, given in cases.items():
        with FlopCounterMode(display=False) as counter:
            fn(*given)
        ours = sum(flops(n) for n in _graph(lambda *x, fn=fn: [fn(*x)], list(given)).nodes if fx_nodes.is_compute(n))
        assert ours == counter.get_total_flops() > 0, fn
