"""Chat templates: how a conversation is written for a model."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import TYPE_CHECKING

from megatune.data.formats import Conversation, Message, RowError
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.named import NAMED_TEMPLATES, NamedTemplate
from megatune.data.templates.turns import Template, Thinking, Turn
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Template", "Thinking", "Turn", "load_template", "template_names"]


def template_names() -> tuple[str, ...]:
    """What `template` may be."""
    return ("default", *NAMED_TEMPLATES)


def load_template(name: str, tokenizer: PreTrainedTokenizerBase, default_system: str | None = None) -> Template:
    """A template, checked against the tokenizer it will be used with.

    Args:
        default_system: for conversations without a system message; None keeps the template's own.

    Raises:
        MegatuneError: an unknown name (exit code 64), or a tokenizer that has no chat template or not this template's
            special tokens (exit code 66).
    """
    if name == "default":
        return _from_tokenizer(tokenizer, default_system)
    if name not in NAMED_TEMPLATES:
        near = difflib.get_close_matches(name, template_names(), n=2)
        mend = f"nearest: {', '.join(near)}" if near else f"one of {', '.join(template_names())}"
        raise MegatuneError(Finding(f"template: {name!r} is unknown", mend=mend), ExitCode.SETTINGS)
    template = NAMED_TEMPLATES[name]
    if missing := _missing_tokens(template, tokenizer):
        raise _refused(name, tokenizer, f"the tokenizer does not have {', '.join(missing)} as one token")
    template = template.bound(tokenizer.bos_token or "", tokenizer.eos_token or "")
    return template if default_system is None else replace(template, default_system=default_system)


def _from_tokenizer(tokenizer: PreTrainedTokenizerBase, default_system: str | None) -> Template:
    if not tokenizer.chat_template:
        raise _refused("default", tokenizer, "the tokenizer has no chat template")
    template = ChatTemplate(tokenizer, default_system or "")
    probe = Conversation((Message("user", "Hello"), Message("assistant", "Hi")))
    try:
        template.render(probe, Thinking())
    except RowError as error:
        why = f"{error.reason} ({error.detail})" if error.detail else error.reason
        raise _refused("default", tokenizer, f"answers cannot be told from prompts: {why}") from error
    return template


def _missing_tokens(template: NamedTemplate, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens of the template that are not one token of the tokenizer."""
    own = {"{bos}": tokenizer.bos_token, "{eos}": tokenizer.eos_token}
    missing = []
    for token in template.special_tokens:
        text = own.get(token, token)
        ids = tokenizer.encode(text, add_special_tokens=False) if text else []
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            missing.append(text or {"{bos}": "a bos_token", "{eos}": "an eos_token"}[token])
    return missing


def _refused(name: str, tokenizer: PreTrainedTokenizerBase, why: str) -> MegatuneError:
    fitting = [other for other, template in NAMED_TEMPLATES.items() if not _missing_tokens(template, tokenizer)]
    if tokenizer.chat_template and name != "default":
        fitting.insert(0, "default")
    mend = (
        f"templates that fit it: {', '.join(fitting)}"
        if fitting
        else (f"train a model whose tokenizer has a chat template or the tokens of one of {', '.join(NAMED_TEMPLATES)}")
    )
    what = f"template: {name} does not fit this model's tokenizer"
    return MegatuneError(Finding(what, tokenizer.name_or_path, why, mend), ExitCode.INPUT)
