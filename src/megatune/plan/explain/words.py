"""Texts of explanations in English and Chinese: of settings, headings and connecting words, and costs in words."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml

from megatune.config.setting import EXPERTS, Needs, SettingInfo
from megatune.config.values import shown
from megatune.plan.changes.variation import written
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.explain.cost import Effect, Weighed
from megatune.plan.explain.ground import Ground
from megatune.plan.pages.words import MEMORY_WORDS, bytes_unit, layout_words, percent, row_length, seconds, size

Language: TypeAlias = Literal["en", "zh"]
_HARDLY_BYTES, _HARDLY_TIME = 2**20, 0.0005


def language_of(environment: Mapping[str, str]) -> Language:
    """Return Chinese where LC_ALL, LC_MESSAGES or LANG, the first that is set, begins with zh."""
    said = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return "zh" if said.lower().startswith("zh") else "en"


class Texts(NamedTuple):
    """What a setting is, how it works, when to change it, its type with range and unit, and what each choice does."""

    what: str
    how: str
    when: str
    type: str
    values: Mapping[str, str]


def texts_of(info: SettingInfo, language: Language) -> Texts:
    """Return a setting's texts in a language."""
    if language == "en":
        unit = f" ({info.unit})" if info.unit else ""
        return Texts(*info.texts[:3], info.expected + unit, info.texts.values)
    from megatune.config.chinese import phrases, translations

    text = translations()[info.path]
    unit = f"（单位：{phrases('units')[info.unit].removeprefix('个').strip()}）" if info.unit else ""
    return Texts(text.what, text.how, text.when, info.expected_in(phrases("types")) + unit, text.values)


def needs_text(need: Needs, words: Words) -> str:
    """Say what other setting's values will do: `finetuning_type: lora`, `tensor_model_parallel_size ≥ 2`."""
    name = need.path.partition(".")[2]
    if need.path == EXPERTS:
        text = words.experts
    elif need.least is not None:
        text = f"{name} ≥ {need.least}"
    else:
        text = f"{name}: {words.either.join(map(shown, need.values))}" if need.values else name
    return words.either.join((text, *([needs_text(need.otherwise, words)] if need.otherwise is not None else ())))


def all_needs(info: SettingInfo, words: Words) -> list[str]:
    """Say what a setting needs, each with the values of the setting that need it, where not all do."""
    said = {
        needs_text(need, words) + (words.parentheses.format(words.comma.join(map(shown, need.of))) if need.of else "")
        for need in info.needs
    }
    return sorted(said)


def refusal_texts(why: str, fix: str, language: Language) -> tuple[str, str]:
    """Say why a known key is refused, and what to write instead."""
    if language == "en":
        return why, fix
    from megatune.config.chinese import phrases

    return phrases("refusals").get(why, why), phrases("fixes").get(fix, fix)


def accepted_text(why: str, language: Language) -> str:
    """Say why a known key changes nothing."""
    if language == "en":
        return why
    from megatune.config.chinese import phrases

    return phrases("accepted").get(why, why)


WIDTH = 100
# What does not begin a line.
_CLOSING = "，。；：、）！？”%"


