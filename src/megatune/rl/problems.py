"""Rows of files to prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatune.rl.samples import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.settings import PromptData, RewardRole


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of a run.

    Attributes:
        by_domain: in the order of the files.
        too_long, too_short: rows that were left out by the length of their prompts.
        notes: lines for the log: rows by domain, what was left out, tags that no reward names.
    """

    by_domain: dict[str, list[Problem]]
    too_long: int = 0
    too_short: int = 0
    notes: tuple[str, ...] = field(default=())

    def all(self) -> list[Problem]:
        """The problems of every domain, for validation."""
        return [problem for problems in self.by_domain.values() for problem in problems]


def read_problems(
    data: PromptData,
    rewards: Mapping[str, RewardRole],
    tokenizer: PreTrainedTokenizerBase,
    prompt_length: int,
    template: str | None = None,
    tag_to_template: Mapping[str, str] | None = None,
) -> Problems:
    """Read the rows of all files and write their prompts.

    A row's domain is its column `domain`, else that of the reward whose `tag_included` has its tag, else math_rule.
    With `data.domain_shares` only their domains are kept; without (validation), those of `rewards`.

    Args:
        template: global_template; None: `data.template`.

    Raises:
        MegatuneError: (DATA) rows that cannot be read or lack a column that their reward needs, a domain without
            problems; (INPUT) a file is missing; (SETTINGS) an unknown template. All at once.
    """
    raise NotImplementedError
