"""What a user asks the planner: settings as `megatune train` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatune.config.entry import Arguments
from megatune.config.load import Loaded, load
from megatune.config.rules import finetuning, preference
from megatune.plan.case import Case
from megatune.plan.changes.variation import with_settings
from megatune.plan.search import SearchRequest

_LAYOUT_GROUPS = ("parallel", "batch", "recompute")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned.

    Attributes:
        case: the settings' own layout.
        global_batch_size: rows of a step.
        origins: as `Loaded.origins`; empty for a plan of a bare model.
        plans_own: whether the settings' own layout is planned, before a better one is searched for.
        dataset_tokens: of the whole run; None where not known.
        notes: what was assumed, in sentences.
        file: the settings file that was planned.
        written: settings, "group.name", that the user gave a value.
    """

    case: Case
    global_batch_size: int
    origins: Mapping[str, str] = field(default_factory=dict)
    plans_own: bool = False
    dataset_tokens: float | None = None
    notes: tuple[str, ...] = ()
    file: str | None = None
    written: frozenset[str] = frozenset()

    @property
    def request(self) -> SearchRequest:
        """All layouts with the same global batch."""
        return SearchRequest(case=self.case, global_batch_size=self.global_batch_size, written=self.written)


@dataclass(frozen=True)
class Asked:
    """Settings that are to be planned."""

    loaded: Loaded

    @property
    def written(self) -> set[str]:
        """Groups of settings among which something is written."""
        return {path.partition(".")[0] for path in self.loaded.written}

    @property
    def has_layout(self) -> bool:
        """Whether a layout, a batch or recomputation is written."""
        return not self.written.isdisjoint(_LAYOUT_GROUPS)


def read_settings(source: str | None, words: Arguments, trainable: str | None = None) -> Asked:
    """Read settings as `megatune train` does.

    Args:
        source: the settings file; None for a plan of a model.
        trainable: a finetuning_type in place of the one that is written.

    Raises:
        MegatuneError: INPUT, where the file cannot be read.
    """
    loaded = load(source, words.overrides, words.flags)
    if trainable is not None:
        loaded = replace(loaded, settings=with_settings(loaded.settings, {"finetuning.finetuning_type": trainable}))
    found = loaded.check_rules(rules=(*finetuning.RULES, preference.needs))
    return Asked(replace(loaded, findings=[*loaded.findings, *found]))
