"""Chat templates: how a conversation is rendered for a model, and whether a template fits the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
_HasToken = Callable[[str], bool]  # returns whether a tokenizer has a special token of a template as one token


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
    if name is None:
        return _from_tokenizer(tokenizer, default_system)
    has_own = bool(tokenizer.chat_template)
    template = read_template(name) if is_template_file(name) else named_template(name, tokenizer_has_own=has_own)
    texts = {token: getattr(tokenizer, f"{token[1:-1]}_token") or text for token, text in _ANY_TOKENIZER.items()}
    if missing := [texts.get(token, token) for token in template.special_tokens if not _has_token(tokenizer, token)]:
        raise _mismatch_with(tokenizer, name, _missing(missing))
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
    """Return the template with this name.

    Args:
        tokenizer_has_own: whether the model's tokenizer has a chat template, which can replace a LLaMA-Factory
            template that is not supported here.

    Raises:
        MegatuneError: the name is unknown (exit code 64); the error lists the nearest names.
    """
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
    template, has_own = None, folder is not None and has_chat_template(folder)
    if is_swift:
        if name is not None:
            swift_template_named(name)
    elif name is not None:
        template = read_template(name) if is_template_file(name) else named_template(name, tokenizer_has_own=has_own)
    if folder is None:
        return
    check_vocabulary(folder)
    try:
        text = (folder / TOKENIZER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = None

    def has(token: str) -> bool:
        forms = json.dumps(token, ensure_ascii=False), json.dumps(token)
        return token in _ANY_TOKENIZER or text is None or any(form in text for form in forms)

    fitting = _fitting(has) if text is not None else []
    if template is None:
        if not is_swift and not has_own:
            raise _mismatch("null", str(folder), "the tokenizer has no chat template", fitting)
    elif missing := [token for token in template.special_tokens if not has(token)]:
        raise _mismatch(template.name, str(folder), _missing(missing), fitting, has_own=has_own)


def has_chat_template(folder: Path) -> bool:
    """Return whether a folder's tokenizer has a chat template; True if its files cannot be read."""
    if any((folder / name).exists() for name in _CHAT_TEMPLATES):
        return True
    try:
        return bool(json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # loading the tokenizer reports what is wrong with it


def _from_tokenizer(tokenizer: PreTrainedTokenizerBase, default_system: str | None) -> Template:
    if not tokenizer.chat_template:
        raise _mismatch_with(tokenizer, "null", "the tokenizer has no chat template")
    template = ChatTemplate(tokenizer, default_system or "")
    try:
        template.render(PROBE, Thinking())
    except RowError as error:
        raise _mismatch_with(tokenizer, "null", f"answers cannot be separated from prompts: {error}") from error
    try:
        missing = template.missing_generation_prompt()
    except template_errors() as error:
        raise _mismatch_with(tokenizer, "null", f"it cannot be rendered: {error}") from error
    if missing:
        why = f"the chat template has no generation prompt: the model would have to write {missing!r} before an answer"
        raise _mismatch_with(tokenizer, "null", why)
    fitting = _fitting(lambda token: _has_token(tokenizer, token))
    choice = f", or choose a template by name: {', '.join(fitting)}" if fitting else ""
    check_tokens(template, tokenizer, f"let the chat template write a special token after each answer{choice}")
    return template


def _has_token(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    text = {"{bos}": tokenizer.bos_token, "{eos}": tokenizer.eos_token}.get(token, token)
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return len(ids) == 1 and (ids[0] != tokenizer.unk_token_id or text == tokenizer.unk_token)


def _fitting(has: _HasToken) -> list[str]:
    """Return the templates whose special tokens the tokenizer has, except those that need only bos and eos."""
    own = (template for template in NAMED_TEMPLATES.values() if set(template.special_tokens) - set(_ANY_TOKENIZER))
    return [template.name for template in own if all(map(has, template.special_tokens))]


def _missing(missing: list[str]) -> str:
    return f"the tokenizer does not have {', '.join(missing)} as one token"


def _mismatch_with(tokenizer: PreTrainedTokenizerBase, name: str, why: str) -> MegatuneError:
    fitting = _fitting(lambda token: _has_token(tokenizer, token))
    return _mismatch(name, tokenizer.name_or_path, why, fitting, has_own=bool(tokenizer.chat_template))


def _mismatch(name: str, where: str, why: str, fitting: list[str], *, has_own: bool = False) -> MegatuneError:
    if has_own and name != "null":
        fitting = ["null", *fitting]
    fix = f"train a model whose tokenizer has a chat template or the tokens of one of {', '.join(NAMED_TEMPLATES)}"
    if fitting:
        fix = f"templates that fit it: {', '.join(fitting)}"
    what = f"template: {name} does not fit this model's tokenizer"
    return MegatuneError(Finding(what, where, why, fix), ExitCode.INPUT)
