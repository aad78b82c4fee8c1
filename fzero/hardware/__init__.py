"""hardware: a machine as data: device, levels of the network, host and disk, each figure with its source.

    machine = fzero.hardware.load("h100")            # a preset, or the path of a TOML file
    fzero.simulate(lowered, machine)

`fzero.hardware.presets()` names the presets. `fzero doctor --hardware FILE` measures this machine into such a file.
"""

from fzero.hardware.machine import Device, Drive, Hardware, Host, NetworkLevel
from fzero.hardware.toml_file import load, presets, to_toml

__all__ = ["Device", "Drive", "Hardware", "Host", "NetworkLevel", "load", "presets", "to_toml"]
