"""Every setting of a training run, one nested group for each concern; and how messages name settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import Field

from megatune.config.groups.data import DataSettings
from megatune.config.groups.finetuning import FinetuningSettings, PreferenceSettings
from megatune.config.groups.optimizer import BatchSettings, OptimizerSettings, PrecisionSettings
from megatune.config.groups.output import CheckpointSettings, EvaluationSettings, LoggingSettings
from megatune.config.groups.parallel import ExpertSettings, ParallelSettings
from megatune.config.groups.performance import PerformanceSettings, RecomputeSettings
from megatune.config.groups.run import ModelSettings, RunSettings
from megatune.config.setting import Group, Mark, SettingInfo, describe
from megatune.errors import Finding

# What numbers may be reported to.
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
_QUOTED = re.compile(r"`([^`]*)`")
_NAMED = re.compile(r"(\w+)(?:(: | )(.*))?", re.DOTALL)


class Settings(Group):
    """What one run does. Built by `megatune.config.load`, or in code: `Settings(run=RunSettings(seed=1))`."""

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    finetuning: FinetuningSettings = Field(default_factory=FinetuningSettings)
    preference: PreferenceSettings = Field(default_factory=PreferenceSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    batch: BatchSettings = Field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    precision: PrecisionSettings = Field(default_factory=PrecisionSettings)
    parallel: ParallelSettings = Field(default_factory=ParallelSettings)
    experts: ExpertSettings = Field(default_factory=ExpertSettings)
    recompute: RecomputeSettings = Field(default_factory=RecomputeSettings)
    performance: PerformanceSettings = Field(default_factory=PerformanceSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)

    @property
    def task(self) -> tuple[str, int | None, int]:
        """What `families.as_trained` makes the model that is trained of: the stage, scores of a classifier, and layers
        that predict further tokens."""
        return self.run.stage, self.run.num_labels, self.model.mtp_num_layers

    @property
    def packing(self) -> bool:
        """Whether rows hold several samples; texts share rows unless the user says otherwise."""
        packing = self.data.packing
        return self.run.stage == "pt" if packing is None else packing

    @property
    def trackers(self) -> list[str]:
        """What report_to names, with what all stands for: tensorboard, wandb, swanlab, mlflow."""
        asked = {*self.logging.report_to, *(["swanlab"] if self.logging.use_swanlab else [])}
        return [name for name in TRACKERS if name in asked or "all" in asked]

    @property
    def generates(self) -> bool:
        """Whether answers are written during training."""
        return self.evaluation.predict_with_generate or self.evaluation.eval_generate_steps is not None

    @property
    def eval_interval(self) -> float:
        """Steps between evaluations with eval_strategy: steps, or a share of all."""
        return self.evaluation.eval_steps or self.logging.logging_steps


# Group name -> its model, in the order that run.yaml and `explain` list them.
GROUPS: dict[str, type[Group]] = {name: field.default_factory for name, field in Settings.model_fields.items()}  # type: ignore[misc]


@cache
def all_settings() -> dict[str, SettingInfo]:
    """Describe every setting by its path "group.name", in order of declaration."""
    return {info.path: info for group, model in GROUPS.items() for info in describe(group, model)}


@cache
def setting_paths() -> dict[str, str]:
    """Map the names of settings to "group.name"."""
    return {info.name: path for path, info in all_settings().items()}


@cache
def marked(mark: Mark) -> frozenset[str]:
    """Return the settings with a mark, by "group.name"."""
    return frozenset(path for path, info in all_settings().items() if mark in info.marks)


def setting_value(settings: Settings, path: str) -> Any:
    """Return the value of "group.name"."""
    group, _, name = path.partition(".")
    return getattr(getattr(settings, group), name)


def is_default(settings: Settings, path: str) -> bool:
    """Tell whether a setting has its declared default."""
    return bool(setting_value(settings, path) == all_settings()[path].default)


def with_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Replace settings by "group.name"; no rule has looked at them."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = value
    update = {group: getattr(settings, group).model_copy(update=values) for group, values in groups.items()}
    return settings.model_copy(update=update)


# Below 1 they are shares of all steps.
INTERVALS = ("logging.logging_steps", "checkpoint.save_steps", "evaluation.eval_steps")


def whole_steps(interval: float, total_steps: float) -> int:
    """Count the steps of an interval, which may be a share of all, as Transformers does."""
    return math.ceil(interval * total_steps) if interval < 1 else int(interval)


def counted_steps(settings: Settings, total_steps: int) -> dict[str, int]:
    """Return the intervals that are shares of all steps in steps, by "group.name"."""
    values = {path: setting_value(settings, path) for path in INTERVALS}
    return {path: whole_steps(value, total_steps) for path, value in values.items() if value and value < 1}


def replace_names(text: str, say: Callable[[str, str, str, str], str]) -> str:
    """Replace every named setting by what `say` returns for its name, what joins it and its value, its value, and the
    text before it.

    A message names a setting between backticks, with a value where it has one: `max_steps`, `max_steps 5`, and
    `max_steps: 5` where it is to be written so. Who prints the message replaces them, by our own names or a dialect's.
    Between backticks, what is not a setting stays as it is: a command.
    """

    def said(quoted: re.Match[str]) -> str:
        named = _NAMED.fullmatch(quoted[1])
        if named is None or named[1] not in setting_paths():
            return quoted[0]
        return say(named[1], named[2] or "", named[3] or "", text[: quoted.start()])

    return _QUOTED.sub(said, text)


def plain_finding(finding: Finding) -> Finding:
    """Write settings in a finding by our own names."""
    return Finding(plain(finding.what), finding.where, plain(finding.why), plain(finding.fix))


def plain(text: str) -> str:
    """Write settings by our own names."""
    return replace_names(text, lambda name, between, value, _: name + between + value)
