"""Records digests of DeepSpeed's layouts: `python record_deepspeed.py SPARSITY_CONFIG DEEPSPEED_VERSION`.

SPARSITY_CONFIG is `deepspeed/ops/sparse_attention/sparsity_config.py` of a release before September 2026; it needs
torch alone. What it refuses is recorded as "refused".
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "sparse" / "deepspeed_layouts.json"
CLASSES = {
    "fixed": "FixedSparsityConfig",
    "longformer": "BSLongformerSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
}
HEADS = 4


class Drawn:
    """Stands for Python's `random` in DeepSpeed's module: the draws of a case depend on its number alone."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def sample(self, population: range, count: int) -> list[int]:
        """`count` distinct elements. Raises ValueError if there are fewer, as `random.sample`."""
        if count > len(population):
            raise ValueError("Sample larger than population or is negative")
        self.calls += 1
        return sorted(population, key=lambda x: hashlib.sha256(f"{self.number} {self.calls} {x}".encode()).digest())[
            :count
        ]


def random_blocks(number: int, name: str, n: int, parameters: dict[str, Any]) -> Tensor | None:
    """What DeepSpeed draws for a case: (1 or heads, n, random blocks); None where it draws none, or raises."""
    count, drawn = parameters.get("num_random_blocks", 0), Drawn(number)
    below = name == "bigbird" and parameters["attention"] == "unidirectional"
    if not 0 < count <= (1 if below else n):
        return None
    heads = HEADS if parameters["different_layout_per_head"] else 1
    rows = [[drawn.sample(range(r + 1 if below else n), count) for r in range(n)] for _ in range(heads)]
    return torch.tensor(rows)


def cases() -> list[tuple[str, int, dict[str, Any]]]:
    """(layout, blocks, parameters) of every case; heads are `HEADS`, a block is 16 tokens."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    both = ("unidirectional", "bidirectional")
    for n, local, wide, attention, flat, patterns, own in itertools.product(
        (3, 4, 7, 8, 13), (2, 4), (1, 2, 3), both, (False, True), (1, 2), (False, True)
    ):
        found.append(("fixed", n, {
            "num_local_blocks": local, "num_global_blocks": wide, "attention": attention,
            "horizontal_global_attention": flat, "num_different_global_patterns": patterns,
            "different_layout_per_head": own,
        }))  # fmt: skip
    for n, window, (starts, ends), attention in itertools.product(
        (2, 3, 8, 13), (1, 2, 3, 5), (([0], None), ([1, 6], None), ([0, 5], [2, 7]), ([2], [2])), both
    ):
        found.append(("longformer", n, {
            "num_sliding_window_blocks": window, "global_block_indices": starts, "global_block_end_indices": ends,
            "attention": attention,
        }))  # fmt: skip
    for n, drawn, (starts, ends), windows, attention, flat, own in itertools.product(
        (2, 7, 8), (0, 1, 3), (([0], None), ([1, 6], None), ([0, 5], [2, 7]), ([2], [2])), ([4], [1, 3, 2]), both,
        (False, True), (False, True),
    ):  # fmt: skip
        found.append(("variable", n, {
            "num_random_blocks": drawn, "local_window_blocks": windows, "global_block_indices": starts,
            "global_block_end_indices": ends, "attention": attention, "horizontal_global_attention": flat,
            "different_layout_per_head": own,
        }))  # fmt: skip
    for n, drawn, window, wide, attention, own in itertools.product(
        (2, 3, 8, 13), (0, 1, 3), (1, 3, 5), (0, 1, 3), both, (False, True)
    ):
        found.append(("bigbird", n, {
            "num_random_blocks": drawn, "num_sliding_window_blocks": window, "num_global_blocks": wide,
            "attention": attention, "different_layout_per_head": own,
        }))  # fmt: skip
    return found


def digest(layout: Tensor) -> str:
    """Of shape and bits."""
    return hashlib.sha256(repr(layout.int().tolist()).encode()).hexdigest()[:16]


def main(source: str, version: str) -> None:
    spec = importlib.util.spec_from_file_location("sparsity_config", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorded = []
    for number, (name, n, parameters) in enumerate(cases()):
        module.random = Drawn(number)  # type: ignore[attr-defined]
        try:
            made = getattr(module, CLASSES[name])(num_heads=HEADS, block=16, **parameters).make_layout(16 * n)
        except (ValueError, NotImplementedError):
            recorded.append("refused")
        else:
            recorded.append(digest(made))
    GOLDEN.write_text(json.dumps({"deepspeed": version, "layouts": recorded}, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
