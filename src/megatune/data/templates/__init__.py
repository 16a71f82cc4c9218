"""Chat templates: how a conversation is rendered for a model, and whether a template fits the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.named import NAMED_TEMPLATES, NamedTemplate, is_template_file, read_template
from megatune.data.templates.rendering import template_errors
from megatune.data.templates.swift_table import swift_template_named
from megatune.data.templates.tools import tool_format as tool_format_of
from megatune.data.templates.turns import PROBE, Template, Thinking, Turn, check_tokens, stop_note
from megatune.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, check_vocabulary
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Template",
    "Thinking",
    "Turn",
    "check_template",
    "has_chat_template",
    "load_template",
    "render_all",
    "stop_note",
    "template_source",
]

_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_ANY_TOKENIZER = {"{bos}": "a bos_token", "{eos}": "an eos_token"}  # tokens that any tokenizer may have


class _KnownTokenizer(NamedTuple):
    """What a template is checked against, before and after the tokenizer is loaded.

    Attributes:
        where: its folder or name.
        has: returns whether it has a special token of a template as one token; None if its vocabulary is not known.
    """

    where: str
    has_chat_template: bool
    has: Callable[[str], bool] | None

    @classmethod
    def in_folder(cls, folder: Path) -> _KnownTokenizer:
        """Read the files; a token of any tokenizer counts as there."""
        try:
            text = (folder / TOKENIZER).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return cls(str(folder), has_chat_template(folder), None)

        def has(token: str) -> bool:
            forms = json.dumps(token, ensure_ascii=False), json.dumps(token)
            return token in _ANY_TOKENIZER or any(form in text for form in forms)

        return cls(str(folder), has_chat_template(folder), has)

    @classmethod
    def loaded(cls, tokenizer: PreTrainedTokenizerBase) -> _KnownTokenizer:
        def has(token: str) -> bool:
            text = {"{bos}": tokenizer.bos_token, "{eos}": tokenizer.eos_token}.get(token, token)
            ids = tokenizer.encode(text, add_special_tokens=False) if text else []
            return len(ids) == 1 and (ids[0] != tokenizer.unk_token_id or text == tokenizer.unk_token)

        return cls(tokenizer.name_or_path, bool(tokenizer.chat_template), has)

    def check(self, template: NamedTemplate | None) -> None:
        """Refuse a template, or None for the tokenizer's own, if the tokenizer lacks it or its special tokens."""
        if template is None:
            if not self.has_chat_template:
                raise self.mismatch("null", "the tokenizer has no chat template")
        elif self.has is not None and (missing := [each for each in template.special_tokens if not self.has(each)]):
            named = ", ".join(_ANY_TOKENIZER.get(token, token) for token in missing)
            raise self.mismatch(template.name, f"the tokenizer does not have {named} as one token")

    @property
    def fitting(self) -> list[str]:
        """The templates whose special tokens it has, except those that need only bos and eos."""
        if self.has is None:
            return []
        own = (each for each in NAMED_TEMPLATES.values() if set(each.special_tokens) - set(_ANY_TOKENIZER))
        return [each.name for each in own if all(map(self.has, each.special_tokens))]

    def mismatch(self, name: str, why: str) -> MegatuneError:
        """Return the error of a template that does not fit."""
        fitting = [*(["null"] if self.has_chat_template and name != "null" else []), *self.fitting]
        fix = f"train a model whose tokenizer has a chat template or the tokens of one of {', '.join(NAMED_TEMPLATES)}"
        if fitting:
            fix = f"templates that fit it: {', '.join(fitting)}"
        what = f"template: {name} does not fit this model's tokenizer"
        return MegatuneError(Finding(what, self.where, why, fix), ExitCode.INPUT)


def load_template(
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    default_system: str | None = None,
    tool_format: str | None = None,
) -> Template:
    """Load a template and check that it fits the tokenizer.

    Args:
        name: one of NAMED_TEMPLATES, or the path of a YAML file; None is the tokenizer's chat template.
        default_system: the system message of conversations without one; None keeps the template's default.
        tool_format: one of LLaMA-Factory's tool formats; None keeps the template's format.

    Raises:
        MegatuneError: the name is unknown or the file is invalid (exit code 64); or the file does not exist, or the
            tokenizer lacks a chat template, this template's special tokens or an end-of-turn token (exit code 66).
    """
    known = _KnownTokenizer.loaded(tokenizer)
    template = None if name is None else named_template(name, tokenizer_has_own=known.has_chat_template)
    known.check(template)
    if template is None:
        return _from_tokenizer(tokenizer, default_system, known)
    if tool_format is not None:
        template = template.with_tools(tool_format_of(tool_format))
    template = template.with_special_tokens(tokenizer.bos_token or "", tokenizer.eos_token or "")
    if default_system is not None:
        template = replace(template, default_system=default_system)
    check_tokens(template, tokenizer, "end `assistant` with {eos} or with one special token of the tokenizer")
    return template


