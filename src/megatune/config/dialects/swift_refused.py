"""Megatron-SWIFT's flags, and values of them, that are refused by name. `off` begins with the default there."""

from __future__ import annotations

from megatune.config.dialects.dialect import Refused
from megatune.config.dialects.llamafactory_refused import NOT_BUILT
from megatune.config.dialects.swift_rollouts import DEFAULTS, WITHOUT_DEFAULT

_FP8 = "training in 8 or 4 bits is not built; bf16 is"
_MUON = "of optimizers there are adam (AdamW) and sgd"
_MTP = "multi-token prediction is not built"
_PLUGINS = "code from outside is not run"
_KERNEL = "no kernel of that kind is built"
_DECAY = "the weight decay is the same at every step"
_HEAD = "of heads there are a language model's and, in `rlhf --rlhf_type rm`, a reward model's"
_FSDP = "the distributed optimizer shards what can be sharded here"
_OVERLAP = "it overlaps inside kernels of Transformer Engine, which is not used"
_FREEZE = "tensors are frozen by the parts of a model: freeze_llm, freeze_vit, freeze_aligner"
_CACHED = "rows are cached by themselves: `tokenized_path` names a folder for them"
_BEST = "no checkpoint is chosen by a metric; save_total_limit keeps the newest"
_RANDOM = "a run begins with the weights of a model; `megatune demo-model` makes one with random weights"
_PAGES = "it belongs to models that are not built"
_ADAPTER = "adapters are read in the form that peft saves"
_ROLLOUTS = "it belongs to grpo and gkd, which are no preference stages; `rlhf` has dpo, kto and rm"

