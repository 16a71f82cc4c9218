"""One setting explained, and the reference of all of them in Markdown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from megatune.config.dialects.dialect import Dialect, Refused
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.rules.finetuning import NOT_BUILT
from megatune.config.setting import SettingInfo
from megatune.config.settings import GROUPS, all_settings
from megatune.config.values import shown
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.explain.cost import weigh
from megatune.plan.explain.ground import Ground
from megatune.plan.explain.language import Language, columns_of, padded, refusal_texts, texts_of, wrapped
from megatune.plan.explain.sentences import cost_lines
from megatune.plan.explain.words import Words, words_of


def explain_key(key: str, grounds: Sequence[Ground], language: Language = "en", dialect: Dialect = LLAMAFACTORY) -> str:
    """Explain what a key is, how it works, when to change it, and what it costs; for a terminal.

    Args:
        key: of the dialect, or "group.name"; a dash is an underscore.
        grounds: the cases to weigh it in: the first in which it has an effect.

    Raises:
        MegatuneError: SETTINGS, where nobody knows the key, with the nearest names.
    """
    name = key.removeprefix("--").replace("-", "_")
    infos, words = all_settings(), words_of(language)
    meaning = dialect.meaning_of(name)
    path = meaning.paths[0] if meaning else name if name in infos else None
    refused = dialect.not_built.get(name)
    if path is None and refused is None:
        raise _unknown(key, dialect)
    lines: list[str] = []
    if path is not None:
        lines += _explained(infos[path], grounds, language, dialect)
        refused = refused or {**NOT_BUILT, **dialect.not_built}.get(infos[path].name)
    if refused is not None:
        lines += [""] if lines else [name]
        lines += _refusal(name, refused, words, language)
    return "\n".join(lines)


def knows(key: str, dialect: Dialect = LLAMAFACTORY) -> bool:
    """Return whether `explain_key` has something to say of it."""
    name = key.removeprefix("--").replace("-", "_")
    return dialect.knows(name) or name in all_settings()


# As plans write layouts, and people say.
_SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "num_processes",
    "lr": "learning_rate",
}


def _unknown(key: str, dialect: Dialect) -> MegatuneError:
    names = dialect.names
    name = key.lower().removeprefix("--").replace("-", "_").rpartition(".")[2]
    near = [_SHORT[name]] if name in _SHORT else difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    near += [] if name in _SHORT else [each for each in names if name in each and each not in near][: 3 - len(near)]
    fix = f"did you mean {' or '.join(near)}?" if near else "`megatune explain --all` lists every setting"
    return MegatuneError(Finding(f"unknown setting {key!r}", fix=fix), ExitCode.SETTINGS)


def _explained(info: SettingInfo, grounds: Sequence[Ground], language: Language, dialect: Dialect) -> Iterator[str]:
    words, texts = words_of(language), texts_of(info, language)
    names = dialect.names_of(info.path)
    yield wrapped(info.name + words.parentheses.format(f"{words.group}{words.colon}{info.group}"))
    heads = (words.takes, words.default, words.also, words.what, words.how, words.when, words.values, words.cost)
    width = max(map(columns_of, heads)) + 2

    def paragraph(heading: str, text: str, hang: int = 0) -> str:
        return wrapped(text, indent=" " * (width + 2 + hang), first="  " + padded(heading, width))

    yield paragraph(words.takes, texts.type)
    yield paragraph(words.default, shown(info.default))
    yield paragraph(words.also, f"{dialect.name}{words.colon}{words.comma.join(names)}")
    yield ""
    yield paragraph(words.what, texts.what)
    yield paragraph(words.how, texts.how)
    yield paragraph(words.when, texts.when)
    for index, (value, text) in enumerate(texts.values.items()):
        yield paragraph("" if index else words.values, f"{value}{words.colon}{text}", hang=2)
    yield ""
    for index, line in enumerate(cost_lines(info, weigh(info, grounds), list(grounds), words)):
        yield paragraph("" if index else words.cost, line, hang=2)


def _refusal(key: str, refused: Refused, words: Words, language: Language) -> Iterator[str]:
    why, fix = refusal_texts(refused.why, refused.fix, language)
    values = ""
    if refused.values is not None:
        listed = words.comma.join(map(shown, refused.values))
        values = words.parentheses.format(f"{key}{words.colon}{listed}")
    head = (words.refused_values if values else words.refused) + values
    yield wrapped(head + words.colon + why, indent="    ", first="  ")
    passes = [*refused.off, *([] if refused.values else [None])]
    if passes and refused.values is None:
        yield wrapped(words.passes + words.colon + words.comma.join(map(shown, passes)), indent="    ", first="  ")
    if fix:
        yield wrapped(
            words.instead + words.colon + fix.removeprefix("write ").removeprefix("写 "), indent="    ", first="  "
        )


def settings_page(language: Language = "en", dialect: Dialect = LLAMAFACTORY) -> str:
    """Return the reference of all settings: what `explain --all` prints, and the page of the documents."""
    words = words_of(language)
    parts = [f"# {words.title}\n\n{words.head}"]
    for group in GROUPS:
        parts.append(f"\n## {group}\n")
        parts += [part for info in all_settings().values() if info.group == group
                  for part in _setting(info, words, language, dialect)]  # fmt: skip
    return "".join([*parts, "\n", words.refused_head, *_refused(words, language, dialect)])


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
