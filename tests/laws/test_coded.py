"""Parameters and gradients as messages of blocks: one set of bits at every stage, and those of a loop by hand."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import cases
import hf_models
import kept
import pytest
import torch
from coded_cases import GRIDS, params_of, rows, same, start
from helpers import Run, gloo, run
from helpers import values as of_ranks
from torch import Tensor

import fzero
from fzero import P, Precision, interop, optim, tree
from fzero.cost.coding import coding
from fzero.errors import CaptureError, SpecError
from fzero.ir.program import wire_bytes
from fzero.kernels.codecs import CODECS, decode, decode_sum, encode
from fzero.kernels.codecs import EXACT as EXACT_CODING

POLICIES = {
    "int8": {"gather": "int8", "reduce": "int8"},
    "int8 and int4, bf16": {"gather": "int8", "reduce": "int4", "compute": "bf16"},
    "e4m3 and e5m2": {"gather": "e4m3", "reduce": "e5m2"},
    "gathered alone": {"gather": "int4"},
    "reduced alone": {"reduce": "int4"},
}


def trained(mesh: dict[str, int], steps: int = 2, **given: Any) -> Run:
    world = 1
    for n in mesh.values():
        world *= n
    made = {"loss": cases.layers_loss, "optimizer": optim.adamw(1e-2), "transfers": "p2p", "clip_norm": 0.5}
    return run(fzero.Spec(mesh=mesh, **{**made, **given}), start(), rows, world=world, steps=steps)


# --- a loop by hand ---------------------------------------------------------------------------------------------------


def rounded(x: Tensor, codec: str | None) -> Tensor:
    return x if codec is None else decode(encode(x.reshape(-1), CODECS[codec]), x.numel(), CODECS[codec]).view(x.shape)


def mean(parts: list[Tensor], codec: str | None, sizes: list[int]) -> Tensor:
    """The mean over ranks, axis by axis, the inner one first; the last sum is divided."""
    world = len(parts)
    for number, n in enumerate(sizes):
        divisor, sums = world if number == len(sizes) - 1 else 1, []
        for i in range(0, len(parts), n):
            group = parts[i : i + n]
            if codec is None or n == 1:
                sums.append(sum(group[1:], group[0]) / divisor)
                continue
            messages = torch.stack([encode(x.reshape(-1), CODECS[codec]) for x in group])
            total = decode_sum(messages, divisor, CODECS[codec])
            sums.append(total[: group[0].numel()].view(group[0].shape))
        parts = sums
    return parts[0]


def by_hand(mesh: dict[str, int], gather: str | None, reduce: str | None) -> dict[str, Tensor]:
    """One step of SGD: the loss on rounded matrices, its gradients for the held ones, their mean by messages."""
    held, world = start(), 1
    for n in mesh.values():
        world *= n
    paths, leaves, treedef = tree.flatten(held)
    grads = []
    for rank in range(world):
        used = [rounded(x, gather if x.ndim > 1 else None).requires_grad_() for x in leaves]
        grads.append(torch.autograd.grad(cases.layers_loss(tree.unflatten(treedef, used), rows(rank)), used))
    sizes = [n for _, n in reversed(mesh.items())]
    means = [mean([g[i] for g in grads], reduce if x.ndim > 1 else None, sizes) for i, x in enumerate(leaves)]
    return {f"params/{path}": x - 0.5 * g for path, x, g in zip(paths, leaves, means, strict=True)}


@pytest.mark.parametrize("grid", ["1", "3", "2x2"])
@pytest.mark.parametrize("policy", ["int8", "e4m3 and e5m2", "gathered alone", "reduced alone"])
@pytest.mark.sampled(2)
def test_a_step_is_that_of_a_loop_by_hand(policy: str, grid: str) -> None:
    codecs = POLICIES[policy]
    one = trained(GRIDS[grid], 1, precision=Precision(**codecs), optimizer=optim.sgd(0.5), clip_norm=None, zero=2)
    wanted = by_hand(GRIDS[grid], codecs.get("gather"), codecs.get("reduce"))
    assert params_of(one).keys() == wanted.keys()
    assert [path for path, leaf in params_of(one).items() if not torch.equal(leaf, wanted[path])] == []


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(1)
def test_stages_have_one_set_of_bits(policy: str, grid: str, microbatches: int) -> None:
    given = {"precision": Precision(**POLICIES[policy]), "microbatches": microbatches}
    first = trained(GRIDS[grid], zero=0, **given)
    for zero in (1, 2, 3):
        assert same(trained(GRIDS[grid], zero=zero, **given), first), zero


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_bytes": 1 << 12}, {"prefetch": 0}, {"prefetch": 2}, {"transfers": "shared"}, {"remat": "full"},
        {"remat": "offload"}, {"offload": "optimizer+params"}, {"offload": {"grads/**": "cpu", "**": "cpu"}},
        {"mesh": {"pp": 2, "dp": 2}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled(1)
def test_what_changes_no_bit_changes_none_of_messages(given: dict[str, Any]) -> None:
    policy = {"precision": Precision(gather="int8", reduce="int4"), "microbatches": 2, "zero": 3}
    zero = 1 if "mesh" in given else 3
    plain = trained(GRIDS["2"], **policy)
    mesh = given.get("mesh", GRIDS["2"])
    assert same(trained(mesh, **{**policy, "zero": zero, **{k: v for k, v in given.items() if k != "mesh"}}), plain)


@pytest.mark.parametrize("reduce", ["each", "end"])
@pytest.mark.sampled(1)
def test_hierarchies_and_when_gradients_are_reduced(reduce: str) -> None:
    given = {"precision": Precision(gather="int8", reduce="int8"), "microbatches": 2, "reduce": reduce}
    plain = trained(GRIDS["2x2"], zero=3, **given)
    for zero in (0, 1, "hsdp", "hpz"):
        assert same(trained(GRIDS["2x2"], zero=zero, **given), plain), zero


def test_parts_of_leaves_are_coded_as_they_lie() -> None:
    """With tp a rank codes its part of a matrix: stages agree, and a step of SGD differs from tp=1 by half a code."""
    rules = {"params/layers/*/w": P(None, "tp")}
    given = {"precision": Precision(gather="int8", reduce="int8"), "optimizer": optim.sgd(0.5), "clip_norm": None}
    first = trained({"dp": 2, "tp": 2}, 1, zero=0, shard=rules, **given)
    for zero in (2, 3):
        assert same(trained({"dp": 2, "tp": 2}, 1, zero=zero, shard=rules, **given), first)
    alone, plain = (
        trained({"dp": 2}, 1, zero=0, **given),
        trained({"dp": 2}, 1, zero=0, **{**given, "precision": "fp32"}),
    )
    for path, leaf in params_of(first).items():
        moved = (params_of(plain)[path] - tree.flatten(start())[1][list(params_of(plain)).index(path)]).abs().max()
        assert (leaf - params_of(alone)[path]).abs().max() <= 0.1 * moved + 1e-6, path


def test_leaves_that_are_not_trained_and_leaves_that_are_kept() -> None:
    policy = Precision(gather="int8", reduce="int8", compute="bf16", keep={"layers/1/**": "fp32"})
    assert policy.coding("layers/1/w", torch.zeros(2, 2)) == EXACT_CODING
    assert policy.coding("layers/0/w", torch.zeros(2, 2)).gather == "int8"
    given = {"precision": Precision(gather="int8", reduce="int8"), "trainable": ("layers/**", "z")}
    first = trained(GRIDS["2"], zero=0, **given)
    for zero in (1, 3):
        assert same(trained(GRIDS["2"], zero=zero, **given), first), zero


# --- real processes ---------------------------------------------------------------------------------------------------


def processes(transfers: str, zero: Any, mesh: dict[str, int] | None = None) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    spec = fzero.Spec(
        loss=cases.layers_loss, optimizer=optim.adamw(1e-2), clip_norm=0.5, transfers=transfers, zero=zero,
        precision=Precision(gather="int8", reduce="int4"), **({"mesh": mesh} if mesh else {}),
    )  # fmt: skip
    state = fzero.init(start(), spec)
    for step in range(2):
        before = sum(state.sent_bytes.values())
        state = fzero.step(state, rows(state.runtime.rank, step))
        sent = sum(state.sent_bytes.values()) - before
        said = sum(wire_bytes(state.program, op) for op in state.program.ops)
        assert abs(sent - said) <= 0.02 * said, (sent, said)
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return {path: leaf for path, leaf in zip(paths, leaves, strict=True) if path.startswith("params/")}


@pytest.mark.parametrize(("transfers", "zero"), [("p2p", 3), ("shared", 1), ("auto", 2)])
@pytest.mark.sampled(1)
def test_processes_have_the_bits_of_the_interpreter(transfers: str, zero: int) -> None:
    wanted = params_of(trained(GRIDS["2"], zero=0, precision=Precision(gather="int8", reduce="int4")))
    for final in of_ranks(gloo(2, processes, transfers, zero)):
        assert [path for path, leaf in wanted.items() if not torch.equal(final[path], leaf)] == []


def test_processes_of_replicas_of_nodes_too() -> None:
    wanted = params_of(trained(GRIDS["2x2"], zero=3, precision=Precision(gather="int8", reduce="int4")))
    for final in of_ranks(gloo(4, processes, "p2p", "hsdp", GRIDS["2x2"])):
        assert [path for path, leaf in wanted.items() if not torch.equal(final[path], leaf)] == []


# --- bytes ------------------------------------------------------------------------------------------------------------


EXACT = ("norm/b",)
WIDE_INIT, WIDE_LOSS = cases.gpt(vocab=2048, width=256, depth=1)
ADAMW = optim.adamw(1e-3)


def sent(world: int = 4, zero: int = 3, **given: Any) -> tuple[Counter[str], int]:
    """(bytes by kind of transfer, elements of the matrices) of a GPT whose leaves are matrices but for 1 %."""
    spec = fzero.Spec(loss=WIDE_LOSS, optimizer=ADAMW, zero=zero, **given)
    program = kept.lower(spec, WIDE_INIT, cases.tokens(2, 64, 2048), world).program
    found: Counter[str] = Counter()
    for op in program.ops:
        found[op.kind] += wire_bytes(program, op)
    return found, sum(bucket.length for bucket in program.buckets.values())


def test_bytes_are_those_of_the_formulas() -> None:
    """c = bits / 8 + 4 / 64 for each element and direction, of (N - 1) / N; next to nothing is exact here."""
    for zero in (0, 1, 2, 3):
        for gather, reduce in (("int8", "int8"), ("int8", "int4"), (None, "int8")):
            precision = Precision(gather=gather, reduce=reduce, compute=None if gather else "bf16", exact=EXACT)
            found, elements = sent(zero=zero, precision=precision)
            gathered = elements * ((1.0625 if gather else 2.0) if zero else 4.0)
            if zero == 3:  # twice, but for the positions: their gradient needs no value of them
                gathered *= 2 - 1024 * 256 / elements
            wanted = 3 / 4 * (gathered + elements * {"int8": 1.0625, "int4": 0.5625}[reduce])
            assert sum(found.values()) == pytest.approx(wanted, rel=0.01), (zero, gather, reduce, found)


def test_replicas_of_nodes_send_their_slices_to_each_other() -> None:
    """Of the inner sum's slice all of each message; in fp32 it is an all-reduce."""
    given = {"zero": "hsdp", "mesh": {"dp_out": 2, "dp": 2}}
    found, elements = sent(precision=Precision(compute="bf16", reduce="int8", exact=EXACT), **given)
    assert found["all_to_all"] == pytest.approx(1 / 2 * 1.0625 * elements, rel=0.01)
    assert found["all_gather_values"] == pytest.approx(1 / 2 * 1.0625 * elements, rel=0.01)
    plain, _ = sent(precision=Precision(compute="bf16"), **given)
    assert plain["all_reduce"] == pytest.approx(1 / 2 * 4 * elements, rel=0.01)
    policy = Precision(compute="bf16", reduce="int8", exact=EXACT)
    spec = fzero.Spec(loss=WIDE_LOSS, optimizer=optim.sgd(0.1), precision=policy, **given)
    account = coding(fzero.lower(spec, WIDE_INIT, cases.tokens(2, 64, 2048), world_size=4).program, policy)
    assert account.saved == pytest.approx(sum(plain.values()) - sum(found.values()), rel=0.02)


