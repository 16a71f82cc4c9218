"""Whether a template fits a tokenizer, as far as the tokenizer's files show it: nothing of Transformers is imported."""

from __future__ import annotations

import json
from pathlib import Path

from megatune.data.templates.named import NamedTemplate, is_template_file, read_template
from megatune.data.templates.swift_table import named_swift_template
from megatune.data.templates.table import NAMED_TEMPLATES
from megatune.data.tokenizer_files import check_vocabulary
from megatune.errors import ExitCode, Finding, MegatuneError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_template(name: str | None, folder: Path | None, *, is_swift: bool = False) -> None:
    """Refuse a template that is none, or that cannot be this tokenizer's.

    Args:
        name: as `load_template` takes it.
        folder: of the tokenizer; None where it is not here yet.
        is_swift: it is a name of ms-swift's.

    Raises:
        MegatuneError: as `load_template`.
    """
    from megatune.data.templates import named_template

    if is_swift:
        if name is not None:
            named_swift_template(name)
        if folder is not None:
            check_vocabulary(folder)
        return
    template = None
    if name is not None:
        own = folder is not None and _has_chat_template(folder)
        template = read_template(name) if is_template_file(name) else named_template(name, tokenizer_has_own=own)
    if folder is None:
        return
    check_vocabulary(folder)
    if template is None:
        if not _has_chat_template(folder):
            raise _refused("null", folder, "the tokenizer has no chat template")
    elif missing := _missing(template, _text(folder)):
        raise _refused(template.name, folder, f"the tokenizer does not have {', '.join(missing)} as one token")


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _CHAT_TEMPLATES):
        return True
    try:
        return bool(json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # what reads the tokenizer says what is wrong with it


def _text(folder: Path) -> str | None:
    """Return what tokenizer.json says; None where there is none to read."""
    try:
        return (folder / TOKENIZER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _missing(template: NamedTemplate, text: str | None) -> list[str]:
    """Name special tokens of the template that tokenizer.json does not have anywhere."""
    tokens = [token for token in template.special_tokens if token not in ("{bos}", "{eos}")]
    written = {token: (json.dumps(token, ensure_ascii=False), json.dumps(token)) for token in tokens}
    return [token for token in tokens if text is not None and not any(form in text for form in written[token])]


def _refused(name: str, folder: Path, why: str) -> MegatuneError:
    text = _text(folder)
    own = (each for each in NAMED_TEMPLATES.values() if set(each.special_tokens) - {"{bos}", "{eos}"})
    fitting = [] if text is None else [each.name for each in own if not _missing(each, text)]
    if name != "null" and _has_chat_template(folder):
        fitting.insert(0, "null")
    fix = f"train a model whose tokenizer has a chat template or the tokens of one of {', '.join(NAMED_TEMPLATES)}"
    if fitting:
        fix = f"templates that fit it: {', '.join(fitting)}"
    what = f"template: {name} does not fit this model's tokenizer"
    return MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)
