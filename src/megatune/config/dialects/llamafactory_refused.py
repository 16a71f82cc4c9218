"""LLaMA-Factory's keys, or values of them, that are not done here: each with the reason and what to do instead."""

from __future__ import annotations

from megatune.config.dialects.dialect import Refused

_TOKEN_MEAN = (
    "the loss is always divided by the global number of trained tokens, once; any other mean weighs tokens unequally"
)
_EXPORT = "a run saves what it trained in output_dir; the verb `megatune export` writes merged models"
_GPTQ = "models are written in the dtype that they are trained in, and not quantized"
_PISSA = "adapters start at zero beside the model as it is, and PiSSA changes the model itself"
_OFT = "of adapters LoRA is built, with its variants rsLoRA, LoRA+ and DoRA"
_OPTIMIZERS = "the key `optimizer` chooses the optimizer, of which there are adam (AdamW) and sgd"
_NO_PPO = "PPO is not built; stage dpo trains on pairs of answers, stage rm a reward model on them"
_LARK = "nobody is notified of a run; SwanLab's own page can"
_AUDIO = "training on audio is not built"
_VOCABULARY = "a checkpoint keeps the vocabulary that it has: rows are not added to its embeddings"
_LOSSES = "the loss of stage sft is the cross-entropy of trained tokens; others are not built"
_ANSWERING = "a run trains, and does not write answers while it evaluates"
_METRICS = "evaluation computes the loss and the perplexity, and no other metric"
_FP8 = "fp8 is not built"
_ATTENTION = "the model is trained as its config.json describes it"
_ENGINE = "Megatron-Core is the only engine here"
_KEYS = "its keys are settings of their own"
_CPU = "a run takes the GPUs that it sees"
_V1 = "it is a key of LLaMA-Factory's version 1, whose files have other names"
_V1_TOO = "LLaMA-Factory's version 1 and Megatron-SWIFT call it so"
_ACCELERATE = "it is a key of Accelerate, which takes no part"

_INFER = "megatune infer MODEL --val_dataset NAME writes the answers of a trained model"
_ENCODED = "take a checkpoint whose vocabulary has the tokens"

