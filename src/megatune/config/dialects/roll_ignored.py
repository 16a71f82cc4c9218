"""ROLL's keys that change nothing here, each with the reason, and those that are refused by name."""

from __future__ import annotations

from megatune.config.dialects.dialect import Refused
from megatune.config.dialects.table import table

_OLD = "it is of an older version of ROLL, which drops it, too"
_NO_EFFECT = "it has no effect in ROLL either"
_PATHS = "output_dir says it"
_ENGINE = "how engines are driven is decided here"
_HYDRA = "it is Hydra's own"
_PICTURES = "reinforcement learning of vision-language models is not built"
_ROW = "rows are as long as their samples"
_KERNELS = "the engine chooses its kernels"
_AGENTIC = "it belongs to ROLL's agentic pipeline"

TOP_IGNORED: dict[str, str] = {
    "hydra": _HYDRA,
    "base_dir": _PATHS,
    "logging_dir": "what the processes of roles print is in output_dir/launch/logs",
    "length_profiler_dir": _PATHS,
    "profiler_output_dir": _PATHS,
    "otlp_output_dir": "telemetry is never sent",
    "num_nodes": "it follows from the devices, as in ROLL",
    "local_rank": _NO_EFFECT,
    "val_batch_size": "the validation set is sampled whole, as in ROLL",
    "is_offload_states": "roles that share a device always leave it when it is not theirs",
    "generate_opt_level": "every response is a request of its own",
    "is_num_return_sequences_expand": "every response is a request of its own",
    "router_args": "which engine samples a prompt changes no result",
    "transfer_backend": "samples travel as Ray's objects",
    "reward": _NO_EFFECT,
    "pure_opd_pipeline_type": "the pipeline is that of this verb",
    **dict.fromkeys(
        (
            *("l2", "use_reward_scaling", "add_len_reward", "use_reward_norm", "postive_loss_coef"),
            *("positive_loss_coef", "use_topr_neg_loss_coef", "use_policy_loss_type", "use_topr_loss", "val_greedy"),
            *("val_n_sample", "mask_type", "balance_length", "minibatch_data_iter_num"),
        ),
        _NO_EFFECT,
    ),
    **dict.fromkeys(
        (
            *("reward_norm", "reward_shift", "reward_scale", "use_remove_padding", "reward_system_config"),
            *("generate_redundancy_num", "reward_filter_mean_threshold", "offload_nccl", "use_additional_prompts"),
        ),
        _OLD,
    ),
    **dict.fromkeys(
        ("pg_variant", "lora_rank", "lora_alpha", "lora_target", "lora_dropout"),
        "at the top level it only stands for ${...}",
    ),
    **dict.fromkeys(
        ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload"),
        "DeepSpeed takes no part",
    ),
}
TOP_REFUSED: dict[str, Refused] = {
    "adv_estimator": Refused(
        _AGENTIC, values=("gigpo", "step_reinforce", "agentic_reinforce"), fix="write adv_estimator: grpo"
    ),
    "kl_penalty": Refused(
        "rollouts keep the probabilities of sampled tokens, and not whole distributions",
        values=("full",),
        fix="write kl_penalty: kl",
    ),
    "track_with": Refused("of trackers there are tensorboard, wandb, swanlab and mlflow", values=("trackio",)),
    "profiler_timeline": Refused("no profiler runs beside roles", off=(False,)),
    "profiler_memory": Refused("no profiler runs beside roles", off=(False,)),
    "save_logging_board_dir": Refused(
        "log-probabilities of tokens are in what rollout_dump_dir writes", fix="write rollout_dump_dir: FOLDER"
    ),
    "user_defined_rollout_loop_cls": Refused(
        "prompts are sampled once; hooks for tools are not built",
        off=("roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",),
        fix="remove user_defined_rollout_loop_cls",
    ),
    "report_length_and_rewards": Refused(
        "lengths and scores are in what rollout_dump_dir writes", off=(False,), fix="write rollout_dump_dir: FOLDER"
    ),
    "is_offload_optimizer_states_in_train_step": Refused(
        "the optimizer's state stays on the device, or on the host for the whole run",
        off=(False,),
        fix="write optimizer_cpu_offload: true in strategy_config of actor_train, or remove it",
    ),
}

ROLE_IGNORED: dict[str, str] = {
    "name": "roles have their own names, as in ROLL",
    "max_concurrency": _ENGINE,
    "offload_nccl": "ROLL forces it to false, too",
    "use_remove_padding": _OLD,
    "logits_in_fp32": "log-probabilities and entropies are always computed in fp32",
    **dict.fromkeys(("sequence_length_round_in_train", "sequence_length_round_in_infer"), _ROW),
}
ROLE_REFUSED: dict[str, Refused] = {
    "apply_loss_scale": Refused("a loss is divided by the counts of the whole global batch, once", off=(True,)),
    "mtp_training_mode": Refused("multi-token prediction is not built", off=("disabled",)),
}

MODEL_IGNORED: dict[str, str] = {
    "adapter_name_or_path": _NO_EFFECT,
    "attn_implementation": _KERNELS,
    "flash_attn": _KERNELS,
    "disable_gradient_checkpointing": "recompute_granularity of strategy_config says it, as in ROLL's Megatron",
    "gradient_checkpointing_use_reentrant": "recompute_granularity of strategy_config says it",
    "device_map": "the layout says which rank holds what",
    "model_type": "the role says it",
    "autocast_adapter_dtype": "adapters are in the model's dtype, with master weights in fp32",
    "ulysses_size": "context_parallel_size and cp_comm_type of strategy_config say it",
}
MODEL_REFUSED: dict[str, Refused] = {
    "num_labels": Refused("a critic gives one value a token", off=(1,)),
    "model_config_kwargs": Refused("the model is what its config.json says", off=({},)),
    "freeze_module_prefix": Refused(_PICTURES),
}