REFUSED: dict[str, Refused] = {
    # Of files, and of scripts made from them.
    **{name: NOT_BUILT[name] for name in ("do_train", "save_hf_model", "quantization_method")},
    # Values of flags that are built.
    "optimizer": Refused(_MUON, values=("muon", "dist_muon"), fix="write --optimizer adam"),
    "exp_avg_dtype": Refused(_FP8, values=("fp16", "fp8"), fix="write --exp_avg_dtype bf16"),
    "exp_avg_sq_dtype": Refused(_FP8, values=("fp16", "fp8"), fix="write --exp_avg_sq_dtype bf16"),
    "moe_token_dispatcher_type": Refused(
        "it needs DeepEP's kernels", values=("flex",), fix="write --moe_token_dispatcher_type alltoall"
    ),
    "tuner_type": Refused(
        "adapters are on the language model, and everything else is frozen beside them",
        values=("lora_llm",),
        fix="write --tuner_type lora",
    ),
    "rlhf_type": Refused(
        "it is reinforcement learning or distillation, not a preference stage",
        values=("grpo", "gkd"),
        fix="write --rlhf_type dpo, kto or rm",
    ),
    # Training.
    "cross_entropy_fusion_impl": Refused(_KERNEL, off=("native",)),
    "optimizer_cuda_graph": Refused(_KERNEL, off=(False,)),
    "main_params_dtype": Refused("the optimizer's copy of the weights is fp32", off=("fp32",)),
    "data_parallel_random_init": Refused(_RANDOM, off=(False,)),
    "use_cpu_initialization": Refused(_RANDOM, off=(False,)),
    "perform_initialization": Refused(_RANDOM, off=(False,)),
    "no_initialization": Refused(_RANDOM, off=(True,)),
    "data_sharding": Refused("the order of rows is the same in every layout", off=(False,)),
    "lr_warmup_init": Refused("the warm-up begins at 0", off=(0.0,)),
    "weight_decay_incr_style": Refused(_DECAY, off=("constant",)),
    "start_weight_decay": Refused(_DECAY, fix="write --weight_decay"),
    "end_weight_decay": Refused(_DECAY, fix="write --weight_decay"),
    "muon_momentum": Refused(_MUON, off=(0.9,)),
    "muon_split_qkv": Refused(_MUON, off=(True,)),
    "muon_use_nesterov": Refused(_MUON, off=(False,)),
    "muon_scale_mode": Refused(_MUON, off=("spectral",)),
    "muon_fp32_matmul_prec": Refused(_MUON, off=("medium",)),
    "muon_coefficient_type": Refused(_MUON, off=("quintic",)),
    "muon_num_ns_steps": Refused(_MUON, off=(5,)),
    "muon_tp_mode": Refused(_MUON, off=("blockwise",)),
    "muon_extra_scale_factor": Refused(_MUON, off=(1.0,)),
    "muon_scalar_optimizer": Refused(_MUON, off=("adam",)),
    "apply_query_key_layer_scaling": Refused("attention is computed in fp32 inside, and needs none", off=(False,)),
    "apply_wd_to_qk_layernorm": Refused(_PAGES, off=(False,)),
    "attention_dropout": Refused("the attention of these models has none", off=(0.0,)),
    "hidden_dropout": Refused("the layers of these models have none", off=(0.0,)),
    "fp8_format": Refused(_FP8),
    "fp8_recipe": Refused(_FP8, off=("delayed",)),
    "fp8_param_gather": Refused(_FP8, off=(False,)),
    "fp8_amax_history_len": Refused(_FP8, off=(1024,)),
    "fp8_amax_compute_algo": Refused(_FP8, off=("max",)),
    "fp4_format": Refused(_FP8),
    "fp4_recipe": Refused(_FP8, off=("nvfp4",)),
    "fp4_param_gather": Refused(_FP8, off=(False,)),
    # Models and checkpoints.
    "rope_scaling": Refused("config.json of the model says how its rotary embeddings are scaled"),
    "megatron_extra_kwargs": Refused("every setting of Megatron-Core that is built has a flag"),
    "extra_megatron_kwargs": Refused("every setting of Megatron-Core that is built has a flag"),
    "model_kwargs": Refused("of its keys those are read that bound pictures: max_pixels, fps and their like"),
    "save_retain_interval": Refused(
        "version 3 keeps every so many steps with it, and save_total_limit the newest", fix="write --save_total_limit 2"
    ),
    "metric_for_best_model": Refused(_BEST, off=("loss",)),
    "mcore_adapter": Refused(_ADAPTER, fix="write --adapters with a folder that has adapter_config.json"),
    "adapter_load": Refused(_ADAPTER, fix="write --adapters with a folder that has adapter_config.json"),
    "mcore_ref_model": Refused("a reference is a Hugging Face model", fix="write --ref_model FOLDER"),
    "ref_load": Refused("a reference is a Hugging Face model", fix="write --ref_model FOLDER"),
    "mcore_ref_adapter": Refused(_ADAPTER, fix="write --ref_adapters FOLDER"),
    "ref_adapter_load": Refused(_ADAPTER, fix="write --ref_adapters FOLDER"),
    # Distribution.
    "use_megatron_fsdp": Refused(_FSDP, off=(False,), fix="write --use_distributed_optimizer"),
    "data_parallel_sharding_strategy": Refused(_FSDP, off=("optim_grads_params", "no_shard")),
    "tp_comm_overlap": Refused(_OVERLAP, off=(False,)),
    "overlap_param_gather_with_optimizer_step": Refused("the gather overlaps with the next step", off=(False,)),
    "cp_partition_mode": Refused("every context-parallel rank has two parts, so that all work alike", off=("zigzag",)),
    "sequence_packing_scheduler": Refused("packed rows are of one length, so ranks have alike to do"),
    "moe_enable_deepep": Refused("it needs DeepEP's kernels", off=(False,)),
    "moe_token_drop_policy": Refused("tokens beyond an expert's capacity are dropped by probability", off=("probs",)),
    "mtp_num_layers": Refused(_MTP),
    "mtp_loss_scaling_factor": Refused(_MTP, off=(0.1,)),
    "mtp_decoder_input_detach": Refused(_MTP, off=(False,)),
    "mtp_shared_weights": Refused(_MTP, off=(False,)),
    "dsa_indexer_loss_coeff": Refused(_PAGES, off=(0.0,)),
    "dsa_indexer_use_sparse_loss": Refused(_PAGES, off=(False,)),
    "apply_dsa_kernel_fusion": Refused(_PAGES, off=(False,)),
    "csa_dense_mode": Refused(_PAGES, off=(False,)),
    "use_fused_mhc": Refused(_PAGES, off=(False,)),
    "mhc_recompute_layer_num": Refused(_PAGES),
    "linear_decoupled_in_proj": Refused(_PAGES, off=(False,)),
    # What is trained.
    "freeze_parameters": Refused(_FREEZE),
    "freeze_parameters_regex": Refused(_FREEZE),
    "freeze_parameters_ratio": Refused(_FREEZE, off=(0.0,)),
    "trainable_parameters": Refused(_FREEZE),
    "trainable_parameters_regex": Refused(_FREEZE),
    "target_regex": Refused("modules are named", fix="write --target_modules with names: q_proj v_proj"),
    "lora_bias": Refused("adapters have no biases", off=("none",)),
    "lora_dtype": Refused("adapters are fp32 in the optimizer, and saved so", off=("float32",)),
    "enable_dft_loss": Refused("the loss of a token is its cross-entropy", off=(False,)),
    "enable_channel_loss": Refused("one loss is logged", off=(False,)),
    "task_type": Refused(_HEAD, off=("causal_lm",)),
    "num_labels": Refused(_HEAD, off=(1,)),
    "problem_type": Refused(_HEAD),
    "mrl_dims": Refused(_HEAD),
    # Data.
    "custom_dataset_info": Refused("data sets are registered in dataset_info.json", fix="name the file in --dataset"),
    "download_mode": Refused("what was fetched of a hub is not fetched again", off=("reuse_dataset_if_exists",)),
    "cached_dataset": Refused(_CACHED),
    "cached_val_dataset": Refused(_CACHED),
    "packing_length": Refused("a packed row is as long as max_length", fix="write --max_length"),
    "packing_strategy": Refused("rows are filled by their lengths", off=("binpack",)),
    "norm_bbox": Refused("boxes in texts are left as they are"),
    "max_model_len": Refused("config.json of the model says it", fix="write --max_length"),
    "init_strategy": Refused(_RANDOM),
    "local_repo_path": Refused(_PLUGINS),
    "is_binary_loss_scale": Refused("answers are trained, and what is not answered is not"),
    "disable_auto_column_mapping": Refused("--columns says what columns are called", off=(False,)),
    "sequence_parallel_size": Refused("it is of Transformers' training", off=(1,), fix="write --context_parallel_size"),
    "tuner_backend": Refused("adapters are in peft's form", off=("peft",)),
    "load_data_args": Refused("data sets are named on the command line", off=(False,)),
    "new_special_tokens": Refused("a model keeps its vocabulary"),
    "external_plugins": Refused(_PLUGINS),
    "custom_register_path": Refused(_PLUGINS),
    "callbacks": Refused(_PLUGINS),
    # Preferences.
    "reference_free": Refused("a loss without a reference is chosen by name: orpo, simpo, cpo", off=(False,)),
    "f_divergence_type": Refused("the link of the losses is the reverse KL divergence", off=("reverse_kl",)),
    **{name: Refused(_ROLLOUTS) for name in WITHOUT_DEFAULT},
    **{name: Refused(_ROLLOUTS, off=(default,)) for name, default in DEFAULTS.items()},
}
