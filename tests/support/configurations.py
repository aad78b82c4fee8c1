"""Documents for DeepSpeed as its documentation and those of LLaMA-Factory and axolotl describe them.

Written anew: the keys and the values that those pages name, small enough to train here. `A` is "auto". A `Case` says
what a document means: fields of the Spec, by name (`precision` by what is computed).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

A, ON, OFF = "auto", {"enabled": True}, {"enabled": False}
Document = dict[str, Any]


class Case(NamedTuple):
    """A document, the fields that it gives, and values for what is left open (by path). ranks: of a ds_config."""

    document: Document
    fields: dict[str, Any]
    auto: Mapping[str, Any] = MappingProxyType({})
    ranks: int = 2


MICRO = {"train_micro_batch_size_per_gpu": 2}
LR = {"optimizer.params.lr": 1e-2}
ROWS = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}  # two ranks, two micro batches
AUTOS = {"train_batch_size": A, "train_micro_batch_size_per_gpu": A, "gradient_accumulation_steps": A}
FILLED = {**MICRO, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
TRAINER = {**AUTOS, "gradient_clipping": A, "zero_allow_untested_optimizer": True}
NARROW = {
    "fp16": {
        "enabled": A,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": A},
}
FP16 = {"fp16": {**NARROW["fp16"], "enabled": True}}
IN_BF16 = {"bf16.enabled": True, "fp16.enabled": False}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARM = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
FILLS = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), A)}
FILLS_WARM = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), A),
}
OF_TRAINER = {
    **FILLED,
    **LR,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 1e-4,
    "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 3,
    "scheduler.params.total_num_steps": 10,
}
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "overlap_comm": True,
    "contiguous_gradients": True,
}
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": A,
    "stage3_prefetch_bucket_size": A,
    "stage3_param_persistence_threshold": A,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}


def ds(zero: Document, **more: Any) -> Document:
    return {**ROWS, "optimizer": ADAMW, "zero_optimization": zero, **more}


CYCLE = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 1e-2,
    "cycle_first_step_size": 3,
    "cycle_first_stair_count": 3,
    "cycle_second_step_size": 3,
    "cycle_second_stair_count": 3,
    "decay_step_size": 2,
    "decay_lr_rate": 1e-3,
    "cycle_min_mom": 0.85,
    "cycle_max_mom": 0.99,
    "decay_mom_rate": 0.0,
}

# DeepSpeed: its reference of keys, and its tutorials
DEEPSPEED = {
    "ds_first": Case(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "fp16": ON,
            "zero_optimization": True,
        },
        {"zero": 1, "microbatches": 1, "clip_norm": 1.0, "precision": "fp16"},
    ),
    "ds_cifar": Case(
        {
            "train_batch_size": 8,
            "steps_per_print": 2000,
            "optimizer": ADAMW,
            "scheduler": WARM,
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "bf16": OFF,
            "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
            "zero_optimization": {
                "stage": 0,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 5e7,
                "reduce_bucket_size": 5e7,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "cpu_offload": False,
            },
        },
        {"zero": 0, "microbatches": 1},
    ),
    "ds_stage1": Case(ds({"stage": 1, "reduce_bucket_size": 5e8}, **FP16), {"zero": 1, "precision": "fp16"}),
    "ds_stage2": Case(ds({"stage": 2, **BUCKETS}, bf16=ON), {"zero": 2, "precision": "bf16"}),
    "ds_stage2_offload": Case(
        ds({"stage": 2, "offload_optimizer": CPU, **BUCKETS, "round_robin_gradients": True}),
        {"zero": 2, "offload": {"optimizer": "cpu"}},
    ),
    "ds_stage3": Case(ds({**STAGE3, "reduce_bucket_size": 5e8}, bf16=ON), {"zero": 3, "precision": "bf16"}),
    "ds_stage3_offload": Case(
        ds({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
        {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    ),
    "ds_hpz": Case(
        {**ds({"stage": 3, "zero_hpz_partition_size": 2}), "train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"zero": "hpz", "mesh": {"dp_out": -1, "dp": 2}},
        ranks=4,
    ),
    "ds_mics": Case(
        {**ds({"stage": 3, "mics_shard_size": 2}), "train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"zero": "hsdp", "mesh": {"dp_out": -1, "dp": 2}},
        ranks=4,
    ),
    "ds_one_cycle": Case(ds({"stage": 2}, scheduler={"type": "OneCycle", "params": CYCLE}), {"zero": 2}),
    "ds_range_test": Case(
        ds(
            {"stage": 1},
            scheduler={
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": 1e-3,
                    "lr_range_test_step_size": 2,
                    "lr_range_test_step_rate": 5,
                    "lr_range_test_staircase": False,
                },
            },
        ),
        {"zero": 1},
    ),
    "ds_decay": Case(
        ds({"stage": 1}, scheduler={"type": "WarmupDecayLR", "params": {**WARM["params"], "total_num_steps": 10}}),
        {"zero": 1},
    ),
    "ds_cosine": Case(
        ds(
            {"stage": 1},
            scheduler={
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 10,
                    "warmup_min_ratio": 0.1,
                    "warmup_num_steps": 3,
                    "cos_min_ratio": 0.01,
                },
            },
        ),
        {"zero": 1},
    ),
    "ds_adam_l2": Case(
        ds({"stage": 2}, optimizer={"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}}),
        {"zero": 2},
    ),
    "ds_muon": Case(ds({"stage": 1}, optimizer={"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}), {"zero": 1}),
    "ds_sgd": Case(
        ds(
            {"stage": 0},
            optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
            gradient_clipping=0.0,
            gradient_predivide_factor=2.0,
            communication_data_type="fp32",
        ),
        {"zero": 0},
    ),
    "ds_lion": Case(
        ds({"stage": 1}, optimizer={"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}), {"zero": 1}
    ),
    "ds_adagrad": Case(ds({"stage": 1}, optimizer={"type": "Adagrad", "params": {"lr": 1e-2}}), {"zero": 1}),
    "ds_fixed_scale": Case(
        ds({"stage": 1}, fp16={"enabled": True, "loss_scale": 128}), {"zero": 1, "precision": "fp16"}
    ),
    "ds_autocast": Case(
        ds({"stage": 2}, torch_autocast={"enabled": True, "dtype": "bfloat16"}), {"zero": 2, "precision": "autocast"}
    ),
    "ds_monitors": Case(
        ds(
            {"stage": 1},
            tensorboard={"enabled": True, "output_path": "out", "job_name": "a"},
            csv_monitor={"enabled": True},
            wandb={"enabled": False},
            comms_logger={"enabled": True, "verbose": False},
            dump_state=True,
            flops_profiler={"enabled": True, "profile_step": 1, "detailed": True},
            wall_clock_breakdown=True,
        ),
        {"zero": 1},
    ),
    "ds_checkpointing": Case(
        ds(
            {"stage": 2},
            activation_checkpointing={
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 4,
                "synchronize_checkpoint_boundary": True,
                "profile": True,
            },
            checkpoint={"tag_validation": "Ignore"},
            data_types={"grad_accum_dtype": "fp32"},
        ),
        {"zero": 2},
    ),
    # transformers' own pages of DeepSpeed: every value of the Trainer is "auto"
    "hf_zero2": Case(
        {
            **TRAINER,
            **NARROW,
            "optimizer": FILLS,
            "scheduler": FILLS_WARM,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS},
        },
        {"zero": 2, "microbatches": 2, "clip_norm": 0.5, "precision": "bf16", "offload": {"optimizer": "cpu"}},
        {**OF_TRAINER, **IN_BF16},
    ),
    "hf_zero3": Case(
        {
            **TRAINER,
            **NARROW,
            "optimizer": FILLS,
            "scheduler": FILLS_WARM,
            "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU},
        },
        {"zero": 3, "precision": "fp16", "offload": {"optimizer": "cpu", "params": "cpu"}},
        {**OF_TRAINER, "bf16.enabled": False, "fp16.enabled": True},
    ),
}

# LLaMA-Factory's and axolotl's files for DeepSpeed: their arguments are the Trainer's, which fills what is "auto"
FACTORY = {**TRAINER, **NARROW}
BF16_AUTO = {**IN_BF16, **FILLED}
FACTORY3 = {**STAGE3, "overlap_comm": False}
AXOLOTL = {**NARROW, **AUTOS, "gradient_clipping": A, "wall_clock_breakdown": False}
AXOLOTL3 = {**STAGE3, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
OTHERS = {
    "factory_z0": Case(
        {**FACTORY, "zero_optimization": {**BUCKETS, "stage": 0, "round_robin_gradients": True}},
        {"zero": 0, "microbatches": 2, "clip_norm": 0.5, "precision": "bf16"},
        BF16_AUTO,
    ),
    "factory_z2": Case(
        {**FACTORY, "zero_optimization": {**BUCKETS, "stage": 2, "overlap_comm": False, "round_robin_gradients": True}},
        {"zero": 2, "overlap": False},
        BF16_AUTO,
    ),
    "factory_z2_offload": Case(
        {**FACTORY, "zero_optimization": {**BUCKETS, "stage": 2, "offload_optimizer": CPU}},
        {"zero": 2, "offload": {"optimizer": "cpu"}},
        BF16_AUTO,
    ),
    "factory_z3": Case({**FACTORY, "zero_optimization": FACTORY3}, {"zero": 3, "overlap": False}, BF16_AUTO),
    "factory_z3_offload": Case(
        {**FACTORY, "zero_optimization": {**FACTORY3, "offload_optimizer": CPU, "offload_param": CPU}},
        {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
        BF16_AUTO,
    ),
    "factory_autotp": Case(
        {
            "_comment": "models with a plan",
            **FACTORY,
            "zero_optimization": {**BUCKETS, "stage": 1},
            "tensor_parallel": {"autotp_size": 1},
        },
        {"zero": 1},
        BF16_AUTO,
    ),
    "axolotl_zero1": Case({**AXOLOTL, "zero_optimization": {"stage": 1, "overlap_comm": True}}, {"zero": 1}, BF16_AUTO),
    "axolotl_zero1_compile": Case(
        {
            **AXOLOTL,
            "compile": {"disable": False, "backend": "inductor"},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
        },
        {"zero": 1},
        BF16_AUTO,
    ),
    "axolotl_zero2": Case(
        {
            **AXOLOTL,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        {"zero": 2, "microbatches": 2},
        BF16_AUTO,
    ),
    "axolotl_zero3": Case({**AXOLOTL, "zero_optimization": AXOLOTL3}, {"zero": 3, "prefetch_bytes": 2}, BF16_AUTO),
    "axolotl_zero3_bf16": Case(
        {**AUTOS, "bf16": ON, "gradient_clipping": A, "zero_optimization": AXOLOTL3},
        {"zero": 3, "precision": "bf16"},
        FILLED,
    ),
    "axolotl_zero3_params": Case(
        {**AUTOS, "bf16": ON, "gradient_clipping": A, "zero_optimization": {**AXOLOTL3, "offload_param": CPU}},
        {"offload": {"params": "cpu"}},
        FILLED,
    ),
    "axolotl_zero3_all": Case(
        {
            **AUTOS,
            "bf16": ON,
            "gradient_clipping": A,
            "zero_optimization": {**AXOLOTL3, "offload_param": CPU, "offload_optimizer": CPU},
        },
        {"offload": {"optimizer": "cpu", "params": "cpu"}},
        FILLED,
    ),
}
