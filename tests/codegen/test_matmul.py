"""Matrix products by the faster library: fp32 stays fp32, one choice per shape, and every stage has it.

Choices are forced by writing figures into the machine's file; nothing here depends on which library is faster.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept
import pytest
import torch
from helpers import differing, gloo, relative, run, run_reference, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, Model
from torch import Tensor, fx

import fzero
from fzero._torch_compat import FakeTensorMode, compute
from fzero.capture.graph import Graph
from fzero.codegen import matmul
from fzero.codegen.matmul import FORMS, OUT_FORMS, Matmul
from fzero.codegen.workspace import workspace_bytes
from fzero.cost import kept_costs
from fzero.cost.allocator import measured_peak
from fzero.errors import SpecError, VerifyError
from fzero.verify.rules import verify

aten = torch.ops.aten
ONEDNN = {*FORMS.values(), *OUT_FORMS.values()}
WIDENED = {*matmul.WIDENED.values(), *matmul.WIDENED_OUT.values()}
FAST, SLOW = {"torch": 1.0, "onednn": 2.0}, {"torch": 1.0, "onednn": 1.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))


ADAMW = fzero.optim.adamw(1e-2)


def spec_of(model: Model, **fields: Any) -> fzero.Spec:
    return fzero.Spec(loss=model.loss, optimizer=ADAMW, **{"matmul": "fastest", **fields})


def lowered(model: Model, world: int = 1, **fields: Any) -> fzero.Lowered:
    params = model.init(fzero.random.key(0))
    return kept.lower(spec_of(model, **fields), params, model.batch(0, 0), world)


def graph_nodes(graph: Graph) -> Iterable[fx.Node]:
    return (n for gm in (graph.gm, *(r.gm for r in graph.regions)) for n in gm.graph.nodes)


def force(model: Model, figures: dict[str, float], **fields: Any) -> None:
    """Makes this machine's file say `figures` of every product of a model's step."""
    found = map(matmul.of, graph_nodes(lowered(model, matmul="default", **fields).graph))
    kept_costs.remember("products", {str(product): figures for product in found if product is not None})


def targets(program: fzero.ir.program.Program) -> list[Any]:
    return [n.target for gm in program.segments.values() for n in gm.graph.nodes if n.op == "call_function"]


# --- the ops ----------------------------------------------------------------------------------------------------------


def laid_out(shape: tuple[int, ...], layout: str, generator: torch.Generator) -> Tensor:
    if layout == "t":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).transpose(-1, -2)
    if layout == "wide":  # columns of a wider matrix
        return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., 1 : 1 + shape[-1]]
    return torch.randn(*shape, generator=generator)


@st.composite
def operands(draw: st.DrawFn) -> tuple[str, list[Tensor]]:
    name = draw(st.sampled_from(matmul.NAMES))
    rows, inner, columns = (draw(st.integers(0, 80)) for _ in range(3))
    batch = (draw(st.integers(0, 3)),) if "bmm" in name else ()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    layouts = [draw(st.sampled_from(["n", "t", "wide"])) for _ in range(2)]
    pair = [
        laid_out((*batch, rows, inner), layouts[0], generator),
        laid_out((*batch, inner, columns), layouts[1], generator),
    ]
    if name == "addmm":
        shape = draw(st.sampled_from([(columns,), (rows, columns), (1, columns)]))
        return name, [torch.randn(shape, generator=generator), *pair]
    return name, ([torch.randn(*batch, rows, columns, generator=generator)] if name == "baddbmm" else []) + pair


@given(case=operands())
@settings(max_examples=150, deadline=None)
def test_an_op_is_torchs_own_but_for_fp32_rounding(case: tuple[str, list[Tensor]]) -> None:
    name, given_ = case
    own, form = getattr(aten, name).default, FORMS[getattr(aten, name).default]
    result, usual = form(*given_), own(*given_)
    assert (result.shape, result.stride(), result.dtype) == (usual.shape, usual.stride(), usual.dtype)
    exact = own(*(x.double() for x in given_))
    scale = own(*(x.double().abs() for x in given_))  # what rounding is relative to
    assert ((result - exact).abs() <= 1e-6 * scale).all()  # 80 terms: at most 80 roundings of 6e-8, mostly far fewer
    into = torch.full_like(usual, float("nan"))
    assert OUT_FORMS[getattr(aten, name).out](*given_, out=into) is into or usual.numel() == 0
    assert torch.equal(into, result)


@pytest.mark.parametrize("dtype", matmul.NARROW)
@given(case=operands())
@settings(max_examples=60, deadline=None)
def test_a_widened_product_rounds_once(dtype: torch.dtype, case: tuple[str, list[Tensor]]) -> None:
    """Half a unit in the last place of the exact result, and fp32's own error."""
    name, wide = case
    given_ = [x.to(dtype) for x in wide]
    own, form = getattr(aten, name).default, matmul.WIDENED[getattr(aten, name).default]
    result, exact = form(*given_), own(*(x.double() for x in given_))
    usual = own(*(x.float() for x in given_))
    assert (result.shape, result.stride(), result.dtype) == (usual.shape, usual.stride(), dtype)
    scale = own(*(x.double().abs() for x in given_))
    half = 0.5 * torch.finfo(dtype).eps
    assert ((result - exact).abs() <= half * exact.abs() * (1 + 1e-3) + 1e-6 * scale + 1e-7).all()
    into = torch.full_like(result, float("nan"))
    matmul.WIDENED_OUT[getattr(aten, name).out](*given_, out=into)
    assert torch.equal(into, result)


