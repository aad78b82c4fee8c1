"""plan_from_spec: the plan of a spec's state: checks path rules against the leaves, then calls `fzero.plan.layout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from fzero import tree
from fzero.compile import decide
from fzero.compile.resolve import mesh_of
from fzero.errors import SpecError
from fzero.ir.decisions import Choice
from fzero.ir.mesh import Mesh
from fzero.ir.records import DEVICE
from fzero.plan.layout import layout
from fzero.plan.memory_use import GRADS, KINDS_OF_LEAVES
from fzero.plan.parallelism import DEFAULT_PARAMS
from fzero.plan.pipeline_cut import CutLayers, cut_layers
from fzero.plan.state_plan import Plan
from fzero.spec import Spec


def plan_for(
    spec: Spec,
    paths: Sequence[str],
    values: Sequence[torch.Tensor],
    per_rank: Sequence[str],
    mesh: Mesh,
    bucket_costs: Mapping[str, float] | None = None,
    deciders: decide.Deciders | None = None,
) -> Plan:
    """The layout of a state's leaves. bucket_costs: as kept (`fzero.cost.bucket_costs`). deciders: choose where the
    spec says nothing.

    Raises SpecError for a path rule that matches no leaf.
    """
    parallel, memory = spec.parallel, spec.memory
    params, offload = parallel.param_rules, memory.offload_rules
    if spec.params != DEFAULT_PARAMS:
        check_rules("Spec(params=...)", params, paths)
    of_params = [path.removeprefix("params/") for path in paths if path.startswith("params/")]
    check_rules("Spec(trainable=...)", spec.numerics.trainable_rules or (), of_params)
    of_state = [rule for rule in offload if rule not in KINDS_OF_LEAVES and not rule.startswith(GRADS)]
    check_rules("Spec(offload=...)", of_state, paths)
    deciders = deciders or decide.DECIDERS
    if memory.bucket_bytes is not None:
        size = Choice.given(memory.bucket_bytes, "Spec(bucket_bytes=)")
    else:
        size = deciders.bucket_bytes(bucket_costs or {})
    plan = layout(
        paths,
        values,
        mesh=mesh,
        pipeline=_cut(spec, mesh, deciders),
        zero=parallel.stages(mesh_of(spec).data_axes),
        bucket_bytes=size.value,
        params=params,
        per_rank=per_rank,
        compute=spec.numerics.policy.gathered_dtype,
        coding=spec.numerics.policy.coding,
        shard=parallel.shard or {},
        home=partial(memory.space_of, params=params),
    )
    _check_offloaded(offload, plan)
    gradients = [f"{GRADS}{slot.path}" for bucket in plan.buckets.values() for slot in bucket.slots]
    check_rules("Spec(offload=...)", [rule for rule in offload if rule.startswith(GRADS)], gradients)
    slots = [slot.path for bucket in plan.buckets.values() for slot in bucket.slots]
    check_rules("Spec(remat=...)", memory.remat_rules, [*paths, *slots])
    return replace(plan, bucket_bytes=size)


def _check_offloaded(rules: Mapping[str, str], plan: Plan) -> None:
    """Raises SpecError where a rule is to take leaves off the device, and each leaf that it matches stays there."""
    away = {leaf.path for leaf in plan.leaves if plan.buffers[leaf.buffer].space != DEVICE}
    for rule, to in rules.items():
        matched = [leaf.path for leaf in plan.leaves if rule not in KINDS_OF_LEAVES and tree.matches(rule, leaf.path)]
        if to != "device" and matched and away.isdisjoint(matched):
            raise SpecError(
                f"Spec(offload={{{rule!r}: {to!r}}}): all that it matches stays on the device, as {matched[0]}. Only "
                "floating leaves of one dim or more, and what mirrors them, are offloaded, and the first rule that "
                "matches a leaf decides. Leave the rule out, or put it first"
            )


def _cut(spec: Spec, mesh: Mesh, deciders: decide.Deciders) -> CutLayers | None:
    """How the layers are dealt to the roles of a pipeline; None without one."""
    if mesh.roles == 1:
        return None
    pipeline = spec.parallel.order
    given = None if pipeline.cut is None else Choice.given(tuple(pipeline.cut), "Pipeline(cut=)")
    choose = deciders.cut if given is None else lambda layers, last, chunks: given
    return partial(cut_layers, role_of=pipeline.order(mesh.roles, spec.microbatches).role_of, choose=choose)


def check_rules(field_name: str, rules: Iterable[str], paths: Iterable[str]) -> None:
    """Raises SpecError for a rule that matches no path: it is a mistake that would otherwise pass in silence."""
    paths = list(paths)
    for rule in rules:
        if rule != "**" and not any(tree.matches(rule, path) for path in paths):
            names = [path.split("/") for path in paths]
            known = {"/".join([*name[:n], "**"]) for name in names for n in range(1, len(name))} | set(paths)
            below = [name for name in known if name.endswith(f"/{rule}")]
            whole = min(below, key=lambda name: (name.count("/"), name), default=rule)
            raise SpecError(f"{field_name}: the rule {rule!r} matches no leaf.{tree.suggest(whole, known)}")
