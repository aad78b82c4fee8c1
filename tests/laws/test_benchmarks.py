"""The measuring side: what it counts and decides, without a measurement (`make bench` measures)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import cases
import pytest
import torch
from rich.console import Console

import fzero
from benchmarks import (
    chart,
    disk,
    gpu,
    launch,
    link,
    lower_large,
    pipelining,
    run,
    sparse,
    summary,
    tensor,
    tensor_models,
    timelines,
    what_fits,
    worker,
)
from benchmarks.contenders import CONTENDERS, Setup
from benchmarks.machine import ROOT
from benchmarks.model import SIZES, Size, cross_entropy, empty_model, make_batch, make_model
from benchmarks.pipelining_worker import SIZES as SIZES_OF_PIPELINES
from benchmarks.pipelining_worker import Stage, late_receives
from benchmarks.ratios import TABLE, ratios
from benchmarks.tensor_worker import CONTENDERS as CONTENDERS_OF_TENSOR
from benchmarks.tensor_worker import SIZES as SIZES_OF_TENSOR
from benchmarks.tensor_worker import num_parameters, torch_plan
from fzero.ir.op import make_op
from fzero.ir.records import Ref

TINY = SIZES["tiny"]


def records(*times: list[float], losses: list[float] | None = None) -> list[dict]:
    common = {"first_step_s": 9.0, "minor_faults_per_step": 5.0, "others_cores": 0.0, "losses": losses or [1.0]}
    return [{**common, "step_s": list(one)} for one in times]


def test_the_named_sizes_have_the_parameters_they_are_called_after() -> None:
    sizes = {name: round(size.num_parameters / 1e6, 1) for name, size in {**SIZES, **gpu.SIZES}.items()}
    assert sizes["small"] == 3.7
    assert sizes["gpt2"] == 123.8
    assert (sizes["gpt2_large"], sizes["gpt2_xl"], sizes["llama_1b"]) == (774.0, 1557.6, 1345.4)


def test_flops_count_every_product_once() -> None:
    size = gpu.TINY["llama_tiny"]
    block = 4 * size.width**2 + 3 * size.width * size.inner + 2 * size.width
    worked = size.layers * block + size.width + size.vocabulary * size.width  # the output layer, not the lookup
    attention = 12 * size.layers * size.sequence * size.width
    assert size.flops == (6 * worked + attention) * size.batch * size.sequence


@pytest.mark.parametrize("size", [TINY, gpu.TINY["llama_tiny"]])
def test_every_process_makes_the_same_model_and_each_rank_its_own_batch(size: Size) -> None:
    first, second = make_model(size), make_model(size)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert {p.device.type for p in empty_model(size).parameters()} == {"meta"}
    one, other = make_batch(size, 3, 0), make_batch(size, 3, 1)
    assert torch.equal(one["x"][:, 1:], one["y"][:, :-1])
    assert not torch.equal(one["x"], other["x"])
    assert torch.equal(one["x"], make_batch(size, 3, 0)["x"])


def test_the_step_of_fzero_is_the_step_of_the_plain_loop() -> None:
    steps = [CONTENDERS[name].make(Setup(TINY, "fp32")) for name in ("alone", "fzero3")]
    batches = [make_batch(TINY, number, 0) for number in range(3)]
    plain, ours = ([float(step(batch)) for batch in batches] for step in steps)
    assert ours == pytest.approx(plain, rel=1e-5)
    assert plain[2] < plain[0]


def test_a_step_counts_for_its_slowest_rank_and_a_contender_for_its_median_round() -> None:
    rounds = [records([1.0, 2.0, 3.0], [4.0, 1.0, 1.0]), records([7.0, 7.0, 7.0], [1.0, 1.0, 1.0])]
    assert summary.step_times(rounds[0]) == [4.0, 2.0, 3.0]
    found = summary.figures("ddp", "tiny", rounds)
    assert found["step_s_rounds"] == [3.0, 7.0]
    assert found["step_s"] == 5.0
    assert found["tokens_per_s"] == 2 * TINY.tokens / 5.0
    assert "live_peak_bytes" not in found  # measured, or absent


def test_a_loss_curve_that_is_off_stops_the_run_and_the_floor_does_not() -> None:
    reference = [2.0, 1.0]
    good, bad = records([1.0], losses=[2.0, 1.00001]), records([1.0], losses=[2.0, 1.01])
    found = run.compared("fp32", {"ddp": [good], "floor": [bad]}, reference)
    assert found["gaps"]["floor"] == pytest.approx(0.01)
    assert summary.gap_line(found) == (
        "Losses agree with the reference's to 1e-05 (allowed 0.0001; without communication 0.01)"
    )
    with pytest.raises(SystemExit, match=r"loss curves disagree by more than 0\.0001.*\nfsdp: 0\.01"):
        run.compared("fp32", {"ddp": [good], "fsdp": [good, bad]}, reference)
    with pytest.raises(SystemExit, match="disagree"):
        run.compared("fp32", {"ddp": [records([1.0], losses=[2.0, float("nan")])]}, reference)


def test_ratios_are_taken_where_both_were_measured() -> None:
    case = {"size": "gpt2", "dtype": "fp32", "link": "loopback", "malloc": "default"}
    figures = {
        "fzero3": {"step_s": 2.0, "live_peak_bytes": 95},
        "fsdp": {"step_s": 3.0, "live_peak_bytes": 100},
        "floor": {"step_s": 1.8},
    }
    found = {(one["theirs"], one["figure"]): one for one in ratios(case, figures)}
    assert set(found) == {("fsdp", "step_s"), ("floor", "step_s"), ("fsdp", "live_peak_bytes")}
    speed = found["fsdp", "step_s"]
    assert (speed["ratio"], speed["wanted"], speed["reached"]) == (1.5, 1.6, False)
    assert found["floor", "step_s"]["reached"]
    assert not found["fsdp", "live_peak_bytes"]["reached"]
    other = ratios({**case, "malloc": "keep"}, figures)
    assert next((one["wanted"], one["reached"]) for one in other if one["theirs"] == "fsdp") == (1.25, True)
    assert summary.ratio_lines([speed]) == ["fzero zero=3 / FSDP2, resharding: 1.50x, wanted 1.6x: NO"]


def test_every_row_of_the_ratios_names_contenders() -> None:
    assert {name for row in TABLE for name in (row.ours, row.theirs)} <= set(CONTENDERS)


@pytest.mark.acceptance
def test_held_bytes_are_those_of_every_storage_once() -> None:
    before = worker.held_bytes()
    kept = torch.zeros(1000)
    views = [kept[:10], kept.view(10, 100), torch.nn.Parameter(torch.zeros(50))]
    assert worker.held_bytes() - before == 4000 + 200
    del views, kept
    assert worker.held_bytes() == before


@pytest.mark.acceptance
def test_the_memory_of_a_plain_step_is_parameters_moments_and_gradients() -> None:
    step = CONTENDERS["alone"].make(Setup(TINY, "fp32"))
    before, batch = worker.held_bytes(), make_batch(TINY, 0, 0)
    step(batch)
    found = worker.live_peak(lambda: step(batch))
    each = 4 * TINY.num_parameters
    assert 2 * each <= found["held_bytes"] - before < 2.1 * each  # the moments came with the first step
    assert found["live_peak_bytes"] - found["held_bytes"] > each  # the gradients, at least


def test_options_are_checked_and_cross_to_cases() -> None:
    plan, out = run.parsed(
        ["--size", "tiny", "--malloc", "default,keep", "--only", "fzero0,fzero1,floor", "--out", "x"]
    )
    assert [case.malloc for case in plan.cases] == ["default", "keep"]
    assert plan.names == ("fzero0", "fzero1", "floor")
    assert out == "x"
    with pytest.raises(SystemExit, match="--only foo: known are alone"):
        run.parsed(["--only", "foo"])
    with pytest.raises(SystemExit):
        run.parsed(["--size", "huge"])


def test_every_process_gets_one_thread_and_the_same_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    with link.loopback() as wire:
        found = [
            launch.environment(launch.Job("fsdp", "tiny", "fp32", malloc, 1, 1), wire, rank, 1234)
            for malloc, rank in (("default", 0), ("keep", 1))
        ]
    assert [env["OMP_NUM_THREADS"] for env in found] == ["1", "1"]
    assert [(env["RANK"], env["WORLD_SIZE"]) for env in found] == [("0", "2"), ("1", "2")]
    assert not [key for key in found[0] if key.startswith("MALLOC_")]
    assert float(found[1]["MALLOC_TRIM_THRESHOLD_"]) == float(found[1]["MALLOC_MMAP_THRESHOLD_"]) == 1e11


def test_a_slow_link_without_rights_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(link.shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    with pytest.raises(SystemExit, match="needs root and iproute2: not root"), link.shaped("1gbit"):
        pass


def test_the_chart_is_drawn_from_the_record_and_names_what_is_missing(tmp_path: Path) -> None:
    one = {"step_s": 2.0, "step_s_rounds": [1.5, 2.5], "rss_peak_bytes": 2e9}
    rows = {"fzero3": {"title": "fzero zero=3", **one}, "floor": {"title": "floor", **one}, "fsdp": {"failed": "x"}}
    case = {"size": "tiny", "dtype": "fp32", "link": "loopback", "malloc": "default", "rounds": 2, "contenders": rows}
    case["model"] = {"parameters": 1e6, "batch": 2, "sequence": 32}
    record = {"cases": [case], "machine": {"cpu": {"model": "a CPU"}, "packages": {"torch": "2"}, "date": "2026-01-01"}}
    (tmp_path / "r.json").write_text(json.dumps(record))
    for name in ("a.svg", "b.svg"):
        chart.main([str(tmp_path / "r.json"), "--size", "tiny", "--out", str(tmp_path / name)])
    drawn = (tmp_path / "a.svg").read_text()
    assert "fzero zero=3" in drawn
    assert "2.00" in drawn
    assert drawn == (tmp_path / "b.svg").read_text()
    with pytest.raises(SystemExit, match=r"no case gpt2, fp32.*there are: tiny, fp32"):
        chart.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "c.svg")])


# --- one rank's share of a larger world ---------------------------------------------------------------------------


def test_a_filled_transfer_is_what_equal_ranks_would_do() -> None:
    comm, whole = gpu.Filled(1, 3), torch.zeros(6)
    gather = make_op("all_gather", [Ref("s")], [Ref("w")])
    comm.start("w", gather, [torch.tensor([1.0, 2.0]), whole])
    assert whole.tolist() == [1, 2, 1, 2, 1, 2]
    whole = torch.tensor([0.0, 0.0, 5.0, 6.0, 0.0, 0.0])
    comm.start("w", gather, [whole[2:4], whole])  # the own slice in place
    assert whole.tolist() == [5, 6, 5, 6, 5, 6]
    scattered, source = torch.zeros(2), torch.arange(6.0)
    comm.start("d", make_op("reduce_scatter", [Ref("s")], [Ref("d")], divisor=3), [source, scattered])
    assert scattered.tolist() == [2, 3]
    summed = torch.zeros(())
    comm.start("d", make_op("all_reduce_small", [Ref("s")], [Ref("d")], op="sum"), [torch.tensor(2.0), summed])
    assert float(summed) == 6


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.sampled(1)
def test_a_share_holds_a_rank_s_part_and_trains(zero: int) -> None:
    setup = Setup(gpu.TINY["llama_tiny"], "fp32")
    state = gpu.share_of(setup, zero, 8)
    held = sum(x.numel() * x.element_size() for x in state.runtime.memory.values())
    whole = 3 * 4 * setup.size.num_parameters
    assert held == pytest.approx(whole if zero == 0 else whole / 8, rel=0.1)
    before = {name: x.clone() for name, x in state.runtime.memory.items()}
    step = gpu.share(setup, zero, 8)
    assert torch.isfinite(step(make_batch(setup.size, 0, 0)))
    assert before.keys() == state.runtime.memory.keys()


def test_mfu_needs_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.peak_flops("cpu", None) is None
    assert gpu.peak_flops("cpu", 0.5) == 5e11
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    assert gpu.peak_flops("cuda", None) == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "something new")
    assert gpu.peak_flops("cuda", None) is None


def test_gpu_arguments_are_checked() -> None:
    assert gpu.parsed(["--device", "cpu", "--tiny", "--size", "llama_tiny"]).sizes is gpu.TINY
    for wrong in (["--size", "gpt2_xl"], ["--only", "fzero3@7"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            gpu.parsed(["--device", "cpu", "--tiny", *wrong])


def test_losses_that_differ_are_found_on_the_device_too() -> None:
    rows = {"a": {"losses": [1.0]}, "b": {"losses": [1.001]}, "c": {"losses": [1.5]}, "d": {"failed": "out of memory"}}
    assert list(gpu.disagreeing(rows, "bf16")) == ["c"]
    assert json.dumps(gpu.disagreeing(rows, "fp32"))


@pytest.mark.acceptance
def test_a_405b_shaped_step_is_lowered_for_its_roles() -> None:
    """A part of `benchmarks.lower_large`: every role verified with the others, within the memory of a small machine."""
    made = lower_large.lowered(layers=4, pp=2, dp=128, tp=1, microbatches=4, length=8192)
    assert made.plan.world_size == 256
    assert [program.role for program in made.programs.values()] == [0, 1]
    assert all(memory.peak > memory.state > 0 for memory in made.memories.values())


# --- pipelines beside torch.distributed.pipelining ----------------------------------------------------------------


def pipelined(seconds: list[list[float]], losses: list[float | None], pss: int | None = None) -> dict:
    """A rank's record of a contender: seconds by round, or its memory."""
    peaks = dict.fromkeys(pipelining.MEMORY, pss) if pss else {"step_s_rounds": seconds, "first_step_s": 1.0}
    return {"losses": losses, **peaks}


