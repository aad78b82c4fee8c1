"""The formula of `fzero.cost` on the steps of GPT-2 large that were recorded on an H100
(benchmarks/results/gpu_gpt2_large*.json): 8 x 1,024 tokens, 36 layers of width 1,280, bf16, AdamW, one rank.

The counts are of the programs as they were recorded: fzero's by `lowered.roofline()`. torch.compile's were counted by
hand in its own graph (68.0 GB; 2 GB of padding and the number of kernels are estimates). Of the figures of `rates.H100`
three are fitted on these rows, as its comment says: this test holds the formula, and does not prove it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fzero.cost.node_work import CallWork, seconds
from fzero.cost.rates import H100
from fzero.cost.tensor_cores import Product, TensorCores

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TOKENS, WIDTH, LAYERS, VOCABULARY, ATTENTION = 8192, 1280, 36, 50257, 2.706e12
UPDATE = 21.67e9
STEPS = [  # record, row; bytes between products, attention and updates; of updates; kernels; the products' vocabulary
    ("gpu_gpt2_large", "fzero0", 92.9e9, UPDATE, 3177, VOCABULARY),
    ("gpu_gpt2_large", "fzero3_compiled", 80.5e9, UPDATE, 2808, VOCABULARY),
    ("gpu_gpt2_large", "floor_compiled", 70.0e9, UPDATE, 1830, 50304),
    ("gpu_gpt2_large_2", "fzero3_compiled", 54.8e9, 20.13e9, 1973, 50304),  # predicted, and measured afterwards
    ("gpu_gpt2_large_3", "fzero0", 80.8e9, 21.68e9, 1838, 50304),
    ("gpu_gpt2_large_3", "fzero3_compiled", 39.4e9, 21.68e9, 1213, 50304),
]


def products(vocabulary: int) -> list[tuple[int, Product]]:
    """(how often, the product) of a step: forward, of the input's gradient and of the weight's."""
    sides = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    each = [(LAYERS, side) for side in sides] + [(1, (vocabulary, WIDTH))]
    return [
        (times, Product(1, *shape, 2))
        for times, (out, into) in each
        for shape in ((TOKENS, out, into), (TOKENS, into, out), (out, into, TOKENS))
    ]


@pytest.mark.parametrize(("record", "row", "between", "update", "kernels", "vocabulary"), STEPS)
def test_the_formula_gives_the_recorded_step(
    record: str, row: str, between: float, update: float, kernels: int, vocabulary: int
) -> None:
    work = [(times, CallWork("product", 0, 0, 0, 0, p.flops, 2, p)) for times, p in products(vocabulary)]
    work += [
        (1, CallWork("attention", 0, 0, 0, 0, int(ATTENTION), 2)),
        (1, CallWork("loops", kernels, int(between), 0)),
    ]
    work += [(1, CallWork("update", 0, int(update), 0))]
    rows = json.loads((RESULTS / f"{record}.json").read_text())["sizes"]["gpt2_large"]["rows"]
    recorded = rows[row]["step_s"]
    assert sum(times * seconds(each, H100) for times, each in work) == pytest.approx(recorded, rel=0.03)


CORES = TensorCores(flops=800e12, processors=100, unaligned=1e12)


def test_waves_by_hand() -> None:
    """100 tiles of 128 x 256 are one wave, 101 are two."""
    one, two = (Product(1, 128 * rows, 25600, 1152, 2) for rows in (1, 2))
    wave = 100 * 2 * 128 * 256 * (1152 + 128) / 800e12
    assert CORES.seconds(one, 1e15) == pytest.approx(wave)
    assert CORES.seconds(two, 1e15) == pytest.approx(2 * wave)


def test_unaligned_and_thin_products() -> None:
    odd = Product(1, 8192, 8191, 8192, 2)
    assert not odd.aligned
    assert CORES.seconds(odd, 1e15) == odd.flops / 1e12
    assert odd._replace(itemsize=4, n=8188).aligned, "four numbers of fp32 are 16 bytes"
    thin = Product(1, 8192, 8, 8, 2)
    assert CORES.seconds(thin, 1e9) == pytest.approx(thin.nbytes / 1e9), "no less than its bytes"
