"""Headings, connecting words and phrases of cost, in English; `chinese` has the same in Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatune.plan.explain.language import Language
from megatune.plan.pages.words import MEMORY_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One language; the defaults are English. What is in braces is filled in.

    Attributes:
        colon, comma, stop, parentheses: as the language writes them.
        parts: of memory, by their names in `StageMemory`.
    """

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
    every_other: str = "every other value"
    the_rest: str = "the rest"


ENGLISH = Words()


def words_of(language: Language) -> Words:
    """Return the words of a language."""
    if language == "en":
        return ENGLISH
    from megatune.plan.explain.chinese import CHINESE

    return CHINESE
