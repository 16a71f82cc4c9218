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
    "logging_steps": 5,
}
DEFAULTS: dict[int, dict[str, Any]] = {
    3: {**_OF_BOTH, "split_dataset_ratio": 0.01, "eval_iters": 100},
    4: {**_OF_BOTH, "split_dataset_ratio": 0.0, "eval_iters": -1},
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
            *("no_rope_fusion", "no_bias_swiglu_fusion", "no_initialization", "distributed_timeout_minutes"),
            *("save_retain_interval", "num_layers_per_virtual_pipeline_stage", "deterministic_mode", "seq_length"),
            *("use_flash_attn", "dataloader_type", "ckpt_format", "auto_detect_ckpt_format", "load_safetensors"),
            *("exit_on_missing_checkpoint", "transformer_impl", "no_create_attention_mask_in_dataloader"),
            *("tensorboard_log_interval", "no_log_learning_rate_to_tensorboard", "wandb_save_dir", "logging_level"),
            *("log_params_norm", "log_throughput", "log_timers_to_tensorboard", "log_memory_to_tensorboard"),
            *("log_validation_ppl_to_tensorboard", "num_layers", "hidden_size", "ffn_hidden_size", "num_experts"),
            *("num_attention_heads", "num_query_groups", "max_position_embeddings", "rotary_base", "kv_channels"),
        ),
        "",
    ),
}
