"""What a user asks the planner: settings as `megatune train` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.pages.words import amount
from megatune.plan.search import SearchRequest
from megatune.plan.time import answers


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

    def run_seconds(self, planned: Estimate) -> tuple[float, str] | None:
        """Return how long the whole run takes with a plan of its step, and of how many tokens or steps that is: by the
        tokens of its data, or where these are not known by its steps; None where neither is known. Answers that are
        written every so many steps count."""
        of_step, steps = planned.time.total, float(self.case.settings.optimizer.max_steps)
        if (written := answers(planned.case)) is not None and written.every is not None:
            of_step += written.seconds / written.every
        if self.dataset_tokens is not None:
            return self.dataset_tokens / planned.time.tokens * of_step, f"{amount(self.dataset_tokens)} tokens"
        return (steps * of_step, f"{steps:,.0f} steps") if steps > 0 else None

    @property
    def request(self) -> SearchRequest:
        """All layouts with the same global batch."""
        return SearchRequest(case=self.case, global_batch_size=self.global_batch_size, written=self.written)
