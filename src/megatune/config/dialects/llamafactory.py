"""LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter), and our own beside them."""

from __future__ import annotations

from megatune.config.dialects.dialect import Dialect, Refused

# Beside the names of our settings, which are LLaMA-Factory's where it has them.
KEYS = {
    "packing": "data.packing",
    "neat_packing": "data.packing",
    "eval_strategy": "evaluation.eval_strategy",
    "evaluation_strategy": "evaluation.eval_strategy",
    "run_name": "run.run_name",
    "swanlab_run_name": "run.run_name",
}

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
_KERNELS = "the engine's own layers are used, whose kernels the keys of Megatron-Core choose"

NOT_BUILT: dict[str, Refused] = {
    # Values of keys that are built.
    "do_train": Refused("training is what this command does", values=(False,), off=(True,)),
    "save_hf_model": Refused(
        "a checkpoint is always a Hugging Face model as it is; there is no other form to save",
        values=(False,),
        off=(True,),
    ),
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
    "swanlab_logdir": Refused(
        "SwanLab's files are in output_dir/swanlog", fix="set SWANLAB_LOG_DIR for another folder"
    ),
    **{name: Refused(_LARK) for name in ("swanlab_lark_webhook_url", "swanlab_lark_secret")},
    # Data.
    "preprocessing_batch_size": Refused(
        "how many rows are tokenised together changes no result here, and is chosen by the program", off=(1000,)
    ),
    "image_do_pan_and_scan": Refused("it belongs to Gemma 3, which is not built", off=(False,)),
    "crop_to_patches": Refused("it belongs to InternVL, which is not built", off=(False,)),
    "use_audio_in_video": Refused("training on audio is not built", off=(False,)),
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
        values=("gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4", "fp8"),
        fix="write quantization_method: bnb",
    ),
    "quantization_device_map": Refused("the layout says which rank holds what of the base"),
    # Other ways to save memory.
    **{
        f"use_{name}": Refused(_OPTIMIZERS, off=(False,)) for name in ("galore", "apollo", "badam", "adam_mini", "muon")
    },
    **{name: Refused(_KERNELS, off=(False,)) for name in ("use_unsloth", "use_unsloth_gc", "enable_liger_kernel")},
    # Common in LLaMA-Factory's files, though not of its Megatron path.
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
