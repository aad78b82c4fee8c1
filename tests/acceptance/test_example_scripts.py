"""The training scripts of transformers' examples/pytorch give with fzero's Trainer what they give with the stock one.

FZERO_EXAMPLES names the folder of the scripts, which are not part of this project (CONTRIBUTING.md).
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign import sources
from helpers import gloo, values

pytestmark = pytest.mark.acceptance
if "FZERO_EXAMPLES" not in os.environ:
    pytest.skip("FZERO_EXAMPLES names no folder of transformers' examples/pytorch", allow_module_level=True)
sources.operators()
for name in ("accelerate", "datasets", "evaluate"):
    pytest.importorskip(name)

from example_inputs import CASES, SHIFTED  # noqa: E402
from example_scripts import changed, of_losses, on_rank, worst  # noqa: E402

CLOSE = 1e-5


@pytest.mark.parametrize("world", [1, 2], ids=["alone", "two"])
@pytest.mark.parametrize("case", CASES)
def test_a_script_gives_what_it_gives_with_the_stock_trainer(
    case: str, world: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Logged losses, norms and rates, metrics, predictions and files of predictions, with short last batches.

    The differences are in the file that pytest's --junitxml names.
    """
    if case.startswith(("resnet", "vit")):
        pytest.importorskip("torchvision")
    found = [on_rank(case, str(tmp_path))] if world == 1 else values(gloo(world, on_rank, case, str(tmp_path)))
    gap = max(worst(ours, stock, case in SHIFTED) for stock, ours in found)
    record_property("worst", gap)
    record_property("losses", max(of_losses(ours, stock) for stock, ours in found))
    assert gap < CLOSE


def test_only_the_import_of_the_trainer_is_changed() -> None:
    text, count = changed("from transformers import AutoConfig, Trainer\nprint(Trainer, AutoConfig)")
    assert count == 1
    assert text == "from fzero.interop import Trainer\nfrom transformers import AutoConfig\nprint(Trainer, AutoConfig)"
