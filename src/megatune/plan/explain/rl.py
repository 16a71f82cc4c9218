"""Keys of reinforcement learning explained: one, those of a file, and all of them in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.dialects.roll import ReadRL
from megatune.config.dialects.roll_engine import section_names
from megatune.config.dialects.roll_tree import data_of, entries_of
from megatune.config.dialects.table import table
from megatune.config.rl.pages import find_key, rl_pages
from megatune.config.values import shown
from megatune.plan.explain.words import (
    Language,
    Words,
    phrase_of,
    rows,
    section,
    texts_of,
    what_it_does,
    words_of,
    wrapped,
    written,
)


def knows_rl(key: str) -> bool:
    """Return whether `explain_rl_key` has something to say of a key."""
    return find_key(key) is not None


def explain_rl_key(key: str, language: Language = "en") -> str:
    """Explain one key that `knows_rl`, for a terminal."""
    found = find_key(key)
    assert found is not None, key
    dotted, info = found
    words, texts = words_of(language), texts_of(info, language, is_rl=True)
    lines = [wrapped(dotted + words.parentheses.format("megatune rl"))]
    lines += rows(words, (words.takes, [texts.type]), (words.default, [shown(info.default)]))
    return "\n".join([*lines, "", *what_it_does(texts, words)])


def explain_rl_file(name: str, read: ReadRL, language: Language = "en") -> str:
    """Explain every key that is written in a file, then say what is wrong with it, for a terminal."""
    words = words_of(language)
    lines = [words.settings.format(file=name)]
    for entry in entries_of(read.tree):
        found, value = find_key(entry.key), data_of(entry)
        if found is not None and value is not None:
            texts = texts_of(found[1], language, is_rl=True)
            lines += ["", *written(entry.key, value, found[1].default, entry.origin, texts, words)]
    remarks = [*map(str, read.findings), *read.lines]
    return "\n".join([*lines, "", words.remarks, *(remarks or [words.no_remarks])])


def rl_page(language: Language = "en") -> str:
    """Return the reference of all keys, in Markdown."""
    words = words_of(language)
    parts = [words.rl_head]
    for heading, infos in rl_pages().items():
        parts.append(f"\n## {words.rl_groups[heading]}\n")
        for dotted, info in infos.items():
            parts += section(dotted, info.default, texts_of(info, language, is_rl=True), words)
    parts.append(words.rl_engine)
    for name, keys in section_names().items():
        parts.append(f"| `ROLE.{name}` | {', '.join(f'`{key}`' for key in keys)} |\n")
    parts += [words.rl_refused_head, *_refused_rows(words, language)]
    return "".join([*parts, words.rl_accepted_head, *_accepted_rows(language)])


def _refused_rows(words: Words, language: Language) -> Iterator[str]:
    for dotted, row in table("roll").items():
        if row.unsupported:
            values = ", ".join(f"`{shown(value)}`" for value in row.refuses or ()) or words.every_other
            yield f"| `{dotted}` | {values} | {phrase_of(row.unsupported, 'reasons', language)} |\n"


def _accepted_rows(language: Language) -> Iterator[str]:
    """Give a row for each reason and mapping, with the keys that it is of."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for dotted, row in table("roll").items():
        above, _, key = dotted.rpartition(".")
        if row.ignored:
            reasons.setdefault((above, row.ignored), []).append(f"`{key}`")
    for (above, why), names in reasons.items():
        why = phrase_of(why, "reasons", language)
        yield f"| {f'`{above}`' if above else ''} | {', '.join(names)} | {why} |\n"
