"""LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter), and our own beside them."""

from __future__ import annotations

from megatune.config.dialects.dialect import Dialect, Refused

KEYS: dict[str, str] = {
    # run
    "stage": "run.stage",
    "do_train": "run.do_train",
    "output_dir": "run.output_dir",
    "overwrite_output_dir": "run.overwrite_output_dir",
    "resume_from_checkpoint": "run.resume_from_checkpoint",
    "seed": "run.seed",
    "num_processes": "run.num_processes",
    "ddp_timeout": "run.ddp_timeout",
    "check_agreement_interval": "run.check_agreement_interval",
    "memory_check": "run.memory_check",
    "run_name": "run.run_name",
    # model
    "model_name_or_path": "model.model_name_or_path",
    "trust_remote_code": "model.trust_remote_code",
    "finetuning_type": "model.finetuning_type",
    # data
    "dataset": "data.dataset",
    "dataset_dir": "data.dataset_dir",
    "eval_dataset": "data.eval_dataset",
    "template": "data.template",
    "cutoff_len": "data.cutoff_len",
    "packing": "data.packing",
    "neat_packing": "data.packing",
    "truncation_strategy": "data.truncation_strategy",
    "group_by_length": "data.group_by_length",
    "disable_shuffling": "data.disable_shuffling",
    "mix_strategy": "data.mix_strategy",
    "interleave_probs": "data.interleave_probs",
    "dataset_weights": "data.dataset_weights",
    "streaming": "data.streaming",
    "buffer_size": "data.buffer_size",
    "on_bad_row": "data.on_bad_row",
    "tokenized_path": "data.tokenized_path",
    "overwrite_cache": "data.overwrite_cache",
    "max_samples": "data.max_samples",
    "val_size": "data.val_size",
    "train_on_prompt": "data.train_on_prompt",
    "mask_history": "data.mask_history",
    "enable_thinking": "data.enable_thinking",
    "preserve_thinking": "data.preserve_thinking",
    "default_system": "data.default_system",
    "model_name": "data.model_name",
    "model_author": "data.model_author",
    "preprocessing_num_workers": "data.preprocessing_num_workers",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "dataloader_pin_memory": "data.dataloader_pin_memory",
    "remove_unused_columns": "data.remove_unused_columns",
    # batch
    "per_device_train_batch_size": "batch.per_device_train_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "per_device_eval_batch_size": "batch.per_device_eval_batch_size",
    # optimizer
    "optimizer": "optimizer.optimizer",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.lr_scheduler_type",
    "lr_scheduler_kwargs": "optimizer.lr_scheduler_kwargs",
    "warmup_ratio": "optimizer.warmup_ratio",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "adam_beta1": "optimizer.adam_beta1",
    "adam_beta2": "optimizer.adam_beta2",
    "adam_epsilon": "optimizer.adam_epsilon",
    "sgd_momentum": "optimizer.sgd_momentum",
    "exp_avg_dtype": "optimizer.exp_avg_dtype",
    "exp_avg_sq_dtype": "optimizer.exp_avg_sq_dtype",
    "optimizer_cpu_offload": "optimizer.optimizer_cpu_offload",
    "optimizer_offload_fraction": "optimizer.optimizer_offload_fraction",
    "num_train_epochs": "optimizer.num_train_epochs",
    "max_steps": "optimizer.max_steps",
    # precision
    "bf16": "precision.bf16",
    "fp16": "precision.fp16",
    "accumulate_allreduce_grads_in_fp32": "precision.accumulate_allreduce_grads_in_fp32",
    # parallel
    "tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_model_parallel_size",
    "sequence_parallel": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.use_distributed_optimizer",
    "overlap_grad_reduce": "parallel.overlap_grad_reduce",
    "overlap_param_gather": "parallel.overlap_param_gather",
    "overlap_p2p_comm": "parallel.overlap_p2p_comm",
    "context_parallel_size": "parallel.context_parallel_size",
    "cp_comm_type": "parallel.cp_comm_type",
    "expert_model_parallel_size": "parallel.expert_model_parallel_size",
    "expert_tensor_parallel_size": "parallel.expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers": "parallel.decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers": "parallel.decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split": "parallel.account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "parallel.account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout": "parallel.pipeline_model_parallel_layout",
    # experts
    "moe_token_dispatcher_type": "experts.moe_token_dispatcher_type",
    "moe_grouped_gemm": "experts.moe_grouped_gemm",
    "moe_router_load_balancing_type": "experts.moe_router_load_balancing_type",
    "moe_aux_loss_coeff": "experts.moe_aux_loss_coeff",
    "moe_z_loss_coeff": "experts.moe_z_loss_coeff",
    "moe_router_dtype": "experts.moe_router_dtype",
    "moe_router_topk": "experts.moe_router_topk",
    "moe_router_pre_softmax": "experts.moe_router_pre_softmax",
    "moe_router_bias_update_rate": "experts.moe_router_bias_update_rate",
    "moe_expert_capacity_factor": "experts.moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity": "experts.moe_pad_expert_input_to_capacity",
    "moe_shared_expert_overlap": "experts.moe_shared_expert_overlap",
    # recompute
    "recompute_granularity": "recompute.recompute_granularity",
    "recompute_method": "recompute.recompute_method",
    "recompute_num_layers": "recompute.recompute_num_layers",
    "recompute_modules": "recompute.recompute_modules",
    "moe_layer_recompute": "recompute.moe_layer_recompute",
    # performance
    "attention_backend": "performance.attention_backend",
    "bias_activation_fusion": "performance.bias_activation_fusion",
    "apply_rope_fusion": "performance.apply_rope_fusion",
    "cross_entropy_loss_fusion": "performance.cross_entropy_loss_fusion",
    "rms_norm_fusion": "performance.rms_norm_fusion",
    "gradient_accumulation_fusion": "performance.gradient_accumulation_fusion",
    "manual_gc": "performance.manual_gc",
    "manual_gc_interval": "performance.manual_gc_interval",
    # logging
    "logging_steps": "logging.logging_steps",
    "report_to": "logging.report_to",
    "plot_loss": "logging.plot_loss",
    "profile": "logging.profile",
    "profile_step_start": "logging.profile_step_start",
    "profile_step_end": "logging.profile_step_end",
    "profile_ranks": "logging.profile_ranks",
    # checkpoint
    "save_strategy": "checkpoint.save_strategy",
    "save_steps": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.save_total_limit",
    "save_only_model": "checkpoint.save_only_model",
    "save_hf_model": "checkpoint.save_hf_model",
    # evaluation
    "eval_strategy": "evaluation.eval_strategy",
    "evaluation_strategy": "evaluation.eval_strategy",
    "eval_steps": "evaluation.eval_steps",
    "load_best_model_at_end": "evaluation.load_best_model_at_end",
}

