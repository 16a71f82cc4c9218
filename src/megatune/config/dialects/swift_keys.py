"""The keys of a file of reinforcement learning while a command line of Megatron-SWIFT is written as one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatune.config.dialects.roll_tree import Reading, Tree
from megatune.config.dialects.swift import SwiftRun
from megatune.config.dialects.table import table
from megatune.config.entry import SettingEntry
from megatune.config.load import Loaded
from megatune.config.settings import all_settings, setting_value
from megatune.config.values import as_read, shown
from megatune.errors import Finding

OF_ROLES = ("parallel", "experts", "performance", "precision")
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
_OF_RUN = (
    *("batch.per_device_train_batch_size", "batch.per_device_eval_batch_size", "batch.gradient_accumulation_steps"),
    *("run.stage", "run.output_dir", "run.seed", "run.run_name", "run.num_processes", "run.ddp_timeout"),
    *("run.memory_check", "model.model_name_or_path", "data.dataset", "data.eval_dataset", "data.template"),
    *("data.default_system", "data.enable_thinking", "data.conversation_rules", "data.cutoff_len"),
    *("data.image_max_pixels", "data.image_min_pixels", "data.media_dir"),
    *(
        "finetuning.freeze_vision_tower",
        "finetuning.freeze_multi_modal_projector",
        "finetuning.freeze_deepstack_mergers",
    ),
    *("finetuning.finetuning_type", *(f"finetuning.{name}" for name in LORA), "logging.logging_steps"),
    *("logging.report_to", "logging.wandb_project", "logging.swanlab_project", "checkpoint.save_steps"),
    *("checkpoint.save_strategy", "checkpoint.save_total_limit", "run.resume_from_checkpoint"),
    *("evaluation.eval_strategy", "evaluation.eval_steps"),
)
_IDLE = {
    **dict.fromkeys(
        ("sleep_level", "offload_model", "offload_optimizer", "offload_bridge"),
        "roles that share a device always leave it when it is not theirs",
    ),
    **dict.fromkeys(
        ("log_completions", "log_entropy", "log_rollout_offpolicy_metrics", "wandb_log_unique_prompts"),
        "metrics.jsonl has every metric, and the log some responses",
    ),
    "move_model_batches": "weights travel in buckets",
    "max_resample_times": "prompts are sampled until the step is full",
    "vllm_mode": "engines and trainer take turns on the devices",
}
# Settings that change nothing of a run whose rows are prompts.
_HARMLESS = (
    *("data.preprocessing_num_workers", "data.dataloader_num_workers", "data.val_size", "data.packing"),
    *("data.truncation_strategy", "data.mask_history", "data.train_on_prompt", "data.answer_masks"),
)
_MISSED = ("checkpoint.save_format", "checkpoint.merge_lora", "checkpoint.push_to_hub")


@dataclass(slots=True)
class Keys:
    """The keys on their way.

    Attributes:
        devices: processes that train, and devices that sample by turns with them.
    """

    run: SwiftRun
    loaded: Loaded
    devices: int
    reading: Reading = field(default_factory=Reading)

    @property
    def sees(self) -> bool:
        """Whether the model reads pictures."""
        return "vision_config" in self.run.command.config

    def value(self, flag: str) -> Any:
        """Return the value of a flag that grpo alone has, or its default."""
        entry = self.run.command.rollouts.get(flag)
        if entry is not None and entry.value.data is not None:
            return entry.value.data
        row = table("swift")[flag]
        return row.passes[0] if row.passes else None

    def number(self, flag: str) -> float:
        """Return the number that a flag is; 1, and a finding, where it is none."""
        found = self.value(flag)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
        self.refuse(flag, "", f"write --{flag} with a number")
        return 1

    def setting(self, path: str) -> Any:
        return setting_value(self.loaded.settings, path)

    def put(self, dotted: str, value: Any, *flags: str) -> None:
        """Write a key.

        Args:
            flags: that say it: of grpo, or "group.name" of settings. The first that was typed is its place.
        """
        command = self.run.command
        typed = (command.rollouts.get(flag) or self.loaded.entries.get(flag) for flag in flags)
        entry = next(filter(None, typed), None)
        where = entry.where if entry is not None else command.default_origin
        if entry is not None and flags[0] in command.rollouts:
            command.whys.setdefault(where, f"{dotted.rpartition('.')[2]}: {shown(value)}")
        above, _, name = dotted.rpartition(".")
        tree: Tree = self.reading.tree
        for part in filter(None, above.split(".")):
            inside = tree.setdefault(part, {})
            assert isinstance(inside, dict)
            tree = inside
        origin = entry.origin if entry is not None else command.default_origin
        tree[name] = SettingEntry(dotted, as_read(value), where, origin)

    def refuse(self, flag: str, why: str, fix: str) -> None:
        """Refuse what a flag asks for."""
        entry = self.run.command.rollouts.get(flag)
        where = f"--{flag}" if entry is None else entry.where
        finding = Finding(f"{flag}: {shown(self.value(flag))} is not supported", where, why, fix)
        if finding not in self.reading.findings:
            self.reading.findings.append(finding)

    def note_others(self) -> None:
        """Say which flags change nothing, and refuse those whose effect would be missed."""
        command, of_roles = self.run.command, (*OF_ROLES, "optimizer", "recompute")
        for flag, entry in command.rollouts.items():
            command.whys.setdefault(entry.where, f"ignored: {_IDLE.get(flag, 'it says nothing to this run')}")
        for path, entry in self.loaded.entries.items():
            group = path.partition(".")[0]
            is_default = entry.where.startswith(command.default_origin) or self.setting(path) == default_of(path)
            if is_default or group in of_roles or path in _OF_RUN:
                continue
            if (group in ("finetuning", "model", "data") and path not in _HARMLESS) or path in _MISSED:
                what, fix = f"{entry.key}: {shown(entry.value.data)} is not supported", f"remove --{entry.key}"
                self.reading.findings.append(Finding(what, entry.where, "grpo trains without it here", fix))
            else:
                command.whys[entry.where] = "it says nothing to grpo"


def default_of(path: str) -> Any:
    return all_settings()[path].default
