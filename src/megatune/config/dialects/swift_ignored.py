"""Megatron-SWIFT's flags that change nothing of what is trained: each with the type of its value, and why."""

from __future__ import annotations

_KERNELS = "a choice of kernels: the engine's own compute the same"
_EXCHANGE = "when and how ranks exchange changes no result, and the engine decides it"
_CACHE = "rows are tokenised once, and kept by their content"
_READING = "how rows are read ahead changes no result"
_CONFIG = "config.json of the model says it"
_ADDITION = "checkpoints of other forms are not written in this way"
_NO_VLM = "it says how a picture's encoder computes, not what"

IGNORED: dict[str, tuple[type, str]] = {
    "masked_softmax_fusion": (bool, _KERNELS),
    "bias_dropout_fusion": (bool, _KERNELS),
    "no_masked_softmax_fusion": (bool, _KERNELS),
    "no_bias_dropout_fusion": (bool, _KERNELS),
    "moe_permute_fusion": (bool, _KERNELS),
    "use_flash_attn": (bool, "attention_backend chooses the kernel of attention"),
    "transformer_impl": (str, _KERNELS),
    "attention_softmax_in_fp32": (bool, "it always is"),
    "use_precision_aware_optimizer": (bool, "exp_avg_dtype and exp_avg_sq_dtype say what it is for"),
    "manual_gc_eval": (bool, "garbage is collected by steps"),
    "deterministic_mode": (bool, "a run of one layout is always the same, bit for bit"),
    "te_rng_tracker": (bool, _KERNELS),
    "padding_free": (bool, "padding is never trained on, and takes no part in attention"),
    "mlp_padding_free": (bool, "padding is never trained on, and takes no part in attention"),
    "lazy_tokenize": (bool, _CACHE),
    "load_from_cache_file": (bool, _CACHE),
    "packing_num_proc": (int, _CACHE),
    "no_create_attention_mask_in_dataloader": (bool, "masks are made where they are needed"),
    "dataloader_type": (str, _READING),
    "dataloader_persistent_workers": (bool, _READING),
    "dataloader_prefetch_factor": (int, _READING),
    "val_dataset_shuffle": (bool, "the evaluation set is evaluated whole, in any order"),
    "local_rank": (int, "the launcher knows it"),
    "nccl_comm_warmup": (bool, _EXCHANGE),
    "align_grad_reduce": (bool, _EXCHANGE),
    "align_param_gather": (bool, _EXCHANGE),
    "batch_p2p_comm": (bool, _EXCHANGE),
    "microbatch_group_size_per_vp_stage": (int, _EXCHANGE),
    "microbatch_group_size_per_virtual_pipeline_stage": (int, _EXCHANGE),
    "max_shard_size": (str, "files of a checkpoint are as large as the writer makes them"),
    "no_save_rng": (bool, "random states are saved with the optimizer, and not without it"),
    "use_persistent_ckpt_worker": (bool, _ADDITION),
    "dist_ckpt_save_pre_mcore_014": (bool, _ADDITION),
    "dist_ckpt_optim_fully_reshardable": (bool, _ADDITION),
    "distrib_optim_fully_reshardable_mem_efficient": (bool, _ADDITION),
    "ckpt_fully_parallel_load": (bool, _ADDITION),
    "ckpt_assume_constant_structure": (bool, _ADDITION),
    "no_data_sharding": (bool, "the order of rows is the same in every layout"),
    "ckpt_format": (str, "a checkpoint is written in the one form of this program"),
    "auto_detect_ckpt_format": (bool, "what a folder holds is seen from its files"),
    "exit_on_missing_checkpoint": (bool, "a model that is not there always ends the run"),
    "load_safetensors": (bool, "what a folder holds is seen from its files"),
    "create_checkpoint_symlink": (bool, "checkpoints are named by their steps"),
    "save_missing_weights": (bool, "a checkpoint has the tensors of the model that it came from"),
    "check_model": (bool, "files are checked by their digests"),
    "load_args": (bool, "the model's config.json says what it is; every other setting is on the command line"),
    "model_type": (str, _CONFIG),
    "bridge_backend": (str, "the program has its own bridge"),
    "language_model_only": (bool, "without pictures in the data, the encoder of pictures is not run"),
    "greater_is_better": (bool, "no checkpoint is chosen by a metric"),
    "vit_gradient_checkpointing": (bool, _NO_VLM),
    "vit_gradient_checkpointing_kwargs": (dict, _NO_VLM),
    "gradient_checkpointing_kwargs": (dict, _NO_VLM),
    "vit_attn_impl": (str, _NO_VLM),
    "enable_npu_model_patch": (bool, _KERNELS),
    "attn_impl": (str, "attention_backend chooses the kernel of attention"),
    "experts_impl": (str, _KERNELS),
    "device_map": (str, "the layout says which rank holds what"),
    "max_memory": (dict, "the layout says which rank holds what"),
    "padding_side": (str, "padding is never trained on, and takes no part in attention"),
    "use_swift_lora": (bool, "adapters are in peft's form"),
    "response_prefix": (str, "it begins answers that are generated, and rows have theirs"),
    "template_backend": (str, "templates are ms-swift's own"),
    "ignore_args_error": (bool, "a flag that is not known always ends the run"),
    "tensorboard_queue_size": (int, "how often a log is flushed"),
    "tensorboard_log_interval": (int, "every line of the log is in TensorBoard"),
    "no_log_learning_rate_to_tensorboard": (bool, "the learning rate is always logged"),
    "logging_level": (str, "the console has one level"),
    "logging_leval": (str, "the console has one level"),
    # The shape of the model, version 3: config.json has it, and a different one would not fit its weights.
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("max_position_embeddings", "rotary_base", "kv_channels", "num_experts", "moe_ffn_hidden_size"),
            *("moe_shared_expert_intermediate_size", "padded_vocab_size", "original_max_position_embeddings"),
            *("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_conv_kernel_dim", "no_rope_freq", "moe_router_num_groups", "moe_router_group_topk"),
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"),
        ),
        (int, _CONFIG),
    ),
    **dict.fromkeys(
        (
            *("rotary_percent", "norm_epsilon", "partial_rotary_factor", "activation_func_clamp_value"),
            *("glu_linear_offset", "moe_router_topk_scaling_factor"),
        ),
        (float, _CONFIG),
    ),
    **dict.fromkeys(
        (
            *("position_embedding_type", "normalization", "architectures", "llm_architectures", "softmax_type"),
            *("window_size", "window_attn_skip_freq", "moe_layer_freq", "moe_router_score_function"),
        ),
        (str, _CONFIG),
    ),
    **dict.fromkeys(("layer_types", "mrope_section"), (list, _CONFIG)),
    **dict.fromkeys(
        (
            *("group_query_attention", "swiglu", "untie_embeddings_and_output_weights", "disable_bias_linear"),
            *("add_qkv_bias", "qk_layernorm", "initialize_embedding", "use_shared_expert_gate", "mrope_interleaved"),
            *("rotary_interleaved", "quick_geglu", "qk_l2_norm", "moe_apply_probs_on_input"),
            *("moe_router_enable_expert_bias", "multi_latent_attention"),
        ),
        (bool, _CONFIG),
    ),
}
