"""Defaults that differ from LLaMA-Factory's, of keys that work here: what a file that does not say them means there."""

from __future__ import annotations

from typing import Any, NamedTuple


class Default(NamedTuple):
    """What a key is by default in LLaMA-Factory, and why it is something else here."""

    theirs: Any
    why: str


_PACKING = "null packs the texts of stage pt, as there"
_OVERLAP = "they need a layout with copies to gain anything; its mcore_adapter has them off, too"

DEFAULTS: dict[str, Default] = {
    "finetuning_type": Default(
        "lora", "on its Megatron path, where LoRA's keys are not read, it trains every parameter"
    ),
    "do_train": Default(False, "training is what the command does"),
    "neat_packing": Default(False, _PACKING),
    "sequence_packing": Default(False, _PACKING),
    "use_packed_sequences": Default(False, _PACKING),
    "accumulate_allreduce_grads_in_fp32": Default(False, "its mcore_adapter turns it on with bf16"),
    "mixed_precision": Default("bf16_mixed", "bf16: true says it, as elsewhere in LLaMA-Factory"),
    "overlap_grad_reduce": Default(True, _OVERLAP),
    "overlap_param_gather": Default(True, _OVERLAP),
    "optimizer_offload_fraction": Default(0.0, "it says how much of the optimizer goes, where it goes at all"),
    "save_hf_model": Default(False, "every checkpoint is a Hugging Face model"),
    "dataloader_num_workers": Default(0, "0 for text, as many as there are cores for, up to 4, for pictures"),
    "logging_steps": Default(500, "a loss that is seen early saves runs"),
    "plot_loss": Default(False, "the picture costs nothing"),
    "report_to": Default("none", "event files for TensorBoard need no account"),
    "swanlab_mode": Default("cloud", "null leaves it to SwanLab, whose own is cloud"),
    "swanlab_project": Default("llamafactory", "null is SWANLAB_PROJ_NAME, or else megatune"),
}
