"""forms: the results of ops on fake tensors, kept by the forms of their operands.

A layer's ops come again in the next layer, in the next trace, and for each leaf of an optimizer. Fake tensors keep them
too, but to look there takes half of the time of an op of a trace. Kept are ops of aten that write nothing, draw nothing
and ask for no values, fzero's elementwise ones, and those whose row says so (`OpInfo.fake`). The forms of their results
follow from those of their operands; what shares memory with an operand is said by the schema. All others go the usual
way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    fake_by_kernel,
    fake_of_form,
    fake_rule,
    lying_on,
)
from fzero.ir import fx_values, in_place
from fzero.ir.op_info import of

aten = torch.ops.aten
HOST = torch.device("cpu")
MOST = 20_000  # calls that are kept
_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
_STATIC = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_NEVER = object()  # the key of a call whose results may follow from more
_kept: dict[Any, list[tuple[Any, ...] | None] | None] = {}  # forms of a call's results; None: they are not to be kept


def run(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`op(*args, **kwargs)` on fake tensors, whose mode is on."""
    rule, operands = fake_rule(op), list[FakeTensor]()
    if op._schema.is_mutable:
        in_place.check(op, args, kwargs, run)
        in_place.count(op, args)
    kind = _results(op)
    key = _NEVER if kind is None else _key([*args, *kwargs, *kwargs.values()], operands, op is aten.as_strided.default)
    if key is _NEVER or not operands or any(x.fake_mode is not operands[0].fake_mode for x in operands):
        if kind and operands and backend.traced_device() and (fakes := _faked(operands[0].fake_mode, args, kwargs)):
            return run(op, *fakes)
        return rule(*args, **kwargs)
    key = (op, key, torch.get_default_dtype(), away := backend.traced_device())
    forms = _kept.get(key)
    if forms is None:
        result = _asked(op, rule, args, kwargs, operands)
        if key not in _kept:
            if len(_kept) >= MOST:
                _kept.clear()
            found = _forms(operands, [result] if kind is torch.Tensor else result, _shares(op))
            _kept[key] = found if away is None else _there(away, op, rule, args, kwargs, operands) or found
        if away is None or (forms := _kept[key]) is None:
            return result
    made = [None if form is None else fake_of_form(operands[0], *form) for form in forms]
    return made[0] if kind is torch.Tensor else kind(made)


def _faked(mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operands, with fake tensors in the place of real ones, which are closed over: those lie on the processor, so
    that rules would say the processor's forms. None if there are none."""
    found = list[torch.Tensor]()

    def fake(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(fake, x))
        if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor):
            found.append(x)
            return mode.from_tensor(x.detach())
        return x

    faked = [fake(x) for x in args], {name: fake(x) for name, x in kwargs.items()}
    return faked if found else None


def _asked(
    op: OpOverload, rule: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[FakeTensor]
) -> Any:  # fmt: skip
    if of(op).fake == "kernel" and kwargs.get("device") is None and _alike(op, operands) and _settled(op, operands):
        with contextlib.suppress(RuntimeError, IndexError, ValueError):  # torch's rule says what is wrong
            result = fake_by_kernel(op, args, kwargs, operands[0])
            if _settled(op, fx_values.tensors(result if isinstance(result, (list, tuple)) else [result])):
                return result
    return rule(*args, **kwargs)


def _there(
    device: torch.device, op: OpOverload, rule: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
    operands: Sequence[FakeTensor],
) -> list[tuple[Any, ...] | None] | None:  # fmt: skip
    """The forms of the results of operands of a device that is elsewhere, which lie on the processor in a trace: rules
    say other dtypes for statistics there. None where the rule asks the device itself, as for a convolution."""
    with lying_on(device, operands), contextlib.suppress(RuntimeError, AssertionError):
        result = _asked(op, rule, args, kwargs, operands)
        results = [result] if isinstance(result, torch.Tensor) else result
        own = [x.clone() if any(x is y for y in operands) else x for x in results]  # the rule of a norm hands some on
        forms = _forms(operands, own, _shares(op))
        return forms and [None if form is None else (*form[:-1], HOST) for form in forms]
    return None


def _alike(op: OpOverload, operands: Sequence[FakeTensor]) -> bool:
    """Whether they lie on one device, and have dtypes by which the kernel for meta tensors has the form of theirs: the
    statistics of a norm of narrow operands have another dtype on each device."""
    row, dtypes = of(op), {x.dtype for x in operands}
    if (row.one_dtype is not None and len(dtypes) > 1) or (
        row.norm_weight is not None and min(d.itemsize for d in dtypes) < 4
    ):
        return False
    return len({x.fake_device for x in operands}) == 1


