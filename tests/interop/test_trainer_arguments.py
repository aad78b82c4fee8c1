"""What a Trainer of fzero cannot do is refused at the start, by name; and what `deepspeed=` and `fsdp=` decide."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero
from fzero.errors import ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, QUIET, STOCK, TASKS, make, trained  # noqa: E402

from fzero.interop import Trainer, TrainingArguments  # noqa: E402
from fzero.interop._hf_compat import Recomputed  # noqa: E402
from fzero.interop.trainer import refusals  # noqa: E402
from fzero.interop.trainer.parallel import given_of  # noqa: E402


def refused(folder: Path, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        make(OURS, "llama", folder, **options)
    return error.value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: a step has one batch size. Set it to False"),
        ({"torch_compile": True}, 'torch_compile=True: fzero captures the step by itself. Leave it out, or give spec='),
        ({"fp16_full_eval": True}, "fp16_full_eval=True: evaluation runs in the precision of training. Leave it out"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True: evaluation runs in the precision of training. Leave it out"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: its hooks are not captured. Leave it out"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True: its kernels are not captured. Leave it out"),
        ({"optim": "adamw_anyprecision"}, "optim='adamw_anyprecision': fzero has no counterpart. Take one of"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "this one follows the metrics"),
        ({"debug": "underflow_overflow"}, "debug=[<DebugOption.UNDERFLOW_OVERFLOW: 'underflow_overflow'>]: its hooks"),
        ({"pad_to": -1}, "pad_to=-1: needed a whole number of at least 0, or None. Leave it out"),
        ({"spec": {"mesh": {"dp": 1, "tp": 2}}}, "spec: mesh={'dp': 1, 'tp': 2} needs 2 ranks, there are 1"),
        ({"accelerator_config": {"even_batches": False}}, "accelerator_config.even_batches=False: a rank without a"),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
         "activation_checkpointing_kwargs['every_n_layers']: it is Spec(remat='full') here. Leave it out"),
        ({"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
         "save_only_model=True: load_best_model_at_end reads the whole state of the best step. Leave one of them out"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}, "fsdp": "full_shard"}, "deepspeed, fsdp: both are given."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_argument_is_refused_by_name(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    error = refused(tmp_path, **options)
    assert len(error.refusals) == 1
    assert said in str(error)
    assert str(error).startswith("Trainer: one thing is in the way\n  ")


def test_all_refusals_come_in_one_error(tmp_path: Path) -> None:
    document = {"zero_optimiztion": {"stage": 2}, "train_micro_batch_size_per_gpu": 7}
    error = refused(tmp_path, torch_compile=True, optim="adamw_anyprecision", deepspeed=document)
    assert [path for path, _ in error.refusals] == [
        "torch_compile", "optim", "zero_optimiztion", "train_micro_batch_size_per_gpu",
    ]  # fmt: skip
    assert "Trainer: 4 things are in the way" in str(error)
    assert "Did you mean 'zero_optimization'?" in str(error)


def test_stock_arguments_that_started_an_engine_are_refused() -> None:
    """Arguments of the stock class are taken as they are, but for the fields that start an engine."""
    args = transformers.TrainingArguments("runs/none", **QUIET)
    args.fsdp = True
    with pytest.raises(ConfigError, match=r"fsdp=True.*Import TrainingArguments from fzero\.interop"):
        Trainer(TASKS["llama"]()[0], args)
    args.fsdp = None
    assert Trainer(TASKS["llama"]()[0], args).engine is None


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_an_engine_of_the_launcher_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=rf"{name}=true.*Launch with torchrun"):
        TrainingArguments("runs/none")


def test_an_older_transformers_is_refused_and_the_old_names_of_recomputation_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"every_n_layers": 2})
    assert Recomputed.of(old) == (True, "gradient_checkpointing_kwargs", {"every_n_layers": 2})
    monkeypatch.setattr(refusals.transformers, "__version__", "5.3.0")
    said = "transformers 5.3.0: its Trainer has not all that this one asks for. pip install 'transformers>=5.11'"
    assert refused(tmp_path).refusals == (("transformers", said),)


def test_a_model_that_cannot_train_is_refused(tmp_path: Path) -> None:
    """One that lies on two devices."""
    args = TrainingArguments(str(tmp_path), **QUIET)
    model = TASKS["llama"]()[0]
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ConfigError, match=r"lies on several devices already.*device_map="):
        Trainer(model, args)


def test_a_subclass_whose_work_would_be_left_out_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *given: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"Own\.training_step: its work is inside the captured step.*compute_loss"):
        Own(TASKS["llama"]()[0], TrainingArguments(str(tmp_path), **QUIET))


@pytest.mark.parametrize(
    ("make_one", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), "no counterpart of torch.optim.lbfgs.LBFGS"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "optimizer.amsgrad: fzero.optim has no such option"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "optimizer.dampening: fzero.optim has no such"),
        (lambda p: torch.optim.AdamW([{"params": p[:1], "betas": (0.5, 0.9)}, {"params": p[1:]}]),
         "optimizer.betas: it differs between groups"),
        (lambda p: torch.optim.AdamW([{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "weight_decay": 0.1}]),
         "optimizer.weight_decay: groups have several decays above 0"),
    ],
)  # fmt: skip
def test_an_optimizer_without_a_counterpart_is_refused(make_one: Any, said: str, tmp_path: Path) -> None:
    trainer = make(OURS, "llama", tmp_path, max_steps=1)
    trainer.optimizer = make_one(list(trainer.model.parameters()))
    with pytest.raises(ConfigError) as error:
        trainer.train()
    assert said in str(error.value)


def test_a_schedule_of_metrics_is_refused(tmp_path: Path) -> None:
    model = TASKS["llama"]()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match=r"optimizers\[1\], a ReduceLROnPlateau.*schedule of the step count"):
        Trainer(model, TrainingArguments(str(tmp_path), **QUIET), optimizers=(optimizer, schedule))


# --- deepspeed= and fsdp= ---------------------------------------------------------------------------------------------

BATCHES: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto", "zero_optimization": {"stage": 2},
}  # fmt: skip
AUTO: dict[str, Any] = {  # the document that transformers' own pages show
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({"deepspeed": BATCHES}, 2),
        ({"fsdp": "full_shard"}, 3),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}, 3),
    ],
    ids=["deepspeed", "fsdp-legacy", "fsdp"],
)
@pytest.mark.sampled(1)
def test_the_two_fields_are_the_spec(options: dict[str, Any], zero: int, tmp_path: Path) -> None:
    """And neither engine is started. The numbers are those of a Trainer without them."""
    ours = make(OURS, "llama", tmp_path / OURS, max_steps=3, **options)
    assert not ours.is_deepspeed_enabled
    assert not ours.is_fsdp_enabled
    ours.train()
    assert ours.engine.spec.zero == zero
    stock = trained(STOCK, "llama", tmp_path / STOCK, max_steps=3).losses
    found = {entry["step"]: entry["loss"] for entry in ours.state.log_history if "loss" in entry}
    assert found == pytest.approx(stock, abs=1e-5)


def test_a_ds_config_decides_the_spec(tmp_path: Path) -> None:
    """From a file, with every "auto" of it filled by the arguments."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(AUTO))
    trainer = make(OURS, "llama", tmp_path, max_steps=4, deepspeed=str(file), max_grad_norm=0.5)
    trainer.train()
    spec = trainer.engine.spec
    assert (spec.zero, spec.microbatches, spec.clip_norm) == (2, 4, 0.5)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx(
        [0.0, 0.0, 0.001, 0.002]
    )  # DeepSpeed's lag: the first two updates have the least rate


