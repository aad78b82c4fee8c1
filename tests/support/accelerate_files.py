"""Files of `accelerate config`, and of LLaMA-Factory and axolotl for FSDP, as their documentations describe them."""

from __future__ import annotations

from typing import Any

from configurations import MICRO, A, Case, Document

HEAD = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "gpu_ids": "all",
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
    "mixed_precision": "no",
}
WRAP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
FSDP1 = {
    **WRAP,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
FSDP2 = {**WRAP, "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}


def fsdp(config: Document, **more: Any) -> Document:
    return {**HEAD, "distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": config, **more}


def plugin(config: Document, **more: Any) -> Document:
    return {**HEAD, "distributed_type": "DEEPSPEED", "deepspeed_config": config, **more}


BOTH = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
NONE = {"offload_optimizer_device": "none", "offload_param_device": "none"}
ACCELERATE = {
    "accelerate_cpu": Case({**HEAD, "distributed_type": "MULTI_CPU", "use_cpu": True}, {"zero": 0, "device": "cpu"}),
    "accelerate_multi_gpu": Case(
        {**HEAD, "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, {"zero": 0, "precision": "autocast"}
    ),
    "accelerate_dynamo": Case(
        {
            **HEAD,
            "distributed_type": "MULTI_GPU",
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_mode": "default",
                "dynamo_use_dynamic": False,
                "dynamo_use_fullgraph": False,
            },
        },
        {"zero": 0, "compile": "auto"},
    ),
    "accelerate_fsdp": Case(fsdp(FSDP1), {"zero": 3, "precision": "autocast"}),
    "accelerate_fsdp_grad_op": Case(fsdp({**FSDP1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}), {"zero": 2}),
    "accelerate_fsdp2": Case(fsdp(FSDP2), {"zero": 3, "precision": "autocast"}),
    "accelerate_hsdp": Case(
        fsdp(
            FSDP2,
            num_processes=4,
            parallelism_config={
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            },
        ),
        {"zero": "hsdp", "mesh": {"dp_out": 2, "dp": -1}},
    ),
    "factory_fsdp_offload": Case(
        fsdp({**FSDP1, "fsdp_offload_params": True}, mixed_precision="no"), {"zero": 3, "offload": "optimizer+params"}
    ),
    "axolotl_fsdp2": Case(
        fsdp({**FSDP2, "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}),
        {"zero": 2, "remat": "full"},
    ),
    "accelerate_zero1": Case(
        plugin(
            {
                "deepspeed_multinode_launcher": "standard",
                "gradient_accumulation_steps": 2,
                "zero3_init_flag": False,
                "zero_stage": 1,
            }
        ),
        {"zero": 1, "microbatches": 2},
        MICRO,
    ),
    "accelerate_zero2": Case(
        plugin(
            {
                **NONE,
                "gradient_accumulation_steps": A,
                "gradient_clipping": A,
                "zero_stage": 2,
                "zero3_init_flag": False,
            },
            mixed_precision="fp16",
        ),
        {"zero": 2, "microbatches": 1, "precision": "fp16"},
        MICRO,
    ),
    "accelerate_zero3": Case(
        plugin(
            {
                **BOTH,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.7,
                "zero3_init_flag": True,
                "zero3_save_16bit_model": A,
                "zero_stage": 3,
            },
            mixed_precision="bf16",
        ),
        {"zero": 3, "clip_norm": 0.7, "precision": "bf16", "offload": {"optimizer": "cpu", "params": "cpu"}},
        MICRO,
    ),
}
