"""command: `fzero config FILE`: what becomes of each key of a configuration, or the Python that does the same."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fzero.errors import ConfigError, printable
from fzero.interop.config.accelerate import accelerate_config, is_accelerate
from fzero.interop.config.deepspeed import ds_config
from fzero.interop.config.ledger import LedgerLine, table_of
from fzero.interop.config.read import read


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero config`."""
    parser.add_argument("file", type=Path, help="a ds_config.json, or a yaml or json of accelerate config")
    parser.add_argument("--world", type=int, help="ranks in all (accelerate's file says it; else 1)")
    form = "a value for a key that says auto or is missing"
    parser.add_argument("--auto", action="append", default=[], metavar="KEY=VALUE", help=form)
    parser.add_argument("--python", action="store_true", help="print the Python that does the same, to keep")


def command(arguments: argparse.Namespace) -> int:
    """Prints the table or the Python. Returns the exit status: 0 too where only values are open, unless `--python` asks
    for a Spec that they would be in. What is in the way is a ConfigError, after the table, for the caller."""
    auto = dict(_pair(text) for text in arguments.auto)
    document = read(arguments.file)[1]
    translate = accelerate_config if is_accelerate(document) else ds_config
    try:
        given = translate(arguments.file, world_size=arguments.world, auto=auto)
    except ConfigError as error:
        if arguments.python or not (error.lines or error.open):
            raise
        print(printable(f"{arguments.file}\n{table_of([LedgerLine(*line) for line in error.lines])}"))
        if {path for path, _ in error.refusals} - set(error.open):
            raise
        print(printable("\n".join(["still open:", *(f"  give --auto {path}=VALUE" for path in error.open)])))
        return 0
    print(printable(given.python() if arguments.python else str(given)))
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
