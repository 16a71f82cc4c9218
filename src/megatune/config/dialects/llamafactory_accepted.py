"""LLaMA-Factory's keys that change nothing of what is trained here: they pass, with a line that says why."""

from __future__ import annotations

from megatune.config.dialects.dialect import Accepted

_KERNELS = "a choice of kernels: the engine's own compute the same"
_RECOMPUTE = "recompute_granularity says what is recomputed"
_SHARDING = "Megatron-Core shards the optimizer itself (use_distributed_optimizer), and its layout the model"
_EXCHANGE = "when and how ranks exchange changes no result, and the engine decides it"
_READING = "how rows are read ahead changes no result"
_ANSWERING = "it says how a model answers, as flags of `megatune infer` do"
_EVALUATION = "evaluation computes the loss alone, and keeps no predictions"
_LOADING = "weights are streamed, each rank its own slices"
_CHECKPOINT = "a checkpoint is a Hugging Face model, and any layout resumes from it"
_PROCESSES = "a run starts its own processes, one for each GPU or num_processes, or joins torchrun's"
_SAID = "the log says it anyway"
_PRINTING = "what is printed, and when, follows logging_steps"
_PROFILE = "profile_step_start and profile_step_end choose the steps"
_ENGINE = "Megatron-Core is the only engine here"
_TRACKERS = "wandb_project, swanlab_project and run_name name a run"
_DEVICES = "it belongs to other devices"
_SEEDED = "a run of one layout is the same each time, bit for bit"


def _of(switch: str, *names: str) -> dict[str, Accepted]:
    """Keys that say something only where a switch is on, which is refused."""
    return dict.fromkeys(names, Accepted(f"it says something only with {switch}: true, which is refused"))


