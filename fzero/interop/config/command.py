"""command: `fzero config FILE`: what becomes of each key of a configuration, or the Python that does the same."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fzero.errors import ConfigError
from fzero.interop.config.accelerate import accelerate_config, is_accelerate
from fzero.interop.config.deepspeed import ds_config
from fzero.interop.config.read import read


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero config`."""
    parser.add_argument("file", type=Path, help="a ds_config.json, or a yaml or json of accelerate config")
    parser.add_argument("--world", type=int, help="ranks in all (accelerate's file says it; else 1)")
    form = "a value for a key that says auto or is missing"
    parser.add_argument("--auto", action="append", default=[], metavar="KEY=VALUE", help=form)
    parser.add_argument("--python", action="store_true", help="print the Python that does the same, to keep")


def command(arguments: argparse.Namespace) -> int:
    """Prints the table or the Python. Returns the exit status; a ConfigError is for the caller."""
    auto = dict(_pair(text) for text in arguments.auto)
    document = read(arguments.file)[1]
    translate = accelerate_config if is_accelerate(document) else ds_config
    given = translate(arguments.file, world_size=arguments.world, auto=auto)
    print(given.python() if arguments.python else given)
    return 0


def _pair(text: str) -> tuple[str, Any]:
    """`key=value`, the value as JSON, or else as text.

    >>> _pair("optimizer.params.betas=[0.9, 0.95]"), _pair("data_types.param_dtype=bf16")
    (('optimizer.params.betas', [0.9, 0.95]), ('data_types.param_dtype', 'bf16'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--auto {text}: needed a key and a value, as --auto optimizer.params.lr=2e-5")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
