"""Headings, connecting words and phrases of cost, in English; `chinese` has the same in Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatune.plan.explain.language import Language
from megatune.plan.pages.words import MEMORY_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One language. What is in braces is filled in.

    Attributes:
        colon, comma, stop, parentheses: as the language writes them.
        parts: of memory, by their names in `StageMemory`.
    """

    colon: str
    comma: str
    stop: str
    parentheses: str
    takes: str
    default: str
    group: str
    also: str
    what: str
    how: str
    when: str
    values: str
    cost: str
    parts: Mapping[str, str]
    # Costs.
    ground: str
    assumed: Mapping[str, str]
    semicolon: str
    tokens: str
    now: str
    fullest: str
    memory: str
    no_memory: str
    step_time: str
    token_time: str
    no_time: str
    does_not_fit: str
    uncertainty: str
    beside: str
    nothing_here: str
    none: str
    not_compared: str
    not_here: str
    not_planned: str
    against: str
    # Keys that are refused.
    refused: str
    refused_values: str
    passes: str
    instead: str
    # Files.
    settings: str
    none_set: str
    is_default: str
    off: str
    remarks: str
    no_remarks: str
    without_effect: str
    experts: str
    line: str
    whole: str
    # The page.
    title: str
    head: str
    refused_head: str
    every_other: str
    the_rest: str


ENGLISH = Words(
    colon=": ",
    comma=", ",
    stop=".",
    parentheses=" ({})",
    takes="takes",
    default="default",
    group="group",
    also="names",
    what="what",
    how="how",
    when="when",
    values="values",
    cost="cost",
    parts=MEMORY_WORDS,
    ground="for {model} on {gpus} × {gpu}, {layout}",
    assumed={
        "case": "assumed; a file, or --model, --gpus and --gpu, say otherwise",
        "machines": "the machines are assumed; --gpus and --gpu say otherwise",
    },
    semicolon="; ",
    tokens="{rows} rows of {tokens} tokens a step",
    now="{value}: {memory}, {seconds} a step",
    fullest="{size} of {device} on the fullest stage",
    memory="{change} on the fullest stage",
    no_memory="the same memory",
    step_time="{change} step time",
    token_time="{change} time a token",
    no_time="the same time",
    does_not_fit="does not fit",
    uncertainty="times are uncertain by ±{percent}; weights, gradients and optimizer state are exact",
    beside="with {changes}",
    nothing_here="it changes nothing here; {ground}:",
    none="none: it changes no memory and no time that is planned",
    not_compared="not compared: no other value is valid here",
    not_here="not valid here: {why}",
    not_planned="not planned: {why}",
    against="against {value}: {effect}",
    refused="known, and refused",
    refused_values="refused",
    passes="passes",
    instead="instead",
    settings="What {file} sets",
    none_set="It sets nothing: every setting has its default.",
    is_default="the default",
    off="off: {what}",
    remarks="Remarks",
    no_remarks="None: nothing is wrong, and everything has an effect.",
    without_effect="{key} has no effect without {needs}",
    experts="a mixture of experts",
    line="line {number}",
    whole="All of it, {ground}: {memory}, {seconds} a step, {rate} tokens/s a GPU",
    title="Settings",
    head="""\
Every setting of a run, as it is written in a YAML file, as `key=value` after it, or as `--key value`. What is not
written has its default. A key that is not listed here is refused, and so is a value out of its range.

`megatune explain KEY` says the same of one setting, and what it costs for a model on its machines;
`megatune explain FILE.yaml` goes through a file. This page is `megatune explain --all`, written by
`python docs/generate_settings.py`; [settings.zh.md](settings.zh.md) has it in Chinese.
""",
    refused_head="""\
## Known and refused

Keys of LLaMA-Factory's files that are known here and not honoured. A value that asks for nothing passes; any other is
refused with this reason.

| key | refused | passes | why |
|---|---|---|---|
""",
    every_other="every other value",
    the_rest="the rest",
)


def words_of(language: Language) -> Words:
    """The words of a language."""
    if language == "en":
        return ENGLISH
    from megatune.plan.explain.chinese import CHINESE

    return CHINESE
