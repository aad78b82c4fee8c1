"""Records and graphs as JSON: what comes back is what was written; other bytes make nothing."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import cases
import pytest
import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import segments
from fzero.ir.packed import pack, unpack
from fzero.ir.records import Ref

VALUES: list[Any] = [
    None, 0, -3, True, "text", 0.1, -0.0, math.inf, 1 + 2j, (), (1, (2.5, "x")), [1, [2]], {"a": 1, 2: (3,)},
    {1, 2}, frozenset({"a"}), slice(1, None, (2,)), Counter("aab"), torch.Size([2, 3]), torch.bfloat16, Fraction(2, 3),
    torch.device("cuda"), torch.strided, torch.channels_last, Ref("x"), torch.ops.aten.mm.default,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back(value: Any) -> None:
    found = unpack(pack(value), FakeTensorMode())
    assert found == value
    assert type(found) is type(value)


def test_a_device_is_that_of_who_reads() -> None:
    there, here = torch.device("cuda", 0), torch.device("cuda", 3)
    with FakeTensorMode() as mode:
        value = torch.empty(2, device="cpu")
    assert unpack(pack((there, value)), mode, here)[0] == here
    assert unpack(pack((there, value)), mode, here)[1].device.type == "cpu"


def test_nan_comes_back() -> None:
    assert math.isnan(unpack(pack(math.nan), FakeTensorMode()))


def graphs(lowered: Any) -> Iterator[fx.GraphModule]:
    for program in lowered.programs.values():
        yield from program.segments.values()


@pytest.mark.parametrize(
    "options", [{"zero": 3}, {"microbatches": 2, "remat": "full"}, {"offload": "optimizer"}], ids=str
)
def test_a_program_comes_back_with_its_graphs(options: dict[str, Any]) -> None:
    lowered = cases.lowered(**options)
    found = unpack(pack((lowered.programs, lowered.decisions, lowered.records)), FakeTensorMode())
    assert found == (lowered.programs, lowered.decisions, lowered.records)
    assert str(found[0][0]) == str(lowered.program)
    for key, gm in found[0][0].segments.items():
        own = lowered.program.segments[key]
        assert segments.digest(gm) == key
        for a, b in zip(gm.graph.nodes, own.graph.nodes, strict=True):
            assert (a.name, a.op, a.target, str(a.args), str(a.kwargs)) == (
                b.name,
                b.op,
                b.target,
                str(b.args),
                str(b.kwargs),
            )
            assert a.meta.keys() == b.meta.keys()
            assert {k: v for k, v in a.meta.items() if k != "val"} == {k: v for k, v in b.meta.items() if k != "val"}
            assert forms(a.meta.get("val")) == forms(b.meta.get("val"))
        assert shared(gm) == shared(own)


def forms(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [*map(forms, value)]
    return value is not None and (value.shape, value.dtype, value.stride(), value.storage_offset(), value.device)


def shared(gm: fx.GraphModule) -> list[int]:
    """Of each value the number of the memory that it lies in."""
    numbers: dict[int, int] = {}
    values = [v for node in gm.graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor)]
    return [numbers.setdefault(v.untyped_storage()._cdata, len(numbers)) for v in values]


def test_what_is_one_object_comes_back_as_one() -> None:
    one = Ref("x")
    first, (second, other) = unpack(pack((one, (one, Ref("x")))), FakeTensorMode())
    assert first is second
    assert first == other
    assert first is not other


@pytest.mark.parametrize("value", [lambda: 0, torch.zeros(2), torch.nn.Linear(2, 2), object(), print], ids=range(5))
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="no packed form"):
        pack((1, value))


@pytest.mark.parametrize(
    ("classes", "records"),
    [
        ([["os", "system"]], [[0, "touch /tmp/x"]]),
        ([["fzero.ir.packed", "pack"]], [[0, 1]]),
        ([["fzero.ir.records", "Ref"]], [[0]]),
        (["fzero.ir.no_such:Ref"], [[0, "x"]]),
        ([["builtins", "print"]], [[0, "x"]]),
    ],
    ids=str,
)  # fmt: skip
def test_other_classes_are_not_made(
    classes: list[list[str]], records: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"classes": classes, "records": records, "graphs": [], "value": {"record": 0}}
    with pytest.raises(ValueError, match="not what fzero packed"):
        unpack(json.dumps(data).encode(), FakeTensorMode())
    assert not capsys.readouterr().out


@pytest.mark.parametrize("op", ["os.system", "aten.no_such.default", "torch.ops", "aten.mm"])
def test_ops_that_are_not_registered_are_refused(op: str) -> None:
    data = {"classes": [], "records": [], "graphs": [], "value": {"op": op}}
    with pytest.raises(ValueError, match="not what fzero packed"):
        unpack(json.dumps(data).encode(), FakeTensorMode())


def test_bytes_of_another_hand_are_refused_or_read_as_values() -> None:
    whole, draw = pack(cases.lowered(zero=1).programs), random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.choice(b'0123456789[]{}",ax')
        cut = bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        with contextlib.suppress(ValueError):  # the one error that may be
            unpack(cut, FakeTensorMode())