NOT_BUILT: dict[str, Refused] = {
    # Values of keys that are built.
    "do_train": Refused("training is what this command does", off=(True,)),
    "save_hf_model": Refused(
        "a checkpoint is always a Hugging Face model as it is; there is no other form to save", off=(True,)
    ),
    **{
        f"moe_router_{name}": Refused("config.json of the model says it, and what comes out is run with that")
        for name in ("topk", "pre_softmax")
    },
    "stage": Refused(
        "preference training and reward models are built; PPO is not",
        values=("ppo",),
        fix="write stage: dpo; PPO's place is `megatune rl`",
    ),
    "hub_strategy": Refused(
        "the training state is not pushed: it is large, and of use where the run is",
        values=("checkpoint", "all_checkpoints"),
        fix="write hub_strategy: every_save",
    ),
    "finetuning_type": Refused(_OFT, values=("oft",), fix="write finetuning_type: lora"),
    "swanlab_logdir": Refused(
        "SwanLab's files are in output_dir/swanlog", fix="set SWANLAB_LOG_DIR for another folder"
    ),
    **{name: Refused(_LARK) for name in ("swanlab_lark_webhook_url", "swanlab_lark_secret")},
    # The model.
    **{
        name: Refused(_VOCABULARY, fix=_ENCODED)
        for name in ("add_tokens", "add_special_tokens", "new_special_tokens_config")
    },
    "resize_vocab": Refused(_VOCABULARY, off=(False,), fix=_ENCODED),
    "init_special_tokens": Refused(_VOCABULARY, off=("noise_init",)),
    "split_special_tokens": Refused("special tokens in a text are what they say", off=(False,)),
    "rope_scaling": Refused(_ATTENTION, fix="write rope_parameters into config.json"),
    "shift_attn": Refused(_ATTENTION, off=(False,), fix="context_parallel_size trains long rows with exact attention"),
    "mixture_of_depths": Refused(_ATTENTION),
    "upcast_layernorm": Refused("all weights compute in one dtype, and fp32 masters learn", off=(False,)),
    "train_from_scratch": Refused(
        "weights are those of the checkpoint", off=(False,), fix="`megatune demo-model` makes a model of random weights"
    ),
    "moe_token_drop_policy": Refused("tokens beyond the capacity are dropped by probability", off=("probs",)),
    "moe_enable_routing_replay": Refused("routing is computed anew in every pass", off=(False,)),
    "mtp_num_layers": Refused("layers that predict further tokens are not trained", off=(0,)),
    "om_hub_token": Refused("reading from the hub of Openmind is not built"),
    "use_kt": Refused(
        "KTransformers is not used: experts compute where the model does",
        off=(False,),
        fix="write quantization_bit: 4 or optimizer_cpu_offload: true to train in less memory",
    ),
    # Data.
    "image_do_pan_and_scan": Refused("it belongs to Gemma 3, which is not built", off=(False,)),
    "crop_to_patches": Refused("it belongs to InternVL, which is not built", off=(False,)),
    "use_audio_in_video": Refused(_AUDIO, off=(False,)),
    "audio_sampling_rate": Refused(_AUDIO, off=(16000,)),
    "ignore_pad_token_for_loss": Refused("padding is never trained", off=(True,)),
    "data_seed": Refused("one number seeds the run", fix="write seed"),
    "dataloader_drop_last": Refused("every row of an epoch is trained: its last step may have fewer", off=(False,)),
    "ignore_data_skip": Refused("a resumed run goes on at the row where it stopped", off=(False,)),
    # What is learned.
    "calculate_per_token_loss": Refused(_TOKEN_MEAN, off=(True,)),
    "average_tokens_across_devices": Refused(_TOKEN_MEAN, off=(True,)),
    "label_smoothing_factor": Refused(_LOSSES, off=(0.0, 0)),
    "neftune_noise_alpha": Refused("no noise is added to embeddings"),
    **{name: Refused(_LOSSES, off=(False,)) for name in ("use_dft_loss", "use_asft_loss", "use_eaft_loss")},
    "pure_bf16": Refused(
        "masters of the weights are kept in fp32, without which small steps are lost",
        off=(False,),
        fix="write bf16: true; exp_avg_dtype and exp_avg_sq_dtype: bf16 save memory",
    ),
    "fp8": Refused(_FP8, off=(False,), fix="write bf16: true"),
    "fp8_recipe": Refused(_FP8, fix="write bf16: true"),
    "fp8_param": Refused(_FP8, off=(False,), fix="write bf16: true"),
    # Megatron.
    "use_hyper_parallel": Refused(_ENGINE, off=(False,)),
    "hyper_parallel_args": Refused(_ENGINE),
    "hyper_parallel_cp_size": Refused(_ENGINE, off=(1,), fix="write context_parallel_size"),
    "parallelism_config": Refused(_KEYS, fix="write tensor_model_parallel_size and its like"),
    "additional_configs": Refused(_KEYS, off=({},), fix="write them beside the others"),
    "extra_config": Refused(_KEYS, fix="write them beside the others"),
    **{
        name: Refused(_CPU, off=(False,), fix="write CUDA_VISIBLE_DEVICES= before the command")
        for name in ("use_cpu", "no_cuda", "use_mps_device")
    },
    "auto_find_batch_size": Refused(
        "what fits is known before the run", off=(False,), fix="`megatune plan FILE.yaml` says which batch fits"
    ),
    # Adapters.
    "pissa_init": Refused(_PISSA, off=(False,)),
    "pissa_iter": Refused(_PISSA, off=(16,)),
    "pissa_convert": Refused(_PISSA, off=(False,)),
    "oft_rank": Refused(_OFT, off=(0,)),
    "oft_block_size": Refused(_OFT, off=(32,)),
    "oft_target": Refused(_OFT, off=("all",)),
    "module_dropout": Refused(_OFT, off=(0.0, 0)),
    "adapter_folder": Refused("the key `adapter_name_or_path` takes whole paths"),
    **{name: Refused(_EXPORT) for name in ("export_dir", "export_size", "export_device", "export_hub_model_id")},
    "export_legacy_format": Refused(_EXPORT, off=(False,)),
    **{f"export_quantization_{name}": Refused(_GPTQ) for name in ("bit", "dataset", "nsamples", "maxlen")},
    # Preferences.
    "ref_model_quantization_bit": Refused(
        "a reference has the form of the model that is trained, and is loaded before it and only until its "
        "log-probabilities are computed"
    ),
    **{name: Refused(_NO_PPO) for name in ("reward_model", "reward_model_adapters", "reward_model_quantization_bit")},
    "reward_model_type": Refused(_NO_PPO, off=("lora",)),
    "ppo_buffer_size": Refused(_NO_PPO, off=(1,)),
    "ppo_epochs": Refused(_NO_PPO, off=(4,)),
    "ppo_score_norm": Refused(_NO_PPO, off=(False,)),
    "ppo_target": Refused(_NO_PPO, off=(6.0, 6)),
    "ppo_whiten_rewards": Refused(_NO_PPO, off=(False,)),
    # A base in few bits.
    "quantization_method": Refused(
        "a base is quantized on the fly as bitsandbytes does it; other ways need data to quantize by, or kernels that "
        "run on few devices",
        off=("bnb",),
        fix="write quantization_method: bnb",
    ),
    # Other optimizers.
    **{
        f"use_{name}": Refused(_OPTIMIZERS, off=(False,)) for name in ("galore", "apollo", "badam", "adam_mini", "muon")
    },
    "adafactor": Refused(_OPTIMIZERS, off=(False,)),
    "optim": Refused(
        "the key `optimizer` chooses the optimizer: adam (AdamW) or sgd",
        off=("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "sgd"),
        fix="write optimizer: adam or optimizer: sgd",
    ),
    **{name: Refused(_OPTIMIZERS) for name in ("optim_args", "optim_target_modules")},
    # Evaluation, logging, saving.
    **{name: Refused(_ANSWERING, off=(False,), fix=_INFER) for name in ("do_predict", "predict_with_generate")},
    **{name: Refused(_METRICS, off=(False,)) for name in ("compute_accuracy", "eval_on_each_dataset")},
    "metric_for_best_model": Refused("the best checkpoint has the lowest loss", off=("eval_loss", "loss")),
    "greater_is_better": Refused("the best checkpoint has the lowest loss", off=(False,)),
    "early_stopping_steps": Refused(
        "a run has the steps that it was given", fix="write load_best_model_at_end: true, which keeps the best model"
    ),
    "eval_delay": Refused("evaluation comes every eval_steps, from the first time on", off=(0, 0.0)),
    "eval_on_start": Refused("evaluation comes every eval_steps, behind them", off=(False,)),
    "profiler_output_dir": Refused("traces are in output_dir/profile"),
    "profile_modules": Refused("traces name every module", fix="write profile: true"),
    "save_safetensors": Refused("pickles are not written: weights are safetensors", off=(True,)),
    "hub_revision": Refused("what is pushed is the main revision"),
    "push_to_hub_model_id": Refused("a repository has one name", fix="write hub_model_id: OWNER/NAME"),
    "push_to_hub_organization": Refused("a repository has one name", fix="write hub_model_id: OWNER/NAME"),
    # Files of others that look like settings.
    "model": Refused(_V1_TOO, fix="write model_name_or_path"),
    "train_dataset": Refused(_V1, fix="write dataset, with the names of dataset_info.json"),
    "micro_batch_size": Refused(_V1_TOO, fix="write per_device_train_batch_size"),
    "cp_size": Refused(_V1, off=(1,), fix="write context_parallel_size"),
    "cp_mode": Refused(_V1, fix="write cp_comm_type: a2a, which is Ulysses"),
    "peft_config": Refused(_V1, fix="write finetuning_type, lora_rank, lora_alpha and lora_target"),
    "quant_config": Refused(_V1, fix="write quantization_bit: 4"),
    "dist_config": Refused(_V1, fix="write the sizes of the layout, such as tensor_model_parallel_size"),
    "optim_config": Refused(_V1, fix="write optimizer: adam or optimizer: sgd"),
    "batching_strategy": Refused(_V1, off=("normal",), fix="write packing: true"),
    **{name: Refused(_V1) for name in ("model_class", "kernel_config", "init_config", "sample_backend")},
    **{
        name: Refused(_ACCELERATE, fix="write the settings of the run: its layout is Megatron-Core's")
        for name in (
            "compute_environment",
            "distributed_type",
            "downcast_bf16",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "num_machines",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
        )
    },
    "tool_format": Refused(
        "calls of tools are written as the template does",
        fix="write template: FILE.yaml, a template of your own, with tools: qwen, llama3, mistral or plain in it",
    ),
}