def pipelined_ranks(names: Sequence[str], rounds: int, late: float = 2.0) -> list[dict]:
    ranks = []
    for rank in range(2):
        known: list[float | None] = [2.0, 1.0 if rank else None]
        seconds = {"torch": 1.0, "fzero_late": late}
        rows = {name: [[seconds.get(name, 0.5) + rank, 9.0, 0.1]] * rounds for name in names}
        memory = None if rounds else 100 * (1 + rank)
        ranks.append({name: pipelined(rows[name], known, memory) for name in names} | {"others_cores": 0.0})
    return ranks


def test_pipelines_are_timed_by_the_slowest_rank_and_compared_by_round() -> None:
    plan, out = pipelining.parsed(["--world", "2", "--rounds", "3"])
    assert out == "pipelining"
    assert [case.link for case in plan.cases] == ["loopback", "1gbit"]
    found = pipelining.run_case(plan.cases[0], plan, pipelined_ranks)
    torch_ = found["contenders"]["torch"]
    assert torch_["step_s_rounds"] == [2.0] * 3  # of 2, 9 and 0.1
    assert torch_["pss_peak_bytes"] == [100, 200]
    ours = next(row for row in found["ratios"] if row["ours"] == "fzero_p2p")
    assert (ours["step_s"], ours["pss_peak_bytes"], ours["pss_peak_bytes_sum"]) == (0.75, 1.0, 1.0)
    on_link = pipelining.run_case(plan.cases[1], plan, pipelined_ranks)
    early = next(row for row in on_link["ratios"] if row["theirs"] == "fzero_late")
    assert early["step_s"] == 0.5
    assert "pss_peak_bytes" not in early  # memory is read on loopback


