"""Finds models and data files for a new run, detects the stage that their rows fit, and writes its settings file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from megatune.config.values import counted, shown
from megatune.data.formats import TextFormat
from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.data.sources.detection import suggest_columns
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.estimate import Estimate
from megatune.plan.launch import layout_settings, planned_lines

Goal = Literal["full", "lora", "dpo", "rl"]
GOALS: tuple[Goal, ...] = get_args(Goal)
MAX_ROWS = 20_000  # maximum number of rows to count

# Parts of the names of files that are neither data nor weights.
_OTHER_NAMES = (
    *("config", "tokenizer", "vocab", "merges", "index"),
    *("dataset_info", "metrics", "trainer_", "added_tokens"),
)
_PREFERENCE = (".csv", ".jsonl", ".parquet", ".json")  # suffixes of data files, in order of preference


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Properties of the data of a new run.

    Attributes:
        stage: the stage that its rows fit: sft, pt or dpo.
        goal: the goal that its rows fit; None if full training and LoRA both do.
        rows: their number, at most MAX_ROWS; 0 if they are not in local files.
        columns: column name -> known name, if the names are unknown and were guessed.
    """

    stage: str
    goal: Goal | None = None
    rows: int = 0
    columns: Mapping[str, str]


def find_models(folder: Path) -> list[str]:
    """Return this folder, or its subfolders, with a Hugging Face model, without checkpoints of runs."""
    if (folder / "config.json").is_file():
        return [str(folder)]
    inside = sorted(path.parent for path in folder.glob("*/config.json") if not path.parent.name.startswith("."))
    return [str(path) for path in inside if not path.name.startswith("checkpoint-")]


def find_data(folder: Path) -> list[str]:
    """Return the files that may be data, in the order of _PREFERENCE."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and data_suffix(path) in _PREFERENCE]
    files = [path for path in files if not any(word in path.name.lower() for word in _OTHER_NAMES)]
    return [str(path) for path in sorted(files, key=lambda path: _PREFERENCE.index(data_suffix(path) or ""))]


def look_at(data: str, goal: Goal | None) -> DataFacts:
    """Find the stage and goal that the rows of the data fit.

    Args:
        data: as in `dataset`; data on a hub is assumed to be conversations, or pairs if the goal is dpo.
        goal: None to decide by the data.

    Raises:
        MegatuneError: as `resolve_datasets`; SETTINGS or DATA, if the goal needs other rows.
    """
    row = next(_rows(data), None)
    if goal is None and row is not None and "ground_truth" in row and _prompt(row) is not None:
        goal = "rl" if not {"response", "output", "answer"} & row.keys() else None
    if goal == "rl":
        count = sum(1 for _ in islice(_rows(data), MAX_ROWS))
        return DataFacts(stage="sft", goal=goal, rows=count, columns=_of_rl(data, row))
    if goal is None:
        goal = "dpo" if row is not None and {"chosen", "rejected"} <= row.keys() else None
    stage = "dpo" if goal == "dpo" else "sft"
    sources, columns = _resolved(data, stage, row)
    if sources and isinstance(sources[0].format, TextFormat):
        stage = "pt"
    rows = sum(1 for source in sources for _ in islice(source.rows_from(), MAX_ROWS))
    return DataFacts(stage=stage, goal=goal, rows=min(rows, MAX_ROWS), columns=columns)


def _resolved(data: str, stage: str, row: Mapping[str, Any] | None) -> tuple[list[DatasetSource], Mapping[str, str]]:
    """Resolve the data set. If the names of its columns are unknown, guess what they mean."""
    try:
        return resolve_datasets([data], "data", stage, hubs=False), {}
    except MegatuneError as error:
        if error.exit_code != ExitCode.DATA or row is None:
            raise
        columns = suggest_columns(row, stage)
        if stage == "sft" and not {"response", "messages"} & set(columns.values()):
            raise
        return resolve_datasets([data], "data", stage, columns, hubs=False), columns


def _rows(data: str) -> Iterator[Mapping[str, Any]]:
    path = Path(data).expanduser()
    if path.is_file():
        yield from (row.fields for row in read_rows(path) if row.error is None)


def _prompt(row: Mapping[str, Any]) -> str | None:
    return next((name for name in ("messages", "prompt") if name in row), None)


def _of_rl(data: str, row: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Check that reinforcement learning can read the rows; return {}.

    Raises:
        MegatuneError: INPUT, if the data is not a local file; DATA, if a column is missing.
    """
    fix = "name the columns messages (or prompt) and ground_truth; docs/rl-rewards.md describes the rows"
    if row is None:
        finding = Finding(f"{data} is not a file with rows", "data", "reinforcement learning reads files", fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    missing = [] if _prompt(row) else ["messages"]
    missing += [] if "ground_truth" in row else ["ground_truth"]
    if missing:
        what = f"{data} has no column {' and no column '.join(missing)}"
        why = "the reward compares a response with ground_truth"
        raise MegatuneError(Finding(what, "data", why, fix), ExitCode.DATA)
    return {}


_COLUMN = 40
_GROUP = 8  # responses to each prompt
# Keys of a layout that a strategy in ROLL's files accepts.
_STRATEGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "use_distributed_optimizer",
    "recompute_granularity", "recompute_method", "recompute_num_layers",
)  # fmt: skip


def training_file(model: str, output_dir: str, decided: Mapping[str, Any], best: Estimate) -> str:
    """Return the file of `megatune train`.

    Args:
        decided: settings decided before the search, by key.
        best: the best layout.
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
    """Return the file of `megatune rl`: GRPO with math rewards. Roles time-share all devices."""
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
    """Check that a settings file does not exist.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    if file.exists():
        raise _cannot_write(file, "it exists already")


def write_settings(file: Path, text: str) -> None:
    """Write a new settings file.

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
