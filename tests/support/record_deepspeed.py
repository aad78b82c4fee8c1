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

from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "sparse" / "deepspeed_layouts.json"
CLASSES = {"fixed": "FixedSparsityConfig", "longformer": "BSLongformerSparsityConfig"}


def cases() -> list[tuple[str, int, dict[str, Any]]]:
    """(layout, blocks, parameters) of every case; heads are 4, a block is 16 tokens."""
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
    for name, n, parameters in cases():
        try:
            made = getattr(module, CLASSES[name])(num_heads=4, block=16, **parameters).make_layout(16 * n)
        except (ValueError, NotImplementedError):
            recorded.append("refused")
        else:
            recorded.append(digest(made))
    GOLDEN.write_text(json.dumps({"deepspeed": version, "layouts": recorded}, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