def test_pipelines_with_other_losses_are_not_reported() -> None:
    curves = {"torch": [[2.0, 1.0]], "fzero_p2p": [[2.0, 1.0], [2.0, 1.0001]]}
    with pytest.raises(SystemExit, match="losses differ by more than 1e-05"):
        pipelining.compared(curves)


def test_torchs_orders_are_drawn_beside_ours(tmp_path: Path) -> None:
    timelines.main(tmp_path / "torch.svg")
    text = (tmp_path / "torch.svg").read_text()
    assert text == (ROOT / "docs" / "schedules" / "torch.svg").read_text()
    drawings = [part.text or "" for part in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    shares = {line.split(":")[0]: line.split()[2] for line in drawings if " idle " in line}
    assert list(shares) == ["interleaved", "ScheduleInterleaved1F1B", "zb-h1", "ScheduleInterleavedZeroBubble",
                            "zb-v", "ScheduleZBVZeroBubble"]  # fmt: skip
    assert shares["interleaved"] == shares["ScheduleInterleaved1F1B"] == "15.8%"
    assert shares["zb-v"] == shares["ScheduleZBVZeroBubble"] == "5.9%"


def test_options_of_pipelining() -> None:
    quick, out = pipelining.parsed(["--quick"])
    assert (quick.cases, out) == (pipelining.QUICK, "pipelining_quick")
    for wrong in (["--world", "3"], ["--rounds", "0"], ["--world", "4", "--link", "1gbit"]):
        with pytest.raises(SystemExit):
            pipelining.parsed(wrong)


def test_hand_split_stages_are_the_model() -> None:
    size = SIZES_OF_PIPELINES["tiny"]
    model, batch = make_model(size), make_batch(size, 0, 0)
    h = batch["x"]
    for role in range(2):
        h = Stage(model, role, 2)(h)
    assert torch.equal(cross_entropy(h, batch["y"]), model(batch["x"], batch["y"]))


def test_late_receives_are_a_program_too() -> None:
    """Receives begin as late as the order of messages lets them, in programs that verify still takes."""
    init, loss = cases.gpt(64, 16, 4, 2)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-2), microbatches=4, mesh={"pp": 2}, pipeline="1f1b", transfers="p2p"
    )
    lowered = fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(4, 8, 64))
    late = {role: late_receives(program) for role, program in lowered.programs.items()}
    fzero.verify(late)
    for role, program in lowered.programs.items():
        assert sorted(map(str, program.ops)) == sorted(map(str, late[role].ops))
        assert computed_between(late[role]) < computed_between(program)


