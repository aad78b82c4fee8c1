"""accelerate_keys: every key of a file of `accelerate config` 1.15, and what fzero does with it."""

from __future__ import annotations

from fzero.interop.config.config_keys import (
    ANY,
    BLOCK,
    COUNT,
    FLAG,
    FOLDER,
    INT,
    NAME,
    POSITIVE,
    SIGNED,
    TEXT,
    Of,
    ValueKind,
    Verdict,
    keys,
    one_of,
    table,
)

HONOURED, ALWAYS, HINT, REFUSED, _ = Verdict
FSDP, DEEPSPEED, PARALLEL = "fsdp_config", "deepspeed_config", "parallelism_config"

DEVICE = one_of("none", "cpu", "nvme")
PRECISIONS = ("no", "fp16", "bf16")
PRECISION = ValueKind(  # in any case, as Accelerate reads it; YAML's bare no is false
    one_of(*PRECISIONS).needed, lambda value: isinstance(value, str) and value.lower() in PRECISIONS, off="no"
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STRATEGY = ValueKind(
    f"1 to {len(STRATEGIES)}, or one of {', '.join(STRATEGIES)}",
    lambda value: str(value).upper() in (*STRATEGIES, *map(str, range(1, len(STRATEGIES) + 1))),
    off="NO_SHARD",
)
TYPE = ValueKind("a name", lambda value: NAME.fits(value) or str(value).upper() == "NO", off="NO")
ZERO_STAGE = one_of(0, 1, 2, 3)
LIMIT = POSITIVE._replace(off=0.0)
BY_STRUCTURE = "layers are found by their structure"
LAUNCHER = "for the launcher"
DYNAMO = 'Spec(compile="auto") where it is INDUCTOR'

ACCELERATE = table(
    keys("", HONOURED, "Spec(zero=, mesh=)", distributed_type=Of(TYPE, "NO")),
    keys("", REFUSED, "fzero starts no jobs of SageMaker", "launch with torchrun", compute_environment="LOCAL_MACHINE"),
    keys("", HONOURED, "the ranks, unless world_size= is given", num_processes=Of(SIGNED, -1)),
    keys("", HONOURED, "nodes, for hybrid sharding", num_machines=Of(COUNT, 1)),
    keys("", HONOURED, "Spec(precision=)", mixed_precision=Of(PRECISION, "no"), fp16=False),
    keys("", HONOURED, 'Spec(device="cpu")', use_cpu=False),
    keys("", HINT, LAUNCHER, machine_rank=0, gpu_ids=Of(ANY), main_process_ip=Of(ANY), main_process_port=Of(ANY),
         rdzv_backend="static", same_network=False, main_training_function="main", enable_cpu_affinity=False,
         mpirun_config=Of(BLOCK)),
    keys("", HINT, "batches that differ between ranks are always found", debug=False),
    # --- FSDP; keys are written with and without fsdp_ before them
    keys(FSDP, HONOURED, "Spec(zero=)", sharding_strategy=Of(STRATEGY), reshard_after_forward=Of(ANY),
         version=Of(one_of(1, 2), 1)),
    keys(FSDP, HONOURED, "Spec(offload=)", offload_params=False),
    keys(FSDP, HONOURED, 'Spec(remat="full"); the same bits', activation_checkpointing=False),
    keys(FSDP, HONOURED, "given.whole_export: one folder of whole tensors, or fzero's own checkpoint",
         state_dict_type=Of(TEXT)),
    keys(FSDP, ALWAYS, "fzero is so", cpu_ram_efficient_loading=Of(FLAG), sync_module_states=Of(FLAG),
         use_orig_params=Of(FLAG)),
    keys(FSDP, HINT, BY_STRUCTURE, auto_wrap_policy=Of(TEXT), transformer_layer_cls_to_wrap=Of(ANY),
         min_num_params=Of(INT)),
    keys(FSDP, HINT, "gathers are placed by measured cost", backward_prefetch=Of(TEXT), forward_prefetch=Of(FLAG),
         limit_all_gathers=True),
    keys(FSDP, REFUSED, "fzero holds every parameter in a bucket", "Spec(trainable=) leaves parameters out of training",
         ignored_modules=Of(ANY)),
    keys(FSDP, REFUSED, "saved activations stay on the device", "take it out", activation_checkpointing_offload=False),
    # --- DeepSpeed's plugin: the rest is in its own file, or filled in as Accelerate fills it
    keys(DEEPSPEED, HONOURED, "the file, as Accelerate finds it, or beside this one", deepspeed_config_file=Of(NAME)),
    keys(DEEPSPEED, HONOURED, "as in a ds_config; auto is Accelerate's default", auto=True,
         gradient_accumulation_steps=Of(COUNT, 1), gradient_clipping=Of(LIMIT, 1.0), zero_stage=Of(ZERO_STAGE, 2),
         offload_optimizer_device=Of(DEVICE, "none"), offload_param_device=Of(DEVICE, "none"),
         offload_optimizer_nvme_path=Of(FOLDER), offload_param_nvme_path=Of(FOLDER), zero3_save_16bit_model=False),
    keys(DEEPSPEED, ALWAYS, "a state is made in slices", zero3_init_flag=False),
    keys(DEEPSPEED, HINT, "Ulysses is not used", seq_parallel_communication_data_type=Of(TEXT)),
    keys(DEEPSPEED, HINT, BY_STRUCTURE, deepspeed_moe_layer_cls_names=Of(ANY)),
    keys(DEEPSPEED, HINT, LAUNCHER, deepspeed_multinode_launcher=Of(TEXT), deepspeed_hostfile=Of(TEXT),
         deepspeed_exclusion_filter=Of(TEXT), deepspeed_inclusion_filter=Of(TEXT)),
    # --- axes
    keys(PARALLEL, HONOURED, "Spec(mesh=)", dp_replicate_size=Of(COUNT, 1), dp_shard_size=Of(COUNT, 1)),
    keys(PARALLEL, HONOURED, "Spec(mesh=); give shard=fzero.interop.tp_plan(model)", tp_size=Of(COUNT, 1)),
    keys(PARALLEL, REFUSED, "fzero splits no attention over ranks",
         'take it out; Spec(sequence="tp") splits tokens along tp', cp_size=1, sp_size=1),
    keys(PARALLEL, HINT, "cp and sp are not used", cp_backend=Of(TEXT), cp_comm_strategy=Of(TEXT), sp_backend=Of(TEXT),
         sp_seq_length=Of(ANY), sp_seq_length_is_variable=Of(ANY), sp_attn_implementation=Of(TEXT)),
    # --- what fzero does not do
    keys("", HINT, "of Intel's extension, in older versions", ipex_config=Of(BLOCK)),
    keys("", REFUSED, "fzero is not Megatron-LM", "take the block out", megatron_lm_config=Of(BLOCK)),
    keys("", REFUSED, "fzero computes in no 8 bits", "take the block out, and write bf16", fp8_config=Of(BLOCK)),
    keys("", HINT, "of TPUs, which no type here uses", tpu_name=Of(TEXT), tpu_zone=Of(TEXT),
         tpu_use_cluster=False, tpu_use_sudo=False, tpu_vm=Of(ANY), tpu_env=Of(ANY), downcast_bf16=False,
         command_file=Of(TEXT), commands=Of(ANY)),
    keys("dynamo_config", HONOURED, DYNAMO, backend=Of(TYPE, "NO")),
    keys("", HONOURED, DYNAMO, dynamo_backend=Of(TYPE, "NO")),
    keys("dynamo_config", HINT, "nothing is compiled by Dynamo", mode=Of(ANY), use_fullgraph=Of(ANY),
         use_dynamic=Of(ANY), use_regional_compilation=Of(ANY)),
)  # fmt: skip

ALIASES = {  # Accelerate takes these names with and without their block's before them
    f"{block}.{prefix}{path.removeprefix(f'{block}.')}": path
    for block, prefix in ((FSDP, "fsdp_"), (PARALLEL, "parallelism_config_"), ("dynamo_config", "dynamo_"))
    for path in ACCELERATE
    if path.startswith(f"{block}.")
} | {f"{FSDP}.fsdp_backward_prefetch_policy": f"{FSDP}.backward_prefetch"}  # its name before Accelerate 0.25
