"""A machine for plans of small models."""

from __future__ import annotations

from fzero.hardware import Device, Hardware, Host, NetworkLevel

# small enough that layers of a few hundred columns fill it, with a network that one notices
TOY = Hardware(
    name="toy",
    device=Device(memory_gib=0.01, memory_bytes=1e10, flops={"fp32": 1e11}, launch_us=1),
    levels=(
        NetworkLevel(name="node", size=4, bytes=2e9, latency_us=5),
        NetworkLevel(name="net", size=64, bytes=2e8, latency_us=20),
    ),
    host=Host(memory_gib=1, to_device_bytes=1e9, from_device_bytes=1e9, adam_bytes=1e10),
)
