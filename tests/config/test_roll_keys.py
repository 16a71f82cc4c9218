"""ROLL's keys: none is unknown here, and every default that differs is listed."""

import json
from pathlib import Path
from typing import Any

from megatune.config.dialects.dialect import table
from megatune.config.rl.settings import rl_keys
from megatune.config.settings import all_settings, setting_paths

KEYS = {
    line[:80].strip(): json.loads(line[80:])
    for line in Path(__file__).with_name("roll_keys.txt").read_text(encoding="utf-8").splitlines()[1:]
}
CONFIG = "ROLE.strategy_args.strategy_config."
# Mappings whose keys are read one by one.
MAPPINGS = {"tracker_kwargs", "checkpoint_config", "rewards.DOMAIN.tag_included", f"{CONFIG}additional_configs"}
# Key -> its default there and here. null of sizes is 1, of lora_target no adapters, of freeze_module_prefix nothing
# frozen, and the others are applied where ROLL's files are read.
DIFFERENT = {
    "exp_name": ("(the name of the script)", "rlvr"),
    "track_with": ("tensorboard", ["tensorboard"]),
    "ROLE.model_args.dtype": ("bf16", False),
    "ROLE.model_args.freeze_module_prefix": (None, True),
    "ROLE.model_args.lora_target": (None, ["all"]),
    "ROLE.data_args.template": ("native", None),
    "ROLE.generating_args.max_new_tokens": (8192, None),
    **{
        f"{CONFIG}{size}_parallel_size": (None, 1)
        for size in ("tensor_model", "pipeline_model", "context", "expert_model")
    },
    f"{CONFIG}recompute_modules": (None, ["core_attn"]),
    f"{CONFIG}cross_entropy_loss_fusion": (False, True),
    f"{CONFIG}moe_token_dispatcher_type": ("allgather", "alltoall"),
    f"{CONFIG}moe_grouped_gemm": (None, True),
    f"{CONFIG}transformer_impl": (None, "native"),
    f"{CONFIG}accumulate_allreduce_grads_in_fp32": (False, True),
    f"{CONFIG}use_distributed_optimizer": (False, True),
    f"{CONFIG}optimizer_offload_fraction": (0.0, 1.0),
}


def ours(key: str) -> Any:
    """The default here, or ... of a key without a value or an effect."""
    row, name = table("roll").get(key), key.rpartition(".")[2]
    if key in rl_keys():
        return rl_keys()[key].default
    if row is not None and not row.paths:
        return ...
    path = row.paths[0] if row is not None else setting_paths()[name]
    return all_settings()[path].default


def test_every_default_that_differs_is_listed():
    found = {key: (theirs, ours(key)) for key, theirs in KEYS.items() if key not in MAPPINGS}
    different = {key: both for key, both in found.items() if both[1] is not ... and both[0] != both[1] and any(both)}
    assert different == DIFFERENT
