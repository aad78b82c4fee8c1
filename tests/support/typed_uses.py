"""Each public name as a user writes it, with the type that an editor must know. Checked by `make lint`, never run.

`tests/laws/test_types.py` says which names are missing here. A name that loses its annotation fails `assert_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor

import fzero
from fzero import checkpoint, data, hardware, interop, optim, random, sparse

Tree = dict[str, Tensor]


def loss(params: Tree, batch: Tree) -> Tensor:
    return (batch["x"] @ params["w"] - batch["y"]).square().mean()


def the_loop(params: Tree, batch: Tree, key: Tensor) -> None:
    spec = fzero.Spec(
        loss=loss, optimizer=optim.adamw(3e-4), zero={"blocks/**": 3, "**": 1}, mesh={"dp": 2, "tp": 2},
        shard={"w": fzero.P(None, "tp"), "qkv": fzero.P(fzero.groups("tp", 3), None)}, clip_norm=1.0, microbatches=2,
        precision=fzero.Precision(compute="fp16", loss_scale=fzero.LossScale(initial=2.0**10)),
        pipeline=fzero.Pipeline("1f1b"),
    )  # fmt: skip
    state = assert_type(fzero.init(params, spec, key=key), fzero.State)
    with fzero.Checkpointer("run", every=20, keep=2) as saver, fzero.Log("log.jsonl", every=5) as log:
        state = assert_type(saver.resume(params, spec), fzero.State)
        assert_type(saver.extra, Mapping[str, Any])
        state = assert_type(fzero.step(state, batch), fzero.State)
        saver.after(state, {"position": 4})
        log(state, epoch=1.0)
    assert_type(state.step, int)
    assert_type(state.metrics, Mapping[str, Any])
    assert_type(state.held_bytes, dict[str, int])
    assert_type(fzero.save(state, "run", extra={"a": 1}), Path)
    assert_type(fzero.load("run", spec), fzero.State)
    assert_type(fzero.profile(state, batch), fzero.State)
    fzero.unshard(state.params)["w"]
    fzero.evaluate(state, batch, lambda p, b: fzero.Mean((b["y"] == p["w"]).sum(), len(b["y"])))


def leaves(one: fzero.ShardedTensor) -> None:
    assert_type(one.path, str)
    assert_type(one.shape, torch.Size)
    assert_type(one.dtype, torch.dtype)
    assert_type(one.full(), Tensor)
    assert_type(one.local, Tensor)


def before_a_run(spec: fzero.Spec, params: Tree, batch: Tree) -> None:
    lowered = assert_type(fzero.lower(spec, params, batch, world_size=8), fzero.Lowered)
    program = assert_type(lowered.program, fzero.Program)
    assert_type(lowered.memory.peak, int)
    assert_type(fzero.parse(str(program), program.segments), fzero.Program)
    fzero.verify(lowered.roles)
    machine = hardware.load("h100")
    assert_type(fzero.simulate(lowered, machine).seconds, float)
    assert_type(fzero.simulation(lowered, machine), fzero.Simulation)
    assert_type(fzero.longest(spec, params, batch, dim=1, world_size=8), fzero.Longest)
    planned = assert_type(fzero.plan(spec, params, batch, world_size=8, hardware="h100"), fzero.Planned)
    assert_type(planned.seconds, float)
    saved = assert_type(checkpoint.manifest("run"), fzero.Manifest)
    assert_type(saved.step, int)


def a_step_by_hand(params: Tree, batch: Tree, key: Tensor, error: fzero.CodedError) -> None:
    value, grads = fzero.value_and_grad(loss, key=key, microbatches=2)(params, batch)
    fzero.grad(loss)(params, batch)
    fzero.forward(loss)(params, batch)
    fzero.remat(loss)(params, batch)
    fzero.scan(lambda carry, x: (carry + x, carry), value, grads)
    value = fzero.pmean(fzero.psum(fzero.pmax(fzero.per_rank(value))))
    assert_type(fzero.axis_index("dp"), Tensor)
    assert_type(fzero.constrain(value, fzero.P("dp")), Tensor)
    fzero.static(3)
    fzero.coded_error(grads)
    fzero.first_error(params, "bf16")
    mean, _ = fzero.coded_mean(grads, error, "sign")
    fzero.Phases(lambda step: "warm", {"warm": mean})
    assert_type(fzero.Schedule("1", (0,), ()).name, str)


def errors(error: fzero.FzeroError) -> str:
    if isinstance(error, fzero.HangError):
        assert_type(error.missing, tuple[int, ...])
    if isinstance(error, fzero.CheckpointError | fzero.OffloadError | fzero.CorruptError | fzero.MismatchError):
        return assert_type(error.file, str)
    if isinstance(error, fzero.ConfigError):
        assert_type(error.refusals, tuple[tuple[str, str], ...])
    known = (fzero.CaptureError, fzero.DataError, fzero.DisagreementError, fzero.DonatedError, fzero.NonFiniteError)
    return str(isinstance(error, (*known, fzero.SpecError, fzero.TreeError, fzero.VerifyError)))


TRANSFORMATIONS: list[optim.GradientTransformation] = [
    optim.adadelta(), optim.adafactor(), optim.adagrad(1e-2), optim.adam(1e-3), optim.adamw(1e-3, mask="**/weight"),
    optim.adamw8bit(1e-3), optim.add_decayed_weights(0.1), optim.apply_if_finite(optim.sgd(0.1)),
    optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_value(1.0)), optim.delayed(optim.sgd(0.1)),
    optim.ema(0.9), optim.ema_params(optim.sgd(0.1), 0.99), optim.identity(),
    optim.inject_hyperparams(optim.sgd)(learning_rate=0.1), optim.lamb(1e-3), optim.lars(0.1), optim.lion(1e-4),
    optim.masked(optim.sgd(0.1), ["**/bias"]), optim.multi_transform({"**": optim.sgd(0.1)}),
    optim.muon(0.02, mask=optim.hidden_matrices, others=optim.adamw(1e-3)), optim.nadam(1e-3), optim.radam(1e-3),
    optim.rmsprop(1e-2), optim.scale(0.5), optim.scale_by_path({"**/bias": 2.0}),
    optim.scale_by_schedule(optim.constant(0.1)), optim.scale_by_trust_ratio(), optim.sgd(0.1), optim.trace(0.9),
]  # fmt: skip
PHASES: list[fzero.Phases[optim.GradientTransformation]] = [
    optim.onebit_adam(1e-3, 100),
    optim.freeze_nu(1e-3, after=10),
]
SCHEDULES: list[optim.Schedule] = [
    optim.constant(0.1), optim.cosine(0.1, 100), optim.exponential(0.1, 10, 0.5), optim.inverse_time(0.1, 10, 0.5),
    optim.joined([optim.constant(0.1), optim.constant(0.2)], [10]), optim.linear_growth(0.1, 10, 0.5),
    optim.linear_warmup(0.1, 10), optim.piecewise(0.1, {10: 0.5}), optim.polynomial(0.1, 100, power=2.0),
    optim.shift(optim.constant(0.1), -1), optim.table([0.1, 0.2]), optim.triangle(0.1, 0.2, 10, 10),
    optim.warmup(0.0, 0.1, 10), optim.warmup_cosine(0.1, 10, 100),
]  # fmt: skip


def updates(params: Tree, grads: Tree, tx: optim.GradientTransformation) -> None:
    made, _ = tx.update(grads, tx.init(params), params)
    optim.apply_updates(params, made)
    assert_type(optim.global_norm(grads), Tensor)
    assert_type(optim.one_cycle(0.1, 100), optim.OneCycle)
    optim.stochastic_round(grads["w"], random.key(3))


def counted(
    held: optim.AdamState | optim.NadamState | optim.RadamState | optim.Adam8State | optim.OnebitAdamState
    | optim.AdadeltaState | optim.AdafactorState | optim.AdagradState | optim.EmaState | optim.LionState
    | optim.MuonState | optim.RmspropState | optim.InjectState,
) -> Tensor:  # fmt: skip
    if isinstance(held, optim.Adam8State):
        assert_type(held.mu, optim.Blocks)
    return assert_type(held.count, Tensor)


def wrapped(held: optim.DelayedState | optim.EmaParamsState | optim.IfFiniteState) -> Any:
    return held.inner, optim.SgdState, optim.TraceState, optim.ScheduleState


def draws(seed: int) -> None:
    one, two = random.split(random.key(seed), 2)
    assert_type(random.fold_in(one, 3), Tensor)
    assert_type(random.normal(one, (2, 3)), Tensor)
    assert_type(random.uniform(two, (2,)), Tensor)
    assert_type(random.randint(two, 0, 5, (2,)), Tensor)
    assert_type(random.bernoulli(two, 0.5, (2,)), Tensor)
    assert_type(random.categorical(two, torch.zeros(2, 3)), Tensor)
    assert_type(random.permutation(two, 5), Tensor)
    assert_type(random.dropout(two, torch.ones(3), 0.1), Tensor)


def batches(texts: list[dict[str, Tensor]]) -> None:
    rows = assert_type(data.batches(texts, 8, seed=1, workers=2), data.Rows)
    assert_type(rows.position, int)
    tokens = data.Tokens("tokens.bin", sequence=16, dtype=data.DTYPES[1], order=data.ORDERS[0])
    assert_type(tokens.batches(8), data.Batches)
    assert_type(next(tokens.batches(8)), data.Batch)
    assert_type(data.by_length(texts, [3, 4], 2, to=[4, 8]), data.ByLength)
    assert_type(data.packed(texts, 64, lengths=[3, 4]), data.Packed | data.PackedStream)
    data.pad_to(texts[0], 8, {"x": 0.0})
    data.permute(tokens.starts(0, 4).astype("uint64"), 10, key=3)


def attention(q: Tensor, columns: Tensor) -> None:
    layouts: list[sparse.BlockLayout] = [
        sparse.sliding_window(256, window=64, causal=True), sparse.fixed(1, 128), sparse.bigbird(1, 128, key=q),
        sparse.longformer(1, 128), sparse.variable(1, 128, key=q), sparse.dense(1, 128),
        sparse.from_columns(columns, block=16), sparse.from_mask(q.bool(), block=16),
        sparse.from_deepspeed({"mode": "fixed"}, 1, 128),
    ]  # fmt: skip
    assert_type(sparse.attention(q, q, q, layouts[0]), Tensor)
    assert_type(sparse.block_for(128), int)


def others(module: torch.nn.Module, state: fzero.State, params: Tree) -> None:
    parts = assert_type(interop.from_module(module), interop.Functional)
    assert_type(parts.apply, interop.Apply)
    assert_type(interop.ds_config("ds.json", world_size=2), interop.Given)
    assert_type(interop.accelerate_config({"num_processes": 2}), interop.Given)
    assert_type(interop.export_safetensors(state, "out", tied=parts.apply), Path)
    assert_type(interop.export_dcp(state, "out"), Path)
    assert_type(interop.fitted(interop.safetensors("in", like=params), params), interop.Fitted)
    interop.write_checkpoint(interop.dcp("in", params), "run")
    assert_type(interop.deepspeed("in").step, int)
    interop.with_buffers(lambda p, b, x: (x @ p["w"], b), parts.params, parts.buffers, optim.sgd(0.1))
    assert_type(interop.tp_plan(module), dict[str, fzero.P])
    assert_type(interop.register_attention(), str)
    arguments = interop.TrainingArguments("out", pad_to=64), interop.Seq2SeqTrainingArguments("out")
    interop.Trainer(model=module, args=arguments[0])
    interop.Seq2SeqTrainer(model=module, args=arguments[1])


def saved_in_parts(state: fzero.State, group: torch.distributed.ProcessGroup) -> None:
    held = assert_type(checkpoint.snapshot(state), checkpoint.Snapshot)
    assert_type(checkpoint.write(held, "run", group=group, disk=checkpoint.Disk()), Path)
    assert_type(checkpoint.locate("run"), Path)
    assert_type(next(checkpoint.committed(Path("run"))), tuple[int, Path])


def machines() -> None:
    machine = assert_type(hardware.load(hardware.presets()[0]), hardware.Hardware)
    assert_type(machine.device, hardware.Device)
    print(machine.host, hardware.Host, hardware.Drive, hardware.NetworkLevel)
    assert_type(hardware.to_toml(machine), str)