ACCEPTED: dict[str, Accepted] = {
    "trust_remote_code": Accepted(
        "no code of a repository is ever run: the supported families need none", off=(False,)
    ),
    "remove_unused_columns": Accepted("only the columns that dataset_info.json names are read", off=(True, False)),
    "use_mca": Accepted(_ENGINE, off=(True,)),
    "use_megatron_bridge": Accepted(_ENGINE, off=(False,)),
    **dict.fromkeys(
        (
            "flash_attn", "use_unsloth", "enable_liger_kernel", "use_liger_kernel", "liger_kernel_config",
            "use_v1_kernels", "transformer_impl", "masked_softmax_fusion", "torch_compile", "torch_compile_backend",
            "torch_compile_mode", "torchdynamo", "jit_mode_eval", "use_ipex", "cuda_graph_impl", "cuda_graph_scope",
            "compile_warmup", "tf32", "fp16_backend", "half_precision_backend", "fp16_opt_level",
        ),
        Accepted(_KERNELS, off=(False,)),
    ),
    "upcast_lmhead_output": Accepted("the loss is always computed in fp32", off=(False,)),
    **dict.fromkeys(
        ("use_unsloth_gc", "disable_gradient_checkpointing", "use_reentrant_gc", "gradient_checkpointing_kwargs"),
        Accepted(_RECOMPUTE),
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"),
        Accepted(_SHARDING),
    ),
    **dict.fromkeys(
        (
            "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_bucket_size", "ddp_broadcast_buffers",
            "ddp_static_graph", "ddp_average_in_collective", "delay_grad_reduce", "variable_seq_lengths",
        ),
        Accepted(_EXCHANGE),
    ),
    "ddp_backend": Accepted("NCCL joins GPUs, gloo CPUs"),
    "check_for_nan_in_loss_and_grad": Accepted("every step's numbers are checked", off=(True,)),
    **dict.fromkeys(
        (
            "preprocessing_batch_size", "dataloader_persistent_workers", "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context", "dataloader_in_order", "accelerator_config", "dispatch_batches",
            "split_batches", "length_column_name", "sortish_sampler", "data_shared_file_system",
        ),
        Accepted(_READING),
    ),
    "label_names": Accepted("the template says which tokens are trained"),
    "quantization_device_map": Accepted("the layout says which rank holds what of the base"),
    "use_fast_tokenizer": Accepted("a tokenizer is the fast one where there is one"),
    **dict.fromkeys(("low_cpu_mem_usage", "offload_folder"), Accepted(_LOADING)),
    "print_param_status": Accepted("the first lines of a run say what is trained", off=(False,)),
    **dict.fromkeys(
        (
            "infer_backend", "infer_dtype", "use_kv_cache", "use_cache", "vllm_maxlen", "vllm_gpu_util",
            "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config", "sglang_maxlen", "sglang_mem_fraction",
            "sglang_tp_size", "sglang_config", "sglang_lora_backend", "do_sample", "temperature", "top_p", "top_k",
            "num_beams", "max_length", "max_new_tokens", "repetition_penalty", "length_penalty", "skip_special_tokens",
            "eval_num_beams", "generation_max_length", "generation_num_beams", "generation_config",
        ),
        Accepted(_ANSWERING),
    ),
    "do_eval": Accepted("eval_strategy says when a run evaluates"),
    **dict.fromkeys(
        (
            "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
            "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics",
        ),
        Accepted(_EVALUATION),
    ),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), Accepted("evaluation computes as training does")),
    **dict.fromkeys(
        (
            "save_on_each_node", "ckpt_format", "ckpt_d2h_non_blocking", "distrib_optim_fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient", "export_hf_on_finish", "enable_jit_checkpoint",
            "restore_callback_states_from_checkpoint",
        ),
        Accepted(_CHECKPOINT),
    ),
    "hub_always_push": Accepted("every checkpoint that is saved is pushed, in its order"),
    **dict.fromkeys(
        (
            "include_num_input_tokens_seen", "include_tokens_per_second", "include_effective_tokens_per_second",
            "skip_memory_metrics",
        ),
        Accepted(_SAID),
    ),
    **dict.fromkeys(
        (
            "logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level",
            "log_level_replica", "disable_tqdm", "debug",
        ),
        Accepted(_PRINTING),
    ),
    **dict.fromkeys(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), Accepted(_TRACKERS)
    ),
    **dict.fromkeys(
        (
            "profiler_wait_steps", "profiler_warmup_steps", "profiler_active_steps", "profiler_repeat",
            "profiler_record_shapes", "profiler_profile_memory", "profiler_with_stack",
        ),
        Accepted(_PROFILE),
    ),
    **dict.fromkeys(
        ("ray_num_workers", "ray_init_kwargs", "ray_scope", "master_addr", "master_port", "local_rank"),
        Accepted(_PROCESSES),
    ),
    **dict.fromkeys(("full_determinism", "past_index"), Accepted(_SEEDED)),
    "torch_empty_cache_steps": Accepted("memory that was freed is used again"),
    **dict.fromkeys(("tpu_num_cores", "tpu_metrics_debug", "mp_parameters", "xpu_backend"), Accepted(_DEVICES)),
    **_of("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    **_of(
        "use_galore",
        *(f"galore_{name}" for name in ("target", "rank", "update_interval", "scale", "proj_type", "layerwise")),
    ),
    **_of(
        "use_apollo",
        *(f"apollo_{name}" for name in ("target", "rank", "update_interval", "scale", "proj", "proj_type")),
        *(f"apollo_{name}" for name in ("scale_type", "layerwise", "scale_front")),
    ),
    **_of(
        "use_badam",
        *(f"badam_{name}" for name in ("mode", "start_block", "switch_mode", "switch_interval", "update_ratio")),
        *(f"badam_{name}" for name in ("mask_mode", "verbose")),
    ),
    **_of("use_asft_loss", "asft_alpha"),
    **_of("use_eaft_loss", "eaft_alpha"),
    **_of(
        "use_kt",
        *(f"kt_{name}" for name in ("config", "cpu_activation", "weight_path", "non_expert_weight_path")),
        *(f"kt_{name}" for name in ("expert_checkpoint_path", "use_lora_experts", "lora_expert_num")),
        "kt_lora_expert_intermediate_size",
    ),
}  # fmt: skip
