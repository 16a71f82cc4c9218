"""Scores samples in processes of their own, while others are still sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megatune.rl.samples import Sample

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole
    from megatune.rl.rewards.judge import Ask


@dataclass(slots=True)
class DomainCounts:
    """What became of the samples of one domain, since the start of the run.

    Attributes:
        errors: scored 0 because the reward raised, its process died, or it could not be had.
        timeouts: scored 0 because the reward took too long.
        last_failure: what the latest of either said; "" where there was none.
        seconds: that rewards took, summed over processes.
    """

    scored: int = 0
    errors: int = 0
    timeouts: int = 0
    last_failure: str = ""
    seconds: float = 0.0


class RewardPool:
    """Scores samples of every domain by the domain's reward.

    A sample that is handed in comes back from `collect` with `score` and `details` set: `details["correct"]` is 1 or 0
    (what accuracies and difficulty masks are of; `score` is what is trained on), and `details["error"]` says what went
    wrong where the reward raised, timed out or died: the score is 0 then, correct 0, and the pool goes on with a new
    process. Not for several threads at once.

    Args:
        rewards: domain -> its reward; `workers` processes each, started as they are needed.
        asks: domain -> what asks the model of an llm_judge whose judge_model_type is "inference" or "cluster";
            called by several threads.
        log_dir: what the processes print goes there, into reward-DOMAIN.log; None: to this process's stderr.
        limit: seconds that one sample may take; None: of the reward's kind.

    Raises:
        MegatuneError: (SETTINGS) an unknown kind, or arguments that a kind does not take; (UNAVAILABLE) a library that
            a kind needs is not installed.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardRole],
        *,
        asks: Mapping[str, Ask] | None = None,
        log_dir: Path | None = None,
        limit: float | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Samples that were handed in and not collected."""
        raise NotImplementedError

    @property
    def counts(self) -> dict[str, DomainCounts]:
        """By domain."""
        raise NotImplementedError

    def submit(self, samples: Iterable[Sample]) -> None:
        """Take samples to score; returns at once. `sample.problem.domain` says which reward."""
        raise NotImplementedError

    def collect(self, timeout: float = 0.0) -> list[Sample]:
        """Return samples that were scored since the last call, in the order in which they were done.

        Args:
            timeout: seconds to wait until there is at least one; returns at once where nothing is pending.

        Raises:
            MegatuneError: (UNAVAILABLE) a domain's last FAILURES_IN_A_ROW samples all failed.
        """
        raise NotImplementedError

    def score(self, samples: Iterable[Sample]) -> list[Sample]:
        """Score samples and return them, in their order; nothing else may be pending."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes, with whatever they still do. Samples that are pending are forgotten."""
        raise NotImplementedError

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