@pytest.mark.parametrize(("forms", "dtype"), [(FORMS, torch.float32), (matmul.WIDENED, torch.bfloat16)])
@given(case=operands())
@settings(max_examples=50, deadline=None)
def test_shapes_and_strides_are_known_without_memory(
    forms: dict[Any, Any], dtype: torch.dtype, case: tuple[str, list[Tensor]]
) -> None:
    name, given_ = case[0], [x.to(dtype) for x in case[1]]
    real = forms[getattr(aten, name).default](*given_)
    with FakeTensorMode() as mode:
        fake = forms[getattr(aten, name).default](*(mode.from_tensor(x) for x in given_))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
def test_the_error_is_that_of_fp32(layouts: str) -> None:
    """Against fp64 both libraries err alike; operands rounded to bf16 would err 4,000 times as much."""
    generator = torch.Generator().manual_seed(0)
    a, b = laid_out((192, 768), layouts[0], generator), laid_out((768, 320), layouts[1], generator)
    exact = a.double() @ b.double()
    usual, other = relative(a @ b, exact), relative(torch.ops.fzero.onednn_mm(a, b), exact)
    assert 0 < other < 4 * usual < 4e-6
    assert relative(a.bfloat16().float() @ b.bfloat16().float(), exact) > 100 * other


def test_bits_depend_neither_on_the_address_nor_on_the_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((96, 200), (200, 144)))
    expected = torch.ops.fzero.onednn_mm(a, b)
    for offset in (1, 16, 64):
        moved = torch.empty(a.numel() + offset)[offset:].view(a.shape).copy_(a)
        into = torch.empty(expected.numel() + offset)[offset:].view(expected.shape)
        torch.ops.fzero.onednn_mm.out(moved, b, out=into)
        assert torch.equal(into, expected)
    assert torch.equal(torch.ops.fzero.onednn_mm(a.t().contiguous().t(), b), expected)
    assert torch.equal(torch.ops.fzero.onednn_mm(a, b.t().contiguous().t()), expected)


def test_torchs_setting_is_as_before_also_after_an_error() -> None:
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    torch.ops.fzero.onednn_mm(torch.ones(4, 4), torch.ones(4, 4))
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ops.fzero.onednn_mm(torch.ones(4, 4), torch.ones(5, 4))
    assert setting.fp32_precision == before
    setting.fp32_precision = "ieee"
    try:
        torch.ops.fzero.onednn_mm(torch.ones(4, 4), torch.ones(4, 4))
        assert setting.fp32_precision == "ieee"
    finally:
        setting.fp32_precision = before


def test_where_onednn_would_round_the_kernel_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_KEEPS_FP32", False)
    assert compute.by_onednn(aten.mm.default) is aten.mm.default


@pytest.mark.parametrize("form", ["default", "out"])
@pytest.mark.parametrize("layouts", ["nn", "nt", "tn"])
@pytest.mark.parametrize("sizes", [(256, 768, 640), (768, 1024, 256), (100, 101, 103), (33, 2000, 5)])
@pytest.mark.parametrize("name", matmul.NAMES)
@pytest.mark.acceptance
def test_the_account_covers_what_onednn_allocates(
    name: str, sizes: tuple[int, int, int], layouts: str, form: str
) -> None:
    covers(name, sizes, layouts, form)


CALLS = (
    st.sampled_from(matmul.NAMES),
    st.tuples(st.integers(1, 400), st.integers(1, 2000), st.integers(1, 700)),
    st.sampled_from(["nn", "nt", "tn"]),
    st.sampled_from(["default", "out"]),
)


