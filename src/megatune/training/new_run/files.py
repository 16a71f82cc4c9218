"""The text of the settings file of a new run: short, with a comment where a key needs one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.config.values import counted, shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.estimate import Estimate
from megatune.plan.launch import layout_settings, planned_lines

_COLUMN = 40
_GROUP = 8  # responses to each prompt
# Keys of a layout that a strategy of ROLL's files takes.
_STRATEGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "use_distributed_optimizer",
    "recompute_granularity", "recompute_method", "recompute_num_layers",
)  # fmt: skip


def training_file(model: str, output_dir: str, decided: Mapping[str, Any], best: Estimate) -> str:
    """Write the file of `megatune train`.

    Args:
        decided: what was decided before the search, by keys.
        best: the layout that was found.
    """
    of_training = ("learning_rate", "num_train_epochs")
    sections = {
        "model and data": {"model_name_or_path": model}
        | {key: value for key, value in decided.items() if key not in of_training},
        "training and output": {key: decided[key] for key in of_training}
        | {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "output_dir": output_dir, "logging_steps": 1,
           "save_strategy": "epoch", "save_total_limit": 2, "plot_loss": True},
        "layout, found by the planner": layout_settings(best.case),
    }  # fmt: skip
    notes = {
        "finetuning_type": "all weights" if decided["finetuning_type"] == "full" else "adapters next to the model",
        "columns": "a guess: the file's columns, and what they are",
        "cutoff_len": "tokens; longer rows are cut",
        "learning_rate": "the first setting to vary",
        "save_strategy": "a checkpoint after every epoch",
        "save_total_limit": "the newest are kept, older ones deleted; remove it to keep all",
        "output_dir": "checkpoints, logs, and at the end the model",
        "per_device_train_batch_size": f"a step has {counted(best.case.global_batch_size, 'row')} in all",
    }
    return planned_lines(best) + "".join(_section(*section, notes) for section in sections.items())


def _section(title: str, settings: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    lines = [f"{key}: {shown(value, quoted=True)}" for key, value in settings.items()]
    noted = (
        f"{line:<{_COLUMN}}  # {notes[key]}" if key in notes else line
        for key, line in zip(settings, lines, strict=True)
    )
    return "\n".join(["", f"### {title}", *noted, ""])


def rl_file(model: str, data: str, output_dir: str, decided: Mapping[str, Any], best: Estimate) -> str:
    """Write the file of `megatune rl`: GRPO, with the answers of the data as mathematics for the reward.

    Roles share all devices in turn.
    """
    case, batch, on_cpu = best.case, best.case.settings.batch, best.case.machine.device.on_cpu
    layout = {key: value for key, value in layout_settings(case).items() if key in _STRATEGY}
    half, dtype = decided["cutoff_len"] // 2, "fp32" if on_cpu else "bf16"
    adapters = f", lora_rank: {decided['lora_rank']}, lora_target: all-linear" if "lora_rank" in decided else ""
    devices, engine = f"list(range(0,{case.world_size}))", "builtin" if on_cpu else "vllm"
    quoted = {name: shown(text, quoted=True) for name, text in (("model", model), ("data", data), ("out", output_dir))}
    return f"""\
{planned_lines(best)}
exp_name: new-run
output_dir: {quoted["out"]}
pretrain: {quoted["model"]}
max_steps: 100
save_steps: 50
logging_steps: 1
rollout_batch_size: {case.global_batch_size // 4:<21}  # prompts a step
num_return_sequences_in_group: {_GROUP:<10}  # responses to each prompt, which are compared
prompt_length: {half:<26}  # tokens; longer prompts are left out
response_length: {half:<24}  # tokens; longer responses are cut
adv_estimator: grpo
init_kl_coef: 0.0

actor_train:                              # trains
  device_mapping: {devices}
  model_args: {{dtype: {dtype}{adapters}}}
  training_args:
    learning_rate: {decided["learning_rate"]!r}
    per_device_train_batch_size: {batch.per_device_train_batch_size}
    gradient_accumulation_steps: {batch.gradient_accumulation_steps}
  data_args: {{template: native, file_name: [{quoted["data"]}]}}
  strategy_args: {{strategy_name: megatron_train, strategy_config: {shown(layout, quoted=True)}}}

actor_infer:                              # samples responses
  device_mapping: {devices}
  model_args: {{dtype: {dtype}}}
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: 0}}
  strategy_args: {{strategy_name: {engine}}}

rewards:
  math_rule: {{worker_cls: math_rule, tag_included: [math_rule]}}  # 1 where the response's answer equals ground_truth
"""


def check_new(file: Path) -> None:
    """Refuse a settings file that is there already.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    if file.exists():
        raise _cannot_write(file, "it exists already")


def write_settings(file: Path, text: str) -> None:
    """Write a settings file, which must not be there yet.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise _cannot_write(file, error.strerror or str(error)) from error


def _cannot_write(file: Path, why: str) -> MegatuneError:
    finding = Finding("cannot write the settings file", str(file), why, "name another file")
    return MegatuneError(finding, ExitCode.CANNOT_WRITE)
