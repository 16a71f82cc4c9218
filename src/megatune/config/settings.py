"""Every setting of a training run, in one nested group per concern."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

# Trackers of metrics.
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")


class Settings(Group):
    """The settings of one run. Built by `megatune.config.load`, or in code: `Settings(run=RunSettings(seed=1))`."""

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
        """The arguments of `families.as_trained`: stage, number of a classifier's scores, number of MTP layers."""
        return self.run.stage, self.run.num_labels, self.model.mtp_num_layers

    @property
    def packing(self) -> bool:
        """Whether rows hold several samples; the default is true for stage pt."""
        packing = self.data.packing
        return self.run.stage == "pt" if packing is None else packing

    @property
    def trackers(self) -> list[str]:
        """The trackers of report_to, with "all" expanded: tensorboard, wandb, swanlab, mlflow."""
        asked = {*self.logging.report_to, *(["swanlab"] if self.logging.use_swanlab else [])}
        return [name for name in TRACKERS if name in asked or "all" in asked]

    @property
    def generates(self) -> bool:
        """Whether answers are generated during training."""
        return self.evaluation.predict_with_generate or self.evaluation.eval_generate_steps is not None

    @property
    def eval_interval(self) -> float:
        """Steps between evaluations with eval_strategy: steps, or a fraction of all steps."""
        return self.evaluation.eval_steps or self.logging.logging_steps


# Group name -> group, in the order of run.yaml and `explain`.
GROUPS: dict[str, type[Group]] = {name: field.default_factory for name, field in Settings.model_fields.items()}  # type: ignore[misc]


@cache
def all_settings() -> dict[str, SettingInfo]:
    """Describe every setting, by its path "group.name", in the order of declaration."""
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
    """Return whether a setting has its declared default."""
    return bool(setting_value(settings, path) == all_settings()[path].default)


def with_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Replace settings, by "group.name", without checking rules."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = value
    update = {group: getattr(settings, group).model_copy(update=values) for group, values in groups.items()}
    return settings.model_copy(update=update)


# Settings that are fractions of all steps if below 1.
INTERVALS = ("logging.logging_steps", "checkpoint.save_steps", "evaluation.eval_steps")


def whole_steps(interval: float, total_steps: float) -> int:
    """Return an interval in steps; below 1 it is a fraction of all steps, as in Transformers."""
    return math.ceil(interval * total_steps) if interval < 1 else int(interval)


def counted_steps(settings: Settings, total_steps: int) -> dict[str, int]:
    """Return the intervals that are fractions of all steps in steps, by "group.name"."""
    values = {path: setting_value(settings, path) for path in INTERVALS}
    return {path: whole_steps(value, total_steps) for path, value in values.items() if value and value < 1}