def test_int8_both_ways_is_nearly_four_times_less() -> None:
    coded, _ = sent(precision=Precision(gather="int8", reduce="int8", exact=EXACT))
    fp32, bf16 = (sum(sent(precision=p)[0].values()) for p in ("fp32", "bf16"))
    assert fp32 >= 3.7 * sum(coded.values())
    assert bf16 >= 2.4 * sum(coded.values())


# --- lost elements, and refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.sampled(1)
def test_a_lost_element_is_seen_on_all_ranks_and_skipped(lost: float, zero: int) -> None:
    def batch(rank: int, step: int) -> Tensor:
        given = rows(rank, step)
        given[0, 0] = lost if (rank, step) == (1, 1) else given[0, 0]
        return given

    spec = fzero.Spec(
        loss=cases.layers_loss, optimizer=optim.adamw(1e-2), zero=zero, transfers="p2p", nonfinite="skip",
        precision=Precision(gather="int8", reduce="int4"),
    )  # fmt: skip
    one, two = (run(spec, start(), batch, world=2, steps=n) for n in (1, 2))
    assert all(leaf.isfinite().all() for leaf in two.final.values())
    assert same(one, two)


def lower(params: Any = None, **given: Any) -> fzero.Lowered:
    spec = fzero.Spec(**{"loss": cases.layers_loss, "optimizer": optim.sgd(0.1), **given})
    return fzero.lower(spec, params or start(), rows(0), world_size=4)