def columns_of(text: str) -> int:
    """Count the columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Wrap a paragraph in lines of `WIDTH`, with `indent` before each, or `first` before the first one."""
    head = first or indent
    if text.isascii():
        return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    lines, line, used = [], head, columns_of(head)
    # Words of other scripts with their space, and single Chinese characters, stay together.
    for word in re.findall(r"[^\s\u2e80-\uffef]+\s*|[\u2e80-\uffef]\s*|\s+", text):
        if used + columns_of(word.rstrip()) > WIDTH and word[0] not in _CLOSING and line.strip():
            lines.append(line.rstrip())
            line, used, word = indent, columns_of(indent), word.lstrip()
        line += word
        used += columns_of(word)
    return "\n".join([*lines, line.rstrip()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One language; the defaults are English. What is in braces is filled in; `parts` are of memory, by their names in
    `StageMemory`."""

    colon: str = ": "
    comma: str = ", "
    stop: str = "."
    parentheses: str = " ({})"
    takes: str = "takes"
    default: str = "default"
    group: str = "group"
    also: str = "names"
    what: str = "what"
    how: str = "how"
    when: str = "when"
    values: str = "values"
    needs: str = "needs"
    either: str = " or "
    cost: str = "cost"
    parts: Mapping[str, str] = field(default_factory=lambda: MEMORY_WORDS)
    # Costs.
    ground: str = "for {model} on {gpus} × {gpu}, {layout}"
    assumed: Mapping[str, str] = field(
        default_factory=lambda: {
            "case": "assumed; a file, or --model, --gpus and --gpu, say otherwise",
            "machines": "the machines are assumed; --gpus and --gpu say otherwise",
        }
    )
    semicolon: str = "; "
    tokens: str = "{rows} rows of {tokens} tokens a step"
    now: str = "{value}: {memory}, {seconds} a step"
    fullest: str = "{size} of {device} on the fullest stage"
    memory: str = "{change} on the fullest stage"
    no_memory: str = "the same memory"
    step_time: str = "{change} step time"
    token_time: str = "{change} time a token"
    no_time: str = "the same time"
    does_not_fit: str = "does not fit"
    uncertainty: str = "times are uncertain by ±{percent}; weights, gradients and optimizer state are exact"
    beside: str = "with {changes}"
    none: str = "none: it changes no memory and no time that is planned"
    not_compared: str = "not compared: no other value is valid here"
    not_here: str = "not valid here: {why}"
    not_planned: str = "not planned: {why}"
    against: str = "against {value}: {effect}"
    # Keys that are refused.
    refused: str = "known, and refused"
    refused_values: str = "refused"
    passes: str = "passes"
    accepted: str = "known, and without effect"
    instead: str = "instead"
    # Files.
    settings: str = "What {file} sets"
    none_set: str = "It sets nothing: every setting has its default."
    is_default: str = "the default"
    off: str = "off: {what}"
    remarks: str = "Remarks"
    no_remarks: str = "None: nothing is wrong, and everything has an effect."
    without_effect: str = "{key} has no effect without {needs}"
    experts: str = "a mixture of experts"
    line: str = "line {number}"
    whole: str = "All of it, {ground}: {memory}, {seconds} a step, {rate} tokens/s a GPU"
    # The page.
    title: str = "Settings"
    head: str = """\
Every setting of a run, as it is written in a YAML file, as `key=value` after it, or as `--key value`. What is not
written has its default. A key that is not listed here is refused, and so is a value out of its range.

`megatune explain KEY` says the same of one setting, and what it costs for a model on its machines;
`megatune explain FILE.yaml` goes through a file. This page is `megatune explain --all`, written by
`python docs/generate_settings.py`; [settings.zh.md](settings.zh.md) has it in Chinese.
"""
    refused_head: str = """\
## Known and refused

Keys of LLaMA-Factory's files that are known here and not honoured. A value that asks for nothing passes; any other is
refused with this reason.

| key | refused | passes | why |
|---|---|---|---|
"""
    accepted_head: str = """\

## Known, and without effect

Keys of LLaMA-Factory's files that change nothing here. They pass, and a run says why in a line.

| keys | why |
|---|---|
"""
    every_other: str = "every other value"
    the_rest: str = "the rest"


@cache
def words_of(language: Language) -> Words:
    """Return the words of a language; the Chinese ones are read from `chinese.yaml`."""
    if language == "en":
        return Words()
    return Words(**yaml.safe_load(Path(__file__).with_name("chinese.yaml").read_text(encoding="utf-8")))


def ground_line(ground: Ground, words: Words) -> str:
    """Name the case: model, machines, layout, and the rows of a step."""
    assert ground.case is not None
    case = ground.case
    text = words.ground.format(
        model=case.model.name, gpus=case.world_size, gpu=case.machine.device.name, layout=layout_words(case)
    )
    text += words.comma + words.tokens.format(rows=f"{case.global_batch_size:,}", tokens=row_length(case))
    return text + (words.parentheses.format(words.assumed[ground.assumed]) if ground.assumed else "")


def cost_lines(info: SettingInfo, weighed: Weighed | None, grounds: Sequence[Ground], words: Words) -> Iterator[str]:
    """Say what the setting costs: the case, the value now, and other values against it."""
    if weighed is None:
        yield words.not_planned.format(why=grounds[0].why_not)
        return
    if weighed.refused:
        yield ground_line(weighed.ground, words) + words.colon.rstrip()
        yield words.not_compared if weighed.refused == info.expected else words.not_here.format(why=weighed.refused)
        return
    if not weighed.effects and info.path != "model.model_name_or_path":
        yield words.none
        return
    line = ground_line(weighed.ground, words)
    if weighed.companions:
        line += words.comma + words.beside.format(changes=written(weighed.companions))
    yield line + words.colon.rstrip()
    case = weighed.ground.case
    assert case is not None
    before = weighed.effects[0].before if weighed.effects else estimate(case)
    value = shown(weighed.now) if weighed.effects else case.model.name
    yield words.now.format(value=value, memory=fullest(before, words), seconds=seconds(before.time.total))
    for effect in weighed.effects:
        yield shown(effect.value) + words.colon + effect_words(effect, words)
    yield words.uncertainty.format(percent=percent(before.time.uncertainty))


def against_words(effect: Effect, value: Any, words: Words) -> str:
    """Put an effect against what else the setting could be."""
    other = shown(value)
    if effect.beside:
        other += words.parentheses.format(words.beside.format(changes=written(effect.beside)))
    text = words.against.format(value=other, effect=effect_words(replace(effect, beside={}), words))
    return text.replace("） ", "）")


def effect_words(effect: Effect, words: Words) -> str:
    """Put an effect in a line: memory, time, what else had to change, and whether it fits."""
    memory = words.no_memory
    if abs(effect.memory) >= _HARDLY_BYTES:
        memory = words.memory.format(change=signed_bytes(effect.memory))
        part, change = effect.part
        if abs(change) >= _HARDLY_BYTES and effect.after.fullest.stage == effect.before.fullest.stage:
            memory += words.parentheses.format(f"{words.parts[part]} {signed_bytes(change)}")
    time = words.no_time
    if abs(effect.time) >= _HARDLY_TIME:
        share = ("+" if effect.time > 0 else "−") + percent(abs(effect.time))  # −12 %, or ×2.4 from the double on
        share = f"×{1 + effect.time:.1f}" if effect.time >= 1 else share
        time = (words.step_time if effect.same_rows else words.token_time).format(change=share)
    parts = [memory, time]
    if effect.beside:
        parts.append(words.beside.format(changes=written(effect.beside)))
    if not effect.after.fits:
        parts.append(words.does_not_fit)
    return words.comma.join(parts)


def fullest(planned: Estimate, words: Words) -> str:
    """Write `58.2 of 79.2 GiB on the fullest stage`."""
    total, memory = planned.fullest.total, planned.case.machine.device.memory
    unit = bytes_unit(total)
    text = words.fullest.format(size=unit.of(total), device=unit.with_name(memory))
    return text if planned.fits else text + words.comma + words.does_not_fit


def signed_bytes(number: int) -> str:
    """Write a change of memory: +3.1 GiB."""
    return ("+" if number > 0 else "−") + size(abs(number))