@given(*CALLS)
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_the_account_covers_what_onednn_allocates_at_any_size(
    name: str, sizes: tuple[int, int, int], layouts: str, form: str
) -> None:
    covers(name, sizes, layouts, form)


@given(*CALLS)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_the_account_covers_what_a_widened_product_allocates(
    name: str, sizes: tuple[int, int, int], layouts: str, form: str
) -> None:
    covers(name, sizes, layouts, form, "widened", torch.bfloat16)


def covers(
    name: str,
    sizes: tuple[int, int, int],
    layouts: str,
    form: str,
    way: str = "onednn",
    dtype: torch.dtype = torch.float32,
) -> None:
    """What the kernel takes beside its operands is within what is planned for it, and that is little more."""
    rows, inner, columns = sizes
    batch = (3,) if "bmm" in name else ()
    generator = torch.Generator().manual_seed(0)
    given_ = [
        laid_out((*batch, rows, inner), layouts[0], generator),
        laid_out((*batch, inner, columns), layouts[1], generator),
    ]
    if name.endswith("addmm") or name == "baddbmm":
        given_.insert(0, torch.randn(*batch, rows, columns, generator=generator))
    given_, out = [x.to(dtype) for x in given_], torch.empty(*batch, rows, columns, dtype=dtype)
    target = getattr(getattr(torch.ops.fzero, f"{way}_{name}"), form)
    kwargs = {"out": out} if form == "out" else {}
    _, extra = measured_peak(lambda: target(*given_, **kwargs))
    graph = fx.Graph()
    holders = [graph.placeholder(f"x{i}") for i in range(len(given_))]
    for holder, value in zip(holders, given_, strict=True):
        holder.meta["val"] = value
    node = graph.call_function(target, tuple(holders))
    node.meta["val"] = out
    result = 0 if kwargs else out.nbytes
    copied = given_[-2].numel() * 4 if len(given_) > 2 and layouts[0] == "t" else 0
    wide = sum(4 * x.numel() for x in (*given_, out)) if way == "widened" else 0
    assert extra <= result + workspace_bytes(node) <= result + wide + copied + 600_000


# --- measuring --------------------------------------------------------------------------------------------------------


def product(name: str, *like: tuple[int, ...], layout: str = "") -> Matmul:
    return Matmul(name, like, tuple(matmul._strides(shape, layout) for shape in like))


@pytest.mark.parametrize(
    "one",
    [
        product("mm", (64, 32), (32, 48)),
        product("mm", (64, 32), (32, 48), layout=":t"),
        product("addmm", (48,), (64, 32), (32, 48)),
        product("bmm", (3, 64, 32), (3, 32, 48), layout=":t"),
        product("baddbmm", (3, 64, 48), (3, 64, 32), (3, 32, 48)),
        Matmul("mm", ((8, 4), (4, 8)), ((20, 2), (0, 1))),
        Matmul("mm", ((1, 4), (4, 1)), ((4, 1), (1, 1))),
    ],
    ids=str,
)
def test_both_libraries_are_measured_and_nobodys_random_numbers_change(one: Matmul) -> None:
    before = torch.get_rng_state()
    figures = matmul.measured(one)
    assert figures.keys() == {"torch", "onednn"}
    assert all(value > 0 for value in figures.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_result_that_is_not_that_of_fp32_rules_onednn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(a.bfloat16().float() @ b.bfloat16().float())

    monkeypatch.setitem(matmul.KERNELS, torch.ops.fzero.onednn_mm.out, rounded)
    figures = matmul.measured(product("mm", (64, 32), (32, 48)))
    assert figures["onednn"] == 0.0 < figures["torch"]


@pytest.mark.parametrize(
    ("one", "part"),
    [
        (product("mm", (256, 768), (768, 50257)), ((256, 768), (768, 2705))),
        (product("mm", (50257, 256), (256, 768)), ((2705, 256), (256, 768))),
        (product("mm", (256, 50257), (50257, 768)), ((256, 2705), (2705, 768))),
        (product("addmm", (50257,), (256, 768), (768, 50257)), ((2705,), (256, 768), (768, 2705))),
        (product("addmm", (1, 50257), (256, 768), (768, 50257)), ((1, 2705), (256, 768), (768, 2705))),
        (product("baddbmm", (2, 1024, 4096), (2, 1024, 512), (2, 512, 4096)), None),
        (product("mm", (256, 768), (768, 640)), ((256, 768), (768, 640))),
        (product("mm", (4096, 4096), (4096, 4096)), ((64, 2048), (2048, 4096))),
        (replace(product("mm", (512, 768), (768, 3072)), dtype=torch.bfloat16), ((512, 512), (512, 64))),
        (replace(product("bmm", (96, 256, 64), (96, 64, 256)), dtype=torch.bfloat16), ((96, 64, 64), (96, 64, 64))),
    ],
    ids=str,
)
def test_a_large_product_is_measured_in_part(one: Matmul, part: tuple[tuple[int, ...], ...] | None) -> None:
    cut = matmul._part(one)
    assert 0 < cut.multiplications <= matmul.LARGEST + 64 * one.multiplications // max(map(max, one.shapes))
    if part is not None:
        assert cut.shapes == part
    assert [matmul._layout(*x) for x in zip(cut.shapes, cut.strides, strict=True)] == [""] * len(cut.shapes)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_default_is_torchs_own_and_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "figures_of", None)
    assert not ONEDNN & set(targets(lowered(MODELS["mlp"], matmul="default").program))
    assert fzero.Spec(loss=MODELS["mlp"].loss, optimizer=fzero.optim.sgd(0.1)).matmul == "default"
    with pytest.raises(SpecError, match=r"Spec\(matmul='fastet'\).*Did you mean 'fastest'"):
        spec_of(MODELS["mlp"], matmul="fastet")


