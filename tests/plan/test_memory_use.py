"""memory_use: rules of offload and of recomputation, as other rooms read them."""

import pytest

import fzero
from fzero.plan.memory_use import MemoryUse

PARAMS = ("params/**",)


def test_short_names_stand_for_rules() -> None:
    assert MemoryUse(offload="optimizer+params").offload_rules == {"optimizer": "cpu", "params": "cpu"}
    assert MemoryUse().offload_rules == {}


def test_the_first_rule_that_matches_says_where_a_leaf_waits() -> None:
    use = MemoryUse(offload={"params/head/**": "device", "params": "cpu", "**": "nvme"}, nvme_path="/disk")
    assert use.space_of("params/head/w", PARAMS) == "device"
    assert use.space_of("params/body/w", PARAMS) == "host"
    assert use.space_of("opt_state/mu/body/w", PARAMS) == "disk"
    assert MemoryUse(offload="optimizer").space_of("params/body/w", PARAMS) == "device"


def test_rules_of_gradients_are_apart() -> None:
    use = MemoryUse(offload={"optimizer": "cpu", "grads/blocks/**": "cpu"})
    assert use.gradient_rules == {"blocks/**": "host"}


def test_remat_as_rules() -> None:
    assert MemoryUse(remat="full").remat_rules == {"**": "full"}
    assert MemoryUse(remat={"blocks/**": "offload"}).remat_rules == {"blocks/**": "offload"}


@pytest.mark.parametrize(
    "name", ["bucket_bytes", "gather_bytes", "prefetch_bytes", "loss_chunks", "device_bytes", "host_bytes"]
)
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(fzero.SpecError, match=rf"Spec\({name}=0\): needed a positive int"):
        MemoryUse(**{name: 0})