TRAINING_IGNORED: dict[str, str] = {
    "output_dir": "the top level's output_dir is meant",
    "max_steps": "the schedule is as long as the updates of the run, as in ROLL",
    "num_train_epochs": "the top level's max_steps ends the run, as in ROLL",
    "seed": "the top level's seed is meant, as in ROLL",
    "data_seed": _NO_EFFECT,
    "dataloader_num_workers": _NO_EFFECT,
    "tf32": _NO_EFFECT,
    "save_hf_model": "a checkpoint is always a Hugging Face model",
    "logging_steps": "the top level's logging_steps is meant",
    "max_grad_norm": "the top level's max_grad_norm is meant",
}

DATA_IGNORED: dict[str, str] = {
    "dataset_dir": "file_name is taken from the working folder, as in ROLL",
    "interleave_probs": "domain_interleave_probs says it, as in ROLL",
    "eval_file_name": _NO_EFFECT,
    "max_samples": f"{_OLD}; dataset_filter.num_samples does it",
    "dataset_type": "a file's name says its form",
    "preprocessing_num_workers": "how rows are read changes no result",
}
DATA_REFUSED: dict[str, Refused] = {
    **dict.fromkeys(
        (
            *("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_total_pixels"),
            *("video_fps", "video_max_frames", "video_resize_chunk_frames", "image_folder", "video_folder"),
            "audio_folder",
        ),
        Refused(_PICTURES),
    ),
    "custom_data_kwargs_func": Refused(_PICTURES),
}

GENERATING_IGNORED: dict[str, str] = {
    "max_length": "sequence_length says it, as in ROLL",
    "length_penalty": "responses are sampled, not searched",
    "logprobs": "engines always return the log-probability of the sampled token",
    "include_stop_str_in_output": "a stop string stays in the response, as in ROLL",
}
GENERATING_REFUSED: dict[str, Refused] = {
    "num_beams": Refused(
        "responses are sampled, not searched", off=(1,), fix="write num_beams: 1 and num_return_sequences: N"
    ),
}

REWARD_IGNORED: dict[str, str] = {
    "response_filter_config": _NO_EFFECT,
}
REWARD_REFUSED: dict[str, Refused] = {
    "reward_manager_config": Refused("ROLL's plugins of rewards are not built", off=([],)),
}

_CHECKPOINT = "a checkpoint is written in the one form of this program"
_OF_MEGATRON = (
    *("masked_softmax_fusion", "bias_dropout_fusion", "moe_permute_fusion", "attention_softmax_in_fp32"),
    *("use_precision_aware_optimizer", "deterministic_mode", "batch_p2p_comm", "align_grad_reduce"),
    *("align_param_gather", "microbatch_group_size_per_vp_stage"),
)
STRATEGY_IGNORED: dict[str, str] = {
    **{key: table("swift").rows[key].ignored for key in _OF_MEGATRON},
    "variable_seq_lengths": _ROW,
    "calculate_per_token_loss": "loss_agg_mode says what a loss is divided by",
    "delay_grad_reduce": "when gradients are exchanged is decided by overlap_grad_reduce",
    "check_for_nan_in_loss_and_grad": "numbers that are not finite always end the run",
    "ddp_average_in_collective": "gradients are summed, and divided by counts of the global batch",
    "ddp_bucket_size": "it changes no result",
    "ckpt_format": _CHECKPOINT,
    "ckpt_d2h_non_blocking": _CHECKPOINT,
    "save_hf_model": "a checkpoint is always a Hugging Face model",
    "save_merged_model": "weights that engines get are always merged",
    "distrib_optim_fully_reshardable": _CHECKPOINT,
    "distrib_optim_fully_reshardable_mem_efficient": _CHECKPOINT,
    "sequence_packing": "use_sequence_packing of the role says it",
    "compile_warmup": _KERNELS,
    "use_batched_model_update": _OLD,
    "moe_enable_routing_replay": "router_replay of the role says it",
    "moe_router_force_load_balancing": _NO_EFFECT,
    "transformer_impl": _KERNELS,
    "cuda_graph_scope": _KERNELS,
}
_FP8 = "training in 8 bits is not built; bf16 is"
STRATEGY_REFUSED: dict[str, Refused] = {
    "overlap_param_gather": Refused(
        "a trainer leaves its device between turns, and with it what was gathered; ROLL refuses it, too", off=(False,)
    ),
    "cuda_graph_impl": Refused("CUDA graphs are not built"),
    "fp8": Refused(_FP8),
    "fp8_recipe": Refused(_FP8),
    "fp8_param": Refused(_FP8, off=(False,)),
    "mtp_num_layers": Refused("multi-token prediction is not built", off=(0,)),
    "moe_token_drop_policy": Refused("tokens are dropped by their probability", off=("probs",)),
}

# Of strategy_config of engines that the built-in one has no use for, so that a file can be tried without them.
ENGINE_KEYS = frozenset(
    (
        *("gpu_memory_utilization", "block_size", "max_model_len", "load_format", "sleep_level", "VLLM_USE_V1"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enforce_eager"),
        *("enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "disable_custom_all_reduce"),
        *("distributed_executor_backend", "cudagraph_capture_sizes", "cuda_graph_sizes", "optimization_level"),
        *("disable_log_stats", "disable_mm_preprocessor_cache", "mem_fraction_static", "enable_memory_saver"),
        *("log_level", "log_level_http", "grpc_mode", "py_executable", "dtype", "context_length"),
    )
)
FSDP = "of trainers there is Megatron-Core; its distributed optimizer shards what FSDP shards"
