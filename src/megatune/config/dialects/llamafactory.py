"""LLaMA-Factory's keys, as its users write them for Megatron training (mcore_adapter), and our own beside them."""

from __future__ import annotations

from megatune.config.dialects.dialect import Chooses, Dialect, Meaning, PooledLoss
from megatune.config.dialects.llamafactory_accepted import ACCEPTED
from megatune.config.dialects.llamafactory_refused import NOT_BUILT

_OPTIMIZER, _RECOMPUTE = "optimizer.optimizer", "recompute.recompute_granularity"
_ADAM = {_OPTIMIZER: "adam"}

# Beside the names of our settings, which are LLaMA-Factory's where it has them.
_OTHERS: dict[str, Meaning] = {
    "neat_packing": "data.packing",
    "sequence_packing": "data.packing",
    "use_packed_sequences": "data.packing",
    "train_sampling_strategy": Chooses(
        {
            "random": {},
            "group_by_length": {"data.group_by_length": True},
            "sequential": {"data.disable_shuffling": True},
        }
    ),
    "per_gpu_train_batch_size": "batch.per_device_train_batch_size",
    "per_gpu_eval_batch_size": "batch.per_device_eval_batch_size",
    "optim": Chooses(
        {
            "adamw_torch": _ADAM,
            "adamw_torch_fused": _ADAM,
            "adamw_hf": _ADAM,
            "adamw_apex_fused": _ADAM,
            "sgd": {_OPTIMIZER: "sgd", "optimizer.sgd_momentum": 0.0},  # torch's own default
        }
    ),
    "mixed_precision": Chooses({"bf16_mixed": {"precision.bf16": True}, "fp16_mixed": {"precision.fp16": True}}),
    "gradient_checkpointing": Chooses({"true": {_RECOMPUTE: "full"}, "false": {_RECOMPUTE: None}}),
    "moe_aux_loss_coef": PooledLoss(),
    "megatron_pretrained_checkpoint": "model.mcore_model",
    "save_merged_model": "checkpoint.merge_lora",
    "hf_hub_token": "checkpoint.hub_token",
    "ms_hub_token": "checkpoint.hub_token",
    "push_to_hub_token": "checkpoint.hub_token",
    "evaluation_strategy": "evaluation.eval_strategy",
    "swanlab_run_name": "run.run_name",
    "logging_dir": "logging.tensorboard_dir",
    "enable_torch_profiler": "logging.profile",
}
_OWN = (path for each in _OTHERS.values() for path in ((each,) if isinstance(each, str) else each.paths))
# Messages name a setting by its own name: it comes first.
KEYS: dict[str, Meaning] = {**{path.partition(".")[2]: path for path in _OWN}, **_OTHERS}

LLAMAFACTORY = Dialect(name="LLaMA-Factory", keys=KEYS, not_built=NOT_BUILT, accepted=ACCEPTED)
