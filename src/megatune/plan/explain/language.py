"""The languages that settings are explained in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from megatune.config.setting import SettingInfo

Language: TypeAlias = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


def language_of(environment: Mapping[str, str]) -> Language:
    """The language that the environment asks for: Chinese where LC_ALL, LC_MESSAGES or LANG, the first that is set,
    begins with zh."""
    said = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return "zh" if said.lower().startswith("zh") else "en"


@dataclass(frozen=True, slots=True)
class Texts:
    """What is said of a setting in one language.

    Attributes:
        what, how, when: what it is, how it works, when to change it.
        type: its type, range and unit.
        values: what each choice does.
    """

    what: str
    how: str
    when: str
    type: str
    values: Mapping[str, str] = field(default_factory=dict)


def texts_of(info: SettingInfo, language: Language) -> Texts:
    """A setting's texts."""
    if language == "en":
        unit = f" ({info.unit})" if info.unit else ""
        return Texts(info.advice, info.how, info.when, info.expected + unit, info.values)
    from megatune.config.chinese import phrases, translations

    text = translations()[info.path]
    unit = f"（单位：{phrases('units')[info.unit].removeprefix('个').strip()}）" if info.unit else ""
    return Texts(text.what, text.how, text.when, info.expected_in(phrases("types")) + unit, text.values)


def refusal_texts(why: str, fix: str, language: Language) -> tuple[str, str]:
    """Why a known key is refused, and what to write instead."""
    if language == "en":
        return why, fix
    from megatune.config.chinese import phrases

    return phrases("refusals").get(why, why), phrases("fixes").get(fix, fix)