def render_all(
    template: Template, conversations: Sequence[Conversation], thinking: Thinking
) -> list[list[Turn] | RowError]:
    """Render conversations with a template; return the error for each conversation that cannot be rendered."""
    if isinstance(template, ChatTemplate):  # in one request to another process, which renders them
        return template.render_all(conversations, thinking)
    written: list[list[Turn] | RowError] = []
    for conversation in conversations:
        try:
            written.append(template.render(conversation, thinking))
        except RowError as error:
            written.append(error)
    return written


def template_source(name: str | None) -> str:
    """Return the content of a value of `template` for cache keys: the text of a file, or the name.

    Raises:
        OSError: the file cannot be read.
    """
    if name is not None and is_template_file(name):
        return Path(name).read_text(encoding="utf-8-sig")
    return name or "default"  # the name of null in the keys of existing prepared rows


def named_template(name: str, *, tokenizer_has_own: bool = False) -> NamedTemplate:
    """Return the template of a file, or with this name.

    Args:
        tokenizer_has_own: whether the model's tokenizer has a chat template, which can replace a LLaMA-Factory
            template that is not supported here.

    Raises:
        MegatuneError: the name is unknown (exit code 64); the error lists the nearest names. Or as `read_template`.
    """
    if is_template_file(name):
        return read_template(name)
    if name in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[name]
    names = f"one of {', '.join(NAMED_TEMPLATES)}, a path ending in .yaml, or null for the tokenizer's chat template"
    fix = did_you_mean(name, NAMED_TEMPLATES, names, count=2)
    own = "the tokenizer of this model has a chat template, which template: null uses"
    why = own if tokenizer_has_own and fix == names else ""
    raise MegatuneError(Finding(f"template: {name!r} is unknown", why=why, fix=fix), ExitCode.SETTINGS)


def check_template(name: str | None, folder: Path | None, *, is_swift: bool = False) -> None:
    """Reject a template that is unknown, or that does not fit the tokenizer according to the tokenizer's files.

    This does not import Transformers.

    Args:
        name: as in `load_template`.
        folder: the tokenizer's folder; None if it is not downloaded yet.
        is_swift: whether `name` is one of ms-swift's names.

    Raises:
        MegatuneError: as in `load_template`.
    """
    has_own, template = folder is not None and has_chat_template(folder), None
    if is_swift and name is not None:
        swift_template_named(name)
    elif name is not None:
        template = named_template(name, tokenizer_has_own=has_own)
    if folder is not None:
        check_vocabulary(folder)
        if not is_swift:
            _KnownTokenizer.in_folder(folder).check(template)


def has_chat_template(folder: Path) -> bool:
    """Return whether a folder's tokenizer has a chat template; True if its files cannot be read."""
    if any((folder / name).exists() for name in _CHAT_TEMPLATES):
        return True
    try:
        return bool(json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # loading the tokenizer reports what is wrong with it


def _from_tokenizer(tokenizer: PreTrainedTokenizerBase, default_system: str | None, known: _KnownTokenizer) -> Template:
    template = ChatTemplate(tokenizer, default_system or "")
    try:
        template.render(PROBE, Thinking())
    except RowError as error:
        raise known.mismatch("null", f"answers cannot be separated from prompts: {error}") from error
    try:
        missing = template.missing_generation_prompt()
    except template_errors() as error:
        raise known.mismatch("null", f"it cannot be rendered: {error}") from error
    if missing:
        why = f"the chat template has no generation prompt: the model would have to write {missing!r} before an answer"
        raise known.mismatch("null", why)
    choice = f", or choose a template by name: {', '.join(known.fitting)}" if known.fitting else ""
    check_tokens(template, tokenizer, f"let the chat template write a special token after each answer{choice}")
    return template