def own_step(state: Any, batch: Tensor, reduce: bool = True) -> Any:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"]).mean()

    value, grads = fzero.value_and_grad(loss, precision=Precision(reduce="int8"), reduce=reduce)(state, batch)
    return tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


def test_exact_of_nothing_codes_every_leaf_but_scalars() -> None:
    both = Precision(gather="int8", exact=())
    assert [both.coding("blocks/0/b", torch.zeros(shape)).gather for shape in [(8,), (8, 8), ()]] == [
        "int8",
        "int8",
        None,
    ]
    assert both.coding("wte", torch.zeros(8, 8)).gather == "int8"
    with pytest.raises(SpecError, match=r"Precision\(exact=3\): needed path rules, as in"):
        Precision(gather="int8", exact=3)  # type: ignore[arg-type]


def test_what_codecs_refuse() -> None:
    with pytest.raises(SpecError, match=r"gather='fp8'\): needed one of int8, int4, e4m3, e5m2 or None"):
        Precision(gather="fp8")
    with pytest.raises(SpecError, match=r"gather='sign'\): needed one of .*int8"):
        Precision(gather="sign")
    with pytest.raises(SpecError, match="no codec is given that would touch a leaf"):
        Precision(exact=("**/b",))
    with pytest.raises(SpecError, match=r"Precision\(exact=...\): the rule '\*\*/v' matches no leaf"):
        lower(precision=Precision(gather="int8", exact=("**/v",)))
    wide = tree.map(lambda x: x.double() if x.shape == (36, 36) else x, start())
    with pytest.raises(SpecError, match=r"layers/0/w is float64, and codecs scale in float32.*exact=\('layers/0/w',\)"):
        lower(wide, precision=Precision(reduce="int8"))
    with pytest.raises(
        CaptureError, match=r"the codec of gradients lies in the layout of the state.*Spec\(precision=...\)"
    ):
        fzero.lower(fzero.Spec(step=own_step), {"w": torch.ones(8, 8)}, rows(0), world_size=2)
    with pytest.raises(
        SpecError, match=r"reduce='int8'\): the optimizer takes each rank's own gradients .*Take reduce= out"
    ):
        lower(precision=Precision(reduce="int8"), optimizer=optim.onebit_adam(1e-3, 10))
    local = fzero.Spec(step=lambda s, b: own_step(s, b, reduce=False), precision=Precision(reduce="int8"))
    with pytest.raises(CaptureError, match=r"stay on their rank.*fzero.coded_mean\(grads, codec='int8'\)"):
        fzero.lower(local, {"w": torch.ones(8, 8)}, rows(0), world_size=2)


# --- models that are not ours -----------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("codecs", [("int8", "int8"), ("int8", "int4")], ids=str)
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
@pytest.mark.acceptance
def test_hugging_face_models_train_as_without_codecs(name: str, codecs: tuple[str, str]) -> None:
    """The loss of each of fifty steps is within a hundredth; norms and embeddings are exact."""
    case = hf_models.CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        params, buffers, apply = interop.from_module(case.make().eval())  # without dropout

    def loss(params: Any, batch: dict[str, Tensor]) -> fzero.Mean:
        given = {key: value for key, value in batch.items() if key != "labels"}
        return fzero.Mean(*case.loss(apply(params, buffers, **given), batch))

    losses = []
    for precision in ("fp32", Precision(gather=codecs[0], reduce=codecs[1])):
        spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), zero=3, transfers="p2p", precision=precision)
        losses.append(run(spec, params, lambda rank, _: case.batch(rank, 0), world=2, steps=50, poison=False).losses())
    for plain, coded in zip(*losses, strict=True):
        assert coded == pytest.approx(plain, rel=0.01)
    assert losses[0] != losses[1]
    assert losses[0][-1] < losses[0][0]
