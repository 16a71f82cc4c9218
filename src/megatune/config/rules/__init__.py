"""Rules between settings: each finds what is wrong, why, and the nearest fix, independent of the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from megatune.architecture import Architecture
from megatune.config.entry import SettingEntry
from megatune.config.rules import data, finetuning, layout, memory, pipeline, run, trained
from megatune.config.rules.rule import Context, Rule, limits
from megatune.config.settings import Settings
from megatune.errors import Finding

# Rules for commands that only read a run's data, and for a run.
DATA_RULES = (*finetuning.RULES, *data.RULES, limits)
RULES = (
    *(*finetuning.RULES, *data.RULES, *run.RULES),
    *(*layout.RULES, *pipeline.RULES, *layout.EXPERT_RULES, *memory.RULES),
    *(*finetuning.PREFERENCE_RULES, *trained.RULES, limits),
)


def check(
    settings: Settings,
    architecture: Architecture | None = None,
    world_size: int | None = None,
    *,
    rules: Iterable[Rule] = RULES,
    origins: Mapping[str, str] | None = None,
    invalid: Collection[str] = (),
    written: Mapping[str, SettingEntry] | None = None,
    phrase: Callable[[Finding], Finding] | None = None,
) -> list[Finding]:
    """Check the rules between settings.

    Args:
        architecture: of the model; None skips the rules that need it.
        world_size: processes over all machines; None takes num_processes, if set.
        rules: the rules to check.
        origins: "group.name" -> where it was written, for the place of findings.
        invalid: "group.name" of settings that were already refused; problems with them are not reported.
        written: "group.name" -> entry of the settings that a user wrote.
        phrase: replaces the names of settings in a finding; None writes our own.
    """
    context = Context(settings, architecture, world_size, written or {})
    findings: list[Finding] = []
    for problem in (problem for rule in rules for problem in rule(context)):
        if set(problem.paths).isdisjoint(invalid):
            places = (origin for path in problem.paths if (origin := (origins or {}).get(path, "default")) != "default")
            findings.append(Finding(problem.what, next(places, ""), problem.why, problem.fix))
    return findings if phrase is None else [*map(phrase, findings)]
