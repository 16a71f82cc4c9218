"""Megatron-SWIFT's flags that are settings here: the names of version 4, and behind them those of version 3."""

from __future__ import annotations

from megatune.config.dialects.dialect import Chooses, GlobalBatchSize, Meaning, Sets, negated

_BATCH = Sets(("batch.per_device_train_batch_size", "batch.per_device_eval_batch_size"))
_MERGERS = ("finetuning.freeze_multi_modal_projector", "finetuning.freeze_deepstack_mergers")
_DTYPES = {
    "bfloat16": {"precision.bf16": True},
    "float16": {"precision.fp16": True},
    "float32": {"precision.fp16": True},
}

# Those that have the names of settings here, and their values.
SAME = (
    *("seed", "output_dir", "model_revision", "streaming", "group_by_length", "packing"),
    *("recompute_method", "recompute_num_layers", "recompute_modules", "moe_layer_recompute"),
    *("cross_entropy_loss_fusion", "bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"),
    *("optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("manual_gc", "weight_decay", "adam_beta1", "adam_beta2", "sgd_momentum", "fp16", "bf16", "ddp_timeout"),
    *("attention_backend", "accumulate_allreduce_grads_in_fp32", "num_train_epochs", "enable_thinking"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "sequence_parallel"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
    *("moe_shared_expert_overlap", "lora_rank", "lora_alpha"),
    *("lora_dropout", "use_rslora", "merge_lora", "center_rewards_coefficient", "save_steps", "save_strategy"),
    *("save_total_limit", "logging_steps", "eval_steps", "report_to", "dataset", "model_name", "model_author"),
    *("dataloader_num_workers", "dataloader_pin_memory", "ref_model"),
    *(
        "preserve_thinking",
        "template",
        "agent_template",
        "conversation_rules",
        "answer_masks",
        "columns",
        "dataset_shuffle",
        "mcore_model",
        "async_save",
    ),
    *("tensorboard_dir", "wandb_project", "wandb_save_dir", "swanlab_project", "swanlab_workspace", "swanlab_mode"),
    *("log_throughput", "log_params_norm", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_token"),
)

# The first of several for one setting is the one that messages name.
KEYS: dict[str, Meaning] = {
    # Training.
    "micro_batch_size": _BATCH,
    "global_batch_size": GlobalBatchSize(),
    "recompute_granularity": Sets(("recompute.recompute_granularity",), values={"none": None}),
    "train_iters": "optimizer.max_steps",
    "max_epochs": "optimizer.num_train_epochs",
    "main_grads_dtype": Sets(("precision.accumulate_allreduce_grads_in_fp32",), values={"fp32": True, "bf16": False}),
    "manual_gc_steps": "performance.manual_gc_interval",
    "manual_gc_interval": "performance.manual_gc_interval",
    "no_bias_swiglu_fusion": negated("performance.bias_activation_fusion"),
    "no_rope_fusion": negated("performance.apply_rope_fusion"),
    "no_gradient_accumulation_fusion": negated("performance.gradient_accumulation_fusion"),
    # Learning rate, regularisation.
    "lr": "optimizer.learning_rate",
    "lr_decay_style": Sets(
        ("optimizer.lr_scheduler_type",),
        values={"inverse-square-root": "inverse_sqrt", "WSD": "warmup_stable_decay"},
    ),
    "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_warmup_fraction": "optimizer.warmup_ratio",
    "clip_grad": "optimizer.max_grad_norm",
    "adam_eps": "optimizer.adam_epsilon",
    # Model and checkpoints.
    "model": "model.model_name_or_path",
    "load": "model.model_name_or_path",
    "save": "run.output_dir",
    "save_interval": "checkpoint.save_steps",
    "no_save_optim": "checkpoint.save_only_model",
    "torch_dtype": Chooses(_DTYPES),
    "wandb_exp_name": "run.run_name",
    "swanlab_exp_name": "run.run_name",
    # Distribution.
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline_model_parallel_size",
    "distributed_timeout_minutes": Sets(("run.ddp_timeout",), factor=60),
    "moe_router_dtype": Sets(("experts.moe_router_dtype",), values={"none": None}),
    # What is trained.
    "tuner_type": "finetuning.finetuning_type",
    "train_type": "finetuning.finetuning_type",
    "freeze_llm": "finetuning.freeze_language_model",
    "freeze_vit": "finetuning.freeze_vision_tower",
    "freeze_aligner": Sets(_MERGERS),
    "vit_lr": "optimizer.vision_lr",
    "aligner_lr": "optimizer.merger_lr",
    "target_modules": "finetuning.lora_target",
    "modules_to_save": "finetuning.additional_target",
    "adapters": "finetuning.adapter_name_or_path",
    # Preferences.
    "rlhf_type": "run.stage",
    "beta": "preference.pref_beta",
    "rpo_alpha": "preference.pref_ftx",
    "label_smoothing": "preference.dpo_label_smoothing",
    "desirable_weight": "preference.kto_chosen_weight",
    "undesirable_weight": "preference.kto_rejected_weight",
    "ref_adapters": "preference.ref_model_adapters",
    # Data.
    "val_dataset": "data.eval_dataset",
    "split_dataset_ratio": "data.val_size",
    "max_length": "data.cutoff_len",
    "seq_length": "data.cutoff_len",
    "max_pixels": "data.image_scale_pixels",
    "system": "data.default_system",
    "dataset_num_proc": "data.preprocessing_num_workers",
    "load_from_cache_file": negated("data.overwrite_cache"),
    "shuffle_buffer_size": "data.buffer_size",
    "interleave_prob": "data.interleave_probs",
    "stopping_strategy": Sets(
        ("data.mix_strategy",), values={"first_exhausted": "interleave_under", "all_exhausted": "interleave_over"}
    ),
    "strict": Sets(("data.on_bad_row",), values={"true": "error", "false": "skip"}),
    "num_workers": "data.dataloader_num_workers",
    "truncation_strategy": Sets(("data.truncation_strategy",), values={"delete": "drop"}),
    "add_non_thinking_prefix": "data.add_empty_thought",
    "loss_scale": Chooses(
        {
            "default": {"data.mask_history": False, "data.train_on_prompt": False},
            "last_round": {"data.mask_history": True, "data.train_on_prompt": False},
            "all": {"data.mask_history": False, "data.train_on_prompt": True},
        }
    ),
    # Logging, evaluation.
    "log_interval": "logging.logging_steps",
    "eval_interval": "evaluation.eval_steps",
    "log_timers_to_tensorboard": "logging.log_timers",
    "log_memory_to_tensorboard": "logging.log_memory",
    "log_validation_ppl_to_tensorboard": "logging.log_validation_ppl",
}
