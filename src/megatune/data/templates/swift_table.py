"""ms-swift's templates of the supported models, by ms-swift's names, and how a template is chosen.

Like ms-swift, choose a template by the name of the model's folder; if it is not the name of a published model, choose
by the tokenizer's chat template, so that a folder may have any name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.data.templates.named import NAMED_TEMPLATES
from megatune.data.templates.swift import SwiftRules, SwiftTemplate
from megatune.data.templates.tool_texts import fill
from megatune.data.templates.tools import agent_template, load_entry, read_table
from megatune.data.tokenizer_files import check_pretraining_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.references import ref, remove

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.groups.data import DataSettings
    from megatune.config.settings import Settings

_QUANTIZED = re.compile(r"-(gptq|awq|fp8|bf16|bnb|aqlm)[^/]*$")
_SIZE = r"[\d.]+b"


def _template(name: str) -> SwiftTemplate:
    texts = load_entry("swift", name)
    if "named" in texts:
        named = NAMED_TEMPLATES[texts.pop("named")]
        end = named.assistant.partition("{content}")[2]
        texts = {
            "prompt": named.user,
            "separator": end,
            "suffix": end,
            "prefix": named.prefix,
            "system": named.prefix + named.system,
            "default_system": named.default_system or None,
        } | texts
    return SwiftTemplate(**{**texts, "models": fill(texts.get("models", ""), size=_SIZE)}, name=name)


SWIFT_TEMPLATES = {name: _template(name) for name in read_table("swift")}

# Stage pt: a question and its answer, if there is a question, between the tokens that the tokenizer adds to a text.
_PLAIN = SwiftTemplate(name="plain text", prompt="{content}", separator=None, suffix="{eos}", prefix="{bos}")


def template_of_swift(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, *, day: date | None = None
) -> SwiftTemplate:
    """Load ms-swift's template for these settings.

    Args:
        day: the date that the template may state, which overrides the settings; without either it is today.

    Raises:
        MegatuneError: the name of the template or agent template is unknown (exit code 64), or there is no template
            for the model (66).
    """
    data, model, is_text = settings.data, settings.model.model_name_or_path or "", settings.run.stage == "pt"
    if is_text:
        check_pretraining_tokenizer(tokenizer)
    if day is None and data.template_date is not None:
        day = date.fromisoformat(data.template_date)
    template = _of_model(model, tokenizer) if data.template is None else swift_template_named(data.template)
    if template.system_file and data.default_system is None:
        template = replace(template, default_system=_system_of(model, template.system_file))
    eos = tokenizer.eos_token or ""
    stop_words = (*template.stop_words, eos)
    if is_text:
        bos, end = _around(tokenizer)
        plain = _bound(_PLAIN, bos, end or eos, day)
        kept = ("thinks", "empty_thought", "trims", "system_in_question")
        template = replace(plain, **{name: getattr(template, name) for name in kept})
        stop_words = () if end else stop_words
    agent = data.agent_template or template.agent or ("react_en" if data.swift_version < 4 else None)
    written = replace(
        _bound(template, tokenizer.bos_token or "", eos, day),
        rules=_rules(data, has_template=not is_text),
        stop_words=stop_words,
        agent_template=None if agent is None else agent_template(agent, data.swift_version),
    )
    if template.adds_bos:
        bos, _ = _around(tokenizer)
        system = None if written.system is None else bos + written.system
        written = replace(written, prefix=bos + written.prefix, system=system)
    if data.default_system is None:
        return written
    if written.system is None and not written.system_in_question:
        what = f"default_system: ms-swift's template {written.name} has no place for a system message"
        raise MegatuneError(Finding(what, fix=remove("default_system")), ExitCode.SETTINGS)
    return replace(written, default_system=data.default_system)


def _rules(data: DataSettings, *, has_template: bool) -> SwiftRules:
    return SwiftRules(
        data.swift_version,
        last_round=data.mask_history,
        add_empty_thought=data.add_empty_thought,
        preserve_thinking=data.preserve_thinking,
        enable_thinking=data.enable_thinking,
        masks=None if data.answer_masks is None else tuple(data.answer_masks),
        has_template=has_template,
    )


def swift_template_named(name: str) -> SwiftTemplate:
    """Return ms-swift's template of this name.

    Raises:
        MegatuneError: it is not supported (exit code 64); the error lists the nearest names.
    """
    if name in SWIFT_TEMPLATES:
        return SWIFT_TEMPLATES[name]
    fix = did_you_mean(name, SWIFT_TEMPLATES, f"one of {', '.join(SWIFT_TEMPLATES)}", count=3)
    raise MegatuneError(Finding(f"template: ms-swift's {name!r} is not supported", fix=fix), ExitCode.SETTINGS)


def _of_model(model: str, tokenizer: PreTrainedTokenizerBase) -> SwiftTemplate:
    """Return the template of a model, by its name as in ms-swift, or by its chat template."""
    name = _QUANTIZED.sub("", model.rstrip("/").rpartition("/")[2].lower())
    source = str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
    for template in SWIFT_TEMPLATES.values():
        if template.models and re.fullmatch(template.models, name):
            return template
    for template in SWIFT_TEMPLATES.values():
        if template.marks and all(mark in source for mark in template.marks):
            return template
    why = "its tokenizer has no chat template" if not source else "its chat template is not of a known family"
    fix = f"name the template of the model: one of {', '.join(SWIFT_TEMPLATES)}"
    what = "template: ms-swift's template for this model is not known"
    raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)


def _system_of(model: str, name: str) -> str:
    """Return the default system message from a file in the model's folder.

    Raises:
        MegatuneError: the file does not exist (exit code 66).
    """
    try:
        return Path(model, name).read_text(encoding="utf-8").replace("{name}", Path(model).name)
    except OSError as error:
        why, fix = "ms-swift takes the default system message from it", f"give {ref('default_system')}"
        raise MegatuneError(Finding(f"the model has no {name}: {error}", model, why, fix), ExitCode.INPUT) from None


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the texts that the tokenizer adds before and after a text."""
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    place = whole.index(letter)
    return tokenizer.decode(whole[:place]), tokenizer.decode(whole[place + 1 :])


def _bound(template: SwiftTemplate, bos: str, eos: str, day: date | None) -> SwiftTemplate:
    """Replace {bos} and {eos} by a tokenizer's special tokens, and {today} by a day, or by today's date."""
    today = day or date.today()
    days = {"{today}": today, "{yesterday}": today - timedelta(days=1)}

    def filled(text: str) -> str:
        for place, day in days.items():
            text = text.replace(place, day.isoformat())
        return text.replace("{bos}", bos).replace("{eos}", eos)

    return replace(
        template,
        default_system=None if template.default_system is None else filled(template.default_system),
        prefix=filled(template.prefix),
        system=None if template.system is None else filled(template.system),
        separator=None if template.separator is None else filled(template.separator),
        suffix=filled(template.suffix),
    )
