"""layout: the plan of a spec's state: checks the path rules against the leaves, then calls `fzero.plan.layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from fzero import tree
from fzero.compile.resolve import layout_rules, pipeline_of
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.plan.layout import BUCKET_BYTES, Plan, layout
from fzero.plan.pipeline_cut import Cut, cut_layers
from fzero.spec import Spec


def plan_for(
    spec: Spec,
    paths: Sequence[str],
    values: Sequence[torch.Tensor],
    per_rank: Sequence[str],
    mesh: Mesh,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """The layout of a state's leaves. `bucket_bytes` is used if the spec names no size.

    Raises SpecError for a path rule that matches no leaf.
    """
    rules = layout_rules(spec)
    if rules.params_given:
        check_rules("Spec(params=...)", rules.params, paths)
    of_params = [path.removeprefix("params/") for path in paths if path.startswith("params/")]
    check_rules("Spec(trainable=...)", rules.trainable, of_params)
    plan = layout(
        paths,
        values,
        mesh=mesh,
        pipeline=_cut(spec, mesh),
        zero=rules.zero,
        bucket_bytes=rules.bucket_bytes or bucket_bytes,
        params=rules.params,
        per_rank=per_rank,
        compute=rules.compute_dtype,
        shard=rules.shard,
    )
    check_rules("Spec(remat=...)", rules.remat, [*paths, *(s.path for b in plan.buckets.values() for s in b.slots)])
    return plan


def _cut(spec: Spec, mesh: Mesh) -> Callable[[Mapping[str, int], int], Cut] | None:
    """How the layers are dealt to the roles of a pipeline; None without one."""
    if mesh.roles == 1:
        return None
    pipeline = pipeline_of(spec)
    return partial(cut_layers, role_of=pipeline.order(mesh.roles, spec.microbatches).role_of, cut=pipeline.cut)


def check_rules(field_name: str, rules: Iterable[str], paths: Iterable[str]) -> None:
    """Raises SpecError for a rule that matches no path: it is a mistake that would otherwise pass in silence."""
    paths = list(paths)
    for rule in rules:
        if rule != "**" and not any(tree.matches(rule, path) for path in paths):
            known = {path.rpartition("/")[0] + "/**" for path in paths if "/" in path} | set(paths)
            raise SpecError(f"{field_name}: the rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")
