"""The file that trains in a layout that was found."""

from __future__ import annotations

from collections.abc import Mapping

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.load import dump
from megatune.config.settings import Settings, all_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.changes.variation import setting_of
from megatune.plan.estimate import Estimate

# What a search decides.
_CHOSEN = (
    "run.num_processes",
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    *(path for path in all_settings() if path.startswith(("parallel.", "recompute."))),
)
# Written from a bare model even where they are the defaults: they are what was asked for.
_ALWAYS = (
    "batch.per_device_train_batch_size",
    "batch.gradient_accumulation_steps",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
)
_PLACEHOLDERS = (
    ("model.model_name_or_path", "FOLDER", "the Hugging Face checkpoint of {name}"),
    ("data.dataset", "NAME", "one or more of the names in dataset_info.json, which lies in dataset_dir"),
    ("run.output_dir", "FOLDER", "for checkpoints, logs and the final model"),
    ("optimizer.learning_rate", "1.0e-5", "5.0e-5 where nothing is written"),
    ("optimizer.num_train_epochs", "3.0", "as many where nothing is written"),
)


def winner_yaml(estimate: Estimate, origins: Mapping[str, str]) -> str:
    """Write a settings file that `megatune train` runs.

    Args:
        origins: "group.name" -> where a user wrote it, as `Loaded.origins`. Where some were written in a file, the text
            holds every setting; where none was, only those that differ from the defaults, and comments in place of
            what only the user knows.

    Raises:
        MegatuneError: SETTINGS, with everything that is planned and cannot be trained yet.
    """
    if findings := _not_built(estimate.case):
        raise MegatuneError(findings, ExitCode.SETTINGS)
    settings = estimate.case.settings
    if all(origin == "default" for origin in origins.values()):
        return _short(estimate.case)
    infos = all_settings()
    chosen = {
        path: "plan"
        for path in _CHOSEN
        if origins.get(path, "default") != "default" or setting_of(settings, path) != infos[path].default
    }
    return dump(settings, {**origins, **chosen})


def _not_built(case: Case) -> list[Finding]:
    """Say what can be planned, and not trained."""
    problems = []
    if case.settings.finetuning.finetuning_type == "lora":
        problems.append(("training LoRA adapters is not built yet", "plan without --output, or full training"))
    if case.model.architecture.vision is not None:
        problems.append(("training vision-language models is not built yet", "plan without --output"))
    elif case.settings.finetuning.freeze_language_model:
        problems.append(("a frozen language model leaves nothing to train", "plan without freeze_language_model"))
    return [
        Finding(f"no settings file for {case.model.name}: {what}", why="it is planned only", fix=fix)
        for what, fix in problems
    ]


def _short(case: Case) -> str:
    """Write only what differs from the defaults, and comments in place of what is not known."""
    settings = case.settings
    lines = [f"# {case.model.name} on {case.world_size} processes, a global batch of {case.global_batch_size} rows"]
    missing = [entry for entry in _PLACEHOLDERS if not _is_written(settings, entry[0])]
    if missing:
        lines.append("# To be filled in:")
        lines += [
            f"{f'# {LLAMAFACTORY.key_of(path)}: {example}':<52}  # {note.format(name=case.model.name)}"
            for path, example, note in missing
        ]
    asked = {path: "asked for" for path in all_settings() if _is_written(settings, path)}
    written = dump(settings, {**asked, **dict.fromkeys(_CHOSEN, "plan")}).splitlines()
    keys = {LLAMAFACTORY.key_of(path) for path in all_settings() if path in _ALWAYS or _is_written(settings, path)}
    lines += [line for line in written if line.partition(":")[0] in keys]
    return "\n".join(lines) + "\n"


def _is_written(settings: Settings, path: str) -> bool:
    return bool(setting_of(settings, path) != all_settings()[path].default)
