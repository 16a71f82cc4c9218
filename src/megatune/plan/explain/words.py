"""Texts of explanations in English and Chinese: settings, headings and phrases, and the costs of settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml

from megatune.config.setting import EXPERTS, Needs, SettingInfo
from megatune.config.values import shown
from megatune.pages import columns_of, page_width
from megatune.pages import wrapped as lines_of
from megatune.plan.changes import value_of
from megatune.plan.changes import written as written_changes
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.explain.cost import BaseCase, SettingImpact
from megatune.plan.fixes import Fix
from megatune.plan.pages.words import bytes_unit, describe_layout, percent, row_length, seconds, size

Language: TypeAlias = Literal["en", "zh"]
_HARDLY_BYTES, _HARDLY_TIME = 2**20, 0.0005


def language_of(environment: Mapping[str, str]) -> Language:
    """Return Chinese if the first one set of LC_ALL, LC_MESSAGES and LANG begins with zh, and English otherwise."""
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


class Texts(NamedTuple):
    """Texts of a setting: what it is, how it works, when to change it, its type with range and unit, its choices."""

    what: str
    how: str
    when: str
    type: str
    values: Mapping[str, str]


def texts_of(info: SettingInfo, language: Language, *, is_rl: bool = False) -> Texts:
    """Return the texts of a setting in a language; `is_rl` for keys of reinforcement learning."""
    if language == "en":
        unit = f" ({info.unit})" if info.unit else ""
        return Texts(*info.texts[:3], info.expected + unit, info.texts.values)
    from megatune.config.chinese import phrases, translations

    text = translations("rl" if is_rl else "")[info.path]
    units = {**phrases("units"), **(phrases("units", "rl") if is_rl else {})}
    unit = f"（单位：{units[info.unit].removeprefix('个').strip()}）" if info.unit else ""
    return Texts(text.what, text.how, text.when, info.expected_in(phrases("types")) + unit, text.values)


def needs_text(need: Needs, words: Words) -> str:
    """Describe the required values of another setting: `finetuning_type: lora`, `tensor_model_parallel_size ≥ 2`."""
    name = need.path.partition(".")[2]
    if need.path == EXPERTS:
        text = words.experts
    elif need.least is not None:
        text = f"{name} ≥ {need.least}"
    else:
        text = f"{name}: {words.either.join(map(shown, need.values))}" if need.values else name
    return words.either.join((text, *([needs_text(need.otherwise, words)] if need.otherwise is not None else ())))


def all_needs(info: SettingInfo, words: Words) -> list[str]:
    """List what a setting needs, each with the values of the setting that need it unless all do."""
    needs = {
        needs_text(need, words) + (words.parentheses.format(words.comma.join(map(shown, need.of))) if need.of else "")
        for need in info.needs
    }
    return sorted(needs)


def phrase_of(text: str, kind: str, language: Language) -> str:
    """Translate a sentence of the tables of keys, of kind "refusals", "fixes", "accepted", or of RL's "reasons"."""
    if language == "en":
        return text
    from megatune.config.chinese import phrases

    return phrases(kind, "rl" if kind == "reasons" else "").get(text, text)


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Wrap a paragraph to the terminal, with `indent` before each line, or `first` before the first one."""
    return "\n".join(lines_of(text, page_width(), first or indent, indent))


@cache
def words_of(language: Language) -> Words:
    """Read the headings and phrases of a language."""
    file = Path(__file__).with_name("english.yaml" if language == "en" else "chinese.yaml")
    return Words(**yaml.safe_load(file.read_text(encoding="utf-8")))


class Words(SimpleNamespace):
    """Headings and phrases of one language, by their names in its file; `parts` are those of `StageMemory`."""


def rows(words: Words, *entries: tuple[str, Iterable[str]], hang: int = 0) -> Iterator[str]:
    """Yield paragraphs to the right of their headings; lines after the first are indented by `hang` more columns."""
    heads = (words.takes, words.default, words.also, words.what, words.how, words.when, words.values, words.needs)
    width = max(map(columns_of, (*heads, words.cost))) + 2
    for heading, texts in entries:
        for text in texts:
            head = f"  {heading}{' ' * (width - columns_of(heading))}"
            yield wrapped(text, indent=" " * (width + 2 + hang), first=head)
            heading = ""


def what_it_does(texts: Texts, words: Words) -> Iterator[str]:
    """Yield the texts of a setting and of its values, for a terminal."""
    yield from rows(words, (words.what, [texts.what]), (words.how, [texts.how]), (words.when, [texts.when]))
    yield from rows(
        words, (words.values, [f"{value}{words.colon}{text}" for value, text in texts.values.items()]), hang=2
    )


def written(key: str, value: Any, default: Any, origin: str, texts: Texts, words: Words) -> Iterator[str]:
    """Yield the value of a key in a file, its default, and its description, for a terminal."""
    usual = words.is_default if value == default else f"{words.default} {shown(default)}"
    yield wrapped(f"{key}: {shown(value)}{words.parentheses.format(origin + words.semicolon + usual)}")
    yield wrapped(words.off.format(what=texts.what) if value is False else texts.what, indent="    ")
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict | list) and (text := texts.values.get(shown(each))):
            yield wrapped(f"{shown(each)}{words.colon}{text}", indent="    ")


def section(name: str, default: Any, texts: Texts, words: Words, also: Sequence[str] = ()) -> Iterator[str]:
    """Yield the Markdown of one setting."""
    yield f"\n### {name}\n\n{texts.type}{words.semicolon}{words.default} `{shown(default)}`"
    if also:
        yield f"{words.semicolon}{words.also} {words.comma.join(f'`{name}`' for name in also)}"
    yield f"\n\n{texts.what}\n\n"
    yield f"- **{words.how.capitalize()}**{words.colon}{texts.how}\n"
    yield f"- **{words.when.capitalize()}**{words.colon}{texts.when}\n"
    yield from (f"- `{value}`{words.colon}{text}\n" for value, text in texts.values.items())


def case_line(base: BaseCase, words: Words) -> str:
    """Describe the case: model, machines, layout, and the rows of a step."""
    assert base.case is not None
    case = base.case
    text = words.case.format(
        model=case.model.name, gpus=case.world_size, gpu=case.machine.device.name, layout=describe_layout(case)
    )
    text += words.comma + words.tokens.format(rows=f"{case.global_batch_size:,}", tokens=row_length(case))
    return text + (words.parentheses.format(words.assumed[base.assumed]) if base.assumed else "")


def cost_lines(
    info: SettingInfo, impact: SettingImpact | None, cases: Sequence[BaseCase], words: Words
) -> Iterator[str]:
    """Describe the cost of a setting: the case, its present value, and other values compared with it."""
    if impact is None:
        yield words.not_planned.format(why=cases[0].why_not)
        return
    if impact.refused:
        yield case_line(impact.base, words) + words.colon.rstrip()
        yield words.not_compared if impact.refused == info.expected else words.not_here.format(why=impact.refused)
        return
    if not impact.effects and info.path != "model.model_name_or_path":
        yield words.none
        return
    line = case_line(impact.base, words)
    if impact.companions:
        line += words.comma + words.together.format(changes=written_changes(impact.companions))
    yield line + words.colon.rstrip()
    case = impact.base.case
    assert case is not None
    before = impact.effects[0].before if impact.effects else estimate(case)
    value = shown(impact.now) if impact.effects else case.model.name
    yield words.now.format(value=value, memory=fullest(before, words), seconds=seconds(before.time.total))
    for effect in impact.effects:
        value = value_of(effect.after.case, info.path)
        yield shown(value) + words.colon + describe_effect(effect, words, others_of(effect, info.path))
    yield words.uncertainty.format(percent=percent(before.time.uncertainty))


def others_of(effect: Fix, path: str) -> dict[str, Any]:
    """Return the settings that had to change with the one of this path."""
    return {other: value for other, value in effect.changes.items() if other != path}


def describe_comparison(effect: Fix, path: str, value: Any, words: Words) -> str:
    """Describe an effect compared with another value of the setting of this path."""
    other = shown(value)
    if changes := others_of(effect, path):
        other += words.parentheses.format(words.together.format(changes=written_changes(changes)))
    text = words.compared.format(value=other, effect=describe_effect(effect, words, side_changes={}))
    return text.replace("） ", "）")


def describe_effect(effect: Fix, words: Words, side_changes: Mapping[str, Any]) -> str:
    """Describe an effect in a line: memory, time for as many tokens, settings that changed with it, and whether it
    fits."""
    more_bytes, more_time = -effect.saving, -effect.gain
    memory = words.no_memory
    if abs(more_bytes) >= _HARDLY_BYTES:
        memory = words.memory.format(change=signed_bytes(more_bytes))
        part, change = effect.part
        if abs(change) >= _HARDLY_BYTES and effect.after.fullest.stage == effect.before.fullest.stage:
            memory += words.parentheses.format(f"{words.parts[part]} {signed_bytes(change)}")
    time = words.no_time
    if abs(more_time) >= _HARDLY_TIME:
        share = ("+" if more_time > 0 else "−") + percent(abs(more_time))  # −12 %, or ×2.4 from 2 on
        share = f"×{1 + more_time:.1f}" if more_time >= 1 else share
        time = (words.step_time if effect.same_rows else words.token_time).format(change=share)
    parts = [memory, time]
    if side_changes:
        parts.append(words.together.format(changes=written_changes(side_changes)))
    if not effect.after.fits:
        parts.append(words.does_not_fit)
    return words.comma.join(parts)


def fullest(planned: Estimate, words: Words) -> str:
    """Format the memory: `58.2 of 79.2 GiB on the fullest stage`."""
    total, memory = planned.fullest.total, planned.case.machine.device.memory
    unit = bytes_unit(total)
    text = words.fullest.format(size=unit.of(total), device=unit.with_name(memory))
    return text if planned.fits else text + words.comma + words.does_not_fit


def signed_bytes(number: int) -> str:
    """Format a change of memory: +3.1 GiB."""
    return ("+" if number > 0 else "−") + size(abs(number))