def _settled(op: OpOverload, values: Sequence[torch.Tensor]) -> bool:
    """Whether strides follow from shapes and operands: of dims of one element they say nothing, and rules differ there
    unless all lies in plain order."""
    long = all(size > 1 for x in values for size in x.shape)
    return long or (not _shares(op) and all(x.is_contiguous() for x in values))


@functools.cache
def _results(op: OpOverload) -> Any:
    """What the op returns: Tensor, tuple or list; None if its results' forms may follow from more than its operands'.
    No operand but the first may share memory with a result."""
    schema = op._schema
    own = bool(of(op).fake) or (op.namespace == "fzero" and torch.Tag.pointwise in op.tags)
    sharing = {a.name for a in schema.arguments if a.alias_info is not None}
    types = [str(r.type) for r in schema.returns]
    if schema.is_mutable or _TAGS.intersection(op.tags) or not (op.namespace == "aten" or own):
        return None
    if not schema.arguments or not sharing <= {schema.arguments[0].name}:
        return None
    if types == ["List[Tensor]"]:
        return list
    return None if not types or set(types) != {"Tensor"} else torch.Tensor if len(types) == 1 else tuple


@functools.cache
def _shares(op: OpOverload) -> bool:
    return op is aten._unsafe_view.default or any(r.alias_info is not None for r in op._schema.returns)


def _key(value: Any, operands: list[FakeTensor], by_offset: bool) -> Any:
    """What the form of a result depends on. Fake tensors are added to `operands`. Where an operand begins in its memory
    says no more than where a view of it does; but for an op that is told where (`by_offset`)."""
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value):
            return _NEVER
        operands.append(value)
        offset = value.storage_offset() if by_offset else 0
        return tuple(value.shape), value.stride(), offset, value.dtype, value.fake_device
    if kind in (tuple, list):
        parts = [_key(x, operands, by_offset) for x in value]
        return _NEVER if _NEVER in parts else (kind, *parts)
    return (kind, value) if kind in _STATIC else _NEVER


def _is_plain(x: Any) -> bool:
    """Whether a fake tensor is described by shape, strides, offset, dtype and device."""
    strided = type(x) is FakeTensor and x.layout is torch.strided
    return strided and x.constant is None and not x.is_conj() and not x.is_neg()


def _forms(
    operands: Sequence[FakeTensor], results: Sequence[Any], shares: bool
) -> list[tuple[Any, ...] | None] | None:  # fmt: skip
    """(whether it lies in the first operand's memory, shape, strides, offset, dtype, device) of each result; the offset
    from the first operand's own; None of a result that is not wanted. None where that does not say what they are."""
    made = [x for x in results if x is not None]
    if any(not _is_plain(x) or any(x is y for y in operands) for x in made):
        return None
    first, taken = operands[0], {_memory(x) for x in operands}
    for x in made:
        if (_memory(x) != _memory(first) or x.dtype is not first.dtype) if shares else _memory(x) in taken:
            return None
        taken.add(_memory(x))
    own = first.storage_offset() if shares else 0
    return [
        None if x is None else (shares, tuple(x.shape), x.stride(), x.storage_offset() - own, x.dtype, x.fake_device)
        for x in results
    ]


def _memory(x: FakeTensor) -> int:
    return int(x.untyped_storage()._cdata)


# --- of graphs --------------------------------------------------------------------------------------------------------


def propagate(gm: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> fx.GraphModule:
    """Sets `meta["val"]` of every node anew from these (fake) inputs. In place; returns its argument."""
    for node, value in shapes(gm, inputs).items():
        node.meta["val"] = value
    return gm


def renew(graph: fx.Graph) -> None:
    """Sets `meta["val"]` of nodes that have none, and anew of those that read a value whose form is another by that.
    The others keep theirs."""
    changed = set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or ("val" in node.meta and changed.isdisjoint(node.all_input_nodes)):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        before = node.meta.get("val")
        node.meta["val"] = value = _value(node, args, kwargs, [n.meta["val"] for n in node.all_input_nodes])
        if before is None or [*map(_form, fx_values.tensors(before))] != [*map(_form, fx_values.tensors(value))]:
            changed.add(node)


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype


def _value(node: fx.Node, args: Any, kwargs: Any, given: Iterable[Any]) -> Any:
    """A node's value. given: some values, of which one may be fake."""
    mode = next((v.fake_mode for v in given if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    with mode:
        if isinstance(node.target, OpOverload):
            return run(node.target, args, kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def shapes(gm: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> dict[fx.Node, Any]:
    """The (fake) value of every node from these (fake) inputs."""
    value_of: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value_of[node] = next(feed)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: value_of[n])
            value_of[node] = _value(node, args, kwargs, value_of.values())
    return value_of