def computed_between(program: fzero.ir.program.Program) -> int:
    """The segments that run between the start of a receive and its wait, over all receives."""
    ops, total = list(program.ops), 0
    for i, op in enumerate(ops):
        if op.is_recv:
            end = next(j for j in range(i, len(ops)) if ops[j].is_wait and ops[j].reads[0].name == op.target)
            total += sum(one.kind == "run" for one in ops[i:end])
    return total


@pytest.mark.acceptance
def test_the_quick_benchmark_of_pipelines_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(pipelining, "RESULTS", tmp_path)
    pipelining.main(["--quick"])
    (case,) = json.loads((tmp_path / "pipelining_quick.json").read_text())["cases"]
    assert case["gaps"].keys() == {"torch", "fzero_p2p", "fzero_auto"}
    assert max(case["gaps"].values()) <= pipelining.TOLERANCE


# --- tensor parallelism beside DTensor and FSDP2 ----------------------------------------------------------------------


def tensor_ranks(what: str, names: Sequence[str]) -> list[dict]:
    """Records of four ranks: ours takes half of theirs."""
    ranks = []
    for rank in range(tensor.WORLD):
        record: dict = {"others_cores": 0.0}
        for name in names:
            share = 1.0 if name.startswith("torch") else 0.5
            losses = [2.0, 1.0] if share == 0.5 else [1.5 + (rank > 1), 0.5 + (rank > 1)]
            record[name] = {
                "rounds": {"step_s_rounds": [[share * (1 + rank), 9.0, 0.1]] * 2, "first_step_s": 1.0},
                "memory": dict.fromkeys(tensor.MEMORY, 100 * share),
                "start": {
                    "made_s": 1.0, "first_step_s": 3.0, "step_s": [share, share], "sent_bytes": {"dp": 8, "tp": rank},
                    "wire_bytes": 5.0,
                },
            }[what] | {"losses": losses}  # fmt: skip
        ranks.append(record)
    return ranks