def test_blocks_in_json_are_those_of_a_command_line(tmp_path: Path) -> None:
    """The complaint: `--deepspeed '{...}'`, which transformers reads, was taken for a file's name."""
    args = TrainingArguments(str(tmp_path), **QUIET, deepspeed='{"zero_optimization": {"stage": 1}}')
    assert given_of(args)["zero"] == 1  # type: ignore[index]
    args = TrainingArguments(str(tmp_path), **QUIET, fsdp="true", fsdp_config='{"reshard_after_forward": false}')
    assert given_of(args)["zero"] == 2  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"TrainingArguments\(deepspeed=\): line 1"):
        TrainingArguments(str(tmp_path), **QUIET, deepspeed='{"zero_optimization": True}')


def test_a_ds_config_without_a_schedule_has_that_of_the_arguments(tmp_path: Path) -> None:
    """And trains as the arguments alone do, from whose optimizer it takes nothing else."""
    document = {name: block for name, block in AUTO.items() if name != "scheduler"}
    options = {"max_steps": 4, "weight_decay": 0.0}
    with_it = trained(OURS, "llama", tmp_path, deepspeed=document, **options)
    without = trained(OURS, "llama", tmp_path, spec={"zero": 2}, **options)
    assert with_it.rates == without.rates
    assert with_it.losses == pytest.approx(without.losses, abs=1e-6)
    document.pop("optimizer")
    alone = trained(OURS, "llama", tmp_path, deepspeed=document, **options)
    assert alone.losses == without.losses


