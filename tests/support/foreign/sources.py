"""Where foreign models come from: `case("timm/resnet")`."""

import importlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from foreign.case import Case

# source: its module here, and what must be installed
SOURCES = {
    "examples": ("foreign.examples", ()),
    "hf": ("foreign.hf", ("transformers",)),
    "timm": ("foreign.timm_models", ("timm", "torchvision")),
}


def installed(source: str) -> bool:
    return all(importlib.util.find_spec(name) for name in SOURCES[source][1])


def keys(source: str) -> Iterator[str]:
    """ "source/family" of all its cases."""
    yield from (f"{source}/{family}" for family in _module(source).FAMILIES)


def case(key: str) -> Case:
    source, _, family = key.partition("/")
    return _module(source).case(family)


def _module(source: str) -> Any:
    operators()
    return importlib.import_module(SOURCES[source][0])


@cache
def operators() -> None:
    """Defines what torchvision's import asks for and the CPU build of torch has not; transformers imports it too."""
    if not importlib.util.find_spec("torchvision") or torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