def test_the_old_name_of_the_field_is_refused() -> None:
    with pytest.raises(SpecError, match="Spec has no field 'products'"):
        spec_of(MODELS["mlp"], products="fastest")


def test_ahead_of_time_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "measured", None)
    found = lowered(MODELS["mlp"])
    assert found.program.digest == lowered(MODELS["mlp"], matmul="default").program.digest
    lines = [line for question, line in found.choices.items() if question not in ("reduce", "prefetch")]
    assert len(lines) == 6 + 2  # three forward products, their weight gradients, two input gradients
    assert all("torch's own, for nothing was measured here" in line for line in lines)


def test_choices_are_listed_with_both_figures() -> None:
    force(MODELS["mlp"], {"torch": 101.234, "onednn": 215.678})
    choices = lowered(MODELS["mlp"]).choices
    question = "mm float32 4x13 13x3"
    assert choices[question] == f"{question}: oneDNN by speed (GFLOP/s: oneDNN 216, torch's own 101)"
    assert "mm float32 13x4:t 4x3" in choices


@pytest.mark.parametrize(("onednn", "chosen"), [(1.09, False), (1.1, True), (0.0, False)])
def test_a_tie_stays_with_torch(onednn: float, chosen: bool) -> None:
    force(MODELS["mlp"], {"torch": 1.0, "onednn": onednn})
    found = targets(lowered(MODELS["mlp"]).program)
    assert bool(ONEDNN & set(found)) == chosen
    assert chosen != bool({*FORMS, *OUT_FORMS} & set(found))


def test_rewriting_changes_targets_alone_and_not_its_input() -> None:
    graph = lowered(MODELS["gpt"], matmul="default").graph
    chosen = {p for p in map(matmul.of, graph_nodes(graph)) if p is not None and p.name == "mm"}
    before = [str(region.gm.graph) for region in graph.regions]
    new = matmul.rewritten(graph, chosen)
    assert [str(region.gm.graph) for region in graph.regions] == before
    for old_node, node in zip(graph_nodes(graph), graph_nodes(new), strict=True):
        assert node.target == FORMS[aten.mm.default] if old_node.target is aten.mm.default else old_node.target
        assert node.meta.get("phase") == old_node.meta.get("phase")
        if isinstance(old_node.meta.get("val"), Tensor):
            a, b = node.meta["val"], old_node.meta["val"]
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert aten.addmm.default in {n.target for n in graph_nodes(new)}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_products_in_16_bits_are_computed_in_fp32_where_that_is_faster(precision: str, dtype: str) -> None:
    force(MODELS["mlp"], {"torch": 1.0, "fp32": 30.0}, precision=precision)
    found = lowered(MODELS["mlp"], precision=precision)
    assert WIDENED & set(targets(found.program))
    assert not {*FORMS, *OUT_FORMS} & set(targets(found.program))
    asked = [line for question, line in found.choices.items() if dtype in question]
    assert len(asked) == 8
    assert all(line.endswith("in fp32 by speed (GFLOP/s: in fp32 30, torch's own 1)") for line in asked)


def test_products_in_fp64_and_of_nothing_are_left_alone() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return (b.double() @ p["w"].double()).sum().float() + (b[:0] @ p["w"]).sum()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), matmul="fastest")
    assert "float32" not in str(fzero.lower(spec, {"w": torch.ones(2, 3)}, torch.ones(4, 2)).choices)