_VISION = "vision-language models are not built yet; only text is read"
_LORA = "LoRA is not built yet"
_TOKEN_MEAN = (
    "the loss is always divided by the global number of trained tokens, once; any other mean weighs tokens unequally"
)

NOT_BUILT: dict[str, Refused] = {
    # Values of keys that are built.
    "do_train": Refused("training is what this command does", values=(False,), off=(True,)),
    "finetuning_type": Refused(
        "only full fine-tuning is built; LoRA and freezing are not yet",
        values=("lora", "freeze"),
        fix="write finetuning_type: full",
    ),
    "trust_remote_code": Refused(
        "the supported model families need no code from a checkpoint's repository, so none is ever run",
        values=(True,),
        off=(False,),
    ),
    "report_to": Refused(
        "only TensorBoard is built; metrics.jsonl holds the same numbers for other tools",
        values=("wandb", "swanlab", "mlflow", "all"),
        fix="write report_to: tensorboard, or report_to: none",
    ),
    "save_hf_model": Refused(
        "a checkpoint is always a Hugging Face model as it is; there is no other form to save",
        values=(False,),
        off=(True,),
    ),
    # Data.
    "preprocessing_batch_size": Refused(
        "how many rows are tokenised together changes no result here, and is chosen by the program", off=(1000,)
    ),
    # Vision.
    "image_max_pixels": Refused(_VISION),
    "image_min_pixels": Refused(_VISION),
    "video_max_pixels": Refused(_VISION),
    "video_min_pixels": Refused(_VISION),
    "video_fps": Refused(_VISION),
    "video_maxlen": Refused(_VISION),
    "media_dir": Refused(_VISION),
    "freeze_vision_tower": Refused(_VISION),
    "freeze_multi_modal_projector": Refused(_VISION),
    "freeze_language_model": Refused(_VISION, off=(False,)),
    # Megatron.
    "calculate_per_token_loss": Refused(_TOKEN_MEAN, off=(True,)),
    "transformer_impl": Refused(
        "the engine's own layers are used, on every machine; Transformer Engine is not needed", off=("local",)
    ),
    "use_mca": Refused("Megatron-Core is the only engine here", off=(True,)),
    "ddp_find_unused_parameters": Refused(
        "Megatron-Core's data parallelism expects a gradient for every parameter, and every parameter gets one",
        off=(False,),
    ),
    # Common in LLaMA-Factory's files, though not of its Megatron path.
    "adapter_name_or_path": Refused(_LORA),
    "lora_rank": Refused(_LORA),
    "lora_alpha": Refused(_LORA),
    "lora_dropout": Refused(_LORA),
    "lora_target": Refused(_LORA),
    "deepspeed": Refused("Megatron-Core shards the optimizer itself: see use_distributed_optimizer"),
    "fsdp": Refused("Megatron-Core shards the optimizer itself: see use_distributed_optimizer"),
    "flash_attn": Refused(
        "the key `attention_backend` chooses the kernel", off=("auto", "sdpa"), fix="write attention_backend: auto"
    ),
    "gradient_checkpointing": Refused(
        "Megatron-Core's keys say what is recomputed", off=(False,), fix="write recompute_granularity: full"
    ),
    "optim": Refused(
        "the key `optimizer` chooses the optimizer: adam (AdamW) or sgd",
        off=("adamw_torch", "adamw_torch_fused"),
        fix="write optimizer: adam or optimizer: sgd",
    ),
}

LLAMAFACTORY = Dialect(name="LLaMA-Factory", keys=KEYS, not_built=NOT_BUILT)
