"""memory_use: rules of offload and of recomputation, as other rooms read them."""

from pathlib import Path

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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefetch": -1}, "prefetch=-1): needed 0 or a positive int"),
        ({"prefetch": True}, "prefetch=True"),
        ({"overlap": 1}, "overlap=1): needed True or False"),
        ({"remat": "some"}, '"none", "full", "gathers", "offload", or path rules'),
        ({"remat": {"blocks/**": "half"}}, '"none", "full", "gathers", "offload"'),
        ({"remat": {3: "full"}}, '"none", "full", "gathers", "offload"'),
        ({"update_on": "gpu", "offload": "optimizer"}, "update_on='gpu'"),
        ({"update_on": "cpu"}, "offload=, which says what lies off the device"),
        ({"nvme_path": "/disk"}, "offload=, which says what lies off the device"),
        ({"offload": "optimiser"}, "Did you mean 'optimizer'?"),
        ({"offload": {}}, 'path rules to "device", "cpu" or "nvme"'),
        ({"offload": 3}, 'path rules to "device", "cpu" or "nvme"'),
        ({"offload": {"**": "host"}}, "offload={'**': 'host'}"),
        ({"offload": {3: "cpu"}}, "offload={3: 'cpu'}"),
        ({"offload": {"**": "device"}}, "a rule that takes something off the device, or no offload="),
        ({"offload": {"**": "nvme"}}, "'nvme' needed nvme_path="),
        ({"offload": {"**": "nvme"}, "nvme_path": ""}, "the path of a folder"),
        ({"offload": {"**": "nvme"}, "nvme_path": "a\0b"}, "the path of a folder"),
        ({"offload": {"**": "nvme"}, "nvme_path": 3}, "the path of a folder"),
        ({"offload": {"**": "cpu"}, "nvme_path": "/disk"}, "a rule of offload= to 'nvme', or none"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_cannot_be_used(given: dict[str, object], message: str) -> None:
    with pytest.raises(fzero.SpecError) as error:
        MemoryUse(**given)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"prefetch": 0}, {"bucket_bytes": 1, "gather_bytes": 2}, {"overlap": False},
        {"offload": "optimizer", "update_on": "device"}, {"offload": {"**": "nvme"}, "nvme_path": Path("/disk")},
        {"offload": {"params": "device", "**": "cpu"}},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_go_together(given: dict[str, object]) -> None:
    MemoryUse(**given)  # type: ignore[arg-type]


def test_a_leaf_without_a_rule_stays_on_the_device() -> None:
    use = MemoryUse(offload={"opt_state/mu/**": "cpu"})
    assert use.space_of("opt_state/nu/w", PARAMS) == "device"
    assert use.space_of("opt_state/mu/w", PARAMS) == "host"
    every = MemoryUse(offload="optimizer+params")
    assert {every.space_of(path, PARAMS) for path in ("params/w", "opt_state/mu/w", "count")} == {"host"}