# --- every stage the same ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "mlp", "untied"])
@pytest.mark.sampled(1)
def test_stages_are_bitwise_equal_with_onednn(name: str, whole: bool) -> None:
    """The models' batches are made larger, so that oneDNN computes (it leaves the smallest products to torch)."""
    model = larger(MODELS[name])
    params = model.init(fzero.random.key(0))
    force(model, FAST, zero=0)
    stages = (0, 1, 2, 3) if whole else (0, 3)
    runs = {z: run(spec_of(model, zero=z), params, model.batch, world=2, steps=2) for z in stages}
    for stage, one in runs.items():
        assert differing(one.final, runs[0].final) == [], f"zero={stage}"
        found = targets(one.lowered.program)
        assert ONEDNN & set(found)
        assert not {*FORMS, *OUT_FORMS} & set(found)
    usual = run(spec_of(model, zero=3, matmul="default"), params, model.batch, world=2, steps=2)
    for path, value in usual.final.items():
        assert relative(runs[0].final[path], value) < 1e-3, path
    assert usual.losses()[-1] == pytest.approx(runs[0].losses()[-1], rel=1e-5)


def larger(model: Model) -> Model:
    def batch(rank: int, step: int) -> Any:
        whole = [model.batch(rank, 100 * step + i) for i in range(16)]
        return fzero.tree.map(lambda *parts: torch.cat(parts), *whole)

    return model._replace(batch=batch)


def test_the_reference_computes_the_same_step() -> None:
    model = larger(MODELS["mlp"])
    params = model.init(fzero.random.key(0))
    force(model, FAST)
    ran = run(spec_of(model), params, model.batch, world=2, steps=2)
    found, _ = run_reference(spec_of(model), params, model.batch, world=2, steps=2, graph=ran.lowered.graph)
    for path, value in found.items():
        assert relative(ran.final[path], value) < 1e-5, path


def test_weight_gradients_are_written_where_they_belong() -> None:
    force(MODELS["mlp"], FAST)
    found = targets(lowered(MODELS["mlp"], world=2).program)
    assert found.count(torch.ops.fzero.onednn_mm.out) >= 3


def test_a_program_with_another_choice_than_the_step_is_refused() -> None:
    force(MODELS["mlp"], FAST)
    program = lowered(MODELS["mlp"], world=2).program
    verify(program)
    key, gm = next(
        (k, g) for k, g in program.segments.items() if FORMS[aten.mm.default] in {n.target for n in g.graph.nodes}
    )
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if node.target is FORMS[aten.mm.default]:
            node.target = aten.mm.default
    other = fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(VerifyError):
        verify(replace(program, segments={**program.segments, key: other}))


# --- real ranks -------------------------------------------------------------------------------------------------------


def _contradicting(folder: str) -> Any:
    """Each rank's own file says the contrary of the other's."""
    rank = int(os.environ["RANK"])
    os.environ["FZERO_CACHE"] = f"{folder}/{rank}"
    model = MODELS["mlp"]
    force(model, FAST if rank == 0 else SLOW)
    state = fzero.init(model.init(fzero.random.key(0)), spec_of(model))
    for number in range(2):
        state = fzero.step(state, model.batch(rank, number))
    (found,) = state.runtime.programs.values()
    return {q: said for q, said in found.choices.items() if q != "codec"}, found.digest


def test_ranks_whose_files_differ_run_rank_0s_choice(tmp_path: Path) -> None:
    first, second = values(gloo(2, _contradicting, str(tmp_path)))
    assert first == second
    assert all(
        "oneDNN by speed" in line for question, line in first[0].items() if question not in ("reduce", "prefetch")
    )


def _measuring(folder: str) -> Any:
    rank = int(os.environ["RANK"])
    os.environ["FZERO_CACHE"] = folder
    model = MODELS["mlp"]
    state = fzero.init(model.init(fzero.random.key(0)), replace(spec_of(model), prefetch=1))
    state = fzero.step(state, model.batch(rank, 0))
    (found,) = state.runtime.programs.values()
    return {q: said for q, said in found.choices.items() if q != "codec"}, found.digest


def test_ranks_that_start_with_nothing_measure_once_and_the_next_run_knows(tmp_path: Path) -> None:
    first, second = values(gloo(2, _measuring, str(tmp_path)))
    assert first == second
    assert all("GFLOP/s" in line for question, line in first[0].items() if question not in ("reduce", "codec"))
    again, _ = values(gloo(2, _measuring, str(tmp_path)))
    assert again == first