def test_tensor_parallel_contenders_are_timed_and_compared() -> None:
    plan, out = tensor.parsed(["--case", "plain", "--size", "tiny"])
    assert out == "tensor"
    found = tensor.run_case("plain", plan, tensor_ranks, lambda _: None)
    theirs = found["contenders"]["torch"]
    assert theirs["step_s_rounds"] == [4.0, 4.0]  # of 4, 9 and 0.1
    assert (theirs["total_s"], theirs["sent_bytes"]) == (5.0, {"dp": 8, "tp": 3})
    assert found["gaps"]["fzero_p2p"] == 0.0  # of the mean over the ranks
    row = next(row for row in found["ratios"] if row["ours"] == "fzero_auto")
    assert (row["step_s"], row["pss_peak_bytes"], row["total_s"]) == (0.5, 0.5, 0.8)
    assert all(row["reached"].values())
    console = Console(record=True, width=200)
    tensor.show(console, found)
    assert "fzero_auto: step_s 0.50 (reached)" in console.export_text()
    with pytest.raises(SystemExit, match=r"losses differ by more than 0\.0001"):
        tensor.compared({"torch": [[2.0, 1.0]], "fzero_p2p": [[2.0, 1.001]]})
    for wrong in (["--case", "no"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            tensor.parsed(wrong)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_state_of_the_llama_is_a_gigabyte_and_torchs_plan_names_its_modules() -> None:
    from benchmarks.tensor_worker import llama

    size = SIZES_OF_TENSOR["llama"]
    assert 16 * num_parameters(size) > 1e9
    modules = {
        name.replace("layers.0", "layers.*") for name, _ in llama(SIZES_OF_TENSOR["tiny"], "meta").named_modules()
    }
    for sequence in (False, True):
        assert torch_plan(sequence).keys() <= modules
    assert {name for names in tensor.CASES.values() for name in names} == CONTENDERS_OF_TENSOR.keys()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_an_architecture_over_two_ranks_is_judged() -> None:
    assert tensor_models.judged("Llama", lambda: tensor_models.by_fzero("Llama")) == "runs"

    def still() -> tensor_models.Result:
        loss, _ = tensor_models.alone("Llama", tensor_models.build("Llama"))
        return loss, dict(tensor_models.build("Llama").named_parameters())

    assert tensor_models.judged("Llama", still).startswith("wrong gradients (by 1.0e+00")
    assert tensor_models.judged("Llama", lambda: (0.0, {})).startswith("another loss")


@pytest.mark.acceptance
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_quick_benchmark_of_tensor_parallelism_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(pipelining, "RESULTS", tmp_path)
    tensor.main(["--quick"])
    plain, sequence = json.loads((tmp_path / "tensor_quick.json").read_text())["cases"]
    for case in (plain, sequence):
        assert case["contenders"].keys() == set(tensor.CASES[case["case"]])
        assert max(case["gaps"].values()) <= tensor.TOLERANCE


def test_disks_are_compared_with_the_best_of_the_others() -> None:
    """The lane against a setting that is best in the median, and every byte moved by each, read back as it was."""
    rates = {"fzero": [3, 9, 1], "fio a": [1, 1, 1], "fio b": [2, 2, 9], "deepspeed x": [6, 1, 6]}
    times = {"write": {name: {"gb_per_s": rate} for name, rate in rates.items()}}
    assert disk.shares(times) == {"write": {"fio": 1.5, "deepspeed": 0.5}}
    size = 64 << 10
    memory = disk.aligned(size).random_(0, 256)
    expected = memory.clone()
    lane = disk.of_fzero(disk.DiskFile(".", size), memory, 12 << 10)
    for kind in disk.KINDS:
        assert sum(nbytes for _, _, nbytes in disk.ranges_of(kind, size)) == size
        seconds, cpu = lane(disk.ranges_of(kind, size))
        assert min(seconds, cpu) > 0
    memory.zero_()
    lane(disk.ranges_of("read", size))
    assert torch.equal(memory, expected)


def test_a_pattern_of_attention_looks_at_a_tenth_of_the_pairs() -> None:
    """And the contenders compute the same."""
    for pattern in ("causal", "window"):
        for tokens in (512, 2048):
            share = float(sparse.layout(pattern, tokens).tokens().float().mean())
            assert 0.05 <= share <= 0.1, (pattern, tokens, share)
    q, k, v = torch.randn(3, 1, sparse.HEADS, 512, 8).unbind(0)
    calls = sparse.contenders("causal", sparse.layout("causal", 512))
    torch.testing.assert_close(calls["sparse"](q, k, v), calls["masked"](q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", what_fits.REMAT)
@pytest.mark.sampled(1)
def test_a_window_is_ten_times_longer_than_scores_under_one_budget(remat: str) -> None:
    """At equal recomputation: what ten times fewer tokens need by their scores is more than the window needs."""
    small, tokens = what_fits.SHAPES["small"], 3840

    def peak(name: str, tokens: int) -> int:
        spec = what_fits.spec(small, name, remat, tokens)
        like, batch = what_fits.params_like(small), what_fits.batch_like(tokens)
        return fzero.lower(spec, like, batch, world_size=1).memory.peak

    assert peak("scores", tokens) > 1_000_000_000 > peak("window", 10 * tokens)


def test_the_contenders_of_what_fits_compute_the_same() -> None:
    q, k, v = torch.randn(3, 1, 2, 640, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    by_scores = what_fits.attention("scores", 640)(q, k, v)
    for name in ("masked", "window"):
        torch.testing.assert_close(what_fits.attention(name, 640)(q, k, v), by_scores, rtol=1e-4, atol=1e-5)
