"""toml_file: a machine from a TOML file and back. A key that no record has is refused, with a suggestion."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.hardware.machine import TABLES, Device, Drive, Hardware, Host, NetworkLevel
from fzero.ir.mesh import Mesh
from fzero.tree import suggest

PRESETS = Path(__file__).parent
PARTS = {"device": Device, "host": Host, "disk": Drive}


def presets() -> list[str]:
    """The names of the machines that are known.

    >>> presets()
    ['a100-40gb', 'a100-80gb', 'cpu-gloo', 'h100', 'h200', 'rtx4090', 'v100-32gb']
    """
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(machine: str | Path | Hardware) -> Hardware:
    """A machine by its name or file. machine: a preset, or the path of a TOML file. Raises SpecError for a file that is
    none.

    >>> load("h100").device.memory_gib
    80
    >>> load("h10")
    Traceback (most recent call last):
    fzero.errors.SpecError: hardware='h10': no preset and no file. Did you mean 'h100'? ...
    """
    if isinstance(machine, Hardware):
        return machine
    if not isinstance(machine, str | Path):
        raise SpecError(f"hardware={machine!r}: needed a preset ({', '.join(presets())}), a TOML file or a Hardware")
    path = PRESETS / f"{machine}.toml" if str(machine) in presets() else Path(machine)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        hint = suggest(str(machine), presets())
        unread = f" that can be read: {error}" if path.exists() else ""
        raise SpecError(
            f"hardware={str(machine)!r}: no preset and no file{unread}.{hint} The presets are {', '.join(presets())}; "
            "a file of your own is TOML, as `fzero doctor --hardware FILE` writes it"
        ) from error
    try:
        return _parsed(path.name, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"hardware file {path}: it is no TOML: {error}") from error


def rates_over(machine: Rates | Hardware | str | Path, mesh: Mesh, compile: str | None = None) -> Rates:
    """The rates of a machine, given as `load` takes it, over a mesh; rates as they are. compile: as in `Hardware`."""
    return machine if isinstance(machine, Rates) else replace(load(machine), compile=compile).rates(mesh)


def _parsed(where: str, given: Mapping[str, Any]) -> Hardware:
    _known(where, "", given, ["name", "type", "level", *PARTS])
    if "device" not in given:
        raise SpecError(f"hardware file {where}: needed a table [device], with memory_gib, memory_bytes and flops")
    sources: dict[str, str] = {}
    parts = {
        name: _record(where, name, record, given[name], sources) for name, record in PARTS.items() if name in given
    }
    levels = given.get("level", [])
    if not isinstance(levels, list):
        raise SpecError(f"hardware file {where}: needed [[level]], with two brackets: there may be several")
    found = tuple(_record(where, f"level.{_name(level)}", NetworkLevel, level, sources) for level in levels)
    name, kind = str(given.get("name", where)), given.get("type", "")
    return Hardware(name=name, type=kind, levels=found, sources=sources, **parts)


def _name(level: Any) -> str:
    return str(level.get("name", "?")) if isinstance(level, dict) else "?"


def _record(where: str, part: str, record: type[Any], given: Any, sources: dict[str, str]) -> Any:
    """A record of its table. What stands in `from` goes into `sources`."""
    if not isinstance(given, dict):
        raise SpecError(f"hardware file {where}: [{part}] is {given!r}: needed a table")
    names = {f.name: f for f in fields(record)}
    _known(where, part, given, [*names, "from"])
    told = given.get("from", {})
    _known(where, f"{part}.from", told, [name for name in names if name != "name"])
    sources |= {f"{part}.{name}": str(text) for name, text in told.items()}
    values = {name: value for name, value in given.items() if name != "from"}
    for name, f in names.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise SpecError(f"hardware file {where}: [{part}] needs {name}")
    for name, value in values.items():
        if part == "device" and name in TABLES and not isinstance(value, dict):
            raise SpecError(f"hardware file {where}: {part}.{name} = {value!r}: needed a table, as {{ fp32 = 20e12 }}")
    return record(**values)


def _known(where: str, part: str, given: Any, names: list[str]) -> None:
    if not isinstance(given, dict):
        raise SpecError(f"hardware file {where}: [{part}] is {given!r}: needed a table")
    for key in given:
        if key not in names:
            raise SpecError(
                f"hardware file {where}: {f'[{part}]' if part else 'it'} has no key {key!r}.{suggest(key, names)} "
                f"The keys are {', '.join(names)}"
            )


def to_toml(machine: Hardware) -> str:
    """The text that `load` reads. machine: any.

    >>> print(to_toml(load("rtx4090")).splitlines()[0])
    name = "RTX 4090 24 GB, PCIe 4"
    """
    lines = [f"name = {_text(machine.name)}", *([f"type = {_text(machine.type)}"] if machine.type else [])]
    tables = [(name, f"[{name}]", getattr(machine, name)) for name in PARTS if getattr(machine, name) is not None]
    tables[1:1] = [(f"level.{level.name}", "[[level]]", level) for level in machine.levels]
    for part, title, record in tables:
        lines += ["", title]
        for name, value in asdict(record).items():
            if value != {}:
                lines.append(f"{name} = {_text(value)}")
        own = {
            key.removeprefix(f"{part}."): text for key, text in machine.sources.items() if key.startswith(f"{part}.")
        }
        if own:
            lines.append(f"from = {_text(own)}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return f"{value:g}" if isinstance(value, float) and value >= 1e6 else repr(value)
