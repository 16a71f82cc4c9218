"""What a translation of a setting's texts is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A setting's texts in another language.

    Attributes:
        english: `SettingInfo.digest` of the texts that it translates.
        what, how, when, values: as `advice`, `how`, `when` and `values` of the declaration.
    """

    english: str
    what: str
    how: str
    when: str
    values: Mapping[str, str] = field(default_factory=dict)
