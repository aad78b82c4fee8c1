"""Machines as data: presets with sources, rings over levels by hand, files that are refused."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

import fzero
from fzero import hardware
from fzero.errors import SpecError
from fzero.hardware import Device, Hardware, NetworkLevel
from fzero.ir.mesh import Mesh

H100 = hardware.load("h100")
NVLINK, PORT = (level.bytes * level.efficiency for level in H100.levels[:2])


@pytest.mark.parametrize("name", hardware.presets())
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    machine = hardware.load(name)
    parts = [("device", machine.device), ("host", machine.host), ("disk", machine.disk)]
    parts += [(f"level.{level.name}", level) for level in machine.levels]
    figures = {
        f"{part}.{f.name}" for part, record in parts if is_dataclass(record) for f in fields(record) if f.name != "name"
    }
    derived = {"device.efficiency", "level.size", "host.from_device_bytes", "disk.size_gib"}
    derived |= {f"level.{level.name}.start_us" for level in machine.levels if not level.start_us}  # counted with hops
    lacking = {f for f in figures - set(machine.sources) if f not in derived and not f.endswith(".size")}
    assert lacking <= {"device.memory_efficiency"}
    assert machine.budget > 0


@pytest.mark.parametrize("name", hardware.presets())
def test_a_machine_written_and_read_is_the_same(name: str, tmp_path: Path) -> None:
    machine = hardware.load(name)
    file = tmp_path / "mine.toml"
    file.write_text(hardware.to_toml(machine), encoding="utf-8")
    assert hardware.load(file) == machine


def test_a_ring_within_a_node_has_the_inner_levels_figures() -> None:
    link = H100.link(range(8))
    assert link.latency == pytest.approx(3.4e-6)
    whole = 8e9
    assert link.seconds("all_gather", int(whole), 8) == pytest.approx(7 * 3.4e-6 + whole * 7 / 8 / NVLINK)


# microseconds of all-reduces by MiB, among so many A100 over NVLink: measured (VIA-Research/vTrain, trace/a100)
NCCL = {
    2: {4: 61, 16: 132, 64: 405, 256: 1456, 1024: 5443}, 4: {4: 77, 16: 180, 64: 544, 256: 1929, 1024: 7259},
    8: {4: 96, 16: 232, 64: 580, 256: 2162, 1024: 8193},
}  # fmt: skip


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb"])
def test_all_reduces_within_a_node_take_what_was_measured(name: str) -> None:
    off = []
    for ranks, measured in NCCL.items():
        rates = hardware.load(name).rates(Mesh((("tp", ranks),)))
        off += [rates.transfer("all_reduce", n << 20, "tp", ranks) / (us * 1e-6) - 1 for n, us in measured.items()]
    assert max(map(abs, off)) < 0.18
    assert sum(map(abs, off)) / len(off) < 0.08


def test_a_transfer_starts_once_on_the_level_that_starts_the_slowest() -> None:
    sizes = {"node": (2, 3.0), "net": (4, 2.0)}
    levels = tuple(NetworkLevel(name=x, size=n, bytes=1e9, start_us=us) for x, (n, us) in sizes.items())
    machine = Hardware(name="two", device=Device(memory_gib=1, memory_bytes=1e9, flops={"fp32": 1e9}), levels=levels)
    assert [machine.link(ranks).start for ranks in ([0, 1], [0, 2], [0, 1, 2, 3])] == [3e-6, 2e-6, 3e-6]


def test_a_ring_across_nodes_uses_a_port_for_each_member_of_a_node() -> None:
    """One member a node has one port; eight members of each carry the ring over eight, at most what NVLink gives."""
    alone, together = H100.link(range(0, 64, 8)), H100.link(range(64))
    whole = 1e9
    assert alone.seconds("all_gather", int(whole), 8) == pytest.approx(7 * 9.6e-6 + whole * 7 / 8 / PORT)
    rate = min(8 * PORT, NVLINK)
    hops = 56 * 3.4e-6 + 7 * 9.6e-6
    assert together.seconds("all_gather", int(whole), 64) == pytest.approx(hops + whole * 63 / 64 / rate)


def test_the_axes_of_a_mesh_get_the_levels_that_they_cross() -> None:
    rates = H100.rates(Mesh((("pp", 4), ("dp", 8), ("tp", 8))))
    assert rates.axes["tp"]["all_gather"].wire_bytes == pytest.approx(2 * NVLINK)
    assert rates.axes["dp"]["all_gather"].wire_bytes == pytest.approx(2 * PORT)
    assert rates.axes["pp"]["send"].wire_bytes == pytest.approx(PORT)
    assert rates.transfer("send", int(PORT / 1000), "pp", 2) == pytest.approx(1e-3 + 9.6e-6)


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(SpecError, match="joins 2 devices, and the mesh needs 4: add a \\[\\[level\\]\\]"):
        hardware.load("rtx4090").rates(Mesh((("dp", 4),)))


def test_levels_of_no_multiple_are_refused() -> None:
    device = Device(memory_gib=1, memory_bytes=1e9, flops={"fp32": 1e9})

    def level(size: int) -> NetworkLevel:
        return NetworkLevel(name=f"of {size}", size=size, bytes=1e9)

    with pytest.raises(SpecError, match="joins 12 devices, which is no multiple of the 8"):
        Hardware(name="odd", device=device, levels=(level(8), level(12)))


GOOD = "[device]\nmemory_gib = 8\nmemory_bytes = 1e11\nflops = { fp32 = 1e12 }\n"
LEVEL = GOOD + "[[level]]\nname = 'x'\nsize = 2\nbytes = 1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[device", "it is no TOML"),
        ("name = 'x'", "needed a table \\[device\\], with memory_gib"),
        (GOOD.replace("memory_gib = 8\n", ""), "\\[device\\] needs memory_gib"),
        (GOOD.replace("memory_gib", "memory_gb"), "\\[device\\] has no key 'memory_gb'. Did you mean 'memory_gib'?"),
        (GOOD + "[hots]\n", "it has no key 'hots'. Did you mean 'host'?"),
        (GOOD + "headroom = 3\n", "device.headroom = 3: needed a part of 1"),
        (GOOD + "memory_efficiency = true\n", "device.memory_efficiency = True: needed a part of 1"),
        (GOOD.replace("1e12", "-1"), "device.flops.fp32 = -1: needed a number"),
        (GOOD + "[level]\nname = 'x'\n", "needed \\[\\[level\\]\\], with two brackets"),
        (GOOD + "[[level]]\nname = 'x'\nsize = 2.5\nbytes = 1\n", "level.x.size = 2.5: needed a positive int"),
        (
            LEVEL + "start_us = { a = 1 }\n",
            "level.x.start_us = {'a': 1}: needed",
        ),
        (
            LEVEL + "start_us = -1\n",
            "level.x.start_us = -1: needed a number",
        ),
        (GOOD.replace("{ fp32 = 1e12 }", "1e12"), "device.flops = 1000000000000.0: needed a table"),
        (GOOD.replace("fp32", "bf16"), "device.flops has no fp32"),
        (GOOD + "from = { flopz = 'x' }\n", "\\[device.from\\] has no key 'flopz'. Did you mean 'flops'?"),
        ("device = 3", "\\[device\\] is 3: needed a table"),
        (GOOD + "headroom = 1\n", "device.headroom = 1: needed a part of 1, and not all of it"),
        (GOOD + "reserved_gib = 9\n", "reserved_gib = 9 and headroom = 0 leave nothing of memory_gib = 8"),
        (GOOD + "memory_efficiency = 0\n", "device.memory_efficiency = 0: needed a part of 1, more than 0"),
        (GOOD + "efficiency = { fp32 = 0 }\n", "device.efficiency.fp32 = 0: needed a part of 1, more than 0"),
        (GOOD.replace("{", "{ bfloat16 = 1e13,"), "device.flops.bfloat16: no such dtype. Did you mean .* fp32, fp8"),
        (LEVEL + "tax = 0.5\n", "level.x.tax = 0.5: needed 1 or more"),
        (LEVEL.replace("bytes = 1\n", "bytes = 0\n"), "level.x.bytes = 0: needed a number, more than 0"),
        (GOOD + "[host]\nmemory_gib = 1\n", "\\[host\\] needs to_device_bytes"),
        (GOOD + "[host]\nmemory_gib = 1\nto_device_bytes = 1e9\n", "\\[host\\] needs from_device_bytes"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=said):
        hardware.load(file)


def test_figures_that_no_machine_has_are_refused_also_where_no_file_gives_them() -> None:
    """Divided by, they are infinite or end a plan with ZeroDivisionError."""
    with pytest.raises(SpecError, match=r"level.nvlink.efficiency = 0: needed a part of 1, more than 0"):
        replace(H100, levels=(replace(H100.levels[0], efficiency=0), *H100.levels[1:]))
    with pytest.raises(SpecError, match=r"device.flops.fp32 = 0: needed a number, more than 0"):
        replace(H100, device=replace(H100.device, flops={"fp32": 0}))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD, encoding="utf-8-sig")
    assert hardware.load(tmp_path / "mine.toml").device.memory_gib == 8


def test_a_folder_and_bytes_are_no_machine(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    for given, said in (
        (tmp_path, " that can be read: .*directory"),
        (tmp_path / "x.toml", " that can be read: .*0xff"),
    ):
        with pytest.raises(SpecError, match=f"no preset and no file{said}"):
            hardware.load(given)
    with pytest.raises(SpecError, match=r"no preset and no file\. The presets"):
        hardware.load("no\0file")


def test_a_step_is_simulated_on_a_machine() -> None:
    """Eight ranks in a node, then one rank in each of eight nodes: the same bytes, over a slower level."""
    spec = fzero.Spec(
        loss=lambda p, b: (b @ p["w"]).square().mean(),
        optimizer=fzero.optim.sgd(0.1),
        zero=3,
        precision="bf16",
    )
    lowered = fzero.lower(spec, {"w": torch.empty(4096, 4096, device="meta")}, torch.empty(1, 4096), world_size=8)
    near = fzero.simulate(lowered, H100)
    spread = replace(H100, levels=(replace(H100.levels[1], size=8), *H100.levels[1:]))
    far = fzero.simulate(lowered, spread)
    assert near.busy["wire dp"] < far.busy["wire dp"]
    assert far.seconds > near.seconds


def test_small_products_and_short_calls_take_longer_than_their_operations() -> None:
    """By hand: 2 m n k at half speed where the least side is `small_side`; no call under the launch."""
    spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).sum(), optimizer=fzero.optim.sgd(0.1), zero=0)
    lowered = fzero.lower(spec, {"w": torch.empty(64, 4096, device="meta")}, torch.empty(2048, 64), world_size=1)
    plain = replace(H100.rates(Mesh((("dp", 1),))), small_side=0.0, launch=0.0)
    base = fzero.simulate(lowered, plain).compute
    small = fzero.simulate(lowered, replace(plain, small_side=64.0)).compute
    work = 2 * 2 * 2048 * 64 * 4096 / plain.flops[4]
    assert small - base == pytest.approx(work, rel=0.02)  # forward and the weight's gradient: least sides 64, 64
    assert fzero.simulate(lowered, replace(plain, launch=1.0)).compute >= 2.0


@pytest.mark.parametrize("low", [1e8, 8e11])
def test_attention_is_a_part_of_the_faster_dtype(low: float) -> None:
    """A processor without 16-bit products is slow in bf16, and its attention in fp32 is not."""
    device = Device(memory_gib=1, memory_bytes=1e10, flops={"fp32": 1e11, "bf16": low}, attention=0.25)
    assert Hardware(name="one", device=device).rates(Mesh((("dp", 1),))).attention == 0.25 * max(low, 1e11)


def test_updates_beside_a_processor_are_its_own_work() -> None:
    """A rank of a CPU has no other cores that update while it computes."""
    mesh = Mesh((("dp", 2),))
    assert H100.rates(mesh).host_bytes > 0
    assert replace(H100, type="cpu").rates(mesh).host_bytes == 0


def test_a_file_says_what_its_devices_are(tmp_path: Path) -> None:
    machine = hardware.load("rtx4090")
    assert machine.type == "cuda"
    file = tmp_path / "machine.toml"
    file.write_text(hardware.to_toml(machine))
    assert hardware.load(file).type == "cuda"
    for wrong, text in (("'gpu'", '"gpu"'), ("0", "0"), (r"\[\]", "[]")):
        file.write_text(hardware.to_toml(machine).replace('"cuda"', text))
        with pytest.raises(SpecError, match=f"type = {wrong}: needed one of cpu, cuda"):
            hardware.load(file)
    with pytest.raises(SpecError, match=r"hardware 'RTX .* type = 'gpu': needed one of cpu, cuda"):
        replace(machine, type="gpu")
