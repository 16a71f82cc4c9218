"""ROLL's files of reinforcement learning with verifiable rewards: read, checked and made into `RLSettings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatune.config.rl.settings import RLSettings
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class ReadRL:
    """A file that was read.

    Attributes:
        settings: None where findings leave nothing that could be built.
        findings: all that is wrong, in the order of the file's lines.
        lines: what the user is told first: what does nothing, and what is computed otherwise than in ROLL.
        origins: dotted key as it was written, "actor_train.training_args.learning_rate" -> "run.yaml:7" or "override".
    """

    settings: RLSettings | None
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    def require_valid(self) -> RLSettings:
        """Return the settings if nothing is wrong with them.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        if self.findings or self.settings is None:
            raise MegatuneError(self.findings, ExitCode.SETTINGS)
        return self.settings


def is_rl_file(source: str | Path) -> bool:
    """Tell whether a YAML file describes reinforcement learning: it has roles. False for what cannot be read."""
    raise NotImplementedError


def read_roll(source: str | Path, overrides: Sequence[str] = ()) -> ReadRL:
    """Read ROLL's YAML: Hydra's defaults, `${key}`, device mappings, then `a.b.c=value` words.

    Nothing of this machine is looked at: neither devices nor engines nor files of data or models.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    raise NotImplementedError
