"""What Megatron-SWIFT trains with where a flag is absent, as far as it changes results and differs here.

Kernels, workers and timeouts stay as they are here: they change no result.
"""

from __future__ import annotations

from typing import Any

# By flag. Those of learning rate, adapters, length and precision depend on more: see swift_meaning.
_OF_BOTH: dict[str, Any] = {
    "tuner_type": "full",
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "truncation_strategy": "delete",
    "packing": False,
    "enable_thinking": None,
    "preserve_thinking": None,
    "logging_steps": 5,
}
DEFAULTS: dict[int, dict[str, Any]] = {
    3: {**_OF_BOTH, "conversation_rules": "ms_swift_3", "split_dataset_ratio": 0.01, "eval_iters": 100},
    4: {**_OF_BOTH, "conversation_rules": "ms_swift_4", "split_dataset_ratio": 0.0, "eval_iters": -1},
}

# Names of version 3 that version 4 does not accept, and what became of them: "" where nothing took their place.
VERSION_3: dict[str, str] = {
    "save": "output_dir",
    "save_interval": "save_steps",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "ref_load": "mcore_ref_model",
    "ref_adapter_load": "mcore_ref_adapter",
    "train_type": "tuner_type",
    "max_epochs": "num_train_epochs",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "num_workers": "dataloader_num_workers",
    "manual_gc_interval": "manual_gc_steps",
    "extra_megatron_kwargs": "megatron_extra_kwargs",
    "gradient_checkpointing_kwargs": "vit_gradient_checkpointing_kwargs",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "distributed_backend": "ddp_backend",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    **dict.fromkeys(
        (
            *("activation_func_clamp_value", "add_qkv_bias", "architectures", "attention_dropout"),
            *("auto_detect_ckpt_format", "ckpt_assume_constant_structure", "ckpt_format"),
            *("ckpt_fully_parallel_load", "dataloader_type", "deterministic_mode", "disable_bias_linear"),
            *("distributed_timeout_minutes", "exit_on_missing_checkpoint", "ffn_hidden_size"),
            *("glu_linear_offset", "group_query_attention", "hidden_dropout", "hidden_size"),
            *("initialize_embedding", "kv_channels", "kv_lora_rank", "layer_types", "linear_conv_kernel_dim"),
            *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
            *("llm_architectures", "load_safetensors", "log_memory_to_tensorboard", "log_params_norm"),
            *("log_throughput", "log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard"),
            *("logging_leval", "logging_level", "max_position_embeddings", "moe_apply_probs_on_input"),
            *("moe_ffn_hidden_size", "moe_layer_freq", "moe_router_bias_update_rate"),
            *("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_num_groups"),
            *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk"),
            *("moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "mrope_interleaved"),
            *("mrope_section", "multi_latent_attention", "no_bias_swiglu_fusion"),
            *("no_create_attention_mask_in_dataloader", "no_data_sharding", "no_initialization"),
            *("no_log_learning_rate_to_tensorboard", "no_rope_freq", "no_rope_fusion", "norm_epsilon"),
            *("normalization", "num_attention_heads", "num_experts", "num_layers"),
            *("num_layers_per_virtual_pipeline_stage", "num_query_groups", "original_max_position_embeddings"),
            *("padded_vocab_size", "partial_rotary_factor", "position_embedding_type", "q_lora_rank"),
            *("qk_head_dim", "qk_l2_norm", "qk_layernorm", "qk_pos_emb_head_dim", "quick_geglu", "rotary_base"),
            *("rotary_interleaved", "rotary_percent", "save_retain_interval", "seq_length", "softmax_type"),
            *("swiglu", "tensorboard_log_interval", "transformer_impl", "untie_embeddings_and_output_weights"),
            *("use_flash_attn", "use_shared_expert_gate", "wandb_save_dir", "window_attn_skip_freq"),
            "window_size",
        ),
        "",
    ),
}
