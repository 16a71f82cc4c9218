"""The reference of all settings, in Markdown: what `explain --all` prints, and the page of the documents."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.rules.finetuning import NOT_BUILT
from megatune.config.setting import SettingInfo
from megatune.config.settings import GROUPS, all_settings
from megatune.config.values import shown
from megatune.plan.explain.language import Language, refusal_texts, texts_of
from megatune.plan.explain.words import Words, words_of


def settings_page(language: Language = "en", dialect: Dialect = LLAMAFACTORY) -> str:
    """The whole page."""
    words = words_of(language)
    parts = [f"# {words.title}\n\n{words.head}"]
    for group in GROUPS:
        parts.append(f"\n## {group}\n")
        parts += [
            "".join(_setting(info, words, language, dialect)) for info in all_settings().values() if info.group == group
        ]
    parts += ["\n", words.refused_head, *_refused(words, language, dialect)]
    return "".join(parts)


def _setting(info: SettingInfo, words: Words, language: Language, dialect: Dialect) -> Iterator[str]:
    texts = texts_of(info, language)
    names = dialect.names_of(info.path)
    yield f"\n### {names[0]}\n\n"
    yield f"{texts.type}{words.semicolon}{words.default} `{shown(info.default)}`"
    yield (
        f"{words.semicolon}{words.also} {words.comma.join(f'`{name}`' for name in names)}\n\n" if names[1:] else "\n\n"
    )
    yield f"{texts.what}\n\n"
    yield f"- **{words.how.capitalize()}**{words.colon}{texts.how}\n"
    yield f"- **{words.when.capitalize()}**{words.colon}{texts.when}\n"
    for value, text in texts.values.items():
        yield f"- `{value}`{words.colon}{text}\n"


def _refused(words: Words, language: Language, dialect: Dialect) -> Iterator[str]:
    for key, refused in sorted({**NOT_BUILT, **dialect.not_built}.items()):
        every = refused.values is None
        values = words.every_other if every else ", ".join(f"`{shown(v)}`" for v in refused.values or ())
        passes = ", ".join(f"`{shown(v)}`" for v in refused.off) or ("`null`" if every else words.the_rest)
        why, _ = refusal_texts(refused.why, refused.fix, language)
        yield f"| `{key}` | {values} | {passes} | {why.replace('|', chr(92) + '|')} |\n"