def test_flags_that_a_ds_config_would_ignore_are_refused(tmp_path: Path) -> None:
    document = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "tensorboard": {"enabled": True}}
    error = refused(tmp_path, deepspeed=document, max_grad_norm=0.3, weight_decay=0.1, learning_rate=3e-3)
    assert {path for path, _ in error.refusals} >= {"gradient_clipping", "optimizer.params.weight_decay"}
    assert 'it is missing, so DeepSpeed takes 0.0, but TrainingArguments say 0.1. Write "auto"' in str(error)
    assert "optimizer.params.lr = 0.001: auto= gives 0.003, but the document says another value" in str(error)
    fixed = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, "tensorboard": {"enabled": True}}
    assert "tensorboard.enabled: report_to=" in str(refused(tmp_path, deepspeed=fixed, weight_decay=0.0))


@pytest.mark.parametrize(
    ("options", "zero", "remat"),
    [
        ({"fsdp": True}, 3, "none"),
        ({"fsdp": "full_shard auto_wrap"}, 3, "none"),
        ({"fsdp": "shard_grad_op"}, 2, "none"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}}, 2, "full"),
        ({"fsdp": ["full_shard"], "fsdp_config": {"version": 1, "fsdp_transformer_layer_cls_to_wrap": "L"}}, 3, "none"),
    ],
)  # fmt: skip
def test_fsdp_decides_the_spec(options: dict[str, Any], zero: int, remat: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), **QUIET, **options)
    given = given_of(args)
    assert given is not None
    assert (given["zero"], given.get("remat", "none")) == (zero, remat)
    assert (args.fsdp, args.fsdp_config) == (None, None)


def test_fsdp_offload_and_what_it_refuses(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), **QUIET, fsdp="full_shard offload")
    assert given_of(args)["offload"] == "optimizer+params"  # type: ignore[index]
    error = refused(tmp_path, fsdp=True, fsdp_config={"xla": True, "shardng_strategy": 2})
    assert {path for path, _ in error.refusals} == {"fsdp_config.xla", "fsdp_config.shardng_strategy"}


def test_a_spec_in_json_comes_last(tmp_path: Path) -> None:
    trainer = make(OURS, "llama", tmp_path, max_steps=1, fsdp=True, spec='{"zero": 1, "remat": "full"}')
    trainer.train()
    assert (trainer.engine.spec.zero, trainer.engine.spec.remat) == (1, "full")
    error = refused(tmp_path, spec={"zeroo": 1, "microbatches": 2})
    assert "spec: Spec has no field 'zeroo'. Did you mean 'zero'" in str(error)
    assert "spec['microbatches']: the other arguments say it. Leave it out" in str(error)


@pytest.mark.parametrize(("optim", "state"), [("lion_32bit", "LionState"), ("adamw_8bit", "Adam8State")])
@pytest.mark.sampled(1)
def test_optimizers_of_other_libraries_are_fzeros_own(optim: str, state: str, tmp_path: Path) -> None:
    """By their names in `optim=`; bitsandbytes is not needed."""
    trainer = make(OURS, "llama", tmp_path, max_steps=3, optim=optim)
    before = SimpleNamespace(**{n.replace(".", "_"): p.detach().clone() for n, p in trainer.model.named_parameters()})
    trainer.train()
    assert type(trainer.engine.state.tree["opt_state"]).__name__ == state
    after = fzero.unshard(trainer.engine.state.params)
    assert all(not torch.equal(vars(before)[n.replace(".", "_")], p) for n, p in after.items())
